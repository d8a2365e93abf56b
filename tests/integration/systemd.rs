//! What systemd hands over, and what it is told.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::net::UnixDatagram;

use crate::harness::{Client, Proxy, Raw, Reload, Upstream, get, one_limit, signal, within};

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

#[tokio::test]
async fn no_connection_is_refused_over_a_restart() {
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 100);
    let (clients, operators) = (listener(), listener());
    let addr = clients.local_addr().unwrap();
    let mut old = Proxy::spawn_on(&conf, &clients, &operators, &[]).await;
    let done = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..8)
        .map(|_| {
            let done = Arc::clone(&done);
            tokio::spawn(async move {
                let mut served = 0;
                while !done.load(Ordering::Relaxed) {
                    let mut raw = Raw::connect(addr).await;
                    raw.write(get("/hold?ms=5")).await.unwrap();
                    let answer = raw.answer().await.expect("an answer on every connection");
                    let answer = String::from_utf8(answer).unwrap();
                    // Who was waiting or just came is told to come back.
                    assert!(
                        answer.starts_with("HTTP/1.1 200 ")
                            || answer.contains("tidegate-reason: draining"),
                        "{answer}"
                    );
                    served += 1;
                }
                served
            })
        })
        .collect();
    upstream.wait_total(50).await;

    old.sigterm();
    assert_eq!(old.wait_exit().await.code(), Some(0));
    let before = upstream.total();
    // Nobody accepts now, and nobody is refused.
    let mut waiting = Raw::get(addr, "/status/204").await;
    let new = Proxy::spawn_on(&conf, &clients, &operators, &[]).await;

    let answer = waiting.head().await;
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    upstream.wait_total(before + 50).await;
    done.store(true, Ordering::Relaxed);
    for client in load {
        assert!(client.await.unwrap() > 0);
    }
    assert_eq!(new.admin_status("/readyz").await, Some(200));
}

#[tokio::test]
async fn it_hears_of_start_reload_and_stop() {
    let upstream = Upstream::spawn().await;
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let hears = async |wanted: &str| {
        let mut text = vec![0; 4096];
        let length = within(wanted, socket.recv(&mut text)).await.unwrap();
        let text = String::from_utf8_lossy(&text[..length]).into_owned();
        assert!(text.lines().any(|line| line.starts_with(wanted)), "{wanted} in {text}");
        text
    };
    let conf = one_limit(&upstream, 1);
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap())];
    let mut proxy = Proxy::spawn_with(&conf, &environment).await;
    hears("READY=1").await;

    let hangup = async || signal(proxy.pid(), "HUP");
    assert_eq!(proxy.reloaded(hangup).await, Reload::Applied);
    let reloading = hears("RELOADING=1").await;
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
    hears("READY=1").await;
    // A file that can't be used is no reason to give the service up.
    assert_eq!(proxy.reconfigure("nonsense").await, Reload::Refused);
    hears("RELOADING=1").await;
    hears("READY=1").await;

    proxy.sigterm();
    hears("STOPPING=1").await;
    assert_eq!(proxy.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn sockets_of_others_are_not_taken() {
    let upstream = Upstream::spawn().await;
    // What a parent was handed isn't for its child.
    let environment = [("LISTEN_FDS", "2"), ("LISTEN_PID", "1")];
    let proxy = Proxy::spawn_with(&one_limit(&upstream, 1), &environment).await;
    assert_eq!(Client::new().get(proxy.addr(), "/status/204").await.status, 204);
}
