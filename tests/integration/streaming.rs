//! A stream passes event by event and keeps its slot to its last byte; answers without a body give theirs back too.

use crate::harness::{Carrier, Client, Proxy, Raw, Redis, Upstream, eventually, one_limit};

#[tokio::test]
async fn events_pass_one_by_one() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let mut events = Client::new().events(proxy.addr(), "/sse?events=5&gate=1").await;

    // The upstream writes an event only after the client has read the one before.
    for event in 1..=5 {
        upstream.open(1);
        assert_eq!(events.next().await, Some(event.to_string()));
    }
    upstream.open(1);
    assert_eq!(events.next().await, None);
}

#[tokio::test]
async fn a_stream_holds_its_slot_to_its_end() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).redis(&redis)).await;
    let client = Client::new();
    let mut events = client.events(proxy.addr(), "/sse?events=2&gate=1").await;
    let second = tokio::spawn({
        let addr = proxy.addr();
        async move { client.get(addr, "/status/200").await }
    });
    redis.wait_waiting("llm", 1).await;

    upstream.open(2);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    assert_eq!(events.next().await.as_deref(), Some("2"));
    assert_eq!(redis.waiting("llm").await, 1, "the slot went before the end");
    assert_eq!(upstream.total(), 1);

    upstream.open(1);
    assert_eq!(events.next().await, None);
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(upstream.highest(), 1);
}

#[tokio::test]
async fn a_stream_of_three_leases_keeps_its_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).lease("2s");
    let (proxy, other) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let client = Client::new();
    let mut events = client.events(proxy.addr(), "/sse?events=1&gate=1").await;
    let holders = redis.holders("llm").await;
    assert_eq!(holders.len(), 1);
    let second = tokio::spawn({
        let addr = other.addr();
        async move { client.get(addr, "/status/200").await }
    });
    redis.wait_waiting("llm", 1).await;

    let score = async || -> f64 { redis.cli(&["ZSCORE", "sem:llm", &holders[0]]).await };
    let taken = score().await;
    eventually("the lease renewed for three leases", async || score().await >= taken + 6_000.0)
        .await;
    assert_eq!(redis.holders("llm").await, holders);
    assert_eq!(upstream.total(), 1);

    upstream.open(2);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    assert_eq!(events.next().await, None);
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(upstream.highest(), 1);
}

#[tokio::test]
async fn answers_without_a_body_end_and_free_their_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).redis(&redis)).await;
    let mut raw = Raw::connect(proxy.addr()).await;

    // All on one connection: an answer that didn't end properly would spoil the next. With one slot, one that kept it would stop it.
    for (request, status) in [
        ("HEAD /big?bytes=1000", "200"),
        ("GET /status/204", "204"),
        ("GET /status/304", "304"),
        ("HEAD /status/200", "200"),
        ("POST /status/204", "204"),
    ] {
        let end = if request.starts_with("POST") { "content-length: 0\r\n\r\n" } else { "\r\n" };
        raw.write(format!("{request} HTTP/1.1\r\nhost: test\r\n{end}")).await.unwrap();
        let head = raw.head().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {head}");
        redis.wait_in_use("llm", 0).await;
    }
    assert_eq!((upstream.total(), upstream.highest()), (5, 1));
    assert!(redis.script_calls().await > 0, "Redis was never asked");
}

#[tokio::test]
async fn trailers_pass_and_free_their_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).redis(&redis)).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    for _ in 0..3 {
        raw.write("GET /trailers HTTP/1.1\r\nhost: test\r\nte: trailers\r\n\r\n").await.unwrap();
        assert!(raw.head().await.starts_with("HTTP/1.1 200"));
        let body = raw.read_until("0\r\nx-sum: 1\r\n\r\n").await;
        assert!(body.contains("one"), "{body}");
        redis.wait_in_use("llm", 0).await;
    }
}

#[tokio::test]
async fn an_answer_cut_by_the_upstream_is_cut_for_the_client() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    for carrier in Carrier::ALL {
        let proxy = carrier.spawn(one_limit(&upstream, 1).redis(&redis)).await;
        for path in ["/trunc", "/say?bytes=1000&cut=1"] {
            // A clean end would pass half an answer off as a whole one.
            let cut = carrier.call(&proxy).await.try_get(path, &[]).await;
            cut.expect_err("an answer that is cut");
            redis.wait_in_use("llm", 0).await;
        }
        if !carrier.is_http2() {
            // Before HTTP/1.1 an answer ended with the connection, so only a reset tells.
            let mut old = carrier.raw(&proxy).await;
            old.write("GET /trunc HTTP/1.0\r\nhost: a\r\n\r\n").await.unwrap();
            old.read_to_end().await.expect_err("an answer that is cut");
            redis.wait_in_use("llm", 0).await;
        }
        let mut client = carrier.call(&proxy).await;
        let answer = client.get("/reset", &[]).await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
        redis.wait_in_use("llm", 0).await;
        assert_eq!(client.get("/status/200", &[]).await.status, 200, "{carrier:?}");
        redis.wait_in_use("llm", 0).await;
    }
}
