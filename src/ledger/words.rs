//! What is asked of the store, and what it answers.

use std::sync::Arc;

use uuid::Uuid;

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
    /// Whether this is one of many sets of a limit with a key: its keys go when it is idle.
    pub keyed: bool,
    /// Whether everyone is admitted, and only told what would have happened.
    pub shadow: bool,
    /// Whether each grant brings a number that is higher than all before.
    pub fenced: bool,
    /// Whether instances may keep slots for a moment that they don't need: they are told when somebody waits.
    pub warm: bool,
    /// The classes, highest first.
    pub classes: Arc<[ClassSpec]>,
    /// Which limit of the configuration this is; the store doesn't look at it.
    pub limit: usize,
}

/// A class, as one limit treats it.
#[derive(Clone, Debug)]
pub struct ClassSpec {
    /// Labels the queue.
    pub name: Arc<str>,
    /// The share of the slots above which the class isn't admitted.
    pub share: f64,
    /// How many of the class may wait.
    pub queue: u32,
}

/// A sliding window log of one value of a rate's key.
#[derive(Clone, Debug)]
pub struct RateSpec {
    /// The rate's name, followed by `:` and a digest.
    pub key: Arc<str>,
    /// How many requests pass in a window.
    pub requests: u32,
    /// How long the window is, ms.
    pub window: i64,
    /// Whether everyone passes, and is only told what would have happened.
    pub shadow: bool,
    /// Which rate of the configuration this is; the store doesn't look at it.
    pub rate: usize,
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
    /// The rates, which are asked first.
    pub rates: Arc<[RateSpec]>,
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
    /// Whether its entries in the rates go too: it was never admitted.
    pub refund: bool,
}

/// Keeps an instance present, renews its holders and claims its configuration.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat {
    /// Whether the instance hears pushes.
    pub subscribed: bool,
    /// Whether the instance leaves for good.
    pub leaving: bool,
    /// Which instances it wants to know of: those heard of within this, ms.
    pub within: i64,
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
    /// The override that the instance remembers, as it was told.
    pub known: Option<Override>,
    /// An operator's order: other slots than the configuration's, or (`Some(None)`) an end of that.
    pub order: Option<Option<u32>>,
}

/// Slots that an operator set, above the claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Rises with every order; the highest that anyone remembers is in force.
    pub version: u64,
    /// The slots; none if the claims are in force again.
    pub slots: Option<u32>,
    /// What was claimed when it was set. A claim of anything else ends it.
    pub claims: Vec<u32>,
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
    /// The same, but a set or a rate in shadow mode would have refused.
    Shadowed {
        /// What would have refused first.
        by: Refuser,
        /// What it would have said.
        why: Shed,
    },
    /// In the queue of want `at`; earlier wants are held.
    Waiting {
        /// Index of the want.
        at: u32,
        /// Waiters of this class and higher ones in that queue, this one included.
        queue: u32,
    },
    /// Refused; nothing is kept.
    Shed {
        /// What refused.
        by: Refuser,
        /// What it said.
        why: Shed,
    },
    /// The store has no memory left for more entries of a rate; nothing is kept.
    NoMemory,
}

/// What refuses: the want or the rate of this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuser {
    /// A set.
    Want(u32),
    /// A rate.
    Rate(u32),
}

/// Why nothing is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shed {
    /// No slot free and no room to wait.
    Full {
        /// Waiters of this class and higher ones in that queue.
        queue: u32,
    },
    /// Nobody is admitted yet and the request may not wait.
    Recovering,
    /// More slots than the set has for this class.
    TooHeavy,
    /// The window is full.
    RateLimited {
        /// When the next request fits, ms from now.
        after: u32,
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

/// More holders make no list that anybody reads.
pub const MOST_HOLDERS: usize = 1_000;

/// One who has slots, for those who look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// A UUID, or whatever a plain client chose.
    pub id: String,
    /// The key of the set.
    pub set: Arc<str>,
    /// Whose request it is; none if a plain client took the slots.
    pub of: Option<Origin>,
    /// How many slots.
    pub weight: u32,
    /// Since when it has them, or of a plain client, since when it last said so, ms.
    pub age: i64,
}

/// Where a request came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The instance that holds for it.
    pub instance: Uuid,
    /// Its route.
    pub route: String,
    /// Its class.
    pub class: String,
}

/// Ends the request of a holder, wherever it runs.
#[derive(Clone, Copy, Debug)]
pub struct Evict {
    /// Whose.
    pub id: Uuid,
    /// The instance that is asked to.
    pub instance: Uuid,
    /// An instance not heard of for this long is gone, ms.
    pub presence: i64,
    /// Whether the holder of an instance that is gone is removed at once.
    pub force: bool,
}

/// What became of an [`Evict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// It is the asking instance's own, which has to cut it.
    Mine,
    /// Its instance was told to cut it.
    Told,
    /// Its instance lives, but doesn't hear just now.
    Deaf,
    /// Its instance is gone; it ends with its lease.
    Gone,
    /// Its instance is gone, and so are its slots.
    Removed,
    /// A plain client has it, who hears of nothing.
    Plain,
    /// Nobody has it.
    Unknown,
}

/// What an instance is told without having asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A waiter of its own was granted a slot, or should ask again for another reason.
    Granted,
    /// A waiter of its own had to go, for one of a higher class.
    Displaced,
    /// Somebody waits for slots that it may be keeping; no waiter in particular.
    Wanted,
    /// An operator ends a request of its own.
    Evicted,
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
    /// The fences of who was granted a slot of a fenced set.
    pub fences: Vec<(Uuid, u64)>,
    /// Waiters of the caller that had to go for others.
    pub displaced: Vec<Uuid>,
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
    /// The fences of who was granted a slot of a fenced set.
    pub fences: Vec<(Uuid, u64)>,
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
    /// The fences of who was granted a slot of a fenced set.
    pub fences: Vec<(Uuid, u64)>,
    /// Waiters of the caller that were granted earlier and haven't confirmed.
    pub pending: Vec<Uuid>,
    /// The instances asked for, and how long ago each was heard of, ms; the latest last.
    pub instances: Vec<(Uuid, i64)>,
}

/// A set as the store sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// The override in force, or the last that was.
    pub order: Option<Override>,
}

/// The caller's connection isn't its newest; nothing was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale;
