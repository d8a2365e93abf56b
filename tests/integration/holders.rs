//! Who has the slots, and what becomes of whom an operator evicts: the upstream is rid of a request before its slot is another's.

use std::process::Stdio;

use http::Method;
use serde_json::Value;
use tokio::{io::AsyncReadExt, process::Command};

use crate::harness::{
    Client, Proxy, Raw, Redis, Upstream, eventually, one_limit, run_to_end, within,
};

/// What `GET /limits/llm/holders` lists.
async fn holders(proxy: &Proxy) -> Vec<Value> {
    let answer = Client::new().get(proxy.admin(), "/limits/llm/holders").await;
    let body: Value = serde_json::from_slice(&answer.body).unwrap();
    body["holders"].as_array().unwrap().clone()
}

/// `DELETE /limits/llm/holders/<id>`
async fn evict(proxy: &Proxy, id: &str) -> (u16, String) {
    let mut raw = Raw::connect(proxy.admin()).await;
    let head = format!(
        "DELETE /limits/llm/holders/{id} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\r\n"
    );
    raw.write(head).await.unwrap();
    let answer = String::from_utf8(raw.answer().await.unwrap()).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The holder of the only request of an instance.
async fn only_holder(proxy: &Proxy) -> String {
    let instance = proxy.status().await["instance"].clone();
    let mut id = String::new();
    eventually("the instance has a holder", async || {
        let all = holders(proxy).await;
        let own = all.iter().find(|holder| holder["instance"] == instance);
        id = own.map_or(String::new(), |holder| holder["id"].as_str().unwrap().to_owned());
        !id.is_empty()
    })
    .await;
    id
}

#[tokio::test]
async fn the_evicted_leave_the_upstream_before_their_slot_is_anothers() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    for conf in [one_limit(&upstream, 1), one_limit(&upstream, 1).redis(&redis)] {
        let proxy = Proxy::spawn(&conf).await;
        let mut silent = Raw::get(proxy.addr(), "/silent").await;
        upstream.wait_current(1).await;
        let (addr, client) = (proxy.addr(), Client::new());
        let next = tokio::spawn(async move { client.get(addr, "/status/200").await });
        eventually("one waits", async || proxy.limit("llm").await["waiting"]["normal"] == 1).await;
        let id = only_holder(&proxy).await;
        let (status, body) = evict(&proxy, &id).await;
        assert!((status, body.contains("\"cut\"")) == (200, true), "{status} {body}");
        let answer = silent.head().await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("tidegate-reason: evicted"), "{answer}");
        assert_eq!(next.await.unwrap().status, 200);
        assert_eq!(upstream.take_highest(), 1);
        assert_eq!(evict(&proxy, &id).await.0, 404);
    }
}

#[tokio::test]
async fn a_slot_of_the_evicted_stays_taken_for_the_upstreams_linger() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).upstream("linger = \"5m\"")).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let _next = Raw::get(proxy.addr(), "/status/200").await;
    eventually("one waits", async || proxy.limit("llm").await["waiting"]["normal"] == 1).await;
    let id = only_holder(&proxy).await;
    assert_eq!(evict(&proxy, &id).await.0, 200);
    upstream.wait_current(0).await;
    assert_eq!(only_holder(&proxy).await, id);
    assert_eq!((upstream.total(), &proxy.limit("llm").await["waiting"]["normal"]), (1, &1.into()));
    // Once is enough.
    let (status, why) = evict(&proxy, &id).await;
    assert!(status == 409 && why.contains("coming or going"), "{status} {why}");
}

#[tokio::test]
async fn an_instance_ends_what_another_is_told_to_evict() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis);
    let (here, there) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let mut events = Client::new().events(there.addr(), "/sse?events=9&gate=1").await;
    upstream.open(1);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    let id = only_holder(&there).await;
    let listed = holders(&here).await;
    assert_eq!((listed.len(), &listed[0]["route"]), (1, &Value::from("/")));
    let (addr, client) = (here.addr(), Client::new());
    let next = tokio::spawn(async move { client.get(addr, "/status/200").await });
    redis.wait_waiting("llm", 1).await;
    assert_eq!(evict(&here, &id).await.0, 202);
    assert_eq!(next.await.unwrap().status, 200);
    assert_eq!(upstream.take_highest(), 1);
}

#[tokio::test]
async fn plain_clients_and_the_dead_are_told_apart() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 3).redis(&redis).lease("10m");
    let here = Proxy::spawn(&conf).await;
    let time: (u64, u64) = redis.cli(&["TIME"]).await;
    let now = (time.0 * 1_000).to_string();
    let plain = "0194a000-0000-7000-8000-000000000000";
    for id in [plain, "<script>alert(1)</script>"] {
        redis.cli::<()>(&["ZADD", "sem:llm", &now, id]).await;
    }
    let ids: Vec<String> =
        holders(&here).await.iter().map(|holder| holder["id"].as_str().unwrap().into()).collect();
    assert!(ids.contains(&"<script>alert(1)</script>".to_owned()), "{ids:?}");
    let (status, why) = evict(&here, plain).await;
    assert!(status == 409 && why.contains("plain client"), "{status} {why}");
    assert_eq!(evict(&here, "%3Cscript%3E").await.0, 404);

    let mut dead = Proxy::spawn(&conf).await;
    let _silent = Raw::get(dead.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let id = only_holder(&dead).await;
    dead.kill9().await;
    let mut why = String::new();
    eventually("its instance counts as gone", async || {
        let (status, text) = evict(&here, &id).await;
        why = text;
        status == 409
    })
    .await;
    assert!(why.contains("gone"), "{why}");
    let url = format!("http://{}", here.admin());
    let output = run_to_end(&["evict", "llm", &id, "--force", "--admin", &url]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    redis.wait_in_use("llm", 2).await;
}

#[tokio::test]
async fn an_eviction_must_come_from_an_operator() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let id = only_holder(&proxy).await;
    let path = format!("/limits/llm/holders/{id}");
    // Without the type that no other page's form can send.
    let answer = Client::new().send(Method::DELETE, proxy.admin(), &path, "".into()).await;
    assert_eq!(answer.unwrap().status, 415);
    assert_eq!(upstream.current(), 1);
    let elsewhere = format!(
        "DELETE {path} HTTP/1.1\r\nhost: localhost\r\norigin: http://evil\r\ncontent-type: application/json\r\n\r\n"
    );
    let mut raw = Raw::connect(proxy.admin()).await;
    raw.write(elsewhere).await.unwrap();
    assert!(raw.head().await.starts_with("HTTP/1.1 403"));
    assert_eq!(upstream.current(), 1);
}

#[tokio::test]
async fn the_command_line_lists_and_evicts() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2)
        .redis(&redis)
        .limit("key = \"header:x-tenant\"")
        .route("name = \"\u{9b}31mred\u{202e}\"".replace('\u{9b}', "blue "));
    let proxy = Proxy::spawn(&conf).await;
    let mut silent = Raw::connect(proxy.addr()).await;
    silent.write("GET /silent HTTP/1.1\r\nhost: t\r\nx-tenant: acme\r\n\r\n").await.unwrap();
    upstream.wait_current(1).await;
    let url = format!("http://{}", proxy.admin());
    let output = run_to_end(&["holders", "llm", "--admin", &url]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("normal") && text.contains("31mred\\u{202e}"), "{text}");
    assert!(!text.contains('\x1b') && !text.contains("acme"), "{text}");
    let output = run_to_end(&["holders", "llm", "--json", "--admin", &url]).await;
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let id = listed["holders"][0]["id"].as_str().unwrap();
    assert_eq!(listed["holders"][0]["key"].as_str().unwrap().len(), 32);
    let output = run_to_end(&["evict", "llm", id, "--admin", &url]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("cut"), "{text}");
    upstream.wait_current(0).await;
    let output = run_to_end(&["evict", "llm", id, "--admin", &url]).await;
    assert_eq!(output.status.code(), Some(1));
    let output = run_to_end(&["status", "--admin", &url]).await;
    assert!(String::from_utf8(output.stdout).unwrap().contains("llm"));
}

#[tokio::test]
async fn colours_and_a_table_that_is_drawn_anew_are_for_terminals() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let url = format!("http://{}", proxy.admin());
    let words = ["status", "--admin", &url];
    let program = env!("CARGO_BIN_EXE_tidegate");
    // On a terminal, which `script` makes, up to the end or until these words have come twice.
    let on_terminal = async |before: &str, words: &str, twice: &str| {
        let line = format!("{before} {program} {words} --admin {url}");
        let mut script = Command::new("script");
        script.args(["-qec", &line, "/dev/null"]).env_remove("NO_COLOR").kill_on_drop(true);
        script.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut script = script.spawn().expect("script is on the PATH");
        let (mut output, mut text) = (script.stdout.take().unwrap(), Vec::new());
        let read = async {
            while output.read_buf(&mut text).await.unwrap() > 0 {
                if String::from_utf8_lossy(&text).matches(twice).count() > 1 {
                    break;
                }
            }
        };
        within("what a terminal shows", read).await;
        String::from_utf8(text).unwrap()
    };
    let coloured = on_terminal("", "status", "never").await;
    assert!(coloured.contains("\x1b[33m") && !coloured.contains("\x1b[H"), "{coloured:?}");
    let bare = on_terminal("NO_COLOR=1", "status", "never").await;
    assert!(bare.contains("llm") && !bare.contains('\x1b'), "{bare:?}");
    let live = on_terminal("", "status --watch 100ms", "\x1b[H\x1b[2J").await;
    assert!(live.matches("\x1b[H\x1b[2J").count() > 1, "{live:?}");
    // Into a file or a pipe.
    let output = run_to_end(&words).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("llm") && !text.contains('\x1b'), "{text:?}");
}
