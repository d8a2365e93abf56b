//! The hand-over of a slot: 10 slots, 20 ms holds, more clients than that.
//!
//! Tidegate runs as two and as three instances that share a Redis, the poller as three, each with its part of the clients. HAProxy
//! is one process with two threads, for its queue is its own; Tidegate's embedded store likewise. The poller is nginx-lua, whose
//! requests ask Redis again every 100 ms.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use crate::{
    Bound, Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::Cpus,
    load::{burst, closed_loop, open_arrivals},
    report::{Disturbance, figure, median},
};

/// Who, and how many instances of it.
type Fleet = (Candidate, usize);

const HAPROXY: Fleet = (Candidate::Haproxy, 1);
const REDIS_BY_TWO: Fleet = (Candidate::Redis, 2);
const REDIS_BY_THREE: Fleet = (Candidate::Redis, 3);
const FLEETS: [(Fleet, &str); 5] = [
    (HAPROXY, "haproxy queue"),
    ((Candidate::NginxLua, 3), "polling (nginx-lua)"),
    ((Candidate::Embedded, 1), "tidegate embedded"),
    (REDIS_BY_TWO, "tidegate redis, two"),
    (REDIS_BY_THREE, "tidegate redis, three"),
];
const SLOTS: usize = 10;
const HOLD: Duration = Duration::from_millis(20);
const CLIENTS: usize = 100;
const BURST: usize = 200;
const BURSTS: usize = 3;
const OPEN_PER_SECOND: f64 = 450.0;

/// One round of one fleet; times in ms.
#[derive(Clone, Copy, Debug)]
struct Sample {
    fleet: Fleet,
    round: usize,
    per_second: f64,
    p50: f64,
    p99: f64,
    max: f64,
    jain: f64,
    burst: f64,
    open_p50: f64,
    open_p99: f64,
    /// The most requests that the upstream ever held.
    most: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let disturbance = Disturbance::watch();
    let mut started = Vec::new();
    for ((candidate, instances), name) in FLEETS {
        if !run.compares(candidate) {
            continue;
        }
        // One for each, or they would share a limit.
        let redis = start_redis(Cpus::Any).await?;
        let upstream = crate::upstream::HoldUpstream::start()?;
        let setup = Setup {
            haproxy_threads: 2,
            haproxy_queue: true,
            ..Setup::new(Cpus::Any, SLOTS, upstream.addr.port(), redis.port)
        };
        let mut procs = Vec::new();
        while procs.len() < instances {
            // Those of all fleets are up at the same time.
            match candidate.start(&setup, 10 * instances + procs.len()).await {
                Ok(proc) => procs.push(proc),
                Err(error) => {
                    run.missing(candidate, error)?;
                    break;
                }
            }
        }
        if procs.len() == instances {
            started.push(((candidate, instances), name, upstream, procs, redis));
        }
    }

    let mut samples = Vec::new();
    for round in 0..run.rounds {
        for (fleet, name, upstream, procs, _) in &started {
            eprint!("\rround {} of {}: hand-over, {name}    ", round + 1, run.rounds);
            let addrs: Vec<_> = procs
                .iter()
                .map(|proc| SocketAddr::from((Ipv4Addr::LOCALHOST, proc.port)))
                .collect();
            let length = Duration::from_millis(run.seconds * 2500);
            match measure(&addrs, length, round).await {
                Ok(sample) => samples.push(Sample {
                    fleet: *fleet,
                    round,
                    most: upstream.most() as f64,
                    ..sample
                }),
                Err(error) => run.failures.push(format!("hand-over, {name}: {error}")),
            }
            // What others let through stands in the table; for us it is a failure.
            if upstream.most() > SLOTS as u64 && fleet.0.is_tidegate() {
                let most = upstream.most();
                run.failures.push(format!("hand-over, {name}: the upstream held {most}"));
            }
        }
    }
    eprintln!();
    drop(started);
    show(run, &samples, disturbance.percent());
    if run.compares(Candidate::Redis) {
        three_instances(run).await?;
    }
    Ok(())
}

/// Three instances with one limit of six, far more clients than that.
async fn three_instances(run: &mut Run) -> Result<()> {
    const SLOTS: usize = 6;
    const CLIENTS: usize = 200;
    let upstream = crate::upstream::HoldUpstream::start()?;
    let redis = start_redis(Cpus::Any).await?;
    let setup = Setup::new(Cpus::Any, SLOTS, upstream.addr.port(), redis.port);
    let mut procs = Vec::new();
    for number in 4..7 {
        procs.push(Candidate::Redis.start(&setup, number).await?);
    }
    let addrs: Vec<_> =
        procs.iter().map(|proc| SocketAddr::from((Ipv4Addr::LOCALHOST, proc.port))).collect();
    let mut rows = Vec::new();
    for hold in [HOLD, 10 * HOLD] {
        let ideal = SLOTS as f64 / hold.as_secs_f64();
        let mut shares = Vec::new();
        for _ in 0..run.rounds {
            let length = Duration::from_millis(run.seconds * 2500);
            let warm_up = Duration::from_millis(500);
            let (_, took) = closed_loop(&addrs, CLIENTS, hold, warm_up, length).await?;
            shares.push(took.len() as f64 / length.as_secs_f64() / ideal);
        }
        let share = median(shares.iter().copied());
        let row = [format!("{} ms", hold.as_millis()), figure(share), upstream.most().to_string()];
        rows.push(row.to_vec());
        let name = format!("three instances, {} ms holds: share of N / hold", hold.as_millis());
        run.mark(name, share, Bound::AtLeast(0.9));
    }
    if upstream.most() > SLOTS as u64 {
        run.failures.push(format!("three instances: the upstream held {}", upstream.most()));
    }
    run.report.heading("Three instances on one Redis, 6 slots, 200 clients");
    run.report.table(&["holds", "share of N / hold", "most at the upstream"], &rows);
    Ok(())
}

/// The three loads, one after the other.
async fn measure(addrs: &[SocketAddr], length: Duration, round: usize) -> Result<Sample> {
    let ms = |micros: u64| micros as f64 / 1000.0;
    let (counts, closed) =
        closed_loop(addrs, CLIENTS, HOLD, Duration::from_millis(500), length).await?;
    let mut bursts = Vec::new();
    for _ in 0..BURSTS {
        bursts.push(burst(addrs, BURST, HOLD).await?.as_secs_f64() * 1000.0);
    }
    let open = open_arrivals(addrs, OPEN_PER_SECOND, HOLD, length, round as u64).await?;
    Ok(Sample {
        fleet: HAPROXY,
        round,
        per_second: closed.len() as f64 / length.as_secs_f64(),
        p50: ms(closed.value_at_quantile(0.5)),
        p99: ms(closed.value_at_quantile(0.99)),
        max: ms(closed.max()),
        jain: jain(&counts),
        burst: median(bursts),
        open_p50: ms(open.value_at_quantile(0.5)),
        open_p99: ms(open.value_at_quantile(0.99)),
        most: f64::NAN,
    })
}

/// Jain's index of fairness: 1 if all got the same, 1/n if one got everything.
fn jain(counts: &[u64]) -> f64 {
    let sum: f64 = counts.iter().map(|&count| count as f64).sum();
    let squares: f64 = counts.iter().map(|&count| (count as f64).powi(2)).sum();
    sum * sum / (counts.len() as f64 * squares)
}

fn show(run: &mut Run, samples: &[Sample], others: f64) {
    let middle = |fleet, value: fn(&Sample) -> f64| {
        median(samples.iter().filter(|sample| sample.fleet == fleet).map(value))
    };
    let to_haproxy = |fleet, value: fn(&Sample) -> f64| {
        let of = samples.iter().filter(|sample| sample.fleet == fleet);
        let haproxy = |round| samples.iter().find(|s| s.fleet == HAPROXY && s.round == round);
        median(of.filter_map(|of| Some(value(of) / value(haproxy(of.round)?))))
    };
    let ideal = SLOTS as f64 / HOLD.as_secs_f64();
    let ratio_row = |what: &str, value: fn(&Sample) -> f64| {
        let mut row = vec![what.to_owned()];
        for (fleet, _) in FLEETS {
            let ratio = to_haproxy(fleet, value);
            let value = figure(middle(fleet, value));
            row.push(match fleet {
                _ if ratio.is_nan() => "not available".to_owned(),
                HAPROXY => value,
                _ => format!("{value} ({}x)", figure(ratio)),
            });
        }
        row
    };
    let row = |what: &str, value: &dyn Fn(Fleet) -> f64| {
        let cells = FLEETS.map(|(fleet, _)| figure(value(fleet)));
        [what.to_owned()].into_iter().chain(cells).collect()
    };
    let rows = [
        ratio_row("100 clients, req/s", |s| s.per_second),
        row("share of N / hold, %", &|fleet| 100.0 * middle(fleet, |s| s.per_second) / ideal),
        ratio_row("p50 ms", |s| s.p50),
        ratio_row("p99 ms", |s| s.p99),
        ratio_row("max ms", |s| s.max),
        ratio_row("Jain's index", |s| s.jain),
        ratio_row("burst of 200, last answer ms", |s| s.burst),
        ratio_row("open 450/s, p50 ms", |s| s.open_p50),
        ratio_row("open 450/s, p99 ms", |s| s.open_p99),
        row("most at the upstream", &|fleet| middle(fleet, |s| s.most)),
    ];
    run.report.heading("Hand-over, 10 slots, 20 ms holds");
    let [haproxy, polling, embedded, two, three] = FLEETS.map(|(_, name)| name);
    run.report.table(&["", haproxy, polling, embedded, two, three], &rows);
    run.report.line(&format!(
        "Medians of {} rounds, in brackets the ratio to HAProxy's queue within a round. Tidegate on Redis is \
         two or three instances of one thread, the poller three, each with its part of the clients; HAProxy is one process \
         of two threads, Tidegate embedded one of one. The ideal burst is 400 ms. Open arrivals are a Poisson process, the same for \
         all. Other processes used {others:.1} % of the machine.",
        run.rounds
    ));
    let two = |value: fn(&Sample) -> f64| to_haproxy(REDIS_BY_TWO, value);
    run.mark("hand-over, req/s: two / haproxy queue", two(|s| s.per_second), Bound::AtLeast(0.97));
    let three = |value: fn(&Sample) -> f64| to_haproxy(REDIS_BY_THREE, value);
    let jain = middle(REDIS_BY_THREE, |s| s.jain);
    run.mark(
        "hand-over, req/s: three / haproxy queue",
        three(|s| s.per_second),
        Bound::AtLeast(0.98),
    );
    run.mark("hand-over, p99: three / haproxy queue", three(|s| s.p99), Bound::AtMost(1.1));
    run.mark("hand-over, Jain's index: three", jain, Bound::AtLeast(0.99));
    run.mark("burst: three / haproxy queue", three(|s| s.burst), Bound::AtMost(1.05));
    run.mark("open p99: three / haproxy queue", three(|s| s.open_p99), Bound::AtMost(1.2));
}
