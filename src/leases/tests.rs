//! The keeper on the embedded store: no sockets, so time may be paused.

use super::*;
use crate::store::{ClassSpec, MemoryStore, SetSpec, Want};

mod simulation;

fn spec(slots: u32, queue: u32) -> Arc<SetSpec> {
    Arc::new(SetSpec {
        key: Arc::from("llm"),
        slots,
        lease: i64::MAX / 8,
        grant_ttl: 3_000,
        recovery: 0,
        queue,
        ageing: 5_000,
        keyed: false,
        shadow: false,
        fenced: false,
        warm: false,
        classes: Arc::from([ClassSpec { name: Arc::from("normal"), share: 1.0, queue: u32::MAX }]),
        limit: 0,
    })
}

fn keeper(store: &MemoryStore, set: &Arc<SetSpec>) -> Leases {
    let forever = Duration::from_secs(1 << 31);
    let limit = LimitSettings {
        set: Arc::clone(set),
        renew: forever,
        queue_timeouts: vec![Duration::from_secs(10)],
        cut_after: None,
    };
    Leases::start(
        Arc::new(store.clone()),
        Settings {
            instance: Uuid::now_v7(),
            limits: vec![limit],
            heartbeat: Duration::from_secs(1),
            gap: forever,
            presence: forever,
            op_timeout: Duration::from_millis(400),
            when_down: WhenDown::LocalShare,
        },
    )
}

fn ask(set: &Arc<SetSpec>) -> Ask {
    Ask {
        id: Uuid::now_v7(),
        wants: Arc::from([Want { set: Arc::clone(set), weight: 1 }]),
        rates: Arc::from([]),
        class: 0,
        route: Arc::from("/"),
    }
}

async fn used(store: &MemoryStore, set: &SetSpec) -> (u32, u32) {
    let status = store.status(set).await.unwrap();
    (status.used, status.waiting[0].0)
}

#[tokio::test(start_paused = true)]
async fn a_dropped_lease_hands_its_slot_to_the_next_in_line() {
    let (store, set) = (MemoryStore::new(), spec(1, 10));
    let leases = keeper(&store, &set);
    let first = leases.acquire(ask(&set), None).await.unwrap();
    let second = leases.acquire(ask(&set), None);
    let third = leases.acquire(ask(&set), None);
    assert_eq!(used(&store, &set).await, (1, 2));
    drop(first);
    let second = second.await.unwrap();
    assert_eq!(used(&store, &set).await, (1, 1));
    drop(second);
    drop(third.await.unwrap());
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_slot_goes_to_a_waiter_of_another_instance() {
    let (store, set) = (MemoryStore::new(), spec(1, 10));
    let (here, there) = (keeper(&store, &set), keeper(&store, &set));
    let held = here.acquire(ask(&set), None).await.unwrap();
    let waiting = there.acquire(ask(&set), None);
    drop(held);
    let granted = waiting.await.unwrap();
    assert_eq!(used(&store, &set).await, (1, 0));
    drop(granted);
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_leaves_nothing_behind() {
    let (store, set) = (MemoryStore::new(), spec(1, 10));
    let leases = keeper(&store, &set);
    for _ in 0..100 {
        let held = leases.acquire(ask(&set), None);
        let waits = leases.acquire(ask(&set), None);
        drop(waits);
        drop(held);
    }
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gives_up_when_its_time_is_over() {
    let (store, set) = (MemoryStore::new(), spec(1, 10));
    let leases = keeper(&store, &set);
    let held = leases.acquire(ask(&set), None).await.unwrap();
    let start = Instant::now();
    let refused = leases.acquire(ask(&set), None).await.unwrap_err();
    assert_eq!((refused.why, refused.limit), (Why::QueueTimeout, Some(0)));
    assert_eq!(start.elapsed().as_secs(), 10);
    assert_eq!(used(&store, &set).await, (1, 0));
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_at_once() {
    let (store, set) = (MemoryStore::new(), spec(1, 1));
    let leases = keeper(&store, &set);
    let held = leases.acquire(ask(&set), None).await.unwrap();
    let waits = leases.acquire(ask(&set), None);
    assert_eq!(leases.acquire(ask(&set), None).await.unwrap_err().why, Why::Full);
    drop((held, waits));
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn draining_refuses_waiters_and_waits_for_holders() {
    let (store, set) = (MemoryStore::new(), spec(1, 10));
    let leases = keeper(&store, &set);
    let held = leases.acquire(ask(&set), None).await.unwrap();
    let waits = leases.acquire(ask(&set), None);
    leases.drain();
    assert_eq!(waits.await.unwrap_err().why, Why::Draining);
    assert_eq!(leases.acquire(ask(&set), None).await.unwrap_err().why, Why::Draining);
    let leaving = {
        let leases = leases.clone();
        tokio::spawn(async move { leases.leave(Duration::from_secs(60)).await })
    };
    tokio::task::yield_now().await;
    assert!(!leaving.is_finished());
    drop(held);
    leaving.await.unwrap();
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_threads_never_pass_the_limit() {
    let (store, set) = (MemoryStore::new(), spec(5, 10_000));
    let leases = keeper(&store, &set);
    let running = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..64_u32 {
        let (leases, set, running) = (leases.clone(), Arc::clone(&set), Arc::clone(&running));
        tasks.spawn(async move {
            for round in 0..50 {
                let pending = leases.acquire(ask(&set), None);
                if (number + round) % 5 == 0 {
                    drop(pending);
                    continue;
                }
                let lease = pending.await.unwrap();
                let now = running.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert!(now < 5, "{now} others hold one of 5 slots");
                tokio::task::yield_now().await;
                running.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                drop(lease);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(used(&store, &set).await, (0, 0));
}

// === slots kept warm ===

fn warm(slots: u32) -> Arc<SetSpec> {
    Arc::new(SetSpec { warm: true, ..(*spec(slots, 10)).clone() })
}

/// Another request of the same kind.
fn another(ask: &Ask) -> Ask {
    Ask { id: Uuid::now_v7(), ..ask.clone() }
}

/// Until every instance has seen the set as it is.
async fn heartbeats(count: u32) {
    tokio::time::sleep(count * Duration::from_secs(1) + Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_kept_for_the_next_request_of_its_kind_and_no_longer_than_needed() {
    let (store, set) = (MemoryStore::new(), warm(4));
    let leases = keeper(&store, &set);
    let first = leases.acquire(ask(&set), None).await.unwrap();
    heartbeats(1).await;
    let kind = ask(&set);
    let (holder, other) = (first.holder(), ask(&set));
    drop(first);
    // Of another route: it asks for a slot of its own.
    let other = leases.acquire(other, None).await.unwrap();
    assert_ne!(other.holder(), holder);
    assert_eq!(used(&store, &set).await, (2, 0));
    drop(other);

    let lease = leases.acquire(another(&kind), None).await.unwrap();
    let holder = lease.holder();
    for _ in 0..10 {
        drop(leases.acquire(another(&kind), None).await.unwrap());
    }
    drop(lease);
    let lease = leases.acquire(another(&kind), None).await.unwrap();
    assert_eq!(lease.holder(), holder);
    drop(lease);
    heartbeats(3).await;
    assert_eq!(used(&store, &set).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_is_kept_goes_to_whoever_waits_at_once() {
    let (store, set) = (MemoryStore::new(), warm(4));
    let (here, there) = (keeper(&store, &set), keeper(&store, &set));
    heartbeats(1).await;
    drop(here.acquire(ask(&set), None).await.unwrap());
    assert_eq!(used(&store, &set).await, (1, 0));
    let mut held = Vec::new();
    let start = Instant::now();
    for _ in 0..4 {
        held.push(there.acquire(ask(&set), None).await.unwrap());
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(used(&store, &set).await, (4, 0));
    // Nobody keeps anything while it is that full.
    drop(held.pop());
    assert_eq!(used(&store, &set).await, (3, 0));
}

#[tokio::test(start_paused = true)]
async fn who_leaves_keeps_nothing() {
    let (store, set) = (MemoryStore::new(), warm(4));
    let leases = keeper(&store, &set);
    heartbeats(1).await;
    let lease = leases.acquire(ask(&set), None).await.unwrap();
    drop(leases.acquire(ask(&set), None).await.unwrap());
    assert_eq!(used(&store, &set).await, (2, 0));
    leases.drain();
    assert_eq!(used(&store, &set).await, (1, 0));
    drop(lease);
    leases.leave(Duration::from_secs(1)).await;
    assert_eq!(used(&store, &set).await, (0, 0));
}
