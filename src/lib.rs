//! Tidegate, a reverse proxy that holds a fleet-wide limit on requests in flight.

pub mod admission;
pub mod check;
pub mod cli;
pub mod config;
pub mod demo;
pub mod leases;
pub mod ledger;
pub mod metrics;
pub mod reason;
pub mod store;
