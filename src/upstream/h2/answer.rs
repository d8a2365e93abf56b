//! The body of an answer over HTTP/2.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, header::CONTENT_LENGTH};
use http_body::{Body, Frame, SizeHint};

/// What comes over a stream. The window is opened for more as the client takes it.
#[derive(Debug)]
pub(crate) struct Received {
    stream: RecvStream,
    /// What is to come, if the head told.
    left: Option<u64>,
    has_data_ended: bool,
}

impl Received {
    pub(super) fn new(stream: RecvStream, head: &HeaderMap) -> Self {
        let length = head.get(CONTENT_LENGTH);
        let left = length.and_then(|length| length.to_str().ok()?.parse().ok());
        Self { stream, left, has_data_ended: false }
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.has_data_ended {
            if let Some(data) = ready!(self.stream.poll_data(cx)) {
                let data = data?;
                self.stream.flow_control().release_capacity(data.len())?;
                self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            self.has_data_ended = true;
        }
        let trailers = ready!(self.stream.poll_trailers(cx)).transpose();
        Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers)))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
