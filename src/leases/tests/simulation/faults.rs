//! What goes wrong.

use super::{
    plan::{Fault, LINGER},
    requests::Phase,
    world::{Happening, World, tell},
    *,
};
use crate::{
    leases::tests::simulation::machine::Link,
    ledger::{Ledger, testing::Part},
};

const HOUR: i64 = 3_600_000;

/// What ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heal {
    Partition(usize),
    Freeze(usize),
    Outage,
    Slow,
    Pushes,
    Restart,
    /// A replica takes over.
    Failover,
    /// Another instance starts in this one's place.
    Replace(usize),
    /// An instance that drained is told to leave.
    Leave(usize),
}

impl World {
    pub(super) fn plan_fault(&mut self) {
        let next = self.about(self.plan.peace);
        self.plan_in(next, Happening::Fault);
    }

    pub(super) fn fault(&mut self) {
        if !self.busy {
            return;
        }
        self.plan_fault();
        let fault = self.plan.faults[self.rng.usize(..self.plan.faults.len())];
        let living = self.living();
        let Some(&at) = living.get(self.rng.usize(..living.len().max(1))) else { return };
        let set = self.rng.usize(..self.plan.sets.len());
        // Short ones, and ones that outlast leases.
        let time = match self.rng.u32(..3) {
            0 => self.up_to(Duration::from_secs(1)),
            1 => self.up_to(self.plan.lease),
            _ => self.up_to(3 * self.plan.lease),
        };
        self.faults += 1;
        self.last_fault = self.now;
        tell!(self, "FAULT {fault:?}: {at}, {}, {time:?}", self.plan.sets[set].key);
        match fault {
            Fault::Cut => self.break_line(at),
            Fault::Hole => self.silence_line(at),
            Fault::Partition => {
                self.disturb(at, time);
                self.machines[at].partitioned = true;
                self.loses_subscription(at);
                self.plan_in(time, Happening::Heals(Heal::Partition(at)));
            }
            Fault::Outage => {
                self.disturb_all(time);
                self.store.up = false;
                self.plan_in(time, Happening::Heals(Heal::Outage));
            }
            Fault::Slow => {
                self.disturb_all(time);
                self.slow = true;
                self.plan_in(time, Happening::Heals(Heal::Slow));
            }
            Fault::Freeze => {
                self.disturb(at, time);
                self.machines[at].frozen = true;
                self.plan_in(time, Happening::Heals(Heal::Freeze(at)));
            }
            Fault::Crash => {
                self.crash(at);
                self.plan_in(time, Happening::Heals(Heal::Replace(at)));
            }
            Fault::Reconfigure => self.drain(at, time),
            Fault::Join => {
                if living.len() < 6 {
                    let claims = self.other_claims();
                    self.start_machine(&claims);
                }
            }
            Fault::Restart => {
                self.store.up = false;
                self.disturb_all(time);
                self.break_all();
                self.plan_in(time, Happening::Heals(Heal::Restart));
            }
            Fault::FlushAll => self.store.replace(Ledger::default(), false, self.now),
            Fault::LosePart => self.lose_part(set),
            Fault::Failover => {
                self.store.snapshot = Some(self.store.ledger.clone());
                let lag = time.min(Duration::from_secs(1));
                self.disturb_all(lag);
                self.plan_in(lag, Happening::Heals(Heal::Failover));
            }
            Fault::ClockJump => {
                let by = self.rng.i64(5_000..HOUR);
                let by = if self.rng.bool() { by } else { -by };
                tell!(self, "the clock jumps by {by} ms");
                self.store.set_clock(by, self.now);
            }
            Fault::LosePushes => {
                self.pushes_get_lost = true;
                self.plan_in(time, Happening::Heals(Heal::Pushes));
            }
            Fault::Unsubscribe => self.loses_subscription(at),
            Fault::Override => {
                let limit = self.rng.usize(..self.plan.limits.len());
                if !self.plan.limits[limit].keyed && !self.plan.limits[limit].fenced {
                    let above = self.plan.above(limit);
                    let slots = self.chance(0.7).then(|| above + self.rng.u32(0..=8));
                    self.order(at, limit, slots);
                }
            }
        }
    }

    pub(super) fn heals(&mut self, heal: Heal) {
        tell!(self, "over: {heal:?}");
        match heal {
            Heal::Partition(at) => {
                self.machines[at].partitioned = false;
                self.disturb(at, Duration::ZERO);
            }
            Heal::Freeze(at) => self.wake(at),
            Heal::Outage => {
                self.store.up = true;
                self.disturb_all(Duration::ZERO);
            }
            Heal::Slow => {
                self.slow = false;
                self.disturb_all(Duration::ZERO);
            }
            Heal::Pushes => self.pushes_get_lost = false,
            Heal::Restart => self.start_store(Ledger::default()),
            Heal::Failover => {
                if let Some(snapshot) = self.store.snapshot.take() {
                    self.start_store(snapshot);
                }
            }
            Heal::Replace(at) => {
                let same = self.rng.bool();
                let claims =
                    if same { self.machines[at].claims.clone() } else { self.other_claims() };
                self.start_machine(&claims);
            }
            Heal::Leave(at) => {
                let machine = &mut self.machines[at];
                if machine.frozen {
                    self.plan_in(self.plan.lease, Happening::Heals(heal));
                } else if machine.alive {
                    machine.inbox.push(Message::Leave);
                    self.serve(at);
                }
            }
        }
    }

    // === on instances ===

    /// What an instance fails to do in this time and shortly after is its excuse.
    fn disturb(&mut self, at: usize, time: Duration) {
        let machine = &mut self.machines[at];
        machine.disturbed = machine.disturbed.max(self.now + time);
        self.last_fault = self.last_fault.max(self.now);
    }

    fn disturb_all(&mut self, time: Duration) {
        for at in self.living() {
            self.disturb(at, time);
        }
    }

    fn break_line(&mut self, at: usize) {
        self.disturb(at, Duration::ZERO);
        if let Link::Up(line) = self.machines[at].link {
            let noticed = self.latency();
            self.lines[line].mute = true;
            self.lines[line].deaf = true;
            self.plan_in(noticed, Happening::Broke { machine: at, line });
        }
    }

    fn silence_line(&mut self, at: usize) {
        self.disturb(at, Duration::ZERO);
        if let Link::Up(line) = self.machines[at].link {
            self.lines[line].deaf = true;
            self.lines[line].mute = self.rng.bool();
        }
    }

    fn break_all(&mut self) {
        for at in self.living() {
            self.break_line(at);
            self.loses_subscription(at);
        }
    }

    fn wake(&mut self, at: usize) {
        let machine = &mut self.machines[at];
        if !machine.alive || !std::mem::take(&mut machine.frozen) {
            return;
        }
        machine.woke = self.now;
        let mut missed = std::mem::take(&mut machine.missed);
        // What is noticed first is anybody's guess, though answers are read in order.
        if self.rng.bool() {
            missed.sort_by_key(|happening| matches!(happening, Happening::TimedOut { .. }));
        } else {
            missed.sort_by_key(|happening| !matches!(happening, Happening::TimedOut { .. }));
        }
        for happening in missed {
            self.plan_in(Duration::ZERO, happening);
        }
        self.disturb(at, Duration::ZERO);
        // So is whether the keeper runs before those do who came meanwhile.
        if self.rng.bool() {
            self.serve(at);
        }
        if self.busy {
            (0..self.rng.u32(..8))
                .for_each(|_| self.plan_in(Duration::ZERO, Happening::Queued { machine: at }));
        }
        let number = self.machines[at].ticks;
        self.plan_in(Duration::ZERO, Happening::Tick { machine: at, number });
    }

    pub(super) fn crash(&mut self, at: usize) {
        self.close_line(at);
        let machine = &mut self.machines[at];
        machine.alive = false;
        machine.woke = self.now;
        let asking = std::mem::take(&mut machine.asking);
        self.store.ledger.listeners.remove(&machine.id);
        for request in asking {
            self.requests[request].phase = Phase::Over;
        }
        for request in self.running.clone() {
            let its = &mut self.requests[request];
            if its.machine == at && its.phase == Phase::Running {
                its.phase = Phase::Closing;
                self.plan_in(LINGER, Happening::Closed { request });
            }
        }
    }

    fn other_claims(&mut self) -> Vec<u32> {
        let slots = |world: &mut Self, limit: usize| match world.plan.limits[limit].fenced {
            true => 1,
            false => world.plan.above(limit) + world.rng.u32(1..=6),
        };
        (0..self.plan.limits.len()).map(|limit| slots(self, limit)).collect()
    }

    fn drain(&mut self, at: usize, time: Duration) {
        if self.machines[at].frozen || std::mem::replace(&mut self.machines[at].draining, true) {
            return;
        }
        self.machines[at].inbox.push(Message::Drain);
        self.serve(at);
        self.plan_in(time, Happening::Heals(Heal::Leave(at)));
        self.plan_in(time, Happening::Heals(Heal::Replace(at)));
    }

    pub(super) fn order(&mut self, at: usize, limit: usize, slots: Option<u32>) {
        if self.machines[at].frozen {
            return;
        }
        tell!(self, "{at} is told to set {limit} to {slots:?}");
        let (done, _) = oneshot::channel();
        self.machines[at].inbox.push(Message::SetSlots { limit, slots, done });
        self.serve(at);
    }

    // === on the store ===

    fn lose_part(&mut self, set: usize) {
        let parts = [
            Part::Fleet,
            Part::Instances,
            Part::Slots,
            Part::Meta,
            Part::Info,
            Part::Wait("high"),
            Part::Wait("low"),
        ];
        let part = parts[self.rng.usize(..parts.len())];
        if self.store.fleet_lost.is_some_and(|lost| self.now < lost + self.plan.lease) {
            return;
        }
        tell!(self, "{part:?} is lost");
        self.store.lose(set, part, self.now, self.plan.lease);
    }

    /// The store is another process from now on.
    fn start_store(&mut self, memory: Ledger) {
        self.store.replace(memory, true, self.now);
        self.store.up = true;
        self.break_all();
        self.last_fault = self.now;
    }

    /// Everything is mended.
    pub(super) fn mend(&mut self) {
        self.busy = false;
        self.slow = false;
        self.pushes_get_lost = false;
        if !self.store.up {
            self.heals(Heal::Outage);
        }
        for at in self.living() {
            self.machines[at].partitioned = false;
            self.wake(at);
            self.disturb(at, Duration::ZERO);
        }
        self.last_fault = self.now;
    }
}
