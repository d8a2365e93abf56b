//! Explains a configuration: what is resolved, what it can bear, and what looks wrong.

use std::{cmp::Reverse, fmt::Write, time::Duration};

use crate::config::{Config, HostPattern, Limit, Route, StoreKind};

/// A waiter's connection, head and task in this process; an estimate.
const WAITER_IN_PROCESS: u64 = 16 * 1024;

/// A waiter's entries in Redis; an estimate.
const WAITER_IN_REDIS: u64 = 250;

const HOLDS_MS: [u64; 4] = [10, 100, 1_000, 10_000];

/// Returns what `tidegate check` prints.
pub fn report(config: &Config) -> String {
    let mut out = String::new();
    section(&mut out, "routes, in the order they match:", routes(config));
    section(&mut out, "limits:", config.limits.iter().map(limit));
    for warning in warnings(config) {
        line(&mut out, &format!("warning: {warning}"));
    }
    out
}

fn section(out: &mut String, title: &str, items: impl IntoIterator<Item = String>) {
    line(out, title);
    for item in items {
        line(out, &item);
    }
    line(out, "");
}

fn line(out: &mut String, text: &str) {
    writeln!(out, "{text}").expect("a String takes any text");
}

fn routes(config: &Config) -> Vec<String> {
    let mut routes: Vec<_> = config.routes.iter().collect();
    routes.sort_by_key(|route| match_order(route));
    routes.into_iter().map(|route| describe(route, config)).collect()
}

/// Exact host, wildcard (the longest first), any host; then the longest path. Else as in the file.
fn match_order(route: &Route) -> (u8, Reverse<usize>, &str, Reverse<usize>) {
    let (rank, length, host) = match &route.host {
        HostPattern::Exact(host) => (0, 0, host.as_str()),
        HostPattern::Suffix(suffix) => (1, suffix.len(), suffix.as_str()),
        HostPattern::Any => (2, 0, ""),
    };
    let path = route.path.trim_end_matches('/').len();
    (rank, Reverse(length), host, Reverse(path))
}

fn describe(route: &Route, config: &Config) -> String {
    let host = match &route.host {
        HostPattern::Any => "any host".to_owned(),
        HostPattern::Exact(host) => host.clone(),
        HostPattern::Suffix(suffix) => format!("*{suffix}"),
    };
    let methods = match route.methods.as_slice() {
        [] => "all methods".to_owned(),
        methods => methods.iter().map(|method| method.as_str()).collect::<Vec<_>>().join(", "),
    };
    let limits = match limits_of(route, config).as_slice() {
        [] => "no limit".to_owned(),
        limits => limits
            .iter()
            .map(|limit| format!("{} ({})", limit.name, limit.slots))
            .collect::<Vec<_>>()
            .join(", then "),
    };
    let upstream = &config.upstreams[route.upstream];
    format!(
        "  {host} {path}  {methods}  -> {name} {endpoint}  limits: {limits}",
        path = route.path,
        name = upstream.name,
        endpoint = upstream.endpoint,
    )
}

fn limits_of<'a>(route: &Route, config: &'a Config) -> Vec<&'a Limit> {
    route.limits.iter().map(|&limit| &config.limits[limit]).collect()
}

fn limit(limit: &Limit) -> String {
    let max_hold = limit.max_hold.map_or("none".to_owned(), short);
    let waiters = u64::from(limit.queue.size);
    format!(
        "  {name}: {slots} slots, lease {lease}, max_hold {max_hold}, queue {waiters} for {timeout}\n\
         \x20   serves at most {rates}\n\
         \x20   a full queue takes about {process} in the process, {redis} in a Redis store",
        name = limit.name,
        slots = limit.slots,
        lease = short(limit.lease),
        timeout = short(limit.queue.timeout),
        rates = HOLDS_MS.map(|hold| rate(limit.slots, hold)).join(", "),
        process = bytes(waiters * WAITER_IN_PROCESS),
        redis = bytes(waiters * WAITER_IN_REDIS),
    )
}

/// Little's law: N slots, each held for this long, turn over N / hold requests a second.
fn rate(slots: u32, hold_ms: u64) -> String {
    let per_second = f64::from(slots) * 1_000.0 / hold_ms as f64;
    let hold = short(Duration::from_millis(hold_ms));
    format!("{per_second}/s at {hold}")
}

fn short(duration: Duration) -> String {
    humantime::format_duration(duration).to_string().replace(' ', "")
}

fn bytes(bytes: u64) -> String {
    const KIB: u64 = 1024;
    match bytes {
        0..KIB => format!("{bytes} B"),
        KIB..0x10_0000 => format!("{} KiB", bytes.div_ceil(KIB)),
        _ => format!("{} MiB", bytes.div_ceil(KIB * KIB)),
    }
}

fn warnings(config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    if config.store.kind == StoreKind::Memory {
        warnings.push(
            "the store is memory: it counts per process; a fleet shares its slots only in Redis"
                .to_owned(),
        );
    }
    for route in &config.routes {
        warnings.extend(outer_larger(route, config));
    }
    warnings.extend(unlimited(config));
    warnings.extend(unused(config));
    warnings
}

/// An outer limit with more slots than an inner one never fills: its holders queue at the inner one.
fn outer_larger(route: &Route, config: &Config) -> Vec<String> {
    let limits = limits_of(route, config);
    let mut warnings = Vec::new();
    for (position, outer) in limits.iter().enumerate() {
        for inner in &limits[position + 1..] {
            if outer.slots > inner.slots {
                warnings.push(format!(
                    "route `{}`: outer limit `{}` ({} slots) is larger than inner limit `{}` ({} slots), so it holds slots while it waits there",
                    route.name, outer.name, outer.slots, inner.name, inner.slots
                ));
            }
        }
    }
    warnings
}

fn unlimited(config: &Config) -> impl Iterator<Item = String> {
    let routes = config.routes.iter().filter(|route| route.limits.is_empty());
    routes.map(|route| {
        format!(
            "route `{}`: upstream `{}` is without any limit",
            route.name, config.upstreams[route.upstream].name
        )
    })
}

fn unused(config: &Config) -> impl Iterator<Item = String> {
    let limits = config.limits.iter().enumerate();
    let limits = limits
        .filter(|(index, _)| !config.routes.iter().any(|route| route.limits.contains(index)))
        .map(|(_, limit)| format!("limit `{}` is used by no route", limit.name));
    let upstreams = config.upstreams.iter().enumerate();
    let upstreams = upstreams
        .filter(|(index, _)| !config.routes.iter().any(|route| route.upstream == *index))
        .map(|(_, upstream)| format!("upstream `{}` is used by no route", upstream.name));
    limits.chain(upstreams)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        [limits.wide]
        slots = 20
        queue = 100
        [limits.narrow]
        slots = 5
        max_hold = "0s"
        [limits.idle]
        slots = 1
        [upstreams.app]
        endpoints = ["http://127.0.0.1:3000/base"]
        limits = ["narrow"]
        [upstreams.free]
        endpoints = ["http://127.0.0.1:3001"]
        [upstreams.idle]
        endpoints = ["http://127.0.0.1:3002"]
        [[routes]]
        upstream = "free"
        [[routes]]
        path = "/long/path"
        methods = ["GET", "POST"]
        upstream = "app"
        limits = ["wide"]
        [[routes]]
        host = "*.example.com"
        upstream = "app"
        [[routes]]
        host = "a.example.com"
        upstream = "app"
    "#;

    fn report_of(text: &str) -> String {
        report(&Config::parse("proxy.toml", text, |_| None).unwrap())
    }

    #[test]
    fn explains_routes_limits_and_figures() {
        let report = report_of(TEXT);
        let expected = "\
routes, in the order they match:
  a.example.com /  all methods  -> app http://127.0.0.1:3000/base  limits: narrow (5)
  *.example.com /  all methods  -> app http://127.0.0.1:3000/base  limits: narrow (5)
  any host /long/path  GET, POST  -> app http://127.0.0.1:3000/base  limits: wide (20), then narrow (5)
  any host /  all methods  -> free http://127.0.0.1:3001/  limits: no limit

limits:
  wide: 20 slots, lease 15s, max_hold 30m, queue 100 for 10s
    serves at most 2000/s at 10ms, 200/s at 100ms, 20/s at 1s, 2/s at 10s
    a full queue takes about 2 MiB in the process, 25 KiB in a Redis store
  narrow: 5 slots, lease 15s, max_hold none, queue 64 for 10s
    serves at most 500/s at 10ms, 50/s at 100ms, 5/s at 1s, 0.5/s at 10s
";
        assert!(report.starts_with(expected), "{report}");
    }

    #[test]
    fn warns() {
        let report = report_of(TEXT);
        let warnings: Vec<_> =
            report.lines().filter_map(|line| line.strip_prefix("warning: ")).collect();
        let expected = [
            "the store is memory",
            "route `/long/path`: outer limit `wide` (20 slots) is larger than inner limit `narrow` (5 slots)",
            "route `/`: upstream `free` is without any limit",
            "limit `idle` is used by no route",
            "upstream `idle` is used by no route",
        ];
        assert_eq!(warnings.len(), expected.len(), "{report}");
        for (warning, expected) in warnings.iter().zip(expected) {
            assert!(warning.starts_with(expected), "{warning}");
        }
    }

    #[test]
    fn a_sound_fleet_has_no_warning() {
        let report = report_of(
            r#"
            store.url = "redis://127.0.0.1"
            limits.app.slots = 5
            upstreams.app = { endpoints = ["http://127.0.0.1:3000"], limits = ["app"] }
            routes = [{ upstream = "app" }]
            "#,
        );
        assert!(!report.contains("warning"), "{report}");
    }
}
