//! Clients as they are: the official SDKs of LLM providers, and the HTTP clients beneath most others.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::Semaphore,
};

use crate::harness::{Client, Proxy, Raw, Redis, Upstream, one_limit, within};

#[tokio::test]
async fn openai_streams_and_holds_its_slot_to_the_last_event() {
    streams_and_holds("openai").await;
}

#[tokio::test]
async fn anthropic_streams_and_holds_its_slot_to_the_last_event() {
    streams_and_holds("anthropic").await;
}

async fn streams_and_holds(sdk: &str) {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).redis(&redis)).await;
    let mut chat = Python::chat(sdk, &proxy, 0, "5", "1").await;
    upstream.wait_current(1).await;
    let second = tokio::spawn({
        let addr = proxy.addr();
        async move { Client::new().get(addr, "/status/200").await }
    });
    redis.wait_waiting("llm", 1).await;

    // The upstream writes an event only after the SDK has handed out the one before.
    for event in 1..=5 {
        upstream.open(1);
        assert_eq!(chat.line().await, event.to_string());
        assert_eq!((upstream.total(), redis.waiting("llm").await), (1, 1));
    }
    upstream.open(1);
    assert_eq!(chat.line().await, "end");
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(upstream.highest(), 1);
    redis.wait_in_use("llm", 0).await;
}

const QUEUE_FULL: &str = "every slot is taken and the queue is full";

#[tokio::test]
async fn openai_raises_what_it_documents() {
    let unavailable = "InternalServerError<APIStatusError 503 queue_full service_unavailable_error";
    raises("openai", "", unavailable, QUEUE_FULL).await;
    let limited = "RateLimitError<APIStatusError 429 queue_full rate_limit_error";
    raises("openai", "status = 429", limited, QUEUE_FULL).await;
}

#[tokio::test]
async fn anthropic_raises_what_it_documents() {
    let message = format!("{QUEUE_FULL} (queue_full)");
    let unavailable = "ServiceUnavailableError<InternalServerError<APIStatusError 503 queue_full overloaded_error";
    raises("anthropic", "", unavailable, &message).await;
    let limited = "RateLimitError<APIStatusError 429 queue_full rate_limit_error";
    raises("anthropic", "status = 429", limited, &message).await;
    let overloaded =
        "OverloadedError<InternalServerError<APIStatusError 529 queue_full overloaded_error";
    raises("anthropic", "status = 529", overloaded, &message).await;
}

async fn raises(sdk: &str, limit: &'static str, error: &str, message: &str) {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).queue("0").limit(limit).route(dialect(sdk));
    let proxy = Proxy::spawn(&conf).await;
    let _holder = hold(&upstream, &proxy).await;
    let mut chat = Python::chat(sdk, &proxy, 0, "1", "0").await;
    assert_eq!(chat.line().await, error);
    assert_eq!(chat.line().await, message);
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn openai_comes_back_and_is_served() {
    comes_back("openai").await;
}

#[tokio::test]
async fn anthropic_comes_back_and_is_served() {
    comes_back("anthropic").await;
}

async fn comes_back(sdk: &str) {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).queue("0").route(dialect(sdk));
    let proxy = Proxy::spawn(&conf).await;
    let holder = Raw::get(proxy.addr(), "/gate?name=holder").await;
    upstream.wait_current(1).await;
    let mut chat = Python::chat(sdk, &proxy, 5, "2", "0").await;
    // With nothing measured yet we say two to three seconds, where it would wait half a second at first by itself; and in
    // milliseconds, so that whole seconds are rare.
    loop {
        let line = chat.line().await;
        let wait: f64 = line.strip_prefix("again in ").expect(&line).parse().unwrap();
        assert!((2.0..=3.0).contains(&wait), "{sdk} waits {wait} s");
        if wait.fract() != 0.0 {
            break;
        }
    }
    upstream.open_gate("holder", 1);
    for line in ["1", "2", "end"] {
        assert_eq!(chat.line().await, line);
    }
    assert_eq!((upstream.highest(), upstream.total()), (1, 2));
    drop(holder);
}

/// What such a route has.
fn dialect(sdk: &str) -> String {
    format!("dialect = \"{sdk}\"")
}

#[tokio::test]
async fn httpx_and_aiohttp_see_the_refusal_of_every_upload() {
    let (upstream, proxy) = full().await;
    let _holder = hold(&upstream, &proxy).await;
    let url = format!("http://{}/echo", proxy.addr());
    for client in ["httpx", "aiohttp"] {
        let mut uploads = Python::run(&["upload.py", client, &url]).await;
        for upload in 1..=10 {
            assert_eq!(uploads.line().await, "503 queue_full", "{client}, upload {upload}");
        }
    }
    assert_eq!(upstream.total(), 1);
}

#[tokio::test]
async fn curl_sees_the_refusal_of_every_upload() {
    let (upstream, proxy) = full().await;
    let _holder = hold(&upstream, &proxy).await;
    let url = format!("http://{}/echo", proxy.addr());
    let body = NamedTempFile::new().unwrap();
    std::fs::write(&body, vec![b'x'; 2_000_000]).unwrap();
    let body = format!("@{}", body.path().display());
    // As it does by itself, asking first; and without asking.
    for expect in ["expect: 100-continue", "expect:"] {
        for upload in 1..=10 {
            let mut curl = Command::new("curl");
            curl.args([
                "-sS",
                "-o",
                "-",
                "-w",
                " %header{tidegate-reason} %{http_code}",
                "-H",
                expect,
            ]);
            curl.args(["--data-binary", &body, &url]).kill_on_drop(true);
            let output = within("curl", curl.output()).await.expect("curl is on the PATH");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{expect} upload {upload}: {error}");
            assert!(text.ends_with(" queue_full 503"), "{expect}: {text}");
        }
    }
    assert_eq!(upstream.total(), 1);
}

/// A limit of one slot and no queue.
async fn full() -> (Upstream, Proxy) {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).queue("0")).await;
    (upstream, proxy)
}

async fn hold(upstream: &Upstream, proxy: &Proxy) -> Raw {
    let holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    holder
}

/// A program of `tests/sdk` at work, ended on drop.
struct Python {
    lines: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Python {
    /// Starts one and waits until it has imported what it needs, which takes seconds of work: one after the other.
    async fn run(words: &[&str]) -> Self {
        static IMPORTING: Semaphore = Semaphore::const_new(1);
        let _turn = IMPORTING.acquire().await.unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let python: PathBuf = root.join("target/sdk-venv/bin/python");
        assert!(
            python.exists(),
            "there is no {}: please run tests/run.sh, which installs the SDKs there",
            python.display()
        );
        let mut process = Command::new(python)
            .args(words)
            .current_dir(root.join("tests/sdk"))
            .env("PYTHONUNBUFFERED", "1")
            .env_remove("HTTP_PROXY")
            .env_remove("http_proxy")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut python = Self { lines, _process: process };
        assert_eq!(python.line().await, "ready");
        python
    }

    async fn chat(sdk: &str, proxy: &Proxy, retries: u32, events: &str, gate: &str) -> Self {
        let url = format!("http://{}", proxy.addr());
        Self::run(&["chat.py", sdk, &url, &retries.to_string(), events, gate]).await
    }

    /// The next line it prints.
    async fn line(&mut self) -> String {
        let line = within("a line from Python", self.lines.next_line()).await.unwrap();
        line.expect("Python ended")
    }
}
