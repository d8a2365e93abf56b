//! Full means fair: who goes first, who is sent away, and what is said.

use tokio::task::JoinHandle;

use crate::harness::{
    Answer, Client, Conf, Proxy, Raw, Redis, Upstream, eventually, one_limit, run_to_end,
};

/// The class in a header, which counts since the tests connect from a trusted hop.
const BY_HEADER: &str = "class = { header = \"x-priority\", default = \"normal\" }";
const TRUSTED: &str = "trusted_proxies = [\"127.0.0.1/32\"]";

fn as_class(proxy: &Proxy, class: &'static str) -> JoinHandle<Answer> {
    ask(proxy, "/gate", class)
}

fn ask(proxy: &Proxy, path: &'static str, class: &'static str) -> JoinHandle<Answer> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get_with(addr, path, &[("x-priority", class)]).await })
}

/// Two instances on one Redis. The embedded store counts for one process, so there both are the same.
struct Fleet(Proxy, Option<Proxy>);

impl Fleet {
    async fn spawn(conf: &Conf, redis: Option<&Redis>) -> Self {
        let here = Proxy::spawn(conf).await;
        Self(here, if redis.is_some() { Some(Proxy::spawn(conf).await) } else { None })
    }

    fn here(&self) -> &Proxy {
        &self.0
    }

    fn there(&self) -> &Proxy {
        self.1.as_ref().unwrap_or(&self.0)
    }
}

async fn on_both_stores(test: impl AsyncFn(Conf, Option<&Redis>, &Upstream)) {
    let upstream = Upstream::spawn().await;
    test(one_limit(&upstream, 1), None, &upstream).await;
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    test(one_limit(&upstream, 1).redis(&redis), Some(&redis), &upstream).await;
}

async fn waiting(proxy: &Proxy, count: u64) {
    eventually("as many wait", async || {
        let limit = proxy.limit("llm").await;
        let classes = limit["waiting"].as_object().unwrap();
        classes.values().map(|class| class.as_u64().unwrap()).sum::<u64>() == count
    })
    .await;
}

/// Classes that age by one for each of these times.
fn ageing(time: &str) -> String {
    format!("{BY_HEADER}\n\n[classes]\nageing = \"{time}\"")
}

/// Waits until somebody has waited for so long, by the store's clock.
async fn oldest_wait(proxy: &Proxy, ms: u64) {
    eventually("somebody has waited", async || {
        proxy.limit("llm").await["oldest_wait_ms"].as_u64().unwrap() >= ms
    })
    .await;
}

#[tokio::test]
async fn a_higher_class_goes_first_wherever_it_waits() {
    on_both_stores(async |conf, redis, upstream| {
        let conf = conf.server(TRUSTED).route(ageing("1h"));
        let fleet = Fleet::spawn(&conf, redis).await;
        let (here, there) = (fleet.here(), fleet.there());
        let holder = as_class(here, "normal");
        upstream.wait_current(1).await;
        let background: Vec<_> = (0..3).map(|_| as_class(here, "background")).collect();
        waiting(here, 3).await;
        let critical = as_class(there, "critical");
        waiting(here, 4).await;
        upstream.open(2);
        assert_eq!(holder.await.unwrap().status, 200);
        assert_eq!(critical.await.unwrap().status, 200);
        assert!(background.iter().all(|request| !request.is_finished()));
        upstream.open(3);
        for request in background {
            assert_eq!(request.await.unwrap().status, 200);
        }
        assert_eq!(upstream.highest(), 1);
    })
    .await;
}

/// What has waited for as many steps as there are classes above it is next, whoever comes from above meanwhile: the bound is
/// two steps of ageing and one grant.
#[tokio::test]
async fn a_flood_from_above_keeps_a_waiter_for_two_steps_of_ageing_and_one_grant() {
    on_both_stores(async |conf, redis, upstream| {
        let conf = conf.server(TRUSTED).route(ageing("500ms"));
        let fleet = Fleet::spawn(&conf, redis).await;
        let (here, there) = (fleet.here(), fleet.there());
        let holder = as_class(here, "critical");
        upstream.wait_current(1).await;
        let background = as_class(here, "background");
        waiting(here, 1).await;
        let mut flood = vec![as_class(here, "critical"), as_class(there, "critical")];
        waiting(here, 3).await;
        oldest_wait(here, 1_000).await;
        flood.extend([as_class(here, "critical"), as_class(there, "critical")]);
        waiting(here, 5).await;
        upstream.open(2);
        assert_eq!(holder.await.unwrap().status, 200);
        assert_eq!(background.await.unwrap().status, 200);
        assert!(flood.iter().all(|request| !request.is_finished()));
        upstream.open(4);
        for request in flood {
            assert_eq!(request.await.unwrap().status, 200);
        }
        assert_eq!(upstream.highest(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_flood_of_long_streams_leaves_the_reserve_to_the_classes_above() {
    on_both_stores(async |conf, redis, upstream| {
        let limit = "classes.background = { share = 0.5 }";
        let conf = conf.slots(4).server(TRUSTED).limit(limit).route(ageing("1h"));
        let fleet = Fleet::spawn(&conf, redis).await;
        let (here, there) = (fleet.here(), fleet.there());
        let streams = [here, there].into_iter().cycle().take(12);
        let streams: Vec<_> = streams.map(|at| ask(at, "/gate?name=long", "background")).collect();
        upstream.wait_current(2).await;
        waiting(here, 10).await;
        // The reserve is there at once, again and again, and nobody of the flood slips in when it is left.
        for round in 0..3 {
            let above = [as_class(there, "normal"), as_class(here, "critical")];
            upstream.wait_current(4).await;
            upstream.open(2);
            for request in above {
                assert_eq!(request.await.unwrap().status, 200);
            }
            upstream.wait_current(2).await;
            waiting(here, 10).await;
            assert_eq!(upstream.total(), 2 + 2 * (round + 1));
        }
        // Each stream that ends is followed by one.
        upstream.open_gate("long", 1);
        upstream.wait_total(9).await;
        assert_eq!(upstream.current(), 2);
        upstream.open_gate("long", 11);
        for stream in streams {
            assert_eq!(stream.await.unwrap().status, 200);
        }
        assert_eq!(upstream.highest(), 4);
    })
    .await;
}

#[tokio::test]
async fn a_flood_that_has_aged_still_leaves_one_slot() {
    on_both_stores(async |conf, redis, upstream| {
        let limit = "classes.background = { share = 0.5 }";
        let conf = conf.slots(4).server(TRUSTED).limit(limit).route(ageing("100ms"));
        let fleet = Fleet::spawn(&conf, redis).await;
        let (here, there) = (fleet.here(), fleet.there());
        let flood = [here, there].into_iter().cycle().take(8);
        let flood: Vec<_> = flood.map(|at| ask(at, "/gate?name=long", "background")).collect();
        upstream.wait_current(3).await;
        // Some heartbeats later nobody has taken the last one.
        oldest_wait(here, 3_000).await;
        assert_eq!((upstream.current(), upstream.total()), (3, 3));
        let critical = as_class(there, "critical");
        upstream.wait_current(4).await;
        upstream.open(1);
        assert_eq!(critical.await.unwrap().status, 200);
        upstream.open_gate("long", 8);
        for request in flood {
            assert_eq!(request.await.unwrap().status, 200);
        }
    })
    .await;
}

/// Four of five slots are taken from above all the time, two more than the share of the class below. It waits for one step of
/// ageing, as the class above it may have every slot, and then, since an aged one leaves a slot free, for one release.
#[tokio::test]
async fn a_share_under_a_flood_from_above_waits_for_one_step_of_ageing_and_one_release() {
    on_both_stores(async |conf, redis, upstream| {
        let limit = "classes.background = { share = 0.5 }";
        let conf = conf.slots(5).server(TRUSTED).limit(limit).route(ageing("500ms"));
        let fleet = Fleet::spawn(&conf, redis).await;
        let (here, there) = (fleet.here(), fleet.there());
        let mut above = Vec::new();
        for at in [here, there, here, there] {
            above.push(ask(at, "/gate?name=above", "critical"));
        }
        upstream.wait_current(4).await;
        let background = as_class(here, "background");
        waiting(here, 1).await;
        oldest_wait(here, 2_500).await;
        assert_eq!((upstream.current(), upstream.total()), (4, 4));
        // One goes, and at once another comes: the share has been served in between.
        upstream.open_gate("above", 1);
        upstream.wait_total(5).await;
        waiting(here, 0).await;
        above.push(ask(there, "/gate?name=above", "critical"));
        upstream.wait_total(6).await;
        upstream.open(1);
        assert_eq!(background.await.unwrap().status, 200);
        upstream.open_gate("above", 4);
        for request in above {
            assert_eq!(request.await.unwrap().status, 200);
        }
        assert_eq!(upstream.highest(), 5);
    })
    .await;
}

#[tokio::test]
async fn a_stranger_cannot_choose_its_class_and_its_header_goes_no_further() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).route(BY_HEADER)).await;
    let seen =
        Client::new().get_with(proxy.addr(), "/headers", &[("x-priority", "critical")]).await;
    assert!(!String::from_utf8_lossy(&seen.body).contains("x-priority"), "{seen:?}");
}

#[tokio::test]
async fn a_newcomer_displaces_the_youngest_of_the_lowest_class() {
    on_both_stores(async |conf, _, upstream| {
        let conf = conf.server(TRUSTED).route(BY_HEADER).queue("{ size = 2, timeout = \"2m\" }");
        let proxy = Proxy::spawn(&conf).await;
        let holder = as_class(&proxy, "normal");
        upstream.wait_current(1).await;
        let older = as_class(&proxy, "background");
        waiting(&proxy, 1).await;
        let younger = as_class(&proxy, "background");
        waiting(&proxy, 2).await;
        let critical = as_class(&proxy, "critical");
        let displaced = younger.await.unwrap();
        assert_eq!((displaced.status, displaced.header("tidegate-reason")), (503, "displaced"));
        let refused = as_class(&proxy, "background").await.unwrap();
        assert_eq!(refused.header("tidegate-reason"), "queue_full");
        upstream.open(3);
        for request in [holder, critical, older] {
            assert_eq!(request.await.unwrap().status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn a_class_without_a_queue_is_shed_at_once_and_a_share_keeps_its_reserve() {
    on_both_stores(async |conf, _, upstream| {
        let conf = conf
            .slots(4)
            .server(TRUSTED)
            .route(BY_HEADER)
            .limit("classes.background = { share = 0.5, queue = 0 }");
        let proxy = Proxy::spawn(&conf).await;
        let flood = [as_class(&proxy, "background"), as_class(&proxy, "background")];
        upstream.wait_current(2).await;
        let shed = as_class(&proxy, "background").await.unwrap();
        assert_eq!((shed.status, shed.header("tidegate-reason")), (503, "queue_full"));
        let others = [as_class(&proxy, "normal"), as_class(&proxy, "critical")];
        upstream.wait_current(4).await;
        upstream.open(4);
        for request in flood.into_iter().chain(others) {
            assert_eq!(request.await.unwrap().status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn each_tenant_has_slots_of_its_own_and_its_name_stays_here() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let tail = r#"limits = ["tenant"]
rates = ["per-tenant"]

[limits.tenant]
slots = 1
key = "header:x-tenant"
queue = 0
lease = "10m"
slots_for = { "big secret tenant" = 2 }

[rates.per-tenant]
requests = 100
window = "1m"
key = "header:x-tenant"
"#;
    let conf = one_limit(&upstream, 9).redis(&redis).route(tail);
    let proxy = Proxy::spawn_with(&conf, &[("RUST_LOG", "trace,hyper=off,h2=off")]).await;
    let addr = proxy.addr();
    let ask = |tenant: &'static str| {
        tokio::spawn(
            async move { Client::new().get_with(addr, "/gate", &[("x-tenant", tenant)]).await },
        )
    };
    let small = ask("small secret tenant");
    upstream.wait_current(1).await;
    let refused = ask("small secret tenant").await.unwrap();
    assert_eq!((refused.status, refused.header("tidegate-reason")), (429, "queue_full"));
    let big = [ask("big secret tenant"), ask("big secret tenant")];
    upstream.wait_current(3).await;
    assert_eq!(ask("big secret tenant").await.unwrap().status, 429);
    let keys: Vec<String> = redis.cli(&["KEYS", "*"]).await;
    assert!(keys.iter().filter(|key| key.starts_with("sem:tenant:")).count() >= 2, "{keys:?}");
    assert!(keys.iter().any(|key| key.starts_with("rl:per-tenant:")), "{keys:?}");
    let texts = redis.everything().await;
    assert!(texts.iter().any(|text| text.contains(" critical ") || text.contains(" normal ")));
    for text in texts {
        assert!(!text.contains("secret"), "{text}");
    }
    for path in ["/metrics", "/status", "/limits/tenant", "/limits/llm"] {
        let answer = Client::new().get(proxy.admin(), path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(!String::from_utf8_lossy(&answer.body).contains("secret"), "{path}");
    }
    upstream.open(3);
    assert_eq!(small.await.unwrap().status, 200);
    for request in big {
        assert_eq!(request.await.unwrap().status, 200);
    }
    let log = proxy.log();
    assert!(!log.is_empty() && !log.contains("secret"), "{log}");
    eventually("an idle tenant costs nothing", async || {
        let keys: Vec<String> = redis.cli(&["KEYS", "sem:tenant:*"]).await;
        keys.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_rate_lets_so_many_pass_and_says_when_to_come_back() {
    on_both_stores(async |conf, _, upstream| {
        let tail = "rates = [\"all\"]\n\n[rates.all]\nrequests = 5\nwindow = \"10m\"";
        let proxy = Proxy::spawn(&conf.slots(1).queue("0").route(tail)).await;
        let client = Client::new();
        // A refusal by the full limit burns no quota.
        let holder = Raw::get(proxy.addr(), "/gate").await;
        upstream.wait_current(1).await;
        for _ in 0..3 {
            let full = client.get(proxy.addr(), "/status/200").await;
            assert_eq!(full.header("tidegate-reason"), "queue_full");
        }
        upstream.open(1);
        upstream.wait_current(0).await;
        eventually("the slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
        let mut passed = 1;
        for _ in 0..7 {
            let answer = client.get(proxy.addr(), "/status/200").await;
            if answer.status == 200 {
                passed += 1;
                eventually("slot", async || proxy.limit("llm").await["in_use"] == 0).await;
                continue;
            }
            assert_eq!((answer.status, answer.header("tidegate-reason")), (429, "rate_limited"));
            let ms: u64 = answer.header("retry-after-ms").parse().unwrap();
            assert!((540_000..=600_001).contains(&ms), "{ms}");
        }
        assert_eq!(passed, 5);
        drop(holder);
    })
    .await;
}

#[tokio::test]
async fn a_limit_in_shadow_mode_admits_everyone_and_counts() {
    on_both_stores(async |conf, _, upstream| {
        let conf = conf.queue("0").limit("mode = \"shadow\"");
        let proxy = Proxy::spawn(&conf).await;
        let all: Vec<_> = (0..3).map(|_| as_class(&proxy, "normal")).collect();
        upstream.wait_current(3).await;
        let metrics = Client::new().get(proxy.admin(), "/metrics").await;
        let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
        let line = "tidegate_shadow_total{limit=\"llm\",class=\"normal\",reason=\"queue_full\"} 2";
        assert!(metrics.contains(line), "{metrics}");
        upstream.open(3);
        for request in all {
            assert_eq!(request.await.unwrap().status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn what_weighs_too_much_is_refused_and_a_heavy_one_is_not_starved() {
    on_both_stores(async |conf, _, upstream| {
        let weights = format!("weight = {{ header = \"x-weight\", max = 9 }}\n{}", ageing("1h"));
        let conf = conf.slots(3).server(TRUSTED).route(weights);
        let proxy = Proxy::spawn(&conf).await;
        let addr = proxy.addr();
        let ask = |weight: &'static str| {
            tokio::spawn(async move {
                Client::new().get_with(addr, "/gate", &[("x-weight", weight)]).await
            })
        };
        let heavy = ask("4").await.unwrap();
        assert_eq!((heavy.status, heavy.header("tidegate-reason")), (413, "too_heavy"));
        assert_eq!(heavy.header("x-should-retry"), "false");
        let first = ask("2");
        upstream.wait_current(1).await;
        let second = ask("2");
        waiting(&proxy, 1).await;
        // There is room for one more slot, but it is the heavy one's turn.
        let third = ask("1");
        waiting(&proxy, 2).await;
        // Nor does the class below get past it.
        let fourth = as_class(&proxy, "background");
        waiting(&proxy, 3).await;
        assert_eq!(upstream.total(), 1);
        upstream.open(1);
        assert_eq!(first.await.unwrap().status, 200);
        upstream.wait_total(3).await;
        upstream.open(3);
        for request in [second, third, fourth] {
            assert_eq!(request.await.unwrap().status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn the_ladder_is_taken_before_anyone_is_refused() {
    let (upstream, cheap) = (Upstream::spawn().await, Upstream::spawn().await);
    let tail = format!(
        r#"dialect = "openai"
on_full = [{{ upstream = "cheap" }}, {{ respond = 200, body = "later", content_type = "text/plain" }}]

[limits.cheap]
slots = 1
queue = 0

[upstreams.cheap]
endpoints = ["{}"]
limits = ["cheap"]
"#,
        cheap.url()
    );
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).queue("0").route(tail)).await;
    let client = Client::new();
    let first = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let elsewhere =
        client.get_with(proxy.addr(), "/headers", &[("authorization", "Bearer mine")]).await;
    assert_eq!(elsewhere.header("tidegate-degraded"), "upstream:cheap");
    assert!(!String::from_utf8_lossy(&elsewhere.body).contains("Bearer mine"));
    let second = Raw::get(proxy.addr(), "/silent").await;
    cheap.wait_current(1).await;
    let fixed = client.get(proxy.addr(), "/").await;
    assert_eq!((fixed.status, &fixed.body[..]), (200, &b"later"[..]));
    assert_eq!(fixed.header("tidegate-degraded"), "respond");
    assert_eq!(fixed.header("tidegate-reason"), "queue_full");
    assert_eq!((upstream.highest(), cheap.highest()), (1, 1));
    drop((first, second));
}

#[tokio::test]
async fn an_operator_changes_a_limit_for_the_whole_fleet_and_takes_it_back() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis);
    let (here, there) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let requests: Vec<_> = (0..3).map(|_| as_class(&there, "normal")).collect();
    upstream.wait_current(1).await;
    redis.wait_waiting("llm", 2).await;
    let admin = format!("http://{}", here.admin());
    let raised = run_to_end(&["limit", "llm", "--slots", "3", "--admin", &admin]).await;
    assert_eq!(raised.status.code(), Some(0), "{raised:?}");
    upstream.wait_current(3).await;
    let reset = run_to_end(&["limit", "llm", "--reset", "--admin", &admin]).await;
    assert_eq!(reset.status.code(), Some(0), "{reset:?}");
    eventually("both have it", async || {
        here.limit("llm").await["slots"] == 1 && there.limit("llm").await["slots"] == 1
    })
    .await;
    // Nobody is cut, and nobody follows before there is room.
    assert_eq!(upstream.current(), 3);
    upstream.open(3);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
}
