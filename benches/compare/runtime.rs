//! Two threads, three ways: one process whose runtime has two workers, two processes of one thread each that share the
//! port (`SO_REUSEPORT`), and HAProxy with two threads.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    time::Duration,
};

use socket2::{Domain, Socket, Type};
use tokio::time::Instant;

use crate::{
    Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::{Cpus, Proc},
    load::{Connection, Throughput, wrk},
    report::{Disturbance, figure, median},
    serve::Kind,
};

const CONNECTIONS: [usize; 2] = [32, 256];
/// So many clients that each process has some of them.
const FIRST: usize = 64;

/// A row.
#[derive(Debug)]
struct Way {
    name: String,
    procs: Vec<Proc>,
    samples: Vec<Sample>,
}

/// One measurement of it.
#[derive(Clone, Copy, Debug)]
struct Sample {
    connections: usize,
    saw: Throughput,
    cpu_us: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    let disturbance = Disturbance::watch();
    let (redis, upstream) = (start_redis(Cpus::Any).await?, Kind::Fast.start(Cpus::Any).await?);
    let setup = Setup {
        haproxy_threads: 2,
        tidegate_threads: 2,
        ..Setup::new(Cpus::Any, 1000, upstream.port, redis.port)
    };
    let one = Setup { tidegate_threads: 1, ..setup };
    let way = |candidate: Candidate, how: &str, procs| {
        let name = format!("{}, {how}", candidate.name());
        Way { name, procs, samples: Vec::new() }
    };
    let haproxy = Candidate::Haproxy.start(&setup, 0).await?;
    let mut ways = vec![way(Candidate::Haproxy, "2 threads", vec![haproxy])];
    for candidate in [Candidate::NoLimit, Candidate::Embedded, Candidate::Redis] {
        let proc = candidate.start(&setup, 0).await?;
        ways.push(way(candidate, "1 process of 2 threads", vec![proc]));
        // An embedded store is each process' own, so two would be two limits.
        if candidate != Candidate::Embedded {
            let mut procs = Vec::new();
            let sockets = two_on_one_port()?;
            for (number, socket) in sockets.into_iter().enumerate() {
                procs.push(candidate.start_on(&one, 1 + number, socket).await?);
            }
            ways.push(way(candidate, "2 processes of 1 thread", procs));
        }
    }
    for way in &ways {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, way.procs[0].port));
        for connection in &mut Connection::open_many(&[addr], FIRST).await? {
            connection.get(Duration::ZERO).await?;
        }
    }
    for round in 0..run.rounds {
        for connections in CONNECTIONS {
            for way in &mut ways {
                eprintln!("round {} of {}: {connections}, {}", round + 1, run.rounds, way.name);
                let (cpu, start) = (way.cpu(), Instant::now());
                let url = format!("http://127.0.0.1:{}/", way.procs[0].port);
                let saw = wrk(&url, connections, run.seconds).await?;
                let cpu_us = 1e6 * (way.cpu() - cpu) / saw.requests;
                if saw.errors > 0.0 || start.elapsed() < Duration::from_secs(run.seconds) {
                    run.failures.push(format!("{} answered wrongly", way.name));
                }
                way.samples.push(Sample { connections, saw, cpu_us });
            }
        }
    }
    for way in &ways {
        if way.procs.iter().any(|proc| proc.cpu() < 0.1) {
            run.failures.push(format!("{}: one had all the connections", way.name));
        }
    }
    let head = ["", "req/s", "to haproxy", "p50 ms", "p99 ms", "CPU us", "MiB"];
    for connections in CONNECTIONS {
        let haproxy = ways[0].of(connections);
        let row = |way: &Way| {
            let of = way.of(connections);
            let middle = |value: fn(&Sample) -> f64| median(of.iter().map(value));
            let pairs = of.iter().zip(&haproxy);
            let figures = [
                middle(|sample| sample.saw.per_second),
                median(pairs.map(|(one, haproxy)| one.saw.per_second / haproxy.saw.per_second)),
                middle(|sample| sample.saw.p50_ms),
                middle(|sample| sample.saw.p99_ms),
                middle(|sample| sample.cpu_us),
                way.procs.iter().map(Proc::memory).sum::<f64>() / 1024.0,
            ];
            [way.name.clone()].into_iter().chain(figures.map(figure)).collect()
        };
        let rows: Vec<_> = ways.iter().map(row).collect();
        run.report.heading(&format!("Two threads, {connections} connections"));
        run.report.table(&head, &rows);
    }
    drop((ways, upstream, redis));
    run.report.line(&format!(
        "Medians of {} rounds of {} s, ratios within a round. Nothing is pinned: on two CPUs wrk and the upstream take \
         theirs from the proxies, so read the CPU a request first. Other processes used {:.1} % of the machine.",
        run.rounds,
        run.seconds,
        disturbance.percent()
    ));
    Ok(())
}

impl Way {
    fn cpu(&self) -> f64 {
        self.procs.iter().map(Proc::cpu).sum()
    }

    fn of(&self, connections: usize) -> Vec<Sample> {
        let samples = self.samples.iter().copied();
        samples.filter(|sample| sample.connections == connections).collect()
    }
}

/// Two sockets that listen on one port; the kernel gives each a part of the connections.
fn two_on_one_port() -> Result<[TcpListener; 2]> {
    let listen = |port| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_port(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into())?;
        socket.listen(1024)?;
        Ok::<TcpListener, std::io::Error>(socket.into())
    };
    let first = listen(0)?;
    let second = listen(first.local_addr()?.port())?;
    Ok([first, second])
}
