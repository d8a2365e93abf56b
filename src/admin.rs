//! The listener for operators: is it alive, is it ready, what is full, the metrics, a page that shows it all, a limit's
//! slots to change, and holders to evict.

use std::{convert::Infallible, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch};
use uuid::Uuid;

use crate::{
    admission::Admission,
    config::{Config, Limit, MOST_SLOTS, StoreKind, WhenDown},
    log::Log,
    metrics::Metrics,
    registry::Registry,
    upstream::Upstream,
};

mod endpoints;
mod guard;
mod holders;
mod live;
mod log;
mod page;
mod signs;
mod status;
#[cfg(test)]
mod tests;

use guard::{Denied, Guard};
use live::{Events, Live, Seat};
pub use signs::watch;

/// What a write may send.
const LONGEST_BODY: usize = 1024;

/// How long a write's body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// What the operators' listener answers from.
#[derive(Debug)]
pub struct Admin {
    instance: Uuid,
    store: &'static str,
    when_down: &'static str,
    limits: Vec<Arc<str>>,
    /// Per limit, how many slots an operator may give it.
    most_slots: Vec<u32>,
    /// Per limit, whether it has a key.
    keyed: Vec<bool>,
    /// Per limit, the longest that a request may hold its slots.
    max_hold: Vec<Option<Duration>>,
    rates: Vec<Arc<str>>,
    classes: Vec<Arc<str>>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    upstreams: Vec<Arc<Upstream>>,
    registry: Arc<Registry>,
    draining: watch::Receiver<bool>,
    guard: Guard,
    log: Arc<Log>,
}

/// The body of a PATCH; a number, or null for what the configuration says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Patch {
    slots: Value,
}

type Answer = Response<Either<Full<Bytes>, Events>>;

/// Serves until the process ends: operators look on while an instance drains.
pub async fn serve(listener: TcpListener, admin: Arc<ArcSwap<Admin>>) {
    let live = Live::start(Arc::clone(&admin));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let admin = Arc::clone(&admin);
        let seat = Seat::of(&live);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let admin = admin.load_full();
                let seat = &seat;
                async move { Ok::<_, Infallible>(admin.answer(request, seat).await) }
            });
            let io = TokioIo::new(stream);
            let connection =
                http1::Builder::new().timer(TokioTimer::new()).serve_connection(io, service);
            tokio::select! {
                _ = connection => {}
                () = seat.lost() => {}
            }
        });
    }
}

impl Admin {
    /// Takes what it shows.
    pub(crate) fn new(
        config: &Config,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        upstreams: Vec<Arc<Upstream>>,
        registry: Arc<Registry>,
        draining: watch::Receiver<bool>,
        log: Arc<Log>,
    ) -> Arc<Self> {
        let store = match config.store.kind {
            StoreKind::Memory => "memory",
            StoreKind::Redis(_) => "redis",
        };
        let limits = config.limits.iter().map(|limit| Arc::clone(&limit.name)).collect();
        let most = |limit: &Limit| if limit.fence_header.is_some() { 1 } else { MOST_SLOTS };
        let instance = admission.instance();
        let guard = Guard::new(config.admin.as_ref());
        Arc::new(Self {
            keyed: config.limits.iter().map(|limit| limit.key.is_some()).collect(),
            max_hold: config.limits.iter().map(|limit| limit.max_hold).collect(),
            rates: config.rates.iter().map(|rate| Arc::clone(&rate.name)).collect(),
            classes: config.classes.order.clone(),
            instance,
            store,
            when_down: match config.store.when_down {
                WhenDown::Closed => "closed",
                WhenDown::LocalShare => "local-share",
                WhenDown::Open => "open",
            },
            limits,
            most_slots: config.limits.iter().map(most).collect(),
            admission,
            metrics,
            upstreams,
            registry,
            draining,
            guard,
            log,
        })
    }

    async fn answer(&self, request: Request<Incoming>, seat: &Seat) -> Answer {
        if let Err((status, why)) = self.guard.check_host(request.headers()) {
            return denied(status, why);
        }
        let path = request.uri().path();
        if let Some(below) = path.strip_prefix("/limits/") {
            let (name, below) = match below.split_once('/') {
                Some((name, below)) => (name.to_owned(), Some(below.to_owned())),
                None => (below.to_owned(), None),
            };
            let Some(index) = self.limits.iter().position(|limit| **limit == *name) else {
                let names = self.limits.join(", ");
                let why = format!("no limit of this name; there is {names}\n");
                return answer(StatusCode::NOT_FOUND, TEXT, why);
            };
            return match below.as_deref() {
                None => self.limit(index, request).await,
                Some("holders") => self.holders(index, &request).await,
                Some(below) => match below.strip_prefix("holders/").filter(|id| !id.is_empty()) {
                    Some(id) => self.holder(index, id, &request).await,
                    None => not_found(),
                },
            };
        }
        if path == "/log" {
            return self.log(request).await;
        }
        if !PATHS.contains(&path) {
            return not_found();
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return not_allowed("GET, HEAD");
        }
        match path {
            "/" => page::page(),
            "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/status" => json_answer(StatusCode::OK, &self.status().await),
            "/events" => seat.take(request.method() == Method::HEAD, self.status().await),
            _ => self.metrics(),
        }
    }

    async fn limit(&self, index: usize, request: Request<Incoming>) -> Answer {
        let status = match *request.method() {
            Method::GET | Method::HEAD => self.admission.status(index).await,
            Method::PATCH => match self.wanted_slots(index, request).await {
                Ok(slots) => match self.admission.set_slots(index, slots).await {
                    Ok(status) => {
                        let limit = &*self.limits[index];
                        match slots {
                            Some(slots) => {
                                tracing::info!(limit, slots, "an operator set the slots of a limit")
                            }
                            None => tracing::info!(
                                limit,
                                "an operator gave a limit its configured slots back"
                            ),
                        }
                        Ok(status)
                    }
                    Err(error) => {
                        return answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n"));
                    }
                },
                Err((status, why)) => return denied(status, why),
            },
            _ => return not_allowed("GET, HEAD, PATCH"),
        };
        json_answer(StatusCode::OK, &self.limit_status(&self.known(), index, status))
    }

    /// The slots that a permitted write asks for; none for what the configuration says.
    async fn wanted_slots(
        &self,
        limit: usize,
        request: Request<Incoming>,
    ) -> Result<Option<u32>, Denied> {
        self.guard.check(request.headers())?;
        let body = Limited::new(request.into_body(), LONGEST_BODY).collect();
        let body = tokio::time::timeout(BODY_TIMEOUT, body).await;
        let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
        let patch: Option<Patch> = body.and_then(|body| serde_json::from_slice(&body).ok());
        let slots = match patch.map(|patch| patch.slots) {
            Some(Value::Null) => return Ok(None),
            slots => slots.as_ref().and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok()),
        };
        let why =
            "the body must be {\"slots\": N} with N from 0 to 1000000, or {\"slots\": null}\n";
        let slots = slots.filter(|&slots| slots <= MOST_SLOTS);
        match slots {
            Some(slots) if slots > self.most_slots[limit] => Err((
                StatusCode::BAD_REQUEST,
                "a limit with a fence_header has one slot, or none: one number can't tell several holders apart\n",
            )),
            slots => slots.map(Some).ok_or((StatusCode::BAD_REQUEST, why)),
        }
    }

    /// Ready once start-up recovery is over, and while the store or what stands in for it can serve; saturation never makes
    /// an instance unready.
    fn ready(&self) -> Answer {
        let outlook = self.admission.outlook();
        if *self.draining.borrow() {
            text(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
        } else if !outlook.up && !outlook.has_fallback {
            text(StatusCode::SERVICE_UNAVAILABLE, "store_down\n")
        } else if outlook.up && !outlook.started {
            text(StatusCode::SERVICE_UNAVAILABLE, "recovering\n")
        } else {
            text(StatusCode::OK, "ok\n")
        }
    }

    fn metrics(&self) -> Answer {
        for (index, upstream) in self.upstreams.iter().enumerate() {
            endpoints::measure(self.metrics.endpoints(index), &upstream.state());
        }
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        answer(StatusCode::OK, kind, self.metrics.render(|| self.admission.outlook()))
    }
}

fn json_answer(status: StatusCode, value: &Value) -> Answer {
    answer(status, "application/json", format!("{value:#}\n"))
}

/// What there is beside `/limits/`.
const PATHS: [&str; 6] = ["/", "/livez", "/readyz", "/status", "/events", "/metrics"];

fn not_found() -> Answer {
    let why = "not found; there are / /livez /readyz /status /events /metrics /limits/<name> \
               /limits/<name>/holders /limits/<name>/holders/<id> /log\n";
    text(StatusCode::NOT_FOUND, why)
}

const TEXT: &str = "text/plain; charset=utf-8";

fn text(status: StatusCode, body: &'static str) -> Answer {
    answer(status, TEXT, body.to_owned())
}

fn not_allowed(methods: &'static str) -> Answer {
    let mut answer = answer(StatusCode::METHOD_NOT_ALLOWED, TEXT, format!("only {methods}\n"));
    answer.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(methods));
    answer
}

fn denied(status: StatusCode, why: &'static str) -> Answer {
    let mut answer = text(status, why);
    if status == StatusCode::UNAUTHORIZED {
        let bearer = header::HeaderValue::from_static("Bearer");
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    answer
}

fn answer(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut response = Response::new(Either::Left(Full::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    response
}
