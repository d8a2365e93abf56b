//! What comes from the store.

use super::*;

impl Keeper {
    /// Takes in what the store says. After an error the connection is given up, which accounts for everything.
    pub(in crate::leases) fn on_reply(
        &mut self,
        call: Call,
        sent: Instant,
        now: Instant,
        result: Result<Reply, StoreError>,
    ) {
        let reply = match result {
            Ok(reply) => reply,
            Err(StoreError::Timeout) => return self.out_of_contact(sent),
            Err(_) => return self.out_of_contact(now),
        };
        self.in_contact(now);
        if let Some(releases) = reply.releases {
            self.note(releases.stamp, now);
            self.take_fences(&releases.fences);
            for release in &call.releases {
                self.entries.remove(&release.ask.id);
            }
            self.on_granted(&releases.granted, sent, now);
        }
        if let (Some(beat), Some(heartbeat)) = (reply.heartbeat, call.heartbeat) {
            self.note(beat.stamp, now);
            self.take_fences(&beat.fences);
            self.on_heartbeat(&heartbeat, beat, sent, now);
        }
        if let Some(acquires) = reply.acquires {
            self.on_acquires(call.acquires, acquires, sent, now);
        }
    }

    pub(in crate::leases) fn on_acquires(
        &mut self,
        acquires: Vec<Acquire>,
        reply: AcquireReply,
        sent: Instant,
        now: Instant,
    ) {
        self.note(reply.stamp, now);
        self.take_fences(&reply.fences);
        for (acquire, outcome) in acquires.into_iter().zip(reply.outcomes) {
            self.on_acquired(acquire, outcome, sent, now);
        }
        self.on_told(&reply.granted, &reply.displaced, sent, now);
    }

    pub(in crate::leases) fn take_fences(&mut self, fences: &[(Uuid, u64)]) {
        for (id, fence) in fences {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.fence = Some(*fence);
            }
        }
    }

    /// What an acquire did to others of this instance that wait.
    pub(in crate::leases) fn on_told(
        &mut self,
        granted: &[Uuid],
        displaced: &[Uuid],
        sent: Instant,
        now: Instant,
    ) {
        self.on_granted(granted, sent, now);
        for &id in displaced {
            self.on_displaced(id, now);
        }
    }

    /// Follows the store's recoveries. A new one means: say at once what is held.
    pub(in crate::leases) fn note(&mut self, stamp: Stamp, now: Instant) {
        if stamp.recovery == self.recovery.start {
            return;
        }
        let at = |store_ms: i64| match u64::try_from(store_ms - stamp.now) {
            Ok(ahead) => now + Duration::from_millis(ahead),
            Err(_) => {
                now.checked_sub(Duration::from_millis((stamp.now - store_ms) as u64)).unwrap_or(now)
            }
        };
        self.cool(now);
        self.recovery.start = stamp.recovery;
        self.recovery.began = at(stamp.recovery);
        self.recovery.ends = self
            .settings
            .limits
            .iter()
            .map(|limit| at(stamp.recovery + limit.set.recovery))
            .collect();
        self.recovery.alarm = self.recovery.ends.iter().filter(|end| **end > now).min().copied();
        if self.recovery.alarm.is_some() {
            tracing::warn!("slots are being counted anew: nobody is admitted until that is over");
        }
        self.renew_since = now;
        self.next_beat = now;
    }

    pub(in crate::leases) fn on_acquired(
        &mut self,
        acquire: Acquire,
        outcome: Acquired,
        sent: Instant,
        now: Instant,
    ) {
        let id = acquire.ask.id;
        let Some(entry) = self.entries.get_mut(&id) else {
            // Released and acknowledged before this answer came: whatever it took goes back.
            if !matches!(outcome, Acquired::Shed { .. } | Acquired::NoMemory) {
                self.return_unknown(acquire.ask, now);
            }
            return;
        };
        if entry.phase != Phase::Asked {
            return;
        }
        match outcome {
            Acquired::Granted => self.hand_over(id, sent, now, None),
            Acquired::Shadowed { by, why } => {
                let shadow = self.refused(&acquire.ask, by, why);
                self.hand_over(id, sent, now, Some(shadow));
            }
            Acquired::Waiting { at, queue } => {
                self.stir(now);
                self.keep_waiting(id, at as usize, queue, sent, now);
            }
            Acquired::Shed { by, why } => {
                if matches!(why, Shed::Full { .. }) {
                    self.stir(now);
                }
                let refused = self.refused(&acquire.ask, by, why);
                self.turn_down(id, refused);
            }
            Acquired::NoMemory => self.turn_down(id, Refused::of(Why::StoreDown)),
        }
    }

    /// Puts the store's words into the configuration's.
    pub(in crate::leases) fn refused(&self, ask: &Ask, by: Refuser, why: Shed) -> Refused {
        let limit = match by {
            Refuser::Want(at) => Some(ask.wants[at as usize].set.limit),
            Refuser::Rate(_) => None,
        };
        let rate = match by {
            Refuser::Want(_) => None,
            Refuser::Rate(at) => Some(ask.rates[at as usize].rate),
        };
        let (why, expected_wait) = match why {
            Shed::Full { queue } => {
                (Why::Full, limit.and_then(|limit| self.expected_wait(limit, queue)))
            }
            Shed::Recovering => (Why::Recovering, None),
            Shed::TooHeavy => (Why::TooHeavy, None),
            Shed::RateLimited { after } => {
                (Why::RateLimited, Some(Duration::from_millis(after.into())))
            }
        };
        Refused { why, limit, rate, expected_wait }
    }

    pub(in crate::leases) fn hand_over(
        &mut self,
        id: Uuid,
        sent: Instant,
        now: Instant,
        shadow: Option<Refused>,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let age = ms(now.duration_since(sent));
        if entry.ask.wants.iter().any(|want| age >= want.set.lease) {
            // The process slept, and the slots may be another's by now.
            return self.ask_again(id);
        }
        entry.phase = Phase::Held;
        entry.held = entry.ask.wants.len();
        entry.confirmed = sent;
        entry.taken = now;
        entry.admitted = true;
        if let Some(deadline) = entry.deadline.take() {
            self.deadlines.remove(&(deadline, id));
        }
        if let Some(to) = entry.answer.take() {
            let limit = |want: &Want| self.settings.limits[want.set.limit].cut_after;
            if let Some(lasts) = entry.ask.wants.iter().filter_map(limit).min() {
                let confirmed = Some(sent).filter(|_| !entry.uncounted);
                entry.guard = Some(Guard::new(lasts, confirmed, now));
            }
            let (fence, guard) = (entry.fence, entry.guard.clone());
            self.answers.push(Answer { id, to, outcome: Ok(now), shadow, fence, guard });
        }
        let wants = Arc::clone(&entry.ask.wants);
        self.count_taken(&wants);
    }

    pub(in crate::leases) fn keep_waiting(
        &mut self,
        id: Uuid,
        at: usize,
        queue: u32,
        sent: Instant,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.phase = Phase::Waiting;
        entry.queued = true;
        entry.held = at;
        entry.confirmed = sent;
        let (pushed, waits) = (entry.pushed, entry.deadline.is_some());
        if pushed {
            self.ask_again(id);
        }
        if waits {
            return;
        }
        let (limit, deadline) = self.deadline_of(id, now);
        if self.is_dead_on_arrival(limit, queue, deadline.saturating_duration_since(now)) {
            let expected_wait = self.expected_wait(limit, queue);
            self.refuse(
                id,
                Refused { limit: Some(limit), expected_wait, ..Refused::of(Why::Deadline) },
            );
            self.on_release(id, now);
            return;
        }
        self.wait_until(id, deadline);
    }

    /// Whether a waiter will hardly be served in the time that it has. Careful not to shed what would have been: only
    /// behind a whole round of others, on enough measurements, and if it would take twice the time.
    pub(in crate::leases) fn is_dead_on_arrival(
        &self,
        limit: usize,
        queue: u32,
        left: Duration,
    ) -> bool {
        let (state, ahead) = (&self.limits[limit], queue.saturating_sub(1));
        let slots = state.seen.slots.max(1);
        ahead >= slots
            && state.samples >= SAMPLES_TO_JUDGE
            && self.expected_wait(limit, ahead).is_some_and(|wait| wait > 2 * left)
    }

    /// The store keeps nothing of the request.
    pub(in crate::leases) fn turn_down(&mut self, id: Uuid, refused: Refused) {
        self.refuse(id, refused);
        self.forget(id);
    }

    /// Waiters of ours were handed slots with a full lease.
    pub(in crate::leases) fn on_granted(&mut self, granted: &[Uuid], sent: Instant, now: Instant) {
        for &id in granted {
            let Some(entry) = self.entries.get_mut(&id) else {
                // Of a store that went back to an older memory.
                self.return_stray(id, now);
                continue;
            };
            match entry.phase {
                // Asked again meanwhile: that answer will say the same.
                Phase::Waiting if entry.ask.wants.len() == 1 => self.hand_over(id, sent, now, None),
                Phase::Waiting => self.ask_again(id),
                Phase::Asked => entry.pushed = true,
                _ => {}
            }
        }
    }

    pub(in crate::leases) fn on_heartbeat(
        &mut self,
        heartbeat: &Heartbeat,
        reply: BeatReply,
        sent: Instant,
        now: Instant,
    ) {
        if heartbeat.leaving {
            self.leaving = Leaving::Done;
        }
        let renewals = heartbeat.beats.iter().flat_map(|beat| &beat.renew);
        for (renew, renewed) in renewals.zip(&reply.renewed) {
            self.readded += u64::from(*renewed == Renewed::Readded);
            if let Some(entry) = self.entries.get_mut(&renew.ask.id) {
                entry.confirmed = entry.confirmed.max(sent);
                entry.uncounted = false;
                if let Some(guard) = &entry.guard {
                    guard.confirm(entry.confirmed);
                }
            }
        }
        self.meet(&reply, sent, now);
        self.on_granted(&reply.granted, sent, now);
        self.see(heartbeat, &reply.sets, now);
        self.heard_of.clone_from(&reply.instances);
        self.calm_down(sent, now);
        self.heard = true;
        self.find_lost_waiters(heartbeat, &reply.sets, reply.pending.len());
        for id in reply.pending {
            self.on_push(id, now);
        }
        if heartbeat.beats.iter().any(|beat| beat.order.is_some()) {
            for done in self.orders.drain(..) {
                let _ = done.send(());
            }
        }
    }

    /// Remembers the sets' states; of a limit with a key, the sums over the sets that are in use here.
    pub(in crate::leases) fn see(
        &mut self,
        heartbeat: &Heartbeat,
        sets: &[SetState],
        now: Instant,
    ) {
        let seconds = now.duration_since(self.seen_at).as_secs_f64();
        self.seen_at = now;
        for (state, limit) in self.limits.iter_mut().zip(&self.settings.limits) {
            if seconds > 0.0 {
                let rate = f64::from(std::mem::take(&mut state.arrivals)) / seconds;
                state.arrival_rate += ARRIVALS_SMOOTHING * (rate - state.arrival_rate);
            }
            if limit.set.keyed {
                state.seen = SetState { slots: limit.set.slots, ..SetState::default() };
            }
        }
        for (beat, seen) in heartbeat.beats.iter().zip(sets) {
            let state = &mut self.limits[beat.set.limit].seen;
            if beat.set.keyed {
                state.used += seen.used;
                state.waiting += seen.waiting;
            } else {
                state.clone_from(seen);
            }
        }
    }

    /// Waiters that the store has forgotten ask again, with the time they have waited.
    pub(in crate::leases) fn find_lost_waiters(
        &mut self,
        heartbeat: &Heartbeat,
        sets: &[SetState],
        pending: usize,
    ) {
        let mut here: FxHashMap<&str, Vec<(Instant, Uuid)>> = FxHashMap::default();
        for (&id, entry) in &self.entries {
            if entry.phase == Phase::Waiting {
                here.entry(&entry.ask.wants[entry.held].set.key)
                    .or_default()
                    .push((entry.asked, id));
            }
        }
        let mut lost = Vec::new();
        for (beat, seen) in heartbeat.beats.iter().zip(sets) {
            if let Some(waiting) = here.remove(&*beat.set.key)
                && waiting.len() > seen.mine as usize + pending
            {
                lost.extend(waiting);
            }
        }
        lost.sort_unstable();
        for (_, id) in lost {
            self.ask_again(id);
        }
    }

    fn heard_of(&self, now: Instant) -> Vec<(Uuid, Duration)> {
        let since = now.duration_since(self.seen_at);
        let age = |ms: i64| Duration::from_millis(ms.unsigned_abs()) + since;
        let me = self.caller.instance;
        let others = self.heard_of.iter().filter(|(instance, _)| *instance != me);
        let others = others.map(|&(instance, ms)| (instance, age(ms)));
        std::iter::once((me, Duration::ZERO)).chain(others).collect()
    }

    /// Who asks here and has no answer yet, at the limit where each waits.
    fn waiting(&self, now: Instant) -> Vec<Vec<(u32, Duration)>> {
        let limits = self.settings.limits.iter();
        let mut waiting: Vec<Vec<_>> =
            limits.map(|limit| vec![(0, Duration::ZERO); limit.set.classes.len()]).collect();
        for entry in self.entries.values().filter(|entry| entry.answer.is_some()) {
            let at = entry.held.min(entry.ask.wants.len() - 1);
            let classes = &mut waiting[entry.ask.wants[at].set.limit];
            if let Some((count, oldest)) = classes.get_mut(entry.ask.class) {
                *count += 1;
                *oldest = now.duration_since(entry.asked).max(*oldest);
            }
        }
        waiting
    }

    pub(in crate::leases) fn outlook(&mut self, now: Instant) -> Outlook {
        let recovering = self.recovery.ends.iter().any(|end| *end > now);
        self.started |= self.heard && !recovering;
        Outlook {
            up: self.connected && !self.down && self.heard,
            away: self.absence.begun,
            has_fallback: self.has_fallback(),
            shares: self
                .settings
                .limits
                .iter()
                .zip(&self.limits)
                .map(|(limit, state)| self.share_of(limit.set.limit, state.seen.slots))
                .collect(),
            alone: self.absence.alone,
            readded: self.readded,
            started: self.started,
            recovering,
            seen: now.duration_since(self.seen_at),
            sets: self.limits.iter().map(|limit| limit.seen.clone()).collect(),
            waiting: self.waiting(now),
            arrival_rate: self.limits.iter().map(|limit| limit.arrival_rate).collect(),
            local: self.limits.iter().map(|limit| limit.local).collect(),
            instances: self.heard_of(now),
            presence: Duration::from_millis(self.caller.presence.unsigned_abs()),
            hold: self.limits.iter().map(|limit| limit.hold.map(Duration::from_secs_f64)).collect(),
            standing: self.standing(now),
        }
    }

    fn standing(&self, now: Instant) -> Vec<Standing> {
        let mut standing: Vec<Standing> = self
            .limits
            .iter()
            .map(|limit| Standing { counted: limit.local, ..Standing::default() })
            .collect();
        for want in self.spare_wants() {
            standing[want.set.limit].spare += want.weight;
        }
        for entry in self.entries.values() {
            if !matches!(entry.phase, Phase::Held | Phase::Spare) {
                continue;
            }
            let age = now.duration_since(entry.confirmed);
            for want in entry.ask.wants.iter() {
                let limit = &mut standing[want.set.limit];
                let overdue = age.saturating_sub(self.settings.limits[want.set.limit].renew);
                limit.renew_lag = limit.renew_lag.max(overdue);
                let is_counted = !entry.uncounted && ms(age) <= want.set.lease;
                if entry.phase == Phase::Held && !is_counted {
                    limit.counted = limit.counted.saturating_sub(want.weight);
                }
            }
        }
        standing
    }
}
