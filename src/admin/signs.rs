//! What an operator should know of: said in the log once it has begun, and once it is over, not with every request.
//!
//! That the store is away or counts anew is said by the keeper, which learns of it first.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

use super::Admin;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// A limit that is full for less, while requests wait, just works.
const FULL_FOR: Duration = Duration::from_secs(5);
/// What was over for less isn't over.
const CALM_FOR: Duration = Duration::from_secs(10);
/// From this part of `max_hold` on a request holds its slots for too long; the alert rules say the same.
const TOO_LONG: f64 = 0.8;

/// What was said so far.
#[derive(Debug, Default)]
struct Signs {
    limits: HashMap<Arc<str>, OfLimit>,
    /// Whether each is gone.
    instances: HashMap<Uuid, Sign>,
}

#[derive(Debug, Default)]
struct OfLimit {
    full: Sign,
    slow: Sign,
}

/// Something that is so or not, and said to be so or not.
#[derive(Debug, Default)]
struct Sign {
    said: bool,
    /// Since when it has been other than was said.
    other_since: Option<Instant>,
}

/// Says what there is to say until the process ends, by whichever configuration is in force.
pub async fn watch(admin: Weak<ArcSwap<Admin>>) {
    let mut signs = Signs::default();
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let Some(admin) = admin.upgrade() else { return };
        signs.look(&admin.load_full(), Instant::now());
    }
}

impl Signs {
    fn look(&mut self, admin: &Admin, now: Instant) {
        let outlook = admin.admission.outlook();
        let mut longest = admin.registry.longest_holds(now);
        for (index, limit) in admin.limits.iter().enumerate() {
            let seen = &outlook.sets[index];
            let said = self.limits.entry(Arc::clone(limit)).or_default();
            // While the store is away these figures are of the past.
            if outlook.up && !admin.keyed[index] {
                said.full(limit, (seen.used, seen.slots, seen.waiting), now);
            }
            if let Some(max_hold) = admin.max_hold[index] {
                said.slow(limit, longest.remove(limit).unwrap_or_default(), max_hold, now);
            }
        }
        self.limits.retain(|name, _| admin.limits.contains(name));
        // In recovery the others have yet to be heard of.
        if outlook.up && !outlook.recovering {
            let gone: Vec<_> = outlook.gone().collect();
            for (instance, _) in &outlook.instances {
                self.gone(*instance, gone.contains(instance), outlook.presence, now);
            }
            self.instances.retain(|id, sign| {
                let is_known = outlook.instances.iter().any(|(known, _)| known == id);
                if sign.said && !is_known {
                    tracing::info!(instance = %id, "what an instance that is gone had held is back");
                }
                is_known
            });
        }
    }

    /// After a store that was away each is silent until its next heartbeat, which comes within half a presence. A whole one
    /// would be too long: the store speaks of the silent for a lease only.
    fn gone(&mut self, instance: Uuid, is_gone: bool, presence: Duration, now: Instant) {
        let sign = self.instances.entry(instance).or_default();
        let patience = if sign.said { Duration::ZERO } else { presence / 2 };
        match sign.see(is_gone, patience, now) {
            Some(true) => tracing::warn!(
                %instance,
                "an instance is gone without having left: its slots come back with the end of their leases"
            ),
            Some(false) => tracing::info!(%instance, "an instance that was gone is back"),
            None => {}
        }
    }
}

impl OfLimit {
    fn full(&mut self, limit: &str, (used, slots, waiting): (u32, u32, u32), now: Instant) {
        let is_full = waiting > 0 && used >= slots;
        let patience = if self.full.said { CALM_FOR } else { FULL_FOR };
        match self.full.see(is_full, patience, now) {
            Some(true) => {
                tracing::warn!(limit, slots, waiting, "a limit is full, and requests wait");
            }
            Some(false) => tracing::info!(limit, "nobody is held up by a full limit any more"),
            None => {}
        }
    }

    /// One that is cut at `max_hold` makes room for the next, which may come as far: until then it isn't over.
    fn slow(&mut self, limit: &str, longest: Duration, max_hold: Duration, now: Instant) {
        let is_slow = longest >= max_hold.mul_f64(TOO_LONG);
        let patience = if self.slow.said { CALM_FOR.max(max_hold) } else { Duration::ZERO };
        match self.slow.see(is_slow, patience, now) {
            Some(true) => tracing::warn!(
                limit,
                held = ?longest,
                ?max_hold,
                "a request holds its slots for almost as long as max_hold lets it: its upstream is slow, or hangs"
            ),
            Some(false) => {
                tracing::info!(limit, "no request holds its slots for that long any more")
            }
            None => {}
        }
    }
}

impl Sign {
    /// Takes in what is so now; returns what is to be said, once that has been so for as long as it takes.
    fn see(&mut self, is_so: bool, patience: Duration, now: Instant) -> Option<bool> {
        if is_so == self.said {
            self.other_since = None;
            return None;
        }
        let since = *self.other_since.get_or_insert(now);
        if now.duration_since(since) < patience {
            return None;
        }
        *self = Self { said: is_so, other_since: None };
        Some(is_so)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_and_goes_is_said_once() {
        let (mut sign, start) = (Sign::default(), Instant::now());
        let mut said = Vec::new();
        // Full for a moment; full; room for a moment; room.
        let times = [(0, true), (4, true), (5, false), (6, true), (10, true), (11, true)];
        let more = [(12, false), (20, false), (21, true), (22, false), (31, false), (32, false)];
        for (at, is_full) in times.into_iter().chain(more) {
            let patience = if sign.said { CALM_FOR } else { FULL_FOR };
            let word = sign.see(is_full, patience, start + Duration::from_secs(at));
            said.extend(word.map(|word| (at, word)));
        }
        assert_eq!(said, [(11, true), (32, false)]);
    }
}
