//! W3C Trace Context: `traceparent` in and out. `tracestate` is others', and passes as it came.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{SpanId, TraceId};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// What a caller said of the trace.
#[derive(Debug, PartialEq)]
pub(super) struct Context {
    trace: TraceId,
    parent: SpanId,
    pub(super) sampled: bool,
}

/// The place of a request in a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trace {
    /// All of it.
    pub(crate) id: TraceId,
    /// The caller's span, if it said so.
    pub(crate) parent: Option<SpanId>,
    /// The request's own span.
    pub(crate) request: SpanId,
    /// The span of the call to the upstream, which is the parent of what that does.
    pub(crate) upstream: SpanId,
}

impl Context {
    /// None if nothing was said, or nothing that can be read; then the rest of what was said goes too.
    pub(super) fn take(headers: &mut HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(TRACEPARENT).iter();
        let context = match (lines.next(), lines.next()) {
            (Some(only), None) => only.to_str().ok().and_then(Self::read),
            _ => None,
        };
        if context.is_none() {
            headers.remove(TRACESTATE);
        }
        context
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut part = |length| parts.next().filter(|part| is_hex(part, length));
        let (version, trace, parent, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // Versions to come may say more behind it.
        if version == "ff" || version == "00" && parts.next().is_some() {
            return None;
        }
        let (trace, parent) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(parent).ok()?);
        let is_valid = trace != TraceId::INVALID && parent != SpanId::INVALID;
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        is_valid.then_some(Self { trace, parent, sampled })
    }
}

impl Trace {
    pub(super) fn of(context: Option<Context>) -> Self {
        let (id, parent) = match context {
            Some(Context { trace, parent, .. }) => (trace, Some(parent)),
            None => (TraceId::from(fastrand::u128(1..)), None),
        };
        Self { id, parent, request: new_span(), upstream: new_span() }
    }

    /// What isn't traced here stays the caller's child.
    pub(super) fn tell(&self, headers: &mut HeaderMap, sampled: bool) {
        let parent = self.parent.filter(|_| !sampled).unwrap_or(self.upstream);
        let text = format!("00-{}-{parent}-0{}", self.id, u8::from(sampled));
        headers.insert(TRACEPARENT, HeaderValue::try_from(text).expect("hexadecimal digits"));
    }
}

pub(crate) fn new_span() -> SpanId {
    SpanId::from(fastrand::u64(1..))
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";

    #[test]
    fn a_caller_that_says_nonsense_is_not_heard() {
        let good = format!("00-{TRACE}-{PARENT}");
        let cases = [
            (format!("{good}-01"), Some(true)),
            (format!("{good}-00"), Some(false)),
            (format!("{good}-03"), Some(true)),
            (format!("cc-{TRACE}-{PARENT}-01-what-comes"), Some(true)),
            (format!("{good}-01-more"), None),
            (format!("ff-{TRACE}-{PARENT}-01"), None),
            (format!("00-{TRACE}-{PARENT}"), None),
            (format!("00-{}-{PARENT}-01", TRACE.to_uppercase()), None),
            (format!("00-{}-{PARENT}-01", "0".repeat(32)), None),
            (format!("00-{TRACE}-{}-01", "0".repeat(16)), None),
            (format!("{good}-0g"), None),
            (String::new(), None),
        ];
        for (text, sampled) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(TRACEPARENT, HeaderValue::try_from(&text).unwrap());
            headers.insert(TRACESTATE, HeaderValue::from_static("a=1"));
            let context = Context::take(&mut headers);
            assert_eq!(context.as_ref().map(|context| context.sampled), sampled, "{text}");
            assert_eq!(headers.contains_key(TRACESTATE), sampled.is_some(), "{text}");
            headers.append(TRACEPARENT, HeaderValue::from_static("00"));
            assert!(Context::take(&mut headers).is_none(), "two of them");
        }
    }

    #[test]
    fn the_upstream_is_told_of_the_call_to_it_or_of_the_caller() {
        let context = || Context::read(&format!("00-{TRACE}-{PARENT}-01"));
        let told = |trace: Trace, sampled| {
            let mut headers = HeaderMap::new();
            trace.tell(&mut headers, sampled);
            headers[TRACEPARENT].to_str().unwrap().to_owned()
        };
        let trace = Trace::of(context());
        assert_eq!(told(trace, true), format!("00-{TRACE}-{}-01", trace.upstream));
        assert_eq!(told(trace, false), format!("00-{TRACE}-{PARENT}-00"));
        let root = Trace::of(None);
        assert_eq!(told(root, true), format!("00-{}-{}-01", root.id, root.upstream));
        assert_eq!(told(root, false), format!("00-{}-{}-00", root.id, root.upstream));
    }
}
