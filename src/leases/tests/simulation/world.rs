//! Virtual time: what is to happen, in order; and the story of what did.

use std::collections::{BTreeMap, VecDeque};

use super::{
    faults::Heal,
    machine::{Line, Link, Machine},
    plan::{Mutant, Plan},
    requests::Request,
    store::Store,
    warm::Spare,
    *,
};
use crate::store::{Call, Caller, Reply, StoreError};

/// How much of the story is told, unless somebody says.
const TAIL: u64 = 120;

/// What is to happen.
#[derive(Debug)]
pub(super) enum Happening {
    /// A keeper's alarm.
    Tick {
        machine: usize,
        number: u64,
    },
    /// An attempt to connect ends.
    Opened {
        machine: usize,
        attempt: u64,
        well: bool,
    },
    /// The next attempt begins.
    Reopen {
        machine: usize,
        attempt: u64,
    },
    /// The next call of a connection arrives at the store.
    Arrives {
        line: usize,
    },
    /// The oldest call of a connection is answered.
    Answered {
        machine: usize,
        line: usize,
        result: Box<Result<Reply, StoreError>>,
    },
    TimedOut {
        machine: usize,
        line: usize,
        number: u64,
    },
    /// The client notices that its connection is gone.
    Broke {
        machine: usize,
        line: usize,
    },
    Pushed {
        machine: usize,
        event: Event,
    },
    /// A subscription works.
    Subscribes {
        machine: usize,
    },
    /// A call arrives a second time.
    Again {
        caller: Caller,
        run: Arc<str>,
        call: Call,
    },
    /// A client comes, and after a while the next.
    Comes {
        machine: usize,
    },
    /// One that came while the process slept.
    Queued {
        machine: usize,
    },
    /// The upstream's answer is complete.
    Ends {
        request: usize,
    },
    /// The keeper hears of it.
    Drops {
        machine: usize,
        request: usize,
    },
    /// Somebody looks whether a lease still lasts.
    Guards {
        machine: usize,
        request: usize,
    },
    /// The client loses patience.
    Leaves {
        machine: usize,
        request: usize,
    },
    /// The upstream has noticed that a request was cut.
    Closed {
        request: usize,
    },
    /// A request should have been told by now.
    Due {
        request: usize,
    },
    Fault,
    Heals(Heal),
}

pub(super) struct World {
    pub(super) plan: Plan,
    pub(super) rng: Rng,
    pub(super) epoch: Instant,
    pub(super) now: Instant,
    agenda: BTreeMap<(Instant, u64), Happening>,
    planned: u64,
    pub(super) store: Store,
    pub(super) machines: Vec<Machine>,
    pub(super) lines: Vec<Line>,
    pub(super) requests: Vec<Request>,
    by_id: HashMap<Uuid, usize>,
    /// What runs at the upstream.
    pub(super) running: Vec<usize>,
    /// What instances keep warm; of one that is gone until its lease is over.
    pub(super) spares: Vec<Spare>,
    /// Faults happen and clients come.
    pub(super) busy: bool,
    pub(super) slow: bool,
    pub(super) pushes_get_lost: bool,
    pub(super) last_lost_push: Option<Instant>,
    pub(super) last_fault: Instant,
    /// The highest fence that began, of any request.
    pub(super) fence: u64,
    pub(super) tells: bool,
    pub(super) story: VecDeque<String>,
    pub(super) wrong: Option<String>,
    pub(super) began: [u64; 5],
    pub(super) faults: u64,
}

/// Adds to the story, if it is told.
macro_rules! tell {
    ($world:expr, $($words:tt)*) => {
        if $world.tells {
            let words = format!($($words)*);
            $world.say(words);
        }
    };
}
pub(super) use tell;

impl World {
    pub(super) fn new(seed: u64, mutant: Option<Mutant>, tells: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let plan = Plan::draw(&mut rng, mutant);
        // Far from the machine's start, so that times before the beginning exist.
        let now = Instant::now() + Duration::from_secs(1 << 24);
        let mut world = Self {
            store: Store::new(&plan, now),
            plan,
            rng,
            epoch: now,
            now,
            agenda: BTreeMap::new(),
            planned: 0,
            machines: Vec::new(),
            lines: Vec::new(),
            requests: Vec::new(),
            by_id: HashMap::default(),
            running: Vec::new(),
            spares: Vec::new(),
            busy: true,
            slow: false,
            pushes_get_lost: false,
            last_lost_push: None,
            last_fault: now,
            fence: 0,
            tells,
            story: VecDeque::new(),
            wrong: None,
            began: [0; 5],
            faults: 0,
        };
        tell!(world, "{}", world.plan);
        let claims: Vec<u32> = world.plan.limits.iter().map(|limit| limit.slots).collect();
        for _ in 0..world.plan.instances {
            world.start_machine(&claims);
        }
        if !world.plan.faults.is_empty() {
            world.plan_fault();
        }
        world
    }

    /// Runs for so many steps, then until everything has come to rest.
    pub(super) fn run(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            self.step()?;
        }
        self.come_to_rest()?;
        self.probe()
    }

    pub(super) fn pass(&mut self, time: Duration) -> Result<(), String> {
        let end = self.now + time;
        while self.agenda.first_key_value().is_some_and(|((at, _), _)| *at <= end) {
            self.step()?;
        }
        self.now = end;
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let Some(((at, _), happening)) = self.agenda.pop_first() else {
            return Err("nothing is to happen any more".to_owned());
        };
        self.now = at;
        self.happen(happening);
        self.check_cuts();
        self.wrong.take().map_or(Ok(()), Err)
    }

    pub(super) fn plan_at(&mut self, at: Instant, happening: Happening) {
        self.planned += 1;
        self.agenda.insert((at.max(self.now), self.planned), happening);
    }

    pub(super) fn plan_in(&mut self, time: Duration, happening: Happening) {
        self.plan_at(self.now + time, happening);
    }

    fn happen(&mut self, happening: Happening) {
        if let Some(at) = happening.machine() {
            let machine = &mut self.machines[at];
            if !machine.alive {
                return;
            }
            if machine.frozen {
                machine.missed.push(happening);
                return;
            }
        }
        match happening {
            Happening::Tick { machine, number } => {
                if self.machines[machine].ticks == number {
                    self.serve(machine);
                }
            }
            Happening::Opened { machine, attempt, well } => self.opened(machine, attempt, well),
            Happening::Reopen { machine, attempt } => self.reopen(machine, attempt),
            Happening::Arrives { line } => self.arrives(line),
            Happening::Answered { machine, line, result } => self.answered(machine, line, *result),
            Happening::TimedOut { machine, line, number } => self.timed_out(machine, line, number),
            Happening::Broke { machine, line } => self.broke(machine, line),
            Happening::Pushed { machine, event } => self.hears(machine, event),
            Happening::Subscribes { machine } => self.subscribes(machine),
            Happening::Again { caller, run, call } => self.arrives_again(&caller, &run, &call),
            Happening::Comes { machine } => self.comes(machine),
            Happening::Queued { machine } => self.client(machine),
            Happening::Ends { request } => self.ends(request),
            Happening::Drops { machine, request } => self.drops(machine, request),
            Happening::Guards { request, .. } => self.guards(request),
            Happening::Leaves { request, .. } => self.leaves(request),
            Happening::Closed { request } => self.closed(request),
            Happening::Due { request } => self.due(request),
            Happening::Fault => self.fault(),
            Happening::Heals(heal) => self.heals(heal),
        }
    }

    // === who is who ===

    pub(super) fn machine_of(&self, instance: Uuid) -> Option<usize> {
        self.machines.iter().position(|machine| machine.id == instance)
    }

    pub(super) fn request_of(&self, id: Uuid) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn name(&self, id: Uuid) -> String {
        self.request_of(id).map_or_else(|| "nobody".to_owned(), |request| format!("r{request}"))
    }

    pub(super) fn list_request(&mut self, request: Request) -> usize {
        let at = self.requests.len();
        self.by_id.insert(request.id, at);
        self.requests.push(request);
        at
    }

    pub(super) fn living(&self) -> Vec<usize> {
        (0..self.machines.len()).filter(|at| self.machines[*at].alive).collect()
    }

    pub(super) fn new_id(&mut self) -> Uuid {
        Uuid::from_u128(self.rng.u128(..))
    }

    // === the network ===

    pub(super) fn reaches(&self, machine: usize) -> bool {
        self.store.up && !self.machines[machine].partitioned
    }

    pub(super) fn latency(&mut self) -> Duration {
        let micros =
            if self.slow { self.rng.u64(1_000..500_000) } else { self.rng.u64(100..3_000) };
        Duration::from_micros(micros)
    }

    /// Draws a time with this mean.
    pub(super) fn about(&mut self, mean: Duration) -> Duration {
        let factor = -(1.0 - self.rng.f64()).ln();
        mean.mul_f64(factor.min(5.0))
    }

    pub(super) fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.rng.f64())
    }

    pub(super) fn chance(&mut self, part: f64) -> bool {
        self.rng.f64() < part
    }

    // === the story ===

    pub(super) fn say(&mut self, words: String) {
        let at = self.now.duration_since(self.epoch).as_secs_f64();
        if self.story.len() as u64 == number("TIDEGATE_SIM_TAIL").unwrap_or(TAIL) {
            self.story.pop_front();
        }
        self.story.push_back(format!("{at:10.4} {words}"));
    }

    pub(super) fn breaks(&mut self, law: String) {
        tell!(self, "BROKEN: {law}");
        self.wrong.get_or_insert(law);
    }

    /// Whether nothing has disturbed an instance for so long.
    pub(super) fn is_calm(&self, machine: usize, time: Duration) -> bool {
        self.now.saturating_duration_since(self.machines[machine].disturbed) > time
    }

    pub(super) fn is_connected(&self, machine: usize) -> bool {
        matches!(self.machines[machine].link, Link::Up(_))
    }
}

impl Happening {
    /// Whose process it happens in.
    fn machine(&self) -> Option<usize> {
        match self {
            Self::Tick { machine, .. }
            | Self::Opened { machine, .. }
            | Self::Reopen { machine, .. }
            | Self::Answered { machine, .. }
            | Self::TimedOut { machine, .. }
            | Self::Broke { machine, .. }
            | Self::Pushed { machine, .. }
            | Self::Subscribes { machine }
            | Self::Comes { machine }
            | Self::Queued { machine }
            | Self::Drops { machine, .. }
            | Self::Guards { machine, .. }
            | Self::Leaves { machine, .. } => Some(*machine),
            Self::Arrives { .. }
            | Self::Again { .. }
            | Self::Ends { .. }
            | Self::Closed { .. }
            | Self::Due { .. }
            | Self::Fault
            | Self::Heals(_) => None,
        }
    }
}
