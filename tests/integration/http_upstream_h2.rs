//! Upstreams that are spoken to in HTTP/2: one stream is cut, refused or slow, and the others don't notice.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Method;
use rcgen::generate_simple_self_signed;
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::aws_lc_rs, pki_types::PrivateKeyDer},
};

use crate::harness::{
    Carrier, Client, Conf, First, H2Upstream, Proxy, Raw, Settings, Upstream, eventually,
    one_limit, whole,
};

async fn conf(upstream: &H2Upstream, slots: u32) -> Conf {
    let conf = one_limit(&Upstream::spawn().await, slots).endpoint(upstream.url());
    conf.upstream("http2 = true\nlinger = \"0s\"")
}

async fn front(upstream: &H2Upstream, slots: u32) -> Proxy {
    Proxy::spawn(&conf(upstream, slots).await).await
}

async fn with(settings: Settings, slots: u32) -> (H2Upstream, Proxy) {
    let upstream = H2Upstream::spawn(settings).await;
    let proxy = front(&upstream, slots).await;
    (upstream, proxy)
}

fn gated(proxy: &Proxy, requests: usize) -> Vec<tokio::task::JoinHandle<u16>> {
    let addr = proxy.addr();
    let get = || tokio::spawn(async move { Client::new().get(addr, "/gate").await.status });
    (0..requests).map(|_| get()).collect()
}

#[tokio::test]
async fn requests_share_a_connection_and_come_as_http2_wants_them() {
    let (upstream, proxy) = with(Settings::default(), 50).await;
    let client = Client::new();
    let answer =
        client.get_with(proxy.addr(), "/a%2Fb?q=1", &[("te", "trailers"), ("cookie", "a=1")]).await;
    let said = String::from_utf8(answer.body.to_vec()).unwrap();
    let target = format!("GET {0} http://{0}/a%2Fb?q=1\n", upstream.addr());
    assert!(said.starts_with(&target), "{said}");
    for absent in ["\nhost:", "\nconnection:", "\ntransfer-encoding:"] {
        assert!(!said.contains(absent), "{said}");
    }
    let requests = gated(&proxy, 40);
    upstream.wait_current(40).await;
    upstream.open();
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
    assert_eq!((upstream.connections(), upstream.highest()), (1, 40));
}

#[tokio::test]
async fn c33_bodies_and_trailers_pass_both_ways() {
    let (_upstream, proxy) = with(Settings::default(), 2).await;
    let body = Bytes::from(vec![b'b'; 1_000_000]);
    for body in [Bytes::new(), Bytes::from_static(b"small"), body] {
        let answer = Client::new().send(Method::POST, proxy.addr(), "/echo", body.clone()).await;
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.body.len()), (200, body.len()));
        assert_eq!(answer.body, body);
    }
    let mut raw = Raw::connect(proxy.addr()).await;
    let chunks = "POST /echo HTTP/1.1\r\nhost: h\r\nte: trailers\r\nconnection: te\r\ntransfer-encoding: chunked\r\n\r\n3\r\nABC\r\n0\r\nx-sum: 3\r\n\r\n";
    raw.write(chunks).await.unwrap();
    raw.read_until("ABC").await;
    raw.read_until("0\r\n").await;
    assert_eq!(proxy.limit("llm").await["in_use"], 0);
}

#[tokio::test]
async fn tls_agrees_on_http2_or_there_is_no_connection() {
    let certificate = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    for (alpn, reason) in
        [(Some("h2"), ""), (Some("http/1.1"), "upstream_connect"), (None, "upstream_connect")]
    {
        let key = PrivateKeyDer::try_from(certificate.signing_key.serialize_der()).unwrap();
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![certificate.cert.der().clone()], key)
                .unwrap();
        config.alpn_protocols = alpn.map(|name| name.as_bytes().to_vec()).into_iter().collect();
        let tls = Some(TlsAcceptor::from(Arc::new(config)));
        let upstream = H2Upstream::spawn(Settings { tls, ..Settings::default() }).await;
        let url = format!("https://localhost:{}", upstream.addr().port());
        let conf = conf(&upstream, 1).await.endpoint(url.clone());
        let conf = conf.upstream("http2 = true\ntls = { ca = \"ca.pem\" }");
        let proxy = Proxy::spawn(&conf.file("ca.pem", certificate.cert.pem())).await;
        for _ in 0..2 {
            let answer = Client::new().get(proxy.addr(), "/x").await;
            assert_eq!(answer.header("tidegate-reason"), reason);
            assert_eq!(answer.body.starts_with(b"GET localhost"), reason.is_empty());
        }
    }
}

#[tokio::test]
async fn an_upstream_that_speaks_http1_only_is_told_from_one_that_is_late() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).upstream("http2 = true\nconnect_timeout = \"1s\"");
    let proxy = Proxy::spawn(&conf).await;
    let answer = Client::new().get(proxy.addr(), "/x").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_connect"));
}

#[tokio::test]
async fn an_answer_that_is_whole_holds_its_slot_to_the_end_of_its_stream() {
    let upstream = H2Upstream::spawn(Settings::default()).await;
    // Whoever takes the end for a client that left holds the slot for ever.
    let conf = conf(&upstream, 1).await.upstream("http2 = true\nlinger = \"10m\"");
    let conf = conf.queue("{ size = 0, timeout = \"1s\" }");
    let copied = "on_full = [{ stale = \"10m\" }]\n[log]\nrequests = true\n";
    let proxy = Proxy::spawn(&conf.route(copied)).await;
    for bytes in [5, 100_000, 0] {
        let path = format!("/length?bytes={bytes}");
        let answer = Client::new().get(proxy.addr(), &path).await;
        assert_eq!((answer.status, answer.body.len()), (200, bytes));
        upstream.wait_current(1).await;
        assert_eq!(proxy.limit("llm").await["in_use"], 1);
        if bytes > 0 {
            let copy = Client::new().get(proxy.addr(), &path).await;
            assert_eq!((copy.header("tidegate-degraded"), copy.body.len()), ("stale", bytes));
        }
        upstream.open();
        eventually("the slot is free", async || proxy.limit("llm").await["in_use"] == 0).await;
    }
    let complete = || proxy.log().matches("\"end\":\"complete\"").count();
    eventually("five lines of complete answers", async || complete() == 5).await;
}

#[tokio::test]
async fn e40_a_slot_is_free_only_when_its_stream_was_reset() {
    let upstream = H2Upstream::spawn(Settings { most_streams: 1, ..Settings::default() });
    let upstream = upstream.await;
    let proxy = front(&upstream, 1).await;
    for path in ["/gate", "/gate?body=1", "/silent"] {
        for _ in 0..10 {
            let mut left = Raw::get(proxy.addr(), path).await;
            upstream.wait_current(1).await;
            if path.contains("body") {
                left.head().await;
            }
            let next = tokio::spawn({
                let addr = proxy.addr();
                async move { Client::new().get(addr, "/next").await.status }
            });
            eventually("the next one waits", async || {
                let limit = proxy.limit("llm").await;
                limit["waiting"]["normal"] == 1
            })
            .await;
            left.reset();
            assert_eq!(next.await.unwrap(), 200);
        }
    }
    // The connection lived through all of it.
    assert_eq!((upstream.highest(), upstream.connections()), (1, 1));
    assert_eq!(proxy.limit("llm").await["in_use"], 0);
}

#[tokio::test]
async fn e40_whoever_leaves_in_the_middle_of_an_upload_is_reset_too() {
    let (upstream, proxy) = with(Settings::default(), 1).await;
    for _ in 0..5 {
        let mut left = Raw::connect(proxy.addr()).await;
        let head = "POST /silent HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000\r\n\r\n";
        left.write(head).await.unwrap();
        left.write(vec![b'x'; 200_000]).await.unwrap();
        upstream.wait_current(1).await;
        left.reset();
        assert_eq!(Client::new().get(proxy.addr(), "/next").await.status, 200);
    }
    assert_eq!((upstream.highest(), upstream.connections()), (1, 1));
}

#[tokio::test]
async fn e40_where_no_reset_gets_through_the_connection_is_closed_before_the_slot_is_free() {
    let upstream = H2Upstream::spawn(Settings { first: First::Deaf, ..Settings::default() }).await;
    let conf = conf(&upstream, 1).await.upstream("http2 = true\nlinger = \"1s\"");
    let proxy = Proxy::spawn(&conf).await;
    let mut left = Raw::connect(proxy.addr()).await;
    let head = "POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000000\r\n\r\n";
    left.write(head).await.unwrap();
    // Until everything between here and there is full.
    let (block, pause) = (vec![b'x'; 64 * 1024], Duration::from_millis(500));
    while tokio::time::timeout(pause, left.write(&block)).await.is_ok() {}
    left.reset();
    assert_eq!(Client::new().get(proxy.addr(), "/next").await.status, 200);
    assert_eq!((upstream.highest(), upstream.connections()), (1, 2));
}

#[tokio::test]
async fn g57_a_request_that_was_not_served_goes_again_once() {
    let (upstream, proxy) = with(Settings::default(), 1).await;
    let client = Client::new();
    for (method, path, total) in [
        (Method::GET, "/refuse?a", 2),
        // Not even looked at, so that it may go again.
        (Method::POST, "/refuse?b", 2),
    ] {
        let before = upstream.total();
        let answer = client.send(method, proxy.addr(), path, "small".into()).await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(upstream.total() - before, total);
    }
    let before = upstream.total();
    let answer = client.get(proxy.addr(), "/refuse?always").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
    assert_eq!(upstream.total() - before, 2);
    for _ in 0..10 {
        assert_eq!(client.get(proxy.addr(), "/refuse?always").await.status, 502);
    }
    assert_eq!((upstream.highest(), upstream.connections()), (1, 2));

    let (upstream, proxy) =
        with(Settings { first: First::SentAway, ..Settings::default() }, 1).await;
    let answer = client.send(Method::POST, proxy.addr(), "/x", "small".into()).await.unwrap();
    assert_eq!((answer.status, upstream.connections()), (200, 2));
    let granted = r#"tidegate_semaphore_acquire_total{limit="llm",result="granted"}"#;
    assert_eq!(proxy.metric(granted).await, 1.0);
}

#[tokio::test]
async fn g55_only_an_idempotent_request_goes_again_after_an_old_connection() {
    let (upstream, proxy) = with(Settings::default(), 1).await;
    for (method, times) in [(Method::GET, 2), (Method::POST, 1)] {
        assert_eq!(Client::new().get(proxy.addr(), "/x").await.status, 200);
        let before = upstream.total();
        let answer = Client::new().send(method, proxy.addr(), "/drop", "small".into()).await;
        assert_eq!(answer.unwrap().header("tidegate-reason"), "upstream_reset");
        assert_eq!(upstream.total() - before, times);
    }
}

#[tokio::test]
async fn g57_a_streamed_upload_is_not_sent_again() {
    let (upstream, proxy) = with(Settings::default(), 1).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    let chunks =
        "POST /refuse?c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nABC\r\n";
    raw.write(chunks).await.unwrap();
    assert!(raw.head().await.contains("tidegate-reason: upstream_reset"));
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn g58_a_connection_that_answers_no_ping_is_given_up() {
    let upstream = H2Upstream::spawn(Settings { first: First::Lost, ..Settings::default() });
    let upstream = upstream.await;
    let conf = conf(&upstream, 2).await;
    let proxy = Proxy::spawn(&conf.upstream("http2 = true\nping_interval = \"200ms\"")).await;
    let answer = Client::new().get(proxy.addr(), "/x").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
    assert_eq!(Client::new().get(proxy.addr(), "/x").await.status, 200);
    assert_eq!(upstream.connections(), 2);
    eventually("all slots are back", async || proxy.limit("llm").await["in_use"] == 0).await;
}

#[tokio::test]
async fn g63_clients_that_read_nothing_stop_nobody_else() {
    for carrier in Carrier::ALL {
        let upstream = H2Upstream::spawn(Settings::default()).await;
        let proxy = carrier.spawn(conf(&upstream, 50).await).await;
        // Once more rounds than the connection's window has room for, if what is dropped kept its part of it.
        for _ in 0..if carrier == Carrier::Http1 { 4 } else { 1 } {
            let mut slow = Vec::new();
            for _ in 0..40 {
                let mut client = carrier.call(&proxy).await;
                let path = "/big?bytes=100000000";
                let unread = client.open(Method::GET, path, &[], whole("")).await;
                slow.push((client, unread));
            }
            let mut other = carrier.call(&proxy).await;
            for _ in 0..3 {
                let answer = other.get("/big?bytes=1000000", &[]).await;
                assert_eq!(answer.body.len(), 1_000_000);
            }
            drop(slow);
            upstream.wait_current(0).await;
        }
        assert_eq!(upstream.connections(), 1);
        eventually("all slots are back", async || proxy.limit("llm").await["in_use"] == 0).await;
    }
}

#[tokio::test]
async fn a_full_connection_is_joined_by_another() {
    let (upstream, proxy) = with(Settings { most_streams: 3, ..Settings::default() }, 20).await;
    assert_eq!(Client::new().get(proxy.addr(), "/x").await.status, 200);
    let requests = gated(&proxy, 9);
    upstream.wait_current(9).await;
    assert_eq!(upstream.connections(), 3);
    upstream.open();
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
}

#[tokio::test]
async fn b22_a_long_head_is_relayed_and_one_that_is_too_long_is_a_502() {
    let (upstream, proxy) = with(Settings::default(), 1).await;
    let client = Client::new();
    let answer = client.get(proxy.addr(), "/head?bytes=30000").await;
    assert_eq!((answer.status, answer.header("x-long").len()), (200, 30_000));
    let answer = client.get(proxy.addr(), "/head?bytes=200000").await;
    assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
    assert_eq!(client.get(proxy.addr(), "/x").await.status, 200);
    assert_eq!(upstream.highest(), 1);
}

#[tokio::test]
async fn a08_an_upgrade_is_forwarded_without_the_wish() {
    let (_upstream, proxy) = with(Settings::default(), 1).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    raw.write("GET /x HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        .await
        .unwrap();
    assert!(raw.head().await.starts_with("HTTP/1.1 200"));
    let said = raw.read_until("x-real-ip").await;
    assert!(!said.contains("upgrade"), "{said}");
}
