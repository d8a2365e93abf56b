//! The request body on its way to the upstream: none, read beforehand, or streamed.
//!
//! A streamed body can be stopped from outside, and remembers whose fault its early end was: the
//! upstream's client reports both as its own failure to send.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

use crate::{
    headers,
    reason::Reason,
    server::{BodyError, RequestBody},
};

/// What the upstream is sent.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// Nothing.
    Empty,
    /// A body that was read before admission. Can be sent again.
    Whole(Bytes),
    /// As the client sends it.
    Stream(RequestBody, Arc<Upload>),
}

/// The state of a streamed body, shared with whoever may stop it.
#[derive(Debug, Default)]
pub(crate) struct Upload {
    state: AtomicU8,
    waker: AtomicWaker,
    /// Pieces handed over.
    pieces: AtomicU32,
    /// The client has yet to send the next piece.
    awaits_client: AtomicBool,
}

/// Why a request body can't be sent on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("the exchange is over")]
    Stopped,
}

const OPEN: u8 = 0;
const SENT: u8 = 1;
const STOPPED: u8 = 2;
const BROKEN: u8 = 3;
const STALLED: u8 = 4;

/// Reads a small body to its end, of which no more was announced.
///
/// # Errors
/// The reason to tell the client: it stalled, or broke the framing.
pub(crate) async fn read_small(mut body: RequestBody, announced: u64) -> Result<Bytes, Reason> {
    let mut whole = Bytes::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| fault(&error))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if (whole.len() + data.len()) as u64 > announced {
            return Err(Reason::BadRequest);
        }
        whole = if whole.is_empty() {
            data
        } else {
            let mut joined = BytesMut::from(whole);
            joined.extend_from_slice(&data);
            joined.freeze()
        };
    }
    Ok(whole)
}

fn fault(error: &BodyError) -> Reason {
    match error {
        BodyError::Stalled => Reason::ClientTimeout,
        BodyError::Client(_) => Reason::BadRequest,
    }
}

impl Upload {
    /// Whether the whole body was handed over.
    pub(crate) fn is_sent(&self) -> bool {
        self.state.load(Ordering::Acquire) == SENT
    }

    /// Whether it isn't the upstream's fault that there is no answer yet: the client has yet to send, or pieces were handed
    /// over since `seen` was counted.
    pub(crate) fn is_under_way(&self, seen: &mut u32) -> bool {
        let pieces = self.pieces.load(Ordering::Relaxed);
        let moved = std::mem::replace(seen, pieces) != pieces;
        moved || (!self.is_sent() && self.awaits_client.load(Ordering::Relaxed))
    }

    /// What the client did wrong, if it did.
    pub(crate) fn fault(&self) -> Option<Reason> {
        match self.state.load(Ordering::Acquire) {
            BROKEN => Some(Reason::BadRequest),
            STALLED => Some(Reason::ClientTimeout),
            _ => None,
        }
    }

    /// Ends the body with an error, so that the connection it goes to is closed.
    pub(crate) fn stop(&self) {
        let stopped =
            self.state.compare_exchange(OPEN, STOPPED, Ordering::AcqRel, Ordering::Acquire);
        if stopped.is_ok() {
            self.waker.wake();
        }
    }

    fn is_stopped(&self) -> bool {
        self.state.load(Ordering::Acquire) == STOPPED
    }

    fn end(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }
}

impl Outgoing {
    /// The same body once more, if it is still there.
    pub(crate) fn again(&self) -> Option<Self> {
        match self {
            Outgoing::Empty => Some(Outgoing::Empty),
            Outgoing::Whole(bytes) => Some(Outgoing::Whole(bytes.clone())),
            Outgoing::Stream(..) => None,
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        match &mut *self {
            Outgoing::Empty => Poll::Ready(None),
            Outgoing::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
            }
            Outgoing::Stream(body, upload) => {
                // Registered before the look, so that a stop in between isn't missed.
                upload.waker.register(cx.waker());
                if upload.is_stopped() {
                    return Poll::Ready(Some(Err(UploadError::Stopped)));
                }
                let frame = Pin::new(&mut *body).poll_frame(cx);
                upload.awaits_client.store(frame.is_pending(), Ordering::Relaxed);
                let frame = ready!(frame);
                upload.pieces.fetch_add(1, Ordering::Relaxed);
                match &frame {
                    None => upload.end(SENT),
                    Some(Ok(_)) if body.is_end_stream() => upload.end(SENT),
                    Some(Ok(_)) => {}
                    Some(Err(BodyError::Stalled)) => upload.end(STALLED),
                    Some(Err(BodyError::Client(_))) => upload.end(BROKEN),
                }
                Poll::Ready(frame.map(|frame| Ok(checked(frame?))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Outgoing::Empty => true,
            Outgoing::Whole(bytes) => bytes.is_empty(),
            Outgoing::Stream(body, _) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Outgoing::Empty => SizeHint::with_exact(0),
            Outgoing::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Outgoing::Stream(body, _) => body.size_hint(),
        }
    }
}

fn checked(frame: Frame<Bytes>) -> Frame<Bytes> {
    match frame.into_trailers() {
        Ok(mut trailers) => {
            headers::clean_trailers(&mut trailers);
            Frame::trailers(trailers)
        }
        Err(data) => data,
    }
}
