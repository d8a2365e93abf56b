//! How it is found out which endpoints are fit to serve.

use std::time::Duration;

use http::{StatusCode, uri::PathAndQuery};

/// `health`: each endpoint is asked how it is.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthCheck {
    /// What is asked for.
    pub path: PathAndQuery,
    /// How often.
    pub interval: Duration,
    /// How long one answer may take.
    pub timeout: Duration,
    /// So many good answers in a row, and it serves again.
    pub healthy: u32,
    /// So many bad ones in a row, and it doesn't.
    pub unhealthy: u32,
    /// Which answers are good; every 2xx if none are named.
    pub statuses: Vec<StatusCode>,
}

/// `ejection`: who fails requests gets none for a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Ejection {
    /// So many failures in a row.
    pub failures: u32,
    /// Which answers are failures, beside no connection and no answer.
    pub statuses: Vec<StatusCode>,
    /// For how long the first time; twice as long each time after.
    pub time: Duration,
    /// And the longest.
    pub max_time: Duration,
    /// Which part of the endpoints may be out at the same time.
    pub share: f64,
}

impl HealthCheck {
    /// Whether this is the answer of an endpoint that is well.
    pub fn is_good(&self, status: StatusCode) -> bool {
        match self.statuses.as_slice() {
            [] => status.is_success(),
            good => good.contains(&status),
        }
    }
}
