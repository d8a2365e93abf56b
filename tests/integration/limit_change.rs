//! The lowest claim of living instances is in force: lowering acts at once, raising when the last old instance is gone.

use tokio::task::JoinHandle;

use crate::harness::{Answer, Client, Proxy, Redis, Upstream, eventually, one_limit};

#[tokio::test]
async fn raising_takes_effect_when_the_old_instance_is_gone() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis);
    let mut old = Proxy::spawn(&conf).await;
    let new = Proxy::spawn(&conf.slots(4)).await;
    let requests = get_many(&new, 4);
    upstream.wait_current(2).await;
    redis.wait_waiting("llm", 2).await;
    assert_eq!(new.limit("llm").await["slots"], 2);

    old.sigterm();
    assert_eq!(old.wait_exit().await.code(), Some(0));

    upstream.wait_current(4).await;
    upstream.open(4);
    served(requests).await;
    assert_eq!(upstream.highest(), 4);
}

#[tokio::test]
async fn lowering_acts_at_once_and_cuts_nobody() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 4).redis(&redis);
    let old = Proxy::spawn(&conf).await;
    let running = get_many(&old, 4);
    upstream.wait_current(4).await;

    let new = Proxy::spawn(&conf.slots(1)).await;
    eventually("the lower claim is in force", async || old.limit("llm").await["slots"] == 1).await;
    let waiting = get_many(&new, 2);
    redis.wait_waiting("llm", 2).await;
    assert_eq!(upstream.current(), 4);

    // Three finish and nobody follows; only with the fourth is there room under the new limit.
    upstream.open(3);
    upstream.wait_current(1).await;
    redis.wait_in_use("llm", 1).await;
    assert_eq!(redis.waiting("llm").await, 2);
    assert_eq!(upstream.total(), 4);
    upstream.open(1);
    served(running).await;
    upstream.wait_total(5).await;
    assert_eq!(redis.waiting("llm").await, 1);
    upstream.open(2);
    served(waiting).await;
    redis.wait_in_use("llm", 0).await;
}

fn get_many(proxy: &Proxy, requests: usize) -> Vec<JoinHandle<Answer>> {
    let addr = proxy.addr();
    let get = |_| tokio::spawn(async move { Client::new().get(addr, "/gate").await });
    (0..requests).map(get).collect()
}

async fn served(requests: Vec<JoinHandle<Answer>>) {
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
}
