//! The bytes of a connection, counted as they cross the wire.

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

use super::client::ClientConn;

/// Up to this much is copied rather than written from where it lies.
const SMALL: usize = 2048;

/// A TCP stream that the connection's task can watch while hyper owns it.
#[derive(Clone, Debug)]
pub(super) struct Socket(pub(super) Arc<TcpStream>);

/// Counts the bytes of a socket, and tells when it takes no more.
#[derive(Debug)]
pub(super) struct Metered {
    socket: Socket,
    client: Arc<ClientConn>,
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
            let written = self.transfer(Interest::WRITABLE, room, || write(&self.0, bufs, room));
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

/// Writes what there is at once, by way of one piece if it is small: the kernel takes one faster than a list of them.
fn write(stream: &TcpStream, bufs: &[IoSlice<'_>], size: usize) -> io::Result<usize> {
    match bufs {
        [only] => stream.try_write(only),
        _ if size <= SMALL => {
            let mut piece = [0; SMALL];
            let mut end = 0;
            for buf in bufs {
                piece[end..end + buf.len()].copy_from_slice(buf);
                end += buf.len();
            }
            stream.try_write(&piece[..end])
        }
        _ => stream.try_write_vectored(bufs),
    }
}

// === impl Metered ===

impl Metered {
    pub(super) fn new(socket: Socket, client: Arc<ClientConn>) -> Self {
        Self { socket, client }
    }

    fn count_written(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let traffic = &self.client.traffic;
        traffic.write_blocked.store(result.is_pending(), Relaxed);
        if let Poll::Ready(Ok(size)) = result {
            traffic.written.store(traffic.written.load(Relaxed) + size as u64, Relaxed);
        }
        result
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(cx, buf))?;
        let size = (buf.filled().len() - before) as u64;
        let read = &self.client.traffic.read;
        read.store(read.load(Relaxed) + size, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.count_written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.count_written(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn pieces_arrive_in_order_whether_they_are_copied_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut socket = Socket(Arc::new(stream));
        let (mut peer, _) = listener.accept().await.unwrap();
        for sizes in [&[5][..], &[SMALL], &[200, SMALL - 200], &[200, SMALL - 199], &[1, 0, 9_000]]
        {
            let pieces: Vec<Vec<u8>> =
                sizes.iter().zip(b'a'..).map(|(&size, letter)| vec![letter; size]).collect();
            let bufs: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
            let whole = pieces.concat();
            assert_eq!(socket.write_vectored(&bufs).await.unwrap(), whole.len());
            let mut came = vec![0; whole.len()];
            peer.read_exact(&mut came).await.unwrap();
            assert_eq!(came, whole);
        }
    }
}
