//! The specification of the slots: a pure, synchronous state machine without a clock and without I/O.
//!
//! Every operation takes the store's time in milliseconds and answers at once. `scripts/*.lua` say the same
//! in Lua for Redis, and a test feeds both the same random operations. Read this file for what the store promises;
//! `set.rs` beside it holds the rules of one semaphore.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc};

// Ids are random and the other keys are the configuration's, so nobody can choose what collides.
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use uuid::Uuid;

mod look;
mod set;
#[cfg(test)]
pub(crate) mod testing;
mod words;

pub use set::SetStatus;
use set::{Set, Take};
pub use words::*;

/// How far a clock may go back before memory is held to be incomplete, and how far ahead a score may lie, in ms.
const CLOCK_SLACK: i64 = 1_000;
/// The fleet's last sign of life, and a set's `live_until`, needn't be exact: they are rewritten when off by this, ms.
const LAST_STEP: i64 = 100;
const LIVE_STEP: i64 = 1_000;
/// Silent for so long, ms, an instance has no command under way any more that would arrive, and no lease that would last.
const LONG_GONE: i64 = 86_400_000;
/// How many of those one heartbeat forgets: of the dead, and of those that left.
const FORGOTTEN_PER_CALL: usize = 8;
/// How many waiters one operation grants at most; the next heartbeat goes on.
const GRANTS_PER_CALL: usize = 256;

/// Everything the store remembers.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Ledger {
    fleet: Option<Fleet>,
    /// When each was heard of. Of one that has left: when it did, below zero. It stays on the list, since the fence must
    /// know its connections for as long as commands may come late.
    instances: HashMap<Uuid, i64>,
    sets: HashMap<Arc<str>, Set>,
    /// Who would hear a push.
    pub(crate) listeners: HashSet<Uuid>,
    /// Pushes to deliver: instance, id, and what of it.
    pub(crate) pushes: Vec<(Uuid, Uuid, Notice)>,
    /// Per value of a rate's key: when requests passed.
    rates: HashMap<Arc<str>, Window>,
}

/// When requests passed, in order, and how long that counts, ms.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Window {
    length: i64,
    passed: BTreeSet<(i64, Uuid)>,
}

/// What the store remembers of the whole fleet.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Fleet {
    last: i64,
    run: Box<str>,
    recovery: i64,
    /// The last that was given, of any set.
    fence: u64,
    /// Per set: the latest end of a lease among members taken through Tidegate. Tells a lost set from an empty one.
    live: HashMap<Arc<str>, i64>,
    epochs: HashMap<Uuid, u64>,
    subscribed: HashMap<Uuid, bool>,
}

/// What every operation on a set needs beside the set.
struct Context<'a> {
    now: i64,
    caller: &'a Caller,
    fleet: &'a mut Fleet,
    instances: &'a HashMap<Uuid, i64>,
    listeners: &'a HashSet<Uuid>,
    pushes: &'a mut Vec<(Uuid, Uuid, Notice)>,
    rates: &'a mut HashMap<Arc<str>, Window>,
    granted: Vec<Uuid>,
    fences: Vec<(Uuid, u64)>,
    displaced: Vec<Uuid>,
    /// Waiters of the caller that should ask again.
    again: Vec<Uuid>,
}

impl Ledger {
    /// Applies releases in order, hands what became free to the best waiters, then applies acquires in order.
    ///
    /// # Errors
    /// [`Stale`] if the caller has a newer connection.
    pub fn turn(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        releases: &[Release],
        acquires: &[Acquire],
    ) -> Result<(ReleaseReply, AcquireReply), Stale> {
        let (sets, mut context) = self.enter(now, caller, run)?;
        let asks = releases.iter().map(|release| &release.ask);
        let asks = asks.chain(acquires.iter().map(|acquire| &acquire.ask));
        let used = open_all(sets, &mut context, asks);
        let mut released = Vec::with_capacity(releases.len());
        for release in releases {
            released.push(release_one(sets, &mut context, release));
        }
        if !releases.is_empty() {
            for spec in &used {
                set_of(sets, spec).grant(&mut context, spec);
            }
        }
        let handed_on = std::mem::take(&mut context.granted);
        let fences_handed_on = std::mem::take(&mut context.fences);
        let mut outcomes = Vec::with_capacity(acquires.len());
        for acquire in acquires {
            outcomes.push(acquire_one(sets, &mut context, acquire));
        }
        finish_all(sets, &mut context, &used);
        let stamp = context.stamp();
        let Context { granted, fences, displaced, .. } = context;
        let releases = ReleaseReply {
            stamp,
            outcomes: released,
            granted: handed_on,
            fences: fences_handed_on,
        };
        Ok((releases, AcquireReply { stamp, outcomes, granted, fences, displaced }))
    }

    /// A turn of acquires alone.
    ///
    /// # Errors
    /// [`Stale`], as for any turn.
    pub fn acquire(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        acquires: &[Acquire],
    ) -> Result<AcquireReply, Stale> {
        self.turn(now, caller, run, &[], acquires).map(|(_, reply)| reply)
    }

    /// A turn of releases alone.
    ///
    /// # Errors
    /// [`Stale`], as for any turn.
    pub fn release(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        releases: &[Release],
    ) -> Result<ReleaseReply, Stale> {
        self.turn(now, caller, run, releases, &[]).map(|(reply, _)| reply)
    }

    /// Applies a heartbeat. Its beats name distinct sets.
    ///
    /// # Errors
    /// [`Stale`] if the caller has a newer connection.
    pub fn heartbeat(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        heartbeat: &Heartbeat,
    ) -> Result<BeatReply, Stale> {
        let (_, context) = self.enter(now, caller, run)?;
        if *context.fleet.run != *run || context.instances.is_empty() {
            context.fleet.recovery = now;
            context.fleet.run = run.into();
        }
        let recovery = context.fleet.recovery;
        if self.instances.is_empty() {
            let known = self.fleet.iter().flat_map(|fleet| fleet.epochs.keys());
            self.instances.extend(known.map(|&instance| (instance, -now)));
        }
        self.instances.insert(caller.instance, if heartbeat.leaving { -now } else { now });
        // In recovery a clock that jumped, or a server that slept, may make the living look long gone.
        if now - recovery > heartbeat.within {
            self.forget_the_long_gone(now);
        }
        let instances = self.heard_within(now, heartbeat.within);
        let (sets, mut context) = self.context(now, caller);
        context
            .fleet
            .subscribed
            .insert(caller.instance, heartbeat.subscribed && !heartbeat.leaving);
        let mut reply = BeatReply { instances, ..BeatReply::default() };
        for beat in &heartbeat.beats {
            let spec = &beat.set;
            let set = open(sets, &mut context, spec);
            set.obey(beat);
            set.refresh(&mut context, spec);
            set.forget_the_gone(&mut context, heartbeat.leaving);
            set.drop_too_heavy(&mut context);
            for renew in &beat.renew {
                reply.renewed.push(set.renew(&mut context, spec, renew));
            }
            set.tidy();
            set.collect_pending(&context, &mut reply.pending);
            set.grant(&mut context, spec);
            set.finish(&mut context, spec);
            reply.sets.push(set.state(&context));
            if spec.keyed && set.is_idle() {
                sets.remove(&spec.key);
            }
        }
        reply.pending.append(&mut context.again);
        reply.stamp = context.stamp();
        reply.granted = context.granted;
        reply.fences = context.fences;
        Ok(reply)
    }

    /// The state of a set now, read only.
    pub fn status(&self, now: i64, spec: &SetSpec) -> SetStatus {
        let recovery = self.fleet.as_ref().map_or(0, |fleet| fleet.recovery);
        match self.sets.get(&spec.key) {
            Some(set) => set.status(now, recovery, &spec.classes),
            None => {
                let waiting = vec![(0, 0); spec.classes.len()];
                SetStatus { waiting, recovery, now, ..SetStatus::default() }
            }
        }
    }

    /// The fence and the fleet's own signs of a loss.
    fn enter<'a>(
        &'a mut self,
        now: i64,
        caller: &'a Caller,
        run: &str,
    ) -> Result<(&'a mut HashMap<Arc<str>, Set>, Context<'a>), Stale> {
        let newest =
            self.fleet.as_ref().and_then(|fleet| fleet.epochs.get(&caller.instance).copied());
        if newest.is_some_and(|newest| caller.epoch < newest) {
            return Err(Stale);
        }
        let lost = match &mut self.fleet {
            Some(fleet) if now < fleet.last - CLOCK_SLACK => {
                // Or sets that are long empty would seem lost until the clock has caught up.
                let back = fleet.last - now;
                fleet.live.values_mut().for_each(|live| *live -= back);
                true
            }
            Some(fleet) => now - fleet.last > caller.gap,
            None => {
                self.fleet = Some(Fleet { run: run.into(), last: now, ..Fleet::default() });
                self.instances.insert(caller.instance, now);
                true
            }
        };
        let fleet = self.fleet.get_or_insert_default();
        if lost {
            fleet.recovery = now;
            // Where the clock went back: the dead would else live until it has caught up.
            self.instances.values_mut().for_each(|seen| *seen = now.min(*seen));
        }
        if now < fleet.last || now - fleet.last >= LAST_STEP {
            fleet.last = now;
        }
        if newest != Some(caller.epoch) {
            fleet.epochs.insert(caller.instance, caller.epoch);
        }
        Ok(self.context(now, caller))
    }
}

impl Ledger {
    fn forget_the_long_gone(&mut self, now: i64) {
        let is_long_gone = |at: &i64| at.abs() < now - LONG_GONE;
        let seen = self.instances.iter().map(|(&instance, &at)| (at, instance));
        let mut long_gone: Vec<_> = seen.filter(|(at, _)| is_long_gone(at)).collect();
        long_gone.sort_unstable();
        let (left, dead) = long_gone.split_at(long_gone.partition_point(|(at, _)| *at < 0));
        let fleet = self.fleet.get_or_insert_default();
        for part in [left, dead] {
            for (_, instance) in part.iter().take(FORGOTTEN_PER_CALL) {
                self.instances.remove(instance);
                fleet.epochs.remove(instance);
                fleet.subscribed.remove(instance);
            }
        }
        fleet.live.retain(|_, live| *live >= now - LONG_GONE);
    }

    fn heard_within(&self, now: i64, within: i64) -> Vec<(Uuid, i64)> {
        let ages = self.instances.iter().map(|(&instance, &seen)| (instance, now - seen));
        let mut heard: Vec<_> = ages.filter(|&(_, age)| age <= within).collect();
        heard.sort_unstable_by_key(|&(instance, age)| (Reverse(age), instance));
        heard
    }

    fn context<'a>(
        &'a mut self,
        now: i64,
        caller: &'a Caller,
    ) -> (&'a mut HashMap<Arc<str>, Set>, Context<'a>) {
        let context = Context {
            now,
            caller,
            fleet: self.fleet.get_or_insert_default(),
            instances: &self.instances,
            listeners: &self.listeners,
            pushes: &mut self.pushes,
            rates: &mut self.rates,
            granted: Vec::new(),
            fences: Vec::new(),
            displaced: Vec::new(),
            again: Vec::new(),
        };
        (&mut self.sets, context)
    }
}

// === impl Context ===

impl Context<'_> {
    fn stamp(&self) -> Stamp {
        Stamp { now: self.now, recovery: self.fleet.recovery }
    }

    /// Its own outcome tells of a grant to a request of this operation.
    fn tell_by_outcome(&mut self, id: Uuid) {
        self.granted.retain(|granted| *granted != id);
    }

    /// Counts a request in a window, or says when it would fit. One exactly a window old still counts.
    fn pass_rate(&mut self, rate: &RateSpec, acquire: &Acquire) -> Result<(), Shed> {
        let (id, oldest) = (acquire.ask.id, self.now - rate.window);
        if !self.rates.contains_key(&rate.key) {
            self.rates.insert(Arc::clone(&rate.key), Window::default());
        }
        let window = self.rates.get_mut(&rate.key).expect("just put there");
        window.length = rate.window;
        while let Some(&(at, _)) = window.passed.first()
            && at < oldest
        {
            window.passed.pop_first();
        }
        if acquire.again && window.passed.iter().any(|(_, passed)| *passed == id) {
            return Ok(());
        }
        if let Some(over) = window.passed.len().checked_sub(rate.requests as usize) {
            let next = window.passed.iter().nth(over).map_or(oldest, |(at, _)| *at);
            let after = next + rate.window + 1 - self.now;
            return Err(Shed::RateLimited { after: after.max(0) as u32 });
        }
        window.passed.insert((self.now, id));
        Ok(())
    }

    /// Takes the entries of a request that wasn't admitted out again.
    fn refund(&mut self, rates: &[RateSpec], id: Uuid) {
        for rate in rates {
            if let Some(window) = self.rates.get_mut(&rate.key) {
                window.passed.retain(|(_, passed)| *passed != id);
            }
        }
    }

    /// Tells an instance of one of its waiters; the caller hears in the reply.
    fn notify(&mut self, instance: Uuid, id: Uuid, notice: Notice) {
        if instance == self.caller.instance {
            match notice {
                Notice::Granted => self.again.push(id),
                Notice::Displaced => self.displaced.push(id),
                Notice::Wanted | Notice::Evicted => {}
            }
        } else if self.fleet.subscribed.get(&instance) == Some(&true)
            && self.listeners.contains(&instance)
        {
            self.pushes.push((instance, id, notice));
        }
    }

    /// Tells every living instance that slots are wanted; the caller hears in the reply.
    fn call_for_slots(&mut self) {
        let others: Vec<Uuid> =
            self.instances.keys().copied().filter(|&instance| self.living(instance)).collect();
        for instance in others {
            self.notify(instance, Uuid::nil(), Notice::Wanted);
        }
    }

    fn living(&self, instance: Uuid) -> bool {
        self.seen_within(instance, self.caller.presence)
    }

    fn seen_within(&self, instance: Uuid, time: i64) -> bool {
        self.instances.get(&instance).is_some_and(|&seen| seen >= self.now - time)
    }
}

// === operations over several sets ===

fn acquire_one(
    sets: &mut HashMap<Arc<str>, Set>,
    context: &mut Context<'_>,
    acquire: &Acquire,
) -> Acquired {
    let (ask, mut shadow) = (&acquire.ask, None);
    for (index, rate) in ask.rates.iter().enumerate() {
        let by = Refuser::Rate(index as u32);
        match context.pass_rate(rate, acquire) {
            Ok(()) => {}
            Err(why) if rate.shadow => shadow = shadow.or(Some((by, why))),
            Err(why) => {
                context.refund(&ask.rates[..index], ask.id);
                return Acquired::Shed { by, why };
            }
        }
    }
    for (index, want) in ask.wants.iter().enumerate() {
        let by = Refuser::Want(index as u32);
        let why = match set_of(sets, &want.set).take(context, &want.set, acquire, want.weight) {
            Take::Taken => continue,
            Take::Shadowed(why) => {
                shadow = shadow.or(Some((by, why)));
                continue;
            }
            Take::Waiting { queue } => return Acquired::Waiting { at: index as u32, queue },
            Take::Shed(why) => why,
        };
        for earlier in &ask.wants[..index] {
            let set = set_of(sets, &earlier.set);
            set.give_back(ask.id, ask.class, true);
            set.grant(context, &earlier.set);
        }
        context.refund(&ask.rates, ask.id);
        return Acquired::Shed { by, why };
    }
    shadow.map_or(Acquired::Granted, |(by, why)| Acquired::Shadowed { by, why })
}

fn release_one(
    sets: &mut HashMap<Arc<str>, Set>,
    context: &mut Context<'_>,
    release: &Release,
) -> Released {
    let ask = &release.ask;
    if release.refund {
        context.refund(&ask.rates, ask.id);
    }
    let mut outcome = Released::Unknown;
    for want in ask.wants.iter() {
        let one = set_of(sets, &want.set).give_back(ask.id, ask.class, release.queued);
        if outcome == Released::Unknown {
            outcome = one;
        }
    }
    outcome
}

/// Opens every set that the requests name, once each, in order.
fn open_all<'a>(
    sets: &mut HashMap<Arc<str>, Set>,
    context: &mut Context<'_>,
    asks: impl Iterator<Item = &'a Ask>,
) -> Vec<&'a Arc<SetSpec>> {
    let mut opened: Vec<&'a Arc<SetSpec>> = Vec::with_capacity(1);
    for want in asks.flat_map(|ask| ask.wants.iter()) {
        if !opened.iter().any(|spec| spec.key == want.set.key) {
            open(sets, context, &want.set);
            opened.push(&want.set);
        }
    }
    opened
}

fn finish_all(
    sets: &mut HashMap<Arc<str>, Set>,
    context: &mut Context<'_>,
    used: &[&Arc<SetSpec>],
) {
    for spec in used {
        let set = set_of(sets, spec);
        set.finish(context, spec);
        if spec.keyed && set.is_idle() {
            sets.remove(&spec.key);
        }
    }
}

fn set_of<'a>(sets: &'a mut HashMap<Arc<str>, Set>, spec: &SetSpec) -> &'a mut Set {
    sets.get_mut(&spec.key).expect("opened before it is used")
}

/// Every operation on a set starts here: policy, signs of a loss, purge.
fn open<'a>(
    sets: &'a mut HashMap<Arc<str>, Set>,
    context: &mut Context<'_>,
    spec: &SetSpec,
) -> &'a mut Set {
    if !sets.contains_key(&spec.key) {
        sets.insert(Arc::clone(&spec.key), Set::default());
    }
    let set = sets.get_mut(&spec.key).expect("just put there");
    set.open(context, spec);
    set
}
