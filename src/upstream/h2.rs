//! HTTP/2 to an endpoint: connections that requests share, and one request's stream on one of them.
//!
//! Every stream has a window of its own, and a connection's is as large as those of all its streams together: whoever doesn't read
//! fills the window of nobody else. A connection takes no more streams than its peer allows, then there is another one.
//!
//! A stream that is cut must be reset before its slot is free, and the `h2` crate doesn't tell when a frame is sent. So the frames
//! are followed where they pass (`frames`), and a stream is over when both its ends were seen to close.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Ping, PingPong,
    client::{Builder, SendRequest},
};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, MissedTickBehavior};

use super::connect::{Connector, UpstreamConn};
use crate::body::BoxError;

mod answer;
mod frames;
mod stream;

pub(crate) use answer::Received;
pub(crate) use stream::{Failed, Sent, Stream};

use frames::{Followed, Streams};

/// What HTTP/2 is called in a TLS handshake.
pub(super) const ALPN: &[u8] = b"h2";

/// How many streams one connection carries at most.
const MOST_STREAMS: usize = 100;
/// How much of an answer is on its way or lies here unread.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * (MOST_STREAMS as u32 + 1);
/// The longest head of an answer.
const LONGEST_HEAD: u32 = 64 * 1024;
/// How many reset streams are remembered for what still comes of them.
const MOST_RESETS: usize = 10 * MOST_STREAMS;
/// How long a connection without a stream is kept.
const IDLE: Duration = Duration::from_secs(30);
/// How often those that aren't needed are looked for.
const SWEEP: Duration = Duration::from_millis(500);

/// The connections to one endpoint.
#[derive(Debug)]
pub(super) struct Trunks {
    trunks: Mutex<Vec<Arc<Trunk>>>,
    /// Held while connecting, so that those who come meanwhile find the new connection.
    connecting: tokio::sync::Mutex<()>,
    connector: Connector,
    max_age: Duration,
    /// How often each is asked whether it is still there.
    ping_interval: Option<Duration>,
}

/// A connection that requests share.
#[derive(Debug)]
struct Trunk {
    sender: SendRequest<Bytes>,
    conn: Arc<UpstreamConn>,
    streams: Arc<Streams>,
    seats: Mutex<Seats>,
    born: Instant,
    /// It owes us the answer to a ping, or took no request.
    is_doubted: AtomicBool,
}

#[derive(Debug)]
struct Seats {
    taken: usize,
    /// Since when nobody is there.
    idle: Instant,
}

/// The right to one stream.
#[derive(Debug)]
struct Seat(Arc<Trunk>);

// === impl Trunks ===

impl Trunks {
    /// Must be called inside a runtime.
    pub(super) fn start(
        connector: Connector,
        max_age: Duration,
        ping_interval: Option<Duration>,
    ) -> Arc<Self> {
        let trunks = Arc::new(Self {
            trunks: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            connector,
            max_age,
            ping_interval,
        });
        tokio::spawn(sweep_for_ever(Arc::downgrade(&trunks)));
        trunks
    }

    /// A seat on a connection; on a new one if nowhere is a free one. `afresh` takes another one than first comes to hand, since
    /// that one failed.
    async fn seat(&self, afresh: bool) -> Result<Seat, BoxError> {
        let seat = async {
            if let Some(seat) = self.free_seat(afresh) {
                return Ok(seat);
            }
            let _connecting = self.connecting.lock().await;
            if let Some(seat) = self.free_seat(afresh) {
                return Ok(seat);
            }
            let trunk = connect(&self.connector, self.ping_interval).await?;
            let seat = trunk.seat().ok_or("the upstream allows no stream")?;
            self.lock().push(trunk);
            Ok(seat)
        };
        tokio::time::timeout(self.connector.timeout(), seat).await?
    }

    fn free_seat(&self, afresh: bool) -> Option<Seat> {
        let now = Instant::now();
        let usable = |trunk: &&Arc<Trunk>| {
            !trunk.is_over()
                && !trunk.is_doubted.load(Ordering::Relaxed)
                && now - trunk.born < self.max_age
        };
        let trunks = self.lock();
        let mut usable = trunks.iter().filter(usable);
        match afresh {
            false => usable.find_map(Trunk::seat),
            // A peer that refuses one after the other isn't given ever more connections.
            true => usable.clone().nth(1).and_then(|_| usable.rev().find_map(Trunk::seat)),
        }
    }

    fn sweep(&self, now: Instant) {
        let is_over = |trunk: &mut Arc<Trunk>| {
            let seats = trunk.lock();
            let is_old = now - trunk.born >= self.max_age || now - seats.idle >= IDLE;
            trunk.is_over() || (seats.taken == 0 && is_old)
        };
        // What still has streams lives on with them.
        let over: Vec<_> = self.lock().extract_if(.., is_over).collect();
        drop(over);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Trunk>>> {
        self.trunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sweep_for_ever(trunks: Weak<Trunks>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(trunks) = trunks.upgrade() else {
            return;
        };
        trunks.sweep(Instant::now());
    }
}

/// Returns once both sides have agreed on how many streams there may be.
async fn connect(
    connector: &Connector,
    ping_interval: Option<Duration>,
) -> Result<Arc<Trunk>, BoxError> {
    let (io, conn) = connector.connect().await?;
    if let MaybeHttpsStream::Https(tls) = &io
        && tls.inner().get_ref().1.alpn_protocol() != Some(ALPN)
    {
        return Err("the upstream's TLS doesn't offer HTTP/2".into());
    }
    let streams = Arc::new(Streams::default());
    let io = Followed::new(TokioIo::new(io), Arc::clone(&streams));
    let handshake = Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_max_send_streams(1)
        .max_header_list_size(LONGEST_HEAD)
        .max_concurrent_reset_streams(MOST_RESETS)
        .enable_push(false)
        .handshake(io);
    let (sender, mut connection) = handshake.await?;
    let pings = connection.ping_pong();
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "upstream connection ended");
        }
    });
    tokio::select! {
        () = streams.settled() => {}
        () = conn.closed() => return Err("the upstream doesn't speak HTTP/2".into()),
    }
    let trunk = Arc::new(Trunk {
        sender,
        conn,
        streams,
        seats: Mutex::new(Seats { taken: 0, idle: Instant::now() }),
        born: Instant::now(),
        is_doubted: AtomicBool::new(false),
    });
    if let Some((pings, every)) = pings.zip(ping_interval) {
        tokio::spawn(ping_for_ever(Arc::downgrade(&trunk), pings, every));
    }
    Ok(trunk)
}

/// Ends a connection that doesn't answer until the next ping is due, and doubts it before.
async fn ping_for_ever(trunk: Weak<Trunk>, mut pings: PingPong, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let mut pong = pin!(pings.ping(Ping::opaque()));
        let mut is_late = tokio::time::timeout(every / 4, &mut pong).await.is_err();
        let Some(trunk) = trunk.upgrade() else {
            return;
        };
        if is_late {
            trunk.is_doubted.store(true, Ordering::Relaxed);
            is_late = tokio::time::timeout(every * 3 / 4, pong).await.is_err();
            trunk.is_doubted.store(is_late, Ordering::Relaxed);
        }
        if is_late {
            tracing::warn!("a connection to an upstream answers no ping");
            trunk.conn.abort();
            return;
        }
    }
}

// === impl Trunk ===

impl Trunk {
    /// Whether no more streams may be opened on it.
    fn is_over(&self) -> bool {
        self.streams.are_last() || self.conn.is_closed()
    }

    fn seat(self: &Arc<Self>) -> Option<Seat> {
        let most = self.sender.current_max_send_streams().min(MOST_STREAMS);
        let mut seats = self.lock();
        (seats.taken < most).then(|| {
            seats.taken += 1;
            Seat(Arc::clone(self))
        })
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.0.lock();
        seats.taken -= 1;
        if seats.taken == 0 {
            seats.idle = Instant::now();
        }
    }
}
