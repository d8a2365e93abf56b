//! Random operations on the scripts and on the ledger, side by side: the same replies, the same contents, the same
//! pushes. The ledger is given the time that each script's reply tells.
//!
//! `TIDEGATE_DIFF_OPS` says how many operations, `TIDEGATE_DIFF_SEED` which ones (though not when: time is real).

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

use deadpool_redis::redis::{self, Pipeline, aio::MultiplexedConnection};
use fastrand::Rng;

use super::{
    server::{PREFIX, Server},
    *,
};
use crate::{
    ledger::{
        Ledger,
        testing::{Dump, Part},
    },
    store::keys::Keys,
};

mod words;

use words::*;

const INSTANCES: usize = 3;
/// The last instance may say that it is subscribed, but it never is.
const LISTENERS: usize = 2;
/// The last one is plain: weight 1, classes that all may have everything, nothing beside it, as the scripts' short ways
/// want it.
const SETS: usize = 4;
const PLAIN: usize = 3;
/// Old asks that an instance still repeats, renews and releases.
const REMEMBERED: usize = 14;

#[tokio::test]
async fn scripts_and_ledger_agree_on_random_operations() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let operations = number("TIDEGATE_DIFF_OPS").unwrap_or(10_000);
    let seed = number("TIDEGATE_DIFF_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("TIDEGATE_DIFF_SEED={seed} TIDEGATE_DIFF_OPS={operations}");
    let mut pair = Pair::start(seed).await;
    for _ in 0..operations {
        pair.step().await;
    }
    pair.compare_pushes().await;
    println!("{:?}", pair.seen);
    for what in [
        "Granted",
        "Waiting",
        "Full",
        "Recovering",
        "TooHeavy",
        "Released",
        "Dequeued",
        "Unknown",
        "Kept",
        "Readded",
        "Stale",
        "one turn",
        "wanted",
        "pushed",
        "granted",
        "pending",
        "Shadowed",
        "RateLimited",
        "displaced",
        "forgotten",
    ] {
        assert!(operations < 5_000 || pair.seen.contains_key(what), "never seen: {what}");
    }
}

/// What an instance has asked for.
#[derive(Clone, Debug)]
struct Asked {
    id: Uuid,
    class: usize,
    wants: Vec<(usize, u32)>,
    rates: Vec<usize>,
}

struct Instance {
    id: Uuid,
    epoch: u64,
    asked: VecDeque<Asked>,
    /// Per set, what its configuration says: slots and lease.
    claims: Vec<(u32, i64)>,
    /// Silent for so many steps.
    silent: u32,
}

struct Pair {
    rng: Rng,
    ledger: Ledger,
    run: String,
    _server: Server,
    store: Arc<RedisStore>,
    link: Arc<dyn Link>,
    raw: MultiplexedConnection,
    keys: Keys,
    /// Per instance, and behind them all there are.
    classes: Vec<Arc<[ClassSpec]>>,
    instances: Vec<Instance>,
    plain: Vec<(usize, Uuid)>,
    /// Whether the second set is in shadow mode.
    shadow: bool,
    heard: Heard,
    pushed: Vec<(Uuid, Uuid, Notice)>,
    /// The latest operations, to be read when the two differ.
    log: VecDeque<String>,
    seen: BTreeMap<&'static str, u32>,
}

impl Pair {
    async fn start(seed: u64) -> Self {
        let server = Server::start().await;
        let mut raw = server.connect().await;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut raw).await.unwrap();
        let run = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap().to_owned();
        let store = server.store();
        let mut rng = Rng::with_seed(seed);
        let ids: Vec<Uuid> = (0..INSTANCES).map(|_| Uuid::from_u128(rng.u128(..))).collect();
        let heard: Heard = Arc::default();
        let mut ledger = Ledger::default();
        for &id in &ids[..LISTENERS] {
            ledger.listeners.insert(id);
            listen(&store, id, &heard).await;
        }
        let instance = |&id| Instance {
            id,
            epoch: 1,
            asked: VecDeque::new(),
            claims: (0..SETS).map(base).collect(),
            silent: 0,
        };
        Self {
            instances: ids.iter().map(instance).collect(),
            rng,
            ledger,
            run,
            link: store.open().await.unwrap(),
            store,
            _server: server,
            raw,
            keys: Keys::new(PREFIX),
            classes: vec![some_classes(0), some_classes(0), some_classes(1), some_classes(2)],
            plain: Vec::new(),
            shadow: false,
            heard,
            pushed: Vec::new(),
            log: VecDeque::new(),
            seen: BTreeMap::new(),
        }
    }

    async fn step(&mut self) {
        match self.rng.u32(..1_000) {
            0..4 => {
                let ms = self.rng.u64(20..200);
                self.note(format!("pause {ms} ms"));
                pause(ms).await;
            }
            4..8 => self.lose().await,
            8..20 => self.plain_client().await,
            20..24 => {
                let index = self.rng.usize(..INSTANCES);
                self.instances[index].silent = self.rng.u32(50..400);
            }
            24..28 => self.change_a_claim(),
            45 => self.shadow = !self.shadow,
            28..29 => self.turn_back_the_clock().await,
            29..35 => self.age_an_instance().await,
            35..45 => self.look().await,
            _ => self.operate().await,
        }
        // Most of the test's time goes into this, and what differs stays different.
        if self.rng.u32(..3) == 0 {
            self.compare().await;
        }
    }

    fn note(&mut self, text: String) {
        if self.log.len() == 60 {
            self.log.pop_front();
        }
        self.log.push_back(text);
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    // === operations ===

    async fn operate(&mut self) {
        let mut who = self.rng.usize(..INSTANCES);
        if self.instances[who].silent > 0 {
            self.instances[who].silent -= 1;
            who = (who + 1) % INSTANCES;
        }
        let mut call = Call::default();
        let kind = self.rng.u32(..100);
        if (0..40).contains(&kind) || kind > 92 {
            for _ in 0..self.rng.usize(1..4) {
                call.releases.extend(self.some_release(who));
            }
        }
        if (40..60).contains(&kind) || kind > 97 {
            call.heartbeat = Some(self.some_heartbeat(who));
        }
        if kind >= 60 {
            for _ in 0..self.rng.usize(1..4) {
                call.acquires.push(self.some_acquire(who));
            }
        }
        // Requests with rates go by a script of their own, which has a time of its own.
        if let Some(first) = call.acquires.first() {
            let rated = first.ask.rates.is_empty();
            call.acquires.retain(|acquire| acquire.ask.rates.is_empty() == rated);
        }
        if call.is_empty() {
            return;
        }
        let instance = &mut self.instances[who];
        if self.rng.u32(..200) == 0 {
            instance.epoch += 1;
        }
        let stale = instance.epoch > 1 && self.rng.u32(..50) == 0;
        let caller = Caller {
            instance: instance.id,
            epoch: instance.epoch - u64::from(stale),
            gap: 90,
            presence: 120,
        };
        let reply = self.link.call(&caller, &call).await;
        self.note(format!("{who} {caller:?}\n    {}\n    = {reply:?}", brief(&call)));
        self.repeat_on_ledger(&caller, &call, reply);
        let pushed = std::mem::take(&mut self.ledger.pushes);
        if !pushed.is_empty() {
            self.count("pushed");
        }
        if pushed.iter().any(|push| push.2 == Notice::Wanted) {
            self.count("wanted");
        }
        self.pushed.extend(pushed);
    }

    fn repeat_on_ledger(&mut self, caller: &Caller, call: &Call, reply: Result<Reply, StoreError>) {
        let reply = match reply {
            Ok(reply) => reply,
            Err(StoreError::Stale) => {
                // A stale caller learns no time, and the ledger needs none to say so.
                self.count("Stale");
                let stale = self.ledger.release(0, caller, &self.run, &[]);
                assert_eq!(stale, Err(Stale), "{}", self.story());
                return;
            }
            Err(error) => panic!("{error}\n{}", self.story()),
        };
        let is_one_turn = call.is_one_turn();
        if let Some(theirs) = &reply.releases {
            let now = theirs.stamp.now;
            if is_one_turn && let Some(acquires) = &reply.acquires {
                let (releases, run) = (&call.releases, &self.run);
                let ours = self.ledger.turn(now, caller, run, releases, &call.acquires);
                self.same(ours, &(theirs.clone(), acquires.clone()));
                self.count("one turn");
            } else {
                let ours = self.ledger.release(now, caller, &self.run, &call.releases);
                self.same(ours, theirs);
            }
            theirs.outcomes.iter().for_each(|outcome| self.count(released(*outcome)));
            self.count_granted(&theirs.granted);
        }
        if let (Some(theirs), Some(heartbeat)) = (reply.heartbeat, &call.heartbeat) {
            let now = theirs.stamp.now;
            let listed = |ledger: &Ledger| ledger.dump(&[])["instances"].len();
            let before = listed(&self.ledger);
            let ours = self.ledger.heartbeat(now, caller, &self.run, heartbeat);
            if listed(&self.ledger) < before {
                self.count("forgotten");
            }
            self.same(ours, &theirs);
            for renewed in &theirs.renewed {
                self.count(if *renewed == Renewed::Kept { "Kept" } else { "Readded" });
            }
            if !theirs.pending.is_empty() {
                self.count("pending");
            }
            self.count_granted(&theirs.granted);
        }
        if let Some(theirs) = reply.acquires {
            let now = theirs.stamp.now;
            if !is_one_turn {
                let ours = self.ledger.acquire(now, caller, &self.run, &call.acquires);
                self.same(ours, &theirs);
            }
            theirs.outcomes.iter().for_each(|outcome| self.count(acquired(*outcome)));
            self.count_granted(&theirs.granted);
            if !theirs.displaced.is_empty() {
                self.count("displaced");
            }
        }
    }

    fn same<T: PartialEq + fmt::Debug>(&self, ours: Result<T, Stale>, theirs: &T) {
        let ours = ours.unwrap_or_else(|_| panic!("stale to the ledger alone\n{}", self.story()));
        if ours != *theirs {
            panic!("ledger {ours:?}\nscript {theirs:?}\n{}", self.story());
        }
    }

    fn count_granted(&mut self, granted: &[Uuid]) {
        if !granted.is_empty() {
            self.count("granted");
        }
    }

    fn story(&self) -> String {
        Vec::from_iter(self.log.iter().cloned()).join("\n")
    }

    // === what to operate with ===

    fn spec(&self, who: usize, set: usize) -> Arc<SetSpec> {
        let (slots, lease) = self.instances[who].claims[set];
        Arc::new(SetSpec {
            key: format!("set{set}").into(),
            slots,
            lease,
            grant_ttl: [60, 100, 40, 80][set],
            recovery: [40, 60, 0, 50][set],
            queue: [8, 4, 3, 6][set],
            ageing: [30, 50, 20, 30][set],
            keyed: false,
            shadow: set == 1 && self.shadow,
            fenced: set == 2,
            warm: set == 1,
            classes: if set == PLAIN { equals() } else { Arc::clone(&self.classes[who]) },
            limit: set,
        })
    }

    fn ask(&self, who: usize, asked: &Asked) -> Ask {
        let want = |&(set, weight)| Want { set: self.spec(who, set), weight };
        Ask {
            id: asked.id,
            wants: asked.wants.iter().map(want).collect(),
            rates: asked.rates.iter().map(|&rate| rate_spec(rate)).collect(),
            class: asked.class,
            route: "a route".into(),
        }
    }

    fn an_old_one(&mut self, who: usize) -> Option<Asked> {
        let asked = &self.instances[who].asked;
        (!asked.is_empty()).then(|| asked[self.rng.usize(..asked.len())].clone())
    }

    fn some_acquire(&mut self, who: usize) -> Acquire {
        let again = self.rng.u32(..4) == 0;
        let old = if again { self.an_old_one(who) } else { None };
        let asked = old.clone().unwrap_or_else(|| self.a_new_one(who));
        Acquire {
            ask: self.ask(who, &asked),
            waited: if self.rng.bool() { 0 } else { self.rng.i64(0..80) },
            may_wait: self.rng.u32(..6) > 0,
            again: old.is_some() || self.rng.u32(..20) == 0,
        }
    }

    fn a_new_one(&mut self, who: usize) -> Asked {
        let first = self.rng.usize(..SETS);
        if first == PLAIN {
            let id = Uuid::from_u128(self.rng.u128(..));
            let class = if self.rng.u32(..12) == 0 { self.rng.usize(..3) } else { 1 };
            let asked = Asked { id, class, wants: vec![(PLAIN, 1)], rates: Vec::new() };
            return self.remember(who, asked);
        }
        let mut wants =
            vec![(first, self.rng.u32(1..4).min(self.rng.u32(1..4)).min(self.rng.u32(1..4)))];
        if self.rng.u32(..3) == 0 {
            wants.push(((first + 1 + self.rng.usize(..PLAIN - 1)) % PLAIN, self.rng.u32(1..3)));
        }
        let asked = Asked {
            id: Uuid::from_u128(self.rng.u128(..)),
            class: self.rng.usize(..3),
            wants,
            rates: self.some_rates(),
        };
        self.remember(who, asked)
    }

    fn remember(&mut self, who: usize, asked: Asked) -> Asked {
        let known = &mut self.instances[who].asked;
        known.push_back(asked.clone());
        if known.len() > REMEMBERED {
            known.pop_front();
        }
        asked
    }

    fn some_rates(&mut self) -> Vec<usize> {
        match self.rng.u32(..8) {
            0 => vec![0],
            1 => vec![1],
            2 => vec![2, 0],
            _ => Vec::new(),
        }
    }

    fn some_release(&mut self, who: usize) -> Option<Release> {
        // Mostly one that holds a slot, or slots would come back too seldom for anyone to be granted.
        let holds = |asked: &&Asked| {
            asked.wants.iter().any(|want| self.ledger.holds(&format!("set{}", want.0), asked.id))
        };
        let holder = self.instances[who].asked.iter().find(holds).cloned();
        let holder = holder.filter(|_| self.rng.u32(..3) > 0);
        let asked = holder.or_else(|| self.an_old_one(who))?;
        if self.rng.u32(..3) > 0 {
            self.instances[who].asked.retain(|known| known.id != asked.id);
        }
        Some(Release {
            ask: self.ask(who, &asked),
            queued: self.rng.u32(..4) > 0,
            refund: self.rng.u32(..4) == 0,
        })
    }

    fn some_heartbeat(&mut self, who: usize) -> Heartbeat {
        let mut beats = Vec::new();
        for set in 0..SETS {
            if self.rng.u32(..5) == 0 {
                continue;
            }
            let mut renew: Vec<Renew> = Vec::new();
            for _ in 0..self.rng.usize(..4) {
                let Some(asked) = self.an_old_one(who) else { continue };
                let Some(&(_, weight)) = asked.wants.iter().find(|want| want.0 == set) else {
                    continue;
                };
                // Mostly those that really hold a slot, as an instance would.
                let holds = self.ledger.holds(&format!("set{set}"), asked.id);
                if holds || self.rng.u32(..8) == 0 {
                    let lapsed = self.rng.u32(..3) > 0;
                    renew.push(Renew { ask: self.ask(who, &asked), weight, lapsed });
                }
            }
            let known = (self.rng.u32(..20) == 0).then(|| Override {
                version: self.rng.u64(1..9),
                slots: Some(self.rng.u32(1..8)),
                claims: vec![2, 4, 6],
            });
            let order = match self.rng.u32(..60) {
                0 => Some(Some(self.rng.u32(0..8))),
                1 => Some(None),
                _ => None,
            };
            beats.push(Beat { set: self.spec(who, set), renew, known, order });
        }
        self.rng.shuffle(&mut beats);
        Heartbeat {
            subscribed: self.rng.u32(..4) > 0,
            leaving: self.rng.u32(..60) == 0,
            within: if self.rng.bool() { self.rng.i64(..100) } else { self.rng.i64(..20_000) },
            beats,
        }
    }

    // === behind the operations' back ===

    fn change_a_claim(&mut self) {
        let (who, set) = (self.rng.usize(..INSTANCES), self.rng.usize(..SETS));
        let (slots, lease) = base(set);
        let slots = if self.rng.bool() { slots } else { self.rng.u32(0..slots + 3) };
        let lease = if self.rng.u32(..3) > 0 { lease } else { lease + 40 };
        self.note(format!("{who} claims {slots} {lease} of set{set}"));
        self.instances[who].claims[set] = (slots, lease);
    }

    async fn lose(&mut self) {
        let set = self.rng.usize(..SETS);
        let (part, key) = match self.rng.usize(..9) {
            0 => (Part::Fleet, self.keys.fleet.clone()),
            1 => (Part::Instances, self.keys.instances.clone()),
            n => {
                let part = [
                    Part::Slots,
                    Part::Meta,
                    Part::Info,
                    Part::Wait("high"),
                    Part::Wait("normal"),
                    Part::Wait("low"),
                    Part::Wait("odd"),
                ][n - 2];
                (part, self.keys_of(set)[n - 2].clone())
            }
        };
        // With meta goes what is noted of queues; who waits where not all know is found again by those alone who do.
        if part == Part::Meta && self.is_waited_for_where_not_all_know(set) {
            return;
        }
        self.note(format!("lose {part:?} of set{set}"));
        redis::cmd("DEL").arg(key).exec_async(&mut self.raw).await.unwrap();
        self.ledger.lose(&format!("set{set}"), part);
    }

    async fn plain_client(&mut self) {
        let remove = self.plain.len() > 3 || self.rng.bool();
        if remove && !self.plain.is_empty() {
            let (set, id) = self.plain.swap_remove(self.rng.usize(..self.plain.len()));
            let key = self.keys_of(set)[0].clone();
            let id_text = id.to_string();
            redis::cmd("ZREM").arg(key).arg(id_text).exec_async(&mut self.raw).await.unwrap();
            self.note(format!("plain {id} leaves set{set}"));
            self.ledger.plain_remove(&format!("set{set}"), id);
            return;
        }
        let set = self.rng.usize(..SETS);
        let id = Uuid::from_u128(self.rng.u128(..));
        // Some scores lie in the future, as after a clock that went back.
        let score = self.now().await + if self.rng.u32(..5) == 0 { 1_500 } else { 0 };
        let key = self.keys_of(set)[0].clone();
        let mut pipeline = Pipeline::new();
        pipeline.cmd("ZADD").arg(&key).arg(score).arg(id.to_string());
        pipeline.cmd("EXPIRE").arg(&key).arg(60);
        pipeline.exec_async(&mut self.raw).await.unwrap();
        self.note(format!("plain {id} joins set{set} at {score}"));
        self.plain.push((set, id));
        self.ledger.plain_add(&format!("set{set}"), id, score);
    }

    async fn turn_back_the_clock(&mut self) {
        self.note("the clock goes back".to_owned());
        let mut exists = redis::cmd("EXISTS");
        exists.arg(&self.keys.fleet);
        if exists.query_async::<bool>(&mut self.raw).await.unwrap() {
            let mut ahead = redis::cmd("HINCRBY");
            ahead.arg(&self.keys.fleet).arg("last").arg(5_000);
            ahead.exec_async(&mut self.raw).await.unwrap();
        }
        self.ledger.last_seen_later(5_000);
    }

    /// It seems to have been silent, or gone, for more than a day.
    async fn age_an_instance(&mut self) {
        let id = self.instances[self.rng.usize(..INSTANCES)].id;
        self.note(format!("{id} is heard of no more"));
        let score = redis::cmd("ZSCORE").arg(&self.keys.instances).arg(id.to_string()).to_owned();
        let at: Option<i64> = score.query_async(&mut self.raw).await.unwrap();
        let Some(at) = at else { return };
        let mut earlier = redis::cmd("ZINCRBY");
        earlier.arg(&self.keys.instances).arg(-at.signum() * 90_000_000).arg(id.to_string());
        earlier.exec_async(&mut self.raw).await.unwrap();
        self.ledger.heard_earlier(id, 90_000_000);
    }

    async fn now(&mut self) -> i64 {
        let time = redis::cmd("TIME").query_async(&mut self.raw).await;
        let (seconds, micros): (i64, i64) = time.unwrap();
        seconds * 1_000 + micros / 1_000
    }

    // === comparisons ===

    async fn look(&mut self) {
        let set = self.rng.usize(..SETS);
        let spec = self.spec(0, set);
        let before = self.now().await;
        let theirs = self.store.status(&spec).await.unwrap();
        let after = self.now().await;
        let ours = (before..=after).map(|now| status_text(&self.ledger.status(now, &spec)));
        let ours: Vec<String> = ours.collect();
        let theirs = status_text(&theirs);
        assert!(ours.contains(&theirs), "{ours:?}\n{theirs}\n{}", self.story());
    }

    fn keys_of(&self, set: usize) -> Vec<String> {
        let mut keys = Vec::new();
        self.keys.of_set(&self.whole_spec(set), |key| keys.push(key.to_owned()));
        keys
    }

    /// With every class that anyone knows.
    fn whole_spec(&self, set: usize) -> SetSpec {
        SetSpec { classes: Arc::clone(&self.classes[INSTANCES]), ..(*self.spec(0, set)).clone() }
    }

    fn is_waited_for_where_not_all_know(&self, set: usize) -> bool {
        let dump = self.ledger.dump(&[&self.whole_spec(set)]);
        ["normal", "odd"].iter().any(|class| !dump[&format!("set{set} wait {class}")].is_empty())
    }

    async fn compare(&mut self) {
        let theirs = self.dump_redis().await;
        let specs: Vec<SetSpec> = (0..SETS).map(|set| self.whole_spec(set)).collect();
        let mut ours = self.ledger.dump(&Vec::from_iter(&specs));
        for fields in ours.values_mut() {
            fields.retain(significant);
        }
        if ours == theirs {
            return;
        }
        let mut differences = String::new();
        for (key, ours) in &ours {
            let theirs = &theirs[key];
            for field in ours.keys().chain(theirs.keys()) {
                let (our, their) = (ours.get(field), theirs.get(field));
                if our != their {
                    differences += &format!("{key} {field}: ledger {our:?} redis {their:?}\n");
                }
            }
        }
        panic!("{}\n{differences}", self.story());
    }

    async fn dump_redis(&mut self) -> Dump {
        let mut names = vec!["fleet".to_owned(), "instances".to_owned()];
        let mut pipeline = Pipeline::new();
        pipeline.cmd("HGETALL").arg(&self.keys.fleet);
        let sorted = |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("ZRANGE").arg(key).arg(0).arg(-1).arg("WITHSCORES");
        };
        sorted(&mut pipeline, &self.keys.instances);
        for set in 0..SETS {
            let keys = self.keys_of(set);
            let kinds =
                ["slots", "meta", "info", "wait high", "wait normal", "wait low", "wait odd"];
            for (key, kind) in keys.iter().zip(kinds) {
                names.push(format!("set{set} {kind}"));
                match kind {
                    "meta" | "info" => _ = pipeline.cmd("HGETALL").arg(key),
                    _ => sorted(&mut pipeline, key),
                }
            }
        }
        let contents: Vec<HashMap<String, String>> =
            pipeline.query_async(&mut self.raw).await.unwrap();
        let significant = |fields: HashMap<String, String>| {
            let mut fields = BTreeMap::from_iter(fields);
            fields.retain(significant);
            fields
        };
        names.into_iter().zip(contents.into_iter().map(significant)).collect()
    }

    async fn compare_pushes(&mut self) {
        let of = |all: &[(Uuid, Uuid, Notice)], who: &Instance| -> Vec<(Uuid, Notice)> {
            let mine = all.iter().filter(|push| push.0 == who.id);
            mine.map(|push| (push.1, push.2)).collect()
        };
        // They come by another connection, so they may still be on their way.
        for _ in 0..200 {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if heard.len() >= self.pushed.len() {
                break;
            }
            pause(10).await;
        }
        let heard = self.heard.lock().unwrap().clone();
        for who in &self.instances {
            assert_eq!(of(&heard, who), of(&self.pushed, who), "pushes to {}", who.id);
        }
    }
}
