//! A handler's future is dropped when its client leaves, whatever the client sent before.

use super::*;

const HANG: &str = "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n";

fn upload(size: usize) -> Vec<u8> {
    let mut bytes =
        format!("POST /hang HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n").into_bytes();
    bytes.resize(bytes.len() + size, b'x');
    bytes
}

async fn noticed(bytes: &[u8], leave: fn(TcpStream)) {
    let mut running = Running::new(|_| {}).await;
    let client = running.send(bytes).await;
    running.expect(Event::Entered).await;
    leave(client);
    running.expect(Event::Dropped).await;
}

fn reset(client: TcpStream) {
    client.set_zero_linger().unwrap();
}

#[tokio::test]
async fn plain_get() {
    noticed(HANG.as_bytes(), drop).await;
    noticed(HANG.as_bytes(), reset).await;
}

#[tokio::test]
async fn stray_line_end_behind_the_request() {
    noticed(format!("{HANG}\r\n").as_bytes(), drop).await;
    noticed(format!("{HANG}\r\n").as_bytes(), reset).await;
}

#[tokio::test]
async fn pipelined_request_behind_the_request() {
    noticed(format!("{HANG}{HANG}").as_bytes(), drop).await;
    noticed(format!("{HANG}{HANG}").as_bytes(), reset).await;
}

#[tokio::test]
async fn unread_upload() {
    noticed(&upload(100_000), drop).await;
    noticed(&upload(100_000), reset).await;
}

#[tokio::test]
async fn half_close() {
    let mut running = Running::new(|_| {}).await;
    let mut client = running.send(HANG.as_bytes()).await;
    running.expect(Event::Entered).await;
    client.shutdown().await.unwrap();
    running.expect(Event::Dropped).await;
}

#[tokio::test]
async fn leaving_while_the_response_streams() {
    let mut running = Running::new(|_| {}).await;
    let client = running.send(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n\r\n").await;
    running.expect(Event::Entered).await;
    drop(client);
    running.expect(Event::Dropped).await;
}

#[tokio::test]
async fn http2_stream_reset() {
    let mut running = Running::new(|_| {}).await;
    let (mut client, _conn) = http2(&running).await;
    let request = tokio::spawn(client.send_request(get("/hang")));
    running.expect(Event::Entered).await;
    request.abort();
    running.expect(Event::Dropped).await;
}

#[tokio::test]
async fn http2_connection_close() {
    let mut running = Running::new(|_| {}).await;
    let stream = running.connect().await;
    // hyper's client keeps its stream in a task of its own, so it is closed behind its back.
    let handle = socket2::SockRef::from(&stream).try_clone().unwrap();
    let (mut client, _conn) = http2_on(stream).await;
    let _request = tokio::spawn(client.send_request(get("/hang")));
    running.expect(Event::Entered).await;
    handle.shutdown(std::net::Shutdown::Write).unwrap();
    running.expect(Event::Dropped).await;
}
