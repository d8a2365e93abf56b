//! What a configuration that was read again changes. Nobody who holds or waits is disturbed.

use super::*;

impl Keeper {
    /// Goes on by these settings. A limit's place is its set's; one that they don't name keeps its place and what it has,
    /// for those who still hold or wait.
    pub(in crate::leases) fn adopt(&mut self, settings: Settings, now: Instant) {
        // What is kept warm is of the old settings, and nobody would ask for it again.
        self.cool(now);
        let mut limits = mem::take(&mut self.settings.limits);
        for limit in settings.limits {
            match limits.get_mut(limit.set.limit) {
                Some(known) => *known = limit,
                None => {
                    self.limits.push(LimitState::default());
                    let recovery = Duration::from_millis(limit.set.recovery.unsigned_abs());
                    self.recovery.ends.push(self.recovery.began + recovery);
                    limits.push(limit);
                }
            }
        }
        self.caller.gap = ms(settings.gap);
        self.caller.presence = ms(settings.presence);
        self.settings = Settings { instance: self.settings.instance, limits, ..settings };
        // What is claimed now counts from here on.
        self.next_beat = now;
    }
}
