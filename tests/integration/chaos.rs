//! A fleet under load, one fault after the other: the highest count at the upstream, the time until every slot is in use again,
//! and the requests that were lost. The long form prints the README's table: `tests/chaos.sh`.

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::harness::{
    Client, Conf, Proxy, Redis, Relay, Replicated, Sentinels, Upstream, eventually, one_limit,
    run_to_end,
};

const SLOTS: usize = 6;
const INSTANCES: usize = 3;
/// For each instance. Two of them have enough for every slot.
const CLIENTS: usize = 8;
/// A slot that is free for longer than this isn't on its way from one request to the next.
const STARVED: Duration = Duration::from_millis(300);
/// No fault may take longer to heal. A lease, a recovery and a heartbeat are half of that.
const PATIENCE: Duration = Duration::from_secs(20);

/// Redis, as many instances as there are, each behind a relay of its own, and clients that never rest.
struct Fleet {
    upstream: Upstream,
    redis: Redis,
    relays: Vec<Relay>,
    proxies: Vec<Proxy>,
    conf: Conf,
    lease: Duration,
    load: Load,
}

/// What the promise allows, beyond N and beyond nothing lost.
#[derive(Clone, Copy, Default)]
struct Allowed {
    overshoot: usize,
    lost: usize,
}

struct Row {
    fault: &'static str,
    slots: usize,
    highest: usize,
    allowed: Allowed,
    heal: Duration,
    healed: bool,
    served: usize,
    refused: usize,
    lost: usize,
}

impl Row {
    fn is_kept(&self) -> bool {
        let overshoot = self.highest.saturating_sub(self.slots);
        self.healed && overshoot <= self.allowed.overshoot && self.lost <= self.allowed.lost
    }
}

const HEAD: &str = "| fault | N | highest count | above N (allowed) | full again after | served | refused | lost (allowed) |\n\
                    |---|---|---|---|---|---|---|---|";

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, slots, highest, allowed, served, refused, lost, .. } = self;
        let heal = self.heal.as_secs_f64();
        let heal = if self.healed { format!("{heal:.1} s") } else { "never".to_owned() };
        let above = highest.saturating_sub(*slots);
        write!(f, "| {fault} | {slots} | {highest} | {above} ({}) | {heal} ", allowed.overshoot)?;
        write!(f, "| {served} | {refused} | {lost} ({}) |", allowed.lost)
    }
}

fn check(rows: &[Row]) {
    let broken: Vec<_> = rows.iter().filter(|row| !row.is_kept()).map(|row| row.fault).collect();
    assert!(broken.is_empty(), "beyond what is promised: {broken:?}");
}

// === load ===

struct Load {
    addrs: Arc<Mutex<Vec<SocketAddr>>>,
    tally: Arc<Tally>,
    clients: JoinSet<()>,
}

#[derive(Default)]
struct Tally {
    stop: AtomicBool,
    served: AtomicUsize,
    refused: AtomicUsize,
    lost: AtomicUsize,
}

impl Load {
    fn on(proxies: &[Proxy]) -> Self {
        let addrs = Arc::new(Mutex::new(proxies.iter().map(Proxy::addr).collect::<Vec<_>>()));
        let (tally, mut clients) = (Arc::<Tally>::default(), JoinSet::new());
        for number in 0..CLIENTS * proxies.len() {
            let (addrs, tally) = (Arc::clone(&addrs), Arc::clone(&tally));
            clients.spawn(async move {
                let (client, mut random) = (Client::new(), fastrand::Rng::with_seed(number as u64));
                while !tally.stop.load(Ordering::Relaxed) {
                    let addr = addrs.lock().unwrap()[number % INSTANCES];
                    let hold = if random.u8(..) < 16 { 1_000 } else { random.u64(10..150) };
                    let count = match client.try_get(addr, &format!("/hold?ms={hold}")).await {
                        Ok(answer) if answer.status == 200 => &tally.served,
                        Ok(answer) if answer.headers.contains_key("retry-after") => &tally.refused,
                        Ok(_) => &tally.lost,
                        Err(error) if is_connect(&*error) => {
                            sleep(Duration::from_millis(50)).await;
                            continue;
                        }
                        Err(_) => &tally.lost,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                    // A killed process closes its sockets one by one: whoever comes back at once may find the listener
                    // still open and be lost again.
                    if !std::ptr::eq(count, &raw const tally.served) {
                        sleep(Duration::from_millis(50)).await;
                    }
                }
            });
        }
        Self { addrs, tally, clients }
    }

    /// Served, refused and lost so far.
    fn counts(&self) -> [usize; 3] {
        let Tally { served, refused, lost, .. } = &*self.tally;
        [served, refused, lost].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Nobody had accepted the request.
fn is_connect(error: &(dyn std::error::Error + 'static)) -> bool {
    let error = error.downcast_ref::<hyper_util::client::legacy::Error>();
    error.is_some_and(hyper_util::client::legacy::Error::is_connect)
}

// === impl Fleet ===

impl Fleet {
    async fn start(lease: &'static str) -> Self {
        let redis = Redis::spawn_with(&["--enable-debug-command", "yes"]).await;
        let upstream = Upstream::spawn().await;
        let conf = one_limit(&upstream, SLOTS as u32).lease(lease);
        let (mut relays, mut proxies) = (Vec::new(), Vec::new());
        for _ in 0..INSTANCES {
            let relay = Relay::to(redis.addr()).await;
            proxies.push(Proxy::spawn(&through(&conf, &relay)).await);
            relays.push(relay);
        }
        Self::under_load(upstream, redis, relays, proxies, conf, lease).await
    }

    async fn under_load(
        upstream: Upstream,
        redis: Redis,
        relays: Vec<Relay>,
        proxies: Vec<Proxy>,
        conf: Conf,
        lease: &str,
    ) -> Self {
        for proxy in &proxies {
            eventually("every instance has its share", async || {
                proxy.limit("llm").await["share"] == SLOTS / INSTANCES
            })
            .await;
        }
        let lease = Duration::from_secs(lease.trim_end_matches('s').parse().unwrap());
        let load = Load::on(&proxies);
        upstream.wait_current(SLOTS).await;
        Self { upstream, redis, relays, proxies, conf, lease, load }
    }

    /// Does something bad, and looks what comes of it until long after every slot is in use again.
    async fn suffer(
        &mut self,
        fault: &'static str,
        slots: usize,
        inflict: impl AsyncFnOnce(&mut Self) -> Allowed,
    ) -> Row {
        let before = self.load.counts();
        self.upstream.take_highest();
        let allowed = inflict(self).await;
        let (over, mut full, mut heal) = (Instant::now(), Instant::now(), Duration::ZERO);
        // Whatever lapses has lapsed by then.
        let settled = self.lease + Duration::from_millis(1_500);
        while over.elapsed() < settled || full.elapsed() > STARVED {
            if over.elapsed() > PATIENCE {
                break;
            }
            sleep(Duration::from_millis(2)).await;
            if self.upstream.current() >= slots {
                if full.elapsed() > STARVED {
                    heal = over.elapsed();
                }
                full = Instant::now();
            }
        }
        let [served, refused, lost] = self.load.counts();
        let row = Row {
            fault,
            slots,
            highest: self.upstream.take_highest(),
            allowed,
            heal,
            healed: full.elapsed() <= STARVED,
            served: served - before[0],
            refused: refused - before[1],
            lost: lost - before[2],
        };
        println!("{row}");
        row
    }

    /// No slot is left behind.
    async fn end(mut self) {
        self.load.tally.stop.store(true, Ordering::Relaxed);
        while let Some(client) = self.load.clients.join_next().await {
            client.unwrap();
        }
        self.redis.wait_in_use("llm", 0).await;
        self.redis.wait_waiting("llm", 0).await;
    }

    async fn kill_one(&mut self) -> Allowed {
        self.proxies[0].kill9().await;
        // Its clients' requests go with it.
        Allowed { lost: CLIENTS, ..Allowed::default() }
    }

    async fn replace_killed(&mut self) {
        self.proxies[0] = Proxy::spawn(&through(&self.conf, &self.relays[0])).await;
        self.load.addrs.lock().unwrap()[0] = self.proxies[0].addr();
        let proxy = &self.proxies[0];
        eventually("the new instance has its share", async || {
            proxy.limit("llm").await["share"] == SLOTS / INSTANCES
        })
        .await;
    }

    async fn freeze_one(&mut self) -> Allowed {
        let instance = self.first_instance().await;
        self.proxies[0].sigstop();
        let overshoot = self.slots_of(&instance).await;
        sleep(2 * self.lease).await;
        self.proxies[0].sigcont();
        Allowed { overshoot, lost: 0 }
    }

    /// Cut off, it hands its own slots on until their lease is over, and what runs then goes on; after that it has its share.
    async fn cut_one_off(&mut self) -> Allowed {
        let instance = self.first_instance().await;
        self.relays[0].shut();
        let overshoot = self.slots_of(&instance).await.max(SLOTS / INSTANCES);
        sleep(2 * self.lease).await;
        self.relays[0].reopen();
        Allowed { overshoot, lost: 0 }
    }

    async fn first_instance(&self) -> String {
        self.proxies[0].status().await["instance"].as_str().unwrap().to_owned()
    }

    /// As Redis has them.
    async fn slots_of(&self, instance: &str) -> usize {
        let holders = self.redis.holders("llm").await;
        let infos: HashMap<String, String> = self.redis.cli(&["HGETALL", "sem:llm:info"]).await;
        let is_its =
            |holder: &&String| infos.get(*holder).is_some_and(|info| info.contains(instance));
        holders.iter().filter(is_its).count()
    }

    async fn set_limit(&self, slots: &str) {
        let admin = format!("http://{}", self.proxies[1].admin());
        let mut words = vec!["limit", "llm", "--admin", &admin];
        words.extend(slots.split(' '));
        let ended = run_to_end(&words).await;
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}

fn through(conf: &Conf, relay: &Relay) -> Conf {
    conf.clone().store_url(format!("redis://{}", relay.addr()))
}

async fn nothing_more(fault: impl Future<Output = ()>) -> Allowed {
    fault.await;
    Allowed::default()
}

// === the faults ===

/// Each of those that heal within a few seconds.
async fn short_faults(fleet: &mut Fleet, rows: &mut Vec<Row>) {
    let row = fleet.suffer("an instance is killed", SLOTS, Fleet::kill_one).await;
    rows.push(row);
    fleet.replace_killed().await;
    let row = fleet.suffer("FLUSHALL", SLOTS, async |fleet: &mut Fleet| {
        nothing_more(fleet.redis.cli(&["FLUSHALL"])).await
    });
    rows.push(row.await);
    let row = fleet.suffer("SCRIPT FLUSH", SLOTS, async |fleet: &mut Fleet| {
        nothing_more(fleet.redis.cli(&["SCRIPT", "FLUSH"])).await
    });
    rows.push(row.await);
    let row =
        fleet.suffer("Redis is killed and comes back empty", SLOTS, async |fleet: &mut Fleet| {
            nothing_more(fleet.redis.restart()).await
        });
    rows.push(row.await);
    let row = fleet.suffer("every connection to Redis is cut", SLOTS, async |fleet: &mut Fleet| {
        fleet.relays.iter().for_each(Relay::cut);
        Allowed::default()
    });
    rows.push(row.await);
}

/// Each of those that take their time.
async fn long_faults(fleet: &mut Fleet, rows: &mut Vec<Row>) {
    let row = fleet.suffer("an instance is frozen for two leases", SLOTS, Fleet::freeze_one).await;
    rows.push(row);
    let row = fleet.suffer("DEBUG SLEEP 1.5", SLOTS, async |fleet: &mut Fleet| {
        // Its answer comes too late for the client that asks.
        _ = fleet.redis.try_cli::<String>(&["DEBUG", "SLEEP", "1.5"]).await;
        sleep(Duration::from_millis(1_500)).await;
        Allowed::default()
    });
    rows.push(row.await);
    let row =
        fleet.suffer("Redis has no memory left, for 3 s", SLOTS, async |fleet: &mut Fleet| {
            fleet.redis.cli::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
            sleep(Duration::from_secs(3)).await;
            nothing_more(fleet.redis.cli(&["CONFIG", "SET", "maxmemory", "0"])).await
        });
    rows.push(row.await);
    let row = fleet.suffer(
        "answers of Redis are 200 ms late, for 3 s",
        SLOTS,
        async |fleet: &mut Fleet| {
            fleet.relays.iter().for_each(|relay| relay.delay(Duration::from_millis(200)));
            sleep(Duration::from_secs(3)).await;
            fleet.relays.iter().for_each(|relay| relay.delay(Duration::ZERO));
            Allowed::default()
        },
    );
    rows.push(row.await);
    let row = fleet.suffer(
        "no answer of Redis arrives for 2 s, then connections break",
        SLOTS,
        async |fleet: &mut Fleet| {
            fleet.relays.iter().for_each(Relay::lose_replies);
            sleep(Duration::from_secs(2)).await;
            fleet.relays.iter().for_each(Relay::cut);
            Allowed::default()
        },
    );
    rows.push(row.await);
    let row = fleet.suffer("an instance is cut off for two leases", SLOTS, Fleet::cut_one_off);
    rows.push(row.await);
    let row = fleet.suffer("Redis is frozen for two leases", SLOTS, async |fleet: &mut Fleet| {
        fleet.redis.pause();
        sleep(2 * fleet.lease).await;
        fleet.redis.resume();
        Allowed::default()
    });
    rows.push(row.await);
    let row = fleet.suffer("the limit is lowered", SLOTS / 2, async |fleet: &mut Fleet| {
        fleet.set_limit("--slots 3").await;
        eventually("those above it are done", async || fleet.upstream.current() <= 3).await;
        fleet.upstream.take_highest();
        Allowed::default()
    });
    rows.push(row.await);
    let row = fleet.suffer("the limit is raised again", SLOTS, async |fleet: &mut Fleet| {
        fleet.set_limit("--reset").await;
        Allowed::default()
    });
    rows.push(row.await);
}

async fn failover(lease: &'static str, rows: &mut Vec<Row>) {
    let (upstream, primary) = (Upstream::spawn().await, Redis::spawn().await);
    let port = primary.addr().port().to_string();
    let replica = Redis::spawn_with(&["--replicaof", "127.0.0.1", &port]).await;
    let sentinels = Sentinels::spawn(3, &primary).await;
    eventually("the Sentinels know the replica", async || {
        sentinels.fact(0, "num-slaves").await.as_deref() == Some("1")
    })
    .await;
    let conf = one_limit(&upstream, SLOTS as u32).lease(lease).store_url(sentinels.url());
    let mut proxies = Vec::new();
    for _ in 0..INSTANCES {
        proxies.push(Proxy::spawn(&conf).await);
    }
    let mut fleet = Fleet::under_load(upstream, primary, vec![], proxies, conf, lease).await;
    let promoted = replica.addr().port();
    let mut replica = Some(replica);
    let row = fleet.suffer(
        "failover: the primary is killed (from the Sentinels' decision on)",
        SLOTS,
        async |fleet: &mut Fleet| {
            fleet.redis.kill9().await;
            eventually("the replica is the primary", async || {
                sentinels.primary().await == promoted
            })
            .await;
            fleet.redis = replica.take().unwrap();
            Allowed::default()
        },
    );
    rows.push(row.await);
    fleet.end().await;
}

/// The replica hears nothing more, grants go on, the primary dies, and the replica takes over with its older memory.
async fn lossy_failover(lease: &'static str, rows: &mut Vec<Row>) {
    let (upstream, mut redis) = (Upstream::spawn().await, Replicated::spawn().await);
    let strict = "recovery = \"strict\"\non_lease_lost = \"cut\"";
    let conf = one_limit(&upstream, SLOTS as u32).lease(lease).limit(strict);
    let conf = conf.store_url(redis.url());
    let mut proxies = Vec::new();
    for _ in 0..INSTANCES {
        proxies.push(Proxy::spawn(&conf).await);
    }
    let primary = std::mem::replace(&mut redis.primary, Redis::spawn().await);
    let mut fleet = Fleet::under_load(upstream, primary, vec![], proxies, conf, lease).await;
    let row = fleet.suffer(
        "failover under strict: the replica lacks the last second",
        SLOTS,
        async |fleet: &mut Fleet| {
            redis.cut_off();
            sleep(Duration::from_secs(1)).await;
            fleet.redis.kill9().await;
            redis.promote().await;
            std::mem::swap(&mut fleet.redis, &mut redis.replica);
            Allowed::default()
        },
    );
    rows.push(row.await);
    fleet.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_promised_holds_under_faults() {
    println!("{HEAD}");
    let (mut fleet, mut rows) = (Fleet::start("2s").await, Vec::new());
    short_faults(&mut fleet, &mut rows).await;
    fleet.end().await;
    check(&rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_that_a_failover_loses_pass_no_limit_under_strict() {
    println!("{HEAD}");
    let mut rows = Vec::new();
    lossy_failover("4s", &mut rows).await;
    check(&rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes three minutes: tests/chaos.sh"]
async fn the_table_of_faults() {
    println!("{HEAD}");
    let (mut fleet, mut rows) = (Fleet::start("4s").await, Vec::new());
    short_faults(&mut fleet, &mut rows).await;
    long_faults(&mut fleet, &mut rows).await;
    fleet.end().await;
    failover("4s", &mut rows).await;
    lossy_failover("4s", &mut rows).await;
    check(&rows);
}
