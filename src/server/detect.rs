//! Tells HTTP/2 with prior knowledge from HTTP/1 by the first bytes.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, ReadBuf},
    time::Instant,
};

const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Which protocol a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// The bytes that were read before hyper has the connection.
#[derive(Debug)]
pub(super) struct Prefix {
    bytes: [u8; PREFACE.len()],
    len: usize,
    /// When the first of them came.
    pub(super) since: Instant,
}

impl Prefix {
    fn new() -> Self {
        Self { bytes: [0; PREFACE.len()], len: 0, since: Instant::now() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Reads what is there, as long as there is room; false if the client left.
    fn poll_read<T: AsyncRead + Unpin>(&mut self, io: &mut T, cx: &mut Context<'_>) -> Poll<bool> {
        let mut buf = ReadBuf::new(&mut self.bytes[self.len..]);
        let read = ready!(Pin::new(io).poll_read(cx, &mut buf));
        let size = buf.filled().len();
        if self.len == 0 {
            self.since = Instant::now();
        }
        self.len += size;
        Poll::Ready(read.is_ok() && size > 0)
    }

    /// Reads the first bytes from a client that spoke before; none if it left.
    pub(super) fn poll_first<T: AsyncRead + Unpin>(
        io: &mut T,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Self>> {
        let mut prefix = Self::new();
        prefix.poll_read(io, cx).map(|spoken| spoken.then_some(prefix))
    }
}

/// Reads until the protocol is known; `None` if the client leaves before.
pub(super) async fn detect<T: AsyncRead + Unpin>(io: &mut T) -> Option<(Protocol, Prefix)> {
    let mut prefix = Prefix::new();
    loop {
        if !poll_fn(|cx| prefix.poll_read(io, cx)).await {
            return None;
        }
        if prefix.bytes() != &PREFACE[..prefix.len] {
            return Some((Protocol::Http1, prefix));
        }
        if prefix.len == PREFACE.len() {
            return Some((Protocol::Http2, prefix));
        }
    }
}
