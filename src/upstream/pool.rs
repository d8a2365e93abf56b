//! The connections to one upstream that wait for a request, and a request's way to one of them.
//!
//! Each thread keeps those of its own requests, so that their bytes come in where they are waited for. One that has none left takes
//! another's: as long as there is one no new one is made, and there are never more than requests were under way at once.
//!
//! A connection comes back only after a response that was read to its end, and hyper is ready for the
//! next request a moment after that. The newest is taken first, so that those a quiet hour doesn't
//! need grow old and are closed.

use std::{
    iter,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, client::conn::TrySendError};
use thread_local::ThreadLocal;
use tokio::{
    task::coop::unconstrained,
    time::{Instant, MissedTickBehavior},
};

use super::{connect::Connector, link::Link};
use crate::{body::BoxError, upload::Outgoing};

/// Shorter than the 5 s after which common servers close an idle connection, so that we close first.
const IDLE: Duration = Duration::from_secs(4);
/// How often old connections are looked for.
const SWEEP: Duration = Duration::from_millis(500);

/// The idle connections.
#[derive(Debug)]
pub(crate) struct Pool {
    idle: ThreadLocal<Mutex<Stack>>,
    connector: Connector,
    /// How long a connection may be used for new requests.
    max_age: Duration,
}

/// Those that one thread has used, the newest on top.
#[derive(Debug, Default)]
struct Stack(Vec<Idle>);

#[derive(Debug)]
struct Idle {
    link: Link,
    since: Instant,
}

/// A request on its way.
pub(crate) struct Sent {
    stage: Stage,
    /// The request once more, where it may be sent again if its connection was an old one.
    spare: Option<Box<Request<Outgoing>>>,
}

/// Why there is no response.
#[derive(Debug)]
pub(crate) struct SendError {
    pub(crate) cause: Cause,
    /// The connection the request went to.
    pub(crate) link: Option<Link>,
    /// The request, if it may be sent once more: not a byte of it was sent, or its connection was an old one and it does no harm.
    pub(crate) spare: Option<Box<Request<Outgoing>>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Cause {
    #[error("can't connect: {0}")]
    Connect(BoxError),
    #[error("the connection broke: {0}")]
    Broken(BoxError),
}

enum Stage {
    Connecting(Connecting, Box<Request<Outgoing>>),
    /// The connection's last response ended, and hyper is about to say so.
    Almost(Link, Box<Request<Outgoing>>),
    Waiting(Link, Answer),
    Over,
}

type Connecting = Pin<Box<dyn Future<Output = Result<Link, BoxError>> + Send>>;

type Answer = Pin<
    Box<dyn Future<Output = Result<Response<Incoming>, TrySendError<Request<Outgoing>>>> + Send>,
>;

// === impl Pool ===

impl Pool {
    /// Must be called inside a runtime.
    pub(super) fn start(connector: Connector, max_age: Duration) -> Arc<Self> {
        let pool = Arc::new(Self { idle: ThreadLocal::new(), connector, max_age });
        tokio::spawn(sweep_for_ever(Arc::downgrade(&pool)));
        pool
    }

    /// Sends a request over an idle connection, or a new one.
    pub(super) fn send(&self, request: Box<Request<Outgoing>>, now: Instant) -> Sent {
        let Some(link) = self.take(now) else {
            return self.send_afresh(request);
        };
        let spare = again(&request);
        Sent { stage: over(link, request), spare }
    }

    /// Sends a request over a new connection.
    pub(super) fn send_afresh(&self, request: Box<Request<Outgoing>>) -> Sent {
        Sent { stage: self.connecting(request), spare: None }
    }

    /// Gives back a connection whose response was read to its end.
    pub(crate) fn put(&self, mut link: Link) {
        link.rest();
        let since = Instant::now();
        if !link.sender.is_closed() && since - link.born < self.max_age {
            lock(self.idle.get_or_default()).0.push(Idle { link, since });
        }
    }

    fn stage(&self, request: Box<Request<Outgoing>>, now: Instant) -> Stage {
        match self.take(now) {
            Some(link) => over(link, request),
            None => self.connecting(request),
        }
    }

    fn connecting(&self, request: Box<Request<Outgoing>>) -> Stage {
        Stage::Connecting(Box::pin(Link::connect(self.connector.clone())), request)
    }

    /// One of this thread's own, or else of another's.
    fn take(&self, now: Instant) -> Option<Link> {
        let own = self.idle.get_or_default();
        iter::once(own)
            .chain(&self.idle)
            .find_map(|stack| iter::from_fn(|| lock(stack).take(now)).find_map(Link::at_hand))
    }

    fn sweep(&self, now: Instant) {
        let is_over = |idle: &mut Idle| {
            idle.link.look();
            idle.is_old(now) || idle.link.sender.is_closed()
        };
        for stack in &self.idle {
            let over: Vec<_> = lock(stack).0.extract_if(.., is_over).collect();
            for mut idle in over {
                // Nothing is under way on it, so hyper would never close it by itself.
                if !idle.link.sender.is_ready() {
                    idle.link.abort();
                }
            }
        }
    }
}

fn lock(stack: &Mutex<Stack>) -> MutexGuard<'_, Stack> {
    stack.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn sweep_for_ever(pool: Weak<Pool>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(pool) = pool.upgrade() else {
            return;
        };
        pool.sweep(Instant::now());
    }
}

fn over(link: Link, request: Box<Request<Outgoing>>) -> Stage {
    if link.sender.is_ready() { waiting(link, request) } else { Stage::Almost(link, request) }
}

fn waiting(mut link: Link, request: Box<Request<Outgoing>>) -> Stage {
    link.prepare_for(&request);
    // Polled behind the driver and not woken by it, so that it must never say "later" for fairness' sake.
    let answer = Box::pin(unconstrained(link.sender.try_send_request(*request)));
    Stage::Waiting(link, answer)
}

/// The same request once more, where sending it twice does no harm and its body is still there.
fn again(request: &Request<Outgoing>) -> Option<Box<Request<Outgoing>>> {
    if !request.method().is_idempotent() {
        return None;
    }
    let mut again = Box::new(Request::new(request.body().again()?));
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.version_mut() = request.version();
    *again.headers_mut() = request.headers().clone();
    Some(again)
}

// === impl Stack and Idle ===

impl Stack {
    /// The newest connection that is ready, or else the newest that will be.
    fn take(&mut self, now: Instant) -> Option<Link> {
        let idle = &mut self.0;
        let at = idle
            .iter()
            .rposition(|idle| idle.link.sender.is_ready())
            .or_else(|| idle.iter().rposition(|idle| !idle.link.sender.is_closed()))?;
        // What lies below is older still. All of it is left to the sweep.
        (!idle[at].is_old(now)).then(|| idle.remove(at).link)
    }
}

impl Idle {
    fn is_old(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= IDLE
    }
}

// === impl Sent ===

impl Sent {
    /// The connection the request went to; none while not a byte of it was sent.
    pub(crate) fn into_link(self) -> Option<Link> {
        match self.stage {
            Stage::Waiting(link, _) => Some(link),
            Stage::Connecting(..) | Stage::Almost(..) | Stage::Over => None,
        }
    }

    /// Waits for the head of the response. The connection comes with it, to be given back behind it.
    pub(crate) fn poll(
        &mut self,
        pool: &Pool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Response<Incoming>, Link), SendError>> {
        loop {
            match &mut self.stage {
                Stage::Connecting(connecting, _) => {
                    let connected = ready!(connecting.as_mut().poll(cx));
                    let Stage::Connecting(_, request) = self.leave() else { unreachable!() };
                    match connected {
                        Ok(link) => self.stage = waiting(link, request),
                        Err(error) => {
                            let (cause, spare) = (Cause::Connect(error), Some(request));
                            return Poll::Ready(Err(SendError { cause, link: None, spare }));
                        }
                    }
                }
                Stage::Almost(link, _) => {
                    // If it is closed instead, the request comes back like from any closed one.
                    link.drive(cx);
                    let _ =
                        ready!(link.sender.poll_ready(&mut Context::from_waker(link.waker(cx))));
                    let Stage::Almost(link, request) = self.leave() else { unreachable!() };
                    self.stage = waiting(link, request);
                }
                Stage::Waiting(link, answer) => {
                    link.drive(cx);
                    let mut cx = Context::from_waker(link.waker(cx));
                    let answer = ready!(answer.as_mut().poll(&mut cx));
                    let Stage::Waiting(link, _) = self.leave() else { unreachable!() };
                    let mut error = match answer {
                        Ok(response) => return Poll::Ready(Ok((response, link))),
                        Err(error) => error,
                    };
                    match error.take_message() {
                        // Closed before the request came to it: as if it had never been taken.
                        Some(request) if link.conn.is_reused() => {
                            self.stage = pool.stage(Box::new(request), Instant::now());
                        }
                        _ => return Poll::Ready(Err(self.broken(link, error.into_error()))),
                    }
                }
                Stage::Over => unreachable!("polled after the end"),
            }
        }
    }

    fn leave(&mut self) -> Stage {
        std::mem::replace(&mut self.stage, Stage::Over)
    }

    fn broken(&mut self, link: Link, error: hyper::Error) -> SendError {
        let spare = self.spare.take().filter(|_| link.conn.was_stale());
        SendError { cause: Cause::Broken(error.into()), link: Some(link), spare }
    }
}

impl std::fmt::Debug for Sent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sent").finish_non_exhaustive()
    }
}
