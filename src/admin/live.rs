//! Server-sent events for the page: one sampler for all who watch, and the last five minutes for whoever comes.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::Either;
use serde_json::{Map, Value, json};
use tokio::{
    sync::{Notify, mpsc},
    time::{MissedTickBehavior, interval},
};

use super::{Admin, Answer, answer, text};

/// Between two samples.
const EVERY: Duration = Duration::from_secs(1);
/// How many samples are kept: five minutes.
const KEPT: usize = 300;
/// How many may watch.
const MOST_WATCHERS: usize = 32;
/// How many events may lie unread until whoever should read them is dropped.
const MOST_UNREAD: usize = 8;

/// Who watches, and what there was to see.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    samples: VecDeque<Sample>,
    watchers: Vec<Watcher>,
}

/// How every limit stood at one time.
#[derive(Debug)]
struct Sample {
    /// Since 1970, ms.
    at: u64,
    limits: Vec<(Arc<str>, Figures)>,
}

/// Slots, of them in use, of those ours; waiters; refused by this instance so far.
type Figures = [u64; 5];

#[derive(Debug)]
struct Watcher {
    to: mpsc::Sender<Bytes>,
    lost: Arc<Notify>,
}

/// A connection's place among those who watch.
#[derive(Debug)]
pub(super) struct Seat {
    live: Arc<Live>,
    lost: Arc<Notify>,
}

/// The body of a stream of events, which never ends by itself.
#[derive(Debug)]
pub(super) struct Events(mpsc::Receiver<Bytes>);

// === impl Live ===

impl Live {
    /// Starts the sampler, which ends with what is returned.
    pub(super) fn start(admin: Arc<ArcSwap<Admin>>) -> Arc<Self> {
        let live = Arc::new(Self::default());
        tokio::spawn(sample_for_ever(Arc::downgrade(&live), admin));
        live
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, sample: Sample) {
        let samples = &mut self.lock().samples;
        if samples.len() == KEPT {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    fn is_watched(&self) -> bool {
        let watchers = &mut self.lock().watchers;
        watchers.retain(|watcher| !watcher.to.is_closed());
        !watchers.is_empty()
    }

    /// Who doesn't read what it is told loses its connection.
    fn tell(&self, event: &Bytes) {
        self.lock().watchers.retain(|Watcher { to, lost }| {
            let is_told = to.try_send(event.clone()).is_ok();
            if !is_told {
                lost.notify_one();
            }
            is_told
        });
    }
}

async fn sample_for_ever(live: Weak<Live>, admin: Arc<ArcSwap<Admin>>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let Some(live) = live.upgrade() else { return };
        let admin = admin.load_full();
        live.keep(admin.sample());
        // The store is asked only for those who look.
        if live.is_watched() {
            live.tell(&event("snapshot", &with_time(admin.status().await)));
        }
    }
}

impl Admin {
    /// As of the last heartbeat, so that it costs the store nothing.
    fn sample(&self) -> Sample {
        let outlook = self.admission.outlook();
        let figures = |index: usize| {
            let seen = &outlook.sets[index];
            let refused = self.metrics.refusals(&self.limits[index]);
            let refused = refused.into_iter().map(|(_, count)| count).sum();
            let counts = [seen.slots, seen.used, outlook.local[index], seen.waiting].map(u64::from);
            let [slots, used, local, waiting] = counts;
            [slots, used, local, waiting, refused]
        };
        // Of one that no heartbeat has told of yet there is nothing to keep.
        let is_known =
            |index: usize| outlook.sets[index].slots > 0 || outlook.sets[index].lease > 0;
        let limits = self.limits.iter().enumerate().filter(|(index, _)| is_known(*index));
        let limits = limits.map(|(index, name)| (Arc::clone(name), figures(index))).collect();
        Sample { at: now_ms(), limits }
    }
}

// === impl Seat ===

impl Seat {
    pub(super) fn of(live: &Arc<Live>) -> Self {
        Self { live: Arc::clone(live), lost: Arc::default() }
    }

    /// Resolves if what this connection is told lies unread for too long.
    pub(super) async fn lost(&self) {
        self.lost.notified().await;
    }

    /// The stream of events: first what was, and what is now.
    pub(super) fn take(&self, is_head: bool, now: Value) -> Answer {
        let mut head = answer(StatusCode::OK, "text/event-stream", String::new());
        if is_head {
            return head;
        }
        let mut state = self.live.lock();
        state.watchers.retain(|watcher| !watcher.to.is_closed());
        if state.watchers.len() >= MOST_WATCHERS {
            let why = "too many watch already\n";
            let mut refused = text(StatusCode::SERVICE_UNAVAILABLE, why);
            refused.headers_mut().insert(header::RETRY_AFTER, 5.into());
            return refused;
        }
        let (to, events) = mpsc::channel(MOST_UNREAD);
        for first in [event("history", &state.history()), event("snapshot", &with_time(now))] {
            to.try_send(first).expect("a new channel has room");
        }
        state.watchers.push(Watcher { to, lost: Arc::clone(&self.lost) });
        *head.body_mut() = Either::Right(Events(events));
        head
    }
}

impl State {
    /// Per limit: time and figures of each sample, the oldest first.
    fn history(&self) -> Value {
        let mut limits: Map<String, Value> = Map::new();
        for Sample { at, limits: sampled } in &self.samples {
            for (name, [slots, used, local, waiting, refused]) in sampled {
                let points = limits.entry(&**name).or_insert_with(|| json!([]));
                if let Value::Array(points) = points {
                    points.push(json!([at, slots, used, local, waiting, refused]));
                }
            }
        }
        json!({ "limits": limits })
    }
}

// === events ===

fn event(name: &str, data: &Value) -> Bytes {
    // Compact JSON has no line breaks, which would end the event.
    format!("event: {name}\ndata: {data}\n\n").into()
}

fn with_time(mut status: Value) -> Value {
    status["at"] = json!(now_ms());
    status
}

fn now_ms() -> u64 {
    let today = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    today.as_millis() as u64
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(live: &Arc<Live>) -> (Seat, Events) {
        let seat = Seat::of(live);
        match seat.take(false, json!({})).into_body() {
            Either::Right(events) => (seat, events),
            Either::Left(_) => panic!("there was no room"),
        }
    }

    #[tokio::test]
    async fn who_does_not_read_is_dropped_and_nobody_else() {
        let live = Arc::new(Live::default());
        let ((slow, _unread), (_quick, mut events)) = (seat(&live), seat(&live));
        for _ in 0..MOST_UNREAD {
            while events.0.try_recv().is_ok() {}
            live.tell(&event("snapshot", &json!({})));
        }
        slow.lost().await;
        assert_eq!(live.lock().watchers.len(), 1);
        assert!(events.0.try_recv().is_ok());
    }

    #[test]
    fn there_is_room_for_some_and_again_for_those_who_come_after() {
        let live = Arc::new(Live::default());
        let mut seats: Vec<_> = (0..MOST_WATCHERS).map(|_| seat(&live)).collect();
        let refused = Seat::of(&live).take(false, json!({}));
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        seats.pop();
        seat(&live);
    }

    #[test]
    fn five_minutes_are_kept() {
        let live = Live::default();
        for at in 0..=KEPT as u64 {
            live.keep(Sample { at, limits: vec![("llm".into(), [5, 4, 3, 2, 1])] });
        }
        let history = live.lock().history();
        let points = history["limits"]["llm"].as_array().unwrap();
        assert_eq!((points.len(), &points[0]), (KEPT, &json!([1, 5, 4, 3, 2, 1])));
    }
}
