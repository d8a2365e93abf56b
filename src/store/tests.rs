//! Both stores against their contract, and the scripts against the ledger.

use std::{sync::Arc, time::Duration};

use super::*;

mod contract;
mod differential;
mod over_redis;
mod rig;
mod server;
mod timing;

/// A class of every kind: first served, ordinary, and one that leaves half of the slots alone.
fn classes() -> Arc<[(Arc<str>, f64)]> {
    [("high", 1.0), ("normal", 1.0), ("low", 0.5)].map(|(name, share)| (name.into(), share)).into()
}

async fn pause(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}
