//! Bodies: the request's, which knows whether it was read and whether the client stalls, and the
//! response's, which keeps the request counted.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::{Version, header::EXPECT, request::Parts};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tokio::{runtime::Handle, time};

use super::{
    client::{ClientConn, InFlight, REST},
    watchdog::REST_TIME,
};

/// Why a request body ended early. Either way it is the client's doing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// Less than 1 KiB came within the stall timeout although more was awaited.
    #[error("the client stopped sending its request body")]
    Stalled,
    /// The framing was broken, or the client left.
    #[error("the request body from the client is broken")]
    Client(#[source] hyper::Error),
}

/// A request's body; frames pass unchanged and unbuffered.
#[derive(Debug)]
pub struct RequestBody {
    // `None` once it ended.
    incoming: Option<Incoming>,
    // `None` if the request came without a body.
    link: Option<Link>,
}

#[derive(Debug)]
struct Link {
    watch: Arc<BodyWatch>,
    client: Arc<ClientConn>,
    /// HTTP/1, where the connection can't be used again before the body was read.
    blocks_connection: bool,
    /// The client waits for `100 Continue`, which hyper sends at the first poll.
    awaits_continue: bool,
}

/// What the connection and the service know of a body that a handler holds.
#[derive(Debug, Default)]
pub(super) struct BodyWatch {
    pub(super) arrived: AtomicU64,
    pub(super) waiting: AtomicBool,
    stalled: AtomicBool,
    fate: AtomicU8,
    waker: AtomicWaker,
}

/// `BodyWatch::fate`
const OPEN: u8 = 0;
const DONE: u8 = 1;
const LEFT: u8 = 2;

// === impl RequestBody ===

impl RequestBody {
    /// Wraps the body behind this head; the watch is `None` for a request without one.
    pub(super) fn wrap(
        head: &Parts,
        incoming: Incoming,
        client: &Arc<ClientConn>,
    ) -> (Self, Option<Arc<BodyWatch>>) {
        if incoming.is_end_stream() {
            return (Self { incoming: Some(incoming), link: None }, None);
        }
        let watch = Arc::new(BodyWatch::default());
        client.bodies.remember(Arc::clone(&watch));
        let link = Link {
            watch: Arc::clone(&watch),
            client: Arc::clone(client),
            blocks_connection: head.version < Version::HTTP_2,
            awaits_continue: head.headers.contains_key(EXPECT),
        };
        (Self { incoming: Some(incoming), link: Some(link) }, Some(watch))
    }

    /// Whether the client's body was read to its end.
    pub fn is_done(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.watch.is_done())
    }

    fn end(&mut self, fate: u8) -> Option<Incoming> {
        let incoming = self.incoming.take();
        if let Some(link) = &self.link
            // The first fate stays: a body that was read to its end is dropped later.
            && link.watch.fate.compare_exchange(OPEN, fate, AcqRel, Acquire).is_ok()
        {
            link.client.bodies.open.fetch_sub(1, AcqRel);
        }
        incoming
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let Some(incoming) = &mut this.incoming else {
            return Poll::Ready(None);
        };
        let Some(link) = &mut this.link else {
            return Pin::new(incoming).poll_frame(cx).map_err(BodyError::Client);
        };
        link.awaits_continue = false;
        let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(cx) else {
            ready!(link.watch.poll_stalled(cx));
            this.leave();
            return Poll::Ready(Some(Err(BodyError::Stalled)));
        };
        link.watch.waiting.store(false, Relaxed);
        match frame {
            Some(Ok(frame)) => {
                link.watch.record(&frame);
                if frame.is_trailers() || incoming.is_end_stream() {
                    this.end(DONE);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                this.end(LEFT);
                Poll::Ready(Some(Err(BodyError::Client(error))))
            }
            None => {
                this.end(DONE);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.incoming {
            Some(incoming) => incoming.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}

impl RequestBody {
    /// Has the unread rest read if the client could miss the answer otherwise: on HTTP/1 by the
    /// connection, which must close behind it; on HTTP/2 by itself, since some clients take the reset
    /// of a stream that they are writing to for a failure, whatever was answered before it.
    fn leave(&mut self) {
        let Some(incoming) = self.end(LEFT) else {
            return;
        };
        let Some(link) = self.link.as_ref().filter(|link| !link.awaits_continue) else {
            return;
        };
        if link.blocks_connection {
            link.client.leave_rest(incoming);
        } else if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(time::timeout(REST_TIME, read_away(incoming)));
        }
    }
}

async fn read_away(mut body: Incoming) {
    let mut left = REST;
    while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
            Some(fewer) => left = fewer,
            None => return,
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.leave();
    }
}

// === impl BodyWatch ===

impl BodyWatch {
    pub(super) fn is_done(&self) -> bool {
        self.fate.load(Acquire) == DONE
    }

    /// Whether nobody will read the body any more although it did not end.
    pub(super) fn is_left(&self) -> bool {
        self.fate.load(Acquire) == LEFT
    }

    pub(super) fn is_open(&self) -> bool {
        self.fate.load(Acquire) == OPEN
    }

    pub(super) fn stall(&self) {
        self.stalled.store(true, Release);
        self.waker.wake();
    }

    fn poll_stalled(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        self.waiting.store(true, Relaxed);
        if self.stalled.load(Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn record(&self, frame: &Frame<Bytes>) {
        let size = frame.data_ref().map_or(0, Bytes::len) as u64;
        let arrived = self.arrived.load(Relaxed) + size;
        self.arrived.store(arrived, Relaxed);
    }
}

// === impl ResponseBody ===

pin_project! {
    /// A handler's body; the request is in flight until this is dropped.
    #[derive(Debug)]
    pub(super) struct ResponseBody<B> {
        #[pin]
        inner: B,
        in_flight: InFlight,
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn new(inner: B, in_flight: InFlight) -> Self {
        Self { inner, in_flight }
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.project().inner.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
