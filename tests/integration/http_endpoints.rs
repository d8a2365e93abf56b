//! An upstream of several endpoints: the load is even, the limit is one, and who isn't there costs nobody an answer.

use bytes::Bytes;
use http::Method;

use crate::harness::{Client, Conf, Proxy, Upstream, one_limit, unused_addr};

/// Two upstreams that are endpoints of one, and a configuration with so many slots.
async fn two(slots: u32) -> (Upstream, Upstream, Conf) {
    let (a, b) = (Upstream::spawn().await, Upstream::spawn().await);
    let conf = one_limit(&a, slots).endpoints([a.url(), b.url()]);
    (a, b, conf)
}

#[tokio::test]
async fn endpoints_share_the_load_and_the_limit() {
    let (a, b, conf) = two(4).await;
    let proxy = Proxy::spawn(&conf).await;
    let requests: Vec<_> = (0..10)
        .map(|_| {
            let addr = proxy.addr();
            tokio::spawn(async move { Client::new().get(addr, "/gate").await.status })
        })
        .collect();
    a.wait_current(2).await;
    b.wait_current(2).await;
    a.open(10);
    b.open(10);
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
    assert_eq!(a.total() + b.total(), 10);
    assert!(a.highest() + b.highest() <= 5, "{} and {}", a.highest(), b.highest());
}

#[tokio::test]
async fn each_endpoint_sees_its_own_name_as_host() {
    let (a, b, conf) = two(4).await;
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let mut seen = [0, 0];
    for _ in 0..20 {
        let before = a.total();
        let answer = client.get(proxy.addr(), "/headers").await;
        let (index, upstream) = if a.total() > before { (0, &a) } else { (1, &b) };
        let head = String::from_utf8(answer.body.to_vec()).unwrap();
        assert!(head.contains(&format!("\"host: {}\"", upstream.addr())), "{head}");
        seen[index] += 1;
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[tokio::test]
async fn j76_endpoints_may_be_ipv6_addresses_and_names() {
    let six = Upstream::spawn_at("[::1]:0").await;
    let four = Upstream::spawn().await;
    let name = format!("http://localhost:{}", four.addr().port());
    for (upstream, url) in [(&six, six.url()), (&four, name)] {
        let proxy = Proxy::spawn(&one_limit(upstream, 1).endpoint(url)).await;
        for _ in 0..3 {
            assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
        }
        assert_eq!(upstream.total(), 3);
    }
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_an_upstream_that_is_not_there() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).endpoint("http://nowhere.invalid:80".to_owned());
    let proxy = Proxy::spawn(&conf.upstream("connect_timeout = \"20s\"")).await;
    for _ in 0..2 {
        let answer = Client::new().get(proxy.addr(), "/").await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_connect"));
    }
    assert_eq!(proxy.limit("llm").await["in_use"], 0);
}

#[tokio::test]
async fn g61_who_cannot_be_reached_is_passed_over_on_the_same_slot() {
    let upstream = Upstream::spawn().await;
    let dead = format!("http://{}", unused_addr());
    let conf = one_limit(&upstream, 1).endpoints([upstream.url(), dead.clone()]);
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    // The dead one is drawn half of the time. Its connect failure sent nothing, so a POST may go on.
    for _ in 0..20 {
        let body = Bytes::from_static(b"once");
        let answer = client.send(Method::POST, proxy.addr(), "/echo", body.clone()).await.unwrap();
        assert_eq!((answer.status, answer.body), (200, body));
    }
    assert_eq!((upstream.total(), upstream.highest()), (20, 1));
    let granted = r#"tidegate_semaphore_acquire_total{limit="llm",result="granted"}"#;
    assert_eq!(proxy.metric(granted).await, 20.0);

    let other = format!("http://{}", unused_addr());
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).endpoints([dead, other])).await;
    let answer = client.get(proxy.addr(), "/").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_connect"));
    assert_eq!(proxy.limit("llm").await["in_use"], 0);
}

#[tokio::test]
async fn g55_nothing_is_replayed_that_is_not_safe_to() {
    let (a, b, conf) = two(1).await;
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let total = || a.total() + b.total();
    for (method, body, times) in [
        (Method::GET, "", 2),
        (Method::PUT, "small", 2),
        (Method::POST, "", 1),
        (Method::POST, "small", 1),
        (Method::PATCH, "small", 1),
    ] {
        // Until both have served, so that connections are old ones.
        let (mut served, before) = ([false; 2], (a.total(), b.total()));
        while served != [true; 2] {
            client.get(proxy.addr(), "/status/200").await;
            served = [a.total() > before.0, b.total() > before.1];
        }
        let before = total();
        let answer = client.send(method.clone(), proxy.addr(), "/reset", body.into()).await;
        assert_eq!(answer.unwrap().header("tidegate-reason"), "upstream_reset");
        assert_eq!(total() - before, times, "{method} {body:?}");
    }
    assert!(a.highest() + b.highest() <= 2);
    // Over a new connection nothing is ever sent twice.
    let proxy = Proxy::spawn(&conf).await;
    let before = total();
    assert_eq!(client.get(proxy.addr(), "/reset").await.status, 502);
    assert_eq!(total() - before, 1);
}
