//! The upstream that holds, inside this process; those in processes of their own are in `serve`.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crate::Result;

/// An answer with a body of this length.
pub(crate) fn answer(body: usize) -> Vec<u8> {
    let mut answer =
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {body}\r\n\r\n")
            .into_bytes();
    answer.resize(answer.len() + body, b'x');
    answer
}

/// An upstream that holds every request as long as its path says (`/20` = 20 ms) and counts.
///
/// A thread for each connection: a sleeping thread wakes within 0.1 ms, tokio's timer only within 1 ms,
/// which would be 5 % of the hold.
#[derive(Debug)]
pub(crate) struct HoldUpstream {
    pub(crate) addr: SocketAddr,
    count: Arc<Count>,
}

#[derive(Debug, Default)]
struct Count {
    now: AtomicU64,
    most: AtomicU64,
}

impl HoldUpstream {
    pub(crate) fn start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (addr, count) = (listener.local_addr()?, Arc::new(Count::default()));
        let counting = count.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let count = counting.clone();
                thread::spawn(move || hold(stream, &count));
            }
        });
        Ok(Self { addr, count })
    }

    /// How many requests it is holding.
    pub(crate) fn now(&self) -> u64 {
        self.count.now.load(Relaxed)
    }

    /// The most requests it ever held at once.
    pub(crate) fn most(&self) -> u64 {
        self.count.most.load(Relaxed)
    }
}

#[expect(clippy::disallowed_methods, reason = "the thread is the connection's own")]
fn hold(mut stream: TcpStream, count: &Count) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let (answer, mut head) = (answer(16), Vec::new());
    let mut chunk = [0; 4096];
    loop {
        let n = stream.read(&mut chunk).ok().filter(|&n| n > 0)?;
        head.extend_from_slice(&chunk[..n]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let now = count.now.fetch_add(1, Relaxed) + 1;
        count.most.fetch_max(now, Relaxed);
        let path = std::str::from_utf8(&head)
            .ok()
            .and_then(|head| head.split(['/', ' ']).nth(2)?.parse().ok());
        thread::sleep(Duration::from_millis(path.unwrap_or(20)));
        head.clear();
        // The next request may come as soon as the answer is written, so it ends before that.
        count.now.fetch_sub(1, Relaxed);
        stream.write_all(&answer).ok()?;
    }
}
