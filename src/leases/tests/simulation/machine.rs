//! An instance: the real keeper, driven as `leases.rs` drives it, over connections that may fail.

use std::collections::VecDeque;

use super::{
    plan::OP_TIMEOUT,
    world::{Happening, World, tell},
    *,
};
use crate::store::{Call, Caller, Reply, Stale, StoreError};

const CALLS_IN_FLIGHT: usize = 2;

pub(super) struct Machine {
    pub(super) keeper: Keeper,
    pub(super) id: Uuid,
    /// What its configuration says of each limit.
    pub(super) claims: Vec<u32>,
    /// Per set of the plan.
    pub(super) sets: Vec<Arc<SetSpec>>,
    pub(super) route: Arc<str>,
    pub(super) alive: bool,
    pub(super) draining: bool,
    pub(super) frozen: bool,
    /// What happened meanwhile.
    pub(super) missed: Vec<Happening>,
    /// When it last woke up, or was killed.
    pub(super) woke: Instant,
    pub(super) partitioned: bool,
    /// Its subscription is dead, whether or not anybody has noticed.
    pub(super) deaf: bool,
    pub(super) link: Link,
    /// Of attempts to connect, to tell the latest.
    attempt: u64,
    failures: u32,
    pub(super) flights: VecDeque<Flight>,
    pub(super) inbox: Vec<Message>,
    /// The number of the latest alarm.
    pub(super) ticks: u64,
    calls: u64,
    /// Requests that ask.
    pub(super) asking: Vec<usize>,
    /// How many requests are over that it hasn't heard of.
    pub(super) unheard: usize,
    /// When a fault last touched it.
    pub(super) disturbed: Instant,
    /// When the store last answered, and when the heartbeat was sent that was last answered.
    pub(super) contact: Option<Instant>,
    pub(super) beat: Option<Instant>,
    /// How wrong its clock is, ms.
    pub(super) skew: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Opening,
    Up(usize),
    Pausing,
}

pub(super) struct Flight {
    number: u64,
    call: Call,
    sent: Instant,
}

/// A connection, as both ends and the network see it.
pub(super) struct Line {
    machine: usize,
    run: Arc<str>,
    /// The client still uses it.
    open: bool,
    /// Nothing gets through any more: commands, and answers.
    pub(super) mute: bool,
    pub(super) deaf: bool,
    /// The client is told of the break when it next sends.
    reset: bool,
    /// What becomes of commands that are under way when the client gives up is decided once.
    fated: bool,
    calls: VecDeque<(Caller, Call)>,
    last_arrival: Instant,
    last_answer: Instant,
}

impl World {
    pub(super) fn start_machine(&mut self, claims: &[u32]) {
        let id = self.new_id();
        let (plan, now) = (&self.plan, self.now);
        let sets = plan.sets.iter();
        let sets = sets.map(|set| Arc::new(plan.set_spec(&set.key, set.limit, claims[set.limit])));
        let machine = Machine {
            keeper: Keeper::new(plan.settings(id, claims), now),
            id,
            claims: claims.to_vec(),
            sets: sets.collect(),
            route: "/".into(),
            alive: true,
            draining: false,
            frozen: false,
            missed: Vec::new(),
            woke: now,
            partitioned: false,
            deaf: true,
            link: Link::Pausing,
            attempt: 0,
            failures: 0,
            flights: VecDeque::new(),
            inbox: Vec::new(),
            ticks: 0,
            calls: 0,
            asking: Vec::new(),
            unheard: 0,
            disturbed: now,
            contact: None,
            beat: None,
            skew: self.rng.i64(-31_000..31_000),
        };
        self.machines.push(machine);
        let machine = self.machines.len() - 1;
        tell!(self, "{machine} starts with {claims:?}");
        let subscribed = self.now + self.latency();
        self.plan_at(subscribed, Happening::Subscribes { machine });
        self.plan_in(Duration::ZERO, Happening::Comes { machine });
        self.open(machine);
        self.serve(machine);
    }

    // === the driver's turns ===

    /// Reads the inbox, says what is to be said, and sets the alarm.
    pub(super) fn serve(&mut self, at: usize) {
        let now = self.now;
        loop {
            let machine = &mut self.machines[at];
            for message in machine.inbox.drain(..) {
                machine.keeper.read(message, now);
            }
            machine.keeper.expire(now);
            self.deliver(at, false);
            if let Link::Up(line) = self.machines[at].link {
                while self.machines[at].flights.len() < CALLS_IN_FLIGHT
                    && let Some(call) = self.machines[at].keeper.next_call(now)
                {
                    self.send(at, line, call);
                }
            } else {
                self.machines[at].keeper.turn_away(now);
                self.deliver(at, true);
            }
            if self.machines[at].inbox.is_empty() {
                break;
            }
        }
        self.check_listed(at);
        if self.machines[at].keeper.has_left() {
            return self.is_gone(at);
        }
        let machine = &mut self.machines[at];
        let alarm = machine.keeper.alarm(now);
        machine.ticks += 1;
        let number = machine.ticks;
        if machine.flights.len() < CALLS_IN_FLIGHT {
            self.plan_at(alarm, Happening::Tick { machine: at, number });
        }
    }

    fn is_gone(&mut self, at: usize) {
        tell!(self, "{at} has left");
        self.crash(at);
    }

    fn open(&mut self, at: usize) {
        let machine = &mut self.machines[at];
        machine.attempt += 1;
        machine.link = Link::Opening;
        let attempt = machine.attempt;
        let well = self.reaches(at);
        let takes = match well || self.rng.bool() {
            true => 2 * self.latency(),
            false => OP_TIMEOUT,
        };
        self.plan_in(takes.min(OP_TIMEOUT), Happening::Opened { machine: at, attempt, well });
    }

    pub(super) fn opened(&mut self, at: usize, attempt: u64, well: bool) {
        if self.machines[at].attempt != attempt {
            return;
        }
        let (well, now) = (well && self.reaches(at), self.now);
        if well {
            let run = Arc::clone(&self.store.run);
            self.lines.push(Line {
                machine: at,
                run,
                open: true,
                mute: false,
                deaf: false,
                reset: false,
                fated: false,
                calls: VecDeque::new(),
                last_arrival: now,
                last_answer: now,
            });
            let machine = &mut self.machines[at];
            machine.link = Link::Up(self.lines.len() - 1);
            let epoch = machine.keeper.connected(now);
            tell!(self, "{at} is connected, epoch {epoch}");
        } else {
            let machine = &mut self.machines[at];
            machine.failures += 1;
            machine.keeper.give_up_after(machine.failures, now);
            self.pause(at);
        }
        self.serve(at);
    }

    fn pause(&mut self, at: usize) {
        let longest = Duration::from_millis(25) * (1 << self.machines[at].failures.min(6));
        let pause = longest.min(Duration::from_secs(1)).mul_f64(0.5 + self.rng.f64() / 2.0);
        let machine = &mut self.machines[at];
        machine.attempt += 1;
        machine.link = Link::Pausing;
        let attempt = machine.attempt;
        self.plan_in(pause, Happening::Reopen { machine: at, attempt });
    }

    pub(super) fn reopen(&mut self, at: usize, attempt: u64) {
        if self.machines[at].attempt == attempt {
            self.open(at);
            self.serve(at);
        }
    }

    // === calls and answers ===

    fn send(&mut self, at: usize, line: usize, call: Call) {
        let (now, latency) = (self.now, self.latency());
        let is_through = self.reaches(at) && !self.lines[line].mute;
        let machine = &mut self.machines[at];
        machine.calls += 1;
        let number = machine.calls;
        let caller = machine.keeper.caller().clone();
        machine.flights.push_back(Flight { number, call: call.clone(), sent: now });
        let wire = &mut self.lines[line];
        wire.calls.push_back((caller, call));
        self.plan_in(OP_TIMEOUT, Happening::TimedOut { machine: at, line, number });
        let wire = &mut self.lines[line];
        if wire.reset {
            let result = Box::new(Err(StoreError::Unavailable("reset".to_owned())));
            self.plan_in(latency, Happening::Answered { machine: at, line, result });
        } else if is_through {
            wire.last_arrival = wire.last_arrival.max(now + latency);
            let arrival = wire.last_arrival;
            self.plan_at(arrival, Happening::Arrives { line });
        } else {
            wire.mute = true;
        }
    }

    pub(super) fn arrives(&mut self, line: usize) {
        let at = self.lines[line].machine;
        let (open, same_server) = (self.lines[line].open, self.lines[line].run == self.store.run);
        if !same_server {
            self.lines[line].calls.clear();
            return;
        }
        if !self.reaches(at) {
            self.lines[line].mute = true;
            return;
        }
        if !open && !std::mem::replace(&mut self.lines[line].fated, true) && self.is_fated(line) {
            return;
        }
        let Some((caller, call)) = self.lines[line].calls.pop_front() else { return };
        if !open {
            tell!(self, "late, by epoch {} of {at}:", caller.epoch);
        }
        let run = Arc::clone(&self.lines[line].run);
        let result = self.apply(&caller, &run, &call);
        if result.is_err() {
            tell!(self, "stale: epoch {} of {at}", caller.epoch);
        }
        if self.busy && self.chance(0.05) {
            let later = self.up_to(Duration::from_secs(3));
            self.plan_in(later, Happening::Again { caller, run, call });
        }
        if open && !self.lines[line].deaf {
            let latency = self.latency();
            let wire = &mut self.lines[line];
            wire.last_answer = wire.last_answer.max(self.now + latency);
            let answered = wire.last_answer;
            let result = Box::new(result.map_err(|Stale| StoreError::Stale));
            self.plan_at(answered, Happening::Answered { machine: at, line, result });
        }
    }

    /// What was under way when the client gave a connection up is lost, or late, or just in time. True if not now.
    fn is_fated(&mut self, line: usize) -> bool {
        match self.rng.u32(..3) {
            0 => self.lines[line].calls.clear(),
            1 => self.postpone(line),
            _ => return false,
        }
        true
    }

    fn postpone(&mut self, line: usize) {
        let mut later = self.now + self.up_to(Duration::from_secs(4));
        for _ in 0..self.lines[line].calls.len() {
            self.plan_at(later, Happening::Arrives { line });
            later += self.latency();
        }
    }

    /// A call comes once more, after a newer connection was seen.
    pub(super) fn arrives_again(&mut self, caller: &Caller, run: &str, call: &Call) {
        let newest = self.store.epochs.get(&caller.instance);
        let is_old = newest.is_some_and(|newest| caller.epoch < *newest);
        if is_old && self.store.up && *run == *self.store.run {
            tell!(
                self,
                "once more, by epoch {} of {:?}:",
                caller.epoch,
                self.machine_of(caller.instance)
            );
            let _ = self.apply(caller, run, call);
        }
    }

    pub(super) fn answered(&mut self, at: usize, line: usize, result: Result<Reply, StoreError>) {
        let now = self.now;
        let machine = &mut self.machines[at];
        if machine.link != Link::Up(line) {
            return;
        }
        let Some(flight) = machine.flights.pop_front() else { return };
        let broken = result.is_err();
        if !broken {
            machine.contact = Some(now);
            if flight.call.heartbeat.is_some() {
                machine.beat = Some(flight.sent);
            }
        }
        machine.keeper.on_reply(flight.call, flight.sent, now, result);
        self.deliver(at, false);
        if broken {
            self.gives_up(at);
        } else {
            self.machines[at].failures = 0;
        }
        self.serve(at);
    }

    pub(super) fn timed_out(&mut self, at: usize, line: usize, number: u64) {
        let now = self.now;
        let machine = &mut self.machines[at];
        if machine.link != Link::Up(line) {
            return;
        }
        let Some(place) = machine.flights.iter().position(|flight| flight.number == number) else {
            return;
        };
        tell!(self, "{at} waits for an answer in vain");
        let machine = &mut self.machines[at];
        if let Some(flight) = machine.flights.remove(place) {
            machine.keeper.on_reply(flight.call, flight.sent, now, Err(StoreError::Timeout));
        }
        self.deliver(at, false);
        self.gives_up(at);
        self.serve(at);
    }

    pub(super) fn broke(&mut self, at: usize, line: usize) {
        self.lines[line].mute = true;
        self.lines[line].deaf = true;
        self.lines[line].reset = true;
        if self.machines[at].link == Link::Up(line) && !self.machines[at].flights.is_empty() {
            self.answered(at, line, Err(StoreError::Unavailable("reset".to_owned())));
        }
    }

    /// A connection that can't be trusted any more.
    fn gives_up(&mut self, at: usize) {
        tell!(self, "{at} gives its connection up");
        let now = self.now;
        let machine = &mut self.machines[at];
        machine.failures += 1;
        machine.keeper.disconnected(machine.failures, now);
        machine.flights.clear();
        self.close_line(at);
        self.pause(at);
    }

    /// Nobody reads its answers any more; what was said may still arrive.
    pub(super) fn close_line(&mut self, at: usize) {
        if let Link::Up(line) = self.machines[at].link {
            self.lines[line].open = false;
            if self.lines[line].mute && self.rng.bool() {
                self.postpone(line);
            }
        }
    }

    // === the subscription ===

    pub(super) fn subscribes(&mut self, at: usize) {
        if self.reaches(at) {
            let id = self.machines[at].id;
            self.store.ledger.listeners.insert(id);
            self.machines[at].deaf = false;
            self.machines[at].inbox.push(Message::Event(Event::Subscribed));
            self.serve(at);
        } else {
            let again = self.up_to(Duration::from_secs(1));
            self.plan_in(again, Happening::Subscribes { machine: at });
        }
    }

    pub(super) fn hears(&mut self, at: usize, event: Event) {
        tell!(self, "{at} hears {event:?}");
        if event == Event::Unsubscribed {
            self.store.ledger.listeners.remove(&self.machines[at].id);
        }
        self.machines[at].inbox.push(Message::Event(event));
        self.serve(at);
    }

    /// The client notices at once or later; the server may count it as a listener until then.
    pub(super) fn loses_subscription(&mut self, at: usize) {
        self.machines[at].deaf = true;
        if self.rng.bool() {
            self.store.ledger.listeners.remove(&self.machines[at].id);
        }
        let noticed = self.up_to(Duration::from_secs(1));
        let event = Event::Unsubscribed;
        self.plan_in(noticed, Happening::Pushed { machine: at, event });
        let again = noticed + self.up_to(Duration::from_secs(2));
        self.plan_in(again, Happening::Subscribes { machine: at });
    }
}
