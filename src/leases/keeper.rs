//! The keeper's state machine: what each holder and waiter of this instance is up to. No I/O, no clock of its own.

use std::{
    collections::{BTreeSet, VecDeque},
    mem,
    sync::Arc,
    time::Duration,
};

use rustc_hash::FxHashMap;
use tokio::{sync::oneshot, time::Instant};
use uuid::Uuid;

use super::{Guard, Lease, Outlook, Standing};
use crate::store::{
    Acquire, AcquireReply, Acquired, Ask, Beat, BeatReply, Call, Caller, Event, Heartbeat, Refuser,
    Release, ReleaseReply, Renew, Renewed, Reply, SetSpec, SetState, Shed, Stamp, StoreError, Want,
};

mod adopt;
mod answers;
mod at_once;
mod away;
mod calls;
mod entry;
mod warm;

pub(super) use at_once::AtOnce;
use away::Absence;
pub use away::{Alone, WhenDown};
use entry::{Entry, Phase};
use warm::Warm;

/// How many requests, and how many releases, go into one call.
const BATCH: usize = 128;
/// How many renewals go into one call.
const RENEWALS_PER_CALL: usize = 512;
/// How much a new hold time counts in the mean.
const HOLD_SMOOTHING: f64 = 0.1;
/// How much a new arrival rate counts in the mean.
const ARRIVALS_SMOOTHING: f64 = 0.2;
/// So many holds must have been measured before anyone is judged by them.
const SAMPLES_TO_JUDGE: u32 = 50;
/// So many failures in a row and nobody waits for the store any more.
const FAILURES_TO_GIVE_UP: u32 = 3;

/// How an instance keeps its leases.
#[derive(Clone, Debug)]
pub struct Settings {
    /// New for every start of a process.
    pub instance: Uuid,
    /// Every limit, each at the place that its set names.
    pub limits: Vec<LimitSettings>,
    /// Between two heartbeats.
    pub heartbeat: Duration,
    /// A fleet silent for longer may have lost holders.
    pub gap: Duration,
    /// An instance silent for longer is gone.
    pub presence: Duration,
    /// How long a request waits for a store that doesn't answer.
    pub op_timeout: Duration,
    /// What becomes of new requests while it doesn't.
    pub when_down: WhenDown,
}

/// One limit, for the keeper.
#[derive(Clone, Debug)]
pub struct LimitSettings {
    /// For the store.
    pub set: Arc<SetSpec>,
    /// Between two renewals, at most.
    pub renew: Duration,
    /// How long a request of each class may wait.
    pub queue_timeouts: Vec<Duration>,
    /// How long after the sending of what confirmed its lease a request is cut, if it is.
    pub cut_after: Option<Duration>,
}

/// A request wasn't given its slots; nothing of it is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refused {
    /// Why.
    pub why: Why,
    /// Index of the limit that refused, if one did.
    pub limit: Option<usize>,
    /// Index of the rate that refused, if one did.
    pub rate: Option<usize>,
    /// How long a newcomer would wait, where hold times were measured; exactly when a rate has room again.
    pub expected_wait: Option<Duration>,
}

/// Why a request wasn't given its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// No slot and no room to wait.
    Full,
    /// It waited, and had to go for a request of a higher class.
    Displaced,
    /// Waited for as long as one may.
    QueueTimeout,
    /// It would not have been served before its deadline.
    Deadline,
    /// Nobody is admitted yet and the request may not wait.
    Recovering,
    /// More slots than there are.
    TooHeavy,
    /// Too many requests in the rate's window.
    RateLimited,
    /// The store doesn't answer.
    StoreDown,
    /// This instance is stopping.
    Draining,
}

/// What handles tell the keeper.
#[derive(Debug)]
pub(super) enum Message {
    Acquire {
        ask: Ask,
        asked: Instant,
        deadline: Option<Instant>,
        answer: oneshot::Sender<Result<Lease, Refused>>,
    },
    /// An operator's order: other slots, or none to end that. Answered once the store has it.
    SetSlots {
        limit: usize,
        slots: Option<u32>,
        done: oneshot::Sender<()>,
    },
    Release(Uuid),
    /// Slots taken at once, and since when they are held.
    GiveBack {
        ask: Ask,
        taken: Instant,
    },
    Event(Event),
    Drain,
    Leave,
}

/// What the keeper tells a request: when its slots were taken, or why not.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) id: Uuid,
    pub(super) to: oneshot::Sender<Result<Lease, Refused>>,
    pub(super) outcome: Result<Instant, Refused>,
    /// What a limit or rate in shadow mode would have said.
    pub(super) shadow: Option<Refused>,
    pub(super) fence: Option<u64>,
    pub(super) guard: Option<Guard>,
}

/// The keeper of one instance.
#[derive(Debug)]
pub(super) struct Keeper {
    settings: Settings,
    caller: Caller,
    /// Ids are random, so the hash needn't be.
    entries: FxHashMap<Uuid, Entry>,
    /// How many hold slots without an entry.
    unlisted: usize,
    warm: Warm,
    /// Ids to ask for; an entry that moved on meanwhile is skipped.
    new: VecDeque<Uuid>,
    /// Ids to release.
    gone: VecDeque<Uuid>,
    /// When waiters give up.
    deadlines: BTreeSet<(Instant, Uuid)>,
    answers: Vec<Answer>,
    spare: Vec<Message>,
    /// Who waits for an order to reach the store.
    orders: Vec<oneshot::Sender<()>>,
    /// When the sets were last seen.
    seen_at: Instant,
    /// Which instances the store had heard of then, and how long ago, ms.
    heard_of: Vec<(Uuid, i64)>,
    next_beat: Instant,
    /// Holders not confirmed since then are renewed at once.
    renew_since: Instant,
    /// Renewals are left over from before a new connection or recovery; nobody new is asked for until they are out.
    reasserting: bool,
    recovery: RecoveryView,
    subscribed: bool,
    connected: bool,
    /// Nobody waits for the store while it is down.
    down: bool,
    absence: Absence,
    draining: bool,
    leaving: Leaving,
    alarm: Instant,
    limits: Vec<LimitState>,
    /// A heartbeat was answered.
    heard: bool,
    /// And the recovery it found, if any, is over.
    started: bool,
    readded: u64,
}

#[derive(Debug, Default, Clone)]
struct LimitState {
    seen: SetState,
    local: u32,
    hold: Option<f64>,
    /// How many holds were measured.
    samples: u32,
    /// Requests since the last heartbeat, and per second.
    arrivals: u32,
    arrival_rate: f64,
    order: Option<Option<u32>>,
}

/// The store's latest recovery, in this instance's time.
#[derive(Debug)]
struct RecoveryView {
    /// The store's own time of its start, to tell one from the next.
    start: i64,
    began: Instant,
    /// Per limit.
    ends: Vec<Instant>,
    alarm: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Leaving {
    No,
    Wanted,
    Said,
    Done,
}

impl Settings {
    /// Whether slots of any limit may be kept warm.
    pub(super) fn is_warm(&self) -> bool {
        self.limits.iter().any(|limit| limit.set.warm)
    }
}

impl Answer {
    fn no(id: Uuid, to: oneshot::Sender<Result<Lease, Refused>>, refused: Refused) -> Self {
        Self { id, to, outcome: Err(refused), shadow: None, fence: None, guard: None }
    }
}

impl Refused {
    /// The keeper is gone: only while the process ends.
    pub(super) const GONE: Self = Self::of(Why::Draining);

    const fn of(why: Why) -> Self {
        Self { why, limit: None, rate: None, expected_wait: None }
    }
}

fn ms(duration: Duration) -> i64 {
    duration.as_millis().min(i64::MAX as u128 / 4) as i64
}

impl Keeper {
    pub(super) fn new(settings: Settings, now: Instant) -> Self {
        let caller = Caller {
            instance: settings.instance,
            epoch: 1,
            gap: ms(settings.gap),
            presence: ms(settings.presence),
        };
        let recovery = RecoveryView {
            start: 0,
            began: now,
            ends: vec![now; settings.limits.len()],
            alarm: None,
        };
        Self {
            limits: vec![LimitState::default(); settings.limits.len()],
            caller,
            entries: FxHashMap::default(),
            unlisted: 0,
            warm: Warm::default(),
            new: VecDeque::new(),
            gone: VecDeque::new(),
            deadlines: BTreeSet::new(),
            answers: Vec::new(),
            spare: Vec::new(),
            orders: Vec::new(),
            seen_at: now,
            heard_of: Vec::new(),
            next_beat: now,
            renew_since: now,
            reasserting: false,
            recovery,
            subscribed: false,
            connected: true,
            down: false,
            absence: Absence::default(),
            draining: false,
            leaving: Leaving::No,
            alarm: now,
            heard: false,
            started: false,
            readded: 0,
            settings,
        }
    }

    pub(super) fn caller(&self) -> &Caller {
        &self.caller
    }

    pub(super) fn take_answers(&mut self) -> Vec<Answer> {
        mem::take(&mut self.answers)
    }

    /// An empty list to change for the inbox, so that neither has to grow again.
    pub(super) fn spare(&mut self) -> Vec<Message> {
        mem::take(&mut self.spare)
    }

    pub(super) fn keep_spare(&mut self, messages: Vec<Message>) {
        self.spare = messages;
    }

    /// Whether anybody waits, here or, as of the last heartbeat, anywhere.
    pub(super) fn is_crowded(&self) -> bool {
        !self.deadlines.is_empty() || self.limits.iter().any(|limit| limit.seen.waiting > 0)
    }

    pub(super) fn has_left(&self) -> bool {
        self.leaving == Leaving::Done
    }
}

// === impl Keeper: messages ===

impl Keeper {
    pub(super) fn read(&mut self, message: Message, now: Instant) {
        match message {
            Message::Acquire { ask, asked, deadline, answer } => {
                let entry = Entry::new(ask, Phase::New, asked, now);
                self.on_acquire(Entry { answer: Some(answer), patience: deadline, ..entry });
            }
            Message::SetSlots { limit, slots, done } => {
                self.limits[limit].order = Some(slots);
                self.orders.push(done);
                self.next_beat = now;
            }
            Message::Release(id) => self.on_release(id, now),
            Message::GiveBack { ask, taken } => self.on_give_back(ask, taken, now),
            Message::Event(Event::Granted(id)) => self.on_push(id, now),
            Message::Event(Event::Displaced(id)) => self.on_displaced(id, now),
            Message::Event(Event::Wanted) => self.stir(now),
            // Of a request that runs, which isn't the keeper's to end.
            Message::Event(Event::Evicted(_)) => {}
            Message::Event(event @ (Event::Subscribed | Event::Unsubscribed)) => {
                self.subscribed = event == Event::Subscribed;
                self.next_beat = now;
            }
            Message::Drain => self.drain(now),
            Message::Leave => {
                self.cool(now);
                if self.leaving == Leaving::No {
                    self.leaving = Leaving::Wanted;
                }
            }
        }
    }

    fn on_acquire(&mut self, mut entry: Entry) {
        let id = entry.ask.id;
        let why = match (self.draining, self.down) {
            (true, _) => Some(Why::Draining),
            (_, true) if self.settings.when_down == WhenDown::Closed => Some(Why::StoreDown),
            _ => None,
        };
        if let (Some(why), Some(to)) = (why, entry.answer.take_if(|_| why.is_some())) {
            self.answers.push(Answer::no(id, to, Refused::of(why)));
            return;
        }
        self.count_arrival(&entry.ask);
        self.entries.insert(id, entry);
        self.new.push_back(id);
    }

    /// A handle was dropped.
    fn on_release(&mut self, id: Uuid, now: Instant) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        match entry.phase {
            Phase::Leaving | Phase::Releasing => return,
            Phase::New if !entry.again => return self.forget(id),
            Phase::Held => {
                let held_for = now.duration_since(entry.taken);
                let wants = Arc::clone(&entry.ask.wants);
                let is_unheard_of = entry.uncounted && !entry.again;
                self.count_hold(&wants, held_for);
                if is_unheard_of {
                    return self.forget(id);
                }
            }
            _ => {}
        }
        self.send_off(id);
    }

    /// Neither here nor in the store anything is kept of it.
    fn forget(&mut self, id: Uuid) {
        if let Some(deadline) = self.entries.remove(&id).and_then(|entry| entry.deadline) {
            self.deadlines.remove(&(deadline, id));
        }
    }

    /// From now on the id isn't renewed any more, and its release is on its way.
    fn send_off(&mut self, id: Uuid) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        // An answer that is still missing may say that the id waits.
        entry.queued |= !matches!(entry.phase, Phase::Held | Phase::Spare);
        entry.phase = Phase::Leaving;
        entry.answer = None;
        if let Some(deadline) = entry.deadline.take() {
            self.deadlines.remove(&(deadline, id));
        }
        self.gone.push_back(id);
    }

    fn count_arrival(&mut self, ask: &Ask) {
        for want in ask.wants.iter() {
            self.limits[want.set.limit].arrivals += 1;
        }
    }

    fn count_taken(&mut self, wants: &[Want]) {
        for want in wants {
            self.limits[want.set.limit].local += want.weight;
        }
    }

    fn count_hold(&mut self, wants: &[Want], held_for: Duration) {
        for want in wants {
            let state = &mut self.limits[want.set.limit];
            state.local = state.local.saturating_sub(want.weight);
            state.samples = state.samples.saturating_add(1);
            let seconds = held_for.as_secs_f64();
            state.hold = Some(match state.hold {
                Some(mean) => mean + HOLD_SMOOTHING * (seconds - mean),
                None => seconds,
            });
        }
    }

    /// One of our waiters was granted a slot, they say: it asks again and starts on that answer.
    fn on_push(&mut self, id: Uuid, now: Instant) {
        match self.entries.get_mut(&id) {
            Some(entry) => match entry.phase {
                Phase::Waiting => self.ask_again(id),
                Phase::Asked => entry.pushed = true,
                _ => {}
            },
            None => self.return_stray(id, now),
        }
    }

    /// One of our waiters had to go for another's.
    fn on_displaced(&mut self, id: Uuid, now: Instant) {
        let Some(entry) = self.entries.get(&id) else { return };
        if !matches!(entry.phase, Phase::Waiting | Phase::Asked | Phase::New) {
            return;
        }
        let at = entry.held.min(entry.ask.wants.len() - 1);
        let limit = entry.ask.wants[at].set.limit;
        let wait = self.expected_wait(limit, self.limits[limit].seen.waiting);
        self.refuse(
            id,
            Refused { limit: Some(limit), expected_wait: wait, ..Refused::of(Why::Displaced) },
        );
        self.on_release(id, now);
    }

    fn ask_again(&mut self, id: Uuid) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.phase = Phase::New;
            entry.again = true;
            entry.pushed = false;
            self.new.push_back(id);
        }
    }

    /// A slot was granted to an id that nobody here knows: it goes back, whichever set it is of.
    fn return_stray(&mut self, id: Uuid, now: Instant) {
        let wants = self.settings.limits.iter().filter(|limit| !limit.set.keyed);
        let wants = wants.map(|limit| Want { set: Arc::clone(&limit.set), weight: 1 }).collect();
        let rates = Arc::from([]);
        let ask = Ask { id, wants, rates, class: 0, route: Arc::from("-") };
        self.return_unknown(ask, now);
    }

    fn return_unknown(&mut self, ask: Ask, now: Instant) {
        let id = ask.id;
        let entry =
            Entry { again: true, queued: true, ..Entry::new(ask, Phase::Leaving, now, now) };
        self.entries.insert(id, entry);
        self.gone.push_back(id);
    }

    fn drain(&mut self, now: Instant) {
        self.draining = true;
        self.cool(now);
        let asking: Vec<Uuid> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.answer.is_some())
            .map(|(&id, _)| id)
            .collect();
        for id in asking {
            self.refuse(id, Refused::of(Why::Draining));
            self.on_release(id, now);
        }
    }

    /// Tells a request no. Its entry stays for whoever has to give things back.
    fn refuse(&mut self, id: Uuid, refused: Refused) {
        if let Some(to) = self.entries.get_mut(&id).and_then(|entry| entry.answer.take()) {
            self.answers.push(Answer::no(id, to, refused));
        }
    }
}

// === impl Keeper: time ===

impl Keeper {
    /// Refuses those who have waited for as long as they may. Time spent in recovery doesn't count.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.recovery.alarm.is_some_and(|alarm| alarm <= now) {
            self.recovery.alarm =
                self.recovery.ends.iter().filter(|end| **end > now).min().copied();
            if self.recovery.alarm.is_none() {
                tracing::info!("slots are counted: requests are admitted again");
            }
            self.next_beat = now;
        }
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            entry.deadline = None;
            let (limit, later) = self.deadline_of(id, now);
            if later > now {
                self.wait_until(id, later);
                continue;
            }
            let patience = self.entries.get(&id).and_then(|entry| entry.patience);
            let out_of_patience = patience.is_some_and(|patience| patience <= now);
            let why = if out_of_patience { Why::Deadline } else { Why::QueueTimeout };
            let expected_wait = self.expected_wait(limit, self.limits[limit].seen.waiting);
            self.refuse(id, Refused { limit: Some(limit), expected_wait, ..Refused::of(why) });
            self.on_release(id, now);
        }
    }

    /// Which limit a request waits at, and when it gives up. Time spent in recovery doesn't count, but to the client it does.
    fn deadline_of(&self, id: Uuid, now: Instant) -> (usize, Instant) {
        let entry = &self.entries[&id];
        let at = entry.held.min(entry.ask.wants.len() - 1);
        let limit = entry.ask.wants[at].set.limit;
        let timeout = self.settings.limits[limit].queue_timeouts[entry.ask.class];
        let later = entry.asked + timeout + self.recovery.overlap(limit, entry.asked, now);
        (limit, entry.patience.map_or(later, |patience| later.min(patience)))
    }

    fn wait_until(&mut self, id: Uuid, deadline: Instant) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.deadline = Some(deadline);
            self.deadlines.insert((deadline, id));
        }
    }

    /// When to look again although nobody has said anything.
    pub(super) fn alarm(&mut self, now: Instant) -> Instant {
        self.alarm = self.next_alarm();
        if !self.connected {
            // Heartbeats wait for a connection, but those who ask don't wait longer than an operation's timeout.
            self.alarm = self.alarm.max(now + self.settings.op_timeout / 4);
        }
        self.alarm
    }

    /// Whether there is something to do before the time last told.
    pub(super) fn alarm_moved(&self) -> bool {
        self.next_alarm() < self.alarm
    }

    fn next_alarm(&self) -> Instant {
        let mut alarm = self.next_beat;
        if let Some(&(deadline, _)) = self.deadlines.first() {
            alarm = alarm.min(deadline);
        }
        if let Some(recovered) = self.recovery.alarm {
            alarm = alarm.min(recovered);
        }
        alarm
    }

    fn expected_wait(&self, limit: usize, queue: u32) -> Option<Duration> {
        let state = &self.limits[limit];
        let slots = match state.seen.slots {
            0 => self.settings.limits[limit].set.slots,
            slots => slots,
        };
        let hold = state.hold?;
        Some(Duration::from_secs_f64(f64::from(queue + 1) * hold / f64::from(slots.max(1))))
    }
}

impl RecoveryView {
    /// How much of the time between two moments fell into the latest recovery.
    fn overlap(&self, limit: usize, from: Instant, to: Instant) -> Duration {
        let end = self.ends[limit].min(to);
        let start = self.began.max(from);
        end.saturating_duration_since(start)
    }
}

// === impl Keeper: connection ===

impl Keeper {
    /// A new connection is open: what is held is said first.
    pub(super) fn connected(&mut self, now: Instant) -> u64 {
        self.caller.epoch += 1;
        self.connected = true;
        self.next_beat = now;
        self.renew_since = now;
        self.reasserting = true;
        self.caller.epoch
    }

    /// The connection broke: every outcome that is missing is unknown, and asked for again.
    pub(super) fn disconnected(&mut self, failures: u32, now: Instant) {
        self.connected = false;
        self.cool(now);
        self.orders.clear();
        if self.leaving == Leaving::Said {
            self.leaving = Leaving::Wanted;
        }
        self.give_up_after(failures, now);
        let mut asking = Vec::new();
        for (&id, entry) in &mut self.entries {
            entry.renewed = entry.confirmed;
            match entry.phase {
                Phase::Asked | Phase::Waiting => {
                    entry.phase = Phase::New;
                    entry.again = true;
                    asking.push((entry.asked, id));
                }
                Phase::Releasing => {
                    entry.phase = Phase::Leaving;
                    self.gone.push_back(id);
                }
                Phase::New | Phase::Held | Phase::Spare | Phase::Leaving => {}
            }
        }
        // In the order in which they came, so that they queue in that order again.
        asking.sort_unstable();
        for (_, id) in asking.into_iter().rev() {
            self.new.push_front(id);
        }
    }
}
