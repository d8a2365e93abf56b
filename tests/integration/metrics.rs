//! Nothing that a client says makes a series.

use std::{collections::BTreeSet, net::SocketAddr};

use crate::harness::{Client, Proxy, Raw, Upstream, one_limit};

const CONNECTIONS: usize = 4;

/// Paths, hosts, methods and tenants that nobody has seen before, some in the shape of a label.
async fn strange(addr: SocketAddr, numbers: std::ops::Range<usize>) {
    let mut raw = Raw::connect(addr).await;
    for n in numbers {
        let method = if n % 3 == 0 { format!("STRANGE{n}") } else { "GET".to_owned() };
        // Some are forwarded; no route leads anywhere for the others.
        let (path, domain) = match n % 2 {
            0 => (format!("/status/200?strange{n}"), "test"),
            _ => (format!("/strange%22%7D%0A{n}"), "example"),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: strange{n}.{domain}\r\nx-tenant: strange\"}} {n}\r\n\
             x-priority: strange{n}\r\nx-request-id: strange{n}\r\nuser-agent: strange{n}\r\n\r\n"
        );
        raw.write(request).await.unwrap();
        raw.answer().await.expect("an answer");
    }
}

async fn series(proxy: &Proxy) -> BTreeSet<String> {
    let text = Client::new().get(proxy.admin(), "/metrics").await;
    let text = String::from_utf8(text.body.to_vec()).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

async fn nothing_makes_a_series(requests: usize) {
    let upstream = Upstream::spawn().await;
    let route = "rates = [\"some\"]\nhost = \"*.test\"\nclass = { key = \"header:x-tenant\" }\n\
                 [rates.some]\nrequests = 1000000\nwindow = \"1m\"\nkey = \"header:x-tenant\"\n";
    let conf = one_limit(&upstream, 100).limit("key = \"header:x-tenant\"").route(route);
    let proxy = Proxy::spawn(&conf).await;
    // Every kind of answer once: each status has a series of its own.
    strange(proxy.addr(), 0..30).await;
    let before = series(&proxy).await;
    assert!(before.len() > 100, "{before:?}");
    assert!(!before.iter().any(|series| series.contains("strange")), "{before:?}");
    let share = requests / CONNECTIONS;
    let clients = (0..CONNECTIONS).map(|index| {
        let from = 30 + index * share;
        tokio::spawn(strange(proxy.addr(), from..from + share))
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    assert_eq!(series(&proxy).await, before);
}

#[tokio::test]
async fn strange_requests_make_no_series() {
    nothing_makes_a_series(2_000).await;
}

#[tokio::test]
#[ignore = "a minute; the short form runs always"]
async fn a_hundred_thousand_strange_requests_make_no_series() {
    nothing_makes_a_series(100_000).await;
}
