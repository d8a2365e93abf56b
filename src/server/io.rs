//! The bytes of a connection, counted.

use std::{
    io::{self, IoSlice},
    net::Shutdown,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
};

use super::{client::ClientConn, detect::Prefix};

/// A TCP stream that the connection's task can watch while hyper owns it.
#[derive(Clone, Debug)]
pub(super) struct Socket(pub(super) Arc<TcpStream>);

/// Counts the bytes of a stream, tells when it is blocked, and replays what was read from it
/// before hyper had it.
#[derive(Debug)]
pub(super) struct Metered<T> {
    inner: T,
    prefix: Option<Prefix>,
    client: Arc<ClientConn>,
    /// Whether bytes that come while no request is in flight begin a head.
    one_at_a_time: bool,
}

// === impl Socket ===

impl Socket {
    /// Does what `TcpStream::poll_read` does, through a shared reference: a transfer that falls
    /// short of `room` has emptied (or filled) the kernel's buffer, so the readiness is cleared
    /// and the next poll costs no system call.
    fn transfer(
        &self,
        interest: Interest,
        room: usize,
        f: impl FnOnce() -> io::Result<usize>,
    ) -> Option<io::Result<usize>> {
        let mut short = None;
        let result = self.0.try_io(interest, || {
            let n = f()?;
            if 0 < n && n < room {
                short = Some(n);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(n)
        });
        match (short, result) {
            (Some(n), _) => Some(Ok(n)),
            (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => None,
            (None, result) => Some(result),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            let room = buf.remaining();
            let read = self.transfer(Interest::READABLE, room, || self.0.try_read_buf(buf));
            if let Some(result) = read {
                return Poll::Ready(result.map(drop));
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            let room = bufs.iter().map(|buf| buf.len()).sum();
            let written =
                self.transfer(Interest::WRITABLE, room, || self.0.try_write_vectored(bufs));
            if let Some(result) = written {
                return Poll::Ready(result);
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match SockRef::from(&*self.0).shutdown(Shutdown::Write) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(())),
        }
    }
}

// === impl Metered ===

impl<T> Metered<T> {
    pub(super) fn new(
        inner: T,
        prefix: Prefix,
        client: Arc<ClientConn>,
        one_at_a_time: bool,
    ) -> Self {
        Self {
            inner,
            prefix: Some(prefix),
            client,
            one_at_a_time,
        }
    }

    fn count_read(&self, size: usize) {
        if size == 0 {
            return;
        }
        let traffic = &self.client.traffic;
        traffic
            .read
            .store(traffic.read.load(Relaxed) + size as u64, Relaxed);
        if self.one_at_a_time && self.client.in_flight() == 0 && !self.client.has_rest() {
            traffic.head_started.store(true, Relaxed);
        }
    }

    fn count_written(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let traffic = &self.client.traffic;
        traffic.write_blocked.store(result.is_pending(), Relaxed);
        if let Poll::Ready(Ok(size)) = result {
            traffic
                .written
                .store(traffic.written.load(Relaxed) + size as u64, Relaxed);
        }
        result
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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
        self.count_read(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.count_written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.count_written(result)
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
