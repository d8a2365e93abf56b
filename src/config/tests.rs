//! Checks the configuration against bad inputs, defaults and the file in the repository.

use std::time::Duration;

use http::Method;

use super::*;

mod crossing;
mod policy;
mod telling;

/// What a table leaves out so that the rest is a valid file.
const REST: &str = r#"
[limits.app]
slots = 5
[limits.narrow]
slots = 2
[upstreams.app]
endpoints = ["http://127.0.0.1:3000"]
limits = ["app"]
[[routes]]
upstream = "app"
"#;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse("proxy.toml", text, |variable| match variable {
        "PORT" => Some("3100".to_owned()),
        "PASSWORD" => Some("hunter2".to_owned()),
        _ => None,
    })
}

fn error_of(text: &str) -> String {
    match parse(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(error) => error.to_string(),
    }
}

fn first_line(text: &str) -> String {
    error_of(text).lines().next().unwrap().to_owned()
}

/// Text of one or more lines that come first -> what the first line of the error starts with, after `proxy.toml:`.
const BAD_HEADS: &[(&str, &str)] = &[
    (
        "[sever]",
        "1:2: sever: unknown key, did you mean `server`? expected one of server, admin, log, traces, store, classes, limits, rates, upstreams, routes",
    ),
    (
        "[server]\nlisten = \"127.0.0.1:1\"\ntrustd_proxies = []",
        "3:1: server.trustd_proxies: unknown key, did you mean `trusted_proxies`? expected one of listen, ",
    ),
    (
        "[server]\nlisten = \"localhost:80\"",
        "2:10: server.listen: must be an IP address and a port",
    ),
    ("[server]\nlisten = 80", "2:10: server.listen: must be a text in quotes"),
    ("[server]\nlisten = \"127.0.0.1:9900\"", "2:10: server.listen: must differ"),
    (
        "[server]\nlisten = \"[::1]:1\"\n[admin]\nlisten = \"[::1]:1\"",
        "4:10: admin.listen: must differ",
    ),
    ("[server]\nmax_in_flight = 0", "2:17: server.max_in_flight: must be 1 to "),
    ("[server]\nmax_in_flight = \"many\"", "2:17: server.max_in_flight: must be a whole number"),
    ("[server]\nmax_connections = -1", "2:19: server.max_connections: must be 1 to "),
    (
        "[server]\nmax_connections_per_address = 0",
        "2:31: server.max_connections_per_address: must be 1 to ",
    ),
    (
        "[server]\ntrusted_proxies = [\"10.0.0.0/8\", \"10.0.0.0/33\"]",
        "2:34: server.trusted_proxies[1]: must be a CIDR",
    ),
    ("[server]\ntrusted_proxies = \"10.0.0.0/8\"", "2:19: server.trusted_proxies: must be a list"),
    (
        "[server]\nheader_timeout = 10",
        "2:18: server.header_timeout: a bare number has no unit: write \"10s\" or \"10ms\"",
    ),
    (
        "[server]\nheader_timeout = \"10\"",
        "2:18: server.header_timeout: must be a duration such as \"250ms\", \"10s\" or \"5m\"",
    ),
    ("[server]\nheader_timeout = true", "2:18: server.header_timeout: must be a duration such as"),
    ("[server]\nheader_timeout = \"0s\"", "2:18: server.header_timeout: must be at least 1ms"),
    ("[server]\ndrain_timeout = \"2years\"", "2:17: server.drain_timeout: must be at most 365days"),
    ("[admin]\nlisten = \"none\"", "2:10: admin.listen: must be an IP address and a port"),
    ("admin = 5", "1:9: admin: must be a table"),
    (
        "[store]\nurl = \"memory\"",
        "2:7: store.url: must be \"memory:\" or begin with redis://, rediss://, redis+sentinel:// or",
    ),
    (
        "[store]\nurl = \"redis+sentinel://a:1,b:x/main\"",
        "2:7: store.url: must be redis+sentinel://[user][:password@]host:port,host2:port/name-of",
    ),
    ("[store]\nurl = \"redis+sentinel://a,b\"", "2:7: store.url: must be redis+sentinel://"),
    ("[store]\nurl = \"redis+sentinel://a,,b/main\"", "2:7: store.url: must be redis+sentinel://"),
    ("[store]\nurl = \"redis+sentinel://a/ma in\"", "2:7: store.url: must be redis+sentinel://"),
    (
        "[store]\nurl = \"redis://a\"\ntls = { ca = \"Cargo.toml\" }",
        "3:7: store.tls: needs a url that begins with rediss:// or rediss+sentinel://",
    ),
    (
        "[store]\nurl = \"rediss://a\"\ntls = { ca = \"nowhere.pem\" }",
        "3:14: store.tls.ca: the file can't be read: No such file",
    ),
    (
        "[store]\nurl = \"rediss://a\"\ntls = { ca = \"Cargo.toml\" }",
        "3:14: store.tls.ca: must be a file with certificates in PEM",
    ),
    (
        "[store]\nurl = \"rediss://a\"\ntls = { client_key = \"Cargo.toml\" }",
        "3:22: store.tls.client_key: must be a file with a private key in PEM",
    ),
    ("[store]\nurl = \"redis://host:port\"", "2:7: store.url: must be a Redis URL"),
    (
        "[store]\nfailover = \"open\"",
        "2:1: store.failover: unknown key, expected one of url, tls, op_timeout, when_down, prefix, digest_key, sentinel_user, sentinel_password",
    ),
    ("[store]\nprefix = \"a b\"", "2:10: store.prefix: must be at most 128 printable"),
    (
        "[store]\nop_timeout = \"4s\"\n[limits.a]\nslots = 1",
        "3:9: limits.a.lease: must be at least 4 x store.op_timeout, here 16s",
    ),
    ("[limits.a]", "1:9: limits.a.slots: must be given, it has no default"),
    ("[limits.a]\nslots = -1", "2:9: limits.a.slots: must be 0 to 1000000"),
    ("[limits.a]\nslots = 1000001", "2:9: limits.a.slots: must be 0 to 1000000"),
    ("[limits.a]\nslots = 5\nlease = \"1s\"", "3:9: limits.a.lease: must be at least 2s"),
    (
        "[store]\nop_timeout = \"1s\"\n[limits.a]\nslots = 5\nlease = \"3s\"",
        "5:9: limits.a.lease: must be at least 4 x store.op_timeout, here 4s",
    ),
    ("[limits.a]\nslots = 5\nqueue = -1", "3:9: limits.a.queue: must be 0 to "),
    (
        "[limits.a]\nslots = 5\nqueue = \"long\"",
        "3:9: limits.a.queue: must be a number or a table such as { size",
    ),
    ("[limits.a]\nslots = 5\nqueue = { size = -1 }", "3:18: limits.a.queue.size: must be 0 to "),
    (
        "[limits.a]\nslots = 5\nqueue = { sise = 1 }",
        "3:11: limits.a.queue.sise: unknown key, did you mean `size`?",
    ),
    (
        "[limits.a]\nslots = 5\nqueue = { timeout = 1 }",
        "3:21: limits.a.queue.timeout: a bare number",
    ),
    (
        "[limits.a]\nslots = 5\nrecovery = \"slow\"",
        "3:12: limits.a.recovery: must be \"fast\" or \"strict\"",
    ),
    (
        "[limits.a]\nslots = 5\non_lease_lost = \"drop\"",
        "3:17: limits.a.on_lease_lost: must be \"keep\" or \"cut\"",
    ),
    (
        "[store]\nwhen_down = \"share\"",
        "2:13: store.when_down: must be \"closed\", \"local-share\" or \"open\"",
    ),
    ("[limits.\"a b\"]\nslots = 5", "1:9: limits.a b: a name must be 1 to 128"),
    ("[limits.a]\nslots = 5\n[limits.a]\nslots = 6", "3:9: duplicate key a"),
    ("[upstreams.a]", "1:12: upstreams.a.endpoints: must be given"),
    ("[upstreams.a]\nendpoints = []", "2:13: upstreams.a.endpoints: must hold 1 to 256 endpoints"),
    (
        "[upstreams.a]\nendpoints = [\"http://a\", \"https://b\"]",
        "2:26: upstreams.a.endpoints[1]: must have the same scheme and path",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a/x\", \"http://b/y\"]",
        "2:28: upstreams.a.endpoints[1]: must have the same scheme and path",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\", \"http://A/\"]",
        "2:26: upstreams.a.endpoints[1]: is listed twice",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nresolve_interval = \"0s\"",
        "3:20: upstreams.a.resolve_interval: must be at least 1ms",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nhealth = { interval = \"1s\" }",
        "3:10: upstreams.a.health.path: must be given",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nhealth = { path = \"health\" }",
        "3:19: upstreams.a.health.path: must be a path such as",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nhealth = { path = \"/\", healthy = 0 }",
        "3:34: upstreams.a.health.healthy: must be 1 to 1000",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nejection = { statuses = [500, 50] }",
        "3:31: upstreams.a.ejection.statuses[1]: must be 100 to 599",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nejection = { share = 1.5 }",
        "3:22: upstreams.a.ejection.share: must be above 0 and at most 1",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nejection = { time = \"10m\" }",
        "3:21: upstreams.a.ejection.time: max_time must be no shorter than time",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nping_interval = \"10s\"",
        "3:17: upstreams.a.ping_interval: needs http2 = true",
    ),
    ("[upstreams.a]\nendpoints = [\"http://a\"]\nhttp2 = \"yes\"", "3:9: upstreams.a.http2: "),
    (
        "[upstreams.a]\nendpoints = [\"a:80\"]",
        "2:14: upstreams.a.endpoints[0]: must begin with http:// or https://",
    ),
    (
        "[upstreams.a]\nendpoints = [\"/a\"]",
        "2:14: upstreams.a.endpoints[0]: must begin with http:// or https://",
    ),
    (
        "[upstreams.a]\nendpoints = [\"ftp://a\"]",
        "2:14: upstreams.a.endpoints[0]: must begin with http",
    ),
    ("[upstreams.a]\nendpoints = [\"http://\"]", "2:14: upstreams.a.endpoints[0]: must be a URL"),
    (
        "[upstreams.a]\nendpoints = [\"http://a?b\"]",
        "2:14: upstreams.a.endpoints[0]: must have no query",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a#b\"]",
        "2:14: upstreams.a.endpoints[0]: must have no query",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://u:p@a\"]",
        "2:14: upstreams.a.endpoints[0]: must have no user",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a:0\"]",
        "2:14: upstreams.a.endpoints[0]: must name a host and",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a:99999\"]",
        "2:14: upstreams.a.endpoints[0]: must name a host and",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nlimits = [\"b\"]",
        "3:11: upstreams.a.limits[0]: must name an existing limit: there is app, narrow",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\non_client_gone = \"x\"",
        "3:18: upstreams.a.on_client_gone: must be \"cancel\" or \"finish\"",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a\"]\nhost = \"x\"",
        "3:8: upstreams.a.host: must be \"upstream\" or \"keep\"",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a:${NONE}\"]",
        "2:14: upstreams.a.endpoints[0]: environment variable NONE is not set",
    ),
    (
        "[upstreams.a]\nendpoints = [\"http://a:${PORT\"]",
        "2:14: upstreams.a.endpoints[0]: `${` must be followed by",
    ),
    ("[[routes]]", "1:1: routes[0].upstream: must be given"),
    (
        "[[routes]]\nupstream = \"b\"",
        "2:12: routes[0].upstream: must name an existing upstream: there is app",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nlimits = [\"b\"]",
        "3:11: routes[0].limits[0]: must name an existing limit",
    ),
    ("[[routes]]\nupstream = \"app\"\npath = \"v1\"", "3:8: routes[0].path: must begin with `/`"),
    (
        "[[routes]]\nupstream = \"app\"\npath = \"/v1?a\"",
        "3:8: routes[0].path: must be a plain path prefix",
    ),
    (
        "[[routes]]\nupstream = \"app\"\npath = \"/v1/*\"",
        "3:8: routes[0].path: must be a plain path prefix",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nmethods = [\"GET\", \"PO ST\"]",
        "3:19: routes[0].methods[1]: must be an HTTP method",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nmethods = [\"post\"]",
        "3:12: routes[0].methods[0]: methods are upper case: write \"POST\"",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nhost = \"*\"",
        "3:8: routes[0].host: must name a host; leave the key out",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nhost = \"a.*.b\"",
        "3:8: routes[0].host: must be a host such as",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nhost = \"*a.b\"",
        "3:8: routes[0].host: must be a host such as",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nhost = \"a:80\"",
        "3:8: routes[0].host: must be a host such as",
    ),
    ("[[routes]]\nupstream = \"app\"\nhost = \"\"", "3:8: routes[0].host: must be a host such as"),
    ("[[routes]]\nupstream = \"app\"\nname = \"\"", "3:8: routes[0].name: must be 1 to 128"),
    ("[[routes]]\nupstream = \"app\"\nwaight = 1", "3:1: routes[0].waight: unknown key, did you"),
    (
        "[[routes]]\nupstream = \"app\"\n",
        "13:12: routes[1].upstream: has the same host, path and a method in common",
    ),
    ("[server]\nlisten = ", "2:10: string values must be quoted"),
    ("[server]\nlisten = \"a", "2:12: invalid basic string"),
    ("\"é\" = [\"é\", 1 ] # é", "1:1: é: unknown key"),
    ("[server]\n\"é\" = \"é\"", "2:1: server.é: unknown key"),
];

#[test]
fn every_bad_input_is_refused_at_its_place() {
    refuses(BAD_HEADS);
}

fn refuses(heads: &[(&str, &str)]) {
    assert!(!heads.is_empty());
    let mut failures = Vec::new();
    for (head, expected) in heads {
        let line = first_line(&format!("{head}\n{REST}"));
        if !line.starts_with(&format!("proxy.toml:{expected}")) {
            failures.push(format!("{head}\n  expected {expected}\n  got      {line}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn no_route_is_refused() {
    assert_eq!(
        first_line("[server]\n"),
        "proxy.toml:2:1: routes: there must be at least one route: add [[routes]] with upstream = \"...\""
    );
    assert!(first_line("").starts_with("proxy.toml:1:1: routes: there must be"));
}

#[test]
fn the_source_line_is_shown_with_carets() {
    let error = error_of(&format!("{REST}[limits.llm]\nslots = 5\nlease = \"1s\"\n"));
    let lines: Vec<_> = error.lines().collect();
    assert_eq!(lines[0], "proxy.toml:13:9: limits.llm.lease: must be at least 2s");
    assert!(error.contains(r#"13 | lease = "1s""#), "{error}");
    assert!(error.contains("^^^^"), "{error}");
}

#[test]
fn routes_of_the_same_request_are_refused() {
    let routes = |first: &str, second: &str| {
        format!(
            "{REST}path = \"/rest\"\n[[routes]]\nupstream = \"app\"\n{first}\n[[routes]]\nupstream = \"app\"\n{second}\n"
        )
    };
    let refused = [
        ("path = \"/v1\"", "path = \"/v1\""),
        ("path = \"/v1\"", "path = \"/v1/\""),
        ("host = \"A.b\"", "host = \"a.B\""),
        ("host = \"*.b\"", "host = \"*.b\"\nmethods = [\"GET\"]"),
        ("methods = [\"GET\"]", "methods = [\"POST\", \"GET\"]"),
    ];
    for (first, second) in refused {
        let line = first_line(&routes(first, second));
        assert!(line.contains("has the same host, path and a method"), "{line}");
    }
    let accepted = [
        ("path = \"/v1\"", "path = \"/v1/a\""),
        ("host = \"*.b\"", "host = \"a.b\""),
        ("methods = [\"GET\"]", "methods = [\"POST\"]"),
    ];
    for (first, second) in accepted {
        assert_eq!(parse(&routes(first, second)).unwrap().routes.len(), 3);
    }
}

#[test]
fn limits_in_opposite_orders_are_refused() {
    let routes = |orders: &[&str]| {
        let mut text = "upstreams.u.endpoints = [\"http://a\"]\n".to_owned();
        for name in ["a", "b", "c"] {
            text += &format!("limits.{name}.slots = 1\n");
        }
        for (index, order) in orders.iter().enumerate() {
            text +=
                &format!("[[routes]]\nupstream = \"u\"\npath = \"/{index}\"\nlimits = [{order}]\n");
        }
        text
    };
    let refused: [&[&str]; 3] = [
        &[r#""a", "b""#, r#""b", "a""#],
        &[r#""a", "b", "c""#, r#""c", "a""#],
        &[r#""a", "b""#, r#""b", "c""#, r#""c", "a""#],
    ];
    for orders in refused {
        let line = first_line(&routes(orders));
        assert!(line.contains("the other way round"), "{line}");
    }
    let line = first_line(&routes(refused[0]));
    assert_eq!(
        line,
        "proxy.toml:12:16: routes[1].limits[1]: takes limit `b` before `a`, and route `/0` the other way round: they could wait for each other"
    );
    assert!(parse(&routes(&[r#""a", "b", "c""#, r#""a", "c""#, r#""b", "c""#])).is_ok());
}

#[test]
fn everything_has_a_default() {
    let config = parse(REST).unwrap();
    let server = &config.server;
    assert_eq!(server.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(server.max_in_flight, 10_000);
    assert_eq!(server.max_connections, 20_000);
    assert!(server.trusted_proxies.is_empty());
    assert_eq!(server.header_timeout, Duration::from_secs(10));
    assert_eq!(server.keepalive_timeout, Duration::from_secs(75));
    assert_eq!(server.stall_timeout, Duration::from_secs(60));
    assert_eq!(server.drain_delay, Duration::ZERO);
    assert_eq!(server.drain_timeout, Duration::from_secs(25));
    let admin = config.admin.unwrap();
    assert_eq!(admin.listen.to_string(), "127.0.0.1:9900");
    assert_eq!(admin.token, None);
    assert_eq!(config.store.kind, StoreKind::Memory);
    assert_eq!(config.store.digest_key, None);
    assert_eq!(config.store.prefix, "");
    assert_eq!(config.store.op_timeout, Duration::from_millis(400));
    let limit = &config.limits[0];
    assert_eq!(limit.lease, Duration::from_secs(15));
    assert_eq!(limit.max_hold, Some(Duration::from_secs(30 * 60)));
    assert_eq!(limit.queue.size, 64);
    assert_eq!(limit.queue.timeout, Duration::from_secs(10));
    assert_eq!(limit.recovery, Recovery::Fast);
    assert_eq!(limit.on_lease_lost, OnLeaseLost::Keep);
    assert_eq!(config.store.when_down, WhenDown::LocalShare);
    let upstream = &config.upstreams[0];
    assert_eq!(upstream.endpoints[0], "http://127.0.0.1:3000/");
    assert_eq!(upstream.connect_timeout, Duration::from_secs(3));
    assert_eq!(upstream.response_timeout, Duration::from_secs(60));
    assert_eq!(upstream.idle_timeout, Duration::from_secs(60));
    assert_eq!(upstream.linger, Duration::from_millis(250));
    assert_eq!(upstream.on_client_gone, OnClientGone::Cancel);
    assert_eq!(upstream.host, HostHeader::Upstream);
    let route = &config.routes[0];
    assert_eq!(&*route.name, "/");
    assert_eq!(route.host, HostPattern::Any);
    assert_eq!(route.path, "/");
    assert!(route.methods.is_empty());
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        [server]
        listen = "[::]:0"
        max_in_flight = 1
        max_connections = 2
        trusted_proxies = ["10.0.0.0/8", "::1"]
        header_timeout = "1s"
        keepalive_timeout = "2s"
        stall_timeout = "3s"
        drain_delay = "4s"
        drain_timeout = "1m 5s"
        [admin]
        listen = "[::]:0"
        [store]
        url = "rediss://user:${PASSWORD}@host:6380/3"
        op_timeout = "250ms"
        prefix = "{tidegate}:"
        when_down = "open"
        [limits.z]
        slots = 0
        lease = "2s"
        max_hold = "0s"
        queue = { size = 7, timeout = "5m" }
        recovery = "strict"
        on_lease_lost = "cut"
        [limits.b]
        slots = 100
        [limits.a]
        slots = 1
        queue = 0
        [upstreams.u]
        endpoints = ["https://host:${PORT}/base"]
        limits = ["b", "z"]
        connect_timeout = "1s"
        response_timeout = "2s"
        idle_timeout = "3s"
        linger = "0s"
        on_client_gone = "finish"
        host = "keep"
        [[routes]]
        host = "*.Example.com"
        path = "/v1/"
        methods = ["GET", "PURGE"]
        upstream = "u"
        limits = ["a", "b"]
        [[routes]]
        name = "all"
        host = "example.com"
        upstream = "u"
        "#,
    )
    .unwrap();
    assert_eq!(config.server.trusted_proxies[1].to_string(), "::1/128");
    assert_eq!(config.server.drain_timeout, Duration::from_secs(65));
    let url = "rediss://user:hunter2@host:6380/3".to_owned();
    assert_eq!(config.store.kind, StoreKind::Redis(RedisAt { url: Secret(url), sentinels: None }));
    assert_eq!(config.store.prefix, "{tidegate}:");
    let names: Vec<_> = config.limits.iter().map(|limit| &*limit.name).collect();
    assert_eq!(names, ["z", "b", "a"]);
    let sizes: Vec<_> = config.limits.iter().map(|limit| limit.queue.size).collect();
    assert_eq!(sizes, [7, 400, 0]);
    assert_eq!(config.limits[0].max_hold, None);
    assert_eq!(config.limits[0].recovery, Recovery::Strict);
    assert_eq!(config.limits[0].on_lease_lost, OnLeaseLost::Cut);
    assert_eq!(config.store.when_down, WhenDown::Open);
    assert_eq!(config.limits[0].queue.timeout, Duration::from_secs(300));
    assert_eq!(config.upstreams[0].endpoints[0], "https://host:3100/base");
    assert_eq!(config.upstreams[0].on_client_gone, OnClientGone::Finish);
    assert_eq!(config.upstreams[0].host, HostHeader::Keep);
    assert_eq!(config.upstreams[0].linger, Duration::ZERO);
    let [first, second] = config.routes.as_slice() else {
        panic!("two routes");
    };
    assert_eq!(&*first.name, "*.Example.com/v1/");
    assert_eq!(first.host, HostPattern::Suffix(".example.com".to_owned()));
    assert_eq!(first.methods, [Method::GET, Method::from_bytes(b"PURGE").unwrap()]);
    assert_eq!(first.limits, [2, 1, 0], "its own, then the upstream's, each once");
    assert_eq!(&*second.name, "all");
    assert_eq!(second.limits, [1, 0]);
}

#[test]
fn a_lease_that_is_cut_leaves_time_to_renew() {
    let text = |lease: &str, linger: &str| {
        format!(
            "[limits.a]\nslots = 1\n{lease}\non_lease_lost = \"cut\"\n[upstreams.u]\nendpoints = [\"http://a\"]\nlinger = \"{linger}\"\n\
             [[routes]]\nupstream = \"u\"\nlimits = [\"a\"]\n"
        )
    };
    // 2s - 400ms - 200ms - 40ms = 1360ms, of which linger leaves 667ms or doesn't.
    assert!(parse(&text("lease = \"2s\"", "693ms")).is_ok());
    let error = parse(&text("lease = \"2s\"", "694ms")).unwrap_err().to_string();
    assert!(error.contains("3:9: limits.a.lease: must leave a third of itself"), "{error}");
    let error = parse(&text("", "15s")).unwrap_err().to_string();
    assert!(error.contains("limits.a.lease: must leave a third of itself"), "{error}");
    assert!(parse(&text("", "15s").replace("cut", "keep")).is_ok());
}

#[test]
fn a_password_is_never_shown() {
    let texts = [
        "[store]\nurl = \"redis://:hunter2@host:port\"",
        "[store]\nurl = \"redis://:hunter2@host\"\nop_timeout = 5",
        "store = { url = \"redis://:hunter2@host\", op_timeout = 5 }",
        "store = { url = \"hunter2\", op_timeout = 5 }",
        "store = \"redis://:hunter2@host\"",
        "store = \"hunter2\"",
        "[store]\nurl = \"redsi://:hunter2@host\"",
        "[store]\nurl = \"hunter2\"",
        "[store]\nurl = \"\"\"\nredis://:\nhunter2@host\"\"\"",
        "[store]\nurl = [\"hunter2\"]",
        "[store]\nurl = \"redis://:${PASSWORD}@host:port\"",
        "[store]\nurl = \"redis://:hunter2@${NONE}\"",
        "[store]\nurll = \"hunter2\"",
        "[store]\npassword = \"hunter2\"",
        "[store]\nsentinel_password = \"hunter2\"",
        "[store]\ndigest_key = \"hunter2 \"",
        "[store]\ndigest_key = \"hunter2\"\nprefix = 1",
        "[admin]\ntoken = \"hunter2 \"",
        "[admin]\ntoken = \"hunter2\"\nlisten = 1",
        "admin = { token = \"hunter2\", listen = 1 }",
        "[admin]\ntokn = \"hunter2\"",
        "[store]\nurl = \"redis://:hunter2@host",
        "[store]\nurl = redis://:hunter2@host",
        "[server]\nmax_in_flight = \"${PASSWORD}\"",
        "[server]\nlisten = \"${PASSWORD}\"",
        "[upstreams.a]\nendpoints = [\"http://user:hunter2@a\"]",
    ];
    assert!(!texts.is_empty());
    for text in texts {
        let error = parse(&format!("{text}\n{REST}")).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
    let secrets = "store.url = \"redis+sentinel://:hunter2@host/main\"\nstore.sentinel_password = \"hunter2\"\nstore.digest_key = \"hunter2\"\nadmin.token = \"hunter2\"";
    let config = parse(&format!("{secrets}\n{REST}")).unwrap();
    assert_eq!(config.store.digest_key, Some(Secret("hunter2".to_owned())));
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
fn the_file_of_the_repository_runs_as_it_is() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("proxy.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let config = Config::parse("proxy.toml", &text, |_| None).unwrap();
    assert_eq!(config.store.kind, StoreKind::Memory);
    assert_eq!(config.upstreams[0].endpoints[0], "http://127.0.0.1:3000/");
    assert_eq!(config.routes.len(), 1);
    assert!(Config::load(&path).is_ok());
}

#[test]
fn the_file_of_the_repository_teaches_only_keys_and_defaults_that_exist() {
    let text = include_str!("../../proxy.toml");
    let is_key = |line: &str| {
        let name = line.split(" = ").next().unwrap_or_default();
        line.contains(" = ") && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    };
    let mut uncommented = 0;
    let mut all = String::new();
    for line in text.lines() {
        let key = line.strip_prefix("# ").filter(|rest| is_key(rest));
        uncommented += usize::from(key.is_some());
        all += key.unwrap_or(line);
        all.push('\n');
    }
    assert!(uncommented > 15, "{uncommented}");
    let mut taught = parse(&all).unwrap();
    let mut plain = parse(text).unwrap();
    // The route's host and methods have examples, since any and all can't be written.
    taught.routes.clear();
    plain.routes.clear();
    assert_eq!(format!("{taught:?}"), format!("{plain:?}"));
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::load("nowhere/proxy.toml".as_ref()).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with("nowhere/proxy.toml: can't be read: "), "{error}");
}

fn quick(change: impl FnOnce(&mut QuickOptions)) -> Result<Config, ConfigError> {
    let mut options = QuickOptions {
        listen: "127.0.0.1:8080".to_owned(),
        upstream: "http://127.0.0.1:3000".to_owned(),
        slots: 20,
        store_url: Secret("memory:".to_owned()),
        admin_listen: None,
    };
    change(&mut options);
    Config::quick(options)
}

#[test]
fn another_admin_listener_keeps_the_token() {
    let config = parse(&format!("admin.token = \"hunter2\"\n{REST}")).unwrap();
    let elsewhere = AdminListen::At(([127, 0, 0, 1], 1).into());
    let admin = config.with_admin_listen(elsewhere).unwrap().admin.unwrap();
    assert_eq!(admin.listen.port(), 1);
    assert_eq!(admin.token, Some(Secret("hunter2".to_owned())));
}

#[test]
fn flags_make_a_configuration() {
    let config = quick(|options| options.slots = 30).unwrap();
    assert_eq!(&*config.limits[0].name, "default");
    assert_eq!(config.limits[0].slots, 30);
    assert_eq!(config.limits[0].queue.size, 120);
    assert_eq!(&*config.upstreams[0].name, "default");
    assert_eq!(config.routes[0].path, "/");
    assert_eq!(config.routes[0].limits, [0]);
    assert_eq!(config.admin.unwrap().listen.to_string(), "127.0.0.1:9900");
    let off = quick(|options| options.admin_listen = Some(AdminListen::Off)).unwrap();
    assert!(off.admin.is_none());
    let redis = quick(|options| options.store_url = Secret("redis://host".to_owned())).unwrap();
    assert!(matches!(redis.store.kind, StoreKind::Redis(_)));
}

#[test]
fn bad_flags_are_named() {
    type Change = fn(&mut QuickOptions);
    let cases: [(Change, &str); 6] = [
        (|options| options.listen = "8080".into(), "--listen: must be an IP"),
        (|options| options.upstream = "a:80".into(), "--upstream: must begin with http"),
        (|options| options.slots = 1_000_001, "--slots: must be 0 to 1000000"),
        (
            |options| options.store_url.0 = "redis://:hunter2@a:b".into(),
            "--store: must be a Redis URL",
        ),
        (|options| options.store_url.0 = "hunter2".into(), "--store: must be \"memory:\""),
        (|options| options.listen = "127.0.0.1:9900".into(), "--admin-listen: must differ"),
    ];
    for (change, expected) in cases {
        let error = quick(change).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn nothing_in_a_file_does_anything_to_a_terminal() {
    for (text, shown) in [
        ("\"\\u001b[2Jkey\\nEVIL\" = 3", "\\u{1b}[2Jkey\\u{a}EVIL"),
        ("[limits.\"a\\u001b]0;x\\u0007\"]\nslot = 3", "limits.a\\u{1b}]0;x\\u{7}.slot"),
        ("[limits.a]\n\"\u{202e}slots\" = 3", "limits.a.\\u{202e}slots"),
        ("[server]\nlisten = \"\u{9b}31m\u{1b}[2J\"", "listen = \"??31m?[2J\""),
    ] {
        let error = error_of(text);
        assert!(error.contains(shown), "{error}");
        let tricky = |letter: char| letter.is_control() && letter != '\n' || letter == '\u{202e}';
        assert!(!error.contains(tricky), "{error:?}");
        assert!(!error.lines().any(|line| line.starts_with("EVIL")), "{error}");
    }
}
