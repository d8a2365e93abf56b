//! Refusals to gRPC clients: status 200, and the real one in `grpc-status`.

use http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};

use crate::reason::Reason;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// Whether a request speaks gRPC.
pub(crate) fn is_spoken(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let rest = kind.strip_prefix(b"application/grpc");
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Makes a refusal one that a gRPC client understands.
pub(super) fn speak(
    reason: Reason,
    detail: &'static str,
    wait_ms: Option<u64>,
    head: &mut HeaderMap,
) {
    head.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head.insert(GRPC_STATUS, HeaderValue::from_static(code(reason)));
    head.insert(GRPC_MESSAGE, HeaderValue::from_static(detail));
    if let Some(ms) = wait_ms {
        head.insert(PUSHBACK, ms.into());
    }
}

fn code(reason: Reason) -> &'static str {
    match reason {
        Reason::QueueFull
        | Reason::Displaced
        | Reason::Deadline
        | Reason::RateLimited
        | Reason::QueueTimeout
        | Reason::ProcessFull
        | Reason::TooHeavy => "8",
        Reason::Recovering
        | Reason::StoreDown
        | Reason::Draining
        | Reason::UpstreamConnect
        | Reason::UpstreamTimeout
        | Reason::UpstreamReset
        | Reason::MaxHold
        | Reason::LeaseLost => "14",
        Reason::NoRoute | Reason::MethodNotAllowed => "12",
        Reason::BadRequest | Reason::HeadTooLarge => "3",
        Reason::ClientTimeout => "4",
        // Not 14: such a client would ask again by itself.
        Reason::Evicted => "10",
        Reason::Internal => "13",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_grpc_is_taken_for_grpc() {
        let spoken = |kind| {
            is_spoken(&HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]))
        };
        assert!(spoken("application/grpc") && spoken("application/grpc+proto"));
        assert!(spoken("application/grpc;charset=utf-8"));
        assert!(!spoken("application/grpc-web") && !spoken("application/json"));
        assert!(!is_spoken(&HeaderMap::new()));
    }
}
