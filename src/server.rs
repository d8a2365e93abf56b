//! The listener for clients: HTTP/1.0, HTTP/1.1 and HTTP/2 with prior knowledge on one port.
//!
//! A connection is one task. It polls hyper, and beside it what hyper does not do: it notices that
//! the client left whatever bytes lie unread (`hangup`), keeps the timeouts (`watchdog`), and reads
//! on a little when a request was answered before its body was read (`client`). A client that
//! closes its sending side counts as gone, as it does for nginx.

use std::{future::Future, sync::Arc};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{Response, StatusCode, request::Parts};
use http_body::Body;
use tokio::{net::TcpListener, sync::watch};

use crate::config;

mod accept;
mod announced;
mod body;
mod client;
mod connection;
mod crowd;
mod detect;
mod framing;
mod front;
mod gather;
mod hangup;
mod io;
mod tls;
mod turned_away;
mod watchdog;
mod workers;

#[cfg(test)]
mod tests;

pub use body::{BodyError, RequestBody};
pub use client::ClientConn;
pub use turned_away::TurnedAway;
pub use workers::Workers;

/// Answers requests.
///
/// The future, and later the response body, are dropped at once when the client leaves.
pub trait Handler: Send + Sync + 'static {
    /// What responses carry.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>
        + Send
        + 'static;

    /// Answers one request, whose head is in a box since it passes through many hands.
    fn handle(
        &self,
        head: Box<Parts>,
        body: RequestBody,
        conn: &Arc<ClientConn>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// The answer to a head that can't be read: of this status, which is 400, 414 or 431.
    fn unreadable(&self, status: StatusCode, conn: &ClientConn) -> Response<Bytes>;

    /// Hears of a connection that isn't served.
    fn turned_away(&self, why: TurnedAway);
}

/// Marks a response, as an extension, as final whatever the request body still holds.
///
/// If the body was not read to its end, an HTTP/1 connection closes after such a response. A
/// response whose handler dropped the request body unread is treated so without the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Extension of a request that says in two ways how long its body is, or in a way that can't be read. hyper makes an innocent
/// one of it; its connection is closed behind the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoLengths;

/// How the end of [`serve`] went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were still busy at the drain timeout.
    pub cut: usize,
}

/// Whoever is in charge when a request comes answers it.
impl<H: Handler> Handler for ArcSwap<H> {
    type Body = H::Body;

    async fn handle(
        &self,
        head: Box<Parts>,
        body: RequestBody,
        conn: &Arc<ClientConn>,
    ) -> Response<Self::Body> {
        self.load_full().handle(head, body, conn).await
    }

    fn unreadable(&self, status: StatusCode, conn: &ClientConn) -> Response<Bytes> {
        self.load().unreadable(status, conn)
    }

    fn turned_away(&self, why: TurnedAway) {
        self.load().turned_away(why);
    }
}

/// Serves clients until `stop`, then closes the listener, lets running requests finish for at most
/// the drain timeout and cuts what is left. New settings are for new connections.
pub async fn serve<H: Handler>(
    listener: TcpListener,
    handler: Arc<H>,
    settings: watch::Receiver<config::Server>,
    workers: Arc<Workers>,
    stop: impl Future<Output = ()>,
) -> Drained {
    accept::Acceptor::new(listener, handler, settings, workers).run(stop).await
}
