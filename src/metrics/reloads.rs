//! How the latest attempt to read the configuration again went.

use std::{
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Counts attempts, and remembers the latest.
#[derive(Debug, Default)]
pub struct Reloads {
    count: Family<ResultLabel, Counter>,
    worked: Gauge,
    loaded: Gauge,
    last: Mutex<Option<(SystemTime, bool)>>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

impl Reloads {
    /// The configuration of the start counts as loaded now.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let reloads = Self::default();
        for result in ["applied", "refused"] {
            reloads.count.get_or_create_owned(&ResultLabel { result });
        }
        registry.register(
            "config_reloads",
            "Attempts to read the configuration again, by result",
            reloads.count.clone(),
        );
        registry.register(
            "config_last_reload_successful",
            "0 while the latest configuration could not be used, and an older one is in force",
            reloads.worked.clone(),
        );
        registry.register(
            "config_loaded_timestamp_seconds",
            "When the configuration in force was read",
            reloads.loaded.clone(),
        );
        reloads.worked.set(1);
        reloads.loaded.set(seconds(SystemTime::now()));
        reloads
    }

    /// Notes an attempt.
    pub fn note(&self, worked: bool) {
        let now = SystemTime::now();
        let result = if worked { "applied" } else { "refused" };
        self.count.get_or_create(&ResultLabel { result }).inc();
        self.worked.set(worked.into());
        if worked {
            self.loaded.set(seconds(now));
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, worked));
    }

    /// When the latest attempt was, and whether it worked; none if there was none.
    pub fn last(&self) -> Option<(SystemTime, bool)> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64
}
