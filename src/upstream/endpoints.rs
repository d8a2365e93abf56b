//! The endpoints of an upstream: every address that a request may go to, how much each has to do, and which is next.
//!
//! Of two that are drawn at random the one with fewer requests in flight is taken. That keeps the load even without a look at all
//! of them, and doesn't send every instance's next request to the same one, as taking the least loaded would.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::{HeaderValue, Uri, uri::Scheme};
use rustls::ClientConfig;
use tokio::sync::watch;

use super::{
    Pool,
    connect::Connector,
    resolve::{self, Name},
    tls,
};
use crate::config::{self, HostHeader};

/// Every endpoint of one upstream.
#[derive(Debug)]
pub(crate) struct Endpoints {
    upstream: Arc<str>,
    entries: Vec<Entry>,
    /// The endpoint, where there is one and it can't change.
    only: Option<Arc<Endpoint>>,
    known: watch::Sender<Known>,
    tls: ClientConfig,
    connect_timeout: Duration,
    max_connection_age: Duration,
}

/// One of `endpoints` in the configuration: an address, or a name that stands for some.
#[derive(Debug)]
struct Entry {
    uri: Uri,
    /// What a request to it must be given as Host, where that depends on the endpoint.
    host: Option<HeaderValue>,
}

/// One address of an upstream.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) pool: Arc<Pool>,
    /// Which entry it stands for.
    entry: usize,
    addr: SocketAddr,
    /// Requests in flight.
    load: AtomicUsize,
}

/// An endpoint that has a request to serve for as long as this lives.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Endpoint>);

#[derive(Debug, Default)]
struct Known {
    endpoints: Vec<Arc<Endpoint>>,
    /// Names that no lookup came back for.
    awaited: usize,
}

// === impl Endpoints ===

impl Endpoints {
    /// Must be called inside the runtime on which the connections will live.
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
        let entries: Vec<_> = config
            .endpoints
            .iter()
            .map(|uri| Entry { uri: uri.clone(), host: host(uri) })
            .collect();
        let is_tls = config.endpoints[0].scheme() == Some(&Scheme::HTTPS);
        Self {
            upstream: Arc::clone(&config.name),
            entries,
            only: None,
            known: watch::Sender::default(),
            tls: tls::config(is_tls, &config.tls),
            connect_timeout: config.connect_timeout,
            max_connection_age: config.max_connection_age,
        }
    }

    /// Where the next request goes; none if no address is known.
    pub(super) fn choose(&self) -> Option<Busy> {
        match &self.only {
            Some(only) => Some(Busy::new(only)),
            None => pick(self.known.borrow().endpoints.iter()),
        }
    }

    /// Another endpoint than this one.
    pub(super) fn choose_other(&self, than: &Busy) -> Option<Busy> {
        let known = self.known.borrow();
        pick(known.endpoints.iter().filter(|endpoint| !Arc::ptr_eq(endpoint, &than.0)))
    }

    /// Like [`Endpoints::choose`], but waits for the first answer about the names, as long as connecting may take.
    pub(super) async fn first(&self) -> Option<Busy> {
        let mut known = self.known.subscribe();
        let told = known.wait_for(|known| !known.endpoints.is_empty() || known.awaited == 0);
        let _ = tokio::time::timeout(self.connect_timeout, told).await;
        self.choose()
    }

    /// What a request to this endpoint must be given as Host, if not what every request is.
    pub(super) fn host(&self, endpoint: &Endpoint) -> Option<&HeaderValue> {
        self.entries[endpoint.entry].host.as_ref()
    }

    /// What a lookup of an entry's name said: the addresses that it stands for from now on, none if the lookup failed. Then those of
    /// before are kept. `is_first` is set where it is the first answer about this name.
    pub(super) fn found(&self, entry: usize, addrs: Option<&[SocketAddr]>, is_first: bool) {
        let changed = self.known.send_if_modified(|known| {
            known.awaited -= usize::from(is_first);
            let Some(addrs) = addrs else { return is_first };
            let mut changed = false;
            known.endpoints.retain(|old| {
                let stays = old.entry != entry || addrs.contains(&old.addr);
                changed |= !stays;
                stays
            });
            for &addr in addrs {
                let is_known = |known: &Arc<Endpoint>| known.entry == entry && known.addr == addr;
                if !known.endpoints.iter().any(is_known) {
                    known.endpoints.push(self.endpoint(entry, addr));
                    changed = true;
                }
            }
            changed || is_first
        });
        if let Some(addrs) = addrs.filter(|_| changed) {
            let endpoint = self.name(entry);
            tracing::info!(
                upstream = &*self.upstream,
                endpoint,
                ?addrs,
                "addresses of an endpoint"
            );
        }
    }

    pub(super) fn upstream(&self) -> &str {
        &self.upstream
    }

    /// The entry as configured, without its path.
    pub(super) fn name(&self, entry: usize) -> &str {
        self.entries[entry].uri.authority().map_or("", |authority| authority.as_str())
    }

    fn endpoint(&self, entry: usize, addr: SocketAddr) -> Arc<Endpoint> {
        let uri = self.entries[entry].uri.clone();
        let connector = Connector::new(uri, addr, self.connect_timeout, self.tls.clone());
        Arc::new(Endpoint {
            pool: Pool::start(connector, self.max_connection_age),
            entry,
            addr,
            load: AtomicUsize::new(0),
        })
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

/// The less busy of two.
fn pick<'a>(mut all: impl Iterator<Item = &'a Arc<Endpoint>> + Clone) -> Option<Busy> {
    let count = all.clone().count();
    if count < 2 {
        return all.next().map(Busy::new);
    }
    let first = fastrand::usize(..count);
    let second = (first + fastrand::usize(1..count)) % count;
    let (first, second) = (all.clone().nth(first)?, all.nth(second)?);
    Some(Busy::new(if second.load() < first.load() { second } else { first }))
}

// === impl Endpoint ===

impl Endpoint {
    fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }
}

// === impl Busy ===

impl Busy {
    fn new(endpoint: &Arc<Endpoint>) -> Self {
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
    use super::*;

    fn endpoints(urls: &[&str]) -> Arc<Endpoints> {
        let mut config = super::super::tests::config(urls[0]);
        config.endpoints = urls.iter().map(|url| url.parse().unwrap()).collect();
        Endpoints::start(&config)
    }

    #[tokio::test]
    async fn the_less_busy_of_two_is_taken() {
        let all = endpoints(&["http://127.0.0.1:1", "http://127.0.0.2:1"]);
        let busy: Vec<_> = (0..20).map(|_| all.choose().unwrap()).collect();
        let at = |entry| busy.iter().filter(|busy| busy.entry == entry).count();
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
            let load = busy.iter().filter(|busy| busy.entry == entry).count();
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
}
