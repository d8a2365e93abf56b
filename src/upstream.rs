//! One upstream: where it is, how to call it, and which of its endpoints to.

use std::{sync::Arc, time::Duration};

use http::{
    HeaderValue, Request, Response, Uri,
    header::HOST,
    uri::{InvalidUri, PathAndQuery},
};
use tokio::time::Instant;

use crate::{
    config::{self, HeaderRules, HostHeader, OnClientGone},
    upload::{Outgoing, Upload},
};

mod connect;
mod endpoints;
mod h2;
mod health;
mod line;
mod link;
mod pool;
mod resolve;
mod tls;

pub(crate) use endpoints::{Busy, EntryState};
pub(crate) use line::{Answer, Incoming, Line, Open, Sent, Spare, Unanswered};
pub(crate) use pool::Cause;

use endpoints::Endpoints;
use line::Failed;
use pool::Pool;

/// An upstream, ready to be called.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) name: Arc<str>,
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
    /// Must be called inside a runtime.
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
            name: Arc::clone(&config.name),
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

    /// The endpoint for the next request; none while no name was looked up.
    pub(crate) fn choose(&self) -> Option<Busy> {
        self.endpoints.choose()
    }

    /// The same as soon as the first names were; none if they stand for nothing.
    pub(crate) async fn first(&self) -> Option<Busy> {
        self.endpoints.first().await
    }

    /// Starts a request.
    pub(crate) fn send(
        &self,
        busy: Busy,
        mut request: Box<Request<Outgoing>>,
        now: Instant,
    ) -> Sent {
        name_host(&busy, &mut request);
        Sent::new(busy, request, now)
    }

    /// Starts a request once more.
    pub(crate) fn send_again(&self, spare: Spare) -> Sent {
        let Spare { busy, mut request } = spare;
        name_host(&busy, &mut request);
        Sent::afresh(busy, request)
    }

    /// How each of the configured endpoints does.
    pub(crate) fn state(&self) -> Vec<EntryState> {
        self.endpoints.state()
    }

    /// Notes that a request wasn't answered in time.
    pub(crate) fn late(&self, sent: &Sent) {
        self.endpoints.note(sent.at(), None);
    }

    /// What comes of a request that was answered, or not, as far as `upload` isn't to blame. It may be sent again to another endpoint if this one couldn't be reached,
    /// and anywhere if its connection was an old one, as far as it does no harm.
    pub(crate) fn settle(
        &self,
        sent: Sent,
        answer: Answer,
        upload: Option<&Upload>,
    ) -> Result<(Response<Incoming>, Line), Unanswered> {
        let busy = sent.busy();
        let Failed { cause, on, spare } = match answer {
            Ok((response, on)) => {
                busy.standing.answered();
                self.endpoints.note(&busy, Some(response.status()));
                return Ok((response, Line::new(busy, on)));
            }
            Err(error) => error,
        };
        // A connection that was too old says nothing about its endpoint.
        let was_old = matches!(cause, Cause::Broken(_)) && spare.is_some();
        if !was_old && upload.is_none_or(|upload| upload.fault().is_none()) {
            busy.standing.unanswered(Instant::now());
            self.endpoints.note(&busy, None);
        }
        let spare = spare.and_then(|request| {
            let other = self.endpoints.choose_other(&busy);
            let busy = match cause {
                Cause::Connect(_) => other?,
                Cause::Broken(_) => other.unwrap_or_else(|| busy.again()),
            };
            Some(Box::new(Spare { busy, request }))
        });
        Err(Unanswered { cause, open: on.map(|on| Open::new(busy, on)), spare })
    }
}

fn name_host(busy: &Busy, request: &mut Request<Outgoing>) {
    if let Some(host) = busy.host() {
        request.headers_mut().insert(HOST, host.clone());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config(endpoint: &str) -> config::Upstream {
        config::Upstream {
            name: Arc::from("up"),
            endpoints: vec![endpoint.parse().unwrap()],
            off_limits: None,
            resolve_interval: Duration::from_secs(30),
            max_connection_age: Duration::from_secs(300),
            http2: false,
            ping_interval: None,
            health: None,
            ejection: None,
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
