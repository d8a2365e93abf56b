//! The lowest claim of living instances is in force: lowering acts at once, raising when the last old instance is gone.

use tokio::task::JoinHandle;

use crate::harness::{
    Answer, Client, Proxy, Redis, Relay, Upstream, eventually, one_limit, run_to_end,
};

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

#[tokio::test]
async fn a_change_that_could_not_be_made_is_not_made_later() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let relay = Relay::to(redis.addr()).await;
    let url = format!("redis://{}", relay.addr());
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).store_url(url)).await;
    relay.shut();
    eventually("it is known to be away", async || proxy.status().await["store"]["up"] == false)
        .await;
    let admin = format!("http://{}", proxy.admin());
    let ended = run_to_end(&["limit", "llm", "--slots", "4", "--admin", &admin]).await;
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && said.contains("nothing was changed"), "{said}");

    relay.reopen();
    eventually("it is back", async || proxy.status().await["store"]["up"] == true).await;
    // A newer order would be behind an older one.
    let ended = run_to_end(&["limit", "llm", "--slots", "3", "--admin", &admin]).await;
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let order: String = redis.cli(&["HGET", "sem:llm:meta", "override"]).await;
    assert!(order.starts_with("1 3 "), "{order}");
    assert!(run_to_end(&["limit", "llm", "--reset", "--admin", &admin]).await.status.success());
    let log = proxy.log();
    assert_eq!(log.matches("an operator set the slots of a limit").count(), 1, "{log}");
    assert_eq!(log.matches("an operator gave a limit its configured slots back").count(), 1);
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
