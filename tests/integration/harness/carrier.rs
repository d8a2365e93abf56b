use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, LazyLock, Mutex},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, request};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
    rt::Executor,
};
use hyper_util::rt::TokioIo;
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use tokio::{
    io::{self, AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::JoinSet,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore, SupportedProtocolVersion, crypto::aws_lc_rs, version::TLS13,
    },
};

use super::{Answer, Conf, Proxy, Raw, within};

/// A certificate for `localhost`, and its key.
pub(crate) type Shown = CertifiedKey<KeyPair>;

pub(crate) fn certificate() -> Shown {
    generate_simple_self_signed(["localhost".to_owned()]).unwrap()
}

/// What [`Carrier::front`] puts in front.
static SHOWN: LazyLock<Shown> = LazyLock::new(certificate);

/// What a client speaks, and over what. A row's test runs once for each carrier that can express it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Http1,
    Http1Tls,
    Http2,
    Http2Tls,
}

impl Carrier {
    pub(crate) const ALL: [Self; 4] = [Self::Http1, Self::Http1Tls, Self::Http2, Self::Http2Tls];
    /// Those on which heads and bodies are text.
    pub(crate) const HTTP1: [Self; 2] = [Self::Http1, Self::Http1Tls];
    pub(crate) const HTTP2: [Self; 2] = [Self::Http2, Self::Http2Tls];

    pub(crate) fn is_secret(self) -> bool {
        matches!(self, Self::Http1Tls | Self::Http2Tls)
    }

    pub(crate) fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Http2Tls)
    }

    pub(crate) fn scheme(self) -> &'static str {
        if self.is_secret() { "https" } else { "http" }
    }

    /// The configuration with the listener that this carrier needs. Comes last, since it adds to the lines of `[server]`.
    pub(crate) fn front(self, conf: Conf) -> Conf {
        if self.is_secret() { conf.showing(&SHOWN) } else { conf }
    }

    /// The program in front of that.
    pub(crate) async fn spawn(self, conf: Conf) -> Proxy {
        Proxy::spawn(&self.front(conf)).await
    }

    /// A connection for bytes as they are.
    pub(crate) async fn raw(self, proxy: &Proxy) -> Raw {
        Raw::on(self.wire(proxy.addr(), &SHOWN).await)
    }

    /// The same with a GET on its way.
    pub(crate) async fn raw_get(self, proxy: &Proxy, path: &str) -> Raw {
        let mut raw = self.raw(proxy).await;
        raw.write(super::get(path)).await.unwrap();
        raw
    }

    /// A connection for requests.
    pub(crate) async fn call(self, proxy: &Proxy) -> Caller {
        self.call_as(proxy, &SHOWN).await
    }

    /// The same where another certificate is to be shown.
    pub(crate) async fn call_as(self, proxy: &Proxy, shown: &Shown) -> Caller {
        let stream = TokioIo::new(self.wire(proxy.addr(), shown).await);
        let tasks = Tasks::default();
        let sender = if self.is_http2() {
            let shaken = within("HTTP/2", http2::handshake(tasks.clone(), stream)).await;
            let (sender, connection) = shaken.unwrap();
            tasks.execute(async { drop(connection.await) });
            Sender::Http2(sender)
        } else {
            let (sender, connection) = within("HTTP/1.1", http1::handshake(stream)).await.unwrap();
            tasks.execute(async { drop(connection.await) });
            Sender::Http1(sender)
        };
        Caller { carrier: self, sender, tasks }
    }

    async fn wire(self, addr: SocketAddr, shown: &Shown) -> Wire {
        if self.is_secret() {
            let protocol = if self.is_http2() { "h2" } else { "http/1.1" };
            let stream = shake(addr, shown, &TLS13, protocol).await.unwrap();
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(protocol.as_bytes()));
            return Wire::Secret(Box::new(stream));
        }
        let stream = within("a connection", TcpStream::connect(addr)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Wire::Plain(stream)
    }
}

/// A handshake with someone who shows this certificate.
pub(crate) async fn shake(
    addr: SocketAddr,
    shown: &Shown,
    version: &'static SupportedProtocolVersion,
    protocol: &str,
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(shown.cert.der().clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let name = "localhost".try_into().unwrap();
    within("a handshake", TlsConnector::from(Arc::new(config)).connect(name, stream)).await
}

/// A socket, with TLS or without.
pub(super) enum Wire {
    Plain(TcpStream),
    Secret(Box<TlsStream<TcpStream>>),
}

impl Wire {
    pub(super) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Secret(stream) => stream.get_ref().0,
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Secret(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Secret(stream) => {
                // What a write takes goes out with it, as it does without TLS.
                let written = ready!(Pin::new(&mut *stream).poll_write(cx, buf))?;
                let _ = Pin::new(stream).poll_flush(cx)?;
                Poll::Ready(Ok(written))
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secret(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secret(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// What a caller sends behind a head.
pub(crate) type Said = UnsyncBoxBody<Bytes, Infallible>;

/// A body of a known length.
pub(crate) fn whole(bytes: impl Into<Bytes>) -> Said {
    Full::new(bytes.into()).boxed_unsync()
}

/// A body of these frames, and then its end, or nothing more.
pub(crate) fn pieces(
    frames: impl IntoIterator<Item = Frame<Bytes>, IntoIter: Send + Unpin + 'static>,
    ends: bool,
) -> Said {
    Pieces { frames: frames.into_iter(), ends }.boxed_unsync()
}

struct Pieces<I> {
    frames: I,
    ends: bool,
}

impl<I: Iterator<Item = Frame<Bytes>> + Unpin> Body for Pieces<I> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.frames.next() {
            None if !self.ends => Poll::Pending,
            frame => Poll::Ready(frame.map(Ok)),
        }
    }
}

/// One connection of a client that sends requests over whatever carries them. Dropped, it is gone, with all that runs on it.
pub(crate) struct Caller {
    carrier: Carrier,
    sender: Sender,
    tasks: Tasks,
}

/// What a connection consists of.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.0.lock().unwrap().spawn(task);
    }
}

enum Sender {
    Http1(http1::SendRequest<Said>),
    Http2(http2::SendRequest<Said>),
}

impl Caller {
    /// A request for this host, as the carrier words it.
    pub(crate) fn request(&self, method: Method, host: &str, path: &str) -> request::Builder {
        let request = Request::builder().method(method);
        if self.carrier.is_http2() {
            return request.uri(format!("{}://{host}{path}", self.carrier.scheme()));
        }
        request.uri(path).header("host", host)
    }

    /// The head of the answer; an error where the peer closes or resets instead.
    pub(crate) async fn send(
        &mut self,
        request: Request<Said>,
    ) -> hyper::Result<Response<Incoming>> {
        let what = format!("{:?}: {} {}", self.carrier, request.method(), request.uri());
        match &mut self.sender {
            Sender::Http1(sender) => {
                within(&what, sender.ready()).await?;
                within(&what, sender.send_request(request)).await
            }
            Sender::Http2(sender) => {
                within(&what, sender.ready()).await?;
                within(&what, sender.send_request(request)).await
            }
        }
    }

    /// The head of the answer to a request with these fields and this body.
    pub(crate) async fn open(
        &mut self,
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
        body: Said,
    ) -> Response<Incoming> {
        let request = self.with(method, path, fields).body(body).unwrap();
        let answer = self.send(request).await;
        answer.unwrap_or_else(|error| panic!("{:?}, {path}: {error}", self.carrier))
    }

    /// The whole answer.
    pub(crate) async fn ask(
        &mut self,
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
        body: Said,
    ) -> Answer {
        let answer = self.open(method, path, fields, body).await;
        Answer::whole(answer).await.unwrap()
    }

    /// The whole answer to a GET with these fields.
    pub(crate) async fn get(&mut self, path: &str, fields: &[(&str, &str)]) -> Answer {
        self.ask(Method::GET, path, fields, whole("")).await
    }

    /// The same, or an error where the answer is cut: behind its head, or with it.
    pub(crate) async fn try_get(
        &mut self,
        path: &str,
        fields: &[(&str, &str)],
    ) -> hyper::Result<Answer> {
        let request = self.with(Method::GET, path, fields).body(whole("")).unwrap();
        Answer::whole(self.send(request).await?).await
    }

    fn with(&self, method: Method, path: &str, fields: &[(&str, &str)]) -> request::Builder {
        let request = self.request(method, "a", path);
        fields.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.tasks.0.lock().unwrap().abort_all();
    }
}

/// Trailers of these fields.
pub(crate) fn trailers(fields: &[(&'static str, &'static str)]) -> Frame<Bytes> {
    let mut trailers = HeaderMap::new();
    for (name, value) in fields {
        trailers.append(*name, value.parse().unwrap());
    }
    Frame::trailers(trailers)
}
