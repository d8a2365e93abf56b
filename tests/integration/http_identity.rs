//! Which fields cross, who the client is, and what gRPC clients are told. Names follow `docs/http.md`.

use http::Method;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::harness::{
    Carrier, Conf, H2, Proxy, Raw, Upstream, eventually, one_limit, pieces, trailers, unused_addr,
    within,
};

/// The lines of the head that the upstream gets for these.
async fn passed(carrier: Carrier, conf: Conf, fields: &str) -> Vec<String> {
    let proxy = carrier.spawn(conf).await;
    let mut client = carrier.raw(&proxy).await;
    let request = format!("GET /headers HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{fields}\r\n");
    client.write(request).await.unwrap();
    let answer = String::from_utf8(client.read_to_end().await.unwrap()).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    serde_json::from_str(body).unwrap()
}

fn values<'a>(lines: &'a [String], name: &str) -> Vec<&'a str> {
    let field = |line: &'a String| line.split_once(": ").filter(|(key, _)| *key == name);
    lines.iter().filter_map(field).map(|(_, value)| value).collect()
}

#[tokio::test]
async fn c25_c26_fields_of_the_connection_stay_behind_and_identity_does_not() {
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::HTTP1 {
        let lines = passed(
        carrier,
        one_limit(&upstream, 1),
        "connection:\r\nconnection: x-own, X-Forwarded-For, Authorization, cookie, host\r\nx-own: 1\r\nauthorization: Bearer x\r\n\
         cookie: a=1\r\nkeep-alive: timeout=5\r\nproxy-connection: close\r\nte: gzip\r\nproxy-authorization: Basic x\r\nx-kept: 1\r\n",
    )
    .await;
        for gone in
            ["connection", "x-own", "keep-alive", "proxy-connection", "te", "proxy-authorization"]
        {
            assert!(values(&lines, gone).is_empty(), "{gone}: {lines:?}");
        }
        for (kept, value) in [
            ("authorization", "Bearer x"),
            ("cookie", "a=1"),
            ("x-forwarded-for", "127.0.0.1"),
            ("x-kept", "1"),
        ] {
            assert_eq!(values(&lines, kept), [value], "{lines:?}");
        }
        assert_eq!(values(&lines, "host").len(), 1);
    }
}

#[tokio::test]
async fn c26_c34_the_answers_connection_stays_behind_and_cookies_stay_apart() {
    let upstream = Upstream::spawn().await;
    let say = "connection: x-own|x-own: 1|keep-alive: timeout=5|proxy-authenticate: Basic|set-cookie: a=1|set-cookie: b=2|tidegate-reason: queue_full";
    for carrier in Carrier::ALL {
        let proxy = carrier.spawn(one_limit(&upstream, 1)).await;
        let answer = carrier.call(&proxy).await.get("/say?bytes=2", &[("x-say", say)]).await;
        assert_eq!((answer.status, answer.body.len()), (200, 2), "{carrier:?}");
        for gone in ["connection", "x-own", "keep-alive", "proxy-authenticate", "tidegate-reason"] {
            assert_eq!(answer.header(gone), "", "{carrier:?}: {gone}");
        }
        let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().collect();
        assert_eq!(cookies, ["a=1", "b=2"], "{carrier:?}");
    }
}

#[tokio::test]
async fn c28_an_http2_request_becomes_a_clean_http1_one() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).upstream("host = \"keep\"")).await;
    let mut client = H2::connect(proxy.addr()).await;
    let fields = [("cookie", "a=1"), ("cookie", "b=2"), ("te", "trailers")];
    let answer = client.send(Method::GET, "/headers", &fields).await;
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let lines: Vec<String> = serde_json::from_slice(&body).unwrap();
    assert_eq!(lines[0], "GET /headers HTTP/1.1");
    assert_eq!(values(&lines, "cookie"), ["a=1; b=2"]);
    assert_eq!(values(&lines, "host"), [proxy.addr().to_string()]);
    assert_eq!(values(&lines, "te"), ["trailers"]);
}

#[tokio::test]
async fn c29_c30_c31_nobody_tells_who_he_is_unless_he_is_trusted() {
    let upstream = Upstream::spawn().await;
    let claims = [
        ("x-forwarded-for", "6.6.6.6"),
        ("x-forwarded-proto", "gopher"),
        ("x-forwarded-host", "evil"),
        ("forwarded", "for=6.6.6.6"),
        ("x-real-ip", "6.6.6.6"),
        ("x_forwarded_for", "6.6.6.6"),
        ("tidegate-slot", "1"),
        ("tidegate_slot", "1"),
        ("x-priority", "critical"),
    ];
    let class = "class = { header = \"x-priority\", default = \"normal\" }";
    for carrier in Carrier::ALL {
        let passed = async |conf: Conf| -> Vec<String> {
            let proxy = carrier.spawn(conf.route(class)).await;
            let answer = carrier.call(&proxy).await.get("/headers", &claims).await;
            assert_eq!(answer.status, 200);
            serde_json::from_slice(&answer.body).unwrap()
        };
        let lines = passed(one_limit(&upstream, 1)).await;
        assert!(
            !lines.iter().any(|line| line.contains("6.6.6.6") || line.contains("evil")),
            "{lines:?}"
        );
        for gone in ["forwarded", "x_forwarded_for", "tidegate-slot", "tidegate_slot", "x-priority"]
        {
            assert!(values(&lines, gone).is_empty(), "{carrier:?}, {gone}: {lines:?}");
        }
        assert_eq!(values(&lines, "x-forwarded-for"), ["127.0.0.1"]);
        assert_eq!(values(&lines, "x-forwarded-proto"), [carrier.scheme()]);

        let trusting = one_limit(&upstream, 1).server("trusted_proxies = [\"127.0.0.0/8\"]");
        let lines = passed(trusting).await;
        assert_eq!(values(&lines, "x-forwarded-for"), ["6.6.6.6, 127.0.0.1"]);
        assert_eq!(values(&lines, "x-real-ip"), ["6.6.6.6"]);
        assert_eq!(values(&lines, "x-forwarded-proto"), ["gopher"]);
        for gone in ["forwarded", "x_forwarded_for", "tidegate-slot", "tidegate_slot"] {
            assert!(values(&lines, gone).is_empty(), "{carrier:?}, {gone}: {lines:?}");
        }
    }
}

#[tokio::test]
async fn c32_trailers_claim_nothing_that_headers_cannot() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::ALL {
        let proxy = carrier.spawn(one_limit(&upstream, 1).endpoint(url.clone())).await;
        let mut client = carrier.call(&proxy).await;
        let names = "x-sum, authorization, x-forwarded-for, tidegate-slot";
        let claims = trailers(&[
            ("x-sum", "1"),
            ("authorization", "x"),
            ("x-forwarded-for", "6.6.6.6"),
            ("tidegate-slot", "1"),
        ]);
        let fields = [("te", "trailers"), ("trailer", names)];
        let body = pieces([Frame::data("hi".into()), claims], true);
        let asked = async { client.open(Method::POST, "/", &fields, body).await.status() };
        let answered = async {
            let (mut stream, _) = within("a connection", listener.accept()).await.unwrap();
            let mut seen = Vec::new();
            while !(seen.windows(3).any(|at| at == b"\n0\r") && seen.ends_with(b"\r\n\r\n")) {
                within("the request", stream.read_buf(&mut seen)).await.unwrap();
            }
            let answer = b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n";
            stream.write_all(answer).await.unwrap();
            String::from_utf8(seen).unwrap()
        };
        let (status, seen) = tokio::join!(asked, answered);
        assert_eq!(status, 204);
        let (_, trailers) = seen.split_once("\r\n0\r\n").unwrap();
        assert_eq!(trailers, "x-sum: 1\r\n\r\n", "{carrier:?}");
    }
}

const GRPC: [(&str, &str); 2] = [("content-type", "application/grpc"), ("te", "trailers")];

#[tokio::test]
async fn c33_trailers_reach_an_http2_client() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let answer = H2::connect(proxy.addr()).await.send(Method::POST, "/trailers", &GRPC).await;
    let body = within("the trailers", answer.into_body().collect()).await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-sum"], "1");
    assert_eq!(body.to_bytes(), "one");
    eventually("its slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
}

#[tokio::test]
async fn grpc_clients_are_refused_in_their_own_words() {
    let upstream = Upstream::spawn().await;
    let nowhere = format!(
        "\n[[routes]]\npath = \"/nowhere\"\nupstream = \"nowhere\"\n[[routes]]\npath = \"/get\"\nmethods = [\"GET\"]\nupstream = \"llm\"\n\
         [upstreams.nowhere]\nendpoints = [\"http://{}\"]",
        unused_addr()
    );
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).queue("0").route(nowhere)).await;
    let _holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let mut client = H2::connect(proxy.addr()).await;
    for (path, status, reason) in [
        ("/pkg.Service/Call", "8", "queue_full"),
        ("/nowhere/Call", "14", "upstream_connect"),
        ("/get/Call", "12", "method_not_allowed"),
    ] {
        let answer = client.send(Method::POST, path, &GRPC).await;
        assert_eq!(answer.status(), 200, "{path}");
        let head = answer.headers().clone();
        assert_eq!(head["content-type"], "application/grpc");
        assert_eq!(
            (head["grpc-status"].to_str().unwrap(), &head["tidegate-reason"]),
            (status, &reason.parse::<http::HeaderValue>().unwrap())
        );
        assert!(!head["grpc-message"].is_empty());
        assert_eq!(head.contains_key("grpc-retry-pushback-ms"), status == "8", "{path}");
        assert!(answer.into_body().collect().await.unwrap().to_bytes().is_empty());
    }
    // Others get what they always got.
    let answer = client.send(Method::POST, "/x", &[("content-type", "application/json")]).await;
    assert_eq!(answer.status(), 503);
}
