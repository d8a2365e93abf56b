//! Connections that a balancer announces by the PROXY protocol.

use super::*;

const GET: &str = "GET /peer HTTP/1.0\r\n\r\n";

async fn behind_a_balancer(change: impl FnOnce(&mut config::Server)) -> Running {
    Running::new(|settings| {
        settings.proxy_protocol = vec!["127.0.0.0/8".parse().unwrap()];
        change(settings);
    })
    .await
}

async fn said_to(running: &Running, header: &str) -> String {
    let mut client = running.send(format!("{header}{GET}").as_bytes()).await;
    read_all(&mut client).await
}

#[tokio::test]
async fn the_address_is_the_announced_one() {
    let running = behind_a_balancer(|_| ()).await;
    let reply = said_to(&running, "PROXY TCP4 192.0.2.7 10.0.0.1 8080 80\r\n").await;
    assert!(reply.ends_with("192.0.2.7:8080 at 192.0.2.7"), "{reply}");
    // A health check has the balancer's own.
    let reply = said_to(&running, "PROXY UNKNOWN\r\n").await;
    assert!(reply.ends_with(" at 127.0.0.1"), "{reply}");
}

#[tokio::test]
async fn a_connection_without_a_header_is_closed() {
    let mut running = behind_a_balancer(|_| ()).await;
    assert_eq!(said_to(&running, "").await, "");
    running.expect(Event::TurnedAway(TurnedAway::ProxyHeader)).await;
}

#[tokio::test]
async fn nobody_else_may_announce() {
    let mut running = behind_a_balancer(|settings| {
        settings.proxy_protocol = vec!["10.0.0.0/8".parse().unwrap()];
    })
    .await;
    assert_eq!(said_to(&running, "PROXY TCP4 192.0.2.7 10.0.0.1 8080 80\r\n").await, "");
    running.expect(Event::TurnedAway(TurnedAway::Stranger)).await;
}

#[tokio::test]
async fn a_header_has_its_time() {
    let running =
        behind_a_balancer(|settings| settings.header_timeout = Duration::from_millis(200)).await;
    let mut client = running.send(b"PROXY TCP4 192.0.2.7 ").await;
    assert_eq!(read_all(&mut client).await, "");
}

#[tokio::test]
async fn announced_addresses_are_counted_apart() {
    let mut running =
        behind_a_balancer(|settings| settings.max_connections_per_address = Some(1)).await;
    let hang = |address: &str| {
        format!("PROXY TCP4 {address} 10.0.0.1 1 80\r\nGET /hang HTTP/1.1\r\nHost: a\r\n\r\n")
    };
    let _first = running.send(hang("192.0.2.7").as_bytes()).await;
    running.expect(Event::Entered).await;
    let _other = running.send(hang("192.0.2.8").as_bytes()).await;
    running.expect(Event::Entered).await;
    assert_eq!(said_to(&running, "PROXY TCP4 192.0.2.7 10.0.0.1 2 80\r\n").await, "");
    running.expect(Event::TurnedAway(TurnedAway::Crowd)).await;
}
