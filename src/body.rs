//! The response body, which carries the request's slot to its last frame.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;

use crate::exchange::Owner;

/// The error of a body, whatever made it.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What the client reads: the upstream's answer frame by frame, or one of our own.
#[derive(Debug)]
pub struct ResponseBody(Kind);

#[derive(Debug)]
enum Kind {
    Streamed(Owner),
    Whole(Full<Bytes>),
}

impl ResponseBody {
    pub(crate) fn streamed(owner: Owner) -> Self {
        if owner.ends_with_its_head() {
            return Self::whole(Bytes::new());
        }
        Self(Kind::Streamed(owner))
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
            Kind::Whole(full) => {
                Pin::new(full).poll_frame(cx).map_err(|never: Infallible| match never {})
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Streamed(owner) => owner.is_end_stream(),
            Kind::Whole(full) => full.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Streamed(owner) => owner.size_hint(),
            Kind::Whole(full) => full.size_hint(),
        }
    }
}
