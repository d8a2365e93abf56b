//! One upstream: where it is, how to call it, and its pool of connections.

use std::{sync::Arc, time::Duration};

use http::{
    HeaderValue, Request, Uri,
    uri::{InvalidUri, PathAndQuery},
};
use tokio::time::Instant;

use crate::{
    config::{self, HeaderRules, HostHeader, OnClientGone},
    upload::Outgoing,
};

mod connect;
mod pool;
mod tls;

pub(crate) use connect::UpstreamConn;
pub(crate) use pool::{Cause, Link, Pool, SendError, Sent};

use connect::Connector;

/// An upstream, ready to be called.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) pool: Arc<Pool>,
    /// Goes in front of the request's path; never ends with a slash.
    base: String,
    /// What the upstream sees as Host, unless the client's is kept.
    pub(crate) host: Option<HeaderValue>,
    pub(crate) response_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) linger: Duration,
    pub(crate) finishes: bool,
    pub(crate) tunnel_timeout: Duration,
    pub(crate) set_headers: HeaderRules,
}

/// Which connection a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// One from the pool, if there is one.
    First,
    /// A new one.
    Second,
}

impl Upstream {
    /// Must be called inside the runtime on which its connections will live.
    pub(crate) fn new(config: &config::Upstream) -> Self {
        let endpoint = &config.endpoint;
        let authority = endpoint.authority().expect("an endpoint has an authority");
        let host = HeaderValue::from_str(authority.as_str()).expect("an authority is ASCII");
        if config.tls.insecure {
            tracing::warn!(
                upstream = &*config.name,
                "INSECURE: any certificate is accepted, so anyone on the way can be this upstream"
            );
        }
        Self {
            pool: Pool::start(Connector::new(
                endpoint.clone(),
                config.connect_timeout,
                &config.tls,
            )),
            base: endpoint.path().trim_end_matches('/').to_owned(),
            host: (config.host == HostHeader::Upstream).then_some(host),
            response_timeout: config.response_timeout,
            idle_timeout: config.idle_timeout,
            linger: config.linger,
            finishes: config.on_client_gone == OnClientGone::Finish,
            tunnel_timeout: config.tunnel_timeout,
            set_headers: config.set_headers.clone(),
        }
    }

    /// What a request asks for: behind the base path, the target byte for byte, but for the first
    /// `strip` bytes.
    pub(crate) fn target(&self, target: PathAndQuery, strip: usize) -> Result<Uri, InvalidUri> {
        if strip > 0 {
            let rest = target.as_str().get(strip..).unwrap_or_default();
            let slash = if rest.starts_with('/') { "" } else { "/" };
            return Ok(PathAndQuery::try_from(format!("{}{slash}{rest}", self.base))?.into());
        }
        if self.base.is_empty() && target.as_str().starts_with('/') {
            return Ok(target.into());
        }
        // Shows a slash where there is no path, as in `http://host?query`.
        Ok(PathAndQuery::try_from(format!("{}{target}", self.base))?.into())
    }

    /// Starts a request.
    pub(crate) fn send(&self, request: Request<Outgoing>, attempt: Attempt, now: Instant) -> Sent {
        match attempt {
            Attempt::First => self.pool.send(request, now),
            Attempt::Second => self.pool.send_afresh(request),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config(endpoint: &str) -> config::Upstream {
        config::Upstream {
            name: Arc::from("up"),
            endpoint: endpoint.parse().unwrap(),
            limits: Vec::new(),
            connect_timeout: Duration::from_secs(3),
            response_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            linger: Duration::ZERO,
            on_client_gone: OnClientGone::Cancel,
            host: HostHeader::Upstream,
            tls: config::UpstreamTls::default(),
            tunnel_timeout: Duration::from_secs(60),
            set_headers: HeaderRules::default(),
        }
    }

    #[tokio::test]
    async fn the_target_is_forwarded_byte_for_byte_behind_the_base_path() {
        let odd = "/a%2Fb//c/../d/%2e%2e/x?q=a%2Fb&&r=%20+;%5B";
        for (endpoint, expected) in [
            ("http://h:81", odd.to_owned()),
            ("http://h/", odd.to_owned()),
            ("https://h/base/", format!("/base{odd}")),
        ] {
            let upstream = Upstream::new(&config(endpoint));
            let target = upstream.target(PathAndQuery::from_static(odd), 0).unwrap();
            assert_eq!(target.to_string(), expected);
        }
    }

    #[tokio::test]
    async fn what_is_stripped_leaves_a_path() {
        for (endpoint, target, expected) in [
            ("http://h", "/api/a%2Fb?q=1", "/a%2Fb?q=1"),
            ("http://h", "/api", "/"),
            ("http://h", "/api?q=1", "/?q=1"),
            ("http://h/base/", "/api/x", "/base/x"),
            ("http://h/base/", "/api", "/base/"),
        ] {
            let upstream = Upstream::new(&config(endpoint));
            let target = upstream.target(PathAndQuery::from_static(target), "/api".len()).unwrap();
            assert_eq!(target.to_string(), expected);
        }
    }
}
