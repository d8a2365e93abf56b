//! Slow, silent and early: clients that stall, and answers that come before the request ends. Names follow `docs/http.md`.

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
};

use crate::harness::{Client, Collector, Proxy, Raw, Upstream, eventually, get, one_limit, within};

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
    let upstream = Upstream::spawn().await;
    let collector = Collector::spawn().await;
    let told = format!(
        "[log]\nrequests = true\n[traces]\nendpoint = \"{}\"\nheaders = {{ x-api-key = \"{}\" }}\n",
        collector.url(),
        SECRETS[6]
    );
    let proxy = Proxy::spawn_with(
        &one_limit(&upstream, 1).queue("0").route(told),
        &[("RUST_LOG", "tidegate=trace,info")],
    )
    .await;
    let fields = [
        ("authorization", SECRETS[0]),
        ("x-api-key", SECRETS[1]),
        ("x-goog-api-key", SECRETS[2]),
        ("cookie", SECRETS[3]),
        ("api-key", SECRETS[5]),
    ];
    let client = Client::new();
    let ask = async |path: &str| {
        let path = format!("{path}?key={}", SECRETS[4]);
        client.get_with(proxy.addr(), &path, &fields).await
    };
    let mut bodies = vec![ask("/reset").await, ask("/%2e%2e/x").await];
    eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
    let _holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    bodies.push(ask("/echo").await);
    for answer in &bodies {
        let text = format!("{:?} {}", answer.headers, String::from_utf8_lossy(&answer.body));
        assert!(!SECRETS.iter().any(|secret| text.contains(secret)), "{text}");
    }
    let metrics = client.get(proxy.admin(), "/metrics").await;
    // Two that were admitted or tried to, one that was refused as it is, and one that was refused full.
    collector.wait_spans(6).await;
    eventually("each has its line", async || proxy.log().matches("\"end\":").count() >= 3).await;
    let mut told = proxy.log() + &String::from_utf8_lossy(&metrics.body);
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
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    for path in ["/metrics", "/status", "/readyz", "/limits/llm"] {
        let answer = Client::new().get(proxy.addr(), path).await;
        assert_eq!((answer.status, answer.header("tidegate-reason")), (404, ""), "{path}");
    }
    assert_eq!(upstream.total(), 4);
}
