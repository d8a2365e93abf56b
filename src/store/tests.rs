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
fn classes() -> Arc<[ClassSpec]> {
    let class = |(name, share, queue): (&str, _, _)| ClassSpec { name: name.into(), share, queue };
    [("high", 1.0, u32::MAX), ("normal", 1.0, u32::MAX), ("low", 0.5, u32::MAX)].map(class).into()
}

async fn pause(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}
