//! What goes to the store.

use super::*;

impl Keeper {
    /// What is to be sent now, if anything.
    pub(in crate::leases) fn next_call(&mut self, now: Instant) -> Option<Call> {
        let mut call = Call::default();
        // On a new connection what is held comes first: a release might hand on a slot that isn't free.
        if !self.reasserting {
            self.fill_releases(&mut call);
        }
        if self.next_beat <= now || self.reasserting {
            call.heartbeat = Some(self.compose_heartbeat(now));
        }
        if !self.reasserting {
            self.fill_acquires(&mut call, now);
        }
        let is_idle = self.entries.is_empty() && self.unlisted == 0;
        if call.is_empty() && self.leaving == Leaving::Wanted && is_idle {
            self.leaving = Leaving::Said;
            let mut heartbeat = self.compose_heartbeat(now);
            heartbeat.leaving = true;
            call.heartbeat = Some(heartbeat);
        }
        (!call.is_empty()).then_some(call)
    }

    pub(in crate::leases) fn fill_releases(&mut self, call: &mut Call) {
        while call.releases.len() < BATCH
            && let Some(id) = self.gone.pop_front()
        {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            if entry.phase == Phase::Leaving {
                entry.phase = Phase::Releasing;
                entry.said = true;
                call.releases.push(Release {
                    ask: entry.ask.clone(),
                    queued: entry.queued || entry.again,
                    refund: !entry.admitted && !entry.ask.rates.is_empty(),
                });
            }
        }
    }

    pub(in crate::leases) fn fill_acquires(&mut self, call: &mut Call, now: Instant) {
        while call.acquires.len() < BATCH
            && let Some(id) = self.new.pop_front()
        {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            if entry.phase == Phase::New {
                entry.phase = Phase::Asked;
                call.acquires.push(Acquire {
                    ask: entry.ask.clone(),
                    waited: ms(now.duration_since(entry.asked)),
                    may_wait: entry.ask.wants.iter().any(|want| want.set.queue > 0),
                    again: entry.again,
                });
            }
        }
    }

    pub(in crate::leases) fn compose_heartbeat(&mut self, now: Instant) -> Heartbeat {
        // Without a subscription, grants are collected by heartbeats: more often then.
        let pace = if self.subscribed { 1 } else { 4 };
        self.next_beat = now + self.settings.heartbeat / pace;
        self.reasserting = false;
        self.cool_idle(now);
        let mut beats = Beats::of_limits(&self.settings.limits, &mut self.limits);
        let mut renewals = 0;
        for entry in self.entries.values_mut() {
            if matches!(entry.phase, Phase::Leaving | Phase::Releasing) {
                continue;
            }
            // Its slot may be another's already, and it is about to be cut.
            if entry.guard.as_ref().is_some_and(|guard| guard.is_over(now)) {
                continue;
            }
            let mut due = false;
            for want in &entry.ask.wants[..entry.held] {
                let every = self.settings.limits[want.set.limit].renew;
                let every = every.saturating_sub(self.settings.heartbeat);
                let last = entry.confirmed.max(entry.renewed);
                if last >= self.renew_since && now.duration_since(last) < every {
                    continue;
                }
                due = true;
                let age = ms(now.duration_since(entry.confirmed));
                let lapsed = entry.uncounted || age > want.set.lease;
                let renew = Renew { ask: entry.ask.clone(), weight: want.weight, lapsed };
                beats.of(&want.set).renew.push(renew);
            }
            if entry.phase == Phase::Waiting && entry.ask.wants[entry.held].set.keyed {
                beats.of(&entry.ask.wants[entry.held].set);
            }
            if due {
                entry.renewed = now;
                entry.again |= entry.uncounted;
                renewals += 1;
            }
            if renewals == RENEWALS_PER_CALL {
                self.next_beat = now;
                self.reasserting = self.renew_since > entry.confirmed;
                break;
            }
        }
        let beats = beats.list;
        let longest = self.settings.limits.iter().map(|limit| limit.set.lease).max();
        let within = longest.unwrap_or(0) + ms(self.settings.op_timeout);
        Heartbeat { subscribed: self.subscribed, leaving: false, within, beats }
    }
}

#[cfg(test)]
impl Keeper {
    /// How many ids are listed for requests that ask, wait or run, and how many things besides.
    pub(in crate::leases) fn listed(&self) -> (usize, usize) {
        let is_leaving = |entry: &&Entry| matches!(entry.phase, Phase::Leaving | Phase::Releasing);
        let leaving = self.entries.values().filter(is_leaving).count();
        let queues = self.new.len() + self.gone.len() + self.deadlines.len();
        (self.entries.len() - leaving, leaving + queues)
    }
}

/// The beats of a heartbeat: one for each limit without a key, and one for each set of a key's value that is in use.
struct Beats {
    list: Vec<Beat>,
    places: FxHashMap<Arc<str>, usize>,
}

impl Beats {
    pub(in crate::leases) fn of_limits(
        limits: &[LimitSettings],
        states: &mut [LimitState],
    ) -> Self {
        let mut beats =
            Self { list: Vec::with_capacity(limits.len()), places: FxHashMap::default() };
        for (limit, state) in limits.iter().zip(states) {
            if !limit.set.keyed {
                let beat = beats.of(&limit.set);
                beat.known.clone_from(&state.seen.order);
                beat.order = state.order.take();
            }
        }
        beats
    }

    pub(in crate::leases) fn of(&mut self, set: &Arc<SetSpec>) -> &mut Beat {
        let place = *self.places.entry(Arc::clone(&set.key)).or_insert_with(|| {
            self.list.push(Beat {
                set: Arc::clone(set),
                renew: Vec::new(),
                known: None,
                order: None,
            });
            self.list.len() - 1
        });
        &mut self.list[place]
    }
}
