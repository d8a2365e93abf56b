//! G59: names of endpoints that change while the program runs, as the system's own lookup tells them.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tempfile::NamedTempFile;

use crate::harness::{Client, Proxy, Upstream, eventually, one_limit};

/// What names stand for, as `/etc/hosts` says it, for one process alone.
struct Hosts(NamedTempFile);

impl Hosts {
    fn new(line: &str) -> Self {
        let hosts = Self(NamedTempFile::new().unwrap());
        hosts.say(line);
        hosts
    }

    /// Said again and again by those who wait for it: a change within a second of the last one would be overlooked.
    fn say(&self, line: &str) {
        std::fs::write(self.0.path(), format!("{line}\n")).unwrap();
    }

    async fn spawn(&self, upstream: SocketAddr) -> Proxy {
        let conf = one_limit(&Upstream::spawn().await, 50)
            .endpoint(format!("http://up.test:{}", upstream.port()))
            .upstream("resolve_interval = \"1s\"");
        let environment = [
            ("LD_PRELOAD", "libnss_wrapper.so"),
            ("NSS_WRAPPER_HOSTS", self.0.path().to_str().unwrap()),
        ];
        Proxy::spawn_with(&conf, &environment).await
    }
}

#[tokio::test]
async fn g59_a_name_that_moves_is_followed_and_nothing_is_lost() {
    let first = Upstream::spawn_at("127.0.0.2:0").await;
    let second = Upstream::spawn_at(("127.0.0.3", first.addr().port())).await;
    let hosts = Hosts::new("127.0.0.2 up.test");
    let proxy = hosts.spawn(first.addr()).await;
    let client = Client::new();
    let answer = client.get(proxy.addr(), "/status/200").await;
    assert_eq!(answer.status, 200, "tests/run.sh installs libnss-wrapper: {}", proxy.log());
    let mut stream = client.events(proxy.addr(), "/sse?events=2&gate=1").await;
    first.wait_current(1).await;

    // Under load: every request is answered, by the one or the other.
    let done = Arc::new(AtomicBool::new(false));
    let clients = [(); 4].map(|()| {
        let (addr, done) = (proxy.addr(), Arc::clone(&done));
        tokio::spawn(async move {
            let client = Client::new();
            while !done.load(Ordering::Relaxed) {
                assert_eq!(client.get(addr, "/hold?ms=5").await.status, 200);
            }
        })
    });
    eventually("the name is followed", async || {
        hosts.say("127.0.0.3 up.test");
        second.total() > 20
    })
    .await;
    done.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let before = (first.total(), second.total());
    for _ in 0..20 {
        assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200);
    }
    assert_eq!((first.total(), second.total()), (before.0, before.1 + 20));

    // Who was there before goes on.
    first.open(3);
    for event in ["1", "2"] {
        assert_eq!(stream.next().await.as_deref(), Some(event));
    }
    assert_eq!(stream.next().await, None);
    first.wait_current(0).await;
    eventually("every slot is back", async || proxy.limit("llm").await["in_use"] == 0).await;
}

#[tokio::test]
async fn g59_a_name_that_is_gone_keeps_its_last_addresses() {
    let first = Upstream::spawn_at("127.0.0.2:0").await;
    let second = Upstream::spawn_at(("127.0.0.3", first.addr().port())).await;
    let hosts = Hosts::new("127.0.0.2 up.test");
    let proxy = hosts.spawn(first.addr()).await;
    let client = Client::new();
    assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200, "{}", proxy.log());
    eventually("the name is gone", async || {
        hosts.say("127.0.0.3 other.test");
        proxy.log().contains("the name can't be looked up")
    })
    .await;
    for _ in 0..20 {
        assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200);
    }
    assert_eq!((first.total(), second.total()), (21, 0));
    eventually("it is back, elsewhere", async || {
        hosts.say("127.0.0.3 up.test");
        assert_eq!(client.get(proxy.addr(), "/status/200").await.status, 200);
        second.total() > 0
    })
    .await;
    assert!(proxy.log().contains("the name can be looked up again"), "{}", proxy.log());
    // Said once each, however often it was tried.
    assert_eq!(proxy.log().matches("the name can't be looked up").count(), 1);
}
