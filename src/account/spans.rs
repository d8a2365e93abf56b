//! A request's spans: `request`, and in it `rate`, `wait` and `upstream`.

use std::time::SystemTime;

use opentelemetry::{
    InstrumentationScope, KeyValue, SpanId, TraceFlags,
    trace::{SpanContext, SpanKind, Status, TraceState},
};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tokio::time::Instant;

use super::{End, Facts, plain};
use crate::traces::{Trace, new_span};

const LONGEST: usize = 1024;

/// Those of the parts that there were.
pub(super) fn of(facts: &Facts, trace: Trace, now: Instant) -> Vec<SpanData> {
    let at = |instant: Instant| facts.began_at + (instant - facts.began);
    let mut spans = vec![request(facts, trace, at(now))];
    let mut part = |name, id, kind, began, ended, attributes, status| {
        let place = Place { id, parent: Some(trace.request), is_remote: false };
        let mut span = span(trace, place, name, kind, (at(began), at(ended)));
        span.attributes = attributes;
        span.status = status;
        spans.push(span);
    };
    let internal = SpanKind::Internal;
    if let (Some(admission), Some(route)) = (facts.admission(), facts.route()) {
        // The store settles rates and limits in one call, so they begin as one.
        let (began, ended) = (admission.asked, admission.asked + admission.waited);
        let refused = |is_so: bool| match facts.reason.filter(|_| is_so) {
            Some(reason) => Status::error(reason.as_str()),
            None => Status::Unset,
        };
        let is_refused = admission.refused_by.is_some();
        if !route.rates.is_empty() {
            let named = vec![KeyValue::new("tidegate.rates", route.rates.join(","))];
            let status = refused(admission.by_rate);
            part("rate", new_span(), internal.clone(), began, ended, named, status);
        }
        if !route.limits.is_empty() && !admission.by_rate {
            let named = vec![KeyValue::new("tidegate.limits", route.limits.join(","))];
            part("wait", new_span(), internal, began, ended, named, refused(is_refused));
        }
    }
    if let (Some(call), Some(upstream)) = (&facts.upstream, facts.called()) {
        let mut attributes = vec![
            KeyValue::new("tidegate.upstream", upstream.name.to_string()),
            KeyValue::new("tidegate.holder", call.holder.to_string()),
        ];
        let endpoint = facts.endpoint().map(|it| KeyValue::new("server.address", it.to_owned()));
        attributes.extend(endpoint);
        attributes.extend(status_code(facts));
        part(
            "upstream",
            trace.upstream,
            SpanKind::Client,
            call.began,
            now,
            attributes,
            status(facts),
        );
    }
    spans
}

struct Place {
    id: SpanId,
    parent: Option<SpanId>,
    is_remote: bool,
}

fn request(facts: &Facts, trace: Trace, ended: SystemTime) -> SpanData {
    let place = Place { id: trace.request, parent: trace.parent, is_remote: true };
    let mut span = span(trace, place, "request", SpanKind::Server, (facts.began_at, ended));
    let words = [
        ("http.request.method", facts.method(LONGEST)),
        ("server.address", facts.host(LONGEST)),
        ("url.path", facts.path(LONGEST)),
        ("client.address", Some(facts.client.to_canonical().to_string())),
        ("http.route", facts.route().map(|route| route.name.to_string())),
        ("tidegate.request_id", Some(facts.id.as_str().to_owned())),
        ("tidegate.class", facts.class().map(ToOwned::to_owned)),
        ("tidegate.reason", facts.reason.map(|reason| reason.as_str().to_owned())),
        ("tidegate.end", Some(facts.end.as_str().to_owned())),
        ("tidegate.degraded", facts.degraded.as_ref().map(|step| plain(step.as_bytes(), LONGEST))),
        (
            "tidegate.shadow",
            facts.admission().and_then(|admission| admission.shadow).map(|r| r.as_str().to_owned()),
        ),
    ];
    let words = words.into_iter().filter_map(|(key, word)| Some(KeyValue::new(key, word?)));
    let bytes = i64::try_from(facts.bytes).unwrap_or(i64::MAX);
    span.attributes = words.collect();
    span.attributes.push(KeyValue::new("http.response.body.size", bytes));
    span.attributes.extend(status_code(facts));
    span.status = status(facts);
    span
}

fn status_code(facts: &Facts) -> Option<KeyValue> {
    let status = facts.status?.as_u16();
    Some(KeyValue::new("http.response.status_code", i64::from(status)))
}

/// What a client does wrong is no error of ours.
fn status(facts: &Facts) -> Status {
    let is_error =
        facts.end == End::Cut || facts.status.is_some_and(|status| status.is_server_error());
    match (is_error, facts.reason) {
        (false, _) => Status::Unset,
        (true, reason) => Status::error(reason.map_or("", |reason| reason.as_str())),
    }
}

fn span(
    trace: Trace,
    place: Place,
    name: &'static str,
    kind: SpanKind,
    (began, ended): (SystemTime, SystemTime),
) -> SpanData {
    let flags = TraceFlags::SAMPLED;
    SpanData {
        span_context: SpanContext::new(trace.id, place.id, flags, false, TraceState::default()),
        parent_span_id: place.parent.unwrap_or(SpanId::INVALID),
        parent_span_is_remote: place.is_remote && place.parent.is_some(),
        span_kind: kind,
        name: name.into(),
        start_time: began,
        end_time: ended,
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: InstrumentationScope::builder("tidegate").build(),
    }
}
