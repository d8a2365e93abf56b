//! Why a connection isn't served, and how loudly that is said.

use std::{net::SocketAddr, sync::Mutex, time::Duration};

use tokio::time::Instant;

use super::client::lock;

/// Anyone can be turned away as often as they like, so the log hears of it no more often than this.
const PAUSE: Duration = Duration::from_secs(10);

/// Why a connection was closed before it was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnedAway {
    /// Its address has as many as it may.
    Crowd,
    /// It didn't say whose it is, or not properly.
    ProxyHeader,
    /// It isn't one that may say so.
    Stranger,
}

/// Says it now and then.
#[derive(Debug, Default)]
pub(super) struct Notice(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    since: u64,
}

impl TurnedAway {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Crowd => "crowd",
            Self::ProxyHeader => "proxy_header",
            Self::Stranger => "stranger",
        }
    }
}

impl Notice {
    pub(super) fn of(&self, peer: SocketAddr, why: TurnedAway) {
        let now = Instant::now();
        let mut said = lock(&self.0);
        said.since += 1;
        if said.last.is_some_and(|last| now - last < PAUSE) {
            return;
        }
        said.last = Some(now);
        let connections = std::mem::take(&mut said.since);
        drop(said);
        tracing::warn!(%peer, why = why.as_str(), connections, "connections were turned away");
    }
}
