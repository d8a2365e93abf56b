//! One connection: hyper, and what hyper does not watch.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io::{self, ErrorKind},
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::{HeaderValue, Request, Response, Version, header::CONNECTION};
use http_body::Body;
use hyper::{
    body::Incoming,
    rt::{Read, Write, bounds::Http2ServerConnExec},
    server::conn::{
        http1::{self, Parts},
        http2,
    },
    service::{HttpService, service_fn},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use ipnet::IpNet;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::{self, Instant},
};

use super::{
    Handler, Refused, TwoLengths,
    announced::{self, Unannounced},
    body::{BodyWatch, RequestBody, ResponseBody},
    client::{ClientConn, Command, InFlight, REST},
    crowd::{Crowd, Presence},
    detect::{Protocol, detect},
    front::{Front, Words},
    gather::Gather,
    hangup,
    io::{Metered, Socket},
    tls::{self, Tls},
    turned_away::{Notice, TurnedAway},
    watchdog::{CLOSING_TIME, Limits, REST_TIME, Verdict, Watchdog, Window},
};
use crate::config;

/// The bound on a head, and on what hyper buffers in each direction of an HTTP/1 connection.
const BUFFER: usize = 64 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// Room for sixteen stalled uploads before they hold up the others.
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
const MAX_STREAMS: u32 = 250;
const PING: Duration = Duration::from_secs(20);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What all connections have in common.
pub(super) struct Server<H> {
    handler: Arc<H>,
    words: Words,
    limits: Limits,
    crowd: Arc<Crowd>,
    /// How many connections an address may have, and which addresses any number.
    most_per_address: usize,
    trusted: Vec<IpNet>,
    /// Who must say whose connection it is.
    announcers: Vec<IpNet>,
    notice: Notice,
    tls: Option<Tls>,
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
}

// === impl Server ===

impl<H: Handler> Server<H> {
    pub(super) fn new(handler: Arc<H>, settings: &config::Server, crowd: &Arc<Crowd>) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .max_buf_size(BUFFER)
            // It would bound idling too, and take a timer for every request.
            .header_read_timeout(None);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(MAX_STREAMS)
            .max_send_buf_size(BUFFER)
            .max_header_list_size(BUFFER as u32)
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING);
        let words: Words = {
            let handler = Arc::clone(&handler);
            Arc::new(move |status, client: &ClientConn| handler.unreadable(status, client))
        };
        let tls = settings.tls.as_ref().map(tls::front);
        Self {
            handler,
            words,
            limits: Limits::new(settings),
            crowd: Arc::clone(crowd),
            most_per_address: settings.max_connections_per_address.unwrap_or(usize::MAX),
            trusted: settings.trusted_proxies.clone(),
            announcers: settings.proxy_protocol.clone(),
            notice: Notice::default(),
            tls,
            http1,
            http2,
        }
    }

    /// New connections are another's.
    pub(super) fn retire(&self) {
        self.tls.iter().for_each(Tls::retire);
    }

    pub(super) fn is_secure(&self) -> bool {
        self.tls.is_some()
    }

    /// Serves one client until it leaves or is told to.
    pub(super) async fn connection(&self, stream: TcpStream, client: Arc<ClientConn>) {
        let stream = Arc::new(stream);
        let mut socket = Metered::new(Socket(Arc::clone(&stream)), Arc::clone(&client));
        let deadline = Instant::now() + self.limits.header;
        if !self.announcers.is_empty() {
            // In a box, as below.
            match Box::pin(self.hear(&mut socket, deadline, &client)).await {
                Some(Ok(())) => {}
                Some(Err(why)) => return self.turn_away(client.peer(), why),
                None => return,
            }
        }
        let _presence = match self.enter(client.peer()) {
            Ok(presence) => presence,
            Err(why) => return self.turn_away(client.peer(), why),
        };
        match &self.tls {
            None => self.greet(socket, deadline, &stream, &client).await,
            // In a box, or plain connections would have to hold room for it.
            Some(tls) => Box::pin(self.shake(tls, socket, deadline, &stream, &client)).await,
        }
    }

    /// Hears whose connection it is; none if it ended before that was said.
    async fn hear(
        &self,
        socket: &mut Metered,
        deadline: Instant,
        client: &ClientConn,
    ) -> Option<Result<(), TurnedAway>> {
        if !is_within(client.peer(), &self.announcers) {
            return Some(Err(TurnedAway::Stranger));
        }
        let heard = while_new(client, announced::read(socket));
        match time::timeout_at(deadline, heard).await.ok()?? {
            Ok(address) => address.into_iter().for_each(|address| client.announce(address)),
            Err(Unannounced::Gone) => return None,
            Err(Unannounced::Wrong) => return Some(Err(TurnedAway::ProxyHeader)),
        }
        Some(Ok(()))
    }

    /// Counts a connection under its address; those of our own proxies aren't one client's.
    fn enter(&self, peer: SocketAddr) -> Result<Option<Presence>, TurnedAway> {
        if is_within(peer, &self.trusted) {
            return Ok(None);
        }
        self.crowd.enter(peer.ip(), self.most_per_address).map(Some).ok_or(TurnedAway::Crowd)
    }

    fn turn_away(&self, peer: SocketAddr, why: TurnedAway) {
        self.handler.turned_away(why);
        self.notice.of(peer, why);
    }

    async fn shake(
        &self,
        tls: &Tls,
        socket: Metered,
        deadline: Instant,
        stream: &Arc<TcpStream>,
        client: &Arc<ClientConn>,
    ) {
        let shaken = while_new(client, tls.acceptor.accept(socket));
        match time::timeout_at(deadline, shaken).await {
            Ok(Some(Ok(socket))) => self.greet(socket, deadline, stream, client).await,
            Ok(Some(Err(error))) => {
                tracing::debug!(peer = %client.peer(), %error, "no handshake");
            }
            Ok(None) | Err(_) => {}
        }
    }

    /// Finds out what a client speaks, and serves it.
    async fn greet<T>(
        &self,
        mut socket: T,
        deadline: Instant,
        stream: &Arc<TcpStream>,
        client: &Arc<ClientConn>,
    ) where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let detected = while_new(client, detect(&mut socket));
        let Ok(Some(Some((protocol, prefix)))) = time::timeout_at(deadline, detected).await else {
            return;
        };

        let serving =
            Arc::new(Serving { handler: Arc::clone(&self.handler), client: Arc::clone(client) });
        let words = (protocol == Protocol::Http1).then(|| Arc::clone(&self.words));
        let mut front = Front::new(socket, prefix, Arc::clone(client), words);
        // Conversations are in boxes, or a connection that has none would have to hold room for one.
        if protocol == Protocol::Http2 {
            return Box::pin(self.converse_in_http2(front, stream, serving)).await;
        }
        let mut idle = Window::begin();
        loop {
            let conversation = self.converse_in_http1(front, stream, Arc::clone(&serving), idle);
            let Some(resting) = Box::pin(conversation).await else { return };
            (front, idle) = resting;
            tracing::trace!(peer = %client.peer(), "idle: hyper's buffers are given up");
            if !front.is_spoken_to(idle.since + self.limits.keepalive).await {
                let _ = time::timeout(CLOSING_TIME, front.shutdown()).await;
                return;
            }
        }
    }

    async fn converse_in_http2<T>(
        &self,
        front: Front<T>,
        stream: &Arc<TcpStream>,
        serving: Arc<Serving<H>>,
    ) where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let client = Arc::clone(&serving.client);
        let watchdog = Watchdog::new(self.limits, front.since(), Window::begin());
        // In a box, or hyper and tokio would move all of it eight times on its way through a task.
        let service = service_fn(move |request| Box::pin(Arc::clone(&serving).call(request)));
        let gather = Gather::new(front);
        let out = gather.other();
        let conn = pin!(self.http2.serve_connection(TokioIo::new(gather), service));
        drive(pin!(Gathering { conn, out }), stream, &client, watchdog).await;
    }

    /// Until the connection closes, or is idle: then it is given back, and since when, so that hyper's buffers can go.
    async fn converse_in_http1<T>(
        &self,
        front: Front<T>,
        stream: &Arc<TcpStream>,
        serving: Arc<Serving<H>>,
        idle: Window,
    ) -> Option<(Front<T>, Window)>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let client = Arc::clone(&serving.client);
        let watchdog = Watchdog::new(self.limits, front.since(), idle);
        let service = service_fn(move |request| Arc::clone(&serving).call(request));
        let mut conn = self.http1.serve_connection(TokioIo::new(front), service).with_upgrades();
        match drive(Pin::new(&mut conn), stream, &client, watchdog).await {
            Ended::Idle(since) => {
                let Parts { io, read_buf, .. } = conn.into_parts()?;
                let mut front = io.into_inner();
                front.put_back(&read_buf);
                return Some((front, since));
            }
            Ended::Unreadable => {
                // In a box, for its buffer.
                let _ = time::timeout(REST_TIME, Box::pin(read_away(stream))).await;
            }
            Ended::Broken | Ended::Otherwise => {}
        }
        drop(conn);
        if let Some(tunnel) = client.take_tunnel() {
            // A half that ends isn't the end here, so nothing but this is watched.
            until(&client, Command::Cut, tunnel).await;
        }
        None
    }
}

/// Runs `future` while a client has yet to say what it wants: when a drain begins it has a moment left for that, since it may
/// have connected, and sent a request, before.
async fn while_new<F: Future>(client: &ClientConn, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    if let Some(output) = until(client, Command::Drain, future.as_mut()).await {
        return Some(output);
    }
    let rest = until(client, Command::Cut, future);
    time::timeout(CLOSING_TIME, rest).await.ok().flatten()
}

fn is_within(peer: SocketAddr, nets: &[IpNet]) -> bool {
    let address = peer.ip().to_canonical();
    nets.iter().any(|net| net.contains(&address))
}

/// Runs `future` until the acceptor has this command, or a stronger one.
async fn until<F: Future>(client: &ClientConn, command: Command, future: F) -> Option<F::Output> {
    tokio::select! {
        biased;
        () = client.told(command) => None,
        output = future => Some(output),
    }
}

/// Reads what comes behind a head that couldn't be read, or the close would be a reset and take our
/// answer with it.
async fn read_away(stream: &TcpStream) {
    let mut bytes = [0; 4096];
    let mut left = REST;
    while left > 0 && stream.readable().await.is_ok() {
        match stream.try_read(&mut bytes) {
            Ok(0) => return,
            Ok(size) => left = left.saturating_sub(size),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// How hyper's part of a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// A head couldn't be read, and was answered.
    Unreadable,
    /// Not at all: it has been between two requests since then.
    Idle(Window),
    /// In the middle of an answer, since there was no more of it.
    Broken,
    Otherwise,
}

/// hyper's part of a connection.
trait Conversation: Future<Output = hyper::Result<()>> {
    /// Ends it behind the requests that run.
    fn finish(self: Pin<&mut Self>);

    /// Sends what was said when it was polled, as far as that hasn't been sent yet.
    fn poll_send(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// HTTP/2, and a hand on what it says.
struct Gathering<'a, C, T> {
    conn: Pin<&'a mut C>,
    out: Gather<T>,
}

impl<I, S, B> Conversation for http1::UpgradeableConnection<I, S>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    I: Read + Write + Unpin + Send + 'static,
    B: Body<Error: Into<BoxError>> + 'static,
{
    fn finish(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<C: Future, T> Future for Gathering<'_, C, T> {
    type Output = C::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        self.conn.as_mut().poll(cx)
    }
}

impl<I, S, B, T> Conversation for Gathering<'_, http2::Connection<I, S, TokioExecutor>, T>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    I: Read + Write + Unpin + 'static,
    B: Body<Error: Into<BoxError>> + 'static,
    TokioExecutor: Http2ServerConnExec<S::Future, B>,
    T: AsyncWrite + Unpin,
{
    fn finish(mut self: Pin<&mut Self>) {
        self.conn.as_mut().graceful_shutdown();
    }

    fn poll_send(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.out.poll_send(cx)
    }
}

/// Polls the connection and everything beside it in one task. Dropping the connection drops its
/// handlers and bodies.
async fn drive<C>(
    mut conn: Pin<&mut C>,
    stream: &TcpStream,
    client: &ClientConn,
    watchdog: Watchdog,
) -> Ended
where
    C: Conversation,
{
    let mut watchdog = pin!(watchdog);
    let mut gone = pin!(hangup::gone(stream));
    let mut closing = false;
    poll_fn(|cx| {
        client.waker.register(cx.waker());
        if gone.as_mut().poll(cx).is_ready() {
            tracing::debug!(peer = %client.peer(), "the client left");
            return Poll::Ready(Ended::Otherwise);
        }
        if let Poll::Ready(ended) = poll_conn(conn.as_mut(), cx, client) {
            if ended == Ended::Broken && client.traffic.is_old.load(Relaxed) {
                // HTTP/1.0 has no other way to tell that an answer isn't whole.
                let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
            }
            return Poll::Ready(ended);
        }
        let mut close = match client.command() {
            Command::Serve => false,
            // A head that has begun is read to its end; the watchdog waits no longer for it than ever.
            Command::Drain => !client.traffic.in_head.load(Relaxed) || client.in_flight() > 0,
            Command::Cut => return Poll::Ready(Ended::Otherwise),
        };
        while let Poll::Ready(verdict) = watchdog.as_mut().poll(cx, client) {
            match verdict {
                Verdict::Close => close = true,
                Verdict::Rest(since) => return Poll::Ready(Ended::Idle(since)),
                Verdict::Cut(reason) => {
                    tracing::debug!(peer = %client.peer(), reason, "connection cut");
                    return Poll::Ready(Ended::Otherwise);
                }
            }
        }
        if close && !closing {
            closing = true;
            conn.as_mut().finish();
            watchdog.as_mut().closing();
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

fn poll_conn<C>(mut conn: Pin<&mut C>, cx: &mut Context<'_>, client: &ClientConn) -> Poll<Ended>
where
    C: Conversation,
{
    let polled = conn.as_mut().poll(cx);
    let sent = conn.as_mut().poll_send(cx);
    match polled {
        Poll::Ready(Ok(())) => Poll::Ready(Ended::Otherwise),
        Poll::Ready(Err(error)) => {
            tracing::debug!(peer = %client.peer(), %error, "connection ended");
            Poll::Ready(match error {
                error if error.is_parse() => Ended::Unreadable,
                error if error.is_user() => Ended::Broken,
                _ => Ended::Otherwise,
            })
        }
        Poll::Pending => {
            if let Poll::Ready(Err(error)) = sent {
                tracing::debug!(peer = %client.peer(), %error, "nothing can be sent any more");
                return Poll::Ready(Ended::Otherwise);
            }
            // Reading wakes this task through the body's channel when hyper must be polled again.
            let _ = client.poll_rest(cx);
            Poll::Pending
        }
    }
}

/// A handler and the connection it serves, shared by the connection's requests.
struct Serving<H> {
    handler: Arc<H>,
    client: Arc<ClientConn>,
}

// === impl Serving ===

impl<H: Handler> Serving<H> {
    fn call(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<Response<ResponseBody<H::Body>>, Infallible>> + Send {
        // Here and not in the future: the head is complete now, and hyper moves the future with all it holds.
        let in_flight = self.client.begin();
        let is_doubtful = self.client.is_doubtful();
        let (head, incoming) = request.into_parts();
        let (version, mut head) = (head.version, Box::new(head));
        self.client.traffic.is_old.store(version == Version::HTTP_10, Relaxed);
        if is_doubtful {
            // hyper took one of them away, and the handler shall know what the client said.
            head.extensions.insert(TwoLengths);
        }
        let (body, watch) = RequestBody::wrap(&head, incoming, &self.client);
        async move {
            let mut response = self.handler.handle(head, body, &self.client).await;
            if let Some(body) = watch
                && version < Version::HTTP_2
            {
                close_if_unread(&mut response, &body, &self.client);
            }
            if is_doubtful {
                // Nobody knows what the next bytes are.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(tied(response, in_flight))
        }
    }
}

fn tied<B>(response: Response<B>, in_flight: InFlight) -> Response<ResponseBody<B>> {
    response.map(|body| ResponseBody::new(body, in_flight))
}

/// Announces the close that must follow a response to a request whose body was not read: its bytes
/// would be taken for the next request, and clients that are not told lose the response.
fn close_if_unread<B>(response: &mut Response<B>, body: &BodyWatch, client: &ClientConn) {
    let refused = response.extensions().get::<Refused>().is_some();
    if body.is_done() || !(refused || body.is_left()) {
        return;
    }
    // A small body has usually come with its head. Reading it here keeps the connection.
    let mut cx = Context::from_waker(Waker::noop());
    if client.has_rest() && client.poll_rest(&mut cx).is_ready() {
        return;
    }
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}
