//! One admitted request at its upstream, from the moment its head leaves until its slot is given back.
//!
//! What the exchange holds (the response so far, the permit) sits behind a lock and not in the future
//! or body that hyper polls: hyper polls neither while the client doesn't read, and a slot must be
//! taken back all the same. So there are three ways out, and each takes the contents exactly once:
//! - the response ended clean: the permit drops at once;
//! - it was cut (timeout, failure, operator) or its owner dropped it (the client left): the upstream's
//!   connection is closed first, and the permit drops when it is closed, after `linger`;
//! - the client left and the upstream is to finish: a task reads on, and ends in one of the first two.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{runtime::Handle, time::Instant};
use uuid::Uuid;

use crate::{
    admission::Permit,
    gauge::Share,
    reason::Reason,
    registry::Registry,
    upload::{Outgoing, Upload},
    upstream::{Attempt, Sent, Upstream, connect::UpstreamConn},
};

/// What a request in flight owns. Dropping it gives all of it back.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) permit: Permit,
    /// Of the process-wide cap.
    pub(crate) _seat: Share,
}

/// Shared by its [`Owner`] and the registry.
#[derive(Debug)]
pub(crate) struct Exchange {
    holder: Uuid,
    cut_at: Option<Instant>,
    upstream: Arc<Upstream>,
    upload: Option<Arc<Upload>>,
    registry: Arc<Registry>,
    runtime: Handle,
    state: Mutex<State>,
}

/// The future or body that hyper polls. Dropping it means that the client left.
#[derive(Debug)]
pub(crate) struct Owner(Arc<Exchange>);

/// Why there is no response head.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) reason: Reason,
    /// The connection was an old one and may have been closed before the request came to it.
    pub(crate) was_stale: bool,
}

/// Why a response body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the upstream broke off: {0}")]
    Upstream(hyper::Error),
    #[error("cut: {}", .0.as_str())]
    Cut(Reason),
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Polled, and the upstream had nothing.
    is_waiting: bool,
    /// Since when, as far as the janitor saw.
    waiting_since: Option<Instant>,
    waker: Option<Waker>,
    is_finishing: bool,
}

#[derive(Debug)]
enum Phase {
    /// Nothing is under way: before the first try, or after a failed one.
    Idle(Held, Option<Arc<UpstreamConn>>),
    Head(Held, Box<Sent>),
    Body(Held, Incoming, Option<Arc<UpstreamConn>>),
    Over(Option<Reason>),
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn holder(&self) -> Uuid {
        self.holder
    }

    /// Ends the exchange from outside.
    pub(crate) fn cut(&self, reason: Reason) {
        let (phase, waker) = {
            let mut state = self.lock();
            if matches!(state.phase, Phase::Over(_)) {
                return;
            }
            (state.close(Some(reason)), state.waker.take())
        };
        self.abort(phase);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Why the exchange should be cut now, if it should.
    pub(crate) fn overdue(&self, now: Instant) -> Option<Reason> {
        if self.cut_at.is_some_and(|at| at <= now) {
            return Some(Reason::MaxHold);
        }
        let mut state = self.lock();
        if !state.is_waiting {
            return None;
        }
        let limit = match state.phase {
            Phase::Head(..) => self.upstream.response_timeout,
            Phase::Body(..) => self.upstream.idle_timeout,
            Phase::Idle(..) | Phase::Over(_) => return None,
        };
        let since = *state.waiting_since.get_or_insert(now);
        (now - since >= limit).then_some(Reason::UpstreamTimeout)
    }

    fn poll_head(&self, cx: &mut Context<'_>) -> Poll<Result<Response<()>, Failure>> {
        let mut state = self.lock();
        state.remember(cx.waker());
        let sent = match &mut state.phase {
            Phase::Head(_, sent) => sent,
            Phase::Over(Some(reason)) => return Poll::Ready(Err(Failure::cut(*reason))),
            Phase::Idle(..) | Phase::Body(..) | Phase::Over(None) => {
                unreachable!("polled after the end")
            }
        };
        let answer = ready!(Pin::new(&mut sent.response).poll(cx));
        let Phase::Head(held, sent) = state.close(None) else { unreachable!("looked at above") };
        Poll::Ready(match answer {
            Ok(response) => Ok(state.begin_body(held, response)),
            Err(error) => {
                let conn = sent.connection();
                let failure = self.blame(&error, conn.as_deref());
                state.phase = Phase::Idle(held, conn);
                Err(failure)
            }
        })
    }

    fn blame(
        &self,
        error: &hyper_util::client::legacy::Error,
        conn: Option<&UpstreamConn>,
    ) -> Failure {
        let fault = self.upload.as_ref().and_then(|upload| upload.fault());
        let reason = match fault {
            Some(fault) => fault,
            None if error.is_connect() => Reason::UpstreamConnect,
            None => Reason::UpstreamReset,
        };
        tracing::debug!(?error, reason = reason.as_str(), "no response");
        Failure { reason, was_stale: fault.is_none() && conn.is_some_and(UpstreamConn::was_stale) }
    }

    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let mut state = self.lock();
        state.remember(cx.waker());
        let body = match &mut state.phase {
            Phase::Body(_, body, _) => body,
            Phase::Over(Some(reason)) => {
                return Poll::Ready(Some(Err(Broken::Cut(*reason))));
            }
            Phase::Idle(..) | Phase::Head(..) | Phase::Over(None) => return Poll::Ready(None),
        };
        let polled = Pin::new(&mut *body).poll_frame(cx);
        let is_end = body.is_end_stream();
        match polled {
            Poll::Pending => {
                state.is_waiting = true;
                Poll::Pending
            }
            Poll::Ready(Some(Ok(frame))) => {
                state.is_waiting = false;
                state.waiting_since = None;
                // Asked only behind a frame: that is the last one, so the upstream is done.
                if is_end {
                    let phase = state.close(None);
                    drop(state);
                    self.complete(phase);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                let phase = state.close(None);
                drop(state);
                self.complete(phase);
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                let phase = state.close(Some(Reason::UpstreamReset));
                drop(state);
                self.abort(phase);
                Poll::Ready(Some(Err(Broken::Upstream(error))))
            }
        }
    }

    /// The response is complete: the slot is free at once.
    fn complete(&self, phase: Phase) {
        self.registry.remove(self.holder);
        // An upload that nobody waits for would keep the connection, and the client busy.
        if let Some(upload) = &self.upload
            && !upload.is_sent()
        {
            upload.stop();
            if let Phase::Body(_, _, Some(conn)) = &phase {
                conn.abort();
            }
        }
        drop(phase);
    }

    /// The exchange ends early: the upstream must see it first, then the slot is free.
    fn abort(&self, phase: Phase) {
        self.registry.remove(self.holder);
        if let Some(upload) = &self.upload {
            upload.stop();
        }
        let (held, conn) = match phase {
            Phase::Idle(held, conn) | Phase::Body(held, _, conn) => (held, conn),
            Phase::Head(held, sent) => {
                // Not polled any more, so no byte goes out between this look and the drop.
                let conn = sent.connection();
                (held, conn)
            }
            Phase::Over(_) => return,
        };
        let Some(conn) = conn else {
            return;
        };
        conn.abort();
        let linger = self.upstream.linger;
        self.runtime.spawn(async move {
            conn.closed().await;
            tokio::time::sleep(linger).await;
            drop(held);
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Takes the contents, which nobody else can then take again.
    fn close(&mut self, reason: Option<Reason>) -> Phase {
        std::mem::replace(&mut self.phase, Phase::Over(reason))
    }

    fn begin_body(&mut self, held: Held, response: Response<Incoming>) -> Response<()> {
        let (mut head, body) = response.into_parts();
        let conn: Option<Arc<UpstreamConn>> = head.extensions.remove();
        if let Some(conn) = &conn {
            conn.answered();
        }
        self.is_waiting = false;
        self.waiting_since = None;
        self.phase = Phase::Body(held, body, conn);
        Response::from_parts(head, ())
    }

    fn remember(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(known) => known.clone_from(waker),
            None => self.waker = Some(waker.clone()),
        }
    }
}

// === impl Owner ===

impl Owner {
    pub(crate) fn new(
        held: Held,
        upstream: Arc<Upstream>,
        upload: Option<Arc<Upload>>,
        registry: Arc<Registry>,
        runtime: Handle,
    ) -> Self {
        let permit = &held.permit;
        let exchange = Arc::new(Exchange {
            holder: permit.holder(),
            cut_at: permit.max_hold().map(|longest| permit.taken() + longest),
            upstream,
            upload,
            registry,
            runtime,
            state: Mutex::new(State {
                phase: Phase::Idle(held, None),
                is_waiting: false,
                waiting_since: None,
                waker: None,
                is_finishing: false,
            }),
        });
        exchange.registry.insert(&exchange);
        Self(exchange)
    }

    /// Sends the request and waits for the head of the response.
    pub(crate) async fn send(
        &self,
        request: Request<Outgoing>,
        attempt: Attempt,
        now: Instant,
    ) -> Result<Response<()>, Failure> {
        self.start(request, attempt, now)?;
        self.head().await
    }

    fn start(
        &self,
        request: Request<Outgoing>,
        attempt: Attempt,
        now: Instant,
    ) -> Result<(), Failure> {
        let mut state = self.0.lock();
        match state.close(None) {
            Phase::Idle(held, _) => {
                let sent = Box::new(self.0.upstream.send(request, attempt));
                state.phase = Phase::Head(held, sent);
                state.is_waiting = true;
                state.waiting_since = Some(now);
                Ok(())
            }
            Phase::Over(Some(reason)) => {
                state.phase = Phase::Over(Some(reason));
                Err(Failure::cut(reason))
            }
            Phase::Head(..) | Phase::Body(..) | Phase::Over(None) => unreachable!("started twice"),
        }
    }

    async fn head(&self) -> Result<Response<()>, Failure> {
        poll_fn(|cx| self.0.poll_head(cx)).await
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

    /// Gives everything back if the response has no body, and says whether it hasn't.
    pub(crate) fn ends_with_its_head(&self) -> bool {
        let mut state = self.0.lock();
        match &state.phase {
            Phase::Body(_, body, _) if body.is_end_stream() => {
                let phase = state.close(None);
                drop(state);
                self.0.complete(phase);
                true
            }
            _ => false,
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        matches!(self.0.lock().phase, Phase::Over(None))
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match &self.0.lock().phase {
            Phase::Body(_, body, _) => body.size_hint(),
            Phase::Over(None) => SizeHint::with_exact(0),
            _ => SizeHint::default(),
        }
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
            Phase::Idle(..) => None,
            Phase::Head(..) => Some(false),
            Phase::Body(..) => Some(true),
        };
        if let Some(has_head) = has_head
            && exchange.upstream.finishes
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

impl Failure {
    fn cut(reason: Reason) -> Self {
        Self { reason, was_stale: false }
    }
}
