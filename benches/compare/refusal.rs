//! A storm: 5 slots and 100 places to wait are taken, and 10,000 requests come on top, twice.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{task::JoinSet, time::Instant};

use crate::{
    Bound, Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::Cpus,
    load::{Connection, Latencies, latencies, micros},
    report::figure,
    upstream::HoldUpstream,
};

const SLOTS: usize = 5;
const QUEUE: usize = 100;
const ARRIVALS: usize = 10_000;
/// As many as ask at the same time.
const CONNECTIONS: usize = 50;
/// Longer than the section takes.
const HOLD: Duration = Duration::from_secs(50);

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let mut rows = Vec::new();
    for candidate in [Candidate::Embedded, Candidate::Redis] {
        eprintln!("refusal, {}", candidate.name());
        match measure(candidate).await {
            Ok(storm) => {
                let name = |what: &str| format!("refusal, {}: {what}", candidate.name());
                run.mark(name("median ms"), storm.p50_ms, Bound::AtMost(5.0));
                run.mark(
                    name("memory after the second storm / after the first"),
                    storm.growth,
                    Bound::AtMost(1.1),
                );
                rows.push(storm.row(candidate));
            }
            Err(error) => run.missing(candidate, error)?,
        }
    }
    run.report.heading("Refusals: 5 slots, 100 places, 10,000 arrivals on top");
    let head =
        ["", "p50 ms", "p99 ms", "Retry-After s", "different ones", "MiB after 1", "MiB after 2"];
    run.report.table(&head, &rows);
    run.report.line(&format!(
        "{CONNECTIONS} connections ask again as soon as they are refused. Memory: resident, after each of two storms."
    ));
    Ok(())
}

#[derive(Debug)]
struct Storm {
    p50_ms: f64,
    p99_ms: f64,
    least: u64,
    most: u64,
    different: usize,
    mib: [f64; 2],
    growth: f64,
}

impl Storm {
    fn row(&self, candidate: Candidate) -> Vec<String> {
        vec![
            candidate.name().to_owned(),
            figure(self.p50_ms),
            figure(self.p99_ms),
            format!("{} to {}", self.least, self.most),
            self.different.to_string(),
            figure(self.mib[0]),
            figure(self.mib[1]),
        ]
    }
}

async fn measure(candidate: Candidate) -> Result<Storm> {
    let (redis, upstream) = (start_redis(Cpus::Any).await?, HoldUpstream::start()?);
    let setup =
        Setup { queue: QUEUE, ..Setup::new(Cpus::Any, SLOTS, upstream.addr.port(), redis.port) };
    let proxy = candidate.start(&setup, 1).await?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, proxy.port));
    // So that there is a hold time to reckon with.
    for connection in &mut Connection::open_many(&[addr], SLOTS).await? {
        connection.get(Duration::from_millis(300)).await?;
    }
    let mut busy = Connection::open_many(&[addr], SLOTS + QUEUE).await?;
    for connection in &mut busy {
        connection.send(HOLD).await?;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (took, after) = storm(addr).await?;
    let first = proxy.memory() / 1024.0;
    storm(addr).await?;
    let second = proxy.memory() / 1024.0;
    let mut different = after.clone();
    different.sort_unstable();
    different.dedup();
    let (least, most) = (different[0], different[different.len() - 1]);
    if least < 1 || most > 30 {
        return Err(format!("Retry-After from {least} to {most}").into());
    }
    let ms = |quantile| took.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Storm {
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        least,
        most,
        different: different.len(),
        mib: [first, second],
        growth: second / first,
    })
}

async fn storm(addr: SocketAddr) -> Result<(Latencies, Vec<u64>)> {
    let mut tasks = JoinSet::new();
    for mut connection in Connection::open_many(&[addr], CONNECTIONS).await? {
        tasks.spawn(async move {
            let (mut took, mut after) = (latencies()?, Vec::new());
            for _ in 0..ARRIVALS / CONNECTIONS {
                let sent = Instant::now();
                after.push(connection.refused().await?);
                took.record(micros(sent.elapsed()))?;
            }
            Ok::<_, crate::Error>((took, after))
        });
    }
    let (mut all, mut every) = (latencies()?, Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (took, after) = done??;
        all.add(took)?;
        every.extend(after);
    }
    Ok((all, every))
}
