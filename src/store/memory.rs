//! The store inside this process: the ledger behind a lock. It is fair, prioritised and complete, for one process.
//!
//! Like Redis it starts without memory, so the first operation starts a recovery; a caller for whom that is pointless
//! says so in its [`SetSpec`] (`recovery: 0`). Its clock starts at the time of day, so that fences rise over restarts too,
//! and never jumps.

use std::{
    collections::HashMap,
    fmt, slice,
    sync::{Arc, Mutex, MutexGuard},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;
use uuid::Uuid;

use super::{
    Acquire, AcquireReply, BoxFuture, Call, Caller, Event, Evict, Evicted, Holder, Link,
    LocalStore, Notice, Push, Release, ReleaseReply, Reply, SetSpec, SetStatus, SlotStore, Stale,
    StoreError,
};
use crate::ledger::Ledger;

/// The ledger behind a lock. Clones are handles to the same store.
#[derive(Clone)]
pub struct MemoryStore(Arc<Shared>);

struct Shared {
    born: Instant,
    /// The time of day then, ms.
    born_at: i64,
    /// A std lock, since it is held for microseconds and never across an await.
    ledger: Mutex<Ledger>,
    /// Beside the ledger's lock, so that a push may call the store again.
    pushes: Mutex<HashMap<Uuid, Push>>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        let today = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(Shared {
            born: Instant::now(),
            born_at: today.as_millis() as i64,
            ledger: Mutex::default(),
            pushes: Mutex::default(),
        }))
    }

    /// Milliseconds, above 0, which would mean "never" to the ledger.
    pub(super) fn now(&self) -> i64 {
        self.0.born_at + self.0.born.elapsed().as_millis() as i64 + 1
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.ledger.lock().expect("the ledger never panics")
    }

    /// Applies an operation, and tells others of what it did for them.
    fn locked<T>(&self, operation: impl FnOnce(&mut Ledger, i64) -> T) -> T {
        let mut ledger = self.ledger();
        // Read under the lock, so that the ledger's time never goes back.
        let now = self.now();
        let reply = operation(&mut ledger, now);
        let pushes = std::mem::take(&mut ledger.pushes);
        drop(ledger);
        self.deliver(pushes);
        reply
    }

    fn deliver(&self, pushes: Vec<(Uuid, Uuid, Notice)>) {
        for (instance, id, notice) in pushes {
            let handlers = self.0.pushes.lock().expect("nothing panics under this lock");
            let push = handlers.get(&instance).cloned();
            drop(handlers);
            if let Some(push) = push {
                push(match notice {
                    Notice::Granted => Event::Granted(id),
                    Notice::Displaced => Event::Displaced(id),
                    Notice::Wanted => Event::Wanted,
                    Notice::Evicted => Event::Evicted(id),
                });
            }
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryStore")
    }
}

impl LocalStore for MemoryStore {
    fn apply(&self, caller: &Caller, call: &Call) -> Result<Reply, StoreError> {
        let reply = self.locked(|ledger, now| apply(ledger, now, caller, call));
        reply.map_err(|Stale| StoreError::Stale)
    }

    fn acquire(&self, caller: &Caller, acquire: &Acquire) -> Result<AcquireReply, Stale> {
        self.locked(|ledger, now| ledger.acquire(now, caller, "", slice::from_ref(acquire)))
    }

    fn release(&self, caller: &Caller, release: &Release) -> Result<ReleaseReply, Stale> {
        self.locked(|ledger, now| ledger.release(now, caller, "", slice::from_ref(release)))
    }
}

fn apply(ledger: &mut Ledger, now: i64, caller: &Caller, call: &Call) -> Result<Reply, Stale> {
    let mut reply = Reply::default();
    if !call.releases.is_empty() {
        reply.releases = Some(ledger.release(now, caller, "", &call.releases)?);
    }
    if let Some(heartbeat) = &call.heartbeat {
        reply.heartbeat = Some(ledger.heartbeat(now, caller, "", heartbeat)?);
    }
    if !call.acquires.is_empty() {
        reply.acquires = Some(ledger.acquire(now, caller, "", &call.acquires)?);
    }
    Ok(reply)
}

impl Link for MemoryStore {
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let reply = self.apply(caller, call);
        Box::pin(std::future::ready(reply))
    }
}

impl SlotStore for MemoryStore {
    fn local(&self) -> Option<&dyn LocalStore> {
        Some(self)
    }

    fn open(&self) -> BoxFuture<'_, Result<Arc<dyn Link>, StoreError>> {
        let link: Arc<dyn Link> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(link)))
    }

    fn subscribe(&self, instance: Uuid, push: Push) {
        let handlers = || self.0.pushes.lock().expect("nothing panics under this lock");
        handlers().insert(instance, Arc::clone(&push));
        self.ledger().listeners.insert(instance);
        push(Event::Subscribed);
    }

    fn status<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<SetStatus, StoreError>> {
        let ledger = self.ledger();
        let status = ledger.status(self.now(), spec);
        drop(ledger);
        Box::pin(std::future::ready(Ok(status)))
    }

    fn holders<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<Vec<Holder>, StoreError>> {
        let ledger = self.ledger();
        let holders = ledger.holders(self.now(), spec);
        drop(ledger);
        Box::pin(std::future::ready(Ok(holders)))
    }

    fn evict<'a>(
        &'a self,
        spec: &'a SetSpec,
        evict: &'a Evict,
    ) -> BoxFuture<'a, Result<Evicted, StoreError>> {
        let evicted = self.locked(|ledger, now| ledger.evict(now, spec, evict));
        Box::pin(std::future::ready(Ok(evicted)))
    }
}
