//! The harness must be right before what it says about the proxy means anything.

use std::time::Duration;

use tokio::task::JoinSet;

use super::{Client, Raw, Redis, Relay, Upstream};

#[tokio::test]
async fn upstream_counts_what_is_in_flight() {
    let upstream = Upstream::spawn().await;
    let client = Client::new();
    let mut requests = JoinSet::new();
    for _ in 0..4 {
        let (client, addr) = (client.clone(), upstream.addr());
        requests.spawn(async move { client.get(addr, "/gate").await });
    }
    upstream.wait_current(4).await;
    upstream.open(3);
    upstream.wait_current(1).await;
    upstream.open(1);
    for answer in requests.join_all().await {
        assert_eq!((answer.status, &answer.body[..]), (200, &b"through the gate\n"[..]));
    }
    assert_eq!((upstream.current(), upstream.highest(), upstream.total()), (0, 4, 4));
}

#[tokio::test]
async fn upstream_sees_a_close_while_it_holds() {
    let upstream = Upstream::spawn().await;
    for path in ["/gate", "/silent", "/sse?events=1&gate=1"] {
        let gone = Raw::get(upstream.addr(), path).await;
        upstream.wait_current(1).await;
        drop(gone);
        upstream.wait_current(0).await;

        let reset = Raw::get(upstream.addr(), path).await;
        upstream.wait_current(1).await;
        reset.reset();
        upstream.wait_current(0).await;
    }
    assert_eq!(upstream.total(), 6);
}

#[tokio::test]
async fn upstream_behaves_as_the_path_says() {
    let upstream = Upstream::spawn().await;
    let (client, addr) = (Client::new(), upstream.addr());

    assert_eq!(client.get(addr, "/big?bytes=100000").await.body.len(), 100_000);
    assert_eq!(client.get(addr, "/status/204").await.status, 204);
    assert_eq!(client.get(addr, "/hold?ms=1").await.status, 200);
    let echoed = client.send(http::Method::POST, addr, "/echo", "hello".into());
    assert_eq!(echoed.await.unwrap().body, "hello");
    let head: Vec<String> =
        serde_json::from_slice(&client.get(addr, "/headers").await.body).unwrap();
    assert_eq!(head[0], "GET /headers HTTP/1.1");
    let trailers = client.get(addr, "/trailers").await.trailers.unwrap();
    assert_eq!(trailers["x-sum"], "1");
    client.try_get(addr, "/trunc").await.unwrap_err();
    client.try_get(addr, "/reset").await.unwrap_err();

    let mut events = client.events(addr, "/sse?events=2&gate=1&name=a").await;
    upstream.open_gate("a", 1);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    assert_eq!(upstream.current(), 1);
    upstream.open_gate("a", 2);
    assert_eq!(events.next().await.as_deref(), Some("2"));
    assert_eq!(events.next().await, None);
    assert_eq!(upstream.current(), 0);
}

#[tokio::test]
async fn redis_restarts_empty_and_counts_calls() {
    let mut redis = Redis::spawn().await;
    redis.cli::<()>(&["ZADD", "sem:llm", "1", "a"]).await;
    redis.cli::<()>(&["ZADD", "sem:llm:wait:normal", "1", "b"]).await;
    assert_eq!(redis.holders("llm").await, ["a"]);
    assert_eq!(redis.waiting("llm").await, 1);
    assert_eq!(redis.calls(&["zadd", "keys"]).await, 3);
    redis.restart().await;
    assert_eq!(redis.in_use("llm").await, 0);
}

#[tokio::test]
async fn relay_loses_replies_and_cuts() {
    let upstream = Upstream::spawn().await;
    let relay = Relay::to(upstream.addr()).await;
    relay.delay(Duration::from_millis(1));
    let mut deaf = Raw::get(relay.addr(), "/status/200").await;
    assert!(deaf.head().await.starts_with("HTTP/1.1 200"));

    relay.lose_replies();
    deaf.write(super::client::get("/status/200")).await.unwrap();
    upstream.wait_total(2).await;
    relay.cut();
    assert_eq!(deaf.read_to_end().await.unwrap(), b"");
    assert_eq!(Client::new().get(relay.addr(), "/status/200").await.status, 200);
}
