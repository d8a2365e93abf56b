//! One upstream: where it is, how to call it, and which of its endpoints to.

use std::{sync::Arc, time::Duration};

use http::{
    HeaderValue, Request, Response, Uri,
    header::HOST,
    uri::{InvalidUri, PathAndQuery},
};
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::{
    config::{self, HeaderRules, HostHeader, OnClientGone},
    upload::Outgoing,
};

mod connect;
mod endpoints;
mod line;
mod pool;
mod resolve;
mod tls;

pub(crate) use endpoints::Busy;
pub(crate) use line::{Line, Open, Sent, Spare, Unanswered};
pub(crate) use pool::Cause;

use connect::UpstreamConn;
use endpoints::Endpoints;
use pool::{Link, Pool, SendError};

/// An upstream, ready to be called.
#[derive(Debug)]
pub(crate) struct Upstream {
    endpoints: Arc<Endpoints>,
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

impl Upstream {
    /// Must be called inside the runtime on which its connections will live.
    pub(crate) fn new(config: &config::Upstream) -> Self {
        let first = &config.endpoints[0];
        let host = endpoints::authority(first);
        if config.tls.insecure {
            tracing::warn!(
                upstream = &*config.name,
                "INSECURE: any certificate is accepted, so anyone on the way can be this upstream"
            );
        }
        Self {
            endpoints: Endpoints::start(config),
            base: first.path().trim_end_matches('/').to_owned(),
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

    /// The endpoint for the next request; none if its name can't be looked up.
    pub(crate) async fn choose(&self) -> Option<Busy> {
        match self.endpoints.choose() {
            Some(busy) => Some(busy),
            None => self.endpoints.first().await,
        }
    }

    /// Starts a request.
    pub(crate) fn send(&self, busy: Busy, mut request: Request<Outgoing>, now: Instant) -> Sent {
        self.name_host(&busy, &mut request);
        Sent::new(busy, request, now)
    }

    /// Starts a request once more.
    pub(crate) fn send_again(&self, spare: Spare) -> Sent {
        let Spare { busy, mut request } = spare;
        self.name_host(&busy, &mut request);
        Sent::afresh(busy, request)
    }

    fn name_host(&self, busy: &Busy, request: &mut Request<Outgoing>) {
        if let Some(host) = self.endpoints.host(busy) {
            request.headers_mut().insert(HOST, host.clone());
        }
    }

    /// What comes of a request that was answered, or not. It may be sent again to another endpoint if this one couldn't be reached,
    /// and anywhere if its connection was an old one, as far as it does no harm.
    pub(crate) fn settle(
        &self,
        sent: Sent,
        answer: Result<(Response<Incoming>, Link), SendError>,
    ) -> Result<(Response<Incoming>, Line), Unanswered> {
        let busy = sent.busy();
        let SendError { cause, conn, spare } = match answer {
            Ok((response, link)) => return Ok((response, Line::new(busy, link))),
            Err(error) => error,
        };
        let spare = spare.and_then(|request| {
            let other = self.endpoints.choose_other(&busy);
            let busy = match cause {
                Cause::Connect(_) => other?,
                Cause::Broken(_) => other.unwrap_or_else(|| busy.again()),
            };
            Some(Box::new(Spare { busy, request: *request }))
        });
        Err(Unanswered { cause, open: conn.map(|conn| Open::new(busy, conn)), spare })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config(endpoint: &str) -> config::Upstream {
        config::Upstream {
            name: Arc::from("up"),
            endpoints: vec![endpoint.parse().unwrap()],
            resolve_interval: Duration::from_secs(30),
            max_connection_age: Duration::from_secs(300),
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
