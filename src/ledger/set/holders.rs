//! Who has the slots of a semaphore.

use super::*;
use crate::ledger::{Holder, Origin};

impl Set {
    /// Those whose lease isn't over.
    pub(in crate::ledger) fn holders<'a>(
        &'a self,
        now: i64,
        key: &'a Arc<str>,
    ) -> impl Iterator<Item = Holder> + 'a {
        let oldest = now - self.meta.lease;
        let valid = self.slots.iter().filter(move |(_, (score, _))| *score >= oldest);
        valid.map(move |(id, &(score, weight))| {
            let info = self.info.get(id);
            Holder {
                id: id.to_string(),
                set: Arc::clone(key),
                of: info.map(|info| Origin {
                    instance: info.instance,
                    route: info.route.to_string(),
                    class: self.table[info.class].name.to_string(),
                }),
                weight,
                age: (now - info.map_or(score, |info| info.at)).max(0),
            }
        })
    }

    /// Whose a holder is, unless a plain client's; none if nobody has it.
    pub(in crate::ledger) fn owner_of(&self, id: Uuid) -> Option<Option<Uuid>> {
        self.slots.get(&id).map(|_| self.info.get(&id).map(|info| info.instance))
    }

    /// Removes a holder. True if none of our own is left.
    pub(in crate::ledger) fn forget_holder(&mut self, id: Uuid) -> bool {
        self.remove_slot(id);
        self.info.remove(&id);
        self.meta.pending.remove(&id);
        self.changed = Changed::default();
        self.slots.is_empty() || self.info.is_empty()
    }
}
