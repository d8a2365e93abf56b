use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream, ToSocketAddrs,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, watch},
    task::JoinHandle,
};

use super::watched;

/// An HTTP/1.1 server that counts what it has in flight: from a request's head to just before the last byte of its answer is written
/// (a client that has that byte may already send the next request), or until the peer's close is seen, for which it always watches.
///
/// The path chooses the behaviour:
/// - `/hold?ms=20` answers after a time
/// - `/gate` answers when [`Upstream::open`] lets one request through
/// - `/sse?events=5` streams events; with `&gate=1` each event, and then the end, waits for the gate
/// - `/v1/chat/completions?events=5` and `/v1/messages?events=5` do the same in the words of OpenAI and Anthropic
/// - `/silent` never answers
/// - `/echo` sends the request's body back
/// - `/status/204` answers with that status
/// - `/trailers` ends its chunks with a trailer
/// - `/trunc` closes in the middle of its body
/// - `/reset` resets the connection instead of an answer
/// - `/big?bytes=1000` sends that many bytes
/// - `/say?bytes=10` answers with the header lines that the request's `x-say` holds, separated by `|`, and with that many bytes or,
///   without `bytes`, the number of requests so far; `&status=404` with another status, `&cut=1` without the last byte
/// - `/upgrade` answers 101 and sends back what comes, until its peer ends its half; with `&gate=1` it then waits for the gate and
///   says `bye`
/// - `/health` answers with the status of [`Upstream::feel`], and counts for nothing
/// - `/headers` answers with the request's head as a JSON array of lines
///
/// `&name=x` gives a request a gate of its own.
pub(crate) struct Upstream {
    addr: SocketAddr,
    state: Arc<State>,
    acceptor: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    current: usize,
    highest: usize,
    total: usize,
}

#[derive(Default)]
struct State {
    counts: watch::Sender<Counts>,
    gates: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// 0 for 200.
    health: AtomicU16,
    /// How many were accepted.
    connections: AtomicUsize,
}

impl Upstream {
    pub(crate) async fn spawn() -> Self {
        Self::spawn_at("127.0.0.1:0").await
    }

    /// The same at this address.
    pub(crate) async fn spawn_at(addr: impl ToSocketAddrs) -> Self {
        let listener = TcpListener::bind(addr).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let acceptor = tokio::spawn({
            let state = Arc::clone(&state);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let state = Arc::clone(&state);
                    state.connections.fetch_add(1, Ordering::Relaxed);
                    // An error is the peer's close, which is what the counting is about.
                    tokio::spawn(async move { connection(stream, &state).await.ok() });
                }
            }
        });
        Self { addr, state, acceptor }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub(crate) fn current(&self) -> usize {
        self.state.counts.borrow().current
    }

    pub(crate) fn highest(&self) -> usize {
        self.state.counts.borrow().highest
    }

    /// The highest count since the last call.
    pub(crate) fn take_highest(&self) -> usize {
        let mut highest = 0;
        self.state.counts.send_modify(|counts| {
            highest = std::mem::replace(&mut counts.highest, counts.current);
        });
        highest
    }

    /// How many connections came in since the start.
    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn total(&self) -> usize {
        self.state.counts.borrow().total
    }

    /// Waits until exactly this many requests are in flight.
    pub(crate) async fn wait_current(&self, current: usize) {
        self.wait(&format!("{current} requests at the upstream"), |counts| {
            counts.current == current
        })
        .await;
    }

    /// Waits until this many requests have come in since the start.
    pub(crate) async fn wait_total(&self, total: usize) {
        self.wait(&format!("{total} requests seen by the upstream"), |counts| {
            counts.total >= total
        })
        .await;
    }

    async fn wait(&self, what: &str, done: impl FnMut(&Counts) -> bool) {
        watched(what, self.state.counts.subscribe(), done).await;
    }

    /// What `/health` says from now on.
    pub(crate) fn feel(&self, status: u16) {
        self.state.health.store(status, Ordering::Relaxed);
    }

    /// Lets this many more answers or events through the common gate.
    pub(crate) fn open(&self, permits: usize) {
        self.open_gate("", permits);
    }

    /// Lets this many more answers or events through the gate of that name.
    pub(crate) fn open_gate(&self, name: &str, permits: usize) {
        self.state.gate(name).add_permits(permits);
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

impl State {
    fn gate(&self, name: &str) -> Arc<Semaphore> {
        let mut gates = self.gates.lock().unwrap();
        let closed = || Arc::new(Semaphore::new(0));
        Arc::clone(gates.entry(name.to_owned()).or_insert_with(closed))
    }
}

/// Counts one request for as long as it lives.
struct InFlight<'a>(&'a State);

impl<'a> InFlight<'a> {
    fn new(state: &'a State) -> Self {
        state.counts.send_modify(|counts| {
            counts.total += 1;
            counts.current += 1;
            counts.highest = counts.highest.max(counts.current);
        });
        Self(state)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.counts.send_modify(|counts| counts.current -= 1);
    }
}

struct Request {
    head: String,
    method: String,
    path: String,
    query: HashMap<String, String>,
    body: Vec<u8>,
}

impl Request {
    fn parse(head: String) -> Self {
        let mut words = head.split_whitespace();
        let method = words.next().unwrap_or_default().to_owned();
        let target = words.next().unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let query = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let path = path.to_owned();
        Self { method, path, query, head, body: Vec::new() }
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn number(&self, key: &str) -> usize {
        let value = self.query.get(key).map_or("0", String::as_str);
        value.parse().unwrap()
    }

    fn name(&self) -> &str {
        self.query.get("name").map_or("", String::as_str)
    }
}

async fn connection(stream: TcpStream, state: &State) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut input = Input { reader, buffer: Vec::new() };
    loop {
        let head = input.until(b"\r\n\r\n").await?;
        let mut request = Request::parse(String::from_utf8_lossy(&head).into_owned());
        let in_flight = (request.path != "/health").then(|| InFlight::new(state));
        request.body = input.body(&request).await?;
        if request.path == "/upgrade" {
            return tunnel(&request, input, writer, state).await;
        }
        let answer = Answer { state, request: &request, writer: &mut writer, in_flight };
        tokio::select! {
            keep = answer.write() => if !keep? { return Ok(()) },
            () = input.closed() => return Ok(()),
        }
    }
}

async fn tunnel(
    request: &Request,
    mut input: Input,
    mut writer: OwnedWriteHalf,
    state: &State,
) -> io::Result<()> {
    let head = "HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: echo\r\nx-own: 1\r\n\r\n";
    writer.write_all(head.as_bytes()).await?;
    loop {
        writer.write_all(&input.buffer).await?;
        input.buffer.clear();
        match input.more().await {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
    }
    if request.number("gate") == 1 {
        state.gate(request.name()).acquire_owned().await.unwrap().forget();
        writer.write_all(b"bye").await?;
    }
    Ok(())
}

struct Input {
    reader: OwnedReadHalf,
    buffer: Vec<u8>,
}

impl Input {
    async fn more(&mut self) -> io::Result<()> {
        match self.reader.read_buf(&mut self.buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn until(&mut self, end: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|at| at == end) {
                return Ok(self.buffer.drain(..at + end.len()).collect());
            }
            self.more().await?;
        }
    }

    async fn exactly(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < bytes {
            self.more().await?;
        }
        Ok(self.buffer.drain(..bytes).collect())
    }

    async fn body(&mut self, request: &Request) -> io::Result<Vec<u8>> {
        if let Some(length) = request.header("content-length") {
            return self.exactly(length.parse().unwrap()).await;
        }
        let mut body = Vec::new();
        if request.header("transfer-encoding").is_some() {
            loop {
                let size = String::from_utf8(self.until(b"\r\n").await?).unwrap();
                let size = usize::from_str_radix(size.trim(), 16).unwrap();
                let chunk = self.exactly(size + 2).await?;
                if size == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..size]);
            }
        }
        Ok(body)
    }

    /// Ends when the peer has closed or reset the connection.
    async fn closed(&mut self) {
        while self.more().await.is_ok() {}
    }
}

struct Answer<'a> {
    state: &'a State,
    request: &'a Request,
    writer: &'a mut OwnedWriteHalf,
    in_flight: Option<InFlight<'a>>,
}

impl Answer<'_> {
    /// Writes the answer; says whether the connection is good for another.
    async fn write(mut self) -> io::Result<bool> {
        let request = self.request;
        match request.path.as_str() {
            "/hold" => {
                let time = Duration::from_millis(request.number("ms") as u64);
                tokio::time::sleep(time).await;
                self.whole(200, b"held\n").await
            }
            "/gate" => {
                self.gate().await;
                self.whole(200, b"through the gate\n").await
            }
            "/sse" => self.events(&PLAIN).await,
            "/v1/chat/completions" => self.events(&OPENAI).await,
            "/v1/messages" => self.events(&ANTHROPIC).await,
            "/silent" => std::future::pending().await,
            "/echo" => self.whole(200, &request.body).await,
            "/trailers" => {
                self.piece(
                    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n",
                )
                .await?;
                self.piece("3\r\none\r\n").await?;
                self.last(b"0\r\nx-sum: 1\r\n\r\n").await
            }
            "/trunc" => {
                self.piece("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
                    .await?;
                Ok(false)
            }
            "/reset" => {
                SockRef::from(self.writer.as_ref()).set_linger(Some(Duration::ZERO))?;
                Ok(false)
            }
            "/big" => self.whole(200, &vec![b'x'; request.number("bytes")]).await,
            "/say" => self.say().await,
            "/health" => {
                let status = self.state.health.load(Ordering::Relaxed).max(200);
                self.whole(status, b"").await
            }
            "/headers" => {
                let lines: Vec<&str> = request.head.trim_end().lines().collect();
                let json = serde_json::to_vec(&lines).unwrap();
                self.whole(200, &json).await
            }
            path => {
                let status = path.strip_prefix("/status/").unwrap_or("404");
                self.whole(status.parse().unwrap(), b"").await
            }
        }
    }

    async fn gate(&self) {
        let gate = self.state.gate(self.request.name());
        gate.acquire_owned().await.unwrap().forget();
    }

    async fn say(mut self) -> io::Result<bool> {
        let request = self.request;
        let total = self.state.counts.borrow().total.to_string().into_bytes();
        let body = match request.number("bytes") {
            0 => total,
            bytes => vec![b'x'; bytes],
        };
        let status = request.number("status").max(200);
        let lines: String = request.header("x-say").unwrap_or_default().split('|').fold(
            String::new(),
            |lines, line| {
                if line.is_empty() { lines } else { lines + line.trim() + "\r\n" }
            },
        );
        let length = body.len();
        let head = format!("HTTP/1.1 {status} Said\r\n{lines}content-length: {length}\r\n\r\n");
        self.piece(&head).await?;
        if request.method == "HEAD" {
            return self.last(b"").await;
        }
        let (most, last) = body.split_at(length - 1);
        self.writer.write_all(most).await?;
        if request.number("cut") == 1 { Ok(false) } else { self.last(last).await }
    }

    async fn events(mut self, dialect: &Dialect) -> io::Result<bool> {
        let gated = self.request.number("gate") == 1;
        self.piece("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            .await?;
        self.piece(&chunk(dialect.first)).await?;
        for event in 1..=self.request.number("events") {
            if gated {
                self.gate().await;
            }
            self.piece(&chunk(&dialect.event.replace("{}", &event.to_string()))).await?;
        }
        if gated {
            self.gate().await;
        }
        let last = chunk(dialect.last) + "0\r\n\r\n";
        self.last(last.as_bytes()).await
    }

    async fn piece(&mut self, text: &str) -> io::Result<()> {
        self.writer.write_all(text.as_bytes()).await
    }

    async fn whole(mut self, status: u16, body: &[u8]) -> io::Result<bool> {
        let length = match status {
            204 | 304 => String::new(),
            _ => format!("content-length: {}\r\n", body.len()),
        };
        let head = format!("HTTP/1.1 {status} As Asked\r\n{length}\r\n");
        if self.request.method == "HEAD" || body.is_empty() {
            return self.last(head.as_bytes()).await;
        }
        self.piece(&head).await?;
        let (most, last) = body.split_at(body.len() - 1);
        self.writer.write_all(most).await?;
        self.last(last).await
    }

    async fn last(self, bytes: &[u8]) -> io::Result<bool> {
        drop(self.in_flight);
        self.writer.write_all(bytes).await?;
        Ok(true)
    }
}

/// How events are worded: what comes before them, each of them, and what comes after.
struct Dialect {
    first: &'static str,
    event: &'static str,
    last: &'static str,
}

const PLAIN: Dialect = Dialect { first: "", event: "data: {}\n\n", last: "" };

const OPENAI: Dialect = Dialect {
    first: "",
    event: r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"{}"},"finish_reason":null}]}

"#,
    last: "data: [DONE]\n\n",
};

const ANTHROPIC: Dialect = Dialect {
    first: r#"event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

"#,
    event: r#"event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"{}"}}

"#,
    last: r#"event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":5}}

event: message_stop
data: {"type":"message_stop"}

"#,
};

/// The text as a chunk; nothing for nothing, since an empty chunk would be the last.
fn chunk(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    format!("{:x}\r\n{text}\r\n", text.len())
}
