//! The lease keeper: the one owner of every command that goes to the store.
//!
//! Requests hold handles: a [`Pending`] while they ask, a [`Lease`] once they hold slots. Both give everything back by
//! being dropped, which puts one message into the inbox and never blocks. The keeper (`keeper.rs`) is a state machine
//! without I/O. It is driven by an ordered connection (`task.rs`), or, where the store answers at once, on the thread of whoever
//! has something to say (`combine`).

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};
use uuid::Uuid;

use crate::store::{Ask, Event, LocalStore, SetState, SlotStore};

mod cutter;
mod guard;
mod keeper;
mod task;

use cutter::Cutter;
pub use guard::Guard;
pub use keeper::{Alone, LimitSettings, Refused, Settings, WhenDown, Why};
use keeper::{Answer, AtOnce, Keeper, Message};

const NEVER_STALE: &str = "a store inside the process knows one connection of each instance";

/// A handle to the keeper of this instance.
#[derive(Clone, Debug)]
pub struct Leases {
    desk: Arc<Desk>,
}

/// What handles and keeper share.
#[derive(Debug)]
struct Desk {
    store: Arc<dyn SlotStore>,
    inbox: Mutex<Vec<Message>>,
    keeper: Mutex<Keeper>,
    /// Whether slots of any limit may be kept warm.
    is_warm: AtomicBool,
    /// Whether anybody waits, as far as is known.
    is_crowded: AtomicBool,
    cutter: Cutter,
    wake: Notify,
    idle: Notify,
}

/// Slots that are held. Dropping it gives them back.
#[must_use = "dropping a lease gives its slots back"]
#[derive(Debug)]
pub struct Lease {
    desk: Arc<Desk>,
    slots: Slots,
    taken: Instant,
    shadow: Option<Refused>,
    fence: Option<u64>,
    guard: Option<Guard>,
}

/// How a lease says which slots it gives back.
#[derive(Debug)]
enum Slots {
    /// The keeper has them listed under this id.
    Listed(Uuid),
    /// They were taken at once; none after they were given back.
    AtOnce(Option<Ask>),
}

/// A request for slots, under way. Dropping it takes the request back, whatever became of it.
#[must_use = "dropping it takes the request back"]
#[derive(Debug)]
pub struct Pending(Awaited);

#[derive(Debug)]
enum Awaited {
    /// The slots were there at once; none after they were handed over.
    Told(Option<Lease>),
    /// What the keeper will say.
    Word(Word),
}

#[derive(Debug)]
struct Word {
    desk: Arc<Desk>,
    id: Uuid,
    answer: oneshot::Receiver<Result<Lease, Refused>>,
    answered: bool,
}

/// What the keeper knows of the store.
#[derive(Clone, Debug)]
pub struct Outlook {
    /// Whether the store answers.
    pub up: bool,
    /// Whether requests are settled without it meanwhile.
    pub away: bool,
    /// Whether they can be served then.
    pub has_fallback: bool,
    /// What this instance has of each limit while the store is out of reach.
    pub shares: Vec<u32>,
    /// How many requests were admitted without the store.
    pub alone: Alone,
    /// How many holders the store had lost and counts again.
    pub readded: u64,
    /// Whether a first heartbeat was answered and its recovery is over.
    pub started: bool,
    /// Whether any set is in recovery.
    pub recovering: bool,
    /// How long ago the last heartbeat was answered, which `sets` and `instances` are of.
    pub seen: Duration,
    /// The sets as of the last heartbeat, each at its place.
    pub sets: Vec<SetState>,
    /// Who waits here and now, per set and class: how many, and for how long the oldest.
    pub waiting: Vec<Vec<(u32, Duration)>>,
    /// Slots that this instance holds, per set.
    pub local: Vec<u32>,
    /// Requests a second that asked this instance for a slot, per limit.
    pub arrival_rate: Vec<f64>,
    /// Every instance that the store has heard of lately, and how long ago that is; this one, which is here.
    pub instances: Vec<(Uuid, Duration)>,
    /// How long an instance may be silent until it counts as gone.
    pub presence: Duration,
    /// Mean hold time, per set, where one was measured.
    pub hold: Vec<Option<Duration>>,
    /// How this instance's slots stand with the store, per limit.
    pub standing: Vec<Standing>,
}

/// How this instance's slots of a limit stand with the store.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    /// Those of requests that the store counts: confirmed within a lease.
    pub counted: u32,
    /// Those that are kept for the next request.
    pub spare: u32,
    /// How long the most overdue renewal is overdue.
    pub renew_lag: Duration,
}

impl Outlook {
    /// The instances that were silent for too long when the store was last heard of. Later than that nobody can tell.
    pub fn gone(&self) -> impl Iterator<Item = Uuid> {
        let latest = self.presence + self.seen;
        self.instances.iter().filter(move |(_, heard)| *heard > latest).map(|(id, _)| *id)
    }

    /// Of these places only, in this order.
    #[must_use]
    pub fn of(self, places: &[usize]) -> Self {
        fn pick<T: Clone>(all: &[T], places: &[usize]) -> Vec<T> {
            places.iter().map(|&place| all[place].clone()).collect()
        }
        Self {
            shares: pick(&self.shares, places),
            sets: pick(&self.sets, places),
            waiting: pick(&self.waiting, places),
            local: pick(&self.local, places),
            arrival_rate: pick(&self.arrival_rate, places),
            hold: pick(&self.hold, places),
            standing: pick(&self.standing, places),
            ..self
        }
    }
}

// === impl Leases ===

impl Leases {
    /// Starts the keeper of an instance on the current runtime.
    pub fn start(store: Arc<dyn SlotStore>, settings: Settings) -> Self {
        let instance = settings.instance;
        let desk = Arc::new(Desk {
            is_warm: settings.is_warm().into(),
            keeper: Mutex::new(Keeper::new(settings, Instant::now())),
            inbox: Mutex::new(Vec::new()),
            is_crowded: AtomicBool::new(false),
            cutter: Cutter::default(),
            wake: Notify::new(),
            idle: Notify::new(),
            store: Arc::clone(&store),
        });
        let weak = Arc::downgrade(&desk);
        store.subscribe(
            instance,
            Arc::new(move |event| {
                let Some(desk) = weak.upgrade() else { return };
                match event {
                    Event::Evicted(holder) => _ = desk.cutter.cut(holder),
                    event => desk.say(Message::Event(event)),
                }
            }),
        );
        let keeper = tokio::spawn(task::run(Arc::clone(&desk)));
        tokio::spawn(async move {
            // Without renewals the slots of running requests would be given to others.
            if keeper.await.is_err_and(|error| error.is_panic()) {
                tracing::error!(
                    "the lease keeper failed; the process can't go on without renewals"
                );
                std::process::abort();
            }
        });
        Self { desk }
    }

    /// Asks for slots. `ask.id` was never used before; at the deadline, if there is one, the client gives up by itself.
    pub fn acquire(&self, ask: Ask, deadline: Option<Instant>) -> Pending {
        let (desk, id, now) = (&self.desk, ask.id, Instant::now());
        if (desk.is_warm() || desk.store.local().is_some())
            && let Ok(mut keeper) = desk.keeper.try_lock()
        {
            if let Some(slots) = keeper.reuse(&ask, now) {
                desk.leave_for_good(keeper);
                return Pending::told(desk, slots, now);
            }
            if let Some(store) = desk.store.local()
                && keeper.is_open()
            {
                return desk.acquire_at_once(store, keeper, ask, deadline, now);
            }
        }
        let (sender, answer) = oneshot::channel();
        let pending = Pending::waiting(desk, id, answer);
        desk.say(Message::Acquire { ask, asked: now, deadline, answer: sender });
        pending
    }

    /// Goes on by other settings. Who holds keeps what it has and who waits its place; a limit that is named no more
    /// stays for them.
    pub fn adopt(&self, settings: Settings) {
        self.desk.is_warm.store(settings.is_warm(), Relaxed);
        self.desk.look(|keeper| keeper.adopt(settings, Instant::now()));
    }

    /// Orders other slots for a limit, fleet-wide, above what configurations claim; none ends that. False if the order
    /// may not have reached the store.
    pub async fn set_slots(&self, limit: usize, slots: Option<u32>) -> bool {
        let (done, answer) = oneshot::channel();
        self.desk.say(Message::SetSlots { limit, slots, done });
        answer.await.is_ok()
    }

    /// Names whoever ends a request by its holder, and says whether it was there. The first one stays.
    pub fn cut_by(&self, cut: impl Fn(Uuid) -> bool + Send + Sync + 'static) {
        self.desk.cutter.set(Box::new(cut));
    }

    /// Ends a request of this instance; false if none runs under that holder.
    pub fn cut(&self, holder: Uuid) -> bool {
        self.desk.cutter.cut(holder)
    }

    /// Refuses whoever waits or comes, from now on.
    pub fn drain(&self) {
        self.desk.say(Message::Drain);
    }

    /// Waits until every slot is given back, then takes leave of the store; not longer than `patience`.
    pub async fn leave(&self, patience: Duration) {
        self.desk.say(Message::Leave);
        let left = async {
            loop {
                let idle = self.desk.idle.notified();
                if self.desk.look(|keeper| keeper.has_left()) {
                    return;
                }
                idle.await;
            }
        };
        let _ = tokio::time::timeout(patience, left).await;
    }

    /// This instance's id.
    pub fn instance(&self) -> Uuid {
        self.desk.look(|keeper| keeper.caller().instance)
    }

    /// What is known now.
    pub fn outlook(&self) -> Outlook {
        self.desk.look(|keeper| keeper.outlook(Instant::now()))
    }
}

// === impl Desk ===

impl Desk {
    fn is_warm(&self) -> bool {
        self.is_warm.load(Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(|_| std::process::abort())
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<Message>> {
        self.inbox.lock().expect("nothing panics while the inbox is locked")
    }

    fn say(self: &Arc<Self>, message: Message) {
        self.inbox().push(message);
        if self.store.local().is_some() {
            self.combine();
        } else {
            self.wake.notify_one();
        }
    }

    /// Works off the inbox, unless somebody else does: then that one looks again before it goes.
    fn combine(self: &Arc<Self>) {
        let store = self.store.local().expect("combining needs a store that answers at once");
        loop {
            let mut keeper = match self.keeper.try_lock() {
                Ok(keeper) => keeper,
                Err(TryLockError::WouldBlock) => return,
                Err(TryLockError::Poisoned(_)) => std::process::abort(),
            };
            let now = Instant::now();
            self.read_inbox(&mut keeper, now);
            while let Some(call) = keeper.next_call(now) {
                let reply = store.apply(keeper.caller(), &call);
                keeper.on_reply(call, now, now, reply);
            }
            self.leave(keeper);
            if self.inbox().is_empty() {
                return;
            }
        }
    }

    /// Asks the store on the spot, without a way through the inbox.
    fn acquire_at_once(
        self: &Arc<Self>,
        store: &dyn LocalStore,
        mut keeper: MutexGuard<'_, Keeper>,
        ask: Ask,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Pending {
        let id = ask.id;
        let acquire = keeper.ask_at_once(ask);
        let reply = store.acquire(keeper.caller(), &acquire).expect(NEVER_STALE);
        let became = keeper.on_asked_at_once(acquire, reply, deadline, now);
        self.leave_for_good(keeper);
        match became {
            AtOnce::Taken { ask, shadow, fence } => {
                let (desk, slots) = (Arc::clone(self), Slots::AtOnce(Some(ask)));
                let lease = Lease { desk, slots, taken: now, shadow, fence, guard: None };
                Pending(Awaited::Told(Some(lease)))
            }
            AtOnce::Later(answer) => Pending::waiting(self, id, answer),
        }
    }

    /// Gives back on the spot what was taken so.
    fn give_back(self: &Arc<Self>, ask: Ask, taken: Instant) {
        if let Some(store) = self.store.local()
            && let Ok(mut keeper) = self.keeper.try_lock()
        {
            let now = Instant::now();
            let release = keeper.give_back_at_once(ask, taken, now);
            let reply = store.release(keeper.caller(), &release).expect(NEVER_STALE);
            keeper.on_given_back(&reply, now);
            self.leave_for_good(keeper);
        } else {
            self.say(Message::GiveBack { ask, taken });
        }
    }

    /// Keeps slots for the next request here; false if they are to be given back.
    fn keep_warm(self: &Arc<Self>, slots: &mut Slots, taken: Instant) -> bool {
        let Ok(mut keeper) = self.keeper.try_lock() else { return false };
        let is_kept = keeper.keep_warm(slots, taken, Instant::now());
        self.leave_for_good(keeper);
        is_kept
    }

    /// Looks at the keeper, or changes something in passing.
    fn look<T>(self: &Arc<Self>, look: impl FnOnce(&mut Keeper) -> T) -> T {
        let mut keeper = self.lock();
        let seen = look(&mut keeper);
        self.leave_for_good(keeper);
        seen
    }

    /// Lets go of the keeper, and works off what others could not say meanwhile.
    fn leave_for_good(self: &Arc<Self>, keeper: MutexGuard<'_, Keeper>) {
        self.leave(keeper);
        if self.store.local().is_some() && !self.inbox().is_empty() {
            self.combine();
        }
    }

    /// Lets go of the keeper; whoever sleeps until its next alarm hears if that moved.
    fn leave(self: &Arc<Self>, keeper: MutexGuard<'_, Keeper>) {
        let rearm = keeper.alarm_moved();
        self.deliver(keeper);
        if rearm {
            self.wake.notify_one();
        }
    }

    fn read_inbox(&self, keeper: &mut Keeper, now: Instant) {
        let mut messages = keeper.spare();
        std::mem::swap(&mut *self.inbox(), &mut messages);
        for message in messages.drain(..) {
            keeper.read(message, now);
        }
        keeper.keep_spare(messages);
        keeper.expire(now);
    }

    /// Tells requests what became of them. One that is gone drops its lease, which is a message like any other.
    fn deliver(self: &Arc<Self>, mut keeper: MutexGuard<'_, Keeper>) {
        let answers = keeper.take_answers();
        let left = keeper.has_left();
        self.is_crowded.store(keeper.is_crowded(), Relaxed);
        drop(keeper);
        for answer in answers {
            let Answer { id, to, outcome, shadow, fence, guard } = answer;
            let lease = |taken| {
                let (desk, slots) = (Arc::clone(self), Slots::Listed(id));
                Lease { desk, slots, taken, shadow, fence, guard }
            };
            let outcome = outcome.map(lease);
            let _ = to.send(outcome);
        }
        if left {
            self.idle.notify_waiters();
        }
    }
}

// === impl Lease and Pending ===

impl Lease {
    /// What a limit or a rate in shadow mode would have said.
    pub fn shadow(&self) -> Option<Refused> {
        self.shadow
    }

    /// The number of the grant, higher than of any before, where one of the sets is fenced.
    pub fn fence(&self) -> Option<u64> {
        self.fence
    }

    /// The id under which the slots are taken: of the request, or of one whose slots were handed on.
    pub fn holder(&self) -> Uuid {
        match &self.slots {
            Slots::Listed(id) => *id,
            Slots::AtOnce(ask) => ask.as_ref().map(|ask| ask.id).unwrap_or_default(),
        }
    }

    /// Tells until when the request may rely on its slots, if it is to be cut then.
    pub fn guard(&self) -> Option<&Guard> {
        self.guard.as_ref()
    }

    /// Whether somebody waits for slots of the store's, as far as is known here; of whichever limit.
    pub fn is_awaited(&self) -> bool {
        self.desk.is_crowded.load(Relaxed)
    }

    /// When the slots were taken, by this instance's clock.
    pub fn taken(&self) -> Instant {
        self.taken
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.desk.is_warm() && self.desk.keep_warm(&mut self.slots, self.taken) {
            return;
        }
        match &mut self.slots {
            Slots::Listed(id) => self.desk.say(Message::Release(*id)),
            Slots::AtOnce(ask) => {
                if let Some(ask) = ask.take() {
                    self.desk.give_back(ask, self.taken);
                }
            }
        }
    }
}

impl Pending {
    fn told(desk: &Arc<Desk>, slots: Slots, taken: Instant) -> Self {
        let desk = Arc::clone(desk);
        Self(Awaited::Told(Some(Lease {
            desk,
            slots,
            taken,
            shadow: None,
            fence: None,
            guard: None,
        })))
    }

    fn waiting(
        desk: &Arc<Desk>,
        id: Uuid,
        answer: oneshot::Receiver<Result<Lease, Refused>>,
    ) -> Self {
        Self(Awaited::Word(Word { desk: Arc::clone(desk), id, answer, answered: false }))
    }
}

impl Future for Pending {
    type Output = Result<Lease, Refused>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Awaited::Told(lease) => Poll::Ready(lease.take().ok_or(Refused::GONE)),
            Awaited::Word(word) => {
                let answer = std::task::ready!(Pin::new(&mut word.answer).poll(context));
                word.answered = true;
                Poll::Ready(answer.unwrap_or(Err(Refused::GONE)))
            }
        }
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        if !self.answered {
            self.desk.say(Message::Release(self.id));
        }
    }
}

#[cfg(test)]
mod tests;
