//! What tests see of the ledger, spelled as Redis would keep it, and what they do to it behind the operations' back.

use std::{collections::BTreeMap, sync::Arc};

use super::{Ledger, Set, SetSpec, Uuid};

/// A key's name → its fields and values, or members and scores.
pub(crate) type Dump = BTreeMap<String, BTreeMap<String, String>>;

/// What may get lost: each is one key in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Fleet,
    Instances,
    Slots,
    Meta,
    Info,
    /// The queue of this class.
    Wait(&'static str),
}

/// Somebody in a queue.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) class: usize,
    pub(crate) ticket: u64,
    pub(crate) id: Uuid,
    /// None where that was lost.
    pub(crate) instance: Option<Uuid>,
}

impl Ledger {
    /// Who waits, each class in its order.
    pub(crate) fn queue(&self, set: &str) -> Vec<Waiter> {
        self.sets.get(set).map(Set::queue).unwrap_or_default()
    }

    /// What a key's time to live does to a set that nobody has touched for two leases.
    pub(crate) fn expire(&mut self, set: &str) {
        self.sets.remove(set);
    }

    /// Turns every queue around.
    pub(crate) fn reverse_queues(&mut self) {
        self.sets.values_mut().for_each(Set::reverse_queues);
    }

    /// What an instance holds as far as is known: set, id, slots.
    pub(crate) fn held_by(&self, instance: Uuid) -> Vec<(Arc<str>, Uuid, u32)> {
        let sets = self.sets.iter();
        let held = sets.flat_map(|(key, set)| {
            set.held_by(instance).map(|(id, weight)| (Arc::clone(key), id, weight))
        });
        let mut held = Vec::from_iter(held);
        held.sort_unstable();
        held
    }

    pub(crate) fn dump(&self, sets: &[&SetSpec]) -> Dump {
        let mut dump = Dump::new();
        let mut fleet = BTreeMap::new();
        if let Some(known) = &self.fleet {
            fleet.insert("last".into(), known.last.to_string());
            fleet.insert("run".into(), known.run.to_string());
            fleet.insert("recovery".into(), known.recovery.to_string());
            if known.fence > 0 {
                fleet.insert("fence".into(), known.fence.to_string());
            }
            let live = known.live.iter().map(|(set, at)| (format!("live:{set}"), at.to_string()));
            fleet.extend(live);
            let epochs = known.epochs.iter();
            fleet.extend(epochs.map(|(id, epoch)| (format!("epoch:{id}"), epoch.to_string())));
            let subscribed = known.subscribed.iter();
            fleet.extend(
                subscribed.map(|(id, is)| (format!("sub:{id}"), u8::from(*is).to_string())),
            );
        }
        dump.insert("fleet".into(), fleet);
        let instances = self.instances.iter();
        let instances = instances.map(|(id, seen)| (id.to_string(), seen.to_string())).collect();
        dump.insert("instances".into(), instances);
        let nothing = Set::default();
        for set in sets {
            self.sets.get(&set.key).unwrap_or(&nothing).dump(set, &mut dump);
        }
        dump
    }

    /// Loses one key.
    pub(crate) fn lose(&mut self, set: &str, part: Part) {
        match part {
            Part::Fleet => self.fleet = None,
            Part::Instances => self.instances.clear(),
            part => {
                if let Some(set) = self.sets.get_mut(set) {
                    set.lose(part);
                }
            }
        }
    }

    /// A program that isn't Tidegate takes a slot, or renews it.
    pub(crate) fn plain_add(&mut self, set: &str, id: Uuid, score: i64) {
        self.sets.entry(set.into()).or_default().plain_add(id, score);
    }

    /// A program that isn't Tidegate gives a slot back.
    pub(crate) fn plain_remove(&mut self, set: &str, id: Uuid) {
        if let Some(set) = self.sets.get_mut(set) {
            set.plain_remove(id);
        }
    }

    /// An instance seems to have been silent, or gone, for so much longer.
    pub(crate) fn heard_earlier(&mut self, instance: Uuid, by: i64) {
        if let Some(at) = self.instances.get_mut(&instance) {
            *at -= at.signum() * by;
        }
    }

    pub(crate) fn holds(&self, set: &str, id: Uuid) -> bool {
        self.sets.get(set).is_some_and(|set| set.holds(id))
    }

    /// The clock seems to go back by this much at the next operation.
    pub(crate) fn last_seen_later(&mut self, by: i64) {
        if let Some(fleet) = &mut self.fleet {
            fleet.last += by;
        }
    }
}
