//! Server-sent events: many streams of small events, and what each event costs and waits.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    Candidate, Result, Run,
    candidates::Setup,
    children::{Cpus, Proc},
    load::{Latencies, latencies},
    report::{Disturbance, figure, median},
    serve::{EVENTS_PER_SECOND, Kind, now_us},
};

const CANDIDATES: [Candidate; 5] = [
    Candidate::Direct,
    Candidate::Haproxy,
    Candidate::Nginx,
    Candidate::NoLimit,
    Candidate::Embedded,
];
const STREAMS: usize = 2_000;
/// Between opening the streams and measuring them.
const SETTLE: Duration = Duration::from_secs(2);

/// One round of one candidate.
#[derive(Clone, Copy, Debug)]
struct Sample {
    candidate: Candidate,
    round: usize,
    /// Of the events that were due, how many arrived, in percent.
    arrived: f64,
    cpu_us: f64,
    core: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// For each stream.
    kib: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let (disturbance, streams) = (Disturbance::watch(), run.at_most(STREAMS));
    let upstream = Kind::Events.start(Cpus::Rest).await?;
    let setup =
        Setup { haproxy_no_delay: true, ..Setup::new(Cpus::Proxy, 2 * STREAMS, upstream.port, 0) };
    let mut procs = Vec::new();
    for candidate in CANDIDATES.into_iter().filter(|&candidate| candidate != Candidate::Direct) {
        match candidate.start(&setup, 0).await {
            Ok(proc) => procs.push((candidate, proc)),
            Err(error) => run.missing(candidate, error)?,
        }
    }
    let (mut samples, length) = (Vec::new(), Duration::from_secs(2 * run.seconds));
    // This process is the client, beside the upstream.
    Cpus::Rest.take()?;
    for round in 0..run.rounds {
        let direct = [(Candidate::Direct, &upstream)];
        let others = procs.iter().map(|(candidate, proc)| (*candidate, proc));
        for (candidate, proc) in direct.into_iter().chain(others) {
            eprintln!("round {} of {}: streams, {}", round + 1, run.rounds, candidate.name());
            let sample = measure(proc, streams, length).await?;
            samples.push(Sample { candidate, round, ..sample });
        }
    }
    Cpus::Any.take()?;
    drop((procs, upstream));
    show(run, &samples, streams, disturbance.percent());
    Ok(())
}

async fn measure(proc: &Proc, streams: usize, length: Duration) -> Result<Sample> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, proc.port));
    let memory = proc.memory();
    let delays = Arc::new(Mutex::new(Delays { counts: false, took: latencies()? }));
    let mut tasks = JoinSet::new();
    for _ in 0..streams {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: bench\r\n\r\n").await?;
        tasks.spawn(listen(stream, Arc::clone(&delays)));
    }
    sleep(SETTLE).await;
    let (cpu, kib) = (proc.cpu(), (proc.memory() - memory) / streams as f64);
    delays.lock().map_err(|_| "a stream panicked")?.counts = true;
    let start = Instant::now();
    sleep(length).await;
    let (cpu, length) = (proc.cpu() - cpu, start.elapsed());
    // A stream that has ended has failed.
    if let Some(ended) = tasks.try_join_next() {
        ended??;
    }
    let delays = &delays.lock().map_err(|_| "a stream panicked")?.took;
    let (events, due) = (delays.len() as f64, streams as f64 * EVENTS_PER_SECOND as f64);
    let ms = |quantile| delays.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Sample {
        candidate: Candidate::Direct,
        round: 0,
        arrived: 100.0 * events / (due * length.as_secs_f64()),
        cpu_us: 1e6 * cpu / events,
        core: 100.0 * cpu / length.as_secs_f64(),
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        kib,
    })
}

/// How long events took, of all streams, from when that counts.
struct Delays {
    counts: bool,
    took: Latencies,
}

/// Reads a stream for ever.
async fn listen(mut stream: TcpStream, delays: Arc<Mutex<Delays>>) -> Result<()> {
    let mut text = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut text).await? == 0 {
            return Err(format!("cut: {}", String::from_utf8_lossy(&text)).into());
        }
        let now = now_us();
        while let Some(end) = memchr::memmem::find(&text, b"\n\n") {
            let event = String::from_utf8_lossy(&text[..end]);
            let sent = event.split_once("data: ").and_then(|(_, rest)| rest.split(' ').next());
            let sent: u64 = sent.ok_or("no event")?.parse()?;
            let mut delays = delays.lock().map_err(|_| "a stream panicked")?;
            if delays.counts {
                delays.took.record(now.saturating_sub(sent))?;
            }
            drop(delays);
            text.drain(..end + 2);
        }
    }
}

fn show(run: &mut Run, samples: &[Sample], streams: usize, others: f64) {
    let of = |candidate| samples.iter().filter(move |sample| sample.candidate == candidate);
    let middle = |candidate, value: fn(&Sample) -> f64| median(of(candidate).map(value));
    let with = |candidate, to, both: fn(&Sample, &Sample) -> f64| {
        let other = |round| of(to).find(|sample| sample.round == round);
        median(of(candidate).filter_map(|sample| Some(both(sample, other(sample.round)?))))
    };
    let added = |candidate, both| match candidate {
        Candidate::Direct => f64::NAN,
        _ => with(candidate, Candidate::Direct, both),
    };
    let rows = CANDIDATES.map(|candidate| {
        let figures = [
            middle(candidate, |sample| sample.cpu_us),
            with(candidate, Candidate::Haproxy, |one, haproxy| one.cpu_us / haproxy.cpu_us),
            middle(candidate, |sample| sample.p50_ms),
            middle(candidate, |sample| sample.p99_ms),
            added(candidate, |one, direct| one.p50_ms - direct.p50_ms),
            added(candidate, |one, direct| one.p99_ms - direct.p99_ms),
            middle(candidate, |sample| sample.arrived),
            middle(candidate, |sample| sample.core),
            middle(candidate, |sample| sample.kib),
        ];
        let name = candidate.name().to_owned();
        [name].into_iter().chain(figures.map(figure)).collect()
    });
    run.report.heading(&format!("{streams} streams of {EVENTS_PER_SECOND} events/s of 100 bytes"));
    let head = [
        "",
        "CPU us an event",
        "to haproxy",
        "p50 ms",
        "p99 ms",
        "added p50 ms",
        "added p99 ms",
        "arrived %",
        "core %",
        "KiB a stream",
    ];
    run.report.table(&head, &rows);
    run.report.line(&format!(
        "Medians of {} rounds of {} s; ratios and what is added to `direct` within a round. An event carries the time at \
         which the upstream wrote it, and took as long as until the client read it. HAProxy has `option http-no-delay`, without which an event waits for 200 ms. Of `direct` CPU and memory are the \
         upstream's. KiB: growth by opening the streams, in later rounds partly into what was kept. Other processes used \
         {others:.1} % of the machine.",
        run.rounds,
        2 * run.seconds
    ));
}
