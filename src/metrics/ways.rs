//! How long the store and the upstreams take, and what rates say.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use super::{Histograms, InSeconds};

#[derive(Debug)]
pub(super) struct WayFamilies {
    store: Histograms<ResultLabel>,
    upstreams: Histograms<UpstreamLabel>,
    rates: Family<RateLabels, Counter>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct UpstreamLabel {
    upstream: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RateLabels {
    rate: String,
    result: &'static str,
}

/// The store's calls.
#[derive(Clone, Debug)]
pub struct StoreMetrics {
    ok: Histogram,
    error: Histogram,
}

/// One rate's answers.
#[derive(Clone, Debug)]
pub struct RateMetrics {
    allowed: Counter,
    refused: Counter,
}

impl WayFamilies {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let families = Self {
            store: Histograms::new_with_constructor(InSeconds),
            upstreams: Histograms::new_with_constructor(InSeconds),
            rates: Family::default(),
        };
        let Self { store, upstreams, rates } = &families;
        registry.register("store_op_seconds", "Calls of the store, by result", store.clone());
        registry.register(
            "upstream_seconds",
            "From sending a request to the head of the upstream's answer",
            upstreams.clone(),
        );
        registry.register("rate", "Requests that asked a rate, by result", rates.clone());
        families
    }

    pub(super) fn store(&self) -> StoreMetrics {
        let of = |result| self.store.get_or_create_owned(&ResultLabel { result });
        StoreMetrics { ok: of("ok"), error: of("error") }
    }

    pub(super) fn upstream(&self, name: &str) -> Histogram {
        self.upstreams.get_or_create_owned(&UpstreamLabel { upstream: name.to_owned() })
    }

    pub(super) fn rate(&self, name: &str) -> RateMetrics {
        let of =
            |result| self.rates.get_or_create_owned(&RateLabels { rate: name.to_owned(), result });
        RateMetrics { allowed: of("allowed"), refused: of("refused") }
    }
}

impl StoreMetrics {
    /// A call was answered, or not, after this time.
    pub fn called(&self, worked: bool, took: Duration) {
        let histogram = if worked { &self.ok } else { &self.error };
        histogram.observe(took.as_secs_f64());
    }
}

impl RateMetrics {
    /// A request was within the rate, and went on.
    pub fn allowed(&self) {
        self.allowed.inc();
    }

    /// A request was too much.
    pub fn refused(&self) {
        self.refused.inc();
    }
}
