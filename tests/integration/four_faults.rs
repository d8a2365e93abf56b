//! The four faults of which an operator must hear. Each shows in `tidegate status`, in `/status`, on the page's stream of events, in
//! one line of the log, and in the very series that its alert reads: the one that moves in the alert's test, and fires nothing else.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;
use serde_yaml_ng::Value as Yaml;

use crate::harness::{
    Client, Proxy, Raw, Redis, Upstream, eventually, one_limit, tidegate, within,
};

const RULES: &str = include_str!("../../deploy/prometheus/alerts.yml");
const SCENARIOS: &str = include_str!("../../deploy/prometheus/alerts.test.yml");

#[tokio::test]
async fn redis_is_killed() {
    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).redis(&redis)).await;
    let _silent = Raw::get(proxy.addr(), "/silent").await;
    redis.wait_in_use("llm", 1).await;
    let watch = Watch::begin(&proxy, &[&proxy]).await;
    eventually("it is counted", async || proxy.limit("llm").await["in_use"] == 1).await;

    redis.kill9().await;
    watch.sees("the store is down", |status| status["store"]["up"] == false).await;
    // What is shown is honest: old where it is, and this instance is here.
    let is_stale = |status: &Json| status["limits"]["llm"]["stale_ms"].as_u64() > Some(4_000);
    let status = watch.sees("the figures are old", is_stale).await;
    let limit = &status["limits"]["llm"];
    assert_eq!((&limit["exact"], &limit["in_use"]), (&false.into(), &1.into()));
    assert_eq!(limit["holders_by_instance"][status["instance"].as_str().unwrap()], 1);
    let instances = status["instances"].as_array().unwrap();
    assert_eq!((instances.len(), &instances[0]["gone"]), (1, &false.into()), "{status}");
    watch.table("store redis down; what follows is stale, of ").await;
    watch.says(&["the store doesn't answer"]).await;
    watch.moved("Redis is gone", "TidegateStoreDown").await;
    assert_eq!(proxy.metric("tidegate_store_up").await, 0.0);
}

#[tokio::test]
async fn a_limit_is_full() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let class = "class = { header = \"x-priority\", default = \"normal\" }";
    let conf = one_limit(&upstream, 1).redis(&redis).route(class);
    let proxy = Proxy::spawn(&conf.server("trusted_proxies = [\"127.0.0.1\"]")).await;
    let watch = Watch::begin(&proxy, &[&proxy]).await;

    let _holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let _waiters = [Raw::get(proxy.addr(), "/silent").await, {
        let mut urgent = Raw::connect(proxy.addr()).await;
        let request = "GET /silent HTTP/1.1\r\nhost: t\r\nx-priority: critical\r\n\r\n";
        urgent.write(request).await.unwrap();
        urgent
    }];
    let is_full = |status: &Json| {
        let limit = &status["limits"]["llm"];
        let waiting = |class: &str| limit["waiting"][class] == 1;
        limit["in_use"] == limit["slots"] && waiting("normal") && waiting("critical")
    };
    watch.sees("the limit is full, and requests wait", is_full).await;
    watch.table("llm 1 1 2 ").await;
    watch.says(&["a limit is full, and requests wait"]).await;
    watch.moved("a limit that is full while requests wait", "TidegateLimitFull").await;
    let metric = async |name: &str| {
        proxy.metric(&format!("tidegate_semaphore_{name}{{limit=\"llm\"}}")).await
    };
    assert_eq!((metric("current_holders").await, metric("limit").await), (1.0, 1.0));
    assert_eq!(metric("waiting").await, 2.0);

    // Of those who wait is told by class as well while nobody can be asked, as far as they wait here.
    redis.pause();
    let is_told = |status: &Json| status["store"]["up"] == false && is_full(status);
    watch.sees("they are told by class without the store", is_told).await;
    redis.resume();
}

#[tokio::test]
async fn an_instance_is_killed_with_a_holder() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).lease("12s");
    let (here, mut killed) = (Proxy::spawn(&conf).await, Proxy::spawn(&conf).await);
    let _silent = Raw::get(killed.addr(), "/silent").await;
    let counted = async |proxy: &Proxy| {
        let holders = "tidegate_semaphore_current_holders{limit=\"llm\"}";
        eventually("it is counted", async || proxy.metric(holders).await == 1.0).await;
    };
    counted(&here).await;
    counted(&killed).await;
    let id = killed.status().await["instance"].as_str().unwrap().to_owned();
    let mut watch = Watch::begin(&here, &[&here, &killed]).await;

    killed.kill9().await;
    watch.living.truncate(1);
    let is_gone = |status: &Json| {
        let mut instances = status["instances"].as_array().unwrap().iter();
        instances.any(|instance| instance["id"] == *id && instance["gone"] == true)
            && status["limits"]["llm"]["holders_by_instance"][&id] == 1
    };
    watch.sees("an instance is gone, and holds a slot", is_gone).await;
    watch.table(", 1 gone LIMIT").await;
    watch.says(&["an instance is gone without having left", &id]).await;
    watch.moved("a leaked holder", "TidegateHoldersOfNobody").await;
    counted(&here).await;
    assert_eq!(here.metric("tidegate_semaphore_local_holders{limit=\"llm\"}").await, 0.0);
    let over = "what an instance that is gone had held is back";
    eventually("it is over", async || here.log().contains(over)).await;
}

#[tokio::test]
async fn an_upstream_is_slow() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 2).limit("max_hold = \"10s\"")).await;
    let watch = Watch::begin(&proxy, &[&proxy]).await;

    let mut silent = Raw::get(proxy.addr(), "/silent").await;
    let is_slow = |status: &Json| {
        let limit = &status["limits"]["llm"];
        limit["max_hold_ms"] == 10_000 && limit["longest_hold_ms"].as_u64() > Some(8_000)
    };
    watch.sees("a request holds for too long", is_slow).await;
    watch.table("LONGEST").await;
    watch.says(&["almost as long as max_hold lets it", "llm"]).await;
    assert!(silent.head().await.starts_with("HTTP/1.1 504"));
    let count = "tidegate_semaphore_hold_seconds_count{limit=\"llm\"}";
    eventually("the hold is measured", async || proxy.metric(count).await == 1.0).await;
    watch.moved("a slow upstream", "TidegateHoldsTooLong").await;
    // Two seconds later there is still the one line.
    watch.says(&["almost as long as max_hold lets it"]).await;
    // So its quantile lies beyond four fifths of ten seconds.
    let short = "tidegate_semaphore_hold_seconds_bucket{le=\"5.0\",limit=\"llm\"}";
    let longest = "tidegate_semaphore_max_hold_seconds{limit=\"llm\"}";
    assert_eq!((proxy.metric(short).await, proxy.metric(longest).await), (0.0, 10.0));
}

#[test]
fn every_scenario_that_fires_fires_one_alert_by_what_moves_in_it() {
    let mut alerts = BTreeSet::new();
    for scenario in scenarios() {
        let Scenario { name, moves, fires } = scenario;
        assert!(fires.len() <= 1, "{name}: {fires:?}");
        let Some(alert) = fires.first() else { continue };
        assert!(moves.iter().any(|series| reads(alert).contains(series)), "{name}: {moves:?}");
        alerts.insert(alert.clone());
    }
    assert_eq!(alerts.len(), RULES.matches("- alert: ").count(), "{alerts:?}");
}

// === what the tests need ===

/// The samples of some instances, by number and series.
type Samples = BTreeMap<(usize, String), String>;

/// An operator who looks at an instance before and after a fault.
struct Watch<'a> {
    proxy: &'a Proxy,
    /// Where Prometheus finds metrics.
    living: Vec<std::net::SocketAddr>,
    before: Samples,
    warned: usize,
}

impl<'a> Watch<'a> {
    async fn begin(proxy: &'a Proxy, scraped: &[&Proxy]) -> Self {
        let living = scraped.iter().map(|proxy| proxy.admin()).collect();
        let mut watch = Self { proxy, living, before: Samples::new(), warned: 0 };
        (watch.before, watch.warned) = (watch.samples().await, watch.warnings().len());
        watch
    }

    /// Waits until `/status` and the page's next figures say so; returns what the former said.
    async fn sees(&self, what: &str, is_so: impl Fn(&Json) -> bool) -> Json {
        let mut status = Json::Null;
        eventually(&format!("{what}: /status"), async || {
            status = self.proxy.status().await;
            is_so(&status)
        })
        .await;
        let mut events = Client::new().events(self.proxy.admin(), "/events").await;
        within(&format!("{what}: /events"), async {
            loop {
                let event = events.next().await.unwrap();
                let Some(data) = event.strip_prefix("event: snapshot\ndata: ") else { continue };
                if is_so(&serde_json::from_str(data).unwrap()) {
                    return;
                }
            }
        })
        .await;
        status
    }

    /// What `tidegate status` prints has these words.
    async fn table(&self, words: &str) {
        let admin = format!("http://{}", self.proxy.admin());
        let mut status = tidegate();
        let output = within("status", status.args(["status", "--admin", &admin]).output()).await;
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(words), "no {words:?} in:\n{text}");
    }

    /// The log has one warning more than before, with these words.
    async fn says(&self, words: &[&str]) {
        let is_said = async || self.warnings().len() > self.warned;
        eventually(&format!("the log says {words:?}"), is_said).await;
        let said = self.warnings().split_off(self.warned);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(words.iter().all(|word| said[0].contains(word)), "no {words:?} in {said:?}");
    }

    fn warnings(&self) -> Vec<String> {
        let log = self.proxy.log();
        let is_warning = |line: &&str| {
            line.contains("\"level\":\"WARN\"") || line.contains("\"level\":\"ERROR\"")
        };
        log.lines().filter(is_warning).map(str::to_owned).collect()
    }

    /// Waits until every series has moved that moves in a scenario and is read by the alert that it fires.
    async fn moved(&self, scenario: &str, alert: &str) {
        let all = scenarios();
        let scenario = all.iter().find(|one| one.name == scenario).unwrap();
        assert_eq!(scenario.fires, BTreeSet::from([alert.to_owned()]));
        let wanted: BTreeSet<_> = scenario.moves.intersection(&reads(alert)).cloned().collect();
        assert!(!wanted.is_empty(), "{alert} reads nothing that moves");
        eventually(&format!("{wanted:?} move"), async || {
            let now = self.samples().await;
            let moved = self.before.iter().filter(|(key, value)| now.get(key) != Some(value));
            let moved: BTreeSet<_> = moved.map(|((_, series), _)| name_of(series)).collect();
            wanted.iter().all(|name| moved.contains(name.as_str()))
        })
        .await;
    }

    async fn samples(&self) -> Samples {
        let mut samples = Samples::new();
        for (index, admin) in self.living.iter().enumerate() {
            let text = Client::new().get(*admin, "/metrics").await;
            let text = String::from_utf8(text.body.to_vec()).unwrap();
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let lines = lines.filter_map(|line| line.rsplit_once(' '));
            samples.extend(lines.map(|(series, at)| ((index, series.to_owned()), at.to_owned())));
        }
        samples
    }
}

/// A test of the alerts.
struct Scenario {
    name: String,
    /// The metrics that aren't as in the first one, where all is well.
    moves: BTreeSet<String>,
    /// All alerts that are ever expected to fire.
    fires: BTreeSet<String>,
}

fn name_of(series: &str) -> &str {
    series.split('{').next().unwrap()
}

fn list(value: &Yaml) -> &[Yaml] {
    value.as_sequence().unwrap()
}

fn scenarios() -> Vec<Scenario> {
    let file: Yaml = serde_yaml_ng::from_str(SCENARIOS).unwrap();
    let tests = list(&file["tests"]);
    let calm = list(&tests[0]["input_series"]);
    let scenario = |test: &Yaml| {
        let series = list(&test["input_series"]).iter().filter(|series| !calm.contains(series));
        let moves = series.map(|series| name_of(series["series"].as_str().unwrap()).to_owned());
        let expected = list(&test["promql_expr_test"]).iter();
        let expected = expected.flat_map(|one| list(&one["exp_samples"]));
        let name = |sample: &Yaml| {
            let (_, rest) = sample["labels"].as_str().unwrap().split_once("alertname=\"").unwrap();
            rest.split('"').next().unwrap().to_owned()
        };
        let name_of_test = test["name"].as_str().unwrap().to_owned();
        Scenario { name: name_of_test, moves: moves.collect(), fires: expected.map(name).collect() }
    };
    tests.iter().map(scenario).collect()
}

/// The metrics in an alert's expression.
fn reads(alert: &str) -> BTreeSet<String> {
    let file: Yaml = serde_yaml_ng::from_str(RULES).unwrap();
    let rules = list(&file["groups"][0]["rules"]);
    let rule = rules.iter().find(|rule| rule["alert"] == alert).unwrap();
    let expr = rule["expr"].as_str().unwrap();
    let words = expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("tidegate_")).map(str::to_owned).collect()
}
