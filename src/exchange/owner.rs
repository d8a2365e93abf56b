//! The side of an exchange that hyper polls, and drops when the client leaves, or has all that was promised.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::{runtime::Handle, time::Instant};

use super::{Broken, Exchange, Failure, Given, Held, Phase, State};
use crate::{
    reason::Reason,
    registry::Registry,
    upload::{Outgoing, Upload},
    upstream::{Sent, Spare, Upstream},
};

/// The future or body that hyper polls. Dropping it means that the client left, unless it [is whole](Self::is_whole).
#[derive(Debug)]
pub(crate) struct Owner(Arc<Exchange>);

impl Owner {
    /// Whatever outlives the request lives on the current runtime, as its upstream's connection does.
    pub(crate) fn new(
        held: Held,
        upstream: Arc<Upstream>,
        upload: Option<Arc<Upload>>,
        patience: Option<Duration>,
        registry: Arc<Registry>,
    ) -> Self {
        let permit = &held.permit;
        let stay = permit.stay();
        let exchange = Arc::new(Exchange {
            holder: permit.holder(),
            guard: permit.guard().cloned(),
            cut_at: permit.max_hold().map(|longest| permit.taken() + longest),
            upstream,
            upload,
            patience,
            registry,
            runtime: Handle::current(),
            state: Mutex::new(State {
                phase: Phase::Idle(held, None),
                stay,
                is_waiting: false,
                waiting_since: None,
                pieces_seen: 0,
                waker: None,
                is_finishing: false,
                early: None,
                given: Given::default(),
            }),
        });
        exchange.registry.insert(&exchange);
        Self(exchange)
    }

    /// Sends the request and waits for the head of the response.
    pub(crate) async fn send(
        &self,
        request: Box<Request<Outgoing>>,
        now: Instant,
    ) -> Result<Response<()>, Failure> {
        let upstream = &self.0.upstream;
        let busy = match upstream.choose() {
            Some(busy) => busy,
            // In a box, or every request would hold room for it.
            None => Box::pin(upstream.first()).await.ok_or_else(Failure::no_endpoint)?,
        };
        self.start(|| upstream.send(busy, request, now), now)?;
        self.head().await
    }

    /// Sends once more what may be, on the same slots.
    pub(crate) async fn send_again(&self, spare: Spare) -> Result<Response<()>, Failure> {
        self.start(|| self.0.upstream.send_again(spare), Instant::now())?;
        self.head().await
    }

    fn start(&self, send: impl FnOnce() -> Sent, now: Instant) -> Result<(), Failure> {
        self.0.check_lease();
        let mut state = self.0.lock();
        match state.close(None) {
            Phase::Idle(held, _) => {
                state.phase = Phase::Head(held, send());
                state.is_waiting = true;
                state.waiting_since = Some(now);
                Ok(())
            }
            Phase::Over(Some(reason)) => {
                state.phase = Phase::Over(Some(reason));
                Err(Failure::cut(reason))
            }
            Phase::Head(..) | Phase::Body(..) | Phase::Tunnel(..) | Phase::Over(None) => {
                unreachable!("started twice")
            }
        }
    }

    async fn head(&self) -> Result<Response<()>, Failure> {
        poll_fn(|cx| self.0.poll_head(cx)).await
    }

    /// Why the exchange ended early, if it did.
    pub(crate) fn why_cut(&self) -> Option<Reason> {
        match self.0.lock().phase {
            Phase::Over(reason) => reason,
            _ => None,
        }
    }

    /// The endpoint that has the request, or had it last, as configured.
    pub(crate) fn endpoint(&self) -> Option<String> {
        match &self.0.lock().phase {
            Phase::Body(_, _, line) | Phase::Tunnel(_, line) => Some(line.endpoint().to_owned()),
            Phase::Idle(_, open) => open.as_ref().map(|open| open.endpoint().to_owned()),
            Phase::Head(..) | Phase::Over(_) => None,
        }
    }

    /// Ends the exchange for a reason of our own.
    pub(crate) fn cut(&self, reason: Reason) {
        self.0.cut(reason);
    }

    pub(crate) fn poll_frame(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.0.poll_frame(cx)
    }

    /// The connection speaks another protocol from here on, and the slot is held to its end.
    pub(crate) fn begin_tunnel(&self) {
        let mut state = self.0.lock();
        state.phase = match state.close(None) {
            Phase::Body(held, _, link) => Phase::Tunnel(held, link),
            phase => phase,
        };
    }

    /// Both halves have ended, and the upstream's connection was closed.
    pub(crate) fn tunnel_ended(self) {
        let phase = self.0.lock().close(None);
        self.0.registry.remove(self.0.holder);
        drop(phase);
    }

    /// Takes what came along with the head. If that is the whole answer the slot is given back here, and whoever waits for
    /// it goes first: the slot is worth more than the moment that this answer goes on later.
    pub(crate) async fn take_early(&self) {
        let mut has_read = false;
        poll_fn(|cx| {
            if !has_read && self.0.read_early(cx) {
                // Comes back behind the tasks that the release has woken.
                has_read = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        let state = self.0.lock();
        matches!(state.phase, Phase::Over(None)) && state.early.is_none()
    }

    /// Whether the client was given all of the answer that was promised. The upstream may still have to end it: over HTTP/2 the
    /// end can come behind the last byte, and hyper asks for nothing behind the length that a head tells.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.lock().is_whole()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        let state = self.0.lock();
        let early = state.early.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len) as u64;
        let mut hint = match &state.phase {
            Phase::Body(_, body, _) => body.size_hint(),
            Phase::Over(None) => SizeHint::with_exact(0),
            _ => return SizeHint::default(),
        };
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + early);
        }
        hint.set_lower(hint.lower() + early);
        hint
    }

    /// Reads the answer to its end, for nobody.
    async fn finish(self, has_head: bool) {
        if !has_head && self.head().await.is_err() {
            return;
        }
        while let Some(Ok(_)) = poll_fn(|cx| self.0.poll_frame(cx)).await {}
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let exchange = &self.0;
        let mut state = exchange.lock();
        let has_head = match state.phase {
            Phase::Over(_) => return,
            Phase::Idle(..) | Phase::Tunnel(..) => None,
            Phase::Head(..) => Some(false),
            Phase::Body(..) => Some(true),
        };
        if let Some(has_head) = has_head
            && (exchange.upstream.finishes || state.is_whole())
            // A runtime that is gone drops the task at once, and with it this owner's successor.
            && !state.is_finishing
        {
            state.is_finishing = true;
            drop(state);
            let successor = Owner(Arc::clone(exchange));
            exchange.runtime.spawn(successor.finish(has_head));
            return;
        }
        let phase = state.close(None);
        drop(state);
        exchange.abort(phase);
    }
}
