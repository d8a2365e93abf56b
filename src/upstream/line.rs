//! A request at its endpoint: on its way there, then the connection its answer comes over, then what ends it.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::{
    UpstreamConn,
    endpoints::Busy,
    pool::{self, Cause, Link, SendError},
};
use crate::upload::Outgoing;

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Sent {
    busy: Busy,
    way: pool::Sent,
}

/// What an answer comes over.
#[derive(Debug)]
pub(crate) struct Line {
    busy: Busy,
    link: Link,
}

/// What must be closed before the upstream knows that nobody waits for it.
#[derive(Debug)]
pub(crate) struct Open {
    _busy: Busy,
    conn: Arc<UpstreamConn>,
}

/// Why there is no response.
#[derive(Debug)]
pub(crate) struct Unanswered {
    pub(crate) cause: Cause,
    /// What the request went to.
    pub(crate) open: Option<Open>,
    /// The request and its next way, if it may be sent once more.
    pub(crate) spare: Option<Box<Spare>>,
}

/// A request that may be sent once more.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(super) busy: Busy,
    pub(super) request: Request<Outgoing>,
}

// === impl Sent ===

impl Sent {
    /// Over any connection to the endpoint.
    pub(super) fn new(busy: Busy, request: Request<Outgoing>, now: Instant) -> Self {
        let way = busy.pool.send(request, now);
        Self { busy, way }
    }

    /// Over a new connection.
    pub(super) fn afresh(busy: Busy, request: Request<Outgoing>) -> Self {
        let way = busy.pool.send_afresh(request);
        Self { busy, way }
    }

    /// Waits for the head of the response. What it comes over comes with it.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Response<Incoming>, Link), SendError>> {
        self.way.poll(&self.busy.pool, cx)
    }

    /// What ends it; nothing need while not a byte of it was sent.
    pub(crate) fn open(self) -> Option<Open> {
        Some(Open { conn: self.way.connection()?, _busy: self.busy })
    }

    pub(super) fn at(&self) -> &Busy {
        &self.busy
    }

    pub(super) fn busy(self) -> Busy {
        self.busy
    }
}

// === impl Line ===

impl Line {
    pub(super) fn new(busy: Busy, link: Link) -> Self {
        Self { busy, link }
    }

    /// The answer was read to its end.
    pub(crate) fn put(self) {
        self.busy.pool.put(self.link);
    }

    /// Notes that a response began.
    pub(crate) fn answered(&self) {
        self.link.conn.answered();
    }

    pub(crate) fn open(self) -> Open {
        Open { conn: self.link.conn, _busy: self.busy }
    }
}

// === impl Open ===

impl Open {
    pub(super) fn new(busy: Busy, conn: Arc<UpstreamConn>) -> Self {
        Self { conn, _busy: busy }
    }

    /// Has the upstream told, as soon as may be.
    pub(crate) fn close(&self) {
        self.conn.abort();
    }

    /// Waits until it was.
    pub(crate) async fn closed(self) {
        self.conn.closed().await;
    }
}
