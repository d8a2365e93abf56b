//! What a route does when a limit is full: the steps of its ladder, in order, before a request is refused.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::{
    body::ResponseBody,
    config::{Config, Step},
    reason::Reason,
    reply,
};

const TIDEGATE_DEGRADED: HeaderName = HeaderName::from_static("tidegate-degraded");

/// What proves who the client is; it stays here when a request goes to another upstream.
const CREDENTIALS: [HeaderName; 5] = [
    header::AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// A step, ready to be taken.
#[derive(Debug)]
pub(crate) enum Rung {
    /// Another upstream, by index, under its own limits.
    Upstream { upstream: usize, forward_credentials: bool, mark: HeaderValue },
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
                }
            }
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
            Self::Respond { .. } => "respond",
        }
    }
}

pub(crate) fn remove_credentials(headers: &mut HeaderMap) {
    for name in CREDENTIALS {
        headers.remove(name);
    }
}

/// Says honestly that this isn't the answer that the route usually gives.
pub(crate) fn mark(response: &mut Response<ResponseBody>, mark: HeaderValue) {
    response.headers_mut().insert(TIDEGATE_DEGRADED, mark);
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
