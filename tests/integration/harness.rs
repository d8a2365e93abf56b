//! What the tests run the program with: a Redis, an upstream that counts, the proxy, clients, and a relay that breaks connections.

use std::{
    fmt::Debug,
    net::{SocketAddr, TcpListener},
    process::Command,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use tokio::sync::watch;

mod carrier;
mod client;
mod collector;
mod h2_upstream;
mod proxy;
mod redis;
mod relay;
mod replicated;
mod self_test;
mod upstream;

pub(crate) use carrier::{Carrier, Shown, certificate, pieces, shake, trailers, whole};
pub(crate) use client::{Answer, Client, Events, H2, Raw, get};
pub(crate) use collector::{Collector, attribute};
pub(crate) use h2_upstream::{First, H2Upstream, Settings};
pub(crate) use proxy::{Conf, Proxy, Reload, config_file, one_limit, run_to_end, tidegate};
pub(crate) use redis::{Redis, Sentinels};
pub(crate) use relay::Relay;
pub(crate) use replicated::Replicated;
pub(crate) use upstream::Upstream;

/// How long anything may take before its test fails. Generous: it is a bound on a hang, not a measurement.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The future's output, or a failure that says what was waited for.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: still not after {LIMIT:?}"),
    }
}

/// Waits until what is watched is so, or fails with what it is instead.
pub(crate) async fn watched<T: Debug>(
    what: &str,
    mut values: watch::Receiver<T>,
    done: impl FnMut(&T) -> bool,
) {
    if tokio::time::timeout(LIMIT, values.wait_for(done)).await.is_err() {
        panic!("{what}: still not after {LIMIT:?}, but {:?}", *values.borrow());
    }
}

/// Waits until something outside says so: a key in Redis, a metric, the state of a process.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    within(what, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// An address nobody listens on. Below the ephemeral range, so that no outgoing connection takes the port meanwhile, and never the
/// same twice in this process.
pub(crate) fn unused_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // A Redis of a Cluster listens 10,000 higher as well, which is still below the ports that clients are given.
    // Processes of the tests that run side by side begin far from each other.
    let start = (std::process::id() * 67 % 10_000) as u16;
    for _ in 0..10_000 {
        let port = 12_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed) % 10_000) % 10_000;
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(addr).is_ok() {
            return addr;
        }
    }
    panic!("no free port between 12000 and 22000");
}

/// Sends a signal (`TERM`, `STOP`, `CONT`, `KILL`) to one process.
pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap();
    assert!(sent.success(), "kill -{name} {pid} failed");
}
