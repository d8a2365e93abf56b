use super::*;
use crate::leases::Slots;
use crate::store::{AcquireReply, ClassSpec, ReleaseReply, Released};

const HEARTBEAT: Duration = Duration::from_millis(500);
const OP_TIMEOUT: Duration = Duration::from_millis(400);
const LEASE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(1);

fn set(limit: usize, slots: u32) -> SetSpec {
    SetSpec {
        key: format!("limit{limit}").into(),
        slots,
        lease: ms(LEASE),
        grant_ttl: 1_000,
        recovery: 2_000,
        queue: 10,
        ageing: 5_000,
        keyed: false,
        shadow: false,
        fenced: false,
        warm: false,
        classes: [("high", 1.0), ("low", 0.5)]
            .map(|(name, share)| ClassSpec { name: name.into(), share, queue: 10 })
            .into(),
        limit,
    }
}

/// A keeper, and a store made of what the test answers.
struct Rig {
    keeper: Keeper,
    now: Instant,
    started: Instant,
    /// The instances that the store tells of.
    fleet: Vec<Uuid>,
    recovery: i64,
    sets: Vec<Arc<SetSpec>>,
    slots: u32,
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

impl Rig {
    fn new(when_down: WhenDown, sets: Vec<SetSpec>) -> Self {
        let sets: Vec<_> = sets.into_iter().map(Arc::new).collect();
        let limits = sets.iter().map(|set| LimitSettings {
            set: Arc::clone(set),
            renew: LEASE / 3,
            queue_timeouts: vec![Duration::from_secs(10); 2],
            cut_after: None,
        });
        let settings = Settings {
            instance: id(2),
            limits: limits.collect(),
            heartbeat: HEARTBEAT,
            gap: LEASE / 2,
            presence: 3 * HEARTBEAT,
            op_timeout: OP_TIMEOUT,
            when_down,
        };
        let now = Instant::now();
        let (fleet, slots) = (vec![id(1), id(2)], sets[0].slots);
        let keeper = Keeper::new(settings, now);
        Self { keeper, now, started: now, fleet, recovery: 0, sets, slots }
    }

    /// In contact for long, outside recovery.
    fn settled(slots: u32) -> Self {
        let mut rig = Self::new(WhenDown::LocalShare, vec![set(0, slots)]);
        rig.serve_for(4 * HEARTBEAT);
        rig
    }

    fn store_now(&self) -> i64 {
        1_000_000 + ms(self.now - self.started)
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// The store answers whatever the keeper says; everybody is granted.
    fn serve(&mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        while let Some(call) = self.keeper.next_call(self.now) {
            let stamp = Stamp { now: self.store_now(), recovery: self.recovery };
            let state = SetState { slots: self.slots, ..SetState::default() };
            let reply = Reply {
                releases: (!call.releases.is_empty()).then(|| ReleaseReply {
                    stamp,
                    outcomes: vec![Released::Released; call.releases.len()],
                    fences: Vec::new(),
                    granted: Vec::new(),
                }),
                heartbeat: call.heartbeat.as_ref().map(|heartbeat| BeatReply {
                    stamp,
                    renewed: heartbeat
                        .beats
                        .iter()
                        .flat_map(|beat| beat.renew.iter().map(|_| Renewed::Kept))
                        .collect(),
                    sets: vec![state; heartbeat.beats.len()],
                    instances: self.fleet.iter().map(|&id| (id, 0)).collect(),
                    ..BeatReply::default()
                }),
                acquires: (!call.acquires.is_empty()).then(|| AcquireReply {
                    stamp,
                    outcomes: vec![Acquired::Granted; call.acquires.len()],
                    ..AcquireReply::default()
                }),
            };
            calls.push(call.clone());
            self.keeper.on_reply(call, self.now, self.now, Ok(reply));
        }
        calls
    }

    fn serve_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.serve();
            self.pass(HEARTBEAT / 2);
        }
        self.serve();
    }

    fn lose(&mut self) {
        self.keeper.disconnected(1, self.now);
    }

    fn lose_for_good(&mut self) {
        self.keeper.disconnected(FAILURES_TO_GIVE_UP, self.now);
    }

    fn back(&mut self) {
        self.keeper.connected(self.now);
    }

    fn ask(&mut self, wants: &[(usize, u32)], class: usize) -> Uuid {
        let wants = wants
            .iter()
            .map(|&(limit, weight)| Want { set: Arc::clone(&self.sets[limit]), weight });
        let ask = Ask {
            id: Uuid::now_v7(),
            wants: wants.collect(),
            rates: Arc::from([]),
            class,
            route: "/".into(),
        };
        let (id, asked) = (ask.id, self.now);
        let (answer, _) = oneshot::channel();
        self.keeper.read(Message::Acquire { ask, asked, deadline: None, answer }, self.now);
        id
    }

    fn ask_one(&mut self) -> Uuid {
        self.ask(&[(0, 1)], 0)
    }

    /// Asks and is granted while the store answers.
    fn hold(&mut self, wants: &[(usize, u32)], class: usize) -> Uuid {
        let id = self.ask(wants, class);
        self.serve();
        assert_eq!(self.answers(), [(id, None)]);
        id
    }

    fn release(&mut self, id: Uuid) {
        self.keeper.read(Message::Release(id), self.now);
    }

    /// Who was told what: under which id the slots are, or why there are none.
    fn answers(&mut self) -> Vec<(Uuid, Option<Why>)> {
        let answers = self.keeper.take_answers().into_iter();
        answers.map(|answer| (answer.id, answer.outcome.err().map(|refused| refused.why))).collect()
    }

    fn settle(&mut self) -> Vec<(Uuid, Option<Why>)> {
        self.keeper.expire(self.now);
        self.keeper.turn_away(self.now);
        self.answers()
    }
}

#[test]
fn shares_sum_up_to_the_slots() {
    for of in 1..8 {
        for slots in 0..20 {
            let shares: Vec<u32> = (0..of).map(|rank| Place { rank, of }.share(slots)).collect();
            assert_eq!(shares.iter().sum::<u32>(), slots, "{shares:?}");
            assert!(shares.is_sorted_by(|a, b| a >= b) && shares[0] - shares[of as usize - 1] <= 1);
        }
    }
    // Whoever has heard of more instances has no more than before.
    for of in 1..8 {
        for (rank, slots) in (0..of).flat_map(|rank| (0..20).map(move |slots| (rank, slots))) {
            let less = Place { rank, of }.share(slots);
            for rank in [rank, rank + 1] {
                assert!(Place { rank, of: of + 1 }.share(slots) <= less);
            }
        }
    }
}

#[test]
fn a_slot_that_is_free_here_is_handed_on_for_one_lease() {
    let mut rig = Rig::settled(4);
    let (first, second) = (rig.hold(&[(0, 1)], 0), rig.hold(&[(0, 1)], 0));
    rig.lose_for_good();
    rig.release(first);
    let newcomer = rig.ask_one();
    assert_eq!(rig.settle(), [(first, None)], "under the id that the store knows");
    // Nothing else is free, although a share would have room.
    let waiter = rig.ask_one();
    assert_eq!(rig.settle(), []);
    rig.pass(LEASE - TICK);
    assert_eq!(rig.settle(), []);
    rig.release(second);
    assert_eq!(rig.settle(), [(second, None)]);
    assert!(
        !rig.keeper.entries.contains_key(&waiter) && !rig.keeper.entries.contains_key(&newcomer)
    );

    // Both are said to be held, none is released.
    rig.back();
    let calls = rig.serve();
    let renewed: Vec<_> = calls[0].heartbeat.iter().flat_map(|beat| &beat.beats[0].renew).collect();
    assert_eq!(renewed.len(), 2);
    assert!(calls.iter().all(|call| call.releases.is_empty() && call.acquires.is_empty()));
}

#[test]
fn a_slot_whose_release_may_have_arrived_is_not_handed_on() {
    let mut rig = Rig::settled(4);
    let held = rig.hold(&[(0, 1)], 0);
    rig.release(held);
    let call = rig.keeper.next_call(rig.now).unwrap();
    assert_eq!(call.releases.len(), 1);
    rig.lose_for_good();
    rig.ask_one();
    assert_eq!(rig.settle(), []);
}

#[test]
fn a_slot_whose_lease_is_over_is_not_handed_on() {
    let mut rig = Rig::settled(1);
    let held = rig.hold(&[(0, 1)], 0);
    rig.pass(100 * TICK);
    // A later answer, which doesn't confirm the lease, is a contact.
    rig.ask_one();
    rig.serve();
    rig.answers();
    rig.lose_for_good();
    rig.release(held);
    rig.pass(LEASE - 100 * TICK);
    rig.ask_one();
    assert_eq!(rig.settle(), []);
}

#[test]
fn the_share_begins_after_a_lease_and_counts_what_runs() {
    let mut rig = Rig::settled(5);
    let held = [rig.hold(&[(0, 1)], 0), rig.hold(&[(0, 1)], 0)];
    rig.lose_for_good();
    let waiter = rig.ask_one();
    rig.pass(LEASE);
    assert_eq!(rig.settle(), []);
    rig.pass(TICK);
    // Two of two run already: 5 / 2, the odd one is the other's.
    assert_eq!(rig.settle(), []);
    rig.release(held[0]);
    assert_eq!(rig.settle(), [(waiter, None)]);
    let next = rig.ask_one();
    assert_eq!(rig.settle(), []);
    rig.release(waiter);
    assert_eq!(rig.settle(), [(next, None)]);
    assert!(!rig.keeper.entries.contains_key(&waiter), "the store never knew it");

    // The store counts it from now on; it is no holder that was lost.
    rig.pass(TICK);
    rig.back();
    let calls = rig.serve();
    let renewed = || calls[0].heartbeat.iter().flat_map(|beat| &beat.beats[0].renew);
    assert!(renewed().all(|renew| renew.lapsed));
    assert_eq!(renewed().count(), 2);
}

#[test]
fn who_never_reached_the_store_has_no_share() {
    let mut rig = Rig::new(WhenDown::LocalShare, vec![set(0, 4)]);
    rig.keeper.give_up_after(FAILURES_TO_GIVE_UP, rig.now);
    let id = rig.ask_one();
    assert_eq!(rig.settle(), [(id, Some(Why::StoreDown))]);
    rig.pass(2 * LEASE);
    let id = rig.ask_one();
    assert_eq!(rig.settle(), [(id, Some(Why::StoreDown))]);
    assert!(!rig.keeper.outlook(rig.now).has_fallback);
}

#[test]
fn who_is_in_contact_for_less_than_two_heartbeats_has_no_share() {
    for (beats, share) in [(1, 0), (2, 2)] {
        let mut rig = Rig::new(WhenDown::LocalShare, vec![set(0, 4)]);
        rig.serve_for(beats * HEARTBEAT);
        assert_eq!(rig.keeper.share_of(0, 4), share);
        rig.lose_for_good();
        rig.pass(LEASE + TICK);
        let id = rig.ask_one();
        let why = (share == 0).then_some(Why::StoreDown);
        assert_eq!(rig.settle(), [(id, why)]);
    }
}

#[test]
fn recovery_teaches_nobody_who_is_there() {
    let mut rig = Rig::settled(4);
    assert_eq!(rig.keeper.share_of(0, 4), 2);
    // A store without memory has heard of nobody else yet.
    rig.recovery = rig.store_now();
    rig.fleet = vec![id(2)];
    rig.serve_for(2 * HEARTBEAT);
    assert_eq!(rig.keeper.share_of(0, 4), 2);
    rig.fleet = vec![id(1), id(2), id(3)];
    rig.serve_for(4 * HEARTBEAT);
    assert_eq!(rig.keeper.share_of(0, 4), 1);
}

#[test]
fn who_was_away_for_too_long_may_have_been_forgotten() {
    let recovers = |away: Duration, lost_memory: bool| {
        let mut rig = Rig::settled(4);
        rig.lose();
        rig.pass(away);
        if lost_memory {
            rig.recovery = rig.store_now() - 2_000;
        }
        rig.back();
        rig.serve();
        rig.keeper.share_of(0, 4) == 2
    };
    // Within a lease and an operation's timeout the others still count on it.
    assert!(recovers(LEASE + OP_TIMEOUT, false));
    assert!(!recovers(LEASE + OP_TIMEOUT + TICK, false));
    // Unless a whole recovery may have passed without it.
    assert!(recovers(Duration::from_secs(2), true));
    assert!(!recovers(Duration::from_secs(2) + TICK, true));
}

#[test]
fn several_limits_are_all_or_none() {
    let mut rig = Rig::new(WhenDown::LocalShare, vec![set(0, 4), set(1, 4)]);
    rig.serve_for(4 * HEARTBEAT);
    let narrow = rig.hold(&[(0, 1)], 0);
    let both = rig.hold(&[(0, 1), (1, 1)], 0);
    rig.lose_for_good();
    rig.release(narrow);
    rig.ask(&[(0, 1), (1, 1)], 0);
    assert_eq!(rig.settle(), []);
    rig.release(both);
    assert_eq!(rig.settle(), [(both, None)]);
    // From the shares: the second limit has room for one more, the first has none.
    rig.ask(&[(0, 1)], 0);
    assert_eq!(rig.settle(), [(narrow, None)]);
    rig.pass(LEASE + TICK);
    let second = rig.ask(&[(0, 1), (1, 1)], 0);
    assert_eq!(rig.settle(), []);
    let alone = rig.ask(&[(1, 1)], 0);
    assert_eq!(rig.settle(), [(alone, None)]);
    rig.release(narrow);
    assert_eq!(rig.settle(), []);
    rig.release(alone);
    assert_eq!(rig.settle(), [(second, None)]);
}

#[test]
fn the_best_waiter_is_next_and_the_heavy_one_is_not_starved() {
    let mut rig = Rig::settled(8);
    let running = [0; 4].map(|_| rig.hold(&[(0, 1)], 0));
    rig.lose_for_good();
    rig.pass(LEASE + TICK);
    let low = rig.ask(&[(0, 1)], 1);
    let heavy = rig.ask(&[(0, 2)], 0);
    rig.pass(TICK);
    let light = rig.ask(&[(0, 1)], 0);
    assert_eq!(rig.settle(), []);
    rig.release(running[0]);
    assert_eq!(rig.settle(), []);
    rig.release(running[1]);
    assert_eq!(rig.settle(), [(heavy, None)]);
    rig.release(running[2]);
    assert_eq!(rig.settle(), [(light, None)]);
    // The low class has half of the share, two, which are in use.
    rig.release(running[3]);
    assert_eq!(rig.settle(), []);
    rig.release(light);
    assert_eq!(rig.settle(), []);
    rig.release(heavy);
    assert_eq!(rig.settle(), [(low, None)]);
}

#[test]
fn waiting_here_is_bounded_in_number_and_time() {
    let mut rig = Rig::settled(2);
    rig.hold(&[(0, 1)], 0);
    rig.lose_for_good();
    rig.pass(LEASE + TICK);
    for _ in 0..10 {
        rig.ask_one();
    }
    assert_eq!(rig.settle(), []);
    let late = rig.ask_one();
    assert_eq!(rig.settle(), [(late, Some(Why::StoreDown))]);
    rig.pass(Duration::from_secs(10));
    let answers = rig.settle();
    assert_eq!(answers.len(), 10);
    assert!(answers.iter().all(|(_, why)| *why == Some(Why::QueueTimeout)));
    assert_eq!((rig.keeper.entries.len(), rig.keeper.deadlines.len()), (1, 0));
}

#[test]
fn nobody_waits_here_for_what_never_comes() {
    let mut rig = Rig::settled(1);
    // The one slot goes to the lower id.
    assert_eq!(rig.keeper.share_of(0, 1), 0);
    rig.lose_for_good();
    let waiter = rig.ask_one();
    assert_eq!(rig.settle(), []);
    rig.pass(LEASE + TICK);
    assert_eq!(rig.settle(), [(waiter, Some(Why::StoreDown))]);
}

#[test]
fn a_waiter_of_the_store_keeps_its_place_and_is_served_first() {
    for when_down in [WhenDown::Closed, WhenDown::LocalShare] {
        let mut rig = Rig::new(when_down, vec![set(0, 2)]);
        rig.serve_for(4 * HEARTBEAT);
        let held = rig.hold(&[(0, 1)], 0);
        let waiter = rig.ask_one();
        let call = rig.keeper.next_call(rig.now).unwrap();
        let waiting = AcquireReply {
            outcomes: vec![Acquired::Waiting { at: 0, queue: 1 }],
            ..AcquireReply::default()
        };
        let reply = Reply { acquires: Some(waiting), ..Reply::default() };
        rig.keeper.on_reply(call, rig.now, rig.now, Ok(reply));
        rig.lose_for_good();
        rig.pass(TICK);
        let newcomer = rig.ask_one();
        rig.release(held);
        let (expected, asked): (&[_], &[_]) = match when_down {
            WhenDown::LocalShare => (&[(held, None)], &[newcomer]),
            _ => (&[(newcomer, Some(Why::StoreDown))], &[waiter]),
        };
        assert!(rig.answers().iter().chain(&rig.settle()).eq(expected));
        // What still waits asks when the store is back, after what is held was said.
        rig.back();
        let calls = rig.serve();
        let order = calls.iter().position(|call| !call.acquires.is_empty()).unwrap();
        assert!(order == 0 && calls[0].heartbeat.is_some() && calls[0].releases.is_empty());
        let acquires = calls[order].acquires.iter().map(|acquire| acquire.ask.id);
        assert!(acquires.eq(asked.iter().copied()));
    }
}

#[test]
fn nothing_is_settled_here_before_the_store_has_failed_for_its_timeout() {
    let mut rig = Rig::settled(4);
    let held = rig.hold(&[(0, 1)], 0);
    rig.lose();
    rig.release(held);
    let newcomer = rig.ask_one();
    rig.pass(OP_TIMEOUT - TICK);
    assert_eq!(rig.settle(), []);
    assert!(!rig.keeper.outlook(rig.now).away);
    rig.pass(TICK);
    assert_eq!(rig.settle(), [(held, None)]);
    assert!(rig.keeper.outlook(rig.now).away);
    // The store decides again.
    rig.back();
    rig.serve();
    assert!(!rig.keeper.outlook(rig.now).away);
    assert!(!rig.keeper.entries.contains_key(&newcomer));
}

#[test]
fn open_admits_everybody() {
    let mut rig = Rig::new(WhenDown::Open, vec![set(0, 1)]);
    rig.keeper.give_up_after(FAILURES_TO_GIVE_UP, rig.now);
    let asked: Vec<_> = (0..5).map(|_| (rig.ask_one(), None)).collect();
    assert_eq!(rig.settle(), asked);
    let outlook = rig.keeper.outlook(rig.now);
    assert_eq!((outlook.has_fallback, outlook.alone.open), (true, 5));
}

#[test]
fn shadow_limits_stop_nobody() {
    let mut rig = Rig::new(WhenDown::LocalShare, vec![SetSpec { shadow: true, ..set(0, 1) }]);
    rig.serve_for(4 * HEARTBEAT);
    rig.lose_for_good();
    rig.pass(LEASE + TICK);
    let asked: Vec<_> = (0..5).map(|_| (rig.ask_one(), None)).collect();
    assert_eq!(rig.settle(), asked);
}

#[test]
fn a_class_with_a_reserve_above_it_takes_over_from_its_like() {
    let mut rig = Rig::settled(4);
    let (high, low) = (rig.hold(&[(0, 1)], 0), rig.hold(&[(0, 1)], 1));
    rig.lose_for_good();
    rig.release(high);
    rig.ask(&[(0, 1)], 1);
    assert_eq!(rig.settle(), []);
    rig.release(low);
    assert_eq!(rig.settle(), [(low, None)]);
}

#[test]
fn the_stalest_slot_goes_first_unless_its_user_is_cut() {
    for is_cut in [false, true] {
        let mut rig = Rig::settled(4);
        rig.keeper.settings.limits[0].cut_after = is_cut.then_some(LEASE / 2);
        let stale = rig.hold(&[(0, 1)], 0);
        rig.pass(100 * TICK);
        let fresh = rig.hold(&[(0, 1)], 0);
        rig.lose_for_good();
        rig.release(fresh);
        rig.release(stale);
        rig.ask_one();
        assert_eq!(rig.settle(), [(if is_cut { fresh } else { stale }, None)]);
        // One that is to be cut gets no slot on which it would be cut at once.
        rig.pass(LEASE / 2);
        rig.ask_one();
        let left = if is_cut { vec![] } else { vec![(fresh, None)] };
        assert_eq!(rig.settle(), left);
    }
}

#[test]
fn who_has_no_lease_is_not_cut_before_the_store_gives_one() {
    let mut rig = Rig::settled(4);
    rig.keeper.settings.limits[0].cut_after = Some(LEASE / 2);
    rig.lose_for_good();
    rig.pass(LEASE + TICK);
    let id = rig.ask_one();
    assert_eq!(rig.settle(), [(id, None)]);
    let guard = rig.keeper.entries[&id].guard.clone().unwrap();
    rig.pass(2 * LEASE);
    assert_eq!(guard.ends(), None);
    rig.back();
    rig.serve();
    assert_eq!(guard.ends(), Some(rig.now + LEASE / 2));
}

// === slots kept warm, in a store that can be lost ===

/// Holds a slot of a warm limit, and returns another request like its owner.
fn warm_rig() -> (Rig, Uuid, Ask) {
    let mut rig = Rig::new(WhenDown::LocalShare, vec![SetSpec { warm: true, ..set(0, 8) }]);
    rig.serve_for(4 * HEARTBEAT);
    let id = rig.hold(&[(0, 1)], 0);
    let another = Ask { id: Uuid::now_v7(), ..rig.keeper.entries[&id].ask.clone() };
    (rig, id, another)
}

#[test]
fn a_slot_that_was_kept_over_a_freeze_is_given_back_unused() {
    let (mut rig, id, another) = warm_rig();
    let mut slots = Slots::Listed(id);
    assert!(rig.keeper.keep_warm(&mut slots, rig.now, rig.now));
    let mut slots = rig.keeper.reuse(&another, rig.now).expect("it is renewed");
    assert!(rig.keeper.keep_warm(&mut slots, rig.now, rig.now));
    // Nobody has renewed it for a lease: it may be another's.
    rig.pass(LEASE);
    assert!(rig.keeper.reuse(&another, rig.now).is_none());
    let released = rig.serve().iter().any(|call| call.releases.iter().any(|one| one.ask.id == id));
    assert!(released);
}

#[test]
fn a_slot_that_is_kept_is_handed_on_while_the_store_is_away() {
    let (mut rig, id, _) = warm_rig();
    assert!(rig.keeper.keep_warm(&mut Slots::Listed(id), rig.now, rig.now));
    rig.lose_for_good();
    rig.ask_one();
    assert_eq!(rig.settle(), [(id, None)]);
}

#[test]
fn a_grant_that_is_read_after_its_lease_is_asked_for_again() {
    let mut rig = Rig::settled(4);
    let id = rig.ask_one();
    let (call, sent) = (rig.keeper.next_call(rig.now).unwrap(), rig.now);
    let stamp = Stamp { now: rig.store_now(), recovery: rig.recovery };
    let outcomes = vec![Acquired::Granted];
    let acquires = Some(AcquireReply { stamp, outcomes, ..AcquireReply::default() });
    // The process sleeps while its answer lies in the socket.
    rig.pass(LEASE);
    rig.keeper.on_reply(call, sent, rig.now, Ok(Reply { acquires, ..Reply::default() }));
    assert_eq!(rig.answers(), []);
    let calls = rig.serve();
    let again = calls.iter().flat_map(|call| &call.acquires).map(|acquire| acquire.again);
    assert_eq!(Vec::from_iter(again), [true]);
    assert_eq!(rig.answers(), [(id, None)]);
}
