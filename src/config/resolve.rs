//! Turns the mirror of a file into a [`Config`]: every default, and every rule that takes more than one value.

use std::{
    collections::{HashMap, HashSet},
    ops::{Range, RangeInclusive},
    sync::Arc,
    time::Duration,
};

use toml::Spanned;

use super::{
    Admin, Config, HostPattern, Limit, Queue, Route, Server, Store, Upstream,
    error::Problem,
    file::{
        FileAdmin, FileConfig, FileDuration, FileLimit, FileQueue, FileQueueTable, FileRoute,
        FileServer, FileStore, FileUpstream, Named,
    },
    rules,
};

type Found<T> = Result<T, Problem>;

const REQUESTS: RangeInclusive<i64> = 1..=10_000_000;
const WAITERS: RangeInclusive<i64> = 0..=10_000_000;

/// Checks a whole file, which ends at `end`.
pub(super) fn resolve(file: FileConfig, end: usize) -> Found<Config> {
    let server = server(&file.server)?;
    let admin = admin(&file.admin)?;
    rules::apart(server.listen, admin.listen).map_err(|rule| {
        let listen = file.admin.listen.as_ref().or(file.server.listen.as_ref());
        Problem::new(listen.map_or(0..0, Spanned::span), rule)
    })?;
    let store = store(&file.store)?;
    let limits = in_order(file.limits, |name, table| limit(name, table, store.op_timeout))?;
    let limit_names = index(limits.iter().map(|limit| &limit.name));
    let mut upstream_limits = Vec::new();
    let upstreams = in_order(file.upstreams, |name, table| {
        upstream_limits.push(references(&table.limits, &limit_names, "limit")?);
        upstream(name, table)
    })?;
    let upstream_names = index(upstreams.iter().map(|upstream| &upstream.name));
    if file.routes.is_empty() {
        return Err(Problem::missing(
            end..end,
            "routes",
            "there must be at least one route: add [[routes]] with upstream = \"...\"",
        ));
    }
    let mut routes = Vec::with_capacity(file.routes.len());
    for table in &file.routes {
        let mut route = route(table, &limit_names, &upstream_names)?;
        let inherited = &upstream_limits[route.upstream];
        route.limits = each_once(route.limits.iter().chain(inherited));
        routes.push(route);
    }
    check_overlaps(&file.routes, &routes)?;
    check_orders(&file.routes, &routes, &limits)?;
    Ok(Config { server, admin: Some(admin), store, limits, upstreams, routes })
}

fn server(file: &FileServer) -> Found<Server> {
    Ok(Server {
        listen: address(&file.listen, "127.0.0.1:8080")?,
        max_in_flight: or(&file.max_in_flight, 10_000, |n| rules::within(n, REQUESTS))?,
        max_connections: or(&file.max_connections, 20_000, |n| rules::within(n, REQUESTS))?,
        trusted_proxies: each(&file.trusted_proxies, rules::network)?,
        header_timeout: positive(&file.header_timeout, 10_000)?,
        keepalive_timeout: positive(&file.keepalive_timeout, 75_000)?,
        stall_timeout: positive(&file.stall_timeout, 60_000)?,
        drain_delay: duration(&file.drain_delay, 0),
        drain_timeout: duration(&file.drain_timeout, 25_000),
    })
}

fn admin(file: &FileAdmin) -> Found<Admin> {
    Ok(Admin { listen: address(&file.listen, "127.0.0.1:9900")? })
}

fn store(file: &FileStore) -> Found<Store> {
    let prefix = text(&file.prefix, "");
    or_text(&file.prefix, "", rules::prefix)?;
    Ok(Store {
        kind: or_text(&file.url, "memory:", rules::store_kind)?,
        prefix: prefix.to_owned(),
        op_timeout: positive(&file.op_timeout, 400)?,
    })
}

fn limit(name: &Spanned<String>, file: &FileLimit, op_timeout: Duration) -> Found<Limit> {
    rules::name(name.get_ref()).at(name.span())?;
    let slots = required(name.span(), &file.slots, "slots")?;
    let slots = rules::within(*slots.get_ref(), rules::SLOTS).at(slots.span())?;
    let lease_span = file.lease.as_ref().map_or(name.span(), Spanned::span);
    let lease = rules::lease(duration(&file.lease, 15_000), op_timeout);
    let lease = match (&file.lease, lease) {
        (None, Err(rule)) => return Err(Problem::missing(lease_span, "lease", rule)),
        (Some(_), lease) => lease.at(lease_span)?,
        (None, Ok(lease)) => lease,
    };
    Ok(Limit {
        name: Arc::from(name.get_ref().as_str()),
        slots,
        lease,
        max_hold: Some(duration(&file.max_hold, 30 * 60_000)).filter(|hold| !hold.is_zero()),
        queue: queue(&file.queue, slots)?,
        recovery: or_text(&file.recovery, "fast", rules::recovery)?,
    })
}

fn queue(file: &Option<Spanned<FileQueue>>, slots: u32) -> Found<Queue> {
    let by_default = FileQueueTable::default();
    let (size, table) = match file.as_ref().map(|queue| (queue.span(), queue.get_ref())) {
        None => (None, &by_default),
        Some((span, FileQueue::Size(size))) => (Some((*size, span)), &by_default),
        Some((_, FileQueue::Table(table))) => {
            let size = table.size.as_ref();
            (size.map(|size| (*size.get_ref(), size.span())), table)
        }
    };
    let size = match size {
        Some((size, span)) => rules::within(size, WAITERS).at(span)?,
        None => (4 * slots).max(64),
    };
    Ok(Queue { size, timeout: positive(&table.timeout, 10_000)? })
}

fn upstream(name: &Spanned<String>, file: &FileUpstream) -> Found<Upstream> {
    rules::name(name.get_ref()).at(name.span())?;
    let endpoints = required(name.span(), &file.endpoints, "endpoints")?;
    let [endpoint] = endpoints.get_ref().as_slice() else {
        let rule = "must hold exactly one endpoint: several aren't supported yet";
        return Err(Problem::new(endpoints.span(), rule));
    };
    Ok(Upstream {
        name: Arc::from(name.get_ref().as_str()),
        endpoint: rules::endpoint(endpoint.get_ref()).at(endpoint.span())?,
        connect_timeout: positive(&file.connect_timeout, 3_000)?,
        response_timeout: positive(&file.response_timeout, 60_000)?,
        idle_timeout: positive(&file.idle_timeout, 60_000)?,
        linger: duration(&file.linger, 250),
        on_client_gone: or_text(&file.on_client_gone, "cancel", rules::on_client_gone)?,
        host: or_text(&file.host, "upstream", rules::host_header)?,
    })
}

/// A route with its own limits only.
fn route(
    table: &Spanned<FileRoute>,
    limits: &HashMap<Arc<str>, usize>,
    upstreams: &HashMap<Arc<str>, usize>,
) -> Found<Route> {
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
        upstream: reference(upstream, upstreams, "upstream")?,
        limits: references(&file.limits, limits, "limit")?,
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
fn check_orders(tables: &[Spanned<FileRoute>], routes: &[Route], limits: &[Limit]) -> Found<()> {
    // Per limit: which limit is taken right after it, and by which route.
    let mut after: Vec<Vec<(usize, usize)>> = vec![Vec::new(); limits.len()];
    for (index, route) in routes.iter().enumerate() {
        for (&first, &second) in route.limits.iter().zip(route.limits.iter().skip(1)) {
            if let Some(other) = route_between(&after, second, first) {
                let rule = format!(
                    "takes limit `{}` before `{}`, and route `{}` the other way round: they could wait for each other",
                    limits[first].name, limits[second].name, routes[other].name
                );
                return Err(Problem::new(order_place(&tables[index]), rule)
                    .against(order_place(&tables[other])));
            }
            after[first].push((second, index));
        }
    }
    Ok(())
}

/// The route that begins a way from one limit to another, if there is one.
fn route_between(after: &[Vec<(usize, usize)>], from: usize, to: usize) -> Option<usize> {
    let mut seen = HashSet::from([from]);
    let mut open: Vec<_> = after[from].clone();
    while let Some((limit, route)) = open.pop() {
        if limit == to {
            return Some(route);
        }
        if seen.insert(limit) {
            open.extend(after[limit].iter().map(|&(next, _)| (next, route)));
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
    tables: Named<T>,
    mut resolve: impl FnMut(&Spanned<String>, &T) -> Found<U>,
) -> Found<Vec<U>> {
    let mut tables: Vec<_> = tables.into_iter().collect();
    tables.sort_by_key(|(name, _)| name.span().start);
    tables.iter().map(|(name, table)| resolve(name, table)).collect()
}

fn index<'a>(names: impl Iterator<Item = &'a Arc<str>>) -> HashMap<Arc<str>, usize> {
    names.enumerate().map(|(index, name)| (Arc::clone(name), index)).collect()
}

fn references(
    names: &Option<Vec<Spanned<String>>>,
    known: &HashMap<Arc<str>, usize>,
    kind: &str,
) -> Found<Vec<usize>> {
    let names = names.as_deref().unwrap_or_default();
    names.iter().map(|name| reference(name, known, kind)).collect()
}

fn reference(name: &Spanned<String>, known: &HashMap<Arc<str>, usize>, kind: &str) -> Found<usize> {
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
