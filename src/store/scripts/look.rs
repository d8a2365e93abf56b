//! The scripts for operators. Each is loaded along with its call, since a pooled connection may lead to another server
//! than before.

use super::*;
use crate::store::{Evict, Evicted, Holder, MOST_HOLDERS, Origin, SetStatus};

/// A call of such a script.
pub(in crate::store) struct Look(Pipeline);

/// Members to look at; the further slots of a holder are such too.
const MOST_MEMBERS: usize = 10 * MOST_HOLDERS;

impl Look {
    fn of(script: &Script, keys: &[&str], args: impl FnOnce(&mut Cmd)) -> Self {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.text);
        let mut cmd = Cmd::new();
        cmd.arg("EVALSHA").arg(&script.hash).arg(keys.len()).arg(keys);
        args(&mut cmd);
        pipeline.add_command(cmd);
        Self(pipeline)
    }

    /// The commands, and which of the answers is the script's.
    pub(in crate::store) fn commands(&self) -> (&Pipeline, usize) {
        (&self.0, 1)
    }
}

fn keys_of(keys: &Keys, set: &SetSpec) -> Vec<String> {
    let mut all = Vec::with_capacity(Keys::OF_SET + set.classes.len());
    keys.of_set(set, |key| all.push(key.to_owned()));
    all
}

pub(in crate::store) fn status(keys: &Keys, set: &SetSpec) -> Look {
    let of_set = keys_of(keys, set);
    let mut all = vec![&*keys.fleet];
    all.extend(of_set.iter().map(String::as_str));
    Look::of(&STATUS, &all, |_| {})
}

pub(in crate::store) fn holders(keys: &Keys, set: &SetSpec) -> Look {
    let of_set = keys_of(keys, set);
    Look::of(&HOLDERS, &[&of_set[0], &of_set[1], &of_set[2]], |cmd| {
        cmd.arg(MOST_MEMBERS);
    })
}

pub(in crate::store) fn evict(keys: &Keys, set: &SetSpec, evict: &Evict) -> Look {
    let of_set = keys_of(keys, set);
    let all = [&*keys.fleet, &*keys.instances, &of_set[0], &of_set[2]];
    Look::of(&EVICT, &all, |cmd| {
        id(cmd, evict.id);
        id(cmd, evict.instance);
        cmd.arg(evict.presence);
        flag(cmd, evict.force);
        cmd.arg(&keys.channels).arg(&*set.key);
    })
}

pub(in crate::store) fn read_status(reply: Value) -> Result<SetStatus, StoreError> {
    let mut reader = Reader::of(reply)?;
    let slots = reader.number()?;
    let lease = reader.int()?;
    let used = reader.number()?;
    let recovery = reader.int()?;
    let now = reader.int()?;
    let waiting = reader.many(|reader| Ok((reader.number()?, reader.int()?)))?;
    let by_instance: Vec<(Uuid, u32)> =
        reader.many(|reader| Ok((reader.id()?, reader.number()?)))?;
    let by_instance = by_instance.into_iter().collect();
    Ok(SetStatus { slots, lease, used, waiting, by_instance, recovery, now })
}

pub(in crate::store) fn read_holders(
    reply: Value,
    set: &Arc<str>,
) -> Result<Vec<Holder>, StoreError> {
    let mut reader = Reader::of(reply)?;
    let mut holders = Vec::with_capacity(reader.left() / 6);
    while reader.left() > 0 {
        let (id, instance) = (reader.any_text()?, reader.any_text()?);
        let (class, route) = (reader.any_text()?, reader.any_text()?);
        let of = Uuid::try_parse(&instance).ok();
        let of = of.map(|instance| Origin { instance, route, class });
        let (weight, age) = (reader.number()?, reader.int()?);
        holders.push(Holder { id, set: Arc::clone(set), of, weight, age });
    }
    Ok(holders)
}

pub(in crate::store) fn read_evicted(reply: Value) -> Result<Evicted, StoreError> {
    match reply {
        Value::BulkString(word) => match &word[..] {
            b"mine" => Ok(Evicted::Mine),
            b"told" => Ok(Evicted::Told),
            b"deaf" => Ok(Evicted::Deaf),
            b"gone" => Ok(Evicted::Gone),
            b"removed" => Ok(Evicted::Removed),
            b"plain" => Ok(Evicted::Plain),
            b"unknown" => Ok(Evicted::Unknown),
            _ => Err(bad("an unknown outcome of an eviction")),
        },
        _ => Err(bad("a word was expected")),
    }
}

impl Reader {
    /// What anybody may have written.
    fn any_text(&mut self) -> Result<String, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(text)) => Ok(String::from_utf8_lossy(&text).into_owned()),
            _ => Err(bad("a text was expected")),
        }
    }
}
