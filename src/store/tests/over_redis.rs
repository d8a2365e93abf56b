//! What only a store that others reach too can get wrong.

use super::{
    rig::*,
    server::{Server, settings},
    *,
};
use crate::config::{RedisAt, Secret};

#[tokio::test]
async fn the_slots_outlive_the_expiry_that_a_plain_client_sets() {
    let (rig, set) = (Rig::redis().await, Arc::new(set(1)));
    let me = rig.instance().await;
    let (holder, key) = (ask(&set), rig.key_of_slots(&set));
    me.acquire(&holder).await;
    for _ in 0..6 {
        let _: u32 = rig.raw(&["EXPIRE", &key, "1"]).await;
        me.renew(&holder, false).await;
        assert_eq!(rig.raw::<i64>(&["TTL", &key]).await, -1);
        assert_eq!(
            me.try_acquire(&ask(&set)).await,
            Acquired::Shed { by: Refuser::Want(0), why: Shed::Full { queue: 0 } }
        );
        pause(200).await;
    }
    assert_eq!(rig.used(&set).await, 1);
}

#[tokio::test]
async fn calls_are_applied_in_the_order_in_which_they_were_made() {
    let (rig, set) = (Rig::redis().await, Arc::new(set(1)));
    let me = rig.instance().await;
    for _ in 0..50 {
        let ask = ask(&set);
        let acquire = Acquire { ask: ask.clone(), waited: 0, may_wait: false, again: false };
        let first = Call { acquires: vec![acquire], ..Call::default() };
        let release = Release { ask, queued: false, refund: false };
        let second = Call { releases: vec![release], ..Call::default() };
        let (first, second) = tokio::join!(me.call(&first), me.call(&second));
        assert_eq!(first.unwrap().acquires.unwrap().outcomes, [Acquired::Granted]);
        assert_eq!(second.unwrap().releases.unwrap().outcomes, [Released::Released]);
    }
}

#[tokio::test]
async fn the_next_link_loads_the_scripts_that_were_lost() {
    let (rig, set) = (Rig::redis().await, Arc::new(set(1)));
    let mut me = rig.instance().await;
    let _: String = rig.raw(&["SCRIPT", "FLUSH"]).await;
    let holder = ask(&set);
    let acquire = Acquire { ask: holder.clone(), waited: 0, may_wait: true, again: false };
    let call = Call { acquires: vec![acquire], ..Call::default() };
    assert!(matches!(me.call(&call).await, Err(StoreError::Unavailable(_))));
    me.reconnect(&rig).await;
    assert_eq!(me.acquire_again(&holder).await, Acquired::Granted);
    // Whoever only looks needs no link.
    let _: String = rig.raw(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(rig.used(&set).await, 1);
}

#[tokio::test]
async fn a_subscription_comes_back() {
    let rig = Rig::redis().await;
    let mut me = rig.instance().await;
    rig.subscribe(&mut me).await;
    me.forget_what_was_heard();
    assert_eq!(rig.raw::<u32>(&["CLIENT", "KILL", "TYPE", "pubsub"]).await, 1);
    me.hears(Event::Unsubscribed).await;
    me.hears(Event::Subscribed).await;
}

#[tokio::test]
async fn a_grant_that_may_not_be_published_is_undone() {
    let (rig, set) = (Rig::redis().await, Arc::new(set(1)));
    let (me, mut other) = (rig.instance().await, rig.instance().await);
    rig.subscribe(&mut other).await;
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    other.acquire(&waiter).await;
    let _: String = rig.raw(&["ACL", "SETUSER", "default", "resetchannels"]).await;
    assert_eq!(me.release(&holder).await, (Released::Released, vec![]));
    assert_eq!((rig.used(&set).await, rig.waiting(&set).await), (0, 1));
    assert_eq!(other.beat(&[&set]).await.granted, [waiter.id]);
    assert_eq!((rig.used(&set).await, rig.waiting(&set).await), (1, 0));
}

#[tokio::test]
async fn a_link_that_is_dropped_takes_its_connection_along() {
    let server = Server::start().await;
    let (store, mut raw) = (server.store(), server.connect().await);
    let mut clients = async || {
        let command = ["CLIENT", "LIST"];
        let list: String = {
            let mut cmd = deadpool_redis::redis::cmd(command[0]);
            cmd.arg(command[1]).query_async(&mut raw).await.unwrap()
        };
        list.lines().count()
    };
    for _ in 0..5 {
        let link = store.open().await.unwrap();
        assert_eq!(clients().await, 2);
        drop(link);
        pause(20).await;
        assert_eq!(clients().await, 1);
    }
}

#[tokio::test]
async fn errors_tell_neither_url_nor_password() {
    let server = Server::start().await;
    let port = server.port;
    drop(server);
    for url in [
        format!("redis://user:hunter2@127.0.0.1:{port}"),
        "redis://user:hunter2@nowhere.invalid".to_owned(),
        "http://user:hunter2@127.0.0.1".to_owned(),
        "redis://user:hunter2@127.0.0.1:port".to_owned(),
    ] {
        let at = RedisAt { url: Secret(url.clone()), sentinels: None };
        let text = match RedisStore::new(&at, &settings(&url), false) {
            Ok(store) => store.open().await.unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(!text.contains("hunter2") && !text.contains("user"), "{url}: {text}");
    }
}

#[tokio::test]
async fn a_silent_server_times_out() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let at = RedisAt { url: Secret(url.clone()), sentinels: None };
    let store = RedisStore::new(&at, &settings(&url), false).unwrap();
    assert!(matches!(store.open().await, Err(StoreError::Timeout)));
}

#[tokio::test]
async fn what_is_noted_of_a_set_goes_a_day_after_its_keys() {
    let rig = Rig::redis().await;
    let me = rig.instance().await;
    let fleet = format!("{}tidegate:fleet", super::server::PREFIX);
    let (seconds, _): (i64, i64) = rig.raw(&["TIME"]).await;
    for (set, hours) in [("old", 25), ("new", 23)] {
        let live = ((seconds - hours * 3_600) * 1_000).to_string();
        let _: u32 = rig.raw(&["HSET", &fleet, &format!("live:{set}"), &live]).await;
    }
    pause(10).await;
    let beat = Call { heartbeat: Some(Heartbeat::default()), ..Call::default() };
    while rig.raw::<bool>(&["HEXISTS", &fleet, "live:old"]).await {
        me.call(&beat).await.unwrap();
    }
    assert!(rig.raw::<bool>(&["HEXISTS", &fleet, "live:new"]).await);
}
