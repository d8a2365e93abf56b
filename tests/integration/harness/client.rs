use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use socket2::SockRef;
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{carrier::Wire, within};

/// An ordinary client with a pool of connections.
#[derive(Clone)]
pub(crate) struct Client(legacy::Client<HttpConnector, Full<Bytes>>);

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Answer {
    /// Reads an answer to its end; an error where it is cut.
    pub(crate) async fn whole(answer: Response<Incoming>) -> hyper::Result<Self> {
        let (head, body) = answer.into_parts();
        let body = within("the rest of an answer", body.collect()).await?;
        Ok(Self {
            status: head.status.as_u16(),
            headers: head.headers,
            trailers: body.trailers().cloned(),
            body: body.to_bytes(),
        })
    }

    /// A header's text, empty where there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value.map_or("", |value| value.to_str().unwrap())
    }
}

impl Client {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self(legacy::Client::builder(TokioExecutor::new()).build(connector))
    }

    pub(crate) async fn get(&self, addr: SocketAddr, path: &str) -> Answer {
        let answer = within(path, self.send(Method::GET, addr, path, Bytes::new())).await;
        answer.unwrap_or_else(|error| panic!("GET {addr}{path}: {error}"))
    }

    pub(crate) async fn get_with(
        &self,
        addr: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request = Request::get(format!("http://{addr}{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::new())).unwrap();
        let answer = within(path, self.0.request(request)).await.unwrap();
        Answer::whole(answer).await.unwrap()
    }

    pub(crate) async fn try_get(
        &self,
        addr: SocketAddr,
        path: &str,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        self.send(Method::GET, addr, path, Bytes::new()).await
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        addr: SocketAddr,
        path: &str,
        body: Bytes,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{addr}{path}"))
            .body(Full::new(body))?;
        Ok(Answer::whole(self.0.request(request).await?).await?)
    }

    /// Opens a stream of events.
    pub(crate) async fn events(&self, addr: SocketAddr, path: &str) -> Events {
        let uri = format!("http://{addr}{path}").parse().unwrap();
        let response = within(path, self.0.get(uri)).await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        Events { response, received: String::new() }
    }
}

/// A stream of server-sent events, read one by one. Dropped early, it closes its connection.
pub(crate) struct Events {
    response: Response<Incoming>,
    received: String,
}

impl Events {
    /// The next event's data, none at a proper end of the stream.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.received.split_once("\n\n") {
                let event = event.trim_start_matches("data: ").to_owned();
                self.received = rest.to_owned();
                return Some(event);
            }
            let frame = within("the next event", self.response.frame()).await?;
            let data = frame.unwrap().into_data().unwrap_or_default();
            self.received.push_str(std::str::from_utf8(&data).unwrap());
        }
    }
}

/// A client that writes and reads bytes as it likes. Dropped, it closes with a FIN.
pub(crate) struct Raw {
    stream: Wire,
    received: Vec<u8>,
}

impl Raw {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        Self::try_connect(addr).await.unwrap()
    }

    /// An error if nobody listens.
    pub(crate) async fn try_connect(addr: SocketAddr) -> io::Result<Self> {
        let stream = within("a connection", TcpStream::connect(addr)).await?;
        stream.set_nodelay(true)?;
        Ok(Self::on(Wire::Plain(stream)))
    }

    pub(super) fn on(stream: Wire) -> Self {
        Self { stream, received: Vec::new() }
    }

    /// An answer that says its length; none if the peer closes instead.
    pub(crate) async fn answer(&mut self) -> Option<Vec<u8>> {
        loop {
            let text = String::from_utf8_lossy(&self.received);
            if let Some((head, _)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                let whole = head.len() + 4 + length.expect("a length").parse::<usize>().unwrap();
                if self.received.len() >= whole {
                    return Some(self.received.drain(..whole).collect());
                }
            }
            let read = self.stream.read_buf(&mut self.received);
            if within("an answer", read).await.unwrap_or(0) == 0 {
                assert!(self.received.is_empty(), "an answer was cut");
                return None;
            }
        }
    }

    /// Connects and sends a GET.
    pub(crate) async fn get(addr: SocketAddr, path: &str) -> Self {
        let mut raw = Self::connect(addr).await;
        raw.write(&get(path)).await.unwrap();
        raw
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        within("a write", self.stream.write_all(bytes.as_ref())).await
    }

    /// Reads to the end of a head.
    pub(crate) async fn head(&mut self) -> String {
        self.read_until("\r\n\r\n").await
    }

    /// Reads up to and with this text.
    pub(crate) async fn read_until(&mut self, end: &str) -> String {
        loop {
            let found = self.received.windows(end.len()).position(|at| at == end.as_bytes());
            if let Some(at) = found {
                let text: Vec<u8> = self.received.drain(..at + end.len()).collect();
                return String::from_utf8_lossy(&text).into_owned();
            }
            let read = self.stream.read_buf(&mut self.received);
            let read = within(&format!("{end:?} from the peer"), read).await;
            assert_ne!(read.unwrap(), 0, "closed before {end:?}");
        }
    }

    /// Everything until the peer closes; an error if it closes with a reset.
    pub(crate) async fn read_to_end(mut self) -> io::Result<Vec<u8>> {
        within("the peer's close", self.stream.read_to_end(&mut self.received)).await?;
        Ok(self.received)
    }

    /// Closes with a RST.
    pub(crate) fn reset(self) {
        SockRef::from(self.stream.socket()).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Says that nothing more will be sent, and goes on reading.
    pub(crate) async fn half_close(&mut self) {
        self.stream.shutdown().await.unwrap();
    }
}

/// The bytes of a GET.
pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

/// One HTTP/2 connection with prior knowledge. A response dropped early resets its stream, not the connection.
#[derive(Clone)]
pub(crate) struct H2 {
    addr: SocketAddr,
    sender: http2::SendRequest<Full<Bytes>>,
}

impl H2 {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.unwrap();
        let (sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { addr, sender }
    }

    pub(crate) async fn get(&mut self, path: &str) -> hyper::Result<Response<Incoming>> {
        let uri = format!("http://{}{path}", self.addr);
        let request = Request::get(uri).body(Full::default()).unwrap();
        self.sender.send_request(request).await
    }

    /// Sends a request with these header fields.
    pub(crate) async fn send(
        &mut self,
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
    ) -> Response<Incoming> {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::default()).unwrap();
        within(path, self.sender.send_request(request)).await.unwrap()
    }
}
