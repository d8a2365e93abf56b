//! How keys and channels are spelled in Redis. No other file does.

use uuid::Uuid;

use super::{RateSpec, SetSpec};

/// Spells keys and channels under one prefix.
#[derive(Debug)]
pub(super) struct Keys {
    /// Goes in front of a semaphore's keys: the prefix and `sem:`.
    semaphores: String,
    /// The same for a rate's windows.
    rates: String,
    /// A hash: when the fleet was last seen, by which run of the server, and what it knows of sets and instances.
    pub(super) fleet: String,
    /// A sorted set: instance, by its last heartbeat.
    pub(super) instances: String,
    /// Goes in front of an instance in the name of the channel on which it hears of grants.
    pub(super) channels: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            semaphores: format!("{prefix}sem:"),
            rates: format!("{prefix}rl:"),
            fleet: format!("{prefix}tidegate:fleet"),
            instances: format!("{prefix}tidegate:instances"),
            channels: format!("{prefix}tidegate:push:"),
        }
    }

    pub(super) fn channel(&self, instance: Uuid) -> String {
        format!("{}{instance}", self.channels)
    }

    /// The key of a set's slots. The scripts that write make the others from it.
    pub(super) fn slots(&self, set: &SetSpec) -> String {
        [&self.semaphores, &*set.key].concat()
    }

    /// Hands over the keys of a set in the order of the scripts: slots, meta, info, and a queue for each class.
    pub(super) fn of_set(&self, set: &SetSpec, mut with: impl FnMut(&str)) {
        let mut key = String::with_capacity(self.semaphores.len() + set.key.len() + 32);
        key.push_str(&self.semaphores);
        key.push_str(&set.key);
        with(&key);
        let stem = key.len();
        for suffix in [":meta", ":info"] {
            key.push_str(suffix);
            with(&key);
            key.truncate(stem);
        }
        key.push_str(":wait:");
        let stem = key.len();
        for class in set.classes.iter() {
            key.push_str(&class.name);
            with(&key);
            key.truncate(stem);
        }
    }

    /// The field of the fleet's hash that tells of a set's holders.
    pub(super) const LIVE: &str = "live:";

    /// The key of a rate's window.
    pub(super) fn of_rate(&self, rate: &RateSpec) -> String {
        format!("{}{}", self.rates, rate.key)
    }

    /// The keys of a set that aren't for one of its classes.
    pub(super) const OF_SET: usize = 3;
}
