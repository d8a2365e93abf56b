//! What an upstream is told, so that it can turn away a request whose slot has long been another's.

use std::collections::HashSet;

use crate::harness::{Answer, Client, Conf, Proxy, Redis, Upstream, one_limit, run_to_end};

/// The holder and the fence that the upstream was told.
fn told(answer: &Answer) -> (String, u64) {
    assert_eq!(answer.status, 200);
    let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
    let told = |name: &str| {
        let mut values = lines.iter().filter_map(|line| line.strip_prefix(name));
        let value = values.next().unwrap_or_else(|| panic!("no {name} in {lines:?}"));
        assert_eq!(values.next(), None, "{name} twice");
        value.to_owned()
    };
    (told("x-holder: "), told("x-fence: ").parse().unwrap())
}

async fn ask(proxy: &Proxy) -> (String, u64) {
    // What the client says under these names is nobody's.
    let forged = [("x-fence", "99999999999999999"), ("x-holder", "me")];
    told(&Client::new().get_with(proxy.addr(), "/headers", &forged).await)
}

fn fenced(upstream: &Upstream) -> Conf {
    one_limit(upstream, 1).limit("holder_header = \"x-holder\"\nfence_header = \"x-fence\"")
}

#[tokio::test]
async fn fences_rise_from_holder_to_holder_over_the_fleet_and_over_losses() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = fenced(&upstream).redis(&redis);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let (mut holders, mut last) = (HashSet::new(), 0);
    let mut rises = |(holder, fence): (String, u64)| {
        assert!(fence > last, "{fence} after {last}");
        assert!(holders.insert(holder), "a holder twice");
        last = fence;
    };
    for proxy in [&a, &b, &b, &a] {
        rises(ask(proxy).await);
    }
    // From hand to hand, to a waiter here and to one over there.
    for waits_at in [&a, &b] {
        let addr = a.addr();
        let holder = tokio::spawn(async move { Client::new().get(addr, "/gate").await });
        upstream.wait_current(1).await;
        let ((), waited) = tokio::join!(
            async {
                redis.wait_waiting("llm", 1).await;
                upstream.open(1);
            },
            ask(waits_at)
        );
        rises(waited);
        assert_eq!(holder.await.unwrap().status, 200);
    }
    redis.cli::<()>(&["FLUSHALL"]).await;
    for proxy in [&b, &a] {
        rises(ask(proxy).await);
    }
    assert_eq!(upstream.highest(), 1);
    // It would mean nothing among several.
    let admin = format!("http://{}", a.admin());
    let raised = run_to_end(&["limit", "llm", "--slots", "2", "--admin", &admin]).await;
    assert_eq!(raised.status.code(), Some(1), "{raised:?}");
    assert_eq!(a.limit("llm").await["slots"], 1);
}

#[tokio::test]
async fn fences_of_the_embedded_store_rise_over_a_restart() {
    let upstream = Upstream::spawn().await;
    let conf = fenced(&upstream);
    let mut last = 0;
    for _ in 0..2 {
        let proxy = Proxy::spawn(&conf).await;
        for _ in 0..3 {
            let (_, fence) = ask(&proxy).await;
            assert!(fence > last, "{fence} after {last}");
            last = fence;
        }
    }
}
