use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, common::v1::any_value::Value, trace::v1::Span,
};
use prost::Message;
use tokio::{net::TcpListener, task::JoinHandle};

use super::eventually;

/// Takes spans by OTLP over HTTP, and remembers them.
pub(crate) struct Collector {
    url: String,
    calls: Calls,
    acceptor: JoinHandle<()>,
}

type Calls = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

impl Collector {
    pub(crate) async fn spawn() -> Self {
        Self::answering(true).await
    }

    /// One that takes calls, and never answers them.
    pub(crate) async fn silent() -> Self {
        Self::answering(false).await
    }

    async fn answering(answers: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let calls = Calls::default();
        let acceptor = tokio::spawn({
            let calls = Arc::clone(&calls);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let calls = Arc::clone(&calls);
                    let service = service_fn(move |request| {
                        let calls = Arc::clone(&calls);
                        async move { Ok::<_, Infallible>(take(request, &calls, answers).await) }
                    });
                    let io = TokioIo::new(stream);
                    tokio::spawn(http1::Builder::new().serve_connection(io, service));
                }
            }
        });
        Self { url, calls, acceptor }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Everything that was sent to it, as it was sent.
    pub(crate) fn calls(&self) -> Vec<(HeaderMap, Bytes)> {
        self.calls.lock().unwrap().clone()
    }

    /// Attributes of whoever sent spans, and the spans.
    pub(crate) fn requests(&self) -> Vec<ExportTraceServiceRequest> {
        let decode = |(_, body): &(HeaderMap, Bytes)| {
            ExportTraceServiceRequest::decode(body.clone()).expect("spans of OTLP")
        };
        self.calls().iter().map(decode).collect()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let sent = self.requests().into_iter().flat_map(|request| request.resource_spans);
        let scopes = sent.flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    /// Its spans once there are so many.
    pub(crate) async fn wait_spans(&self, count: usize) -> Vec<Span> {
        eventually(&format!("{count} spans"), async || self.spans().len() >= count).await;
        self.spans()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

async fn take(
    request: Request<Incoming>,
    calls: &Mutex<Vec<(HeaderMap, Bytes)>>,
    answers: bool,
) -> Response<Full<Bytes>> {
    assert_eq!(request.uri().path(), "/v1/traces");
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    calls.lock().unwrap().push((head.headers, body));
    if !answers {
        std::future::pending::<()>().await;
    }
    Response::new(Full::default())
}

/// An attribute as text; empty where there is none.
pub(crate) fn attribute(span: &Span, key: &str) -> String {
    let value = span.attributes.iter().find(|attribute| attribute.key == key);
    match value.and_then(|attribute| attribute.value.as_ref()?.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => other.map(|value| format!("{value:?}")).unwrap_or_default(),
    }
}
