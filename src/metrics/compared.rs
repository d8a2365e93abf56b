//! What is compared with something else: open bodies with slots that are counted, renewals with the lease, holds with the longest.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::LimitLabel;
use crate::config::Limit;

type Seconds = Gauge<f64, AtomicU64>;

#[derive(Debug)]
pub(super) struct ComparedFamilies {
    open: Family<LimitLabel, Gauge>,
    overshoot: Family<LimitLabel, Gauge>,
    spare: Family<LimitLabel, Gauge>,
    renew_lag: Family<LimitLabel, Seconds>,
    lease: Family<LimitLabel, Seconds>,
    max_hold: Family<LimitLabel, Seconds>,
}

/// Of one limit.
#[derive(Clone, Debug)]
pub(super) struct Compared {
    pub(super) open: Gauge,
    pub(super) overshoot: Gauge,
    pub(super) spare: Gauge,
    pub(super) renew_lag: Seconds,
}

impl ComparedFamilies {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let families = Self {
            open: Family::default(),
            overshoot: Family::default(),
            spare: Family::default(),
            renew_lag: Family::default(),
            lease: Family::default(),
            max_hold: Family::default(),
        };
        let Self { open, overshoot, spare, renew_lag, lease, max_hold } = &families;
        registry.register(
            "overshoot",
            "Slots that requests open at the upstream take, less those that the store counts for this instance, at least 0",
            overshoot.clone(),
        );
        registry.register(
            "lease_renew_lag_seconds",
            "How long the most overdue renewal of this instance is overdue",
            renew_lag.clone(),
        );
        let semaphore = registry.sub_registry_with_prefix("semaphore");
        semaphore.register(
            "open",
            "Slots that requests of this instance take which are open at the upstream",
            open.clone(),
        );
        semaphore.register(
            "spare_holders",
            "Slots that this instance keeps for its next request",
            spare.clone(),
        );
        semaphore.register("lease_seconds", "The lease, as configured", lease.clone());
        semaphore.register(
            "max_hold_seconds",
            "The longest hold, as configured; infinite if there is none",
            max_hold.clone(),
        );
        families
    }

    pub(super) fn of(&self, label: &LimitLabel, limit: &Limit) -> Compared {
        self.lease.get_or_create(label).set(limit.lease.as_secs_f64());
        let max_hold = limit.max_hold.map_or(f64::INFINITY, |hold| hold.as_secs_f64());
        self.max_hold.get_or_create(label).set(max_hold);
        Compared {
            open: self.open.get_or_create_owned(label),
            overshoot: self.overshoot.get_or_create_owned(label),
            spare: self.spare.get_or_create_owned(label),
            renew_lag: self.renew_lag.get_or_create_owned(label),
        }
    }

    pub(super) fn forget(&self, label: &LimitLabel) {
        for gauges in [&self.open, &self.overshoot, &self.spare] {
            gauges.remove(label);
        }
        for gauges in [&self.renew_lag, &self.lease, &self.max_hold] {
            gauges.remove(label);
        }
    }
}

impl Compared {
    /// `opened` was counted before the others, and is counted once more, so that a request which begins or ends meanwhile
    /// doesn't look like one without a slot.
    pub(super) fn compare(&self, opened: i64, counted: u32, spare: u32, lag: Duration) {
        self.overshoot.set((opened.min(self.open.get()) - i64::from(counted)).max(0));
        self.spare.set(spare.into());
        self.renew_lag.set(lag.as_secs_f64());
    }
}
