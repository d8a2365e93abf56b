//! Requests, and the upstream that counts what really runs.

use super::{
    plan::{LINGER, Mutant, OP_TIMEOUT},
    world::{Happening, World, tell},
    *,
};

/// A request that is told by nobody else in this time is told by nobody.
const SLACK: Duration = Duration::from_secs(4);

pub(super) struct Request {
    pub(super) machine: usize,
    pub(super) id: Uuid,
    /// Sets and weights, in the order in which they are taken.
    pub(super) wants: Vec<(usize, u32)>,
    pub(super) class: usize,
    pub(super) asked: Instant,
    pub(super) taken: Instant,
    pub(super) phase: Phase,
    /// Under which id its slots are taken.
    pub(super) holder: Uuid,
    pub(super) way: Way,
    hold: Duration,
    leaves_running: Option<Duration>,
    guard: Option<Guard>,
    answer: Option<oneshot::Receiver<Result<Lease, Refused>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Asking,
    Running,
    /// Cut; the upstream works on for a moment.
    Closing,
    Over,
}

/// How a request came to its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Granted,
    TakenOver,
    Shared,
    Open,
    /// With what another had, without asking.
    Warm,
}

impl World {
    pub(super) fn comes(&mut self, machine: usize) {
        if !self.busy {
            return;
        }
        let next = self.about(self.plan.pause);
        self.plan_in(next, Happening::Comes { machine });
        self.client(machine);
    }

    pub(super) fn client(&mut self, machine: usize) {
        let route = self.rng.usize(..self.plan.routes.len());
        let sets = self.plan.routes[route].clone();
        let weight = |world: &mut Self, set: usize| {
            let slots = world.plan.limits[world.plan.sets[set].limit].slots;
            if slots >= 3 && world.chance(0.2) { 2 } else { 1 }
        };
        let wants = Vec::from_iter(sets.into_iter().map(|set| (set, weight(self, set))));
        let class = usize::from(self.chance(0.3));
        let hold = self.about(self.plan.hold);
        let request = self.ask(machine, &wants, class, hold);
        if self.chance(0.1) {
            let leaves = self.up_to(self.plan.queue_timeout);
            self.plan_in(leaves, Happening::Leaves { machine, request });
        }
        if self.chance(0.1) {
            let leaves = self.up_to(hold);
            match self.requests[request].phase {
                Phase::Running => self.plan_in(leaves, Happening::Leaves { machine, request }),
                _ => self.requests[request].leaves_running = Some(leaves),
            }
        }
        self.serve(machine);
    }

    pub(super) fn ask(
        &mut self,
        machine: usize,
        wants: &[(usize, u32)],
        class: usize,
        hold: Duration,
    ) -> usize {
        let (id, asked) = (self.new_id(), self.now);
        let request = self.list_request(Request {
            machine,
            id,
            wants: wants.to_vec(),
            class,
            asked,
            taken: asked,
            phase: Phase::Asking,
            holder: id,
            way: Way::Granted,
            hold,
            leaves_running: None,
            guard: None,
            answer: None,
        });
        tell!(self, "r{request} asks {machine} for {wants:?}, class {class}");
        let sets = &self.machines[machine].sets;
        let wants = wants.iter().map(|&(set, weight)| Want { set: Arc::clone(&sets[set]), weight });
        let rates = Arc::from([]);
        let route = Arc::clone(&self.machines[machine].route);
        let ask = Ask { id, wants: wants.collect(), rates, class, route };
        if self.finds_warm(machine, request, &ask) {
            return request;
        }
        let deadline = self.rng.u8(..10) == 0;
        let deadline = deadline.then(|| asked + self.plan.queue_timeout / 2);
        let (sender, answer) = oneshot::channel();
        self.requests[request].answer = Some(answer);
        let message = Message::Acquire { ask, asked, deadline, answer: sender };
        self.machines[machine].inbox.push(message);
        self.machines[machine].asking.push(request);
        self.plan_in(self.patience(), Happening::Due { request });
        request
    }

    /// How long a request may wait in peace until it is told.
    fn patience(&self) -> Duration {
        self.plan.queue_timeout + self.plan.recovery() + 3 * OP_TIMEOUT + SLACK
    }

    pub(super) fn due(&mut self, request: usize) {
        let Request { machine, phase, asked, .. } = self.requests[request];
        if phase != Phase::Asking || !self.machines[machine].alive {
            return;
        }
        let peaceful = self.machines[machine].disturbed.max(self.last_fault).max(asked);
        if self.now.duration_since(peaceful) < self.patience() {
            return self.plan_in(self.patience(), Happening::Due { request });
        }
        self.breaks(format!("r{request} waits for ever"));
    }

    // === answers ===

    /// Tells requests what the keeper says to them. What comes out where the store is away comes without it.
    pub(super) fn deliver(&mut self, at: usize, alone: bool) {
        for answer in self.machines[at].keeper.take_answers() {
            let Answer { id, to, outcome, guard, fence, .. } = answer;
            // Whoever listens is found by a word; a request that is gone gives its slots back.
            if to.send(Err(Refused::GONE)).is_err() {
                if outcome.is_ok() {
                    self.machines[at].inbox.push(Message::Release(id));
                }
                continue;
            }
            let asking = &self.machines[at].asking;
            let hears = |request: &mut Request| {
                request.answer.as_mut().is_some_and(|answer| answer.try_recv().is_ok())
            };
            let place = asking.iter().position(|request| hears(&mut self.requests[*request]));
            let Some(place) = place else {
                self.breaks("an answer to nobody".to_owned());
                continue;
            };
            let request = self.machines[at].asking.remove(place);
            self.requests[request].answer = None;
            match outcome {
                Ok(_) => {
                    let way = match (alone, id == self.requests[request].id) {
                        (false, true) => Way::Granted,
                        (true, true) if self.plan.when_down == WhenDown::Open => Way::Open,
                        (true, true) => Way::Shared,
                        (_, false) => Way::TakenOver,
                    };
                    self.requests[request].holder = id;
                    self.begins(request, way, guard, fence);
                }
                Err(refused) => {
                    tell!(self, "r{request} is refused: {:?}", refused.why);
                    self.requests[request].phase = Phase::Over;
                }
            }
        }
    }

    pub(super) fn begins(&mut self, at: usize, way: Way, guard: Option<Guard>, fence: Option<u64>) {
        tell!(self, "r{at} begins: {way:?}, as {}", self.name(self.requests[at].holder));
        let request = &mut self.requests[at];
        request.phase = Phase::Running;
        request.way = way;
        request.taken = self.now;
        request.guard = guard;
        let (machine, hold, leaves) = (request.machine, request.hold, request.leaves_running);
        let holder = request.holder;
        self.spares.retain(|spare| spare.holder != holder);
        self.began[way as usize] += 1;
        self.running.push(at);
        self.check_beginning(at, fence);
        self.plan_in(hold, Happening::Ends { request: at });
        if let Some(leaves) = leaves {
            self.plan_in(leaves, Happening::Leaves { machine, request: at });
        }
        if self.plan.is(Mutant::ReleaseAtHead) {
            self.plan_in(hold / 2, Happening::Drops { machine, request: at });
        }
        self.look_at_guard(at);
    }

    // === ends ===

    pub(super) fn ends(&mut self, at: usize) {
        if self.requests[at].phase == Phase::Running {
            tell!(self, "r{at} ends");
            self.is_over(at);
        }
    }

    /// The upstream doesn't work for it any more; the process hears of that when it runs.
    fn is_over(&mut self, at: usize) {
        let machine = self.requests[at].machine;
        self.requests[at].phase = Phase::Over;
        self.running.retain(|running| *running != at);
        self.machines[machine].unheard += 1;
        self.plan_in(Duration::ZERO, Happening::Drops { machine, request: at });
    }

    pub(super) fn drops(&mut self, machine: usize, request: usize) {
        let holder = self.requests[request].holder;
        let heard = &mut self.machines[machine];
        heard.unheard = heard.unheard.saturating_sub(1);
        if !self.keeps(machine, request) {
            self.machines[machine].inbox.push(Message::Release(holder));
            self.serve(machine);
        }
    }

    pub(super) fn leaves(&mut self, at: usize) {
        let machine = self.requests[at].machine;
        match self.requests[at].phase {
            Phase::Asking => {
                tell!(self, "r{at} gives up");
                let request = &mut self.requests[at];
                request.phase = Phase::Over;
                request.answer = None;
                let id = request.id;
                let machine = &mut self.machines[machine];
                machine.asking.retain(|asking| *asking != at);
                machine.inbox.push(Message::Release(id));
                self.serve(self.requests[at].machine);
            }
            Phase::Running => self.cut(at),
            Phase::Closing | Phase::Over => {}
        }
    }

    /// Closes the upstream's connection.
    pub(super) fn cut(&mut self, at: usize) {
        tell!(self, "r{at} is cut");
        self.requests[at].phase = Phase::Closing;
        self.plan_in(LINGER, Happening::Closed { request: at });
    }

    pub(super) fn closed(&mut self, at: usize) {
        tell!(self, "r{at} is closed");
        self.is_over(at);
    }

    fn look_at_guard(&mut self, at: usize) {
        let request = &self.requests[at];
        if let Some(end) = request.guard.as_ref().map(|guard| guard.ends()) {
            // Without a lease there is no end, until the store gives one.
            let look = end.map_or(self.now + OP_TIMEOUT, |end| end - LINGER);
            let machine = request.machine;
            self.plan_at(look, Happening::Guards { machine, request: at });
        }
    }

    pub(super) fn guards(&mut self, at: usize) {
        let request = &self.requests[at];
        if request.phase != Phase::Running || self.plan.is(Mutant::NoCut) {
            return;
        }
        let end = request.guard.as_ref().and_then(Guard::ends);
        match end {
            Some(end) if end - LINGER <= self.now => self.cut(at),
            _ => self.look_at_guard(at),
        }
    }
}
