//! The story of a request: find its route, find it a slot, forward it, tie the slot to the answer.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONTENT_LENGTH, EXPECT, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use http_body::Body;
use ipnet::IpNet;
use tokio::{runtime::Handle, time::Instant};
use uuid::Uuid;

use crate::{
    account::{Account, Accounts},
    admission::{Admission, Arrival, Permit},
    client,
    config::{self, ClassRule, Config, Dialect, HeaderRules, Route, WeightRule},
    copies::{Copies, Interest, Tee},
    degrade::{self, Rung},
    exchange::{Failure, Held, Owner},
    gauge::{Gauge, Share},
    headers::{self, Way},
    log::Log,
    metrics::Metrics,
    reason::Reason,
    registry::Registry,
    reply::{self, Reply},
    request_id::{RequestId, X_REQUEST_ID},
    route::{Miss, Routes},
    server::{ClientConn, Handler, RequestBody, TurnedAway, TwoLengths},
    target::{self, Objection},
    told::Told,
    tunnel::{self, Consent, Wish},
    upload::{self, Outgoing, Upload},
    upstream::Upstream,
};

pub use crate::body::ResponseBody;

#[cfg(test)]
mod tests;

/// A body up to this length is read before admission, so that a slow sender holds no slot.
const SMALL_BODY: u64 = 64 * 1024;
/// All bodies read beforehand together. Further ones are streamed.
const SMALL_BODIES: usize = 64 * 1024 * 1024;
/// What `CONNECT` and `TRACE` could have been instead.
const METHODS: HeaderValue =
    HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");

/// The proxy: one for the whole process.
#[derive(Debug)]
pub struct Proxy {
    routes: Routes,
    rules: Vec<Rules>,
    upstreams: Vec<Arc<Upstream>>,
    /// What these were made of.
    made_of: Vec<config::Upstream>,
    copies: Option<Arc<Copies>>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    accounts: Arc<Accounts>,
    trusted: Vec<IpNet>,
    stall: Duration,
    seats: Arc<Gauge>,
    small_bodies: Arc<Gauge>,
    registry: Arc<Registry>,
}

/// How one route's requests are treated.
#[derive(Debug)]
struct Rules {
    upstream: usize,
    dialect: Dialect,
    on_full: Vec<Rung>,
    /// Headers that decide about admission, and count from trusted hops only.
    trusted_only: Vec<HeaderName>,
    told: Told,
    request_headers: HeaderRules,
    response_headers: HeaderRules,
    /// How many bytes of the path the upstream doesn't see.
    strip: usize,
}

/// Where an admitted request goes, and what of it.
struct Target<'a> {
    upstream: usize,
    keeps_credentials: bool,
    mark: Option<&'a HeaderValue>,
    trusted_only: &'a [HeaderName],
    told: &'a Told,
    request_headers: &'a HeaderRules,
    strip: usize,
}

/// What a step of the ladder comes to.
enum Instead<'a> {
    Upstream(Permit, Target<'a>),
    Answer(Response<ResponseBody>),
}

impl Rules {
    fn of(config: &Config, route: &Route) -> Self {
        let class = match &route.class {
            ClassRule::Header { name, .. } => Some(name.clone()),
            ClassRule::Fixed(_) | ClassRule::ByKey { .. } => None,
        };
        let weight = match &route.weight {
            WeightRule::Header { name, .. } => Some(name.clone()),
            WeightRule::Fixed(_) | WeightRule::Bytes { .. } => None,
        };
        Self {
            upstream: route.upstream,
            dialect: route.dialect,
            on_full: route.on_full.iter().map(|step| Rung::of(config, step)).collect(),
            trusted_only: class.into_iter().chain(weight).collect(),
            told: Told::of(config, &route.limits),
            request_headers: route.request_headers.clone(),
            response_headers: route.response_headers.clone(),
            strip: if route.strip_prefix { route.path.trim_end_matches('/').len() } else { 0 },
        }
    }
}

impl<'a> Target<'a> {
    fn of(rules: &'a Rules) -> Self {
        Self {
            upstream: rules.upstream,
            keeps_credentials: true,
            mark: None,
            trusted_only: &rules.trusted_only,
            told: &rules.told,
            request_headers: &rules.request_headers,
            strip: rules.strip,
        }
    }
}

/// What is told of a request once it is answered.
#[derive(Default)]
struct Notes {
    route: Option<usize>,
    queued: Duration,
    account: Account,
}

/// A request ready to leave.
struct Call {
    upstream: Arc<Upstream>,
    /// Which one it is.
    index: usize,
    request: Box<Request<Outgoing>>,
    interest: Option<Interest>,
    wish: Option<Wish>,
    /// Set for HTTP/2, where a stream may be stuck on a connection that isn't.
    patience: Option<Duration>,
}

impl Proxy {
    /// Must be called inside a runtime.
    pub fn new(
        config: &Config,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        log: Arc<Log>,
    ) -> Arc<Self> {
        Self::build(config, admission, metrics, log, None)
    }

    /// The proxy of another configuration, with what running requests and connections of this one have in common with it.
    pub fn adopt(
        &self,
        config: &Config,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        log: Arc<Log>,
    ) -> Arc<Self> {
        self.seats.set_cap(config.server.max_in_flight);
        Self::build(config, admission, metrics, log, Some(self))
    }

    fn build(
        config: &Config,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        log: Arc<Log>,
        before: Option<&Self>,
    ) -> Arc<Self> {
        let told = before.map(|before| &*before.accounts);
        let accounts = Accounts::new(config, &metrics, log, admission.instance(), told);
        let kept = |upstream: &config::Upstream| {
            let at = before?.made_of.iter().position(|known| known == upstream)?;
            Some(Arc::clone(&before?.upstreams[at]))
        };
        let upstreams = config
            .upstreams
            .iter()
            .map(|upstream| kept(upstream).unwrap_or_else(|| Arc::new(Upstream::new(upstream))));
        let shared = |gauge: fn(&Self) -> &Arc<Gauge>, cap| {
            before.map_or_else(|| Gauge::new(cap), |before| Arc::clone(gauge(before)))
        };
        Arc::new(Self {
            routes: Routes::new(&config.routes),
            rules: config.routes.iter().map(|route| Rules::of(config, route)).collect(),
            upstreams: upstreams.collect(),
            made_of: config.upstreams.clone(),
            copies: Copies::new(config),
            admission,
            metrics,
            accounts,
            trusted: config.server.trusted_proxies.clone(),
            stall: config.server.stall_timeout,
            seats: shared(|proxy| &proxy.seats, config.server.max_in_flight),
            small_bodies: shared(|proxy| &proxy.small_bodies, SMALL_BODIES),
            registry: before.map_or_else(
                || Registry::start(&Handle::current()),
                |before| Arc::clone(&before.registry),
            ),
        })
    }

    /// Every upstream, in the order of the configuration.
    pub(crate) fn upstreams(&self) -> Vec<Arc<Upstream>> {
        self.upstreams.clone()
    }

    /// Every exchange of the process.
    pub(crate) fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.registry)
    }

    /// Waits until what is to be told of requests has been told, but not longer than `patience` for each.
    pub async fn flush(&self, patience: Duration) {
        self.accounts.flush(patience).await;
    }

    /// Ends the request that holds its slots under this id; false if it isn't here.
    pub fn cut(&self, holder: Uuid, reason: Reason) -> bool {
        self.registry.cut(holder, reason)
    }

    async fn answer(
        &self,
        mut parts: Box<Parts>,
        body: RequestBody,
        conn: &ClientConn,
    ) -> Response<ResponseBody> {
        let is_head = parts.method == Method::HEAD;
        let is_grpc = parts.version == Version::HTTP_2 && reply::is_grpc(&parts.headers);
        let (began, mut notes) = (Instant::now(), Notes::default());
        let trusted = client::is_trusted(conn.peer().ip(), &self.trusted);
        let id = RequestId::of(&parts.headers, trusted);
        parts.headers.insert(X_REQUEST_ID, id.value());
        let settled = match parts.extensions.get::<TwoLengths>() {
            Some(_) => Err(Objection::Bad),
            None => target::settle(&mut parts),
        };
        notes.account =
            self.accounts.open(&mut parts, &id, trusted, |head| self.client(head, conn, trusted));
        let answer = match settled {
            Ok(()) => self.serve(parts, body, conn, &mut notes).await,
            Err(Objection::Server) => {
                let mut response = reply::options();
                notes.account.answered(&response);
                response.body_mut().tie(notes.account, is_head);
                return response;
            }
            Err(Objection::Method) => Err(Reply::method_not_allowed(METHODS)),
            Err(Objection::Bad) => Err(Reason::BadRequest.into()),
        };
        let dialect = notes.route.map(|route| self.rules[route].dialect).unwrap_or_default();
        let refuse = |reply: Reply| {
            notes.account.refused(reply.reason());
            reply.spoken(dialect).grpc(is_grpc).to(id.clone()).respond(is_head, notes.queued)
        };
        let mut response = answer.unwrap_or_else(refuse);
        // An upstream that has an id of its own for it is asked about that one.
        response.headers_mut().entry(X_REQUEST_ID).or_insert_with(|| id.value());
        notes.account.answered(&response);
        response.body_mut().tie(notes.account, is_head);
        if let Some(route) = notes.route {
            self.rules[route].response_headers.apply(response.headers_mut());
            self.metrics.route(route).answered(response.status(), began.elapsed());
        }
        response
    }

    async fn serve(
        &self,
        parts: Box<Parts>,
        body: RequestBody,
        conn: &ClientConn,
        notes: &mut Notes,
    ) -> Result<Response<ResponseBody>, Reply> {
        let route = self.find_route(&parts)?;
        notes.route = Some(route);
        notes.account.routed(route);
        let seat = self.seats.take(1).ok_or(Reason::ProcessFull)?;
        let (body, _small) = self.read_if_small(&parts, body).await?;
        let admitted = self.admit(route, &parts, conn, notes).await;
        let (permit, target) = match admitted {
            Ok(permit) => (permit, Target::of(&self.rules[route])),
            Err(reply) => {
                notes.account.refused(reply.reason());
                // In a box, or every request would hold room for it.
                match Box::pin(self.degrade(route, reply, &parts, &body, conn)).await? {
                    Instead::Upstream(permit, target) => (permit, target),
                    Instead::Answer(mut response) => {
                        headers::add_timing(response.headers_mut(), notes.queued, None);
                        return Ok(response);
                    }
                }
            }
        };
        notes.account.called(target.upstream, &permit);
        let mark = target.mark.cloned();
        let interest = self.interest(route, &target, &parts, &body);
        let call = self.prepare(target, parts, body, conn, &permit, interest)?;
        let held = Held { permit, _seat: seat };
        let mut response = self.forward(call, held, conn, notes).await?;
        if let Some(mark) = mark {
            degrade::mark(&mut response, mark);
        }
        Ok(response)
    }

    /// Takes the steps of the route's ladder in order; refused if none helps.
    async fn degrade(
        &self,
        route: usize,
        reply: Reply,
        parts: &Parts,
        body: &Outgoing,
        conn: &ClientConn,
    ) -> Result<Instead<'_>, Reply> {
        if !reply.reason().can_degrade() {
            return Err(reply);
        }
        for (step, rung) in self.rules[route].on_full.iter().enumerate() {
            match rung {
                Rung::Upstream { upstream, forward_credentials, mark, told } => {
                    let arrival = self.arrival(parts, conn);
                    let admitted = self.admission.admit_instead(route, step, &arrival).await;
                    if let Ok(permit) = admitted {
                        self.metrics.degraded(route, rung.label());
                        let rules = &self.rules[route];
                        return Ok(Instead::Upstream(
                            permit,
                            Target {
                                upstream: *upstream,
                                keeps_credentials: *forward_credentials,
                                mark: Some(mark),
                                told,
                                ..Target::of(rules)
                            },
                        ));
                    }
                }
                Rung::Stale { allowance } => {
                    let copies = self.copies.as_ref().filter(|_| body.is_end_stream());
                    let copy = copies.and_then(|copies| copies.find(route, parts, *allowance));
                    if let Some(copy) = copy {
                        self.metrics.degraded(route, rung.label());
                        let answer = degrade::stale(reply.reason(), &parts.method, copy);
                        return Ok(Instead::Answer(answer));
                    }
                }
                Rung::Respond { status, body, content_type } => {
                    self.metrics.degraded(route, rung.label());
                    let body =
                        if parts.method == Method::HEAD { Bytes::new() } else { body.clone() };
                    return Ok(Instead::Answer(degrade::respond(
                        reply.reason(),
                        *status,
                        body,
                        content_type.clone(),
                    )));
                }
            }
        }
        Err(reply)
    }

    /// What of a request decides about its admission.
    fn arrival<'a>(&self, parts: &'a Parts, conn: &ClientConn) -> Arrival<'a> {
        let peer = conn.peer().ip();
        let trusted = client::is_trusted(peer, &self.trusted);
        Arrival {
            headers: &parts.headers,
            client: self.client(&parts.headers, conn, trusted),
            trusted,
            body: match target::content_length(&parts.headers) {
                None if !parts.headers.contains_key(TRANSFER_ENCODING) => Some(0),
                length => length,
            },
        }
    }

    fn client(&self, head: &HeaderMap, conn: &ClientConn, trusted: bool) -> IpAddr {
        let peer = conn.peer().ip();
        match trusted {
            true => client::address(peer, head, &self.trusted),
            false => peer.to_canonical(),
        }
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
        if let Some(length) = length.filter(|length| *length <= SMALL_BODY)
            && !parts.headers.contains_key(EXPECT)
            && let Some(share) = self.small_bodies.take(length as usize)
        {
            let whole: Bytes = upload::read_small(body, length).await?;
            return Ok((Outgoing::Whole(whole), Some(share)));
        }
        Ok((Outgoing::Stream(body, Arc::new(Upload::default())), None))
    }

    async fn admit(
        &self,
        route: usize,
        parts: &Parts,
        conn: &ClientConn,
        notes: &mut Notes,
    ) -> Result<Permit, Reply> {
        let asked = Instant::now();
        let admitted = self.admission.admit(route, &self.arrival(parts, conn)).await;
        notes.queued = match &admitted {
            Ok(permit) => permit.taken() - asked,
            Err(_) => asked.elapsed(),
        };
        notes.account.asked(asked, &admitted);
        Ok(admitted?)
    }

    /// What the answer of the route's own upstream means for the copies; any upstream may make a change.
    fn interest(
        &self,
        route: usize,
        target: &Target<'_>,
        parts: &Parts,
        body: &Outgoing,
    ) -> Option<Interest> {
        let interest = self.copies.as_ref()?.interest(route, parts, !body.is_end_stream())?;
        let is_usual = target.mark.is_none() || matches!(interest, Interest::Change(_));
        is_usual.then_some(interest)
    }

    fn prepare(
        &self,
        target: Target<'_>,
        mut parts: Box<Parts>,
        body: Outgoing,
        conn: &ClientConn,
        permit: &Permit,
        mut interest: Option<Interest>,
    ) -> Result<Call, Reply> {
        let upstream = Arc::clone(&self.upstreams[target.upstream]);
        let wish = Wish::take(&mut parts).filter(|_| body.is_end_stream());
        let patience = (parts.version == Version::HTTP_2).then_some(self.stall);
        let peer = conn.peer().ip();
        let trusted = client::is_trusted(peer, &self.trusted);
        let way = Way {
            peer: conn.address(),
            client: trusted.then(|| client::address(peer, &parts.headers, &self.trusted)),
            trusted,
            secure: conn.is_secure,
        };
        headers::to_upstream(&mut parts.headers, &way);
        if let Some(wish) = &wish {
            wish.tell(&mut parts.headers);
        }
        if !trusted {
            target.trusted_only.iter().for_each(|name| drop(parts.headers.remove(name)));
        }
        if !target.keeps_credentials {
            degrade::remove_credentials(&mut parts.headers);
        }
        target.request_headers.apply(&mut parts.headers);
        upstream.set_headers.apply(&mut parts.headers);
        target.told.tell(&mut parts.headers, permit);
        if let Some(host) = &upstream.host {
            parts.headers.insert(HOST, host.clone());
        }
        // Said outright, since hyper would drop the body of a GET otherwise.
        if matches!(body, Outgoing::Stream(..)) && !parts.headers.contains_key(CONTENT_LENGTH) {
            parts.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        let uri = upstream.target(target::path_and_query(&parts.uri), target.strip);
        parts.uri = uri.map_err(|_| Reason::BadRequest)?;
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        if let Some(interest) = &mut interest {
            interest.sent(&parts.headers);
        }
        let request = Box::new(Request::from_parts(*parts, body));
        Ok(Call { upstream, index: target.upstream, request, interest, wish, patience })
    }

    fn forward(
        &self,
        call: Call,
        held: Held,
        conn: &ClientConn,
        notes: &mut Notes,
    ) -> impl Future<Output = Result<Response<ResponseBody>, Reply>> + Send {
        let Call { upstream, index, request, interest, wish, patience } = call;
        let (queued, started) = (notes.queued, held.permit.taken());
        let upload = match request.body() {
            Outgoing::Stream(_, upload) => Some(Arc::clone(upload)),
            Outgoing::Empty | Outgoing::Whole(_) => None,
        };
        let idle = upstream.tunnel_timeout;
        // Here and not in the future, which would hold room for all that goes into it.
        let owner = Owner::new(held, upstream, upload, patience, Arc::clone(&self.registry));
        async move {
            let mut answer = owner.send(request, started).await;
            if let Err(Failure { spare: Some(spare), .. }) = answer {
                answer = owner.send_again(*spare).await;
            }
            notes.account.reached(|| owner.endpoint());
            let took = started.elapsed();
            if answer.is_ok() {
                self.metrics.upstream_answered(index, took);
            }
            match answer {
                Ok(mut head) if head.status() == StatusCode::SWITCHING_PROTOCOLS => {
                    let Some((wish, consent)) = wish.zip(Consent::take(&mut head)) else {
                        // Nobody asked for another protocol: the upstream can't be followed there.
                        owner.cut(Reason::UpstreamReset);
                        return Err(Reply::from(Reason::UpstreamReset).after(took));
                    };
                    consent.tell(head.headers_mut());
                    headers::add_timing(head.headers_mut(), queued, Some(took));
                    owner.begin_tunnel();
                    let mut account = std::mem::take(&mut notes.account);
                    account.answered(&head);
                    conn.leave_tunnel(tunnel::run(wish, consent, owner, idle, account));
                    Ok(head.map(|()| ResponseBody::whole(Bytes::new())))
                }
                Ok(head) => {
                    let copies = self.copies.as_ref().zip(interest);
                    let tee =
                        copies.and_then(|(all, interest)| all.answered(interest, &head, took));
                    owner.take_early().await;
                    Ok(deliver(head, owner, tee, queued, took))
                }
                Err(failure) => Err(Reply::from(failure.reason).after(took)),
            }
        }
    }
}

impl Handler for Proxy {
    type Body = ResponseBody;

    fn handle(
        &self,
        head: Box<Parts>,
        body: RequestBody,
        conn: &Arc<ClientConn>,
    ) -> impl Future<Output = Response<ResponseBody>> + Send {
        self.answer(head, body, conn)
    }

    fn unreadable(&self, status: StatusCode, conn: &ClientConn) -> Response<Bytes> {
        let (id, reply) = (RequestId::new(), Reply::unreadable(status));
        let mut account = self.accounts.open_unread(&id, conn.peer().ip());
        account.refused(reply.reason());
        let response = reply.to(id).compose(Duration::ZERO);
        account.answered(&response);
        account.complete();
        response
    }

    fn turned_away(&self, why: TurnedAway) {
        self.metrics.turned_away(why.as_str());
    }
}

/// From here on the body owns the slot.
fn deliver(
    head: Response<()>,
    owner: Owner,
    tee: Option<Box<Tee>>,
    queued: Duration,
    took: Duration,
) -> Response<ResponseBody> {
    let mut response = head.map(|()| ResponseBody::streamed(owner, tee));
    *response.version_mut() = Version::HTTP_11;
    headers::to_client(response.headers_mut());
    headers::add_timing(response.headers_mut(), queued, Some(took));
    response
}
