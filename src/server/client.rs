//! What a connection's task, its handlers and its bodies share.

use std::{
    future::poll_fn,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::*},
    },
    task::{Context, Poll},
};

use futures_util::task::AtomicWaker;
use http::HeaderValue;
use http_body::Body;
use hyper::body::Incoming;

use super::{body::BodyWatch, watchdog::Window};

/// How much of a body nobody wants is read so that the client sees the answer.
pub(super) const REST: usize = 32 * 1024 * 1024;

/// What a handler may know about the connection a request came on.
pub struct ClientConn {
    /// The other end of the socket.
    socket_peer: SocketAddr,
    /// Whose connection that brings.
    announced: OnceLock<SocketAddr>,
    /// Whether it came over TLS.
    pub is_secure: bool,
    address: OnceLock<HeaderValue>,
    pub(super) traffic: Traffic,
    requests: AtomicU64,
    in_flight: AtomicUsize,
    pub(super) bodies: Bodies,
    rest: Rest,
    tunnel: Mutex<Option<Tunnel>>,
    command: AtomicU8,
    pub(super) waker: AtomicWaker,
}

/// Written by the connection's task only, so loads and stores suffice.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) read: AtomicU64,
    pub(super) written: AtomicU64,
    /// The socket takes no more bytes although some are pending.
    pub(super) write_blocked: AtomicBool,
    /// A head of HTTP/1 has begun and not ended.
    pub(super) in_head: AtomicBool,
    /// Between two requests of HTTP/1, as far as its framing could be followed.
    pub(super) is_between: AtomicBool,
    /// The first request, from 1, that named two lengths of its body; 0 if none did.
    pub(super) doubtful: AtomicU64,
    /// The latest request was of HTTP/1.0.
    pub(super) is_old: AtomicBool,
    /// HTTP is over.
    pub(super) is_tunnel: AtomicBool,
}

/// The request bodies that were not read to their end yet.
#[derive(Debug, Default)]
pub(super) struct Bodies {
    pub(super) open: AtomicUsize,
    pub(super) list: Mutex<Vec<(Arc<BodyWatch>, Option<Window>)>>,
}

/// An HTTP/1 body that its handler dropped unread.
#[derive(Debug, Default)]
struct Rest {
    present: AtomicBool,
    body: Mutex<Option<(Incoming, usize)>>,
}

/// What goes on after HTTP.
type Tunnel = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What the acceptor wants of a connection; it only ever grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(super) enum Command {
    Serve,
    Drain,
    Cut,
}

// === impl ClientConn ===

impl ClientConn {
    pub(super) fn new(peer: SocketAddr, is_secure: bool) -> Self {
        Self {
            socket_peer: peer,
            announced: OnceLock::new(),
            is_secure,
            address: OnceLock::new(),
            traffic: Traffic::default(),
            requests: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            bodies: Bodies::default(),
            rest: Rest::default(),
            tunnel: Mutex::default(),
            command: AtomicU8::new(Command::Serve as u8),
            waker: AtomicWaker::new(),
        }
    }

    /// The other end, or whom it connects for.
    pub fn peer(&self) -> SocketAddr {
        self.announced.get().copied().unwrap_or(self.socket_peer)
    }

    /// Takes the word of the other end for whose connection it is, once.
    pub(super) fn announce(&self, peer: SocketAddr) {
        let _ = self.announced.set(peer);
    }

    /// The address of the other end, as a header tells it.
    pub fn address(&self) -> &HeaderValue {
        self.address.get_or_init(|| {
            let address = self.peer().ip().to_canonical().to_string();
            HeaderValue::try_from(address).expect("an address is ASCII")
        })
    }

    /// Bytes received on this connection so far.
    pub fn bytes_read(&self) -> u64 {
        self.traffic.read.load(Relaxed)
    }

    /// Bytes sent on this connection so far.
    pub fn bytes_written(&self) -> u64 {
        self.traffic.written.load(Relaxed)
    }

    /// Requests begun on this connection so far, this one included.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Requests whose response has not ended yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Acquire)
    }

    pub(super) fn begin(self: &Arc<Self>) -> InFlight {
        self.requests.store(self.requests.load(Relaxed) + 1, Relaxed);
        self.in_flight.fetch_add(1, AcqRel);
        InFlight(Arc::clone(self))
    }

    /// Has the connection's task go on with this once an answer of status 101 was written.
    pub fn leave_tunnel(&self, tunnel: impl Future<Output = ()> + Send + 'static) {
        self.traffic.is_tunnel.store(true, Relaxed);
        *lock(&self.tunnel) = Some(Box::pin(tunnel));
    }

    pub(super) fn take_tunnel(&self) -> Option<Tunnel> {
        lock(&self.tunnel).take()
    }

    /// Whether the request that began last named two lengths of its body.
    pub(super) fn is_doubtful(&self) -> bool {
        let number = self.traffic.doubtful.load(Relaxed);
        number != 0 && number == self.requests()
    }

    pub(super) fn tell(&self, command: Command) {
        self.command.store(command as u8, Release);
        self.waker.wake();
    }

    pub(super) fn command(&self) -> Command {
        match self.command.load(Acquire) {
            0 => Command::Serve,
            1 => Command::Drain,
            _ => Command::Cut,
        }
    }

    /// Waits for this command, or a stronger one. For the connection's task alone.
    pub(super) async fn told(&self, command: Command) {
        poll_fn(|cx| {
            self.waker.register(cx.waker());
            if self.command() >= command { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Takes over a body that nobody reads, so that the connection's task reads it to its end.
    pub(super) fn leave_rest(&self, body: Incoming) {
        *lock(&self.rest.body) = Some((body, REST));
        self.rest.present.store(true, Release);
        self.waker.wake();
    }

    pub(super) fn has_rest(&self) -> bool {
        self.rest.present.load(Acquire)
    }

    /// Stops reading the rest; hyper then closes the connection after the response.
    pub(super) fn drop_rest(&self) {
        self.rest.present.store(false, Release);
        lock(&self.rest.body).take();
        // hyper may be waiting for the socket and not for the body's receiver.
        self.waker.wake();
    }

    /// Reads what has come of the rest. Ready when there is nothing left to read.
    pub(super) fn poll_rest(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_rest() {
            return Poll::Ready(());
        }
        let mut slot = lock(&self.rest.body);
        while let Some((body, budget)) = slot.as_mut() {
            match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    let size = frame.data_ref().map_or(0, bytes::Bytes::len);
                    match budget.checked_sub(size) {
                        Some(left) => *budget = left,
                        None => {
                            *slot = None;
                            self.waker.wake();
                        }
                    }
                }
                Poll::Ready(Some(Err(_)) | None) => *slot = None,
            }
        }
        self.rest.present.store(false, Release);
        Poll::Ready(())
    }
}

impl std::fmt::Debug for ClientConn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientConn").field("peer", &self.peer()).finish_non_exhaustive()
    }
}

// === impl Bodies ===

impl Bodies {
    /// Adds a body to the watched ones, forgetting those that ended when the list is full.
    pub(super) fn remember(&self, body: Arc<BodyWatch>) {
        self.open.fetch_add(1, AcqRel);
        let mut list = lock(&self.list);
        if list.len() == list.capacity() {
            list.retain(|(body, _)| body.is_open());
        }
        list.push((body, None));
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl InFlight ===

/// Counts a request from its head to the end of its response.
#[derive(Debug)]
pub(super) struct InFlight(pub(super) Arc<ClientConn>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, AcqRel);
    }
}
