#![doc = include_str!("../ARCHITECTURE.md")]

pub mod admin;
pub mod admission;
pub mod app;
mod body;
pub mod check;
pub mod cli;
mod client;
pub mod config;
mod copies;
mod degrade;
pub mod demo;
mod exchange;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gauge;
mod headers;
pub mod leases;
pub mod ledger;
pub mod metrics;
pub mod proxy;
pub mod reason;
mod registry;
pub mod reload;
pub mod remote;
mod reply;
mod request_id;
mod route;
pub mod server;
pub mod size;
pub mod store;
pub mod systemd;
mod target;
mod told;
mod tunnel;
mod upload;
mod upstream;
