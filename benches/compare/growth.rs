//! What grows with what, on Redis: the store's own code, as an instance under load calls it, against a Redis on a core of
//! its own. A request is a *turn*: the release of one that is done and the acquire of the next. How it is with whole
//! instances is in `instances`.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use tidegate::{
    config::{RedisAt, Secret, Store, StoreKind, StoreTls, WhenDown},
    store::{
        Acquire, Acquired, Ask, Beat, Call, Caller, ClassSpec, Heartbeat, Link, RedisStore,
        Release, SetSpec, SlotStore, Want,
    },
};
use tokio::{task::JoinSet, time::Instant};
use uuid::Uuid;

use crate::{
    Bound, Result, Run,
    candidates::start_redis,
    children::{Cpus, Proc},
    instances,
    report::{Disturbance, figure, median},
};

/// Nothing ends by itself meanwhile, ms.
const FOR_EVER: i64 = 1 << 40;
const LEASE: i64 = 600_000;
/// So many calls are under way at a time, so that Redis is never without one.
const CALLS: usize = 4;
/// Requests in each call: alone, and as they gather under load.
const BATCHES: [usize; 2] = [1, 16];
const FILL: usize = 128;

/// A state of the store in which a request is measured.
#[derive(Clone, Copy, Debug)]
struct Point {
    what: &'static str,
    /// N of each set, of which all but a few are held.
    slots: usize,
    waiting: usize,
    /// How many sets: values of a limit's key.
    values: usize,
    /// Who calls, each over a connection of its own.
    instances: usize,
}

impl Point {
    /// The number that grows from point to point.
    fn size(&self) -> usize {
        match self.what {
            SLOTS => self.slots,
            WAITING => self.waiting,
            VALUES => self.values,
            _ => self.instances,
        }
    }
}

const SLOTS: &str = "slots";
const WAITING: &str = "waiting, 1,000 slots";
const INSTANCES: &str = "instances, 1,000 slots";
const VALUES: &str = "values of a key, 10 slots each";

/// For each of [`BATCHES`].
#[derive(Clone, Copy, Debug)]
struct Sample {
    redis_us: [f64; 2],
    per_second: [f64; 2],
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let disturbance = Disturbance::watch();
    let point = Point { what: SLOTS, slots: 1_000, waiting: 0, values: 1, instances: 1 };
    let slots = |slots| Point { slots, ..point };
    let waiting = |waiting| Point { what: WAITING, waiting, ..point };
    let values = |values| Point { what: VALUES, slots: 10, values, ..point };
    let instances = |instances| Point { what: INSTANCES, instances, ..point };
    let many = run.at_most(100_000);
    let families = [
        (SLOTS, [10, 1_000, many].map(slots).to_vec(), 10),
        (WAITING, [0, 100, run.at_most(10_000), many].map(waiting).to_vec(), 100),
        (VALUES, [1, 10, 100, run.at_most(10_000)].map(values).to_vec(), 10),
        (INSTANCES, [1, 10, 50].map(instances).to_vec(), 10),
    ];
    let mut rows = Vec::new();
    Cpus::Rest.take()?;
    for (what, points, smallest) in families {
        let mut costs = Vec::new();
        for point in &points {
            let mut samples = Vec::new();
            for round in 0..run.rounds {
                eprintln!("round {} of {}: {} {what}", round + 1, run.rounds, point.size());
                samples.push(measure(point, Duration::from_secs(run.seconds)).await?);
            }
            let middle = |value: fn(&Sample) -> f64| median(samples.iter().map(value));
            let figures = [
                middle(|sample| sample.redis_us[0]),
                middle(|sample| sample.per_second[0]),
                middle(|sample| sample.redis_us[1]),
                middle(|sample| sample.per_second[1]),
            ];
            costs.push((point.size(), figures[0]));
            let name = format!("{} {what}", point.size());
            rows.push([name].into_iter().chain(figures.map(figure)).collect());
        }
        let (largest, dearest) = costs[costs.len() - 1];
        let cheap =
            costs.iter().find(|(size, _)| *size == smallest).map_or(f64::NAN, |cost| cost.1);
        run.mark(
            format!("Redis us a request: {largest} {what} / {smallest}"),
            dearest / cheap,
            // As the logarithms grow.
            Bound::AtMost((100.0 * (largest as f64).ln() / (smallest as f64).ln()).round() / 100.0),
        );
    }
    Cpus::Any.take()?;
    run.report.heading("Growth on one Redis");
    let head =
        ["", "Redis us a request", "requests/s", "us, 16 requests a call", "requests/s, 16 a call"];
    run.report.table(&head, &rows);
    run.report.line(&format!(
        "Medians of {} rounds of {} s. The store's own code on one connection for each instance, with {CALLS} calls under way, Redis on a core \
         of its own: the release of one request and the acquire of the next in one script, by Redis' own clock \
         (`INFO commandstats`). Slots are held but for 4; where somebody waits all are, each release is handed to the \
         longest waiter, and the new request joins the queue. Requests/s is what the slower of Redis and this one \
         client carries. The marks are that nothing grows faster than the logarithm. Other processes used {:.1} % of the machine.",
        run.rounds,
        run.seconds,
        disturbance.percent()
    ));
    instances::table(run).await
}

/// An instance that does nothing but turns.
#[derive(Debug)]
struct Turner {
    link: Arc<dyn Link>,
    caller: Caller,
    sets: Vec<Arc<SetSpec>>,
    /// Who holds a slot, of which set; the longest first.
    held: Mutex<VecDeque<(Uuid, usize)>>,
}

async fn measure(point: &Point, length: Duration) -> Result<Sample> {
    let redis = start_redis(Cpus::Proxy).await?;
    let sets: Vec<_> = (0..point.values).map(|value| Arc::new(set(point, value))).collect();
    let mut turners = Vec::new();
    for _ in 0..point.instances {
        let instance = Uuid::now_v7();
        let turner = Turner {
            // One store has few connections.
            link: store(redis.port)?.open().await?,
            caller: Caller { instance, epoch: 1, gap: FOR_EVER, presence: FOR_EVER },
            sets: sets.clone(),
            held: Mutex::default(),
        };
        turner.fill(point).await?;
        turners.push(turner);
    }
    let turners = Arc::new(turners);
    let (mut redis_us, mut per_second) = ([f64::NAN; 2], [f64::NAN; 2]);
    for (place, batch) in BATCHES.into_iter().enumerate() {
        let (before, start) = (script_us(&redis)?, Instant::now());
        let mut tasks = JoinSet::new();
        for task in 0..CALLS {
            let turners = Arc::clone(&turners);
            tasks.spawn(async move {
                let (mut requests, mut next) = (0, task);
                while start.elapsed() < length {
                    requests += turners[next % turners.len()].turn(batch).await?;
                    next += 1;
                }
                Ok::<_, crate::Error>(requests)
            });
        }
        let mut requests = 0;
        while let Some(done) = tasks.join_next().await {
            requests += done??;
        }
        redis_us[place] = (script_us(&redis)? - before) / requests as f64;
        per_second[place] = requests as f64 / start.elapsed().as_secs_f64();
    }
    Ok(Sample { redis_us, per_second })
}

impl Turner {
    /// Takes its part of the slots, and queues the waiters.
    async fn fill(&self, point: &Point) -> Result<()> {
        for sets in self.sets.chunks(FILL) {
            let beat = |set: &Arc<SetSpec>| Beat {
                set: Arc::clone(set),
                renew: Vec::new(),
                known: None,
                order: None,
            };
            let beats = sets.iter().map(beat).collect();
            let heartbeat =
                Heartbeat { subscribed: false, leaving: false, within: FOR_EVER, beats };
            self.link
                .call(&self.caller, &Call { heartbeat: Some(heartbeat), ..Call::default() })
                .await?;
        }
        let free = if point.waiting == 0 { 4 } else { 0 };
        let taken = point.values * (point.slots - free) / point.instances;
        let mut places = (0..taken + point.waiting).map(|n| n % point.values).peekable();
        while places.peek().is_some() {
            let acquires = places.by_ref().take(FILL).map(|set| self.acquire(set)).collect();
            self.apply(Vec::new(), acquires).await?;
        }
        let held = self.held.lock().map_err(|_| "a task panicked")?.len();
        if held == taken {
            Ok(())
        } else {
            Err(format!("{held} slots are held, not {taken}").into())
        }
    }

    /// So many requests end, and as many begin, in the same sets.
    async fn turn(&self, batch: usize) -> Result<usize> {
        let done: Vec<_> = {
            let mut held = self.held.lock().map_err(|_| "a task panicked")?;
            let n = batch.min(held.len());
            held.drain(..n).collect()
        };
        if done.is_empty() {
            tokio::task::yield_now().await;
            return Ok(0);
        }
        let acquires = done.iter().map(|&(_, set)| self.acquire(set)).collect();
        let n = done.len();
        self.apply(done, acquires).await?;
        Ok(n)
    }

    fn ask(&self, id: Uuid, set: usize) -> Ask {
        let want = Want { set: Arc::clone(&self.sets[set]), weight: 1 };
        Ask { id, wants: [want].into(), rates: Arc::from([]), class: 0, route: "bench".into() }
    }

    fn acquire(&self, set: usize) -> (Acquire, usize) {
        let ask = self.ask(Uuid::now_v7(), set);
        (Acquire { ask, waited: 0, may_wait: true, again: false }, set)
    }

    async fn apply(&self, done: Vec<(Uuid, usize)>, acquires: Vec<(Acquire, usize)>) -> Result<()> {
        let release = |(id, set)| Release { ask: self.ask(id, set), queued: false, refund: false };
        let (acquires, sets): (Vec<_>, Vec<_>) = acquires.into_iter().unzip();
        let ids: Vec<_> = acquires.iter().map(|acquire| acquire.ask.id).collect();
        let call =
            Call { releases: done.into_iter().map(release).collect(), heartbeat: None, acquires };
        let reply = self.link.call(&self.caller, &call).await?;
        let acquired = reply.acquires.ok_or("no answer to the acquires")?;
        let mut held = self.held.lock().map_err(|_| "a task panicked")?;
        for ((id, set), outcome) in ids.into_iter().zip(sets).zip(acquired.outcomes) {
            match outcome {
                Acquired::Granted => held.push_back((id, set)),
                Acquired::Waiting { .. } => {}
                other => return Err(format!("a request got {other:?}").into()),
            }
        }
        // Only where there is a single set anybody waits.
        let granted = reply.releases.map(|releases| releases.granted).unwrap_or_default();
        held.extend(granted.into_iter().chain(acquired.granted).map(|id| (id, 0)));
        Ok(())
    }
}

fn set(point: &Point, value: usize) -> SetSpec {
    let classes = [ClassSpec { name: "normal".into(), share: 1.0, queue: 1_000_000 }];
    let keyed = point.what == VALUES;
    SetSpec {
        key: if keyed { format!("bench:{value:032x}").into() } else { "bench".into() },
        slots: point.slots as u32,
        lease: LEASE,
        grant_ttl: LEASE / 2,
        recovery: 0,
        queue: 1_000_000,
        ageing: FOR_EVER,
        keyed,
        shadow: false,
        fenced: false,
        warm: false,
        classes: classes.into(),
        limit: 0,
    }
}

fn store(port: u16) -> Result<Arc<RedisStore>> {
    let at = RedisAt { url: Secret(format!("redis://127.0.0.1:{port}")), sentinels: None };
    let settings = Store {
        kind: StoreKind::Redis(at.clone()),
        tls: StoreTls::default(),
        prefix: String::new(),
        digest_key: None,
        when_down: WhenDown::Closed,
        op_timeout: Duration::from_secs(10),
    };
    Ok(RedisStore::new(&at, &settings, false)?)
}

/// How long scripts have run in a Redis, by its own clock.
fn script_us(redis: &Proc) -> Result<f64> {
    let port = redis.port.to_string();
    let said = std::process::Command::new("redis-cli")
        .args(["-p", &port, "info", "commandstats"])
        .output()?;
    let text = String::from_utf8(said.stdout)?;
    let line = text.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    let time = line.and_then(|line| line.split_once("usec=")?.1.split(',').next());
    Ok(time.map_or(Ok(0.0), str::parse)?)
}
