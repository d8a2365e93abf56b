//! What a request on a route asks for: its class, its weight, its slots and rates, and until when.

use std::{net::IpAddr, sync::Arc, time::Duration};

use aws_lc_rs::{digest, hmac};
use http::{HeaderMap, HeaderName};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    config::{ClassRule, Config, Key, Mode, Route, WeightRule},
    store::{Ask, RateSpec, SetSpec, Want},
};

/// gRPC's own deadline; every such client sends it.
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// What of a request decides about its admission.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// As the client sent them.
    pub headers: &'a HeaderMap,
    /// Who sent it.
    pub client: IpAddr,
    /// Whether it came by a trusted hop, whose class and weight headers count.
    pub trusted: bool,
    /// The length of its body; none if that isn't said.
    pub body: Option<u64>,
}

/// What the requests of one route ask for.
#[derive(Debug)]
pub(super) struct Plan {
    name: Arc<str>,
    /// Everything that every request of the route asks for alike; else made for each.
    wants: Arc<[Want]>,
    limits: Vec<KeyedLimit>,
    is_alike: bool,
    rates: Vec<KeyedRate>,
    class: ClassRule,
    classes: Vec<Arc<str>>,
    weight: WeightRule,
    deadline_header: Option<HeaderName>,
    digester: Digester,
}

#[derive(Debug)]
struct KeyedLimit {
    set: Arc<SetSpec>,
    key: Option<Key>,
    slots_for: Vec<(String, u32)>,
}

#[derive(Debug)]
struct KeyedRate {
    name: Arc<str>,
    spec: RateSpec,
    key: Option<Key>,
}

/// Turns key values into digests: no value leaves the process in the clear.
#[derive(Clone, Debug)]
pub(super) struct Digester(Option<hmac::Key>);

impl Plan {
    pub(super) fn new(config: &Config, sets: &[Arc<SetSpec>], route: &Route) -> Self {
        let limits: Vec<KeyedLimit> = route
            .limits
            .iter()
            .map(|&limit| KeyedLimit {
                set: Arc::clone(&sets[limit]),
                key: config.limits[limit].key.clone(),
                slots_for: config.limits[limit].slots_for.clone(),
            })
            .collect();
        let fixed = match route.weight {
            WeightRule::Fixed(weight) => Some(weight),
            _ => None,
        };
        let want =
            |limit: &KeyedLimit| Want { set: Arc::clone(&limit.set), weight: fixed.unwrap_or(1) };
        Self {
            name: Arc::clone(&route.name),
            wants: limits.iter().map(want).collect(),
            is_alike: fixed.is_some() && limits.iter().all(|limit| limit.key.is_none()),
            limits,
            rates: route.rates.iter().map(|&rate| KeyedRate::new(config, rate)).collect(),
            class: route.class.clone(),
            classes: config.classes.order.clone(),
            weight: route.weight.clone(),
            deadline_header: route.deadline_header.clone(),
            digester: Digester::new(config),
        }
    }

    /// Whether a request of this route goes ahead without asking anyone.
    pub(super) fn is_empty(&self) -> bool {
        self.wants.is_empty() && self.rates.is_empty()
    }

    pub(super) fn ask(&self, id: Uuid, arrival: &Arrival<'_>) -> Ask {
        let wants = if self.is_alike { Arc::clone(&self.wants) } else { self.own_wants(arrival) };
        let rates = self.rates.iter().map(|rate| rate.of(arrival, &self.digester)).collect();
        Ask { id, wants, rates, class: self.class_of(arrival), route: Arc::clone(&self.name) }
    }

    fn own_wants(&self, arrival: &Arrival<'_>) -> Arc<[Want]> {
        let weight = self.weight_of(arrival);
        let want = |limit: &KeyedLimit| Want { set: limit.of(arrival, &self.digester), weight };
        self.limits.iter().map(want).collect()
    }

    fn class_of(&self, arrival: &Arrival<'_>) -> usize {
        match &self.class {
            ClassRule::Fixed(class) => *class,
            ClassRule::Header { name, default } => {
                let named = arrival.trusted.then(|| arrival.headers.get(name)).flatten();
                let position = |value: &http::HeaderValue| {
                    self.classes.iter().position(|class| class.as_bytes() == value.as_bytes())
                };
                named.and_then(position).unwrap_or(*default)
            }
            ClassRule::ByKey { key, classes, default } => {
                let value = value_of(key, arrival);
                let known = classes.iter().find(|(name, _)| name.as_bytes() == value.as_slice());
                known.map_or(*default, |(_, class)| *class)
            }
        }
    }

    fn weight_of(&self, arrival: &Arrival<'_>) -> u32 {
        match &self.weight {
            WeightRule::Fixed(weight) => *weight,
            WeightRule::Header { name, max } => {
                let said = arrival.trusted.then(|| arrival.headers.get(name)).flatten();
                let number = said.and_then(|value| value.to_str().ok()?.trim().parse::<u32>().ok());
                number.unwrap_or(1).clamp(1, *max)
            }
            // A body of unknown length might be of any.
            WeightRule::Bytes { per_slot, max } => arrival.body.map_or(*max, |length| {
                u32::try_from(length.div_ceil(*per_slot)).unwrap_or(*max).clamp(1, *max)
            }),
        }
    }

    /// When the client gives up by itself, if it says so.
    pub(super) fn deadline(&self, arrival: &Arrival<'_>, asked: Instant) -> Option<Instant> {
        let text = |name: &HeaderName| arrival.headers.get(name)?.to_str().ok();
        let named = self.deadline_header.as_ref().and_then(|name| seconds(text(name)?));
        let of_grpc = text(&GRPC_TIMEOUT).and_then(grpc_timeout);
        let patience = named.into_iter().chain(of_grpc).min()?;
        asked.checked_add(patience)
    }
}

impl KeyedLimit {
    fn of(&self, arrival: &Arrival<'_>, digester: &Digester) -> Arc<SetSpec> {
        let Some(key) = &self.key else { return Arc::clone(&self.set) };
        let value = value_of(key, arrival);
        let own = self.slots_for.iter().find(|(name, _)| name.as_bytes() == value.as_slice());
        Arc::new(SetSpec {
            key: format!("{}:{}", self.set.key, digester.digest(&value)).into(),
            slots: own.map_or(self.set.slots, |(_, slots)| *slots),
            classes: Arc::clone(&self.set.classes),
            ..*self.set
        })
    }
}

impl KeyedRate {
    fn new(config: &Config, index: usize) -> Self {
        let rate = &config.rates[index];
        let spec = RateSpec {
            key: Arc::clone(&rate.name),
            requests: rate.requests,
            window: rate.window.as_millis() as i64,
            shadow: rate.mode == Mode::Shadow,
            rate: index,
        };
        Self { name: Arc::clone(&rate.name), spec, key: rate.key.clone() }
    }

    fn of(&self, arrival: &Arrival<'_>, digester: &Digester) -> RateSpec {
        let value = self.key.as_ref().map(|key| value_of(key, arrival)).unwrap_or_default();
        let key = format!("{}:{}", self.name, digester.digest(&value)).into();
        RateSpec { key, ..self.spec.clone() }
    }
}

impl Digester {
    pub(super) fn new(config: &Config) -> Self {
        let key = config.store.digest_key.as_ref();
        Self(key.map(|key| hmac::Key::new(hmac::HMAC_SHA256, key.0.as_bytes())))
    }

    /// Thirty-two hex digits.
    fn digest(&self, value: &[u8]) -> String {
        let hex = |bytes: &[u8]| bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        match &self.0 {
            Some(key) => hex(hmac::sign(key, value).as_ref()),
            None => hex(digest::digest(&digest::SHA256, value).as_ref()),
        }
    }
}

/// The value that a request has for a key; all that have none share one.
fn value_of(key: &Key, arrival: &Arrival<'_>) -> Vec<u8> {
    match key {
        Key::Header(name) => {
            arrival.headers.get(name).map(|value| value.as_bytes().to_vec()).unwrap_or_default()
        }
        Key::ClientIp => arrival.client.to_string().into_bytes(),
    }
}

/// `2`, `0.5`, or with a unit: `250ms`.
fn seconds(text: &str) -> Option<Duration> {
    match text.trim().parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text.trim()).ok(),
    }
}

/// gRPC over HTTP/2: at most eight digits and one letter.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let digits = text.get(..text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match text.as_bytes().last()? {
        b'H' => Some(Duration::from_secs(number * 3600)),
        b'M' => Some(Duration::from_secs(number * 60)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read_in_both_forms() {
        let ms = |ms| Some(Duration::from_millis(ms));
        for (text, expected) in
            [("2", ms(2_000)), ("0.25", ms(250)), ("250ms", ms(250)), ("x", None), ("-1", None)]
        {
            assert_eq!(seconds(text), expected, "{text}");
        }
        for (text, expected) in [
            ("5S", ms(5_000)),
            ("100m", ms(100)),
            ("1M", ms(60_000)),
            ("123456789S", None),
            ("5", None),
            ("", None),
            ("é", None),
        ] {
            assert_eq!(grpc_timeout(text), expected, "{text}");
        }
    }
}
