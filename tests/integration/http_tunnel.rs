//! WebSockets and other tunnels: a slot is held until both halves have ended, and no longer. Names follow `docs/http.md`.

use std::{
    io::ErrorKind,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::sleep,
};

use crate::harness::{Carrier, Conf, Proxy, Raw, Upstream, eventually, get, one_limit, within};

const LIMIT: &str = "\n[[routes]]\npath = \"/admin\"\nmethods = [\"DELETE\"]\nupstream = \"llm\"";

fn conf(upstream: &Upstream) -> Conf {
    one_limit(upstream, 1).queue("0").route(LIMIT)
}

fn upgrade(path: &str, protocol: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: {protocol}\r\n\r\n"
    )
}

/// A tunnel that is open, and through which bytes have come back.
async fn open(carrier: Carrier, proxy: &Proxy, path: &str) -> Raw {
    let mut client = carrier.raw(proxy).await;
    // Some clients don't wait for the consent.
    client.write(upgrade(path, "echo") + "early").await.unwrap();
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(head.contains("\r\nconnection: upgrade\r\n"), "{head}");
    assert!(head.contains("\r\nupgrade: echo\r\n") && head.contains("\r\nx-own: 1\r\n"), "{head}");
    client.read_until("early").await;
    client
}

async fn is_free(carrier: Carrier, proxy: &Proxy, upstream: &Upstream) {
    upstream.wait_current(0).await;
    eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
    assert_eq!(carrier.call(proxy).await.get("/echo", &[]).await.status, 200);
}

#[tokio::test]
async fn d38_a_tunnel_holds_its_slot_until_both_halves_have_ended() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        let mut client = open(carrier, &proxy, "/upgrade?gate=1").await;
        for word in ["one", "HTTP/1.1 400 Bad Request\r\n\r\n", "three"] {
            client.write(word).await.unwrap();
            client.read_until(word).await;
            let refused = carrier.call(&proxy).await.get("/echo", &[]).await;
            assert_eq!(refused.header("tidegate-reason"), "queue_full");
        }
        client.half_close().await;
        let refused = carrier.call(&proxy).await.get("/echo", &[]).await;
        assert_eq!(refused.header("tidegate-reason"), "queue_full");
        assert_eq!(upstream.current(), 1);
        upstream.open(1);
        assert_eq!(client.read_to_end().await.unwrap(), b"bye");
        is_free(carrier, &proxy, &upstream).await;
        assert_eq!(upstream.highest(), 1);
    }
}

#[tokio::test]
async fn d38_what_the_other_side_does_not_take_yet_is_kept_in_order() {
    const NUMBERS: u32 = 16_000_000;
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&conf(&upstream)).await;
    let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
    stream.write_all(upgrade("/upgrade", "echo").as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let (mut from, mut to) = stream.into_split();
    let sent = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        for first in (0..NUMBERS).step_by(10_000) {
            let piece: Vec<u8> = (first..first + 10_000).flat_map(u32::to_be_bytes).collect();
            to.write_all(&piece).await.unwrap();
            counted.store(first, Relaxed);
        }
        to.shutdown().await.unwrap();
    });
    // Nothing is read until every buffer on the way is full.
    let mut before = None;
    while before.replace(sent.load(Relaxed)) != Some(sent.load(Relaxed)) {
        sleep(Duration::from_millis(100)).await;
    }
    let mut from = BufReader::new(&mut from);
    for number in 0..NUMBERS {
        assert_eq!(within("a number", from.read_u32()).await.unwrap(), number);
    }
    assert_eq!(from.read_u8().await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    sending.await.unwrap();
}

#[tokio::test]
async fn d38_a_client_that_breaks_off_frees_the_slot() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        open(carrier, &proxy, "/upgrade").await.reset();
        is_free(carrier, &proxy, &upstream).await;
        drop(open(carrier, &proxy, "/upgrade").await);
        is_free(carrier, &proxy, &upstream).await;
    }
}

#[tokio::test]
async fn d38_a_tunnel_is_closed_when_nothing_moves_and_cut_when_it_is_held_too_long() {
    for carrier in Carrier::HTTP1 {
        for (upstream_lines, limit_lines) in
            [("tunnel_timeout = \"1s\"", ""), ("", "max_hold = \"1s\"")]
        {
            let upstream = Upstream::spawn().await;
            let conf = conf(&upstream).upstream(upstream_lines).limit(limit_lines);
            let proxy = carrier.spawn(conf).await;
            let client = open(carrier, &proxy, "/upgrade").await;
            let _ = client.read_to_end().await;
            is_free(carrier, &proxy, &upstream).await;
        }
    }
}

#[tokio::test]
async fn d38_a_tunnel_ends_with_the_drain() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let mut proxy = carrier.spawn(conf(&upstream).server("drain_timeout = \"2s\"")).await;
        let mut client = open(carrier, &proxy, "/upgrade").await;
        proxy.sigterm();
        eventually("the listener is closed", async || {
            tokio::net::TcpStream::connect(proxy.addr()).await.is_err()
        })
        .await;
        // Until then it goes on.
        client.write("still").await.unwrap();
        client.read_until("still").await;
        assert!(proxy.wait_exit().await.success());
        upstream.wait_current(0).await;
        let _ = client.read_to_end().await;
    }
}

#[tokio::test]
async fn d39_a_refusal_to_change_is_relayed_and_the_connection_goes_on() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        let mut client = carrier.raw(&proxy).await;
        for _ in 0..2 {
            client.write(upgrade("/status/404", "websocket")).await.unwrap();
            let head = client.head().await;
            assert!(
                head.starts_with("HTTP/1.1 404 ") && !head.contains("tidegate-reason"),
                "{head}"
            );
        }
        client.write(upgrade("/headers", "websocket")).await.unwrap();
        client.head().await;
        let lines = client.read_until("]").await;
        assert!(
            lines.contains("\"upgrade: websocket\"") && lines.contains("\"connection: upgrade\""),
            "{lines}"
        );
        is_free(carrier, &proxy, &upstream).await;
    }
}

#[tokio::test]
async fn a07_what_stands_behind_a_refused_upgrade_is_a_request_like_any_other() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        let mut client = carrier.raw(&proxy).await;
        let behind = get("/admin") + &get("/echo");
        client.write(upgrade("/status/200", "websocket") + &behind).await.unwrap();
        assert!(client.head().await.starts_with("HTTP/1.1 200 "));
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 405 "), "{head}");
        client.read_until("}").await;
        assert!(client.head().await.starts_with("HTTP/1.1 200 "));
        assert_eq!(upstream.total(), 2);
    }
}

#[tokio::test]
async fn a08_a_wish_with_a_body_or_for_http2_is_not_passed_on() {
    for carrier in Carrier::HTTP1 {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        for (fields, body) in [
            ("connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 2", "hi"),
            (
                "connection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked",
                "2\r\nhi\r\n0\r\n\r\n",
            ),
            (
                "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__",
                "",
            ),
            ("connection: upgrade\r\nupgrade: websocket, h2c", ""),
            ("connection: upgrade\r\nupgrade: websocket\r\nupgrade: h2c", ""),
            ("connection: keep-alive\r\nupgrade: websocket", ""),
        ] {
            let mut client = carrier.raw(&proxy).await;
            let request = format!("GET /headers HTTP/1.1\r\nhost: a\r\n{fields}\r\n\r\n{body}");
            client.write(request).await.unwrap();
            let head = client.head().await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{fields}\n{head}");
            let lines = client.read_until("]").await;
            assert!(!lines.to_lowercase().contains("upgrade"), "{fields}\n{lines}");
        }
    }
}

#[tokio::test]
async fn d39_nobody_changes_a_protocol_unasked() {
    for carrier in Carrier::ALL {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(conf(&upstream)).await;
        let answer = carrier.call(&proxy).await.get("/upgrade", &[]).await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
        is_free(carrier, &proxy, &upstream).await;
    }
}
