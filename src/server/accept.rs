//! Accepts connections up to the cap, and ends them all.

use std::{
    convert::Infallible,
    future::Future,
    io,
    net::{self, SocketAddr},
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time,
};

use super::{
    Drained, Handler,
    client::{ClientConn, Command},
    connection::Server,
    crowd::Crowd,
    workers::Workers,
};
use crate::config;

/// How much the kernel may hold unsent for one client.
///
/// A socket turns writable when half of this has left, so it is also the grain in which a slow
/// reader's progress shows. With the kernel's default a reader of 10 KiB/s could look stalled.
const UNSENT: u32 = 128 * 1024;
/// Pauses after accept errors such as "too many open files".
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// How long cut connections may take to notice.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Owns the listener and knows every connection.
pub(super) struct Acceptor<H> {
    listener: TcpListener,
    workers: Arc<Workers>,
    handler: Arc<H>,
    server: Arc<Server<H>>,
    settings: watch::Receiver<config::Server>,
    crowd: Arc<Crowd>,
    permits: Arc<Semaphore>,
    max_connections: usize,
    clients: Vec<Weak<ClientConn>>,
    drain_timeout: Duration,
    // Each connection holds a clone of `alive`; `all_gone` ends when the last one is dropped.
    alive: mpsc::Sender<Infallible>,
    all_gone: mpsc::Receiver<Infallible>,
}

impl<H: Handler> Acceptor<H> {
    pub(super) fn new(
        listener: TcpListener,
        handler: Arc<H>,
        mut settings: watch::Receiver<config::Server>,
        workers: Arc<Workers>,
    ) -> Self {
        prepare(&listener);
        let (alive, all_gone) = mpsc::channel(1);
        let now = settings.borrow_and_update().clone();
        let crowd = Arc::default();
        Self {
            listener,
            workers,
            permits: Arc::new(Semaphore::new(now.max_connections)),
            max_connections: now.max_connections,
            drain_timeout: now.drain_timeout,
            server: Arc::new(Server::new(Arc::clone(&handler), &now, &crowd)),
            crowd,
            handler,
            settings,
            clients: Vec::new(),
            alive,
            all_gone,
        }
    }

    pub(super) async fn run(mut self, stop: impl Future<Output = ()>) -> Drained {
        let mut stop = pin!(stop);
        loop {
            let next = tokio::select! {
                biased;
                () = &mut stop => break,
                () = changed(&mut self.settings) => None,
                next = next(&self.listener, &self.permits) => Some(next),
            };
            match next {
                Some(next) => self.start(next),
                None => self.adopt_settings(),
            }
        }
        self.drain().await
    }

    /// From now on connections are served by other settings.
    fn adopt_settings(&mut self) {
        let now = self.settings.borrow_and_update().clone();
        self.drain_timeout = now.drain_timeout;
        self.server.retire();
        self.server = Arc::new(Server::new(Arc::clone(&self.handler), &now, &self.crowd));
        let before = std::mem::replace(&mut self.max_connections, now.max_connections);
        self.permits.add_permits(now.max_connections.saturating_sub(before));
        if let Ok(fewer @ 1..) = u32::try_from(before.saturating_sub(now.max_connections)) {
            let permits = Arc::clone(&self.permits);
            // Nobody else gets a permit before these have come back.
            tokio::spawn(async move {
                if let Ok(surplus) = permits.acquire_many_owned(fewer).await {
                    surplus.forget();
                }
            });
        }
    }

    fn start(&mut self, (stream, peer, permit): Accepted) {
        let client = Arc::new(ClientConn::new(peer, self.server.is_secure()));
        self.remember(Arc::downgrade(&client));
        let server = Arc::clone(&self.server);
        let alive = self.alive.clone();
        self.workers.serve(|served| async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => server.connection(stream, client).await,
                Err(error) => tracing::warn!(%error, "a connection can't be watched"),
            }
            drop((permit, alive, served));
        });
    }

    /// Forgets closed connections when the list is full, so that it costs a constant per accept.
    fn remember(&mut self, client: Weak<ClientConn>) {
        if self.clients.len() == self.clients.capacity() {
            self.clients.retain(|client| client.strong_count() > 0);
            self.clients.reserve(self.clients.len().max(64));
        }
        self.clients.push(client);
    }

    async fn drain(self) -> Drained {
        let Self { listener, clients, alive, mut all_gone, drain_timeout, .. } = self;
        drop((listener, alive));
        let tell = |command| {
            for client in clients.iter().filter_map(Weak::upgrade) {
                client.tell(command);
            }
        };

        tell(Command::Drain);
        if time::timeout(drain_timeout, all_gone.recv()).await.is_ok() {
            return Drained { cut: 0 };
        }
        let cut = all_gone.sender_strong_count();
        tell(Command::Cut);
        // A handler that blocks its thread must not keep the process.
        let _ = time::timeout(CUT_GRACE, all_gone.recv()).await;
        Drained { cut }
    }
}

/// Resolves when there are new settings, which may be never.
async fn changed(settings: &mut watch::Receiver<config::Server>) {
    if settings.changed().await.is_err() {
        std::future::pending().await
    }
}

type Accepted = (net::TcpStream, SocketAddr, OwnedSemaphorePermit);

/// Waits for a permit and only then for a connection: at the cap new clients wait in the backlog.
async fn next(listener: &TcpListener, permits: &Arc<Semaphore>) -> Accepted {
    let permit = Arc::clone(permits).acquire_owned().await.expect("the semaphore is never closed");
    let mut pause = BACKOFF.0;
    loop {
        let accepted = listener.accept().await;
        // It may be served by another runtime than this one.
        match accepted.and_then(|(stream, peer)| Ok((stream.into_std()?, peer))) {
            Ok((stream, peer)) => {
                // Fails only when the client has already left, which the connection finds out.
                let _ = stream.set_nodelay(true);
                return (stream, peer, permit);
            }
            Err(error) if only_this_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                time::sleep(pause).await;
                pause = BACKOFF.1.min(pause * 2);
            }
        }
    }
}

fn only_this_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
    )
}

/// Sets on the listener what accepted sockets inherit.
fn prepare(listener: &TcpListener) {
    let socket = SockRef::from(listener);
    // A client whose machine vanished sends no FIN; these probes end its requests in a minute.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    if let Err(error) = socket.set_tcp_keepalive(&keepalive) {
        tracing::debug!(%error, "no keep-alive probes on client connections");
    }
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_notsent_lowat(UNSENT) {
        tracing::debug!(%error, "no bound on unsent bytes of client connections");
    }
}
