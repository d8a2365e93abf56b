//! The store: the ledger, its clock, and what the world remembers of what it has confirmed.

use super::{
    plan::{Mutant, Plan},
    world::World,
    *,
};
use crate::{
    ledger::{
        Ledger,
        testing::{Part, Waiter},
    },
    store::{Acquire, Acquired, Caller, Heartbeat, Notice, Release, Renewed, SetSpec, Stale},
};

/// A holder's lease, by what was applied in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Confirmed {
    pub(super) first: Instant,
    /// Since when it is counted without a gap.
    pub(super) since: Instant,
    pub(super) at: Instant,
    /// When the store lost its memory of it.
    pub(super) lost: Option<Instant>,
}

pub(super) struct Store {
    pub(super) ledger: Ledger,
    /// Whether it can be reached.
    pub(super) up: bool,
    pub(super) run: Arc<str>,
    runs: u32,
    /// How far the clock was set forward, ms.
    pub(super) ahead: i64,
    pub(super) specs: Vec<SetSpec>,
    pub(super) confirmed: HashMap<(usize, Uuid), Confirmed>,
    /// Whose release was applied; forgotten when the store forgets which connections are old.
    released: HashSet<(usize, Uuid)>,
    /// The newest connections that were seen since.
    pub(super) epochs: HashMap<Uuid, u64>,
    /// Per set: when it lost holders without the chance to notice before the next call.
    pub(super) lost: Vec<Option<Instant>>,
    /// Per set: the slots in force, and since when.
    pub(super) slots: Vec<Vec<(Instant, u32)>>,
    /// Per set: since when a slot lies idle although somebody waits.
    pub(super) idle: Vec<Option<Instant>>,
    /// Per set: since when somebody waits who might be served.
    pub(super) waits: Vec<Option<Instant>>,
    /// Since when an id holds a grant that its owner hasn't confirmed.
    granted: HashMap<(usize, Uuid), Instant>,
    fence: u64,
    /// When the fleet's key was lost alone. What the sets' own keys lose then goes unnoticed for a moment: one key at a
    /// time is what is promised.
    pub(super) fleet_lost: Option<Instant>,
    /// The latest may be forgotten.
    fence_lost: bool,
    pub(super) clock_went_back: bool,
    pub(super) snapshot: Option<Ledger>,
    /// Per set: when it was last touched, which keeps its keys.
    touched: Vec<Instant>,
    /// For a mutant: when the slots expire.
    expires: Vec<Option<Instant>>,
    pub(super) calls: u64,
}

impl Store {
    pub(super) fn new(plan: &Plan, now: Instant) -> Self {
        let spec =
            |set: &plan::SetPlan| plan.set_spec(&set.key, set.limit, plan.limits[set.limit].slots);
        let sets = plan.sets.len();
        Self {
            ledger: Ledger::default(),
            up: true,
            run: "run0".into(),
            runs: 0,
            ahead: 0,
            specs: plan.sets.iter().map(spec).collect(),
            confirmed: HashMap::default(),
            released: HashSet::default(),
            epochs: HashMap::default(),
            lost: vec![None; sets],
            slots: vec![Vec::new(); sets],
            idle: vec![None; sets],
            waits: vec![None; sets],
            granted: HashMap::default(),
            fence: 0,
            fleet_lost: None,
            fence_lost: false,
            clock_went_back: false,
            snapshot: None,
            touched: vec![now; sets],
            expires: vec![None; sets],
            calls: 0,
        }
    }

    /// Keys of sets with a key live for two leases.
    pub(super) fn expire(&mut self, lease: Duration, now: Instant) {
        for (set, touched) in self.specs.iter().zip(&self.touched) {
            if set.keyed && now > *touched + 2 * lease {
                self.ledger.expire(&set.key);
            }
        }
    }

    fn touch(&mut self, call: &Call, now: Instant) {
        let releases = call.releases.iter().map(|release| &release.ask);
        let asks = releases.chain(call.acquires.iter().map(|acquire| &acquire.ask));
        let wanted = asks.flat_map(|ask| ask.wants.iter().map(|want| &want.set.key));
        let beats = call.heartbeat.iter().flat_map(|heartbeat| &heartbeat.beats);
        for key in wanted.chain(beats.map(|beat| &beat.set.key)) {
            if let Some(set) = self.specs.iter().position(|spec| spec.key == *key) {
                self.touched[set] = now;
            }
        }
    }

    pub(super) fn place(&self, key: &str) -> usize {
        self.specs.iter().position(|spec| &*spec.key == key).expect("a set of the plan")
    }

    /// The most slots in force since a moment.
    pub(super) fn most_since(&self, set: usize, since: Instant) -> u32 {
        let history = &self.slots[set];
        let first = history.iter().rposition(|(at, _)| *at < since).unwrap_or(0);
        history[first..].iter().map(|(_, slots)| *slots).max().unwrap_or(0)
    }

    fn forget_fences(&mut self) {
        self.released.clear();
        self.epochs.clear();
        self.fence_lost = true;
    }

    fn lose_holders(&mut self, set: Option<usize>, now: Instant) {
        for (&(at, _), confirmed) in &mut self.confirmed {
            if set.is_none_or(|set| set == at) {
                confirmed.lost = Some(now);
            }
        }
        for (at, lost) in self.lost.iter_mut().enumerate() {
            if set.is_none_or(|set| set == at) {
                *lost = Some(now);
            }
        }
    }

    /// Another memory: none, or an older one. Listeners stay where the server does.
    pub(super) fn replace(&mut self, memory: Ledger, is_new_server: bool, now: Instant) {
        let before = std::mem::replace(&mut self.ledger, memory);
        self.ledger.listeners.clear();
        if is_new_server {
            self.runs += 1;
            self.run = format!("run{}", self.runs).into();
        } else {
            self.ledger.listeners = before.listeners;
        }
        self.forget_fences();
        self.lose_holders(None, now);
    }

    pub(super) fn set_clock(&mut self, by: i64, now: Instant) {
        self.ahead += by;
        self.clock_went_back |= by < 0;
        self.lose_holders(None, now);
    }

    pub(super) fn lose(&mut self, set: usize, part: Part, now: Instant, lease: Duration) {
        let key = Arc::clone(&self.specs[set].key);
        let held = self.confirmed.iter().any(|(&(at, id), confirmed)| {
            at == set && confirmed.at + lease >= now && self.ledger.holds(&key, id)
        });
        self.ledger.lose(&key, part);
        match part {
            Part::Fleet => {
                self.fleet_lost = Some(now);
                self.forget_fences();
            }
            Part::Slots if held => self.lose_holders(Some(set), now),
            _ => {}
        }
    }
}

/// What one command did, for the laws.
struct Applied<'a> {
    caller: &'a Caller,
    granted: &'a [Uuid],
    fences: &'a [(Uuid, u64)],
    /// Whose slots were not granted but registered again.
    readded: &'a [Uuid],
}

impl World {
    /// Applies what of a call reaches the store.
    pub(super) fn apply(
        &mut self,
        caller: &Caller,
        run: &str,
        call: &Call,
    ) -> Result<Reply, Stale> {
        let newest = self.store.epochs.get(&caller.instance).copied().unwrap_or(0);
        let epoch = caller.epoch.max(newest);
        let (caller, call) = (&self.mutated_caller(caller), &self.mutated_call(caller, call));
        self.store.calls += 1;
        let skew = self.machine_of(caller.instance).map_or(0, |at| self.machines[at].skew);
        let skew = if self.plan.is(Mutant::CallersClock) { skew } else { 0 };
        let now = self.store_now() + skew;
        self.store.expire(self.plan.lease, self.now);
        self.store.touch(call, self.now);
        self.expire_after_acquires();
        let mut queues = self.queues();
        let held = self.held_before(&call.acquires);
        if self.plan.is(Mutant::YoungestFirst) {
            self.store.ledger.reverse_queues();
        }
        let mut reply = Reply::default();
        let is_one_turn =
            call.heartbeat.is_none() && !call.releases.is_empty() && !call.acquires.is_empty();
        if !call.releases.is_empty() {
            let acquires = if is_one_turn { &call.acquires[..] } else { &[] };
            let (releases, acquires) =
                self.store.ledger.turn(now, caller, run, &call.releases, acquires)?;
            self.account_releases(&call.releases);
            let (granted, fences) = (&releases.granted, &releases.fences);
            self.account(&Applied { caller, granted, fences, readded: &[] }, &mut queues);
            reply.releases = Some(releases);
            reply.acquires = is_one_turn.then_some(acquires);
        }
        if let Some(heartbeat) = &call.heartbeat {
            let mut beat = self.store.ledger.heartbeat(now, caller, run, heartbeat)?;
            let readded = &self.account_renewals(heartbeat, &beat.renewed);
            let (granted, fences) = (&beat.granted, &beat.fences);
            self.account(&Applied { caller, granted, fences, readded }, &mut queues);
            if self.plan.is(Mutant::FullShare) {
                beat.instances.retain(|(instance, _)| *instance == caller.instance);
            }
            reply.heartbeat = Some(beat);
        }
        if !call.acquires.is_empty() {
            let acquires = match reply.acquires.take() {
                Some(acquires) => acquires,
                None => self.store.ledger.acquire(now, caller, run, &call.acquires)?,
            };
            self.account_acquires(&call.acquires, &acquires.outcomes, &held);
            let (granted, fences) = (&acquires.granted, &acquires.fences);
            self.account(&Applied { caller, granted, fences, readded: &[] }, &mut queues);
            reply.acquires = Some(acquires);
        }
        self.store.epochs.insert(caller.instance, epoch);
        self.deliver_pushes();
        self.note_slots();
        self.check_idle();
        self.check_kept();
        self.check_counted();
        Ok(self.restore_reply(reply))
    }

    pub(super) fn store_now(&self) -> i64 {
        let since = self.now.duration_since(self.epoch).as_millis() as i64;
        1_700_000_000_000 + since + self.store.ahead
    }

    /// Who waits in each set and holds nothing of it.
    fn queues(&self) -> Vec<Vec<Waiter>> {
        let ledger = &self.store.ledger;
        let of = |spec: &SetSpec| {
            let mut queue = ledger.queue(&spec.key);
            queue.retain(|waiter| !ledger.holds(&spec.key, waiter.id));
            queue
        };
        self.store.specs.iter().map(of).collect()
    }

    fn account_releases(&mut self, releases: &[Release]) {
        for release in releases {
            self.spares.retain(|spare| spare.holder != release.ask.id);
            for want in release.ask.wants.iter() {
                // Strays are released from every set that there is without a key.
                if let Some(set) = self.store.specs.iter().position(|spec| spec.key == want.set.key)
                {
                    self.store.confirmed.remove(&(set, release.ask.id));
                    self.store.released.insert((set, release.ask.id));
                }
            }
        }
    }

    /// Which slots those who ask have been granted already.
    fn held_before(&self, acquires: &[Acquire]) -> HashSet<(usize, Uuid)> {
        let asks = acquires.iter().map(|acquire| &acquire.ask);
        let slots = asks.flat_map(|ask| ask.wants.iter().map(|want| (&want.set.key, ask.id)));
        let held = slots.filter(|(key, id)| self.store.ledger.holds(key, *id));
        held.map(|(key, id)| (self.store.place(key), id)).collect()
    }

    fn account_renewals(&mut self, heartbeat: &Heartbeat, renewed: &[Renewed]) -> Vec<Uuid> {
        let mut readded = Vec::new();
        let renewals = heartbeat
            .beats
            .iter()
            .flat_map(|beat| beat.renew.iter().map(|renew| (&beat.set.key, renew)));
        for ((key, renew), renewed) in renewals.zip(renewed) {
            let (set, id) = (self.store.place(key), renew.ask.id);
            let kept = if *renewed == Renewed::Kept { "renews" } else { "registers again" };
            tell!(self, "the store {kept} {} of {key}", self.name(id));
            if *renewed == Renewed::Readded {
                readded.push(id);
                if self.store.released.contains(&(set, id)) {
                    self.breaks(format!("{} came back after its release", self.name(id)));
                }
            }
            self.confirm(set, id, *renewed == Renewed::Readded);
        }
        readded
    }

    fn account_acquires(
        &mut self,
        acquires: &[Acquire],
        outcomes: &[Acquired],
        held_before: &HashSet<(usize, Uuid)>,
    ) {
        for (acquire, outcome) in acquires.iter().zip(outcomes) {
            let id = acquire.ask.id;
            tell!(self, "the store says {outcome:?} to {}", self.name(id));
            let held = match outcome {
                Acquired::Granted | Acquired::Shadowed { .. } => acquire.ask.wants.len(),
                Acquired::Waiting { at, .. } => *at as usize,
                _ => 0,
            };
            for want in &acquire.ask.wants[..held] {
                let set = self.store.place(&want.set.key);
                if self.store.released.contains(&(set, id)) {
                    self.breaks(format!("{} got a slot after its release", self.name(id)));
                }
                if !held_before.contains(&(set, id)) {
                    self.check_admission(set, id);
                }
                self.confirm(set, id, false);
                self.store.expires[set] = Some(self.now + self.plan.lease + Duration::from_secs(1));
            }
        }
    }

    fn account(&mut self, applied: &Applied<'_>, queues: &mut Vec<Vec<Waiter>>) {
        for &id in applied.granted {
            let wants = self.request_of(id).map(|at| self.requests[at].wants.clone());
            if let Some([(set, _)]) = wants.as_deref() {
                tell!(self, "the store grants {} to {}", self.store.specs[*set].key, self.name(id));
                self.check_admission(*set, id);
                self.confirm(*set, id, false);
            }
        }
        for &(id, fence) in applied.fences {
            // Whoever forgets the latest relies on the clock.
            let is_excused = self.store.fence_lost && self.store.clock_went_back;
            self.store.fence_lost = false;
            if fence <= self.store.fence && !is_excused {
                let before = self.store.fence;
                self.breaks(format!("fence {fence} of {} after {before}", self.name(id)));
            }
            self.store.fence = fence;
        }
        let after = self.queues();
        for (set, (before, after)) in queues.iter().zip(&after).enumerate() {
            self.check_order(set, before, after, applied.caller, applied.readded);
            for waiter in before {
                if self.store.ledger.holds(&self.store.specs[set].key, waiter.id) {
                    self.store.granted.insert((set, waiter.id), self.now);
                }
            }
        }
        *queues = after;
    }

    fn confirm(&mut self, set: usize, id: Uuid, is_readded: bool) {
        let now = self.now;
        let first = self.store.granted.remove(&(set, id)).unwrap_or(now);
        let fresh = Confirmed { first, since: first, at: now, lost: None };
        let confirmed = self.store.confirmed.entry((set, id)).or_insert(fresh);
        let lease_is_over = now > confirmed.at + self.plan.lease;
        let since = if lease_is_over || is_readded { now } else { confirmed.since };
        *confirmed = Confirmed { since, at: now, lost: None, ..*confirmed };
    }

    fn note_slots(&mut self) {
        for set in 0..self.store.specs.len() {
            let status = self.store.ledger.status(0, &self.store.specs[set]);
            let history = &mut self.store.slots[set];
            // A set with a key that is idle has no memory of how many there are.
            let is_known = status.slots > 0 || !self.store.specs[set].keyed;
            if is_known && history.last().is_none_or(|(_, slots)| *slots != status.slots) {
                history.push((self.now, status.slots));
                tell!(self, "{} slots in {}", status.slots, self.store.specs[set].key);
            }
        }
    }

    fn deliver_pushes(&mut self) {
        for (instance, id, notice) in std::mem::take(&mut self.store.ledger.pushes) {
            let Some(machine) = self.machine_of(instance) else { continue };
            if notice == Notice::Wanted && self.plan.is(Mutant::KeepsWhatIsWanted) {
                continue;
            }
            let lost = self.pushes_get_lost && self.rng.bool();
            if lost || self.machines[machine].deaf || !self.reaches(machine) {
                tell!(self, "a push to {} gets lost", machine);
                self.last_lost_push = Some(self.now);
                continue;
            }
            let event = match notice {
                Notice::Granted => Event::Granted(id),
                Notice::Displaced => Event::Displaced(id),
                Notice::Wanted => Event::Wanted,
                Notice::Evicted => Event::Evicted(id),
            };
            let at = self.now + self.latency();
            self.plan_at(at, world::Happening::Pushed { machine, event });
        }
    }
}

// === mutants ===

impl World {
    fn mutated_caller(&self, caller: &Caller) -> Caller {
        let epoch = if self.plan.is(Mutant::NoFence) { u64::MAX } else { caller.epoch };
        Caller { epoch, ..caller.clone() }
    }

    fn mutated_call(&self, caller: &Caller, call: &Call) -> Call {
        let mut call = call.clone();
        let Some(heartbeat) = &mut call.heartbeat else { return call };
        if self.plan.is(Mutant::BlindRenewal) {
            for beat in &mut heartbeat.beats {
                let key = &beat.set.key;
                beat.renew.retain(|renew| self.store.ledger.holds(key, renew.ask.id));
            }
        }
        if self.plan.is(Mutant::InstanceHeartbeat) {
            for beat in &mut heartbeat.beats {
                beat.renew.clear();
            }
            for (key, id, weight) in self.store.ledger.held_by(caller.instance) {
                let Some(at) = self.request_of(id) else { continue };
                let set = Arc::new(self.store.specs[self.store.place(&key)].clone());
                let wants = Arc::from([Want { set, weight }]);
                let class = self.requests[at].class;
                let ask = Ask { id, wants, rates: Arc::from([]), class, route: "/".into() };
                let beat = heartbeat.beats.iter_mut().find(|beat| beat.set.key == key);
                let renew = crate::store::Renew { ask, weight, lapsed: false };
                beat.into_iter().for_each(|beat| beat.renew.push(renew.clone()));
            }
        }
        call
    }

    /// The keeper zips its renewals with the outcomes, and is told that all were kept.
    fn restore_reply(&self, mut reply: Reply) -> Reply {
        let is_blind =
            self.plan.is(Mutant::BlindRenewal) || self.plan.is(Mutant::InstanceHeartbeat);
        if let Some(beat) = reply.heartbeat.as_mut().filter(|_| is_blind) {
            beat.renewed = vec![Renewed::Kept; 1_000];
        }
        if let Some(beat) = &mut reply.heartbeat
            && self.plan.is(Mutant::KeepsWhatIsWanted)
        {
            beat.sets.iter_mut().for_each(|set| (set.used, set.waiting) = (0, 0));
        }
        reply
    }

    fn expire_after_acquires(&mut self) {
        if !self.plan.is(Mutant::ExpiresAfterAcquire) {
            return;
        }
        for set in 0..self.store.specs.len() {
            if self.store.expires[set].take_if(|at| *at <= self.now).is_some() {
                let key = Arc::clone(&self.store.specs[set].key);
                self.store.ledger.lose(&key, Part::Slots);
            }
        }
    }
}
