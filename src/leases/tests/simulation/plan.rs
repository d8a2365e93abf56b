//! What a seed draws: limits, instances, habits of the requests, and which faults may happen.

use super::*;

/// How a simulation may be wrong on purpose. Each has to be found, or the laws are worth nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// A store without memory admits at once.
    NoRecovery,
    /// Commands of older connections are applied.
    NoFence,
    /// The slots expire a lease after the last acquire, whoever renews.
    ExpiresAfterAcquire,
    /// A renewal of a lost holder is a success that does nothing.
    BlindRenewal,
    /// The slot is given back when the answer begins.
    ReleaseAtHead,
    /// A heartbeat renews whatever the store has of the instance, and names nobody.
    InstanceHeartbeat,
    /// The callers' clocks count.
    CallersClock,
    /// Each instance believes that it shares the limits with nobody.
    FullShare,
    /// Nobody is cut whose lease ends.
    NoCut,
    /// Queues are served from their ends.
    YoungestFirst,
    /// What is kept warm stays so although somebody waits.
    KeepsWhatIsWanted,
    /// It is used again however long ago its lease was renewed.
    ReusesLate,
    /// Two requests use the same again.
    SharesWarmSlot,
}

impl Mutant {
    pub(super) const ALL: [Self; 13] = [
        Self::NoRecovery,
        Self::NoFence,
        Self::ExpiresAfterAcquire,
        Self::BlindRenewal,
        Self::ReleaseAtHead,
        Self::InstanceHeartbeat,
        Self::CallersClock,
        Self::FullShare,
        Self::NoCut,
        Self::YoungestFirst,
        Self::KeepsWhatIsWanted,
        Self::ReusesLate,
        Self::SharesWarmSlot,
    ];
}

/// What may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A connection breaks.
    Cut,
    /// A connection goes silent.
    Hole,
    /// An instance can't reach the store.
    Partition,
    /// Nobody can.
    Outage,
    /// Everything takes long, sometimes too long.
    Slow,
    Freeze,
    Crash,
    /// An instance drains, leaves, and comes back with other slots in its configuration.
    Reconfigure,
    Join,
    /// The store comes back without memory.
    Restart,
    FlushAll,
    /// One key is gone.
    LosePart,
    /// A replica takes over that lacks the latest writes.
    Failover,
    ClockJump,
    /// Pushes get lost although the subscription seems up.
    LosePushes,
    Unsubscribe,
    /// An operator sets a limit, or ends that.
    Override,
}

const FAULTS: [Fault; 17] = [
    Fault::Cut,
    Fault::Hole,
    Fault::Partition,
    Fault::Outage,
    Fault::Slow,
    Fault::Freeze,
    Fault::Crash,
    Fault::Reconfigure,
    Fault::Join,
    Fault::Restart,
    Fault::FlushAll,
    Fault::LosePart,
    Fault::Failover,
    Fault::ClockJump,
    Fault::LosePushes,
    Fault::Unsubscribe,
    Fault::Override,
];

pub(super) struct LimitPlan {
    name: &'static str,
    pub(super) slots: u32,
    pub(super) keyed: bool,
    pub(super) fenced: bool,
    /// Its slots may be kept warm. From how many on that pays is the configuration's business.
    warm: bool,
    queue: u32,
    classes: Arc<[ClassSpec]>,
}

/// One set: of a limit, or of one value of its key.
pub(super) struct SetPlan {
    pub(super) key: Arc<str>,
    pub(super) limit: usize,
}

pub(super) struct Plan {
    pub(super) limits: Vec<LimitPlan>,
    pub(super) sets: Vec<SetPlan>,
    /// Which sets a request takes, drawn among these.
    pub(super) routes: Vec<Vec<usize>>,
    pub(super) instances: usize,
    pub(super) lease: Duration,
    pub(super) strict: bool,
    pub(super) cut: bool,
    pub(super) when_down: WhenDown,
    pub(super) queue_timeout: Duration,
    /// The mean time that a request runs.
    pub(super) hold: Duration,
    /// Between two requests of one instance, on average.
    pub(super) pause: Duration,
    pub(super) faults: Vec<Fault>,
    /// Between two faults, on average.
    pub(super) peace: Duration,
    pub(super) mutant: Option<Mutant>,
}

pub(super) const OP_TIMEOUT: Duration = Duration::from_millis(400);
pub(super) const LINGER: Duration = Duration::from_millis(250);
const FAST_RECOVERY: Duration = Duration::from_secs(2);
const AGEING: Duration = Duration::from_secs(3);

fn chance(rng: &mut Rng, part: f64) -> bool {
    rng.f64() < part
}

impl Plan {
    pub(super) fn draw(rng: &mut Rng, mutant: Option<Mutant>) -> Self {
        let shares = [("high", 1.0), ("low", if rng.bool() { 0.5 } else { 1.0 })];
        let queue = rng.u32(2..20);
        let classes: Arc<[ClassSpec]> =
            shares.map(|(name, share)| ClassSpec { name: name.into(), share, queue: 20 }).into();
        let cut = rng.bool();
        let warm = !cut && chance(rng, 0.6);
        // Whoever waits anywhere makes an instance keep nothing, and the narrow limits are full most of the time.
        let alone = warm && chance(rng, 0.8);
        let limit = |name, slots, keyed, fenced| LimitPlan {
            name,
            slots,
            keyed,
            fenced,
            warm: warm && !keyed && !fenced,
            queue,
            classes: Arc::clone(&classes),
        };
        let mut limits =
            vec![limit("wide", if warm { rng.u32(4..=16) } else { rng.u32(1..=6) }, false, false)];
        let mut sets = vec![SetPlan { key: "wide".into(), limit: 0 }];
        let mut routes = vec![vec![0]];
        if !alone && rng.bool() {
            limits.push(limit("tenant", rng.u32(1..=3), true, false));
            for value in 0..2 {
                sets.push(SetPlan { key: format!("tenant:{value}").into(), limit: 1 });
                routes.push(vec![1 + value, 0]);
            }
        }
        if !alone && chance(rng, 0.3) {
            limits.push(limit("single", 1, false, true));
            sets.push(SetPlan { key: "single".into(), limit: limits.len() - 1 });
            routes.push(vec![sets.len() - 1]);
        }
        let instances = rng.usize(1..=4);
        // What isn't full, and used again soon, is kept warm; what is full calls for it.
        let holds = if warm { [200, 400, 700, 1_000] } else { [100, 500, 2_000, 8_000] };
        let hold = Duration::from_millis(holds[rng.usize(..4)]);
        let load = if warm { 0.1 + 0.6 * rng.f64() } else { 0.5 + 1.5 * rng.f64() };
        let slots: u32 = limits.iter().map(|limit| limit.slots).sum();
        let pause = hold.mul_f64(instances as f64 / (f64::from(slots) * load));
        let wanted = rng.usize(0..=4) * rng.usize(1..=4);
        let mut faults = FAULTS;
        rng.shuffle(&mut faults);
        // Only after a freeze what is kept may be old.
        if warm && rng.bool() {
            faults[0] = Fault::Freeze;
        }
        Self {
            limits,
            sets,
            routes,
            instances,
            lease: Duration::from_secs([3, 5, 8][rng.usize(..3)]),
            strict: rng.bool(),
            cut,
            when_down: [
                WhenDown::Closed,
                WhenDown::LocalShare,
                WhenDown::LocalShare,
                WhenDown::LocalShare,
                WhenDown::Open,
            ][rng.usize(..5)],
            queue_timeout: Duration::from_secs([1, 4, 10][rng.usize(..3)]),
            hold,
            pause: pause.max(Duration::from_millis(20)),
            faults: faults[..wanted.min(FAULTS.len())].to_vec(),
            peace: Duration::from_millis(rng.u64(500..6_000)) * if warm { 3 } else { 1 },
            mutant,
        }
    }

    /// What a large limit has above a small one, whoever sets it.
    pub(super) fn above(&self, limit: usize) -> u32 {
        self.limits[limit].slots.saturating_sub(6)
    }

    pub(super) fn heartbeat(&self) -> Duration {
        Duration::from_secs(1).min(self.lease / 4)
    }

    pub(super) fn presence(&self) -> Duration {
        3 * self.heartbeat()
    }

    pub(super) fn recovery(&self) -> Duration {
        if self.strict { self.lease + OP_TIMEOUT } else { FAST_RECOVERY }
    }

    pub(super) fn gap(&self) -> Duration {
        (self.lease / 3 + Duration::from_secs(2)).min(self.lease / 2)
    }

    pub(super) fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    pub(super) fn set_spec(&self, key: &Arc<str>, limit: usize, slots: u32) -> SetSpec {
        let ms = |duration: Duration| duration.as_millis() as i64;
        let of = &self.limits[limit];
        let recovery = if self.is(Mutant::NoRecovery) { 0 } else { ms(self.recovery()) };
        SetSpec {
            key: Arc::clone(key),
            slots,
            lease: ms(self.lease),
            grant_ttl: ms(Duration::from_secs(3).min(self.lease / 2)),
            recovery,
            queue: of.queue,
            ageing: ms(AGEING),
            keyed: of.keyed,
            shadow: false,
            fenced: of.fenced,
            warm: of.warm,
            classes: Arc::clone(&of.classes),
            limit,
        }
    }

    /// What an instance is told that claims these slots.
    pub(super) fn settings(&self, instance: Uuid, claims: &[u32]) -> Settings {
        let margin = OP_TIMEOUT + Duration::from_millis(200) + self.lease / 50;
        let limit = |(limit, slots): (usize, &u32)| LimitSettings {
            set: Arc::new(self.set_spec(&self.limits[limit].name.into(), limit, *slots)),
            renew: self.lease / 3,
            queue_timeouts: vec![self.queue_timeout; 2],
            cut_after: self.cut.then(|| self.lease - margin),
        };
        Settings {
            instance,
            limits: claims.iter().enumerate().map(limit).collect(),
            heartbeat: self.heartbeat(),
            gap: self.gap(),
            presence: self.presence(),
            op_timeout: OP_TIMEOUT,
            when_down: self.when_down,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.limits.iter().map(|limit| format!("{} {}", limit.name, limit.slots));
        write!(
            f,
            "{} instances, {}, lease {:?}, {}, {}, {}, {:?}, queue of {} for {:?}, hold {:?}, pause {:?}, faults {:?} every {:?}",
            self.instances,
            limits.collect::<Vec<_>>().join(", "),
            self.lease,
            if self.strict { "strict" } else { "fast" },
            if self.cut { "cut" } else { "keep" },
            if self.limits[0].warm { "warm" } else { "cold" },
            self.when_down,
            self.limits[0].queue,
            self.queue_timeout,
            self.hold,
            self.pause,
            self.faults,
            self.peace,
        )
    }
}
