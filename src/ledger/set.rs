//! The rules of one semaphore: who holds, who waits, who is next.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use uuid::Uuid;

use super::{
    Acquire, Beat, CLOCK_SLACK, ClassSpec, Context, GRANTS_PER_CALL, LIVE_STEP, Notice, Override,
    Released, Renew, Renewed, SetSpec, SetState, Shed,
};

mod beat;
mod grant;
mod holders;
#[cfg(test)]
mod testing;

/// One semaphore.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Set {
    /// Holder → score (when the lease was taken or renewed) and weight.
    slots: HashMap<Uuid, (i64, u32)>,
    by_score: BTreeSet<(i64, Uuid)>,
    used: u32,
    /// What is known of holders and waiters that came through Tidegate. Plain clients have none.
    info: HashMap<Uuid, Info>,
    /// Per class of the table: ticket → waiter.
    wait: Vec<BTreeMap<u64, Uuid>>,
    /// The classes that the caller knows, then those that only others know.
    table: Vec<ClassSpec>,
    /// The caller's, as they came.
    known: Arc<[ClassSpec]>,
    meta: Meta,
    /// What the operation under way has changed, until [`Set::finish`].
    changed: Changed,
}

/// Whether members went, and how long those that came will stay.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Changed {
    removed: bool,
    until: i64,
    lowered: bool,
}

/// The small facts of a semaphore.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Meta {
    /// N in force.
    slots: Option<u32>,
    /// The lease in force.
    lease: i64,
    waiting: u32,
    ticket: Option<u64>,
    /// The recovery after which scores from the future were purged.
    swept: i64,
    /// Whether a purge may have left infos behind.
    dirty: bool,
    /// Instance → slots and lease of its configuration.
    claims: HashMap<Uuid, (u32, i64)>,
    /// Instance → how many of the waiters are its own.
    waiters: HashMap<Uuid, u32>,
    /// Granted id → instance, until its owner confirms.
    pending: HashMap<Uuid, Uuid>,
    order: Option<Override>,
}

/// What is known of a holder or a waiter.
#[derive(Debug, Clone)]
pub(super) struct Info {
    instance: Uuid,
    route: Arc<str>,
    class: usize,
    weight: u32,
    /// When it took its slots, or while it waits, when it began to wait.
    at: i64,
    /// Its ticket while it waits, else 0.
    ticket: u64,
}

/// What [`Set::take`] did.
pub(super) enum Take {
    Taken,
    /// Taken all the same.
    Shadowed(Shed),
    Waiting {
        queue: u32,
    },
    Shed(Shed),
}

/// A set for those who look at it.
#[derive(Clone, Debug, Default)]
pub struct SetStatus {
    /// N in force.
    pub slots: u32,
    /// The lease in force, ms; 0 where the store doesn't know the set.
    pub lease: i64,
    /// Slots taken by holders whose lease isn't over.
    pub used: u32,
    /// Per class: how many wait, and for how long the oldest has, ms.
    pub waiting: Vec<(u32, i64)>,
    /// Slots by instance.
    pub by_instance: HashMap<Uuid, u32>,
    /// When the latest recovery started, store's ms.
    pub recovery: i64,
    /// When this was looked at, store's ms.
    pub now: i64,
}

/// The cap of a class: its share of the slots, at least one.
fn cap(classes: &[ClassSpec], class: usize, slots: u32) -> u32 {
    let share = classes.get(class).map_or(1.0, |class| class.share);
    let part = (share * f64::from(slots)).floor() as u32;
    part.max(1).min(slots)
}

// === impl Set: policy, loss, purge ===

impl Set {
    /// Notices a loss, and claims the caller's policy where there is none.
    pub(super) fn open(&mut self, context: &mut Context<'_>, spec: &SetSpec) {
        let live = context.fleet.live.get(&spec.key).copied().unwrap_or(0);
        if !Arc::ptr_eq(&self.known, &spec.classes) {
            self.see_as(&spec.classes);
        }
        let lost = live > context.now && (self.slots.is_empty() || self.meta.slots.is_none());
        if self.meta.slots.is_none() {
            self.claim_policy(context, spec);
        }
        if lost {
            context.fleet.recovery = context.now;
            context.fleet.live.remove(&spec.key);
        }
    }

    /// Puts the caller's classes first. Those that it doesn't know come behind them, whoever waits there.
    fn see_as(&mut self, known: &Arc<[ClassSpec]>) {
        let is_known = |class: &ClassSpec| known.iter().any(|known| known.name == class.name);
        let others = self.table.iter().filter(|class| !is_known(class)).cloned();
        let mut others = Vec::from_iter(others);
        others.sort_by(|a, b| a.name.cmp(&b.name));
        let before =
            std::mem::replace(&mut self.table, known.iter().cloned().chain(others).collect());
        let place = |class: &ClassSpec| self.table.iter().position(|new| new.name == class.name);
        let places: Vec<usize> = before.iter().filter_map(place).collect();
        let mut queues = vec![BTreeMap::new(); self.table.len()];
        for (queue, &place) in self.wait.drain(..).zip(&places) {
            queues[place] = queue;
        }
        self.wait = queues;
        for info in self.info.values_mut() {
            info.class = places[info.class];
        }
        self.known = Arc::clone(known);
    }

    /// What a heartbeat does beyond [`Set::open`].
    pub(super) fn refresh(&mut self, context: &mut Context<'_>, spec: &SetSpec) {
        let claim = (spec.slots, spec.lease);
        if self.meta.claims.get(&context.caller.instance) != Some(&claim) {
            self.claim_policy(context, spec);
        }
        self.purge(context, spec);
        self.sweep(context, spec);
    }

    fn claim_policy(&mut self, context: &mut Context<'_>, spec: &SetSpec) {
        self.meta.claims.insert(context.caller.instance, (spec.slots, spec.lease));
        self.settle_policy(context);
    }

    fn recovering(&self, context: &Context<'_>, spec: &SetSpec) -> bool {
        context.fleet.recovery > 0 && context.now < context.fleet.recovery + spec.recovery
    }

    /// N in force = the lowest claim of living instances. Lease in force = the longest of those seen within it.
    fn settle_policy(&mut self, context: &mut Context<'_>) {
        let me = context.caller.instance;
        let claims = || self.meta.claims.iter();
        let slots = claims()
            .filter(|&(&instance, _)| instance == me || context.living(instance))
            .map(|(_, &(slots, _))| slots)
            .min();
        let lease = claims()
            .filter(|&(&instance, &(_, lease))| {
                instance == me || context.seen_within(instance, lease)
            })
            .map(|(_, &(_, lease))| lease)
            .max();
        let (Some(slots), Some(lease)) = (slots, lease) else {
            return;
        };
        let slots = self.overridden(slots);
        if self.meta.slots.is_some() && self.meta.lease != lease {
            context.fleet.recovery = context.now;
        }
        let lowered = self.meta.slots.is_some_and(|before| slots < before);
        self.meta.slots = Some(slots);
        self.meta.lease = lease;
        self.changed.lowered |= lowered && slots > 0;
    }

    /// The slots in force, where the claims alone would say this.
    fn overridden(&mut self, claimed: u32) -> u32 {
        let Some(order) = &mut self.meta.order else { return claimed };
        let Some(slots) = order.slots else { return claimed };
        if self.meta.claims.values().all(|(claim, _)| order.claims.contains(claim)) {
            return slots;
        }
        *order = Override { version: order.version + 1, slots: None, claims: Vec::new() };
        claimed
    }

    /// Takes over what an instance remembers, and what an operator orders.
    pub(super) fn obey(&mut self, beat: &Beat) {
        let version = |order: &Option<Override>| order.as_ref().map_or(0, |order| order.version);
        if version(&beat.known) > version(&self.meta.order) {
            self.meta.order.clone_from(&beat.known);
        }
        if let Some(slots) = beat.order {
            let mut claims = Vec::from_iter(self.meta.claims.values().map(|(slots, _)| *slots));
            claims.push(beat.set.slots);
            claims.sort_unstable();
            claims.dedup();
            let version = version(&self.meta.order) + 1;
            let claims = if slots.is_some() { claims } else { Vec::new() };
            self.meta.order = Some(Override { version, slots, claims });
        }
    }

    /// After the slots were lowered: waiters that will never fit ask again, and are told so.
    pub(super) fn drop_too_heavy(&mut self, context: &mut Context<'_>) {
        let slots = self.meta.slots.unwrap_or(0);
        if !std::mem::take(&mut self.changed.lowered) {
            return;
        }
        for class in 0..self.wait.len() {
            let cap = cap(&self.table, class, slots);
            let heavy = |id: &Uuid| self.info.get(id).is_some_and(|info| info.weight > cap);
            let heavy: Vec<Uuid> =
                self.wait[class].values().filter(|id| heavy(id)).copied().collect();
            for id in heavy {
                let instance = self.info.get(&id).map(|info| info.instance);
                self.dequeue(id, class);
                if let Some(instance) = instance {
                    context.notify(instance, id, Notice::Granted);
                }
            }
        }
    }

    /// Drops members whose lease is over: before anyone is refused, made to wait, or granted a slot.
    fn purge(&mut self, context: &Context<'_>, spec: &SetSpec) {
        if self.recovering(context, spec) {
            return;
        }
        let oldest = context.now - self.meta.lease;
        while let Some(&(score, id)) = self.by_score.first()
            && score < oldest
        {
            self.remove_slot(id);
            self.meta.dirty = true;
        }
    }

    /// After a recovery: members from the future are left over from a clock that went back.
    fn sweep(&mut self, context: &Context<'_>, spec: &SetSpec) {
        if self.recovering(context, spec) || self.meta.swept == context.fleet.recovery {
            return;
        }
        self.meta.swept = context.fleet.recovery;
        while let Some(&(score, id)) = self.by_score.last()
            && score > context.now + CLOCK_SLACK
        {
            self.remove_slot(id);
            self.meta.dirty = true;
        }
    }

    /// Ends an operation: rewrites `live_until`, the latest end of a lease among our own members. While members come
    /// and go it may lie too far ahead, never too near; it goes when the set is empty or holds plain clients alone.
    pub(super) fn finish(&mut self, context: &mut Context<'_>, spec: &SetSpec) {
        let changed = std::mem::take(&mut self.changed);
        if changed.removed && (self.slots.is_empty() || self.info.is_empty()) {
            context.fleet.live.remove(&spec.key);
            return;
        }
        match context.fleet.live.get_mut(&spec.key) {
            Some(live) if *live >= changed.until => {}
            Some(live) => *live = changed.until + LIVE_STEP,
            None if changed.until == 0 => {}
            None => {
                context.fleet.live.insert(Arc::clone(&spec.key), changed.until + LIVE_STEP);
            }
        }
    }
}

// === impl Set: take, wait, give back ===

impl Set {
    /// Takes slots for one want, or waits, or says why not.
    pub(super) fn take(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        acquire: &Acquire,
        weight: u32,
    ) -> Take {
        let id = acquire.ask.id;
        if acquire.again {
            if self.slots.contains_key(&id) {
                self.meta.pending.remove(&id);
                self.put_slot(id, context.now, weight);
                context.tell_by_outcome(id);
                self.fence(context, spec, id);
                return Take::Taken;
            }
            if self.ticket_of(id, acquire.ask.class).is_some() {
                return Take::Waiting { queue: self.line(acquire.ask.class) };
            }
        }
        if spec.shadow {
            let would = self.would_shed(context, spec, acquire, weight);
            self.admit(context, spec, acquire, weight);
            return would.map_or(Take::Taken, Take::Shadowed);
        }
        let (class, slots) = (acquire.ask.class, self.meta.slots.unwrap_or(0));
        let cap = cap(&spec.classes, class, slots);
        if slots > 0 && weight > cap {
            return Take::Shed(Shed::TooHeavy);
        }
        let recovering = self.recovering(context, spec);
        if self.meta.waiting > 0 || self.used + weight > cap {
            self.purge(context, spec);
        }
        if !recovering && self.meta.waiting == 0 && self.used + weight <= cap {
            self.admit(context, spec, acquire, weight);
            return Take::Taken;
        }
        let room = self.has_room(spec, acquire);
        if !recovering && self.meta.waiting > 0 && self.used < slots {
            return self.take_by_turn(context, spec, acquire, weight, room);
        }
        if room || self.displace_for(context, spec, acquire) {
            self.enqueue(context, spec, acquire, weight);
            return Take::Waiting { queue: self.line(class) };
        }
        Take::Shed(self.no_room(context, spec, acquire))
    }

    fn admit(&mut self, context: &mut Context<'_>, spec: &SetSpec, acquire: &Acquire, weight: u32) {
        let id = acquire.ask.id;
        self.fence(context, spec, id);
        self.put_slot(id, context.now, weight);
        self.info.insert(id, Info::of(context, acquire, weight, context.now, 0));
    }

    /// A number that rises with every grant. It is the fleet's, since an idle set is forgotten, and never below the time in
    /// microseconds, should the fleet's be lost as well.
    fn fence(&self, context: &mut Context<'_>, spec: &SetSpec, id: Uuid) {
        if spec.fenced {
            let fence = (context.fleet.fence + 1).max(context.now.unsigned_abs() * 1_000);
            context.fleet.fence = fence;
            context.fences.push((id, fence));
        }
    }

    /// What a set in shadow mode would say, if it would say no.
    fn would_shed(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        acquire: &Acquire,
        weight: u32,
    ) -> Option<Shed> {
        let slots = self.meta.slots.unwrap_or(0);
        let cap = cap(&spec.classes, acquire.ask.class, slots);
        if slots > 0 && weight > cap {
            return Some(Shed::TooHeavy);
        }
        if self.used + weight > cap {
            self.purge(context, spec);
        }
        let fits = !self.recovering(context, spec) && self.used + weight <= cap;
        (!fits && !self.has_room(spec, acquire)).then(|| self.no_room(context, spec, acquire))
    }

    fn has_room(&self, spec: &SetSpec, acquire: &Acquire) -> bool {
        let class = acquire.ask.class;
        let of_class = self.wait.get(class).map_or(0, BTreeMap::len) as u32;
        acquire.may_wait && self.meta.waiting < spec.queue && of_class < spec.classes[class].queue
    }

    fn no_room(&self, context: &Context<'_>, spec: &SetSpec, acquire: &Acquire) -> Shed {
        let class = acquire.ask.class;
        let never_waits = !acquire.may_wait || spec.queue == 0 || spec.classes[class].queue == 0;
        if never_waits && self.recovering(context, spec) {
            return Shed::Recovering;
        }
        Shed::Full { queue: self.line(class) }
    }

    /// Waiters of this class and higher ones.
    fn line(&self, class: usize) -> u32 {
        self.wait.iter().take(class + 1).map(BTreeMap::len).sum::<usize>() as u32
    }

    /// The queue is full: the youngest waiter of the lowest class goes, if that class is lower than the newcomer's.
    fn displace_for(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        acquire: &Acquire,
    ) -> bool {
        let class = acquire.ask.class;
        let of_class = self.wait.get(class).map_or(0, BTreeMap::len) as u32;
        if !acquire.may_wait || of_class >= spec.classes[class].queue || spec.queue == 0 {
            return false;
        }
        let lowest = (class + 1..self.wait.len()).rev().find(|&lower| !self.wait[lower].is_empty());
        let Some(lowest) = lowest else { return false };
        let Some((_, id)) = self.wait[lowest].pop_last() else { return false };
        let instance = self.info.remove(&id).map(|info| info.instance);
        self.uncount_waiter(instance);
        if let Some(instance) = instance {
            context.notify(instance, id, Notice::Displaced);
        }
        true
    }

    /// A slot is free although others wait: the newcomer stands in line with them for it, and never jumps the queue.
    fn take_by_turn(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        acquire: &Acquire,
        weight: u32,
        room: bool,
    ) -> Take {
        let (id, class) = (acquire.ask.id, acquire.ask.class);
        self.enqueue(context, spec, acquire, weight);
        self.grant(context, spec);
        if self.slots.contains_key(&id) {
            context.tell_by_outcome(id);
            return Take::Taken;
        }
        if room || self.displace_for(context, spec, acquire) {
            return Take::Waiting { queue: self.line(class) };
        }
        self.dequeue(id, class);
        Take::Shed(self.no_room(context, spec, acquire))
    }

    fn enqueue(
        &mut self,
        context: &mut Context<'_>,
        spec: &SetSpec,
        acquire: &Acquire,
        weight: u32,
    ) {
        if spec.warm && self.meta.waiting == 0 {
            context.call_for_slots();
        }
        // Above every standing ticket, also where the counter was lost: order survives.
        let standing =
            || self.wait.iter().filter_map(|queue| queue.keys().next_back()).max().copied();
        let ticket = self.meta.ticket.or_else(standing).unwrap_or(0) + 1;
        self.meta.ticket = Some(ticket);
        self.wait[acquire.ask.class].insert(ticket, acquire.ask.id);
        let began = context.now - acquire.waited;
        self.info.insert(acquire.ask.id, Info::of(context, acquire, weight, began, ticket));
        self.meta.waiting += 1;
        *self.meta.waiters.entry(context.caller.instance).or_default() += 1;
    }

    /// Removes an id from slots or queue.
    pub(super) fn give_back(&mut self, id: Uuid, class: usize, queued: bool) -> Released {
        if queued {
            self.meta.pending.remove(&id);
        }
        if self.remove_slot(id) {
            self.info.remove(&id);
            return Released::Released;
        }
        if queued && self.dequeue(id, class) { Released::Dequeued } else { Released::Unknown }
    }

    /// Removes a waiter together with what is known of it.
    fn dequeue(&mut self, id: Uuid, class: usize) -> bool {
        let Some(ticket) = self.ticket_of(id, class) else {
            return false;
        };
        self.wait[class].remove(&ticket);
        let info = self.info.remove(&id);
        self.uncount_waiter(info.map(|info| info.instance));
        true
    }

    /// The ticket of a waiter; its info tells, unless that was lost.
    fn ticket_of(&self, id: Uuid, class: usize) -> Option<u64> {
        let queue = self.wait.get(class)?;
        match self.info.get(&id) {
            Some(info) => (queue.get(&info.ticket) == Some(&id)).then_some(info.ticket),
            None => queue.iter().find(|(_, waiter)| **waiter == id).map(|(&ticket, _)| ticket),
        }
    }

    fn uncount_waiter(&mut self, instance: Option<Uuid>) {
        self.meta.waiting = self.meta.waiting.saturating_sub(1);
        if let Some(count) = instance.and_then(|instance| self.meta.waiters.get_mut(&instance)) {
            *count = count.saturating_sub(1);
        }
    }

    fn put_slot(&mut self, id: Uuid, score: i64, weight: u32) {
        match self.slots.insert(id, (score, weight)) {
            Some((old, _)) => {
                self.by_score.remove(&(old, id));
            }
            None => self.used += weight,
        }
        self.by_score.insert((score, id));
        self.changed.until = self.changed.until.max(score + self.meta.lease);
    }

    fn remove_slot(&mut self, id: Uuid) -> bool {
        let Some((score, weight)) = self.slots.remove(&id) else {
            return false;
        };
        self.by_score.remove(&(score, id));
        self.used -= weight;
        self.changed.removed = true;
        true
    }
}

// === impl Info ===

impl Info {
    fn of(context: &Context<'_>, acquire: &Acquire, weight: u32, at: i64, ticket: u64) -> Self {
        Self {
            instance: context.caller.instance,
            route: Arc::clone(&acquire.ask.route),
            class: acquire.ask.class,
            weight,
            at,
            ticket,
        }
    }
}
