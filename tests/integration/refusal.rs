//! A refusal says why and when to come back, and a client in the middle of an upload gets to read it.

use crate::harness::{Answer, Client, Proxy, Raw, Upstream, one_limit};

#[tokio::test]
async fn a_full_limit_without_a_queue_refuses_at_once() {
    let (upstream, proxy, _holder) = full().await;
    let client = Client::new();
    for _ in 0..20 {
        let refused = client.get(proxy.addr(), "/status/200").await;
        assert_eq!(refused.status, 503);
        assert_eq!(refused.header("tidegate-reason"), "queue_full");
        assert_eq!(refused.header("content-type"), "application/problem+json");
        let problem: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
        assert_eq!(problem["status"], 503);
        comes_back(&refused);
    }
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn no_slots_at_all_let_newcomers_wait_for_as_long_as_they_may() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 0).queue("{ size = 9, timeout = \"300ms\" }");
    let proxy = Proxy::spawn(&conf).await;
    let answer = Client::new().get(proxy.addr(), "/status/200").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (503, "queue_timeout"));
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seconds}");
    assert_eq!(upstream.total(), 0);
}

#[tokio::test]
async fn no_answer_of_the_upstream_carries_a_reason() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let answer = Client::new().get(proxy.addr(), "/status/503").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (503, ""));
}

#[tokio::test]
async fn a_refused_upload_is_read_so_that_the_refusal_is_seen() {
    let (upstream, proxy, _holder) = full().await;
    let body = vec![b'x'; 2_000_000];
    for attempt in 0..10 {
        let mut client = Raw::connect(proxy.addr()).await;
        let head =
            format!("POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n", body.len());
        client.write(head).await.unwrap();
        // As most clients do: the whole body first, then the answer.
        if let Err(error) = client.write(&body).await {
            panic!("attempt {attempt}: the upload broke before the refusal could be read: {error}");
        }
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 503"), "attempt {attempt}: {head}");
        assert!(head.contains("queue_full"), "attempt {attempt}: {head}");
    }
    assert_eq!(upstream.total(), 1);
}

/// A limit of one slot, taken, and no queue.
async fn full() -> (Upstream, Proxy, Raw) {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).queue("0")).await;
    let holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    (upstream, proxy, holder)
}

/// `Retry-After` is a whole number of seconds that every SDK understands, and `retry-after-ms` doesn't exceed it.
fn comes_back(refused: &Answer) {
    let seconds: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=30).contains(&seconds), "Retry-After: {seconds}");
    let ms: u64 = refused.header("retry-after-ms").parse().unwrap();
    assert!(ms.div_ceil(1000) == seconds, "retry-after-ms: {ms}, Retry-After: {seconds}");
}
