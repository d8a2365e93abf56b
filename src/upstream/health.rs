//! Which endpoints are fit to serve: asked by us (`health`), and judged by what becomes of requests (`ejection`).
//!
//! An endpoint is out while it is unhealthy or ejected. Where all are out all are used: bad answers for some are better than none
//! for anybody, and the checks may be what is wrong.

use std::{
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Request, Uri,
    header::{CONNECTION, HOST, USER_AGENT},
};
use tokio::time::Instant;

use super::{
    Incoming, Line, Sent,
    endpoints::{Busy, Endpoint},
};
use crate::{
    body::BoxError,
    config::{Ejection, HealthCheck},
    upload::Outgoing,
};

/// What of an answer to a check is read.
const LONGEST_ANSWER: usize = 64 * 1024;

/// How an endpoint does.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Requests in a row that came to nothing.
    failures: AtomicU32,
    /// What follows from the notes.
    is_out: AtomicBool,
    /// Whether the latest request got no answer; since when is noted.
    is_silent: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    is_unhealthy: bool,
    is_ejected: bool,
    silent_since: Option<Instant>,
    /// How often in a row, without as long a stay in between as the last ejection was.
    ejections: u32,
    /// When it came back, and how long it had been out.
    back: Option<(Instant, Duration)>,
}

// === impl Standing ===

impl Standing {
    pub(super) fn is_out(&self) -> bool {
        self.is_out.load(Ordering::Relaxed)
    }

    pub(super) fn is_ejected(&self) -> bool {
        self.lock().is_ejected
    }

    /// One word for operators.
    pub(super) fn word(&self) -> &'static str {
        let notes = self.lock();
        match (notes.is_unhealthy, notes.is_ejected) {
            (true, _) => "unhealthy",
            (false, true) => "ejected",
            (false, false) => "up",
        }
    }

    /// Something was answered, whatever it was.
    pub(super) fn answered(&self) {
        if self.is_silent.load(Ordering::Relaxed) {
            let mut notes = self.lock();
            self.is_silent.store(false, Ordering::Relaxed);
            notes.silent_since = None;
        }
    }

    /// It couldn't be reached, or closed the connection.
    pub(super) fn unanswered(&self, now: Instant) {
        let mut notes = self.lock();
        self.is_silent.store(true, Ordering::Relaxed);
        notes.silent_since.get_or_insert(now);
    }

    /// For how long nothing has been answered, if the latest request wasn't.
    pub(super) fn silent_for(&self, now: Instant) -> Option<Duration> {
        self.lock().silent_since.map(|since| now.saturating_duration_since(since))
    }

    /// A request was answered well.
    pub(super) fn served(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// A request came to nothing; says how many have in a row.
    pub(super) fn failed(&self) -> u32 {
        self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Takes the endpoint out; says for how long, none if it is out already.
    pub(super) fn eject(&self, ejection: &Ejection, now: Instant) -> Option<Duration> {
        let mut notes = self.lock();
        if notes.is_ejected {
            return None;
        }
        let was_good = notes.back.is_none_or(|(since, out)| now - since >= out);
        notes.ejections = if was_good { 1 } else { notes.ejections.saturating_add(1) };
        let doubled = ejection.time.saturating_mul(2u32.saturating_pow(notes.ejections - 1));
        // Not all instances let it back in at the same time.
        let time = doubled.min(ejection.max_time).mul_f64(1.0 + fastrand::f64() / 4.0);
        notes.is_ejected = true;
        notes.back = Some((now + time, time));
        self.settle(&notes);
        Some(time)
    }

    /// Lets it in again.
    pub(super) fn come_back(&self) {
        let mut notes = self.lock();
        notes.is_ejected = false;
        self.failures.store(0, Ordering::Relaxed);
        self.settle(&notes);
    }

    /// What the checks say; true if that is news.
    fn set_unhealthy(&self, is_unhealthy: bool) -> bool {
        let mut notes = self.lock();
        let was = std::mem::replace(&mut notes.is_unhealthy, is_unhealthy);
        self.settle(&notes);
        was != is_unhealthy
    }

    fn settle(&self, notes: &Notes) {
        self.is_out.store(notes.is_unhealthy || notes.is_ejected, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === checks ===

/// Asks an endpoint for as long as it exists.
pub(super) async fn check_for_ever(endpoint: Weak<Endpoint>, check: HealthCheck) {
    let (mut good, mut bad) = (0, 0);
    loop {
        let Some(asked) = endpoint.upgrade() else {
            return;
        };
        let answer = tokio::time::timeout(check.timeout, ask(&asked, &check)).await;
        match answer.map_err(BoxError::from).flatten() {
            Ok(()) => {
                (good, bad) = (good + 1, 0);
                asked.standing.answered();
                if good >= check.healthy && asked.standing.set_unhealthy(false) {
                    let (upstream, endpoint) = asked.names();
                    tracing::info!(upstream, endpoint, addr = %asked.addr, "an endpoint is healthy");
                }
            }
            Err(error) => {
                (good, bad) = (0, bad + 1);
                if bad >= check.unhealthy && asked.standing.set_unhealthy(true) {
                    let (upstream, endpoint) = asked.names();
                    tracing::warn!(upstream, endpoint, addr = %asked.addr, %error, "an endpoint is unhealthy");
                }
            }
        }
        drop(asked);
        // Not all instances ask at the same time.
        tokio::time::sleep(check.interval.mul_f64(0.9 + fastrand::f64() / 5.0)).await;
    }
}

/// Takes no slot.
async fn ask(endpoint: &Arc<Endpoint>, check: &HealthCheck) -> Result<(), BoxError> {
    let mut request = Request::new(Outgoing::Empty);
    *request.uri_mut() = Uri::from(check.path.clone());
    let headers = request.headers_mut();
    headers.insert(HOST, endpoint.authority());
    headers.insert(USER_AGENT, HeaderValue::from_static("tidegate-health"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let mut sent = Sent::probe(Busy::new(endpoint), Box::new(request));
    let (response, on) =
        poll_fn(|cx| sent.poll(cx)).await.map_err(|failed| BoxError::from(failed.cause))?;
    let mut line = Line::new(sent.busy(), on);
    let (head, body) = response.into_parts();
    let ended = read(&mut line, body).await;
    line.open().close();
    ended?;
    match check.is_good(head.status) {
        true => Ok(()),
        false => Err(format!("it answered {}", head.status.as_u16()).into()),
    }
}

/// Reads an answer to its end.
async fn read(line: &mut Line, mut body: Incoming) -> Result<(), BoxError> {
    let mut length = 0;
    while let Some(frame) = poll_fn(|cx| line.poll_frame(&mut body, cx)).await {
        length += frame?.data_ref().map_or(0, Bytes::len);
        if length > LONGEST_ANSWER {
            return Err("its answer is too long".into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EJECTION: Ejection = Ejection {
        failures: 3,
        statuses: Vec::new(),
        time: Duration::from_secs(10),
        max_time: Duration::from_secs(60),
        share: 0.5,
    };

    fn is_about(time: Option<Duration>, seconds: u64) -> bool {
        let base = Duration::from_secs(seconds);
        time.is_some_and(|time| (base..=base * 5 / 4).contains(&time))
    }

    #[tokio::test(start_paused = true)]
    async fn each_ejection_is_longer_until_it_was_in_for_as_long_as_out() {
        let standing = Standing::default();
        for seconds in [10, 20, 40, 60, 60] {
            let time = standing.eject(&EJECTION, Instant::now());
            assert!(is_about(time, seconds), "{time:?} instead of {seconds}");
            assert_eq!(standing.eject(&EJECTION, Instant::now()), None);
            assert!(standing.is_out() && standing.word() == "ejected");
            tokio::time::sleep(time.unwrap()).await;
            standing.come_back();
            assert!(!standing.is_out() && standing.word() == "up");
        }
        tokio::time::sleep(Duration::from_secs(76)).await;
        assert!(is_about(standing.eject(&EJECTION, Instant::now()), 10));
    }

    #[test]
    fn failures_count_in_a_row() {
        let standing = Standing::default();
        assert_eq!((standing.failed(), standing.failed()), (1, 2));
        standing.served();
        assert_eq!(standing.failed(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_from_its_first_request_to_any_answer() {
        let standing = Standing::default();
        assert_eq!(standing.silent_for(Instant::now()), None);
        standing.unanswered(Instant::now());
        tokio::time::advance(Duration::from_secs(3)).await;
        standing.unanswered(Instant::now());
        assert_eq!(standing.silent_for(Instant::now()), Some(Duration::from_secs(3)));
        standing.answered();
        assert_eq!(standing.silent_for(Instant::now()), None);
    }

    #[test]
    fn who_is_unhealthy_and_ejected_needs_both_to_end() {
        let standing = Standing::default();
        assert!(standing.set_unhealthy(true) && !standing.set_unhealthy(true));
        assert!(standing.eject(&EJECTION, Instant::now()).is_some());
        standing.come_back();
        assert!(standing.is_out());
        assert!(standing.set_unhealthy(false) && !standing.is_out());
    }
}
