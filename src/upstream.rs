//! One upstream: where it is, how to call it, and its pool of connections.

use std::{sync::Arc, time::Duration};

use http::{
    HeaderValue, Request, Uri,
    uri::{Authority, Parts, PathAndQuery, Scheme},
};
use hyper_util::{
    client::legacy::{
        Client, ResponseFuture,
        connect::{CaptureConnection, capture_connection},
    },
    rt::{TokioExecutor, TokioTimer},
};

use crate::{
    config::{self, HostHeader, OnClientGone},
    upload::Outgoing,
};

pub(crate) mod connect;

use connect::{Connector, UpstreamConn};

/// Shorter than the 5 s after which common servers close an idle connection, so that we close first.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// An upstream, ready to be called.
#[derive(Debug)]
pub(crate) struct Upstream {
    pooled: Client<Connector, Outgoing>,
    /// Never reuses a connection, for the second try.
    fresh: Client<Connector, Outgoing>,
    scheme: Scheme,
    authority: Authority,
    /// Goes in front of the request's path; never ends with a slash.
    base: String,
    /// What the upstream sees as Host, unless the client's is kept.
    pub(crate) host: Option<HeaderValue>,
    pub(crate) response_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) linger: Duration,
    pub(crate) finishes: bool,
}

/// Which connection a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// One from the pool, if there is one.
    First,
    /// A new one.
    Second,
}

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) response: ResponseFuture,
    connection: CaptureConnection,
}

impl Upstream {
    pub(crate) fn new(config: &config::Upstream) -> Self {
        let endpoint = config.endpoint.clone().into_parts();
        let scheme = endpoint.scheme.expect("an endpoint has a scheme");
        let authority = endpoint.authority.expect("an endpoint has an authority");
        let connector = Connector::new(scheme == Scheme::HTTPS, config.connect_timeout);
        let host = HeaderValue::from_str(authority.as_str()).expect("an authority is ASCII");
        let path = endpoint.path_and_query;
        let base = path.as_ref().map_or("", |path| path.path());
        Self {
            pooled: client(connector.clone(), usize::MAX),
            fresh: client(connector, 0),
            scheme,
            base: base.trim_end_matches('/').to_owned(),
            host: (config.host == HostHeader::Upstream).then_some(host),
            authority,
            response_timeout: config.response_timeout,
            idle_timeout: config.idle_timeout,
            linger: config.linger,
            finishes: config.on_client_gone == OnClientGone::Finish,
        }
    }

    /// Where a request goes: the endpoint, its base path, and the target byte for byte.
    pub(crate) fn target(&self, target: PathAndQuery) -> Result<Uri, http::Error> {
        let target = if self.base.is_empty() {
            target
        } else {
            PathAndQuery::try_from(format!("{}{target}", self.base))?
        };
        let mut parts = Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(target);
        Ok(Uri::from_parts(parts)?)
    }

    /// Starts a request. Nothing moves until the response is polled.
    pub(crate) fn send(&self, mut request: Request<Outgoing>, attempt: Attempt) -> Sent {
        let connection = capture_connection(&mut request);
        let client = match attempt {
            Attempt::First => &self.pooled,
            Attempt::Second => &self.fresh,
        };
        Sent { response: client.request(request), connection }
    }
}

impl Sent {
    /// The connection the request went to; none while not a byte of it was sent.
    pub(crate) fn connection(&self) -> Option<Arc<UpstreamConn>> {
        let connected = self.connection.connection_metadata();
        let mut extras = http::Extensions::new();
        connected.as_ref()?.get_extras(&mut extras);
        extras.remove()
    }
}

fn client(connector: Connector, idle_connections: usize) -> Client<Connector, Outgoing> {
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .pool_max_idle_per_host(idle_connections)
        .set_host(false)
        .retry_canceled_requests(true)
        .build(connector)
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
        }
    }

    #[tokio::test]
    async fn the_target_is_forwarded_byte_for_byte_behind_the_base_path() {
        let odd = "/a%2Fb//c/../d/%2e%2e/x?q=a%2Fb&&r=%20+;%5B";
        for (endpoint, expected) in [
            ("http://h:81", format!("http://h:81{odd}")),
            ("http://h/", format!("http://h{odd}")),
            ("https://h/base/", format!("https://h/base{odd}")),
        ] {
            let upstream = Upstream::new(&config(endpoint));
            let target = upstream.target(PathAndQuery::from_static(odd)).unwrap();
            assert_eq!(target.to_string(), expected);
        }
    }
}
