//! What is told of one request when it has ended: its line in the log, and its spans.
//!
//! An [`Account`] is opened with the request's head and rides in its response, or in its tunnel, to the end. There, or where
//! the client leaves, it is told; so there is one line for each request, however it ended. Where nothing is to be told it is
//! empty and costs nothing.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, header::HOST, request::Parts,
};
use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    admission::{Permit, Refusal},
    config::{self, Config},
    headers::TIDEGATE_DEGRADED,
    log::Log,
    metrics::Metrics,
    reason::Reason,
    request_id::RequestId,
    traces::{Trace, Traces},
};

mod line;
mod spans;

/// Where accounts are opened, and what the numbers in them are called; one for each configuration.
#[derive(Debug)]
pub(crate) struct Accounts {
    log: Arc<Log>,
    lost_lines: Counter,
    traces: Option<Arc<Traces>>,
    routes: Vec<RouteNames>,
    upstreams: Vec<UpstreamNames>,
    limits: Vec<Arc<str>>,
    rates: Vec<Arc<str>>,
    classes: Vec<Arc<str>>,
}

#[derive(Debug)]
struct RouteNames {
    name: Arc<str>,
    limits: Vec<Arc<str>>,
    rates: Vec<Arc<str>>,
}

#[derive(Debug)]
struct UpstreamNames {
    name: Arc<str>,
    /// Where there is only one.
    endpoint: Option<String>,
}

/// What is to be told of a request; nothing if it is empty.
#[derive(Debug, Default)]
pub(crate) struct Account(Option<Box<Facts>>);

#[derive(Debug)]
struct Facts {
    all: Arc<Accounts>,
    /// The line's, if it is to have one.
    is_logged: bool,
    trace: Option<Trace>,
    began: Instant,
    began_at: SystemTime,
    id: RequestId,
    client: IpAddr,
    /// None, like the path, where the head can't be read.
    method: Option<Method>,
    uri: Option<Uri>,
    host: Option<HeaderValue>,
    route: Option<usize>,
    admission: Option<Admission>,
    upstream: Option<Call>,
    status: Option<StatusCode>,
    reason: Option<Reason>,
    degraded: Option<HeaderValue>,
    answered: Option<Instant>,
    bytes: u64,
    end: End,
}

/// What became of the asking for slots.
#[derive(Debug)]
struct Admission {
    asked: Instant,
    waited: Duration,
    class: Option<usize>,
    /// Which limit or rate refused.
    refused_by: Option<Arc<str>>,
    /// Whether that was a rate.
    by_rate: bool,
    shadow: Option<Reason>,
}

/// The call to the upstream.
#[derive(Debug)]
struct Call {
    upstream: usize,
    /// Whom the request came to, as configured.
    endpoint: Option<String>,
    holder: Uuid,
    began: Instant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client left before its answer was complete.
    ClientGone,
    /// The answer broke off.
    Cut,
    Complete,
}

// === impl Accounts ===

impl Accounts {
    /// Inside the runtime. What is the same as `before` goes on.
    pub(crate) fn new(
        config: &Config,
        metrics: &Metrics,
        log: Arc<Log>,
        instance: Uuid,
        before: Option<&Self>,
    ) -> Arc<Self> {
        let kept =
            |wanted: &config::Traces| before?.traces.clone().filter(|traces| traces.is_of(wanted));
        let traces = config.traces.as_ref().and_then(|wanted| {
            kept(wanted).or_else(|| Traces::start(wanted, instance, metrics.lost().spans.clone()))
        });
        let limit = |index: &usize| Arc::clone(&config.limits[*index].name);
        let rate = |index: &usize| Arc::clone(&config.rates[*index].name);
        let route = |route: &config::Route| RouteNames {
            name: Arc::clone(&route.name),
            limits: route.limits.iter().map(limit).collect(),
            rates: route.rates.iter().map(rate).collect(),
        };
        let upstream = |upstream: &config::Upstream| UpstreamNames {
            name: Arc::clone(&upstream.name),
            endpoint: match &upstream.endpoints[..] {
                [only] => only.authority().map(ToString::to_string),
                _ => None,
            },
        };
        Arc::new(Self {
            log,
            lost_lines: metrics.lost().lines.clone(),
            traces,
            routes: config.routes.iter().map(route).collect(),
            upstreams: config.upstreams.iter().map(upstream).collect(),
            limits: config.limits.iter().map(|limit| Arc::clone(&limit.name)).collect(),
            rates: config.rates.iter().map(|rate| Arc::clone(&rate.name)).collect(),
            classes: config.classes.order.clone(),
        })
    }

    /// Opens the account of a request, and leaves in its head what the upstream is told of its trace.
    pub(crate) fn open(
        self: &Arc<Self>,
        parts: &mut Parts,
        id: &RequestId,
        trusted: bool,
        client: impl FnOnce(&HeaderMap) -> IpAddr,
    ) -> Account {
        let trace = self.traces.as_ref().and_then(|all| all.begin(&mut parts.headers, trusted));
        let is_logged = self.log.has_requests();
        if !is_logged && trace.is_none() {
            return Account::default();
        }
        let mut facts = Facts::of(self, id, client(&parts.headers), is_logged);
        facts.trace = trace;
        facts.method = Some(parts.method.clone());
        facts.uri = Some(parts.uri.clone());
        facts.host = parts.headers.get(HOST).cloned();
        Account(Some(facts))
    }

    /// Opens the account of what can't be read.
    pub(crate) fn open_unread(self: &Arc<Self>, id: &RequestId, client: IpAddr) -> Account {
        Account(self.log.has_requests().then(|| Facts::of(self, id, client, true)))
    }

    /// Waits until everything that ended is told, but not longer than `patience` for each of the two.
    pub(crate) async fn flush(&self, patience: Duration) {
        if let Some(traces) = &self.traces {
            traces.flush(patience).await;
        }
        self.log.flush(patience);
    }
}

// === impl Account ===

impl Account {
    /// Whether there is anything to be told.
    pub(crate) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    fn note(&mut self, note: impl FnOnce(&mut Facts)) {
        if let Some(facts) = &mut self.0 {
            note(facts);
        }
    }

    pub(crate) fn routed(&mut self, route: usize) {
        self.note(|facts| facts.route = Some(route));
    }

    /// Slots were asked for, and this is what came of it.
    pub(crate) fn asked(&mut self, asked: Instant, admitted: &Result<Permit, Refusal>) {
        self.note(|facts| {
            let (all, now) = (&facts.all, Instant::now());
            facts.admission = Some(match admitted {
                Ok(permit) => Admission {
                    asked,
                    waited: permit.taken() - asked,
                    class: permit.class(),
                    refused_by: None,
                    by_rate: false,
                    shadow: permit.shadow(),
                },
                Err(refusal) => {
                    let limit = refusal.limit.map(|limit| Arc::clone(&all.limits[limit]));
                    let rate = refusal.rate.map(|rate| Arc::clone(&all.rates[rate]));
                    Admission {
                        asked,
                        waited: now - asked,
                        class: Some(refusal.class),
                        by_rate: rate.is_some(),
                        refused_by: limit.or(rate),
                        shadow: None,
                    }
                }
            });
        });
    }

    /// Why the request wasn't served as its route says, or was cut.
    pub(crate) fn refused(&mut self, reason: Reason) {
        self.note(|facts| facts.reason = Some(reason));
    }

    /// The request goes to this upstream.
    pub(crate) fn called(&mut self, upstream: usize, permit: &Permit) {
        let (holder, began) = (permit.holder(), permit.taken());
        self.note(|facts| facts.upstream = Some(Call { upstream, endpoint: None, holder, began }));
    }

    /// This endpoint of the upstream had it, if that is known.
    pub(crate) fn reached(&mut self, endpoint: impl FnOnce() -> Option<String>) {
        self.note(|facts| {
            if let Some(call) = &mut facts.upstream {
                call.endpoint = endpoint();
            }
        });
    }

    /// The head of the answer is there.
    pub(crate) fn answered<B>(&mut self, response: &Response<B>) {
        self.note(|facts| {
            facts.status = Some(response.status());
            facts.degraded = response.headers().get(TIDEGATE_DEGRADED).cloned();
            facts.answered = Some(Instant::now());
        });
    }

    /// So many more bytes of the body went to the client.
    pub(crate) fn given(&mut self, bytes: u64) {
        self.note(|facts| facts.bytes += bytes);
    }

    /// The answer is complete.
    pub(crate) fn complete(&mut self) {
        self.note(|facts| facts.end = End::Complete);
    }

    /// The answer broke off, for this reason if one is known.
    pub(crate) fn cut(&mut self, reason: Option<Reason>) {
        self.note(|facts| {
            facts.end = End::Cut;
            facts.reason = reason.or(facts.reason);
        });
    }
}

// === impl Facts ===

impl Facts {
    /// What every account begins with.
    fn of(all: &Arc<Accounts>, id: &RequestId, client: IpAddr, is_logged: bool) -> Box<Self> {
        Box::new(Self {
            all: Arc::clone(all),
            is_logged,
            trace: None,
            began: Instant::now(),
            began_at: SystemTime::now(),
            id: id.clone(),
            client,
            method: None,
            uri: None,
            host: None,
            route: None,
            admission: None,
            upstream: None,
            status: None,
            reason: None,
            degraded: None,
            answered: None,
            bytes: 0,
            end: End::ClientGone,
        })
    }

    fn method(&self, longest: usize) -> Option<String> {
        self.method.as_ref().map(|method| plain(method.as_str().as_bytes(), longest))
    }

    /// Without what may stand before it in a whole URL: passwords travel there.
    fn host(&self, longest: usize) -> Option<String> {
        let host = self.host.as_ref()?.as_bytes();
        let name = host.rsplit(|byte| *byte == b'@').next().unwrap_or_default();
        Some(plain(name, longest))
    }

    /// Without the query: keys travel there.
    fn path(&self, longest: usize) -> Option<String> {
        self.uri.as_ref().map(|uri| plain(uri.path().as_bytes(), longest))
    }

    /// Whether nobody would look for it.
    fn went_well(&self) -> bool {
        self.end == End::Complete
            && self.reason.is_none()
            && self.status.is_some_and(|status| status.as_u16() < 400)
    }

    fn endpoint(&self) -> Option<&str> {
        let reached = self.upstream.as_ref().and_then(|call| call.endpoint.as_deref());
        reached.or_else(|| self.called()?.endpoint.as_deref())
    }

    fn admission(&self) -> Option<&Admission> {
        self.admission.as_ref()
    }

    fn route(&self) -> Option<&RouteNames> {
        self.route.map(|route| &self.all.routes[route])
    }

    fn called(&self) -> Option<&UpstreamNames> {
        self.upstream.as_ref().map(|call| &self.all.upstreams[call.upstream])
    }

    fn class(&self) -> Option<&str> {
        let class = self.admission()?.class?;
        self.all.classes.get(class).map(|class| &**class)
    }
}

impl Drop for Facts {
    fn drop(&mut self) {
        let now = Instant::now();
        if self.is_logged
            && (!self.went_well() || self.all.log.draws())
            && !self.all.log.write(line::of(self, now, self.all.log.is_json()))
        {
            self.all.lost_lines.inc();
        }
        if let (Some(traces), Some(trace)) = (&self.all.traces, self.trace) {
            traces.end(spans::of(self, trace, now));
        }
    }
}

impl End {
    const fn as_str(self) -> &'static str {
        match self {
            End::ClientGone => "client_gone",
            End::Cut => "cut",
            End::Complete => "complete",
        }
    }
}

/// What a client sent, fit for a log: printable ASCII as it is, all else as `\xNN`, and of a long text the beginning.
fn plain(bytes: &[u8], longest: usize) -> String {
    let mut text = String::with_capacity(bytes.len().min(longest) + 3);
    for byte in bytes.iter().take(longest) {
        match byte {
            b'\\' => text.push_str("\\\\"),
            b' '..=b'~' => text.push(char::from(*byte)),
            _ => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    if bytes.len() > longest {
        text.push_str("...");
    }
    text
}
