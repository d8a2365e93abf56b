//! The page of the operators' listener, in a real browser.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{Semaphore, SemaphorePermit},
    task::JoinHandle,
};

use crate::harness::{
    Answer, Client, Proxy, Raw, Redis, Reload, Upstream, eventually, one_limit, unused_addr, within,
};

const CARD: &str = ".limit[data-name=llm]";
const VERDICT: &str = "#verdict p:first-child";

#[tokio::test]
async fn it_tells_at_a_glance_what_is_full_and_who_holds() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 3).route("name = \"chat\"")).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees(VERDICT, "All is well").await;
    browser.sees(&within_card(".count"), "0 of 3").await;
    let requests = get_many(&proxy, "/gate", 5);
    upstream.wait_current(3).await;
    browser.sees(VERDICT, "llm is full: 3 of 3, 2 wait").await;
    browser.sees(&within_card(".key"), "2 waiting").await;
    browser.sees(&within_card(".classes"), "normal 2").await;
    browser.sees(&within_card("[aria-label^='3 slots taken here, 0 elsewhere, 0 free']"), "").await;
    browser.click(&within_card("summary")).await;
    browser.sees(&within_card("tbody tr:nth-child(3)"), "chat").await;
    assert_eq!(browser.count(&within_card("tbody tr")).await, 3);

    // Served, measured, and calm again.
    upstream.open(5);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    browser.sees(VERDICT, "All is well").await;
    browser.sees(&within_card(".hold"), "s").await;
    browser.sees(&within_card("details .said"), "Nobody holds a slot").await;
    let path = browser
        .ask(json!({ "do": "attribute", "at": within_card("svg .queue"), "name": "d" }))
        .await;
    assert!(path.as_str().unwrap().contains('L'), "{path}");
    // What was seen is still there after a reload of the page.
    browser.open(&proxy).await;
    browser.sees(&within_card(".most"), "5").await;
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn a_limit_is_changed_and_a_holder_evicted_by_keyboard_alone() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let mut silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees(&within_card(".count"), "1 of 1").await;

    browser.tabs_to("Change the slots of llm").await;
    browser.press("Enter").await;
    browser.sees("#change[open] h2", "Slots of llm").await;
    browser.type_in("1000001").await;
    browser.press("Enter").await;
    // The browser's own check says no, and the dialog stays.
    assert_eq!(browser.count("#change[open]").await, 1);
    browser.press("Escape").await;
    assert_eq!(browser.count("#change[open]").await, 0);
    assert_eq!(proxy.limit("llm").await["slots"], 1);
    browser.press("Enter").await;
    browser.type_in("4").await;
    browser.press("Enter").await;
    browser.sees(&within_card(".count"), "1 of 4").await;
    browser.sees(&within_card(".changed"), "changed by an operator").await;
    assert_eq!(proxy.limit("llm").await["slots"], 4);

    browser.tabs_to("Holders").await;
    browser.press("Enter").await;
    browser.sees(&within_card("tbody tr"), "here").await;
    browser.tabs_to("Evict holder").await;
    browser.press("Enter").await;
    browser.sees("#evict[open] .what", "holds 1 of llm").await;
    // Where one lands by mistake nothing happens.
    browser.press("Enter").await;
    assert_eq!(browser.count("#evict[open]").await, 0);
    assert_eq!(upstream.current(), 1);
    browser.press("Enter").await;
    browser.sees("#evict[open] .what", "holds 1 of llm").await;
    browser.tabs_to("End it").await;
    browser.press("Enter").await;
    browser.sees(&within_card(".count"), "0 of 4").await;
    upstream.wait_current(0).await;
    assert!(silent.head().await.contains("tidegate-reason: evicted"));
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn what_the_gone_left_behind_is_freed_by_who_insists() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis);
    let (here, mut gone) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let _silent = Raw::get(gone.addr(), "/silent").await;
    upstream.wait_current(1).await;
    gone.kill9().await;
    let mut browser = Browser::at(&here).await;
    browser.sees("#instances", "gone").await;
    browser.sees(VERDICT, "llm: 1 of the slots in use is of an instance that is gone").await;
    browser.click(&within_card("summary")).await;
    browser.click(&within_card("tbody button")).await;
    browser.click("#evict .do").await;
    browser.sees("#evict .said", "its instance is gone").await;
    assert_eq!(redis.in_use("llm").await, 1);
    browser.click("#evict [name=force]").await;
    browser.click("#evict .do").await;
    browser.sees(&within_card(".count"), "0 of 2").await;
    redis.wait_in_use("llm", 0).await;
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn it_tells_that_an_upstream_hangs() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).limit("max_hold = \"10s\"")).await;
    // It may have to wait for its turn.
    let mut browser = Browser::at(&proxy).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    browser.sees(VERDICT, "llm: a request has held its slots for").await;
    browser.sees("#verdict p:nth-child(2)", "Its upstream is slow, or hangs").await;
    // Cut at the end of its time.
    browser.sees(VERDICT, "All is well").await;
    browser.sees(&within_card(".held"), "none").await;
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn it_follows_the_configuration_and_asks_for_its_token() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees(&within_card(".count"), "0 of 1").await;
    let text = proxy.text(&one_limit(&upstream, 1)).replace("llm", "other");
    proxy.reconfigure(&text.replace("[store]", "token = \"sesame\"\n[store]")).await;
    browser.sees(".limit[data-name=other] .count", "0 of 1").await;
    assert_eq!(browser.count(CARD).await, 0);
    browser.click(".change").await;
    browser.type_in("2").await;
    browser.click("#change .do").await;
    browser.sees("#change .said", "Bearer").await;
    browser.ask(json!({ "do": "fill", "at": "#change [name=token]", "text": "sesame" })).await;
    browser.click("#change .do").await;
    browser.sees(".limit .count", "0 of 2").await;
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn it_comes_back_by_itself_after_a_restart_and_says_so() {
    let upstream = Upstream::spawn().await;
    let (clients, operators) = (listener(), listener());
    let conf = one_limit(&upstream, 1);
    let mut proxy = Proxy::spawn_on(&conf, &clients, &operators, &[]).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees("#connection", "live").await;
    proxy.kill9().await;
    browser.sees("#connection", "no connection").await;
    let again = Proxy::spawn_on(&conf.slots(7), &clients, &operators, &[]).await;
    browser.sees("#connection", "live").await;
    browser.sees("#notice", "another process than before").await;
    browser.sees(&within_card(".count"), "0 of 7").await;

    // One that answers no more is told from one that is calm.
    again.sigstop();
    browser.sees(VERDICT, "Tidegate doesn't answer").await;
    again.sigcont();
    browser.sees(VERDICT, "All is well").await;
    browser.finds_no_trouble().await;
}

/// Tries to run a script in every way that a name could.
const HOSTILE: &str =
    "<img src=x onerror=document.title='pwned'>\\\"'><script>document.title='pwned'</script>";

#[tokio::test]
async fn names_that_are_scripts_are_names() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let name = format!("name = \"{HOSTILE}\"");
    let conf = one_limit(&upstream, 1).redis(&redis).limit("key = \"header:x-tenant\"").route(name);
    let proxy = Proxy::spawn(&conf).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    let tenant = HOSTILE.replace('\\', "");
    raw.write(format!("GET /silent HTTP/1.1\r\nhost: t\r\nx-tenant: {tenant}\r\n\r\n"))
        .await
        .unwrap();
    upstream.wait_current(1).await;
    // Whoever else writes to Redis may have chosen any name at all.
    let time: (u64, u64) = redis.cli(&["TIME"]).await;
    let set = redis.cli::<Vec<String>>(&["KEYS", "sem:llm:*:info"]).await;
    let set = set[0].trim_end_matches(":info").to_owned();
    redis.cli::<()>(&["ZADD", &set, &(time.0 * 1000).to_string(), &tenant]).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees(&within_card(".state"), "for each value of its key").await;
    browser.click(&within_card("summary")).await;
    browser.sees(&within_card("tbody"), "<img src=x").await;
    browser.sees(&within_card("tbody"), "a plain client").await;
    browser.click(&within_card("tbody button")).await;
    browser.sees("#evict .what", "<script>").await;
    assert_eq!(browser.count("img").await, 0);
    assert_eq!(browser.count("script").await, 1);
    assert!(browser.count("text=pwned").await > 0);
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn it_fits_a_phone_and_the_dark_and_has_its_picture_taken() {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let classes = "classes.background = { share = 0.5, queue = 1 }";
    let class = "class = { header = \"x-priority\", default = \"normal\" }\nname = \"chat\"";
    let conf = one_limit(&upstream, 12).redis(&redis).limit(classes).route(class);
    let conf = conf.server("trusted_proxies = [\"127.0.0.1\"]");
    let (proxy, other) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let mut browser = Browser::at(&proxy).await;
    // So that there is something measured.
    for request in get_many(&proxy, "/hold?ms=400", 40) {
        assert_eq!(request.await.unwrap().status, 200);
    }
    let mut requests = get_many(&proxy, "/gate", 4);
    requests.extend(get_many(&other, "/gate", 3));
    upstream.wait_current(7).await;
    browser.sees(&within_card(".key"), "4 here").await;
    browser.sees(&within_card(".key"), "3 elsewhere").await;
    browser.sees("#fleet", "2 instances").await;
    let light = browser.ask(json!({ "do": "colour", "at": "body" })).await;
    browser.picture("calm").await;

    requests.extend(get_many(&proxy, "/gate", 9));
    // What comes now waits, whatever its class.
    upstream.wait_current(12).await;
    for class in ["critical", "critical", "background", "background", "background"] {
        let (addr, client) = (proxy.addr(), Client::new());
        let get = async move { client.get_with(addr, "/gate", &[("x-priority", class)]).await };
        requests.push(tokio::spawn(get));
    }
    browser.sees(VERDICT, "llm refuses: 2 in the last ten seconds").await;
    browser.sees(&within_card(".reasons"), "queue_full 2").await;
    browser.sees(&within_card(".key"), "7 waiting").await;
    browser.click(&within_card("summary")).await;
    browser.sees(&within_card("tbody"), "chat").await;
    browser.picture("full").await;

    browser.ask(json!({ "do": "size", "width": 375, "height": 812 })).await;
    browser.ask(json!({ "do": "scheme", "scheme": "dark" })).await;
    assert_eq!(browser.ask(json!({ "do": "overflow" })).await, 0);
    assert_ne!(browser.ask(json!({ "do": "colour", "at": "body" })).await, light);
    browser.click(&within_card("tbody button")).await;
    browser.sees("#evict[open] h2", "End this request?").await;
    assert_eq!(browser.ask(json!({ "do": "overflow" })).await, 0);
    browser.press("Escape").await;

    redis.kill9().await;
    browser.sees(VERDICT, "The store is down.").await;
    browser.sees("#store", "redis, down").await;
    browser.sees(&within_card(".changed"), "stale: of").await;
    browser.sees(&within_card(".classes"), "critical 2 · normal 4 · background 1").await;
    browser.ask(json!({ "do": "top" })).await;
    browser.picture("store-down").await;
    browser.finds_no_trouble().await;
    upstream.open(100);
    drop(requests);
}

#[tokio::test]
async fn it_tells_of_a_refused_file_and_of_upstreams_that_are_gone() {
    let (other, addr) = (Upstream::spawn().await, unused_addr());
    let conf = one_limit(&other, 3).endpoint(format!("http://{addr}"));
    let proxy = Proxy::spawn(&conf).await;
    let mut browser = Browser::at(&proxy).await;
    browser.sees(VERDICT, "All is well").await;
    let bad = proxy.text(&conf).replace("slots = 3", "slots = -3");
    assert_eq!(proxy.reconfigure(&bad).await, Reload::Refused);
    browser.sees(VERDICT, "The latest configuration was refused.").await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 502);
    let words = format!("Upstream llm: {addr} has answered no request for");
    browser.sees(VERDICT, &words).await;
    // And what is less bad stands behind it.
    browser.sees("#verdict p:nth-child(2)", "The latest configuration was refused.").await;

    let _back = Upstream::spawn_at(addr).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
    browser.sees(VERDICT, "The latest configuration was refused.").await;
    browser.finds_no_trouble().await;
}

#[tokio::test]
async fn it_lets_nobody_in() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let page = Client::new().get(proxy.admin(), "/").await;
    let policy = page.header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'nonce-"), "{policy}");
    assert!(!policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"), "{policy}");
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(page.header(name), value, "{name}");
    }
    // Streams are for some, and a connection that nobody watches any more makes room.
    let mut watchers = Vec::new();
    for _ in 0..32 {
        watchers.push(Client::new().events(proxy.admin(), "/events").await);
    }
    assert_eq!(proxy.admin_status("/events").await, Some(503));
    watchers.pop();
    eventually("there is room again", async || {
        let mut raw = Raw::connect(proxy.admin()).await;
        raw.write("GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        raw.head().await.starts_with("HTTP/1.1 200")
    })
    .await;
}

// === what the tests need ===

fn within_card(selector: &str) -> String {
    format!("{CARD} {selector}")
}

fn listener() -> std::net::TcpListener {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap()
}

fn get_many(proxy: &Proxy, path: &'static str, requests: usize) -> Vec<JoinHandle<Answer>> {
    let addr = proxy.addr();
    let get = |_| tokio::spawn(async move { Client::new().get(addr, path).await });
    (0..requests).map(get).collect()
}

/// A Chromium, ended on drop.
struct Browser {
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    _process: Child,
    _profile: TempDir,
    _turn: SemaphorePermit<'static>,
}

impl Browser {
    /// Shows the page of an instance. Two at a time, since each is work for several processes.
    async fn at(proxy: &Proxy) -> Self {
        static TURNS: Semaphore = Semaphore::const_new(2);
        let turn = TURNS.acquire().await.unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let modules: PathBuf = root.join("target/page/node_modules");
        assert!(
            modules.join("playwright-core").exists(),
            "there is no playwright-core in {}: please run tests/run.sh, which installs it there",
            modules.display()
        );
        let profile = TempDir::new().unwrap();
        let mut process = Command::new("node")
            .arg(root.join("tests/page/browser.cjs"))
            .arg(profile.path())
            .env("NODE_PATH", modules)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (orders, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let lines = BufReader::new(output).lines();
        let mut browser = Self { orders, lines, _process: process, _profile: profile, _turn: turn };
        assert_eq!(browser.line().await, "ready");
        browser.open(proxy).await;
        browser
    }

    async fn line(&mut self) -> Value {
        let line = within("a line from the browser", self.lines.next_line()).await.unwrap();
        serde_json::from_str(&line.expect("the browser ended")).unwrap()
    }

    async fn try_ask(&mut self, order: Value) -> Result<Value, String> {
        self.orders.write_all(format!("{order}\n").as_bytes()).await.unwrap();
        let answer = self.line().await;
        match answer.get("failed") {
            None => Ok(answer["is"].clone()),
            Some(why) => Err(why.to_string()),
        }
    }

    async fn ask(&mut self, order: Value) -> Value {
        self.try_ask(order).await.unwrap()
    }

    async fn open(&mut self, proxy: &Proxy) {
        self.ask(json!({ "do": "open", "url": format!("http://{}/", proxy.admin()) })).await;
    }

    /// Waits until there is such an element, with these words in it.
    async fn sees(&mut self, selector: &str, words: &str) {
        let mut seen = Value::Null;
        let what = format!("{words:?} at {selector}");
        let sees = async {
            loop {
                if self.count(selector).await > 0 {
                    seen = self.ask(json!({ "do": "text", "at": selector })).await;
                    if seen.as_str().is_some_and(|text| text.contains(words)) {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(crate::harness::LIMIT, sees).await.is_err() {
            panic!("no {what}, but {seen}");
        }
    }

    async fn count(&mut self, selector: &str) -> u64 {
        self.ask(json!({ "do": "count", "at": selector })).await.as_u64().unwrap()
    }

    async fn click(&mut self, selector: &str) {
        self.ask(json!({ "do": "click", "at": selector })).await;
    }

    async fn press(&mut self, key: &str) {
        self.ask(json!({ "do": "press", "key": key })).await;
    }

    async fn type_in(&mut self, text: &str) {
        self.ask(json!({ "do": "type", "text": text })).await;
    }

    /// Goes on by the tabulator until what has the focus is called so.
    async fn tabs_to(&mut self, name: &str) {
        let mut met = Vec::new();
        for _ in 0..20 {
            self.press("Tab").await;
            let focused = self.ask(json!({ "do": "focused" })).await;
            if focused.as_str().is_some_and(|focused| focused.starts_with(name)) {
                return;
            }
            met.push(focused);
        }
        panic!("no {name} but {met:?}");
    }

    /// Takes the picture that the documentation shows, if it is asked for.
    async fn picture(&mut self, name: &str) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = match std::env::var_os("TIDEGATE_PICTURES") {
            Some(_) => root.join("docs/images"),
            None => root.join("target/page"),
        };
        self.ask(json!({ "do": "picture", "file": folder.join(format!("{name}.png")) })).await;
    }

    /// Nothing ran that shouldn't, nothing was asked of anybody else, and nothing failed.
    async fn finds_no_trouble(&mut self) {
        assert_eq!(self.ask(json!({ "do": "troubles" })).await, json!([]));
        let origins = self.ask(json!({ "do": "origins" })).await;
        assert_eq!(origins.as_array().unwrap().len(), 1, "{origins}");
        let title = self.ask(json!({ "do": "title" })).await;
        assert!(!title.as_str().unwrap().starts_with("pwned"), "{title}");
    }
}
