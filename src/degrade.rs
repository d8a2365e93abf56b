//! What a route does when a limit is full: the steps of its ladder, in order, before a request is refused.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header::AGE};

use crate::{
    body::ResponseBody,
    config::{Config, Step},
    copies::Found,
    headers::{self, TIDEGATE_DEGRADED},
    reason::Reason,
    reply,
    request_id::X_REQUEST_ID,
    told::Told,
};

const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// A step, ready to be taken.
#[derive(Debug)]
pub(crate) enum Rung {
    /// Another upstream, by index, under its own limits.
    Upstream { upstream: usize, forward_credentials: bool, mark: HeaderValue, told: Told },
    /// A copy of an earlier answer that was fresh no longer ago than this.
    Stale { allowance: Duration },
    /// A fixed answer.
    Respond { status: StatusCode, body: Bytes, content_type: HeaderValue },
}

impl Rung {
    pub(crate) fn of(config: &Config, step: &Step) -> Self {
        match step {
            Step::Upstream { upstream, forward_credentials } => {
                let mark = format!("upstream:{}", config.upstreams[*upstream].name);
                let mark = HeaderValue::try_from(mark).expect("names are letters and digits");
                Self::Upstream {
                    upstream: *upstream,
                    forward_credentials: *forward_credentials,
                    mark,
                    told: Told::of(config, &config.upstreams[*upstream].limits),
                }
            }
            Step::Stale { allowance } => Self::Stale { allowance: *allowance },
            Step::Respond { status, body, content_type } => Self::Respond {
                status: *status,
                body: Bytes::from(body.clone()),
                content_type: content_type.clone(),
            },
        }
    }

    /// The label in metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Upstream { .. } => "upstream",
            Self::Stale { .. } => "stale",
            Self::Respond { .. } => "respond",
        }
    }
}

/// They stay here when a request goes to another upstream.
pub(crate) fn remove_credentials(fields: &mut HeaderMap) {
    for name in headers::CREDENTIALS {
        fields.remove(name);
    }
}

/// Says honestly that this isn't the answer that the route usually gives.
pub(crate) fn mark(response: &mut Response<ResponseBody>, mark: HeaderValue) {
    response.headers_mut().insert(TIDEGATE_DEGRADED, mark);
}

/// The copy, with its age, and as a cache says what it did (RFC 9211).
pub(crate) fn stale(reason: Reason, method: &Method, copy: Found) -> Response<ResponseBody> {
    let body = if method == Method::HEAD { Bytes::new() } else { copy.body };
    let mut headers = copy.headers;
    // That of the request which the upstream answered.
    headers.remove(X_REQUEST_ID);
    let mut response = reply::copied(reason, copy.status, headers, body);
    let status = format!("tidegate; hit; ttl={}; detail={}", copy.ttl, reason.as_str());
    let status = HeaderValue::try_from(status).expect("words and a number");
    response.headers_mut().insert(AGE, copy.age.as_secs().into());
    response.headers_mut().append(CACHE_STATUS, status);
    mark(&mut response, HeaderValue::from_static("stale"));
    response
}

/// The fixed answer.
pub(crate) fn respond(
    reason: Reason,
    status: StatusCode,
    body: Bytes,
    content_type: HeaderValue,
) -> Response<ResponseBody> {
    let mut response = reply::fixed(reason, status, body, content_type);
    mark(&mut response, HeaderValue::from_static("respond"));
    response
}
