//! TLS for clients: versions, deadlines, and certificates that change. What goes through it is tested where it is tested without,
//! once for each carrier.

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{
    client::TlsStream,
    rustls::version::{TLS12, TLS13},
};

use crate::harness::{
    Proxy, Raw, Shown, Upstream, certificate, eventually, get, one_limit, shake, within,
};

async fn proxy(upstream: &Upstream, shown: &Shown, lines: &'static str) -> Proxy {
    let conf = one_limit(upstream, 2)
        .server(lines)
        .file("cert.pem", shown.cert.pem())
        .file("key.pem", shown.signing_key.serialize_pem());
    Proxy::spawn(&conf).await
}

const TLS: &str = r#"tls = { cert = "cert.pem", key = "key.pem" }"#;

async fn connect(proxy: &Proxy, shown: &Shown) -> TlsStream<TcpStream> {
    shake(proxy.addr(), shown, &TLS13, "http/1.1").await.unwrap()
}

async fn say(proxy: &Proxy, shown: &Shown, bytes: &str) -> String {
    let mut client = connect(proxy, shown).await;
    client.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = String::new();
    within("the close", client.read_to_string(&mut answer)).await.expect("a clean end of TLS");
    answer
}

const CLOSING: &str = "GET /headers HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn c29_both_protocols_and_versions_come_as_https() {
    let (upstream, shown) = (Upstream::spawn().await, certificate());
    let proxy = proxy(&upstream, &shown, TLS).await;
    for version in [&TLS12, &TLS13] {
        let mut old = shake(proxy.addr(), &shown, version, "http/1.1").await.unwrap();
        assert_eq!(old.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        old.write_all(CLOSING.as_bytes()).await.unwrap();
        let mut answer = String::new();
        within("an answer", old.read_to_string(&mut answer)).await.unwrap();
        assert!(answer.contains("x-forwarded-proto: https"), "{answer}");

        let new = shake(proxy.addr(), &shown, version, "h2").await.unwrap();
        assert_eq!(new.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(new)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("https://localhost/headers");
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let answer = within("an answer", sender.send_request(request)).await.unwrap();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains("x-forwarded-proto: https"), "{body}");
    }
}

#[tokio::test]
async fn the_lowest_version_is_kept_and_plain_text_is_not_served() {
    let (upstream, shown) = (Upstream::spawn().await, certificate());
    let lines = r#"tls = { cert = "cert.pem", key = "key.pem", min_version = "1.3" }"#;
    let proxy = proxy(&upstream, &shown, lines).await;
    shake(proxy.addr(), &shown, &TLS12, "http/1.1").await.unwrap_err();
    assert!(say(&proxy, &shown, CLOSING).await.starts_with("HTTP/1.1 200"));
    let mut plain = Raw::connect(proxy.addr()).await;
    plain.write(get("/headers")).await.unwrap();
    let answer = plain.read_to_end().await.unwrap_or_default();
    assert!(!answer.starts_with(b"HTTP/"));
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn a_new_certificate_is_shown_and_a_bad_one_changes_nothing() {
    let (upstream, old, new) = (Upstream::spawn().await, certificate(), certificate());
    let proxy = proxy(&upstream, &old, TLS).await;
    let mut open = connect(&proxy, &old).await;
    proxy.rewrite("cert.pem", "no certificate");
    eventually("the bad file is noticed", async || proxy.log().contains("stays as it was")).await;
    assert!(say(&proxy, &old, CLOSING).await.starts_with("HTTP/1.1 200"));
    proxy.rewrite("cert.pem", &new.cert.pem());
    proxy.rewrite("key.pem", &new.signing_key.serialize_pem());
    eventually("the new one is shown", async || {
        shake(proxy.addr(), &new, &TLS13, "http/1.1").await.is_ok()
    })
    .await;
    shake(proxy.addr(), &old, &TLS13, "http/1.1").await.unwrap_err();
    // Whoever is there stays.
    open.write_all(CLOSING.as_bytes()).await.unwrap();
    let mut answer = String::new();
    within("an answer", open.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn h64_a_handshake_has_the_heads_deadline_and_takes_a_place() {
    let (upstream, shown) = (Upstream::spawn().await, certificate());
    let lines = "max_connections = 1\nheader_timeout = \"2s\"\ntls = { cert = \"cert.pem\", key = \"key.pem\" }";
    let proxy = proxy(&upstream, &shown, lines).await;
    // The beginning of a handshake, and no more.
    let mut silent = Raw::connect(proxy.addr()).await;
    silent.write([0x16, 3, 1]).await.unwrap();
    let waiting = async { say(&proxy, &shown, CLOSING).await };
    let closed = silent.read_to_end();
    let (answer, closed) = tokio::join!(waiting, closed);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(closed.unwrap_or_default(), b"");
}
