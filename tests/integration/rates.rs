//! Rates: so many in any window, and the time told for the next is the time at which it passes.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::harness::{Client, Conf, Proxy, Redis, Upstream, one_limit};

const MARGIN: Duration = Duration::from_millis(50);

#[tokio::test]
async fn five_of_eight_pass_and_the_time_told_for_the_next_is_exact() {
    let upstream = Upstream::spawn().await;
    let redis = Redis::spawn().await;
    let rate = "rates = [\"all\"]\n\n[rates.all]\nrequests = 5\nwindow = \"10s\"";
    let conf = one_limit(&upstream, 100).route(rate);
    let on_redis = conf.clone().redis(&redis);
    tokio::join!(is_exact(&conf), is_exact(&on_redis));
}

async fn is_exact(conf: &Conf) {
    let proxy = Proxy::spawn(conf).await;
    let (addr, client) = (proxy.addr(), Client::new());
    // Three that leave the window one by one, and five at once, of which there is room for two.
    for _ in 0..3 {
        assert_eq!(client.get(addr, "/status/200").await.status, 200);
        sleep(6 * MARGIN).await;
    }
    let mut at_once = JoinSet::new();
    for _ in 0..5 {
        let client = client.clone();
        at_once.spawn(async move { client.get(addr, "/status/200").await.status });
    }
    let mut statuses = at_once.join_all().await;
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 429, 429, 429]);

    let mut just_before = 0;
    for _ in 0..3 {
        let asked = Instant::now();
        let refused = client.get(addr, "/status/200").await;
        let told = Instant::now();
        assert_eq!((refused.status, refused.header("tidegate-reason")), (429, "rate_limited"));
        let after: u64 = refused.header("retry-after-ms").parse().unwrap();
        let seconds: u64 = refused.header("retry-after").parse().unwrap();
        assert_eq!(seconds, after.div_ceil(1_000));
        let after = Duration::from_millis(after);

        sleep_until(asked + after - MARGIN).await;
        let early = client.get(addr, "/status/200").await.status;
        // Answered later than that it may have come in time, on a busy machine.
        if Instant::now() < asked + after {
            assert_eq!(early, 429, "passed before the time that was told");
            just_before += 1;
        }
        sleep_until(told + after).await;
        if early == 429 {
            assert_eq!(client.get(addr, "/status/200").await.status, 200, "refused at its time");
        }
    }
    assert!(just_before > 0, "no answer took less than {MARGIN:?}");
}
