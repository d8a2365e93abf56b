//! One admitted request at its upstream, from the moment its head leaves until its slot is given back.
//!
//! What the exchange holds (the response so far, the permit) sits behind a lock and not in the future
//! or body that hyper polls: hyper polls neither while the client doesn't read, and a slot must be
//! taken back all the same. So there are three ways out, and each takes the contents exactly once:
//! - the response ended clean: the permit drops at once;
//! - it was cut (timeout, failure, operator) or its owner dropped it (the client left): the upstream's
//!   connection is closed first, and the permit drops when it is closed, after `linger`;
//! - the client left and the upstream is to finish, or the client has all that was promised and the upstream hasn't ended:
//!   a task reads on, and ends in one of the first two.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame};
use tokio::{runtime::Handle, time::Instant};
use uuid::Uuid;

use crate::{
    admission::{Permit, Stay},
    body::BoxError,
    gauge::Share,
    leases::Guard,
    reason::Reason,
    registry::Registry,
    upload::Upload,
    upstream::{Cause, Incoming, Line, Open, Sent, Spare, Unanswered, Upstream},
};

mod owner;

pub(crate) use owner::Owner;

/// A piece of an answer that may take a slow client longer than a small one.
const LARGE: usize = 64 * 1024;

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
    guard: Option<Guard>,
    upstream: Arc<Upstream>,
    upload: Option<Arc<Upload>>,
    /// How long a client may take nothing of what it was given, where its connection doesn't tell.
    patience: Option<Duration>,
    registry: Arc<Registry>,
    runtime: Handle,
    state: Mutex<State>,
}

/// Why there is no response head.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) reason: Reason,
    /// The request, if it may be sent once more.
    pub(crate) spare: Option<Box<Spare>>,
}

/// Why a response body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the upstream broke off: {0}")]
    Upstream(BoxError),
    #[error("cut: {}", .0.as_str())]
    Cut(Reason),
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Not kept with the permit: which of them ends first is what is watched.
    stay: Option<Stay>,
    /// Polled, and the upstream had nothing.
    is_waiting: bool,
    /// Since when, as far as the janitor saw.
    waiting_since: Option<Instant>,
    /// How much of the upload had been handed over when the janitor last looked.
    pieces_seen: u32,
    waker: Option<Waker>,
    is_finishing: bool,
    /// A piece of the answer that was read with the head.
    early: Option<Frame<Bytes>>,
    given: Given,
}

/// What the client was given of the answer.
#[derive(Debug, Default)]
struct Given {
    pieces: u32,
    /// The size of the last piece.
    size: usize,
    /// How many pieces there were when the janitor last saw a new one, and when that was.
    seen: u32,
    since: Option<Instant>,
}

#[derive(Debug)]
enum Phase {
    /// Nothing is under way: before the first try, or after a failed one.
    Idle(Held, Option<Open>),
    Head(Held, Sent),
    Body(Held, Incoming, Line),
    /// The connection speaks another protocol now.
    Tunnel(Held, Line),
    Over(Option<Reason>),
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn holder(&self) -> Uuid {
        self.holder
    }

    /// Notes for how long it has held its limits' slots, where that is the longest so far.
    pub(crate) fn note_hold(&self, now: Instant, longest: &mut HashMap<Arc<str>, Duration>) {
        let state = self.lock();
        let Some(stay) = &state.stay else { return };
        let held = now.duration_since(stay.since());
        for limit in stay.limits() {
            let most = longest.entry(Arc::clone(limit)).or_default();
            *most = held.max(*most);
        }
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
        if let (Reason::LeaseLost, Some(held)) = (reason, phase.held()) {
            held.permit.lost();
        }
        if let (Reason::UpstreamTimeout, Phase::Head(_, sent)) = (reason, &phase) {
            self.upstream.late(sent);
        }
        self.abort(phase);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// When the request must have ended because its slot may become another's then, as things stand.
    pub(crate) fn ends(&self) -> Option<Instant> {
        let end = self.guard.as_ref()?.ends()?;
        // So that what the upstream still does after the close is done as well.
        Some(end.checked_sub(self.upstream.linger).unwrap_or(end))
    }

    /// Ends the exchange if its slot may be another's by now. Looked at before every byte: a process that was frozen finds
    /// its timers late.
    fn check_lease(&self) {
        if self.guard.is_some() && self.ends().is_some_and(|end| end <= Instant::now()) {
            self.cut(Reason::LeaseLost);
        }
    }

    /// Why the exchange should be cut now, if it should.
    pub(crate) fn overdue(&self, now: Instant) -> Option<Reason> {
        if self.cut_at.is_some_and(|at| at <= now) {
            return Some(Reason::MaxHold);
        }
        if self.ends().is_some_and(|end| end <= now) {
            return Some(Reason::LeaseLost);
        }
        let mut state = self.lock();
        if !state.is_waiting {
            let patience = self.patience.filter(|_| matches!(state.phase, Phase::Body(..)))?;
            return state.is_left_lying(now, patience).then_some(Reason::ClientTimeout);
        }
        if let (Phase::Head(..), Some(upload)) = (&state.phase, &self.upload) {
            // The upstream's time begins when it has the request.
            let mut seen = state.pieces_seen;
            let is_under_way = upload.is_under_way(&mut seen);
            state.pieces_seen = seen;
            if is_under_way {
                state.waiting_since = Some(now);
                return None;
            }
        }
        let limit = match state.phase {
            Phase::Head(..) => self.upstream.response_timeout,
            Phase::Body(..) => self.upstream.idle_timeout,
            Phase::Idle(..) | Phase::Tunnel(..) | Phase::Over(_) => return None,
        };
        let since = *state.waiting_since.get_or_insert(now);
        (now - since >= limit).then_some(Reason::UpstreamTimeout)
    }

    fn poll_head(&self, cx: &mut Context<'_>) -> Poll<Result<Response<()>, Failure>> {
        self.check_lease();
        let mut state = self.lock();
        state.remember(cx.waker());
        let sent = match &mut state.phase {
            Phase::Head(_, sent) => sent,
            Phase::Over(Some(reason)) => return Poll::Ready(Err(Failure::cut(*reason))),
            Phase::Idle(..) | Phase::Body(..) | Phase::Tunnel(..) | Phase::Over(None) => {
                unreachable!("polled after the end")
            }
        };
        let answer = ready!(sent.poll(cx));
        let Phase::Head(held, sent) = state.close(None) else { unreachable!("looked at above") };
        Poll::Ready(match self.upstream.settle(sent, answer, self.upload.as_deref()) {
            Ok((response, line)) => Ok(state.begin_body(held, response, line)),
            Err(Unanswered { cause, open, spare }) => {
                state.phase = Phase::Idle(held, open);
                Err(Failure { reason: self.blame(&cause), spare })
            }
        })
    }

    fn blame(&self, cause: &Cause) -> Reason {
        let fault = self.upload.as_ref().and_then(|upload| upload.fault());
        let reason = fault.unwrap_or(match cause {
            Cause::Connect(_) => Reason::UpstreamConnect,
            Cause::Broken(_) => Reason::UpstreamReset,
        });
        tracing::debug!(%cause, reason = reason.as_str(), "no response");
        reason
    }

    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let early = self.lock().early.take();
        if let Some(frame) = early { Poll::Ready(Some(Ok(frame))) } else { self.read_frame(cx) }
    }

    /// Reads what came along with the head. True if that was all, and somebody waits for the slot.
    fn read_early(&self, cx: &mut Context<'_>) -> bool {
        let mut state = self.lock();
        let Phase::Body(held, body, _) = &state.phase else { return false };
        let is_awaited = held.permit.is_awaited();
        if body.is_end_stream() {
            let phase = state.close(None);
            drop(state);
            self.complete(phase);
            return is_awaited;
        }
        drop(state);
        let read = self.read_frame(cx);
        let mut state = self.lock();
        if let Poll::Ready(Some(Ok(frame))) = read {
            state.early = Some(frame);
        }
        is_awaited && matches!(state.phase, Phase::Over(None))
    }

    fn read_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.check_lease();
        let mut state = self.lock();
        state.remember(cx.waker());
        let (body, line) = match &mut state.phase {
            Phase::Body(_, body, line) => (body, line),
            Phase::Over(Some(reason)) => {
                return Poll::Ready(Some(Err(Broken::Cut(*reason))));
            }
            Phase::Idle(..) | Phase::Head(..) | Phase::Tunnel(..) | Phase::Over(None) => {
                return Poll::Ready(None);
            }
        };
        let polled = line.poll_frame(body, cx);
        let is_end = body.is_end_stream();
        match polled {
            Poll::Pending => {
                state.is_waiting = true;
                Poll::Pending
            }
            Poll::Ready(Some(Ok(frame))) => {
                state.is_waiting = false;
                state.waiting_since = None;
                state.given.hand(&frame);
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
        let Phase::Body(held, body, line) = phase else {
            return;
        };
        drop(body);
        let stay = self.lock().stay.take();
        match &self.upload {
            // An upload that nobody waits for would keep the connection, and the client busy.
            Some(upload) if !upload.is_sent() => {
                upload.stop();
                line.open().close();
            }
            _ => line.put(),
        }
        // Last, so that whoever gets the slot finds the connection.
        drop((stay, held));
    }

    /// The exchange ends early: the upstream must see it first, then the slot is free.
    fn abort(&self, phase: Phase) {
        self.registry.remove(self.holder);
        if let Some(upload) = &self.upload {
            upload.stop();
        }
        let stay = self.lock().stay.take();
        let (held, open) = match phase {
            Phase::Idle(held, open) => (held, open),
            Phase::Body(held, _, line) | Phase::Tunnel(held, line) => (held, Some(line.open())),
            // Not polled any more, so no byte goes out between this look and the drop.
            Phase::Head(held, sent) => (held, sent.open()),
            Phase::Over(_) => return,
        };
        let Some(mut open) = open else {
            return;
        };
        open.close();
        let linger = self.upstream.linger;
        self.runtime.spawn(async move {
            open.closed().await;
            drop(stay);
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

    fn begin_body(&mut self, held: Held, response: Response<Incoming>, line: Line) -> Response<()> {
        let (head, body) = response.into_parts();
        line.answered();
        self.is_waiting = false;
        self.waiting_since = None;
        self.phase = Phase::Body(held, body, line);
        Response::from_parts(head, ())
    }

    /// Whether everything that the head promised was handed out.
    fn is_whole(&self) -> bool {
        self.early.is_none()
            && match &self.phase {
                Phase::Body(_, body, _) => body.size_hint().exact() == Some(0),
                phase => matches!(phase, Phase::Over(None)),
            }
    }

    /// Whether the client let the last piece lie for so long, or for each [`LARGE`] bytes of it.
    fn is_left_lying(&mut self, now: Instant, patience: Duration) -> bool {
        let given = &mut self.given;
        if given.seen != given.pieces {
            (given.seen, given.since) = (given.pieces, Some(now));
        }
        let share = u32::try_from(given.size / LARGE).unwrap_or(u32::MAX);
        now - *given.since.get_or_insert(now) >= patience.saturating_mul(share.saturating_add(1))
    }

    fn remember(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(known) => known.clone_from(waker),
            None => self.waker = Some(waker.clone()),
        }
    }
}

impl Phase {
    fn held(&self) -> Option<&Held> {
        match self {
            Phase::Idle(held, _)
            | Phase::Head(held, _)
            | Phase::Body(held, ..)
            | Phase::Tunnel(held, _) => Some(held),
            Phase::Over(_) => None,
        }
    }
}

impl Given {
    fn hand(&mut self, frame: &Frame<Bytes>) {
        self.pieces = self.pieces.wrapping_add(1);
        self.size = frame.data_ref().map_or(0, Bytes::len);
    }
}

impl Failure {
    fn no_endpoint() -> Self {
        Self::cut(Reason::UpstreamConnect)
    }

    fn cut(reason: Reason) -> Self {
        Self { reason, spare: None }
    }
}
