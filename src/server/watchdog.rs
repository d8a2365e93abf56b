//! Every timeout of a connection, kept by one coarse timer.
//!
//! hyper polls neither a body nor the socket while the client does nothing, so the timeouts live
//! beside it. The timer runs slowly while there is nothing to watch and ticks while there is: a
//! head begun, bytes pending for the client, a request body awaited, a rest to be read. A request
//! that needs none of these touches no timer. Timeouts are therefore exceeded by up to a tick.

use std::{
    pin::Pin,
    sync::atomic::Ordering::*,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{self, Instant, Sleep};

use super::client::{ClientConn, lock};
use crate::config;

/// What must move within the stall timeout.
const PROGRESS: u64 = 1024;
/// How long the rest of an unwanted body is read once the response ended.
pub(super) const REST_TIME: Duration = Duration::from_secs(2);
/// How long a connection must have been idle for hyper's buffers to be given up.
const BRIEFLY: Duration = Duration::from_secs(2);
/// How long a closing connection without requests may stay open.
pub(super) const CLOSING_TIME: Duration = Duration::from_secs(1);

/// The durations the watchdog keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) header: Duration,
    pub(super) keepalive: Duration,
    stall: Duration,
    tick: Duration,
    slow: Duration,
    brief: Duration,
}

/// Progress since some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) since: Instant,
    moved: u64,
}

/// What the watchdog wants done with the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Close it when its requests are done.
    Close,
    /// Take it from hyper until the client speaks again: it has been between two requests since then.
    Rest(Window),
    /// Drop it, for this reason.
    Cut(&'static str),
}

pin_project! {
    /// Watches one connection.
    pub(super) struct Watchdog {
        #[pin]
        sleep: Sleep,
        ticking: bool,
        state: State,
    }
}

struct State {
    limits: Limits,
    head: Option<Window>,
    write: Option<Window>,
    rest_since: Option<Instant>,
    idle: Window,
    closing: bool,
    closing_since: Option<Instant>,
}

// === impl Limits ===

impl Limits {
    pub(super) fn new(settings: &config::Server) -> Self {
        let quarter = settings.header_timeout.min(settings.stall_timeout) / 4;
        Self {
            header: settings.header_timeout,
            keepalive: settings.keepalive_timeout,
            stall: settings.stall_timeout,
            tick: quarter.clamp(Duration::from_millis(1), Duration::from_secs(1)),
            slow: (settings.keepalive_timeout / 4).max(Duration::from_millis(1)),
            brief: (settings.keepalive_timeout / 4).clamp(Duration::from_millis(1), BRIEFLY),
        }
    }
}

// === impl Window ===

impl Window {
    /// From now on, and nothing has moved yet.
    pub(super) fn begin() -> Self {
        Self { since: Instant::now(), moved: 0 }
    }
}

// === impl Watchdog ===

impl Watchdog {
    /// `idle` since the last request, if there was one before.
    pub(super) fn new(limits: Limits, first_byte: Instant, idle: Window) -> Self {
        let since = |since| Window { since, moved: 0 };
        Self {
            sleep: time::sleep(limits.brief),
            ticking: false,
            state: State {
                limits,
                head: Some(since(first_byte)),
                write: None,
                rest_since: None,
                idle,
                closing: false,
                closing_since: None,
            },
        }
    }

    /// Tells the watchdog that the connection closes when its requests are done.
    pub(super) fn closing(self: Pin<&mut Self>) {
        self.project().state.closing = true;
    }

    pub(super) fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        on: &ClientConn,
    ) -> Poll<Verdict> {
        let mut this = self.project();
        if !*this.ticking && this.state.has_work(on) {
            *this.ticking = true;
            let now = Instant::now();
            this.state.check(now, on);
            this.sleep.as_mut().reset(now + this.state.limits.tick);
        }
        while this.sleep.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let verdict = this.state.check(now, on);
            *this.ticking = this.state.has_work(on);
            let limits = &this.state.limits;
            let pause = match *this.ticking {
                true => limits.tick,
                // Who waits long is not looked at often.
                false if on.in_flight() > 0 => limits.slow,
                false => limits.brief,
            };
            this.sleep.as_mut().reset(now + pause);
            if let Some(verdict) = verdict {
                return Poll::Ready(verdict);
            }
        }
        Poll::Pending
    }
}

// === impl State ===

impl State {
    fn has_work(&self, on: &ClientConn) -> bool {
        self.closing
            || on.traffic.in_head.load(Relaxed)
            || on.traffic.write_blocked.load(Relaxed)
            || on.bodies.open.load(Acquire) > 0
            || on.has_rest()
    }

    fn check(&mut self, now: Instant, on: &ClientConn) -> Option<Verdict> {
        self.check_bodies(now, on);
        self.check_rest(now, on);
        self.check_head(now, on)
            .or_else(|| self.check_write(now, on))
            .or_else(|| self.check_idle(now, on))
            .or_else(|| self.check_closing(now, on))
    }

    fn check_head(&mut self, now: Instant, on: &ClientConn) -> Option<Verdict> {
        // A head may begin while a request is answered; its time begins when it could be read.
        if !on.traffic.in_head.load(Relaxed) || on.in_flight() > 0 {
            self.head = None;
            return None;
        }
        let requests = on.requests();
        match self.head {
            Some(head) if head.moved == requests => (now - head.since >= self.limits.header)
                .then_some(Verdict::Cut("the head of a request did not come in time")),
            _ => {
                self.head = Some(Window { since: now, moved: requests });
                None
            }
        }
    }

    fn check_write(&mut self, now: Instant, on: &ClientConn) -> Option<Verdict> {
        let pending = on.traffic.write_blocked.load(Relaxed);
        stalled(&mut self.write, pending, on.bytes_written(), now, self.limits.stall)
            .then_some(Verdict::Cut("the client stopped reading"))
    }

    fn check_bodies(&mut self, now: Instant, on: &ClientConn) {
        lock(&on.bodies.list).retain_mut(|(body, window)| {
            let waiting = body.waiting.load(Relaxed);
            let arrived = body.arrived.load(Relaxed);
            if stalled(window, waiting, arrived, now, self.limits.stall) {
                body.stall();
            }
            body.is_open()
        });
    }

    fn check_rest(&mut self, now: Instant, on: &ClientConn) {
        if !on.has_rest() || on.in_flight() > 0 {
            self.rest_since = None;
            return;
        }
        let since = *self.rest_since.get_or_insert(now);
        if now - since >= REST_TIME {
            on.drop_rest();
        }
    }

    fn check_idle(&mut self, now: Instant, on: &ClientConn) -> Option<Verdict> {
        let requests = on.requests();
        let busy = on.in_flight() > 0
            || on.traffic.write_blocked.load(Relaxed)
            || on.traffic.in_head.load(Relaxed)
            || on.has_rest();
        if busy || requests != self.idle.moved {
            self.idle = Window { since: now, moved: requests };
        }
        let idle = now - self.idle.since;
        if self.closing || idle < self.limits.brief {
            return None;
        }
        if on.traffic.is_between.load(Relaxed) && on.bodies.open.load(Acquire) == 0 {
            return Some(Verdict::Rest(self.idle));
        }
        (idle >= self.limits.keepalive).then_some(Verdict::Close)
    }

    /// An HTTP/2 client may leave the GOAWAY unanswered.
    fn check_closing(&mut self, now: Instant, on: &ClientConn) -> Option<Verdict> {
        if !self.closing || on.in_flight() > 0 || on.has_rest() {
            self.closing_since = None;
            return None;
        }
        let since = *self.closing_since.get_or_insert(now);
        let blocked = on.traffic.write_blocked.load(Relaxed);
        (!blocked && now - since >= CLOSING_TIME).then_some(Verdict::Cut("closed when idle"))
    }
}

/// Whether less than [`PROGRESS`] moved in a window as long as `limit`, all through which `pending`
/// was seen.
fn stalled(
    window: &mut Option<Window>,
    pending: bool,
    moved: u64,
    now: Instant,
    limit: Duration,
) -> bool {
    match window {
        _ if !pending => *window = None,
        Some(open) if moved - open.moved < PROGRESS => return now - open.since >= limit,
        _ => *window = Some(Window { since: now, moved }),
    }
    false
}
