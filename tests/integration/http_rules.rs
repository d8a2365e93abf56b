//! What an operator changes on the way: header fields both ways, and the path.

use crate::harness::{Client, Proxy, Raw, Upstream, one_limit};

const RULES: &str = r#"
path = "/api/"
strip_prefix = true
[routes.request_headers]
set = { x-set = "ours" }
add = { x-added = "ours" }
remove = ["x-removed"]
[routes.response_headers]
set = { x-set = "ours" }
add = { set-cookie = "c=3" }
remove = ["x-removed"]
"#;

async fn proxy(upstream: &Upstream) -> Proxy {
    let conf = one_limit(upstream, 1)
        .queue("0")
        .upstream("set_headers = { authorization = \"Bearer ${API_KEY}\" }")
        .route(format!("name = \"other\"\n[[routes]]\nupstream = \"llm\"{RULES}"));
    Proxy::spawn_with(&conf, &[("API_KEY", "hunter2"), ("RUST_LOG", "tidegate=trace,info")]).await
}

#[tokio::test]
async fn fields_are_set_added_and_removed_both_ways() {
    let upstream = Upstream::spawn().await;
    let proxy = proxy(&upstream).await;
    let client = Client::new();
    let fields = [
        ("x-set", "theirs"),
        ("x-added", "theirs"),
        ("x-removed", "theirs"),
        ("authorization", "theirs"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ];
    let answer = client.get_with(proxy.addr(), "/api/headers?a%2Fb", &fields).await;
    let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(lines[0], "GET /headers?a%2Fb HTTP/1.1");
    let count = |line: &str| lines.iter().filter(|found| *found == line).count();
    for line in [
        "x-set: ours",
        "x-added: theirs",
        "x-added: ours",
        "authorization: Bearer hunter2",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ] {
        assert_eq!(count(line), 1, "{line}: {lines:?}");
    }
    assert!(
        !lines.iter().any(|line| line.contains("removed") || line == "x-set: theirs"),
        "{lines:?}"
    );

    let say = [("x-say", "x-set: theirs|x-removed: 1|set-cookie: a=1|set-cookie: b=2")];
    let answer = client.get_with(proxy.addr(), "/api/say?bytes=2", &say).await;
    assert_eq!((answer.header("x-set"), answer.header("x-removed")), ("ours", ""));
    let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().collect();
    assert_eq!(cookies, ["a=1", "b=2", "c=3"]);
    // Another route is as it was, but for what the upstream is always told.
    let answer = client.get_with(proxy.addr(), "/headers", &fields).await;
    let lines: Vec<String> = serde_json::from_slice(&answer.body).unwrap();
    assert!(
        lines.contains(&"x-set: theirs".to_owned())
            && lines.contains(&"authorization: Bearer hunter2".to_owned())
    );
    assert!(!proxy.log().contains("hunter2"));
}

#[tokio::test]
async fn answers_of_our_own_carry_the_routes_fields_and_still_say_whose_they_are() {
    let upstream = Upstream::spawn().await;
    let proxy = proxy(&upstream).await;
    let _holder = Raw::get(proxy.addr(), "/silent").await;
    upstream.wait_current(1).await;
    let refused = Client::new().get(proxy.addr(), "/api/x").await;
    assert_eq!(
        (refused.header("tidegate-reason"), refused.header("x-set")),
        ("queue_full", "ours")
    );
}
