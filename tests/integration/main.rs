//! The promises and the hazards, each on the real binary, real sockets and a real Redis.
//!
//! Files are named by the promise or the hazard they hold to account. The proof is always the upstream's own count of what it has in
//! flight. Tests wait for states, never for a time to pass, and assert no durations.
#![cfg(test)]

mod alerts;
mod away;
mod balancer;
mod chaos;
mod client_gone;
mod config_errors;
mod crash;
mod deployments;
mod dns;
mod docs;
mod fairness;
mod fence;
mod four_faults;
mod global_limit;
mod harness;
mod hazards;
mod holders;
mod honest;
mod http2_conformance;
mod http_clients;
mod http_endpoints;
mod http_framing;
mod http_health;
mod http_identity;
mod http_rules;
mod http_tls;
mod http_tunnel;
mod http_upstream_h2;
mod labels;
mod leaks;
mod limit_change;
mod logs;
mod packaging;
mod page;
mod rates;
mod rebinding;
mod refusal;
mod reload;
mod reload_tls;
mod sdk;
mod shutdown;
mod stale;
mod store_faults;
mod streaming;
mod systemd;
mod threads;
mod tls_upstream;
mod traces;
