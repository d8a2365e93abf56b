//! Every exchange of the process, and the one task that cuts those that are overdue.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use rustc_hash::FxHashMap;
use tokio::{runtime::Handle, time::Instant};
use uuid::Uuid;

use crate::{exchange::Exchange, reason::Reason};

/// How late a timeout of the upstream may be noticed.
const TICK: Duration = Duration::from_millis(250);
const SHARDS: usize = 16;

/// Nobody outside chooses the keys, so a fast hash will do.
type Shard = FxHashMap<Uuid, Arc<Exchange>>;

/// The exchanges by holder, in shards so that requests seldom wait for each other.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    shards: [Mutex<Shard>; SHARDS],
}

impl Registry {
    /// A registry with its janitor, who ends with it.
    pub(crate) fn start(runtime: &Handle) -> Arc<Self> {
        let registry = Arc::new(Self::default());
        runtime.spawn(sweep_for_ever(Arc::downgrade(&registry)));
        registry
    }

    pub(crate) fn insert(&self, exchange: &Arc<Exchange>) {
        let holder = exchange.holder();
        self.shard(holder).insert(holder, Arc::clone(exchange));
    }

    pub(crate) fn remove(&self, holder: Uuid) {
        let removed = self.shard(holder).remove(&holder);
        // Dropped outside the lock.
        drop(removed);
    }

    /// Cuts one exchange; false if it isn't here.
    pub(crate) fn cut(&self, holder: Uuid, reason: Reason) -> bool {
        let exchange = self.shard(holder).get(&holder).cloned();
        exchange.is_some_and(|exchange| {
            exchange.cut(reason);
            true
        })
    }

    /// For how long the longest request of each limit has had its slots; none where nobody is at the upstream.
    pub(crate) fn longest_holds(&self, now: Instant) -> HashMap<Arc<str>, Duration> {
        let mut longest = HashMap::new();
        for shard in &self.shards {
            // Nobody is looked at while a shard is locked.
            let exchanges: Vec<_> = lock(shard).values().cloned().collect();
            for exchange in exchanges {
                exchange.note_hold(now, &mut longest);
            }
        }
        longest
    }

    /// Cuts who is overdue; returns when to look again.
    fn sweep(&self, now: Instant) -> Instant {
        let mut next = now + TICK;
        for shard in &self.shards {
            let overdue: Vec<_> = lock(shard)
                .values()
                .filter_map(|exchange| {
                    next = exchange.ends().filter(|end| *end > now).unwrap_or(next).min(next);
                    Some((Arc::clone(exchange), exchange.overdue(now)?))
                })
                .collect();
            for (exchange, reason) in overdue {
                exchange.cut(reason);
            }
        }
        next
    }

    fn shard(&self, holder: Uuid) -> MutexGuard<'_, Shard> {
        // The last byte of a UUID of version 7 is random.
        lock(&self.shards[usize::from(holder.as_bytes()[15]) % SHARDS])
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn sweep_for_ever(registry: Weak<Registry>) {
    let mut next = Instant::now();
    loop {
        tokio::time::sleep_until(next).await;
        let Some(registry) = registry.upgrade() else {
            return;
        };
        next = registry.sweep(Instant::now());
    }
}
