//! The hazards of slots in Redis, by number, and reports of bugs in other software that must not happen here.
//!
//! | hazard | test |
//! |---|---|
//! | 1 long full pool | [`h01_a_pool_full_for_five_leases_never_vanishes`] |
//! | 2 burst | [`h02_a_burst_is_served_and_leaves_nothing`] |
//! | 3 idempotent acquire | `store_faults::a_lost_reply_takes_one_slot`, `store/tests/contract::an_id_is_never_counted_twice` |
//! | 4 unknown outcome, then given up | [`h04_an_acquire_that_arrives_after_its_client_left_takes_nothing`] |
//! | 5 renewal after release | [`h05_a_renewal_that_arrives_after_the_release_brings_nothing_back`] |
//! | 6 cancelled anywhere | [`h06_a_request_dropped_at_any_of_two_hundred_points_keeps_nothing`] |
//! | 7 client leaves in a stream | `client_gone` (eight ways, thirteen rounds each); beside others: hazard 6 |
//! | 8 held to the end of the body | `streaming::a_stream_holds_its_slot_to_its_end`, `answers_without_a_body_…`, `trailers_…` |
//! | 10 an instance dies | [`h10_the_slots_of_a_killed_instance_come_back_with_its_leases_and_no_sooner`], `crash` |
//! | 11 an instance freezes | `away::h11_an_instance_that_was_frozen_…`, `crash::a_late_release_…` |
//! | 14 scripts flushed | `store_faults::scripts_flushed_under_load_fail_no_request`, `store/tests/over_redis::the_next_link_loads_…` |
//! | 17 failover with lost writes | [`failover::h17_a_failover_that_loses_the_latest_grants_passes_no_limit_under_strict`], `chaos` |
//! | 18 split brain | [`failover::h18_an_instance_on_the_losing_side_of_a_split_serves_nobody`] |
//! | 19 Redis unreachable | `away::h19_…`, `away` (frozen, killed, cut off; closed, local-share, open) |
//! | 22 another limit | [`h22_a_limit_goes_from_five_to_two_to_eight_under_load`], `limit_change` |
//! | 23 wake-up | [`h23_a_release_wakes_one_waiter_and_nobody_polls`] |
//! | 24 priority, ageing, weights | [`full::h24_the_right_one_is_next_whatever_it_weighs_and_wherever_it_waits`], `fairness::a_flood_…` |
//! | 25 bounds of the queue, drain | [`full::h25_ten_thousand_at_once_are_refused_apart_and_leave_nothing`] |
//! | bug 1 slots of cancelled and failed requests leak | [`bugs::bug_01_no_way_to_end_leaks_a_slot`] |
//! | bug 2 every instance falls back on the whole limit | `away::bug_02_three_instances_without_redis_share_one_limit` |
//! | bug 3 a release is lost once | [`bugs::bug_03_a_lost_release_is_said_again`], `crash` |
//! | bug 5 jobs longer than the lock | [`h01_a_pool_full_for_five_leases_never_vanishes`], `streaming::a_stream_of_three_leases_keeps_its_slot` |
//! | bug 7 a fair queue loses the living or waits for the dead | [`bugs::bug_07_a_dead_head_goes_and_a_living_waiter_stays`] |
//! | bug 9 a release needs the limit | [`bugs::bug_09_a_release_needs_no_limit`] |
//! | bug 11 a head that leaves wakes nobody | [`bugs::bug_11_a_heavy_head_that_leaves_lets_the_next_one_in`]; at once: `store/tests/contract::a_heavy_head_…` |
//! | bug 12 connection lost while acquiring | [`bugs::bug_12_a_connection_lost_a_hundred_times_while_acquiring_leaves_nothing`] |
//! | bug 13 a cancelled command's reply is read by the next | [`bugs::bug_13_replies_of_cancelled_acquires_are_nobody_elses`] |
//! | bug 15 released at the head | [`bugs::bug_15_eight_streams_through_two_slots`] |
//! | bug 19 an empty limiter is new, or 0, or the old one | [`bugs::bug_19_an_emptied_limit_is_neither_new_nor_zero_nor_the_old_one`] |

use std::{collections::HashSet, time::Duration};

use fastrand::Rng;
use tokio::task::{JoinHandle, JoinSet};

use crate::harness::{
    Answer, Client, Conf, Proxy, Raw, Redis, Relay, Upstream, eventually, get, one_limit,
};

mod bugs;
mod failover;
mod full;

#[tokio::test]
async fn h01_a_pool_full_for_five_leases_never_vanishes() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 3).redis(&redis).lease("2s").queue("0");
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let client = Client::new();
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(client.events(a.addr(), "/sse?events=1&gate=1").await);
    }
    let mut holders = redis.holders("llm").await;
    let taken = redis.score("sem:llm", &holders[2]).await.unwrap();

    eventually("five leases have passed", async || {
        for proxy in [&a, &b] {
            let refused = client.get(proxy.addr(), "/status/200").await;
            assert_eq!((refused.status, refused.header("tidegate-reason")), (503, "queue_full"));
        }
        assert_eq!(redis.cli::<u32>(&["EXISTS", "sem:llm"]).await, 1);
        redis.score("sem:llm", &holders[0]).await.unwrap() >= taken + 10_000.0
    })
    .await;

    let mut still = redis.holders("llm").await;
    holders.sort();
    still.sort();
    assert_eq!(still, holders);
    upstream.open(6);
    for mut events in streams {
        assert_eq!(events.next().await.as_deref(), Some("1"));
        assert_eq!(events.next().await, None);
    }
    assert_eq!((upstream.highest(), upstream.total()), (3, 3));
    redis.wait_in_use("llm", 0).await;
    assert_eq!(client.get(b.addr(), "/status/200").await.status, 200);
}

#[tokio::test]
async fn h02_a_burst_is_served_and_leaves_nothing() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 5).redis(&redis);
    let (a, b, c) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf), Proxy::spawn(&conf));
    let proxies = [a, b, c];
    let mut burst = JoinSet::new();
    for proxy in proxies.iter().cycle().take(500) {
        let addr = proxy.addr();
        burst.spawn(async move { Client::new().get(addr, "/hold?ms=50").await.status });
    }
    assert!(burst.join_all().await.iter().all(|&status| status == 200));
    assert_eq!((upstream.highest(), upstream.total()), (5, 500));
    redis.wait_in_use("llm", 0).await;
    assert_eq!(redis.waiting("llm").await, 0);
    for proxy in &proxies {
        let limit = proxy.limit("llm").await;
        assert_eq!((&limit["in_use"], &limit["local"]), (&0.into(), &0.into()));
    }
}

#[tokio::test]
async fn h04_an_acquire_that_arrives_after_its_client_left_takes_nothing() {
    let (upstream, redis, relay) = store_behind_a_relay().await;
    let proxy = Proxy::spawn(&through(&relay, &upstream, 1)).await;
    let acquire = scripts_of_a_request(&redis, &proxy).await;

    relay.hold_requests();
    let client = Raw::get(proxy.addr(), "/silent").await;
    relay.wait_held(&acquire).await;
    drop(client);
    relay.cut();
    // Served, so the new connection is known to the scripts.
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    redis.wait_in_use("llm", 0).await;

    stale(&relay.deliver_held().await);
    assert_eq!((redis.in_use("llm").await, redis.waiting("llm").await), (0, 0));
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    assert_eq!(upstream.total(), 3);
}

#[tokio::test]
async fn h05_a_renewal_that_arrives_after_the_release_brings_nothing_back() {
    let (upstream, redis, relay) = store_behind_a_relay().await;
    // With so short a lease every heartbeat renews.
    let conf = through(&relay, &upstream, 1).lease("4s").store("op_timeout = \"1s\"");
    let proxy = Proxy::spawn(&conf).await;
    let request = spawn_get(&proxy, "/gate");
    upstream.wait_current(1).await;
    let holders = redis.holders("llm").await;

    relay.hold_requests();
    relay.wait_held(&holders).await;
    // What is held up is the renewal: the slot isn't released before the gate opens, and that goes over another connection.
    relay.cut();
    upstream.open(1);
    assert_eq!(request.await.unwrap().status, 200);
    redis.wait_in_use("llm", 0).await;

    stale(&relay.deliver_held().await);
    assert_eq!(redis.score("sem:llm", &holders[0]).await, None);
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
}

#[tokio::test]
async fn h06_a_request_dropped_at_any_of_two_hundred_points_keeps_nothing() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 3).redis(&redis).upstream("linger = \"10ms\"");
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let proxies = [&a, &b];

    // With every slot taken nobody gets further than the queue.
    let mut holders = Vec::new();
    for _ in 0..3 {
        holders.push(Raw::get(a.addr(), "/silent").await);
    }
    upstream.wait_current(3).await;
    come_and_leave_at_random(proxies, 6, None).await;
    redis.wait_waiting("llm", 0).await;
    assert_eq!((redis.in_use("llm").await, upstream.total()), (3, 3));

    // With the slots free some get all the way.
    drop(holders);
    redis.wait_in_use("llm", 0).await;
    come_and_leave_at_random(proxies, 7, Some("text/event-stream")).await;
    redis.wait_waiting("llm", 0).await;
    redis.wait_in_use("llm", 0).await;
    upstream.wait_current(0).await;
    assert!(upstream.total() > 3, "nobody got as far as the upstream");
    assert_eq!(upstream.highest(), 3);
    for proxy in proxies {
        let answers = [(); 4].map(|()| spawn_get(proxy, "/status/200"));
        for answer in answers {
            assert_eq!(answer.await.unwrap().status, 200);
        }
    }
}

/// A hundred clients, ten at a time, each of which leaves at a moment of its own: within its head, right behind it, somewhat later,
/// or, where there is something to read, in the middle of its answer.
async fn come_and_leave_at_random(proxies: [&Proxy; 2], seed: u64, readable: Option<&'static str>) {
    let mut clients = JoinSet::new();
    for point in 0..100 {
        let mut random = Rng::with_seed(seed << 32 | point);
        let addr = random.choice(proxies).unwrap().addr();
        clients.spawn(async move {
            let stage = random.u8(..4);
            let path = match (stage, readable) {
                (3, Some(_)) => "/sse?events=1&gate=1",
                _ => random.choice(["/silent", "/hold?ms=3"]).unwrap(),
            };
            let request = get(path);
            let end = if stage == 0 { random.usize(..request.len()) } else { request.len() };
            let mut client = Raw::connect(addr).await;
            client.write(&request[..end]).await.unwrap();
            match (stage, readable) {
                (0 | 1, _) => {}
                (3, Some(text)) => _ = client.read_until(text).await,
                _ => tokio::time::sleep(Duration::from_micros(random.u64(..15_000))).await,
            }
            if random.bool() {
                client.reset();
            }
        });
        if clients.len() == 10 {
            clients.join_next().await.unwrap().unwrap();
        }
    }
    clients.join_all().await;
}

#[tokio::test]
async fn h10_the_slots_of_a_killed_instance_come_back_with_its_leases_and_no_sooner() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 3).redis(&redis).lease("2s");
    let (mut killed, survivor) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let dead = [(); 3].map(|()| spawn_get(&killed, "/silent"));
    upstream.wait_current(3).await;
    let holders = redis.holders("llm").await;
    let _dead_waiter = spawn_get(&killed, "/silent");
    redis.wait_waiting("llm", 1).await;
    let heirs = [(); 3].map(|()| spawn_get(&survivor, "/gate"));
    redis.wait_waiting("llm", 4).await;

    killed.kill9().await;
    // Nobody renews any more.
    let mut taken = Vec::new();
    for holder in &holders {
        taken.push(redis.score("sem:llm", holder).await.unwrap());
    }
    upstream.wait_total(6).await;
    assert_eq!(redis.in_use("llm").await, 3);
    taken.sort_by(f64::total_cmp);
    let mut inherited = Vec::new();
    for heir in redis.holders("llm").await {
        assert!(!holders.contains(&heir));
        inherited.push(redis.score("sem:llm", &heir).await.unwrap());
    }
    inherited.sort_by(f64::total_cmp);
    // By the clock of Redis, each was taken a lease after the last renewal of the one before.
    for (taken, inherited) in taken.into_iter().zip(inherited) {
        assert!(inherited >= taken + 2_000.0, "renewed at {taken}, inherited at {inherited}");
    }

    upstream.open(3);
    for heir in heirs {
        assert_eq!(heir.await.unwrap().status, 200);
    }
    redis.wait_in_use("llm", 0).await;
    assert_eq!((redis.waiting("llm").await, upstream.highest()), (0, 3));
    drop(dead);
}

#[tokio::test]
async fn h22_a_limit_goes_from_five_to_two_to_eight_under_load() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 5).redis(&redis).server("drain_timeout = \"10m\"");
    let (mut a5, mut b5) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let client = Client::new();
    let mut streams = Vec::new();
    for proxy in [&a5, &b5, &a5, &b5, &a5] {
        streams.push(client.events(proxy.addr(), "/sse?events=1&gate=1&name=five").await);
    }

    // Both are replaced, one after the other, while their streams run.
    let conf = conf.slots(2);
    let mut a2 = Proxy::spawn(&conf).await;
    eventually("the lower claim is in force", async || a2.limit("llm").await["slots"] == 2).await;
    a5.sigterm();
    let mut b2 = Proxy::spawn(&conf).await;
    b5.sigterm();
    let under_two = [spawn_get(&a2, "/gate"), spawn_get(&b2, "/gate")];
    redis.wait_waiting("llm", 2).await;
    assert_eq!((upstream.current(), redis.in_use("llm").await), (5, 5));

    upstream.open_gate("five", 5);
    for events in &mut streams {
        assert_eq!(events.next().await.as_deref(), Some("1"));
    }
    // Each end of a stream gives a slot back: nobody gets it before the last but one.
    for (ended, total) in [(1, 5), (2, 5), (3, 5), (4, 6), (5, 7)] {
        upstream.open_gate("five", 1);
        upstream.wait_total(total).await;
        redis.wait_in_use("llm", (5 - ended).max(2)).await;
        assert_eq!(upstream.total(), total, "after {ended} streams");
        assert_eq!(redis.waiting("llm").await, 7 - total, "after {ended} streams");
    }
    for mut events in streams {
        assert_eq!(events.next().await, None);
    }
    for old in [&mut a5, &mut b5] {
        assert_eq!(old.wait_exit().await.code(), Some(0));
    }
    upstream.open(2);
    served(under_two).await;
    redis.wait_in_use("llm", 0).await;

    let conf = conf.slots(8);
    let (a8, b8) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let running = [spawn_get(&a8, "/gate?name=eight"), spawn_get(&b8, "/gate?name=eight")];
    upstream.wait_current(2).await;
    let waiting = [&a8, &b8, &a8, &b8, &a8, &b8].map(|proxy| spawn_get(proxy, "/gate?name=eight"));
    redis.wait_waiting("llm", 6).await;
    a2.sigterm();
    assert_eq!(a2.wait_exit().await.code(), Some(0));
    assert_eq!((redis.waiting("llm").await, redis.in_use("llm").await), (6, 2));
    b2.sigterm();
    assert_eq!(b2.wait_exit().await.code(), Some(0));
    upstream.wait_current(8).await;
    assert_eq!((redis.waiting("llm").await, redis.in_use("llm").await), (0, 8));
    upstream.open_gate("eight", 8);
    served(running).await;
    served(waiting).await;
    assert_eq!((upstream.highest(), upstream.total()), (8, 15));
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn h23_a_release_wakes_one_waiter_and_nobody_polls() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis);
    let (a, b, c) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf), Proxy::spawn(&conf));
    let heartbeat = heartbeats(&redis, 6).await;
    let requests = [&a, &b, &c, &a].map(|proxy| spawn_get(proxy, "/gate"));
    redis.wait_waiting("llm", 3).await;
    upstream.wait_current(1).await;

    // They wait: there are heartbeats, and nothing but heartbeats.
    assert_eq!(heartbeats(&redis, 9).await, heartbeat);
    for total in 2..=4 {
        if total > 2 {
            // Just before: the hand-over has to do without.
            redis.cli::<usize>(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        }
        upstream.open(1);
        upstream.wait_total(total).await;
        assert_eq!((redis.in_use("llm").await, redis.waiting("llm").await), (1, 4 - total));
        assert_eq!((upstream.current(), upstream.total()), (1, total));
    }
    upstream.open(1);
    served(requests).await;
    assert_eq!(upstream.highest(), 1);
    redis.wait_in_use("llm", 0).await;
}

/// Waits for so many script calls; which scripts they were.
async fn heartbeats(redis: &Redis, calls: usize) -> HashSet<String> {
    redis.log_calls().await;
    let mut scripts = Vec::new();
    eventually("heartbeats", async || {
        scripts = redis.logged_scripts().await;
        scripts.len() >= calls
    })
    .await;
    scripts.into_iter().collect()
}

async fn store_behind_a_relay() -> (Upstream, Redis, Relay) {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    (upstream, redis, relay)
}

/// A limit whose store is patient and behind the relay.
fn through(relay: &Relay, upstream: &Upstream, slots: u32) -> Conf {
    one_limit(upstream, slots)
        .store_url(format!("redis://{}", relay.addr()))
        .store("op_timeout = \"5s\"")
        .upstream("linger = \"10ms\"")
}

/// The scripts that a request needs and a heartbeat doesn't.
async fn scripts_of_a_request(redis: &Redis, proxy: &Proxy) -> Vec<String> {
    let heartbeat = heartbeats(redis, 2).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    redis.wait_in_use("llm", 0).await;
    let all: HashSet<_> = redis.logged_scripts().await.into_iter().collect();
    let scripts: Vec<_> = all.difference(&heartbeat).cloned().collect();
    assert!(!scripts.is_empty());
    scripts
}

/// Whether Redis replied that the caller has a newer connection, to everything.
fn stale(replies: &str) {
    let replies = replies.replace("+PONG\r\n", "");
    assert!(!replies.is_empty(), "nothing came late");
    assert_eq!(replies.replace("*1\r\n:-1\r\n", ""), "", "not stale: {replies}");
}

async fn served<const N: usize>(requests: [JoinHandle<Answer>; N]) {
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
}

fn spawn_get(proxy: &Proxy, path: &'static str) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, path).await })
}
