//! The scripts as Rust sees them: one function that writes each call, one that reads each reply.
//! The order of KEYS and ARGV is written here and in the scripts' heads, nowhere else.

use std::{
    io::Write as _,
    iter::Take,
    sync::{Arc, LazyLock},
};

use deadpool_redis::redis::{Cmd, Pipeline, Script as Hashed, Value};
use uuid::Uuid;

mod look;

pub(super) use look::{Look, evict, holders, read_evicted, read_holders, read_status, status};

use super::{
    Acquire, AcquireReply, Acquired, Ask, BeatReply, Caller, Heartbeat, Override, RateSpec,
    Refuser, Release, ReleaseReply, Released, Renewed, SetSpec, SetState, Shed, Stamp, StoreError,
    keys::Keys,
};

/// A script and the hash under which Redis keeps it.
struct Script {
    text: &'static str,
    hash: String,
}

impl Script {
    fn new(text: &'static str) -> Self {
        Self { text, hash: Hashed::new(text).get_hash().to_owned() }
    }
}

/// A script that writes: the line with its flags, the shared parts, and what is its own. Short ways, if it
/// has any, stand before everything that only the long way needs.
macro_rules! writing {
    ($flags:literal, [$($quick:literal),*], $($file:literal),+) => {
        LazyLock::new(|| {
            Script::new(concat!(
                $flags,
                include_str!("../../scripts/shared/enter.lua"),
                $(include_str!(concat!("../../scripts/shared/", $quick)),)*
                include_str!("../../scripts/shared/set.lua"),
                include_str!("../../scripts/shared/grant.lua"),
                $(include_str!(concat!("../../scripts/", $file)),)+
            ))
        })
    };
}

/// Releases and acquires, which mostly go together.
static TURN: LazyLock<Script> = writing!(
    "#!lua flags=allow-oom\n",
    ["quick.lua", "handover.lua"],
    "release.lua",
    "acquire.lua"
);
static TURN_RATED: LazyLock<Script> = writing!("#!lua\n", [], "release.lua", "acquire.lua");
static HEARTBEAT: LazyLock<Script> = writing!("#!lua flags=allow-oom\n", [], "heartbeat.lua");
static STATUS: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../scripts/status.lua")));
static HOLDERS: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../scripts/holders.lua")));
static EVICT: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../scripts/evict.lua")));

/// Has Redis keep every script that links call. Returns how many answers that brings.
pub(super) fn load(pipeline: &mut Pipeline) -> usize {
    let all: [&Script; 3] = [&TURN, &TURN_RATED, &HEARTBEAT];
    for script in all {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.text);
    }
    all.len()
}

// === calls ===

/// What every call of a writing script carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer<'a> {
    pub(super) keys: &'a Keys,
    pub(super) run: &'a str,
    pub(super) caller: &'a Caller,
}

impl Writer<'_> {
    /// Releases, then acquires. Requests that ask no rate run even where Redis has no memory left, since what they keep is
    /// bounded; those that are rated don't.
    pub(super) fn turn<'a>(
        &self,
        releases: &[Release],
        acquires: impl Iterator<Item = &'a Acquire> + Clone,
        rated: bool,
    ) -> Cmd {
        let asks = releases.iter().map(|release| &release.ask);
        let asks = asks.chain(acquires.clone().map(|acquire| &acquire.ask));
        let refunded = releases.iter().filter(|release| release.refund).map(|release| &release.ask);
        let sets = distinct(asks.clone());
        let rates = distinct_rates(refunded.chain(acquires.clone().map(|acquire| &acquire.ask)));
        let script = if rated { &TURN_RATED } else { &TURN };
        let (mut cmd, first_rate) = self.begin(script, &sets, &rates, 5 + asks.count());
        let parts = Parts { sets: &sets, rates: &rates, first_rate };
        cmd.arg(groups(releases.iter(), are_released_alike).count());
        for group in groups(releases.iter(), are_released_alike) {
            parts.add(&mut cmd, group.clone().map(|release| &release.ask), |text| {
                parts.of_release(text, group.clone().next());
            });
        }
        for group in groups(acquires, are_asked_alike) {
            parts.add(&mut cmd, group.clone().map(|acquire| &acquire.ask), |text| {
                parts.of_acquire(text, group.clone().next());
            });
        }
        cmd
    }

    pub(super) fn heartbeat(&self, heartbeat: &Heartbeat) -> Cmd {
        let sets: Vec<&SetSpec> = heartbeat.beats.iter().map(|beat| &*beat.set).collect();
        let renewals: usize = heartbeat.beats.iter().map(|beat| beat.renew.len()).sum();
        let own = 3 + 3 * sets.len() + 5 * renewals;
        let (mut cmd, _) = self.begin(&HEARTBEAT, &sets, &[], own);
        flag(&mut cmd, heartbeat.subscribed);
        flag(&mut cmd, heartbeat.leaving);
        cmd.arg(heartbeat.within);
        for beat in &heartbeat.beats {
            cmd.arg(beat.known.as_ref().map(write_override).unwrap_or_default());
            match beat.order {
                None => cmd.arg(""),
                Some(None) => cmd.arg("-"),
                Some(Some(slots)) => cmd.arg(slots),
            };
            cmd.arg(beat.renew.len());
            for renew in &beat.renew {
                id(&mut cmd, renew.ask.id);
                cmd.arg(&*renew.ask.route).arg(renew.ask.class + 1).arg(renew.weight);
                flag(&mut cmd, renew.lapsed);
            }
        }
        cmd
    }

    /// Writes everything up to the script's own arguments, of which there will be about `own`. Also tells where among the
    /// keys the rates begin.
    fn begin(
        &self,
        script: &Script,
        sets: &[&SetSpec],
        rates: &[&RateSpec],
        own: usize,
    ) -> (Cmd, usize) {
        let of_sets = 2 + sets.len();
        let keys = of_sets + rates.len();
        let args = 10 + keys + 2 * sets.len() + own;
        let mut cmd = Cmd::with_capacity(args, 256 + 48 * keys + 160 * sets.len() + 40 * own);
        cmd.arg("EVALSHA").arg(&script.hash);
        cmd.arg(keys).arg(&self.keys.fleet).arg(&self.keys.instances);
        for set in sets {
            cmd.arg(self.keys.slots(set));
        }
        for rate in rates {
            cmd.arg(self.keys.of_rate(rate));
        }
        let Caller { instance, epoch, gap, presence } = self.caller;
        id(&mut cmd, *instance);
        cmd.arg(*epoch).arg(*gap);
        let mut text = Text::default();
        text.word(self.run);
        text.number(*presence);
        text.word(&self.keys.channels);
        cmd.arg(text.bytes());
        cmd.arg(sets.len());
        for set in sets {
            cmd.arg(&*set.key).arg(policy(set).bytes());
        }
        (cmd, of_sets + 1)
    }
}

fn id(cmd: &mut Cmd, id: Uuid) {
    let mut text = Uuid::encode_buffer();
    cmd.arg(&*id.hyphenated().encode_lower(&mut text));
}

fn flag(cmd: &mut Cmd, value: bool) {
    cmd.arg(if value { "1" } else { "0" });
}

/// A set as the caller's configuration has it.
fn policy(set: &SetSpec) -> Text {
    let mut text = Text::default();
    text.number(set.keyed.into());
    text.number(set.shadow.into());
    text.number(set.fenced.into());
    text.number(set.warm.into());
    text.number(set.recovery);
    text.number(set.slots.into());
    text.number(set.lease);
    text.number(set.grant_ttl);
    text.number(set.queue.into());
    text.number(set.ageing);
    for class in set.classes.iter() {
        text.next(&class.name);
        text.share(class.share);
        text.number(class.queue.into());
    }
    text
}

/// What stands where among the arguments.
struct Parts<'a> {
    sets: &'a [&'a SetSpec],
    rates: &'a [&'a RateSpec],
    first_rate: usize,
}

impl Parts<'_> {
    /// Writes what asks that are alike have in common, how many they are, and their ids.
    fn add<'a>(
        &self,
        cmd: &mut Cmd,
        asks: impl Iterator<Item = &'a Ask> + Clone,
        common: impl FnOnce(&mut Text),
    ) {
        let mut text = Text::default();
        common(&mut text);
        cmd.arg(text.bytes()).arg(asks.clone().count());
        for ask in asks {
            id(cmd, ask.id);
        }
    }

    fn of_release(&self, text: &mut Text, release: Option<&Release>) {
        let Some(Release { ask, queued, refund }) = release else { return };
        text.number(ask.class as i64 + 1);
        text.number((*queued).into());
        for rate in if *refund { &ask.rates[..] } else { &[] } {
            text.number(self.place_of(rate));
        }
        self.wants(text, ask);
    }

    fn of_acquire(&self, text: &mut Text, acquire: Option<&Acquire>) {
        let Some(Acquire { ask, waited, may_wait, again }) = acquire else { return };
        for word in [ask.class as i64 + 1, (*may_wait).into(), (*again).into(), *waited] {
            text.number(word);
        }
        for rate in ask.rates.iter() {
            text.number(self.place_of(rate));
            text.number(rate.requests.into());
            text.number(rate.window);
            text.number(rate.shadow.into());
        }
        self.wants(text, ask);
        text.next(&ask.route);
    }

    fn wants(&self, text: &mut Text, ask: &Ask) {
        text.next("");
        for want in ask.wants.iter() {
            let index = self.sets.iter().position(|set| set.key == want.set.key);
            text.number(index.map_or(0, |index| index as i64 + 1));
            text.number(want.weight.into());
        }
    }

    /// Where among the keys.
    fn place_of(&self, rate: &RateSpec) -> i64 {
        let place = self.rates.iter().position(|known| known.key == rate.key);
        (self.first_rate + place.unwrap_or(0)) as i64
    }
}

/// Runs of items that are alike.
fn groups<'a, T: 'a, I: Iterator<Item = &'a T> + Clone>(
    items: I,
    alike: impl Fn(&T, &T) -> bool,
) -> impl Iterator<Item = Take<I>> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let group = rest.clone();
        let first = rest.next()?;
        let mut count = 1;
        while rest.clone().next().is_some_and(|next| alike(first, next)) {
            rest.next();
            count += 1;
        }
        Some(group.take(count))
    })
}

fn are_released_alike(a: &Release, b: &Release) -> bool {
    a.queued == b.queued && !a.refund && !b.refund && are_alike(&a.ask, &b.ask)
}

fn are_asked_alike(a: &Acquire, b: &Acquire) -> bool {
    let rated = !a.ask.rates.is_empty() || !b.ask.rates.is_empty();
    let alike = a.may_wait == b.may_wait && a.again == b.again && a.waited == b.waited;
    alike && !rated && are_alike(&a.ask, &b.ask) && Arc::ptr_eq(&a.ask.route, &b.ask.route)
}

/// Whether two ask for the same slots, in the same class.
fn are_alike(a: &Ask, b: &Ask) -> bool {
    a.class == b.class && Arc::ptr_eq(&a.wants, &b.wants)
}

/// An argument of several words.
#[derive(Default)]
struct Text(Vec<u8>);

impl Text {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn word(&mut self, word: &str) {
        if !matches!(self.0.last(), None | Some(b' ' | b';')) {
            self.0.push(b' ');
        }
        self.0.extend_from_slice(word.as_bytes());
    }

    fn number(&mut self, number: i64) {
        self.word("");
        write!(self.0, "{number}").expect("writing to a vector can't fail");
    }

    fn share(&mut self, share: f64) {
        self.word("");
        write!(self.0, "{share}").expect("writing to a vector can't fail");
    }

    /// Begins the next part.
    fn next(&mut self, word: &str) {
        self.0.push(b';');
        self.word(word);
    }
}

/// The sets that the asks name, once each, in the order of first use.
fn distinct<'a>(asks: impl Iterator<Item = &'a Ask>) -> Vec<&'a SetSpec> {
    let mut sets: Vec<&SetSpec> = Vec::with_capacity(2);
    for want in asks.flat_map(|ask| ask.wants.iter()) {
        if !sets.iter().any(|set| set.key == want.set.key) {
            sets.push(&want.set);
        }
    }
    sets
}

fn distinct_rates<'a>(asks: impl Iterator<Item = &'a Ask>) -> Vec<&'a RateSpec> {
    let mut rates: Vec<&RateSpec> = Vec::new();
    for rate in asks.flat_map(|ask| ask.rates.iter()) {
        if !rates.iter().any(|known| known.key == rate.key) {
            rates.push(rate);
        }
    }
    rates
}

/// Version, slots or `-`, and the claims with commas around each.
fn write_override(order: &Override) -> String {
    match order.slots {
        None => format!("{} - -", order.version),
        Some(slots) => {
            let claims: String = order.claims.iter().map(|claim| format!("{claim},")).collect();
            format!("{} {slots} ,{claims}", order.version)
        }
    }
}

fn read_override(text: &str) -> Result<Option<Override>, StoreError> {
    if text.is_empty() {
        return Ok(None);
    }
    let wrong = || bad("an override was expected");
    let mut words = text.split(' ');
    let (Some(version), Some(slots), Some(claims)) = (words.next(), words.next(), words.next())
    else {
        return Err(wrong());
    };
    let version = version.parse().map_err(|_| wrong())?;
    if slots == "-" {
        return Ok(Some(Override { version, slots: None, claims: Vec::new() }));
    }
    let claims = claims.split(',').filter(|claim| !claim.is_empty()).map(str::parse);
    Ok(Some(Override {
        version,
        slots: Some(slots.parse().map_err(|_| wrong())?),
        claims: claims.collect::<Result<_, _>>().map_err(|_| wrong())?,
    }))
}

// === replies ===

/// The answers to releases and to acquires, if the turn had any.
pub(super) fn read_turn(reply: Value) -> Result<(ReleaseReply, AcquireReply), StoreError> {
    let mut reader = Reader::of(reply)?;
    let stamp = reader.stamp()?;
    let Grants { granted: handed_on, fences: fences_handed_on } = reader.grants()?;
    let released = reader.many(|reader| match reader.int()? {
        0 => Ok(Released::Released),
        1 => Ok(Released::Dequeued),
        2 => Ok(Released::Unknown),
        _ => Err(bad("an unknown outcome of a release")),
    })?;
    let Grants { granted, fences } = reader.grants()?;
    let displaced = reader.many(Reader::id)?;
    let mut outcomes = Vec::with_capacity(reader.left() / 3);
    while reader.left() > 0 {
        outcomes.push(read_acquired(reader.int()?, reader.number()?, reader.int()?)?);
    }
    let releases =
        ReleaseReply { stamp, outcomes: released, granted: handed_on, fences: fences_handed_on };
    Ok((releases, AcquireReply { stamp, outcomes, granted, fences, displaced }))
}

fn read_acquired(code: i64, detail: u32, by: i64) -> Result<Acquired, StoreError> {
    let place = |by: i64| u32::try_from(by).map_err(|_| bad("a number is out of range"));
    let refuser = match by {
        ..0 => Refuser::Rate(place(-1 - by)?),
        _ => Refuser::Want(place(by)?),
    };
    let why = match code % 10 {
        0 | 1 => None,
        2 => Some(Shed::Full { queue: detail }),
        3 => Some(Shed::Recovering),
        4 => Some(Shed::TooHeavy),
        5 => Some(Shed::RateLimited { after: detail }),
        _ => return Err(bad("an unknown outcome of an acquire")),
    };
    match (code, why) {
        (0, _) => Ok(Acquired::Granted),
        (1, _) => Ok(Acquired::Waiting { at: place(by)?, queue: detail }),
        (2..=5, Some(why)) => Ok(Acquired::Shed { by: refuser, why }),
        (12..=15, Some(why)) => Ok(Acquired::Shadowed { by: refuser, why }),
        _ => Err(bad("an unknown outcome of an acquire")),
    }
}

pub(super) fn read_heartbeat(reply: Value) -> Result<BeatReply, StoreError> {
    let mut reader = Reader::of(reply)?;
    let stamp = reader.stamp()?;
    let Grants { granted, fences } = reader.grants()?;
    let pending = reader.many(Reader::id)?;
    let instances = reader.many(|reader| Ok((reader.id()?, reader.int()?)))?;
    let renewed = reader.many(|reader| match reader.int()? {
        0 => Ok(Renewed::Kept),
        1 => Ok(Renewed::Readded),
        _ => Err(bad("an unknown outcome of a renewal")),
    })?;
    let mut sets = Vec::with_capacity(reader.left() / 6);
    while reader.left() > 0 {
        sets.push(SetState {
            slots: reader.number()?,
            used: reader.number()?,
            waiting: reader.number()?,
            mine: reader.number()?,
            lease: reader.int()?,
            order: read_override(&reader.text()?)?,
        });
    }
    Ok(BeatReply { stamp, renewed, sets, granted, fences, pending, instances })
}

fn bad(what: &str) -> StoreError {
    StoreError::BadReply(what.to_owned())
}

/// The caller's waiters that were granted, and the fences of whoever was.
struct Grants {
    granted: Vec<Uuid>,
    fences: Vec<(Uuid, u64)>,
}

/// Reads a reply from front to back.
struct Reader(std::vec::IntoIter<Value>);

impl Reader {
    fn of(reply: Value) -> Result<Self, StoreError> {
        let Value::Array(values) = reply else {
            return Err(bad("not an array"));
        };
        match *values {
            [Value::Int(-1)] => Err(StoreError::Stale),
            _ => Ok(Self(values.into_iter())),
        }
    }

    fn left(&self) -> usize {
        self.0.len()
    }

    /// What every reply of a writing script begins with.
    fn stamp(&mut self) -> Result<Stamp, StoreError> {
        Ok(Stamp { now: self.int()?, recovery: self.int()? })
    }

    fn grants(&mut self) -> Result<Grants, StoreError> {
        let granted = self.many(Self::id)?;
        let fences = self.many(|reader| Ok((reader.id()?, reader.int()?.unsigned_abs())))?;
        Ok(Grants { granted, fences })
    }

    fn int(&mut self) -> Result<i64, StoreError> {
        match self.0.next() {
            Some(Value::Int(value)) => Ok(value),
            Some(_) => Err(bad("a number was expected")),
            None => Err(bad("too short")),
        }
    }

    fn number(&mut self) -> Result<u32, StoreError> {
        u32::try_from(self.int()?).map_err(|_| bad("a number is out of range"))
    }

    fn text(&mut self) -> Result<String, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(text)) => {
                String::from_utf8(text).map_err(|_| bad("a text was expected"))
            }
            _ => Err(bad("a text was expected")),
        }
    }

    fn id(&mut self) -> Result<Uuid, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(text)) => {
                Uuid::try_parse_ascii(&text).map_err(|_| bad("an id was expected"))
            }
            Some(_) => Err(bad("an id was expected")),
            None => Err(bad("too short")),
        }
    }

    /// Reads a count, and that many of something.
    fn many<T>(
        &mut self,
        mut one: impl FnMut(&mut Self) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let count = self.number()? as usize;
        if count > self.left() {
            return Err(bad("too short"));
        }
        (0..count).map(|_| one(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(values: &[i64]) -> Value {
        Value::Array(values.iter().map(|&value| Value::Int(value)).collect())
    }

    fn is_bad<T>(read: Result<T, StoreError>) -> bool {
        matches!(read, Err(StoreError::BadReply(_)))
    }

    #[test]
    fn a_reply_that_makes_no_sense_is_an_error() {
        let all = |reply: &Value| {
            [
                is_bad(read_turn(reply.clone())),
                is_bad(read_heartbeat(reply.clone())),
                is_bad(read_status(reply.clone())),
            ]
        };
        for reply in [
            Value::Nil,
            Value::Okay,
            Value::Int(-1),
            array(&[]),
            array(&[7]),
            // A count that no reply could hold, one below zero, and an id that is a number.
            array(&[7, 7, i64::MAX, 7, 7, i64::MAX]),
            array(&[7, 7, -1, 7, 7, -1]),
            array(&[7, 7, 1, 7, 7, 7]),
            Value::Array(vec![Value::BulkString(b"7".to_vec())]),
        ] {
            assert_eq!(all(&reply), [true; 3], "{reply:?}");
        }
        assert!(read_turn(array(&[7, 7, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0])).is_ok());
        assert!(is_bad(read_turn(array(&[7, 7, 0, 0, 1, 3, 0, 0, 0]))));
        assert!(is_bad(read_turn(array(&[7, 7, 0, 0, 0, 0, 0, 0, 9, 0, 0]))));
        assert!(is_bad(read_turn(array(&[7, 7, 0, 0, 0, 0, 0, 0, 0, 0]))));
        assert!(is_bad(read_heartbeat(array(&[7, 7, 0, 0, 0, 0, 1, 2]))));
        assert!(is_bad(read_heartbeat(array(&[7, 7, 0, 0, 0, 1, 7]))));
    }

    #[test]
    fn a_stale_caller_is_told_so() {
        assert!(matches!(read_turn(array(&[-1])), Err(StoreError::Stale)));
        assert!(matches!(read_heartbeat(array(&[-1])), Err(StoreError::Stale)));
    }
}
