//! Slots kept warm: where a limit is large and far from full and nobody waits, the slots that a request gives back stay
//! here for a moment, and this instance's next request of the same kind has them without asking the store.
//!
//! They stay taken meanwhile, under the same holder, so the upstream never sees more than N. They go back at once when
//! anybody waits anywhere, which the store says in answers and by a push, and within two heartbeats when nobody here needs them.

use super::*;
use crate::leases::Slots;

/// How many of the latest are looked at for one of the same kind.
const LOOK_BACK: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Warm {
    /// The latest at the end.
    spares: Vec<Spare>,
    /// The fewest there were since the last heartbeat: so many were needed by nobody.
    idle: usize,
    /// When somebody was last heard to wait; none since an answer of the store that was asked later.
    stirred: Option<Instant>,
}

#[derive(Debug)]
struct Spare {
    ask: Ask,
    /// Whether it has an entry.
    listed: bool,
}

impl Keeper {
    /// Keeps slots that are given back, if that does no harm. False if they are to be released.
    pub(in crate::leases) fn keep_warm(
        &mut self,
        slots: &mut Slots,
        taken: Instant,
        now: Instant,
    ) -> bool {
        let (ask, listed) = match slots {
            Slots::Listed(id) => match self.entries.get(id) {
                Some(entry) if entry.phase == Phase::Held && !entry.uncounted => (&entry.ask, true),
                _ => return false,
            },
            Slots::AtOnce(Some(ask)) => (&*ask, false),
            Slots::AtOnce(None) => return false,
        };
        if !self.is_calm(ask) {
            return false;
        }
        let ask = ask.clone();
        self.count_hold(&ask.wants, now.duration_since(taken));
        if let Some(entry) = self.entries.get_mut(&ask.id) {
            entry.phase = Phase::Spare;
        }
        self.warm.spares.push(Spare { ask, listed });
        true
    }

    /// What is kept.
    pub(in crate::leases) fn spare_wants(&self) -> impl Iterator<Item = &Want> {
        self.warm.spares.iter().flat_map(|spare| spare.ask.wants.iter())
    }

    /// Slots that are here already, for a newcomer.
    pub(in crate::leases) fn reuse(&mut self, ask: &Ask, now: Instant) -> Option<Slots> {
        let spares = &self.warm.spares;
        let latest = spares.len().saturating_sub(LOOK_BACK);
        let place = spares[latest..].iter().rposition(|spare| are_alike(&spare.ask, ask))?;
        if !self.is_open() || !self.is_calm(ask) {
            return None;
        }
        if !self.is_fresh(&self.warm.spares[latest + place], now) {
            self.cool(now);
            return None;
        }
        let Spare { ask: kept, listed } = self.warm.spares.remove(latest + place);
        self.warm.idle = self.warm.idle.min(self.warm.spares.len());
        if listed {
            let entry = self.entries.get_mut(&kept.id)?;
            entry.phase = Phase::Held;
            entry.taken = now;
        }
        self.count_arrival(ask);
        self.count_taken(&kept.wants);
        Some(if listed { Slots::Listed(kept.id) } else { Slots::AtOnce(Some(kept)) })
    }

    /// Whether its lease was renewed as it should be. After a freeze it may be over, and the slots another's.
    fn is_fresh(&self, spare: &Spare, now: Instant) -> bool {
        let confirmed = |entry: &Entry| ms(now.duration_since(entry.confirmed));
        let age = self.entries.get(&spare.ask.id).map_or(0, confirmed);
        spare.ask.wants.iter().all(|want| age < want.set.lease / 2)
    }

    /// Whether nobody can be in need of what this request has.
    fn is_calm(&self, ask: &Ask) -> bool {
        let is_calm = |want: &Want| {
            let seen = &self.limits[want.set.limit].seen;
            want.set.warm && seen.waiting == 0 && 2 * seen.used <= seen.slots
        };
        let in_contact = self.connected && !self.down && !self.absence.begun;
        in_contact
            && !self.draining
            && self.warm.stirred.is_none()
            && self.recovery.alarm.is_none()
            && ask.rates.is_empty()
            && ask.wants.iter().all(is_calm)
    }

    /// Somebody waits, or was refused for want of a slot.
    pub(super) fn stir(&mut self, now: Instant) {
        self.warm.stirred = Some(now);
        self.cool(now);
    }

    /// An answer came to what was asked at this time.
    pub(super) fn calm_down(&mut self, sent: Instant, now: Instant) {
        if self.warm.stirred.is_some_and(|at| at < sent) {
            self.warm.stirred = None;
        }
        let spares = &self.warm.spares;
        if !spares.iter().all(|spare| self.is_calm(&spare.ask)) {
            self.cool(now);
        }
    }

    /// Gives everything back that is kept warm.
    pub(super) fn cool(&mut self, now: Instant) {
        self.warm.idle = 0;
        for spare in mem::take(&mut self.warm.spares) {
            self.give_up(spare, now);
        }
    }

    /// Gives back what nobody has needed since the last heartbeat.
    pub(super) fn cool_idle(&mut self, now: Instant) {
        let idle: Vec<Spare> = self.warm.spares.drain(..self.warm.idle).collect();
        for spare in idle {
            self.give_up(spare, now);
        }
        self.warm.idle = self.warm.spares.len();
    }

    fn give_up(&mut self, spare: Spare, now: Instant) {
        if spare.listed {
            self.send_off(spare.ask.id);
        } else {
            self.return_unlisted(spare.ask, now);
        }
    }
}

/// Whether one can have what the other had: the same slots, on the same route, in the same class.
fn are_alike(a: &Ask, b: &Ask) -> bool {
    let same = |(a, b): (&Want, &Want)| Arc::ptr_eq(&a.set, &b.set) && a.weight == b.weight;
    a.class == b.class
        && Arc::ptr_eq(&a.route, &b.route)
        && a.wants.len() == b.wants.len()
        && a.wants.iter().zip(b.wants.iter()).all(same)
}
