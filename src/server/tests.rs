//! Real sockets; gates instead of sleeps, and deadlines only as generous upper bounds.

use std::{convert::Infallible, time::Duration};

use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{Semaphore, mpsc, oneshot},
    task::JoinHandle,
    time,
};

use super::*;

mod announced;
mod drain;
mod hangup;
mod idle;
mod refusal;
mod timeouts;
mod workers;

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the handler reports.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    Entered,
    Dropped,
    Body(Result<usize, &'static str>),
    TurnedAway(TurnedAway),
}

/// Answers by path.
struct Scripted {
    events: mpsc::UnboundedSender<Event>,
    gate: Semaphore,
}

struct Running {
    addr: std::net::SocketAddr,
    events: mpsc::UnboundedReceiver<Event>,
    handler: Arc<Scripted>,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Drained>,
}

struct OnDrop(mpsc::UnboundedSender<Event>);

// === impl Scripted ===

impl Handler for Scripted {
    type Body = UnsyncBoxBody<Bytes, Infallible>;

    async fn handle(
        &self,
        head: Box<Parts>,
        body: RequestBody,
        conn: &Arc<ClientConn>,
    ) -> Response<Self::Body> {
        let path = head.uri.path().to_owned();
        let is_doubtful = head.extensions.get::<TwoLengths>().is_some();
        match path.as_str() {
            "/ok" => text(StatusCode::OK, "ok"),
            "/peer" => {
                let address = conn.address().to_str().unwrap();
                text(StatusCode::OK, format!("{} at {address}", conn.peer()))
            }
            "/length" => text(StatusCode::OK, format!("doubtful: {is_doubtful}")),
            "/panic" => panic!("a handler's bug"),
            "/hang" => {
                let _dropped = OnDrop(self.events.clone());
                self.tell(Event::Entered);
                let _unread = body;
                std::future::pending().await
            }
            "/gate" => {
                self.tell(Event::Entered);
                self.gate.acquire().await.unwrap().forget();
                text(StatusCode::OK, "late")
            }
            "/read" => {
                let read = read(body).await;
                let status = read.map_or(StatusCode::REQUEST_TIMEOUT, |_| StatusCode::OK);
                self.tell(Event::Body(read));
                text(status, "")
            }
            "/refuse" => {
                drop(body);
                let mut response = text(StatusCode::SERVICE_UNAVAILABLE, "no");
                response.extensions_mut().insert(Refused);
                response
            }
            "/flood" => self.flood(),
            other => unreachable!("no script for {other}"),
        }
    }

    fn turned_away(&self, why: TurnedAway) {
        self.tell(Event::TurnedAway(why));
    }

    fn unreadable(&self, status: StatusCode, _: &ClientConn) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from_static(b"unreadable"));
        *response.status_mut() = status;
        response
    }
}

impl Scripted {
    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Answers with 64 MiB.
    fn flood(&self) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
        let dropped = OnDrop(self.events.clone());
        let piece = Bytes::from(vec![b'x'; 65536]);
        let frames = (0..1024).map(move |_| {
            let _ = &dropped;
            Ok(http_body::Frame::data(piece.clone()))
        });
        let body = StreamBody::new(futures_util::stream::iter(frames));
        self.tell(Event::Entered);
        Response::new(body.boxed_unsync())
    }
}

async fn read(mut body: RequestBody) -> Result<usize, &'static str> {
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => size += frame.data_ref().map_or(0, Bytes::len),
            Err(BodyError::Stalled) => return Err("stalled"),
            Err(BodyError::Client(_)) => return Err("client"),
        }
    }
    assert!(body.is_done());
    Ok(size)
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let mut response = Response::new(Full::from(body.into()).boxed_unsync());
    *response.status_mut() = status;
    response
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(Event::Dropped);
    }
}

// === impl Running ===

impl Running {
    async fn new(change: impl FnOnce(&mut config::Server)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut settings = config::Server {
            listen: addr,
            tls: None,
            max_in_flight: 100,
            max_connections: 100,
            max_connections_per_address: None,
            proxy_protocol: Vec::new(),
            trusted_proxies: Vec::new(),
            header_timeout: PATIENCE,
            keepalive_timeout: PATIENCE * 2,
            stall_timeout: PATIENCE * 2,
            drain_delay: Duration::ZERO,
            drain_timeout: PATIENCE,
        };
        change(&mut settings);
        let (send, events) = mpsc::unbounded_channel();
        let handler = Arc::new(Scripted { events: send, gate: Semaphore::new(0) });
        let (stop, stopped) = oneshot::channel();
        let (_, settings) = watch::channel(settings);
        let stopped = async {
            let _ = stopped.await;
        };
        let workers = Arc::new(Workers::here());
        let served =
            tokio::spawn(serve(listener, Arc::clone(&handler), settings, workers, stopped));
        Self { addr, events, handler, stop: Some(stop), served }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    /// Connects and sends `bytes`.
    async fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut client = self.connect().await;
        client.write_all(bytes).await.unwrap();
        client
    }

    async fn expect(&mut self, event: Event) {
        let next = time::timeout(PATIENCE, self.events.recv()).await;
        assert_eq!(next.expect("an event"), Some(event));
    }

    async fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    async fn drained(self) -> Drained {
        time::timeout(PATIENCE, self.served).await.unwrap().unwrap()
    }
}

/// Reads until the server closes; a reset counts as a close.
async fn read_all(client: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ =
        time::timeout(PATIENCE, client.read_to_end(&mut bytes)).await.expect("the server closes");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads until `end` has come.
async fn read_until(client: &mut TcpStream, end: &str) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(end.as_bytes()) {
        let byte = time::timeout(PATIENCE, client.read_u8()).await.unwrap();
        bytes.push(byte.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&bytes))));
    }
    String::from_utf8(bytes).unwrap()
}

type Http2 = hyper::client::conn::http2::SendRequest<Full<Bytes>>;

async fn http2(running: &Running) -> (Http2, JoinHandle<()>) {
    http2_on(running.connect().await).await
}

async fn http2_on(stream: TcpStream) -> (Http2, JoinHandle<()>) {
    let io = hyper_util::rt::TokioIo::new(stream);
    let exec = hyper_util::rt::TokioExecutor::new();
    let (send, conn) = hyper::client::conn::http2::handshake(exec, io).await.unwrap();
    let conn = tokio::spawn(async move {
        let _ = conn.await;
    });
    (send, conn)
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(format!("http://tidegate{path}")).body(Full::default()).unwrap()
}

#[tokio::test]
async fn every_version_is_served() {
    let running = Running::new(|_| {}).await;

    let mut old = running.send(b"GET /ok HTTP/1.0\r\n\r\n").await;
    assert!(read_all(&mut old).await.starts_with("HTTP/1.0 200"));

    let mut new = running.connect().await;
    for _ in 0..3 {
        new.write_all(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let reply = read_until(&mut new, "ok").await;
        assert!(reply.starts_with("HTTP/1.1 200") && !reply.contains("close"), "{reply}");
    }

    let (mut http2, _conn) = http2(&running).await;
    let reply = http2.send_request(get("/ok")).await.unwrap();
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "ok");
}

#[tokio::test]
async fn a_panic_ends_only_its_connection() {
    let running = Running::new(|_| {}).await;
    let mut bad = running.send(b"GET /panic HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(read_all(&mut bad).await, "");
    let mut good = running.send(b"GET /ok HTTP/1.0\r\n\r\n").await;
    assert!(read_all(&mut good).await.ends_with("ok"));
}

#[tokio::test]
async fn connections_above_the_cap_wait() {
    let mut running = Running::new(|settings| settings.max_connections = 1).await;
    let first = running.send(b"GET /hang HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;
    let mut second = running.send(b"GET /ok HTTP/1.0\r\n\r\n").await;
    let early = time::timeout(Duration::from_millis(100), second.read_u8()).await;
    assert!(early.is_err(), "served above the cap");
    drop(first);
    running.expect(Event::Dropped).await;
    assert!(read_all(&mut second).await.ends_with("ok"));
}

#[tokio::test]
async fn connections_of_one_address_are_capped() {
    let mut running = Running::new(|settings| {
        settings.max_connections_per_address = Some(2);
    })
    .await;
    let first = running.send(b"GET /hang HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;
    let _second = running.send(b"GET /hang HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;
    let mut third = running.connect().await;
    assert_eq!(read_all(&mut third).await, "");
    running.expect(Event::TurnedAway(TurnedAway::Crowd)).await;
    drop(first);
    running.expect(Event::Dropped).await;
    // The handler is gone before its connection is.
    loop {
        let mut fourth = running.connect().await;
        let _ = fourth.write_all(b"GET /ok HTTP/1.0\r\n\r\n").await;
        if read_all(&mut fourth).await.ends_with("ok") {
            return;
        }
        running.expect(Event::TurnedAway(TurnedAway::Crowd)).await;
    }
}

#[tokio::test]
async fn our_own_proxies_are_no_crowd() {
    let running = Running::new(|settings| {
        settings.max_connections_per_address = Some(1);
        settings.trusted_proxies = vec!["127.0.0.0/8".parse().unwrap()];
    })
    .await;
    let _idle = running.connect().await;
    let mut other = running.send(b"GET /ok HTTP/1.0\r\n\r\n").await;
    assert!(read_all(&mut other).await.ends_with("ok"));
}
