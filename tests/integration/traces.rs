//! Spans of requests: in one trace with what callers and upstreams say, and never in anybody's way.

use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use serde_json::Value;

use crate::harness::{
    Answer, Client, Collector, Conf, Proxy, Raw, Upstream, attribute, eventually, one_limit,
    unused_addr,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const TRUSTED: &str = "trusted_proxies = [\"127.0.0.1/32\"]";

fn traced(conf: Conf, collector: &str, lines: &str) -> Conf {
    conf.route(format!(
        "rates = [\"many\"]\n[rates.many]\nrequests = 1000\nwindow = \"1m\"\n\
         [traces]\nendpoint = \"{collector}\"\n{lines}\n"
    ))
}

async fn ask(proxy: &Proxy, path: &str, sampled: &str) -> Answer {
    let parent = format!("00-{TRACE}-{CALLER}-{sampled}");
    let fields = [("traceparent", &*parent), ("tracestate", "vendor=1")];
    Client::new().get_with(proxy.addr(), path, &fields).await
}

/// The values of a field, as the upstream got them and told again.
fn told(answer: &Answer, name: &str) -> Vec<String> {
    let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
    let value = |line: &String| {
        let (field, value) = line.split_once(':')?;
        field.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    };
    lines.iter().filter_map(value).collect()
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} in {spans:?}"))
}

#[tokio::test]
async fn a_request_is_one_part_of_its_callers_trace() {
    let (upstream, collector) = (Upstream::spawn().await, Collector::spawn().await);
    let headers = "service = \"gate\"\nheaders = { x-token = \"s3cret\" }\nsample = 0.0";
    let conf = traced(one_limit(&upstream, 1).server(TRUSTED), collector.url(), headers);
    let proxy = Proxy::spawn(&conf).await;
    let answer = ask(&proxy, "/headers?key=s3cret-query", "01").await;
    let spans = collector.wait_spans(4).await;
    assert_eq!(spans.len(), 4);
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
    let request = named(&spans, "request");
    assert_eq!(
        (hex(&request.parent_span_id).as_str(), request.kind),
        (CALLER, SpanKind::Server as i32)
    );
    for part in ["rate", "wait", "upstream"] {
        let part = named(&spans, part);
        assert_eq!(part.parent_span_id, request.span_id);
        assert!(part.start_time_unix_nano >= request.start_time_unix_nano);
        assert!(part.end_time_unix_nano <= request.end_time_unix_nano);
    }
    let call = named(&spans, "upstream");
    assert_eq!(call.kind, SpanKind::Client as i32);
    let parent = format!("00-{TRACE}-{}-01", hex(&call.span_id));
    assert_eq!(told(&answer, "traceparent"), [parent]);
    assert_eq!(told(&answer, "tracestate"), ["vendor=1"]);
    let said = |key| attribute(request, key);
    assert_eq!(
        (said("url.path").as_str(), said("http.response.status_code").as_str()),
        ("/headers", "200")
    );
    assert_eq!((said("http.route").as_str(), said("tidegate.class").as_str()), ("/", "normal"));
    assert_eq!(said("tidegate.request_id"), answer.header("x-request-id"));
    let (head, body) = &collector.calls()[0];
    assert_eq!(head["x-token"], "s3cret");
    let body = String::from_utf8_lossy(body);
    assert!(body.contains("service.name") && body.contains("gate") && !body.contains("s3cret"));
}

#[tokio::test]
async fn a_trusted_caller_decides_and_no_other() {
    let (upstream, collector) = (Upstream::spawn().await, Collector::spawn().await);
    let spawn = async |server: &'static str, sample: &str| {
        let conf = traced(one_limit(&upstream, 1).server(server), collector.url(), sample);
        Proxy::spawn(&conf).await
    };
    let passed = |sampled: &str| [format!("00-{TRACE}-{CALLER}-{sampled}")];
    let trusting = spawn(TRUSTED, "sample = 1.0").await;
    assert_eq!(told(&ask(&trusting, "/headers", "00").await, "traceparent"), passed("00"));
    let strict = spawn("", "sample = 0.0").await;
    assert_eq!(told(&ask(&strict, "/headers", "01").await, "traceparent"), passed("00"));
    // A trace of its own, which the upstream isn't to record either.
    let answer = Client::new().get(strict.addr(), "/headers").await;
    let alone = told(&answer, "traceparent");
    assert!(alone.len() == 1 && alone[0].ends_with("-00"), "{alone:?}");
    let drawn = spawn("", "").await;
    let alone = told(&ask(&drawn, "/headers", "00").await, "traceparent");
    assert!(
        alone[0].starts_with(&format!("00-{TRACE}-")) && alone[0].ends_with("-01"),
        "{alone:?}"
    );
    collector.wait_spans(4).await;
    assert_eq!(collector.spans().len(), 4, "only the last one was to be traced");
}

#[tokio::test]
async fn without_a_collector_the_context_passes_untouched() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    for parent in ["00-not-one-at-all", &format!("00-{TRACE}-{CALLER}-01")] {
        let fields = [("traceparent", parent), ("tracestate", "vendor=1")];
        let answer = Client::new().get_with(proxy.addr(), "/headers", &fields).await;
        assert_eq!(told(&answer, "traceparent"), [parent]);
        assert_eq!(told(&answer, "tracestate"), ["vendor=1"]);
    }
}

#[tokio::test]
async fn refusals_and_failures_are_errors_in_the_part_that_failed() {
    let (upstream, collector) = (Upstream::spawn().await, Collector::spawn().await);
    let conf = traced(one_limit(&upstream, 1).queue("0"), collector.url(), "");
    let proxy = Proxy::spawn(&conf).await;
    let holder = Raw::get(proxy.addr(), "/gate").await;
    upstream.wait_current(1).await;
    assert_eq!(Client::new().get(proxy.addr(), "/echo").await.status, 503);
    let spans = collector.wait_spans(3).await;
    let is_error = |span: &Span| {
        let status = span.status.as_ref();
        status.is_some_and(|status| status.code == StatusCode::Error as i32)
    };
    for (name, error) in [("request", true), ("wait", true), ("rate", false)] {
        assert_eq!(is_error(named(&spans, name)), error, "{name}");
    }
    assert_eq!(attribute(named(&spans, "request"), "tidegate.reason"), "queue_full");
    upstream.open(1);
    drop(holder);
    // Another four for the one that held the slot.
    collector.wait_spans(7).await;
    let in_use = async || proxy.limit("llm").await["in_use"].clone();
    eventually("the slot is back", async || in_use().await == 0).await;
    assert_eq!(Client::new().get(proxy.addr(), "/reset").await.status, 502);
    let spans = collector.wait_spans(11).await;
    let call = &spans[10];
    assert_eq!((&*call.name, is_error(call)), ("upstream", true));
}

#[tokio::test]
async fn a_collector_that_is_away_or_slow_slows_nobody() {
    let (upstream, silent) = (Upstream::spawn().await, Collector::silent().await);
    for collector in [silent.url().to_owned(), format!("http://{}", unused_addr())] {
        let conf = one_limit(&upstream, 1).route(format!("[traces]\nendpoint = \"{collector}\""));
        let proxy = Proxy::spawn(&conf).await;
        let client = Client::new();
        let mut asked = 0;
        eventually("spans are lost", async || {
            for _ in 0..500 {
                // Waits for nothing but its answer.
                assert_eq!(client.get(proxy.addr(), "/echo").await.status, 200);
            }
            asked += 500;
            proxy.metric("tidegate_spans_lost_total").await > 0.0
        })
        .await;
        let told = proxy.log().matches("the collector takes no spans").count();
        assert!(told <= 1, "told {told} times of one failure, after {asked} requests");
    }
}

#[tokio::test]
async fn what_ended_before_the_process_is_sent() {
    let (upstream, collector) = (Upstream::spawn().await, Collector::spawn().await);
    let mut proxy = Proxy::spawn(&traced(one_limit(&upstream, 1), collector.url(), "")).await;
    assert_eq!(Client::new().get(proxy.addr(), "/echo").await.status, 200);
    proxy.sigterm();
    assert!(proxy.wait_exit().await.success());
    assert_eq!(collector.spans().len(), 4);
}

#[tokio::test]
async fn tracing_begins_and_ends_with_the_configuration() {
    let (upstream, collector) = (Upstream::spawn().await, Collector::spawn().await);
    let plain = one_limit(&upstream, 1);
    let proxy = Proxy::spawn(&plain).await;
    let with = proxy.text(&traced(plain.clone(), collector.url(), ""));
    proxy.reconfigure(&with).await;
    assert_eq!(Client::new().get(proxy.addr(), "/echo").await.status, 200);
    collector.wait_spans(4).await;
    proxy.reconfigure(&proxy.text(&plain)).await;
    assert_eq!(ask(&proxy, "/headers", "01").await.status, 200);
    let value: Value = proxy.status().await;
    assert!(value["last_reload"].is_object(), "{value}");
    assert_eq!(collector.spans().len(), 4);
}
