//! Redis is away: frozen, killed, or out of one instance's reach. What is admitted then, by the upstream's own count, and that
//! nothing is lost when it is back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use crate::harness::{
    Answer, Client, Conf, Proxy, Raw, Redis, Relay, Upstream, eventually, one_limit,
};

const LEASE: Duration = Duration::from_secs(2);

/// How Redis goes away.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Connections stay open, and nothing is answered.
    Frozen,
    /// It comes back without memory.
    Killed,
}

impl Outage {
    async fn begin(self, redis: &mut Redis) {
        match self {
            Outage::Frozen => redis.pause(),
            Outage::Killed => redis.kill9().await,
        }
    }

    async fn end(self, redis: &mut Redis) {
        match self {
            Outage::Frozen => redis.resume(),
            Outage::Killed => redis.restart().await,
        }
    }
}

fn conf(upstream: &Upstream, redis: &Redis, slots: u32, when_down: &'static str) -> Conf {
    one_limit(upstream, slots).redis(redis).lease("2s").store(when_down)
}

const CLOSED: &str = "when_down = \"closed\"";
const SHARE: &str = "when_down = \"local-share\"";
const OPEN: &str = "when_down = \"open\"";

/// Waits until the instance has this share, should Redis go away.
async fn wait_share(proxy: &Proxy, share: u32) {
    eventually(&format!("a share of {share}"), async || proxy.limit("llm").await["share"] == share)
        .await;
}

async fn wait_away(proxy: &Proxy, away: bool) {
    eventually(&format!("away: {away}"), async || proxy.status().await["store"]["away"] == away)
        .await;
}

fn get(proxy: &Proxy, path: impl Into<String>) -> JoinHandle<Answer> {
    let (addr, path) = (proxy.addr(), path.into());
    tokio::spawn(async move { Client::new().get(addr, &path).await })
}

async fn refused(proxy: &Proxy) {
    let answer = Client::new().get(proxy.addr(), "/gate").await;
    assert_eq!(
        (answer.status, answer.header("tidegate-reason")),
        (503, "store_down"),
        "{answer:?}"
    );
}

async fn admitted(proxy: &Proxy, way: &str) -> f64 {
    proxy.metric(&format!("tidegate_away_admitted_total{{way=\"{way}\"}}")).await
}

// === closed ===

#[tokio::test]
async fn closed_admits_nobody_while_redis_is_frozen() {
    closed_admits_nobody(Outage::Frozen).await;
}

#[tokio::test]
async fn closed_admits_nobody_while_redis_is_gone() {
    closed_admits_nobody(Outage::Killed).await;
}

async fn closed_admits_nobody(outage: Outage) {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = conf(&upstream, &redis, 3, CLOSED);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let running = [get(&a, "/gate?name=a"), get(&b, "/gate?name=b"), get(&b, "/gate?name=c")];
    upstream.wait_current(3).await;
    redis.wait_in_use("llm", 3).await;
    let first = get(&a, "/gate?name=first");
    redis.wait_waiting("llm", 1).await;
    let second = get(&a, "/gate?name=second");
    redis.wait_waiting("llm", 2).await;

    outage.begin(&mut redis).await;
    for proxy in [&a, &b] {
        wait_away(proxy, true).await;
        assert_eq!(proxy.admin_status("/readyz").await, Some(503));
        refused(proxy).await;
    }
    // One slot becomes free, for nobody; two leases go by.
    upstream.open_gate("a", 1);
    upstream.wait_current(2).await;
    sleep(2 * LEASE).await;
    refused(&a).await;
    assert_eq!((upstream.current(), upstream.total()), (2, 3));

    outage.end(&mut redis).await;
    // What ran runs, and who waited longest is next.
    upstream.wait_total(4).await;
    upstream.open_gate("first", 1);
    assert_eq!(first.await.unwrap().status, 200);
    for gate in ["b", "c", "second"] {
        upstream.open_gate(gate, 1);
    }
    for request in running.into_iter().chain([second]) {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (3, 5), "{outage:?}");
    redis.wait_in_use("llm", 0).await;
    for proxy in [&a, &b] {
        wait_away(proxy, false).await;
        assert_eq!(proxy.admin_status("/readyz").await, Some(200));
        let lines = |text: &str| proxy.log().matches(text).count();
        assert_eq!(lines("new requests are refused"), 1, "{}", proxy.log());
        assert_eq!(lines("the store answers again"), 1, "{}", proxy.log());
    }
}

// === local-share ===

#[tokio::test]
async fn h19_an_outage_of_ten_leases_refuses_nobody_while_redis_is_frozen() {
    an_outage_refuses_nobody(Outage::Frozen).await;
}

#[tokio::test]
async fn h19_an_outage_of_ten_leases_refuses_nobody_while_redis_is_gone() {
    an_outage_refuses_nobody(Outage::Killed).await;
}

async fn an_outage_refuses_nobody(outage: Outage) {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = conf(&upstream, &redis, 5, SHARE);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let (a, b) = (Arc::new(a), Arc::new(b));
    let served = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for proxy in [&a, &b].into_iter().cycle().take(8) {
        let (addr, served, done) = (proxy.addr(), Arc::clone(&served), Arc::clone(&done));
        clients.spawn(async move {
            let client = Client::new();
            while !done.load(Ordering::Relaxed) {
                let answer = client.get(addr, "/hold?ms=20").await;
                assert_eq!(answer.status, 200, "{answer:?}");
                served.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    eventually("both have a share", async || {
        a.limit("llm").await["share"].as_u64().unwrap()
            + b.limit("llm").await["share"].as_u64().unwrap()
            == 5
    })
    .await;

    outage.begin(&mut redis).await;
    sleep(10 * LEASE).await;
    for proxy in [&a, &b] {
        wait_away(proxy, true).await;
        assert_eq!(proxy.admin_status("/readyz").await, Some(200));
        assert!(admitted(proxy, "share").await > 100.0);
    }
    let before = served.load(Ordering::Relaxed);
    outage.end(&mut redis).await;
    for proxy in [&a, &b] {
        wait_away(proxy, false).await;
    }
    eventually("the store admits again", async || served.load(Ordering::Relaxed) > before + 200)
        .await;
    done.store(true, Ordering::Relaxed);
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    assert!(upstream.highest() <= 5, "{} at once, {outage:?}", upstream.highest());
    assert!(served.load(Ordering::Relaxed) > 1_000, "{served:?}");
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn bug_02_three_instances_without_redis_share_one_limit() {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = conf(&upstream, &redis, 6, SHARE);
    let proxies = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf), Proxy::spawn(&conf));
    let proxies = [proxies.0, proxies.1, proxies.2];
    for proxy in &proxies {
        wait_share(proxy, 2).await;
    }
    redis.kill9().await;
    let mut requests = Vec::new();
    for proxy in proxies.iter().cycle().take(18) {
        requests.push(get(proxy, "/gate"));
    }
    upstream.wait_current(6).await;
    // More would have come by now.
    sleep(LEASE).await;
    assert_eq!(upstream.total(), 6);

    redis.restart().await;
    for proxy in &proxies {
        wait_away(proxy, false).await;
    }
    redis.wait_in_use("llm", 6).await;
    assert_eq!(upstream.total(), 6);
    upstream.open(18);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (6, 18));
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn who_never_reached_redis_serves_nobody() {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = conf(&upstream, &redis, 4, SHARE);
    redis.kill9().await;
    let proxy = Proxy::spawn_unready(&conf).await;
    wait_away(&proxy, true).await;
    refused(&proxy).await;
    assert_eq!(proxy.admin_status("/readyz").await, Some(503));
    assert_eq!(upstream.total(), 0);

    redis.restart().await;
    eventually("ready", async || proxy.admin_status("/readyz").await == Some(200)).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
}

// === one instance alone is cut off ===

/// One that reaches Redis over a relay, and one that reaches it always.
async fn two(
    limit: &'static str,
    when_down: &'static str,
) -> (Upstream, Redis, Relay, Proxy, Proxy) {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    // Long enough for the first lease of an outage to be looked at.
    let near = conf(&upstream, &redis, 4, when_down).lease("4s").limit(limit);
    let far = near.clone().store_url(format!("redis://{}", relay.addr()));
    let (far, near) = tokio::join!(Proxy::spawn(&far), Proxy::spawn(&near));
    wait_share(&far, 2).await;
    (upstream, redis, relay, far, near)
}

#[tokio::test]
async fn who_is_cut_off_alone_adds_its_share_at_most() {
    let (upstream, redis, relay, far, near) = two("", SHARE).await;
    let mut requests = vec![get(&far, "/gate?name=far"), get(&near, "/gate")];
    upstream.wait_current(2).await;
    redis.wait_in_use("llm", 2).await;

    relay.shut();
    wait_away(&far, true).await;
    // One that was done here is succeeded, and nobody else is served for a lease.
    requests.extend((0..5).map(|_| get(&far, "/gate")));
    upstream.open_gate("far", 1);
    upstream.wait_total(3).await;
    assert_eq!((admitted(&far, "taken_over").await, upstream.current()), (1.0, 2));
    assert_eq!(redis.in_use("llm").await, 2);
    requests.extend((0..5).map(|_| get(&near, "/gate")));
    // Three here, one over there; when its lease is over, four here and two, its share, over there.
    upstream.wait_current(6).await;
    sleep(LEASE).await;
    assert_eq!((upstream.current(), upstream.highest()), (6, 6));

    relay.reopen();
    wait_away(&far, false).await;
    redis.wait_in_use("llm", 6).await;
    assert_eq!(upstream.highest(), 6);
    upstream.open(20);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!(upstream.highest(), 6);
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn who_is_cut_off_alone_adds_nothing_where_its_streams_are_cut() {
    let (upstream, redis, relay, far, near) = two("on_lease_lost = \"cut\"", CLOSED).await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut raw = Raw::get(far.addr(), "/sse?events=1&gate=1&name=far").await;
        raw.head().await;
        streams.push(raw);
    }
    redis.wait_in_use("llm", 3).await;
    // Renewed as long as Redis can be reached.
    sleep(2 * LEASE).await;
    assert_eq!(upstream.current(), 3);

    let requests: Vec<_> = (0..4).map(|_| get(&near, "/gate")).collect();
    relay.shut();
    for raw in streams {
        let rest = raw.read_to_end().await.unwrap_or_default();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "a proper end");
    }
    upstream.wait_total(7).await;
    upstream.wait_current(4).await;
    assert_eq!(upstream.highest(), 4);
    assert_eq!(far.metric("tidegate_lease_lost_total{limit=\"llm\"}").await, 3.0);
    upstream.open(4);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    relay.reopen();
    wait_away(&far, false).await;
    assert_eq!(Client::new().get(far.addr(), "/status/200").await.status, 200);
    assert_eq!(upstream.highest(), 4);
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn strict_recovery_outlasts_those_who_cannot_register_again() {
    let limit = "on_lease_lost = \"cut\"\nrecovery = \"strict\"";
    let (upstream, mut redis, relay, far, near) = two(limit, CLOSED).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut raw = Raw::get(far.addr(), "/sse?events=1&gate=1&name=far").await;
        raw.head().await;
        streams.push(raw);
    }
    relay.shut();
    redis.restart().await;
    // Or the requests would be refused at once, if Redis took long to start.
    wait_away(&near, false).await;
    // Redis has forgotten them, and they can't say that they run.
    let requests: Vec<_> = (0..4).map(|_| get(&near, "/gate")).collect();
    upstream.wait_total(8).await;
    assert_eq!(upstream.highest(), 4);
    upstream.open(4);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn h11_an_instance_that_was_frozen_forwards_no_byte_of_a_lost_lease() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    // Many, so that some are read before the timer comes to them.
    const SLOTS: usize = 40;
    let conf = conf(&upstream, &redis, SLOTS as u32, CLOSED).limit("on_lease_lost = \"cut\"");
    let (frozen, other) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let mut streams = Vec::new();
    for _ in 0..SLOTS {
        let mut raw = Raw::get(frozen.addr(), "/sse?events=3&gate=1&name=frozen").await;
        raw.head().await;
        streams.push(raw);
    }
    redis.wait_in_use("llm", SLOTS).await;

    frozen.sigstop();
    let successors: Vec<_> = (0..SLOTS).map(|_| get(&other, "/gate")).collect();
    upstream.wait_current(2 * SLOTS).await;
    // Three events of each and the end lie ready for it.
    upstream.open_gate("frozen", 4 * SLOTS);
    upstream.wait_current(SLOTS).await;
    frozen.sigcont();
    for raw in streams {
        let rest = raw.read_to_end().await.unwrap_or_default();
        assert!(rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
    }
    assert_eq!(redis.in_use("llm").await, SLOTS);
    upstream.open(SLOTS);
    for successor in successors {
        assert_eq!(successor.await.unwrap().status, 200);
    }
    redis.wait_in_use("llm", 0).await;
}

// === open ===

#[tokio::test]
async fn open_admits_everybody_and_says_so() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&conf(&upstream, &redis, 1, OPEN)).await;
    let mut requests = vec![get(&proxy, "/gate")];
    upstream.wait_current(1).await;
    requests.push(get(&proxy, "/gate"));
    redis.wait_waiting("llm", 1).await;

    redis.pause();
    requests.extend((0..6).map(|_| get(&proxy, "/gate")));
    upstream.wait_current(8).await;
    assert_eq!(proxy.admin_status("/readyz").await, Some(200));
    assert_eq!(admitted(&proxy, "open").await, 7.0);
    assert_eq!(proxy.log().matches("NO LIMIT holds").count(), 1, "{}", proxy.log());

    redis.resume();
    // Everyone is counted now, so the next one waits.
    redis.wait_in_use("llm", 8).await;
    requests.push(get(&proxy, "/gate"));
    redis.wait_waiting("llm", 1).await;
    upstream.open(9);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!(upstream.highest(), 8);
    redis.wait_in_use("llm", 0).await;
}
