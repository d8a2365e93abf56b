//! The contract of a store: where slots are counted.
//!
//! A store applies four operations, each atomically and each at one time of its own clock:
//! [`Acquire`], [`Release`], [`Heartbeat`] and status. [`crate::ledger`] is their meaning, as a pure state machine;
//! the two stores are that machine behind a lock (`memory`) and Lua scripts inside Redis (`redis`).
//! The same tests run on both, and random sequences compare the scripts with the machine.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use uuid::Uuid;

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod keys;
mod memory;
mod redis;
mod scripts;
#[cfg(test)]
mod tests;

pub use self::{memory::MemoryStore, redis::RedisStore};

pub use crate::ledger::{
    Acquire, AcquireReply, Acquired, Ask, Beat, BeatReply, Caller, ClassSpec, Evict, Evicted,
    Heartbeat, Holder, MOST_HOLDERS, Notice, Origin, Override, RateSpec, Refuser, Release,
    ReleaseReply, Released, Renew, Renewed, SetSpec, SetState, SetStatus, Shed, Stale, Stamp, Want,
};

/// A future that a trait object can return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What goes to the store together, in this order: releases, heartbeat, acquires.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Slots and places in queues to give back.
    pub releases: Vec<Release>,
    /// Renewals, presence and policy.
    pub heartbeat: Option<Heartbeat>,
    /// Requests that want slots.
    pub acquires: Vec<Acquire>,
}

impl Call {
    /// Whether releases and requests without rates are one turn: there are both, and nothing between them.
    fn is_one_turn(&self) -> bool {
        let unrated = |acquire: &Acquire| acquire.ask.rates.is_empty();
        self.heartbeat.is_none() && !self.releases.is_empty() && self.acquires.iter().any(unrated)
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.releases.is_empty() && self.heartbeat.is_none() && self.acquires.is_empty()
    }
}

/// The answers to a [`Call`], part by part; a part that wasn't sent has no answer.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// One outcome for each release.
    pub releases: Option<ReleaseReply>,
    /// The state of every set that the heartbeat named.
    pub heartbeat: Option<BeatReply>,
    /// One outcome for each acquire.
    pub acquires: Option<AcquireReply>,
}

/// Why a call has no answer. The operations may have been applied or not.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// No connection, or it broke.
    #[error("the store can't be reached: {0}")]
    Unavailable(String),
    /// No answer within the operation's timeout.
    #[error("the store didn't answer in time")]
    Timeout,
    /// A server answers that can't hold slots, or not for us, and won't by itself.
    #[error("the store can't be used: {0}")]
    Unfit(String),
    /// A newer connection of this instance exists; nothing was applied.
    #[error("the call came from an older connection and did nothing")]
    Stale,
    /// The answer makes no sense.
    #[error("the store's answer makes no sense: {0}")]
    BadReply(String),
}

/// Tells an instance that one of its waiters holds a slot. Only a hint: the waiter asks again before it starts.
pub type Push = Arc<dyn Fn(Event) + Send + Sync>;

/// What a subscription tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// This waiter was granted a slot, or should ask again for another reason.
    Granted(Uuid),
    /// This waiter had to go for one of a higher class.
    Displaced(Uuid),
    /// Somebody waits for slots of a set that instances may keep warm.
    Wanted,
    /// An operator ends the request of this holder.
    Evicted(Uuid),
    /// The subscription works from now on.
    Subscribed,
    /// The subscription is down; grants are collected by heartbeats meanwhile.
    Unsubscribed,
}

/// An ordered connection to the store. Calls are applied in the order in which [`Link::call`] was called,
/// whether or not earlier ones have been answered.
pub trait Link: Send + Sync + fmt::Debug {
    /// Applies a call.
    ///
    /// # Cancellation
    /// Dropping the future loses the answer; the operations may still be applied.
    ///
    /// # Errors
    /// See [`StoreError`]; after any error the link should be replaced by a newer one.
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>>;
}

/// Where slots are counted.
pub trait SlotStore: Send + Sync + fmt::Debug {
    /// The store itself, if it answers at once, inside this process.
    fn local(&self) -> Option<&dyn LocalStore> {
        None
    }

    /// Opens an ordered connection.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`], [`StoreError::Timeout`] or [`StoreError::Unfit`] when there is none to be had.
    fn open(&self) -> BoxFuture<'_, Result<Arc<dyn Link>, StoreError>>;

    /// Starts the subscription of an instance. It lives until the store is dropped, and reconnects by itself.
    fn subscribe(&self, instance: Uuid, push: Push);

    /// Looks at a set, without a fence and without changing anything.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn status<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<SetStatus, StoreError>>;

    /// Who has slots of a set, or of all sets of a limit with a key; at most [`MOST_HOLDERS`]. Like status.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn holders<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<Vec<Holder>, StoreError>>;

    /// Has the request of a holder end, without a fence. Whoever runs it cuts it, so that the slots are another's only
    /// when the upstream is rid of it.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn evict<'a>(
        &'a self,
        spec: &'a SetSpec,
        evict: &'a Evict,
    ) -> BoxFuture<'a, Result<Evicted, StoreError>>;
}

/// A store inside this process: no connection, no lease that could end, and an answer at once.
pub trait LocalStore: Send + Sync {
    /// Applies a call.
    ///
    /// # Errors
    /// [`StoreError::Stale`] only.
    fn apply(&self, caller: &Caller, call: &Call) -> Result<Reply, StoreError>;

    /// Applies a single acquire.
    ///
    /// # Errors
    /// [`Stale`].
    fn acquire(&self, caller: &Caller, acquire: &Acquire) -> Result<AcquireReply, Stale>;

    /// Applies a single release.
    ///
    /// # Errors
    /// [`Stale`].
    fn release(&self, caller: &Caller, release: &Release) -> Result<ReleaseReply, Stale>;
}
