//! SIGTERM: requests in flight finish, waiters are refused as draining, every slot is back before the process ends.

use crate::harness::{Client, Proxy, Raw, Redis, Upstream, eventually, get, one_limit};

#[tokio::test]
async fn requests_in_flight_finish_and_waiters_are_refused() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).server("drain_timeout = \"10m\"");
    let mut proxy = Proxy::spawn(&conf).await;
    let (client, addr) = (Client::new(), proxy.addr());
    let mut events = client.events(addr, "/sse?events=1&gate=1&name=sse").await;
    let get = |path: &'static str| {
        let client = client.clone();
        tokio::spawn(async move { client.get(addr, path).await })
    };
    let in_flight = get("/gate");
    upstream.wait_current(2).await;
    let waiter = get("/status/200");
    redis.wait_waiting("llm", 1).await;

    proxy.sigterm();

    let refused = waiter.await.unwrap();
    assert_eq!(refused.status, 503);
    assert_eq!(refused.header("tidegate-reason"), "draining");
    upstream.open(1);
    let answer = in_flight.await.unwrap();
    assert_eq!((answer.status, &answer.body[..]), (200, &b"through the gate\n"[..]));
    upstream.open_gate("sse", 2);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    assert_eq!(events.next().await, None);

    let status = proxy.wait_exit().await;
    assert_eq!(redis.in_use("llm").await, 0);
    assert_eq!(redis.waiting("llm").await, 0);
    assert_eq!(status.code(), Some(0));
    assert_eq!(upstream.total(), 2);
}

#[tokio::test]
async fn an_idle_instance_ends_by_itself() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).server("drain_timeout = \"10m\"");
    let mut proxy = Proxy::spawn(&conf).await;
    // A kept-alive connection must not hold the drain up.
    let client = Client::new();
    assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200);
    proxy.sigterm();
    assert_eq!(proxy.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn streams_are_cut_at_the_drain_timeout() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).server("drain_timeout = \"500ms\"");
    let mut proxy = Proxy::spawn(&conf).await;
    let _events = Client::new().events(proxy.addr(), "/sse?events=1&gate=1").await;
    proxy.sigterm();
    assert_eq!(proxy.wait_exit().await.code(), Some(0));
    assert_eq!(redis.in_use("llm").await, 0);
    upstream.wait_current(0).await;
}

#[tokio::test]
async fn a_second_sigterm_ends_at_once() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).server("drain_timeout = \"10m\"");
    let mut proxy = Proxy::spawn(&conf).await;
    let _events = Client::new().events(proxy.addr(), "/sse?events=1&gate=1").await;
    proxy.sigterm();
    eventually("readiness is red", async || proxy.admin_status("/readyz").await == Some(503)).await;
    proxy.sigterm();
    // The stream's gate was never opened and the drain has ten minutes: nothing else ends the process.
    proxy.wait_exit().await;
}

#[tokio::test]
async fn j73_a_drain_under_load_fails_no_request_that_was_accepted() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 16).redis(&redis).server("drain_timeout = \"10m\"");
    let mut proxy = Proxy::spawn(&conf).await;
    let addr = proxy.addr();
    let clients: Vec<_> = (0..8)
        .map(|at| {
            tokio::spawn(async move {
                let mut served = 0;
                // Until nobody listens any more.
                while let Ok(raw) = Raw::try_connect(addr).await {
                    served += if at % 2 == 0 { one_each(raw).await } else { many(raw).await };
                }
                served
            })
        })
        .collect();
    upstream.wait_total(100).await;

    proxy.sigterm();

    let mut served = 0;
    for client in clients {
        served += client.await.unwrap();
    }
    assert_eq!(proxy.wait_exit().await.code(), Some(0));
    // Whatever reached the upstream was answered to the end; the others were told to come back, or never read.
    assert_eq!(served, upstream.total());
    assert_eq!(redis.in_use("llm").await, 0);
}

/// A request on a connection of its own; whether it was served.
async fn one_each(mut raw: Raw) -> usize {
    let request = get("/hold?ms=5").replacen("\r\n", "\r\nconnection: close\r\n", 1);
    match raw.write(request).await {
        Ok(()) => raw.read_to_end().await.map_or(0, |answer| whole(&answer).into()),
        Err(_) => 0,
    }
}

/// One request after the other until the connection is closed; how many were served.
async fn many(mut raw: Raw) -> usize {
    let mut served = 0;
    while raw.write(get("/hold?ms=5")).await.is_ok() {
        let Some(answer) = raw.answer().await else { break };
        served += usize::from(whole(&answer));
    }
    served
}

/// Whether this is an answer of the upstream; it isn't cut in any case.
fn whole(answer: &[u8]) -> bool {
    let answer = String::from_utf8_lossy(answer);
    if answer.is_empty() {
        return false;
    }
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole head");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    assert_eq!(length.expect("a length"), body.len().to_string(), "{answer}");
    let is_served = head.starts_with("HTTP/1.1 200");
    assert!(is_served || head.contains("tidegate-reason: draining"), "{answer}");
    is_served
}
