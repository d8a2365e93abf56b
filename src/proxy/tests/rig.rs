//! A proxy with one slot between a raw client and a raw upstream, both in the hands of the test.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Response, StatusCode, request::Parts};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::super::{Proxy, ResponseBody};
use crate::{
    admission::{Admission, Arrival},
    config::{Classes, Config, Limit, Log, Route, Server, Store, StoreKind, StoreTls, WhenDown},
    metrics::Metrics,
    server::{self, ClientConn, Handler, RequestBody, TurnedAway},
    store::MemoryStore,
    upstream,
};

pub(super) struct Rig {
    pub(super) front: SocketAddr,
    pub(super) upstream: TcpListener,
    pub(super) admission: Arc<Admission>,
    pub(super) left: Left,
}

/// Whether a slot was free each time that an answer left the proxy, before anybody had read its body.
pub(super) type Left = Arc<Mutex<Vec<bool>>>;

struct Watched(Arc<Proxy>, Left);

impl Handler for Watched {
    type Body = ResponseBody;

    async fn handle(
        &self,
        head: Box<Parts>,
        body: RequestBody,
        conn: &Arc<ClientConn>,
    ) -> Response<ResponseBody> {
        let response = self.0.handle(head, body, conn).await;
        self.1.lock().unwrap().push(is_free(&self.0.admission));
        response
    }

    fn unreadable(&self, status: StatusCode, conn: &ClientConn) -> Response<Bytes> {
        self.0.unreadable(status, conn)
    }

    fn turned_away(&self, why: TurnedAway) {
        self.0.turned_away(why);
    }
}

fn is_free(admission: &Admission) -> bool {
    admission.admit(0, &arrival(&HeaderMap::new())).now_or_never().is_some()
}

/// One end of a connection. Every wait is bounded, so that a failure isn't a hang.
pub(super) struct Wire(TcpStream);

impl Rig {
    pub(super) async fn new() -> Self {
        Self::with(|_| ()).await
    }

    pub(super) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", upstream.local_addr().unwrap());
        let mut config = config(&endpoint);
        change(&mut config);
        let metrics = Metrics::new(&config);
        let store = Arc::new(MemoryStore::new());
        let admission = Admission::start(&config, store, Arc::clone(&metrics));
        let proxy = Proxy::new(
            &config,
            Arc::clone(&admission),
            metrics,
            Arc::new(crate::log::Log::apart()),
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let front = listener.local_addr().unwrap();
        let (_, settings) = tokio::sync::watch::channel(config.server);
        let left = Left::default();
        let handler = Arc::new(Watched(proxy, Arc::clone(&left)));
        let workers = Arc::new(server::Workers::here());
        tokio::spawn(server::serve(listener, handler, settings, workers, std::future::pending()));
        Self { front, upstream, admission, left }
    }

    pub(super) async fn client(&self, request: &str) -> Wire {
        let mut wire = Wire(TcpStream::connect(self.front).await.unwrap());
        wire.write(request).await;
        wire
    }

    pub(super) async fn accept(&self) -> Wire {
        Wire(bounded(self.upstream.accept()).await.unwrap().0)
    }

    /// Serves one request first, if wanted, so that the next one finds a used connection.
    pub(super) async fn accept_after(&self, client: &mut Wire, is_warm: bool) -> Option<Wire> {
        if !is_warm {
            return None;
        }
        client.write(super::GET).await;
        let mut upstream = self.accept().await;
        upstream.read_head().await;
        upstream.write(super::OK).await;
        client.read_to("ok").await;
        Some(upstream)
    }

    /// Nobody connects, as far as can be seen now.
    pub(super) fn is_unvisited(&self) -> bool {
        self.upstream.accept().now_or_never().is_none()
    }

    pub(super) fn is_free(&self) -> bool {
        is_free(&self.admission)
    }

    pub(super) async fn until_free(&self) {
        drop(bounded(self.admission.admit(0, &arrival(&HeaderMap::new()))).await.unwrap());
    }
}

impl Wire {
    pub(super) async fn write(&mut self, text: &str) {
        bounded(self.0.write_all(text.as_bytes())).await.unwrap();
    }

    /// Reads until the text ends like this, and returns all of it. An end must not look like hex
    /// digits: a head carries a random id.
    pub(super) async fn read_to(&mut self, end: &str) -> String {
        let mut read = Vec::new();
        while !read.ends_with(end.as_bytes()) {
            let byte = bounded(self.0.read_u8()).await;
            let so_far = String::from_utf8_lossy(&read).into_owned();
            read.push(byte.unwrap_or_else(|error| panic!("{error} after {so_far:?}")));
        }
        String::from_utf8(read).unwrap()
    }

    pub(super) async fn read_head(&mut self) -> String {
        self.read_to("\r\n\r\n").await
    }

    /// Reads on until the other end closes, cleanly or not.
    pub(super) async fn read_to_close(&mut self) -> String {
        let mut read = Vec::new();
        let mut buf = [0; 4096];
        while let Ok(n @ 1..) = bounded(self.0.read(&mut buf)).await {
            read.extend_from_slice(&buf[..n]);
        }
        String::from_utf8_lossy(&read).into_owned()
    }

    /// Reads on until the other end closes; true if that was a reset.
    pub(super) async fn is_reset(&mut self) -> bool {
        let mut buf = vec![0; 64 * 1024];
        loop {
            match bounded(self.0.read(&mut buf)).await {
                Ok(0) => return false,
                Ok(_) => {}
                Err(_) => return true,
            }
        }
    }

    /// Writes as long as the other end takes anything.
    pub(super) async fn flood(&mut self) {
        let block = vec![b'x'; 64 * 1024];
        let pause = Duration::from_millis(300);
        while let Ok(Ok(_)) = tokio::time::timeout(pause, self.0.write(&block)).await {}
    }
}

pub(super) async fn bounded<T>(future: impl Future<Output = T>) -> T {
    let bound = Duration::from_secs(10);
    tokio::time::timeout(bound, future).await.expect("took too long")
}

fn arrival(headers: &HeaderMap) -> Arrival<'_> {
    Arrival { headers, client: Ipv4Addr::LOCALHOST.into(), trusted: false, body: Some(0) }
}

fn config(endpoint: &str) -> Config {
    let second = Duration::from_secs(1);
    Config {
        server: Server {
            listen: ([127, 0, 0, 1], 0).into(),
            tls: None,
            max_in_flight: 100,
            max_connections: 100,
            max_connections_per_address: None,
            proxy_protocol: Vec::new(),
            trusted_proxies: Vec::new(),
            header_timeout: 10 * second,
            keepalive_timeout: 10 * second,
            stall_timeout: 10 * second,
            drain_delay: Duration::ZERO,
            drain_timeout: second,
        },
        admin: None,
        log: Log::default(),
        traces: None,
        store: Store {
            kind: StoreKind::Memory,
            tls: StoreTls::default(),
            prefix: String::new(),
            op_timeout: second,
            digest_key: None,
            when_down: WhenDown::Closed,
        },
        classes: Classes::default(),
        limits: vec![Limit::plain("one", 1)],
        rates: Vec::new(),
        upstreams: vec![upstream::tests::config(endpoint)],
        routes: vec![Route { limits: vec![0], ..Route::plain("/") }],
    }
}
