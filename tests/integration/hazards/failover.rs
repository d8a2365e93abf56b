//! The hazards of a replica that lacks what its primary knew, and of a primary that doesn't know that it is none any more.

use super::*;
use crate::harness::Replicated;

const STRICT: &str = "recovery = \"strict\"\non_lease_lost = \"cut\"";

fn gate(proxy: &Proxy) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, "/gate").await })
}

#[tokio::test]
async fn h17_a_failover_that_loses_the_latest_grants_passes_no_limit_under_strict() {
    let upstream = Upstream::spawn().await;
    let mut redis = Replicated::spawn().await;
    let conf = one_limit(&upstream, 2).lease("4s").limit(STRICT).store("when_down = \"closed\"");
    // One of them never hears of the new primary, so it can't say there what it holds.
    let (lost, found) = (conf.clone().store_url(redis.primary.url()), conf.store_url(redis.url()));
    let (a, b) = tokio::join!(Proxy::spawn(&lost), Proxy::spawn(&found));
    redis.cut_off();
    let running = [gate(&a), gate(&a)];
    upstream.wait_current(2).await;
    assert_eq!(redis.replica.in_use("llm").await, 0, "the replica knows neither");
    redis.primary.kill9().await;
    redis.promote().await;

    let waiting = [gate(&b), gate(&b)];
    for request in running {
        assert_ne!(request.await.unwrap().status, 200, "its lease can't be renewed");
    }
    redis.replica.wait_in_use("llm", 2).await;
    upstream.wait_current(2).await;
    upstream.open(2);
    for request in waiting {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (2, 4));
}

#[tokio::test]
async fn h18_an_instance_on_the_losing_side_of_a_split_serves_nobody() {
    let upstream = Upstream::spawn().await;
    let redis = Replicated::spawn().await;
    let conf = one_limit(&upstream, 2).lease("4s").limit(STRICT).store("when_down = \"closed\"");
    // Of the Sentinel's new word one of them never hears.
    let (lost, found) = (conf.clone().store_url(redis.primary.url()), conf.store_url(redis.url()));
    let (a, b) = tokio::join!(Proxy::spawn(&lost), Proxy::spawn(&found));
    let cut = [gate(&a), gate(&a)];
    upstream.wait_current(2).await;
    let waiting = [gate(&b), gate(&b)];
    redis.primary.wait_waiting("llm", 2).await;

    redis.promote().await;
    for request in cut {
        let answer = request.await.unwrap();
        assert_ne!(answer.status, 200, "its lease can't be renewed without a replica");
    }
    redis.replica.wait_in_use("llm", 2).await;
    upstream.wait_current(2).await;
    let refused = Client::new().get(a.addr(), "/status/200").await;
    assert_eq!((refused.status, refused.header("tidegate-reason")), (503, "store_down"));
    upstream.open(2);
    for request in waiting {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (2, 4));
}
