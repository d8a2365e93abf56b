//! How long a request may rely on its lease.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// The store knows nothing of the request, so there is no lease that could end.
const NEVER: u64 = u64::MAX;

/// The end of a lease that is cut, moved on by every renewal that the store confirms. Clones share it.
#[derive(Clone, Debug)]
pub struct Guard {
    born: Instant,
    /// When the last operation was sent that confirmed the lease, µs after the birth.
    confirmed: Arc<AtomicU64>,
    lasts: Duration,
}

impl Guard {
    pub(super) fn new(lasts: Duration, confirmed: Option<Instant>, now: Instant) -> Self {
        let guard =
            Self { born: confirmed.unwrap_or(now), confirmed: Arc::new(NEVER.into()), lasts };
        if let Some(confirmed) = confirmed {
            guard.confirm(confirmed);
        }
        guard
    }

    pub(super) fn confirm(&self, sent: Instant) {
        let after = sent.saturating_duration_since(self.born).as_micros() as u64;
        self.confirmed.store(after, Ordering::Release);
    }

    /// When the request must have ended; none if the store has never counted it.
    pub fn ends(&self) -> Option<Instant> {
        match self.confirmed.load(Ordering::Acquire) {
            NEVER => None,
            after => Some(self.born + Duration::from_micros(after) + self.lasts),
        }
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.ends().is_some_and(|end| end <= now)
    }
}
