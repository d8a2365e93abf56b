//! What tests see of a set, spelled as Redis would keep it, and what they do to it behind the operations' back.

use std::collections::BTreeMap;

use super::{Set, SetSpec};
use crate::ledger::{
    ClassSpec, Uuid,
    testing::{Dump, Part, Waiter},
};

impl Set {
    pub(in crate::ledger) fn dump(&self, spec: &SetSpec, into: &mut Dump) {
        let mut slots = BTreeMap::new();
        for (id, (score, weight)) in &self.slots {
            slots.insert(id.to_string(), score.to_string());
            for part in 2..=*weight {
                slots.insert(format!("{id}~{part}"), score.to_string());
            }
        }
        into.insert(format!("{} slots", spec.key), slots);
        into.insert(format!("{} meta", spec.key), self.dump_meta());
        let infos = self.info.iter().map(|(id, info)| {
            let class = &self.table[info.class].name;
            let text =
                format!("{} {class} {} {} {}", info.instance, info.weight, info.at, info.route);
            (id.to_string(), text)
        });
        into.insert(format!("{} info", spec.key), infos.collect());
        for ClassSpec { name, .. } in spec.classes.iter() {
            let queue = self.queue_of(name).into_iter().flatten();
            let queue = queue.map(|(ticket, id)| (id.to_string(), ticket.to_string())).collect();
            into.insert(format!("{} wait {name}", spec.key), queue);
        }
    }

    pub(in crate::ledger) fn queue(&self) -> Vec<Waiter> {
        let queues = self.wait.iter().enumerate();
        let waiters = queues.flat_map(|(class, queue)| {
            queue.iter().map(move |(&ticket, &id)| {
                let instance = self.info.get(&id).map(|info| info.instance);
                Waiter { class, ticket, id, instance }
            })
        });
        waiters.collect()
    }

    pub(in crate::ledger) fn reverse_queues(&mut self) {
        for queue in &mut self.wait {
            let ids = Vec::from_iter(queue.values().rev().copied());
            for ((ticket, waiter), id) in queue.iter_mut().zip(ids) {
                *waiter = id;
                if let Some(info) = self.info.get_mut(&id) {
                    info.ticket = *ticket;
                }
            }
        }
    }

    pub(in crate::ledger) fn held_by(&self, instance: Uuid) -> impl Iterator<Item = (Uuid, u32)> {
        let slots = self.slots.iter().map(|(&id, &(_, weight))| (id, weight));
        slots.filter(move |(id, _)| self.info.get(id).is_some_and(|info| info.instance == instance))
    }

    fn dump_meta(&self) -> BTreeMap<String, String> {
        let meta = &self.meta;
        let mut fields = BTreeMap::new();
        let mut put = |field: String, value: String| fields.insert(field, value);
        if let Some(slots) = meta.slots {
            put("slots".into(), slots.to_string());
            put("lease".into(), meta.lease.to_string());
        }
        if let Some(ticket) = meta.ticket {
            put("ticket".into(), ticket.to_string());
        }
        if let Some(order) = &meta.order {
            let claims: String = order.claims.iter().map(|claim| format!("{claim},")).collect();
            let text = match order.slots {
                Some(slots) => format!("{} {slots} ,{claims}", order.version),
                None => format!("{} - -", order.version),
            };
            put("override".into(), text);
        }
        if meta.dirty {
            put("dirty".into(), "1".into());
        }
        put("waiting".into(), meta.waiting.to_string());
        put("swept".into(), meta.swept.to_string());
        for (instance, (slots, lease)) in &meta.claims {
            put(format!("claim:{instance}"), format!("{slots} {lease}"));
        }
        for (instance, count) in &meta.waiters {
            put(format!("waiters:{instance}"), count.to_string());
        }
        for (id, instance) in &meta.pending {
            put(format!("pending:{id}"), instance.to_string());
        }
        fields
    }

    pub(in crate::ledger) fn lose(&mut self, part: Part) {
        match part {
            Part::Slots => {
                self.slots.clear();
                self.by_score.clear();
                self.used = 0;
            }
            Part::Meta => self.meta = super::Meta::default(),
            Part::Info => self.info.clear(),
            Part::Wait(class) => {
                if let Some(place) = self.table.iter().position(|known| &*known.name == class) {
                    self.wait[place].clear();
                }
            }
            Part::Fleet | Part::Instances => unreachable!("not of a set"),
        }
    }

    pub(in crate::ledger) fn holds(&self, id: Uuid) -> bool {
        self.slots.contains_key(&id)
    }

    pub(in crate::ledger) fn plain_add(&mut self, id: Uuid, score: i64) {
        match self.slots.insert(id, (score, 1)) {
            Some((old, _)) => {
                self.by_score.remove(&(old, id));
            }
            None => self.used += 1,
        }
        self.by_score.insert((score, id));
    }

    pub(in crate::ledger) fn plain_remove(&mut self, id: Uuid) {
        if let Some((score, weight)) = self.slots.remove(&id) {
            self.by_score.remove(&(score, id));
            self.used -= weight;
        }
    }
}
