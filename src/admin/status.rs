//! What `/status` tells: every limit, the store, the fleet. The keys are documented, and stay as they are.

use std::{collections::HashMap, sync::Arc, time::Duration};

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::{Admin, endpoints};
use crate::{
    leases::Outlook,
    store::{SetStatus, StoreError},
};

/// What this instance knows without asking the store.
pub(super) struct Known {
    pub(super) outlook: Outlook,
    longest_holds: HashMap<Arc<str>, Duration>,
}

impl Admin {
    pub(super) fn known(&self) -> Known {
        let longest_holds = self.registry.longest_holds(Instant::now());
        Known { outlook: self.admission.outlook(), longest_holds }
    }

    /// Everything, as it is now where the store answers.
    pub(super) async fn status(&self) -> Value {
        let known = self.known();
        let Known { outlook, .. } = &known;
        let mut limits = Map::new();
        let (mut failed, mut recovers) = (None, outlook.recovering);
        for (index, name) in self.limits.iter().enumerate() {
            // A store that doesn't answer once isn't asked again for every limit.
            let status = match &failed {
                None => self.admission.status(index).await,
                Some(error) => Err(StoreError::clone(error)),
            };
            if let Err(error) = &status {
                failed.get_or_insert_with(|| error.clone());
            }
            let status = self.limit_status(&known, index, status);
            recovers |= status["recovering"] == true;
            limits.insert(name.to_string(), status);
        }
        let rates = self.rates.iter();
        let rates = rates.map(|rate| (rate.to_string(), json!({ "refused": self.refused(rate) })));
        let gone: Vec<_> = outlook.gone().collect();
        json!({
            "instance": self.instance.to_string(),
            "version": env!("CARGO_PKG_VERSION"),
            "store": {
                "kind": self.store,
                "up": outlook.up,
                "when_down": self.when_down,
                "away": outlook.away,
            },
            "recovery": recovers,
            "draining": *self.draining.borrow(),
            "last_reload": self.metrics.reloads().last().map(|(at, worked)| json!({
                "at": humantime::format_rfc3339_seconds(at).to_string(),
                "worked": worked,
            })),
            "instances": outlook.instances.iter().map(|(instance, heard)| json!({
                "id": instance.to_string(),
                "heard_ms": ms(*heard),
                "gone": gone.contains(instance),
            })).collect::<Vec<_>>(),
            "classes": self.classes.iter().map(|class| &**class).collect::<Vec<_>>(),
            "refused": self.refused(""),
            "rates": rates.collect::<Map<_, _>>(),
            "limits": limits,
            "upstreams": endpoints::status(&self.upstreams),
        })
    }

    /// One limit: exact where the store answers and knows of all who hold, else as this instance knows it, which is told with its age.
    pub(super) fn limit_status(
        &self,
        Known { outlook, longest_holds }: &Known,
        index: usize,
        status: Result<SetStatus, StoreError>,
    ) -> Value {
        let name = &self.limits[index];
        let is_recovering = self.is_recovering(outlook, index, status.as_ref().ok());
        // A set that no heartbeat has told of isn't counted yet.
        let counted = status
            .ok()
            .filter(|set| outlook.up && !is_recovering && !self.keyed[index] && set.lease > 0);
        let is_exact = counted.is_some();
        let status = counted.unwrap_or_else(|| self.admission.known(outlook, index));
        let local = status.by_instance.get(&self.instance).copied().unwrap_or(0);
        let hold = outlook.hold[index].map(|hold| hold.as_secs_f64());
        let waiting: u32 = status.waiting.iter().map(|(count, _)| count).sum();
        let by_class: Map<_, _> = self
            .classes
            .iter()
            .zip(status.waiting.iter().map(|(count, _)| *count).chain(std::iter::repeat(0)))
            .map(|(class, count)| (class.to_string(), json!(count)))
            .collect();
        let by_instance = status.by_instance.iter();
        let by_instance = by_instance.map(|(id, slots)| (id.to_string(), json!(slots)));
        let arrival_rate = outlook.arrival_rate[index];
        let oldest = status.waiting.iter().map(|(_, oldest)| *oldest).max();
        let longest_hold = longest_holds.get(name).copied();
        // Holds that haven't ended are no part of the mean: of an upstream that hangs they say more.
        let held = longest_hold.map(|held| held.as_secs_f64()).into_iter().chain(hold);
        let queue_seconds = held
            .reduce(f64::max)
            .filter(|_| status.slots > 0)
            .map(|held| f64::from(waiting) * held / f64::from(status.slots));
        let order = outlook.sets[index].order.as_ref();
        json!({
            "slots": status.slots,
            "in_use": status.used,
            "local": local,
            "share": outlook.shares[index],
            "waiting": by_class,
            "oldest_wait_ms": oldest.unwrap_or(0),
            "queue_seconds": queue_seconds,
            "arrival_rate": arrival_rate,
            "needed_slots": hold.map(|hold| arrival_rate * hold),
            "hold_ms": hold.map(|hold| hold * 1000.0),
            "longest_hold_ms": longest_hold.map(ms),
            "max_hold_ms": self.max_hold[index].map(ms),
            "overridden": order.is_some_and(|order| order.slots.is_some()),
            "keyed": self.keyed[index],
            "exact": is_exact,
            "recovering": is_recovering,
            "stale_ms": if is_exact { 0 } else { ms(outlook.seen) },
            "refused": self.refused(name),
            "holders_by_instance": by_instance.collect::<Map<_, _>>(),
        })
    }

    /// Whether a limit is being counted anew, as the store says, or said last.
    pub(super) fn is_recovering(
        &self,
        outlook: &Outlook,
        index: usize,
        status: Option<&SetStatus>,
    ) -> bool {
        match status {
            Some(status) => self.admission.is_recovering(outlook, index, status),
            None => outlook.recovering,
        }
    }

    /// How many this instance refused in the name of a limit or a rate, or of neither, by reason; since its start.
    fn refused(&self, name: &str) -> Map<String, Value> {
        let refused = self.metrics.refusals(name).into_iter();
        refused.map(|(reason, count)| (reason.to_owned(), json!(count))).collect()
    }
}

fn ms(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
