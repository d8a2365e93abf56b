//! Slots kept warm: what a request gives back stays with its instance, and the next of its kind begins with it.

use super::{
    plan::{Mutant, OP_TIMEOUT},
    requests::{Phase, Way},
    world::{World, tell},
    *,
};

/// A push, and the release that it calls for, take no longer in peace.
const PUSH: Duration = Duration::from_millis(100);

/// Slots that are taken, by nobody.
pub(super) struct Spare {
    pub(super) machine: usize,
    pub(super) holder: Uuid,
    pub(super) wants: Vec<(usize, u32)>,
    kept: Instant,
}

impl World {
    /// A request that is over offers its slots, as a lease does that is dropped. True if they stay.
    pub(super) fn keeps(&mut self, machine: usize, request: usize) -> bool {
        let (now, over) = (self.now, &self.requests[request]);
        let (holder, wants, taken) = (over.holder, over.wants.clone(), over.taken);
        let keeper = &mut self.machines[machine].keeper;
        if !keeper.keep_warm(&mut Slots::Listed(holder), taken, now) {
            return false;
        }
        let wakes = keeper.alarm_moved();
        tell!(self, "{machine} keeps what r{request} had, as {}", self.name(holder));
        self.spares.push(Spare { machine, holder, wants, kept: now });
        if wakes {
            self.serve(machine);
        }
        true
    }

    /// A request begins at once with what another had. False if it has to ask.
    pub(super) fn finds_warm(&mut self, machine: usize, request: usize, ask: &Ask) -> bool {
        let Some(holder) = self.reuse(machine, request, ask) else { return false };
        let wakes = self.machines[machine].keeper.alarm_moved();
        self.requests[request].holder = holder;
        self.check_reuse(request);
        self.begins(request, Way::Warm, None, None);
        if wakes {
            self.serve(machine);
        }
        true
    }

    fn reuse(&mut self, machine: usize, request: usize, ask: &Ask) -> Option<Uuid> {
        if self.plan.is(Mutant::SharesWarmSlot) {
            let me = &self.requests[request];
            let is_alike = |other: &&usize| {
                let other = &self.requests[**other];
                other.machine == machine
                    && other.phase == Phase::Running
                    && other.way == Way::Warm
                    && (&other.wants, other.class) == (&me.wants, me.class)
            };
            if let Some(&other) = self.running.iter().find(is_alike) {
                return Some(self.requests[other].holder);
            }
        }
        let late = self.plan.is(Mutant::ReusesLate);
        // To a clock that stands still every lease is fresh.
        let now = if late { self.now - self.plan.lease } else { self.now };
        match self.machines[machine].keeper.reuse(ask, now)? {
            Slots::Listed(holder) => Some(holder),
            Slots::AtOnce(_) => None,
        }
    }

    /// A lease that nobody has renewed for so long may be over soon, or be over already.
    fn check_reuse(&mut self, request: usize) {
        let holder = self.requests[request].holder;
        for want in 0..self.requests[request].wants.len() {
            let (set, _) = self.requests[request].wants[want];
            let Some(confirmed) = self.store.confirmed.get(&(set, holder)) else { continue };
            let age = self.now - confirmed.at;
            if age >= self.plan.lease / 2 {
                self.breaks(format!("r{request} begins with slots last renewed {age:?} ago"));
            }
        }
    }

    /// How old an instance's view may be when it hands on what it has.
    pub(super) fn view(&self) -> Duration {
        self.plan.lease / 2 + self.plan.heartbeat() + OP_TIMEOUT
    }

    /// Slots of a set that its instances keep, and that the store must count.
    pub(super) fn kept_warm(&self, set: usize) -> u32 {
        let spares = self.spares.iter().filter(|spare| self.is_counted(spare.holder, set));
        let wants = spares.flat_map(|spare| &spare.wants);
        wants.filter(|(of, _)| *of == set).map(|(_, weight)| *weight).sum()
    }

    /// Nobody waits for slots that are kept longer than a push takes to fetch them, or a heartbeat where none comes.
    pub(super) fn check_kept(&mut self) {
        let (heartbeat, unknown) = (self.plan.heartbeat(), self.unknown());
        let calm = self.now.duration_since(self.last_fault) > unknown;
        for place in 0..self.spares.len() {
            let Spare { machine, holder, ref wants, kept } = self.spares[place];
            if !self.machines[machine].alive {
                continue;
            }
            let waits = wants.iter().filter_map(|(set, _)| self.store.waits[*set]).min();
            let Some(since) = waits.map(|since| since.max(kept)) else { continue };
            let hears = self.is_calm(machine, unknown)
                && self.last_lost_push.is_none_or(|lost| lost + heartbeat < since);
            let longest = match (calm, hears) {
                (true, true) => PUSH,
                (true, false) => 2 * heartbeat,
                (false, _) => unknown,
            };
            if self.now - since > longest {
                let holder = self.name(holder);
                self.breaks(format!("{machine} keeps {holder} warm although somebody waits"));
            }
        }
    }
}
