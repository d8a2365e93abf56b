//! What both stores promise.

use super::{rig::*, server::Cluster, *};
use crate::ledger::testing::Part;

/// Runs each of these on both stores.
macro_rules! on_both_stores {
    ($($test:ident)*) => {
        mod in_memory {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Rig::memory().await).await;
            })*
        }
        mod in_redis {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Rig::redis().await).await;
            })*
        }
        mod in_redis_as_user {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Rig::redis_as_user().await).await;
            })*
        }
        /// One after the other, since it takes a while to make a Cluster.
        #[tokio::test]
        async fn in_a_cluster() {
            let cluster = Cluster::start().await;
            $({
                let prefix = concat!("{", stringify!($test), "}:");
                $test(Rig::in_cluster(&cluster, prefix).await).await;
            })*
        }
    };
}

on_both_stores! {
    an_id_is_never_counted_twice
    the_queue_is_bounded
    waiters_are_served_in_order
    a_grant_to_another_instance_is_pushed
    a_grant_to_a_deaf_instance_is_collected
    an_instance_that_only_says_it_listens_is_skipped
    a_grant_is_pushed_once_whoever_else_is_deaf
    a_grant_that_nobody_confirms_ends
    a_late_release_frees_nothing
    an_older_connection_does_nothing
    a_lost_holder_is_counted_again
    a_lost_holder_whose_lease_lasts_starts_a_recovery
    recovery_admits_nobody
    a_silent_fleet_recovers
    waiters_of_the_dead_block_nobody
    the_lowest_claim_is_in_force
    who_leaves_takes_claim_and_waiters_along
    a_heartbeat_tells_who_was_heard_of
    an_instance_is_forgotten_once_none_of_its_commands_can_arrive
    who_has_left_is_told_from_the_living_after_a_loss
    a_refused_request_keeps_nothing
    a_waiting_request_keeps_its_earlier_slots
    a_grant_of_one_set_is_no_grant_of_the_next
    a_heavy_waiter_is_not_starved
    a_heavy_head_that_leaves_lets_the_next_one_in
    what_never_fits_is_too_heavy
    a_higher_class_is_served_first
    a_waiter_grows_older_and_better
    a_share_leaves_room_for_others
    nobody_jumps_the_queue
    a_plain_client_counts
    a_lost_key_starts_a_recovery
    lost_infos_heal
    a_lost_queue_heals
    zero_slots_admit_nobody_until_raised
    a_class_that_the_caller_does_not_know_is_served_last
    a_lost_meta_hides_no_class_for_long
    the_heaviest_weight_is_taken_and_given_back
    two_in_one_call_are_two_in_a_rate
    fences_rise_with_every_grant_although_an_idle_set_goes
    holders_are_told_with_whose_they_are
    holders_of_every_value_of_a_key_are_told
    who_is_evicted_is_told_by_whom_it_concerns
    what_the_gone_left_behind_is_removed_by_force_only
}

async fn an_id_is_never_counted_twice(rig: Rig) {
    let (set, me) = (Arc::new(set(3)), rig.instance().await);
    let first = ask_as(&set, 1, 2);
    assert_eq!(me.acquire(&first).await, Acquired::Granted);
    assert_eq!(me.acquire_again(&first).await, Acquired::Granted);
    assert_eq!(rig.used(&set).await, 2);
    // A retry whose first try never arrived.
    assert_eq!(me.acquire_again(&ask(&set)).await, Acquired::Granted);
    assert_eq!(rig.used(&set).await, 3);
    let waiter = ask(&set);
    assert_eq!(me.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.acquire_again(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
}

async fn the_queue_is_bounded(rig: Rig) {
    let (set, me) = (Arc::new(SetSpec { queue: 1, ..set(1) }), rig.instance().await);
    assert_eq!(me.acquire(&ask(&set)).await, Acquired::Granted);
    assert_eq!(
        me.try_acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Full { queue: 0 } }
    );
    assert_eq!(me.acquire(&ask(&set)).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(
        me.acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Full { queue: 1 } }
    );
    let state = me.beat(&[&set]).await.sets[0].clone();
    assert_eq!(
        state,
        SetState { slots: 1, used: 1, waiting: 1, mine: 1, lease: 60_000, order: None }
    );
}

async fn waiters_are_served_in_order(rig: Rig) {
    let (set, me) = (Arc::new(set(1)), rig.instance().await);
    let asks = [ask(&set), ask(&set), ask(&set)];
    for ask in &asks {
        me.acquire(ask).await;
    }
    assert_eq!(me.release(&asks[0]).await, (Released::Released, vec![asks[1].id]));
    assert_eq!(me.release(&asks[1]).await, (Released::Released, vec![asks[2].id]));
    assert_eq!(me.release(&asks[2]).await, (Released::Released, vec![]));
    assert_eq!((rig.used(&set).await, rig.waiting(&set).await), (0, 0));
}

async fn a_grant_to_another_instance_is_pushed(rig: Rig) {
    let (set, me, mut other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    rig.subscribe(&mut other).await;
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    other.acquire(&waiter).await;
    assert_eq!(me.release(&holder).await, (Released::Released, vec![]));
    other.hears(Event::Granted(waiter.id)).await;
    assert_eq!(other.beat(&[&set]).await.pending, [waiter.id]);
    assert_eq!(other.acquire_again(&waiter).await, Acquired::Granted);
    assert!(other.beat(&[&set]).await.pending.is_empty());
    assert_eq!(rig.used(&set).await, 1);
}

async fn a_grant_to_a_deaf_instance_is_collected(rig: Rig) {
    let (set, me, other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    other.acquire(&waiter).await;
    me.release(&holder).await;
    assert_eq!(other.beat(&[&set]).await.pending, [waiter.id]);
}

async fn an_instance_that_only_says_it_listens_is_skipped(rig: Rig) {
    let (set, me, mut other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    other.subscribed = true;
    other.beat(&[]).await;
    let asks = [ask(&set), ask(&set), ask(&set)];
    me.acquire(&asks[0]).await;
    other.acquire(&asks[1]).await;
    me.acquire(&asks[2]).await;
    assert_eq!(me.release(&asks[0]).await, (Released::Released, vec![asks[2].id]));
    assert_eq!(other.acquire_again(&asks[1]).await, Acquired::Waiting { at: 0, queue: 1 });
    // Its own heartbeat serves it.
    me.release(&asks[2]).await;
    assert_eq!(other.beat(&[&set]).await.granted, [asks[1].id]);
}

async fn a_grant_is_pushed_once_whoever_else_is_deaf(rig: Rig) {
    let (set, me) = (Arc::new(set(2)), rig.instance().await);
    let (mut other, mut deaf) = (rig.instance().await, rig.instance().await);
    rig.subscribe(&mut other).await;
    deaf.subscribed = true;
    deaf.beat(&[]).await;
    let held = [ask(&set), ask(&set)];
    for ask in &held {
        me.acquire(ask).await;
    }
    let first = ask(&set);
    other.acquire(&first).await;
    deaf.acquire(&ask(&set)).await;
    // Both at once: the first waiter is told before it shows that the second doesn't hear.
    let release = |ask: &Ask| Release { ask: ask.clone(), queued: true, refund: false };
    let call = Call { releases: held.iter().map(release).collect(), ..Call::default() };
    me.call(&call).await.unwrap();
    // What is pushed later, of another set, comes later.
    let another = Arc::new(SetSpec { key: "another".into(), ..SetSpec::clone(&set) });
    let (holder, last) = (ask_as(&another, 1, 2), ask(&another));
    me.acquire(&holder).await;
    other.acquire(&last).await;
    me.release(&holder).await;
    other.hears(Event::Granted(last.id)).await;
    assert_eq!(other.times_heard(Event::Granted(first.id)), 1);
    assert_eq!(other.acquire_again(&first).await, Acquired::Granted);
}

async fn a_grant_that_nobody_confirms_ends(rig: Rig) {
    let set = Arc::new(SetSpec { grant_ttl: 80, ..set(1) });
    let (me, other) = (rig.instance().await, rig.instance().await);
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    other.acquire(&waiter).await;
    me.release(&holder).await;
    assert_eq!(
        me.try_acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Full { queue: 0 } }
    );
    pause(120).await;
    assert_eq!(me.try_acquire(&ask(&set)).await, Acquired::Granted);
    assert_eq!(other.acquire_again(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
}

async fn a_late_release_frees_nothing(rig: Rig) {
    let (set, me) = (Arc::new(SetSpec { lease: 80, ..set(1) }), rig.instance().await);
    let (late, next) = (ask(&set), ask(&set));
    assert_eq!(me.release(&late).await.0, Released::Unknown);
    me.acquire(&late).await;
    pause(120).await;
    assert_eq!(me.try_acquire(&next).await, Acquired::Granted);
    assert_eq!(me.release(&late).await, (Released::Unknown, vec![]));
    assert_eq!(rig.used(&set).await, 1);
    assert_eq!(me.release(&next).await.0, Released::Released);
    assert_eq!(me.release(&next).await.0, Released::Unknown);
}

async fn an_older_connection_does_nothing(rig: Rig) {
    let (set, mut me) = (Arc::new(set(1)), rig.instance().await);
    let holder = ask(&set);
    me.caller.epoch = 2;
    me.acquire(&holder).await;
    me.caller.epoch = 1;
    let release = Release { ask: holder.clone(), queued: false, refund: false };
    let call = Call { releases: vec![release], ..Call::default() };
    assert!(matches!(me.call(&call).await, Err(StoreError::Stale)));
    let beat = Call { heartbeat: Some(Heartbeat::default()), ..Call::default() };
    assert!(matches!(me.call(&beat).await, Err(StoreError::Stale)));
    assert_eq!(rig.used(&set).await, 1);
    // Another instance numbers its own connections.
    assert_eq!(
        rig.instance().await.acquire(&ask(&set)).await,
        Acquired::Waiting { at: 0, queue: 1 }
    );
}

async fn a_lost_holder_is_counted_again(rig: Rig) {
    let set = Arc::new(SetSpec { lease: 100, recovery: 50, ..set(1) });
    let me = rig.instance().await;
    pause(70).await;
    let (lost, next) = (ask(&set), ask(&set));
    assert_eq!(me.acquire(&lost).await, Acquired::Granted);
    pause(60).await;
    assert_eq!(me.renew(&lost, false).await.renewed, [Renewed::Kept]);
    pause(60).await;
    assert_eq!(me.acquire(&next).await, Acquired::Waiting { at: 0, queue: 1 });
    pause(90).await;
    let beat = me.beat(&[&set]).await;
    assert_eq!(beat.granted, [next.id]);
    // Its own clock says too that the lease is over, so nothing is wrong with the store's memory.
    let again = me.renew(&lost, true).await;
    assert_eq!((&*again.renewed, again.sets[0].used), (&[Renewed::Readded][..], 2));
    assert_eq!(again.stamp.recovery, beat.stamp.recovery);
}

async fn a_lost_holder_whose_lease_lasts_starts_a_recovery(rig: Rig) {
    let set = Arc::new(SetSpec { recovery: 80, ..set(5) });
    let me = rig.instance().await;
    pause(100).await;
    let lost = ask(&set);
    let beat = me.renew(&lost, false).await;
    assert_eq!(beat.renewed, [Renewed::Readded]);
    assert_eq!(beat.stamp.recovery, beat.stamp.now);
    assert_eq!(
        me.try_acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Recovering }
    );
    // During a recovery it is expected, and doesn't start another.
    let second = me.renew(&ask(&set), false).await;
    assert_eq!(second.stamp.recovery, beat.stamp.recovery);
    pause(100).await;
    assert_eq!(me.try_acquire(&ask(&set)).await, Acquired::Granted);
    assert_eq!(rig.used(&set).await, 3);
}

async fn recovery_admits_nobody(rig: Rig) {
    let set = Arc::new(SetSpec { recovery: 100, ..set(2) });
    let me = rig.instance().await;
    let waiter = ask(&set);
    assert_eq!(
        me.try_acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Recovering }
    );
    assert_eq!(me.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    assert!(me.beat(&[&set]).await.granted.is_empty());
    pause(130).await;
    assert_eq!(me.beat(&[&set]).await.granted, [waiter.id]);
}

async fn a_silent_fleet_recovers(rig: Rig) {
    let set = Arc::new(SetSpec { recovery: 50, ..set(2) });
    let mut me = rig.instance().await;
    me.caller.gap = 100;
    pause(60).await;
    assert_eq!(me.try_acquire(&ask(&set)).await, Acquired::Granted);
    pause(150).await;
    assert_eq!(
        me.try_acquire(&ask(&set)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Recovering }
    );
}

async fn waiters_of_the_dead_block_nobody(rig: Rig) {
    let (set, mut me, dead) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    me.caller.presence = 100;
    let asks = [ask(&set), ask(&set), ask(&set)];
    me.acquire(&asks[0]).await;
    dead.acquire(&asks[1]).await;
    me.acquire(&asks[2]).await;
    pause(150).await;
    me.beat(&[]).await;
    assert_eq!(me.release(&asks[0]).await, (Released::Released, vec![asks[2].id]));
    assert_eq!(rig.waiting(&set).await, 0);
}

async fn the_lowest_claim_is_in_force(rig: Rig) {
    let (low, high) = (Arc::new(set(1)), Arc::new(set(2)));
    let (old, new) = (rig.instance().await, rig.instance().await);
    assert_eq!(old.beat(&[&low]).await.sets[0].slots, 1);
    assert_eq!(new.beat(&[&high]).await.sets[0].slots, 1);
    let waiter = ask(&high);
    assert_eq!(new.acquire(&ask(&high)).await, Acquired::Granted);
    assert_eq!(new.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    old.leave(&[&low]).await;
    let beat = new.beat(&[&high]).await;
    assert_eq!((beat.sets[0].slots, beat.pending), (2, vec![waiter.id]));
    // Lowering acts at once and evicts nobody.
    let lower = rig.instance().await.beat(&[&low]).await.sets[0].clone();
    assert_eq!((lower.slots, lower.used), (1, 2));
}

async fn who_leaves_takes_claim_and_waiters_along(rig: Rig) {
    let (set, me, other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    other.acquire(&waiter).await;
    other.leave(&[&set]).await;
    assert_eq!(rig.waiting(&set).await, 0);
    assert_eq!(me.release(&holder).await, (Released::Released, vec![]));
    assert_eq!(rig.used(&set).await, 0);
}

/// A request for one slot of each of two sets.
fn both(narrow: &Arc<SetSpec>, wide: &Arc<SetSpec>) -> Ask {
    let want = |set: &Arc<SetSpec>| Want { set: Arc::clone(set), weight: 1 };
    Ask { wants: [want(narrow), want(wide)].into(), ..ask(narrow) }
}

async fn a_heartbeat_tells_who_was_heard_of(rig: Rig) {
    let (a, b) = (rig.instance().await, rig.instance().await);
    let told = |reply: BeatReply| -> Vec<Uuid> {
        assert!(reply.instances.iter().all(|&(_, age)| (0..60_000).contains(&age)));
        reply.instances.iter().map(|&(instance, _)| instance).collect()
    };
    let mut both = told(a.beat(&[]).await);
    both.sort_unstable();
    let mut ids = [a.caller.instance, b.caller.instance];
    ids.sort_unstable();
    assert_eq!(both, ids);
    b.leave(&[]).await;
    assert_eq!(told(a.beat(&[]).await), [a.caller.instance]);
}

const HOUR: i64 = 3_600_000;

async fn an_instance_is_forgotten_once_none_of_its_commands_can_arrive(rig: Rig) {
    let (set, me) = (Arc::new(set(1)), rig.instance().await);
    let (mut dead, mut left) = (rig.instance().await, rig.instance().await);
    for other in [&mut dead, &mut left] {
        other.caller.epoch = 2;
        other.beat(&[]).await;
    }
    left.leave(&[]).await;
    let heartbeat = Some(Heartbeat::default());
    let beat = Call { heartbeat, ..Call::default() };
    let late = Call {
        acquires: vec![Acquire { ask: ask(&set), waited: 0, may_wait: true, again: false }],
        ..Call::default()
    };
    // A recovery is over.
    pause(10).await;
    for other in [&mut dead, &mut left] {
        rig.heard_earlier(other, 23 * HOUR).await;
        me.call(&beat).await.unwrap();
        other.caller.epoch = 1;
        assert!(matches!(other.call(&late).await, Err(StoreError::Stale)));
        other.caller.epoch = 2;
        rig.heard_earlier(other, 2 * HOUR).await;
        me.call(&beat).await.unwrap();
        assert!(!rig.knows(other).await);
    }
    assert!(rig.knows(&me).await);
    assert_eq!(me.try_acquire(&ask(&set)).await, Acquired::Granted);
}

async fn who_has_left_is_told_from_the_living_after_a_loss(rig: Rig) {
    let (set, me, mut left) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    left.caller.epoch = 2;
    left.leave(&[]).await;
    rig.lose(&set, Part::Instances).await;
    let heard = me.beat(&[]).await.instances;
    assert_eq!(Vec::from_iter(heard.iter().map(|heard| heard.0)), [me.caller.instance]);
    pause(10).await;
    rig.heard_earlier(&left, 25 * HOUR).await;
    me.call(&Call { heartbeat: Some(Heartbeat::default()), ..Call::default() }).await.unwrap();
    assert!(!rig.knows(&left).await);
}

async fn a_refused_request_keeps_nothing(rig: Rig) {
    let narrow = Arc::new(SetSpec { key: "narrow".into(), ..set(1) });
    let (wide, me) = (Arc::new(set(1)), rig.instance().await);
    me.acquire(&ask(&wide)).await;
    assert_eq!(
        me.try_acquire(&both(&narrow, &wide)).await,
        Acquired::Shed { by: Refuser::Want(1), why: Shed::Full { queue: 0 } }
    );
    assert_eq!((rig.used(&narrow).await, rig.used(&wide).await), (0, 1));
}

async fn a_waiting_request_keeps_its_earlier_slots(rig: Rig) {
    let narrow = Arc::new(SetSpec { key: "narrow".into(), ..set(1) });
    let (wide, me) = (Arc::new(set(1)), rig.instance().await);
    let (holder, waiter) = (ask(&wide), both(&narrow, &wide));
    me.acquire(&holder).await;
    assert_eq!(me.acquire(&waiter).await, Acquired::Waiting { at: 1, queue: 1 });
    assert_eq!(rig.used(&narrow).await, 1);
    assert_eq!(me.release(&holder).await, (Released::Released, vec![waiter.id]));
    assert_eq!(me.acquire_again(&waiter).await, Acquired::Granted);
    assert_eq!(me.release(&waiter).await.0, Released::Released);
    assert_eq!((rig.used(&narrow).await, rig.used(&wide).await), (0, 0));
}

async fn a_grant_of_one_set_is_no_grant_of_the_next(rig: Rig) {
    let narrow = Arc::new(SetSpec { key: "narrow".into(), ..set(1) });
    let (wide, me, other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    let (waiter, first) = (both(&narrow, &wide), ask(&wide));
    // Both sets have a free slot and a waiter, since a plain client was there.
    let plain = Uuid::now_v7();
    rig.plain_add(&narrow, plain).await;
    rig.plain_add(&wide, plain).await;
    me.acquire(&waiter).await;
    other.acquire(&first).await;
    rig.plain_remove(&narrow, plain).await;
    rig.plain_remove(&wide, plain).await;
    // The newcomer has the first waiter granted on the way, whose own turn comes later in the same call.
    let acquire = |ask: Ask, again| Acquire { ask, waited: 0, may_wait: true, again };
    let acquires = vec![acquire(ask(&narrow), false), acquire(waiter, true)];
    let call = Call { acquires, ..Call::default() };
    let reply = me.call(&call).await.unwrap().acquires.unwrap();
    let waiting = |at| Acquired::Waiting { at, queue: 1 };
    assert_eq!((&*reply.outcomes, &*reply.granted), (&[waiting(0), waiting(1)][..], &[][..]));
    assert_eq!(other.beat(&[&wide]).await.pending, [first.id]);
}

async fn a_heavy_waiter_is_not_starved(rig: Rig) {
    let (set, me) = (Arc::new(set(3)), rig.instance().await);
    let (holder, heavy, light) = (ask_as(&set, 1, 2), ask_as(&set, 1, 3), ask(&set));
    me.acquire(&holder).await;
    assert_eq!(me.acquire(&heavy).await, Acquired::Waiting { at: 0, queue: 1 });
    // One slot is free, but it is being saved.
    assert_eq!(me.acquire(&light).await, Acquired::Waiting { at: 0, queue: 2 });
    assert_eq!(me.release(&holder).await.1, [heavy.id]);
    assert_eq!(me.release(&heavy).await.1, [light.id]);
}

async fn a_heavy_head_that_leaves_lets_the_next_one_in(rig: Rig) {
    let (set, me) = (Arc::new(set(2)), rig.instance().await);
    let (holder, heavy, light) = (ask(&set), ask_as(&set, 1, 2), ask(&set));
    assert_eq!(me.acquire(&holder).await, Acquired::Granted);
    assert_eq!(me.acquire(&heavy).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.acquire(&light).await, Acquired::Waiting { at: 0, queue: 2 });
    // In the same call: nobody waits for a heartbeat.
    assert_eq!(me.release(&heavy).await, (Released::Dequeued, vec![light.id]));
}

async fn what_never_fits_is_too_heavy(rig: Rig) {
    let (set, me) = (Arc::new(set(4)), rig.instance().await);
    assert_eq!(
        me.acquire(&ask_as(&set, 1, 5)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::TooHeavy }
    );
    assert_eq!(
        me.acquire(&ask_as(&set, 2, 3)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::TooHeavy }
    );
    assert_eq!(me.acquire(&ask_as(&set, 1, 4)).await, Acquired::Granted);
}

async fn a_higher_class_is_served_first(rig: Rig) {
    let (set, me) = (Arc::new(set(1)), rig.instance().await);
    let [holder, low, normal, high] = [1, 2, 1, 0].map(|class| ask_as(&set, class, 1));
    for ask in [&holder, &low, &normal, &high] {
        me.acquire(ask).await;
    }
    assert_eq!(me.release(&holder).await.1, [high.id]);
    assert_eq!(me.release(&high).await.1, [normal.id]);
    assert_eq!(me.release(&normal).await.1, [low.id]);
}

async fn a_waiter_grows_older_and_better(rig: Rig) {
    let (set, me) = (Arc::new(SetSpec { ageing: 1_000, ..set(1) }), rig.instance().await);
    let [holder, low, high] = [1, 2, 0].map(|class| ask_as(&set, class, 1));
    me.acquire(&holder).await;
    me.acquire_as(&Acquire { ask: low.clone(), waited: 2_000, may_wait: true, again: false }).await;
    me.acquire(&high).await;
    assert_eq!(me.release(&holder).await.1, [low.id]);
}

async fn a_share_leaves_room_for_others(rig: Rig) {
    let (set, me) = (Arc::new(set(2)), rig.instance().await);
    let [first, low, normal] = [2, 2, 1].map(|class| ask_as(&set, class, 1));
    assert_eq!(me.acquire(&first).await, Acquired::Granted);
    assert_eq!(me.acquire(&low).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.acquire(&normal).await, Acquired::Granted);
    assert_eq!(me.release(&normal).await, (Released::Released, vec![]));
    assert_eq!(me.release(&first).await.1, [low.id]);
}

async fn nobody_jumps_the_queue(rig: Rig) {
    let (set, me, other) = (Arc::new(set(1)), rig.instance().await, rig.instance().await);
    let (plain, waiter, late) = (Uuid::now_v7(), ask(&set), ask(&set));
    rig.plain_add(&set, plain).await;
    assert_eq!(other.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    rig.plain_remove(&set, plain).await;
    // The slot is free and nobody has handed it over yet: it goes to the waiter, not to the newcomer.
    assert_eq!(me.acquire(&late).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(other.beat(&[&set]).await.pending, [waiter.id]);
}

async fn a_plain_client_counts(rig: Rig) {
    let (set, me) = (Arc::new(set(2)), rig.instance().await);
    let (plain, waiter) = (Uuid::now_v7(), ask(&set));
    rig.plain_add(&set, plain).await;
    assert_eq!(me.acquire(&ask(&set)).await, Acquired::Granted);
    assert_eq!(me.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(rig.used(&set).await, 2);
    rig.plain_remove(&set, plain).await;
    assert_eq!(me.beat(&[&set]).await.granted, [waiter.id]);
}

async fn a_lost_key_starts_a_recovery(rig: Rig) {
    let set = Arc::new(SetSpec { recovery: 60, ..set(2) });
    let me = rig.instance().await;
    for part in [Part::Slots, Part::Meta, Part::Fleet, Part::Instances] {
        pause(80).await;
        let holder = ask(&set);
        assert_eq!(me.try_acquire(&holder).await, Acquired::Granted, "{part:?}");
        rig.lose(&set, part).await;
        if part == Part::Instances {
            // Nothing is counted there: the next heartbeat is soon enough.
            me.beat(&[&set]).await;
        }
        assert_eq!(
            me.try_acquire(&ask(&set)).await,
            Acquired::Shed { by: Refuser::Want(0), why: Shed::Recovering },
            "{part:?}"
        );
        let beat = me.renew(&holder, false).await;
        assert_eq!(beat.sets[0].used, 1, "{part:?}");
        pause(80).await;
        me.release(&holder).await;
    }
}

async fn lost_infos_heal(rig: Rig) {
    let (set, me) = (Arc::new(set(1)), rig.instance().await);
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    me.acquire(&waiter).await;
    rig.lose(&set, Part::Info).await;
    // Nobody knows whose the waiter is, so it must ask anew.
    assert_eq!(me.release(&holder).await, (Released::Released, vec![]));
    assert_eq!((rig.used(&set).await, rig.waiting(&set).await), (0, 0));
    assert_eq!(me.acquire_again(&waiter).await, Acquired::Granted);
}

async fn a_lost_queue_heals(rig: Rig) {
    let (set, me) = (Arc::new(SetSpec { queue: 1, ..set(1) }), rig.instance().await);
    let (holder, waiter) = (ask(&set), ask(&set));
    me.acquire(&holder).await;
    me.acquire(&waiter).await;
    rig.lose(&set, Part::Wait("normal")).await;
    let state = me.beat(&[&set]).await.sets[0].clone();
    assert_eq!((state.waiting, state.mine), (0, 0));
    assert_eq!(me.acquire_again(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.release(&holder).await.1, [waiter.id]);
}

/// The same semaphore by a configuration whose classes are these.
fn seen_by(set: &SetSpec, names: &[&str]) -> Arc<SetSpec> {
    let class = |name: &&str| ClassSpec { name: Arc::from(*name), share: 1.0, queue: u32::MAX };
    Arc::new(SetSpec { classes: names.iter().map(class).collect(), ..set.clone() })
}

async fn a_class_that_the_caller_does_not_know_is_served_last(rig: Rig) {
    let (ours, theirs) = (seen_by(&set(1), &["high", "low"]), seen_by(&set(1), &["odd", "high"]));
    let (me, mut other) = (rig.instance().await, rig.instance().await);
    rig.subscribe(&mut other).await;
    let holder = ask_as(&ours, 0, 1);
    assert_eq!(me.acquire(&holder).await, Acquired::Granted);
    // First over there, and first in line.
    let odd = ask_as(&theirs, 0, 1);
    assert_eq!(other.acquire(&odd).await, Acquired::Waiting { at: 0, queue: 1 });
    let low = ask_as(&ours, 1, 1);
    assert_eq!(me.acquire(&low).await, Acquired::Waiting { at: 0, queue: 1 });
    // A heartbeat of one who doesn't know the class doesn't lose who waits there.
    assert_eq!(me.beat(&[&ours]).await.sets[0].waiting, 2);
    assert_eq!(me.release(&holder).await.1, [low.id]);
    assert!(me.release(&low).await.1.is_empty());
    other.hears(Event::Granted(odd.id)).await;
    assert_eq!(other.acquire_again(&odd).await, Acquired::Granted);
    // Nor does one whose own class it is serve it last.
    let low = ask_as(&ours, 1, 1);
    assert_eq!(me.acquire(&low).await, Acquired::Waiting { at: 0, queue: 1 });
    let next = ask_as(&theirs, 0, 1);
    other.acquire(&next).await;
    assert_eq!(other.release(&odd).await.1, [next.id]);
}

async fn a_lost_meta_hides_no_class_for_long(rig: Rig) {
    let (ours, theirs) = (seen_by(&set(1), &["high"]), seen_by(&set(1), &["high", "odd"]));
    let (me, other) = (rig.instance().await, rig.instance().await);
    let (holder, odd) = (ask_as(&ours, 0, 1), ask_as(&theirs, 1, 1));
    me.acquire(&holder).await;
    other.acquire(&odd).await;
    rig.lose(&ours, Part::Meta).await;
    other.beat(&[&theirs]).await;
    assert_eq!(me.beat(&[&ours]).await.sets[0].waiting, 1);
    me.release(&holder).await;
    assert_eq!(other.beat(&[&theirs]).await.pending, [odd.id]);
}

async fn the_heaviest_weight_is_taken_and_given_back(rig: Rig) {
    let (set, me) = (Arc::new(set(1_500)), rig.instance().await);
    // As heavy as a configuration may say.
    let (first, second) = (ask_as(&set, 1, 1_000), ask_as(&set, 1, 1_000));
    assert_eq!(me.acquire(&first).await, Acquired::Granted);
    assert_eq!(rig.used(&set).await, 1_000);
    assert_eq!(me.acquire(&second).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.renew(&first, false).await.renewed, [Renewed::Kept]);
    assert_eq!(me.release(&first).await, (Released::Released, vec![second.id]));
    assert_eq!(rig.used(&set).await, 1_000);
    assert_eq!(me.release(&second).await.0, Released::Released);
    assert_eq!(rig.used(&set).await, 0);
}

async fn two_in_one_call_are_two_in_a_rate(rig: Rig) {
    let me = rig.instance().await;
    let rate = RateSpec { key: "rate".into(), requests: 2, window: 60_000, shadow: false, rate: 0 };
    let of_rate =
        || Ask { rates: [rate.clone()].into(), wants: Arc::from([]), ..ask(&Arc::new(set(1))) };
    let acquire = || Acquire { ask: of_rate(), waited: 0, may_wait: true, again: false };
    let call = Call { acquires: vec![acquire(), acquire(), acquire()], ..Call::default() };
    let outcomes = me.call(&call).await.unwrap().acquires.unwrap().outcomes;
    let after = Shed::RateLimited { after: 60_001 };
    let refused = Acquired::Shed { by: Refuser::Rate(0), why: after };
    assert_eq!(outcomes, [Acquired::Granted, Acquired::Granted, refused]);
}

async fn fences_rise_with_every_grant_although_an_idle_set_goes(rig: Rig) {
    // What is idle goes, with all its keys.
    let set = Arc::new(SetSpec { fenced: true, keyed: true, ..set(1) });
    let (me, mut other) = (rig.instance().await, rig.instance().await);
    rig.subscribe(&mut other).await;
    let acquire = async |at: &Instance, ask: &Ask, again: bool| {
        let acquire = Acquire { ask: ask.clone(), waited: 0, may_wait: true, again };
        let call = Call { acquires: vec![acquire], ..Call::default() };
        at.call(&call).await.unwrap().acquires.unwrap().fences
    };
    let mut last = 0;
    let mut rises = |fences: Vec<(Uuid, u64)>, ask: &Ask| {
        let [(id, fence)] = fences[..] else { panic!("{fences:?}") };
        assert!(id == ask.id && fence > last, "{fence} after {last}");
        last = fence;
    };
    for _ in 0..3 {
        let (first, own, theirs) = (ask(&set), ask(&set), ask(&set));
        rises(acquire(&me, &first, false).await, &first);
        assert_eq!(acquire(&me, &own, false).await, []);
        assert_eq!(acquire(&other, &theirs, false).await, []);
        // Handed on here, which its own release tells, and there, which tells it on being asked.
        let release = Release { ask: first, queued: true, refund: false };
        let call = Call { releases: vec![release], ..Call::default() };
        rises(me.call(&call).await.unwrap().releases.unwrap().fences, &own);
        me.release(&own).await;
        other.hears(Event::Granted(theirs.id)).await;
        rises(acquire(&other, &theirs, true).await, &theirs);
        other.release(&theirs).await;
    }
}

async fn zero_slots_admit_nobody_until_raised(rig: Rig) {
    let (none, one, me) = (Arc::new(set(0)), Arc::new(set(1)), rig.instance().await);
    let waiter = ask(&none);
    assert_eq!(
        me.try_acquire(&ask(&none)).await,
        Acquired::Shed { by: Refuser::Want(0), why: Shed::Full { queue: 0 } }
    );
    assert_eq!(me.acquire(&waiter).await, Acquired::Waiting { at: 0, queue: 1 });
    assert_eq!(me.beat(&[&one]).await.granted, [waiter.id]);
}

async fn holders_are_told_with_whose_they_are(rig: Rig) {
    let set = Arc::new(set(6));
    let (me, other) = (rig.instance().await, rig.instance().await);
    let (heavy, light, plain) = (ask_as(&set, 0, 3), ask(&set), Uuid::now_v7());
    me.acquire(&heavy).await;
    other.acquire(&light).await;
    rig.plain_add(&set, plain).await;
    // Who waits has no slots.
    me.acquire(&ask_as(&set, 1, 2)).await;
    let mut holders = rig.holders(&set).await;
    holders.sort_by_key(|holder| holder.weight);
    assert!(holders.iter().all(|holder| (0..60_000).contains(&holder.age)), "{holders:?}");
    assert!(holders.iter().all(|holder| holder.set == set.key));
    let of = |id: Uuid| holders.iter().find(|holder| holder.id == id.to_string()).unwrap();
    let origin = |of: &Instance, class: &str| {
        let (route, class) = ("example.com/v1/".to_owned(), class.to_owned());
        Some(Origin { instance: of.caller.instance, route, class })
    };
    assert_eq!(holders.len(), 3);
    assert_eq!((of(heavy.id).weight, &of(heavy.id).of), (3, &origin(&me, "high")));
    assert_eq!((of(light.id).weight, &of(light.id).of), (1, &origin(&other, "normal")));
    assert_eq!((of(plain).weight, &of(plain).of), (1, &None));
}

async fn holders_of_every_value_of_a_key_are_told(rig: Rig) {
    let of = |key: &str| Arc::new(SetSpec { key: key.into(), keyed: true, ..set(1) });
    let me = rig.instance().await;
    let (one, two, stranger) = (of("set:1"), of("set:2"), of("settee:1"));
    for set in [&one, &two, &stranger] {
        me.acquire(&ask(set)).await;
    }
    let holders = rig.holders(&SetSpec { keyed: true, ..set(1) }).await;
    let mut keys: Vec<_> = holders.iter().map(|holder| &*holder.set).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["set:1", "set:2"]);
}

async fn who_is_evicted_is_told_by_whom_it_concerns(rig: Rig) {
    let set = Arc::new(set(4));
    let (me, mut other) = (rig.instance().await, rig.instance().await);
    let (mine, theirs, plain) = (ask(&set), ask(&set), Uuid::now_v7());
    me.acquire(&mine).await;
    other.acquire(&theirs).await;
    rig.plain_add(&set, plain).await;
    assert_eq!(rig.evict(&me, &set, mine.id, true).await, Evicted::Mine);
    assert_eq!(rig.evict(&me, &set, plain, true).await, Evicted::Plain);
    assert_eq!(rig.evict(&me, &set, Uuid::now_v7(), true).await, Evicted::Unknown);
    assert_eq!(rig.evict(&me, &set, theirs.id, true).await, Evicted::Deaf);
    rig.subscribe(&mut other).await;
    assert_eq!(rig.evict(&me, &set, theirs.id, true).await, Evicted::Told);
    other.hears(Event::Evicted(theirs.id)).await;
    // Whoever runs a request gives its slots back itself.
    assert_eq!(rig.used(&set).await, 3);
}

async fn what_the_gone_left_behind_is_removed_by_force_only(rig: Rig) {
    let set = Arc::new(set(2));
    let (me, gone) = (rig.instance().await, rig.instance().await);
    let (left, waiter) = (ask_as(&set, 1, 2), ask(&set));
    gone.acquire(&left).await;
    me.acquire(&waiter).await;
    gone.leave(&[&set]).await;
    let before = me.beat(&[&set]).await.stamp.recovery;
    assert_eq!(rig.evict(&me, &set, left.id, false).await, Evicted::Gone);
    assert_eq!(rig.used(&set).await, 2);
    assert_eq!(rig.evict(&me, &set, left.id, true).await, Evicted::Removed);
    assert_eq!((rig.used(&set).await, rig.holders(&set).await), (0, Vec::new()));
    // An empty set isn't a lost one: nobody has to wait for a recovery.
    let beat = me.beat(&[&set]).await;
    assert_eq!((beat.granted, beat.stamp.recovery), (vec![waiter.id], before));
    assert_eq!(rig.evict(&me, &set, left.id, true).await, Evicted::Unknown);
}
