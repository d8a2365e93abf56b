//! What Prometheus reads. Labels come from the configuration only; handles are looked up once, not per request.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::StatusCode;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::{Family, MetricConstructor},
        gauge::Gauge,
        histogram::Histogram,
    },
    registry::Registry,
};

use crate::{
    config::{Config, Limit},
    leases::{Alone, Outlook, Standing},
    reason::Reason,
};

mod compared;
mod endpoints;
mod lost;
mod reloads;
mod ways;

use endpoints::EndpointFamilies;
pub use endpoints::EndpointMetrics;
pub use lost::Lost;
pub use reloads::Reloads;
pub use ways::{RateMetrics, StoreMetrics};

use compared::{Compared, ComparedFamilies};
use ways::WayFamilies;

/// From half a millisecond to an hour: a hold is compared with `max_hold`, which is half an hour unless said.
const SECONDS: [f64; 20] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 900.0, 1800.0, 3600.0,
];

/// Every metric of an instance, with the handles that one configuration needs.
#[derive(Debug)]
pub struct Metrics {
    all: Arc<Families>,
    limits: Vec<LimitMetrics>,
    routes: Vec<RouteMetrics>,
    endpoints: Vec<Vec<EndpointMetrics>>,
    upstreams: Vec<Histogram>,
    classes: Vec<Arc<str>>,
    rates: Vec<Arc<str>>,
}

/// What is counted, whatever the configuration says.
#[derive(Debug)]
struct Families {
    registry: Registry,
    limits: LimitFamilies,
    routes: RouteFamilies,
    endpoints: EndpointFamilies,
    ways: WayFamilies,
    shed: Family<ShedLabels, Counter>,
    shadow: Family<ShedLabels, Counter>,
    degraded: Family<DegradedLabels, Counter>,
    store_up: Gauge,
    recovery: Gauge,
    away: Gauge,
    /// Taken over, from the share, without any limit.
    alone: [Counter; 3],
    readded: Counter,
    turned_away: Family<TurnedAwayLabel, Counter>,
    reloads: Reloads,
    lost: Lost,
}

#[derive(Debug)]
struct LimitFamilies {
    slots: Family<LimitLabel, Gauge>,
    holders: Family<LimitLabel, Gauge>,
    local: Family<LimitLabel, Gauge>,
    waiting: Family<LimitLabel, Gauge>,
    share: Family<LimitLabel, Gauge>,
    acquire: Family<AcquireLabels, Counter>,
    lost: Family<LimitLabel, Counter>,
    wait: Histograms<LimitLabel>,
    hold: Histograms<LimitLabel>,
    compared: ComparedFamilies,
}

#[derive(Debug)]
struct RouteFamilies {
    requests: Family<RequestLabels, Counter>,
    seconds: Histograms<RouteLabel>,
}

/// The semaphore family of one limit.
#[derive(Clone, Debug)]
pub struct LimitMetrics {
    slots: Gauge,
    holders: Gauge,
    local: Gauge,
    waiting: Gauge,
    granted: Counter,
    refused: Counter,
    lost: Counter,
    share: Gauge,
    wait: Histogram,
    hold: Histogram,
    compared: Compared,
    name: Arc<str>,
}

/// One route's requests.
#[derive(Debug)]
pub struct RouteMetrics {
    name: Arc<str>,
    requests: Family<RequestLabels, Counter>,
    by_status: Box<[OnceLock<Counter>]>,
    seconds: Histogram,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitLabel {
    limit: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct AcquireLabels {
    limit: String,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct AloneLabel {
    way: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ShedLabels {
    limit: String,
    class: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DegradedLabels {
    route: String,
    step: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TurnedAwayLabel {
    why: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteLabel {
    route: String,
}

/// Makes histograms for a family.
#[derive(Clone, Debug)]
struct InSeconds;

impl MetricConstructor<Histogram> for InSeconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(SECONDS)
    }
}

type Histograms<L> = Family<L, Histogram, InSeconds>;

impl Metrics {
    /// Registers every metric, with handles for this configuration.
    pub fn new(config: &Config) -> Arc<Self> {
        Self::of(Arc::new(Families::register()), config)
    }

    /// The same metrics with handles for another configuration. What is gone from it is shown no more, but for what was
    /// counted.
    pub fn adopt(&self, config: &Config) -> Arc<Self> {
        for gone in &self.limits {
            if !config.limits.iter().any(|limit| limit.name == gone.name) {
                self.all.limits.forget(&gone.name);
            }
        }
        for gone in self.endpoints.iter().flatten() {
            if !config.upstreams.iter().any(|upstream| gone.is_of(upstream)) {
                self.all.endpoints.forget(gone);
            }
        }
        Self::of(Arc::clone(&self.all), config)
    }

    fn of(all: Arc<Families>, config: &Config) -> Arc<Self> {
        Arc::new(Self {
            limits: config.limits.iter().map(|limit| all.limits.of(limit)).collect(),
            routes: config.routes.iter().map(|route| all.routes.of(&route.name)).collect(),
            endpoints: config.upstreams.iter().map(|upstream| all.endpoints.of(upstream)).collect(),
            upstreams: config.upstreams.iter().map(|to| all.ways.upstream(&to.name)).collect(),
            classes: config.classes.order.clone(),
            rates: config.rates.iter().map(|rate| Arc::clone(&rate.name)).collect(),
            all,
        })
    }

    /// Counts a connection that wasn't served.
    pub fn turned_away(&self, why: &'static str) {
        self.all.turned_away.get_or_create(&TurnedAwayLabel { why }).inc();
    }

    /// How reading the configuration again went.
    pub fn reloads(&self) -> &Reloads {
        &self.all.reloads
    }

    /// What was to be told of requests and got lost.
    pub fn lost(&self) -> &Lost {
        &self.all.lost
    }

    /// The handles of a limit.
    pub fn limit(&self, index: usize) -> &LimitMetrics {
        &self.limits[index]
    }

    /// The handles of a route.
    pub fn route(&self, index: usize) -> &RouteMetrics {
        &self.routes[index]
    }

    /// The handles of an upstream's endpoints.
    pub fn endpoints(&self, upstream: usize) -> &[EndpointMetrics] {
        &self.endpoints[upstream]
    }

    /// The handles of a rate.
    pub fn rate(&self, index: usize) -> RateMetrics {
        self.all.ways.rate(&self.rates[index])
    }

    /// The handles of the store.
    pub fn store(&self) -> StoreMetrics {
        self.all.ways.store()
    }

    /// An upstream answered after this time.
    pub fn upstream_answered(&self, upstream: usize, took: Duration) {
        self.upstreams[upstream].observe(took.as_secs_f64());
    }

    /// Counts a refusal.
    pub fn shed(&self, limit: Option<usize>, rate: Option<usize>, class: usize, reason: Reason) {
        self.all.shed.get_or_create(&self.shed_labels(limit, rate, class, reason)).inc();
    }

    /// How many were refused in the name of a limit or a rate, or of neither (the empty name), by reason, where any were.
    pub fn refusals(&self, name: &str) -> Vec<(&'static str, u64)> {
        let classes = || self.classes.iter().map(|class| class.to_string());
        let count = |reason: Reason| {
            let labels =
                |class| ShedLabels { limit: name.to_owned(), class, reason: reason.as_str() };
            let count =
                |class| self.all.shed.get(&labels(class)).map_or(0, |counter| counter.get());
            (reason.as_str(), classes().map(count).sum())
        };
        Reason::ALL.into_iter().map(count).filter(|(_, count)| *count > 0).collect()
    }

    /// Counts what a limit or a rate in shadow mode would have refused.
    pub fn shadowed(
        &self,
        limit: Option<usize>,
        rate: Option<usize>,
        class: usize,
        reason: Reason,
    ) {
        self.all.shadow.get_or_create(&self.shed_labels(limit, rate, class, reason)).inc();
    }

    /// Counts an answer that a step of a route's ladder gave.
    pub fn degraded(&self, route: usize, step: &'static str) {
        let labels = DegradedLabels { route: self.routes[route].name.to_string(), step };
        self.all.degraded.get_or_create(&labels).inc();
    }

    /// A rate stands where its limit would.
    fn shed_labels(
        &self,
        limit: Option<usize>,
        rate: Option<usize>,
        class: usize,
        reason: Reason,
    ) -> ShedLabels {
        let rate = rate.map(|rate| self.rates[rate].to_string());
        let limit = limit.map(|limit| self.limits[limit].name.to_string());
        let class = self.classes.get(class).map(|class| class.to_string()).unwrap_or_default();
        ShedLabels { limit: limit.or(rate).unwrap_or_default(), class, reason: reason.as_str() }
    }

    /// The exposition, in OpenMetrics text.
    pub fn render(&self, outlook: impl FnOnce() -> Outlook) -> String {
        let all = &self.all;
        let opened: Vec<i64> = self.limits.iter().map(|limit| limit.compared.open.get()).collect();
        let outlook = outlook();
        all.store_up.set(outlook.up.into());
        all.recovery.set(outlook.recovering.into());
        all.away.set(outlook.away.into());
        let Alone { taken_over, shared, open } = outlook.alone;
        for (counter, count) in all.alone.iter().zip([taken_over, shared, open]) {
            catch_up(counter, count);
        }
        catch_up(&all.readded, outlook.readded);
        for (limit, share) in self.limits.iter().zip(&outlook.shares) {
            limit.share.set((*share).into());
        }
        for ((limit, seen), local) in self.limits.iter().zip(&outlook.sets).zip(&outlook.local) {
            limit.slots.set(seen.slots.into());
            limit.holders.set(seen.used.into());
            limit.waiting.set(seen.waiting.into());
            limit.local.set((*local).into());
        }
        for ((limit, opened), standing) in self.limits.iter().zip(opened).zip(&outlook.standing) {
            let Standing { counted, spare, renew_lag } = *standing;
            limit.compared.compare(opened, counted, spare, renew_lag);
        }
        let mut text = String::new();
        encode(&mut text, &all.registry).expect("writing to a string can't fail");
        text
    }
}

impl LimitMetrics {
    /// Whose they are.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// A request got its slot after this wait.
    pub fn granted(&self, waited: Duration) {
        self.granted.inc();
        self.wait.observe(waited.as_secs_f64());
    }

    /// A request got none.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// A request was cut because its lease could have been lost.
    pub fn lost(&self) {
        self.lost.inc();
    }

    /// A request that takes so many slots is open at the upstream from now on.
    pub fn opened(&self, weight: u32) {
        self.compared.open.inc_by(weight.into());
    }

    /// It has ended there.
    pub fn closed(&self, weight: u32) {
        self.compared.open.dec_by(weight.into());
    }

    /// A slot was given back after this hold.
    pub fn released(&self, held: Duration) {
        self.hold.observe(held.as_secs_f64());
    }
}

impl RouteMetrics {
    /// A request was answered with this status, after this time.
    pub fn answered(&self, status: StatusCode, took: Duration) {
        let status = status.as_u16();
        let counter = self.by_status[usize::from(status.clamp(100, 599) - 100)].get_or_init(|| {
            let labels = RequestLabels { route: self.name.to_string(), status };
            self.requests.get_or_create_owned(&labels)
        });
        counter.inc();
        self.seconds.observe(took.as_secs_f64());
    }
}

// === impl Families ===

impl Families {
    fn register() -> Self {
        let mut registry = Registry::with_prefix("tidegate");
        let limits = LimitFamilies::register(&mut registry);
        let routes = RouteFamilies::register(&mut registry);
        let endpoints = EndpointFamilies::register(&mut registry);
        let ways = WayFamilies::register(&mut registry);
        let shed = Family::default();
        registry.register("shed", "Requests refused, by limit, class and reason", shed.clone());
        let (store_up, recovery) = (Gauge::default(), Gauge::default());
        registry.register("store_up", "1 while the store answers", store_up.clone());
        registry.register(
            "recovery",
            "1 while nobody is admitted because the store's memory may be incomplete",
            recovery.clone(),
        );
        let (away, alone, readded) = register_away(&mut registry);
        let (shadow, degraded) = (Family::default(), Family::default());
        registry.register(
            "shadow",
            "Requests that a limit or rate in shadow mode would have refused",
            shadow.clone(),
        );
        registry.register(
            "degraded",
            "Requests answered by a step of their route's ladder",
            degraded.clone(),
        );
        let turned_away = Family::default();
        registry.register(
            "connections_turned_away",
            "Connections of clients that were closed unserved",
            turned_away.clone(),
        );
        let reloads = Reloads::register(&mut registry);
        let lost = Lost::register(&mut registry);
        Self {
            registry,
            limits,
            routes,
            endpoints,
            ways,
            shed,
            shadow,
            degraded,
            store_up,
            recovery,
            away,
            alone,
            readded,
            turned_away,
            reloads,
            lost,
        }
    }
}

impl LimitFamilies {
    fn register(registry: &mut Registry) -> Self {
        let families = Self {
            slots: Family::default(),
            holders: Family::default(),
            local: Family::default(),
            waiting: Family::default(),
            share: Family::default(),
            acquire: Family::default(),
            lost: Family::default(),
            wait: Histograms::new_with_constructor(InSeconds),
            hold: Histograms::new_with_constructor(InSeconds),
            compared: ComparedFamilies::register(registry),
        };
        let Self { slots, holders, local, waiting, share, acquire, lost, wait, hold, .. } =
            &families;
        registry.register(
            "lease_lost",
            "Requests cut because their slot might have become another's (on_lease_lost = cut)",
            lost.clone(),
        );
        let semaphore = registry.sub_registry_with_prefix("semaphore");
        semaphore.register("limit", "Slots in force, fleet-wide", slots.clone());
        semaphore.register("current_holders", "Slots taken, fleet-wide", holders.clone());
        semaphore.register("local_holders", "Slots taken by this instance", local.clone());
        semaphore.register("waiting", "Requests waiting for a slot, fleet-wide", waiting.clone());
        semaphore.register(
            "share",
            "This instance's slots if the store goes away now",
            share.clone(),
        );
        semaphore.register("acquire", "Requests that asked for a slot, by result", acquire.clone());
        semaphore.register("wait_seconds", "From asking for a slot to having it", wait.clone());
        semaphore.register("hold_seconds", "From having a slot to giving it back", hold.clone());
        families
    }

    fn of(&self, limit: &Limit) -> LimitMetrics {
        let name = &limit.name;
        let label = LimitLabel { limit: name.to_string() };
        let acquired = |result| {
            let labels = AcquireLabels { limit: name.to_string(), result };
            self.acquire.get_or_create_owned(&labels)
        };
        LimitMetrics {
            slots: self.slots.get_or_create_owned(&label),
            holders: self.holders.get_or_create_owned(&label),
            local: self.local.get_or_create_owned(&label),
            waiting: self.waiting.get_or_create_owned(&label),
            granted: acquired("granted"),
            refused: acquired("refused"),
            lost: self.lost.get_or_create_owned(&label),
            share: self.share.get_or_create_owned(&label),
            wait: self.wait.get_or_create_owned(&label),
            hold: self.hold.get_or_create_owned(&label),
            compared: self.compared.of(&label, limit),
            name: Arc::clone(name),
        }
    }

    /// Shows no more how a limit stands.
    fn forget(&self, name: &Arc<str>) {
        let label = LimitLabel { limit: name.to_string() };
        for gauges in [&self.slots, &self.holders, &self.local, &self.waiting, &self.share] {
            gauges.remove(&label);
        }
        self.compared.forget(&label);
    }
}

fn register_away(registry: &mut Registry) -> (Gauge, [Counter; 3], Counter) {
    let (away, readded) = (Gauge::default(), Counter::default());
    let admitted = Family::<AloneLabel, Counter>::default();
    registry.register(
        "store_away",
        "1 while requests are settled without the store, by store.when_down",
        away.clone(),
    );
    registry.register(
        "away_admitted",
        "Requests admitted without the store: with the slots of one that was done, from the share, or without any limit",
        admitted.clone(),
    );
    registry.register(
        "lease_readded",
        "Holders that the store had lost and counts again",
        readded.clone(),
    );
    let way = |way| admitted.get_or_create_owned(&AloneLabel { way });
    (away, ["taken_over", "share", "open"].map(way), readded)
}

/// Brings a counter up to what was counted elsewhere.
fn catch_up(counter: &Counter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

impl RouteFamilies {
    fn register(registry: &mut Registry) -> Self {
        let requests = Family::default();
        let seconds = Histograms::new_with_constructor(InSeconds);
        registry.register("requests", "Requests answered, by route and status", requests.clone());
        registry.register(
            "request_seconds",
            "From a request's head to its answer's",
            seconds.clone(),
        );
        Self { requests, seconds }
    }

    fn of(&self, name: &Arc<str>) -> RouteMetrics {
        RouteMetrics {
            name: Arc::clone(name),
            requests: self.requests.clone(),
            by_status: (100..600).map(|_| OnceLock::new()).collect(),
            seconds: self.seconds.get_or_create_owned(&RouteLabel { route: name.to_string() }),
        }
    }
}
