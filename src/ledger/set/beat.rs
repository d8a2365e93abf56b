//! What heartbeats do to a semaphore, and what is seen of it.

use super::*;

impl Set {
    /// Drops the waiters of instances that are gone, and their claims once no lease of theirs can last.
    pub(in crate::ledger) fn forget_the_gone(&mut self, context: &mut Context<'_>, leaving: bool) {
        let me = context.caller.instance;
        if leaving {
            self.drop_waiters(me);
            self.meta.claims.remove(&me);
        }
        let claims: Vec<(Uuid, i64)> =
            self.meta.claims.iter().map(|(&instance, &(_, lease))| (instance, lease)).collect();
        for (instance, lease) in claims {
            if instance == me || context.living(instance) {
                continue;
            }
            self.drop_waiters(instance);
            if !context.seen_within(instance, lease) {
                self.meta.claims.remove(&instance);
            }
        }
        self.settle_policy(context);
    }

    pub(super) fn queue_of(&self, class: &str) -> Option<&BTreeMap<u64, Uuid>> {
        let place = self.table.iter().position(|known| &*known.name == class)?;
        self.wait.get(place)
    }

    /// Nobody holds and nobody waits.
    pub(in crate::ledger) fn is_idle(&self) -> bool {
        self.slots.is_empty() && self.meta.waiting == 0
    }

    fn drop_waiters(&mut self, instance: Uuid) {
        if self.meta.waiters.remove(&instance).unwrap_or(0) == 0 {
            return;
        }
        let (info, meta) = (&mut self.info, &mut self.meta);
        for queue in &mut self.wait {
            queue.retain(|_, id| {
                let gone = info.get(id).is_some_and(|info| info.instance == instance);
                if gone {
                    info.remove(id);
                    meta.waiting = meta.waiting.saturating_sub(1);
                }
                !gone
            });
        }
    }

    /// Renews a holder; one that was lost is counted again, above N if need be, since its request really runs.
    pub(in crate::ledger) fn renew(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        renew: &Renew,
    ) -> Renewed {
        let id = renew.ask.id;
        let kept = self.slots.contains_key(&id);
        if !kept {
            self.dequeue(id, renew.ask.class);
            if !renew.lapsed && !self.recovering(context, spec) {
                context.fleet.recovery = context.now;
            }
        }
        self.put_slot(id, context.now, renew.weight);
        self.info.entry(id).or_insert_with(|| Info {
            instance: context.caller.instance,
            route: Arc::clone(&renew.ask.route),
            class: renew.ask.class,
            weight: renew.weight,
            at: context.now,
            ticket: 0,
        });
        if kept { Renewed::Kept } else { Renewed::Readded }
    }

    /// Mends what the loss of a single key, or a purge, left inconsistent.
    pub(in crate::ledger) fn tidy(&mut self) {
        let slots = &self.slots;
        self.meta.pending.retain(|id, _| slots.contains_key(id));
        let total = self.wait.iter().map(BTreeMap::len).sum::<usize>() as u32;
        let counted: u32 = self.meta.waiters.values().sum();
        if self.meta.waiting != total || counted != total {
            self.count_waiters_anew();
        }
        if self.meta.dirty || self.info.len() > (self.used + self.meta.waiting) as usize {
            self.meta.dirty = false;
            let unknown: Vec<Uuid> = self
                .info
                .iter()
                .filter(|&(id, info)| {
                    !self.slots.contains_key(id) && self.ticket_of(*id, info.class).is_none()
                })
                .map(|(id, _)| *id)
                .collect();
            for id in unknown {
                self.info.remove(&id);
            }
        }
    }

    fn count_waiters_anew(&mut self) {
        let (info, meta) = (&self.info, &mut self.meta);
        meta.waiting = 0;
        meta.waiters.clear();
        for queue in &mut self.wait {
            queue.retain(|_, id| {
                let Some(info) = info.get(id) else {
                    return false;
                };
                meta.waiting += 1;
                *meta.waiters.entry(info.instance).or_default() += 1;
                true
            });
        }
    }

    /// Grants of the caller's waiters that it may not have heard of.
    pub(in crate::ledger) fn collect_pending(
        &self,
        context: &Context<'_>,
        pending: &mut Vec<Uuid>,
    ) {
        let me = context.caller.instance;
        let mut mine: Vec<Uuid> = self
            .meta
            .pending
            .iter()
            .filter(|&(_, &instance)| instance == me)
            .map(|(&id, _)| id)
            .collect();
        mine.sort_unstable();
        pending.append(&mut mine);
    }

    pub(in crate::ledger) fn state(&self, context: &Context<'_>) -> SetState {
        SetState {
            slots: self.meta.slots.unwrap_or(0),
            used: self.used,
            waiting: self.meta.waiting,
            mine: self.meta.waiters.get(&context.caller.instance).copied().unwrap_or(0),
            lease: self.meta.lease,
            order: self.meta.order.clone(),
        }
    }

    pub(in crate::ledger) fn status(
        &self,
        now: i64,
        recovery: i64,
        classes: &[ClassSpec],
    ) -> SetStatus {
        let mut by_instance = HashMap::default();
        let oldest_valid = now - self.meta.lease;
        let mut used = 0;
        for (id, &(score, weight)) in &self.slots {
            if score < oldest_valid {
                continue;
            }
            used += weight;
            if let Some(info) = self.info.get(id) {
                *by_instance.entry(info.instance).or_default() += weight;
            }
        }
        let oldest = |queue: &BTreeMap<u64, Uuid>| {
            let first = queue.values().next().and_then(|id| self.info.get(id));
            first.map_or(0, |info| (now - info.at).max(0))
        };
        SetStatus {
            slots: self.meta.slots.unwrap_or(0),
            lease: self.meta.slots.map_or(0, |_| self.meta.lease),
            used,
            waiting: classes
                .iter()
                .map(|class| self.queue_of(&class.name))
                .map(|queue| queue.map_or((0, 0), |queue| (queue.len() as u32, oldest(queue))))
                .collect(),
            by_instance,
            recovery,
            now,
        }
    }
}
