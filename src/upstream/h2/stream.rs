//! One request's stream: on its way to a connection, then open, then over.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, SendStream, client::ResponseFuture};
use http::{
    Request, Response, Uri, Version,
    header::{CONNECTION, HOST, TRANSFER_ENCODING, UPGRADE},
    request::Parts,
    uri::{Authority, Scheme},
};
use http_body::Body;
use tokio::task::AbortHandle;

use super::{Received, Seat, Trunks, frames::Streams};
use crate::{body::BoxError, upload::Outgoing, upstream::pool::Cause};

/// How long a reset may take to get through. Then the connection is closed instead.
const PATIENCE: Duration = Duration::from_secs(2);

/// A request on its way.
pub(crate) struct Sent {
    stage: Stage,
    trunks: Arc<Trunks>,
}

enum Stage {
    Seating(Seating, Box<Request<Outgoing>>),
    /// With the request once more, where its body is still there.
    Waiting(Stream, ResponseFuture, Option<Box<Request<Outgoing>>>),
    Over,
}

type Seating = Pin<Box<dyn Future<Output = Result<Seat, BoxError>> + Send>>;

/// An open stream.
#[derive(Debug)]
pub(crate) struct Stream {
    seat: Seat,
    id: u32,
    /// Who sends the body.
    upload: Option<AbortHandle>,
    /// Kept until the stream was opened: before, nobody could be told of its end.
    awaited: Option<ResponseFuture>,
}

/// Why there is no response.
pub(crate) struct Failed {
    pub(crate) cause: Cause,
    /// None if not a byte was sent.
    pub(crate) stream: Option<Stream>,
    /// The request, if it may be sent once more.
    pub(crate) spare: Option<Box<Request<Outgoing>>>,
}

// === impl Sent ===

impl Sent {
    /// `afresh` takes another connection than first comes to hand.
    pub(crate) fn new(trunks: &Arc<Trunks>, request: Box<Request<Outgoing>>, afresh: bool) -> Self {
        let seating = seating(trunks, afresh);
        let stage = Stage::Seating(seating, request);
        Self { stage, trunks: Arc::clone(trunks) }
    }

    /// Waits for the head of the response.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Response<Received>, Stream), Failed>> {
        loop {
            match &mut self.stage {
                Stage::Seating(seating, _) => {
                    let seat = ready!(seating.as_mut().poll(cx));
                    let Stage::Seating(_, request) = self.leave() else { unreachable!() };
                    match seat {
                        Ok(seat) => self.stage = self.open(seat, *request)?,
                        Err(error) => {
                            return Poll::Ready(Err(Failed::unsent(error, Some(request))));
                        }
                    }
                }
                Stage::Waiting(_, response, _) => {
                    let answer = ready!(Pin::new(response).poll(cx));
                    let Stage::Waiting(stream, _, spare) = self.leave() else { unreachable!() };
                    return Poll::Ready(match answer {
                        Ok(response) => {
                            let (head, body) = response.into_parts();
                            let body = Received::new(body, &head.headers);
                            Ok((Response::from_parts(head, body), stream))
                        }
                        Err(error) => Err(Failed::broken(error, stream, spare)),
                    });
                }
                Stage::Over => unreachable!("polled after the end"),
            }
        }
    }

    /// Opens a stream, or looks for another connection if this one is over.
    fn open(&self, seat: Seat, request: Request<Outgoing>) -> Result<Stage, Failed> {
        let (parts, body) = request.into_parts();
        let head = match head(parts.clone(), self.trunks.connector.endpoint()) {
            Ok(head) => head,
            Err(error) => return Err(Failed::unsent(error, None)),
        };
        let is_whole = body.is_end_stream();
        match seat.0.sender.clone().send_request(head, is_whole) {
            Ok((response, sending)) => {
                let spare = body.again().map(|again| Box::new(Request::from_parts(parts, again)));
                let id = sending.stream_id().as_u32();
                let streams = Arc::clone(&seat.0.streams);
                let upload = (!is_whole)
                    .then(|| tokio::spawn(upload(body, sending, streams)).abort_handle());
                let stream = Stream { seat, id, upload, awaited: None };
                Ok(Stage::Waiting(stream, response, spare))
            }
            Err(_) => {
                seat.0.is_doubted.store(true, Ordering::Relaxed);
                let request = Box::new(Request::from_parts(parts, body));
                Ok(Stage::Seating(seating(&self.trunks, false), request))
            }
        }
    }

    /// What was opened; nothing while not a byte was sent.
    pub(crate) fn into_stream(self) -> Option<Stream> {
        match self.stage {
            Stage::Waiting(mut stream, response, _) => {
                stream.awaited = Some(response);
                Some(stream)
            }
            Stage::Seating(..) | Stage::Over => None,
        }
    }

    fn leave(&mut self) -> Stage {
        std::mem::replace(&mut self.stage, Stage::Over)
    }
}

impl std::fmt::Debug for Sent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sent").finish_non_exhaustive()
    }
}

fn seating(trunks: &Arc<Trunks>, afresh: bool) -> Seating {
    let trunks = Arc::clone(trunks);
    Box::pin(async move { trunks.seat(afresh).await })
}

/// The head as HTTP/2 has it: the host in the target, and no field of a connection.
fn head(mut parts: Parts, endpoint: &Uri) -> Result<Request<()>, BoxError> {
    for name in [CONNECTION, TRANSFER_ENCODING, UPGRADE] {
        parts.headers.remove(name);
    }
    let authority = match parts.headers.remove(HOST) {
        Some(host) => Authority::try_from(host.as_bytes())?,
        None => endpoint.authority().cloned().ok_or("an endpoint has an authority")?,
    };
    let mut target = parts.uri.into_parts();
    target.authority = Some(authority);
    target.scheme = Some(endpoint.scheme().cloned().unwrap_or(Scheme::HTTP));
    parts.uri = Uri::from_parts(target)?;
    parts.version = Version::HTTP_2;
    Ok(Request::from_parts(parts, ()))
}

/// Sends a body as fast as the peer takes it.
async fn upload(mut body: Outgoing, mut sending: SendStream<Bytes>, streams: Arc<Streams>) {
    if let Err(reason) = pump(&mut body, &mut sending).await {
        // The peer would take the reset of a stream that it doesn't know for an error.
        streams.opened(sending.stream_id().as_u32()).await;
        sending.send_reset(reason);
    }
}

async fn pump(body: &mut Outgoing, sending: &mut SendStream<Bytes>) -> Result<(), Reason> {
    loop {
        let next = poll_fn(|cx| {
            if sending.poll_reset(cx).is_ready() {
                return Poll::Ready(Err(Reason::CANCEL));
            }
            Pin::new(&mut *body).poll_frame(cx).map(Ok)
        });
        let frame = match next.await? {
            Some(frame) => frame.map_err(|_| Reason::CANCEL)?,
            None => return end(sending.send_data(Bytes::new(), true)),
        };
        match frame.into_data() {
            Ok(data) => {
                let is_last = body.is_end_stream();
                if !data.is_empty() {
                    until_taken(sending).await?;
                }
                end(sending.send_data(data, is_last))?;
                if is_last {
                    return Ok(());
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    return end(sending.send_trailers(trailers));
                }
            }
        }
    }
}

/// Waits until the peer's window has any room. The piece is there already, so room that is kept for it can't be kept in vain.
async fn until_taken(sending: &mut SendStream<Bytes>) -> Result<(), Reason> {
    sending.reserve_capacity(1);
    poll_fn(|cx| {
        loop {
            if sending.capacity() > 0 {
                return Poll::Ready(Ok(()));
            }
            if sending.poll_reset(cx).is_ready() {
                return Poll::Ready(Err(Reason::CANCEL));
            }
            match ready!(sending.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(Err(Reason::CANCEL)),
            }
        }
    })
    .await
}

fn end(sent: Result<(), h2::Error>) -> Result<(), Reason> {
    sent.map_err(|_| Reason::CANCEL)
}

// === impl Stream ===

impl Stream {
    /// Notes that a response began.
    pub(crate) fn answered(&self) {
        self.seat.0.conn.answered();
    }

    /// Sends nothing more.
    pub(crate) fn stop(&self) {
        if let Some(upload) = &self.upload {
            upload.abort();
        }
    }

    /// Resets it, and waits until the peer knows.
    pub(crate) async fn reset(mut self) {
        let awaited = self.awaited.take();
        let trunk = &self.seat.0;
        let reset = async {
            trunk.streams.opened(self.id).await;
            // Nobody else has a handle of it, so now it is reset, unless both its ends are closed.
            drop(awaited);
            self.stop();
            trunk.streams.over(self.id).await;
        };
        tokio::select! {
            ended = tokio::time::timeout(PATIENCE, reset) => {
                if ended.is_err() {
                    // Nothing gets through on it.
                    trunk.conn.abort();
                    trunk.conn.closed().await;
                }
            }
            () = trunk.conn.closed() => {}
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop();
    }
}

// === impl Failed ===

impl Failed {
    fn unsent(error: BoxError, spare: Option<Box<Request<Outgoing>>>) -> Self {
        Self { cause: Cause::Connect(error), stream: None, spare }
    }

    /// A request may be sent again if the peer says that it didn't look at it; or if its connection may have been too old, and it
    /// does no harm.
    fn broken(error: h2::Error, stream: Stream, spare: Option<Box<Request<Outgoing>>>) -> Self {
        let trunk = &stream.seat.0;
        let is_refused = error.is_remote() && error.reason() == Some(Reason::REFUSED_STREAM);
        let is_unserved = is_refused || trunk.streams.is_unserved(stream.id);
        let was_old = trunk.conn.is_reused() && !error.is_reset();
        let spare =
            spare.filter(|request| is_unserved || (was_old && request.method().is_idempotent()));
        Self { cause: Cause::Broken(error.into()), stream: Some(stream), spare }
    }
}
