//! Redis as it is run: with a password, users, TLS, Sentinels, or as a Cluster; and servers that won't do.

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tempfile::TempDir;

use crate::harness::{
    Client, Proxy, Raw, Redis, Sentinels, Upstream, eventually, one_limit, run_to_end, unused_addr,
};

#[tokio::test]
async fn a_user_without_channels_waits_longer_and_loses_nothing() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let user = "ACL SETUSER proxy on >s%cret ~* resetchannels +@all -@dangerous +info";
    redis.cli::<()>(&Vec::from_iter(user.split(' '))).await;
    let url = format!("redis://proxy:s%25cret@{}", redis.addr());
    let conf = one_limit(&upstream, 2).store_url(url);
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let requests: Vec<_> = (0..20)
        .map(|n| {
            let addr = if n % 2 == 0 { a.addr() } else { b.addr() };
            tokio::spawn(async move { Client::new().get(addr, "/hold?ms=5").await })
        })
        .collect();
    for request in requests {
        assert_eq!(request.await.unwrap().status, 200);
    }
    assert_eq!((upstream.highest(), upstream.total()), (2, 20));
    redis.wait_in_use("llm", 0).await;
    for log in [a.log(), b.log()] {
        assert!(!log.contains("cret"), "{log}");
    }
}

#[tokio::test]
async fn tls_needs_the_right_ca_and_may_need_a_certificate() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(file("cert.pem"), cert.pem()).unwrap();
    std::fs::write(file("key.pem"), signing_key.serialize_pem()).unwrap();
    let other = generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(file("other.pem"), other.cert.pem()).unwrap();
    let port = unused_addr().port();
    let (cert, key) = (file("cert.pem"), file("key.pem"));
    let redis = Redis::spawn_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &cert,
    ])
    .await;
    let upstream = Upstream::spawn().await;
    let conf = |tls: String| {
        let url = format!("rediss://127.0.0.1:{port}");
        let lines = format!("op_timeout = \"2s\"\ntls = {tls}");
        one_limit(&upstream, 1).store_url(url).store(lines)
    };

    let good = format!("{{ ca = \"{cert}\", client_cert = \"{cert}\", client_key = \"{key}\" }}");
    let proxy = Proxy::spawn(&conf(good)).await;
    let held = Raw::get(proxy.addr(), "/silent").await;
    redis.wait_in_use("llm", 1).await;
    drop(held);
    redis.wait_in_use("llm", 0).await;

    let strange = file("other.pem");
    let strange =
        format!("{{ ca = \"{strange}\", client_cert = \"{cert}\", client_key = \"{key}\" }}");
    for wrong in [strange, format!("{{ ca = \"{cert}\" }}")] {
        let proxy = Proxy::spawn_unready(&conf(wrong)).await;
        assert!(proxy.log().contains("starting without the store"), "{}", proxy.log());
        assert_eq!(proxy.admin_status("/readyz").await, Some(503));
    }
}

#[tokio::test]
async fn a_failover_that_sentinels_decide_on_is_followed() {
    let (upstream, mut primary) = (Upstream::spawn().await, Redis::spawn().await);
    let port = primary.addr().port().to_string();
    let replica = Redis::spawn_with(&["--replicaof", "127.0.0.1", &port]).await;
    eventually("the replica is in step", async || {
        let info: String = replica.cli(&["INFO", "replication"]).await;
        info.contains("master_link_status:up")
    })
    .await;
    let sentinels = Sentinels::spawn(3, &primary).await;
    eventually("the Sentinels know the replica", async || {
        sentinels.fact(0, "num-slaves").await.as_deref() == Some("1")
    })
    .await;
    let conf = one_limit(&upstream, 2).store_url(sentinels.url());
    let (a, b) = tokio::join!(Proxy::spawn(&conf), Proxy::spawn(&conf));
    let running = [get(&a), get(&b)];
    upstream.wait_current(2).await;
    let waiting = [get(&a), get(&b)];
    primary.wait_waiting("llm", 2).await;

    primary.kill9().await;
    eventually("the replica is the primary", async || {
        sentinels.primary().await == replica.addr().port()
    })
    .await;
    replica.wait_in_use("llm", 2).await;
    replica.wait_waiting("llm", 2).await;
    assert_eq!(upstream.highest(), 2);
    upstream.open(4);
    for request in running.into_iter().chain(waiting) {
        assert_eq!(request.await.unwrap(), 200);
    }
    assert_eq!(upstream.highest(), 2);
    replica.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn a_primary_that_sentinels_have_dropped_is_dropped_although_it_still_answers() {
    let (upstream, former) = (Upstream::spawn().await, Redis::spawn().await);
    let (sentinels, next) = (Sentinels::spawn(1, &former).await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).store_url(sentinels.url())).await;
    let running = get(&proxy);
    former.wait_in_use("llm", 1).await;

    let port = next.addr().port().to_string();
    sentinels.cli::<()>(0, &["SENTINEL", "REMOVE", "main"]).await.unwrap();
    sentinels
        .cli::<()>(0, &["SENTINEL", "MONITOR", "main", "127.0.0.1", &port, "1"])
        .await
        .unwrap();
    next.wait_in_use("llm", 1).await;
    eventually("the subscription follows", async || {
        let channels: Vec<String> = next.cli(&["PUBSUB", "CHANNELS"]).await;
        channels.iter().any(|channel| channel.starts_with("tidegate:push:"))
    })
    .await;
    upstream.open(1);
    assert_eq!(running.await.unwrap(), 200);
    next.wait_in_use("llm", 0).await;
    assert_eq!(former.in_use("llm").await, 1, "nothing more is said to the former primary");
}

#[tokio::test]
async fn sentinels_are_asked_with_their_own_password() {
    let (upstream, redis) =
        (Upstream::spawn().await, Redis::spawn_with(&["--requirepass", "counts"]).await);
    let sentinels = Sentinels::spawn(1, &redis).await;
    let user = "ACL SETUSER proxy on >hunter2 +sentinel +ping";
    for words in [user, "ACL SETUSER default resetpass >hunter3"] {
        sentinels.cli::<()>(0, &Vec::from_iter(words.split(' '))).await.unwrap();
    }
    assert!(sentinels.cli::<String>(0, &["PING"]).await.is_err());
    let url = sentinels.url().replace("://", "://:counts@");
    let conf = || one_limit(&upstream, 2).store_url(url.clone());
    let own = conf().store("sentinel_user = \"proxy\"\nsentinel_password = \"${ASK}\"");
    let (asks, knows) = ([("ASK", "hunter2")], conf().store("sentinel_password = \"hunter3\""));
    let (a, b) = tokio::join!(Proxy::spawn_with(&own, &asks), Proxy::spawn(&knows));
    for proxy in [&a, &b] {
        assert_eq!(Client::new().get(proxy.addr(), "/status/200").await.status, 200);
        assert!(!proxy.log().contains("hunter"), "{}", proxy.log());
    }
    drop(redis);

    // Whoever asks without doesn't start.
    let text = conf().text(unused_addr(), unused_addr());
    let (_dir, file) = crate::harness::config_file(&text);
    let ended = run_to_end(&["run", "--config", file.to_str().unwrap()]).await;
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("NOAUTH"), "{said}");
}

#[tokio::test]
async fn a_server_that_will_not_do_ends_the_start_with_the_reason() {
    let cluster = Redis::spawn_with(&["--cluster-enabled", "yes"]).await;
    let locked = Redis::spawn_with(&["--requirepass", "right"]).await;
    let guarded = format!("redis://:hunter2@{}", locked.addr());
    for (url, why) in [
        (cluster.url(), "store.prefix must be a hash tag"),
        (locked.url(), "NOAUTH"),
        (guarded, "authentication failed"),
    ] {
        let listen = ["--listen", "127.0.0.1:0", "--admin-listen", "none", "--store", &url];
        let words = [&["run", "--upstream", "http://127.0.0.1:9", "--slots", "1"], &listen[..]];
        let words = words.concat();
        let ended = run_to_end(&words).await;
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains(why), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[tokio::test]
async fn a_server_that_evicts_is_warned_of_and_refused_under_strict() {
    let redis = Redis::spawn_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let upstream = Upstream::spawn().await;
    let conf = one_limit(&upstream, 1).redis(&redis);
    let proxy = Proxy::spawn(&conf).await;
    assert_eq!(proxy.log().matches("maxmemory-policy is allkeys-lru").count(), 1);

    let text = conf.limit("recovery = \"strict\"").text(unused_addr(), unused_addr());
    let (_dir, file) = crate::harness::config_file(&text);
    let ended = run_to_end(&["run", "--config", file.to_str().unwrap()]).await;
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("maxmemory-policy is allkeys-lru"), "{said}");
}

fn get(proxy: &Proxy) -> tokio::task::JoinHandle<u16> {
    let addr = proxy.addr();
    tokio::spawn(async move { Client::new().get(addr, "/gate").await.status })
}
