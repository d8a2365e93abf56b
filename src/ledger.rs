//! The specification of the slots: a pure, synchronous state machine without a clock and without I/O.
//!
//! Every operation takes the store's time in milliseconds and answers at once. `scripts/*.lua` say the same
//! in Lua for Redis, and a test feeds both the same random operations. Read this file for what the store promises;
//! `set.rs` beside it holds the rules of one semaphore.

use std::sync::Arc;

// Ids are random and the other keys are the configuration's, so nobody can choose what collides.
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use uuid::Uuid;

mod set;
#[cfg(test)]
pub(crate) mod testing;

pub use set::SetStatus;
use set::{Set, Take};

/// How far a clock may go back before memory is held to be incomplete, and how far ahead a score may lie, in ms.
const CLOCK_SLACK: i64 = 1_000;
/// The fleet's last sign of life, and a set's `live_until`, needn't be exact: they are rewritten when off by this, ms.
const LAST_STEP: i64 = 100;
const LIVE_STEP: i64 = 1_000;
/// How many waiters one operation grants at most; the next heartbeat goes on.
const GRANTS_PER_CALL: usize = 256;

/// One semaphore, as the caller's configuration has it.
#[derive(Clone, Debug)]
pub struct SetSpec {
    /// The limit's name, followed by `:` and a digest where the limit has a key.
    pub key: Arc<str>,
    /// The cap N that the caller claims.
    pub slots: u32,
    /// How long a slot lasts without renewal, ms.
    pub lease: i64,
    /// How long a grant lasts until its owner confirms it, ms.
    pub grant_ttl: i64,
    /// How long recovery lasts, ms.
    pub recovery: i64,
    /// How many may wait.
    pub queue: u32,
    /// A waiter counts as one class higher for each of these that it waited, ms.
    pub ageing: i64,
    /// The classes, highest first: name and the share of the slots above which the class isn't admitted.
    pub classes: Arc<[(Arc<str>, f64)]>,
}

/// A number of slots of one semaphore.
#[derive(Clone, Debug)]
pub struct Want {
    /// Which semaphore.
    pub set: Arc<SetSpec>,
    /// How many slots.
    pub weight: u32,
}

/// What one request asks for, under one holder id.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The holder: new for every request, never used again.
    pub id: Uuid,
    /// The semaphores, in the order in which their slots are taken.
    pub wants: Arc<[Want]>,
    /// Index into [`SetSpec::classes`].
    pub class: usize,
    /// The route, for those who look at the holders.
    pub route: Arc<str>,
}

/// Takes slots of every want, or waits at the first that is full, or keeps nothing.
#[derive(Clone, Debug)]
pub struct Acquire {
    /// What is asked for.
    pub ask: Ask,
    /// How long the request has waited already, ms.
    pub waited: i64,
    /// Whether it may wait in a queue.
    pub may_wait: bool,
    /// Whether this id may have been seen before. An id that was is confirmed, never taken twice.
    pub again: bool,
}

/// Gives back every slot of an id, and its place in a queue.
#[derive(Clone, Debug)]
pub struct Release {
    /// What was asked for.
    pub ask: Ask,
    /// Whether the id may be in a queue, or hold an unconfirmed grant.
    pub queued: bool,
}

/// Keeps an instance present, renews its holders and claims its configuration.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat {
    /// Whether the instance hears pushes.
    pub subscribed: bool,
    /// Whether the instance leaves for good.
    pub leaving: bool,
    /// Every set that the instance uses.
    pub beats: Vec<Beat>,
}

/// The part of a heartbeat that is about one set.
#[derive(Clone, Debug)]
pub struct Beat {
    /// Which set.
    pub set: Arc<SetSpec>,
    /// Holders whose lease is to be renewed.
    pub renew: Vec<Renew>,
}

/// One holder to renew.
#[derive(Clone, Debug)]
pub struct Renew {
    /// Whose.
    pub ask: Ask,
    /// Slots of this set.
    pub weight: u32,
    /// Whether its lease is over by the instance's own clock.
    pub lapsed: bool,
}

/// Who calls.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The running process.
    pub instance: Uuid,
    /// The number of its connection; a command from an older connection than the newest seen does nothing.
    pub epoch: u64,
    /// A fleet silent for longer than this may have lost holders, ms.
    pub gap: i64,
    /// An instance not heard of for this long is gone, ms.
    pub presence: i64,
}

/// The store's time and the start of the latest recovery (0 = never), both ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// When the operation was applied.
    pub now: i64,
    /// When the latest recovery started.
    pub recovery: i64,
}

/// What became of an [`Acquire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// Every slot is held, with a full lease.
    Granted,
    /// In the queue of want `at`; earlier wants are held.
    Waiting {
        /// Index of the want.
        at: u32,
        /// Waiters in that queue, this one included.
        queue: u32,
    },
    /// No slot free and no room to wait; nothing is kept.
    Full {
        /// Index of the want.
        at: u32,
        /// Waiters in that queue.
        queue: u32,
    },
    /// Nobody is admitted yet and the request may not wait; nothing is kept.
    Recovering {
        /// Index of the want.
        at: u32,
    },
    /// More slots than the set has for this class; nothing is kept.
    TooHeavy {
        /// Index of the want.
        at: u32,
    },
}

/// What became of a [`Release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// It held slots.
    Released,
    /// It was waiting.
    Dequeued,
    /// It was unknown.
    Unknown,
}

/// What became of a [`Renew`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The lease starts anew.
    Kept,
    /// The holder was lost and is counted again.
    Readded,
}

/// The answer to acquires.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcquireReply {
    /// When.
    pub stamp: Stamp,
    /// One for each acquire.
    pub outcomes: Vec<Acquired>,
    /// Waiters of the caller that were granted on the way, with a full lease; later than an outcome that says otherwise.
    pub granted: Vec<Uuid>,
}

/// The answer to releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReleaseReply {
    /// When.
    pub stamp: Stamp,
    /// One for each release.
    pub outcomes: Vec<Released>,
    /// Waiters of the caller that were granted, with a full lease.
    pub granted: Vec<Uuid>,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BeatReply {
    /// When.
    pub stamp: Stamp,
    /// One for each renewal, in the order of the beats.
    pub renewed: Vec<Renewed>,
    /// One for each beat.
    pub sets: Vec<SetState>,
    /// Waiters of the caller that were granted, with a full lease.
    pub granted: Vec<Uuid>,
    /// Waiters of the caller that were granted earlier and haven't confirmed.
    pub pending: Vec<Uuid>,
}

/// A set as the store sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetState {
    /// N in force: the lowest claimed by living instances.
    pub slots: u32,
    /// Slots taken.
    pub used: u32,
    /// Requests waiting, of all instances.
    pub waiting: u32,
    /// Requests waiting, of the caller.
    pub mine: u32,
    /// The lease in force, ms.
    pub lease: i64,
}

/// The caller's connection isn't its newest; nothing was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale;

/// Everything the store remembers.
#[derive(Debug, Default)]
pub struct Ledger {
    fleet: Option<Fleet>,
    instances: HashMap<Uuid, i64>,
    sets: HashMap<Arc<str>, Set>,
    /// Who would hear a push.
    pub(crate) listeners: HashSet<Uuid>,
    /// Pushes to deliver: instance and granted id.
    pub(crate) pushes: Vec<(Uuid, Uuid)>,
}

/// What the store remembers of the whole fleet.
#[derive(Debug, Default)]
struct Fleet {
    last: i64,
    run: Box<str>,
    recovery: i64,
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
    pushes: &'a mut Vec<(Uuid, Uuid)>,
    granted: Vec<Uuid>,
}

impl Ledger {
    /// Applies acquires in order.
    ///
    /// # Errors
    /// [`Stale`] if the caller has a newer connection.
    pub fn acquire(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        acquires: &[Acquire],
    ) -> Result<AcquireReply, Stale> {
        let (sets, mut context) = self.enter(now, caller, run)?;
        let used = open_all(sets, &mut context, acquires.iter().map(|acquire| &acquire.ask));
        let mut outcomes = Vec::with_capacity(acquires.len());
        for acquire in acquires {
            outcomes.push(acquire_one(sets, &mut context, acquire));
        }
        finish_all(sets, &mut context, &used);
        Ok(AcquireReply { stamp: context.stamp(), outcomes, granted: context.granted })
    }

    /// Applies releases in order, then hands what became free to the best waiters.
    ///
    /// # Errors
    /// [`Stale`] if the caller has a newer connection.
    pub fn release(
        &mut self,
        now: i64,
        caller: &Caller,
        run: &str,
        releases: &[Release],
    ) -> Result<ReleaseReply, Stale> {
        let (sets, mut context) = self.enter(now, caller, run)?;
        let used = open_all(sets, &mut context, releases.iter().map(|release| &release.ask));
        let mut outcomes = Vec::with_capacity(releases.len());
        for release in releases {
            outcomes.push(release_one(sets, release));
        }
        for spec in &used {
            set_of(sets, spec).grant(&mut context, spec);
        }
        finish_all(sets, &mut context, &used);
        Ok(ReleaseReply { stamp: context.stamp(), outcomes, granted: context.granted })
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
        if heartbeat.leaving {
            self.instances.remove(&caller.instance);
        } else {
            self.instances.insert(caller.instance, now);
        }
        let (sets, mut context) = self.context(now, caller);
        context
            .fleet
            .subscribed
            .insert(caller.instance, heartbeat.subscribed && !heartbeat.leaving);
        let mut reply = BeatReply::default();
        for beat in &heartbeat.beats {
            let spec = &beat.set;
            let set = open(sets, &mut context, spec);
            set.refresh(&mut context, spec);
            set.forget_the_gone(&mut context, heartbeat.leaving);
            for renew in &beat.renew {
                reply.renewed.push(set.renew(&mut context, spec, renew));
            }
            set.tidy();
            set.collect_pending(&context, &mut reply.pending);
            set.grant(&mut context, spec);
            set.finish(&mut context, spec);
            reply.sets.push(set.state(&context));
        }
        reply.stamp = context.stamp();
        reply.granted = context.granted;
        Ok(reply)
    }

    /// The state of a set now, read only.
    pub fn status(&self, now: i64, key: &str) -> Option<SetStatus> {
        let recovery = self.fleet.as_ref().map_or(0, |fleet| fleet.recovery);
        self.sets.get(key).map(|set| set.status(now, recovery))
    }

    /// The fence and the fleet's own signs of a loss.
    fn enter<'a>(
        &'a mut self,
        now: i64,
        caller: &'a Caller,
        run: &str,
    ) -> Result<(&'a mut HashMap<Arc<str>, Set>, Context<'a>), Stale> {
        if let Some(fleet) = &self.fleet
            && fleet.epochs.get(&caller.instance).is_some_and(|&newest| caller.epoch < newest)
        {
            return Err(Stale);
        }
        let lost = match &mut self.fleet {
            Some(fleet) => now < fleet.last - CLOCK_SLACK || now - fleet.last > caller.gap,
            None => {
                self.fleet = Some(Fleet { run: run.into(), last: now, ..Fleet::default() });
                self.instances.insert(caller.instance, now);
                true
            }
        };
        let fleet = self.fleet.get_or_insert_default();
        if lost {
            fleet.recovery = now;
        }
        if now < fleet.last || now - fleet.last >= LAST_STEP {
            fleet.last = now;
        }
        fleet.epochs.insert(caller.instance, caller.epoch);
        Ok(self.context(now, caller))
    }
}

impl Ledger {
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
            granted: Vec::new(),
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
    let wants = &acquire.ask.wants;
    for (index, want) in wants.iter().enumerate() {
        let at = index as u32;
        let outcome = match set_of(sets, &want.set).take(context, &want.set, acquire, want.weight) {
            Take::Taken => continue,
            Take::Waiting { queue } => return Acquired::Waiting { at, queue },
            Take::Full { queue } => Acquired::Full { at, queue },
            Take::Recovering => Acquired::Recovering { at },
            Take::TooHeavy => Acquired::TooHeavy { at },
        };
        for earlier in &wants[..index] {
            let set = set_of(sets, &earlier.set);
            set.give_back(acquire.ask.id, acquire.ask.class, true);
            set.grant(context, &earlier.set);
        }
        return outcome;
    }
    Acquired::Granted
}

fn release_one(sets: &mut HashMap<Arc<str>, Set>, release: &Release) -> Released {
    let ask = &release.ask;
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
        set_of(sets, spec).finish(context, spec);
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
