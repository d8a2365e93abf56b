//! Who is next, and how a slot is handed over.

use super::*;

/// A class's first waiter, as a candidate for the next slot.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    effective: usize,
    ticket: u64,
    class: usize,
    weight: u32,
    id: Uuid,
    instance: Uuid,
}

impl Set {
    /// Hands free slots to the best waiters, wherever in the fleet they wait.
    pub(in crate::ledger) fn grant(&mut self, context: &mut Context<'_>, spec: &SetSpec) {
        if self.meta.waiting == 0 || self.recovering(context, spec) {
            return;
        }
        self.purge(context, spec);
        let slots = self.meta.slots.unwrap_or(0);
        let mut deaf = HashSet::default();
        for _ in 0..GRANTS_PER_CALL {
            if self.used >= slots {
                return;
            }
            let Some(head) = self.next(context, spec, slots, &deaf) else {
                return;
            };
            if !self.hand_over(context, spec, &head) {
                deaf.insert(head.instance);
            }
        }
    }

    /// The waiter whose turn it is, if a slot may go to it.
    fn next(
        &mut self,
        context: &Context<'_>,
        spec: &SetSpec,
        slots: u32,
        deaf: &HashSet<Uuid>,
    ) -> Option<Head> {
        let mut heads: Vec<Head> = (0..self.wait.len())
            .filter_map(|class| self.head(context, spec, class, deaf))
            .collect();
        heads.sort_unstable();
        for head in heads {
            let mut cap_now = cap(&self.table, head.class, slots);
            if head.effective < self.level(head.class) {
                let aged =
                    cap(&self.table, head.effective, slots).min(slots).min((slots.max(2)) - 1);
                cap_now = cap_now.max(aged);
            }
            if self.used + head.weight <= cap_now {
                return Some(head);
            }
            // Blocked by its weight: nobody passes, or a heavy head would starve behind light ones.
            if self.used < cap_now {
                return None;
            }
        }
        None
    }

    /// Classes that the caller doesn't know are one level, the last.
    fn level(&self, class: usize) -> usize {
        class.min(self.known.len())
    }

    /// The first waiter of a class whose instance lives and hears. Waiters of the dead are dropped on the way.
    fn head(
        &mut self,
        context: &Context<'_>,
        spec: &SetSpec,
        class: usize,
        deaf: &HashSet<Uuid>,
    ) -> Option<Head> {
        let mut from = 0;
        loop {
            let (&ticket, &id) = self.wait[class].range(from..).next()?;
            let info = self.info.get(&id).cloned();
            match info {
                Some(info) if context.living(info.instance) => {
                    if deaf.contains(&info.instance) {
                        from = ticket + 1;
                        continue;
                    }
                    let waited = (context.now - info.at).max(0);
                    let aged = (waited / spec.ageing) as usize;
                    let effective = self.level(class).saturating_sub(aged);
                    return Some(Head {
                        effective,
                        ticket,
                        class,
                        weight: info.weight,
                        id,
                        instance: info.instance,
                    });
                }
                other => {
                    self.wait[class].remove(&ticket);
                    self.info.remove(&id);
                    self.uncount_waiter(other.map(|info| info.instance));
                }
            }
        }
    }

    /// Moves a waiter into the slots. False if its instance doesn't hear and would let the slot lie.
    fn hand_over(&mut self, context: &mut Context<'_>, spec: &SetSpec, head: &Head) -> bool {
        let own = head.instance == context.caller.instance;
        let score = if own {
            context.granted.push(head.id);
            self.fence(context, spec, head.id);
            context.now
        } else {
            if context.fleet.subscribed.get(&head.instance) == Some(&true) {
                if !context.listeners.contains(&head.instance) {
                    return false;
                }
                context.pushes.push((head.instance, head.id, Notice::Granted));
            }
            self.meta.pending.insert(head.id, head.instance);
            context.now - self.meta.lease + spec.grant_ttl
        };
        self.wait[head.class].remove(&head.ticket);
        self.uncount_waiter(Some(head.instance));
        self.put_slot(head.id, score, head.weight);
        if let Some(info) = self.info.get_mut(&head.id) {
            info.at = context.now;
            info.ticket = 0;
        }
        true
    }
}
