//! Slow, silent and early: clients that stall, and answers that come before the request ends. Names follow `docs/http.md`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use http::{Method, Request};
use http_body::Frame;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
};

use crate::harness::{
    Answer, Carrier, Client, Collector, Proxy, Raw, Reload, Upstream, eventually, get, one_limit,
    pieces, unused_addr, whole, within,
};

#[tokio::test]
async fn h64_a_head_begun_behind_another_request_has_its_deadline() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).server("header_timeout = \"1s\"")).await;
    let mut client = Raw::connect(proxy.addr()).await;
    client.write(get("/gate") + "GET /echo HTTP/1.1\r\n").await.unwrap();
    upstream.wait_current(1).await;
    upstream.open(1);
    // The keep-alive timeout is 75 s.
    let answer = client.read_to_end().await.unwrap_or_default();
    assert_eq!(String::from_utf8_lossy(&answer).matches("HTTP/1.1").count(), 1);
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn e43_whoever_leaves_behind_an_upload_that_nobody_takes_is_found_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::ALL {
        let conf = one_limit(&upstream, 1).endpoint(url.clone());
        let proxy = carrier.spawn(conf.upstream("response_timeout = \"3s\"")).await;
        let mut client = carrier.call(&proxy).await;
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let flood = std::iter::repeat_with(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Frame::data(Bytes::from_static(&[b'x'; 64 * 1024]))
        });
        let full = async {
            let (mut stream, _) = within("a connection", listener.accept()).await.unwrap();
            // The head, and then nothing of the body.
            stream.read_buf(&mut Vec::with_capacity(256)).await.unwrap();
            let (mut before, mut same) = (0, 0);
            eventually("everything on the way is full", async || {
                let now = sent.load(Ordering::Relaxed);
                same = if now == before { same + 1 } else { 0 };
                before = now;
                same == 10
            })
            .await;
            stream
        };
        let mut stream = tokio::select! {
            _ = client.open(Method::POST, "/", &[], pieces(flood, true)) => panic!("an answer"),
            stream = full => stream,
        };
        assert_eq!(proxy.limit("llm").await["in_use"], 1, "{carrier:?}");
        drop(client);
        eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
        let mut rest = Vec::new();
        let end = within("the upstream's connection ends", stream.read_to_end(&mut rest)).await;
        end.expect_err("a reset, which no unsent byte holds back");
    }
}

#[tokio::test]
async fn e44_a_client_that_reads_nothing_is_cut() {
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::ALL {
        let conf = one_limit(&upstream, 1).server("stall_timeout = \"1s\"");
        let proxy = carrier.spawn(conf).await;
        let mut client = carrier.call(&proxy).await;
        let unread = client.open(Method::GET, "/big?bytes=50000000", &[], whole("")).await;
        assert_eq!(unread.status(), 200);
        upstream.wait_current(0).await;
        eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
        Answer::whole(unread).await.expect_err("an answer that is cut");
    }
}

#[tokio::test]
async fn e46_however_a_request_ends_its_slot_is_back_once() {
    let upstream = Upstream::spawn().await;
    let nowhere = format!(
        "\n[[routes]]\npath = \"/nowhere\"\nupstream = \"nowhere\"\n\
         [upstreams.nowhere]\nlimits = [\"llm\"]\nendpoints = [\"http://{}\"]",
        unused_addr()
    );
    for carrier in Carrier::ALL {
        let lines = "response_timeout = \"1s\"\nidle_timeout = \"1s\"\nlinger = \"0s\"";
        let conf = one_limit(&upstream, 1).upstream(lines).route(nowhere.clone());
        let proxy = carrier.spawn(conf).await;
        let mut client = carrier.call(&proxy).await;
        for (path, status) in [
            ("/status/200", Some(200)),
            ("/status/204", Some(204)),
            ("/sse?events=3", Some(200)),
            ("/trailers", Some(200)),
            ("/status/503", Some(503)),
            ("/reset", Some(502)),
            ("/silent", Some(504)),
            ("/nowhere", Some(502)),
            ("/trunc", None),
            ("/say?bytes=100000&cut=1", None),
            ("/sse?events=1&gate=1", None),
        ] {
            let answer = client.try_get(path, &[]).await.ok();
            assert_eq!(answer.map(|answer| answer.status), status, "{carrier:?}: {path}");
            eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
            // Over HTTP/2 no stream takes the others with it.
            if status.is_none() && !carrier.is_http2() {
                client = carrier.call(&proxy).await;
            }
        }
        upstream.wait_current(0).await;
        assert_eq!((upstream.take_highest(), proxy.metric("tidegate_overshoot").await), (1, 0.0));
    }
}

#[tokio::test]
async fn h65_a_body_that_does_not_come_ends_with_408_and_keeps_no_slot() {
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::ALL {
        let conf = one_limit(&upstream, 1).server("stall_timeout = \"1s\"");
        let proxy = carrier.spawn(conf).await;
        // One that is read before it may have a slot, and one that is streamed.
        for (fields, takes_slot) in [(&[("content-length", "9")][..], false), (&[], true)] {
            let before = upstream.total();
            let mut client = carrier.call(&proxy).await;
            let body = pieces([Frame::data("one".into())], false);
            let answer = client.ask(Method::POST, "/echo", fields, body).await;
            assert_eq!((answer.status, answer.header("tidegate-reason")), (408, "client_timeout"));
            assert_eq!(upstream.total() - before, usize::from(takes_slot), "{carrier:?}");
            eventually("no slot is taken", async || proxy.limit("llm").await["in_use"] == 0).await;
            upstream.wait_current(0).await;
        }
    }
}

#[tokio::test]
async fn e44_an_http2_stream_that_nobody_reads_is_cut_and_the_others_go_on() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).server("stall_timeout = \"1s\"")).await;
    let stream = TcpStream::connect(proxy.addr()).await.unwrap();
    let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(1024)
        .initial_connection_window_size(1 << 24)
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let mut ask = async |path: &str| {
        let uri = format!("http://{}{path}", proxy.addr());
        let request = Request::get(uri).body(Full::<Bytes>::default()).unwrap();
        within(path, sender.send_request(request)).await.unwrap()
    };
    // One larger than any buffer, and one of two pieces of which nothing but the first is taken.
    let unread = [ask("/big?bytes=30000000").await, ask("/big?bytes=2000").await];
    let in_use = async || proxy.limit("llm").await["in_use"].clone();
    eventually("the slots are back", async || in_use().await == 0).await;
    upstream.wait_current(0).await;
    assert_eq!(ask("/echo").await.status(), 200);
    drop(unread);
}

#[tokio::test]
async fn f50_f52_curl_sees_an_early_answer_whatever_it_speaks() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).queue("0")).await;
    let holder = Raw::get(proxy.addr(), "/gate").await;
    upstream.wait_current(1).await;
    uploads_see(&proxy, " queue_full 503").await;
    upstream.open(1);
    drop(holder);
}

#[tokio::test]
async fn f52_curl_sees_what_the_upstream_says_in_the_middle_of_an_upload() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // The head, and then nothing of the body.
            stream.read_buf(&mut Vec::with_capacity(256)).await.unwrap();
            let answer = "HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
            stream.write_all(answer.as_bytes()).await.unwrap();
            open.push(stream);
        }
    });
    let proxy = Proxy::spawn(&one_limit(&Upstream::spawn().await, 1).endpoint(url)).await;
    uploads_see(&proxy, "  413").await;
    eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
}

async fn uploads_see(proxy: &Proxy, expected: &str) {
    let body = NamedTempFile::new().unwrap();
    std::fs::write(&body, vec![b'x'; 16_000_000]).unwrap();
    let body = format!("@{}", body.path().display());
    let url = format!("http://{}/echo", proxy.addr());
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        for upload in 1..=5 {
            let mut curl = Command::new("curl");
            curl.args(["-sS", "-o", "-", "-w", " %header{tidegate-reason} %{http_code}", version]);
            curl.args(["-H", "expect:", "--data-binary", &body, &url]).kill_on_drop(true);
            let output = within("curl", curl.output()).await.expect("curl is on the PATH");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(text.ends_with(expected), "{version} upload {upload}: {text} {error}");
            // Over HTTP/2 curl stops an upload at a head above 399 by ending its stream short of its length, which h2 answers with a
            // reset, and that may overtake the body.
            assert!(output.status.success() || version != "--http1.1", "upload {upload}: {error}");
        }
    }
}

const SECRETS: [&str; 7] = [
    "s3cret-auth",
    "s3cret-key",
    "s3cret-goog",
    "s3cret-cookie",
    "s3cret-query",
    "s3cret-api",
    "s3cret-collector",
];

#[tokio::test]
async fn j81_no_secret_is_logged_or_told() {
    for carrier in Carrier::ALL {
        no_secret_is_told(carrier, &Upstream::spawn().await).await;
    }
}

async fn no_secret_is_told(carrier: Carrier, upstream: &Upstream) {
    let collector = Collector::spawn().await;
    let told = format!(
        "[log]\nrequests = true\n[traces]\nendpoint = \"{}\"\nheaders = {{ x-api-key = \"{}\" }}\n",
        collector.url(),
        SECRETS[6]
    );
    let conf = carrier.front(one_limit(upstream, 1).queue("0").route(told));
    let proxy = Proxy::spawn_with(&conf, &[("RUST_LOG", "tidegate=trace,info")]).await;
    let fields = [
        ("authorization", SECRETS[0]),
        ("x-api-key", SECRETS[1]),
        ("x-goog-api-key", SECRETS[2]),
        ("cookie", SECRETS[3]),
        ("api-key", SECRETS[5]),
    ];
    let mut client = carrier.call(&proxy).await;
    let mut ask = async |path: &str| {
        let path = format!("{path}?key={}", SECRETS[4]);
        client.get(&path, &fields).await
    };
    let mut bodies = vec![ask("/reset").await, ask("/%2e%2e/x").await];
    eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
    let mut other = carrier.call(&proxy).await;
    let _holder = tokio::spawn(async move { other.get("/silent", &[]).await });
    upstream.wait_current(1).await;
    bodies.push(ask("/echo").await);
    for answer in &bodies {
        let text = format!("{:?} {}", answer.headers, String::from_utf8_lossy(&answer.body));
        assert!(!SECRETS.iter().any(|secret| text.contains(secret)), "{text}");
    }
    // Two that were admitted or tried to, one that was refused as it is, and one that was refused full.
    collector.wait_spans(6).await;
    eventually("each has its line", async || proxy.log().matches("\"end\":").count() >= 3).await;
    let mut told = proxy.log();
    for path in ["/metrics", "/status", "/limits/llm/holders", "/limits/llm"] {
        told += &String::from_utf8_lossy(&Client::new().get(proxy.admin(), path).await.body);
    }
    for (_, spans) in collector.calls() {
        told += &String::from_utf8_lossy(&spans);
    }
    for secret in SECRETS {
        assert!(!told.contains(secret), "{secret} in {told}");
    }
}

#[tokio::test]
async fn j78_operators_paths_are_the_upstreams_on_the_public_port() {
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::ALL {
        let proxy = carrier.spawn(one_limit(&upstream, 1)).await;
        let before = upstream.total();
        let mut client = carrier.call(&proxy).await;
        for path in ["/metrics", "/status", "/readyz", "/limits/llm"] {
            // Whatever host is asked for: the operators' too.
            for host in ["a", &proxy.admin().to_string()] {
                let request = client.request(Method::GET, host, path).body(whole("")).unwrap();
                let answer = Answer::whole(client.send(request).await.unwrap()).await.unwrap();
                assert_eq!(answer.status, 404, "{carrier:?}: {path}");
                assert!(!answer.headers.contains_key("tidegate-reason"), "{path}");
            }
        }
        assert_eq!(upstream.total() - before, 8);
    }
}

#[tokio::test]
async fn j78_no_name_leads_to_the_operators_listener() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1);
    for carrier in Carrier::ALL {
        let proxy = carrier.spawn(conf.clone()).await;
        let port = proxy.admin().port();
        let front =
            |host: &str| carrier.front(conf.clone().endpoint(format!("http://{host}:{port}")));
        // What can be seen in the file is refused there.
        for host in ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0", "[::ffff:127.0.0.1]", "[::]"]
        {
            let text = proxy.text(&front(host));
            assert_eq!(proxy.sighup(&text).await, Reload::Refused, "{host}");
        }
        // What only the system knows is refused where it would be connected to.
        for host in ["127.1", "0x7f000001", "2130706433", "0177.0.0.1"] {
            let text = proxy.text(&front(host));
            assert_eq!(proxy.sighup(&text).await, Reload::Applied, "{host}: {}", proxy.log());
            let mut client = carrier.call(&proxy).await;
            for path in ["/metrics", "/status", "/livez"] {
                let answer = client.get(path, &[]).await;
                let reason = answer.header("tidegate-reason");
                assert_eq!((answer.status, reason), (502, "upstream_connect"), "{host}{path}");
            }
        }
    }
}
