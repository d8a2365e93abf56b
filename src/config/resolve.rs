//! Turns the mirror of a file into a [`Config`]: every default, and every rule that takes more than one value.

use std::{
    collections::{HashMap, HashSet},
    ops::{Range, RangeInclusive},
    path::Path,
    sync::Arc,
    time::Duration,
};

use http::uri::Scheme;
use toml::Spanned;

use super::{
    Admin, Config, HostPattern, Limit, OnLeaseLost, Route, Server, Step, Store, StoreKind,
    StoreTls, Upstream,
    error::Problem,
    file::{
        FileAdmin, FileConfig, FileDuration, FileLimit, FileRoute, FileServer, FileStore,
        FileStoreTls, FileUpstream, Named,
    },
    rules,
};

mod endpoints;
mod headers;
mod log;
mod policy;
mod tls;

use policy::KnownClasses;

/// Names, each with its index.
type Names = HashMap<Arc<str>, usize>;

type Found<T> = Result<T, Problem>;

const REQUESTS: RangeInclusive<i64> = 1..=10_000_000;
const WAITERS: RangeInclusive<i64> = 0..=10_000_000;

/// Checks a whole file, which ends at `end` and lies in `folder`.
pub(super) fn resolve(file: FileConfig, end: usize, folder: &Path) -> Found<Config> {
    let server = server(&file.server, folder)?;
    let admin = admin(&file.admin)?;
    rules::apart(server.listen, admin.listen).map_err(|rule| {
        let listen = file.admin.listen.as_ref().or(file.server.listen.as_ref());
        Problem::new(listen.map_or(0..0, Spanned::span), rule)
    })?;
    let store = store(&file.store)?;
    let classes = policy::classes(&file.classes)?;
    let limits =
        in_order(&file.limits, |name, table| limit(name, table, store.op_timeout, &classes))?;
    let rates = in_order(&file.rates, policy::rate)?;
    let limit_names = index(limits.iter().map(|limit| &limit.name));
    let upstreams = in_order(&file.upstreams, |name, table| {
        let silence = policy::silence(name.get_ref(), &file.routes);
        upstream(name, table, &limit_names, silence, &admin, folder)
    })?;
    let known = Known {
        classes,
        limits: limit_names,
        rates: index(rates.iter().map(|rate| &rate.name)),
        upstreams: index(upstreams.iter().map(|upstream| &upstream.name)),
    };
    if file.routes.is_empty() {
        return Err(Problem::missing(
            end..end,
            "routes",
            "there must be at least one route: add [[routes]] with upstream = \"...\"",
        ));
    }
    let mut routes = Vec::with_capacity(file.routes.len());
    for table in &file.routes {
        let mut route = route(table, &known)?;
        let inherited = &upstreams[route.upstream].limits;
        route.limits = each_once(route.limits.iter().chain(inherited));
        policy::check_steps(table.get_ref(), &route, &upstreams, &limits)?;
        for (chain, place) in chains(table, &route, &upstreams) {
            rules::one_fence(chain.iter().map(|&limit| &limits[limit])).at(place)?;
        }
        routes.push(route);
    }
    check_overlaps(&file.routes, &routes)?;
    check_orders(&file.routes, &routes, &upstreams, &limits)?;
    check_leases(&file.limits, &routes, &upstreams, &limits, store.op_timeout)?;
    let classes = known.classes.classes;
    Ok(Config {
        server,
        admin: Some(admin),
        log: log::log(&file.log)?,
        traces: file.traces.as_ref().map(log::traces).transpose()?,
        store,
        classes,
        limits,
        rates,
        upstreams,
        routes,
    })
}

/// What a route may name.
struct Known {
    classes: KnownClasses,
    limits: Names,
    rates: Names,
    upstreams: Names,
}

fn server(file: &FileServer, folder: &Path) -> Found<Server> {
    Ok(Server {
        listen: address(&file.listen, "127.0.0.1:8080")?,
        tls: file.tls.as_ref().map(|table| tls::server(table, folder)).transpose()?,
        max_in_flight: or(&file.max_in_flight, 10_000, |n| rules::within(n, REQUESTS))?,
        max_connections: or(&file.max_connections, 20_000, |n| rules::within(n, REQUESTS))?,
        max_connections_per_address: file
            .max_connections_per_address
            .as_ref()
            .map(|n| rules::within(*n.get_ref(), REQUESTS).at(n.span()))
            .transpose()?,
        proxy_protocol: each(&file.proxy_protocol, rules::network)?,
        trusted_proxies: each(&file.trusted_proxies, rules::network)?,
        header_timeout: positive(&file.header_timeout, 10_000)?,
        keepalive_timeout: positive(&file.keepalive_timeout, 75_000)?,
        stall_timeout: positive(&file.stall_timeout, 60_000)?,
        drain_delay: duration(&file.drain_delay, 0),
        drain_timeout: duration(&file.drain_timeout, 25_000),
    })
}

fn admin(file: &FileAdmin) -> Found<Admin> {
    Ok(Admin {
        listen: address(&file.listen, "127.0.0.1:9900")?,
        token: optional(&file.token, rules::secret)?,
    })
}

fn store(file: &FileStore) -> Found<Store> {
    let prefix = text(&file.prefix, "");
    or_text(&file.prefix, "", rules::prefix)?;
    let mut kind = or_text(&file.url, "memory:", rules::store_kind)?;
    sentinel_login(file, &mut kind)?;
    let tls = match &file.tls {
        Some(tls) => {
            rules::is_encrypted(&kind).at(tls.span())?;
            store_tls(tls)?
        }
        None => StoreTls::default(),
    };
    Ok(Store {
        kind,
        tls,
        prefix: prefix.to_owned(),
        op_timeout: positive(&file.op_timeout, 400)?,
        when_down: or_text(&file.when_down, "local-share", rules::when_down)?,
        digest_key: optional(&file.digest_key, rules::secret)?,
    })
}

fn sentinel_login(file: &FileStore, kind: &mut StoreKind) -> Found<()> {
    if let Some(password) = &file.sentinel_password {
        let sentinels = rules::sentinels_of(kind).at(password.span())?;
        sentinels.password = optional(&file.sentinel_password, rules::secret)?;
    }
    if let Some(user) = &file.sentinel_user {
        if file.sentinel_password.is_none() {
            return Err("needs a sentinel_password".to_owned()).at(user.span());
        }
        let sentinels = rules::sentinels_of(kind).at(user.span())?;
        sentinels.user = optional(&file.sentinel_user, rules::secret)?.map(|user| user.0);
    }
    Ok(())
}

fn store_tls(table: &Spanned<FileStoreTls>) -> Found<StoreTls> {
    let file = table.get_ref();
    let cert = optional(&file.client_cert, rules::certificates)?;
    let key = optional(&file.client_key, rules::private_key)?;
    let client = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => {
            let rule = "client_cert and client_key must be given together";
            return Err(Problem::new(table.span(), rule));
        }
    };
    Ok(StoreTls { ca: optional(&file.ca, rules::certificates)?, client })
}

fn limit(
    name: &Spanned<String>,
    file: &FileLimit,
    op_timeout: Duration,
    classes: &KnownClasses,
) -> Found<Limit> {
    rules::name(name.get_ref()).at(name.span())?;
    let slots = policy::slots(required(name.span(), &file.slots, "slots")?)?;
    let lease_span = file.lease.as_ref().map_or(name.span(), Spanned::span);
    let lease = rules::lease(duration(&file.lease, 15_000), op_timeout);
    let lease = match (&file.lease, lease) {
        (None, Err(rule)) => return Err(Problem::missing(lease_span, "lease", rule)),
        (Some(_), lease) => lease.at(lease_span)?,
        (None, Ok(lease)) => lease,
    };
    let key = optional(&file.key, rules::key)?;
    let slots_for = policy::slots_for(&file.slots_for, key.is_some())?;
    let status = if key.is_some() { 429 } else { 503 };
    let mode = or_text(&file.mode, "enforce", rules::mode)?;
    let holder_header = optional(&file.holder_header, rules::own_header)?;
    let most = slots_for.iter().map(|(_, slots)| *slots).fold(slots, u32::max);
    let fence_header = optional(&file.fence_header, |text| {
        rules::fence_header(text, most, mode, holder_header.as_ref())
    })?;
    Ok(Limit {
        name: Arc::from(name.get_ref().as_str()),
        slots,
        lease,
        max_hold: Some(duration(&file.max_hold, 30 * 60_000)).filter(|hold| !hold.is_zero()),
        queue: policy::queue(&file.queue, slots)?,
        recovery: or_text(&file.recovery, "fast", rules::recovery)?,
        on_lease_lost: or_text(&file.on_lease_lost, "keep", rules::on_lease_lost)?,
        classes: policy::class_policies(&file.classes, classes)?,
        key,
        slots_for,
        status: or(&file.status, status, rules::refusal_status)?,
        mode,
        holder_header,
        fence_header,
    })
}

/// `silence` is how long it may say nothing by default, ms.
fn upstream(
    name: &Spanned<String>,
    file: &FileUpstream,
    limits: &Names,
    silence: u64,
    admin: &Admin,
    folder: &Path,
) -> Found<Upstream> {
    rules::name(name.get_ref()).at(name.span())?;
    let endpoints = required(name.span(), &file.endpoints, "endpoints")?;
    let endpoints = endpoints::endpoints(endpoints, admin.listen)?;
    let http2 = file.http2.as_ref().is_some_and(|http2| *http2.get_ref());
    let is_https = endpoints[0].scheme() == Some(&Scheme::HTTPS);
    Ok(Upstream {
        name: Arc::from(name.get_ref().as_str()),
        tls: tls::upstream(&file.tls, is_https, folder)?,
        endpoints,
        off_limits: Some(admin.listen),
        resolve_interval: positive(&file.resolve_interval, 30_000)?,
        max_connection_age: positive(&file.max_connection_age, 5 * 60_000)?,
        http2,
        ping_interval: endpoints::ping_interval(&file.ping_interval, http2)?,
        health: file.health.as_ref().map(endpoints::health).transpose()?,
        ejection: file.ejection.as_ref().map(endpoints::ejection).transpose()?,
        limits: references(&file.limits, limits, "limit")?,
        connect_timeout: positive(&file.connect_timeout, 3_000)?,
        response_timeout: positive(&file.response_timeout, silence)?,
        idle_timeout: positive(&file.idle_timeout, silence)?,
        linger: duration(&file.linger, 250),
        on_client_gone: or_text(&file.on_client_gone, "cancel", rules::on_client_gone)?,
        host: or_text(&file.host, "upstream", rules::host_header)?,
        tunnel_timeout: positive(&file.tunnel_timeout, 10 * 60_000)?,
        set_headers: headers::setting(&file.set_headers)?,
    })
}

/// A route with its own limits only.
fn route(table: &Spanned<FileRoute>, known: &Known) -> Found<Route> {
    let file = table.get_ref();
    let host = match &file.host {
        Some(host) => rules::host_pattern(host.get_ref()).at(host.span())?,
        None => HostPattern::Any,
    };
    let path = text(&file.path, "/");
    or_text(&file.path, "/", rules::path)?;
    let as_written = format!("{}{path}", text(&file.host, ""));
    if let Some(name) = &file.name {
        rules::route_name(name.get_ref()).at(name.span())?;
    }
    let upstream = required(table.span(), &file.upstream, "upstream")?;
    Ok(Route {
        name: Arc::from(text(&file.name, &as_written)),
        host,
        path: path.to_owned(),
        methods: each(&file.methods, rules::method)?,
        upstream: reference(upstream, &known.upstreams, "upstream")?,
        limits: references(&file.limits, &known.limits, "limit")?,
        rates: each_once(references(&file.rates, &known.rates, "rate")?.iter()),
        class: policy::class(&file.class, &known.classes)?,
        weight: policy::weight(&file.weight)?,
        dialect: or_text(&file.dialect, "problem", rules::dialect)?,
        on_full: file
            .on_full
            .iter()
            .map(|step| policy::step(step, &known.upstreams))
            .collect::<Found<_>>()?,
        deadline_header: optional(&file.deadline_header, rules::header)?,
        strip_prefix: file.strip_prefix.as_ref().is_some_and(|strip| *strip.get_ref()),
        request_headers: headers::rules_of(&file.request_headers)?,
        response_headers: headers::rules_of(&file.response_headers)?,
    })
}

/// Refuses two routes that match the same request.
fn check_overlaps(tables: &[Spanned<FileRoute>], routes: &[Route]) -> Found<()> {
    let mut seen: HashMap<_, Vec<usize>> = HashMap::new();
    for (index, route) in routes.iter().enumerate() {
        // `/v1/` also matches `/v1`.
        let path = route.path.trim_end_matches('/');
        let earlier = seen.entry((&route.host, path)).or_default();
        if let Some(&other) = earlier.iter().find(|&&other| methods_overlap(route, &routes[other]))
        {
            let rule = "has the same host, path and a method in common with an earlier route";
            return Err(Problem::new(place(&tables[index]), rule).against(place(&tables[other])));
        }
        earlier.push(index);
    }
    Ok(())
}

fn methods_overlap(a: &Route, b: &Route) -> bool {
    a.methods.is_empty()
        || b.methods.is_empty()
        || a.methods.iter().any(|method| b.methods.contains(method))
}

/// Refuses routes that take limits in a circle: each would hold a slot the other waits for.
fn check_orders(
    tables: &[Spanned<FileRoute>],
    routes: &[Route],
    upstreams: &[Upstream],
    limits: &[Limit],
) -> Found<()> {
    // Per limit: which limit is taken right after it, by which route, and where that is said.
    let mut after: Vec<Vec<After>> = vec![Vec::new(); limits.len()];
    for (index, route) in routes.iter().enumerate() {
        for (chain, place) in chains(&tables[index], route, upstreams) {
            for (&first, &second) in chain.iter().zip(chain.iter().skip(1)) {
                if let Some(other) = way_between(&after, second, first) {
                    let rule = format!(
                        "takes limit `{}` before `{}`, and route `{}` the other way round: they could wait for each other",
                        limits[first].name, limits[second].name, routes[other.route].name
                    );
                    return Err(Problem::new(place, rule).against(other.place.clone()));
                }
                after[first].push(After { limit: second, route: index, place: place.clone() });
            }
        }
    }
    Ok(())
}

/// Refuses a lease too short for requests that are cut before it is over.
fn check_leases(
    tables: &Named<FileLimit>,
    routes: &[Route],
    upstreams: &[Upstream],
    limits: &[Limit],
    op_timeout: Duration,
) -> Found<()> {
    for (index, limit) in limits.iter().enumerate() {
        if limit.on_lease_lost == OnLeaseLost::Keep {
            continue;
        }
        let own = upstreams.iter().filter(|upstream| upstream.limits.contains(&index));
        let led_to = routes.iter().filter(|route| route.limits.contains(&index));
        let led_to = led_to.map(|route| &upstreams[route.upstream]);
        let linger = own.chain(led_to).map(|upstream| upstream.linger).max().unwrap_or_default();
        if let Err(rule) = rules::lease_to_cut(limit, op_timeout, linger)
            && let Some((name, file)) =
                tables.iter().find(|(name, _)| **name.get_ref() == *limit.name)
        {
            return Err(match &file.lease {
                Some(lease) => Problem::new(lease.span(), rule),
                None => Problem::missing(name.span(), "lease", rule),
            });
        }
    }
    Ok(())
}

#[derive(Clone)]
struct After {
    limit: usize,
    route: usize,
    place: Range<usize>,
}

/// What one request of a route may take together: the route's limits or, keeping none of them, those of a step of `on_full`.
fn chains<'a>(
    table: &Spanned<FileRoute>,
    route: &'a Route,
    upstreams: &'a [Upstream],
) -> Vec<(&'a [usize], Range<usize>)> {
    let mut chains = vec![(route.limits.as_slice(), order_place(table))];
    for (file, step) in table.get_ref().on_full.iter().zip(&route.on_full) {
        if let Step::Upstream { upstream, .. } = step {
            chains.push((&upstreams[*upstream].limits, policy::step_place(file)));
        }
    }
    chains
}

/// The beginning of a way from one limit to another, if there is one.
fn way_between(after: &[Vec<After>], from: usize, to: usize) -> Option<&After> {
    let mut seen = HashSet::from([from]);
    let mut open: Vec<_> = after[from].iter().map(|next| (next.limit, next)).collect();
    while let Some((limit, first)) = open.pop() {
        if limit == to {
            return Some(first);
        }
        if seen.insert(limit) {
            open.extend(after[limit].iter().map(|next| (next.limit, first)));
        }
    }
    None
}

/// What tells a route apart from others, for an error to point at.
fn place(table: &Spanned<FileRoute>) -> Range<usize> {
    let file = table.get_ref();
    let told = file.path.as_ref().or(file.host.as_ref());
    told.or(file.upstream.as_ref()).map_or(table.span(), Spanned::span)
}

fn order_place(table: &Spanned<FileRoute>) -> Range<usize> {
    let file = table.get_ref();
    let last = file.limits.as_ref().and_then(|limits| limits.last());
    last.or(file.upstream.as_ref()).map_or(table.span(), Spanned::span)
}

// === values with their defaults ===

/// Puts a broken rule at its place.
trait At<T> {
    fn at(self, span: Range<usize>) -> Found<T>;
}

impl<T> At<T> for Result<T, String> {
    fn at(self, span: Range<usize>) -> Found<T> {
        self.map_err(|rule| Problem::new(span, rule))
    }
}

fn required<'a, T>(
    table: Range<usize>,
    value: &'a Option<Spanned<T>>,
    key: &'static str,
) -> Found<&'a Spanned<T>> {
    let missing = || Problem::missing(table, key, "must be given, it has no default");
    value.as_ref().ok_or_else(missing)
}

fn or<T: Copy, U>(
    value: &Option<Spanned<T>>,
    default: T,
    rule: impl Fn(T) -> Result<U, String>,
) -> Found<U> {
    let (value, span) =
        value.as_ref().map_or((default, 0..0), |value| (*value.get_ref(), value.span()));
    rule(value).at(span)
}

fn or_text<U>(
    value: &Option<Spanned<String>>,
    default: &str,
    rule: impl Fn(&str) -> Result<U, String>,
) -> Found<U> {
    rule(text(value, default)).at(value.as_ref().map_or(0..0, Spanned::span))
}

fn optional<U>(
    value: &Option<Spanned<String>>,
    rule: impl Fn(&str) -> Result<U, String>,
) -> Found<Option<U>> {
    let value = value.as_ref().map(|value| rule(value.get_ref()).at(value.span()));
    value.transpose()
}

fn text<'a>(value: &'a Option<Spanned<String>>, default: &'a str) -> &'a str {
    value.as_ref().map_or(default, |value| value.get_ref())
}

fn address(value: &Option<Spanned<String>>, default: &str) -> Found<std::net::SocketAddr> {
    or_text(value, default, rules::address)
}

fn duration(value: &Option<Spanned<FileDuration>>, default_ms: u64) -> Duration {
    value.as_ref().map_or(Duration::from_millis(default_ms), |value| value.get_ref().0)
}

fn positive(value: &Option<Spanned<FileDuration>>, default_ms: u64) -> Found<Duration> {
    let default = FileDuration(Duration::from_millis(default_ms));
    or(value, default, |value| rules::positive(value.0))
}

fn each<T>(
    values: &Option<Vec<Spanned<String>>>,
    rule: impl Fn(&str) -> Result<T, String>,
) -> Found<Vec<T>> {
    let values = values.as_deref().unwrap_or_default();
    values.iter().map(|value| rule(value.get_ref()).at(value.span())).collect()
}

// === names ===

/// Resolves tables in the order of the file.
fn in_order<T, U>(
    tables: &Named<T>,
    resolve: impl Fn(&Spanned<String>, &T) -> Found<U>,
) -> Found<Vec<U>> {
    let mut tables: Vec<_> = tables.iter().collect();
    tables.sort_by_key(|(name, _)| name.span().start);
    tables.into_iter().map(|(name, table)| resolve(name, table)).collect()
}

fn index<'a>(names: impl Iterator<Item = &'a Arc<str>>) -> Names {
    names.enumerate().map(|(index, name)| (Arc::clone(name), index)).collect()
}

fn references(
    names: &Option<Vec<Spanned<String>>>,
    known: &Names,
    kind: &str,
) -> Found<Vec<usize>> {
    let names = names.as_deref().unwrap_or_default();
    names.iter().map(|name| reference(name, known, kind)).collect()
}

fn reference(name: &Spanned<String>, known: &Names, kind: &str) -> Found<usize> {
    known.get(name.get_ref().as_str()).copied().ok_or_else(|| {
        let mut names: Vec<_> = known.keys().map(AsRef::as_ref).collect();
        names.sort_unstable();
        let there = match names.as_slice() {
            [] => "there is none".to_owned(),
            names => format!("there is {}", names.join(", ")),
        };
        Problem::new(name.span(), format!("must name an existing {kind}: {there}"))
    })
}

fn each_once<'a>(indices: impl Iterator<Item = &'a usize>) -> Vec<usize> {
    let mut once = Vec::new();
    for &index in indices {
        if !once.contains(&index) {
            once.push(index);
        }
    }
    once
}
