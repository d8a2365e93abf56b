//! Every answer that Tidegate makes itself.

use std::time::Duration;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE, RETRY_AFTER},
};

use crate::{
    admission::Refusal,
    body::ResponseBody,
    config::Dialect,
    headers,
    reason::Reason,
    request_id::{RequestId, X_REQUEST_ID},
    server::Refused,
};

mod grpc;

pub(crate) use grpc::is_spoken as is_grpc;

const TIDEGATE_REASON: HeaderName = HeaderName::from_static("tidegate-reason");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// What is said where no wait was measured.
const UNMEASURED_WAIT: Duration = Duration::from_secs(2);
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// An answer in the making.
#[derive(Debug)]
pub(crate) struct Reply {
    reason: Reason,
    status: Option<StatusCode>,
    dialect: Dialect,
    expected_wait: Option<Duration>,
    allow: Option<HeaderValue>,
    upstream: Option<Duration>,
    is_grpc: bool,
    request: Option<RequestId>,
}

/// What a client should do next.
enum Advice {
    /// Come back, but not all at once.
    Later,
    /// Come back when exactly: each key has a time of its own, so there is no crowd.
    At,
    /// The same request will fail the same way.
    Never,
    /// It depends on the upstream.
    Unsaid,
}

impl Reply {
    pub(crate) fn method_not_allowed(allow: HeaderValue) -> Self {
        Self { allow: Some(allow), ..Reason::MethodNotAllowed.into() }
    }

    /// To a head that can't be read.
    pub(crate) fn unreadable(status: StatusCode) -> Self {
        let reason = match status {
            StatusCode::BAD_REQUEST => Reason::BadRequest,
            _ => Reason::HeadTooLarge,
        };
        Self { status: Some(status), ..reason.into() }
    }

    /// What is answered.
    pub(crate) fn reason(&self) -> Reason {
        self.reason
    }

    /// In which form.
    pub(crate) fn spoken(mut self, dialect: Dialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// As gRPC, whatever the dialect, if that is what the client speaks.
    pub(crate) fn grpc(mut self, is_grpc: bool) -> Self {
        self.is_grpc = is_grpc;
        self
    }

    /// To which request.
    pub(crate) fn to(mut self, request: RequestId) -> Self {
        self.request = Some(request);
        self
    }

    /// How long the upstream was tried.
    pub(crate) fn after(mut self, upstream: Duration) -> Self {
        self.upstream = Some(upstream);
        self
    }

    /// The answer, without its body for `HEAD`.
    pub(crate) fn respond(self, is_head: bool, queue: Duration) -> Response<ResponseBody> {
        let mut response = self.compose(queue).map(|body| {
            let body = if is_head { Bytes::new() } else { body };
            ResponseBody::whole(body)
        });
        response.extensions_mut().insert(Refused);
        response
    }

    /// The answer with its body.
    pub(crate) fn compose(self, queue: Duration) -> Response<Bytes> {
        let (usual, detail) = self.reason.answer();
        let status = self.status.unwrap_or(usual);
        let request = self.request.as_ref().map(RequestId::as_str);
        let (content_type, body) = speak(self.dialect, self.reason, status, detail, request);
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let head = response.headers_mut();
        head.insert(TIDEGATE_REASON, HeaderValue::from_static(self.reason.as_str()));
        head.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(request) = &self.request {
            head.insert(X_REQUEST_ID, request.value());
        }
        let wait_ms = match advice(self.reason) {
            Advice::Later => Some(draw(self.expected_wait)),
            Advice::At => Some(self.expected_wait.map_or(1_000, whole_ms).max(1)),
            Advice::Never => {
                head.insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
                None
            }
            Advice::Unsaid => None,
        };
        if let Some(ms) = wait_ms {
            head.insert(RETRY_AFTER_MS, ms.into());
            head.insert(RETRY_AFTER, ms.div_ceil(1000).into());
        }
        if let Some(allow) = self.allow {
            head.insert(ALLOW, allow);
        }
        headers::add_timing(head, queue, self.upstream);
        if self.is_grpc {
            grpc::speak(self.reason, detail, wait_ms, head);
            *response.status_mut() = StatusCode::OK;
            *response.body_mut() = Bytes::new();
        }
        response
    }
}

impl From<Reason> for Reply {
    fn from(reason: Reason) -> Self {
        Self {
            reason,
            status: None,
            dialect: Dialect::Problem,
            expected_wait: None,
            allow: None,
            upstream: None,
            is_grpc: false,
            request: None,
        }
    }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        Self {
            expected_wait: refusal.expected_wait,
            status: refusal.status,
            ..refusal.reason.into()
        }
    }
}

/// The answer to `OPTIONS *`, which asks what the proxy itself can do.
pub(crate) fn options() -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::whole(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.extensions_mut().insert(Refused);
    headers::add_timing(response.headers_mut(), Duration::ZERO, None);
    response
}

/// An answer that the operator wrote, given for this reason.
pub(crate) fn fixed(
    reason: Reason,
    status: StatusCode,
    body: Bytes,
    content_type: HeaderValue,
) -> Response<ResponseBody> {
    copied(reason, status, HeaderMap::from_iter([(CONTENT_TYPE, content_type)]), body)
}

/// An answer that the upstream gave earlier, given again for this reason.
pub(crate) fn copied(
    reason: Reason,
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::whole(body));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response.extensions_mut().insert(Refused);
    let reason = HeaderValue::from_static(reason.as_str());
    response.headers_mut().insert(TIDEGATE_REASON, reason);
    response
}

fn advice(reason: Reason) -> Advice {
    match reason {
        Reason::RateLimited => Advice::At,
        Reason::QueueFull
        | Reason::Displaced
        | Reason::Deadline
        | Reason::QueueTimeout
        | Reason::Recovering
        | Reason::StoreDown
        | Reason::ProcessFull
        | Reason::Draining => Advice::Later,
        Reason::TooHeavy
        | Reason::NoRoute
        | Reason::MethodNotAllowed
        | Reason::BadRequest
        | Reason::HeadTooLarge
        | Reason::ClientTimeout
        | Reason::Evicted => Advice::Never,
        Reason::UpstreamConnect
        | Reason::UpstreamTimeout
        | Reason::UpstreamReset
        | Reason::MaxHold
        | Reason::LeaseLost
        | Reason::Internal => Advice::Unsaid,
    }
}

/// A wait in milliseconds, drawn for each answer: a crowd sent away together must not come back together.
fn draw(expected: Option<Duration>) -> u64 {
    let base = expected.unwrap_or(UNMEASURED_WAIT).clamp(SHORTEST_WAIT, LONGEST_WAIT);
    let base_ms = whole_ms(base);
    fastrand::u64(base_ms..=base_ms * 3 / 2)
}

fn whole_ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)
}

/// The body in a dialect, and its type.
fn speak(
    dialect: Dialect,
    reason: Reason,
    status: StatusCode,
    detail: &str,
    request: Option<&str>,
) -> (&'static str, Bytes) {
    let word = reason.as_str();
    let request = request.map(|id| format!(r#","request_id":"{id}""#)).unwrap_or_default();
    match dialect {
        Dialect::Problem => ("application/problem+json", problem(reason, status, detail, &request)),
        Dialect::OpenAi => {
            let kind = match status.as_u16() {
                429 => "rate_limit_error",
                500.. => "service_unavailable_error",
                _ => "invalid_request_error",
            };
            let text = format!(
                r#"{{"error":{{"message":"{detail}","type":"{kind}","param":null,"code":"{word}"}}}}"#
            );
            ("application/json", Bytes::from(text))
        }
        Dialect::Anthropic => {
            let kind = match status.as_u16() {
                429 => "rate_limit_error",
                404 => "not_found_error",
                413 => "request_too_large",
                400..500 => "invalid_request_error",
                503 | 529 => "overloaded_error",
                _ => "api_error",
            };
            let text = format!(
                r#"{{"type":"error","error":{{"type":"{kind}","message":"{detail} ({word})"}}{request}}}"#
            );
            ("application/json", Bytes::from(text))
        }
        Dialect::Text => ("text/plain; charset=utf-8", Bytes::from(format!("{word}: {detail}\n"))),
    }
}

/// RFC 9457. None of the texts needs escaping.
fn problem(reason: Reason, status: StatusCode, detail: &str, request: &str) -> Bytes {
    let title = status.canonical_reason().unwrap_or_default();
    let word = reason.as_str();
    let status = status.as_u16();
    Bytes::from(format!(
        r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}","reason":"{word}"{request}}}"#
    ))
}

#[cfg(test)]
mod tests {
    use http_body::Body;

    use super::*;

    fn number(response: &Response<ResponseBody>, name: &str) -> u64 {
        response.headers()[name].to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn every_reason_makes_a_valid_problem() {
        for reason in Reason::ALL {
            let (status, detail) = reason.answer();
            let body: serde_json::Value =
                serde_json::from_slice(&problem(reason, status, detail, "")).unwrap();
            assert_eq!(body["type"], "about:blank");
            assert_eq!(body["status"], status.as_u16());
            assert_eq!(body["detail"], detail);
            assert_eq!(body["reason"], reason.as_str());
            let response = Reply::from(reason).respond(false, Duration::ZERO);
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["tidegate-reason"], reason.as_str());
            assert!(response.extensions().get::<Refused>().is_some());
            let never = response.headers().get("x-should-retry").is_some();
            let comes_back = reason == Reason::RateLimited;
            // Who was sent away by an operator would only take the slot again.
            let is_unwelcome = status.is_client_error() || reason == Reason::Evicted;
            assert_eq!(never, is_unwelcome && !comes_back, "{reason:?}");
            assert!(!never || !response.headers().contains_key("retry-after"));
        }
    }

    #[test]
    fn every_dialect_is_well_formed() {
        for reason in Reason::ALL {
            let (status, detail) = reason.answer();
            for dialect in [Dialect::OpenAi, Dialect::Anthropic] {
                let (kind, body) = speak(dialect, reason, status, detail, Some("an-id"));
                assert_eq!(kind, "application/json");
                let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                assert!(body["error"]["message"].as_str().unwrap().contains(detail));
                assert!(body["error"]["type"].is_string());
                let id = (dialect == Dialect::Anthropic).then_some("an-id");
                assert_eq!(body["request_id"].as_str(), id);
            }
            let (_, text) = speak(Dialect::Text, reason, status, detail, Some("an-id"));
            assert_eq!(text, format!("{}: {detail}\n", reason.as_str()));
        }
    }

    #[test]
    fn a_rate_says_exactly_when_to_come_back() {
        let mut reply = Reply::from(Reason::RateLimited);
        reply.expected_wait = Some(Duration::from_millis(2_345));
        let response = reply.respond(false, Duration::ZERO);
        assert_eq!(
            (number(&response, "retry-after-ms"), number(&response, "retry-after")),
            (2_345, 3)
        );
    }

    #[test]
    fn retry_after_is_drawn_around_the_expected_wait() {
        for (expected, base) in
            [(None, 2_000), (Some(5_000), 5_000), (Some(3), 1_000), (Some(900_000), 20_000)]
        {
            let mut seen = std::collections::HashSet::new();
            for _ in 0..200 {
                let refusal = Refusal {
                    reason: Reason::QueueFull,
                    limit: None,
                    rate: None,
                    class: 0,
                    status: None,
                    expected_wait: expected.map(Duration::from_millis),
                };
                let response = Reply::from(refusal).respond(false, Duration::ZERO);
                let ms = number(&response, "retry-after-ms");
                assert!((base..=base * 3 / 2).contains(&ms), "{ms}");
                assert_eq!(number(&response, "retry-after"), ms.div_ceil(1000));
                seen.insert(ms);
            }
            assert!(seen.len() > 50, "no jitter");
        }
    }

    #[test]
    fn a_crowd_that_obeys_does_not_come_back_as_one() {
        // What the fullest tenth of a second may hold, where an even spread is 10, 20 and 1 %.
        for (expected, most) in [(None, 0.13), (Some(1), 0.25), (Some(20), 0.02)] {
            let mut bins = std::collections::HashMap::<u64, u32>::new();
            for _ in 0..10_000 {
                *bins.entry(draw(expected.map(Duration::from_secs)) / 100).or_default() += 1;
            }
            let fullest = f64::from(bins.into_values().max().unwrap()) / 10_000.0;
            assert!(fullest <= most, "{expected:?}: {fullest} in one tenth of a second");
        }
    }

    #[test]
    fn head_gets_no_body() {
        let response = Reply::from(Reason::NoRoute).respond(true, Duration::ZERO);
        assert!(response.body().is_end_stream());
    }

    #[test]
    fn a_wrong_method_carries_allow() {
        let reply = Reply::method_not_allowed(HeaderValue::from_static("POST"));
        let response = reply.respond(false, Duration::ZERO);
        assert_eq!(response.headers()["allow"], "POST");
    }
}
