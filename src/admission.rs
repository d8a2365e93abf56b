//! Decides whether a request may go to its upstream now, later or not at all.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    config::{Config, Limit, Recovery},
    leases::{Lease, Leases, LimitSettings, Outlook, Refused, Settings, Why},
    metrics::{LimitMetrics, Metrics},
    reason::Reason,
    store::{Ask, ClassSpec, SetSpec, SetStatus, SlotStore, StoreError, Want},
};

/// A lease that outlives every process: a store inside the process forgets when the process does.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Hands out permits for the slots of every limit.
#[derive(Debug)]
pub struct Admission {
    leases: Leases,
    store: Arc<dyn SlotStore>,
    metrics: Arc<Metrics>,
    routes: Vec<RoutePlan>,
    limits: Vec<Arc<SetSpec>>,
}

/// What a request on a route asks for.
#[derive(Debug)]
struct RoutePlan {
    name: Arc<str>,
    wants: Arc<[Want]>,
    meters: Arc<[LimitMetrics]>,
    max_hold: Option<Duration>,
}

/// The in-process guard that owns a holder: while it lives the request has its slots, and dropping it gives them back.
#[must_use = "dropping a permit gives its slots back"]
#[derive(Debug)]
pub struct Permit {
    id: Uuid,
    /// None where the route has no limit.
    held: Option<Held>,
    taken: Instant,
    max_hold: Option<Duration>,
}

#[derive(Debug)]
struct Held {
    _lease: Lease,
    meters: Arc<[LimitMetrics]>,
}

/// Why a request wasn't admitted. Nothing of it is kept anywhere.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The word for it.
    pub reason: Reason,
    /// Index of the limit that refused, if one did.
    pub limit: Option<usize>,
    /// How long a request would have to wait now, where that was measured.
    pub expected_wait: Option<Duration>,
}

impl Admission {
    /// Starts the lease keeper of this instance on the current runtime.
    pub fn start(config: &Config, store: Arc<dyn SlotStore>, metrics: Arc<Metrics>) -> Arc<Self> {
        let local = store.local().is_some();
        let op_timeout = config.store.op_timeout;
        let limits: Vec<LimitSettings> = config
            .limits
            .iter()
            .enumerate()
            .map(|(index, limit)| limit_settings(index, limit, op_timeout, local))
            .collect();
        let specs: Vec<_> = limits.iter().map(|limit| Arc::clone(&limit.set)).collect();
        let plan = |route: &crate::config::Route| {
            let limits = || route.limits.iter().copied();
            RoutePlan {
                name: Arc::clone(&route.name),
                wants: limits()
                    .map(|limit| Want { set: Arc::clone(&specs[limit]), weight: 1 })
                    .collect(),
                meters: limits().map(|limit| metrics.limit(limit).clone()).collect(),
                max_hold: limits().filter_map(|limit| config.limits[limit].max_hold).min(),
            }
        };
        Arc::new(Self {
            routes: config.routes.iter().map(plan).collect(),
            leases: Leases::start(Arc::clone(&store), settings(config, limits, local)),
            limits: specs,
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
    /// A [`Refusal`] when a limit, the store or this process won't take the request.
    pub async fn admit(&self, route: usize) -> Result<Permit, Refusal> {
        let plan = &self.routes[route];
        let (id, asked) = (Uuid::now_v7(), Instant::now());
        if plan.wants.is_empty() {
            return Ok(Permit { id, held: None, taken: asked, max_hold: None });
        }
        let ask = Ask {
            id,
            wants: Arc::clone(&plan.wants),
            rates: Arc::from([]),
            class: 0,
            route: Arc::clone(&plan.name),
        };
        match self.leases.acquire(ask, None).await {
            Ok(lease) => {
                let taken = lease.taken();
                plan.meters.iter().for_each(|meter| meter.granted(taken - asked));
                let held = Some(Held { _lease: lease, meters: Arc::clone(&plan.meters) });
                Ok(Permit { id, held, taken, max_hold: plan.max_hold })
            }
            Err(refused) => {
                plan.meters.iter().for_each(LimitMetrics::refused);
                let refusal = Refusal::from(refused);
                self.metrics.shed(refusal.limit, refusal.reason);
                Err(refusal)
            }
        }
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
        self.leases.outlook()
    }

    /// A limit as the store has it now.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn status(&self, limit: usize) -> Result<SetStatus, StoreError> {
        self.store.status(&self.limits[limit]).await
    }

    /// Changes how many slots a limit has, over the whole fleet; none goes back to what is configured.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn set_slots(
        &self,
        _limit: usize,
        _slots: Option<u32>,
    ) -> Result<SetStatus, StoreError> {
        Err(StoreError::Unavailable("not yet".into()))
    }
}

impl Permit {
    /// The id under which the slots are taken, new for every request.
    pub fn holder(&self) -> Uuid {
        self.id
    }

    /// When the slots were taken.
    pub fn taken(&self) -> Instant {
        self.taken
    }

    /// The longest this request may keep its slots; the shortest of its limits.
    pub fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(held) = &self.held {
            held.meters.iter().for_each(|meter| meter.released(self.taken.elapsed()));
        }
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let reason = match refused.why {
            Why::Full => Reason::QueueFull,
            Why::QueueTimeout => Reason::QueueTimeout,
            Why::Recovering => Reason::Recovering,
            Why::TooHeavy => Reason::TooHeavy,
            Why::StoreDown => Reason::StoreDown,
            Why::Draining => Reason::Draining,
            Why::Displaced => Reason::QueueFull,
            Why::Deadline => Reason::QueueTimeout,
            Why::RateLimited => Reason::QueueFull,
        };
        Self { reason, limit: refused.limit, expected_wait: refused.expected_wait }
    }
}

// === intervals: they follow the lease ===

fn heartbeat_of(lease: Duration) -> Duration {
    Duration::from_secs(1).min(lease / 4)
}

fn limit_settings(index: usize, limit: &Limit, op_timeout: Duration, local: bool) -> LimitSettings {
    let lease = if local { FOREVER } else { limit.lease };
    let recovery = match (local, limit.recovery) {
        (true, _) => Duration::ZERO,
        (false, Recovery::Fast) => Duration::from_secs(2),
        (false, Recovery::Strict) => lease + op_timeout,
    };
    let ms = |duration: Duration| duration.as_millis() as i64;
    let set = SetSpec {
        key: Arc::clone(&limit.name),
        slots: limit.slots,
        lease: ms(lease),
        grant_ttl: ms(Duration::from_secs(3).min(lease / 2)),
        recovery: ms(recovery),
        queue: limit.queue.size,
        ageing: 5_000,
        keyed: false,
        shadow: false,
        classes: Arc::from([ClassSpec { name: Arc::from("normal"), share: 1.0, queue: u32::MAX }]),
        limit: index,
    };
    LimitSettings {
        set: Arc::new(set),
        renew: lease / 3,
        queue_timeouts: vec![limit.queue.timeout],
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
    }
}
