//! The line of each request: one, when it has ended, whole and harmless; and how much is logged, changed while the process runs.

use std::process::Stdio;

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{
    Client, Conf, Proxy, Raw, Reload, Upstream, eventually, get, one_limit, within,
};

/// Every request has a line; with more lines for `[log]`.
fn logged(conf: Conf, lines: &str) -> Conf {
    conf.route(format!("[log]\nrequests = true\n{lines}\n"))
}

/// The lines of requests so far.
fn lines(proxy: &Proxy) -> Vec<Value> {
    let log = proxy.log();
    let parsed = log.lines().map(|line| {
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line:?}"))
    });
    parsed.filter(|line: &Value| line["end"].is_string()).collect()
}

/// The lines once there are so many.
async fn wait_lines(proxy: &Proxy, count: usize) -> Vec<Value> {
    eventually(&format!("{count} lines"), async || lines(proxy).len() >= count).await;
    let lines = lines(proxy);
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines
}

async fn patch(proxy: &Proxy, body: &str) -> (u16, String) {
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .build_http();
    let request = http::Request::patch(format!("http://{}/log", proxy.admin()))
        .header("content-type", "application/json")
        .body(http_body_util::Full::new(bytes::Bytes::from(body.to_owned())))
        .unwrap();
    let answer = within("PATCH /log", client.request(request)).await.unwrap();
    let status = answer.status().as_u16();
    let body = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn a_request_has_its_line_when_it_has_ended() {
    let upstream = Upstream::spawn().await;
    let conf = logged(one_limit(&upstream, 1).limit("holder_header = \"x-holder\""), "");
    let proxy = Proxy::spawn(&conf).await;
    let mut events = Client::new().events(proxy.addr(), "/sse?events=2&gate=1").await;
    upstream.open(1);
    let first = events.next().await.unwrap();
    assert!(lines(&proxy).is_empty(), "its answer has not ended");
    upstream.open(2);
    let second = events.next().await.unwrap();
    assert!(events.next().await.is_none());
    let line = &wait_lines(&proxy, 1).await[0];
    // One word for it, whoever writes.
    for line in proxy.log().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let time = line["time"].as_str().unwrap();
        assert!(humantime::parse_rfc3339(time).is_ok() && line["timestamp"].is_null(), "{line}");
    }
    let expected = json!({
        "client": "127.0.0.1", "method": "GET", "path": "/sse", "route": "/", "class": "normal",
        "limits": "llm", "refused_by": null, "status": 200, "reason": null, "end": "complete",
        "upstream": "llm", "endpoint": upstream.addr().to_string(), "degraded": null,
        "shadow": null, "trace": null, "host": proxy.addr().to_string(),
        "bytes": first.len() + second.len() + 2 * "data: \n\n".len(),
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&line[key], value, "{key} of {line}");
    }
    let ms = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"));
    assert!(ms("wait_ms") <= ms("first_byte_ms") && ms("first_byte_ms") <= ms("total_ms"));
    assert!(ms("upstream_ms") <= ms("first_byte_ms"));
    assert_eq!(line["holder"].as_str().unwrap().len(), 36);
    assert!(line["time"].as_str().unwrap().ends_with('Z'));
    let answer = Client::new().get(proxy.addr(), "/echo").await;
    let line = &wait_lines(&proxy, 2).await[1];
    assert_eq!(line["request_id"], answer.header("x-request-id"));
}

#[tokio::test]
async fn the_line_says_how_a_request_ended() {
    let upstream = Upstream::spawn().await;
    let more = "[rates.one]\nrequests = 1\nwindow = \"10m\"\nkey = \"header:x-tenant\"\n\
        [limits.seen]\nslots = 0\nqueue = 0\nmode = \"shadow\"\n\
        [[routes]]\npath = \"/status\"\nupstream = \"llm\"\nrates = [\"one\"]\nlimits = [\"seen\"]\n\
        [[routes]]\npath = \"/say\"\nmethods = [\"GET\"]\nupstream = \"llm\"\n\
        on_full = [{ respond = 200, body = \"later\" }]\n\
        [log]\nrequests = true\n";
    let conf = one_limit(&upstream, 1).queue("{ size = 1, timeout = \"1m\" }").route(more);
    let proxy = Proxy::spawn(&conf).await;
    let (addr, client) = (proxy.addr(), Client::new());
    let mut count = 0;
    let mut next = async |expected: Value| {
        count += 1;
        let line = wait_lines(&proxy, count).await.pop().unwrap();
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&line[key], value, "{key} of {line}");
        }
    };
    client.get(addr, "/status/404").await;
    next(json!({ "status": 404, "reason": null, "end": "complete", "shadow": "queue_full" })).await;
    client.get(addr, "/status/404").await;
    next(json!({ "status": 429, "reason": "rate_limited", "refused_by": "one", "upstream": null }))
        .await;
    client.send(Method::POST, addr, "/say?bytes=1", "".into()).await.unwrap();
    next(json!({ "status": 405, "reason": "method_not_allowed", "class": null, "route": null }))
        .await;
    client.send(Method::HEAD, addr, "/big?bytes=9", "".into()).await.unwrap();
    next(json!({ "status": 200, "end": "complete", "bytes": 0 })).await;
    client.get(addr, "/reset").await;
    next(json!({ "status": 502, "reason": "upstream_reset", "end": "complete" })).await;
    let _ = client.try_get(addr, "/trunc").await;
    next(json!({ "status": 200, "reason": "upstream_reset", "end": "cut" })).await;
    let mut raw = Raw::connect(addr).await;
    raw.write("OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    next(json!({ "status": 204, "end": "complete", "path": "*" })).await;

    let holder = Raw::get(addr, "/gate").await;
    upstream.wait_current(1).await;
    let waiter = Raw::get(addr, "/echo").await;
    eventually("it waits", async || proxy.limit("llm").await["waiting"]["normal"] == 1).await;
    client.get(addr, "/echo").await;
    next(json!({ "status": 503, "reason": "queue_full", "refused_by": "llm", "end": "complete" }))
        .await;
    assert_eq!(client.get(addr, "/say").await.body, "later");
    next(json!({ "status": 200, "reason": "queue_full", "degraded": "respond", "bytes": 5 })).await;
    drop(waiter);
    next(json!({ "status": null, "end": "client_gone", "upstream": null, "path": "/echo" })).await;
    drop(holder);
    next(json!({ "status": null, "end": "client_gone", "upstream": "llm", "path": "/gate" })).await;
}

#[tokio::test]
async fn a_tunnel_has_its_line_when_it_has_ended() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&logged(one_limit(&upstream, 1), "")).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    let wish = "GET /upgrade HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    raw.write(wish).await.unwrap();
    raw.read_until("\r\n\r\n").await;
    raw.write("hello").await.unwrap();
    raw.read_until("hello").await;
    assert!(lines(&proxy).is_empty());
    raw.half_close().await;
    let line = &wait_lines(&proxy, 1).await[0];
    assert_eq!(
        (&line["status"], &line["bytes"], &line["end"]),
        (&json!(101), &json!(5), &json!("complete"))
    );
}

#[tokio::test]
async fn j80_hostile_bytes_stay_in_one_line() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&logged(one_limit(&upstream, 1), "")).await;
    let long = "a".repeat(8 * 1024);
    let paths: [&[u8]; 5] = [
        b"/%0d%0a%1b[31m%00",
        b"/\"end\":\"forged\",\\\"x\\",
        b"/\xff\xc2\x85\xe2\x80\xa8",
        b"/a?key=s3cret",
        format!("/{long}").leak().as_bytes(),
    ];
    let hosts: [&[u8]; 5] = [b"a", b"a\"b", b"\xff\xfe", b"a\x1b[2J", b"user:s3cret@a"];
    for path in paths {
        for host in hosts {
            let mut raw = Raw::connect(proxy.addr()).await;
            let request = [
                b"GET ",
                path,
                b" HTTP/1.1\r\nconnection: close\r\nuser-agent: \x80\"\r\nhost: ",
                host,
                b"\r\n\r\n",
            ];
            raw.write(request.concat()).await.unwrap();
            let _ = raw.read_to_end().await;
        }
    }
    let method = format!("M{}", "X".repeat(4000));
    Client::new().send(method.parse().unwrap(), proxy.addr(), "/echo", "".into()).await.unwrap();
    eventually("the last one's line", async || {
        lines(&proxy).iter().any(|line| line["path"] == "/echo")
    })
    .await;
    let log = proxy.log();
    // Each of them is JSON, or this panics.
    let lines = lines(&proxy);
    assert!(lines.len() >= 10, "{lines:#?}");
    assert!(log.bytes().all(|byte| matches!(byte, b'\n' | b' '..=b'~')));
    assert!(!log.contains("s3cret"));
    assert!(lines.iter().all(|line| line["end"] != "forged" && line.to_string().len() < 4096));
    let shows = |key: &str, end: &str| {
        lines.iter().any(|line| line[key].as_str().is_some_and(|text| text.ends_with(end)))
    };
    assert!(shows("path", "aaa...") && shows("method", "XXX..."));
    let unread =
        lines.iter().find(|line| line["path"].is_null()).expect("a head that can't be read");
    assert_eq!((&unread["status"], &unread["reason"]), (&json!(400), &json!("bad_request")));
    assert_eq!((&unread["client"], &unread["end"]), (&json!("127.0.0.1"), &json!("complete")));
}

#[tokio::test]
async fn what_is_logged_can_be_changed_while_it_runs() {
    let upstream = Upstream::spawn().await;
    let conf = logged(one_limit(&upstream, 1), "sample = 0.0");
    let proxy = Proxy::spawn(&conf).await;
    let client = Client::new();
    let ask = async |path: &str| drop(client.get(proxy.addr(), path).await);
    ask("/echo?1").await;
    ask("/status/500").await;
    let only = wait_lines(&proxy, 1).await;
    assert_eq!(only[0]["status"], 500, "what went wrong has a line whatever is sampled");
    let (status, shown) = patch(&proxy, "{\"sample\": 1}").await;
    assert_eq!((status, shown.contains("1.0")), (200, true), "{shown}");
    ask("/echo").await;
    wait_lines(&proxy, 2).await;
    patch(&proxy, "{\"requests\": false}").await;
    ask("/status/500").await;
    // The log of the process itself.
    assert!(!proxy.log().contains("no response"));
    patch(&proxy, "{\"level\": \"debug\"}").await;
    ask("/reset").await;
    eventually("it tells more", async || proxy.log().contains("no response")).await;
    let seen = || proxy.log().matches("no response").count();
    let before = seen();
    // Another configuration with the same [log] leaves the orders as they are.
    assert_eq!(proxy.reconfigure(&proxy.text(&conf.clone().slots(2))).await, Reload::Applied);
    ask("/reset").await;
    eventually("it still does", async || seen() == before + 1).await;
    patch(&proxy, "{\"level\": null, \"requests\": null}").await;
    ask("/reset").await;
    assert_eq!(seen(), before + 1);
    wait_lines(&proxy, 3).await;
    // Another [log] takes the place of all orders.
    let other = logged(one_limit(&upstream, 2), "level = \"debug\"\nsample = 0.5");
    assert_eq!(proxy.reconfigure(&proxy.text(&other)).await, Reload::Applied);
    let shown = client.get(proxy.admin(), "/log").await;
    let shown: Value = serde_json::from_slice(&shown.body).unwrap();
    assert_eq!(shown, json!({ "level": "debug", "requests": true, "sample": 0.5 }));
    for bad in ["{\"level\": \"loud\"}", "{\"sample\": 2}", "{\"format\": \"text\"}", "[]", "{"] {
        assert_eq!(patch(&proxy, bad).await.0, 400, "{bad}");
    }
    let form = client.send(Method::PATCH, proxy.admin(), "/log", "{}".into()).await.unwrap();
    assert_eq!(form.status, 415);
    assert_eq!(
        client.send(Method::PUT, proxy.admin(), "/log", "{}".into()).await.unwrap().status,
        405
    );
}

#[tokio::test]
async fn a_log_for_people_has_one_line_as_well() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&logged(one_limit(&upstream, 1), "format = \"text\"")).await;
    let mut raw = Raw::connect(proxy.addr()).await;
    raw.write("GET /a\"b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let _ = raw.read_to_end().await;
    eventually("the line", async || proxy.log().contains("end=complete")).await;
    let log = proxy.log();
    let line = log.lines().find(|line| line.contains("end=")).unwrap();
    let shown = " method=GET host=a path=\"/a\\\"b\" route=/ class=normal limits=llm refused_by=- status=404 reason=- end=complete ";
    assert!(line.contains(shown), "{line}");
}

#[tokio::test]
async fn without_requests_there_are_no_lines() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/500").await.status, 500);
    patch(&proxy, "{\"requests\": true}").await;
    Client::new().get(proxy.addr(), "/echo").await;
    assert_eq!(wait_lines(&proxy, 1).await[0]["path"], "/echo");
}

#[tokio::test]
async fn a_stdout_that_nobody_reads_slows_nobody() {
    let upstream = Upstream::spawn().await;
    let conf = logged(one_limit(&upstream, 1), "");
    // A pipe, of which nobody takes anything.
    let proxy = Proxy::spawn_into(&conf, Stdio::piped()).await;
    let mut asked = 0;
    // More than the queue and the pipe hold.
    while asked < 16_000 && proxy.metric("tidegate_log_lines_lost_total").await == 0.0 {
        let mut clients = JoinSet::new();
        for _ in 0..8 {
            let addr = proxy.addr();
            clients.spawn(async move {
                let mut raw = Raw::connect(addr).await;
                for _ in 0..20 {
                    raw.write(get("/echo").repeat(10)).await.unwrap();
                    for _ in 0..10 {
                        assert!(raw.answer().await.is_some());
                    }
                }
            });
        }
        clients.join_all().await;
        asked += 1600;
    }
    let lost = proxy.metric("tidegate_log_lines_lost_total").await;
    assert!(lost > 0.0 && lost < f64::from(asked), "{lost} of {asked}");
    assert_eq!(upstream.total(), asked as usize);
}
