//! A store of either kind, and instances that use it.

use std::sync::Mutex;

use deadpool_redis::redis::{self, aio::MultiplexedConnection};

use super::{
    server::{Cluster, PREFIX, Server, store_at},
    *,
};
use crate::{ledger::testing::Part, store::keys::Keys};

pub(super) const FOR_EVER: i64 = 1 << 40;

/// A store under test.
pub(super) struct Rig {
    store: Arc<dyn SlotStore>,
    /// What is behind it, for what is done behind its back.
    back: Back,
    prefix: String,
}

enum Back {
    Memory(MemoryStore),
    Redis { _server: Option<Server>, raw: MultiplexedConnection },
}

impl Rig {
    pub(super) async fn memory() -> Self {
        let store = MemoryStore::new();
        let prefix = String::new();
        Self { store: Arc::new(store.clone()), back: Back::Memory(store), prefix }
    }

    pub(super) async fn redis() -> Self {
        let server = Server::start().await;
        let raw = server.connect().await;
        let (store, prefix) = (server.store(), PREFIX.to_owned());
        Self { store, back: Back::Redis { _server: Some(server), raw }, prefix }
    }

    /// A Redis in which the store may do what the documentation's user may, and nothing else.
    pub(super) async fn redis_as_user() -> Self {
        let server = Server::start().await;
        let mut raw = server.connect().await;
        acl_as_documented().exec_async(&mut raw).await.unwrap();
        let url = format!("redis://tidegate:secret@127.0.0.1:{}", server.port);
        let back = Back::Redis { _server: Some(server), raw };
        Self { store: store_at(&url, ""), back, prefix: String::new() }
    }

    /// A part of a Cluster, under a prefix of its own. The store is told of the first node, whoever has the keys.
    pub(super) async fn in_cluster(cluster: &Cluster, prefix: &str) -> Self {
        let raw = cluster.owner(prefix).await;
        let store = store_at(&cluster.nodes[0].url(), prefix);
        Self { store, back: Back::Redis { _server: None, raw }, prefix: prefix.to_owned() }
    }

    /// An instance that is present, and doesn't say that it listens.
    pub(super) async fn instance(&self) -> Instance {
        let mut id = [0; 16];
        fastrand::fill(&mut id);
        let caller =
            Caller { instance: Uuid::from_bytes(id), epoch: 1, gap: FOR_EVER, presence: FOR_EVER };
        let heard = Arc::default();
        let link = self.store.open().await.unwrap();
        let instance = Instance { caller, link, subscribed: false, heard };
        instance.beat(&[]).await;
        instance
    }

    /// Has an instance listen, and waits until it does.
    pub(super) async fn subscribe(&self, instance: &mut Instance) {
        let heard = Arc::clone(&instance.heard);
        let push = move |event| heard.lock().unwrap().push(event);
        self.store.subscribe(instance.caller.instance, Arc::new(push));
        instance.hears(Event::Subscribed).await;
        instance.subscribed = true;
        instance.beat(&[]).await;
    }

    pub(super) async fn used(&self, set: &SetSpec) -> u32 {
        self.store.status(set).await.unwrap().used
    }

    pub(super) async fn holders(&self, set: &SetSpec) -> Vec<Holder> {
        self.store.holders(set).await.unwrap()
    }

    /// Evicts as an operator of this instance does.
    pub(super) async fn evict(
        &self,
        from: &Instance,
        set: &SetSpec,
        id: Uuid,
        force: bool,
    ) -> Evicted {
        let Caller { instance, presence, .. } = from.caller;
        let evict = Evict { id, instance, presence, force };
        self.store.evict(set, &evict).await.unwrap()
    }

    pub(super) async fn waiting(&self, set: &SetSpec) -> u32 {
        self.store.status(set).await.unwrap().waiting.iter().map(|class| class.0).sum()
    }

    /// Runs a command beside the store.
    ///
    /// # Panics
    /// On the store in memory.
    pub(super) async fn raw<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let Back::Redis { raw, .. } = &self.back else {
            panic!("there is no Redis");
        };
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| _ = command.arg(*word));
        command.query_async(&mut raw.clone()).await.unwrap()
    }

    pub(super) fn key_of_slots(&self, set: &SetSpec) -> String {
        let mut keys = Vec::new();
        Keys::new(&self.prefix).of_set(set, |key| keys.push(key.to_owned()));
        keys.swap_remove(0)
    }

    pub(super) async fn lose(&self, set: &SetSpec, part: Part) {
        if let Back::Memory(store) = &self.back {
            return store.ledger().lose(&set.key, part);
        }
        let keys = Keys::new(&self.prefix);
        let mut of_set = Vec::new();
        keys.of_set(set, |key| of_set.push(key.to_owned()));
        let key = match part {
            Part::Fleet => &keys.fleet,
            Part::Instances => &keys.instances,
            Part::Slots => &of_set[0],
            Part::Meta => &of_set[1],
            Part::Info => &of_set[2],
            Part::Wait(class) => of_set.iter().find(|key| key.ends_with(class)).unwrap(),
        };
        assert_eq!(self.raw::<u32>(&["DEL", key]).await, 1, "there was no {part:?}");
    }

    /// An instance seems to have been silent, or gone, for so much longer.
    pub(super) async fn heard_earlier(&self, instance: &Instance, by: i64) {
        let id = instance.caller.instance;
        if let Back::Memory(store) = &self.back {
            return store.ledger().heard_earlier(id, by);
        }
        let (key, id) = (Keys::new(&self.prefix).instances, id.to_string());
        let at: i64 = self.raw(&["ZSCORE", &key, &id]).await;
        let by = (-by * at.signum()).to_string();
        let _: f64 = self.raw(&["ZINCRBY", &key, &by, &id]).await;
    }

    /// Whether anything is known of an instance.
    pub(super) async fn knows(&self, instance: &Instance) -> bool {
        let id = instance.caller.instance.to_string();
        if let Back::Memory(store) = &self.back {
            let dump = store.ledger().dump(&[]);
            return dump
                .values()
                .flat_map(|fields| fields.keys())
                .any(|field| field.ends_with(&id));
        }
        let keys = Keys::new(&self.prefix);
        let fields: Vec<String> = self.raw(&["HKEYS", &keys.fleet]).await;
        let listed: Vec<String> = self.raw(&["ZRANGE", &keys.instances, "0", "-1"]).await;
        fields.iter().chain(&listed).any(|field| field.ends_with(&id))
    }

    /// A program that isn't Tidegate takes a slot.
    pub(super) async fn plain_add(&self, set: &SetSpec, id: Uuid) {
        if let Back::Memory(store) = &self.back {
            let now = store.now();
            return store.ledger().plain_add(&set.key, id, now);
        }
        let (key, id) = (self.key_of_slots(set), id.to_string());
        let (seconds, micros): (i64, i64) = self.raw(&["TIME"]).await;
        let now = seconds * 1_000 + micros / 1_000;
        let _: u32 = self.raw(&["ZADD", &key, &now.to_string(), &id]).await;
        let _: u32 = self.raw(&["EXPIRE", &key, "1"]).await;
    }

    pub(super) async fn plain_remove(&self, set: &SetSpec, id: Uuid) {
        if let Back::Memory(store) = &self.back {
            return store.ledger().plain_remove(&set.key, id);
        }
        let _: u32 = self.raw(&["ZREM", &self.key_of_slots(set), &id.to_string()]).await;
    }
}

/// The line with which the documentation lets a user in, with a password.
pub(super) fn acl_as_documented() -> redis::Cmd {
    let page = include_str!("../../../docs/redis.md");
    let lines = page.lines().skip_while(|line| !line.starts_with("ACL SETUSER tidegate"));
    let line: String = lines.take_while(|line| !line.starts_with("```")).collect();
    let mut words = line.split([' ', '\\']).filter(|word| !word.is_empty());
    let mut command = redis::cmd(words.next().expect("the documentation has that line"));
    words.for_each(|word| _ = command.arg(word));
    command
}

/// An instance that uses the store.
pub(super) struct Instance {
    pub(super) caller: Caller,
    pub(super) link: Arc<dyn Link>,
    pub(super) subscribed: bool,
    heard: Arc<Mutex<Vec<Event>>>,
}

impl Instance {
    /// Goes on over a new link.
    pub(super) async fn reconnect(&mut self, rig: &Rig) {
        self.link = rig.store.open().await.unwrap();
        self.caller.epoch += 1;
    }

    pub(super) async fn call(&self, call: &Call) -> Result<Reply, StoreError> {
        self.link.call(&self.caller, call).await
    }

    /// Acquires as a new request that may wait.
    pub(super) async fn acquire(&self, ask: &Ask) -> Acquired {
        self.acquire_as(&Acquire { ask: ask.clone(), waited: 0, may_wait: true, again: false })
            .await
    }

    /// Acquires as a request whose first answer may have been lost.
    pub(super) async fn acquire_again(&self, ask: &Ask) -> Acquired {
        self.acquire_as(&Acquire { ask: ask.clone(), waited: 0, may_wait: true, again: true }).await
    }

    /// Acquires as a request that may not wait.
    pub(super) async fn try_acquire(&self, ask: &Ask) -> Acquired {
        self.acquire_as(&Acquire { ask: ask.clone(), waited: 0, may_wait: false, again: false })
            .await
    }

    pub(super) async fn acquire_as(&self, acquire: &Acquire) -> Acquired {
        let call = Call { acquires: vec![acquire.clone()], ..Call::default() };
        self.call(&call).await.unwrap().acquires.unwrap().outcomes[0]
    }

    /// Releases; the outcome, and which of this instance's waiters are granted.
    pub(super) async fn release(&self, ask: &Ask) -> (Released, Vec<Uuid>) {
        let release = Release { ask: ask.clone(), queued: true, refund: false };
        let call = Call { releases: vec![release], ..Call::default() };
        let reply = self.call(&call).await.unwrap().releases.unwrap();
        (reply.outcomes[0], reply.granted)
    }

    pub(super) async fn beat(&self, sets: &[&Arc<SetSpec>]) -> BeatReply {
        let beats = sets.iter().map(|&set| Beat {
            set: Arc::clone(set),
            renew: Vec::new(),
            known: None,
            order: None,
        });
        self.heartbeat(beats.collect(), false).await
    }

    pub(super) async fn leave(&self, sets: &[&Arc<SetSpec>]) -> BeatReply {
        let beats = sets.iter().map(|&set| Beat {
            set: Arc::clone(set),
            renew: Vec::new(),
            known: None,
            order: None,
        });
        self.heartbeat(beats.collect(), true).await
    }

    /// Renews one holder of one slot.
    pub(super) async fn renew(&self, ask: &Ask, lapsed: bool) -> BeatReply {
        let set = Arc::clone(&ask.wants[0].set);
        let renew = vec![Renew { ask: ask.clone(), weight: ask.wants[0].weight, lapsed }];
        self.heartbeat(vec![Beat { set, renew, known: None, order: None }], false).await
    }

    async fn heartbeat(&self, beats: Vec<Beat>, leaving: bool) -> BeatReply {
        let heartbeat = Heartbeat { subscribed: self.subscribed, leaving, within: FOR_EVER, beats };
        let call = Call { heartbeat: Some(heartbeat), ..Call::default() };
        self.call(&call).await.unwrap().heartbeat.unwrap()
    }

    /// Waits until this is pushed.
    pub(super) async fn hears(&self, event: Event) {
        for _ in 0..500 {
            if self.heard.lock().unwrap().contains(&event) {
                return;
            }
            pause(10).await;
        }
        panic!("{event:?} was never pushed");
    }

    pub(super) fn times_heard(&self, event: Event) -> usize {
        self.heard.lock().unwrap().iter().filter(|heard| **heard == event).count()
    }

    pub(super) fn forget_what_was_heard(&self) {
        self.heard.lock().unwrap().clear();
    }
}

/// A semaphore in which nothing ends by itself.
pub(super) fn set(slots: u32) -> SetSpec {
    SetSpec {
        key: "set".into(),
        slots,
        lease: 60_000,
        grant_ttl: 20_000,
        recovery: 0,
        queue: 10,
        ageing: FOR_EVER,
        keyed: false,
        shadow: false,
        fenced: false,
        warm: false,
        classes: classes(),
        limit: 0,
    }
}

/// Asks for one slot, as an ordinary request.
pub(super) fn ask(set: &Arc<SetSpec>) -> Ask {
    ask_as(set, 1, 1)
}

pub(super) fn ask_as(set: &Arc<SetSpec>, class: usize, weight: u32) -> Ask {
    Ask {
        id: Uuid::now_v7(),
        wants: [Want { set: Arc::clone(set), weight }].into(),
        rates: Arc::from([]),
        class,
        route: "example.com/v1/".into(),
    }
}
