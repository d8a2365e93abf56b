//! Copies of answers, told again while a limit is full.
//!
//! A shared cache by the rules of RFC 9111, but for one thing: while there is room at the upstream it isn't asked. So every
//! answer that may be told again is copied as it streams by, and the newest copy counts.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Response, StatusCode, header, request::Parts};
use moka::{policy::EvictionPolicy, sync::Cache};

use crate::{
    config::{Config, Step},
    gauge::Gauge,
    headers,
};

mod condition;
mod tee;
mod terms;
#[cfg(test)]
mod tests;

pub(crate) use tee::Tee;
use terms::{Terms, Vintage};

const MIB: usize = 1024 * 1024;
/// The longest body that is copied.
pub(crate) const LONGEST_COPY: usize = MIB;
/// What copies take in this process together.
pub(crate) const ALL_COPIES: usize = KEPT + IN_THE_MAKING;
const KEPT: usize = 48 * MIB;
const IN_THE_MAKING: usize = 16 * MIB;
/// Copies of one target, for requests that differ in what the answer varies by.
const VARIANTS: usize = 8;
/// What a copy takes beside its texts; an estimate.
const OVERHEAD: usize = 1024;

/// Every copy of this process. There is none where no route has a step for it.
#[derive(Debug)]
pub(crate) struct Copies {
    /// Whether a route's answers are copied.
    routes: Vec<bool>,
    kept: Cache<Key, Arc<[Arc<Kept>]>>,
    in_the_making: Arc<Gauge>,
    /// How often something was changed by its clients, in a few buckets: an answer that was asked for before a change and
    /// ends after it is out of date already.
    changes: [AtomicU32; 256],
    buckets: RandomState,
}

/// What was asked for. The same path of another host is another thing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    host: String,
    target: String,
}

/// One copy.
#[derive(Debug)]
struct Kept {
    /// Another route leads to another upstream.
    route: usize,
    terms: Terms,
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// What the answer to a request means for the copies.
#[derive(Debug)]
pub(crate) enum Interest {
    /// It may be copied.
    Copy(Box<Asked>),
    /// Where it succeeds it changes what was copied.
    Change(Changed),
}

/// A request whose answer may be copied.
#[derive(Debug)]
pub(crate) struct Asked {
    key: Key,
    route: usize,
    headers: HeaderMap,
    /// Headers that the upstream saw otherwise than the client sent them.
    altered: Vec<HeaderName>,
    changes: u32,
}

/// The target of a request that may change it.
#[derive(Debug)]
pub(crate) struct Changed(Key);

/// A copy for a request.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Since the upstream made it.
    pub(crate) age: Duration,
    /// Seconds for which it is still fresh; negative once it isn't.
    pub(crate) ttl: i64,
}

impl Copies {
    pub(crate) fn new(config: &Config) -> Option<Arc<Self>> {
        let is_stale = |step: &Step| matches!(step, Step::Stale { .. });
        let routes: Vec<_> =
            config.routes.iter().map(|route| route.on_full.iter().any(is_stale)).collect();
        let kept = Cache::builder()
            .max_capacity(KEPT as u64)
            .eviction_policy(EvictionPolicy::lru())
            .weigher(|key: &Key, kept: &Arc<[Arc<Kept>]>| {
                let copies: usize = kept.iter().map(|copy| copy.size()).sum();
                u32::try_from(copies + key.size()).unwrap_or(u32::MAX)
            });
        routes.contains(&true).then(|| {
            Arc::new(Self {
                routes,
                kept: kept.build(),
                in_the_making: Gauge::new(IN_THE_MAKING),
                changes: std::array::from_fn(|_| AtomicU32::new(0)),
                buckets: RandomState::new(),
            })
        })
    }

    /// What this request means for the copies, if anything. Asked before its headers are changed.
    pub(crate) fn interest(&self, route: usize, parts: &Parts, has_body: bool) -> Option<Interest> {
        if !parts.method.is_safe() {
            return Some(Interest::Change(Changed(Key::of(parts))));
        }
        let is_copied = self.routes[route] && parts.method == Method::GET && !has_body;
        is_copied.then(|| {
            let key = Key::of(parts);
            let changes = self.changes_of(&key).load(Ordering::Acquire);
            let (headers, altered) = (parts.headers.clone(), Vec::new());
            Interest::Copy(Box::new(Asked { key, route, headers, altered, changes }))
        })
    }

    /// The head of the answer is here, after this time. Copies of what it changes go; if it may be told again itself, the
    /// result is to see its body: in a box, since every request has room for one.
    pub(crate) fn answered(
        self: &Arc<Self>,
        interest: Interest,
        head: &Response<()>,
        took: Duration,
    ) -> Option<Box<Tee>> {
        match interest {
            Interest::Change(Changed(key)) => {
                if head.status().is_success() || head.status().is_redirection() {
                    self.changes_of(&key).fetch_add(1, Ordering::AcqRel);
                    self.kept.invalidate(&key);
                }
                None
            }
            Interest::Copy(asked) => {
                let terms = Terms::of(&asked, head, took)?;
                Tee::new(Arc::clone(self), *asked, terms, head).map(Box::new)
            }
        }
    }

    /// A copy that may answer this request: of all that do, the newest.
    pub(crate) fn find(&self, route: usize, parts: &Parts, allowance: Duration) -> Option<Found> {
        let is_read = parts.method == Method::GET || parts.method == Method::HEAD;
        if !is_read || condition::is_for_the_upstream(&parts.headers) {
            return None;
        }
        let kept = self.kept.get(&Key::of(parts))?;
        let mut newest_first = kept.iter().rev().filter(|copy| copy.route == route);
        newest_first.find_map(|copy| {
            let vintage = copy.terms.allow(&parts.headers, allowance)?;
            Some(copy.found(&parts.headers, vintage))
        })
    }

    fn keep(&self, asked: &Asked, copy: Kept) {
        let key = &asked.key;
        let is_current = || self.changes_of(key).load(Ordering::Acquire) == asked.changes;
        if !is_current() {
            return;
        }
        let copy = Arc::new(copy);
        self.kept.entry_by_ref(key).and_upsert_with(|entry| {
            let earlier = entry.map(|entry| entry.into_value()).unwrap_or_default();
            let others = earlier.iter().filter(|other| !other.terms.selects(&asked.headers));
            let others: Vec<_> = others.cloned().collect();
            let room = others.len().saturating_sub(VARIANTS - 1);
            others.into_iter().skip(room).chain([copy]).collect()
        });
        // Changed in between: whoever did it may have been too early to remove this copy.
        if !is_current() {
            self.kept.invalidate(key);
        }
        // The bound is kept now, and not when it suits.
        self.kept.run_pending_tasks();
    }

    fn changes_of(&self, key: &Key) -> &AtomicU32 {
        &self.changes[self.buckets.hash_one(key) as usize % self.changes.len()]
    }
}

impl Asked {
    /// What the upstream gets to see of the request.
    fn sent(&mut self, sent: &HeaderMap) {
        let names = sent.keys().chain(self.headers.keys());
        let is_altered =
            |name: &&HeaderName| sent.get_all(*name).iter().ne(self.headers.get_all(*name));
        self.altered = names.filter(is_altered).cloned().collect();
    }
}

impl Interest {
    /// What the upstream gets to see of the request.
    pub(crate) fn sent(&mut self, headers: &HeaderMap) {
        if let Self::Copy(asked) = self {
            asked.sent(headers);
        }
    }
}

impl Key {
    fn of(parts: &Parts) -> Self {
        let host = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
        Self { host: host.unwrap_or_default().to_ascii_lowercase(), target: target.to_owned() }
    }

    fn size(&self) -> usize {
        self.host.len() + self.target.len() + OVERHEAD
    }
}

impl Kept {
    fn size(&self) -> usize {
        // The terms have much of the head once more.
        2 * size_of_headers(&self.headers) + self.terms.size() + self.body.len() + OVERHEAD
    }

    fn found(&self, asked: &HeaderMap, vintage: Vintage) -> Found {
        let Vintage { age, ttl } = vintage;
        let (mut headers, mut found) = (self.headers.clone(), (self.status, self.body.clone()));
        if self.status == StatusCode::OK && condition::is_unmodified(asked, &headers) {
            found = (StatusCode::NOT_MODIFIED, Bytes::new());
            condition::leave_validators(&mut headers);
        } else if self.status != StatusCode::NO_CONTENT {
            headers.insert(header::CONTENT_LENGTH, self.body.len().into());
        }
        let (status, body) = found;
        Found { status, headers, body, age, ttl }
    }
}

fn size_of_headers(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 64).sum()
}

/// The head as it is told again: without what meant the connection or that one exchange.
fn head_of(head: &Response<()>) -> HeaderMap {
    let mut fields = head.headers().clone();
    headers::to_client(&mut fields);
    for name in [header::AGE, header::CONTENT_LENGTH, header::TRAILER, headers::SERVER_TIMING] {
        fields.remove(name);
    }
    fields
}
