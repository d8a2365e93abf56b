//! What a balancer in front may say about the client.

use crate::harness::{Conf, Proxy, Raw, Upstream, get, one_limit};

/// The lines of the head that the upstream gets from a connection that begins with this.
async fn passed(conf: &Conf, announcement: &[u8]) -> Vec<String> {
    let proxy = Proxy::spawn(conf).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    raw.write([announcement, get("/headers").as_bytes()].concat()).await.unwrap();
    let answer = raw.answer().await.expect("an answer");
    let answer = String::from_utf8(answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[tokio::test]
async fn the_upstream_hears_of_the_announced_client() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).server("proxy_protocol = [\"127.0.0.1\"]");
    let version_1 = b"PROXY TCP6 2001:db8::7 2001:db8::1 8080 80\r\n".to_vec();
    let version_2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x07\x0a\0\0\x01\x1f\x90\0\x50";
    for (announcement, client) in [(version_1, "2001:db8::7"), (version_2.to_vec(), "192.0.2.7")] {
        let lines = passed(&conf, &announcement).await;
        for name in ["x-forwarded-for", "x-real-ip"] {
            assert!(lines.contains(&format!("{name}: {client}")), "{name} {client} in {lines:?}");
        }
    }
}

#[tokio::test]
async fn what_is_turned_away_is_counted_and_logged_once() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).server("proxy_protocol = [\"127.0.0.1\"]");
    let proxy = Proxy::spawn(&conf).await;
    for _ in 0..20 {
        let raw = Raw::get(proxy.addr(), "/headers").await;
        // Closed with bytes unread, which may be a reset.
        assert!(raw.read_to_end().await.unwrap_or_default().is_empty());
    }
    let counted =
        proxy.metric("tidegate_connections_turned_away_total{why=\"proxy_header\"}").await;
    assert_eq!(counted, 20.0);
    assert_eq!(proxy.log().matches("connections were turned away").count(), 1, "{}", proxy.log());
    assert_eq!(upstream.total(), 0);
}
