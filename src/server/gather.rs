//! What an HTTP/2 connection says in one turn of its task, sent together.
//!
//! h2 gives each DATA frame of 256 bytes or more a write and a flush of its own, so eight small answers would be eight system
//! calls, and eight records of TLS, though all of them are there. So writes are gathered here, a flush means nothing, and the
//! connection's task sends at the end of its turn.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::client::lock;

/// As much as a record of TLS may hold.
const ROOM: usize = 16 * 1024;
/// What was gathered, h2's own buffer, and a frame's payload, which is at most two pieces.
const PIECES: usize = 4;

/// One for hyper and one for the connection's task, never used at the same time.
pub(super) struct Gather<T>(Arc<Mutex<Gathered<T>>>);

struct Gathered<T> {
    inner: T,
    /// What is to be sent; holds no memory while there is nothing.
    bytes: Vec<u8>,
    /// How much of it was.
    sent: usize,
    /// Whether anything was written behind the last flush.
    is_dirty: bool,
}

// === impl Gather ===

impl<T> Gather<T> {
    pub(super) fn new(inner: T) -> Self {
        let gathered = Gathered { inner, bytes: Vec::new(), sent: 0, is_dirty: false };
        Self(Arc::new(Mutex::new(gathered)))
    }

    pub(super) fn other(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: AsyncWrite + Unpin> Gather<T> {
    /// Sends all there is. Wakes the caller when it can go on.
    pub(super) fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        lock(&self.0).poll_send(cx)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Gather<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut lock(&self.0).inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gather<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        // What is large is written as it lies.
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut gathered = lock(&self.0);
        ready!(gathered.poll_send(cx))?;
        Pin::new(&mut gathered.inner).poll_shutdown(cx)
    }
}

// === impl Gathered ===

impl<T: AsyncWrite + Unpin> Gathered<T> {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let size: usize = bufs.iter().map(|buf| buf.len()).sum();
        if self.bytes.len() + size > ROOM {
            return self.poll_write_out(cx, bufs);
        }
        if self.bytes.capacity() == 0 {
            self.bytes.reserve_exact(ROOM);
        }
        bufs.iter().for_each(|buf| self.bytes.extend_from_slice(buf));
        Poll::Ready(Ok(size))
    }

    /// Writes what was gathered, and behind it as much of this as goes along. Says how much of this that was.
    fn poll_write_out(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let waiting = self.bytes.len() - self.sent;
            let mut pieces = [IoSlice::new(&[]); PIECES];
            pieces[0] = IoSlice::new(&self.bytes[self.sent..]);
            let first = usize::from(waiting > 0);
            let mut count = first;
            for (piece, buf) in pieces[first..].iter_mut().zip(bufs) {
                *piece = IoSlice::new(buf);
                count += 1;
            }
            self.is_dirty = true;
            let inner = Pin::new(&mut self.inner);
            let written = ready!(inner.poll_write_vectored(cx, &pieces[..count]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += written.min(waiting);
            if self.sent == self.bytes.len() {
                (self.bytes, self.sent) = (Vec::new(), 0);
            }
            if written > waiting || bufs.is_empty() && self.bytes.is_empty() {
                return Poll::Ready(Ok(written - waiting));
            }
        }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.bytes.is_empty() {
            ready!(self.poll_write_out(cx, &[]))?;
        }
        if self.is_dirty {
            ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
            self.is_dirty = false;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Waker};

    use futures_util::FutureExt;

    use super::*;

    /// Takes so many bytes with each write, and nothing with every second one.
    struct Wire {
        most: usize,
        is_full: bool,
        writes: Vec<Vec<u8>>,
        is_shut: bool,
    }

    fn gather(most: usize) -> Gather<Wire> {
        Gather::new(Wire { most, is_full: most < usize::MAX, writes: Vec::new(), is_shut: false })
    }

    impl AsyncWrite for Wire {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(buf)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bufs: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            assert!(bufs.iter().all(|buf| !buf.is_empty()));
            if self.most < usize::MAX {
                self.is_full = !self.is_full;
                if !self.is_full {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
            let bytes = bufs.iter().flat_map(|buf| buf.iter().copied());
            let taken: Vec<u8> = bytes.take(self.most).collect();
            let size = taken.len();
            self.writes.push(taken);
            Poll::Ready(Ok(size))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut = true;
            Poll::Ready(Ok(()))
        }
    }

    /// Writes all of this as h2 does: a head and a payload at once, then what is left, and a flush.
    fn say(gather: &mut Gather<Wire>, mut head: &[u8], mut payload: &[u8]) {
        while !head.is_empty() || !payload.is_empty() {
            let wrote = poll_fn(|cx| {
                let bufs = [IoSlice::new(head), IoSlice::new(payload)];
                let bufs = if head.is_empty() { &bufs[1..] } else { &bufs[..] };
                Pin::new(&mut *gather).poll_write_vectored(cx, bufs)
            });
            let Some(wrote) = wrote.now_or_never() else { continue };
            let wrote = wrote.expect("it can be written");
            let of_head = wrote.min(head.len());
            head = &head[of_head..];
            payload = &payload[wrote - of_head..];
        }
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(gather).poll_flush(&mut cx).is_ready());
    }

    fn send(gather: &Gather<Wire>) {
        let mut sent = None;
        while sent.is_none() {
            sent = poll_fn(|cx| gather.poll_send(cx)).now_or_never();
        }
        sent.expect("it ended").expect("it can be sent");
        let gathered = lock(&gather.0);
        assert_eq!((gathered.bytes.capacity(), gathered.is_dirty), (0, false));
    }

    #[test]
    fn small_frames_of_a_turn_go_together() {
        let mut gather = gather(usize::MAX);
        for _ in 0..8 {
            say(&mut gather, b"a head", &[b'x'; 1024]);
        }
        assert!(lock(&gather.0).inner.writes.is_empty());
        send(&gather);
        assert_eq!(
            lock(&gather.0).inner.writes,
            [[&b"a head"[..], &[b'x'; 1024]].concat().repeat(8)]
        );
        send(&gather);
        assert_eq!(lock(&gather.0).inner.writes.len(), 1);
    }

    #[test]
    fn a_large_frame_takes_along_what_was_gathered() {
        let mut gather = gather(usize::MAX);
        say(&mut gather, b"small", b"er");
        say(&mut gather, b"large", &[b'x'; ROOM]);
        let expected = [&b"smallerlarge"[..], &[b'x'; ROOM]].concat();
        assert_eq!(lock(&gather.0).inner.writes, [expected]);
    }

    #[test]
    fn nothing_is_lost_or_changes_places_however_little_goes_at_once() {
        for most in [1, 7, 1000, ROOM - 1, ROOM + 1, 3 * ROOM, usize::MAX] {
            let (mut gather, mut expected) = (gather(most), Vec::new());
            for (number, size) in
                [0, 1, 300, ROOM, 5000, 9000, 12_000, ROOM - 9, 1].into_iter().enumerate()
            {
                let payload: Vec<u8> = (0..size).map(|at| (at / 7 + number) as u8).collect();
                say(&mut gather, b"a frame: ", &payload);
                expected.extend_from_slice(b"a frame: ");
                expected.extend_from_slice(&payload);
                if number == 6 {
                    send(&gather);
                }
            }
            let mut cx = Context::from_waker(Waker::noop());
            while Pin::new(&mut gather).poll_shutdown(&mut cx).is_pending() {}
            let gathered = lock(&gather.0);
            assert_eq!(gathered.inner.writes.concat(), expected, "{most}");
            assert!(gathered.inner.is_shut);
        }
    }
}
