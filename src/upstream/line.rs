//! A request at its endpoint: on its way there, then what its answer comes over, then what ends it. Over HTTP/1.1 that is a
//! connection, over HTTP/2 a stream.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::{
    endpoints::{Busy, Way},
    h2,
    link::Link,
    pool::{self, Cause, SendError},
};
use crate::{body::BoxError, upload::Outgoing};

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Sent {
    busy: Busy,
    on: On<pool::Sent, h2::Sent>,
}

/// What an answer comes over.
#[derive(Debug)]
pub(crate) struct Line {
    busy: Busy,
    on: On<Link, h2::Stream>,
}

/// What must end before the upstream knows that nobody waits for it.
#[derive(Debug)]
pub(crate) struct Open {
    busy: Busy,
    on: On<Link, h2::Stream>,
}

/// An answer's body.
#[derive(Debug)]
pub(crate) struct Incoming(On<hyper::body::Incoming, h2::Received>);

/// The same for both protocols.
#[derive(Debug)]
pub(crate) enum On<A, B> {
    H1(A),
    H2(B),
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
    pub(super) request: Box<Request<Outgoing>>,
}

/// What came of a request.
pub(crate) type Answer = Result<(Response<Incoming>, On<Link, h2::Stream>), Failed>;

/// Why there is no response, what the request went to, and the request, if it may be sent once more.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(super) cause: Cause,
    pub(super) on: Option<On<Link, h2::Stream>>,
    pub(super) spare: Option<Box<Request<Outgoing>>>,
}

// === impl Sent ===

impl Sent {
    /// Over any connection to the endpoint.
    pub(super) fn new(busy: Busy, request: Box<Request<Outgoing>>, now: Instant) -> Self {
        let on = match &busy.way {
            Way::H1(pool) => On::H1(pool.send(request, now)),
            Way::H2(trunks) => On::H2(h2::Sent::new(trunks, request, false)),
        };
        Self { busy, on }
    }

    /// Over a new connection, or at least another.
    pub(super) fn afresh(busy: Busy, request: Box<Request<Outgoing>>) -> Self {
        let on = match &busy.way {
            Way::H1(pool) => On::H1(pool.send_afresh(request)),
            Way::H2(trunks) => On::H2(h2::Sent::new(trunks, request, true)),
        };
        Self { busy, on }
    }

    /// Asks how the endpoint is. It isn't well if it takes no new connection, where requests need one.
    pub(super) fn probe(busy: Busy, request: Box<Request<Outgoing>>) -> Self {
        match &busy.way {
            Way::H1(_) => Self::afresh(busy, request),
            Way::H2(_) => Self::new(busy, request, Instant::now()),
        }
    }

    /// Waits for the head of the response. What it comes over comes with it.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Answer> {
        Poll::Ready(match &mut self.on {
            On::H1(sent) => match ready!(sent.poll(self.busy.pool(), cx)) {
                Ok((response, link)) => {
                    Ok((response.map(|body| Incoming(On::H1(body))), On::H1(link)))
                }
                Err(SendError { cause, link, spare }) => {
                    Err(Failed { cause, on: link.map(On::H1), spare })
                }
            },
            On::H2(sent) => match ready!(sent.poll(cx)) {
                Ok((response, stream)) => {
                    Ok((response.map(|body| Incoming(On::H2(body))), On::H2(stream)))
                }
                Err(h2::Failed { cause, stream, spare }) => {
                    Err(Failed { cause, on: stream.map(On::H2), spare })
                }
            },
        })
    }

    /// What ends it; nothing need while not a byte of it was sent.
    pub(crate) fn open(self) -> Option<Open> {
        let on = match self.on {
            On::H1(sent) => On::H1(sent.into_link()?),
            On::H2(sent) => On::H2(sent.into_stream()?),
        };
        Some(Open::new(self.busy, on))
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
    pub(super) fn new(busy: Busy, on: On<Link, h2::Stream>) -> Self {
        Self { busy, on }
    }

    /// Waits for the next piece of an answer's body.
    pub(crate) fn poll_frame(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let On::H1(link) = &mut self.on else { return Pin::new(body).poll_frame(cx) };
        let mut quiet = Context::from_waker(link.waker(cx));
        let polled = Pin::new(&mut *body).poll_frame(&mut quiet);
        if polled.is_ready() {
            return polled;
        }
        link.drive(cx);
        Pin::new(body).poll_frame(&mut quiet)
    }

    /// The endpoint, as configured.
    pub(crate) fn endpoint(&self) -> &str {
        self.busy.names().1
    }

    /// Notes that a response began.
    pub(crate) fn answered(&self) {
        match &self.on {
            On::H1(link) => link.conn.answered(),
            On::H2(stream) => stream.answered(),
        }
    }

    /// The answer was read to its end.
    pub(crate) fn put(self) {
        match self.on {
            On::H1(link) => self.busy.pool().put(link),
            On::H2(stream) => drop(stream),
        }
    }

    pub(crate) fn open(self) -> Open {
        Open::new(self.busy, self.on)
    }
}

// === impl Open ===

impl Open {
    pub(super) fn new(busy: Busy, on: On<Link, h2::Stream>) -> Self {
        Self { busy, on }
    }

    /// The endpoint, as configured.
    pub(crate) fn endpoint(&self) -> &str {
        self.busy.names().1
    }

    /// Has the upstream told, as soon as may be.
    pub(crate) fn close(&mut self) {
        match &mut self.on {
            On::H1(link) => link.abort(),
            On::H2(stream) => stream.stop(),
        }
    }

    /// Waits until it was.
    pub(crate) async fn closed(self) {
        match self.on {
            On::H1(link) => link.conn.closed().await,
            On::H2(stream) => stream.reset().await,
        }
    }
}

// === impl Incoming ===

impl Body for Incoming {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            On::H1(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            On::H2(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            On::H1(body) => body.is_end_stream(),
            On::H2(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            On::H1(body) => body.size_hint(),
            On::H2(body) => body.size_hint(),
        }
    }
}
