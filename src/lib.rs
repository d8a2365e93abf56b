//! Tidegate, a reverse proxy that holds a fleet-wide limit on requests in flight.

pub mod admission;
mod body;
mod client;
pub mod config;
mod exchange;
mod gauge;
mod headers;
pub mod proxy;
pub mod reason;
mod registry;
mod reply;
mod route;
pub mod seam;
mod target;
mod upload;
mod upstream;
