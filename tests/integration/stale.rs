//! The step of the ladder that tells an earlier answer again: which answers, to whom, for how long, and how it is marked.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::Method;

use crate::harness::{
    Answer, Client, Conf, H2, Proxy, Raw, Redis, Reload, Upstream, eventually, one_limit,
};

const STALE: &str = "on_full = [{ stale = \"10m\" }]";

/// One slot behind a route with a stale step.
struct Stage {
    upstream: Upstream,
    proxy: Proxy,
    client: Client,
}

impl Stage {
    async fn new() -> Self {
        let upstream = Upstream::spawn().await;
        let conf = one_limit(&upstream, 1).queue("0").route(STALE);
        Self::with(upstream, &conf).await
    }

    async fn with(upstream: Upstream, conf: &Conf) -> Self {
        Self { upstream, proxy: Proxy::spawn(conf).await, client: Client::new() }
    }

    /// Asks while there is room, and waits until the slot is back.
    async fn ask(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        let answer = self.client.get_with(self.proxy.addr(), path, headers).await;
        assert_eq!(answer.header("tidegate-degraded"), "", "{path}: {answer:?}");
        self.free().await;
        answer
    }

    /// The answer of `/say` with these header lines, if it is told again to the same request while the limit is full.
    async fn again(&self, path: &str, say: &str, headers: &[(&str, &str)]) -> Option<Answer> {
        let with_say: Vec<_> = headers.iter().copied().chain([("x-say", say)]).collect();
        let first = self.ask(path, &with_say).await;
        assert_ne!(first.header("tidegate-reason"), "queue_full");
        self.while_full(path, headers).await
    }

    async fn while_full(&self, path: &str, headers: &[(&str, &str)]) -> Option<Answer> {
        let holder = self.fill().await;
        let answer = self.client.get_with(self.proxy.addr(), path, headers).await;
        drop(holder);
        self.free().await;
        told_again(answer)
    }

    async fn fill(&self) -> Raw {
        let holder = Raw::get(self.proxy.addr(), "/silent").await;
        self.upstream.wait_current(1).await;
        holder
    }

    async fn free(&self) {
        let in_use = async || self.proxy.limit("llm").await["in_use"] == 0;
        eventually("the slot is back", in_use).await;
    }

    async fn send(&self, method: Method, path: &str) -> Answer {
        self.client.send(method, self.proxy.addr(), path, Bytes::new()).await.unwrap()
    }
}

/// An answer that is one or the other, and nothing in between.
fn told_again(answer: Answer) -> Option<Answer> {
    if answer.header("tidegate-degraded") == "stale" {
        return Some(answer);
    }
    assert_eq!((answer.status, answer.header("tidegate-reason")), (503, "queue_full"));
    None
}

fn number(answer: &Answer, name: &str) -> u64 {
    answer.header(name).parse().unwrap_or_else(|_| panic!("{name} in {answer:?}"))
}

#[tokio::test]
async fn a_full_limit_tells_the_last_answer_again_and_says_so() {
    let stage = Stage::new().await;
    let say = "cache-control: max-age=60|age: 30|content-type: text/x|x-own: 1|cache-status: far; hit|tidegate-degraded: no";
    stage.ask("/say?a=1", &[("x-say", say)]).await;
    let last = stage.ask("/say?a=1", &[("x-say", say)]).await;
    let total = stage.upstream.total();
    let again = stage.while_full("/say?a=1", &[]).await.expect("a copy");
    assert_eq!(stage.upstream.total(), total + 1, "only the holder of the slot went there");
    assert_eq!((again.status, &again.body), (200, &last.body));
    assert_eq!((again.header("content-type"), again.header("x-own")), ("text/x", "1"));
    assert_eq!(again.header("tidegate-reason"), "queue_full");
    assert!(again.header("server-timing").starts_with("queue;dur="), "{again:?}");
    let age = number(&again, "age");
    assert!((30..60).contains(&age), "{age}");
    let caches: Vec<_> = again.headers.get_all("cache-status").iter().collect();
    assert_eq!(caches.len(), 2, "{caches:?}");
    let ttl = format!("tidegate; hit; ttl={}; detail=queue_full", 59 - age);
    let ttl_of_whole = format!("tidegate; hit; ttl={}; detail=queue_full", 60 - age);
    assert!(
        caches[0] == "far; hit" && (caches[1] == &ttl || caches[1] == &ttl_of_whole),
        "{caches:?}"
    );
    let metrics = stage.client.get(stage.proxy.admin(), "/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(metrics.contains("tidegate_degraded_total{route=\"/\",step=\"stale\"} 1"), "{metrics}");
    // Another query, another host: something else.
    assert!(stage.while_full("/say?a=2", &[]).await.is_none());
    assert!(stage.while_full("/say?a=1", &[("host", "other")]).await.is_none());
}

#[tokio::test]
async fn only_get_and_head_without_a_body_are_told_again() {
    let stage = Stage::new().await;
    stage.ask("/say", &[("x-say", "cache-control: max-age=60|etag: \"v1\"")]).await;
    let holder = stage.fill().await;
    let get = told_again(stage.send(Method::GET, "/say").await).unwrap();
    let head = told_again(stage.send(Method::HEAD, "/say").await).unwrap();
    assert_eq!(head.header("content-length"), get.body.len().to_string());
    assert_eq!((head.header("etag"), &head.body[..]), ("\"v1\"", &b""[..]));
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
        assert!(told_again(stage.send(method.clone(), "/say").await).is_none(), "{method}");
    }
    let body = Bytes::from_static(b"which one?");
    let asked = stage.client.send(Method::GET, stage.proxy.addr(), "/say", body).await.unwrap();
    assert!(told_again(asked).is_none());
    let mut h2 = H2::connect(stage.proxy.addr()).await;
    let answer = h2.get("/say").await.unwrap();
    assert_eq!(answer.headers()["tidegate-degraded"], "stale");
    drop(holder);
}

#[tokio::test]
async fn each_variant_is_told_to_those_who_ask_for_it() {
    let stage = Stage::new().await;
    let say = ("x-say", "cache-control: max-age=60|vary: Accept-Language, x-a");
    let german = [("accept-language", "de")];
    let english = [("accept-language", "en")];
    let first = stage.ask("/say", &[say, german[0]]).await;
    let second = stage.ask("/say", &[say, english[0]]).await;
    assert_ne!(first.body, second.body);
    assert_eq!(stage.while_full("/say", &german).await.unwrap().body, first.body);
    assert_eq!(stage.while_full("/say", &english).await.unwrap().body, second.body);
    assert!(stage.while_full("/say", &[]).await.is_none());
    // Every line of a header counts, and so does each header.
    let two_lines = [german[0], ("accept-language", "en")];
    assert!(stage.while_full("/say", &two_lines).await.is_none());
    assert!(stage.while_full("/say", &[german[0], ("x-a", "1")]).await.is_none());
    for vary in ["vary: *", "vary: accept|vary: x-forwarded-for", "vary: a b"] {
        let say = format!("cache-control: max-age=60|{vary}");
        assert!(stage.again(&format!("/say?{}=", vary.len()), &say, &[]).await.is_none(), "{vary}");
    }
}

#[tokio::test]
async fn what_is_not_for_everybody_is_told_to_nobody() {
    let stage = Stage::new().await;
    let auth = ("authorization", "Bearer mine");
    let secret = [
        ("cache-control: no-store", None),
        ("cache-control: max-age=60|cache-control: No-Store", None),
        ("cache-control: private", None),
        ("cache-control: PRIVATE, max-age=60", None),
        ("cache-control: private=\"x-a, x-b\", max-age=60", None),
        ("cache-control: no-cache, max-age=60", None),
        ("cache-control: proxy-revalidate, max-age=60", None),
        ("pragma: no-cache", None),
        ("cache-control: max-age=60|set-cookie: who=me", None),
        ("cache-control: max-age=60", Some(("cache-control", "no-store"))),
        ("cache-control: max-age=60", Some(auth)),
        ("cache-control: max-age=60", Some(("cookie", "who=me"))),
        ("cache-control: max-age=60", Some(("x-api-key", "mine"))),
    ];
    for (index, (say, header)) in secret.into_iter().enumerate() {
        let path = format!("/say?case={index}");
        stage.ask(&path, &header.into_iter().chain([("x-say", say)]).collect::<Vec<_>>()).await;
        assert!(stage.while_full(&path, &[]).await.is_none(), "{say} {header:?}");
        let header: Vec<_> = header.into_iter().collect();
        assert!(stage.while_full(&path, &header).await.is_none(), "{say} {header:?}");
    }
    for (index, word) in ["public", "s-maxage=60", "must-revalidate"].into_iter().enumerate() {
        let (path, say) =
            (format!("/say?for-all={index}"), format!("cache-control: max-age=60, {word}"));
        assert!(stage.again(&path, &say, &[auth]).await.is_some(), "{say}");
        assert!(stage.while_full(&path, &[]).await.is_some(), "{say}");
    }
    // Nor is what anybody got told to one who proves to be someone.
    let path = "/say?anybody=1";
    assert!(stage.again(path, "cache-control: max-age=60", &[]).await.is_some());
    assert!(stage.while_full(path, &[auth]).await.is_none());
    // Whoever wants it from the source gets no copy.
    assert!(stage.while_full(path, &[("cache-control", "no-cache")]).await.is_none());
    assert!(stage.while_full(path, &[("pragma", "no-cache")]).await.is_none());
}

#[tokio::test]
async fn a_copy_is_as_old_as_its_freshness_and_the_allowance_and_no_older() {
    let stage = Stage::new().await;
    let cases = [
        ("cache-control: max-age=60|age: 640", true),
        ("cache-control: max-age=60|age: 661", false),
        ("cache-control: max-age=900|age: 1400", true),
        ("age: 580", true),
        ("age: 601", false),
        ("age: 99999999999999999999", false),
        // Where staleness is forbidden, only what is fresh.
        ("cache-control: must-revalidate, max-age=60|age: 20", true),
        ("cache-control: must-revalidate, max-age=60|age: 60", false),
        ("cache-control: s-maxage=60, max-age=900|age: 20", true),
        ("cache-control: s-maxage=60, max-age=900|age: 60", false),
    ];
    for (index, (say, is_told)) in cases.into_iter().enumerate() {
        let again = stage.again(&format!("/say?case={index}"), say, &[]).await;
        assert_eq!(again.is_some(), is_told, "{say}");
    }
    let ago = |seconds| httpdate::fmt_http_date(SystemTime::now() - Duration::from_secs(seconds));
    let dated = |seconds| format!("cache-control: max-age=60|date: {}", ago(seconds));
    let again = stage.again("/say?dated=1", &dated(600), &[]).await.unwrap();
    assert!((600..630).contains(&number(&again, "age")), "{again:?}");
    assert!(stage.again("/say?dated=2", &dated(700), &[]).await.is_none());
    let expires = format!("date: {}|expires: {}", ago(1000), ago(300));
    assert!(stage.again("/say?expires=1", &expires, &[]).await.is_some());
    let expires = format!("date: {}|expires: {}", ago(1000), ago(700));
    assert!(stage.again("/say?expires=2", &expires, &[]).await.is_none());
    // The client may ask for less.
    let path = "/say?max-stale=1";
    assert!(stage.again(path, "cache-control: max-age=60|age: 300", &[]).await.is_some());
    assert!(stage.while_full(path, &[("cache-control", "max-stale=60")]).await.is_none());
    assert!(stage.while_full(path, &[("cache-control", "max-age=60")]).await.is_none());
}

#[tokio::test]
async fn a_copy_is_the_whole_answer_of_at_most_a_mebibyte() {
    let stage = Stage::new().await;
    let fits = stage.again("/say?bytes=1048576", "", &[]).await.expect("a copy");
    assert_eq!(fits.body.len(), 1_048_576);
    let long = stage.ask("/say?bytes=1048577", &[]).await;
    assert_eq!(long.body.len(), 1_048_577);
    assert!(stage.while_full("/say?bytes=1048577", &[]).await.is_none());
    for path in ["/say?bytes=5000&cut=1", "/trunc"] {
        let broken = stage.client.try_get(stage.proxy.addr(), path).await;
        assert!(broken.is_err(), "{path}: {broken:?}");
        stage.free().await;
        assert!(stage.while_full(path, &[]).await.is_none(), "{path}");
    }
    let with_trailers = stage.ask("/trailers", &[("te", "trailers")]).await;
    assert!(with_trailers.trailers.is_some());
    assert!(stage.while_full("/trailers", &[]).await.is_none());
    // A client that leaves takes its copy along.
    let mut events = stage.client.events(stage.proxy.addr(), "/sse?events=2&gate=1").await;
    stage.upstream.open(1);
    assert_eq!(events.next().await.as_deref(), Some("1"));
    drop(events);
    stage.free().await;
    assert!(stage.while_full("/sse?events=2&gate=1", &[]).await.is_none());
    // Piece by piece, as they come; the copy is there once the end was.
    let mut events = stage.client.events(stage.proxy.addr(), "/sse?events=2&gate=1").await;
    for event in ["1", "2"] {
        stage.upstream.open(1);
        assert_eq!(events.next().await.as_deref(), Some(event));
    }
    stage.upstream.open(1);
    assert_eq!(events.next().await, None);
    stage.free().await;
    let again = stage.while_full("/sse?events=2&gate=1", &[]).await.expect("a copy");
    assert_eq!(&again.body[..], b"data: 1\n\ndata: 2\n\n");
}

#[tokio::test]
async fn a_change_that_succeeds_ends_the_copy() {
    let stage = Stage::new().await;
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
        assert!(stage.again("/say?x=1", "cache-control: max-age=60", &[]).await.is_some());
        let failed = stage.send(method.clone(), "/say?x=2").await;
        assert_eq!(failed.status, 200);
        stage.free().await;
        assert!(stage.while_full("/say?x=1", &[]).await.is_some(), "another target");
        assert_eq!(stage.send(method.clone(), "/say?x=1").await.status, 200);
        stage.free().await;
        assert!(stage.while_full("/say?x=1", &[]).await.is_none(), "{method}");
    }
    let path = "/say?status=404";
    assert!(stage.again(path, "cache-control: max-age=60", &[]).await.is_some());
    assert_eq!(stage.send(Method::POST, path).await.status, 404);
    stage.free().await;
    assert_eq!(stage.while_full(path, &[]).await.expect("nothing was changed").status, 404);
}

#[tokio::test]
async fn an_answer_asked_for_before_a_change_is_no_copy_after_it() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 2).queue("0").route(STALE);
    let stage = Stage::with(upstream, &conf).await;
    let path = "/sse?events=1&gate=1&name=slow";
    let mut read = stage.client.events(stage.proxy.addr(), path).await;
    let mut change = Raw::connect(stage.proxy.addr()).await;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: 0\r\n\r\n",
        stage.proxy.addr()
    );
    change.write(head).await.unwrap();
    assert!(change.head().await.starts_with("HTTP/1.1 200"));
    stage.upstream.open_gate("slow", 4);
    assert_eq!(read.next().await.as_deref(), Some("1"));
    assert_eq!(read.next().await, None);
    stage.free().await;
    let holders = [stage.fill().await, Raw::get(stage.proxy.addr(), "/silent").await];
    stage.upstream.wait_current(2).await;
    assert!(told_again(stage.send(Method::GET, path).await).is_none());
    drop(holders);
}

#[tokio::test]
async fn conditions_are_answered_where_a_copy_can() {
    let stage = Stage::new().await;
    let say = "cache-control: max-age=60|etag: W/\"v,1\"|last-modified: Sun, 06 Nov 1994 08:49:37 GMT|content-type: text/x|age: 600";
    stage.ask("/say", &[("x-say", say)]).await;
    for header in [
        ("if-none-match", "\"v0\", \"v,1\""),
        ("if-none-match", "*"),
        ("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ] {
        let again = stage.while_full("/say", &[header]).await.expect("a copy");
        assert_eq!((again.status, again.body.len()), (304, 0), "{header:?}");
        assert_eq!((again.header("etag"), again.header("content-type")), ("W/\"v,1\"", ""));
        assert!(number(&again, "age") >= 600);
    }
    for header in [
        ("if-none-match", "\"v\""),
        ("if-modified-since", "Sun, 06 Nov 1994 08:49:36 GMT"),
        ("range", "bytes=0-0"),
    ] {
        let again = stage.while_full("/say", &[header]).await.expect("a copy");
        assert_eq!((again.status, again.body.is_empty()), (200, false), "{header:?}");
    }
    for header in
        [("if-match", "\"v,1\""), ("if-unmodified-since", "Sun, 06 Nov 1994 08:49:37 GMT")]
    {
        assert!(stage.while_full("/say", &[header]).await.is_none(), "{header:?}");
    }
    // What the upstream says to a condition, or of a part, is no copy, and takes none away.
    for status in [304, 206, 500] {
        let path = format!("/say?status={status}");
        assert!(stage.again(&path, "cache-control: max-age=60", &[]).await.is_none(), "{status}");
    }
}

#[tokio::test]
async fn without_a_copy_the_next_step_is_taken() {
    let upstream = Upstream::spawn().await;
    let ladder = "on_full = [{ stale = \"10m\" }, { respond = 200, body = \"later\" }]";
    let conf = one_limit(&upstream, 1).queue("0").route(ladder);
    let stage = Stage::with(upstream, &conf).await;
    let holder = stage.fill().await;
    let fixed = stage.send(Method::GET, "/say").await;
    assert_eq!((fixed.header("tidegate-degraded"), &fixed.body[..]), ("respond", &b"later"[..]));
    drop(holder);
}

#[tokio::test]
async fn what_another_upstream_answered_is_no_copy() {
    let (upstream, cheap) = (Upstream::spawn().await, Upstream::spawn().await);
    let tail = format!(
        "on_full = [{{ upstream = \"cheap\" }}, {{ stale = \"10m\" }}]\n\n[limits.cheap]\nslots = 1\nqueue = 0\n\n\
         [upstreams.cheap]\nendpoints = [\"{}\"]\nlimits = [\"cheap\"]\n",
        cheap.url()
    );
    let conf = one_limit(&upstream, 1).queue("0").route(tail);
    let stage = Stage::with(upstream, &conf).await;
    let holder = stage.fill().await;
    let elsewhere = stage.send(Method::GET, "/say").await;
    assert_eq!(elsewhere.header("tidegate-degraded"), "upstream:cheap");
    eventually("its slot is back", async || stage.proxy.limit("cheap").await["in_use"] == 0).await;
    let other = Raw::get(stage.proxy.addr(), "/silent").await;
    cheap.wait_current(1).await;
    assert!(told_again(stage.send(Method::GET, "/say").await).is_none());
    drop((holder, other));
}

/// The reasons for which the ladder is tried, each from outside; that no other is there says `Reason` itself.
#[tokio::test]
async fn every_reason_of_a_limit_leads_to_the_ladder() {
    let degraded = |answer: &Answer, reason| {
        assert_eq!(
            (answer.status, answer.header("tidegate-degraded")),
            (200, "stale"),
            "{answer:?}"
        );
        assert_eq!(answer.header("tidegate-reason"), reason);
    };
    let say = [("x-say", "cache-control: max-age=60")];

    let upstream = Upstream::spawn().await;
    let route = format!(
        "{STALE}\nclass = {{ header = \"x-priority\", default = \"normal\" }}\ndeadline_header = \"x-patience\""
    );
    let conf = one_limit(&upstream, 1)
        .server("trusted_proxies = [\"127.0.0.1/32\"]")
        .queue("{ size = 1, timeout = \"300ms\" }")
        .route(route);
    let stage = Stage::with(upstream, &conf).await;
    stage.ask("/say", &say).await;
    let holder = stage.fill().await;
    let ask = |header: (&'static str, &'static str)| {
        let addr = stage.proxy.addr();
        tokio::spawn(async move { Client::new().get_with(addr, "/say", &[header]).await })
    };
    degraded(&ask(("x-a", "")).await.unwrap(), "queue_timeout");
    degraded(&ask(("x-patience", "10ms")).await.unwrap(), "deadline");
    drop((holder, stage));

    let upstream = Upstream::spawn().await;
    let route = format!("{STALE}\nclass = {{ header = \"x-priority\", default = \"normal\" }}");
    let conf = one_limit(&upstream, 1)
        .server("trusted_proxies = [\"127.0.0.1/32\"]")
        .queue("{ size = 1, timeout = \"2m\" }")
        .route(route);
    let stage = Stage::with(upstream, &conf).await;
    stage.ask("/say", &say).await;
    let _holder = stage.fill().await;
    let ask = |class: &'static str| {
        let addr = stage.proxy.addr();
        tokio::spawn(
            async move { Client::new().get_with(addr, "/say", &[("x-priority", class)]).await },
        )
    };
    let displaced = ask("background");
    eventually("it waits", async || stage.proxy.limit("llm").await["waiting"]["background"] == 1)
        .await;
    degraded(&ask("background").await.unwrap(), "queue_full");
    let _critical = ask("critical");
    degraded(&displaced.await.unwrap(), "displaced");

    let (upstream, mut redis) = (Upstream::spawn().await, Redis::spawn().await);
    let conf = one_limit(&upstream, 1).redis(&redis).queue("0").route(STALE);
    let stage = Stage::with(upstream, &conf).await;
    stage.ask("/say", &say).await;
    redis.cli::<()>(&["FLUSHALL"]).await;
    degraded(&stage.send(Method::GET, "/say").await, "recovering");
    redis.kill9().await;
    degraded(&stage.send(Method::GET, "/say").await, "store_down");
}

#[tokio::test]
async fn copies_begin_anew_with_a_configuration_that_is_read_again() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).queue("0").route(STALE);
    let stage = Stage::with(upstream, &conf).await;
    let path = "/say?bytes=3";
    assert!(stage.again(path, "cache-control: max-age=60", &[]).await.is_some());
    let text = stage.proxy.text(&conf.upstream("linger = \"1s\""));
    assert_eq!(stage.proxy.sighup(&text).await, Reload::Applied);
    assert!(stage.while_full(path, &[]).await.is_none());
    assert!(stage.again(path, "cache-control: max-age=60", &[]).await.is_some());
}
