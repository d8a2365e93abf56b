//! Answers that come before the request body was read.

use super::*;

fn head(extra: &str, size: usize) -> String {
    format!("POST /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n{extra}\r\n")
}

/// A client that sends everything before it looks for the answer, as most do.
async fn refused(size: usize) -> String {
    let running = Running::new(|_| {}).await;
    let mut client = running.send(head("", size).as_bytes()).await;
    client.write_all(&vec![b'x'; size]).await.expect("the server takes the body");
    let mut reply = Vec::new();
    time::timeout(PATIENCE, client.read_to_end(&mut reply))
        .await
        .expect("closed")
        .expect("closed without a reset");
    String::from_utf8(reply).unwrap()
}

#[tokio::test]
async fn the_answer_is_seen_whatever_the_size() {
    for size in [200_000, 2_000_000, 16_000_000] {
        for _ in 0..10 {
            let reply = refused(size).await;
            assert!(reply.starts_with("HTTP/1.1 503"), "{size}: {reply}");
            assert!(reply.contains("connection: close"), "{size}: {reply}");
            assert_eq!(reply.matches("HTTP/1.1").count(), 1, "{size}: {reply}");
        }
    }
}

#[tokio::test]
async fn a_small_body_that_came_along_keeps_the_connection() {
    let running = Running::new(|_| {}).await;
    let mut client = running.connect().await;
    for _ in 0..2 {
        let request = head("", 19) + "GET /ok HTTP/1.1\r\n\r\n".get(..19).unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let reply = read_until(&mut client, "no").await;
        assert!(!reply.contains("close"), "{reply}");
    }
}

#[tokio::test]
async fn a_body_that_was_read_keeps_the_connection() {
    let running = Running::new(|_| {}).await;
    let mut client = running.connect().await;
    for body in
        ["Content-Length: 2\r\n\r\nhi", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"]
            .repeat(2)
    {
        let request = format!("POST /read HTTP/1.1\r\nHost: a\r\n{body}");
        client.write_all(request.as_bytes()).await.unwrap();
        let reply = read_until(&mut client, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        assert!(!reply.contains("close"), "{reply}");
    }
}

#[tokio::test]
async fn an_endless_upload_is_not_read_for_ever() {
    let running = Running::new(|_| {}).await;
    let mut client = running.send(head("", 1 << 40).as_bytes()).await;
    let piece = vec![b'x'; 65536];
    let sending = async {
        let mut sent = 0;
        while client.write_all(&piece).await.is_ok() {
            sent += piece.len();
        }
        sent
    };
    let sent = time::timeout(PATIENCE, sending).await.expect("stops");
    // The bound, and what the two kernels hold.
    assert!(sent < 64 * 1024 * 1024, "{sent}");
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_awaited_for_ever() {
    let running = Running::new(|_| {}).await;
    let mut client = running.send(head("", 1000).as_bytes()).await;
    assert!(read_all(&mut client).await.starts_with("HTTP/1.1 503"));
}

#[tokio::test]
async fn a_client_that_awaits_continue_gets_the_answer_alone() {
    let running = Running::new(|_| {}).await;
    let head = head("Expect: 100-continue\r\n", 1000);
    let mut client = running.send(head.as_bytes()).await;
    let reply = read_all(&mut client).await;
    assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
    assert!(reply.contains("connection: close"), "{reply}");
}

#[tokio::test]
async fn http2_streams_go_on_after_a_refusal() {
    let running = Running::new(|_| {}).await;
    let (mut client, _conn) = http2(&running).await;
    for _ in 0..10 {
        let mut request = get("/refuse");
        *request.body_mut() = Full::from(vec![b'x'; 2_000_000]);
        let reply = client.send_request(request).await.unwrap();
        assert_eq!(reply.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "no");
    }
    let reply = client.send_request(get("/ok")).await.unwrap();
    assert_eq!(reply.status(), StatusCode::OK);
}
