//! The alert rules name metrics that exist.

use std::collections::BTreeSet;

use crate::harness::{Client, Proxy, Redis, Upstream, one_limit};

#[tokio::test]
async fn every_metric_of_an_alert_is_there() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).queue("{ size = 1, timeout = \"50ms\" }");
    let proxy = Proxy::spawn(&conf).await;
    let (client, addr) = (Client::new(), proxy.addr());
    let holder = tokio::spawn(async move { Client::new().get(addr, "/gate").await });
    upstream.wait_current(1).await;
    let late = client.get(addr, "/gate").await;
    assert_eq!(late.header("tidegate-reason"), "queue_timeout");
    upstream.open(1);
    assert_eq!(holder.await.unwrap().status, 200);

    let rules = include_str!("../../deploy/prometheus/alerts.yml");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let named: BTreeSet<&str> =
        rules.split(|c| !is_name(c)).filter(|word| word.starts_with("tidegate_")).collect();
    assert!(named.len() >= 7, "{named:?}");
    let metrics = client.get(proxy.admin(), "/metrics").await;
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    for name in named {
        let is_there = metrics
            .lines()
            .any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        assert!(is_there, "no {name} in:\n{metrics}");
    }
    let reason = "tidegate_shed_total{limit=\"llm\",class=\"normal\",reason=\"queue_timeout\"} 1";
    assert!(metrics.contains(reason), "no {reason} in:\n{metrics}");
}
