//! Tidegate, a reverse proxy that holds a fleet-wide limit on requests in flight.

pub mod admission;
pub mod config;
pub mod reason;
pub mod server;
