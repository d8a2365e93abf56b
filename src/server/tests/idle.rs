//! Connections between two requests, which hyper has to give up for as long as nothing comes.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use tracing::subscriber::DefaultGuard;

use super::*;

const OK: &[u8] = b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n";
/// Idle connections are given up after a quarter of it.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// What is traced on this thread.
#[derive(Clone, Default)]
struct Traced(Arc<Mutex<Vec<u8>>>);

impl Traced {
    fn begin() -> (Self, DefaultGuard) {
        let traced = Self::default();
        let writer = traced.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (traced, tracing::subscriber::set_default(subscriber))
    }

    /// Waits until connections were given up this often.
    async fn given_up(&self, times: usize) {
        let seen = async {
            while self.text().matches("hyper's buffers are given up").count() < times {
                time::sleep(Duration::from_millis(5)).await;
            }
        };
        time::timeout(PATIENCE, seen).await.expect("given up");
    }

    fn text(&self) -> String {
        let text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl io::Write for Traced {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_idle_connection_is_given_up_and_serves_on() {
    let (traced, _guard) = Traced::begin();
    let mut running = Running::new(|settings| settings.keepalive_timeout = KEEPALIVE).await;
    let mut client = running.send(OK).await;
    read_until(&mut client, "ok").await;
    traced.given_up(1).await;
    // Byte by byte, behind a stray line end.
    for byte in [b"\r\n", OK].concat() {
        client.write_all(&[byte]).await.unwrap();
    }
    read_until(&mut client, "ok").await;
    traced.given_up(2).await;
    // Not while a request is under way, however long that takes.
    client.write_all(b"GET /gate HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    running.expect(Event::Entered).await;
    time::sleep(KEEPALIVE).await;
    running.handler.gate.add_permits(1);
    read_until(&mut client, "late").await;
    traced.given_up(3).await;
    // The framing was followed all the while: this one has two lengths.
    let doubtful = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    let request = format!("POST /length HTTP/1.1\r\nHost: a\r\n{doubtful}");
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(read_all(&mut client).await.ends_with("doubtful: true"));
}

#[tokio::test]
async fn nothing_is_given_up_that_has_begun() {
    let (traced, _guard) = Traced::begin();
    // A head that has begun is looked at four times in that, an idle connection every two seconds.
    let running = Running::new(|settings| settings.stall_timeout = Duration::from_secs(1)).await;
    let mut begun = running.send(&[OK, b"GET /o"].concat()).await;
    read_until(&mut begun, "ok").await;
    let mut idle = running.send(OK).await;
    read_until(&mut idle, "ok").await;
    traced.given_up(1).await;
    begun.write_all(b"k HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    read_until(&mut begun, "ok").await;
}

#[tokio::test]
async fn an_idle_http2_connection_is_kept() {
    let (traced, _guard) = Traced::begin();
    let running = Running::new(|settings| settings.keepalive_timeout = KEEPALIVE).await;
    let (mut http2, _conn) = http2(&running).await;
    http2.send_request(get("/ok")).await.unwrap();
    let mut idle = running.send(OK).await;
    read_until(&mut idle, "ok").await;
    traced.given_up(1).await;
    assert_eq!(http2.send_request(get("/ok")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn what_was_given_up_closes_after_the_keepalive_timeout() {
    let (traced, _guard) = Traced::begin();
    let running = Running::new(|settings| settings.keepalive_timeout = KEEPALIVE).await;
    let mut client = running.send(OK).await;
    read_until(&mut client, "ok").await;
    traced.given_up(1).await;
    assert_eq!(read_all(&mut client).await, "");
}

#[tokio::test]
async fn line_ends_keep_no_connection_alive() {
    let running = Running::new(|settings| settings.keepalive_timeout = KEEPALIVE).await;
    let mut client = running.send(OK).await;
    read_until(&mut client, "ok").await;
    let dripping = async {
        while client.write_all(b"\r\n").await.is_ok() {
            time::sleep(KEEPALIVE / 10).await;
        }
    };
    time::timeout(PATIENCE, dripping).await.expect("closed");
}

#[tokio::test]
async fn what_was_given_up_closes_when_the_server_drains() {
    let (traced, _guard) = Traced::begin();
    let mut running = Running::new(|_| ()).await;
    let mut clients = [running.send(OK).await, running.send(OK).await];
    for client in &mut clients {
        read_until(client, "ok").await;
    }
    traced.given_up(2).await;
    let [mut first, mut second] = clients;
    // What has come by then is served.
    first.write_all(OK).await.unwrap();
    running.stop().await;
    assert!(read_all(&mut first).await.ends_with("ok"));
    assert_eq!(read_all(&mut second).await, "");
    assert_eq!(running.drained().await.cut, 0);
}

#[tokio::test]
async fn a_client_that_leaves_what_was_given_up_is_noticed() {
    let (traced, _guard) = Traced::begin();
    let mut running = Running::new(|settings| settings.max_connections = 1).await;
    let mut client = running.send(OK).await;
    read_until(&mut client, "ok").await;
    traced.given_up(1).await;
    drop(client);
    // There was room for one.
    let mut next = running.send(OK).await;
    read_until(&mut next, "ok").await;
    running.stop().await;
}
