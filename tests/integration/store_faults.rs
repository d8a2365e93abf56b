//! What goes wrong with Redis stays with Redis: no failed request, no lost slot, no request too many at the upstream.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::task::{JoinHandle, JoinSet};

use crate::harness::{Answer, Client, Proxy, Redis, Relay, Upstream, one_limit};

#[tokio::test]
async fn scripts_flushed_under_load_fail_no_request() {
    static SERVED: AtomicUsize = AtomicUsize::new(0);
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 3).redis(&redis)).await;
    let mut clients = JoinSet::new();
    for _ in 0..12 {
        let addr = proxy.addr();
        clients.spawn(async move {
            let client = Client::new();
            for _ in 0..50 {
                let answer = client.get(addr, "/hold?ms=2").await;
                assert_eq!(answer.status, 200, "{answer:?}");
                SERVED.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut flushed = 0;
    while SERVED.load(Ordering::Relaxed) < 600 && !clients.is_empty() {
        redis.cli::<()>(&["SCRIPT", "FLUSH"]).await;
        flushed += 1;
        let served = SERVED.load(Ordering::Relaxed);
        while SERVED.load(Ordering::Relaxed) < (served + 20).min(600) {
            match clients.try_join_next() {
                Some(client) => client.unwrap(),
                None => tokio::task::yield_now().await,
            }
        }
    }
    clients.join_all().await;
    assert!(flushed >= 5, "flushed {flushed} times only");
    assert_eq!((upstream.highest(), upstream.total()), (3, 600));
    assert!(redis.script_calls().await > 0, "Redis was never asked");
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn waiters_are_served_without_a_subscription() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let requests = [get(&a, "/gate"), get(&b, "/gate"), get(&a, "/gate"), get(&b, "/gate")];
    redis.wait_waiting("llm", 3).await;

    for _ in &requests {
        let cut: usize = redis.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        eprintln!("{cut} subscriptions cut");
        upstream.open(1);
    }

    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (1, 4));
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn a_lost_reply_takes_one_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    let conf = one_limit(&upstream, 2)
        .store_url(format!("redis://{}", relay.addr()))
        .store("op_timeout = \"5s\"");
    let proxy = Proxy::spawn(&conf).await;

    for round in 1..=10 {
        relay.lose_replies();
        let request = get(&proxy, "/gate");
        redis.wait_in_use("llm", 1).await;
        relay.cut();
        // Asked again, under the same id.
        upstream.wait_current(1).await;
        assert_eq!(redis.in_use("llm").await, 1, "round {round}");
        assert_eq!(upstream.total(), round);
        upstream.open(1);
        assert_eq!(request.await.unwrap().status, 200);
        redis.wait_in_use("llm", 0).await;
    }
}

#[tokio::test]
async fn a_lost_reply_to_one_that_gave_up_takes_no_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    let conf = one_limit(&upstream, 1)
        .store_url(format!("redis://{}", relay.addr()))
        .store("op_timeout = \"5s\"");
    let proxy = Proxy::spawn(&conf).await;

    relay.lose_replies();
    let request = get(&proxy, "/silent");
    redis.wait_in_use("llm", 1).await;
    request.abort();
    relay.cut();
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn late_replies_are_only_late() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    let conf = one_limit(&upstream, 3).store_url(format!("redis://{}", relay.addr()));
    let proxy = Proxy::spawn(&conf).await;
    relay.delay(Duration::from_millis(50));
    let requests: Vec<_> = (0..30).map(|_| get(&proxy, "/hold?ms=5")).collect();
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert!(upstream.highest() <= 3, "{} at once", upstream.highest());
    assert!(redis.script_calls().await > 0, "Redis was never asked");
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn a_frozen_redis_admits_nobody_and_loses_nothing() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).store("op_timeout = \"400ms\"");
    let proxy = Proxy::spawn(&conf).await;
    let holder = get(&proxy, "/gate");
    upstream.wait_current(1).await;
    assert_eq!(redis.in_use("llm").await, 1);
    redis.pause();
    // Served or refused, but never beside the holder.
    let second = get(&proxy, "/gate");
    upstream.open(1);
    assert_eq!(holder.await.unwrap().status, 200);
    redis.resume();
    upstream.open(1);
    second.await.unwrap();
    assert_eq!(upstream.highest(), 1);
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn holders_register_again_after_a_restart_that_lost_everything() {
    holders_survive(async |redis| redis.restart().await).await;
}

#[tokio::test]
async fn holders_register_again_after_flushall() {
    holders_survive(async |redis| redis.cli(&["FLUSHALL"]).await).await;
}

#[tokio::test]
async fn holders_register_again_after_their_key_is_gone() {
    holders_survive(async |redis| redis.cli(&["DEL", "sem:llm"]).await).await;
}

async fn holders_survive(lose: impl AsyncFnOnce(&mut Redis)) {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let running = [get(&a, "/gate"), get(&b, "/gate")];
    upstream.wait_current(2).await;
    let holders = redis.holders("llm").await;
    let waiting = [get(&a, "/gate"), get(&b, "/gate")];
    redis.wait_waiting("llm", 2).await;

    lose(&mut redis).await;

    redis.wait_in_use("llm", 2).await;
    redis.wait_waiting("llm", 2).await;
    let mut again = redis.holders("llm").await;
    again.sort_by_key(|id| holders.iter().position(|holder| holder == id));
    assert_eq!(again, holders);
    assert_eq!(upstream.total(), 2);

    upstream.open(4);
    for request in running.into_iter().chain(waiting) {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!(upstream.highest(), 2);
    redis.wait_in_use("llm", 0).await;
}

fn get(proxy: &Proxy, path: &'static str) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, path).await })
}
