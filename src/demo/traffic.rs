use std::{
    mem,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri, header::RETRY_AFTER};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::{Instant, sleep};

/// Sends one request after the other for ever.
pub(super) struct Client {
    client: legacy::Client<HttpConnector, Empty<Bytes>>,
    uri: Uri,
    tally: Tally,
}

impl Client {
    pub(super) fn new(instance: SocketAddr, tally: Tally) -> Self {
        let uri = Uri::builder()
            .scheme("http")
            .authority(instance.to_string())
            .path_and_query("/v1/stream")
            .build()
            .expect("an address is an authority");
        Self { client: legacy::Client::builder(TokioExecutor::new()).build_http(), uri, tally }
    }

    pub(super) async fn run(self) {
        loop {
            // Nobody asks at the very same moment again and again.
            sleep(Duration::from_millis(fastrand::u64(0..30))).await;
            if let Some(pause) = self.request().await {
                sleep(pause).await;
            }
        }
    }

    /// Says how long to stay away, if it wasn't served.
    async fn request(&self) -> Option<Duration> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = self.uri.clone();
        let asked = Instant::now();
        let waiting = Waiting::new(&self.tally.0.waiting);
        let answer = self.client.request(request).await;
        drop(waiting);
        let second = Duration::from_secs(1);
        let response = match answer {
            Ok(response) => response,
            Err(_) => {
                self.tally.count(|figures| figures.failed += 1);
                return Some(second);
            }
        };
        let (status, wait) = (response.status(), asked.elapsed());
        let pause = retry_after(&response).unwrap_or(second);
        let whole = response.into_body().collect().await.is_ok();
        self.tally.count(|figures| match status {
            StatusCode::OK if whole => {
                figures.served += 1;
                figures.waits.push(wait);
            }
            StatusCode::TOO_MANY_REQUESTS => figures.too_many += 1,
            StatusCode::SERVICE_UNAVAILABLE => figures.refused += 1,
            _ => figures.failed += 1,
        });
        match status {
            StatusCode::OK => None,
            StatusCode::TOO_MANY_REQUESTS => Some(Duration::from_millis(100)),
            _ => Some(pause),
        }
    }
}

fn retry_after(response: &Response<Incoming>) -> Option<Duration> {
    let value = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    value.parse().ok().map(Duration::from_secs)
}

/// What the clients have seen, all of them together.
#[derive(Clone, Default)]
pub(super) struct Tally(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: AtomicUsize,
    figures: Mutex<(Figures, Figures)>,
}

/// What clients have seen in some time.
#[derive(Clone, Default)]
pub(super) struct Figures {
    pub(super) served: u64,
    pub(super) refused: u64,
    pub(super) failed: u64,
    too_many: u64,
    waits: Vec<Duration>,
}

impl Tally {
    /// Requests that wait for their answer's head.
    pub(super) fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Everything since the start.
    pub(super) fn total(&self) -> Figures {
        self.figures().0.clone()
    }

    /// Everything since the last call of this.
    pub(super) fn take_recent(&self) -> Figures {
        mem::take(&mut self.figures().1)
    }

    fn count(&self, count: impl Fn(&mut Figures)) {
        let (total, recent) = &mut *self.figures();
        count(total);
        count(recent);
    }

    fn figures(&self) -> MutexGuard<'_, (Figures, Figures)> {
        let figures = self.0.figures.lock();
        figures.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Figures {
    /// The wait that so many of a hundred didn't exceed; none where nobody waited.
    pub(super) fn wait(&self, percent: usize) -> Duration {
        let mut waits = self.waits.clone();
        waits.sort_unstable();
        let rank = (waits.len() * percent).div_ceil(100).saturating_sub(1);
        waits.get(rank).copied().unwrap_or_default()
    }
}

/// Counts one waiting request for as long as it lives.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
