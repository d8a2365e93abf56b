//! What a balancer in front may say about the client.

use crate::harness::{Client, Conf, Proxy, Raw, Upstream, get, one_limit};

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

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test]
async fn a_request_has_one_id_on_every_hop() {
    let upstream = Upstream::spawn().await;
    let sent =
        [("x-request-id", "from-before"), ("traceparent", TRACE), ("connection", "x-request-id")];
    for trusted in [false, true] {
        let lines = if trusted { "trusted_proxies = [\"127.0.0.1\"]" } else { "" };
        let proxy = Proxy::spawn(&one_limit(&upstream, 1).server(lines)).await;
        let answer = Client::new().get_with(proxy.addr(), "/headers", &sent).await;
        let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
        let told = answer.header("x-request-id");
        assert!(lines.contains(&format!("x-request-id: {told}")), "{told} in {lines:?}");
        assert!(lines.contains(&format!("traceparent: {TRACE}")), "{lines:?}");
        // An id of nobody knows whom is no id.
        assert_eq!(told == "from-before", trusted, "{told}");
    }
}

#[tokio::test]
async fn refusals_and_answers_tell_the_id() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 0).queue("0").route(
        "host = \"full\"\n[[routes]]\npath = \"/say\"\nupstream = \"free\"\n[upstreams.free]\nendpoints = [\"URL\"]"
            .replace("URL", &upstream.url()),
    );
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let refused = client.get_with(proxy.addr(), "/", &[("host", "full")]).await;
    assert_eq!((refused.status, refused.header("tidegate-reason")), (503, "queue_full"));
    let problem: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
    assert_eq!(problem["request_id"], refused.header("x-request-id"));
    assert_eq!(refused.header("x-request-id").len(), 36);
    // A head that can't be read has one as well.
    let mut raw = Raw::connect(proxy.addr()).await;
    raw.write("GET / HTTP/1.1\r\nhost: a\r\nx(y): 1\r\n\r\n").await.unwrap();
    assert!(raw.head().await.contains("\r\nx-request-id: "));
    // The upstream's own id is the one that its operators know.
    let own = [("x-say", "x-request-id: req_123")];
    let answer = client.get_with(proxy.addr(), "/say?bytes=1", &own).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (200, "req_123"));
}
