//! Connects to an upstream and learns when a connection is really gone.
//!
//! A slot may only be given back once the upstream can see that its client left. hyper closes a
//! connection some time after its response is dropped, and a FIN queues behind unsent bytes, perhaps
//! for ever. So the socket is wrapped: [`UpstreamConn::abort`] fails every further read and write,
//! hyper then drops the wrapper, the socket closes with a reset, and [`UpstreamConn::closed`] tells.

use std::{
    io::{self, Read},
    net::SocketAddr,
    os::fd::AsFd,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use http::Uri;
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use rustls::ClientConfig;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::Notify,
};
use tower_service::Service;

use crate::body::BoxError;

/// Connects within a bound on TCP and TLS together.
#[derive(Clone)]
pub(crate) struct Connector {
    https: HttpsConnector<Tcp>,
    endpoint: Uri,
    timeout: Duration,
}

/// What the rest of the proxy knows of one connection.
#[derive(Debug, Default)]
pub(crate) struct UpstreamConn {
    aborted: AtomicBool,
    /// Whether its socket is to be watched by the runtime on which it is next used.
    moved: AtomicBool,
    closed: AtomicBool,
    gone: Notify,
    /// Whether a response came over it before.
    reused: AtomicBool,
    /// Whether a byte came in since the last one went out.
    heard: AtomicBool,
    reader: AtomicWaker,
    writer: AtomicWaker,
}

pub(super) type Stream = MaybeHttpsStream<TokioIo<Socket>>;

/// TCP alone, below TLS, to one address whatever the name.
#[derive(Clone, Copy)]
pub(super) struct Tcp {
    pub(super) addr: SocketAddr,
    /// A listener of ours that no request may get to.
    pub(super) off_limits: Option<SocketAddr>,
}

/// A socket that tells when it is dropped. The order of the fields is the order of events.
pub(crate) struct Socket {
    stream: TcpStream,
    closing: Closing,
}

struct Closing(Arc<UpstreamConn>);

// === impl UpstreamConn ===

impl UpstreamConn {
    /// Has the connection closed as soon as its task runs, by reset.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.reader.wake();
        self.writer.wake();
    }

    /// From now on the runtime on which it is next used waits for its bytes.
    pub(super) fn move_to_next(&self) {
        self.moved.store(true, Ordering::Relaxed);
    }

    /// Waits until the socket was closed.
    pub(crate) async fn closed(&self) {
        let gone = self.gone.notified();
        tokio::pin!(gone);
        // Enabled before the look, so that a close in between isn't missed.
        gone.as_mut().enable();
        if !self.closed.load(Ordering::Acquire) {
            gone.await;
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Notes that a response began.
    pub(crate) fn answered(&self) {
        self.reused.store(true, Ordering::Relaxed);
    }

    /// Whether a response came over it before.
    pub(super) fn is_reused(&self) -> bool {
        self.reused.load(Ordering::Relaxed)
    }

    /// Whether the connection may simply have been too old: it served before, and not a byte
    /// came back since the last request went out.
    pub(super) fn was_stale(&self) -> bool {
        self.is_reused() && !self.heard.load(Ordering::Relaxed)
    }

    /// Fails once the connection was aborted. Called after the waker was registered.
    fn check(&self) -> io::Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Release);
        self.0.gone.notify_waiters();
    }
}

// === impl Connector ===

impl Connector {
    /// Connects by `tcp`, and expects the certificate of `endpoint` there.
    pub(super) fn new(endpoint: Uri, tcp: Tcp, timeout: Duration, tls: Arc<ClientConfig>) -> Self {
        Self { https: HttpsConnector::from((tcp, tls)), endpoint, timeout }
    }

    pub(super) fn endpoint(&self) -> &Uri {
        &self.endpoint
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) async fn connect(&self) -> Result<(Stream, Arc<UpstreamConn>), BoxError> {
        let connecting = self.https.clone().call(self.endpoint.clone());
        let stream = tokio::time::timeout(self.timeout, connecting).await??;
        let mut extras = http::Extensions::new();
        stream.connected().get_extras(&mut extras);
        Ok((stream, extras.remove().expect("every socket tells of its connection")))
    }
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

impl Tcp {
    /// Whether this is a connection to where none may lead. Looked at behind it, since only then all names, spellings and
    /// addresses that stand for others have become one.
    fn is_off_limits(self, stream: &TcpStream) -> io::Result<bool> {
        let Some(listener) = self.off_limits.filter(|at| at.port() == self.addr.port()) else {
            return Ok(false);
        };
        let (at, peer) = (listener.ip().to_canonical(), stream.peer_addr()?.ip().to_canonical());
        let is_here = peer.is_loopback() || peer == stream.local_addr()?.ip().to_canonical();
        Ok(at == peer || (at.is_unspecified() && is_here))
    }
}

impl Service<Uri> for Tcp {
    type Response = TokioIo<Socket>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let tcp = *self;
        Box::pin(async move {
            let stream = TcpStream::connect(tcp.addr).await?;
            if tcp.is_off_limits(&stream)? {
                return Err("it is the operators' listener".into());
            }
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(Socket { stream, closing: Closing(Arc::default()) }))
        })
    }
}

// === impl Socket ===

impl Drop for Socket {
    fn drop(&mut self) {
        if self.closing.0.check().is_err() {
            // A FIN would wait behind what the upstream hasn't read, and the upstream could take it
            // for a half-close. Fails only on a socket that is closed already.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl Connection for Socket {
    fn connected(&self) -> Connected {
        Connected::new().extra(Arc::clone(&self.closing.0))
    }
}

impl Socket {
    /// Has this runtime watch it, if it was told to move. True if it did.
    fn settle(&mut self) -> io::Result<bool> {
        let conn = &self.closing.0;
        let moves = conn.moved.load(Ordering::Relaxed);
        if moves {
            conn.moved.store(false, Ordering::Relaxed);
            let again = self.stream.as_fd().try_clone_to_owned()?;
            self.stream = TcpStream::from_std(again.into())?;
        }
        Ok(moves)
    }

    /// Reads what is there, whatever the runtime has heard of it.
    fn read_now(&self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match (&*SockRef::from(&self.stream)).read(buf.initialize_unfilled()) {
            Ok(size) => {
                buf.advance(size);
                Poll::Ready(Ok(()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn written(
        &self,
        cx: &Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let conn = &self.closing.0;
        if written.is_pending() {
            conn.writer.register(cx.waker());
        } else {
            conn.heard.store(false, Ordering::Relaxed);
        }
        conn.check()?;
        written
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        // A runtime that is new to it hears of what has come when it next looks, which is behind our next request. What came
        // before that isn't its answer.
        let mut read = if self.settle()? { self.read_now(buf) } else { Poll::Pending };
        if read.is_pending() {
            read = Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let conn = &self.closing.0;
        // Registered only where it is needed; then the flag is looked at again.
        if read.is_pending() {
            conn.reader.register(cx.waker());
        } else if buf.filled().len() > before {
            conn.heard.store(true, Ordering::Relaxed);
        }
        conn.check()?;
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.closing.0.check()?;
        self.settle()?;
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // A head alone, mostly: the kernel takes one piece faster than a list of one.
        if let [only] = bufs {
            return self.poll_write(cx, only);
        }
        self.closing.0.check()?;
        self.settle()?;
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.closing.0.check()?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
