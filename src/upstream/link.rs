//! One connection that speaks HTTP/1.1, and who drives it.
//!
//! A connection is driven by the exchange that it serves, in the exchange's own task: what comes in from the upstream wakes
//! the one task that writes it on, and nobody else. Two kinds of request need it driven while nobody polls their exchange, and
//! get it a task of its own: a streamed upload, which goes on while the client doesn't read, and an upgrade.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    thread::{self, ThreadId},
};

use futures_util::task::AtomicWaker;
use http::{Request, header::UPGRADE};
use hyper::client::conn::http1::{self, SendRequest};
use tokio::time::Instant;

use super::connect::{Connector, UpstreamConn};
use crate::{body::BoxError, upload::Outgoing};

/// A connection, for as long as nobody else has it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) sender: SendRequest<Outgoing>,
    pub(super) conn: Arc<UpstreamConn>,
    pub(super) born: Instant,
    /// None where a task has it, and once it has ended.
    driver: Option<Driver>,
    task: Option<Arc<Lent>>,
    /// Where its bytes come in.
    thread: ThreadId,
}

struct Driver(Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>);

/// What a task has of a connection until it is called back, or the connection has ended.
#[derive(Debug)]
struct Lent {
    driver: Mutex<Option<Driver>>,
    waker: AtomicWaker,
}

impl Link {
    pub(super) async fn connect(connector: Connector) -> Result<Self, BoxError> {
        let (io, conn) = connector.connect().await?;
        let (sender, driver) = http1::handshake(io).await?;
        let driver = Some(Driver(Box::pin(driver.with_upgrades())));
        let (born, thread) = (Instant::now(), thread::current().id());
        Ok(Self { sender, conn, born, driver, task: None, thread })
    }

    /// Reads and writes what can be. Whatever is awaited wakes the caller.
    pub(super) fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(Driver(driver)) = &mut self.driver
            && let Poll::Ready(ended) = driver.as_mut().poll(cx)
        {
            self.driver = None;
            log(ended);
        }
    }

    /// Itself, with its bytes coming in on this thread; none if it turns out to have ended.
    pub(super) fn at_hand(mut self) -> Option<Self> {
        let here = thread::current().id();
        if self.thread != here {
            self.recall();
            self.thread = here;
            self.conn.move_to_next();
            // Before the next request: what has come already is no answer to that.
            self.look();
        }
        (!self.sender.is_closed()).then_some(self)
    }

    /// The same for nobody, while the connection is idle.
    pub(super) fn look(&mut self) {
        self.drive(&mut Context::from_waker(Waker::noop()));
    }

    /// Whom to wake by what the connection's driver brings about: nobody, where that is the caller, who looks behind it anyway.
    pub(super) fn waker<'a>(&self, cx: &Context<'a>) -> &'a Waker {
        if self.task.is_some() { cx.waker() } else { Waker::noop() }
    }

    /// Gives it a task of its own if the request needs one.
    pub(super) fn prepare_for(&mut self, request: &Request<Outgoing>) {
        let goes_on_alone = matches!(request.body(), Outgoing::Stream(..));
        if goes_on_alone || request.headers().contains_key(UPGRADE) {
            self.lend();
        }
    }

    /// The answer was read to its end. Its task ends as well, unless something of the request is left to be written.
    pub(super) fn rest(&mut self) {
        let had_task = self.task.is_some();
        self.recall();
        // So that hyper sees the end as well.
        self.look();
        if had_task && !self.sender.is_ready() {
            self.lend();
        }
    }

    fn lend(&mut self) {
        if let Some(driver) = self.driver.take() {
            let lent = Arc::new(Lent { driver: Some(driver).into(), waker: AtomicWaker::new() });
            self.task = Some(Arc::clone(&lent));
            tokio::spawn(poll_fn(move |cx| lent.poll(cx)));
        }
    }

    fn recall(&mut self) {
        if let Some(lent) = self.task.take() {
            self.driver = lent.lock().take();
            lent.waker.wake();
        }
    }

    /// Closes it by reset, at once or as soon as its task runs.
    pub(super) fn abort(&mut self) {
        self.conn.abort();
        self.driver = None;
    }
}

impl Lent {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        let mut driver = self.lock();
        let Some(Driver(future)) = &mut *driver else { return Poll::Ready(()) };
        let ended = ready!(future.as_mut().poll(cx));
        *driver = None;
        log(ended);
        Poll::Ready(())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn log(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "upstream connection ended");
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
