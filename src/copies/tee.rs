//! Copies a body as it streams by, and never holds it up: whatever is in the way of the copy ends the copy.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, header};
use http_body::Frame;

use super::{Asked, Copies, Kept, LONGEST_COPY, Terms, head_of};
use crate::{gauge::Share, target};

/// The smallest room for a body of unknown length.
const FIRST_ROOM: usize = 4 * 1024;

/// A copy in the making. Dropped before [`Tee::finish`] it comes to nothing.
#[derive(Debug)]
pub(crate) struct Tee {
    copies: Arc<Copies>,
    asked: Asked,
    terms: Terms,
    status: StatusCode,
    headers: HeaderMap,
    /// As announced; 0 if it wasn't.
    length: usize,
    body: Vec<u8>,
    room: Option<Share>,
}

impl Tee {
    /// None where the body is too long, or couldn't be told from one that is cut short.
    pub(super) fn new(
        copies: Arc<Copies>,
        asked: Asked,
        terms: Terms,
        head: &Response<()>,
    ) -> Option<Self> {
        let coding = head.headers().get(header::TRANSFER_ENCODING);
        let is_chunked =
            coding.is_some_and(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
        let length = match target::content_length(head.headers()) {
            Some(length) if coding.is_none() => usize::try_from(length).ok()?,
            None if coding.is_none() && head.status() == StatusCode::NO_CONTENT => 0,
            _ if is_chunked => 0,
            _ => return None,
        };
        (length <= LONGEST_COPY).then(|| Self {
            copies,
            asked,
            terms,
            status: head.status(),
            headers: head_of(head),
            length,
            body: Vec::new(),
            room: None,
        })
    }

    /// The next piece; false if there will be no copy.
    #[must_use]
    pub(crate) fn see(&mut self, frame: &Frame<Bytes>) -> bool {
        // A copy is the whole answer, and it has no place for trailers.
        let Some(data) = frame.data_ref() else { return false };
        let length = self.body.len() + data.len();
        if length > LONGEST_COPY {
            return false;
        }
        if length > self.body.capacity() {
            let room = length.next_power_of_two().clamp(FIRST_ROOM, LONGEST_COPY);
            let room = if length <= self.length { self.length } else { room };
            let Some(share) = self.copies.in_the_making.take(room) else { return false };
            let mut body = Vec::with_capacity(room);
            body.extend_from_slice(&self.body);
            (self.body, self.room) = (body, Some(share));
        }
        self.body.extend_from_slice(data);
        true
    }

    /// The body came to its end.
    pub(crate) fn finish(self) {
        let Self { copies, asked, terms, status, headers, body, room, .. } = self;
        let route = asked.route;
        let body = Bytes::from(body.into_boxed_slice());
        copies.keep(&asked, Kept { route, terms, status, headers, body });
        drop(room);
    }
}
