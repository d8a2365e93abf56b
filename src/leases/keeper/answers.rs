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
        let Ok(reply) = result else { return };
        if std::mem::take(&mut self.down) {
            tracing::info!("the store answers again");
        }
        if let Some(releases) = reply.releases {
            self.note(releases.stamp, now);
            for release in &call.releases {
                self.entries.remove(&release.ask.id);
            }
            self.on_granted(&releases.granted, sent, now);
        }
        if let (Some(beat), Some(heartbeat)) = (reply.heartbeat, call.heartbeat) {
            self.note(beat.stamp, now);
            self.on_heartbeat(&heartbeat, beat, sent, now);
        }
        if let Some(acquires) = reply.acquires {
            self.note(acquires.stamp, now);
            for (acquire, outcome) in call.acquires.into_iter().zip(acquires.outcomes) {
                self.on_acquired(acquire, outcome, sent, now);
            }
            self.on_granted(&acquires.granted, sent, now);
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
            if matches!(outcome, Acquired::Granted | Acquired::Waiting { .. }) {
                self.return_unknown(acquire.ask, now);
            }
            return;
        };
        if entry.phase != Phase::Asked {
            return;
        }
        match outcome {
            Acquired::Granted => self.hand_over(id, sent, now),
            Acquired::Waiting { at, .. } => self.keep_waiting(id, at as usize, sent, now),
            Acquired::Full { at, queue } => self.turn_down(id, Why::Full, at, queue),
            Acquired::Recovering { at } => self.turn_down(id, Why::Recovering, at, 0),
            Acquired::TooHeavy { at } => self.turn_down(id, Why::TooHeavy, at, 0),
        }
    }

    pub(in crate::leases) fn hand_over(&mut self, id: Uuid, sent: Instant, now: Instant) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.phase = Phase::Held;
        entry.held = entry.ask.wants.len();
        entry.confirmed = sent;
        entry.taken = now;
        if let Some(deadline) = entry.deadline.take() {
            self.deadlines.remove(&(deadline, id));
        }
        if let Some(to) = entry.answer.take() {
            self.answers.push(Answer { id, to, outcome: Ok(now) });
        }
        let wants = Arc::clone(&entry.ask.wants);
        for want in wants.iter() {
            if let Some(limit) = self.limit_of(&want.set) {
                self.limits[limit].local += want.weight;
            }
        }
    }

    pub(in crate::leases) fn keep_waiting(
        &mut self,
        id: Uuid,
        at: usize,
        sent: Instant,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.phase = Phase::Waiting;
        entry.queued = true;
        entry.held = at;
        entry.confirmed = sent;
        let (pushed, asked, waits) = (entry.pushed, entry.asked, entry.deadline.is_some());
        let set = Arc::clone(&entry.ask.wants[at].set);
        if pushed {
            self.ask_again(id);
        }
        if !waits && let Some(limit) = self.limit_of(&set) {
            let paused = self.recovery.overlap(limit, asked, now);
            self.wait_until(id, asked + self.settings.limits[limit].queue_timeout + paused);
        }
    }

    /// The store keeps nothing of the request.
    pub(in crate::leases) fn turn_down(&mut self, id: Uuid, why: Why, at: u32, queue: u32) {
        let Some(entry) = self.entries.get(&id) else { return };
        let set = Arc::clone(&entry.ask.wants[at as usize].set);
        let limit = self.limit_of(&set);
        let wait = limit.and_then(|limit| self.expected_wait(limit, queue));
        self.refuse(id, why, limit, wait);
        if let Some(deadline) = self.entries.remove(&id).and_then(|entry| entry.deadline) {
            self.deadlines.remove(&(deadline, id));
        }
    }

    /// Waiters of ours were handed slots with a full lease.
    pub(in crate::leases) fn on_granted(&mut self, granted: &[Uuid], sent: Instant, now: Instant) {
        for &id in granted {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            match entry.phase {
                // Asked again meanwhile: that answer will say the same.
                Phase::Waiting if entry.ask.wants.len() == 1 => self.hand_over(id, sent, now),
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
            }
        }
        self.on_granted(&reply.granted, sent, now);
        for (state, seen) in self.limits.iter_mut().zip(&reply.sets) {
            state.seen = *seen;
        }
        self.heard = true;
        self.find_lost_waiters(reply.pending.len() as u32);
        for id in reply.pending {
            self.on_push(id, now);
        }
    }

    /// Waiters that the store has forgotten ask again, with the time they have waited.
    pub(in crate::leases) fn find_lost_waiters(&mut self, pending: u32) {
        for limit in 0..self.limits.len() {
            let key = Arc::clone(&self.settings.limits[limit].set.key);
            let known = self.limits[limit].seen.mine + pending;
            let waits_here = |entry: &Entry| {
                entry.phase == Phase::Waiting && entry.ask.wants[entry.held].set.key == key
            };
            let mut waiting: Vec<(Instant, Uuid)> = Vec::new();
            for (&id, entry) in &self.entries {
                if waits_here(entry) {
                    waiting.push((entry.asked, id));
                }
            }
            if waiting.len() as u32 > known {
                waiting.sort_unstable();
                for (_, id) in waiting {
                    self.ask_again(id);
                }
            }
        }
    }

    pub(in crate::leases) fn outlook(&mut self, now: Instant) -> Outlook {
        let recovering = self.recovery.ends.iter().any(|end| *end > now);
        self.started |= self.heard && !recovering;
        Outlook {
            up: self.connected && !self.down && self.heard,
            started: self.started,
            recovering,
            sets: self.limits.iter().map(|limit| limit.seen).collect(),
            local: self.limits.iter().map(|limit| limit.local).collect(),
            hold: self.limits.iter().map(|limit| limit.hold.map(Duration::from_secs_f64)).collect(),
        }
    }
}
