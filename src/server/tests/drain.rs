//! The end of serving.

use super::*;

#[tokio::test]
async fn running_requests_finish_and_idle_connections_close() {
    let mut running = Running::new(|_| {}).await;
    let mut silent = running.connect().await;
    let mut idle = running.send(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n").await;
    read_until(&mut idle, "ok").await;
    let mut busy = running.send(b"GET /gate HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;

    running.stop().await;
    assert_eq!(read_all(&mut silent).await, "");
    assert_eq!(read_all(&mut idle).await, "");
    assert!(TcpStream::connect(running.addr).await.is_err(), "still open");
    running.handler.gate.add_permits(1);
    let reply = read_all(&mut busy).await;
    assert!(reply.contains("connection: close"), "{reply}");
    assert!(reply.ends_with("late"), "{reply}");
    assert_eq!(running.drained().await, Drained { cut: 0 });
}

#[tokio::test]
async fn http2_connections_drain() {
    let mut running = Running::new(|_| {}).await;
    let (mut idle, idle_conn) = http2(&running).await;
    idle.send_request(get("/ok")).await.unwrap();
    let (mut busy, _conn) = http2(&running).await;
    let request = tokio::spawn(busy.send_request(get("/gate")));
    running.expect(Event::Entered).await;

    running.stop().await;
    time::timeout(PATIENCE, idle_conn).await.unwrap().unwrap();
    running.handler.gate.add_permits(1);
    let reply = request.await.unwrap().unwrap();
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "late");
    assert_eq!(running.drained().await, Drained { cut: 0 });
}

#[tokio::test]
async fn late_requests_are_cut() {
    let timeout = Duration::from_millis(100);
    let mut running = Running::new(|settings| settings.drain_timeout = timeout).await;
    let mut late = running.send(b"GET /hang HTTP/1.1\r\nHost: a\r\n\r\n").await;
    running.expect(Event::Entered).await;
    let (mut client, _conn) = http2(&running).await;
    let request = tokio::spawn(client.send_request(get("/hang")));
    running.expect(Event::Entered).await;

    running.stop().await;
    running.expect(Event::Dropped).await;
    running.expect(Event::Dropped).await;
    assert_eq!(read_all(&mut late).await, "");
    assert!(request.await.unwrap().is_err());
    assert_eq!(running.drained().await, Drained { cut: 2 });
}

#[tokio::test]
async fn a_request_that_is_on_its_way_is_answered() {
    let mut running = Running::new(|_| {}).await;
    let mut new = running.connect().await;
    // An answer behind it tells that this one was accepted.
    let mut other = running.send(b"GET /ok HTTP/1.0\r\n\r\n").await;
    read_all(&mut other).await;

    running.stop().await;
    while TcpStream::connect(running.addr).await.is_ok() {}
    new.write_all(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let reply = read_all(&mut new).await;
    assert!(reply.ends_with("ok"), "{reply}");
    assert_eq!(running.drained().await, Drained { cut: 0 });
}

#[tokio::test]
async fn a_head_that_has_begun_is_read_to_its_end_and_answered() {
    let mut running = Running::new(|_| ()).await;
    let ok = "GET /ok HTTP/1.1\r\nHost: a\r\n\r\n";
    let (begun, rest) = ok.split_at(20);
    // Read together with the request before it.
    let mut client = running.send(format!("{ok}{begun}").as_bytes()).await;
    read_until(&mut client, "ok").await;
    let mut other = running.send(ok.as_bytes()).await;
    read_until(&mut other, "ok").await;
    running.stop().await;
    // The other one learns of the drain at the same time.
    assert_eq!(read_all(&mut other).await, "");
    client.write_all(rest.as_bytes()).await.unwrap();
    assert!(read_all(&mut client).await.ends_with("ok"));
    assert_eq!(running.drained().await.cut, 0);
}
