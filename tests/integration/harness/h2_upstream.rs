use std::{
    collections::HashMap,
    future::poll_fn,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, server::SendResponse};
use http::{
    HeaderMap, HeaderValue, Request, Response,
    header::{CACHE_CONTROL, CONTENT_LENGTH},
};
use tokio::{
    io::{self, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use super::watched;

/// An HTTP/2 server that counts the streams it has in flight: from a request's head to the end of its answer, or until the reset of
/// the stream or the close of its connection is seen.
///
/// - `/gate` answers when [`H2Upstream::open`] lets all of them through; with `&body=1` its head comes at once
/// - `/echo` sends the request's body and trailers back
/// - `/big?bytes=1000` sends that many bytes
/// - `/length?bytes=1000` sends that many bytes, as its head tells, and ends the stream when the gate is opened
/// - `/head?bytes=1000` answers with a field of that length
/// - `/refuse` refuses the stream once, then answers
/// - `/drop` closes the connection
/// - `/silent` never answers
/// - whatever else is answered with `method authority path`, the request's fields behind it
pub(crate) struct H2Upstream {
    addr: SocketAddr,
    state: Arc<State>,
    acceptor: JoinHandle<()>,
}

/// What becomes of the first connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    Served,
    /// Its first stream is said to be unserved, then it is closed.
    SentAway,
    /// Nothing is read from it or sent any more once a request has come.
    Lost,
    /// The same, with windows without end, so that what it is sent piles up. In flight until its close is seen.
    Deaf,
}

pub(crate) struct Settings {
    pub(crate) most_streams: u32,
    pub(crate) first: First,
    pub(crate) tls: Option<TlsAcceptor>,
}

#[derive(Default)]
struct State {
    counts: watch::Sender<Counts>,
    open: Notify,
    refused: Mutex<HashMap<String, usize>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    current: usize,
    highest: usize,
    total: usize,
    connections: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { most_streams: 100, first: First::Served, tls: None }
    }
}

impl H2Upstream {
    pub(crate) async fn spawn(settings: Settings) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let acceptor = tokio::spawn(async move {
            let mut first = settings.first;
            while let Ok((stream, _)) = listener.accept().await {
                shared.counts.send_modify(|counts| counts.connections += 1);
                let (state, tls) = (Arc::clone(&shared), settings.tls.clone());
                let (most, first) =
                    (settings.most_streams, std::mem::replace(&mut first, First::Served));
                tokio::spawn(async move {
                    match (first, tls) {
                        (First::Served, None) => connection(stream, most, &state).await,
                        (First::Served, Some(tls)) => {
                            let Ok(stream) = tls.accept(stream).await else { return };
                            connection(stream, most, &state).await;
                        }
                        // An error is the peer's close.
                        (first, _) => drop(raw(stream, first, &state).await),
                    }
                });
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

    /// Lets everything through that waits at the gate.
    pub(crate) fn open(&self) {
        self.state.open.notify_waiters();
    }

    pub(crate) fn highest(&self) -> usize {
        self.state.counts.borrow().highest
    }

    pub(crate) fn total(&self) -> usize {
        self.state.counts.borrow().total
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.counts.borrow().connections
    }

    /// Waits until exactly this many streams are in flight.
    pub(crate) async fn wait_current(&self, current: usize) {
        let what = format!("{current} streams at the upstream");
        watched(&what, self.state.counts.subscribe(), |counts| counts.current == current).await;
    }
}

impl Drop for H2Upstream {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

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

async fn connection<S>(io: S, most_streams: u32, state: &Arc<State>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(most_streams);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(io).await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        if request.uri().path() == "/drop" {
            drop(InFlight::new(state));
            return;
        }
        let state = Arc::clone(state);
        tokio::spawn(async move {
            let in_flight = InFlight::new(&state);
            // An error is the reset, which is what the counting is about.
            let _ = stream(request, respond, &state, in_flight).await;
        });
    }
}

async fn stream(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    state: &State,
    in_flight: InFlight<'_>,
) -> Result<(), h2::Error> {
    let (head, mut body) = request.into_parts();
    let query = head.uri.query().unwrap_or_default().to_owned();
    let bytes = query.rsplit('=').next().and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    let ok = Response::new(());
    match head.uri.path() {
        "/gate" => {
            let opened = state.open.notified();
            let mut early = None;
            if query.contains("body=1") {
                early = Some(respond.send_response(Response::new(()), false)?);
            }
            tokio::select! {
                () = opened => {}
                _ = is_reset(&mut respond, early.as_mut()) => return Ok(()),
            }
            let mut sending = match early {
                Some(sending) => sending,
                None => respond.send_response(ok, false)?,
            };
            drop(in_flight);
            sending.send_data(Bytes::from_static(b"through the gate"), true)
        }
        "/echo" => {
            let mut sending = respond.send_response(ok, false)?;
            while let Some(data) = body.data().await {
                let data = data?;
                body.flow_control().release_capacity(data.len())?;
                sending.send_data(data, false)?;
            }
            let trailers = body.trailers().await?;
            drop(in_flight);
            match trailers {
                Some(trailers) => sending.send_trailers(trailers),
                None => sending.send_data(Bytes::new(), true),
            }
        }
        "/big" => {
            let mut sending = respond.send_response(ok, false)?;
            let mut left: usize = bytes;
            while left > 0 {
                sending.reserve_capacity(left.min(16 * 1024));
                let Some(room) = poll_fn(|cx| sending.poll_capacity(cx)).await else {
                    return Ok(());
                };
                let room = room?.min(left);
                left -= room;
                sending.send_data(Bytes::from(vec![b'x'; room]), false)?;
            }
            drop(in_flight);
            sending.send_data(Bytes::new(), true)
        }
        "/length" => {
            let opened = state.open.notified();
            let mut response = ok;
            response.headers_mut().insert(CONTENT_LENGTH, bytes.into());
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("max-age=60"));
            let mut sending = respond.send_response(response, false)?;
            sending.send_data(Bytes::from(vec![b'x'; bytes]), false)?;
            tokio::select! {
                () = opened => {}
                _ = is_reset(&mut respond, Some(&mut sending)) => return Ok(()),
            }
            drop(in_flight);
            sending.send_data(Bytes::new(), true)
        }
        "/silent" => {
            let _ = is_reset(&mut respond, None).await;
            Ok(())
        }
        path => {
            if path == "/refuse" {
                let mut refused = state.refused.lock().unwrap();
                let times = refused.entry(query.clone()).or_default();
                *times += 1;
                if *times == 1 || query.contains("always") {
                    respond.send_reset(Reason::REFUSED_STREAM);
                    return Ok(());
                }
            }
            let authority = head.uri.authority().map(ToString::to_string).unwrap_or_default();
            let mut said = format!("{} {authority} {}\n", head.method, head.uri);
            for (name, value) in &head.headers {
                said += &format!("{name}: {}\n", value.to_str().unwrap());
            }
            let mut fields = HeaderMap::new();
            if path == "/head" {
                fields.insert("x-long", "y".repeat(bytes).parse().unwrap());
            }
            let mut response = ok;
            *response.headers_mut() = fields;
            let mut sending = respond.send_response(response, false)?;
            drop(in_flight);
            sending.send_data(Bytes::from(said), true)
        }
    }
}

async fn is_reset(respond: &mut SendResponse<Bytes>, early: Option<&mut SendStream<Bytes>>) {
    let _ = match early {
        Some(sending) => poll_fn(|cx| sending.poll_reset(cx)).await,
        None => poll_fn(|cx| respond.poll_reset(cx)).await,
    };
}

/// As much of the protocol as it takes to get a request.
async fn raw(mut stream: TcpStream, first: First, state: &State) -> io::Result<()> {
    const SETTINGS: &[u8] = &[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff];
    const ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];
    const WINDOW: &[u8] = &[0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0xff, 0, 0];
    const GOAWAY: &[u8] = &[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const PING: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    stream.write_all(&[SETTINGS, ACK, WINDOW].concat()).await?;
    stream.read_exact(&mut [0; 24]).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let [_, a, b, kind, ..] = head;
        let mut payload = vec![0; usize::from(a) << 8 | usize::from(b)];
        stream.read_exact(&mut payload).await?;
        match (kind, first) {
            (1, First::SentAway) => return stream.write_all(GOAWAY).await,
            (1, First::Deaf) => {
                let _in_flight = InFlight::new(state);
                loop {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    stream.write_all(PING).await?;
                }
            }
            (1, _) => return std::future::pending().await,
            _ => {}
        }
    }
}
