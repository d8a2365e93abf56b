//! One large body each way, at full speed: what a byte costs.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

use crate::{
    Candidate, Result, Run,
    candidates::Setup,
    children::{Cpus, Proc},
    report::{Disturbance, figure, median},
    serve::{Kind, send_block},
};

const CANDIDATES: [Candidate; 4] =
    [Candidate::Direct, Candidate::Haproxy, Candidate::Nginx, Candidate::NoLimit];
const GIB: usize = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Download,
    Upload,
}

/// One body of one candidate.
#[derive(Clone, Copy, Debug)]
struct Sample {
    candidate: Candidate,
    way: Way,
    round: usize,
    mib_per_second: f64,
    cpu_per_gib: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let (disturbance, bytes) = (Disturbance::watch(), run.at_most(GIB));
    let upstream = Kind::Transfer.start(Cpus::Rest).await?;
    let setup = Setup::new(Cpus::Proxy, 1000, upstream.port, 0);
    let mut procs = Vec::new();
    for candidate in CANDIDATES.into_iter().filter(|&candidate| candidate != Candidate::Direct) {
        match candidate.start(&setup, 0).await {
            Ok(proc) => procs.push((candidate, proc)),
            Err(error) => run.missing(candidate, error)?,
        }
    }
    let mut samples = Vec::new();
    // This process is the client, beside the upstream.
    Cpus::Rest.take()?;
    for round in 0..run.rounds {
        for way in [Way::Download, Way::Upload] {
            let direct = [(Candidate::Direct, &upstream)];
            let others = procs.iter().map(|(candidate, proc)| (*candidate, proc));
            for (candidate, proc) in direct.into_iter().chain(others) {
                eprintln!("round {} of {}: {way:?}, {}", round + 1, run.rounds, candidate.name());
                let (cpu, start) = (proc.cpu(), Instant::now());
                timeout(PATIENCE, transfer(proc, way, bytes)).await??;
                let (cpu, wall) = (proc.cpu() - cpu, start.elapsed().as_secs_f64());
                let mib_per_second = bytes as f64 / f64::from(1 << 20) / wall;
                let cpu_per_gib = cpu * GIB as f64 / bytes as f64;
                samples.push(Sample { candidate, way, round, mib_per_second, cpu_per_gib });
            }
        }
    }
    Cpus::Any.take()?;
    drop((procs, upstream));
    show(run, &samples, bytes, disturbance.percent());
    Ok(())
}

/// Sends or gets so many bytes in one request on a connection of its own.
async fn transfer(proc: &Proc, way: Way, bytes: usize) -> Result<()> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, proc.port));
    let mut stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let request = match way {
        Way::Download => format!("GET /{bytes} HTTP/1.1\r\nHost: bench\r\n\r\n"),
        Way::Upload => {
            format!("POST /0 HTTP/1.1\r\nHost: bench\r\nContent-Length: {bytes}\r\n\r\n")
        }
    };
    stream.write_all(request.as_bytes()).await?;
    let mut awaited = 0;
    match way {
        Way::Download => awaited = bytes,
        Way::Upload => send_block(&mut stream, bytes).await?,
    }
    let mut head = Vec::new();
    let end = loop {
        if let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut head).await? == 0 {
            return Err("closed before the answer".into());
        }
    };
    if !head.starts_with(b"HTTP/1.1 200 ") {
        return Err(format!("not a 200: {}", String::from_utf8_lossy(&head[..end])).into());
    }
    let mut sink = vec![0; 1 << 18];
    awaited -= head.len() - end;
    while awaited > 0 {
        match stream.read(&mut sink).await? {
            0 => return Err(format!("cut short by {awaited} bytes").into()),
            n => awaited -= n.min(awaited),
        }
    }
    Ok(())
}

fn show(run: &mut Run, samples: &[Sample], bytes: usize, others: f64) {
    let of = |candidate, way| {
        samples.iter().filter(move |sample| sample.candidate == candidate && sample.way == way)
    };
    let to_haproxy = |candidate, way, value: fn(&Sample) -> f64| {
        let haproxy = |round| of(Candidate::Haproxy, way).find(|sample| sample.round == round);
        median(of(candidate, way).filter_map(|one| Some(value(one) / value(haproxy(one.round)?))))
    };
    let speed = |sample: &Sample| sample.mib_per_second;
    let cpu = |sample: &Sample| sample.cpu_per_gib;
    for (way, title) in [(Way::Download, "download"), (Way::Upload, "upload")] {
        let rows = CANDIDATES.map(|candidate| {
            let figures = [
                median(of(candidate, way).map(speed)),
                to_haproxy(candidate, way, speed),
                median(of(candidate, way).map(cpu)),
                to_haproxy(candidate, way, cpu),
            ];
            let name = candidate.name().to_owned();
            [name].into_iter().chain(figures.map(figure)).collect()
        });
        run.report.heading(&format!("One {title} of {} MiB", bytes >> 20));
        let head = ["", "MiB/s", "to haproxy", "CPU s for each GiB", "to haproxy"];
        run.report.table(&head, &rows);
    }
    run.report.line(&format!(
        "Medians of {} rounds, ratios within a round; plain HTTP/1.1, one connection, the proxy on one core, client and \
         upstream on the others. CPU is the process' own; of `direct` it is the upstream's. Nobody splices: HAProxy and \
         nginx run as their distribution has them, nginx told to pass an upload on as it comes and to keep nothing on \
         disk. Other processes used {others:.1} % of the machine.",
        run.rounds
    ));
}
