//! What a connection costs in memory on which nothing happens: one that waits for a slot, one that is idle, a tunnel.
//!
//! A process for each figure: memory that was freed is rarely given back, so one figure would hide in another.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::{
    Bound, Candidate, Result, Run,
    candidates::{Setup, start_redis},
    children::{Cpus, Proc, descriptors},
    load::Connection,
    report::figure,
    serve::Kind as Served,
    upstream::HoldUpstream,
};

const CANDIDATES: [Candidate; 5] = [
    Candidate::Haproxy,
    Candidate::Nginx,
    Candidate::NoLimit,
    Candidate::Embedded,
    Candidate::Redis,
];
/// Held while others wait.
const SLOTS: usize = 10;
/// Longer than a figure takes.
const HOLD: Duration = Duration::from_secs(60);
/// What an idle connection doesn't need may be given up later than at once.
const IDLE: Duration = Duration::from_secs(6);
const PATIENCE: Duration = Duration::from_secs(10);
/// A frame of a WebSocket with a mask, as clients send it: `ping`.
const FRAME: [u8; 10] = [0x81, 0x84, 1, 2, 3, 4, b'p' ^ 1, b'i' ^ 2, b'n' ^ 3, b'g' ^ 4];

/// What its clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// They have sent a request that waits in the proxy's queue.
    Waiting,
    /// They had one request served and send no more.
    Idle,
    /// They have a WebSocket through the proxy, on which one frame went to and fro.
    Tunnel,
}

/// KiB for each connection.
#[derive(Clone, Copy, Debug)]
struct Cost {
    resident: f64,
    anonymous: f64,
}

pub(crate) async fn section(run: &mut Run) -> Result<()> {
    // Both ends of a connection need a descriptor, each in its process, and some are needed for the rest.
    let many = run.at_most(20_000).min(descriptors() - 1_000);
    let kinds = [
        ("waiting", Kind::Waiting, run.at_most(5_000)),
        ("idle", Kind::Idle, run.at_most(5_000)),
        ("idle", Kind::Idle, many),
        ("tunnels", Kind::Tunnel, run.at_most(1_000)),
    ];
    let (mut resident, mut anonymous) = (Vec::new(), Vec::new());
    for candidate in CANDIDATES {
        let mut costs = Vec::new();
        for (name, kind, count) in kinds {
            let queues = !matches!(candidate, Candidate::Nginx | Candidate::NoLimit);
            if kind == Kind::Waiting && !queues {
                costs.push(Cost { resident: f64::NAN, anonymous: f64::NAN });
                continue;
            }
            eprintln!("connections, {}: {count} {name}", candidate.name());
            let cost = measure(candidate, kind, count).await;
            costs.push(cost.map_err(|error| format!("{}, {name}: {error}", candidate.name()))?);
        }
        let row = |value: fn(&Cost) -> f64| {
            let figures = costs.iter().map(|cost| figure(value(cost)));
            [candidate.name().to_owned()].into_iter().chain(figures).collect::<Vec<_>>()
        };
        resident.push(row(|cost| cost.resident));
        anonymous.push(row(|cost| cost.anonymous));
        if candidate == Candidate::Redis {
            for (bound, place) in [(10.0, 0), (4.0, 1), (4.0, 2)] {
                let (what, _, count) = kinds[place];
                let name = format!("KiB for each of {count} {what}: tidegate redis");
                run.mark(name, costs[place].resident, Bound::AtMost(bound));
            }
        }
    }
    let head: Vec<_> = kinds.iter().map(|(name, _, count)| format!("{name} ({count})")).collect();
    let head: Vec<&str> = [""].into_iter().chain(head.iter().map(String::as_str)).collect();
    run.report.heading("Memory: KiB for each connection");
    run.report.table(&head, &resident);
    run.report.heading("Memory: KiB for each connection, without pages of files");
    run.report.table(&head, &anonymous);
    run.report.line(
        "Growth of the process, in which what processes share is counted once (Pss), after 100 connections came and went; \
         buffers in the kernel are not in it. Waiting: behind 10 requests, in HAProxy's or Tidegate's queue; nginx has \
         none. Idle: kept alive after one request, for 8 s or more. Tunnels: WebSockets on which a frame went to and fro, and goes again \
         after the measurement.",
    );
    Ok(())
}

async fn measure(candidate: Candidate, kind: Kind, count: usize) -> Result<Cost> {
    let redis = start_redis(Cpus::Any).await?;
    let (held, served) = match kind {
        Kind::Waiting => (Some(HoldUpstream::start()?), None),
        Kind::Idle => (None, Some(Served::Fast.start(Cpus::Any).await?)),
        Kind::Tunnel => (None, Some(Served::Tunnel.start(Cpus::Any).await?)),
    };
    let port = held.as_ref().map(|upstream| upstream.addr.port());
    let port = port.or(served.as_ref().map(|upstream| upstream.port)).unwrap_or_default();
    let slots = if kind == Kind::Waiting { SLOTS } else { 50_000 };
    let setup = Setup {
        haproxy_queue: kind == Kind::Waiting,
        ..Setup::new(Cpus::Any, slots, port, redis.port)
    };
    let proxy = candidate.start(&setup, 1).await?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, proxy.port));
    // The first requests pay for what is allocated once.
    for connection in &mut Connection::open_many(&[addr], 100).await? {
        connection.get(Duration::ZERO).await?;
    }
    match kind {
        Kind::Waiting => {
            let _slots = wait(addr, SLOTS).await?;
            let upstream = held.ok_or("nobody holds")?;
            while upstream.now() < SLOTS as u64 {
                sleep(Duration::from_millis(10)).await;
            }
            let before = Memory::of(&proxy).await;
            let _waiters = wait(addr, count).await?;
            let cost = Memory::of(&proxy).await.since(&before, count);
            if upstream.most() != SLOTS as u64 {
                return Err(format!("the upstream held {}", upstream.most()).into());
            }
            Ok(cost)
        }
        Kind::Idle => {
            let before = Memory::of(&proxy).await;
            let mut idle = Vec::with_capacity(count);
            for _ in 0..count {
                let mut connection = Connection::open(addr).await?;
                connection.get(Duration::ZERO).await?;
                idle.push(connection);
            }
            sleep(IDLE).await;
            let cost = Memory::of(&proxy).await.since(&before, count);
            for connection in &mut idle {
                connection.get(Duration::ZERO).await?;
            }
            Ok(cost)
        }
        Kind::Tunnel => {
            let before = Memory::of(&proxy).await;
            let mut tunnels = Vec::with_capacity(count);
            for _ in 0..count {
                let mut tunnel = timeout(PATIENCE, open_tunnel(addr)).await??;
                timeout(PATIENCE, echo(&mut tunnel)).await??;
                tunnels.push(tunnel);
            }
            let cost = Memory::of(&proxy).await.since(&before, count);
            for tunnel in &mut tunnels {
                timeout(PATIENCE, echo(tunnel)).await??;
            }
            Ok(cost)
        }
    }
}

/// KiB of a process.
struct Memory {
    resident: f64,
    anonymous: f64,
}

impl Memory {
    async fn of(proxy: &Proc) -> Self {
        sleep(Duration::from_secs(2)).await;
        Self { resident: proxy.memory(), anonymous: proxy.anonymous() }
    }

    fn since(&self, before: &Self, count: usize) -> Cost {
        Cost {
            resident: (self.resident - before.resident) / count as f64,
            anonymous: (self.anonymous - before.anonymous) / count as f64,
        }
    }
}

/// Sends `count` requests that hold long, each on its own connection, and waits for nothing.
pub(crate) async fn wait(addr: SocketAddr, count: usize) -> Result<Vec<Connection>> {
    let mut connections = Connection::open_many(&[addr], count).await?;
    for connection in &mut connections {
        connection.send(HOLD).await?;
    }
    sleep(Duration::from_secs(1)).await;
    Ok(connections)
}

async fn open_tunnel(addr: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let request = "GET /tunnel HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                   Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    if !head.starts_with(b"HTTP/1.1 101 ") {
        return Err(format!("no tunnel: {}", String::from_utf8_lossy(&head)).into());
    }
    Ok(stream)
}

async fn echo(tunnel: &mut TcpStream) -> Result<()> {
    let mut back = [0; FRAME.len()];
    tunnel.write_all(&FRAME).await?;
    tunnel.read_exact(&mut back).await?;
    if back == FRAME { Ok(()) } else { Err("the tunnel changed a frame".into()) }
}
