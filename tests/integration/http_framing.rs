//! Framing, targets and hosts: what can be read in two ways goes nowhere, and what can be read in one arrives as it was sent.
//!
//! Names follow the table in `docs/http.md`.

use http::{Method, Request};
use http_body::Frame;

use crate::harness::{Answer, Carrier, Conf, Proxy, Raw, Upstream, one_limit, pieces, whole};

struct Pair {
    carrier: Carrier,
    upstream: Upstream,
    proxy: Proxy,
}

impl Pair {
    async fn new(carrier: Carrier) -> Self {
        Self::with(carrier, |conf| conf).await
    }

    async fn with(carrier: Carrier, change: impl FnOnce(Conf) -> Conf) -> Self {
        let upstream = Upstream::spawn().await;
        let proxy = carrier.spawn(change(one_limit(&upstream, 4))).await;
        Self { carrier, upstream, proxy }
    }

    async fn raw(&self) -> Raw {
        self.carrier.raw(&self.proxy).await
    }

    /// Everything answered to these bytes, to the close.
    async fn say(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut client = self.raw().await;
        client.write(bytes).await.unwrap();
        let answer = client.read_to_end().await.expect("a close without a reset");
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// These bytes get one answer of our own, a close, and nothing of them reaches the upstream, though a request that is fine
    /// stands behind them.
    async fn refuses(&self, bytes: impl AsRef<[u8]>, status: &str, reason: &str) {
        let shown = String::from_utf8_lossy(bytes.as_ref()).chars().take(200).collect::<String>();
        let before = self.upstream.total();
        let bytes = [bytes.as_ref(), b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"].concat();
        let answer = self.say(bytes).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{shown}\n{answer}");
        assert!(
            answer.contains(&format!("\r\ntidegate-reason: {reason}\r\n")),
            "{shown}\n{answer}"
        );
        assert!(answer.contains("\r\ncontent-type: application/problem+json\r\n"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{shown}\n{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let problem: serde_json::Value = serde_json::from_str(body).expect(&answer);
        assert_eq!(
            (&problem["status"], &problem["reason"]),
            (&status.parse().unwrap(), &reason.into())
        );
        assert_eq!(self.upstream.total(), before, "{shown}");
        assert_eq!(self.proxy.limit("llm").await["in_use"], 0, "{shown}");
    }
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /echo HTTP/1.1\r\nhost: a\r\n{fields}\r\n\r\n{body}")
}

#[tokio::test]
async fn a01_a_length_and_a_transfer_coding_together_are_refused() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let chunked = "4\r\nabcd\r\n0\r\n\r\n";
        for fields in [
            "content-length: 4\r\ntransfer-encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 4",
            "transfer-encoding: chunked\r\nx: y\r\ncontent-length: 14",
        ] {
            pair.refuses(post(fields, chunked), "400", "bad_request").await;
        }
        // Behind a request that is fine, and in pieces.
        let mut client = pair.raw().await;
        let fine = post("content-length: 2", "hi");
        let bad = post("content-length: 4\r\ntransfer-encoding: chunked", chunked);
        for piece in [fine.as_bytes(), bad.as_bytes()].concat().chunks(7) {
            client.write(piece).await.unwrap();
        }
        assert!(client.head().await.starts_with("HTTP/1.1 200"));
        client.read_until("hi").await;
        assert!(client.head().await.starts_with("HTTP/1.1 400"));
        client.read_to_end().await.unwrap();
        assert_eq!(pair.upstream.total(), 1);
    }
}

#[tokio::test]
async fn a02_lengths_and_codings_that_say_nothing_clear_are_refused() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        for fields in [
            "content-length: 4\r\ncontent-length: 5",
            "content-length: +4",
            "content-length: 4, 4",
            "content-length: -1",
            "content-length: 0x4",
            "transfer-encoding: xchunked",
            "transfer-encoding: chunked, identity",
            "transfer-encoding : chunked",
            "transfer-encoding:\x0bchunked",
        ] {
            pair.refuses(post(fields, "abcd"), "400", "bad_request").await;
        }
        let old = "POST /echo HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n";
        pair.refuses(old, "400", "bad_request").await;
    }
}

#[tokio::test]
async fn a03_a_coding_that_cannot_be_framed_anew_is_refused() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        for fields in [
            "transfer-encoding: gzip, chunked",
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        ] {
            pair.refuses(post(fields, "4\r\nabcd\r\n0\r\n\r\n"), "400", "bad_request").await;
        }
    }
}

#[tokio::test]
async fn a04_a_bad_chunk_is_the_clients_fault() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        for body in
            ["0x4\r\nabcd\r\n0\r\n\r\n", "fffffffffffffffff\r\nabcd", "4\r\nabcdXX0\r\n\r\n"]
        {
            let answer = pair.say(post("transfer-encoding: chunked", body)).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{body}\n{answer}");
            assert!(answer.contains("tidegate-reason: bad_request"), "{answer}");
            assert!(answer.contains("connection: close"), "{answer}");
        }
        pair.upstream.wait_current(0).await;
        assert_eq!(carrier.call(&pair.proxy).await.get("/echo", &[]).await.status, 200);
    }
}

#[tokio::test]
async fn a04_what_clients_break_is_no_failure_of_the_upstream() {
    for carrier in Carrier::ALL {
        let lines = "ejection = { failures = 1, time = \"5m\", share = 1.0 }";
        let pair = Pair::with(carrier, |conf| conf.upstream(lines)).await;
        // Read before it may have a slot, and streamed.
        for length in ["9", "100000"] {
            if carrier.is_http2() {
                let mut client = carrier.call(&pair.proxy).await;
                let short = pieces([Frame::data("one".into())], true);
                let request = client.request(Method::POST, "a", "/echo");
                let request = request.header("content-length", length).body(short).unwrap();
                client.send(request).await.expect_err("a stream that is reset");
            } else {
                let head = post("transfer-encoding: chunked", "3\r\none\r\n");
                for chunk in ["0x4\r\nabcd\r\n", "4\r\nabcdXX"] {
                    let answer = pair.say(format!("{head}{chunk}")).await;
                    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
                    assert!(answer.contains("\"reason\":\"bad_request\""), "{answer}");
                }
            }
            // And those who leave in the middle of it.
            let mut client = carrier.call(&pair.proxy).await;
            let before = pair.upstream.total();
            let body = pieces([Frame::data("one".into())], false);
            tokio::select! {
                _ = client.open(Method::POST, "/echo", &[], body) => panic!("an answer"),
                () = pair.upstream.wait_total(before + 1) => {}
            }
            drop(client);
            pair.upstream.wait_current(0).await;
        }
        let endpoint = format!("{{upstream=\"llm\",endpoint=\"{}\"}}", pair.upstream.addr());
        let metric = async |name: &str| {
            pair.proxy.metric(&format!("tidegate_endpoint_{name}{endpoint}")).await
        };
        assert_eq!((metric("up").await, metric("ejections_total").await), (1.0, 0.0));
        // What is the upstream's failure counts at once.
        carrier.call(&pair.proxy).await.get("/reset", &[]).await;
        assert_eq!((metric("up").await, metric("ejections_total").await), (0.0, 1.0));
    }
}

#[tokio::test]
async fn a05_a_chunk_extension_is_dropped() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let chunks = "3;a=\"b\"\r\none\r\n0\r\n\r\n";
        let answer =
            pair.say(post("connection: close\r\ntransfer-encoding: chunked", chunks)).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("one"), "{answer}");
    }
}

#[tokio::test]
async fn a06_a_head_that_is_not_clean_is_refused() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        for head in [
            "GET /echo HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n",
            "GET /echo HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
            "GET /echo HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
            "GET /echo HTTP/1.1\r\nhost: a\r\nX(A): b\r\n\r\n",
            "GET /echo HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n",
            "GET /ec ho HTTP/1.1\r\nhost: a\r\n\r\n",
            "GET /echo HTTP/3.7\r\nhost: a\r\n\r\n",
            "\x16\x03\x01\x02\0\x01\0\x01\r\n\r\n",
        ] {
            pair.refuses(head, "400", "bad_request").await;
        }
    }
}

#[tokio::test]
async fn a09_a_body_is_kept_whatever_the_method() {
    for carrier in Carrier::ALL {
        let pair = Pair::new(carrier).await;
        let mut client = carrier.call(&pair.proxy).await;
        for method in [Method::GET, Method::DELETE, Method::OPTIONS] {
            // Of a length that is said, and of one that isn't.
            let chunked = if carrier.is_http2() { &[][..] } else { &CHUNKED };
            for (fields, body) in
                [(&[][..], whole("one")), (chunked, pieces([Frame::data("one".into())], true))]
            {
                let answer = client.ask(method.clone(), "/echo", fields, body).await;
                assert_eq!((answer.status, &answer.body[..]), (200, &b"one"[..]), "{carrier:?}");
            }
        }
    }
}

const CHUNKED: [(&str, &str); 1] = [("transfer-encoding", "chunked")];

#[tokio::test]
async fn a10_an_answer_with_two_lengths_has_the_one_that_was_true() {
    for carrier in Carrier::ALL {
        let pair = Pair::new(carrier).await;
        let mut client = carrier.call(&pair.proxy).await;
        // The upstream's own length is 4.
        let answer = client.get("/say?bytes=4", &[("x-say", "content-length: 5")]).await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (502, "upstream_reset"));
        // Both: chunks are the framing, and here there are none.
        let fields = [("x-say", "transfer-encoding: chunked")];
        client.try_get("/say?bytes=4", &fields).await.expect_err("an answer that is cut");
        pair.upstream.wait_current(0).await;
        let answer = carrier.call(&pair.proxy).await.get("/echo", &[]).await;
        assert_eq!(answer.status, 200, "{carrier:?}");
    }
}

#[tokio::test]
async fn b14_one_host_and_a_clean_one_or_none() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        for fields in [
            "",
            "host: a\r\nhost: b\r\n",
            "host: a\r\nhost: a\r\n",
            "host: a/b\r\n",
            "host: x@a\r\n",
            "host: a b\r\n",
            "host: [::1\r\n",
            "host: a:b\r\n",
            "host: %61\r\n",
        ] {
            let request = format!("GET /echo HTTP/1.1\r\nconnection: close\r\n{fields}\r\n");
            let answer = pair.say(request).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{fields}\n{answer}");
            assert!(answer.contains("tidegate-reason: bad_request"), "{answer}");
        }
        assert_eq!(pair.upstream.total(), 0);
    }
    // Over HTTP/2 the authority is the host, whatever a field beside it says.
    for carrier in Carrier::HTTP2 {
        let pair = Pair::with(carrier, |conf| conf.upstream("host = \"keep\"")).await;
        let mut client = carrier.call(&pair.proxy).await;
        for hosts in [&[][..], &["a"], &["b"], &["b/x"], &["x@b"]] {
            let fields: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            let answer = client.get("/headers", &fields).await;
            assert_eq!(answer.status, 200, "{carrier:?}: {hosts:?}");
            let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
            let told: Vec<_> = lines.iter().filter(|line| line.contains("host: ")).collect();
            assert_eq!(told, ["host: a", "x-forwarded-host: a"], "{carrier:?}: {hosts:?}");
        }
        for hosts in [["a", "a"], ["a", "b"]] {
            let answer = client.get("/headers", &hosts.map(|host| ("host", host))).await;
            assert_eq!((answer.status, answer.header("tidegate-reason")), (400, "bad_request"));
            assert_eq!(answer.header("content-type"), "application/problem+json");
            let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(
                (&problem["status"], &problem["reason"]),
                (&400.into(), &"bad_request".into())
            );
        }
        assert_eq!(pair.upstream.total(), 5);
    }
}

#[tokio::test]
async fn b15_an_absolute_target_decides_about_the_host() {
    let other =
        "\n[[routes]]\nhost = \"secret\"\npath = \"/\"\nmethods = [\"DELETE\"]\nupstream = \"llm\"";
    for carrier in Carrier::ALL {
        let change = |conf: Conf| conf.upstream("host = \"keep\"").route(other);
        let pair = Pair::with(carrier, change).await;
        if !carrier.is_http2() {
            for (target, host, status, forwarded) in [
                ("http://open/headers", "secret", "200", "host: open"),
                ("http://secret/headers", "open", "405", ""),
            ] {
                let request =
                    format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
                let answer = pair.say(request).await;
                assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
                assert!(answer.contains(forwarded), "{answer}");
                assert!(!answer.contains("x-forwarded-host: secret"), "{answer}");
            }
        }
        let mut client = carrier.call(&pair.proxy).await;
        for (host, status) in [("open", 200), ("secret", 405), ("SECRET:80", 405)] {
            let request = client.request(Method::GET, host, "/headers").body(whole("")).unwrap();
            // The whole answer, or the connection would be given up with the rest of it.
            let answer = Answer::whole(client.send(request).await.unwrap()).await.unwrap();
            assert_eq!(answer.status, status, "{carrier:?}: {host}");
        }
    }
}

#[tokio::test]
async fn b15_a_host_that_is_no_url_is_no_target() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let answer = pair.say("GET a:80 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
        // Before HTTP/1.1 nobody had to say a host; the upstream is told that there is none.
        let answer = pair.say("GET /headers HTTP/1.0\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.0 200 "), "{answer}");
        assert_eq!(pair.upstream.total(), 1);
    }
}

#[tokio::test]
async fn a04_trailers_with_bare_line_ends_say_nothing_of_the_next_request() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let fake = "GET / HTTP/1.1\ncontent-length: 5\ntransfer-encoding: chunked";
        let first = format!(
            "POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: y\n\n{fake}\r\n\r\n"
        );
        let next = "POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 8\r\nconnection: close\r\n\r\nARRIVES!";
        let answer = pair.say(first + next).await;
        assert!(answer.ends_with("ARRIVES!"), "{answer}");
        assert_eq!(pair.upstream.total(), 2);
    }
}

#[tokio::test]
async fn b16_connect_goes_nowhere() {
    for carrier in Carrier::ALL {
        let pair = Pair::new(carrier).await;
        for target in ["h:22", &pair.upstream.addr().to_string()] {
            let mut client = carrier.call(&pair.proxy).await;
            let request = Request::builder().method(Method::CONNECT).uri(target);
            let request = if carrier.is_http2() { request } else { request.header("host", target) };
            let answer = client.send(request.body(whole("")).unwrap()).await.unwrap();
            assert_eq!(answer.status(), 405, "{carrier:?}");
            assert_eq!(answer.headers()["tidegate-reason"], "method_not_allowed");
            assert!(answer.headers()["allow"].to_str().unwrap().starts_with("GET"));
        }
        assert_eq!(pair.upstream.total(), 0);
    }
}

/// What the upstream echoes would be what we added, credentials among it.
#[tokio::test]
async fn b16_trace_goes_nowhere() {
    for carrier in Carrier::ALL {
        let pair = Pair::new(carrier).await;
        let mut client = carrier.call(&pair.proxy).await;
        let answer = client.ask(Method::TRACE, "/headers", &[], whole("")).await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (405, "method_not_allowed"));
        assert_eq!(pair.upstream.total(), 0, "{carrier:?}");
    }
}

#[tokio::test]
async fn b17_asking_the_proxy_itself_is_answered_here() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let answer = pair.say("OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
        assert_eq!(pair.upstream.total(), 0);
    }
}

#[tokio::test]
async fn b18_the_target_arrives_byte_for_byte_and_a_doubtful_one_does_not() {
    let admin = "\n[[routes]]\npath = \"/admin/\"\nmethods = [\"DELETE\"]\nupstream = \"llm\"";
    for carrier in Carrier::ALL {
        let pair = Pair::with(carrier, |conf| conf.route(admin)).await;
        let mut client = carrier.call(&pair.proxy).await;
        let query = "?q=a%2Fb&&r=%20+;%5B&x=%x";
        let answer = client.get(&format!("/headers{query}"), &[]).await;
        let body = String::from_utf8(answer.body.to_vec()).unwrap();
        assert!(body.contains(&format!("GET /headers{query} HTTP/1.1")), "{body}");
        let answer = client.get(&format!("/a%2Fb//c/../d/%2e%2e/x{query}"), &[]).await;
        let reason = answer.header("tidegate-reason");
        assert_eq!((answer.status, reason), (404, ""), "the upstream knows no such path");
        // Another route for whoever resolves dots, slashes or escapes: refused, or that route.
        for target in
            ["/x/../admin/y", "/x/%2e%2e/admin/y", "/%61dmin/y", "//admin/y", "/admin%2Fy"]
        {
            let before = pair.upstream.total();
            let answer = client.get(target, &[]).await;
            assert!([400, 405].contains(&answer.status), "{carrier:?}: {target}\n{answer:?}");
            assert_eq!(pair.upstream.total(), before, "{target}");
        }
    }
}

#[tokio::test]
async fn b21_a_head_that_is_too_long_is_told_so() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let fine = format!(
            "GET /echo?{} HTTP/1.1\r\nhost: a\r\nx: {}\r\n",
            "q".repeat(8_000),
            "v".repeat(20_000)
        );
        let answer = pair.say(format!("{fine}connection: close\r\n\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let target = "q".repeat(70_000);
        pair.refuses(
            format!("GET /?{target} HTTP/1.1\r\nhost: a\r\n\r\n"),
            "414",
            "head_too_large",
        )
        .await;
        let many = "x: y\r\n".repeat(200);
        pair.refuses(format!("GET / HTTP/1.1\r\nhost: a\r\n{many}\r\n"), "431", "head_too_large")
            .await;
        let large = format!("x: {}\r\n", "v".repeat(10_000)).repeat(50);
        pair.refuses(format!("GET / HTTP/1.1\r\nhost: a\r\n{large}\r\n"), "431", "head_too_large")
            .await;
    }
}

#[tokio::test]
async fn b23_bytes_beyond_ascii_pass_as_they_are() {
    for carrier in Carrier::HTTP1 {
        let pair = Pair::new(carrier).await;
        let mut client = pair.raw().await;
        let value = "gr\u{fc}n \u{2603}";
        let request =
            format!("GET /headers HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: {value}\r\n\r\n");
        client.write(request).await.unwrap();
        let answer = String::from_utf8(client.read_to_end().await.unwrap()).unwrap();
        assert!(answer.contains(&format!("x: {value}")), "{answer}");
    }
}
