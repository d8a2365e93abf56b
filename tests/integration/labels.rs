//! Nothing that clients say becomes a metric's label.

use std::collections::BTreeSet;

use tokio::task::JoinSet;

use crate::harness::{Client, Proxy, Raw, Upstream, one_limit};

/// The series of `/metrics`. The upstream chooses the statuses, and this one has few.
async fn series(proxy: &Proxy) -> BTreeSet<String> {
    let answer = Client::new().get(proxy.admin(), "/metrics").await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

/// The nth of ever other requests, each part of which would make a bad label.
fn hostile(n: usize) -> String {
    let method = ["GET".to_owned(), format!("M{n}"), "POST".to_owned()][n % 3].clone();
    let path =
        [format!("/{n}"), format!("/tenant/{n}%22%7D%0A"), format!("/a?n={n}")][n % 3].clone();
    let trace = format!("00-{n:032x}-{n:016x}-01");
    format!(
        "{method} {path} HTTP/1.1\r\nhost: h{n}.example.com\r\nx-tenant: t{n}\"}} {n}\r\n\
         x-priority: p{n}\r\nx-request-id: r{n}\r\nuser-agent: u{n}\r\ntraceparent: {trace}\r\n\
         content-length: 0\r\n\r\n"
    )
}

#[tokio::test]
async fn j79_whatever_clients_say_adds_no_series() {
    let count = std::env::var("TIDEGATE_HOSTILE_REQUESTS").ok();
    let count: usize = count.map_or(5_000, |count| count.parse().expect("a number"));
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 8)
        .server("trusted_proxies = [\"127.0.0.1/32\"]")
        .limit("key = \"header:x-tenant\"")
        .route(
            "class = { header = \"x-priority\", default = \"normal\" }\nrates = [\"each\"]\n\
             [[routes]]\npath = \"/tenant/\"\nmethods = [\"PUT\"]\nupstream = \"llm\"\n\
             [rates.each]\nrequests = 1\nwindow = \"1m\"\nkey = \"header:x-tenant\"\n",
        );
    let proxy = Proxy::spawn(&conf).await;
    // Every kind of answer once: the upstream's 404, the rate's 429, and a method that no route takes.
    let mut raw = Raw::connect(proxy.addr()).await;
    for n in [0, 0, 1, 2] {
        raw.write(hostile(n)).await.unwrap();
        raw.answer().await.unwrap();
    }
    let before = series(&proxy).await;
    assert!(before.iter().any(|series| series.contains("reason=\"rate_limited\"")), "{before:#?}");
    let mut clients = JoinSet::new();
    for first in 0..8 {
        let addr = proxy.addr();
        clients.spawn(async move {
            let mut raw = Raw::connect(addr).await;
            for n in (first..count).step_by(8) {
                raw.write(hostile(n)).await.unwrap();
                assert!(raw.answer().await.is_some(), "request {n}");
            }
        });
    }
    clients.join_all().await;
    let after = series(&proxy).await;
    let added: Vec<_> = after.difference(&before).collect();
    assert!(added.is_empty(), "{} series more: {added:#?}", added.len());
}
