//! Whatever becomes of a request, nothing stays behind: no slot, no waiter, no key, no file descriptor, no memory.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::task::JoinSet;

use crate::harness::{Client, Proxy, Raw, Redis, Upstream, eventually, one_limit};

const CLIENTS: usize = 64;

#[derive(Debug, Default)]
struct Ends {
    served: AtomicUsize,
    refused: AtomicUsize,
    upstream_reset: AtomicUsize,
    timed_out: AtomicUsize,
    client_gone: AtomicUsize,
}

/// One request with a random end.
async fn request(addr: SocketAddr, client: &Client, random: &mut fastrand::Rng, ends: &Ends) {
    let path = match random.u8(..100) {
        0..70 => "/big?bytes=300",
        70..75 => "/reset",
        75..80 => "/trunc",
        80 => "/silent",
        _ => return leave(addr, random, ends).await,
    };
    let end = match client.try_get(addr, path).await {
        Ok(answer) => match answer.status {
            200 => &ends.served,
            502 => &ends.upstream_reset,
            504 => &ends.timed_out,
            503 => &ends.refused,
            status => panic!("{path}: {status}"),
        },
        // Its body ended before its end.
        Err(_) => &ends.upstream_reset,
    };
    end.fetch_add(1, Ordering::Relaxed);
}

/// A request whose client goes, wherever it is by then.
async fn leave(addr: SocketAddr, random: &mut fastrand::Rng, ends: &Ends) {
    let path = ["/hold?ms=8", "/big?bytes=200000", "/silent"][random.usize(..3)];
    let raw = Raw::get(addr, path).await;
    tokio::time::sleep(Duration::from_millis(random.u64(..6))).await;
    // Mostly by a reset: a FIN keeps the port for a minute.
    if random.u8(..) < 240 {
        raw.reset()
    } else {
        drop(raw)
    }
    ends.client_gone.fetch_add(1, Ordering::Relaxed);
}

async fn requests(addr: SocketAddr, count: usize, ends: &Arc<Ends>) {
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let ends = Arc::clone(ends);
        clients.spawn(async move {
            let mut random = fastrand::Rng::with_seed(number as u64);
            let client = Client::new();
            for _ in 0..count / CLIENTS {
                request(addr, &client, &mut random, &ends).await;
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
}

/// Open files and KiB of memory of a process.
fn weight(pid: u32) -> (usize, usize) {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    (files, resident.trim().trim_end_matches(" kB").parse().unwrap())
}

async fn nothing_stays_behind(store: Option<Redis>, count: usize) {
    let upstream = Upstream::spawn().await;
    let mut conf = one_limit(&upstream, 16)
        .queue("{ size = 24, timeout = \"30ms\" }")
        .upstream("response_timeout = \"40ms\"\nlinger = \"2ms\"");
    if let Some(redis) = &store {
        conf = conf.redis(redis);
    }
    let proxy = Proxy::spawn(&conf).await;
    let ends = Arc::default();
    let idle = async || {
        eventually("nobody holds or waits", async || {
            let limit = proxy.limit("llm").await;
            let local = proxy.metric("tidegate_semaphore_local_holders{limit=\"llm\"}").await;
            local == 0.0 && limit["in_use"] == 0
        })
        .await;
        if let Some(redis) = &store {
            redis.wait_in_use("llm", 0).await;
            redis.wait_waiting("llm", 0).await;
        }
    };
    // Pools and caches are filled by then.
    requests(proxy.addr(), (count / 10).min(20_000), &ends).await;
    idle().await;
    let (files, memory) = weight(proxy.pid());
    requests(proxy.addr(), count, &ends).await;
    idle().await;
    eventually("the files are closed", async || weight(proxy.pid()).0 <= files + 4).await;
    let after = weight(proxy.pid());
    println!(
        "{count} requests: {ends:?}\nfiles {files} then {}, KiB {memory} then {}",
        after.0, after.1
    );
    assert!(after.1 < memory + memory / 4 + 8 * 1_024, "{memory} KiB became {}", after.1);
    for (end, seen) in [
        ("served", &ends.served),
        ("refused", &ends.refused),
        ("reset", &ends.upstream_reset),
        ("timed out", &ends.timed_out),
        ("left", &ends.client_gone),
    ] {
        assert!(seen.load(Ordering::Relaxed) > 0, "nobody was {end}: {ends:?}");
    }
    assert!(upstream.highest() <= 16, "{} at once", upstream.highest());
    if let Some(redis) = &store {
        // The claims of the instance stay, as long as it lives.
        let keys: Vec<String> = redis.cli(&["KEYS", "sem:*"]).await;
        assert!(keys.iter().all(|key| key == "sem:llm:meta"), "{keys:?}");
        let noted: Vec<String> = redis.cli(&["HKEYS", "sem:llm:meta"]).await;
        assert!(noted.len() < 16, "{noted:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_behind_in_redis() {
    nothing_stays_behind(Some(Redis::spawn().await), 4_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_behind_in_memory() {
    nothing_stays_behind(None, 4_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a million requests take a quarter of an hour; see docs/proofs.md"]
async fn nothing_stays_behind_of_a_million() {
    nothing_stays_behind(Some(Redis::spawn().await), 1_000_000).await;
}
