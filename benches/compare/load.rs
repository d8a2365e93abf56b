//! The loads: wrk for throughput, and a client of our own for the hand-over, which wrk can't drive.

use std::{net::SocketAddr, process::Stdio, time::Duration};

use hdrhistogram::Histogram;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use crate::{Result, children::Cpus};

/// No answer takes longer, or the run fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// What wrk saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Throughput {
    pub(crate) requests: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) errors: f64,
}

/// Runs wrk with one thread on every CPU but the proxy's.
pub(crate) async fn wrk(url: &str, connections: usize, seconds: u64) -> Result<Throughput> {
    let output = Command::new("taskset")
        .args(["-c", &Cpus::Rest.list(), "wrk", "-t1", "--latency", "--timeout", "10s"])
        .args([&format!("-c{connections}"), &format!("-d{seconds}s"), url])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stdout);
    let after =
        |label: &str| text.split_once(label).and_then(|(_, rest)| rest.split_whitespace().next());
    let percentile =
        |label: &str| text.lines().find_map(|line| line.trim().strip_prefix(label)).map(str::trim);
    let failed = || format!("wrk said: {text}");
    let requests =
        text.lines().find_map(|line| line.trim().split_once(" requests in ")).ok_or_else(failed)?.0;
    let socket_errors = text
        .split_once("Socket errors:")
        .and_then(|(_, rest)| rest.lines().next())
        .unwrap_or_default();
    let socket_errors =
        socket_errors.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok()).sum::<f64>();
    Ok(Throughput {
        requests: requests.parse()?,
        per_second: after("Requests/sec:").ok_or_else(failed)?.parse()?,
        p50_ms: percentile("50%").and_then(millis).ok_or_else(failed)?,
        p99_ms: percentile("99%").and_then(millis).ok_or_else(failed)?,
        errors: socket_errors + after("Non-2xx or 3xx responses:").map_or(Ok(0.0), str::parse)?,
    })
}

/// Runs h2load with one thread on every CPU but the proxy's: so many requests in all, and so many at a time on each
/// connection. It is told no duration, since at its end it may hang. It tells no quantiles: the mean stands for p50.
pub(crate) async fn h2load(
    url: &str,
    connections: usize,
    streams: usize,
    requests: usize,
) -> Result<Throughput> {
    let output = Command::new("taskset")
        .args(["-c", &Cpus::Rest.list(), "h2load", "-t1"])
        .args([format!("-c{connections}"), format!("-m{streams}"), format!("-n{requests}")])
        .arg(url)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, output).await.map_err(|_| "h2load doesn't come to an end")??;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |label: &str| text.lines().find_map(|line| line.strip_prefix(label));
    let failed = || format!("h2load said: {text}");
    let before = |line: &str, word: &str| {
        let word = line.split(',').find_map(|part| part.trim().strip_suffix(word)).map(str::trim);
        word.and_then(|number| number.parse::<f64>().ok())
    };
    let requests = line("requests:").ok_or_else(failed)?;
    let [good, not_good, errored] =
        [" succeeded", " failed", " errored"].map(|word| before(requests, word).ok_or_else(failed));
    let mean = line("time for request:").and_then(|line| line.split_whitespace().nth(2));
    Ok(Throughput {
        requests: good?,
        per_second: line("finished in ")
            .and_then(|line| before(line, " req/s"))
            .ok_or_else(failed)?,
        p50_ms: mean.and_then(millis).ok_or_else(failed)?,
        p99_ms: f64::NAN,
        errors: not_good? + errored?,
    })
}

/// `1.20ms`, `850.00us` or `1.02s` in milliseconds.
fn millis(text: &str) -> Option<f64> {
    let units = [("us", 0.001), ("ms", 1.0), ("s", 1000.0)];
    units
        .iter()
        .find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}

/// A kept-alive connection that does one request at a time.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(addr: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(1024) })
    }

    /// Opens `count` connections, in turn to each of `addrs`.
    pub(crate) async fn open_many(addrs: &[SocketAddr], count: usize) -> Result<Vec<Self>> {
        let mut connections = Vec::with_capacity(count);
        for &addr in addrs.iter().cycle().take(count) {
            connections.push(Self::open(addr).await?);
        }
        Ok(connections)
    }

    /// Asks for a hold and doesn't wait for the answer.
    pub(crate) async fn send(&mut self, hold: Duration) -> Result<()> {
        let request = format!("GET /{} HTTP/1.1\r\nHost: bench\r\n\r\n", hold.as_millis());
        Ok(self.stream.write_all(request.as_bytes()).await?)
    }

    /// Asks while everything is full; returns the `Retry-After` that it is refused with.
    pub(crate) async fn refused(&mut self) -> Result<u64> {
        self.send(Duration::ZERO).await?;
        let error = match timeout(PATIENCE, self.answer()).await? {
            Ok(()) => return Err("admitted although everything was full".into()),
            Err(error) => error,
        };
        let head = String::from_utf8_lossy(&self.buffer).to_ascii_lowercase();
        let field =
            |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        match (head.starts_with("http/1.1 503 "), field("tidegate-reason"), field("retry-after")) {
            (true, Some(reason), Some(after)) if reason.trim() == "queue_full" => {
                Ok(after.trim().parse()?)
            }
            _ => Err(error),
        }
    }

    /// Asks for a hold and reads the whole answer. Anything but a 200 with a Content-Length is an error.
    pub(crate) async fn get(&mut self, hold: Duration) -> Result<()> {
        self.send(hold).await?;
        timeout(PATIENCE, self.answer()).await?
    }

    async fn answer(&mut self) -> Result<()> {
        self.buffer.clear();
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err("closed before the answer".into());
            }
            let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") else {
                continue;
            };
            let head = String::from_utf8_lossy(&self.buffer[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| {
                line.strip_prefix("content-length:")?.trim().parse::<usize>().ok()
            });
            match length {
                Some(length) if head.starts_with("http/1.1 200 ") => {
                    if self.buffer.len() >= end + 4 + length {
                        return Ok(());
                    }
                }
                _ => {
                    return Err(
                        format!("not a 200: {}", head.lines().next().unwrap_or_default()).into()
                    );
                }
            }
        }
    }
}

/// Latencies from 10 us to 2 minutes.
pub(crate) type Latencies = Histogram<u64>;

pub(crate) fn latencies() -> Result<Latencies> {
    Ok(Histogram::new_with_bounds(10, 120_000_000, 3)?)
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A closed loop: each client asks again as soon as it is answered. Returns what each client got between
/// `warm_up` and the end, and how long that took them.
pub(crate) async fn closed_loop(
    addrs: &[SocketAddr],
    clients: usize,
    hold: Duration,
    warm_up: Duration,
    length: Duration,
) -> Result<(Vec<u64>, Latencies)> {
    let connections = Connection::open_many(addrs, clients).await?;
    let from = Instant::now() + warm_up;
    let until = from + length;
    let mut tasks = JoinSet::new();
    for mut connection in connections {
        tasks.spawn(async move {
            let mut took = latencies()?;
            loop {
                let sent = Instant::now();
                if sent >= until {
                    return Ok::<_, crate::Error>(took);
                }
                connection.get(hold).await?;
                let now = Instant::now();
                if now >= from && now < until {
                    took.record(micros(now - sent))?;
                }
            }
        });
    }
    let (mut counts, mut all) = (Vec::new(), latencies()?);
    while let Some(took) = tasks.join_next().await {
        let took = took??;
        counts.push(took.len());
        all.add(took)?;
    }
    Ok((counts, all))
}

/// A burst: everybody asks at once. Returns the time to the last answer.
pub(crate) async fn burst(
    addrs: &[SocketAddr],
    clients: usize,
    hold: Duration,
) -> Result<Duration> {
    let connections = Connection::open_many(addrs, clients).await?;
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for mut connection in connections {
        tasks.spawn(async move { connection.get(hold).await });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(start.elapsed())
}

/// Open arrivals: a Poisson process, the same one whenever `seed` is the same. A latency counts from the
/// moment the request was due, so that a late client can't hide a wait.
pub(crate) async fn open_arrivals(
    addrs: &[SocketAddr],
    per_second: f64,
    hold: Duration,
    length: Duration,
    seed: u64,
) -> Result<Latencies> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut idle = Vec::new();
    for &addr in addrs {
        idle.push(Connection::open_many(&[addr], 100).await?);
    }
    let (mut all, mut tasks) = (latencies()?, JoinSet::new());
    let (start, mut at) = (Instant::now(), 0.0);
    for to in (0..addrs.len()).cycle() {
        let due = start + Duration::from_secs_f64(at);
        if due >= start + length {
            break;
        }
        sleep_until(due).await;
        while let Some(done) = tasks.try_join_next() {
            let (to, connection, took): (usize, Connection, Duration) = done??;
            all.record(micros(took))?;
            idle[to].push(connection);
        }
        let (free, addr) = (idle[to].pop(), addrs[to]);
        tasks.spawn(async move {
            let mut connection = match free {
                Some(connection) => connection,
                None => Connection::open(addr).await?,
            };
            connection.get(hold).await?;
            Ok::<_, crate::Error>((to, connection, due.elapsed()))
        });
        at -= (1.0 - random.f64()).ln() / per_second;
    }
    while let Some(done) = tasks.join_next().await {
        all.record(micros(done??.2))?;
    }
    Ok(all)
}
