//! What operators ask: who has the slots, and that one of them ends.

use super::*;

impl Ledger {
    /// Who has slots of a set, or of all sets of a limit with a key; the longest first. Read only.
    pub fn holders(&self, now: i64, spec: &SetSpec) -> Vec<Holder> {
        let is_of = |key: &str| {
            let rest = key.strip_prefix(&*spec.key);
            rest.is_some_and(|rest| rest.is_empty() || (spec.keyed && rest.starts_with(':')))
        };
        let sets = self.sets.iter().filter(|(key, _)| is_of(key));
        let mut holders: Vec<Holder> = sets.flat_map(|(key, set)| set.holders(now, key)).collect();
        holders.sort_unstable_by(|a, b| (b.age, &a.id).cmp(&(a.age, &b.id)));
        holders.truncate(MOST_HOLDERS);
        holders
    }

    /// Has the request of a holder end.
    pub fn evict(&mut self, now: i64, spec: &SetSpec, evict: &Evict) -> Evicted {
        let Some(set) = self.sets.get_mut(&spec.key) else { return Evicted::Unknown };
        let owner = match set.owner_of(evict.id) {
            None => return Evicted::Unknown,
            Some(None) => return Evicted::Plain,
            Some(Some(owner)) if owner == evict.instance => return Evicted::Mine,
            Some(Some(owner)) => owner,
        };
        let seen = self.instances.get(&owner);
        if seen.is_some_and(|&seen| seen >= now - evict.presence) {
            if !self.listeners.contains(&owner) {
                return Evicted::Deaf;
            }
            self.pushes.push((owner, evict.id, Notice::Evicted));
            return Evicted::Told;
        }
        if !evict.force {
            return Evicted::Gone;
        }
        // Who waits is granted the slots by the next heartbeat.
        if set.forget_holder(evict.id)
            && let Some(fleet) = &mut self.fleet
        {
            fleet.live.remove(&spec.key);
        }
        if spec.keyed && set.is_idle() {
            self.sets.remove(&spec.key);
        }
        Evicted::Removed
    }
}
