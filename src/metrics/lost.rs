//! What was to be told of requests and got lost on the way.

use prometheus_client::{metrics::counter::Counter, registry::Registry};

/// Counts what whoever reads it was too slow for.
#[derive(Debug, Default)]
pub struct Lost {
    /// Lines of requests.
    pub lines: Counter,
    /// Spans of requests.
    pub spans: Counter,
}

impl Lost {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let lost = Self::default();
        registry.register(
            "log_lines_lost",
            "Lines of requests that were lost because stdout was read too slowly",
            lost.lines.clone(),
        );
        registry.register(
            "spans_lost",
            "Spans of requests that were lost because the collector was away or too slow",
            lost.spans.clone(),
        );
        lost
    }
}
