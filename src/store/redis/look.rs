//! What operators ask. None of it takes the way of the links, so a link that is busy or broken doesn't matter.

use std::{cmp::Reverse, collections::BTreeSet};

use super::*;
use crate::store::MOST_HOLDERS;

/// Fields of the fleet's hash that one command looks at.
const FIELDS_AT_ONCE: usize = 1_000;
/// Sets of a limit with a key that are looked at.
const MOST_SETS: usize = MOST_HOLDERS;

impl RedisStore {
    pub(super) async fn see_status(&self, set: &SetSpec) -> Result<SetStatus, StoreError> {
        scripts::read_status(self.run(&scripts::status(&self.keys, set)).await?)
    }

    pub(super) async fn see_holders(&self, set: &SetSpec) -> Result<Vec<Holder>, StoreError> {
        let mut holders = Vec::new();
        for set in self.sets_of(set).await? {
            let look = scripts::holders(&self.keys, &set);
            holders.extend(scripts::read_holders(self.run(&look).await?, &set.key)?);
        }
        holders.sort_unstable_by(|a, b| (Reverse(a.age), &a.id).cmp(&(Reverse(b.age), &b.id)));
        holders.truncate(MOST_HOLDERS);
        Ok(holders)
    }

    pub(super) async fn tell_to_evict(
        &self,
        set: &SetSpec,
        evict: &Evict,
    ) -> Result<Evicted, StoreError> {
        scripts::read_evicted(self.run(&scripts::evict(&self.keys, set, evict)).await?)
    }

    async fn run(&self, look: &scripts::Look) -> Result<Value, StoreError> {
        let mut connection = self.finder.current().await?.pool.get().await?;
        let (commands, offset) = look.commands();
        let mut answers = connection.send_packed_commands(commands, offset, 1).await?;
        Ok(answers.pop().unwrap_or(Value::Nil).extract_error()?)
    }

    /// The set itself, or, of a limit with a key, those that have holders: the fleet's hash has a field for each.
    async fn sets_of(&self, set: &SetSpec) -> Result<Vec<SetSpec>, StoreError> {
        if !set.keyed {
            return Ok(vec![set.clone()]);
        }
        let mut connection = self.finder.current().await?.pool.get().await?;
        let (mut cursor, mut keys) = ("0".to_owned(), BTreeSet::new());
        loop {
            let mut scan = Cmd::new();
            scan.arg("HSCAN").arg(&self.keys.fleet).arg(&cursor);
            scan.arg("MATCH").arg(format!("{}{}:*", Keys::LIVE, set.key));
            scan.arg("COUNT").arg(FIELDS_AT_ONCE);
            let (next, fields): (String, Vec<String>) = scan.query_async(&mut connection).await?;
            let names = fields.iter().step_by(2).filter_map(|name| name.strip_prefix(Keys::LIVE));
            keys.extend(names.map(Arc::from));
            cursor = next;
            if cursor == "0" || keys.len() >= MOST_SETS {
                break;
            }
        }
        Ok(keys.into_iter().map(|key: Arc<str>| SetSpec { key, ..set.clone() }).collect())
    }
}
