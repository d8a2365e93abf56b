//! J74: a configuration that is read again leaves slots, queues and running streams as they are, and one that can't be
//! used changes nothing.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::task::JoinHandle;

use crate::harness::{
    Answer, Client, H2Upstream, Proxy, Raw, Redis, Reload, Settings, Upstream, eventually,
    one_limit, run_to_end, signal, unused_addr, within,
};

fn get(client: &Client, proxy: &Proxy, path: &'static str) -> JoinHandle<Answer> {
    let (client, addr) = (client.clone(), proxy.addr());
    tokio::spawn(async move { client.get(addr, path).await })
}

#[tokio::test]
async fn fifty_reloads_under_load_fail_no_request_and_lose_no_slot() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 4).redis(&redis);
    let proxy = Proxy::spawn(&conf).await;
    let mut stream = Client::new().events(proxy.addr(), "/sse?events=50&gate=1").await;
    upstream.wait_current(1).await;
    let done = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (addr, done) = (proxy.addr(), Arc::clone(&done));
            tokio::spawn(async move {
                // One connection for all of them, and one for each.
                let (client, mut served) = (Client::new(), 0);
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(client.get(addr, "/hold?ms=2").await.status, 200);
                    assert_eq!(Client::new().get(addr, "/status/200").await.status, 200);
                    served += 2;
                }
                served
            })
        })
        .collect();

    for round in 0..50 {
        let slots = if round % 2 == 0 { 6 } else { 4 };
        let text = proxy.text(&conf.clone().slots(slots));
        assert_eq!(proxy.sighup(&text).await, Reload::Applied, "{}", proxy.log());
        upstream.open(1);
        assert_eq!(stream.next().await, Some((round + 1).to_string()));
    }

    done.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(client.await.unwrap() > 0);
    }
    upstream.open(1);
    assert_eq!(stream.next().await, None);
    assert!(upstream.highest() <= 6, "{} ran at once", upstream.highest());
    upstream.wait_current(0).await;
    redis.wait_in_use("llm", 0).await;
    assert_eq!(redis.waiting("llm").await, 0);
}

#[tokio::test]
async fn a_raised_limit_wakes_waiters_that_kept_their_places() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    for conf in [one_limit(&upstream, 1), one_limit(&upstream, 1).redis(&redis)] {
        let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
        let waits = async |count: u32| {
            eventually(&format!("{count} wait"), async || {
                proxy.limit("llm").await["waiting"]["normal"] == count
            })
            .await;
        };
        let mut requests = vec![get(&client, &proxy, "/gate?name=1")];
        upstream.wait_current(1).await;
        for (path, before) in [("/gate?name=2", 1), ("/gate?name=3", 2), ("/gate?name=4", 3)] {
            requests.push(get(&client, &proxy, path));
            waits(before).await;
        }
        // Another route and another timeout, but the same limit: the queue doesn't move.
        let other = conf.clone().route("response_headers = { set = { x-new = \"1\" } }");
        assert_eq!(proxy.reconfigure(&proxy.text(&other)).await, Reload::Applied);
        waits(3).await;
        assert_eq!(upstream.current(), 1);

        assert_eq!(proxy.reconfigure(&proxy.text(&other.slots(3))).await, Reload::Applied);

        upstream.wait_current(3).await;
        waits(1).await;
        // The first of the queue went first, so the last one is who waits still.
        for name in ["1", "2", "3"] {
            upstream.open_gate(name, 1);
        }
        let last = requests.pop().unwrap();
        for request in requests {
            assert_eq!(within("an answer", request).await.unwrap().status, 200);
        }
        upstream.open_gate("4", 1);
        assert_eq!(last.await.unwrap().status, 200);
        upstream.wait_current(0).await;
        eventually("every slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
    }
}

#[tokio::test]
async fn reloaded_slots_spread_over_the_fleet_as_claims_do() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis);
    let (a, b) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let in_force = async |slots: u32| {
        for proxy in [&a, &b] {
            eventually(&format!("{slots} slots"), async || {
                proxy.limit("llm").await["slots"] == slots
            })
            .await;
        }
    };
    let reload = async |proxy: &Proxy, slots| {
        let text = proxy.text(&conf.clone().slots(slots));
        assert_eq!(proxy.sighup(&text).await, Reload::Applied);
    };
    // The lowest claim is in force: raising takes everyone, lowering takes one.
    reload(&a, 4).await;
    eventually("both claims are known", async || {
        let meta: Vec<String> = redis.cli(&["HGETALL", "sem:llm:meta"]).await;
        let claims = meta.chunks(2).filter(|pair| pair[0].starts_with("claim:"));
        let mut claims: Vec<_> = claims.map(|pair| pair[1].split(' ').next().unwrap()).collect();
        claims.sort_unstable();
        claims == ["2", "4"]
    })
    .await;
    in_force(2).await;
    reload(&b, 4).await;
    in_force(4).await;
    reload(&a, 3).await;
    in_force(3).await;
    // An operator's order stands above the claims, until a new one is made.
    let admin = format!("http://{}", a.admin());
    let ordered = run_to_end(&["limit", "llm", "--slots", "9", "--admin", &admin]).await;
    assert!(ordered.status.success(), "{ordered:?}");
    in_force(9).await;
    reload(&b, 4).await;
    in_force(9).await;
    reload(&b, 5).await;
    in_force(3).await;
}

#[tokio::test]
async fn a_bad_file_changes_nothing_and_says_why() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 3);
    let proxy = Proxy::spawn(&conf).await;
    assert!(proxy.status().await["last_reload"].is_null());

    let bad = proxy.text(&conf).replace("slots = 3", "slots = -3");
    assert_eq!(proxy.reconfigure(&bad).await, Reload::Refused);

    let line = bad.lines().position(|line| line.starts_with("slots")).unwrap() + 1;
    let place = format!("proxy.toml:{line}:9: limits.llm.slots: must be");
    assert!(proxy.log().contains(&place), "{place} in {}", proxy.log());
    assert_eq!(proxy.status().await["last_reload"]["worked"], false);
    assert_eq!(proxy.metric("tidegate_config_last_reload_successful").await, 0.0);
    assert_eq!(proxy.limit("llm").await["slots"], 3);
    assert_eq!(Client::new().get(proxy.addr(), "/status/204").await.status, 204);

    assert_eq!(proxy.reconfigure(&proxy.text(&conf.slots(4))).await, Reload::Applied);
    eventually("the slots are in force", async || proxy.limit("llm").await["slots"] == 4).await;
    assert_eq!(proxy.status().await["last_reload"]["worked"], true);
    assert_eq!(proxy.metric("tidegate_config_last_reload_successful").await, 1.0);
}

#[tokio::test]
async fn what_takes_a_restart_is_refused_by_name() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 3).limit("on_lease_lost = \"cut\"");
    let proxy = Proxy::spawn(&conf).await;
    let text = proxy.text(&conf);
    let other = |before: String, after: &str| {
        assert!(text.contains(&before), "{before} in {text}");
        text.replace(&before, after)
    };
    let cases = [
        ("server.listen", other(proxy.addr().to_string(), "127.0.0.1:1")),
        ("admin.listen", other(proxy.admin().to_string(), "127.0.0.1:1")),
        ("store", other("memory:".to_owned(), "redis://127.0.0.1:1")),
        ("classes.order", format!("{text}\n[classes]\norder = [\"one\"]\n")),
        ("limits.llm.lease", other("lease = \"10m\"".to_owned(), "lease = \"5m\"")),
    ];
    for (key, text) in cases {
        assert_eq!(proxy.sighup(&text).await, Reload::Refused, "{key}");
        let words = format!("{key}: changes with a restart only");
        assert!(proxy.log().contains(&words), "{words} in {}", proxy.log());
    }
    assert_eq!(Client::new().get(proxy.addr(), "/status/204").await.status, 204);
}

#[tokio::test]
async fn routes_limits_and_upstreams_come_and_go() {
    let (upstream, second) = (Upstream::spawn().await, Upstream::spawn().await);
    let conf = one_limit(&upstream, 1);
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let running = get(&client, &proxy, "/gate");
    upstream.wait_current(1).await;
    let waiting = get(&client, &proxy, "/status/202");
    eventually("one waits", async || proxy.limit("llm").await["waiting"]["normal"] == 1).await;

    // The limit has another name and place, its upstream another address, and the path is another.
    let text = proxy.text(&conf.clone().endpoint(second.url()).slots(2));
    let text = text.replace("llm", "other").replace("path = \"/\"", "path = \"/status/\"");
    let text = text.replace("[limits.other]", "[limits.first]\nslots = 1\n[limits.other]");
    assert_eq!(proxy.reconfigure(&text).await, Reload::Applied, "{}", proxy.log());

    assert_eq!(client.get(proxy.addr(), "/gate").await.status, 404);
    assert_eq!(client.get(proxy.addr(), "/status/203").await.status, 203);
    assert_eq!((upstream.total(), second.total()), (1, 1));
    let status = proxy.status().await;
    let names: Vec<_> = status["limits"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["first", "other"]);
    assert_eq!(proxy.metric("tidegate_semaphore_limit{limit=\"other\"}").await, 2.0);
    assert_eq!(proxy.metric("tidegate_semaphore_local_holders{limit=\"first\"}").await, 0.0);
    let metrics = client.get(proxy.admin(), "/metrics").await;
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert!(!metrics.contains("semaphore_limit{limit=\"llm\"}"), "{metrics}");
    // Who was there before is served as it would have been.
    upstream.open(1);
    assert_eq!(running.await.unwrap().status, 200);
    assert_eq!(waiting.await.unwrap().status, 202);
    assert_eq!((upstream.total(), second.total()), (2, 1));

    // And back: what the limit had is as it was left.
    assert_eq!(proxy.reconfigure(&proxy.text(&conf)).await, Reload::Applied);
    eventually("nothing is taken", async || proxy.limit("llm").await["in_use"] == 0).await;
    assert_eq!(client.get(proxy.addr(), "/status/204").await.status, 204);
    assert_eq!(upstream.total(), 3);
}

#[tokio::test]
async fn a_swapped_link_is_a_change() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1);
    let proxy = Proxy::spawn(&conf).await;
    // As Kubernetes lays out a mounted ConfigMap: the file is a link into a folder that is a link.
    let link = |to: &str, from: &str| {
        let swap = proxy.folder().join(".swap");
        std::os::unix::fs::symlink(to, &swap).unwrap();
        std::fs::rename(swap, proxy.folder().join(from)).unwrap();
    };
    for (folder, slots) in [("..1", 2), ("..2", 3)] {
        std::fs::create_dir(proxy.folder().join(folder)).unwrap();
        let text = proxy.text(&conf.clone().slots(slots));
        proxy.rewrite(&format!("{folder}/proxy.toml"), &text);
    }
    link("..1", "..data");
    let reload = proxy.reloaded(async || link("..data/proxy.toml", "proxy.toml")).await;
    assert_eq!(reload, Reload::Applied);
    eventually("two slots", async || proxy.limit("llm").await["slots"] == 2).await;
    assert_eq!(proxy.reloaded(async || link("..2", "..data")).await, Reload::Applied);
    eventually("three slots", async || proxy.limit("llm").await["slots"] == 3).await;
}

#[tokio::test]
async fn what_the_process_as_a_whole_may_have_changes_too() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 10).server("max_in_flight = 1\nmax_connections = 10");
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let first = get(&client, &proxy, "/gate");
    upstream.wait_current(1).await;
    let full = client.get(proxy.addr(), "/gate").await;
    assert_eq!(full.header("tidegate-reason"), "process_full");

    let more = conf.clone().server("max_in_flight = 2\nmax_connections = 1");
    assert_eq!(proxy.reconfigure(&proxy.text(&more)).await, Reload::Applied);
    let second = get(&client, &proxy, "/gate");
    upstream.wait_current(2).await;
    let full = client.get(proxy.addr(), "/gate").await;
    assert_eq!(full.header("tidegate-reason"), "process_full");
    upstream.open(2);
    assert_eq!(first.await.unwrap().status, 200);
    assert_eq!(second.await.unwrap().status, 200);
    drop(client);
    // One connection is allowed now, so a second one waits until the first is closed.
    let only = Raw::get(proxy.addr(), "/gate?name=only").await;
    upstream.wait_current(1).await;
    let late = get(&Client::new(), &proxy, "/status/204");
    assert_eq!(proxy.reloaded(async || signal(proxy.pid(), "HUP")).await, Reload::Applied);
    assert!(!late.is_finished());
    drop(only);
    assert_eq!(late.await.unwrap().status, 204);
}

#[tokio::test]
async fn unchanged_upstreams_keep_their_connections_and_changed_ones_begin_anew() {
    let (upstream, second) = (Upstream::spawn().await, Upstream::spawn().await);
    let shared = H2Upstream::spawn(Settings::default()).await;
    let route = |name: &str| {
        format!("\n[[routes]]\npath = \"/{name}/\"\nstrip_prefix = true\nupstream = \"{name}\"\n")
    };
    let tail = format!(
        "{}{}[upstreams.second]\nendpoints = [\"{}\"]\nlimits = [\"llm\"]\nlinger = \"1s\"\n\
         [upstreams.shared]\nendpoints = [\"{}\"]\nhttp2 = true\n",
        route("second"),
        route("shared"),
        second.url(),
        shared.url(),
    );
    // With one slot a request finds the connection that the one before it gave back.
    let conf = one_limit(&upstream, 1).route(tail);
    let proxy = Proxy::spawn(&conf).await;
    // Never idle for so long that they close.
    let done = Arc::new(AtomicBool::new(false));
    let busy = ["/status/200", "/second/status/200", "/shared/x"].map(|path| {
        let (addr, done) = (proxy.addr(), Arc::clone(&done));
        tokio::spawn(async move {
            let client = Client::new();
            while !done.load(Ordering::Relaxed) {
                assert_eq!(client.get(addr, path).await.status, 200);
            }
        })
    });
    let more = async || {
        let now = (upstream.total(), second.total(), shared.total());
        upstream.wait_total(now.0 + 5).await;
        second.wait_total(now.1 + 5).await;
        eventually("more requests", async || shared.total() > now.2 + 5).await;
        (upstream.connections(), second.connections(), shared.connections())
    };
    assert_eq!(more().await, (1, 1, 1));
    // What all of them have to do with: slots, queues, fields, listeners.
    let other = conf.clone().slots(2).slots(1).server("max_connections = 1000");
    let text = proxy.text(&other);
    let text = text.replace("[[routes]]", "[[routes]]\nresponse_headers = { set = { x = \"y\" } }");
    assert_eq!(proxy.sighup(&text).await, Reload::Applied);
    assert_eq!(more().await, (1, 1, 1));
    assert_eq!(proxy.sighup(&text.replace("\"1s\"", "\"2s\"")).await, Reload::Applied);
    assert_eq!(more().await, (1, 2, 1));
    let ping = text.replace("http2 = true", "http2 = true\nping_interval = \"9s\"");
    assert_eq!(proxy.sighup(&ping.replace("\"1s\"", "\"2s\"")).await, Reload::Applied);
    assert_eq!(more().await, (1, 2, 2));
    done.store(true, Ordering::Relaxed);
    for client in busy {
        client.await.unwrap();
    }
}

#[tokio::test]
async fn unchanged_upstreams_keep_what_is_known_of_their_health() {
    let upstream = Upstream::spawn().await;
    let nobody = unused_addr();
    let conf = one_limit(&upstream, 1)
        .endpoints([upstream.url(), format!("http://{nobody}")])
        .upstream("ejection = { failures = 1, time = \"5m\" }");
    let (proxy, client) = (Proxy::spawn(&conf).await, Client::new());
    let sample = format!("tidegate_endpoint_up{{upstream=\"llm\",endpoint=\"{nobody}\"}}");
    let is_up = async || proxy.metric(&sample).await == 1.0;
    assert!(is_up().await);
    eventually("it is out", async || {
        assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200);
        !is_up().await
    })
    .await;
    let text = proxy.text(&conf.clone().slots(2));
    assert_eq!(proxy.sighup(&text).await, Reload::Applied);
    assert!(!is_up().await);
    assert_eq!(proxy.sighup(&text.replace("\"5m\"", "\"4m\"")).await, Reload::Applied);
    assert!(is_up().await);
}
