//! Who goes first, what a request weighs, how many may come in a window, and what happens when a limit is full.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, StatusCode};

use super::Limit;

/// `[classes]`: the priority classes, of the whole fleet.
#[derive(Clone, Debug)]
pub struct Classes {
    /// One to eight names, the highest first. Everything else refers to them by index.
    pub order: Vec<Arc<str>>,
    /// A waiter counts as one class higher for each of these that it has waited.
    pub ageing: Duration,
}

impl Default for Classes {
    fn default() -> Self {
        let order = ["critical", "normal", "background"];
        Self { order: order.map(Arc::from).to_vec(), ageing: Duration::from_secs(5) }
    }
}

impl Classes {
    /// The class of a route that names none: `normal`, else the middle one.
    pub fn usual(&self) -> usize {
        let normal = self.order.iter().position(|name| &**name == "normal");
        normal.unwrap_or(self.order.len().saturating_sub(1) / 2)
    }
}

/// `limits.<name>.classes.<class>`
#[derive(Clone, Debug, PartialEq)]
pub struct ClassPolicy {
    /// The part of the slots up to which this class is admitted; above 0, at most 1.
    pub share: f64,
    /// How many of this class may wait; none for as many as the limit's queue takes.
    pub queue: Option<u32>,
    /// How long one may wait; none for as long as the limit's queue lets it.
    pub timeout: Option<Duration>,
}

impl Default for ClassPolicy {
    fn default() -> Self {
        Self { share: 1.0, queue: None, timeout: None }
    }
}

impl Limit {
    /// How many slots may be in use for one of this class still to be admitted.
    pub fn cap(&self, class: usize) -> u32 {
        let share = self.classes.get(class).map_or(1.0, |policy| policy.share);
        ((share * f64::from(self.slots)).floor() as u32).max(1).min(self.slots)
    }
}

/// What splits a limit or a rate, each value having its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// `"header:x-tenant"`: the value that the client sent; without one, all share one.
    Header(HeaderName),
    /// `"client-ip"`
    ClientIp,
}

/// `mode`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Refuses.
    #[default]
    Enforce,
    /// Admits always, and counts what it would have done.
    Shadow,
}

/// `[rates.<name>]`
#[derive(Clone, Debug)]
pub struct Rate {
    /// Like the name of a limit.
    pub name: Arc<str>,
    /// How many requests may come within any window; at least 1.
    pub requests: u32,
    /// The window's length.
    pub window: Duration,
    /// Counts per value of this; none for all together.
    pub key: Option<Key>,
    /// Whether it refuses.
    pub mode: Mode,
}

impl Rate {
    /// Bytes in Redis for one key value at its limit; measured, so an estimate.
    pub fn bytes_per_key(&self) -> u64 {
        // Redis keeps a short sorted set packed.
        let entry = if self.requests <= 128 { 52 } else { 150 };
        u64::from(self.requests) * entry
    }
}

/// `class` of a route: an index into [`Classes::order`], or where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClassRule {
    /// Always this one.
    Fixed(usize),
    /// The name in a header, from trusted hops only.
    Header {
        /// Which header.
        name: HeaderName,
        /// Where the header is missing, unknown or not to be trusted.
        default: usize,
    },
    /// By the value of a key.
    ByKey {
        /// Which key.
        key: Key,
        /// The class of each value.
        classes: Vec<(String, usize)>,
        /// Any other value's class.
        default: usize,
    },
}

/// `weight` of a route: how many slots one request takes of each limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightRule {
    /// Always this many.
    Fixed(u32),
    /// The number in a header, from trusted hops only; 1 without.
    Header {
        /// Which header.
        name: HeaderName,
        /// More count as this many.
        max: u32,
    },
    /// By the length of the request's body.
    Bytes {
        /// One slot for each of these begun.
        per_slot: u64,
        /// More count as this many.
        max: u32,
    },
}

impl WeightRule {
    /// The most that a request of the route weighs.
    pub fn max(&self) -> u32 {
        match self {
            Self::Fixed(weight) => *weight,
            Self::Header { max, .. } | Self::Bytes { max, .. } => *max,
        }
    }
}

/// `dialect` of a route: the form of a refusal's body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// RFC 9457.
    #[default]
    Problem,
    /// The error object of the OpenAI API.
    OpenAi,
    /// The error object of the Anthropic API.
    Anthropic,
    /// One line of plain text.
    Text,
}

/// One step of `on_full`, tried in order when a limit of the route is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sends the request elsewhere, under that upstream's own limits.
    Upstream {
        /// Index into [`super::Config::upstreams`].
        upstream: usize,
        /// Whether the client's credentials go along.
        forward_credentials: bool,
    },
    /// Answers `GET` and `HEAD` with a copy of an earlier answer.
    Stale {
        /// How long ago the copy may have been fresh.
        allowance: Duration,
    },
    /// Answers with a fixed text.
    Respond {
        /// Of the answer.
        status: StatusCode,
        /// Of the answer.
        body: String,
        /// Of the body.
        content_type: HeaderValue,
    },
}
