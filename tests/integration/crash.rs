//! An instance that dies gives its slots back with its leases, its waiters block nobody, and one that wakes up late harms nobody.

use tokio::task::JoinHandle;

use crate::harness::{Answer, Client, Proxy, Raw, Redis, Upstream, one_limit};

#[tokio::test]
async fn the_slots_and_waiters_of_a_killed_instance_go_with_its_leases() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).lease("2s");
    let (mut killed, survivor) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));

    let _holders =
        [Raw::get(killed.addr(), "/silent").await, Raw::get(killed.addr(), "/silent").await];
    upstream.wait_current(2).await;
    let _first_in_the_queue = Raw::get(killed.addr(), "/silent").await;
    redis.wait_waiting("llm", 1).await;
    let behind = [request(&survivor), request(&survivor)];
    redis.wait_waiting("llm", 3).await;

    killed.kill9().await;

    for answer in behind {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    assert_eq!(upstream.highest(), 2);
    redis.wait_in_use("llm", 0).await;
    redis.wait_waiting("llm", 0).await;
}

#[tokio::test]
async fn a_late_release_frees_nobody_elses_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).lease("2s");
    let (frozen, other) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));

    let late = tokio::spawn({
        let addr = frozen.addr();
        async move { Client::new().get(addr, "/gate?name=late").await }
    });
    upstream.wait_current(1).await;
    frozen.sigstop();
    let successor = tokio::spawn({
        let addr = other.addr();
        async move { Client::new().get(addr, "/gate?name=successor").await }
    });
    upstream.wait_current(2).await;
    let holders = redis.holders("llm").await;
    assert_eq!(holders.len(), 1, "the frozen holder's lease is over");

    frozen.sigcont();
    upstream.open_gate("late", 1);
    assert_eq!(late.await.unwrap().status, 200);
    redis.wait_in_use("llm", 1).await;
    assert_eq!(redis.holders("llm").await, holders);
    let third = request(&frozen);
    redis.wait_waiting("llm", 1).await;
    assert_eq!(upstream.total(), 2);

    upstream.open_gate("successor", 1);
    assert_eq!(successor.await.unwrap().status, 200);
    assert_eq!(third.await.unwrap().status, 200);
    redis.wait_in_use("llm", 0).await;
}

fn request(proxy: &Proxy) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, "/status/200").await })
}
