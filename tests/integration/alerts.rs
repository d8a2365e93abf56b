//! The alert rules and the dashboard name metrics that exist, each rule fires when it should, and the metrics that were made for
//! them tell the truth.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;
use tokio::process::Command;

use crate::harness::{Client, Proxy, Redis, Upstream, eventually, one_limit, within};

const RULES: &str = include_str!("../../deploy/prometheus/alerts.yml");
const RULES_TESTS: &str = include_str!("../../deploy/prometheus/alerts.test.yml");
const METRICS: &str = include_str!("../../docs/metrics.md");
const DASHBOARD: &str = include_str!("../../deploy/grafana/tidegate.json");

fn names(text: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_name(c)).filter(|word| word.starts_with("tidegate_")).collect()
}

/// Every query of the dashboard.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut queries: Vec<_> =
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let variables = variables.iter().filter(|variable| variable["type"] == "query");
    queries.extend(variables.map(|variable| variable["query"].as_str().unwrap().to_owned()));
    queries
}

#[tokio::test]
async fn every_metric_of_an_alert_and_of_the_dashboard_is_there() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).queue("{ size = 1, timeout = \"50ms\" }");
    let proxy = Proxy::spawn(&conf).await;
    let (client, addr) = (Client::new(), proxy.addr());
    let holder = tokio::spawn(async move { Client::new().get(addr, "/gate").await });
    upstream.wait_current(1).await;
    let late = client.get(addr, "/gate").await;
    assert_eq!(late.header("tidegate-reason"), "queue_timeout");
    assert_eq!(proxy.metric("tidegate_semaphore_open{limit=\"llm\"}").await, 1.0);
    assert_eq!(proxy.metric("tidegate_overshoot{limit=\"llm\"}").await, 0.0);
    upstream.open(1);
    assert_eq!(holder.await.unwrap().status, 200);
    let open = async || proxy.metric("tidegate_semaphore_open{limit=\"llm\"}").await;
    eventually("nothing is open", async || open().await == 0.0).await;

    let metrics = client.get(proxy.admin(), "/metrics").await;
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    // Which says all that there is: the test of the page sees to that.
    let types: BTreeSet<(&str, &str)> = METRICS
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .map(|(name, rest)| (name, rest.split(' ').next().unwrap_or_default()))
        .collect();
    let is_there = |name: &str| {
        let of_histogram = ["_bucket", "_sum", "_count"].iter();
        let mut of_histogram = of_histogram.filter_map(|part| name.strip_suffix(part));
        types.contains(&(name, "gauge"))
            || types.contains(&(name, "counter"))
            || of_histogram.any(|name| types.contains(&(name, "histogram")))
    };
    let queries = queries().join("\n");
    let (advice, rules): (Vec<&str>, Vec<&str>) =
        RULES.lines().partition(|line| line.trim().starts_with("action:"));
    for text in [&rules.join("\n"), RULES_TESTS, &queries] {
        let named = names(text);
        assert!(named.len() >= 10, "{named:?}");
        for name in named {
            assert!(is_there(name), "no {name} in {types:?}");
        }
    }
    for name in names(&advice.join("\n")) {
        assert!(types.iter().any(|(real, _)| *real == name), "no {name} in {types:?}");
    }
    let reason = "tidegate_shed_total{limit=\"llm\",class=\"normal\",reason=\"queue_timeout\"} 1";
    assert!(metrics.contains(reason), "no {reason} in:\n{metrics}");
}

#[tokio::test]
async fn a_request_whose_lease_is_over_is_open_but_not_counted() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 2).redis(&redis).lease("2s");
    let proxy = Proxy::spawn(&conf).await;
    let addr = proxy.addr();
    let holder = tokio::spawn(async move { Client::new().get(addr, "/gate").await });
    upstream.wait_current(1).await;
    let overshoot = async || proxy.metric("tidegate_overshoot{limit=\"llm\"}").await;
    let lag = async || proxy.metric("tidegate_lease_renew_lag_seconds{limit=\"llm\"}").await;
    assert_eq!(overshoot().await, 0.0);

    redis.pause();
    eventually("the renewal is overdue", async || lag().await > 1.0).await;
    eventually("the request isn't counted", async || overshoot().await == 1.0).await;
    redis.resume();
    eventually("it is counted again", async || overshoot().await == 0.0).await;
    eventually("it is renewed in time", async || lag().await < 1.0).await;
    let calls = async |result: &str| {
        proxy.metric(&format!("tidegate_store_op_seconds_count{{result=\"{result}\"}}")).await
    };
    assert!(calls("ok").await > 1.0 && calls("error").await >= 1.0);
    upstream.open(1);
    assert_eq!(holder.await.unwrap().status, 200);
}

#[tokio::test]
async fn each_alert_fires_when_it_should_and_no_other_does() {
    // Every alert is expected somewhere, so that none can be left untested.
    let alerts = RULES.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    for alert in alerts {
        assert!(RULES_TESTS.contains(&format!("alertname=\"{alert}\",alertstate")), "{alert}");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    promtool(&["test", "rules"], &root.join("deploy/prometheus/alerts.test.yml")).await;
}

#[tokio::test]
async fn prometheus_can_read_the_queries_of_the_dashboard() {
    let rules: Vec<Value> = queries()
        .into_iter()
        .filter(|query| !query.starts_with("label_values("))
        .map(|query| query.replace("$__rate_interval", "1m").replace("$limit", ".*"))
        .enumerate()
        .map(
            |(index, expr)| serde_json::json!({ "record": format!("query:{index}"), "expr": expr }),
        )
        .collect();
    assert!(rules.len() > 15);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("queries.yml");
    // JSON is YAML.
    let groups = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    fs::write(&file, groups.to_string()).unwrap();
    promtool(&["check", "rules"], &file).await;
}

async fn promtool(words: &[&str], file: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/promtool");
    let program = if here.exists() { here.as_path() } else { Path::new("promtool") };
    let output = within("promtool", Command::new(program).args(words).arg(file).output()).await;
    let output =
        output.unwrap_or_else(|e| panic!("promtool is needed: tests/run.sh gets it ({e})"));
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}
