//! What a proxy costs, and what a limit costs on top: wrk through each candidate, at three concurrencies.

use std::time::Duration;

use crate::{
    Bound, Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::Cpus,
    load::wrk,
    report::{Disturbance, figure, median},
    serve::Kind,
};

const CONNECTIONS: [usize; 3] = [1, 32, 256];

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    candidate: Candidate,
    connections: usize,
    round: usize,
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// CPU of the candidate and of Redis, in microseconds for each request.
    cpu_us: f64,
    redis_us: f64,
    /// How busy the candidate's core was, in percent.
    core: f64,
    memory_mib: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let disturbance = Disturbance::watch();
    let redis = start_redis(Cpus::Rest).await?;
    let upstream = Kind::Fast.start(Cpus::Rest).await?;
    let setup = Setup::new(Cpus::Proxy, 1000, upstream.port, redis.port);
    let mut procs = Vec::new();
    for candidate in Candidate::ALL {
        if candidate == Candidate::Direct || !run.compares(candidate) {
            continue;
        }
        match candidate.start(&setup, 0).await {
            Ok(proc) => procs.push((candidate, proc)),
            Err(error) => run.missing(candidate, error)?,
        }
    }

    let mut samples = Vec::new();
    for round in 0..run.rounds {
        for connections in CONNECTIONS {
            let direct = [(Candidate::Direct, &upstream)];
            for (candidate, proc) in
                direct.into_iter().chain(procs.iter().map(|(candidate, proc)| (*candidate, proc)))
            {
                eprint!(
                    "\rround {} of {}: {connections} connections, {}    ",
                    round + 1,
                    run.rounds,
                    candidate.name()
                );
                let url = format!("http://127.0.0.1:{}/", proc.port);
                if round == 0 {
                    wrk(&url, connections, 1).await?;
                }
                let (cpu, redis_cpu, start) =
                    (proc.cpu(), redis.cpu(), tokio::time::Instant::now());
                let load = wrk(&url, connections, run.seconds).await?;
                let (cpu, redis_cpu, wall) =
                    (proc.cpu() - cpu, redis.cpu() - redis_cpu, start.elapsed().as_secs_f64());
                if load.errors > 0.0 {
                    run.failures.push(format!(
                        "{} answered wrongly {} times",
                        candidate.name(),
                        load.errors
                    ));
                }
                samples.push(Sample {
                    candidate,
                    connections,
                    round,
                    per_second: load.per_second,
                    p50_ms: load.p50_ms,
                    p99_ms: load.p99_ms,
                    cpu_us: 1e6 * cpu / load.requests,
                    redis_us: if candidate.uses_redis() {
                        1e6 * redis_cpu / load.requests
                    } else {
                        f64::NAN
                    },
                    core: 100.0 * cpu / wall,
                    memory_mib: proc.memory() / 1024.0,
                });
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    eprintln!();
    drop((procs, upstream, redis));
    show(run, &samples, disturbance.percent());
    Ok(())
}

/// The median over the rounds of one candidate at one concurrency.
fn middle(
    samples: &[Sample],
    candidate: Candidate,
    connections: usize,
    value: impl Fn(&Sample) -> f64,
) -> f64 {
    let of = samples
        .iter()
        .filter(|sample| sample.candidate == candidate && sample.connections == connections);
    median(of.map(value))
}

/// The median over the rounds of a candidate's value over another's in the same round.
fn ratio(
    samples: &[Sample],
    of: Candidate,
    to: Candidate,
    connections: usize,
    value: impl Fn(&Sample) -> f64,
) -> f64 {
    let of =
        samples.iter().filter(|sample| sample.candidate == of && sample.connections == connections);
    let other = |of: &&Sample| {
        let same =
            |s: &&Sample| s.candidate == to && s.connections == connections && s.round == of.round;
        samples.iter().find(same).copied()
    };
    median(of.filter_map(|of| Some(value(of) / value(&other(&of)?))))
}

fn show(run: &mut Run, samples: &[Sample], others: f64) {
    let head = [
        "",
        "req/s",
        "to haproxy",
        "to nginx-lua",
        "p50 ms",
        "p99 ms",
        "CPU us",
        "Redis CPU us",
        "core %",
        "MiB",
    ];
    for connections in CONNECTIONS {
        let row = |candidate: Candidate| {
            let middle =
                |value: fn(&Sample) -> f64| figure(middle(samples, candidate, connections, value));
            if !samples.iter().any(|sample| sample.candidate == candidate) {
                return vec![candidate.name().to_owned(), "not available".to_owned()];
            }
            vec![
                candidate.name().to_owned(),
                middle(|s| s.per_second),
                figure(ratio(samples, candidate, Candidate::Haproxy, connections, |s| {
                    s.per_second
                })),
                figure(ratio(samples, candidate, Candidate::NginxLua, connections, |s| {
                    s.per_second
                })),
                middle(|s| s.p50_ms),
                middle(|s| s.p99_ms),
                middle(|s| s.cpu_us),
                middle(|s| s.redis_us),
                middle(|s| s.core),
                middle(|s| s.memory_mib),
            ]
        };
        run.report.heading(&format!("Throughput, {connections} connections"));
        run.report.table(&head, &Candidate::ALL.map(row));
    }
    run.report.line(&format!(
        "Medians of {} rounds of {} s. One worker thread and one core for each candidate; `direct` is the upstream \
         itself, on the core that it shares with wrk and Redis. CPU is per request, as the kernel charges it to the \
         process. Other processes used {others:.1} % of the machine.",
        run.rounds, run.seconds
    ));
    let per_second = |sample: &Sample| sample.per_second;
    let marks = [
        (Candidate::NoLimit, Candidate::Haproxy, 0.95),
        (Candidate::Redis, Candidate::Haproxy, 0.8),
        (Candidate::Redis, Candidate::NginxLua, 2.5),
        (Candidate::Embedded, Candidate::NoLimit, 0.97),
    ];
    for (of, to, bound) in marks {
        for connections in [32, 256] {
            let name = format!("req/s at {connections}: {} / {}", of.name(), to.name());
            let measured = ratio(samples, of, to, connections, per_second);
            run.mark(name, measured, Bound::AtLeast(bound));
        }
    }
    for connections in [32, 256] {
        let (of, to) = (Candidate::NoLimit, Candidate::Haproxy);
        let name = format!("CPU a request at {connections}: {} / {}", of.name(), to.name());
        let measured = ratio(samples, of, to, connections, |sample| sample.cpu_us);
        run.mark(name, measured, Bound::AtMost(1.1));
    }
    let redis = middle(samples, Candidate::Redis, 256, |sample| sample.redis_us);
    run.mark("Redis' CPU us a request at 256: tidegate redis", redis, Bound::AtMost(8.0));
    run.mark(
        "p50 added at 1 by the limit: tidegate redis / nginx-lua",
        added_p50(samples, Candidate::Redis, Candidate::NoLimit)
            / added_p50(samples, Candidate::NginxLua, Candidate::Nginx),
        Bound::AtMost(0.5),
    );
}

/// What a limit adds to the same proxy without one, for a single client, ms: the median over the rounds.
fn added_p50(samples: &[Sample], with: Candidate, without: Candidate) -> f64 {
    let of = |candidate| {
        samples.iter().filter(move |s: &&Sample| s.candidate == candidate && s.connections == 1)
    };
    let added = |with: &Sample| {
        let same = of(without).find(|without| without.round == with.round)?;
        Some(with.p50_ms - same.p50_ms)
    };
    median(of(with).filter_map(added))
}
