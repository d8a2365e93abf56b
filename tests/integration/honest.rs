//! What operators are told is so: what isn't known isn't told as if it were, and what is wrong is told wherever they look.

use std::process::Stdio;

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    task::JoinHandle,
};

use crate::harness::{
    Answer, Client, Proxy, Raw, Redis, Reload, Upstream, eventually, one_limit, run_to_end,
    tidegate, unused_addr, within,
};

#[tokio::test]
async fn a_store_that_forgot_everything_is_not_told_as_empty() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).lease("6s");
    let proxy = Proxy::spawn(&conf.limit("recovery = \"strict\"")).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    redis.wait_in_use("llm", 1).await;
    eventually("it is counted", async || {
        let limit = proxy.limit("llm").await;
        limit["in_use"] == 1 && limit["exact"] == true
    })
    .await;
    let listed = holders(&proxy).await;
    assert_eq!(listed["holders"].as_array().unwrap().len(), 1, "{listed}");
    assert_ne!(listed["recovering"], true);

    redis.cli::<()>(&["FLUSHALL"]).await;

    // Before any heartbeat has found out, and while slots are counted anew.
    for _ in 0..20 {
        let status = proxy.status().await;
        assert_eq!(status["recovery"], true, "{status}");
        for limit in [&status["limits"]["llm"], &proxy.limit("llm").await] {
            let told = (&limit["slots"], &limit["in_use"], &limit["local"]);
            assert_eq!(told, (&2.into(), &1.into(), &1.into()), "{limit}");
            let sure = (&limit["exact"], &limit["recovering"]);
            assert_eq!(sure, (&false.into(), &true.into()), "{limit}");
        }
        assert_eq!(holders(&proxy).await["recovering"], true);
    }
    let told = printed(&proxy, &["holders", "llm"]).await;
    assert!(told.starts_with("slots are being counted anew"), "{told}");
    let told = printed(&proxy, &["limit", "llm"]).await;
    assert!(told.starts_with("llm: 2 slots, 1 in use,") && told.contains("anew"), "{told}");
    let told = printed(&proxy, &["status"]).await;
    assert!(told.contains(", recovering"), "{told}");

    eventually("all is counted again", async || {
        let limit = proxy.limit("llm").await;
        limit["exact"] == true
            && limit["in_use"] == 1
            && holders(&proxy).await["recovering"] == false
    })
    .await;
    assert_eq!(printed(&proxy, &["limit", "llm"]).await.matches("anew").count(), 0);
}

#[tokio::test]
async fn holders_of_a_key_that_were_forgotten_are_not_told_as_none() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).lease("6s");
    let proxy = Proxy::spawn(&conf.limit("recovery = \"strict\"\nkey = \"client-ip\"")).await;
    eventually("the start's recovery is over", async || {
        holders(&proxy).await["recovering"] != true
    })
    .await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    eventually("it is listed", async || printed(&proxy, &["holders", "llm"]).await.contains("AGE"))
        .await;

    redis.cli::<()>(&["FLUSHALL"]).await;

    let told = printed(&proxy, &["holders", "llm"]).await;
    assert!(told.starts_with("slots are being counted anew"), "{told}");
    assert_eq!(proxy.status().await["recovery"], true);
    let told = printed(&proxy, &["status"]).await;
    assert!(told.contains("\nllm    2 each       1 "), "{told}");
}

#[tokio::test]
async fn a_limit_that_an_operator_closed_is_told_as_closed() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).redis(&redis)).await;
    eventually("it is counted", async || proxy.limit("llm").await["exact"] == true).await;
    printed(&proxy, &["limit", "llm", "--slots", "0"]).await;
    let limit = proxy.limit("llm").await;
    assert_eq!((&limit["slots"], &limit["exact"]), (&0.into(), &true.into()), "{limit}");
    let waiting = get(&proxy, "/status/200");
    redis.wait_waiting("llm", 1).await;
    let limit = proxy.limit("llm").await;
    assert!(limit["queue_seconds"].is_null(), "{limit}");
    let told = printed(&proxy, &["limit", "llm"]).await;
    assert!(told.ends_with("queue never\n"), "{told}");
    printed(&proxy, &["limit", "llm", "--reset"]).await;
    assert_eq!(waiting.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_refused_file_is_told_until_one_is_taken() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 3);
    let proxy = Proxy::spawn(&conf).await;
    let bad = proxy.text(&conf).replace("slots = 3", "slots = -3");
    assert_eq!(proxy.reconfigure(&bad).await, Reload::Refused);
    let told = printed(&proxy, &["status"]).await;
    assert!(told.contains("was refused; an older one is in force\n"), "{told}");
    assert_eq!(proxy.reconfigure(&proxy.text(&conf.slots(4))).await, Reload::Applied);
    let told = printed(&proxy, &["status"]).await;
    assert!(!told.contains("refused;"), "{told}");
}

#[tokio::test]
async fn an_upstream_that_is_gone_is_told_until_it_answers() {
    let (other, addr) = (Upstream::spawn().await, unused_addr());
    let conf = one_limit(&other, 2).endpoint(format!("http://{addr}"));
    let proxy = Proxy::spawn(&conf).await;
    let silent = async || {
        let status = proxy.status().await;
        status["upstreams"]["llm"]["endpoints"][0]["addresses"][0]["silent_ms"].clone()
    };
    assert!(silent().await.is_null());
    assert_eq!(get(&proxy, "/status/200").await.unwrap().status, 502);
    let since = silent().await.as_u64().unwrap();
    assert_eq!(get(&proxy, "/status/200").await.unwrap().status, 502);
    eventually("it counts on", async || silent().await.as_u64() > Some(since)).await;
    let told = printed(&proxy, &["status"]).await;
    let words = format!("\nupstream llm: {addr} has answered no request for ");
    assert!(told.contains(&words), "{told}");

    let _back = Upstream::spawn_at(addr).await;
    assert_eq!(get(&proxy, "/status/503").await.unwrap().status, 503);
    assert!(silent().await.is_null());
    let told = printed(&proxy, &["status"]).await;
    assert!(!told.contains("answered no request"), "{told}");
}

#[tokio::test]
async fn a_queue_behind_a_request_that_hangs_is_as_long_as_that_hangs() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    assert_eq!(get(&proxy, "/status/200").await.unwrap().status, 200);
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let _waiting = Raw::get(proxy.addr(), "/status/200").await;
    eventually("the queue is told as long", async || {
        let limit = proxy.limit("llm").await;
        let held = limit["longest_hold_ms"].as_f64().unwrap_or(0.0);
        let queue = limit["queue_seconds"].as_f64().unwrap_or(0.0);
        limit["waiting"]["normal"] == 1 && held > 1_000.0 && queue * 1_000.0 >= held
    })
    .await;
}

#[tokio::test]
async fn a_program_that_watches_reads_nothing_but_figures() {
    let url = format!("http://{}", unused_addr());
    let mut watch = tidegate();
    watch.args(["status", "--watch", "100ms", "--json", "--admin", &url]);
    watch.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut watch = watch.spawn().unwrap();
    let mut said = BufReader::new(watch.stderr.take().unwrap()).lines();
    for _ in 0..2 {
        let line = within("it says why", said.next_line()).await.unwrap().unwrap();
        assert!(line.ends_with("; trying again"), "{line}");
    }
    watch.kill().await.unwrap();
    let mut figures = String::new();
    watch.stdout.take().unwrap().read_to_string(&mut figures).await.unwrap();
    assert_eq!(figures, "");
}

async fn holders(proxy: &Proxy) -> Value {
    let answer = Client::new().get(proxy.admin(), "/limits/llm/holders").await;
    serde_json::from_slice(&answer.body).unwrap()
}

/// What a command prints about an instance.
async fn printed(proxy: &Proxy, words: &[&str]) -> String {
    let admin = format!("http://{}", proxy.admin());
    let output = run_to_end(&[words, &["--admin", &admin]].concat()).await;
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn get(proxy: &Proxy, path: &'static str) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, path).await })
}
