//! On what terms an answer may be told again.
//!
//! The library knows the rules; what it leaves to its caller, or reads too narrowly, is settled before it is asked: names of
//! directives in any case, headers of several lines, the age of an answer by its `Date`, and which answers may not be stale.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header};
use http_cache_semantics::{BeforeRequest, CacheOptions, CachePolicy};
use tokio::time::Instant;

use super::{Asked, size_of_headers};
use crate::headers;

/// The age of which nobody asks how much more it is (RFC 9111, 1.2.2).
const OLDEST: u64 = 1 << 31;

#[derive(Debug)]
pub(super) struct Terms {
    policy: CachePolicy,
    /// When the upstream made the answer.
    born: SystemTime,
    /// How old it was when it came here, and when that was. From then on it ages by a clock that nobody sets.
    age: Duration,
    came: Instant,
    /// What the answer varies by, and what it was in the request.
    vary: Vec<HeaderName>,
    selected: HeaderMap,
    /// Said to be for everybody, so that who asks doesn't matter.
    is_for_all: bool,
    must_be_fresh: bool,
}

/// How old a copy is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Vintage {
    pub(super) age: Duration,
    /// Seconds for which it is still fresh; negative once it isn't.
    pub(super) ttl: i64,
}

impl Terms {
    /// None if the answer, which came after this time, may not be told again.
    pub(super) fn of(asked: &Asked, head: &Response<()>, took: Duration) -> Option<Self> {
        let answer = head.headers();
        let said = Directives::of(answer)?;
        // These would have to be asked about at the upstream first, which is full then.
        if said.has("no-cache") || said.has("proxy-revalidate") {
            return None;
        }
        if said.is_empty() && names_no_cache(answer, header::PRAGMA) {
            return None;
        }
        // The rules allow it; but one client's cookie for all is too much of a risk.
        if answer.contains_key(header::SET_COOKIE) {
            return None;
        }
        let vary = varies_by(answer)?;
        if vary.iter().any(|name| asked.altered.contains(name)) {
            return None;
        }
        let now = SystemTime::now();
        let date = answer.get(header::DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
        let apparent = now.duration_since(date).unwrap_or_default();
        let age = apparent.max(said_age(answer) + took);
        let born = now.checked_sub(age)?;
        let mut response = Response::builder().status(head.status()).body(()).ok()?;
        let fields = response.headers_mut();
        fields.insert(header::DATE, HeaderValue::try_from(httpdate::fmt_http_date(date)).ok()?);
        for name in [header::EXPIRES, header::LAST_MODIFIED] {
            if let Some(value) = answer.get(&name) {
                fields.insert(name, value.clone());
            }
        }
        said.write(fields);
        let selected = select(&vary, &asked.headers);
        let request = request_of(&selected, &asked.headers, &Directives::of(&asked.headers)?)?;
        let options =
            CacheOptions { immutable_min_time_to_live: Duration::ZERO, ..CacheOptions::default() };
        let policy = CachePolicy::new_options(&request, &response, born, options);
        let is_for_all = ["public", "s-maxage", "must-revalidate"].iter().any(|one| said.has(one));
        policy.is_storable().then(|| Self {
            policy,
            born,
            age,
            came: Instant::now(),
            vary,
            selected,
            is_for_all,
            must_be_fresh: said.has("must-revalidate") || said.has("s-maxage"),
        })
    }

    /// Whether the copy may answer this request, having been fresh no longer ago than the allowance.
    pub(super) fn allow(&self, asked: &HeaderMap, allowance: Duration) -> Option<Vintage> {
        if !self.selects(asked) || (has_credentials(asked) && !self.is_for_all) {
            return None;
        }
        let age = self.age + self.came.elapsed();
        let lifetime = self.policy.time_to_live(self.born);
        let (left, overdue) = (lifetime.saturating_sub(age), age.saturating_sub(lifetime));
        if left.is_zero() && (self.must_be_fresh || overdue > allowance) {
            return None;
        }
        let mut wishes = Directives::of(asked)?;
        // As if the client had said so; what it did say comes first and counts.
        wishes.add(&format!("max-stale={}", allowance.as_secs().saturating_add(1)));
        let request = request_of(&self.selected, asked, &wishes)?;
        let verdict = self.policy.before_request(&request, self.born.checked_add(age)?);
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        matches!(verdict, BeforeRequest::Fresh(_))
            .then(|| Vintage { age, ttl: seconds(left) - seconds(overdue) })
    }

    /// Whether a request has the same values of what the answer varies by.
    pub(super) fn selects(&self, asked: &HeaderMap) -> bool {
        select(&self.vary, asked) == self.selected
    }

    pub(super) fn size(&self) -> usize {
        2 * size_of_headers(&self.selected)
    }
}

/// The lines of `Cache-Control` as one, in lower case.
struct Directives(String);

impl Directives {
    /// None if they aren't text.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = Self(String::new());
        for line in headers.get_all(header::CACHE_CONTROL) {
            all.add(&line.to_str().ok()?.to_ascii_lowercase());
        }
        Some(all)
    }

    fn add(&mut self, line: &str) {
        if !self.is_empty() {
            self.0.push_str(", ");
        }
        self.0.push_str(line);
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, name: &str) -> bool {
        let mut names =
            self.0.split(',').map(|part| part.split('=').next().unwrap_or_default().trim());
        names.any(|one| one == name)
    }

    fn write(&self, headers: &mut HeaderMap) {
        if let Ok(line) = HeaderValue::try_from(&self.0)
            && !self.is_empty()
        {
            headers.insert(header::CACHE_CONTROL, line);
        }
    }
}

/// As much of a request as the rules look at.
fn request_of(selected: &HeaderMap, asked: &HeaderMap, wishes: &Directives) -> Option<Request<()>> {
    let mut request = Request::builder().method(Method::GET).uri("/").body(()).ok()?;
    let headers = request.headers_mut();
    headers.clone_from(selected);
    // Whatever proves who the client is counts as this header does.
    if has_credentials(asked) {
        headers.entry(header::AUTHORIZATION).or_insert(HeaderValue::from_static("-"));
    }
    wishes.write(headers);
    if !asked.contains_key(header::CACHE_CONTROL) && names_no_cache(asked, header::PRAGMA) {
        headers.insert(header::PRAGMA, HeaderValue::from_static("no-cache"));
    }
    Some(request)
}

fn has_credentials(asked: &HeaderMap) -> bool {
    headers::CREDENTIALS.iter().any(|name| asked.contains_key(name))
}

fn names_no_cache(headers: &HeaderMap, name: HeaderName) -> bool {
    let mut lines = headers.get_all(name).iter();
    lines.any(|line| line.as_bytes().to_ascii_lowercase().windows(8).any(|at| at == b"no-cache"))
}

/// None if it varies by more than headers, or nobody can tell by what.
fn varies_by(answer: &HeaderMap) -> Option<Vec<HeaderName>> {
    let mut names = Vec::new();
    for line in answer.get_all(header::VARY) {
        for name in line.to_str().ok()?.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match name {
                "*" => return None,
                name => names.push(HeaderName::try_from(name).ok()?),
            }
        }
    }
    Some(names)
}

/// Of a request what an answer varies by, each as one line.
fn select(vary: &[HeaderName], asked: &HeaderMap) -> HeaderMap {
    let mut selected = HeaderMap::with_capacity(vary.len());
    for name in vary {
        let lines: Vec<_> = asked.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        if !lines.is_empty() {
            let line = HeaderValue::from_bytes(&lines.join(&b", "[..]));
            selected.insert(name, line.expect("joined from values"));
        }
    }
    selected
}

/// What caches on the way say how old the answer is.
fn said_age(answer: &HeaderMap) -> Duration {
    let said = answer.get(header::AGE).and_then(|age| age.to_str().ok()).unwrap_or_default();
    let first = said.split(',').next().unwrap_or_default().trim();
    let is_number = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = if is_number { first.parse().unwrap_or(OLDEST).min(OLDEST) } else { 0 };
    Duration::from_secs(seconds)
}
