//! The listener for operators: is it alive, is it ready, what is full, and the metrics.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Map, Value, json};
use tokio::{net::TcpListener, sync::watch};
use uuid::Uuid;

use crate::{
    admission::Admission,
    config::{Config, StoreKind},
    leases::Outlook,
    metrics::Metrics,
    store::{SetState, SetStatus, StoreError},
};

/// What the operators' listener answers from.
#[derive(Debug)]
pub struct Admin {
    instance: Uuid,
    store: &'static str,
    limits: Vec<Arc<str>>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    draining: watch::Receiver<bool>,
}

type Answer = Response<Full<Bytes>>;

/// Serves until the process ends: operators look on while an instance drains.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            continue;
        };
        let admin = Arc::clone(&admin);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let admin = Arc::clone(&admin);
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
    pub fn new(
        config: &Config,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        draining: watch::Receiver<bool>,
    ) -> Arc<Self> {
        let store = match config.store.kind {
            StoreKind::Memory => "memory",
            StoreKind::Redis(_) => "redis",
        };
        let limits = config.limits.iter().map(|limit| Arc::clone(&limit.name)).collect();
        let instance = admission.instance();
        Arc::new(Self { instance, store, limits, admission, metrics, draining })
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let known = ["/livez", "/readyz", "/status", "/metrics"];
        let path = request.uri().path();
        if !known.contains(&path) {
            return text(
                StatusCode::NOT_FOUND,
                "not found; there are /livez /readyz /status /metrics\n",
            );
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
        }
        match path {
            "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/status" => json_answer(&self.status().await),
            _ => self.metrics(),
        }
    }

    /// Ready once start-up recovery is over; saturation never makes an instance unready.
    fn ready(&self) -> Answer {
        let outlook = self.admission.outlook();
        if *self.draining.borrow() {
            text(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
        } else if !outlook.up {
            text(StatusCode::SERVICE_UNAVAILABLE, "store_down\n")
        } else if !outlook.started {
            text(StatusCode::SERVICE_UNAVAILABLE, "recovering\n")
        } else {
            text(StatusCode::OK, "ok\n")
        }
    }

    fn metrics(&self) -> Answer {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        answer(StatusCode::OK, kind, self.metrics.render(&self.admission.outlook()))
    }

    async fn status(&self) -> Value {
        let outlook = self.admission.outlook();
        let mut limits = Map::new();
        for (index, name) in self.limits.iter().enumerate() {
            let status = self.admission.status(index).await;
            let status = limit_status(&outlook, index, self.instance, status);
            limits.insert(name.to_string(), status);
        }
        json!({
            "instance": self.instance.to_string(),
            "store": { "kind": self.store, "up": outlook.up },
            "recovery": outlook.recovering,
            "draining": *self.draining.borrow(),
            "limits": limits,
        })
    }
}

/// One limit: exact where the store answers, else as of the last heartbeat.
fn limit_status(
    outlook: &Outlook,
    index: usize,
    instance: Uuid,
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
    let oldest = status.waiting.iter().map(|(_, oldest)| *oldest).max();
    let queue_seconds = hold.map(|hold| f64::from(waiting) * hold / f64::from(status.slots.max(1)));
    json!({
        "slots": status.slots,
        "in_use": status.used,
        "local": local,
        "waiting": { "normal": waiting },
        "oldest_wait_ms": oldest.unwrap_or(0),
        "queue_seconds": queue_seconds,
        "hold_ms": hold.map(|hold| hold * 1000.0),
        "holders_by_instance": status.by_instance.iter().map(|(instance, slots)| (instance.to_string(), json!(slots))).collect::<Map<_, _>>(),
    })
}

fn json_answer(value: &Value) -> Answer {
    answer(StatusCode::OK, "application/json", format!("{value:#}\n"))
}

fn text(status: StatusCode, body: &'static str) -> Answer {
    answer(status, "text/plain; charset=utf-8", body.to_owned())
}

fn answer(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
