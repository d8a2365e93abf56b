//! The story of a request: find its route, find it a slot, forward it, tie the slot to the answer.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONTENT_LENGTH, EXPECT, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use http_body::Body;
use ipnet::IpNet;
use tokio::{runtime::Handle, time::Instant};
use uuid::Uuid;

use crate::{
    admission::{Admission, Permit},
    client,
    config::Config,
    exchange::{Failure, Held, Owner},
    gauge::{Gauge, Share},
    headers::{self, Way},
    metrics::Metrics,
    reason::Reason,
    registry::Registry,
    reply::{self, Reply},
    route::{Miss, Routes},
    server::{ClientConn, Handler, RequestBody},
    target::{self, Objection},
    upload::{self, Outgoing, Upload},
    upstream::{Attempt, Upstream},
};

pub use crate::body::ResponseBody;

#[cfg(test)]
mod tests;

/// A body up to this length is read before admission, so that a slow sender holds no slot.
const SMALL_BODY: u64 = 64 * 1024;
/// All bodies read beforehand together. Further ones are streamed.
const SMALL_BODIES: usize = 64 * 1024 * 1024;
/// What `CONNECT` could have been instead.
const METHODS: HeaderValue =
    HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");

/// The proxy: one for the whole process.
#[derive(Debug)]
pub struct Proxy {
    routes: Routes,
    /// The upstream of each route.
    upstreams: Vec<Arc<Upstream>>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    trusted: Vec<IpNet>,
    seats: Arc<Gauge>,
    small_bodies: Arc<Gauge>,
    registry: Arc<Registry>,
    runtime: Handle,
}

/// What is told of a request once it is answered.
#[derive(Default)]
struct Notes {
    route: Option<usize>,
    queued: Duration,
}

/// A request ready to leave.
struct Call {
    upstream: Arc<Upstream>,
    request: Request<Outgoing>,
}

impl Proxy {
    /// Must be called inside the runtime on which the upstream connections will live.
    pub fn new(config: &Config, admission: Arc<Admission>, metrics: Arc<Metrics>) -> Arc<Self> {
        let upstreams: Vec<_> =
            config.upstreams.iter().map(|upstream| Arc::new(Upstream::new(upstream))).collect();
        let of_route = |route: &crate::config::Route| Arc::clone(&upstreams[route.upstream]);
        let runtime = Handle::current();
        Arc::new(Self {
            routes: Routes::new(&config.routes),
            upstreams: config.routes.iter().map(of_route).collect(),
            admission,
            metrics,
            trusted: config.server.trusted_proxies.clone(),
            seats: Gauge::new(config.server.max_in_flight),
            small_bodies: Gauge::new(SMALL_BODIES),
            registry: Registry::start(&runtime),
            runtime,
        })
    }

    /// Ends the request that holds its slots under this id; false if it isn't here.
    pub fn cut(&self, holder: Uuid, reason: Reason) -> bool {
        self.registry.cut(holder, reason)
    }

    async fn answer(
        &self,
        request: Request<RequestBody>,
        conn: &ClientConn,
    ) -> Response<ResponseBody> {
        let is_head = request.method() == Method::HEAD;
        let (mut parts, body) = request.into_parts();
        let (began, mut notes) = (Instant::now(), Notes::default());
        let answer = match target::settle(&mut parts) {
            Ok(()) => self.serve(parts, body, conn, &mut notes).await,
            Err(Objection::Server) => return reply::options(),
            Err(Objection::Connect) => Err(Reply::method_not_allowed(METHODS)),
            Err(Objection::Bad) => Err(Reason::BadRequest.into()),
        };
        let response = answer.unwrap_or_else(|reply| reply.respond(is_head, notes.queued));
        if let Some(route) = notes.route {
            self.metrics.route(route).answered(response.status(), began.elapsed());
        }
        response
    }

    async fn serve(
        &self,
        parts: Parts,
        body: RequestBody,
        conn: &ClientConn,
        notes: &mut Notes,
    ) -> Result<Response<ResponseBody>, Reply> {
        let route = self.find_route(&parts)?;
        notes.route = Some(route);
        let seat = self.seats.take(1).ok_or(Reason::ProcessFull)?;
        let (body, _small) = self.read_if_small(&parts, body).await?;
        let permit = self.admit(route, notes).await?;
        let call = self.prepare(route, parts, body, conn)?;
        self.forward(call, Held { permit, _seat: seat }, notes.queued).await
    }

    fn find_route(&self, parts: &Parts) -> Result<usize, Reply> {
        let host = parts.headers.get(HOST);
        let host = host.and_then(|host| host.to_str().ok()).unwrap_or_default();
        let found = self.routes.find(&parts.method, host, parts.uri.path());
        found.map_err(|miss| match miss {
            Miss::NoRoute => Reason::NoRoute.into(),
            Miss::Method(allow) => Reply::method_not_allowed(allow),
            Miss::Ambiguous => Reason::BadRequest.into(),
        })
    }

    async fn read_if_small(
        &self,
        parts: &Parts,
        body: RequestBody,
    ) -> Result<(Outgoing, Option<Share>), Reply> {
        if body.is_end_stream() {
            return Ok((Outgoing::Empty, None));
        }
        let length = target::content_length(&parts.headers);
        let is_small = length.is_some_and(|length| length <= SMALL_BODY);
        if is_small
            && !parts.headers.contains_key(EXPECT)
            && let Some(share) =
                self.small_bodies.take(usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX))
        {
            let whole: Bytes = upload::read_small(body).await?;
            return Ok((Outgoing::Whole(whole), Some(share)));
        }
        Ok((Outgoing::Stream(body, Arc::new(Upload::default())), None))
    }

    async fn admit(&self, route: usize, notes: &mut Notes) -> Result<Permit, Reply> {
        let asked = Instant::now();
        let admitted = self.admission.admit(route).await;
        notes.queued = match &admitted {
            Ok(permit) => permit.taken() - asked,
            Err(_) => asked.elapsed(),
        };
        Ok(admitted?)
    }

    fn prepare(
        &self,
        route: usize,
        mut parts: Parts,
        body: Outgoing,
        conn: &ClientConn,
    ) -> Result<Call, Reply> {
        let upstream = Arc::clone(&self.upstreams[route]);
        let peer = conn.peer.ip();
        let trusted = client::is_trusted(peer, &self.trusted);
        let way = Way {
            peer: conn.address(),
            client: trusted.then(|| client::address(peer, &parts.headers, &self.trusted)),
            trusted,
        };
        headers::to_upstream(&mut parts.headers, &way);
        if let Some(host) = &upstream.host {
            parts.headers.insert(HOST, host.clone());
        }
        // Said outright, since hyper would drop the body of a GET otherwise.
        if matches!(body, Outgoing::Stream(..)) && !parts.headers.contains_key(CONTENT_LENGTH) {
            parts.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        let target = upstream.target(target::path_and_query(&parts.uri));
        parts.uri = target.map_err(|_| Reason::BadRequest)?;
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        Ok(Call { upstream, request: Request::from_parts(parts, body) })
    }

    async fn forward(
        &self,
        call: Call,
        held: Held,
        queued: Duration,
    ) -> Result<Response<ResponseBody>, Reply> {
        let started = held.permit.taken();
        let upload = match call.request.body() {
            Outgoing::Stream(_, upload) => Some(Arc::clone(upload)),
            Outgoing::Empty | Outgoing::Whole(_) => None,
        };
        let registry = Arc::clone(&self.registry);
        let owner = Owner::new(held, call.upstream, upload, registry, self.runtime.clone());
        let mut answer = owner.send(call.request, Attempt::First, started).await;
        if let Err(Failure { spare: Some(spare), .. }) = answer {
            answer = owner.send(*spare, Attempt::Second, Instant::now()).await;
        }
        let took = started.elapsed();
        match answer {
            // Nobody asked for another protocol: the upstream can't be followed there.
            Ok(head) if head.status() == StatusCode::SWITCHING_PROTOCOLS => {
                owner.cut(Reason::UpstreamReset);
                Err(Reply::from(Reason::UpstreamReset).after(took))
            }
            Ok(head) => Ok(deliver(head, owner, queued, took)),
            Err(failure) => Err(Reply::from(failure.reason).after(took)),
        }
    }
}

impl Handler for Proxy {
    type Body = ResponseBody;

    async fn handle(
        &self,
        request: Request<RequestBody>,
        conn: &Arc<ClientConn>,
    ) -> Response<ResponseBody> {
        self.answer(request, conn).await
    }
}

/// From here on the body owns the slot.
fn deliver(
    head: Response<()>,
    owner: Owner,
    queued: Duration,
    took: Duration,
) -> Response<ResponseBody> {
    let mut response = head.map(|()| ResponseBody::streamed(owner));
    *response.version_mut() = Version::HTTP_11;
    headers::to_client(response.headers_mut());
    headers::add_timing(response.headers_mut(), queued, Some(took));
    response
}
