//! A client that leaves, in whatever way, ends its request at the upstream and gives its slot back.
//!
//! The lease is ten minutes and there is one slot: if it isn't released, the next round never reaches the upstream.

use http::Method;
use http_body_util::BodyExt;

use crate::harness::{Carrier, H2, Proxy, Raw, Redis, Upstream, get, one_limit, whole, within};

#[tokio::test]
async fn fin_before_the_answer() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let client = carrier.raw_get(proxy, "/silent").await;
        upstream.wait_current(1).await;
        drop(client);
    })
    .await;
}

#[tokio::test]
async fn half_close_counts_as_gone() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let mut client = carrier.raw_get(proxy, "/silent").await;
        upstream.wait_current(1).await;
        client.half_close().await;
        upstream.wait_current(0).await;
    })
    .await;
}

/// E40, E42, whatever carries the request: before its answer, and in the middle of it.
#[tokio::test]
async fn gone_at_any_point() {
    each_round(&Carrier::ALL, async |carrier, proxy, upstream| {
        let mut client = carrier.call(proxy).await;
        let waiting = client.get("/silent", &[]);
        tokio::select! {
            _ = waiting => panic!("an answer"),
            () = upstream.wait_current(1) => {}
        }
        drop(client);
        upstream.wait_current(0).await;

        let mut client = carrier.call(proxy).await;
        let path = "/sse?events=2&gate=1";
        let mut stream = client.open(Method::GET, path, &[], whole("")).await;
        upstream.wait_current(1).await;
        upstream.open(1);
        let event = within("an event", stream.frame()).await.unwrap().unwrap();
        assert_eq!(event.into_data().unwrap(), "data: 1\n\n");
        drop(client);
        upstream.wait_current(0).await;
    })
    .await;
}

#[tokio::test]
async fn reset_before_the_answer() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let client = carrier.raw_get(proxy, "/silent").await;
        upstream.wait_current(1).await;
        client.reset();
    })
    .await;
}

#[tokio::test]
async fn fin_behind_a_stray_line() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let mut client = carrier.raw(proxy).await;
        let request = "POST /silent HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n\r\nhi\r\n";
        client.write(request).await.unwrap();
        upstream.wait_current(1).await;
        drop(client);
    })
    .await;
}

#[tokio::test]
async fn fin_behind_a_pipelined_request() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let mut client = carrier.raw(proxy).await;
        let requests = get("/silent") + &get("/silent");
        client.write(requests).await.unwrap();
        upstream.wait_current(1).await;
        drop(client);
    })
    .await;
}

#[tokio::test]
async fn reset_behind_a_pipelined_request() {
    each_round(&Carrier::HTTP1, async |carrier, proxy, upstream| {
        let mut client = carrier.raw(proxy).await;
        let requests = get("/silent") + &get("/silent");
        client.write(requests).await.unwrap();
        upstream.wait_current(1).await;
        client.reset();
    })
    .await;
}

#[tokio::test]
async fn http2_reset_before_the_answer_and_in_a_stream() {
    each_round(&[Carrier::Http2], async |_, proxy, upstream| {
        let mut connection = H2::connect(proxy.addr()).await;
        let mut again = connection.clone();
        let waiting = tokio::spawn(async move { again.get("/silent").await });
        upstream.wait_current(1).await;
        waiting.abort();
        upstream.wait_current(0).await;

        // The connection outlives the reset.
        let stream = connection.get("/sse?events=1&gate=1").await.unwrap();
        assert_eq!(stream.status(), 200);
        upstream.wait_current(1).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_that_leaves_keeps_nothing() {
    let (upstream, redis, proxy) = rig(Carrier::Http1).await;
    let holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    for _ in 0..ROUNDS {
        let waiter = Raw::get(proxy.addr(), "/silent").await;
        redis.wait_waiting("llm", 1).await;
        drop(waiter);
        redis.wait_waiting("llm", 0).await;
    }
    drop(holder);
    redis.wait_in_use("llm", 0).await;
    assert_eq!(upstream.total(), 1);
}

const ROUNDS: usize = 13;

async fn rig(carrier: Carrier) -> (Upstream, Redis, Proxy) {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).upstream("linger = \"10ms\"");
    let proxy = carrier.spawn(conf).await;
    (upstream, redis, proxy)
}

/// Lets one client after the other come and leave. Each time the upstream sees the close, and in the end every slot is back.
async fn each_round(
    carriers: &[Carrier],
    come_and_leave: impl AsyncFn(Carrier, &Proxy, &Upstream),
) {
    for carrier in carriers {
        let (upstream, redis, proxy) = rig(*carrier).await;
        for _ in 0..ROUNDS {
            come_and_leave(*carrier, &proxy, &upstream).await;
            upstream.wait_current(0).await;
        }
        redis.wait_in_use("llm", 0).await;
        assert_eq!(redis.waiting("llm").await, 0);
        assert!(redis.script_calls().await > 0, "Redis was never asked");
        assert!(upstream.total() >= ROUNDS);
    }
}
