//! A page elsewhere, whose name is made to lead to this machine, can't look at or change what is only protected by its address.

use crate::harness::{Proxy, Raw, Upstream, one_limit};

async fn status_of(proxy: &Proxy, request: &str, host: &str) -> String {
    let mut raw = Raw::connect(proxy.admin()).await;
    let body = "{\"slots\": 9}";
    let kind = "content-type: application/json\r\ncontent-length: 12";
    let same = format!("origin: http://{host}\r\nsec-fetch-site: same-origin");
    let head = format!("{request} HTTP/1.1\r\nhost: {host}\r\n{kind}\r\n{same}\r\n\r\n{body}");
    raw.write(head).await.unwrap();
    raw.head().await.split(' ').nth(1).unwrap().to_owned()
}

#[tokio::test]
async fn a_name_of_somebody_else_opens_nothing() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let port = proxy.admin().port();
    let requests = [
        "GET /",
        "GET /events",
        "GET /status",
        "GET /metrics",
        "GET /limits/llm/holders",
        "PATCH /limits/llm",
    ];
    for request in requests {
        for name in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example"] {
            let host = format!("{name}:{port}");
            assert_eq!(status_of(&proxy, request, &host).await, "421", "{request} for {host}");
        }
    }
    assert_eq!(proxy.limit("llm").await["slots"], 1);
    for name in ["127.0.0.1", "[::1]", "localhost"] {
        for request in requests {
            let host = format!("{name}:{port}");
            assert_eq!(status_of(&proxy, request, &host).await, "200", "{request} for {host}");
        }
    }
    assert_eq!(proxy.limit("llm").await["slots"], 9);

    // Who has the token may come by any name.
    let text = proxy.text(&one_limit(&upstream, 1));
    proxy.reconfigure(&text.replace("[store]", "token = \"sesame\"\n[store]")).await;
    assert_eq!(status_of(&proxy, "GET /status", "admin.example").await, "200");
    assert_eq!(status_of(&proxy, "PATCH /limits/llm", "admin.example").await, "401");
}
