//! The upstreams in a process of their own: this program once more, on one thread, until it is killed.

use std::{
    net::Ipv4Addr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{MissedTickBehavior, interval},
};

use crate::{
    Result,
    children::{Cpus, Proc, free_port},
    upstream::answer,
};

/// Events of a stream each second, and how long one is on the wire, without its chunk.
pub(crate) const EVENTS_PER_SECOND: u64 = 5;
const EVENT: usize = 100;
/// What a body of any length is sent from.
static BLOCK: [u8; 1 << 18] = [b'x'; 1 << 18];

/// What an upstream does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Answers with 1 KB at once.
    Fast,
    /// Switches protocols, and echoes.
    Tunnel,
    /// Sends events for ever, each with the time at which it left.
    Events,
    /// Answers with as many bytes as the path says, or reads a body to its end.
    Transfer,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Fast, Self::Tunnel, Self::Events, Self::Transfer];

    fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Tunnel => "tunnel",
            Self::Events => "events",
            Self::Transfer => "transfer",
        }
    }

    pub(crate) async fn start(self, cpus: Cpus) -> Result<Proc> {
        let (port, this) = (free_port()?, std::env::current_exe()?.display().to_string());
        let command = [this, "upstream".into(), self.name().into(), port.to_string()];
        Proc::start(&format!("upstream-{}", self.name()), port, cpus, &command).await
    }
}

/// What the process does that [`Kind::start`] starts.
pub(crate) async fn serve(name: &str, port: &str) -> Result<()> {
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    let kind = kind.ok_or("no such upstream")?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port.parse()?)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        match kind {
            Kind::Fast => tokio::spawn(fast(stream)),
            Kind::Tunnel => tokio::spawn(tunnel(stream)),
            Kind::Events => tokio::spawn(events(stream)),
            Kind::Transfer => tokio::spawn(transfer(stream)),
        };
    }
}

/// Looks for the end of the head and for nothing else: GET without a body is all it is sent.
async fn fast(mut stream: TcpStream) -> Option<()> {
    let (answer, mut head) = (answer(1024), Vec::with_capacity(4096));
    loop {
        read_head(&mut stream, &mut head).await?;
        head.clear();
        stream.write_all(&answer).await.ok()?;
    }
}

/// Reads on until a head is complete. None at the end.
async fn read_head(stream: &mut TcpStream, head: &mut Vec<u8>) -> Option<usize> {
    loop {
        let end = head.windows(4).position(|window| window == b"\r\n\r\n");
        if end.is_some() {
            return end;
        }
        stream.read_buf(head).await.ok().filter(|&n| n > 0)?;
    }
}

async fn tunnel(mut stream: TcpStream) -> Option<()> {
    let mut head = Vec::with_capacity(1024);
    read_head(&mut stream, &mut head).await?;
    while !String::from_utf8_lossy(&head).to_ascii_lowercase().contains("upgrade: websocket") {
        stream.write_all(&answer(16)).await.ok()?;
        head.clear();
        read_head(&mut stream, &mut head).await?;
    }
    let switched = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    stream.write_all(switched.as_bytes()).await.ok()?;
    let (mut from, mut to) = stream.split();
    tokio::io::copy(&mut from, &mut to).await.ok().map(|_| ())
}

async fn events(mut stream: TcpStream) -> Option<()> {
    let mut head = Vec::with_capacity(1024);
    read_head(&mut stream, &mut head).await?;
    // nginx is told to pass events on at once; the others do so anyway.
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                X-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let mut ticks = interval(Duration::from_secs(1) / EVENTS_PER_SECOND as u32);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let event = format!("data: {:x<width$}\n\n", format!("{} ", now_us()), width = EVENT - 8);
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        stream.write_all(chunk.as_bytes()).await.ok()?;
    }
}

/// Microseconds of a clock that all processes share.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

async fn transfer(mut stream: TcpStream) -> Option<()> {
    let (mut head, mut sink) = (Vec::with_capacity(1024), vec![0; BLOCK.len()]);
    loop {
        let end = read_head(&mut stream, &mut head).await?;
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<usize>().ok());
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
        let asked = number(text.split(['/', ' ']).nth(2)).unwrap_or_default();
        let mut awaited = number(length).unwrap_or_default().saturating_sub(head.len() - end - 4);
        while awaited > 0 {
            awaited -= stream.read(&mut sink).await.ok().filter(|&n| n > 0)?.min(awaited);
        }
        head.clear();
        let told = format!("HTTP/1.1 200 OK\r\nContent-Length: {asked}\r\n\r\n");
        stream.write_all(told.as_bytes()).await.ok()?;
        send_block(&mut stream, asked).await.ok()?;
    }
}

/// Sends so many bytes.
pub(crate) async fn send_block(stream: &mut TcpStream, mut bytes: usize) -> std::io::Result<()> {
    while bytes > 0 {
        let n = bytes.min(BLOCK.len());
        stream.write_all(&BLOCK[..n]).await?;
        bytes -= n;
    }
    Ok(())
}
