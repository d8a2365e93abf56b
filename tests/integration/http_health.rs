//! Endpoints that aren't well, by their own word or by what becomes of requests: they get none, until they are.

use serde_json::Value;

use crate::harness::{Client, Conf, Proxy, Raw, Upstream, eventually, one_limit, unused_addr};

const CHECK: &str =
    r#"health = { path = "/health", interval = "50ms", healthy = 2, unhealthy = 2 }"#;

/// Two upstreams that are endpoints of one.
async fn two(lines: &'static str) -> (Upstream, Upstream, Proxy) {
    let (a, b) = (Upstream::spawn().await, Upstream::spawn().await);
    let proxy = Proxy::spawn(&both(&a, &b).upstream(lines)).await;
    (a, b, proxy)
}

fn both(a: &Upstream, b: &Upstream) -> Conf {
    one_limit(a, 4).endpoints([a.url(), b.url()])
}

/// What `/status` says of each endpoint.
async fn states(proxy: &Proxy) -> [String; 2] {
    let status = proxy.status().await;
    [0, 1].map(|index| {
        let endpoint: &Value = &status["upstreams"]["llm"]["endpoints"][index];
        endpoint["addresses"][0]["state"].as_str().unwrap().to_owned()
    })
}

async fn until(proxy: &Proxy, wanted: [&str; 2]) {
    let what = format!("endpoints are {wanted:?}");
    eventually(&what, async || states(proxy).await == wanted).await;
}

/// Requests until each of these upstreams had one.
async fn until_used<const N: usize>(proxy: &Proxy, upstreams: [&Upstream; N]) {
    let before = upstreams.map(Upstream::total);
    eventually("each has served", async || {
        assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
        upstreams.iter().zip(before).all(|(upstream, before)| upstream.total() > before)
    })
    .await;
}

/// Ten requests, none of which goes there.
async fn is_spared(proxy: &Proxy, upstream: &Upstream) {
    let before = upstream.total();
    for _ in 0..10 {
        assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    }
    assert_eq!(upstream.total(), before);
}

fn lines(proxy: &Proxy, text: &str) -> usize {
    proxy.log().matches(text).count()
}

#[tokio::test]
async fn an_unhealthy_endpoint_gets_no_request_until_it_is_well_again() {
    let (a, b, proxy) = two(CHECK).await;
    until_used(&proxy, [&a, &b]).await;
    for status in [503, 404, 302] {
        a.feel(status);
        until(&proxy, ["unhealthy", "up"]).await;
        is_spared(&proxy, &a).await;
        let up = format!(r#"tidegate_endpoint_up{{upstream="llm",endpoint="{}"}}"#, a.addr());
        assert_eq!(proxy.metric(&up).await, 0.0);
        a.feel(204);
        until(&proxy, ["up", "up"]).await;
        until_used(&proxy, [&a, &b]).await;
        assert_eq!(proxy.metric(&up).await, 1.0);
    }
    assert_eq!(lines(&proxy, "an endpoint is unhealthy"), 3);
    assert_eq!(lines(&proxy, "an endpoint is healthy"), 3);
}

#[tokio::test]
async fn only_the_expected_status_in_time_is_health() {
    let named = r#"health = { path = "/health", interval = "50ms", statuses = [401] }"#;
    let (a, _b, proxy) = two(named).await;
    a.feel(401);
    until(&proxy, ["up", "unhealthy"]).await;

    let silent = r#"health = { path = "/silent", interval = "50ms", timeout = "50ms" }"#;
    let (_a, _b, proxy) = two(silent).await;
    until(&proxy, ["unhealthy", "unhealthy"]).await;
    assert!(lines(&proxy, "deadline has elapsed") > 0, "{}", proxy.log());
}

#[tokio::test]
async fn where_nobody_is_well_everybody_serves() {
    let (a, b, proxy) = two(CHECK).await;
    a.feel(500);
    b.feel(500);
    until(&proxy, ["unhealthy", "unhealthy"]).await;
    until_used(&proxy, [&a, &b]).await;
}

#[tokio::test]
async fn who_fails_requests_is_out_for_a_time_and_never_more_than_the_share() {
    let (a, b, proxy) =
        two(r#"ejection = { failures = 3, statuses = [500, 503], time = "3s" }"#).await;
    let client = Client::new();
    for path in ["/status/503", "/status/500", "/status/502", "/status/503"] {
        client.get(proxy.addr(), path).await;
        client.get(proxy.addr(), path).await;
        // Two in a row, and a good answer begins the count anew.
        until_used(&proxy, [&a, &b]).await;
    }
    for _ in 0..10 {
        client.get(proxy.addr(), "/status/502").await;
    }
    assert_eq!(lines(&proxy, "an endpoint is ejected"), 0);
    for _ in 0..20 {
        client.get(proxy.addr(), "/status/503").await;
    }
    let ejected = match states(&proxy).await.each_ref().map(String::as_str) {
        ["ejected", "up"] => &a,
        ["up", "ejected"] => &b,
        other => panic!("{other:?}"),
    };
    is_spared(&proxy, ejected).await;
    until(&proxy, ["up", "up"]).await;
    until_used(&proxy, [&a, &b]).await;
    let name = |upstream: &Upstream| {
        format!(
            r#"tidegate_endpoint_ejections_total{{upstream="llm",endpoint="{}"}}"#,
            upstream.addr()
        )
    };
    assert_eq!(proxy.metric(&name(&a)).await + proxy.metric(&name(&b)).await, 1.0);
    assert_eq!(lines(&proxy, "an endpoint is ejected"), 1);
    assert_eq!(lines(&proxy, "an endpoint is back"), 1);
}

#[tokio::test]
async fn who_cannot_be_reached_or_does_not_answer_has_failed() {
    let alive = Upstream::spawn().await;
    let dead = format!("http://{}", unused_addr());
    let conf = one_limit(&alive, 4).endpoints([alive.url(), dead]);
    let proxy = Proxy::spawn(&conf.upstream("ejection = { failures = 2, time = \"1m\" }")).await;
    eventually("the dead one is out", async || {
        assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
        states(&proxy).await == ["up", "ejected"]
    })
    .await;

    let late = "response_timeout = \"50ms\"\nejection = { failures = 1, time = \"1m\" }";
    for path in ["/silent", "/reset"] {
        let (_a, _b, proxy) = two(late).await;
        assert!(Client::new().get(proxy.addr(), path).await.status >= 502);
        let states = states(&proxy).await;
        assert_eq!(states.iter().filter(|state| *state == "ejected").count(), 1, "{path}");
    }
}

#[tokio::test]
async fn a04_what_a_client_did_wrong_is_no_failure_of_an_endpoint() {
    let (_a, _b, proxy) = two("ejection = { failures = 1, time = \"1m\", share = 1.0 }").await;
    let head = "POST /echo HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n";
    for bad in ["1\r\na\r\nzz\r\n", "zz\r\n"] {
        for _ in 0..4 {
            let mut raw = Raw::connect(proxy.addr()).await;
            raw.write(format!("{head}{bad}")).await.unwrap();
            assert!(raw.head().await.starts_with("HTTP/1.1 400"));
        }
    }
    let mut left = Raw::connect(proxy.addr()).await;
    left.write(format!("{head}1\r\na\r\n")).await.unwrap();
    left.reset();
    eventually("nothing is in flight", async || proxy.limit("llm").await["in_use"] == 0).await;
    assert_eq!(states(&proxy).await, ["up", "up"]);
}
