//! However many instances and however much load, the upstream sees N requests and no more.

use tokio::{task::JoinSet, time::Instant};

use crate::harness::{Client, Proxy, Redis, Upstream, one_limit};

#[tokio::test]
async fn one_command_holds_the_limit() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::quick(&upstream, 5).await;

    load(&[&proxy], 60, 5, "/hold?ms=20").await;

    assert_eq!(upstream.highest(), 5);
    assert_eq!(upstream.total(), 300);
}

#[tokio::test]
async fn three_instances_hold_one_limit() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 6).redis(&redis);
    let (a, b, c) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf), Proxy::spawn(&conf));
    redis.cli::<()>(&["CONFIG", "RESETSTAT"]).await;
    let started = Instant::now();

    load(&[&a, &b, &c], 200, 3, "/hold?ms=20").await;
    load(&[&a, &b, &c], 200, 1, "/hold?ms=200").await;

    let seconds = started.elapsed().as_secs();
    assert_eq!(upstream.highest(), 6);
    assert_eq!(upstream.total(), 800);
    redis.wait_in_use("llm", 0).await;
    let metrics = Client::new().get(a.admin(), "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    let limit = "tidegate_semaphore_limit{limit=\"llm\"} 6";
    assert!(metrics.contains(limit), "no {limit} in:\n{metrics}");

    // Waiters don't poll: acquire, perhaps its confirmation, and release for each request, and for each instance a few heartbeats a second.
    let calls = redis.script_calls().await;
    let bound = 3 * 800 + 3 * 4 * (seconds + 2);
    eprintln!("800 requests in {seconds} s took {calls} script calls, of at most {bound}");
    assert!(calls >= 100, "only {calls} script calls: was Redis used?");
    assert!(calls <= bound, "{calls} script calls, more than {bound}");
}

#[tokio::test]
async fn slots_that_are_kept_warm_cost_no_calls_and_are_there_for_others() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 64).redis(&redis);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    load(&[&a], 4, 5, "/hold?ms=0").await;
    let before = redis.script_calls().await;

    load(&[&a], 4, 500, "/hold?ms=0").await;

    let calls = redis.script_calls().await - before;
    assert!(calls < 1_000, "{calls} script calls for 2,000 requests with 60 slots to spare");
    // What one keeps is the other's as soon as that wants all of them.
    let client = Client::new();
    let mut all = JoinSet::new();
    for _ in 0..64 {
        let (client, addr) = (client.clone(), b.addr());
        all.spawn(async move { client.get(addr, "/gate").await.status });
    }
    upstream.wait_current(64).await;
    upstream.open(64);
    assert!(all.join_all().await.iter().all(|status| *status == 200));
    load(&[&a, &b], 300, 4, "/hold?ms=20").await;
    assert_eq!(upstream.highest(), 64);
    assert_eq!(upstream.total(), 20 + 2_000 + 64 + 1_200);
    redis.wait_in_use("llm", 0).await;
}

/// So many clients, spread over the instances, each sending so many requests one after the other. All must be served.
async fn load(proxies: &[&Proxy], clients: usize, requests: usize, path: &'static str) {
    let mut tasks = JoinSet::new();
    for proxy in proxies.iter().cycle().take(clients) {
        let addr = proxy.addr();
        tasks.spawn(async move {
            let client = Client::new();
            for _ in 0..requests {
                let answer = client.get(addr, path).await;
                assert_eq!(answer.status, 200, "{answer:?}");
            }
        });
    }
    tasks.join_all().await;
}
