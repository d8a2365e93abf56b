use std::time::Duration;

use crate::config::OnClientGone;

mod rig;

use rig::Rig;

const GET: &str = "GET /x HTTP/1.1\r\nHost: h\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const UPLOAD: &str = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 999999999\r\n\r\n";
const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn the_slot_is_held_to_the_last_byte() {
    let rig = Rig::new().await;
    let mut client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    let head = upstream.read_head().await;
    assert!(head.starts_with("GET /x HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("x-forwarded-for: 127.0.0.1\r\n"), "{head}");
    upstream.write("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nAB").await;
    let head = client.read_to("AB").await;
    assert!(head.contains("server-timing: queue;dur="), "{head}");
    assert!(!head.contains("tidegate-reason"), "{head}");
    assert!(!rig.is_free());
    upstream.write("CD").await;
    client.read_to("CD").await;
    rig.until_free().await;
}

#[tokio::test]
async fn a_whole_answer_frees_the_slot_before_it_goes_on() {
    let whole = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let begun = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok";
    for (answer, rest) in [(whole, ""), (begun, "!")] {
        let rig = Rig::new().await;
        let mut client = rig.client(GET).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        upstream.write(answer).await;
        client.read_to("ok").await;
        assert_eq!(*rig.left.lock().unwrap(), [rest.is_empty()]);
        upstream.write(rest).await;
        client.read_to(rest).await;
        rig.until_free().await;
    }
}

#[tokio::test]
async fn an_answer_without_a_body_frees_the_slot_with_its_head() {
    let head = "HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n";
    for (request, answer) in [
        (head, "HTTP/1.1 200 OK\r\nContent-Length: 4242\r\n\r\n"),
        (head, CHUNKED),
        (GET, "HTTP/1.1 204 No Content\r\n\r\n"),
        (GET, "HTTP/1.1 304 Not Modified\r\n\r\n"),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ] {
        let rig = Rig::new().await;
        let mut client = rig.client(request).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        upstream.write(answer).await;
        let got = client.read_head().await;
        assert_eq!(got.contains("content-length: 4242"), answer.contains("4242"));
        rig.until_free().await;
        // The connection is as good as before: the next request takes it.
        client.write(GET).await;
        upstream.read_head().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_the_upstream_and_then_frees_the_slot() {
    for has_body_begun in [false, true] {
        let linger = |c: &mut crate::config::Config| c.upstreams[0].linger = 3 * SHORT;
        let rig = Rig::with(linger).await;
        let mut client = rig.client(GET).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        if has_body_begun {
            upstream.write(CHUNKED).await;
            upstream.write("2\r\nAB\r\n").await;
            client.read_to("AB\r\n").await;
        }
        drop(client);
        upstream.read_to_close().await;
        assert!(!rig.is_free(), "freed before linger was over");
        rig.until_free().await;
    }
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_upload_stops_the_upload() {
    let rig = Rig::new().await;
    let mut client = rig.client(UPLOAD).await;
    let mut upstream = rig.accept().await;
    upstream.read_head().await;
    assert!(!rig.is_free());
    upstream.write("HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n").await;
    let answer = client.read_head().await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    rig.until_free().await;
    upstream.read_to_close().await;
}

#[tokio::test]
async fn unsent_bytes_do_not_hold_the_close_back() {
    let rig = Rig::with(|c| c.upstreams[0].response_timeout = 10 * SHORT).await;
    let mut client = rig.client(UPLOAD).await;
    let mut upstream = rig.accept().await;
    client.flood().await;
    assert!(!rig.is_free());
    rig.until_free().await;
    assert!(upstream.is_reset().await);
}

#[tokio::test]
async fn a_truncated_answer_never_ends_clean() {
    let counted = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n";
    for (head, part) in [(CHUNKED, "2\r\nAB\r\n"), (counted, "AB")] {
        let rig = Rig::new().await;
        let mut client = rig.client(GET).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        upstream.write(head).await;
        upstream.write(part).await;
        client.read_to(part).await;
        drop(upstream);
        assert_eq!(client.read_to_close().await, "");
        rig.until_free().await;
    }
}

#[tokio::test]
async fn an_upstream_that_is_late_is_given_up() {
    let rig = Rig::with(|c| c.upstreams[0].response_timeout = SHORT).await;
    let mut client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    let head = client.read_head().await;
    assert!(head.starts_with("HTTP/1.1 504"), "{head}");
    assert!(head.contains("tidegate-reason: upstream_timeout"), "{head}");
    upstream.read_to_close().await;
    rig.until_free().await;
}

#[tokio::test]
async fn an_upstream_that_falls_silent_is_given_up() {
    let rig = Rig::with(|c| c.upstreams[0].idle_timeout = SHORT).await;
    let mut client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    upstream.read_head().await;
    upstream.write(CHUNKED).await;
    upstream.write("2\r\nAB\r\n").await;
    client.read_to("AB\r\n").await;
    assert_eq!(client.read_to_close().await, "");
    upstream.read_to_close().await;
    rig.until_free().await;
}

#[tokio::test]
async fn only_a_stale_connection_and_an_idempotent_request_are_tried_again() {
    let post = "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";
    for (request, is_warm, is_retried) in
        [(GET, true, true), (post, true, false), (GET, false, false)]
    {
        let rig = Rig::new().await;
        let mut client = rig.client("").await;
        let mut upstream = rig.accept_after(&mut client, is_warm).await;
        client.write(request).await;
        if !is_warm {
            upstream = Some(rig.accept().await);
        }
        upstream.as_mut().unwrap().read_head().await;
        drop(upstream);
        if is_retried {
            let mut again = rig.accept().await;
            again.read_head().await;
            assert!(!rig.is_free());
            again.write(OK).await;
            client.read_to("ok").await;
        } else {
            let head = client.read_head().await;
            assert!(head.contains("tidegate-reason: upstream_reset"), "{head}");
            assert!(rig.is_unvisited());
        }
        rig.until_free().await;
    }
}

#[tokio::test]
async fn a_connection_that_closed_while_idle_costs_no_request() {
    let rig = Rig::new().await;
    let mut client = rig.client("").await;
    drop(rig.accept_after(&mut client, true).await);
    client.write("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nAB").await;
    let mut upstream = rig.accept().await;
    upstream.read_to("\r\n\r\nAB").await;
    upstream.write(OK).await;
    client.read_to("ok").await;
    rig.until_free().await;
}

#[tokio::test]
async fn a_connection_that_said_close_is_not_used_again() {
    let rig = Rig::new().await;
    let mut client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    upstream.read_head().await;
    upstream.write("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").await;
    client.read_to("ok").await;
    client.write(GET).await;
    rig.accept().await.read_head().await;
    upstream.read_to_close().await;
}

#[tokio::test]
async fn g59_a_connection_is_not_used_beyond_its_age() {
    for (age, is_kept) in [(Duration::from_millis(1), false), (Duration::from_secs(60), true)] {
        let rig = Rig::with(|c| c.upstreams[0].max_connection_age = age).await;
        let mut client = rig.client(GET).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        tokio::time::sleep(2 * age.min(SHORT)).await;
        upstream.write(OK).await;
        client.read_to("ok").await;
        client.write(GET).await;
        if is_kept {
            upstream.read_head().await;
        } else {
            assert_eq!(upstream.read_to_close().await, "");
            rig.accept().await.read_head().await;
        }
    }
}

#[tokio::test]
async fn a_connection_that_nobody_needs_is_closed() {
    let rig = Rig::new().await;
    let mut client = rig.client("").await;
    let mut upstream = rig.accept_after(&mut client, true).await.unwrap();
    assert_eq!(upstream.read_to_close().await, "");
}

#[tokio::test]
async fn a_small_body_is_read_before_a_slot_is_taken() {
    let rig = Rig::new().await;
    let mut client = rig.client("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nAB").await;
    tokio::time::sleep(SHORT).await;
    assert!(rig.is_free() && rig.is_unvisited());
    client.write("CD").await;
    let mut upstream = rig.accept().await;
    upstream.read_to("\r\n\r\nABCD").await;
    assert!(!rig.is_free());
    upstream.write(OK).await;
    client.read_to("ok").await;
}

#[tokio::test]
async fn a_broken_upload_is_the_clients_fault() {
    let rig = Rig::new().await;
    let mut client = rig
        .client("GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        .await;
    let mut upstream = rig.accept().await;
    upstream.read_to("1\r\na\r\n").await;
    client.write("zz\r\n").await;
    let head = client.read_head().await;
    assert!(head.contains("tidegate-reason: bad_request"), "{head}");
    upstream.read_to_close().await;
    rig.until_free().await;
}

#[tokio::test]
async fn max_hold_ends_an_answer_that_nobody_reads() {
    let rig = Rig::with(|c| c.limits[0].max_hold = Some(10 * SHORT)).await;
    let client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    upstream.read_head().await;
    upstream.write("HTTP/1.1 200 OK\r\n\r\n").await;
    upstream.flood().await;
    rig.until_free().await;
    upstream.read_to_close().await;
    drop(client);
}

#[tokio::test]
async fn finish_reads_the_answer_to_its_end_for_nobody() {
    for has_body_begun in [false, true] {
        let finish = |c: &mut crate::config::Config| {
            c.upstreams[0].on_client_gone = OnClientGone::Finish;
        };
        let rig = Rig::with(finish).await;
        let mut client = rig.client(GET).await;
        let mut upstream = rig.accept().await;
        upstream.read_head().await;
        if has_body_begun {
            upstream.write(CHUNKED).await;
            upstream.write("2\r\nAB\r\n").await;
            client.read_to("AB\r\n").await;
        }
        drop(client);
        tokio::time::sleep(SHORT).await;
        if !has_body_begun {
            upstream.write(CHUNKED).await;
        }
        upstream.write("2\r\ncd\r\n").await;
        tokio::time::sleep(SHORT).await;
        assert!(!rig.is_free());
        upstream.write("0\r\n\r\n").await;
        rig.until_free().await;
    }
}

#[tokio::test]
async fn events_pass_one_by_one() {
    let rig = Rig::new().await;
    let mut client = rig.client(GET).await;
    let mut upstream = rig.accept().await;
    upstream.read_head().await;
    upstream.write(CHUNKED).await;
    client.read_head().await;
    for event in ["data: 1", "data: 2", "data: 3"] {
        upstream.write(&format!("7\r\n{event}\r\n")).await;
        client.read_to(&format!("{event}\r\n")).await;
    }
    upstream.write("0\r\n\r\n").await;
    client.read_to("0\r\n\r\n").await;
    rig.until_free().await;
}

#[tokio::test]
async fn the_process_cap_counts_waiting_requests() {
    let rig = Rig::with(|c| c.server.max_in_flight = 2).await;
    let _running = rig.client(GET).await;
    let _upstream = rig.accept().await;
    let _waiting = rig.client(GET).await;
    tokio::time::sleep(SHORT).await;
    let head = rig.client(GET).await.read_head().await;
    assert!(head.contains("tidegate-reason: process_full"), "{head}");
    assert!(head.contains("retry-after: "), "{head}");
}

#[tokio::test]
async fn an_upstream_that_is_not_there_costs_no_linger() {
    let rig = Rig::with(|c| {
        c.upstreams[0].endpoints[0] = "http://127.0.0.1:1".parse().unwrap();
        c.upstreams[0].linger = Duration::from_secs(3600);
    })
    .await;
    let head = rig.client(GET).await.read_head().await;
    assert!(head.contains("tidegate-reason: upstream_connect"), "{head}");
    rig.until_free().await;
}

#[tokio::test]
async fn what_cannot_be_forwarded_is_answered_here() {
    for (request, answer) in [
        ("CONNECT h:22 HTTP/1.1\r\nHost: h\r\n\r\n", "405"),
        ("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", "204"),
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400"),
        ("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "400"),
    ] {
        let rig = Rig::new().await;
        let head = rig.client(request).await.read_head().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {answer}")), "{head}");
        assert!(rig.is_unvisited());
    }
}
