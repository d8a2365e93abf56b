//! The hazards of a limit that is full: who is next, and what becomes of those who are too many.

use std::{collections::BTreeSet, fs};

use tokio::sync::mpsc;

use super::*;
use crate::harness::{H2, within};

const ARRIVALS: usize = 10_000;
const SLOTS: usize = 5;
const QUEUE: usize = 100;
const STREAMS: usize = 200;

#[tokio::test]
async fn h24_the_right_one_is_next_whatever_it_weighs_and_wherever_it_waits() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 4)
        .redis(&redis)
        .server("trusted_proxies = [\"127.0.0.1/32\"]")
        .limit("classes.background = { share = 0.5 }")
        .route(
            "class = { header = \"x-priority\", default = \"normal\" }\n\
             weight = { header = \"x-weight\", max = 4 }\n\n[classes]\nageing = \"1h\"",
        );
    let (a, b, c) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf), Proxy::spawn(&conf));
    let ask = |at: &Proxy, path: &'static str, class: &'static str, weight: &'static str| {
        let addr = at.addr();
        let headers = [("x-priority", class), ("x-weight", weight)];
        tokio::spawn(async move { Client::new().get_with(addr, path, &headers).await })
    };
    let holder = ask(&a, "/gate?name=holder", "normal", "2");
    upstream.wait_current(1).await;
    // Two slots are free, but above the share of the first, and too few for the second, behind whom the others wait.
    let background = ask(&a, "/gate?name=background", "background", "1");
    redis.wait_waiting("llm", 1).await;
    let heavy = ask(&b, "/gate?name=heavy", "normal", "4");
    redis.wait_waiting("llm", 2).await;
    let light = [&a, &b, &c, &c].map(|at| ask(at, "/gate?name=light", "normal", "1"));
    redis.wait_waiting("llm", 6).await;
    // Not behind these: it is of a higher class.
    let critical = ask(&c, "/gate?name=critical", "critical", "1");
    upstream.wait_current(2).await;
    assert_eq!((redis.in_use("llm").await, redis.waiting("llm").await), (3, 6));

    upstream.open_gate("holder", 1);
    redis.wait_in_use("llm", 1).await;
    assert_eq!((redis.waiting("llm").await, upstream.total()), (6, 2));
    upstream.open_gate("critical", 1);
    redis.wait_in_use("llm", 4).await;
    upstream.wait_total(3).await;
    upstream.open_gate("heavy", 1);
    assert_eq!(heavy.await.unwrap().status, 200);
    upstream.wait_total(7).await;
    assert_eq!((upstream.current(), redis.waiting("llm").await), (4, 1));
    // The share is full with two.
    upstream.open_gate("light", 2);
    redis.wait_in_use("llm", 2).await;
    assert_eq!(redis.waiting("llm").await, 1);
    upstream.open_gate("light", 2);
    upstream.wait_total(8).await;
    upstream.open_gate("background", 1);
    served([holder, critical, background]).await;
    served(light).await;
    assert_eq!(upstream.highest(), 4);
}

#[tokio::test]
async fn h25_ten_thousand_at_once_are_refused_apart_and_leave_nothing() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, SLOTS as u32)
        .redis(&redis)
        // The machine may be busy with the storm for longer than a call to Redis takes otherwise.
        .store("op_timeout = \"3s\"")
        .queue("{ size = 100, timeout = \"10m\" }")
        .server("max_in_flight = 30000\ndrain_timeout = \"10m\"");
    let mut proxy = Proxy::spawn(&conf).await;
    let admitted: Vec<_> = (0..SLOTS + QUEUE).map(|_| spawn_get(&proxy, "/gate")).collect();
    redis.wait_waiting("llm", QUEUE).await;
    upstream.wait_current(SLOTS).await;

    let mut connections = Vec::new();
    for _ in 0..ARRIVALS / STREAMS {
        connections.push(H2::connect(proxy.addr()).await);
    }
    storm(&connections).await;
    let (memory, files) = (memory(&proxy), files(&proxy));
    storm(&connections).await;
    // The second storm finds what the first one needed.
    let grown = self::memory(&proxy).saturating_sub(memory);
    assert!(grown < 24 << 10, "{grown} KiB more than the {memory} KiB after the first storm");
    assert_eq!(self::files(&proxy), files);
    assert_eq!((redis.in_use("llm").await, redis.waiting("llm").await), (SLOTS, QUEUE));
    assert_eq!(upstream.total(), SLOTS);
    drop(connections);

    proxy.sigterm();
    redis.wait_waiting("llm", 0).await;
    assert_eq!((upstream.current(), redis.in_use("llm").await), (SLOTS, SLOTS));
    upstream.open(SLOTS);
    let (mut finished, mut draining) = (0, 0);
    for request in admitted {
        let answer = request.await.unwrap();
        match (answer.status, answer.header("tidegate-reason")) {
            (200, _) => finished += 1,
            (503, "draining") => draining += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((finished, draining), (SLOTS, QUEUE));
    assert_eq!(proxy.wait_exit().await.code(), Some(0));
    assert_eq!((redis.in_use("llm").await, upstream.highest()), (0, SLOTS));
}

/// Ten thousand requests at once, of which each is refused, and told to come back at a time of its own.
async fn storm(connections: &[H2]) {
    let (sender, mut answers) = mpsc::unbounded_channel();
    for connection in connections {
        for _ in 0..STREAMS {
            let (mut connection, sender) = (connection.clone(), sender.clone());
            tokio::spawn(async move { sender.send(connection.get("/gate").await) });
        }
    }
    drop(sender);
    let (mut count, mut seconds, mut times) = (0, BTreeSet::new(), BTreeSet::new());
    while let Some(answer) = within("the next refusal", answers.recv()).await {
        let answer = answer.unwrap();
        let header = |name: &str| answer.headers()[name].to_str().unwrap();
        assert_eq!((answer.status().as_u16(), header("tidegate-reason")), (503, "queue_full"));
        let (after, ms) = (header("retry-after"), header("retry-after-ms"));
        let (after, ms): (u64, u64) = (after.parse().unwrap(), ms.parse().unwrap());
        assert!((1..=30).contains(&after) && after == ms.div_ceil(1_000), "{after} s, {ms} ms");
        seconds.insert(after);
        times.insert(ms);
        count += 1;
    }
    assert_eq!(count, ARRIVALS);
    assert!(seconds.len() > 1, "all in {seconds:?} s");
    assert!(times.len() > 500, "only {} times to come back at", times.len());
}

/// KiB.
fn memory(proxy: &Proxy) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", proxy.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn files(proxy: &Proxy) -> usize {
    fs::read_dir(format!("/proc/{}/fd", proxy.pid())).unwrap().count()
}
