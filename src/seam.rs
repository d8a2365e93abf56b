//! Stands in for `server` until it lands: the types by which the listener and the proxy meet.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

/// The error of a body, whatever made it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a request body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The client sent too little in too long a time.
    #[error("the client stalled")]
    Stalled,
    /// The client broke the framing or left.
    #[error(transparent)]
    Client(hyper::Error),
}

/// A request body as the client sends it.
#[derive(Debug)]
pub struct RequestBody(Incoming);

impl RequestBody {
    /// Wraps hyper's body.
    pub fn new(incoming: Incoming) -> Self {
        Self(incoming)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut self.0)
            .poll_frame(cx)
            .map_err(BodyError::Client)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// One client connection, shared by its requests.
#[derive(Debug)]
pub struct ClientConn {
    /// The other end of the socket.
    pub peer: SocketAddr,
}

/// What answers requests.
pub trait Handler {
    /// The body of the answers.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static;

    /// Answers one request.
    fn handle(
        &self,
        request: Request<RequestBody>,
        conn: &Arc<ClientConn>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// Marks a response that the proxy made itself: its request body may be unread.
#[derive(Clone, Copy, Debug)]
pub struct Refused;
