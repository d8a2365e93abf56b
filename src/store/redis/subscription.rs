//! The subscription of an instance: a hint that a waiter was granted a slot, never the grant itself.

use std::{sync::Arc, time::Duration};

use deadpool_redis::redis::{RedisResult, Value};
use futures_util::StreamExt as _;
use tokio::time::{self, Instant};
use uuid::Uuid;

use super::finder::Finder;
use crate::store::{Event, Push, StoreError};

/// How often a connection that says nothing is asked whether it still works.
const PING_EVERY: Duration = Duration::from_secs(5);
/// Between two attempts to connect: doubled after each.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Subscribes, and again whenever the connection is lost.
pub(super) async fn run(finder: Arc<Finder>, channel: String, timeout: Duration, push: Push) {
    let mut pause = PAUSES.0;
    loop {
        let mut subscribed = false;
        let Err(error) = listen(&finder, &channel, timeout, &push, &mut subscribed).await;
        if subscribed {
            push(Event::Unsubscribed);
            pause = PAUSES.0;
        }
        tracing::debug!(%error, "the subscription is down");
        time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Listens until the connection is lost, or another server is the primary.
async fn listen(
    finder: &Finder,
    channel: &str,
    timeout: Duration,
    push: &Push,
    subscribed: &mut bool,
) -> Result<std::convert::Infallible, StoreError> {
    let primary = finder.current().await?;
    let connection = within(timeout, primary.client.get_async_pubsub()).await?;
    let (mut sink, mut messages) = connection.split();
    within(timeout, sink.subscribe(channel)).await?;
    *subscribed = true;
    push(Event::Subscribed);
    let mut ping = time::interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    loop {
        tokio::select! {
            message = messages.next() => {
                let message = message.ok_or_else(|| StoreError::Unavailable("closed".to_owned()))?;
                if let Some(event) = read(message.get_payload_bytes()) {
                    push(event);
                }
            }
            () = primary.replaced() => {
                return Err(StoreError::Unavailable("another server is the primary now".to_owned()));
            }
            // Nothing else would notice a connection whose other end is gone.
            _ = ping.tick() => {
                within(timeout, sink.ping::<Value>()).await?;
            }
        }
    }
}

/// An id that was granted a slot, or, behind a minus, one that had to go, or, behind an exclamation mark, one that an
/// operator evicts; or a plus: slots are wanted.
fn read(payload: &[u8]) -> Option<Event> {
    if payload == b"+" {
        return Some(Event::Wanted);
    }
    let (event, id): (fn(Uuid) -> Event, _) = match payload {
        [b'-', id @ ..] => (Event::Displaced, id),
        [b'!', id @ ..] => (Event::Evicted, id),
        id => (Event::Granted, id),
    };
    Uuid::try_parse_ascii(id).ok().map(event)
}

async fn within<T>(
    timeout: Duration,
    work: impl Future<Output = RedisResult<T>>,
) -> Result<T, StoreError> {
    match time::timeout(timeout, work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(StoreError::Timeout),
    }
}
