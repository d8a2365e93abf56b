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
    account::Account,
    copies::Tee,
    exchange::{Broken, Owner},
    reason::Reason,
};

/// The error of a body, whatever made it.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What the client reads: the upstream's answer frame by frame, or one of our own.
#[derive(Debug)]
pub struct ResponseBody {
    kind: Kind,
    account: Account,
}

#[derive(Debug)]
enum Kind {
    Streamed(Owner),
    /// The same while it is copied.
    Copied(Owner, Option<Box<Tee>>),
    Whole(Full<Bytes>),
}

impl ResponseBody {
    pub(crate) fn streamed(owner: Owner, tee: Option<Box<Tee>>) -> Self {
        match (owner.is_end_stream(), tee) {
            (true, tee) => {
                tee.into_iter().for_each(|tee| tee.finish());
                Self::whole(Bytes::new())
            }
            (false, None) => Kind::Streamed(owner).into(),
            (false, Some(tee)) => Kind::Copied(owner, Some(tee)).into(),
        }
    }

    pub(crate) fn whole(bytes: Bytes) -> Self {
        Kind::Whole(Full::new(bytes)).into()
    }

    /// Ties the request's account to the end of its answer, of which nothing is read if it `is_head` only.
    pub(crate) fn tie(&mut self, mut account: Account, is_head: bool) {
        if is_head || self.is_whole() {
            account.complete();
        }
        self.account = account;
    }

    /// Whether the client was given everything, even if the upstream has not ended yet.
    fn is_whole(&self) -> bool {
        match &self.kind {
            Kind::Streamed(owner) | Kind::Copied(owner, _) => owner.is_whole(),
            Kind::Whole(full) => full.is_end_stream(),
        }
    }

    /// What comes of a poll is what the client gets.
    fn account_for(&mut self, polled: &Poll<Option<Result<Frame<Bytes>, BoxError>>>) {
        match polled {
            // Dropping the body says why it broke off.
            Poll::Pending | Poll::Ready(Some(Err(_))) => {}
            Poll::Ready(Some(Ok(frame))) => {
                self.account.given(frame.data_ref().map_or(0, Bytes::len) as u64);
                if self.is_whole() {
                    self.account.complete();
                }
            }
            Poll::Ready(None) => self.account.complete(),
        }
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
        let polled = match &mut self.kind {
            Kind::Streamed(owner) => owner.poll_frame(cx).map_err(Into::into),
            Kind::Copied(owner, tee) => {
                let polled = owner.poll_frame(cx);
                if let Poll::Ready(frame) = &polled {
                    follow(tee, frame.as_ref(), owner.is_whole());
                }
                polled.map_err(Into::into)
            }
            Kind::Whole(full) => {
                Pin::new(full).poll_frame(cx).map_err(|never: Infallible| match never {})
            }
        };
        if self.account.is_open() {
            self.account_for(&polled);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Streamed(owner) | Kind::Copied(owner, _) => owner.is_end_stream(),
            Kind::Whole(full) => full.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Streamed(owner) | Kind::Copied(owner, _) => owner.size_hint(),
            Kind::Whole(full) => full.size_hint(),
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // Here and not where it is polled: one that is cut while the client takes nothing is never polled again.
        if self.account.is_open()
            && let Some(reason) = self.kind.why_cut()
        {
            self.account.cut(Some(reason));
        }
    }
}

impl From<Kind> for ResponseBody {
    fn from(kind: Kind) -> Self {
        Self { kind, account: Account::default() }
    }
}

impl Kind {
    fn why_cut(&self) -> Option<Reason> {
        match self {
            Self::Streamed(owner) | Self::Copied(owner, _) => owner.why_cut(),
            Self::Whole(_) => None,
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
