//! What becomes of requests while the store is out of reach.
//!
//! For one lease after the last contact the store still counts what this instance held, and gives the rest to others.
//! So a request is served only with the slots of a holder that is done here, whose release was never written to any
//! connection, and whose own lease still lasts: the upstream never sees more than N, even if only this instance is cut
//! off. After that the others may have taken those slots, and each instance keeps to its share of N. Shares sum up to N,
//! since they are of the instances that everyone had seen; an instance that the others may not have seen has none.
//!
//! A request of several limits is served with one holder's slots, or from the shares of them all, or not.

use rustc_hash::FxHashSet;

use super::*;

#[cfg(test)]
mod tests;

/// What becomes of new requests while the store doesn't answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenDown {
    /// They are refused.
    Closed,
    /// They are served with what this instance holds, then from its share.
    LocalShare,
    /// They are all admitted.
    Open,
}

/// How many requests were admitted without the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alone {
    /// With the slots of a holder that was done.
    pub taken_over: u64,
    /// From this instance's share.
    pub shared: u64,
    /// Although there was no limit.
    pub open: u64,
}

/// What an instance remembers for the time when the store is out of reach.
#[derive(Debug, Default)]
pub(super) struct Absence {
    /// When the store last answered.
    contact: Option<Instant>,
    failing_since: Option<Instant>,
    /// Requests are settled here.
    pub(super) begun: bool,
    /// When the last heartbeat was sent that was answered, and which recovery the answer told of.
    beat: Option<(Instant, i64)>,
    /// Since when the others can't have lost sight of this instance.
    seen_since: Option<Instant>,
    /// Of each limit; none while others may not have seen this instance.
    places: Vec<Option<Place>>,
    pub(super) alone: Alone,
}

/// Where an instance stands among those that share a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    rank: u32,
    of: u32,
}

/// What is taken, and who waits, of each set here.
#[derive(Default)]
struct Room {
    used: FxHashMap<Arc<str>, u32>,
    waiting: FxHashMap<(Arc<str>, Option<usize>), u32>,
    /// Where somebody waits whose turn it is first, of one class or of all.
    blocked: FxHashSet<(Arc<str>, Option<usize>)>,
}

impl Place {
    fn among(instances: &[(Uuid, i64)], within: i64, me: Uuid) -> Option<Self> {
        let heard = || instances.iter().filter(|&&(_, age)| age <= within);
        heard().any(|&(id, _)| id == me).then(|| Self {
            rank: heard().filter(|&&(id, _)| id < me).count() as u32,
            of: heard().count() as u32,
        })
    }

    /// The slots are dealt out one by one, the first to the lowest id.
    fn share(self, slots: u32) -> u32 {
        slots / self.of + u32::from(self.rank < slots % self.of)
    }
}

// === impl Keeper: coming and going of the store ===

impl Keeper {
    /// The store answered.
    pub(super) fn in_contact(&mut self, now: Instant) {
        self.absence.contact = Some(now);
        self.absence.failing_since = None;
        if mem::take(&mut self.down) | mem::take(&mut self.absence.begun) {
            tracing::info!("the store answers again: it decides about requests");
        }
    }

    /// The store failed to answer, or to be reached.
    pub(super) fn out_of_contact(&mut self, since: Instant) {
        self.absence.failing_since.get_or_insert(since);
    }

    /// After some failures in a row nobody waits for the store any more.
    pub(in crate::leases) fn give_up_after(&mut self, failures: u32, now: Instant) {
        self.out_of_contact(now);
        if failures >= FAILURES_TO_GIVE_UP && !self.down {
            self.down = true;
            tracing::debug!(failures, "the store failed too often: nobody waits for it any more");
            self.begin_absence();
        }
    }

    fn begin_absence(&mut self) {
        if mem::replace(&mut self.absence.begun, true) {
            return;
        }
        match self.settings.when_down {
            WhenDown::Closed => tracing::warn!(
                "the store doesn't answer: new requests are refused, running ones go on"
            ),
            WhenDown::LocalShare => tracing::warn!(
                "the store doesn't answer: new requests get the slots that become free here, after a lease this instance's share"
            ),
            WhenDown::Open => tracing::error!(
                "the store doesn't answer: EVERY request is admitted, NO LIMIT holds (store.when_down = \"open\")"
            ),
        }
    }

    /// Learns from a heartbeat's answer who shares the limits.
    ///
    /// Another instance may leave this one out of its own count if it had an answer, outside recovery, while the store
    /// had not heard of this one for a lease, or had lost its memory of it. Neither can have happened since the last
    /// heartbeat if that was less than a whole recovery ago, or if no recovery has begun since.
    pub(super) fn meet(&mut self, reply: &BeatReply, sent: Instant, now: Instant) {
        let Stamp { now: store_now, recovery } = reply.stamp;
        let sets = || self.settings.limits.iter().map(|limit| &limit.set);
        let op_timeout = ms(self.settings.op_timeout);
        let reach = sets().map(|set| set.lease).min().unwrap_or(0) + op_timeout;
        let shortest = sets().map(|set| set.recovery).min().unwrap_or(0).min(reach);
        let longest = sets().map(|set| set.recovery).max().unwrap_or(0);
        let unbroken = self.absence.beat.is_some_and(|(before, known)| {
            let silent = ms(now.saturating_duration_since(before));
            silent <= shortest || (recovery == known && silent <= reach)
        });
        let me = self.caller.instance;
        let places = sets().map(|set| Place::among(&reply.instances, set.lease + op_timeout, me));
        let places: Vec<_> = places.collect();
        let absence = &mut self.absence;
        absence.beat = Some((sent, recovery));
        if !unbroken {
            absence.seen_since = None;
            absence.places.clear();
        }
        // Not everyone has been heard of again.
        if recovery > 0 && store_now < recovery + longest {
            return;
        }
        let since = *absence.seen_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= 2 * self.settings.heartbeat {
            absence.places = places;
        }
    }

    /// What this instance has of a number of slots while the store is out of reach.
    pub(super) fn share_of(&self, limit: usize, slots: u32) -> u32 {
        let place = self.absence.places.get(limit).copied().flatten();
        place.map_or(0, |place| place.share(slots))
    }

    /// Whether new requests can be served without the store.
    pub(super) fn has_fallback(&self) -> bool {
        match self.settings.when_down {
            WhenDown::Closed => false,
            WhenDown::LocalShare => self.absence.places.iter().any(Option::is_some),
            WhenDown::Open => self.absence.begun || self.started,
        }
    }
}

// === impl Keeper: requests ===

impl Keeper {
    /// Settles, while there is no connection, what can't wait for one. Waiters of a queue keep their place until their
    /// time is up.
    pub(in crate::leases) fn turn_away(&mut self, now: Instant) {
        self.connected = false;
        self.cool(now);
        let entries = &self.entries;
        self.new.retain(|id| entries.get(id).is_some_and(|entry| entry.phase == Phase::New));
        if self.is_absent(now) {
            self.begin_absence();
            self.settle(now);
        }
        if self.leaving == Leaving::Wanted {
            self.leaving = Leaving::Done;
        }
    }

    /// Whether the store has failed for as long as one waits for it.
    fn is_absent(&self, now: Instant) -> bool {
        let patience = self.settings.op_timeout;
        let fails = |since: Instant| now.saturating_duration_since(since) >= patience;
        self.absence.begun
            || self.down
            || self.absence.failing_since.is_some_and(fails)
            || self.new.iter().any(|id| {
                let entry = &self.entries[id];
                !entry.waits() && fails(entry.asked)
            })
    }

    fn settle(&mut self, now: Instant) {
        let patience = self.settings.op_timeout;
        let is_due = |entry: &Entry| {
            let waited = now.saturating_duration_since(entry.asked);
            entry.waits() || self.down || waited >= patience
        };
        let mut due: Vec<Uuid> =
            self.new.iter().copied().filter(|id| is_due(&self.entries[id])).collect();
        if self.settings.when_down == WhenDown::LocalShare {
            due.sort_by_cached_key(|id| self.turn_of(&self.entries[id], now));
        }
        let mut room = Room::of(self.entries.values());
        for id in due {
            // Somebody who asked twice is settled once.
            if self.entries.get(&id).is_none_or(|entry| entry.phase != Phase::New) {
                continue;
            }
            match self.settings.when_down {
                WhenDown::Closed => self.turn_down_unless(id, false, &mut room, now),
                WhenDown::Open => {
                    self.absence.alone.open += 1;
                    self.admit_alone(id, now);
                }
                WhenDown::LocalShare => {
                    if !self.take_over(id, now) && !self.take_share(id, &mut room, now) {
                        let hopes = self.may_hope(&self.entries[&id], now);
                        self.turn_down_unless(id, hopes, &mut room, now);
                    }
                }
            }
        }
        let entries = &self.entries;
        self.new.retain(|id| entries.get(id).is_some_and(|entry| entry.phase == Phase::New));
    }

    /// The order of service: the class, which gets better with waiting, then who came first.
    fn turn_of(&self, entry: &Entry, now: Instant) -> (i64, Instant) {
        let ageing = entry.ask.wants.first().map_or(i64::MAX, |want| want.set.ageing).max(1);
        let waited = ms(now.saturating_duration_since(entry.asked));
        ((entry.ask.class as i64 - waited / ageing).max(0), entry.asked)
    }

    /// Refuses a request that waits in no queue of the store, unless it may wait here.
    fn turn_down_unless(&mut self, id: Uuid, hopes: bool, room: &mut Room, now: Instant) {
        let entry = &self.entries[&id];
        if entry.queued || (hopes && entry.deadline.is_some()) {
            return;
        }
        if hopes && room.has_place_for(&entry.ask) {
            room.wait(&entry.ask);
            let (_, deadline) = self.deadline_of(id, now);
            self.wait_until(id, deadline);
            return;
        }
        self.refuse(id, Refused::of(Why::StoreDown));
        self.on_release(id, now);
    }

    /// Whether waiting here can help.
    fn may_hope(&self, entry: &Entry, now: Instant) -> bool {
        enforced(&entry.ask).all(|want| {
            self.store_counts_us(&want.set, now)
                || want.weight <= self.cap_of(want, entry.ask.class)
        })
    }

    /// Whether the store may still count what we held of a set, by the time of the last contact.
    fn store_counts_us(&self, set: &SetSpec, now: Instant) -> bool {
        self.absence
            .contact
            .is_some_and(|contact| ms(now.saturating_duration_since(contact)) <= set.lease)
    }

    /// How much of our share may be in use for one of this class still to be admitted.
    fn cap_of(&self, want: &Want, class: usize) -> u32 {
        let limit = want.set.limit;
        let slots = if want.set.keyed { want.set.slots } else { self.limits[limit].seen.slots };
        let share = self.share_of(limit, slots);
        let part = want.set.classes[class].share * f64::from(share);
        (part.floor() as u32).max(1).min(share)
    }

    /// Gives a request the slots of a holder that is done here, and that the store doesn't know to be done.
    fn take_over(&mut self, id: Uuid, now: Instant) -> bool {
        let ask = &self.entries[&id].ask;
        if enforced(ask).next().is_none() {
            return false;
        }
        let spares = self.gone.iter().enumerate().filter_map(|(at, spare)| {
            let holder = self.entries.get(spare)?;
            let age = ms(now.saturating_duration_since(holder.confirmed));
            let is_spare = holder.phase == Phase::Leaving
                && holder.admitted
                && !holder.said
                && !holder.uncounted
                && !holder.guard.as_ref().is_some_and(|guard| guard.is_over(now));
            let excess = excess(holder, ask, age).filter(|_| is_spare)?;
            // Who would be cut lasts the longer on the freshest; else the stalest goes first, for as long as it lasts.
            let order = if holder.guard.is_some() { age } else { -age };
            Some(((excess, order), at))
        });
        let Some((_, at)) = spares.min() else { return false };
        let Some(spare) = self.gone.remove(at) else { return false };
        let to = self.entries.get_mut(&id).and_then(|entry| entry.answer.take());
        self.on_release(id, now);
        let (Some(to), Some(holder)) = (to, self.entries.get_mut(&spare)) else { return true };
        holder.phase = Phase::Held;
        holder.taken = now;
        let guard = holder.guard.clone();
        self.answers.push(Answer {
            id: spare,
            to,
            outcome: Ok(now),
            shadow: None,
            fence: None,
            guard,
        });
        let wants = Arc::clone(&holder.ask.wants);
        self.count_taken(&wants);
        self.absence.alone.taken_over += 1;
        true
    }

    /// Admits a request if the share of every limit has room.
    fn take_share(&mut self, id: Uuid, room: &mut Room, now: Instant) -> bool {
        let ask = &self.entries[&id].ask;
        let class = ask.class;
        if enforced(ask).any(|want| self.store_counts_us(&want.set, now)) {
            return false;
        }
        for want in enforced(ask) {
            let (cap, used) = (self.cap_of(want, class), room.used_of(&want.set));
            if room.is_blocked(&want.set, class) || want.weight > cap {
                return false;
            }
            if used + want.weight > cap {
                // Blocked by its weight alone: nobody passes, or it would starve behind light ones.
                room.block(&want.set, (used >= cap).then_some(class));
                return false;
            }
        }
        room.take(ask);
        self.absence.alone.shared += 1;
        self.admit_alone(id, now);
        true
    }

    /// Admits a request that the store has never counted; it is told when it is back.
    fn admit_alone(&mut self, id: Uuid, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.uncounted = true;
            self.hand_over(id, now, now, None);
        }
    }
}

/// What a request must have; limits in shadow mode admit everyone.
fn enforced(ask: &Ask) -> impl Iterator<Item = &Want> {
    ask.wants.iter().filter(|want| !want.set.shadow)
}

/// How many slots more than asked for a holder has, if its slots will do and the leases that matter still last.
fn excess(holder: &Entry, ask: &Ask, age: i64) -> Option<u32> {
    let held: u32 = holder.ask.wants.iter().map(|want| want.weight).sum();
    let mut wanted = 0;
    for want in enforced(ask) {
        let theirs = holder.ask.wants.iter().find(|theirs| theirs.set.key == want.set.key)?;
        // A class with a reserve above it doesn't take over from there.
        let stays_below = want.set.classes[ask.class].share >= 1.0 || holder.ask.class >= ask.class;
        if theirs.weight < want.weight || age >= want.set.lease || !stays_below {
            return None;
        }
        wanted += want.weight;
    }
    Some(held - wanted)
}

impl Entry {
    /// Waits in a queue of the store, or here for the lack of a store.
    pub(super) fn waits(&self) -> bool {
        self.queued || self.deadline.is_some()
    }
}

impl Room {
    fn of<'a>(entries: impl Iterator<Item = &'a Entry>) -> Self {
        let mut room = Self::default();
        for entry in entries {
            match entry.phase {
                Phase::Held => room.take(&entry.ask),
                Phase::New if entry.waits() => room.wait(&entry.ask),
                _ => {}
            }
        }
        room
    }

    fn take(&mut self, ask: &Ask) {
        for want in ask.wants.iter() {
            *self.used.entry(Arc::clone(&want.set.key)).or_default() += want.weight;
        }
    }

    fn wait(&mut self, ask: &Ask) {
        for want in ask.wants.iter() {
            for class in [None, Some(ask.class)] {
                *self.waiting.entry((Arc::clone(&want.set.key), class)).or_default() += 1;
            }
        }
    }

    fn used_of(&self, set: &SetSpec) -> u32 {
        self.used.get(&set.key).copied().unwrap_or(0)
    }

    /// Whether a queue has room, as far as is known here.
    fn has_place_for(&self, ask: &Ask) -> bool {
        let waiting = |set: &SetSpec, class| {
            self.waiting.get(&(Arc::clone(&set.key), class)).copied().unwrap_or(0)
        };
        enforced(ask).any(|Want { set, .. }| {
            waiting(set, None) < set.queue
                && waiting(set, Some(ask.class)) < set.classes[ask.class].queue
        })
    }

    fn block(&mut self, set: &SetSpec, class: Option<usize>) {
        self.blocked.insert((Arc::clone(&set.key), class));
    }

    fn is_blocked(&self, set: &SetSpec, class: usize) -> bool {
        [None, Some(class)]
            .into_iter()
            .any(|class| self.blocked.contains(&(Arc::clone(&set.key), class)))
    }
}
