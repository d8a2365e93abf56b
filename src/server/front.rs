//! The bytes that hyper reads and writes, and what hyper doesn't make of them.
//!
//! Behind the socket, and behind TLS where there is TLS. It replays what was read to detect the
//! protocol, follows the framing of HTTP/1 requests, and puts our own words in the place of the
//! answer that hyper gives by itself to a head it can't read.

use std::{
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{Response, StatusCode};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{self, Instant},
};

use super::{
    client::{ClientConn, Command},
    detect::Prefix,
    framing::Framing,
};

/// What is said instead of hyper's answer of this status.
pub(super) type Words = Arc<dyn Fn(StatusCode, &ClientConn) -> Response<Bytes> + Send + Sync>;

/// Replays what was read before hyper had the connection, and corrects what hyper says.
pub(super) struct Front<T> {
    inner: T,
    prefix: Option<Prefix>,
    /// What hyper had read when it gave the connection up, and was followed then.
    put_back: Bytes,
    client: Arc<ClientConn>,
    /// HTTP/1 alone has heads that this can follow.
    http1: Option<Http1>,
}

struct Http1 {
    framing: Framing,
    words: Words,
    /// Ours, begun to be written.
    answer: Option<Bytes>,
}

/// How long a resting connection listens on when a drain begins.
const ON_THE_WAY: Duration = Duration::from_millis(50);
/// How hyper's own answer begins, and its status. Every answer of a handler says more than these.
const AUTOMATIC: [(&[u8], StatusCode); 3] = [
    (b"HTTP/1.1 400 Bad Request\r\n", StatusCode::BAD_REQUEST),
    (b"HTTP/1.1 414 URI Too Long\r\n", StatusCode::URI_TOO_LONG),
    (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
    ),
];
const FIELDS: &[u8] = b"connection: close\r\ncontent-length: 0\r\n";
const DATE: usize = "date: Mon, 30 Nov 2026 03:50:45 GMT\r\n".len();
const END: &[u8] = b"\r\n";

// === impl Front ===

impl<T> Front<T> {
    /// With the words for what can't be read if the client speaks HTTP/1.
    pub(super) fn new(
        inner: T,
        prefix: Prefix,
        client: Arc<ClientConn>,
        words: Option<Words>,
    ) -> Self {
        let http1 = words.map(|words| Http1 { framing: Framing::new(), words, answer: None });
        Self { inner, prefix: Some(prefix), put_back: Bytes::new(), client, http1 }
    }

    /// When the first byte came that hyper has yet to see.
    pub(super) fn since(&self) -> Instant {
        self.prefix.as_ref().map_or_else(Instant::now, |prefix| prefix.since)
    }

    /// Has hyper read this again before anything else.
    pub(super) fn put_back(&mut self, bytes: &[u8]) {
        // A copy, since these few hold all of hyper's buffer.
        self.put_back = Bytes::copy_from_slice(bytes);
    }

    fn came(&mut self, bytes: &[u8]) {
        if self.client.traffic.is_tunnel.load(Relaxed) {
            self.http1 = None;
            self.client.traffic.is_between.store(false, Relaxed);
        }
        let Some(http1) = &mut self.http1 else { return };
        let framing = &mut http1.framing;
        framing.follow(bytes);
        let traffic = &self.client.traffic;
        traffic.in_head.store(framing.is_in_head(), Relaxed);
        traffic.is_between.store(framing.is_between(), Relaxed);
        if let Some(number) = framing.doubtful() {
            traffic.doubtful.store(number, Relaxed);
        }
    }
}

impl<T: AsyncRead + Unpin> Front<T> {
    /// Waits, while hyper doesn't have the connection, for the client to speak. False if it left, if it is too late, or
    /// if the connection has to go.
    pub(super) async fn is_spoken_to(&mut self, deadline: Instant) -> bool {
        let Self { inner, client, .. } = self;
        let told = async {
            client.told(Command::Drain).await;
            // What is on its way is still seen.
            time::sleep(ON_THE_WAY).await;
        };
        self.prefix = tokio::select! {
            biased;
            prefix = poll_fn(|cx| Prefix::poll_first(inner, cx)) => prefix,
            () = told => None,
            () = time::sleep_until(deadline) => None,
        };
        self.prefix.is_some()
    }
}

impl<T: AsyncWrite + Unpin> Front<T> {
    /// Writes our answer in the place of hyper's, which ends `last`; `None` if this is none.
    fn correct(&mut self, cx: &mut Context<'_>, last: &[u8]) -> Option<Poll<io::Result<usize>>> {
        let http1 = self.http1.as_mut()?;
        let (at, status) = automatic(last)?;
        if self.client.in_flight() > 0 || self.client.traffic.is_tunnel.load(Relaxed) {
            return None;
        }
        if at > 0 {
            // The end of an earlier answer goes first.
            return Some(Pin::new(&mut self.inner).poll_write(cx, &last[..at]));
        }
        let answer = http1.answer.get_or_insert_with(|| {
            let status = match status {
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE if http1.framing.is_in_first_line() => {
                    StatusCode::URI_TOO_LONG
                }
                status => status,
            };
            let date = &last[last.len() - END.len() - DATE..last.len() - END.len()];
            written(&(http1.words)(status, &self.client), date)
        });
        while answer.has_remaining() {
            match Pin::new(&mut self.inner).poll_write(cx, answer) {
                Poll::Ready(Ok(0)) => {
                    return Some(Poll::Ready(Err(io::ErrorKind::WriteZero.into())));
                }
                Poll::Ready(Ok(size)) => answer.advance(size),
                other => return Some(other),
            }
        }
        Some(Poll::Ready(Ok(last.len())))
    }
}

/// Where hyper's own answer begins, if one ends these bytes.
fn automatic(bytes: &[u8]) -> Option<(usize, StatusCode)> {
    let (before, date) =
        bytes.strip_suffix(END)?.split_at_checked(bytes.len().checked_sub(END.len() + DATE)?)?;
    let before = before.strip_suffix(FIELDS).filter(|_| date.starts_with(b"date: "))?;
    AUTOMATIC.iter().find_map(|(line, status)| Some((before.strip_suffix(*line)?.len(), *status)))
}

fn written(answer: &Response<Bytes>, date: &[u8]) -> Bytes {
    let mut text = format!("HTTP/1.1 {}\r\n", answer.status()).into_bytes();
    for (name, value) in answer.headers() {
        text.extend_from_slice(name.as_ref());
        text.extend_from_slice(b": ");
        text.extend_from_slice(value.as_bytes());
        text.extend_from_slice(END);
    }
    let length = format!("connection: close\r\ncontent-length: {}\r\n", answer.body().len());
    text.extend_from_slice(length.as_bytes());
    text.extend_from_slice(date);
    text.extend_from_slice(END);
    text.extend_from_slice(answer.body());
    text.into()
}

impl<T: AsyncRead + Unpin> AsyncRead for Front<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.put_back.has_remaining() {
            let size = self.put_back.len().min(buf.remaining());
            buf.put_slice(&self.put_back.split_to(size));
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        if let Some(prefix) = self.prefix.take() {
            // No buffer of hyper's is smaller.
            buf.put_slice(prefix.bytes());
            if buf.remaining() > 0 {
                // What follows is usually there already. If not, or if it is an error, the next
                // read will tell.
                let _ = Pin::new(&mut self.inner).poll_read(cx, buf);
            }
        } else {
            ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        }
        self.came(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Front<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if let Some(written) = self.correct(cx, buf) {
            return written;
        }
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // hyper encodes a head only when no body is left to be written.
        if let [only] = bufs
            && let Some(written) = self.correct(cx, only)
        {
            return written;
        }
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATED: &str = "date: Mon, 30 Nov 2026 03:50:45 GMT\r\n\r\n";

    #[test]
    fn only_hypers_own_answer_is_taken_for_one() {
        let line = "HTTP/1.1 400 Bad Request\r\n";
        let fields = "connection: close\r\ncontent-length: 0\r\n";
        let own = format!("{line}{fields}{DATED}");
        assert_eq!(automatic(own.as_bytes()), Some((0, StatusCode::BAD_REQUEST)));
        let behind = format!("rest{own}");
        assert_eq!(automatic(behind.as_bytes()), Some((4, StatusCode::BAD_REQUEST)));
        for other in [
            format!("{line}server-timing: queue;dur=0.0\r\n{fields}{DATED}"),
            format!("HTTP/1.1 200 OK\r\n{fields}{DATED}"),
            format!("{own}x"),
            own[..own.len() - 1].to_owned(),
            DATED.to_owned(),
            String::new(),
        ] {
            assert_eq!(automatic(other.as_bytes()), None, "{other:?}");
        }
    }
}
