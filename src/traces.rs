//! Spans of requests for a collector of OpenTelemetry.
//!
//! A request's spans are made when it has ended, and wait in a bounded queue. One task sends them; where the collector is away or
//! slow they are lost, and counted, and no request knows.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, uri::Scheme};
use hyper_rustls::HttpsConnectorBuilder;
use opentelemetry::KeyValue;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkError,
    trace::{SpanData, SpanExporter as _},
};
use prometheus_client::metrics::counter::Counter;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};
use uuid::Uuid;

use crate::config;

mod context;

pub(crate) use context::{Trace, new_span};

use context::Context;

/// How many requests' spans may wait.
const QUEUE: usize = 2048;
/// How many spans one call may carry.
const BATCH: usize = 512;
/// How long spans wait for others.
const GATHER: Duration = Duration::from_secs(1);
/// How long one call to the collector may take.
const CALL: Duration = Duration::from_secs(5);

/// The way to the collector.
#[derive(Debug)]
pub(crate) struct Traces {
    made_of: config::Traces,
    queue: mpsc::Sender<Order>,
    lost: Counter,
}

#[derive(Debug)]
enum Order {
    Spans(Vec<SpanData>),
    Flush(oneshot::Sender<()>),
}

impl Traces {
    /// Starts the task that sends spans, on the current runtime. None if there can be no exporter.
    pub(crate) fn start(
        config: &config::Traces,
        instance: Uuid,
        lost: Counter,
    ) -> Option<Arc<Self>> {
        let exporter = exporter(config, instance)
            .inspect_err(|error| tracing::error!(%error, "requests can't be traced"))
            .ok()?;
        let (queue, orders) = mpsc::channel(QUEUE);
        tokio::spawn(send_all(orders, exporter, lost.clone()));
        Some(Arc::new(Self { made_of: config.clone(), queue, lost }))
    }

    /// Whether this configuration would make the same of it.
    pub(crate) fn is_of(&self, config: &config::Traces) -> bool {
        self.made_of == *config
    }

    /// Reads the trace that a request belongs to, and leaves in its head what the upstream is told of it. None if it isn't to be
    /// traced: as a trusted caller decided, else as it is drawn.
    pub(crate) fn begin(&self, headers: &mut HeaderMap, trusted: bool) -> Option<Trace> {
        let context = Context::take(headers);
        let decided = context.as_ref().filter(|_| trusted).map(|context| context.sampled);
        let sampled = decided.unwrap_or_else(|| fastrand::f64() < self.made_of.sample);
        let trace = Trace::of(context);
        trace.tell(headers, sampled);
        sampled.then_some(trace)
    }

    /// Hands a request's spans over.
    pub(crate) fn end(&self, spans: Vec<SpanData>) {
        let count = spans.len() as u64;
        if self.queue.try_send(Order::Spans(spans)).is_err() {
            self.lost.inc_by(count);
        }
    }

    /// Waits until what was handed over is sent, but not longer than `patience`.
    pub(crate) async fn flush(&self, patience: Duration) {
        let (done, is_done) = oneshot::channel();
        let flushed = async {
            if self.queue.send(Order::Flush(done)).await.is_ok() {
                let _ = is_done.await;
            }
        };
        let _ = timeout(patience, flushed).await;
    }
}

fn exporter(
    config: &config::Traces,
    instance: Uuid,
) -> Result<SpanExporter, Box<dyn std::error::Error>> {
    let endpoint = format!("{}/v1/traces", config.endpoint.to_string().trim_end_matches('/'));
    let headers = config.headers.iter().filter_map(|(name, value)| {
        Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
    });
    let builder = SpanExporter::builder()
        .with_http()
        .with_endpoint(endpoint)
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(CALL)
        .with_headers(headers.collect());
    let mut exporter = if config.endpoint.scheme() == Some(&Scheme::HTTPS) {
        let connector =
            HttpsConnectorBuilder::new().with_native_roots()?.https_only().enable_http1().build();
        builder.with_http_client(HyperClient::new(connector, CALL, None)).build()?
    } else {
        builder.with_http_client(HyperClient::with_default_connector(CALL, None)).build()?
    };
    let resource = Resource::builder_empty().with_attributes([
        KeyValue::new("service.name", config.service.clone()),
        KeyValue::new("service.instance.id", instance.to_string()),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ]);
    exporter.set_resource(&resource.build());
    Ok(exporter)
}

async fn send_all(mut orders: mpsc::Receiver<Order>, exporter: SpanExporter, lost: Counter) {
    let mut is_well = true;
    loop {
        let (mut batch, mut flushed, mut is_over) = (Vec::new(), None, false);
        match orders.recv().await {
            Some(Order::Spans(spans)) => batch = spans,
            Some(Order::Flush(done)) => flushed = Some(done),
            None => return,
        }
        let end = Instant::now() + GATHER;
        while batch.len() < BATCH && flushed.is_none() && !is_over {
            match timeout_at(end, orders.recv()).await {
                Ok(Some(Order::Spans(spans))) => batch.extend(spans),
                Ok(Some(Order::Flush(done))) => flushed = Some(done),
                Ok(None) | Err(_) => is_over = true,
            }
        }
        let count = batch.len() as u64;
        if count > 0 {
            let sent = exporter.export(batch).await;
            if sent.is_err() {
                lost.inc_by(count);
            }
            tell_of_change(&mut is_well, sent.err());
        }
        // Whoever asks learns that this is done.
        drop(flushed);
    }
}

/// Once for each time it begins and ends, not for each batch.
fn tell_of_change(is_well: &mut bool, error: Option<OTelSdkError>) {
    let was_well = std::mem::replace(is_well, error.is_none());
    match error {
        Some(error) if was_well => tracing::warn!(%error, "the collector takes no spans"),
        None if !was_well => tracing::info!("the collector takes spans again"),
        _ => {}
    }
}
