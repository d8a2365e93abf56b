//! Reports of bugs in other software that must not happen here, by the number of the study.

use bytes::Bytes;
use http::Method;

use super::*;
use crate::harness::{config_file, run_to_end};

#[tokio::test]
async fn bug_01_no_way_to_end_leaks_a_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 4).redis(&redis).upstream("linger = \"10ms\"");
    let proxy = Proxy::spawn(&conf).await;
    let empty = async |total: usize| {
        redis.wait_in_use("llm", 0).await;
        assert_eq!(redis.waiting("llm").await, 0);
        assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
        redis.wait_in_use("llm", 0).await;
        assert_eq!(upstream.total(), total + 1);
    };

    let cancelled: Vec<_> = (0..20)
        .map(|number| {
            let (name, addr) = (format!("cancelled{number}"), proxy.addr());
            upstream.open_gate(&name, 1);
            tokio::spawn(async move {
                let mut client = Raw::get(addr, &format!("/sse?events=2&gate=1&name={name}")).await;
                client.read_until("data: 1").await;
            })
        })
        .collect();
    for client in cancelled {
        client.await.unwrap();
    }
    empty(20).await;

    for (path, status, total) in [("/sse?events=3", 200, 41), ("/status/504", 504, 62)] {
        let answers: Vec<_> = (0..20).map(|_| spawn_get(&proxy, path)).collect();
        for answer in answers {
            assert_eq!(answer.await.unwrap().status, status);
        }
        empty(total).await;
    }
    assert!(upstream.highest() <= 4, "{} at once", upstream.highest());
}

#[tokio::test]
async fn bug_03_a_lost_release_is_said_again() {
    let (upstream, redis, relay) = store_behind_a_relay().await;
    let proxy = Proxy::spawn(&through(&relay, &upstream, 1)).await;
    for round in 1..=5 {
        let request = spawn_get(&proxy, "/gate");
        upstream.wait_current(1).await;
        let holders = redis.holders("llm").await;
        // The lease is ten minutes, so the id goes by in its release alone.
        relay.hold_requests();
        upstream.open(1);
        assert_eq!(request.await.unwrap().status, 200);
        relay.wait_held(&holders).await;
        assert_eq!(redis.holders("llm").await, holders, "round {round}");
        relay.cut();
        relay.lose_held();
        redis.wait_in_use("llm", 0).await;
    }
    assert_eq!(upstream.total(), 5);
}

#[tokio::test]
async fn bug_12_a_connection_lost_a_hundred_times_while_acquiring_leaves_nothing() {
    let (upstream, redis, relay) = store_behind_a_relay().await;
    let proxy = Proxy::spawn(&through(&relay, &upstream, 1)).await;
    for round in 0..100 {
        relay.lose_replies();
        let client = Raw::get(proxy.addr(), "/silent").await;
        // Where the latest release and a heartbeat lost their replies as well, no further call goes out on that connection.
        let taken = redis.wait_in_use("llm", 1);
        if tokio::time::timeout(Duration::from_secs(3), taken).await.is_err() {
            relay.cut();
            redis.wait_in_use("llm", 1).await;
        }
        if round % 2 == 0 {
            drop(client);
            relay.cut();
        } else {
            relay.cut();
            upstream.wait_current(1).await;
            drop(client);
        }
        redis.wait_in_use("llm", 0).await;
        upstream.wait_current(0).await;
    }
    assert_eq!((redis.waiting("llm").await, upstream.highest()), (0, 1));
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
}

#[tokio::test]
async fn bug_13_replies_of_cancelled_acquires_are_nobody_elses() {
    let (upstream, redis, relay) = store_behind_a_relay().await;
    let proxy = Proxy::spawn(&through(&relay, &upstream, 3)).await;
    let addr = proxy.addr();
    relay.delay(Duration::from_millis(2));
    let mut random = Rng::with_seed(13);
    let mut requests = Vec::new();
    for number in 0..200 {
        let body = Bytes::from(format!("request {number}"));
        let request = tokio::spawn(async move {
            let answer = Client::new().send(Method::POST, addr, "/echo", body.clone()).await;
            let answer = answer.unwrap();
            assert_eq!((answer.status, answer.body), (200, body));
        });
        if random.bool() {
            // Cancelled with its acquire on the way, or a little later.
            for _ in 0..random.u8(..20) {
                tokio::task::yield_now().await;
            }
            request.abort();
        } else {
            requests.push(request);
        }
    }
    for request in requests {
        request.await.unwrap();
    }
    // A grant that reached the wrong request would have been one too many.
    assert!(upstream.highest() <= 3, "{} at once", upstream.highest());
    redis.wait_waiting("llm", 0).await;
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn bug_15_eight_streams_through_two_slots() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).redis(&redis)).await;
    let client = Client::new();
    let mut first = [
        client.events(proxy.addr(), "/sse?events=2&gate=1").await,
        client.events(proxy.addr(), "/sse?events=2&gate=1").await,
    ];
    let streams = [(); 6].map(|()| spawn_get(&proxy, "/sse?events=2&gate=1"));
    redis.wait_waiting("llm", 6).await;
    upstream.open(2);
    for events in &mut first {
        assert_eq!(events.next().await.as_deref(), Some("1"));
    }
    assert_eq!((redis.waiting("llm").await, upstream.total()), (6, 2));
    upstream.open(22);
    for mut events in first {
        assert_eq!(events.next().await.as_deref(), Some("2"));
        assert_eq!(events.next().await, None);
    }
    served(streams).await;
    assert_eq!((upstream.highest(), upstream.total()), (2, 8));
    redis.wait_in_use("llm", 0).await;
}

/// A head that weighs or ranks as its headers say, without an answer yet.
fn weighing(weight: u32) -> String {
    format!("GET /gate HTTP/1.1\r\nhost: test\r\nx-weight: {weight}\r\n\r\n")
}

#[tokio::test]
async fn bug_07_a_dead_head_goes_and_a_living_waiter_stays() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    // Present for a second and a half after each heartbeat.
    let conf = one_limit(&upstream, 1).redis(&redis).lease("2s");
    let (a, mut b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let holder = spawn_get(&a, "/gate");
    upstream.wait_current(1).await;
    let _head = spawn_get(&b, "/gate");
    redis.wait_waiting("llm", 1).await;
    let living = spawn_get(&a, "/gate");
    redis.wait_waiting("llm", 2).await;
    b.kill9().await;
    // The dead one is dropped although nothing is released; the living one waits on, for longer than the dead one was believed in.
    redis.wait_waiting("llm", 1).await;
    eventually("three seconds", async || {
        a.limit("llm").await["oldest_wait_ms"].as_u64().unwrap() >= 3_000
    })
    .await;
    assert_eq!((redis.waiting("llm").await, upstream.total()), (1, 1));
    upstream.open(2);
    served([holder, living]).await;
    assert_eq!(upstream.highest(), 1);
}

#[tokio::test]
async fn bug_09_a_release_needs_no_limit() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).redis(&redis)).await;
    let requests = [spawn_get(&proxy, "/gate"), spawn_get(&proxy, "/gate")];
    upstream.wait_current(2).await;
    // Whoever reads now finds neither slots nor lease.
    assert_eq!(redis.cli::<u32>(&["DEL", "sem:llm:meta"]).await, 1);
    upstream.open(2);
    served(requests).await;
    redis.wait_in_use("llm", 0).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    assert_eq!(proxy.limit("llm").await["slots"], 2);
}

#[tokio::test]
async fn bug_11_a_heavy_head_that_leaves_lets_the_next_one_in() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2)
        .redis(&redis)
        .server("trusted_proxies = [\"127.0.0.1/32\"]")
        .route("weight = { header = \"x-weight\", max = 2 }");
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let holder = spawn_get(&a, "/gate");
    upstream.wait_current(1).await;
    let mut heavy = Raw::connect(b.addr()).await;
    heavy.write(weighing(2)).await.unwrap();
    redis.wait_waiting("llm", 1).await;
    let light = spawn_get(&a, "/gate");
    redis.wait_waiting("llm", 2).await;
    assert_eq!(redis.in_use("llm").await, 1);
    drop(heavy);
    upstream.wait_current(2).await;
    upstream.open(2);
    served([holder, light]).await;
    redis.wait_in_use("llm", 0).await;
    assert_eq!(upstream.total(), 2);
}

#[tokio::test]
async fn bug_19_an_emptied_limit_is_neither_new_nor_zero_nor_the_old_one() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let streams = [spawn_get(&a, "/gate"), spawn_get(&b, "/gate")];
    upstream.wait_current(2).await;
    let mut taken = redis.holders("llm").await;
    taken.sort();

    let lose = async || {
        redis.cli::<u32>(&["DEL", "sem:llm", "sem:llm:meta", "sem:llm:info"]).await;
    };
    let recovered = async || {
        eventually("recovery is over", async || {
            let began: Option<u64> = redis.cli(&["HGET", "tidegate:fleet", "recovery"]).await;
            let (now, _): (u64, u64) = redis.cli(&["TIME"]).await;
            redis.in_use("llm").await == 2 && began.is_some_and(|began| now * 1_000 > began + 3_000)
        })
        .await;
    };
    // It is empty, but not new.
    lose().await;
    let third = spawn_get(&a, "/gate");
    recovered().await;
    let mut counted = redis.holders("llm").await;
    counted.sort();
    assert_eq!((counted, upstream.total()), (taken, 2));
    redis.wait_waiting("llm", 1).await;

    // A configuration that makes no sense claims nothing.
    for slots in ["-1", "\"many\"", ""] {
        let text = conf.text(a.addr(), a.admin()).replace("slots = 2", &format!("slots = {slots}"));
        let (_dir, file) = config_file(&text);
        let ended = run_to_end(&["run", "--config", file.to_str().unwrap()]).await;
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    }
    assert_eq!((&a.limit("llm").await["slots"], upstream.total()), (&2.into(), 2));

    // An order outlives the loss: what was configured doesn't come back.
    let admin = format!("http://{}", a.admin());
    let raised = run_to_end(&["limit", "llm", "--slots", "3", "--admin", &admin]).await;
    assert_eq!(raised.status.code(), Some(0), "{raised:?}");
    upstream.wait_current(3).await;
    eventually("both remember", async || {
        a.limit("llm").await["slots"] == 3 && b.limit("llm").await["slots"] == 3
    })
    .await;
    lose().await;
    eventually("it is in force again", async || {
        redis.in_use("llm").await == 3
            && a.limit("llm").await["slots"] == 3
            && b.limit("llm").await["slots"] == 3
    })
    .await;
    upstream.open(3);
    served(streams).await;
    assert_eq!(third.await.unwrap().status, 200);
    assert_eq!(upstream.highest(), 3);
}
