//! Decides whether a request may go to its upstream now, later or not at all.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    config::{self, Config, Mode, OnLeaseLost, Recovery, Route, Step},
    leases::{Guard, Lease, Leases, LimitSettings, Outlook, Settings, WhenDown, Why},
    metrics::{LimitMetrics, Metrics, RateMetrics},
    reason::Reason,
    store::{ClassSpec, Evict, Evicted, Holder, SetSpec, SetStatus, SlotStore, StoreError},
};

mod evict;
mod metered;
mod plan;

pub use evict::Eviction;
use metered::metered;
pub use plan::Arrival;
use plan::Plan;

/// From so many slots on an instance may keep one for its next request, instead of giving it back and asking anew.
const WARM_FROM: u32 = 64;
/// A lease that outlives every process: a store inside the process forgets when the process does.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Hands out permits for the slots of every limit.
#[derive(Debug)]
pub struct Admission {
    leases: Leases,
    store: Arc<dyn SlotStore>,
    metrics: Arc<Metrics>,
    /// One for each route, then one for each upstream that a route falls back on.
    plans: Vec<Planned>,
    /// For each route, and each step of its ladder that is an upstream, which of the plans.
    fallbacks: Vec<Vec<Option<usize>>>,
    /// In the order of the configuration; each names its place in the keeper, which outlives configurations.
    limits: Vec<Arc<SetSpec>>,
    statuses: Vec<StatusCode>,
    /// The limits by their places in the keeper, those of earlier configurations included.
    places: Vec<Arc<str>>,
}

/// A plan, and what is measured of the requests that follow it.
#[derive(Debug)]
struct Planned {
    plan: Plan,
    meters: Arc<[LimitMetrics]>,
    rates: Vec<(usize, RateMetrics)>,
    max_hold: Option<Duration>,
}

/// The in-process guard that owns a holder: while it lives the request has its slots, and dropping it gives them back.
#[must_use = "dropping a permit gives its slots back"]
#[derive(Debug)]
pub struct Permit {
    id: Uuid,
    /// None where the route has no limit; in a box, since a permit goes from hand to hand.
    held: Option<Box<Held>>,
    taken: Instant,
    max_hold: Option<Duration>,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    meters: Arc<[LimitMetrics]>,
    class: usize,
    weight: u32,
}

/// A request's stay at the upstream, counted apart from its slots; dropped where it has ended.
#[must_use = "dropping it says that the request has ended at the upstream"]
#[derive(Debug)]
pub struct Stay {
    meters: Arc<[LimitMetrics]>,
    weight: u32,
    since: Instant,
}

/// Why a request wasn't admitted. Nothing of it is kept anywhere.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The word for it.
    pub reason: Reason,
    /// Which limit of the configuration says so, if one does.
    pub limit: Option<usize>,
    /// Or which rate.
    pub rate: Option<usize>,
    /// The class of the request.
    pub class: usize,
    /// The status of the answer, where it isn't the reason's own.
    pub status: Option<StatusCode>,
    /// How long a request would have to wait now, where that was measured; for a rate, exactly.
    pub expected_wait: Option<Duration>,
}

impl Admission {
    /// Starts the lease keeper of this instance on the current runtime.
    pub fn start(config: &Config, store: Arc<dyn SlotStore>, metrics: Arc<Metrics>) -> Arc<Self> {
        let store = metered(store, metrics.store());
        let (places, limits) = placed(config, Vec::new(), store.local().is_some());
        let sets = limits.iter().map(|limit| Arc::clone(&limit.set)).collect();
        let settings = settings(config, limits, store.local().is_some());
        let leases = Leases::start(Arc::clone(&store), settings);
        Self::new(config, sets, places, leases, store, metrics)
    }

    /// The admission of another configuration, by the same keeper: slots and queues stay as they are.
    pub fn adopt(&self, config: &Config, metrics: Arc<Metrics>) -> Arc<Self> {
        let local = self.store.local().is_some();
        let (places, limits) = placed(config, self.places.clone(), local);
        let sets = limits.iter().map(|limit| Arc::clone(&limit.set)).collect();
        self.leases.adopt(settings(config, limits, local));
        Self::new(config, sets, places, self.leases.clone(), Arc::clone(&self.store), metrics)
    }

    fn new(
        config: &Config,
        sets: Vec<Arc<SetSpec>>,
        places: Vec<Arc<str>>,
        leases: Leases,
        store: Arc<dyn SlotStore>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let planned = |route: &Route| {
            let limits = || route.limits.iter().copied();
            Planned {
                plan: Plan::new(config, &sets, route),
                meters: limits().map(|limit| metrics.limit(limit).clone()).collect(),
                rates: route.rates.iter().map(|&rate| (rate, metrics.rate(rate))).collect(),
                max_hold: limits().filter_map(|limit| config.limits[limit].max_hold).min(),
            }
        };
        let mut plans: Vec<Planned> = config.routes.iter().map(planned).collect();
        let mut fallbacks = Vec::new();
        for route in &config.routes {
            let mut place = |step: &Step| {
                let Step::Upstream { upstream, .. } = step else { return None };
                let limits = config.upstreams[*upstream].limits.clone();
                let rates = Vec::new();
                plans.push(planned(&Route { upstream: *upstream, limits, rates, ..route.clone() }));
                Some(plans.len() - 1)
            };
            fallbacks.push(route.on_full.iter().map(&mut place).collect());
        }
        Arc::new(Self {
            plans,
            fallbacks,
            leases,
            limits: sets,
            places,
            statuses: config.limits.iter().map(|limit| limit.status).collect(),
            store,
            metrics,
        })
    }

    /// Takes a slot of every limit of the route, waiting in their queues if need be.
    ///
    /// # Cancellation
    /// Dropping the future gives back whatever was taken and leaves every queue.
    ///
    /// # Errors
    /// A [`Refusal`] when a rate, a limit, the store or this process won't take the request.
    pub async fn admit(&self, route: usize, arrival: &Arrival<'_>) -> Result<Permit, Refusal> {
        self.follow(&self.plans[route], arrival).await
    }

    /// The same for an upstream that a route falls back on, under that upstream's own limits.
    ///
    /// # Errors
    /// A [`Refusal`], as for the route.
    ///
    /// # Panics
    /// If that step of the route isn't an upstream.
    pub async fn admit_instead(
        &self,
        route: usize,
        step: usize,
        arrival: &Arrival<'_>,
    ) -> Result<Permit, Refusal> {
        let plan = self.fallbacks[route][step].expect("the step is an upstream");
        self.follow(&self.plans[plan], arrival).await
    }

    async fn follow(&self, planned: &Planned, arrival: &Arrival<'_>) -> Result<Permit, Refusal> {
        let Planned { plan, meters, rates, max_hold } = planned;
        let (id, asked) = (Uuid::now_v7(), Instant::now());
        if plan.is_empty() {
            return Ok(Permit { id, held: None, taken: asked, max_hold: None });
        }
        let ask = plan.ask(id, arrival);
        let class = ask.class;
        // The same for every limit.
        let weight = ask.wants.first().map_or(0, |want| want.weight);
        match self.leases.acquire(ask, plan.deadline(arrival, asked)).await {
            Ok(lease) => {
                let taken = lease.taken();
                if let Some(would) = lease.shadow() {
                    let reason = reason_of(would.why);
                    self.metrics.shadowed(self.limit_at(would.limit), would.rate, class, reason);
                }
                meters.iter().for_each(|meter| meter.granted(taken - asked));
                rates.iter().for_each(|(_, rate)| rate.allowed());
                let id = lease.holder();
                let meters = Arc::clone(meters);
                let held = Some(Box::new(Held { lease, meters, class, weight }));
                Ok(Permit { id, held, taken, max_hold: *max_hold })
            }
            Err(refused) => {
                meters.iter().for_each(LimitMetrics::refused);
                let too_much = rates.iter().find(|(rate, _)| Some(*rate) == refused.rate);
                too_much.into_iter().for_each(|(_, rate)| rate.refused());
                let reason = reason_of(refused.why);
                let limit = self.limit_at(refused.limit);
                self.metrics.shed(limit, refused.rate, class, reason);
                let status = limit.map(|limit| self.statuses[limit]);
                let status = status.filter(|_| reason.is_of_a_limit());
                let (rate, expected_wait) = (refused.rate, refused.expected_wait);
                Err(Refusal { reason, limit, rate, class, status, expected_wait })
            }
        }
    }

    /// Which limit of the configuration is at a place of the keeper.
    fn limit_at(&self, place: Option<usize>) -> Option<usize> {
        place.and_then(|place| self.limits.iter().position(|set| set.limit == place))
    }

    /// Refuses whoever waits or comes, from now on.
    pub fn drain(&self) {
        self.leases.drain();
    }

    /// Waits until every slot is given back, but not longer than `patience`.
    pub async fn leave(&self, patience: Duration) {
        self.leases.leave(patience).await;
    }

    /// This instance's id.
    pub fn instance(&self) -> Uuid {
        self.leases.instance()
    }

    /// What is known of the store and of every limit, as of the last heartbeat.
    pub fn outlook(&self) -> Outlook {
        let places: Vec<usize> = self.limits.iter().map(|set| set.limit).collect();
        self.leases.outlook().of(&places)
    }

    /// A limit as the store has it now; of one with a key, whose sets are many, only how the store itself does.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn status(&self, limit: usize) -> Result<SetStatus, StoreError> {
        self.store.status(&self.limits[limit]).await
    }

    /// Whether a limit is being counted anew: the store says so, or has forgotten what it told at the last heartbeat.
    pub fn is_recovering(&self, outlook: &Outlook, limit: usize, status: &SetStatus) -> bool {
        let set = &self.limits[limit];
        let lacks_set = !set.keyed && status.lease == 0 && outlook.sets[limit].lease > 0;
        // Every fleet began with a recovery.
        let is_forgotten = outlook.up && (status.recovery == 0 || lacks_set);
        outlook.recovering || is_forgotten || status.now < status.recovery + set.recovery
    }

    /// A limit as this instance has it without asking: slots as of the last heartbeat, holders and waiters its own.
    pub fn known(&self, outlook: &Outlook, limit: usize) -> SetStatus {
        let seen = &outlook.sets[limit];
        let waiting = outlook.waiting[limit].iter();
        SetStatus {
            // As configured, until a heartbeat has told.
            slots: if seen.lease > 0 { seen.slots } else { self.limits[limit].slots },
            lease: seen.lease,
            used: seen.used.max(outlook.local[limit]),
            waiting: waiting.map(|(count, oldest)| (*count, oldest.as_millis() as i64)).collect(),
            by_instance: std::iter::once((self.instance(), outlook.local[limit])).collect(),
            ..SetStatus::default()
        }
    }

    /// Changes how many slots a limit has, over the whole fleet; none goes back to what is configured.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn set_slots(
        &self,
        limit: usize,
        slots: Option<u32>,
    ) -> Result<SetStatus, StoreError> {
        // Or the order would be kept, and be in force when the store is back, whatever was said of it here.
        if !self.leases.outlook().up {
            let text = "nothing was changed, since there is no connection to it";
            return Err(StoreError::Unavailable(text.to_owned()));
        }
        if !self.leases.set_slots(self.limits[limit].limit, slots).await {
            let text = "the order may not have reached the store";
            return Err(StoreError::Unavailable(text.to_owned()));
        }
        self.status(limit).await
    }
}

impl Permit {
    /// The id under which the slots are taken, new for every request.
    pub fn holder(&self) -> Uuid {
        self.id
    }

    /// The number of the grant, higher than of any before, where one of the limits has a `fence_header`.
    pub fn fence(&self) -> Option<u64> {
        self.held.as_ref().and_then(|held| held.lease.fence())
    }

    /// Counts the request as open at the upstream.
    pub fn stay(&self) -> Option<Stay> {
        let Held { meters, weight, .. } = self.held.as_deref()?;
        meters.iter().for_each(|meter| meter.opened(*weight));
        Some(Stay { meters: Arc::clone(meters), weight: *weight, since: self.taken })
    }

    /// Whether somebody waits for slots, as far as is known here; of whichever limit.
    pub fn is_awaited(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.lease.is_awaited())
    }

    /// When the slots were taken.
    pub fn taken(&self) -> Instant {
        self.taken
    }

    /// The class of the request; none where nobody was asked.
    pub fn class(&self) -> Option<usize> {
        self.held.as_ref().map(|held| held.class)
    }

    /// Why a limit or a rate in shadow mode would have refused it, if one would have.
    pub fn shadow(&self) -> Option<Reason> {
        let would = self.held.as_ref().and_then(|held| held.lease.shadow());
        would.map(|would| reason_of(would.why))
    }

    /// Tells until when the request may rely on its slots, if it is to be cut then.
    pub fn guard(&self) -> Option<&Guard> {
        self.held.as_ref().and_then(|held| held.lease.guard())
    }

    /// Counts a request that was cut because its lease could have been lost.
    pub fn lost(&self) {
        if let Some(held) = &self.held {
            held.meters.iter().for_each(LimitMetrics::lost);
        }
    }

    /// The longest this request may keep its slots; the shortest of its limits.
    pub fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }
}

impl Stay {
    /// Since when it has its slots.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Of which limits.
    pub fn limits(&self) -> impl Iterator<Item = &Arc<str>> {
        self.meters.iter().map(LimitMetrics::name)
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.meters.iter().for_each(|meter| meter.closed(self.weight));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(held) = &self.held {
            held.meters.iter().for_each(|meter| meter.released(self.taken.elapsed()));
        }
    }
}

fn reason_of(why: Why) -> Reason {
    match why {
        Why::Full => Reason::QueueFull,
        Why::Displaced => Reason::Displaced,
        Why::QueueTimeout => Reason::QueueTimeout,
        Why::Deadline => Reason::Deadline,
        Why::Recovering => Reason::Recovering,
        Why::TooHeavy => Reason::TooHeavy,
        Why::RateLimited => Reason::RateLimited,
        Why::StoreDown => Reason::StoreDown,
        Why::Draining => Reason::Draining,
    }
}

// === intervals: they follow the lease ===

fn heartbeat_of(lease: Duration) -> Duration {
    Duration::from_secs(1).min(lease / 4)
}

/// Every limit at its place, which it keeps as long as the process lives; and all places.
fn placed(
    config: &Config,
    mut places: Vec<Arc<str>>,
    local: bool,
) -> (Vec<Arc<str>>, Vec<LimitSettings>) {
    let mut place_of = |name: &Arc<str>| {
        places.iter().position(|known| known == name).unwrap_or_else(|| {
            places.push(Arc::clone(name));
            places.len() - 1
        })
    };
    let limits = (0..config.limits.len())
        .map(|limit| limit_settings(config, limit, place_of(&config.limits[limit].name), local))
        .collect();
    (places, limits)
}

fn limit_settings(config: &Config, index: usize, place: usize, local: bool) -> LimitSettings {
    let limit = &config.limits[index];
    let lease = if local { FOREVER } else { limit.lease };
    let recovery = match (local, limit.recovery) {
        (true, _) => Duration::ZERO,
        (false, Recovery::Fast) => Duration::from_secs(2),
        (false, Recovery::Strict) => lease + config.store.op_timeout,
    };
    let ms = |duration: Duration| duration.as_millis() as i64;
    let classes = config.classes.order.iter().zip(&limit.classes);
    let set = SetSpec {
        key: Arc::clone(&limit.name),
        slots: limit.slots,
        lease: ms(lease),
        grant_ttl: ms(Duration::from_secs(3).min(lease / 2)),
        recovery: ms(recovery),
        queue: limit.queue.size,
        ageing: ms(config.classes.ageing).max(1),
        keyed: limit.key.is_some(),
        shadow: limit.mode == Mode::Shadow,
        fenced: limit.fence_header.is_some(),
        warm: limit.slots >= WARM_FROM && limit.is_plain(),
        classes: classes
            .clone()
            .map(|(name, policy)| ClassSpec {
                name: Arc::clone(name),
                share: policy.share,
                queue: policy.queue.unwrap_or(u32::MAX),
            })
            .collect(),
        limit: place,
    };
    let timeout = limit.queue.timeout;
    LimitSettings {
        set: Arc::new(set),
        renew: lease / 3,
        queue_timeouts: classes.map(|(_, policy)| policy.timeout.unwrap_or(timeout)).collect(),
        cut_after: (!local
            && limit.on_lease_lost == OnLeaseLost::Cut
            && limit.mode == Mode::Enforce)
            .then(|| limit.guarded_for(config.store.op_timeout)),
    }
}

fn settings(config: &Config, limits: Vec<LimitSettings>, local: bool) -> Settings {
    let shortest = config.limits.iter().map(|limit| limit.lease).min();
    let shortest = shortest.unwrap_or(Duration::from_secs(15));
    let heartbeat = heartbeat_of(shortest);
    let gap = (shortest / 3 + Duration::from_secs(2)).min(shortest / 2);
    let (gap, presence) = if local { (FOREVER, FOREVER) } else { (gap, 3 * heartbeat) };
    Settings {
        instance: Uuid::now_v7(),
        limits,
        heartbeat,
        gap,
        presence,
        op_timeout: config.store.op_timeout,
        when_down: match config.store.when_down {
            config::WhenDown::Closed => WhenDown::Closed,
            config::WhenDown::LocalShare => WhenDown::LocalShare,
            config::WhenDown::Open => WhenDown::Open,
        },
    }
}
