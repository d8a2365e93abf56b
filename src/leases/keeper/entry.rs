//! One request, as the keeper knows it.

use super::*;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) ask: Ask,
    pub(super) phase: Phase,
    pub(super) answer: Option<oneshot::Sender<Result<Lease, Refused>>>,
    pub(super) asked: Instant,
    /// The store may know the id already.
    pub(super) again: bool,
    /// The id may be in a queue or hold an unconfirmed grant.
    pub(super) queued: bool,
    /// A push came before the store's answer did.
    pub(super) pushed: bool,
    /// How many of the wants are held.
    pub(super) held: usize,
    /// When the last operation was sent that confirmed the lease.
    pub(super) confirmed: Instant,
    /// When the last renewal was sent.
    pub(super) renewed: Instant,
    pub(super) taken: Instant,
    /// The number of its latest grant, where a set has such.
    pub(super) fence: Option<u64>,
    /// The slots were handed over once.
    pub(super) admitted: bool,
    /// Admitted while the store was out of reach, which has never counted it.
    pub(super) uncounted: bool,
    /// Its release was written to a connection.
    pub(super) said: bool,
    /// Where it is to be cut before its lease is over.
    pub(super) guard: Option<Guard>,
    /// When the client gives up by itself.
    pub(super) patience: Option<Instant>,
    pub(super) deadline: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) enum Phase {
    /// To be asked for.
    New,
    /// Asked for, not answered.
    Asked,
    /// In a queue of the store.
    Waiting,
    /// Every want is held and the lease was handed over.
    Held,
    /// Every want is held, by nobody: kept for the next request.
    Spare,
    /// To be released.
    Leaving,
    /// Released, not acknowledged.
    Releasing,
}

impl Entry {
    pub(super) fn new(ask: Ask, phase: Phase, asked: Instant, now: Instant) -> Self {
        Self {
            ask,
            phase,
            answer: None,
            asked,
            again: false,
            queued: false,
            pushed: false,
            held: 0,
            confirmed: now,
            renewed: now,
            taken: now,
            fence: None,
            admitted: false,
            uncounted: false,
            said: false,
            guard: None,
            patience: None,
            deadline: None,
        }
    }
}
