//! What becomes of the endpoints, each as it is configured: an address that a lookup finds is no label.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::catch_up;
use crate::config::Upstream;

/// One endpoint of an upstream.
#[derive(Debug)]
pub struct EndpointMetrics {
    labels: EndpointLabels,
    addresses: Gauge,
    up: Gauge,
    in_flight: Gauge,
    ejections: Counter,
}

/// The families of all endpoints.
#[derive(Debug, Default)]
pub(super) struct EndpointFamilies {
    addresses: Family<EndpointLabels, Gauge>,
    up: Family<EndpointLabels, Gauge>,
    in_flight: Family<EndpointLabels, Gauge>,
    ejections: Family<EndpointLabels, Counter>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndpointLabels {
    upstream: String,
    endpoint: String,
}

impl EndpointMetrics {
    /// How many addresses it stands for, how many of them are up, and what they have to do.
    pub fn set(&self, addresses: usize, up: usize, in_flight: usize, ejections: u64) {
        for (gauge, value) in
            [(&self.addresses, addresses), (&self.up, up), (&self.in_flight, in_flight)]
        {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        catch_up(&self.ejections, ejections);
    }

    /// Whether it is one of this upstream's.
    pub(super) fn is_of(&self, upstream: &Upstream) -> bool {
        labels_of(upstream).any(|labels| labels == self.labels)
    }
}

impl EndpointFamilies {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let families = Self::default();
        let Self { addresses, up, in_flight, ejections } = &families;
        let endpoint = registry.sub_registry_with_prefix("endpoint");
        endpoint.register("addresses", "Addresses that an endpoint stands for", addresses.clone());
        endpoint.register("up", "Its addresses that are neither unhealthy nor ejected", up.clone());
        endpoint.register("in_flight", "Requests that this instance has there", in_flight.clone());
        endpoint.register(
            "ejections",
            "How often one was taken out for failing",
            ejections.clone(),
        );
        families
    }

    /// Each endpoint of an upstream, in the order of the configuration.
    pub(super) fn of(&self, upstream: &Upstream) -> Vec<EndpointMetrics> {
        let handles = labels_of(upstream).map(|labels| EndpointMetrics {
            addresses: self.addresses.get_or_create_owned(&labels),
            up: self.up.get_or_create_owned(&labels),
            in_flight: self.in_flight.get_or_create_owned(&labels),
            ejections: self.ejections.get_or_create_owned(&labels),
            labels,
        });
        handles.collect()
    }

    /// Shows its state no longer. What was counted stays.
    pub(super) fn forget(&self, gone: &EndpointMetrics) {
        for gauges in [&self.addresses, &self.up, &self.in_flight] {
            gauges.remove(&gone.labels);
        }
    }
}

fn labels_of(upstream: &Upstream) -> impl Iterator<Item = EndpointLabels> {
    upstream.endpoints.iter().map(|endpoint| EndpointLabels {
        upstream: upstream.name.to_string(),
        endpoint: endpoint.authority().map(ToString::to_string).unwrap_or_default(),
    })
}
