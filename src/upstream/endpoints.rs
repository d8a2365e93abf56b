//! The endpoints of an upstream: every address that a request may go to, how much each has to do, and which is next.
//!
//! Of two that are drawn at random the one with fewer requests in flight is taken. That keeps the load even without a look at all
//! of them, and doesn't send every instance's next request to the same one, as taking the least loaded would.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Deref,
    slice::Iter,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::{HeaderValue, StatusCode, Uri, uri::Scheme};
use rustls::ClientConfig;
use tokio::{runtime::Handle, sync::watch, time::Instant};

use super::{
    Pool,
    connect::{Connector, Tcp},
    h2::{self, Trunks},
    health::{self, Standing},
    resolve::{self, Name},
    tls,
};
use crate::config::{self, Ejection, HealthCheck, HostHeader};

/// Every endpoint of one upstream.
#[derive(Debug)]
pub(crate) struct Endpoints {
    entries: Vec<Arc<Entry>>,
    /// The endpoint, where there is one and it can't change.
    only: Option<Arc<Endpoint>>,
    known: watch::Sender<Known>,
    off_limits: Option<SocketAddr>,
    tls: Arc<ClientConfig>,
    http2: bool,
    ping_interval: Option<Duration>,
    connect_timeout: Duration,
    max_connection_age: Duration,
    health: Option<HealthCheck>,
    ejection: Option<Ejection>,
    /// Held while the ejected are counted and one more becomes one.
    ejecting: Mutex<()>,
    runtime: Handle,
}

/// One of `endpoints` in the configuration: an address, or a name that stands for some.
#[derive(Debug)]
struct Entry {
    upstream: Arc<str>,
    uri: Uri,
    /// What a request to it must be given as Host, where that depends on the endpoint.
    host: Option<HeaderValue>,
    /// How often one of its addresses was taken out for failing.
    ejections: AtomicU64,
}

/// One address of an upstream.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) way: Way,
    /// What it stands for.
    entry: Arc<Entry>,
    pub(super) addr: SocketAddr,
    /// Requests in flight.
    load: AtomicUsize,
    pub(super) standing: Standing,
}

/// How requests get to an endpoint.
#[derive(Debug)]
pub(super) enum Way {
    /// Each over a connection of its own, for that time.
    H1(Arc<Pool>),
    /// Over connections that they share.
    H2(Arc<Trunks>),
}

/// An endpoint that has a request to serve for as long as this lives.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Endpoint>);

/// How an entry does.
#[derive(Debug)]
pub(crate) struct EntryState {
    pub(crate) name: String,
    pub(crate) ejections: u64,
    pub(crate) endpoints: Vec<EndpointState>,
}

/// How an endpoint does.
#[derive(Debug)]
pub(crate) struct EndpointState {
    pub(crate) addr: SocketAddr,
    /// up, unhealthy, ejected
    pub(crate) word: &'static str,
    pub(crate) in_flight: usize,
    /// For how long it has answered nothing, if the latest request got no answer.
    pub(crate) silent: Option<Duration>,
}

#[derive(Debug, Default)]
struct Known {
    endpoints: Vec<Arc<Endpoint>>,
    /// Names that no lookup came back for.
    awaited: usize,
}

// === impl Endpoints ===

impl Endpoints {
    /// Must be called inside a runtime.
    pub(super) fn start(config: &config::Upstream) -> Arc<Self> {
        let mut endpoints = Self::empty(config);
        let mut names = Vec::new();
        for (entry, uri) in config.endpoints.iter().enumerate() {
            match address(uri) {
                Ok(addr) => {
                    let endpoint = endpoints.endpoint(entry, addr);
                    endpoints.known.send_modify(|known| known.endpoints.push(endpoint));
                }
                Err(name) => names.push((entry, name)),
            }
        }
        endpoints.known.send_modify(|known| known.awaited = names.len());
        if config.endpoints.len() == 1 && names.is_empty() {
            endpoints.only = endpoints.known.borrow().endpoints.first().cloned();
        }
        let endpoints = Arc::new(endpoints);
        for (entry, name) in names {
            let following = Arc::downgrade(&endpoints);
            tokio::spawn(resolve::follow(following, entry, name, config.resolve_interval));
        }
        endpoints
    }

    fn empty(config: &config::Upstream) -> Self {
        let several = config.endpoints.len() > 1;
        let host =
            |uri: &Uri| (several && config.host == HostHeader::Upstream).then(|| authority(uri));
        let entry = |uri: &Uri| {
            let upstream = Arc::clone(&config.name);
            let ejections = AtomicU64::new(0);
            Arc::new(Entry { upstream, uri: uri.clone(), host: host(uri), ejections })
        };
        let alpn: &[&[u8]] = if config.http2 { &[h2::ALPN] } else { &[] };
        let is_tls = config.endpoints[0].scheme() == Some(&Scheme::HTTPS);
        Self {
            entries: config.endpoints.iter().map(entry).collect(),
            only: None,
            known: watch::Sender::default(),
            off_limits: config.off_limits,
            tls: Arc::new(tls::config(is_tls, &config.tls, alpn)),
            http2: config.http2,
            ping_interval: config.ping_interval,
            connect_timeout: config.connect_timeout,
            max_connection_age: config.max_connection_age,
            health: config.health.clone(),
            ejection: config.ejection.clone(),
            ejecting: Mutex::default(),
            runtime: Handle::current(),
        }
    }

    /// Where the next request goes; none if no address is known.
    pub(super) fn choose(&self) -> Option<Busy> {
        match &self.only {
            Some(only) => Some(Busy::new(only)),
            None => pick(self.known.borrow().endpoints.iter(), None),
        }
    }

    /// Another endpoint than this one.
    pub(super) fn choose_other(&self, than: &Busy) -> Option<Busy> {
        pick(self.known.borrow().endpoints.iter(), Some(&than.0))
    }

    /// Like [`Endpoints::choose`], but waits for the first answer about the names, as long as connecting may take.
    pub(super) async fn first(&self) -> Option<Busy> {
        let mut known = self.known.subscribe();
        let told = known.wait_for(|known| !known.endpoints.is_empty() || known.awaited == 0);
        let _ = tokio::time::timeout(self.connect_timeout, told).await;
        self.choose()
    }

    /// Notes what became of a request: the status of its answer, or none if there was no answer and that was the endpoint's fault.
    pub(super) fn note(&self, endpoint: &Busy, status: Option<StatusCode>) {
        let Some(ejection) = &self.ejection else {
            return;
        };
        if status.is_some_and(|status| !ejection.statuses.contains(&status)) {
            endpoint.standing.served();
        } else if endpoint.standing.failed() >= ejection.failures {
            self.eject(&endpoint.0, ejection);
        }
    }

    /// Takes an endpoint out for a time, unless too many are.
    fn eject(&self, endpoint: &Arc<Endpoint>, ejection: &Ejection) {
        let ejecting = self.ejecting.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.known.borrow();
        let ejected = known.endpoints.iter().filter(|other| other.standing.is_ejected()).count();
        if (ejected + 1) as f64 > ejection.share * known.endpoints.len() as f64 {
            return;
        }
        let Some(time) = endpoint.standing.eject(ejection, Instant::now()) else {
            return;
        };
        drop((known, ejecting));
        endpoint.entry.ejections.fetch_add(1, Ordering::Relaxed);
        let (upstream, name) = endpoint.names();
        tracing::warn!(upstream, endpoint = name, addr = %endpoint.addr, ?time, "an endpoint is ejected");
        self.runtime.spawn(come_back_after(time, Arc::downgrade(endpoint)));
    }

    /// How each entry does, in the order of the configuration.
    pub(super) fn state(&self) -> Vec<EntryState> {
        let (known, now) = (self.known.borrow(), Instant::now());
        let state = |entry: &Arc<Entry>| {
            let endpoints = known.endpoints.iter();
            EntryState {
                name: entry.name().to_owned(),
                ejections: entry.ejections.load(Ordering::Relaxed),
                endpoints: endpoints
                    .filter(|endpoint| Arc::ptr_eq(&endpoint.entry, entry))
                    .map(|endpoint| EndpointState {
                        addr: endpoint.addr,
                        word: endpoint.standing.word(),
                        in_flight: endpoint.load(),
                        silent: endpoint.standing.silent_for(now),
                    })
                    .collect(),
            }
        };
        self.entries.iter().map(state).collect()
    }

    /// What a lookup of an entry's name said: the addresses that it stands for from now on, none if the lookup failed. Then those of
    /// before are kept. `is_first` is set where it is the first answer about this name.
    pub(super) fn found(&self, entry: usize, addrs: Option<&[SocketAddr]>, is_first: bool) {
        let of = &self.entries[entry];
        let changed = self.known.send_if_modified(|known| {
            known.awaited -= usize::from(is_first);
            let Some(addrs) = addrs else { return is_first };
            let mut changed = false;
            known.endpoints.retain(|old| {
                let stays = !Arc::ptr_eq(&old.entry, of) || addrs.contains(&old.addr);
                changed |= !stays;
                stays
            });
            for &addr in addrs {
                let is_known =
                    |known: &Arc<Endpoint>| Arc::ptr_eq(&known.entry, of) && known.addr == addr;
                if !known.endpoints.iter().any(is_known) {
                    known.endpoints.push(self.endpoint(entry, addr));
                    changed = true;
                }
            }
            changed || is_first
        });
        if let Some(addrs) = addrs.filter(|_| changed) {
            let (upstream, endpoint) = self.names(entry);
            tracing::info!(upstream, endpoint, ?addrs, "addresses of an endpoint");
        }
    }

    /// The upstream's name, and the entry's.
    pub(super) fn names(&self, entry: usize) -> (&str, &str) {
        self.entries[entry].names()
    }

    fn endpoint(&self, entry: usize, addr: SocketAddr) -> Arc<Endpoint> {
        let entry = Arc::clone(&self.entries[entry]);
        let uri = entry.uri.clone();
        let tcp = Tcp { addr, off_limits: self.off_limits };
        let connector = Connector::new(uri, tcp, self.connect_timeout, Arc::clone(&self.tls));
        let way = match self.http2 {
            false => Way::H1(Pool::start(connector, self.max_connection_age)),
            true => Way::H2(Trunks::start(connector, self.max_connection_age, self.ping_interval)),
        };
        let endpoint = Arc::new(Endpoint {
            way,
            entry,
            addr,
            load: AtomicUsize::new(0),
            standing: Standing::default(),
        });
        if let Some(check) = &self.health {
            let asked = Arc::downgrade(&endpoint);
            self.runtime.spawn(health::check_for_ever(asked, check.clone()));
        }
        endpoint
    }
}

/// The address that an endpoint is given by, or the name.
fn address(uri: &Uri) -> Result<SocketAddr, Name> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port =
        uri.port_u16().unwrap_or(if uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 });
    match host.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketAddr::new(ip, port)),
        Err(_) => Err(Name { host: host.to_owned(), port }),
    }
}

/// What an upstream sees as Host.
pub(super) fn authority(uri: &Uri) -> HeaderValue {
    let authority = uri.authority().expect("an endpoint has an authority");
    HeaderValue::from_str(authority.as_str()).expect("an authority is ASCII")
}

async fn come_back_after(time: Duration, endpoint: Weak<Endpoint>) {
    tokio::time::sleep(time).await;
    if let Some(endpoint) = endpoint.upgrade() {
        endpoint.standing.come_back();
        let (upstream, name) = endpoint.names();
        tracing::info!(upstream, endpoint = name, addr = %endpoint.addr, "an endpoint is back");
    }
}

/// One of those that are fit to serve, or of all where none is; never this one.
fn pick(all: Iter<'_, Arc<Endpoint>>, but: Option<&Arc<Endpoint>>) -> Option<Busy> {
    let all = all.filter(|endpoint| but.is_none_or(|but| !Arc::ptr_eq(endpoint, but)));
    let fit = all.clone().filter(|endpoint| !endpoint.standing.is_out());
    less_busy(fit).or_else(|| less_busy(all))
}

/// The less busy of two.
fn less_busy<'a>(mut all: impl Iterator<Item = &'a Arc<Endpoint>> + Clone) -> Option<Busy> {
    let count = all.clone().count();
    if count < 2 {
        return all.next().map(Busy::new);
    }
    let first = fastrand::usize(..count);
    let second = (first + fastrand::usize(1..count)) % count;
    let (first, second) = (all.clone().nth(first)?, all.nth(second)?);
    Some(Busy::new(if second.load() < first.load() { second } else { first }))
}

// === impl Entry ===

impl Entry {
    /// As configured, without its path.
    fn name(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }

    fn names(&self) -> (&str, &str) {
        (&self.upstream, self.name())
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// The upstream's name, and the endpoint's as configured.
    pub(super) fn names(&self) -> (&str, &str) {
        self.entry.names()
    }

    /// The connections for HTTP/1.1.
    pub(super) fn pool(&self) -> &Pool {
        match &self.way {
            Way::H1(pool) => pool,
            Way::H2(_) => unreachable!("asked by what this way gave out alone"),
        }
    }

    pub(super) fn authority(&self) -> HeaderValue {
        authority(&self.entry.uri)
    }

    /// What a request must be given as Host, if not what every request is.
    pub(super) fn host(&self) -> Option<&HeaderValue> {
        self.entry.host.as_ref()
    }

    fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }
}

// === impl Busy ===

impl Busy {
    pub(super) fn new(endpoint: &Arc<Endpoint>) -> Self {
        endpoint.load.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(endpoint))
    }

    /// The same endpoint once more.
    pub(super) fn again(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Deref for Busy {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.0
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.load.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
impl Endpoints {
    /// One entry, and nobody has said yet what it stands for.
    pub(super) fn awaiting(config: &config::Upstream) -> Arc<Self> {
        let endpoints = Self::empty(config);
        endpoints.known.send_modify(|known| known.awaited = 1);
        Arc::new(endpoints)
    }

    pub(super) fn addrs(&self) -> Vec<SocketAddr> {
        self.known.borrow().endpoints.iter().map(|endpoint| endpoint.addr).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use http::Request;
    use http_body_util::BodyExt;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::{
        upload::Outgoing,
        upstream::{Line, Sent},
    };

    fn endpoints(urls: &[&str]) -> Arc<Endpoints> {
        let mut config = super::super::tests::config(urls[0]);
        config.endpoints = urls.iter().map(|url| url.parse().unwrap()).collect();
        Endpoints::start(&config)
    }

    #[tokio::test]
    async fn the_less_busy_of_two_is_taken() {
        let all = endpoints(&["http://127.0.0.1:1", "http://127.0.0.2:1"]);
        let busy: Vec<_> = (0..20).map(|_| all.choose().unwrap()).collect();
        let at = |entry| busy.iter().filter(|busy| busy.addr == all.addrs()[entry]).count();
        assert_eq!((at(0), at(1)), (10, 10));
        assert_eq!(busy[0].load(), 10);
        drop(busy);
        assert_eq!(all.choose().unwrap().load(), 1);
    }

    #[tokio::test]
    async fn each_of_many_has_something_to_do() {
        let urls: Vec<_> = (1..=5).map(|n| format!("http://[::{n}]:80")).collect();
        let all = endpoints(&urls.iter().map(String::as_str).collect::<Vec<_>>());
        let busy: Vec<_> = (0..100).map(|_| all.choose().unwrap()).collect();
        for entry in 0..5 {
            let load = busy.iter().filter(|busy| busy.addr == all.addrs()[entry]).count();
            assert!((10..=30).contains(&load), "{load}");
        }
    }

    #[tokio::test]
    async fn only_an_endpoint_given_by_address_never_changes() {
        for (url, is_fixed) in
            [("http://127.0.0.1", true), ("https://[::1]:8", true), ("http://localhost", false)]
        {
            assert_eq!(endpoints(&[url]).only.is_some(), is_fixed, "{url}");
        }
    }

    #[tokio::test]
    async fn g59_an_address_that_is_gone_keeps_no_idle_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let all = Endpoints::awaiting(&super::super::tests::config("http://127.0.0.1:1"));
        all.found(0, Some(&[listener.local_addr().unwrap()]), true);
        let request = Request::new(Outgoing::Empty);
        let mut sent = Sent::new(all.choose().unwrap(), Box::new(request), Instant::now());
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_ne!(stream.read(&mut [0; 1024]).await.unwrap(), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
            stream
        };
        let (answer, mut stream) = tokio::join!(poll_fn(|cx| sent.poll(cx)), serve);
        let (response, on) = answer.unwrap();
        response.into_body().collect().await.unwrap();
        Line::new(sent.busy(), on).put();
        let close = async |stream: &mut TcpStream| {
            let second = Duration::from_secs(1);
            tokio::time::timeout(second, stream.read(&mut [0; 1])).await.is_ok()
        };
        assert!(!close(&mut stream).await, "it is kept");
        all.found(0, Some(&["127.0.0.1:1".parse().unwrap()]), false);
        assert!(close(&mut stream).await, "it is closed");
    }
}
