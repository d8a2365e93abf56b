//! What `/status` tells: every limit, the store, the fleet. The keys are documented, and stay as they are.

use serde_json::{Map, Value, json};

use super::{Admin, endpoints};
use crate::{
    leases::Outlook,
    store::{SetStatus, StoreError},
};

impl Admin {
    /// Everything, as it is now where the store answers.
    pub(super) async fn status(&self) -> Value {
        let outlook = self.admission.outlook();
        let mut limits = Map::new();
        let mut failed = None;
        for (index, name) in self.limits.iter().enumerate() {
            // A store that doesn't answer once isn't asked again for every limit.
            let status = match &failed {
                None => self.admission.status(index).await,
                Some(error) => Err(StoreError::clone(error)),
            };
            if let Err(error) = &status {
                failed.get_or_insert_with(|| error.clone());
            }
            limits.insert(name.to_string(), self.limit_status(&outlook, index, status));
        }
        let rates = self.rates.iter();
        let rates = rates.map(|rate| (rate.to_string(), json!({ "refused": self.refused(rate) })));
        let presence = outlook.presence;
        json!({
            "instance": self.instance.to_string(),
            "version": env!("CARGO_PKG_VERSION"),
            "store": {
                "kind": self.store,
                "up": outlook.up,
                "when_down": self.when_down,
                "away": outlook.away,
            },
            "recovery": outlook.recovering,
            "draining": *self.draining.borrow(),
            "last_reload": self.metrics.reloads().last().map(|(at, worked)| json!({
                "at": humantime::format_rfc3339_seconds(at).to_string(),
                "worked": worked,
            })),
            "instances": outlook.instances.iter().map(|(instance, heard)| json!({
                "id": instance.to_string(),
                "heard_ms": heard.as_millis() as u64,
                "gone": *heard > presence,
            })).collect::<Vec<_>>(),
            "classes": self.classes.iter().map(|class| &**class).collect::<Vec<_>>(),
            "refused": self.refused(""),
            "rates": rates.collect::<Map<_, _>>(),
            "limits": limits,
            "upstreams": endpoints::status(&self.upstreams),
        })
    }

    /// One limit: exact where the store answers, else as of the last heartbeat, with all waiters in the first class.
    pub(super) fn limit_status(
        &self,
        outlook: &Outlook,
        index: usize,
        status: Result<SetStatus, StoreError>,
    ) -> Value {
        let seen = &outlook.sets[index];
        let is_exact = status.is_ok() && !self.keyed[index];
        let local = status.as_ref().map_or(outlook.local[index], |status| {
            status.by_instance.get(&self.instance).copied().unwrap_or(0)
        });
        let hold = outlook.hold[index].map(|hold| hold.as_secs_f64());
        let status = status.unwrap_or_else(|_| SetStatus {
            slots: seen.slots,
            used: seen.used,
            waiting: vec![(seen.waiting, 0)],
            ..SetStatus::default()
        });
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
        let queue_seconds =
            hold.map(|hold| f64::from(waiting) * hold / f64::from(status.slots.max(1)));
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
            "overridden": seen.order.as_ref().is_some_and(|order| order.slots.is_some()),
            "keyed": self.keyed[index],
            "exact": is_exact,
            "refused": self.refused(&self.limits[index]),
            "holders_by_instance": by_instance.collect::<Map<_, _>>(),
        })
    }

    /// How many this instance refused in the name of a limit or a rate, or of neither, by reason; since its start.
    fn refused(&self, name: &str) -> Map<String, Value> {
        let refused = self.metrics.refusals(name).into_iter();
        refused.map(|(reason, count)| (reason.to_owned(), json!(count))).collect()
    }
}
