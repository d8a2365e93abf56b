//! One connection that speaks HTTP/1.1, and who drives it.
//!
//! A connection is driven by the exchange that it serves, in the exchange's own task: what comes in from the upstream wakes
//! the one task that writes it on, and nobody else. Two kinds of request need it driven while nobody polls their exchange, and
//! get it a task of its own: a streamed upload, which goes on while the client doesn't read, and an upgrade.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    thread::{self, ThreadId},
};

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
    /// None where a task drives it, and once it has ended.
    driver: Option<Driver>,
    has_task: bool,
    /// Where its bytes come in.
    thread: ThreadId,
}

struct Driver(Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>);

impl Link {
    pub(super) async fn connect(connector: Connector) -> Result<Self, BoxError> {
        let (io, conn) = connector.connect().await?;
        let (sender, driver) = http1::handshake(io).await?;
        let driver = Some(Driver(Box::pin(driver.with_upgrades())));
        let (born, thread) = (Instant::now(), thread::current().id());
        Ok(Self { sender, conn, born, driver, has_task: false, thread })
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

    /// Has its bytes come in on this thread, unless a task of another drives it.
    pub(super) fn move_here(&mut self) {
        let here = thread::current().id();
        if self.thread != here && !self.has_task {
            self.thread = here;
            self.conn.move_to_next();
        }
    }

    /// The same for nobody, while the connection is idle.
    pub(super) fn look(&mut self) {
        self.drive(&mut Context::from_waker(Waker::noop()));
    }

    /// Whom to wake by what the connection's driver brings about: nobody, where that is the caller, who looks behind it anyway.
    pub(super) fn waker<'a>(&self, cx: &Context<'a>) -> &'a Waker {
        if self.has_task { cx.waker() } else { Waker::noop() }
    }

    /// Gives it a task of its own if the request needs one.
    pub(super) fn prepare_for(&mut self, request: &Request<Outgoing>) {
        let goes_on_alone = matches!(request.body(), Outgoing::Stream(..));
        if (goes_on_alone || request.headers().contains_key(UPGRADE))
            && let Some(Driver(driver)) = self.driver.take()
        {
            self.has_task = true;
            tokio::spawn(async move { log(driver.await) });
        }
    }

    /// Closes it by reset, at once or as soon as its task runs.
    pub(super) fn abort(&mut self) {
        self.conn.abort();
        self.driver = None;
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
