//! What TLS and HTTP/2 cost: the throughput rows again, for clients that speak them. The upstream speaks HTTP/1.1.
//!
//! wrk speaks HTTP/1.1 alone, so over HTTP/2 h2load asks. Both give up as much of the other core as they like.

use crate::{
    Candidate, Result, Run,
    candidates::{Front, Setup},
    children::{Cpus, Proc},
    load::{Throughput, h2load, wrk},
    report::{Disturbance, figure, median},
    serve::Kind,
};

const CANDIDATES: [Candidate; 3] = [Candidate::Haproxy, Candidate::Nginx, Candidate::NoLimit];

/// A way to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    front: Front,
    /// Requests at a time on each connection, of HTTP/2; none for HTTP/1.1.
    streams: Option<usize>,
    connections: usize,
}

impl Load {
    fn title(self) -> String {
        let speaks = match (self.front, self.streams) {
            (Front::Tls, None) => "HTTP/1.1 over TLS 1.3",
            (Front::Tls, Some(_)) => "HTTP/2 over TLS 1.3",
            _ => "HTTP/2 without TLS",
        };
        let streams = self.streams.map(|streams| format!(" of {streams} streams"));
        format!("{speaks}, {} connections{}", self.connections, streams.unwrap_or_default())
    }

    /// Loads a proxy for about so long. `before` is what it carried when it was last asked.
    async fn run(self, proxy: &Proc, seconds: u64, before: f64) -> Result<Throughput> {
        let scheme = if self.front == Front::Tls { "https" } else { "http" };
        let url = format!("{scheme}://127.0.0.1:{}/", proxy.port);
        match self.streams {
            None => wrk(&url, self.connections, seconds).await,
            Some(streams) => {
                let requests = (before * seconds as f64) as usize;
                h2load(&url, self.connections, streams, requests.max(10 * self.connections)).await
            }
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    candidate: Candidate,
    load: Load,
    round: usize,
    saw: Throughput,
    cpu_us: f64,
    core: f64,
    memory_mib: f64,
}

pub(crate) async fn tls(run: &mut Run) -> Result<()> {
    let load = |connections| Load { front: Front::Tls, streams: None, connections };
    compare(run, &[32, 256].map(load)).await
}

pub(crate) async fn http2(run: &mut Run) -> Result<()> {
    let shapes = [(32, 1), (256, 1), (32, 8)];
    let load = |front| {
        shapes.map(|(connections, streams)| Load { front, streams: Some(streams), connections })
    };
    compare(run, &[Front::Tls, Front::H2c].map(load).concat()).await
}

async fn compare(run: &mut Run, loads: &[Load]) -> Result<()> {
    let disturbance = Disturbance::watch();
    let upstream = Kind::Fast.start(Cpus::Rest).await?;
    let mut samples = Vec::new();
    for front in [Front::Tls, Front::H2c] {
        let loads: Vec<_> = loads.iter().filter(|load| load.front == front).collect();
        if loads.is_empty() {
            continue;
        }
        let setup = Setup { front, ..Setup::new(Cpus::Proxy, 1000, upstream.port, 0) };
        let mut procs = Vec::new();
        for candidate in CANDIDATES {
            match candidate.start(&setup, 0).await {
                Ok(proc) => procs.push((candidate, proc)),
                Err(error) => run.missing(candidate, error)?,
            }
        }
        for round in 0..run.rounds {
            for &&load in &loads {
                for (candidate, proc) in &procs {
                    let (candidate, title) = (*candidate, load.title());
                    eprint!(
                        "\rround {} of {}: {title}, {}    ",
                        round + 1,
                        run.rounds,
                        candidate.name()
                    );
                    // As many requests as last time were carried in that time; in the first round it is tried out.
                    let last = samples.iter().rev().find(|sample: &&Sample| {
                        sample.load == load && sample.candidate == candidate
                    });
                    let before = match last {
                        Some(sample) => sample.saw.per_second,
                        None => load.run(proc, 1, 5_000.0).await?.per_second,
                    };
                    let (cpu, start) = (proc.cpu(), tokio::time::Instant::now());
                    let saw = load.run(proc, run.seconds, before).await?;
                    let (cpu, wall) = (proc.cpu() - cpu, start.elapsed().as_secs_f64());
                    if saw.errors > 0.0 {
                        let times = saw.errors;
                        let failure =
                            format!("{title}: {} answered wrongly {times} times", candidate.name());
                        run.failures.push(failure);
                    }
                    samples.push(Sample {
                        candidate,
                        load,
                        round,
                        saw,
                        cpu_us: 1e6 * cpu / saw.requests,
                        core: 100.0 * cpu / wall,
                        memory_mib: proc.memory() / 1024.0,
                    });
                }
            }
        }
    }
    eprintln!();
    drop(upstream);
    show(run, loads, &samples, disturbance.percent());
    Ok(())
}

fn show(run: &mut Run, loads: &[Load], samples: &[Sample], others: f64) {
    let head =
        ["", "req/s", "to haproxy", "p50 ms", "p99 ms", "CPU us", "to haproxy", "core %", "MiB"];
    for &load in loads {
        let of = |candidate| {
            samples
                .iter()
                .filter(move |sample| sample.load == load && sample.candidate == candidate)
        };
        let middle = |candidate, value: fn(&Sample) -> f64| median(of(candidate).map(value));
        let to_haproxy = |candidate, value: fn(&Sample) -> f64| {
            let haproxy = |round| of(Candidate::Haproxy).find(|sample| sample.round == round);
            median(
                of(candidate)
                    .filter_map(|sample| Some(value(sample) / value(haproxy(sample.round)?))),
            )
        };
        let per_second = |sample: &Sample| sample.saw.per_second;
        let cpu = |sample: &Sample| sample.cpu_us;
        let rows = CANDIDATES.map(|candidate| {
            let figures = [
                middle(candidate, per_second),
                to_haproxy(candidate, per_second),
                middle(candidate, |sample| sample.saw.p50_ms),
                middle(candidate, |sample| sample.saw.p99_ms),
                middle(candidate, cpu),
                to_haproxy(candidate, cpu),
                middle(candidate, |sample| sample.core),
                middle(candidate, |sample| sample.memory_mib),
            ];
            let name = candidate.name().to_owned();
            [name].into_iter().chain(figures.map(figure)).collect()
        });
        run.report.heading(&load.title());
        run.report.table(&head, &rows);
    }
    run.report.line(&format!(
        "Medians of {} rounds of {} s, ratios within a round; one worker thread and one core each. Connections stay \
         for a load, so a handshake comes with every few hundred requests. Certificates are ECDSA on P-256. wrk asks over HTTP/1.1, h2load over HTTP/2, \
         which tells the mean time instead of p50. Other processes used {others:.1} % of the machine.",
        run.rounds, run.seconds
    ));
}
