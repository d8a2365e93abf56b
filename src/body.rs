//! The response body, which carries the request's slot to its last frame.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;

use crate::{
    copies::Tee,
    exchange::{Broken, Owner},
};

/// The error of a body, whatever made it.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What the client reads: the upstream's answer frame by frame, or one of our own.
#[derive(Debug)]
pub struct ResponseBody(Kind);

#[derive(Debug)]
enum Kind {
    Streamed(Owner),
    /// The same while it is copied.
    Copied(Owner, Option<Box<Tee>>),
    Whole(Full<Bytes>),
}

impl ResponseBody {
    pub(crate) fn streamed(owner: Owner, tee: Option<Tee>) -> Self {
        match (owner.ends_with_its_head(), tee) {
            (true, tee) => {
                tee.into_iter().for_each(Tee::finish);
                Self::whole(Bytes::new())
            }
            (false, None) => Self(Kind::Streamed(owner)),
            (false, Some(tee)) => Self(Kind::Copied(owner, Some(Box::new(tee)))),
        }
    }

    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self(Kind::Whole(Full::new(bytes)))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    /// An error means that the client must see its connection broken, never a clean end.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Streamed(owner) => owner.poll_frame(cx).map_err(Into::into),
            Kind::Copied(owner, tee) => {
                let polled = owner.poll_frame(cx);
                if let Poll::Ready(frame) = &polled {
                    follow(tee, frame.as_ref(), owner.is_end_stream());
                }
                polled.map_err(Into::into)
            }
            Kind::Whole(full) => {
                Pin::new(full).poll_frame(cx).map_err(|never: Infallible| match never {})
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Streamed(owner) | Kind::Copied(owner, _) => owner.is_end_stream(),
            Kind::Whole(full) => full.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Streamed(owner) | Kind::Copied(owner, _) => owner.size_hint(),
            Kind::Whole(full) => full.size_hint(),
        }
    }
}

/// Shows the copy what the client gets; none is the end. A body that breaks off leaves no copy.
fn follow(tee: &mut Option<Box<Tee>>, frame: Option<&Result<Frame<Bytes>, Broken>>, is_end: bool) {
    let Some(mut copy) = tee.take() else { return };
    match frame {
        Some(Err(_)) => {}
        Some(Ok(frame)) if !copy.see(frame) => {}
        Some(Ok(_)) if !is_end => *tee = Some(copy),
        Some(Ok(_)) | None => copy.finish(),
    }
}
