//! The listener for operators: is it alive, is it ready, what is full, the metrics, and a limit's slots to change.

use std::{convert::Infallible, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::{net::TcpListener, sync::watch};
use uuid::Uuid;

use crate::{
    admission::Admission,
    config::{Config, Limit, MOST_SLOTS, StoreKind, WhenDown},
    leases::Outlook,
    log::Log,
    metrics::Metrics,
    store::{SetState, SetStatus, StoreError},
    upstream::Upstream,
};

mod endpoints;
mod guard;
mod log;
#[cfg(test)]
mod tests;

use guard::{Denied, Guard};

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
    classes: Vec<Arc<str>>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    upstreams: Vec<Arc<Upstream>>,
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

type Answer = Response<Full<Bytes>>;

/// Serves until the process ends: operators look on while an instance drains.
pub async fn serve(listener: TcpListener, admin: Arc<ArcSwap<Admin>>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let admin = Arc::clone(&admin);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let admin = admin.load_full();
                async move { Ok::<_, Infallible>(admin.answer(request).await) }
            });
            let io = TokioIo::new(stream);
            let _ =
                http1::Builder::new().timer(TokioTimer::new()).serve_connection(io, service).await;
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
            draining,
            guard,
            log,
        })
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let known = ["/livez", "/readyz", "/status", "/metrics"];
        let path = request.uri().path();
        if let Some(name) = path.strip_prefix("/limits/") {
            let Some(index) = self.limits.iter().position(|limit| &**limit == name) else {
                let names = self.limits.join(", ");
                let why = format!("no limit of this name; there is {names}\n");
                return answer(StatusCode::NOT_FOUND, TEXT, why);
            };
            return self.limit(index, request).await;
        }
        if path == "/log" {
            return self.log(request).await;
        }
        if !known.contains(&path) {
            return text(
                StatusCode::NOT_FOUND,
                "not found; there are /livez /readyz /status /metrics /limits/<name> /log\n",
            );
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return not_allowed("GET, HEAD");
        }
        match path {
            "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/status" => json_answer(&self.status().await),
            _ => self.metrics(),
        }
    }

    async fn limit(&self, index: usize, request: Request<Incoming>) -> Answer {
        let status = match *request.method() {
            Method::GET | Method::HEAD => self.admission.status(index).await,
            Method::PATCH => match self.wanted_slots(index, request).await {
                Ok(slots) => match self.admission.set_slots(index, slots).await {
                    Ok(status) => Ok(status),
                    Err(error) => {
                        return answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n"));
                    }
                },
                Err((status, why)) => return denied(status, why),
            },
            _ => return not_allowed("GET, HEAD, PATCH"),
        };
        json_answer(&limit_status(
            &self.admission.outlook(),
            index,
            self.instance,
            &self.classes,
            status,
        ))
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
        answer(StatusCode::OK, kind, self.metrics.render(&self.admission.outlook()))
    }

    async fn status(&self) -> Value {
        let outlook = self.admission.outlook();
        let mut limits = Map::new();
        for (index, name) in self.limits.iter().enumerate() {
            let status = self.admission.status(index).await;
            let status = limit_status(&outlook, index, self.instance, &self.classes, status);
            limits.insert(name.to_string(), status);
        }
        json!({
            "instance": self.instance.to_string(),
            "store": {
                "kind": self.store,
                "up": outlook.up,
                "when_down": self.when_down,
                "away": outlook.away,
            },
            "recovery": outlook.recovering,
            "draining": *self.draining.borrow(),
            "last_reload": self.metrics.reloads().last().map(|(at, worked)| json!({
                "at": humantime::format_rfc3339_seconds(at).to_string(),
                "worked": worked,
            })),
            "limits": limits,
            "upstreams": endpoints::status(&self.upstreams),
        })
    }
}

/// One limit: exact where the store answers, else as of the last heartbeat.
fn limit_status(
    outlook: &Outlook,
    index: usize,
    instance: Uuid,
    classes: &[Arc<str>],
    status: Result<SetStatus, StoreError>,
) -> Value {
    let seen: &SetState = &outlook.sets[index];
    let local = status.as_ref().map_or(outlook.local[index], |status| {
        status.by_instance.get(&instance).copied().unwrap_or(0)
    });
    let hold = outlook.hold[index].map(|hold| hold.as_secs_f64());
    let status = status.unwrap_or_else(|_| SetStatus {
        slots: seen.slots,
        used: seen.used,
        waiting: vec![(seen.waiting, 0)],
        ..SetStatus::default()
    });
    let waiting: u32 = status.waiting.iter().map(|(count, _)| count).sum();
    let by_class: Map<_, _> = classes
        .iter()
        .zip(status.waiting.iter().map(|(count, _)| *count).chain(std::iter::repeat(0)))
        .map(|(class, count)| (class.to_string(), json!(count)))
        .collect();
    let arrival_rate = outlook.arrival_rate[index];
    let oldest = status.waiting.iter().map(|(_, oldest)| *oldest).max();
    let queue_seconds = hold.map(|hold| f64::from(waiting) * hold / f64::from(status.slots.max(1)));
    json!({
        "slots": status.slots,
        "in_use": status.used,
        "local": local,
        "share": outlook.shares[index],
        "waiting": by_class,
        "oldest_wait_ms": oldest.unwrap_or(0),
        "queue_seconds": queue_seconds,
        "arrival_rate": arrival_rate,
        "needed_slots": hold.map(|hold| arrival_rate * hold),
        "hold_ms": hold.map(|hold| hold * 1000.0),
        "holders_by_instance": status.by_instance.iter().map(|(instance, slots)| (instance.to_string(), json!(slots))).collect::<Map<_, _>>(),
    })
}

fn json_answer(value: &Value) -> Answer {
    answer(StatusCode::OK, "application/json", format!("{value:#}\n"))
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
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
