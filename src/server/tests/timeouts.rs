//! Clients that are slow, silent or stuck.

use super::*;

const SHORT: Duration = Duration::from_millis(200);

async fn closed_by_deadline(bytes: &[u8]) {
    let running = Running::new(|settings| settings.header_timeout = SHORT).await;
    let mut client = running.send(bytes).await;
    assert_eq!(read_all(&mut client).await, "");
}

#[tokio::test]
async fn silent_connection_is_closed() {
    closed_by_deadline(b"").await;
}

#[tokio::test]
async fn one_byte_that_may_begin_a_preface_is_closed() {
    closed_by_deadline(b"P").await;
}

#[tokio::test]
async fn half_a_preface_is_closed() {
    closed_by_deadline(b"PRI * HTTP/2").await;
}

#[tokio::test]
async fn half_a_head_is_closed() {
    closed_by_deadline(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ").await;
}

#[tokio::test]
async fn dripping_head_is_closed() {
    let running = Running::new(|settings| settings.header_timeout = SHORT).await;
    let mut client = running.send(b"GET / HTTP/1.1\r\n").await;
    let dripping = async {
        while client.write_all(b"X: y\r\n").await.is_ok() {
            time::sleep(SHORT / 10).await;
        }
    };
    time::timeout(PATIENCE, dripping).await.expect("closed");
}

#[tokio::test]
async fn idling_outlasts_the_header_timeout_and_the_next_head_has_its_own() {
    let running = Running::new(|settings| settings.header_timeout = SHORT).await;
    let mut client = running.connect().await;
    for _ in 0..2 {
        client.write_all(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        read_until(&mut client, "ok").await;
        time::sleep(SHORT * 3).await;
    }
    client.write_all(b"GET /o").await.unwrap();
    assert_eq!(read_all(&mut client).await, "");
}

#[tokio::test]
async fn idle_connections_close_after_the_keepalive_timeout() {
    let running = Running::new(|settings| settings.keepalive_timeout = SHORT).await;
    let mut http1 = running.send(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(read_all(&mut http1).await.ends_with("ok"));

    let (mut http2, conn) = http2(&running).await;
    http2.send_request(get("/ok")).await.unwrap();
    time::timeout(PATIENCE, conn).await.expect("closed").unwrap();
}

#[tokio::test]
async fn a_waiting_request_outlasts_every_timeout() {
    let mut running = Running::new(|settings| {
        settings.header_timeout = SHORT;
        settings.keepalive_timeout = SHORT;
        settings.stall_timeout = SHORT;
    })
    .await;
    let mut client = running.send(b"GET /gate HTTP/1.0\r\n\r\n").await;
    running.expect(Event::Entered).await;
    time::sleep(SHORT * 4).await;
    running.handler.gate.add_permits(1);
    assert!(read_all(&mut client).await.ends_with("late"));
}

#[tokio::test]
async fn stalled_reader_is_cut() {
    let mut running = Running::new(|settings| settings.stall_timeout = SHORT).await;
    let _client = running.send(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;
    running.expect(Event::Dropped).await;
}

#[tokio::test]
async fn stalled_http2_reader_is_cut() {
    let mut running = Running::new(|settings| settings.stall_timeout = SHORT).await;
    let mut frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // SETTINGS and WINDOW_UPDATE open every window, so that only the socket holds bytes back.
    frames.extend(*b"\0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff");
    frames.extend(*b"\0\0\x04\x08\0\0\0\0\0\x7f\0\0\0");
    // HEADERS: GET http://a/flood
    frames.extend(*b"\0\0\x0d\x01\x05\0\0\0\x01\x82\x86\x04\x06/flood\x01\x01a");
    let _client = running.send(&frames).await;
    running.expect(Event::Entered).await;
    running.expect(Event::Dropped).await;
}

#[tokio::test]
async fn slow_but_moving_reader_is_not_cut() {
    let stall = Duration::from_secs(1);
    let running = Running::new(|settings| settings.stall_timeout = stall).await;
    let mut client = running.send(b"GET /flood HTTP/1.0\r\n\r\n").await;
    let mut piece = vec![0; 256 * 1024];
    let began = time::Instant::now();
    while began.elapsed() < stall * 3 {
        client.read_exact(&mut piece).await.expect("not cut");
        time::sleep(stall / 5).await;
    }
}

#[tokio::test]
async fn stalled_upload_ends_with_stalled() {
    let mut running = Running::new(|settings| settings.stall_timeout = SHORT).await;
    let mut client =
        running.send(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nx").await;
    running.expect(Event::Body(Err("stalled"))).await;
    let reply = read_all(&mut client).await;
    assert!(reply.starts_with("HTTP/1.1 408"), "{reply}");
    assert!(reply.contains("connection: close"), "{reply}");
}

#[tokio::test]
async fn slow_but_moving_upload_is_read() {
    let mut running = Running::new(|settings| settings.stall_timeout = SHORT * 2).await;
    let mut client =
        running.send(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 20480\r\n\r\n").await;
    for _ in 0..20 {
        client.write_all(&[b'x'; 1024]).await.unwrap();
        time::sleep(SHORT / 4).await;
    }
    running.expect(Event::Body(Ok(20480))).await;
}

#[tokio::test]
async fn broken_framing_is_the_clients_fault() {
    let mut running = Running::new(|_| {}).await;
    let _client = running
        .send(b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        .await;
    running.expect(Event::Body(Err("client"))).await;
}

const PREFACE_AND_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test]
async fn stalled_http2_upload_ends_with_stalled() {
    let mut running = Running::new(|settings| settings.stall_timeout = SHORT).await;
    let mut frames = PREFACE_AND_SETTINGS.to_vec();
    // HEADERS: POST http://a/read, and DATA: one byte, and more to come.
    frames.extend(*b"\0\0\x0c\x01\x04\0\0\0\x01\x83\x86\x04\x05/read\x01\x01a");
    frames.extend(*b"\0\0\x01\0\0\0\0\0\x01x");
    let _client = running.send(&frames).await;
    running.expect(Event::Body(Err("stalled"))).await;
}

#[tokio::test]
async fn an_http2_head_that_does_not_end_is_idling() {
    let running = Running::new(|settings| settings.keepalive_timeout = SHORT).await;
    let mut frames = PREFACE_AND_SETTINGS.to_vec();
    // HEADERS that a CONTINUATION should follow.
    frames.extend(*b"\0\0\x03\x01\x01\0\0\0\x01\x82\x86\x84");
    let mut client = running.send(&frames).await;
    read_all(&mut client).await;
}
