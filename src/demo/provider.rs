use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body::{Body, Frame};
use http_body_util::{Either, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpListener,
    task::{AbortHandle, JoinSet},
    time::{Interval, interval},
};

/// How many events a stream has, and how far apart they are.
const EVENTS: u32 = 6;
const GAP: Duration = Duration::from_millis(60);

/// A server that streams events, counts the streams it has open, and answers 429 to those above its slots. It ends when dropped.
#[derive(Debug)]
pub struct Provider {
    addr: SocketAddr,
    slots: usize,
    counts: Arc<Mutex<Counts>>,
    server: AbortHandle,
}

/// What the provider counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Streams open now.
    pub(super) open: usize,
    /// The most there were at once; one that was refused counts for the moment in which it stood at the door.
    pub(super) highest: usize,
    /// Answers 429.
    pub(super) refused: u64,
}

impl Provider {
    /// Starts it on a free port of this host.
    pub async fn start(slots: usize) -> io::Result<Self> {
        Self::start_at(([127, 0, 0, 1], 0).into(), slots).await
    }

    /// Starts it at an address.
    pub async fn start_at(addr: SocketAddr, slots: usize) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let counts = Arc::<Mutex<Counts>>::default();
        let server = tokio::spawn(serve(listener, slots, Arc::clone(&counts))).abort_handle();
        Ok(Self { addr, slots, counts, server })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many streams it allows.
    pub fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn counts(&self) -> Counts {
        *lock(&self.counts)
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock(counts: &Mutex<Counts>) -> std::sync::MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: TcpListener, slots: usize, counts: Arc<Mutex<Counts>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                // What fails here is one client's connection, and the traffic counts it.
                let Ok((stream, _)) = accepted else { continue };
                let counts = Arc::clone(&counts);
                let answer = service_fn(move |_: Request<Incoming>| {
                    let answer = answer(slots, &counts);
                    async { Ok::<_, Infallible>(answer) }
                });
                connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

fn answer(slots: usize, counts: &Arc<Mutex<Counts>>) -> Response<Either<Events, Full<Bytes>>> {
    let open = Open::new(counts);
    let mut now = lock(counts);
    if now.open > slots {
        now.refused += 1;
        drop(now);
        let body = Full::from("{\"error\": \"too many requests in flight\"}\n");
        let mut response = Response::new(Either::Right(body));
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        return response;
    }
    drop(now);
    let mut response =
        Response::new(Either::Left(Events { sent: 0, timer: interval(GAP), open: Some(open) }));
    let events = http::HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(CONTENT_TYPE, events);
    response
}

/// One open stream, counted for as long as it lives.
#[derive(Debug)]
struct Open(Arc<Mutex<Counts>>);

impl Open {
    fn new(counts: &Arc<Mutex<Counts>>) -> Self {
        let mut now = lock(counts);
        now.open += 1;
        now.highest = now.highest.max(now.open);
        Self(Arc::clone(counts))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        lock(&self.0).open -= 1;
    }
}

/// A body of events. It stops counting before its last event is handed over, since whoever has that may already send the next request.
#[derive(Debug)]
struct Events {
    sent: u32,
    timer: Interval,
    open: Option<Open>,
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.sent == EVENTS {
            return Poll::Ready(None);
        }
        ready!(self.timer.poll_tick(cx));
        self.sent += 1;
        if self.sent == EVENTS {
            self.open = None;
        }
        let event = format!("data: {{\"token\": {}}}\n\n", self.sent);
        Poll::Ready(Some(Ok(Frame::data(event.into()))))
    }
}
