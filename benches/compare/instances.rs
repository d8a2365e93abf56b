//! How it grows with the fleet: up to 50 real instances on one Redis, one limit, more clients than slots.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::{Cpus, Proc, cpus, machine_and_own_cpu},
    load::{Connection, closed_loop},
    report::{Disturbance, figure, median},
    upstream::HoldUpstream,
};

/// With the hold they would let 20,000 requests/s pass.
const SLOTS: usize = 100;
const HOLD: Duration = Duration::from_millis(5);
const CLIENTS: usize = 400;
const WARM_UP: Duration = Duration::from_secs(1);

/// One round.
#[derive(Clone, Copy, Debug)]
struct Sample {
    per_second: f64,
    p99_ms: f64,
    redis_us: f64,
    proxies_us: f64,
    /// How busy Redis' core and the whole machine were, in percent.
    redis: f64,
    machine: f64,
    /// The part of the machine that clients and upstream had, which are this process.
    load: f64,
}

pub(crate) async fn table(run: &mut Run) -> Result<()> {
    let disturbance = Disturbance::watch();
    let most = run.at_most(500) / 10;
    let mut counts: Vec<usize> = [1, 3, 10].into_iter().filter(|&count| count < most).collect();
    counts.push(most);
    let mut rows = Vec::new();
    for count in counts {
        rows.push(measure(run, count).await?);
    }
    run.report.heading(&format!(
        "Instances on one Redis: {SLOTS} slots, {CLIENTS} clients, holds of {} ms",
        HOLD.as_millis()
    ));
    let head = [
        "instances",
        "req/s",
        "p99 ms",
        "most at the upstream",
        "Redis CPU us",
        "proxies' CPU us",
        "Redis core %",
        "machine %",
        "of that load %",
        "ceiling",
    ];
    run.report.table(&head, &rows);
    run.report.line(&format!(
        "Medians of {} rounds of {} s; each instance has one thread, and nothing is pinned: clients, upstream, Redis and all \
         instances share the machine; the load is clients and upstream. The ceiling is what was used up: the slots (N / hold = {:.0} requests/s), Redis' core, \
         or the machine's CPU. Other processes used {:.1} % of the machine.",
        run.rounds,
        run.seconds,
        SLOTS as f64 / HOLD.as_secs_f64(),
        disturbance.percent()
    ));
    Ok(())
}

async fn measure(run: &mut Run, count: usize) -> Result<Vec<String>> {
    let (redis, upstream) = (start_redis(Cpus::Any).await?, HoldUpstream::start()?);
    let setup = Setup::new(Cpus::Any, SLOTS, upstream.addr.port(), redis.port);
    let mut procs = Vec::new();
    for number in 0..count {
        procs.push(Candidate::Redis.start(&setup, 100 + number).await?);
    }
    let addr = |proc: &Proc| SocketAddr::from((Ipv4Addr::LOCALHOST, proc.port));
    let addrs: Vec<_> = procs.iter().map(addr).collect();
    // A new fleet admits nobody for 2 s, in which these wait.
    for connection in &mut Connection::open_many(&addrs, count).await? {
        connection.get(Duration::ZERO).await?;
    }
    let length = Duration::from_secs(run.seconds);
    let mut samples = Vec::new();
    for round in 0..run.rounds {
        eprintln!("round {} of {}: {count} instances", round + 1, run.rounds);
        let spent =
            || (procs.iter().map(Proc::cpu).sum::<f64>(), redis.cpu(), machine_and_own_cpu());
        let (before, start) = (spent(), Instant::now());
        let (_, took) = closed_loop(&addrs, CLIENTS, HOLD, WARM_UP, length).await?;
        let (after, wall) = (spent(), start.elapsed().as_secs_f64());
        let per_second = took.len() as f64 / length.as_secs_f64();
        // CPU is counted from the start of the load, requests after the warm-up only.
        let a_request = |cpu: f64| 1e6 * cpu / (per_second * wall);
        samples.push(Sample {
            per_second,
            p99_ms: took.value_at_quantile(0.99) as f64 / 1000.0,
            proxies_us: a_request(after.0 - before.0),
            redis_us: a_request(after.1 - before.1),
            redis: 100.0 * (after.1 - before.1) / wall,
            machine: 100.0 * (after.2.0 - before.2.0) / (wall * cpus() as f64),
            load: 100.0 * (after.2.1 - before.2.1) / (wall * cpus() as f64),
        });
    }
    if upstream.most() > SLOTS as u64 {
        let most = upstream.most();
        run.failures.push(format!("{count} instances: the upstream held {most}, not {SLOTS}"));
    }
    let middle = |value: fn(&Sample) -> f64| median(samples.iter().map(value));
    let (per_second, redis, machine) = (
        middle(|sample| sample.per_second),
        middle(|sample| sample.redis),
        middle(|sample| sample.machine),
    );
    let ceiling = match () {
        () if per_second >= 0.95 * SLOTS as f64 / HOLD.as_secs_f64() => "the slots",
        () if redis >= 90.0 => "Redis",
        () if machine >= 85.0 => "the machine's CPU",
        () => "none: latency",
    };
    Ok(vec![
        count.to_string(),
        figure(per_second),
        figure(middle(|sample| sample.p99_ms)),
        upstream.most().to_string(),
        figure(middle(|sample| sample.redis_us)),
        figure(middle(|sample| sample.proxies_us)),
        figure(redis),
        figure(machine),
        figure(middle(|sample| sample.load)),
        ceiling.to_owned(),
    ])
}
