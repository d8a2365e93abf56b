//! What must hold, whatever happens. Section 3 of the design says which overshoot each fault allows.
//!
//! A running request is *counted* while the store must know of it: from what confirmed its lease there, for one lease.
//! It isn't any more when its lease is over (its instance was frozen or cut off for so long), or when a store with fast
//! recovery lost it and its instance didn't come in time, or when it was admitted without the store. Nobody is admitted
//! as long as N counted ones run.

use super::{
    plan::{LINGER, Mutant},
    requests::{Phase, Way},
    store::Confirmed,
    world::{World, tell},
    *,
};
use crate::{ledger::testing::Waiter, store::Caller};

impl World {
    fn slots_of(&self, set: usize, requests: impl Iterator<Item = usize>) -> u32 {
        let wants = requests.flat_map(|at| &self.requests[at].wants);
        wants.filter(|(of, _)| *of == set).map(|(_, weight)| *weight).sum()
    }

    /// Whether the store must count a holder.
    pub(super) fn is_counted(&self, holder: Uuid, set: usize) -> bool {
        let Some(confirmed) = self.store.confirmed.get(&(set, holder)) else {
            return false;
        };
        let lost = !self.plan.strict
            && confirmed.lost.is_some_and(|lost| self.now >= lost + self.plan.recovery());
        !lost && self.now <= confirmed.at + self.plan.lease
    }

    /// Whether the store counts a holder because it was told of it, not because of a grant without a gap since.
    fn is_registered(&self, holder: Uuid, confirmed: &Confirmed) -> bool {
        let began = self.request_of(holder).map(|at| self.requests[at].way);
        began != Some(Way::Granted) || confirmed.since != confirmed.first
    }

    /// I1, at the only moments at which the upstream's count rises; I8.
    pub(super) fn check_beginning(&mut self, at: usize, fence: Option<u64>) {
        let holder = self.requests[at].holder;
        let has_same = |other: &&usize| **other != at && self.requests[**other].holder == holder;
        if let Some(other) = self.running.iter().find(has_same) {
            self.breaks(format!("r{at} begins with the slots of r{other}, which runs"));
        }
        match self.requests[at].way {
            Way::Granted | Way::TakenOver | Way::Warm => self.check_counted_beginning(at),
            Way::Shared => self.check_share(at),
            Way::Open => {}
        }
        let is_fenced = |set: usize| self.plan.limits[self.plan.sets[set].limit].fenced;
        let Some(fence) = fence.filter(|_| is_fenced(self.requests[at].wants[0].0)) else { return };
        if fence <= self.fence && !self.store.clock_went_back {
            self.breaks(format!("r{at} begins with fence {fence} after {}", self.fence));
        }
        self.fence = fence;
    }

    fn check_counted_beginning(&mut self, at: usize) {
        let holder = self.requests[at].holder;
        for (set, _) in self.requests[at].wants.clone() {
            let key = Arc::clone(&self.store.specs[set].key);
            let Some(confirmed) = self.store.confirmed.get(&(set, holder)).copied() else {
                return self.breaks(format!("r{at} begins without a slot of {key}"));
            };
            if self.now > confirmed.at + self.plan.lease {
                return self.breaks(format!("r{at} begins on a lease of {key} that is over"));
            }
            // Slots of one who was registered above N are handed on without anything new.
            if self.is_registered(holder, &confirmed) {
                continue;
            }
            // Who was registered after the grant was unknown to it.
            let was_counted = |at: &usize| {
                let other = self.requests[*at].holder;
                self.is_counted(other, set)
                    && self.store.confirmed.get(&(set, other)).is_some_and(|others| {
                        others.since < confirmed.since || !self.is_registered(other, others)
                    })
            };
            let counted = self.running.iter().copied().filter(was_counted);
            let (running, warm) = (self.slots_of(set, counted), self.kept_warm(set));
            // What is handed on without a word to the store may overlook that a limit was lowered, for a moment.
            let since = match self.requests[at].way {
                Way::Warm => confirmed.first.max(self.now - self.view()),
                _ => confirmed.first,
            };
            let slots = self.store.most_since(set, since);
            tell!(self, "{running} counted ones of {slots} run in {key}, {warm} are kept");
            if running + warm > slots {
                let running: Vec<_> = self.running.iter().map(|at| format!("r{at}")).collect();
                let running = running.join(" ");
                self.breaks(format!("r{at} begins above {slots} slots of {key}: {running}"));
            }
        }
    }

    /// An instance alone keeps to its share, and shares sum up to N.
    fn check_share(&mut self, at: usize) {
        let me = self.requests[at].machine;
        if self.plan.when_down != WhenDown::LocalShare {
            return self.breaks(format!("r{at} begins without the store"));
        }
        let (now, lease) = (self.now, self.plan.lease);
        for (set, _) in self.requests[at].wants.clone() {
            let limit = self.plan.sets[set].limit;
            let mine = self.running.iter().copied();
            let mine = mine.filter(|at| self.requests[*at].machine == me);
            let (running, share) = (self.slots_of(set, mine), self.share(me, limit));
            if running > share {
                self.breaks(format!("r{at} begins above the share {share} of {me}: {running}"));
            }
            if self.machines[me].contact.is_some_and(|contact| now < contact + lease) {
                self.breaks(format!("r{at} begins from a share within a lease of the store"));
            }
            let alone = self.living();
            let alone = alone.into_iter().filter(|at| {
                let contact = self.machines[*at].contact;
                !self.is_connected(*at) && contact.is_some_and(|contact| contact + lease < now)
            });
            let alone: Vec<_> = alone.collect();
            // Whoever was cut off before the others has a share of its own.
            let latest = alone.iter().filter_map(|at| self.machines[*at].beat).max();
            let Some(latest) = latest else { continue };
            let heartbeat = self.plan.heartbeat();
            let together =
                |at: &usize| self.machines[*at].beat.is_some_and(|beat| beat + heartbeat >= latest);
            let alone: Vec<_> = alone.into_iter().filter(together).collect();
            let shares = alone.iter().map(|at| self.share(*at, limit)).sum::<u32>();
            let claimed = alone.iter().map(|at| self.machines[*at].claims[limit]).max();
            let slots = match self.store.specs[set].keyed {
                true => claimed.unwrap_or(0),
                false => self.store.most_since(set, latest - heartbeat),
            };
            tell!(self, "shares of {alone:?} sum up to {shares} of {slots}");
            if shares > slots {
                self.breaks(format!("shares of {alone:?} sum up to {shares} of {slots}"));
            }
        }
    }

    fn share(&mut self, at: usize, limit: usize) -> u32 {
        let now = self.now;
        self.machines[at].keeper.outlook(now).shares[limit]
    }

    /// Nobody new is admitted while the store's memory may be incomplete.
    pub(super) fn check_admission(&mut self, set: usize, id: Uuid) {
        let is_new = !self.store.confirmed.contains_key(&(set, id));
        let Some(lost) = self.store.lost[set].filter(|_| is_new) else { return };
        if self.now < lost + self.plan.recovery() {
            let (name, since) = (self.name(id), self.now - lost);
            self.breaks(format!("{name} is admitted {since:?} after holders were lost"));
        }
    }

    /// I3: the store counts whoever runs on a lease, and what it lost it is told in time.
    pub(super) fn check_counted(&mut self) {
        for place in 0..self.running.len() {
            let at = self.running[place];
            let (machine, holder) = (self.requests[at].machine, self.requests[at].holder);
            for want in 0..self.requests[at].wants.len() {
                let (set, _) = self.requests[at].wants[want];
                let Some(confirmed) = self.store.confirmed.get(&(set, holder)).copied() else {
                    continue;
                };
                let key = &self.store.specs[set].key;
                let is_over = self.now > confirmed.at + self.plan.lease;
                let runs_here = self.machines[machine].alive;
                match confirmed.lost {
                    None if !is_over && !self.store.ledger.holds(key, holder) => {
                        self.breaks(format!("the store has forgotten r{at} in {key}"));
                    }
                    None if is_over && runs_here && self.is_calm(machine, self.plan.lease) => {
                        self.breaks(format!("nobody renewed r{at} in {key}"));
                    }
                    Some(lost)
                        if runs_here
                            && self.now > lost + Duration::from_secs(2)
                            && self.is_calm(machine, self.now - lost) =>
                    {
                        self.breaks(format!("nobody told the store of r{at} in {key} again"));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Where that is asked for, nobody runs on a lease that is over, unless asleep.
    pub(super) fn check_cuts(&mut self) {
        if !self.plan.cut {
            return;
        }
        for place in 0..self.running.len() {
            let at = self.running[place];
            let machine = &self.machines[self.requests[at].machine];
            if machine.frozen || self.now <= machine.woke + LINGER {
                continue;
            }
            // Who came without the store isn't cut before it is known to be counted.
            if matches!(self.requests[at].way, Way::Shared | Way::Open) {
                continue;
            }
            let holder = self.requests[at].holder;
            let is_over = |(set, _): &(usize, u32)| {
                let confirmed = self.store.confirmed.get(&(*set, holder));
                confirmed.is_some_and(|confirmed| self.now > confirmed.at + self.plan.lease)
            };
            if self.requests[at].wants.iter().any(is_over) {
                self.breaks(format!("r{at} runs on a lease that is over"));
            }
        }
    }

    /// I5: within a class grants follow tickets, but for who can't be told.
    pub(super) fn check_order(
        &mut self,
        set: usize,
        before: &[Waiter],
        after: &[Waiter],
        caller: &Caller,
        readded: &[Uuid],
    ) {
        let key = Arc::clone(&self.store.specs[set].key);
        let ledger = &self.store.ledger;
        let mut overtaken = None;
        let is_granted =
            |waiter: &&Waiter| ledger.holds(&key, waiter.id) && !readded.contains(&waiter.id);
        for granted in before.iter().filter(is_granted) {
            let hears = |waiter: &&Waiter| {
                waiter.instance.is_some_and(|instance| {
                    instance == caller.instance || ledger.listeners.contains(&instance)
                })
            };
            let was_there = |waiter: &&Waiter| before.iter().any(|other| other.id == waiter.id);
            let mut earlier = after
                .iter()
                .filter(|waiter| waiter.class == granted.class && waiter.ticket < granted.ticket);
            overtaken = overtaken.or_else(|| {
                earlier
                    .find(|waiter| was_there(waiter) && hears(waiter))
                    .map(|waiter| (granted.id, waiter.id))
            });
        }
        if let Some((granted, waiter)) = overtaken {
            let (granted, waiter) = (self.name(granted), self.name(waiter));
            self.breaks(format!("{granted} overtook {waiter} in {key}"));
        }
    }

    /// I4: no slot lies idle while somebody waits.
    pub(super) fn check_idle(&mut self) {
        let now = self.store_now();
        for set in 0..self.store.specs.len() {
            let spec = &self.store.specs[set];
            let status = self.store.ledger.status(now, spec);
            let recovers = now < status.recovery + spec.recovery;
            let smallest = spec.classes.iter().map(|class| {
                ((class.share * f64::from(status.slots)) as u32).max(1).min(status.slots)
            });
            let fits = status.used + 2 <= smallest.min().unwrap_or(0).max(status.slots.min(2));
            let asks = |request: usize| self.requests[request].phase == Phase::Asking;
            let queue = self.store.ledger.queue(&spec.key);
            let waits = queue.iter().any(|waiter| self.request_of(waiter.id).is_some_and(asks));
            if !waits || recovers {
                self.store.waits[set] = None;
            } else {
                self.store.waits[set].get_or_insert(self.now);
            }
            if !(waits && fits && !recovers) {
                self.store.idle[set] = None;
                continue;
            }
            let since = *self.store.idle[set].get_or_insert(self.now);
            let heartbeat = self.plan.heartbeat();
            let unknown = self.unknown();
            let calm = self.now.duration_since(self.last_fault) > unknown;
            let longest = if calm { 2 * heartbeat } else { unknown };
            if self.now - since > longest {
                self.breaks(format!("a slot of {} lies idle while somebody waits", spec.key));
            }
        }
    }

    /// How long after a fault the store may be wrong about who is there.
    pub(super) fn unknown(&self) -> Duration {
        4 * self.plan.heartbeat() + self.plan.presence() + self.plan.recovery()
    }

    /// I9: a keeper knows nothing of requests that are over, but what is still to be said of them.
    pub(super) fn check_listed(&mut self, at: usize) {
        let (listed, _) = self.machines[at].keeper.listed();
        let machine = &self.machines[at];
        let is_here = |request: &&usize| {
            let request = &self.requests[**request];
            request.machine == at && matches!(request.phase, Phase::Running | Phase::Closing)
        };
        let running = self.running.iter().filter(is_here).count();
        // Requests that are over while their end waits in the inbox, or for the process to wake.
        let spares = self.spares.iter().filter(|spare| spare.machine == at).count();
        let known = machine.asking.len() + running + machine.unheard + spares;
        if listed > known && !self.plan.is(Mutant::ReleaseAtHead) {
            self.breaks(format!("{at} keeps {listed} requests, of which {known} are there"));
        }
    }
}

// === in the end ===

impl World {
    /// Once nothing goes wrong any more, everything ends.
    pub(super) fn come_to_rest(&mut self) -> Result<(), String> {
        self.busy = false;
        let lease = self.plan.lease;
        self.pass(3 * lease + Duration::from_secs(1))?;
        self.mend();
        if self.living().is_empty() {
            let claims = self.plan.limits.iter().map(|limit| limit.slots).collect::<Vec<_>>();
            self.start_machine(&claims);
        }
        let first = self.living()[0];
        for limit in 0..self.plan.limits.len() {
            if !self.plan.limits[limit].keyed {
                self.order(first, limit, None);
            }
        }
        let rest = 5 * self.plan.hold + self.plan.queue_timeout + 2 * self.plan.recovery();
        self.pass(rest + 2 * lease + Duration::from_secs(10))?;
        self.check_rest()
    }

    fn check_rest(&mut self) -> Result<(), String> {
        let open = self.requests.iter().position(|request| request.phase != Phase::Over);
        if let Some(open) = open {
            return Err(format!("r{open} never ended"));
        }
        let now = self.store_now();
        self.store.expire(self.plan.lease, self.now);
        for spec in &self.store.specs {
            let status = self.store.ledger.status(now, spec);
            let queue = self.store.ledger.queue(&spec.key);
            if status.used > 0 || !queue.is_empty() {
                let waiters: Vec<_> = queue.iter().map(|waiter| self.name(waiter.id)).collect();
                return Err(format!("{} never got empty: {status:?}, {waiters:?}", spec.key));
            }
        }
        if let Some(spare) = self.spares.iter().find(|spare| self.machines[spare.machine].alive) {
            return Err(format!("{} is still kept warm", self.name(spare.holder)));
        }
        let specs: Vec<_> = self.store.specs.iter().collect();
        for (key, fields) in self.store.ledger.dump(&specs) {
            let is_left =
                |field: &String| {
                    field.starts_with("pending:")
                        || self.store.specs.iter().any(|spec| {
                            !spec.keyed && field.strip_prefix("live:") == Some(&spec.key)
                        })
                };
            let left = match key.rsplit_once(' ') {
                Some((_, "meta")) | None => fields.keys().find(|field| is_left(field)),
                Some(_) => fields.keys().next(),
            };
            if let Some(left) = left {
                return Err(format!("left in {key}: {left}"));
            }
        }
        for at in self.living() {
            let listed = self.machines[at].keeper.listed();
            if listed != (0, 0) {
                return Err(format!("left in the keeper of {at}: {listed:?}"));
            }
            let now = self.now;
            let outlook = self.machines[at].keeper.outlook(now);
            if !outlook.up || outlook.away || outlook.recovering || !outlook.started {
                return Err(format!("{at} hasn't recovered: {outlook:?}"));
            }
            if outlook.local.iter().any(|local| *local > 0) {
                return Err(format!("{at} believes that it holds {:?}", outlook.local));
            }
        }
        Ok(())
    }

    /// Every slot is back: as many requests as there are slots run at once, and one more waits.
    pub(super) fn probe(&mut self) -> Result<(), String> {
        let living = self.living();
        for limit in 0..self.plan.limits.len() {
            let set = self.plan.sets.iter().position(|set| set.limit == limit).unwrap_or(0);
            // Of a set with a key only those claim that use it: here, the first to ask.
            let claimants = if self.plan.limits[limit].keyed { &living[..1] } else { &living[..] };
            let claims = claimants.iter().map(|at| self.machines[*at].claims[limit]);
            let slots = claims.min().unwrap_or(0);
            let began: u64 = self.began.iter().sum();
            for number in 0..=slots as usize {
                let at = claimants[number % claimants.len()];
                self.ask(at, &[(set, 1)], 0, Duration::from_secs(600));
                self.serve(at);
            }
            self.pass(Duration::from_millis(100))?;
            let now_began = self.began.iter().sum::<u64>() - began;
            if now_began != u64::from(slots) {
                return Err(format!("{now_began} of {slots} slots of limit {limit} are back"));
            }
            for at in 0..self.requests.len() {
                if self.requests[at].phase != Phase::Over {
                    self.leaves(at);
                }
            }
            self.pass(2 * self.plan.heartbeat() + Duration::from_secs(2))?;
        }
        self.check_rest()
    }
}
