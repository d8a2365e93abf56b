//! What a waiter costs Redis: calls. What it costs the proxy is in `connections`.

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
    connections::wait,
    load::Connection,
    report::figure,
    upstream::HoldUpstream,
};

const CANDIDATES: [Candidate; 2] = [Candidate::NginxLua, Candidate::Redis];
const SLOTS: usize = 10;
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
    let head = ["", "Redis calls/s, none waits", "Redis calls/s, 1,000 wait", "calls/s per waiter"];
    run.report.table(&head, &rows);
    run.report.line(
        "Calls: all that Redis executed, those inside of scripts included, while the 10 slots were held throughout.",
    );
    Ok(())
}

/// What one candidate cost.
#[derive(Debug)]
struct Waiters {
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
        let figures = [self.calls_alone, self.calls_waiting, per_waiter].map(figure);
        [candidate.name().to_owned()].into_iter().chain(figures).collect()
    }
}

async fn measure(candidate: Candidate) -> Result<Waiters> {
    let (redis, upstream) = (start_redis(Cpus::Any).await?, HoldUpstream::start()?);
    let setup = Setup::new(Cpus::Any, SLOTS, upstream.addr.port(), redis.port);
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
    let calls_alone = calls_per_second(&redis).await?;
    open.extend(wait(addr, 1000).await?);
    let calls_waiting = calls_per_second(&redis).await?;
    if upstream.most() != SLOTS as u64 {
        return Err(format!("the upstream held {} instead of {SLOTS}", upstream.most()).into());
    }
    Ok(Waiters { calls_alone, calls_waiting })
}

/// What Redis executes in a second, without our own question.
async fn calls_per_second(redis: &Proc) -> Result<f64> {
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
