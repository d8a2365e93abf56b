//! Explains a configuration: what is resolved, what it can bear, and what looks wrong.

use std::{cmp::Reverse, fmt::Write, time::Duration};

use crate::config::{
    ClassRule, Config, Dialect, HostPattern, Key, Limit, Mode, OnLeaseLost, Rate, Route, Step,
    WeightRule,
};
use crate::copies::{ALL_COPIES, LONGEST_COPY};

mod warnings;

use warnings::warnings;

/// A waiter's connection, head and task in this process; an estimate.
const WAITER_IN_PROCESS: u64 = 16 * 1024;

/// A waiter's entries in Redis; an estimate.
const WAITER_IN_REDIS: u64 = 250;

const HOLDS_MS: [u64; 4] = [10, 100, 1_000, 10_000];

/// Returns what `tidegate check` prints.
pub fn report(config: &Config) -> String {
    let mut out = String::new();
    section(&mut out, "routes, in the order they match:", routes(config));
    section(&mut out, "classes, the highest first:", [classes(config)]);
    section(&mut out, "limits:", config.limits.iter().map(|each| limit(each, config)));
    if !config.rates.is_empty() {
        section(&mut out, "rates:", config.rates.iter().map(rate_limit));
    }
    let is_stale = |step: &Step| matches!(step, Step::Stale { .. });
    if config.routes.iter().any(|route| route.on_full.iter().any(is_stale)) {
        section(&mut out, "copies, for the steps with `stale`:", [copies()]);
    }
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
    let endpoints: Vec<_> = upstream.endpoints.iter().map(ToString::to_string).collect();
    let mut text = format!(
        "  {host} {path}  {methods}  -> {name} {endpoints}  limits: {limits}",
        path = route.path,
        name = upstream.name,
        endpoints = endpoints.join(", "),
    );
    for detail in details(route, config) {
        text += "\n    ";
        text += &detail;
    }
    text
}

/// What a request of the route is, and what happens when it isn't admitted.
fn details(route: &Route, config: &Config) -> Vec<String> {
    let mut details = vec![format!(
        "class {}, weight {}, dialect {}",
        class(&route.class, config),
        weight(&route.weight),
        dialect(route.dialect),
    )];
    if !route.rates.is_empty() {
        let names = route.rates.iter().map(|&rate| &*config.rates[rate].name);
        details.push(format!("rates: {}", names.collect::<Vec<_>>().join(", ")));
    }
    if let Some(header) = &route.deadline_header {
        details.push(format!("the client's deadline: header {header}"));
    }
    if !route.on_full.is_empty() {
        let steps: Vec<_> = route.on_full.iter().map(|each| step(each, config)).collect();
        details.push(format!("when full: {}", steps.join(", then ")));
    }
    details
}

fn class(rule: &ClassRule, config: &Config) -> String {
    let name = |class: usize| &config.classes.order[class];
    match rule {
        ClassRule::Fixed(class) => name(*class).to_string(),
        ClassRule::Header { name: header, default } => {
            format!("by header {header}, else {}", name(*default))
        }
        ClassRule::ByKey { key: by, classes, default } => {
            let values: Vec<_> =
                classes.iter().map(|(value, class)| format!("{value} {}", name(*class))).collect();
            format!("by {} ({}), else {}", key(by), values.join(", "), name(*default))
        }
    }
}

fn weight(rule: &WeightRule) -> String {
    match rule {
        WeightRule::Fixed(weight) => weight.to_string(),
        WeightRule::Header { name, max } => format!("by header {name}, at most {max}"),
        WeightRule::Bytes { per_slot, max } => {
            format!("one for each {} of body, at most {max}", bytes(*per_slot))
        }
    }
}

fn dialect(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Problem => "problem",
        Dialect::OpenAi => "openai",
        Dialect::Anthropic => "anthropic",
        Dialect::Text => "text",
    }
}

fn step(step: &Step, config: &Config) -> String {
    match step {
        Step::Upstream { upstream, forward_credentials } => {
            let credentials = if *forward_credentials { "with" } else { "without" };
            let upstream = &config.upstreams[*upstream].name;
            format!("upstream {upstream} {credentials} the client's credentials")
        }
        Step::Stale { allowance } => {
            format!("a copy at most {} past its freshness", short(*allowance))
        }
        Step::Respond { status, content_type, .. } => {
            format!("respond {} {}", status.as_u16(), content_type.to_str().unwrap_or("-"))
        }
    }
}

fn key(key: &Key) -> String {
    match key {
        Key::Header(name) => format!("header {name}"),
        Key::ClientIp => "client-ip".to_owned(),
    }
}

fn limits_of<'a>(route: &Route, config: &'a Config) -> Vec<&'a Limit> {
    route.limits.iter().map(|&limit| &config.limits[limit]).collect()
}

fn classes(config: &Config) -> String {
    let ageing = short(config.classes.ageing);
    format!(
        "  {}; a waiter counts as one higher for each {ageing}",
        config.classes.order.join(", ")
    )
}

fn limit(limit: &Limit, config: &Config) -> String {
    let max_hold = limit.max_hold.map_or("none".to_owned(), short);
    let waiters = u64::from(limit.queue.size);
    let mut text = format!(
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
    );
    let names = config.classes.order.iter().enumerate();
    let caps: Vec<_> = names.map(|(class, name)| cap(limit, class, name)).collect();
    text += &format!("\n    classes: {}", caps.join(", "));
    if let Some(by) = &limit.key {
        let others = limit.slots_for.iter().map(|(value, slots)| format!(", {value} has {slots}"));
        let others: String = others.collect();
        text += &format!("\n    all of this for each value of {}{others}", key(by));
    }
    text += &match limit.mode {
        Mode::Enforce => format!("\n    refuses with {}", limit.status.as_u16()),
        Mode::Shadow => "\n    shadow: admits everybody and counts what it would refuse".to_owned(),
    };
    if limit.on_lease_lost == OnLeaseLost::Cut {
        text += "\n    cuts a request before its lease can be over";
    }
    if let Some(header) = &limit.holder_header {
        text += &format!("\n    tells the holder in {header}");
    }
    if let Some(header) = &limit.fence_header {
        text += &format!("\n    tells the number of the grant in {header}");
    }
    text
}

/// "background 10 (share 0.5, queue 0)"
fn cap(limit: &Limit, class: usize, name: &str) -> String {
    let policy = &limit.classes[class];
    let mut said = Vec::new();
    if policy.share < 1.0 {
        said.push(format!("share {}", policy.share));
    }
    match (policy.queue, policy.timeout) {
        (None, None) => {}
        (Some(size), None) => said.push(format!("queue {size}")),
        (None, Some(timeout)) => said.push(format!("queue for {}", short(timeout))),
        (Some(size), Some(timeout)) => said.push(format!("queue {size} for {}", short(timeout))),
    }
    match said.as_slice() {
        [] => format!("{name} {}", limit.cap(class)),
        said => format!("{name} {} ({})", limit.cap(class), said.join(", ")),
    }
}

fn rate_limit(rate: &Rate) -> String {
    let each = rate.bytes_per_key();
    let (whose, memory) = match &rate.key {
        None => (String::new(), format!("takes about {}", bytes(each))),
        Some(by) => (
            format!(" for each value of {}", key(by)),
            format!(
                "takes about {} per value, {} per 1,000 values",
                bytes(each),
                bytes(1_000 * each)
            ),
        ),
    };
    let mode = match rate.mode {
        Mode::Enforce => "",
        Mode::Shadow => ", shadow: only counts what it would refuse",
    };
    format!(
        "  {}: {} requests within any {}{whose}{mode}\n    {memory} in a Redis store",
        rate.name,
        rate.requests,
        short(rate.window),
    )
}

fn copies() -> String {
    let (all, longest) = (bytes(ALL_COPIES as u64), bytes(LONGEST_COPY as u64));
    format!("  take at most {all} in the process, {longest} each")
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
    class normal, weight 1, dialect problem
  *.example.com /  all methods  -> app http://127.0.0.1:3000/base  limits: narrow (5)
    class normal, weight 1, dialect problem
  any host /long/path  GET, POST  -> app http://127.0.0.1:3000/base  limits: wide (20), then narrow (5)
    class normal, weight 1, dialect problem
  any host /  all methods  -> free http://127.0.0.1:3001/  limits: no limit
    class normal, weight 1, dialect problem

classes, the highest first:
  critical, normal, background; a waiter counts as one higher for each 5s

limits:
  wide: 20 slots, lease 15s, max_hold 30m, queue 100 for 10s
    serves at most 2000/s at 10ms, 200/s at 100ms, 20/s at 1s, 2/s at 10s
    a full queue takes about 2 MiB in the process, 25 KiB in a Redis store
    classes: critical 20, normal 20, background 20
    refuses with 503
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

    const POLICIES: &str = r#"
        server.trusted_proxies = ["10.0.0.0/8"]
        store.url = "redis://127.0.0.1"
        [limits.tenant]
        slots = 5
        key = "header:x-tenant"
        slots_for = { big = 50 }
        classes.normal = { queue = { size = 3, timeout = "4s" } }
        classes.background = { share = 0.5, queue = 0 }
        holder_header = "x-holder"
        on_lease_lost = "cut"
        [limits.wide]
        slots = 20
        mode = "shadow"
        [rates.per-tenant]
        requests = 100
        window = "1m"
        key = "header:x-tenant"
        [rates.all]
        requests = 1000
        window = "1s"
        mode = "shadow"
        [upstreams.app]
        endpoints = ["http://127.0.0.1:3000"]
        limits = ["wide"]
        [upstreams.cheap]
        endpoints = ["http://127.0.0.1:3001"]
        [[routes]]
        upstream = "app"
        limits = ["tenant"]
        rates = ["per-tenant", "all"]
        class = { header = "x-priority", default = "normal" }
        weight = { bytes_per_slot = "1MiB", max = 2 }
        dialect = "openai"
        deadline_header = "request-timeout"
        on_full = [
            { upstream = "cheap", forward_credentials = true },
            { stale = "10m" },
            { respond = 200, body = "{}", content_type = "application/json" },
        ]
        [[routes]]
        path = "/key"
        upstream = "app"
        class = { key = "client-ip", classes = { "::1" = "critical" } }
        weight = { header = "x-weight", max = 4 }
    "#;

    #[test]
    fn explains_policies() {
        let report = report_of(POLICIES);
        let expected = "\
routes, in the order they match:
  any host /key  all methods  -> app http://127.0.0.1:3000/  limits: wide (20)
    class by client-ip (::1 critical), else normal, weight by header x-weight, at most 4, dialect problem
  any host /  all methods  -> app http://127.0.0.1:3000/  limits: tenant (5), then wide (20)
    class by header x-priority, else normal, weight one for each 1 MiB of body, at most 2, dialect openai
    rates: per-tenant, all
    the client's deadline: header request-timeout
    when full: upstream cheap with the client's credentials, then a copy at most 10m past its freshness, then respond 200 application/json
";
        assert!(report.starts_with(expected), "{report}");
        let blocks = [
            "
    classes: critical 5, normal 5 (queue 3 for 4s), background 2 (share 0.5, queue 0)
    all of this for each value of header x-tenant, big has 50
    refuses with 429
    cuts a request before its lease can be over
    tells the holder in x-holder
",
            "
    classes: critical 20, normal 20, background 20
    shadow: admits everybody and counts what it would refuse

rates:
  per-tenant: 100 requests within any 1m for each value of header x-tenant
    takes about 6 KiB per value, 5 MiB per 1,000 values in a Redis store
  all: 1000 requests within any 1s, shadow: only counts what it would refuse
    takes about 147 KiB in a Redis store

\
copies, for the steps with `stale`:
  take at most 64 MiB in the process, 1 MiB each
",
        ];
        for block in blocks {
            assert!(report.contains(block), "{block} in {report}");
        }
        assert!(!report.contains("warning"), "{report}");
    }

    #[test]
    fn warns_of_policies() {
        let change = |from: &str, to: &str| {
            assert!(POLICIES.contains(from), "{from}");
            report_of(&POLICIES.replacen(from, to, 1))
        };
        let cases = [
            (
                change("[\"10.0.0.0/8\"]", "[]"),
                "route `/`: class is taken from header x-priority, which counts from trusted proxies only",
            ),
            (
                change("[\"10.0.0.0/8\"]", "[]"),
                "route `/key`: weight is taken from header x-weight, which counts from trusted proxies only",
            ),
            (
                change(
                    "endpoints = [\"http://127.0.0.1:3000\"]\n        limits = [\"wide\"]",
                    "endpoints = [\"http://127.0.0.1:3000\"]",
                ),
                "route `/`: keyed limit `tenant` has no wide one behind it",
            ),
            (
                change("redis://127.0.0.1\"", "redis://127.0.0.1\"\nstore.when_down = \"open\""),
                "store.when_down is \"open\": no limit holds while the store is away",
            ),
            (
                change("max = 2", "max = 6"),
                "route `/`: a request may weigh 6, more than limit `tenant` has slots (5)",
            ),
            (
                change("max = 2", "max = 3"),
                "route `/`: a request may weigh 3, more than class `background` may use of limit `tenant` (2 slots)",
            ),
            (
                change("rates = [\"per-tenant\", \"all\"]", "rates = [\"all\"]"),
                "rate `per-tenant` is used by no route",
            ),
            (
                change("{ upstream = \"cheap\", forward_credentials = true },", ""),
                "upstream `cheap` is used by no route",
            ),
        ];
        for (report, expected) in cases {
            assert!(report.contains(&format!("warning: {expected}")), "{expected} in {report}");
        }
        // Neither a class that the route can't have matters, nor a weight while there is no slot.
        let normal =
            POLICIES.replace("{ header = \"x-priority\", default = \"normal\" }", "\"normal\"");
        let report = report_of(&normal.replace("max = 2", "max = 3"));
        assert!(!report.contains("too_heavy"), "{report}");
        let report = report_of(&POLICIES.replace("slots = 5", "slots = 0"));
        assert!(!report.contains("too_heavy"), "{report}");
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
