//! How the endpoints do, for operators.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::{
    metrics::EndpointMetrics,
    upstream::{EntryState, Upstream},
};

/// Per upstream, its endpoints as configured, each with the addresses that it stands for.
pub(super) fn status(upstreams: &[Arc<Upstream>]) -> Map<String, Value> {
    let of = |upstream: &Arc<Upstream>| {
        let endpoints: Vec<_> = upstream.state().iter().map(endpoint).collect();
        (upstream.name.to_string(), json!({ "endpoints": endpoints }))
    };
    upstreams.iter().map(of).collect()
}

fn endpoint(state: &EntryState) -> Value {
    let addresses: Vec<_> = state
        .endpoints
        .iter()
        .map(|endpoint| {
            json!({
                "address": endpoint.addr.to_string(),
                "state": endpoint.word,
                "in_flight": endpoint.in_flight,
                "silent_ms": endpoint.silent.map(|silent| silent.as_millis() as u64),
            })
        })
        .collect();
    json!({ "endpoint": state.name, "ejections": state.ejections, "addresses": addresses })
}

/// Brings the metrics of an upstream up to date.
pub(super) fn measure(metrics: &[EndpointMetrics], states: &[EntryState]) {
    for (metrics, state) in metrics.iter().zip(states) {
        let endpoints = &state.endpoints;
        let up = endpoints.iter().filter(|endpoint| endpoint.word == "up").count();
        let in_flight = endpoints.iter().map(|endpoint| endpoint.in_flight).sum();
        metrics.set(endpoints.len(), up, in_flight, state.ejections);
    }
}
