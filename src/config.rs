//! What the program runs on: every value here is valid, and nothing here knows TOML.
//!
//! Text becomes a [`Config`] in three steps: `file` reads TOML into a mirror of it, `resolve` applies every default and every
//! check (the ones on single values are in `rules`), and `error` shows the operator where a check failed. Classes, weights,
//! rates and degrading are in `policy`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode, Uri};
use ipnet::IpNet;

mod error;
mod file;
mod follow;
mod headers;
mod health;
pub mod keys;
pub mod log;
mod policy;
mod quick;
mod resolve;
mod rules;
#[cfg(test)]
mod tests;
mod tls;

pub use error::ConfigError;
pub(crate) use error::escaped;
pub use headers::HeaderRules;
pub use health::{Ejection, HealthCheck};
pub use log::{Log, LogFormat, Traces};
pub use policy::{ClassPolicy, ClassRule, Classes, Dialect, Key, Mode, Rate, Step, WeightRule};
pub use quick::{AdminListen, QuickOptions};
pub use tls::{Identity, ServerTls, Stamps, TlsVersion, UpstreamTls};

/// How many slots a limit may have.
pub const MOST_SLOTS: u32 = 1_000_000;

/// A whole configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The listener for clients.
    pub server: Server,
    /// The listener for operators; none with `--admin-listen none`.
    pub admin: Option<Admin>,
    /// What is written of the process and of each request.
    pub log: Log,
    /// Where requests are traced to; nowhere if none.
    pub traces: Option<Traces>,
    /// Where slots are counted.
    pub store: Store,
    /// The priority classes. Routes and limits refer to them by index.
    pub classes: Classes,
    /// Every limit, in the order of the file. Routes and upstreams refer to them by index.
    pub limits: Vec<Limit>,
    /// Every rate, in the order of the file. Routes refer to them by index.
    pub rates: Vec<Rate>,
    /// Every upstream. Routes refer to them by index.
    pub upstreams: Vec<Upstream>,
    /// Every route, in the order of the file.
    pub routes: Vec<Route>,
}

/// `[server]`
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// The certificate that clients see; none for plain connections.
    pub tls: Option<ServerTls>,
    /// Requests in flight in this process, waiting ones included.
    pub max_in_flight: usize,
    /// Open client connections in this process.
    pub max_connections: usize,
    /// Open connections of one client address, which of IPv6 is a /64; none for any number.
    pub max_connections_per_address: Option<usize>,
    /// Who must say by the PROXY protocol whose connection it is, and nobody else may connect; none for plain connections.
    pub proxy_protocol: Vec<IpNet>,
    /// Whose forwarding headers count.
    pub trusted_proxies: Vec<IpNet>,
    /// From a connection's first byte, or the request's, to the complete head.
    pub header_timeout: Duration,
    /// How long a connection may idle between two requests.
    pub keepalive_timeout: Duration,
    /// Bytes pending for the client, or awaited of a request body, and under 1 KiB moved in this time.
    pub stall_timeout: Duration,
    /// Readiness is red for this long before the listener closes.
    pub drain_delay: Duration,
    /// Streams that still run this long after the listener closed are cut.
    pub drain_timeout: Duration,
}

/// `[admin]`
#[derive(Clone, Debug)]
pub struct Admin {
    /// Where operators connect.
    pub listen: SocketAddr,
    /// What a write must bring as its bearer token; off loopback there are no writes without one.
    pub token: Option<Secret>,
}

/// `[store]`
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    /// Which store.
    pub kind: StoreKind,
    /// Who is trusted where the connection is encrypted, and as whom.
    pub tls: StoreTls,
    /// Goes in front of every key.
    pub prefix: String,
    /// How long one call of the store may take.
    pub op_timeout: Duration,
    /// What becomes of new requests while it can't be reached.
    pub when_down: WhenDown,
    /// Hides key values in the names of keys: their digest is an HMAC under this; the same on every instance.
    pub digest_key: Option<Secret>,
}

/// The two stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// Counts per process.
    Memory,
    /// Counts fleet-wide in a Redis.
    Redis(RedisAt),
}

/// Where a Redis is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisAt {
    /// `redis://` or `rediss://`; may hold a password. Where Sentinels are asked, its address is that of the first of them.
    pub url: Secret,
    /// Whoever knows the address of the primary, if that isn't the URL's.
    pub sentinels: Option<Sentinels>,
}

/// `redis+sentinel://host:port,…/name`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentinels {
    /// Host and port of each.
    pub addrs: Vec<(String, u16)>,
    /// What they call the primary.
    pub name: String,
    /// As whom they are asked, if not by anybody.
    pub user: Option<String>,
    /// And by which password.
    pub password: Option<Secret>,
}

/// `store.tls`, as the texts of the files that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreTls {
    /// Whom to trust; the system's roots if none.
    pub ca: Option<String>,
    /// Certificate and key that the server may ask for.
    pub client: Option<(String, Secret)>,
}

/// `when_down`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenDown {
    /// They are refused.
    Closed,
    /// Each instance serves them from what it holds, then from its share of the slots.
    LocalShare,
    /// They are all admitted: there is no limit.
    Open,
}

/// A text that never appears in a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// `[limits.<name>]`
#[derive(Clone, Debug)]
pub struct Limit {
    /// Letters, digits, `.`, `_` and `-`; at most 128.
    pub name: Arc<str>,
    /// The cap N on requests in flight, fleet-wide, for each value of `key`. 0 admits nobody.
    pub slots: u32,
    /// How long a slot lasts without renewal.
    pub lease: Duration,
    /// The longest a request may hold its slot; none for ever.
    pub max_hold: Option<Duration>,
    /// What happens when every slot is taken.
    pub queue: Queue,
    /// How long recovery lasts after a loss of the store's memory.
    pub recovery: Recovery,
    /// What becomes of a request whose lease may be over.
    pub on_lease_lost: OnLeaseLost,
    /// One for each class of [`Config::classes`].
    pub classes: Vec<ClassPolicy>,
    /// Splits the limit: each value has slots and a queue of its own.
    pub key: Option<Key>,
    /// Values of `key` with other slots.
    pub slots_for: Vec<(String, u32)>,
    /// Of a refusal when full: 503, 429 or 529.
    pub status: StatusCode,
    /// Whether it refuses.
    pub mode: Mode,
    /// Tells the upstream the holder's id.
    pub holder_header: Option<HeaderName>,
    /// Tells the upstream the number of the grant, which is higher than of any before. Only where there is one slot.
    pub fence_header: Option<HeaderName>,
}

/// `queue = { size, timeout }`
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    /// How many requests may wait, fleet-wide; 0 refuses at once.
    pub size: u32,
    /// How long one request may wait.
    pub timeout: Duration,
}

/// `recovery`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Two seconds.
    Fast,
    /// A lease and an operation's timeout.
    Strict,
}

/// `on_lease_lost`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLeaseLost {
    /// It goes on, and is counted again when the store answers.
    Keep,
    /// It ends before its slot can be given to another.
    Cut,
}

/// `[upstreams.<name>]`
#[derive(Clone, Debug, PartialEq)]
pub struct Upstream {
    /// The name in the file.
    pub name: Arc<str>,
    /// At least one: `http://` or `https://`, an authority, and perhaps a base path that goes in front of the request's. Scheme and
    /// base path are the same in all of them, the authority in none.
    pub endpoints: Vec<Uri>,
    /// Where they may not lead, whatever their names stand for: the operators' listener.
    pub off_limits: Option<SocketAddr>,
    /// How often the names among them are looked up.
    pub resolve_interval: Duration,
    /// How long a connection may be used for new requests.
    pub max_connection_age: Duration,
    /// Whether HTTP/2 is spoken to it: as TLS agrees on, or without asking.
    pub http2: bool,
    /// How often a connection of HTTP/2 is asked whether it is still there.
    pub ping_interval: Option<Duration>,
    /// Whether its endpoints are asked how they are.
    pub health: Option<HealthCheck>,
    /// Whether those that fail get no requests for a time.
    pub ejection: Option<Ejection>,
    /// Indices into [`Config::limits`]: they apply on every way that leads here.
    pub limits: Vec<usize>,
    /// Bound on TCP and TLS together.
    pub connect_timeout: Duration,
    /// From the request's end of head to the response's.
    pub response_timeout: Duration,
    /// Between two pieces of a response body.
    pub idle_timeout: Duration,
    /// After an abort the slot stays taken for this long past the close of the upstream's connection.
    pub linger: Duration,
    /// What becomes of the upstream's work when the client leaves.
    pub on_client_gone: OnClientGone,
    /// What the upstream sees as Host.
    pub host: HostHeader,
    /// Whom to trust behind `https://`, and as whom to come.
    pub tls: UpstreamTls,
    /// A tunnel, such as a WebSocket's, in which nothing moves for this long is closed.
    pub tunnel_timeout: Duration,
    /// Fields that every request to it carries.
    pub set_headers: HeaderRules,
}

/// `on_client_gone`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnClientGone {
    /// The upstream's connection is closed.
    Cancel,
    /// The answer is read to its end and thrown away.
    Finish,
}

/// `host`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostHeader {
    /// The endpoint's authority.
    Upstream,
    /// The client's.
    Keep,
}

/// `[[routes]]`
#[derive(Clone, Debug)]
pub struct Route {
    /// The label in metrics and logs; by default host and path as written.
    pub name: Arc<str>,
    /// Which hosts.
    pub host: HostPattern,
    /// A path prefix, on segment borders.
    pub path: String,
    /// Which methods; empty for all.
    pub methods: Vec<Method>,
    /// Index into [`Config::upstreams`].
    pub upstream: usize,
    /// Indices into [`Config::limits`]: the route's own, then the upstream's, each once.
    pub limits: Vec<usize>,
    /// Indices into [`Config::rates`], each once.
    pub rates: Vec<usize>,
    /// How important a request is.
    pub class: ClassRule,
    /// How many slots a request takes.
    pub weight: WeightRule,
    /// The form of a refusal's body.
    pub dialect: Dialect,
    /// What is tried, in order, before a request is refused because a limit is full.
    pub on_full: Vec<Step>,
    /// In which header clients say how long they will wait.
    pub deadline_header: Option<HeaderName>,
    /// Whether the upstream sees the path without the route's.
    pub strip_prefix: bool,
    /// What changes in requests that are forwarded.
    pub request_headers: HeaderRules,
    /// What changes in every answer.
    pub response_headers: HeaderRules,
}

impl Limit {
    /// Whether its holders are all alike: nobody is told their ids, and nothing but a release ends them.
    pub fn is_plain(&self) -> bool {
        self.key.is_none()
            && self.mode == Mode::Enforce
            && self.on_lease_lost == OnLeaseLost::Keep
            && self.holder_header.is_none()
            && self.fence_header.is_none()
    }

    /// How long a request may rely on its lease after the sending of what confirmed it, `linger` not yet taken off: what was
    /// sent may have taken an operation's timeout, timers are late, and two clocks don't run alike.
    pub fn guarded_for(&self, op_timeout: Duration) -> Duration {
        self.lease.saturating_sub(op_timeout + Duration::from_millis(200) + self.lease / 50)
    }
}

// What tests of other modules leave out.
#[cfg(test)]
impl Limit {
    pub(crate) fn plain(name: &str, slots: u32) -> Self {
        Self {
            name: Arc::from(name),
            slots,
            lease: Duration::from_secs(15),
            max_hold: None,
            queue: Queue { size: 10, timeout: Duration::from_secs(10) },
            recovery: Recovery::Fast,
            on_lease_lost: OnLeaseLost::Keep,
            classes: vec![ClassPolicy::default(); Classes::default().order.len()],
            key: None,
            slots_for: Vec::new(),
            status: StatusCode::SERVICE_UNAVAILABLE,
            mode: Mode::Enforce,
            holder_header: None,
            fence_header: None,
        }
    }
}

#[cfg(test)]
impl Route {
    pub(crate) fn plain(path: &str) -> Self {
        Self {
            name: Arc::from(path),
            host: HostPattern::Any,
            path: path.to_owned(),
            methods: Vec::new(),
            upstream: 0,
            limits: Vec::new(),
            rates: Vec::new(),
            class: ClassRule::Fixed(Classes::default().usual()),
            weight: WeightRule::Fixed(1),
            dialect: Dialect::Problem,
            on_full: Vec::new(),
            deadline_header: None,
            strip_prefix: false,
            request_headers: HeaderRules::default(),
            response_headers: HeaderRules::default(),
        }
    }
}

/// `host` of a route
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    /// Any host.
    Any,
    /// Exactly this, in lower case, without a port.
    Exact(String),
    /// `*.example.com`, kept as `.example.com`.
    Suffix(String),
}
