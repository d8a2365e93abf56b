//! Tells HTTP/2 with prior knowledge from HTTP/1 by the first bytes.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Poll, ready},
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

/// The bytes that were read to find out.
#[derive(Debug)]
pub(super) struct Prefix {
    bytes: [u8; PREFACE.len()],
    len: usize,
    /// When the first of them came.
    pub(super) since: Instant,
}

impl Prefix {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Reads until the protocol is known; `None` if the client leaves before.
pub(super) async fn detect<T: AsyncRead + Unpin>(io: &mut T) -> Option<(Protocol, Prefix)> {
    let mut bytes = [0; PREFACE.len()];
    let mut len = 0;
    let mut since = None;
    let protocol = loop {
        let read = poll_fn(|cx| {
            let mut buf = ReadBuf::new(&mut bytes[len..]);
            ready!(Pin::new(&mut *io).poll_read(cx, &mut buf))?;
            Poll::Ready(std::io::Result::Ok(buf.filled().len()))
        });
        match read.await {
            Ok(0) | Err(_) => return None,
            Ok(n) => len += n,
        }
        since.get_or_insert_with(Instant::now);
        if bytes[..len] != PREFACE[..len] {
            break Protocol::Http1;
        }
        if len == PREFACE.len() {
            break Protocol::Http2;
        }
    };
    let since = since?;
    Some((protocol, Prefix { bytes, len, since }))
}
