//! What follows `101 Switching Protocols`: bytes both ways, for as long as either side has some.
//!
//! A tunnel holds its slot until both of its halves have ended. A half that ends is passed on as the
//! end of that half alone. It is closed when nothing moves either way for the upstream's
//! `tunnel_timeout`, and cut like any exchange: by an operator, `max_hold`, the end of a drain.

use std::{
    future::poll_fn,
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::{Poll, ready},
    time::Duration,
};

use http::{
    HeaderMap, HeaderValue, Response, Version,
    header::{CONNECTION, UPGRADE},
    request::Parts,
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::{self, Instant},
};

use crate::{account::Account, exchange::Owner, headers};

const PIECE: usize = 8 * 1024;

/// A client's wish to go on with another protocol.
#[derive(Debug)]
pub(crate) struct Wish {
    client: OnUpgrade,
    protocol: HeaderValue,
}

/// An upstream's consent.
#[derive(Debug)]
pub(crate) struct Consent {
    upstream: OnUpgrade,
    protocol: HeaderValue,
}

impl Wish {
    /// Takes the wish off a request without a body. HTTP/2 is no protocol to change to: behind it
    /// requests would pass that nobody looked at.
    pub(crate) fn take(parts: &mut Parts) -> Option<Self> {
        // Only a request with `Upgrade` has one.
        let client = parts.extensions.remove::<OnUpgrade>()?;
        let protocol = parts.headers.get(UPGRADE)?.clone();
        let is_one = parts.headers.get_all(UPGRADE).iter().count() == 1;
        let is_meant = parts.headers.get_all(CONNECTION).iter().any(|line| names(line, "upgrade"));
        let is_http = names(&protocol, "h2c") || names(&protocol, "h2");
        (parts.version == Version::HTTP_11 && is_one && is_meant && !is_http)
            .then_some(Self { client, protocol })
    }

    /// Says it to the upstream.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        tell(&self.protocol, headers);
    }
}

impl Consent {
    /// Takes the consent off an answer of status 101; none if it doesn't say to what.
    pub(crate) fn take(head: &mut Response<()>) -> Option<Self> {
        let upstream = head.extensions_mut().remove::<OnUpgrade>()?;
        let protocol = head.headers().get(UPGRADE)?.clone();
        Some(Self { upstream, protocol })
    }

    /// Says it to the client.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        headers::to_client(headers);
        tell(&self.protocol, headers);
    }
}

fn tell(protocol: &HeaderValue, headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
}

/// Whether a list names this protocol, whatever the version.
fn names(line: &HeaderValue, wanted: &str) -> bool {
    let words = line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    words
        .filter_map(|word| word.split(|byte| *byte == b'/').next())
        .any(|word| word.eq_ignore_ascii_case(wanted.as_bytes()))
}

/// Moves bytes until both halves have ended, one broke, or nothing moved for `idle`.
pub(crate) async fn run(
    wish: Wish,
    consent: Consent,
    owner: Owner,
    idle: Duration,
    mut account: Account,
) {
    let (clock, sent, received) = (Clock::new(), AtomicU64::new(0), AtomicU64::new(0));
    let moving = async {
        let (client, upstream) =
            tokio::try_join!(wish.client, consent.upstream).map_err(io::Error::other)?;
        let (from_client, to_client) = tokio::io::split(TokioIo::new(client));
        let (from_upstream, to_upstream) = tokio::io::split(TokioIo::new(upstream));
        tokio::try_join!(
            one_way(from_client, to_upstream, &clock, &sent),
            one_way(from_upstream, to_client, &clock, &received),
        )
    };
    // The upstream's connection is closed when this is over, and only then the slot is free.
    let ended = tokio::select! {
        ended = moving => ended,
        () = clock.silence(idle) => Err(io::ErrorKind::TimedOut.into()),
    };
    account.given(received.into_inner());
    match ended {
        Ok(_) => {
            account.complete();
            owner.tunnel_ended();
        }
        Err(error) => {
            tracing::debug!(%error, "tunnel broke");
            account.cut(owner.why_cut());
        }
    }
}

/// A half that is silent holds no buffer: what is read goes on from the stack, and only what the other side doesn't take
/// at once is kept.
async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    clock: &Clock,
    moved: &AtomicU64,
) -> io::Result<()> {
    let mut left = Vec::new();
    loop {
        let size = poll_fn(|cx| -> Poll<io::Result<usize>> {
            let mut piece = [const { MaybeUninit::uninit() }; PIECE];
            let mut piece = ReadBuf::uninit(&mut piece);
            ready!(Pin::new(&mut from).poll_read(cx, &mut piece))?;
            let mut rest = piece.filled();
            while !rest.is_empty() {
                match Pin::new(&mut to).poll_write(cx, rest)? {
                    Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    Poll::Ready(taken) => rest = &rest[taken..],
                    Poll::Pending => {
                        left = rest.to_vec();
                        break;
                    }
                }
            }
            Poll::Ready(Ok(piece.filled().len()))
        });
        let size = size.await?;
        if size == 0 {
            to.shutdown().await?;
            return Ok(());
        }
        to.write_all(&std::mem::take(&mut left)).await?;
        to.flush().await?;
        moved.fetch_add(size as u64, Relaxed);
        clock.mark();
    }
}

/// When something moved last.
struct Clock {
    start: Instant,
    last_ms: AtomicU64,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    fn mark(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Relaxed);
    }

    /// Ends when nothing moved for so long.
    async fn silence(&self, idle: Duration) {
        loop {
            let last = self.start + Duration::from_millis(self.last_ms.load(Relaxed));
            if last.elapsed() >= idle {
                return;
            }
            time::sleep_until(last + idle).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_are_found_in_lists() {
        let names = |line, wanted| names(&HeaderValue::from_static(line), wanted);
        assert!(names("keep-alive, Upgrade", "upgrade"));
        assert!(names("websocket, h2c", "h2c"));
        assert!(names("H2C/1.0", "h2c"));
        assert!(!names("websocket", "h2c"));
        assert!(!names("", "upgrade"));
        assert!(!names("upgraded", "upgrade"));
    }
}
