//! Classes, keys, rates, weights, dialects and what happens when a limit is full.

use std::time::Duration;

use http::StatusCode;

use super::*;

const BAD_HEADS: &[(&str, &str)] = &[
    ("[classes]\norder = []", "2:9: classes.order: must hold 1 to 8 names"),
    (
        "[classes]\norder = [\"1\", \"2\", \"3\", \"4\", \"5\", \"6\", \"7\", \"8\", \"9\"]",
        "2:9: classes.order: must hold 1 to 8 names",
    ),
    (
        "[classes]\norder = [\"a\", \"b\", \"a\"]",
        "2:20: classes.order[2]: must hold each name once",
    ),
    ("[classes]\norder = [\"a b\"]", "2:10: classes.order[0]: a name must be 1 to 128"),
    ("[classes]\nordr = []", "2:1: classes.ordr: unknown key, did you mean `order`?"),
    ("[classes]\nageing = \"0s\"", "2:10: classes.ageing: must be at least 1ms"),
    (
        "[limits.a]\nslots = 5\nclasses.high = { share = 0.5 }",
        "3:9: limits.a.classes.high: must name an existing class: there is background, critical, normal",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { share = 0 }",
        "3:28: limits.a.classes.normal.share: must be above 0 and at most 1",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { share = 1.1 }",
        "3:28: limits.a.classes.normal.share: must be above 0",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { share = nan }",
        "3:28: limits.a.classes.normal.share: must be above 0",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { share = \"half\" }",
        "3:28: limits.a.classes.normal.share: must be a number",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { queue = -1 }",
        "3:28: limits.a.classes.normal.queue: must be 0 to ",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { queue = { timeout = \"0s\" } }",
        "3:40: limits.a.classes.normal.queue.timeout: must be at least 1ms",
    ),
    (
        "[limits.a]\nslots = 5\nclasses.normal = { shar = 1 }",
        "3:20: limits.a.classes.normal.shar: unknown key, did you mean `share`?",
    ),
    ("[limits.a]\nslots = 5\nkey = \"x-tenant\"", "3:7: limits.a.key: must be \"client-ip\" or a"),
    (
        "[limits.a]\nslots = 5\nkey = \"header:x y\"",
        "3:7: limits.a.key: must be \"client-ip\" or a",
    ),
    ("[limits.a]\nslots = 5\nslots_for = { big = 50 }", "3:13: limits.a.slots_for: needs a `key`"),
    (
        "[limits.a]\nslots = 5\nkey = \"client-ip\"\nslots_for = { big = -1 }",
        "4:21: limits.a.slots_for.big: must be 0 to 1000000",
    ),
    ("[limits.a]\nslots = 5\nstatus = 500", "3:10: limits.a.status: must be 503, 429 or 529"),
    (
        "[limits.a]\nslots = 5\nmode = \"off\"",
        "3:8: limits.a.mode: must be \"enforce\" or \"shadow\"",
    ),
    (
        "[limits.a]\nslots = 5\nholder_header = \"Host\"",
        "3:17: limits.a.holder_header: must be a header of its own",
    ),
    (
        "[limits.a]\nslots = 5\nholder_header = \"\"",
        "3:17: limits.a.holder_header: must be the name of a header",
    ),
    (
        "[limits.a]\nslots = 2\nfence_header = \"x-fence\"",
        "3:16: limits.a.fence_header: needs slots = 1: one number can't tell several holders apart",
    ),
    (
        "[limits.a]\nslots = 1\nfence_header = \"x-fence\"\nkey = \"client-ip\"\nslots_for = { \"::1\" = 2 }",
        "3:16: limits.a.fence_header: needs slots = 1",
    ),
    (
        "[limits.a]\nslots = 1\nfence_header = \"x-fence\"\nmode = \"shadow\"",
        "3:16: limits.a.fence_header: needs mode = \"enforce\"",
    ),
    (
        "[limits.a]\nslots = 1\nfence_header = \"x-it\"\nholder_header = \"X-It\"",
        "3:16: limits.a.fence_header: must differ from holder_header",
    ),
    (
        "[limits.a]\nslots = 1\nfence_header = \"x-a\"\n[limits.b]\nslots = 1\nfence_header = \"x-b\"\n[[routes]]\nupstream = \"app\"\nlimits = [\"a\", \"b\"]",
        "9:16: routes[0].limits[1]: takes limits `a` and `b`, which both have a fence_header",
    ),
    ("[rates.a]", "1:8: rates.a.requests: must be given"),
    ("[rates.a]\nrequests = 1", "1:8: rates.a.window: must be given"),
    ("[rates.a]\nrequests = 0\nwindow = \"1s\"", "2:12: rates.a.requests: must be 1 to "),
    ("[rates.a]\nrequests = 1\nwindow = \"0s\"", "3:10: rates.a.window: must be 1ms to 1d"),
    ("[rates.a]\nrequests = 1\nwindow = \"25h\"", "3:10: rates.a.window: must be 1ms to 1d"),
    ("[rates.\"a b\"]\nrequests = 1\nwindow = \"1s\"", "1:8: rates.a b: a name must be"),
    (
        "[rates.a]\nrequests = 1\nwindow = \"1s\"\nkey = \"ip\"",
        "4:7: rates.a.key: must be \"client-ip\"",
    ),
    ("[rates.a]\nrequests = 1\nwindow = \"1s\"\nmode = \"x\"", "4:8: rates.a.mode: must be \"enf"),
    (
        "[[routes]]\nupstream = \"app\"\nrates = [\"a\"]",
        "3:10: routes[0].rates[0]: must name an existing rate: there is none",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = \"high\"",
        "3:9: routes[0].class: must name an existing class: there is background, critical, normal",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = 1",
        "3:9: routes[0].class: must be a class or a table",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = {}",
        "3:9: routes[0].class: must hold either `header`, or `key` and `classes`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = { header = \"x\", key = \"client-ip\" }",
        "3:9: routes[0].class: must hold either",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = { header = \"x\", default = \"high\" }",
        "3:35: routes[0].class.default: must name an existing class",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nclass = { key = \"client-ip\", classes = { \"::1\" = \"high\" } }",
        "3:50: routes[0].class.classes.::1: must name an existing class",
    ),
    ("[[routes]]\nupstream = \"app\"\nweight = 0", "3:10: routes[0].weight: must be 1 to 1000"),
    (
        "[[routes]]\nupstream = \"app\"\nweight = \"1\"",
        "3:10: routes[0].weight: must be a number or a table such as { bytes_per_slot",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nweight = { header = \"x\" }",
        "3:10: routes[0].weight.max: must be given",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nweight = { max = 2 }",
        "3:10: routes[0].weight: must hold either `header` or `bytes_per_slot`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nweight = { header = \"x\", max = 1001 }",
        "3:32: routes[0].weight.max: must be 1 to 1000",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nweight = { bytes_per_slot = \"1MB\", max = 2 }",
        "3:29: routes[0].weight.bytes_per_slot: must be a size of at least one byte",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nweight = { bytes_per_slot = 0, max = 2 }",
        "3:29: routes[0].weight.bytes_per_slot: must be a size of at least one byte",
    ),
    (
        "[[routes]]\nupstream = \"app\"\ndialect = \"html\"",
        "3:11: routes[0].dialect: must be \"prob",
    ),
    (
        "[[routes]]\nupstream = \"app\"\ndeadline_header = \"a b\"",
        "3:19: routes[0].deadline_header: must be the name of a header",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{}]",
        "3:12: routes[0].on_full[0]: must hold one of `upstream`, `stale` and `respond`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ upstream = \"app\", respond = 200 }]",
        "3:12: routes[0].on_full[0]: must hold one of",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ upstream = \"cheap\" }]",
        "3:25: routes[0].on_full[0].upstream: must name an existing upstream: there is app",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ upstream = \"app\" }]",
        "3:25: routes[0].on_full[0].upstream: must not share a limit with the route, and both take `app`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ stale = \"0s\" }]",
        "3:22: routes[0].on_full[0].stale: must be at least 1ms",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ stale = \"10m\", respond = 200 }]",
        "3:12: routes[0].on_full[0]: must hold one of",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ stale = \"10m\", body = \"\" }]",
        "3:36: routes[0].on_full[0].body: belongs to a step with `respond`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\nmethods = [\"POST\"]\non_full = [{ stale = \"10m\" }]",
        "4:22: routes[0].on_full[0].stale: needs GET among the route's methods",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ respond = 200, forward_credentials = true }]",
        "3:51: routes[0].on_full[0].forward_credentials: belongs to a step with `upstream`",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ respond = 100 }]",
        "3:24: routes[0].on_full[0].respond: must be 200 to 599",
    ),
    (
        "[[routes]]\nupstream = \"app\"\non_full = [{ respond = 200, content_type = \"json\" }]",
        "3:44: routes[0].on_full[0].content_type: must be a media type",
    ),
    (
        "[store]\ndigest_key = \"\"",
        "2:14: store.digest_key: must be 1 to 1024 printable ASCII characters",
    ),
    ("[admin]\ntoken = \"a b\"", "2:9: admin.token: must be 1 to 1024 printable ASCII characters"),
];

#[test]
fn every_bad_policy_is_refused_at_its_place() {
    refuses(BAD_HEADS);
}

#[test]
fn every_policy_has_a_default() {
    let config = parse(REST).unwrap();
    let order: Vec<_> = config.classes.order.iter().map(|name| &**name).collect();
    assert_eq!(order, ["critical", "normal", "background"]);
    assert_eq!(config.classes.ageing, Duration::from_secs(5));
    assert!(config.rates.is_empty());
    let limit = &config.limits[0];
    assert_eq!(limit.classes, vec![ClassPolicy { share: 1.0, queue: None, timeout: None }; 3]);
    assert_eq!(limit.key, None);
    assert!(limit.slots_for.is_empty());
    assert_eq!(limit.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(limit.mode, Mode::Enforce);
    assert_eq!((&limit.holder_header, &limit.fence_header), (&None, &None));
    let route = &config.routes[0];
    assert!(route.rates.is_empty());
    assert_eq!(route.class, ClassRule::Fixed(1));
    assert_eq!(route.weight, WeightRule::Fixed(1));
    assert_eq!(route.dialect, Dialect::Problem);
    assert!(route.on_full.is_empty());
    assert_eq!(route.deadline_header, None);
}

#[test]
fn every_policy_is_read() {
    let config = parse(
        r#"
        [classes]
        order = ["high", "low"]
        ageing = "2s"
        [limits.tenant]
        slots = 10
        key = "header:X-Tenant"
        slots_for = { "z big" = 50, a = 0 }
        classes.low = { share = 0.5, queue = { size = 3, timeout = "4s" } }
        classes.high = { share = 1, queue = 0 }
        [limits.wide]
        slots = 20
        status = 529
        mode = "shadow"
        holder_header = "X-Holder"
        [limits.ip]
        slots = 1
        key = "client-ip"
        [rates.b]
        requests = 100
        window = "1m"
        key = "header:x-tenant"
        mode = "shadow"
        [rates.a]
        requests = 1
        window = "1d"
        [upstreams.app]
        endpoints = ["http://a"]
        limits = ["wide"]
        [upstreams.cheap]
        endpoints = ["http://b"]
        [[routes]]
        upstream = "app"
        limits = ["tenant"]
        rates = ["a", "b", "a"]
        class = "high"
        weight = 3
        dialect = "openai"
        deadline_header = "Request-Timeout"
        on_full = [
            { upstream = "cheap" },
            { upstream = "cheap", forward_credentials = true },
            { stale = "10m" },
            { respond = 200, body = "{}", content_type = "application/json" },
            { respond = 503 },
        ]
        [[routes]]
        path = "/header"
        upstream = "app"
        class = { header = "x-priority", default = "high" }
        weight = { header = "x-weight", max = 4 }
        dialect = "anthropic"
        [[routes]]
        path = "/key"
        upstream = "app"
        class = { key = "client-ip", classes = { "::1" = "high", "10.0.0.1" = "low" } }
        weight = { bytes_per_slot = "64KiB", max = 8 }
        dialect = "text"
        "#,
    )
    .unwrap();
    assert_eq!(config.classes.ageing, Duration::from_secs(2));
    let [tenant, wide, ip] = config.limits.as_slice() else { panic!("three limits") };
    let x_tenant = || Some(Key::Header(HeaderName::from_static("x-tenant")));
    assert_eq!(tenant.key, x_tenant());
    assert_eq!(tenant.slots_for, [("z big".to_owned(), 50), ("a".to_owned(), 0)]);
    assert_eq!(tenant.status, StatusCode::TOO_MANY_REQUESTS);
    let four = Some(Duration::from_secs(4));
    assert_eq!(tenant.classes[0], ClassPolicy { share: 1.0, queue: Some(0), timeout: None });
    assert_eq!(tenant.classes[1], ClassPolicy { share: 0.5, queue: Some(3), timeout: four });
    assert_eq!(wide.status.as_u16(), 529);
    assert_eq!(wide.mode, Mode::Shadow);
    assert_eq!(wide.holder_header, Some(HeaderName::from_static("x-holder")));
    assert_eq!(ip.key, Some(Key::ClientIp));
    assert_eq!(&*config.rates[0].name, "b");
    assert_eq!(config.rates[0].requests, 100);
    assert_eq!(config.rates[0].window, Duration::from_secs(60));
    assert_eq!(config.rates[0].key, x_tenant());
    assert_eq!(config.rates[0].mode, Mode::Shadow);
    assert_eq!(config.rates[1].key, None);
    assert_eq!(config.rates[1].mode, Mode::Enforce);
    assert_eq!(config.upstreams[0].limits, [1]);

    let [fixed, header, key] = config.routes.as_slice() else { panic!("three routes") };
    assert_eq!(fixed.rates, [1, 0]);
    assert_eq!(fixed.class, ClassRule::Fixed(0));
    assert_eq!(fixed.weight, WeightRule::Fixed(3));
    assert_eq!(fixed.dialect, Dialect::OpenAi);
    assert_eq!(fixed.deadline_header, Some(HeaderName::from_static("request-timeout")));
    let respond = |status, body: &str, kind: &'static str| Step::Respond {
        status,
        body: body.to_owned(),
        content_type: http::HeaderValue::from_static(kind),
    };
    let steps = [
        Step::Upstream { upstream: 1, forward_credentials: false },
        Step::Upstream { upstream: 1, forward_credentials: true },
        Step::Stale { allowance: Duration::from_secs(600) },
        respond(StatusCode::OK, "{}", "application/json"),
        respond(StatusCode::SERVICE_UNAVAILABLE, "", "text/plain; charset=utf-8"),
    ];
    assert_eq!(fixed.on_full, steps);
    let name = HeaderName::from_static;
    assert_eq!(header.class, ClassRule::Header { name: name("x-priority"), default: 0 });
    assert_eq!(header.weight, WeightRule::Header { name: name("x-weight"), max: 4 });
    assert_eq!(header.dialect, Dialect::Anthropic);
    let classes = vec![("::1".to_owned(), 0), ("10.0.0.1".to_owned(), 1)];
    assert_eq!(key.class, ClassRule::ByKey { key: Key::ClientIp, classes, default: 0 });
    assert_eq!(key.weight, WeightRule::Bytes { per_slot: 65_536, max: 8 });
    assert_eq!(key.dialect, Dialect::Text);
}

#[test]
fn sizes_have_units() {
    let sizes = [("1", 1), ("\"7\"", 7), ("\"2 KiB\"", 2048), ("\"1MiB\"", 1 << 20)];
    for (size, bytes) in sizes {
        let route = format!("weight = {{ bytes_per_slot = {size}, max = 2 }}");
        let config = parse(&format!("{REST}{route}\n")).unwrap();
        assert_eq!(config.routes[0].weight, WeightRule::Bytes { per_slot: bytes, max: 2 });
    }
}

#[test]
fn a_share_is_rounded_down_and_never_below_one_slot() {
    let caps = [(20, 0.5, 10), (5, 0.5, 2), (5, 0.1, 1), (0, 0.5, 0), (7, 1.0, 7)];
    for (slots, share, cap) in caps {
        let mut limit = Limit::plain("a", slots);
        limit.classes[2].share = share;
        assert_eq!(limit.cap(2), cap, "{share} of {slots}");
        assert_eq!(limit.cap(0), slots);
    }
}

#[test]
fn without_normal_the_middle_class_is_usual() {
    let cases: [(&str, usize); 5] = [
        (r#""a""#, 0),
        (r#""a", "b""#, 0),
        (r#""a", "b", "c""#, 1),
        (r#""a", "b", "c", "d""#, 1),
        (r#""a", "b", "normal""#, 2),
    ];
    for (order, usual) in cases {
        let config = parse(&format!("classes.order = [{order}]\n{REST}")).unwrap();
        assert_eq!(config.routes[0].class, ClassRule::Fixed(usual), "{order}");
    }
}

#[test]
fn upstreams_of_models_may_think_for_minutes() {
    let timeouts = |routes: &str| {
        let text = format!("upstreams.u.endpoints = [\"http://a\"]\n{routes}\n{REST}");
        let config = parse(&text).unwrap();
        let upstream = config.upstreams.iter().find(|upstream| &*upstream.name == "u").unwrap();
        assert_eq!(upstream.response_timeout, upstream.idle_timeout);
        upstream.response_timeout.as_secs()
    };
    let route = |path: &str, more: &str| format!("[[routes]]\npath = \"/{path}\"\n{more}\n");
    let openai = route("a", "upstream = \"u\"\ndialect = \"openai\"");
    let anthropic = route("b", "upstream = \"u\"\ndialect = \"anthropic\"");
    let plain = route("c", "upstream = \"u\"");
    let degraded = route("d", "upstream = \"app\"\non_full = [{ upstream = \"u\" }]");
    assert_eq!(timeouts(""), 60);
    assert_eq!(timeouts(&openai), 600);
    assert_eq!(timeouts(&format!("{openai}{anthropic}")), 600);
    assert_eq!(timeouts(&format!("{openai}{plain}")), 60);
    assert_eq!(timeouts(&format!("{openai}{degraded}")), 60);
}

#[test]
fn opposite_orders_through_on_full_are_refused() {
    let text = |first: &str, second: &str| {
        format!(
            "{REST}[limits.x]\nslots = 1\n[limits.y]\nslots = 1\n\
             [upstreams.cheap]\nendpoints = [\"http://b\"]\nlimits = [{first}]\n\
             [upstreams.free]\nendpoints = [\"http://c\"]\n\
             [[routes]]\npath = \"/1\"\nupstream = \"app\"\non_full = [{{ upstream = \"cheap\" }}]\n\
             [[routes]]\npath = \"/2\"\nupstream = \"free\"\nlimits = [{second}]\n"
        )
    };
    let (x_y, y_x) = (r#""x", "y""#, r#""y", "x""#);
    assert!(parse(&text(x_y, x_y)).is_ok());
    let line = first_line(&text(x_y, y_x));
    let expected = "routes[2].limits[1]: takes limit `y` before `x`, and route `/1` the other way round: they could wait for each other";
    assert!(line.ends_with(expected), "{line}");
}
