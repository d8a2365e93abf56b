//! The short way, where the store answers at once: a request that is given its slots on the spot needs no entry.
//! Nothing of it must be renewed or asked for again, since such a store forgets only when the process ends.

use super::*;

/// What became of a request at once.
pub(in crate::leases) enum AtOnce {
    /// It has its slots; and what a limit or rate in shadow mode would have said.
    Taken { ask: Ask, shadow: Option<Refused>, fence: Option<u64> },
    /// Its answer comes as everyone else's does.
    Later(oneshot::Receiver<Result<Lease, Refused>>),
}

impl Keeper {
    /// Whether newcomers may be asked for.
    pub(in crate::leases) fn is_open(&self) -> bool {
        !self.draining && !self.down && self.leaving == Leaving::No
    }

    /// What a newcomer says to the store.
    pub(in crate::leases) fn ask_at_once(&mut self, ask: Ask) -> Acquire {
        self.count_arrival(&ask);
        let may_wait = ask.wants.iter().any(|want| want.set.queue > 0);
        Acquire { ask, waited: 0, may_wait, again: false }
    }

    /// Takes in what the store says to a newcomer.
    pub(in crate::leases) fn on_asked_at_once(
        &mut self,
        acquire: Acquire,
        reply: AcquireReply,
        deadline: Option<Instant>,
        now: Instant,
    ) -> AtOnce {
        let shadow = match reply.outcomes.first() {
            Some(Acquired::Granted) => None,
            Some(Acquired::Shadowed { by, why }) => Some(self.refused(&acquire.ask, *by, *why)),
            _ => {
                let (sender, receiver) = oneshot::channel();
                let entry = Entry::new(acquire.ask.clone(), Phase::Asked, now, now);
                let entry = Entry { answer: Some(sender), patience: deadline, ..entry };
                self.entries.insert(acquire.ask.id, entry);
                self.on_acquires(vec![acquire], reply, now, now);
                return AtOnce::Later(receiver);
            }
        };
        self.note(reply.stamp, now);
        self.take_fences(&reply.fences);
        self.on_told(&reply.granted, &reply.displaced, now, now);
        self.count_taken(&acquire.ask.wants);
        self.unlisted += 1;
        let fence =
            reply.fences.iter().find(|(id, _)| *id == acquire.ask.id).map(|(_, fence)| *fence);
        AtOnce::Taken { ask: acquire.ask, shadow, fence }
    }

    /// What is said of slots that were taken at once and held since then.
    pub(in crate::leases) fn give_back_at_once(
        &mut self,
        ask: Ask,
        taken: Instant,
        now: Instant,
    ) -> Release {
        self.unlisted -= 1;
        self.count_hold(&ask.wants, now.duration_since(taken));
        Release { ask, queued: false, refund: false }
    }

    /// Takes in what the store says to that.
    pub(in crate::leases) fn on_given_back(&mut self, reply: &ReleaseReply, now: Instant) {
        self.note(reply.stamp, now);
        self.take_fences(&reply.fences);
        self.on_granted(&reply.granted, now, now);
    }

    /// The same when the keeper was busy: it goes the way of all others.
    pub(super) fn on_give_back(&mut self, ask: Ask, taken: Instant, now: Instant) {
        self.count_hold(&ask.wants, now.duration_since(taken));
        self.return_unlisted(ask, now);
    }

    /// What has no entry gets one, to be released.
    pub(super) fn return_unlisted(&mut self, ask: Ask, now: Instant) {
        self.unlisted -= 1;
        let id = ask.id;
        let entry = Entry { admitted: true, ..Entry::new(ask, Phase::Leaving, now, now) };
        self.entries.insert(id, entry);
        self.gone.push_back(id);
    }
}
