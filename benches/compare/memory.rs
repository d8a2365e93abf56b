//! What a waiter costs: memory in the proxy, and calls in Redis.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    time::Duration,
};

use tokio::time::sleep;

use crate::{
    Bound, Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::{Cpus, Proc},
    load::Connection,
    report::figure,
    upstream::HoldUpstream,
};

const CANDIDATES: [Candidate; 4] =
    [Candidate::Haproxy, Candidate::NginxLua, Candidate::Embedded, Candidate::Redis];
const SLOTS: usize = 10;
/// Longer than the section takes: nobody gets a slot while it is measured.
const HOLD: Duration = Duration::from_secs(60);
/// How long Redis' calls are counted.
const WATCH: Duration = Duration::from_secs(5);

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let mut rows = Vec::new();
    for candidate in CANDIDATES {
        eprintln!("waiters, {}", candidate.name());
        match measure(candidate).await {
            Ok(row) => rows.push(row.show(run, candidate)),
            Err(error) => {
                run.missing(candidate, error)?;
                rows.push(vec![candidate.name().to_owned(), "not available".to_owned()]);
            }
        }
    }
    run.report.heading("Waiters, 10 slots held");
    let head = [
        "",
        "KiB per waiter (5,000)",
        "Redis calls/s, none waits",
        "Redis calls/s, 1,000 wait",
        "calls/s per waiter",
    ];
    run.report.table(&head, &rows);
    run.report.line(
        "KiB: growth of resident memory by 5,000 connections that wait, their buffers in the kernel not counted. \
         Calls: all that Redis executed, those inside of scripts included, while the 10 slots were held throughout. \
         At 5,000 the poller is no longer measured: it only polls.",
    );
    Ok(())
}

/// What one candidate cost. NaN where it has no Redis.
#[derive(Debug)]
struct Waiters {
    kib: f64,
    calls_alone: f64,
    calls_waiting: f64,
}

impl Waiters {
    fn show(&self, run: &mut Run, candidate: Candidate) -> Vec<String> {
        let per_waiter = (self.calls_waiting - self.calls_alone) / 1000.0;
        if candidate == Candidate::Redis {
            // 1,000 waiters may differ from none by a heartbeat more in the window, not by a call each.
            run.mark("Redis calls/s per waiter: tidegate redis", per_waiter, Bound::AtMost(0.01));
        }
        let figures = [self.kib, self.calls_alone, self.calls_waiting, per_waiter].map(figure);
        [candidate.name().to_owned()].into_iter().chain(figures).collect()
    }
}

async fn measure(candidate: Candidate) -> Result<Waiters> {
    let (redis, upstream) = (start_redis(Cpus::Any).await?, HoldUpstream::start()?);
    let setup = Setup {
        cpus: Cpus::Any,
        slots: SLOTS,
        queue: 100_000,
        haproxy_threads: 1,
        haproxy_queue: true,
        upstream: upstream.addr.port(),
        redis: redis.port,
    };
    let proxy = candidate.start(&setup, 1).await?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, proxy.port));

    // The first requests pay for what is allocated once.
    for connection in &mut Connection::open_many(&[addr], 100).await? {
        connection.get(Duration::ZERO).await?;
    }
    let mut open = wait(addr, SLOTS).await?;
    while upstream.now() < SLOTS as u64 {
        sleep(Duration::from_millis(10)).await;
    }
    let before = proxy.memory();
    let calls_alone = calls_per_second(candidate, &redis).await?;
    open.extend(wait(addr, 1000).await?);
    let calls_waiting = calls_per_second(candidate, &redis).await?;
    let kib = if candidate == Candidate::NginxLua {
        f64::NAN
    } else {
        open.extend(wait(addr, 4000).await?);
        sleep(Duration::from_secs(2)).await;
        (proxy.memory() - before) / 5000.0
    };
    if upstream.most() != SLOTS as u64 {
        return Err(format!("the upstream held {} instead of {SLOTS}", upstream.most()).into());
    }
    Ok(Waiters { kib, calls_alone, calls_waiting })
}

/// Sends `count` requests that hold long, each on its own connection, and waits for nothing.
async fn wait(addr: SocketAddr, count: usize) -> Result<Vec<Connection>> {
    let mut connections = Connection::open_many(&[addr], count).await?;
    for connection in &mut connections {
        connection.send(HOLD).await?;
    }
    sleep(Duration::from_secs(1)).await;
    Ok(connections)
}

/// What Redis executes in a second, without our own question.
async fn calls_per_second(candidate: Candidate, redis: &Proc) -> Result<f64> {
    if !candidate.uses_redis() {
        return Ok(f64::NAN);
    }
    let before = calls(redis)?;
    sleep(WATCH).await;
    Ok((calls(redis)? - before) / WATCH.as_secs_f64())
}

fn calls(redis: &Proc) -> Result<f64> {
    let output = Command::new("redis-cli")
        .args(["-p", &redis.port.to_string(), "info", "commandstats"])
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let others = text
        .lines()
        .filter(|line| line.starts_with("cmdstat_") && !line.starts_with("cmdstat_info:"));
    Ok(others.filter_map(|line| line.split(['=', ',']).nth(1)?.parse::<f64>().ok()).sum())
}
