//! The keeper's task: connects to the store, again and again where it must, and carries calls there and replies back, in order.
//! Several calls may be in flight; whatever arrives meanwhile goes out together with the next one.

use futures_util::{StreamExt, future::poll_immediate, stream::FuturesUnordered};

use super::*;
use crate::store::{BoxFuture, Call, Link, Reply, StoreError};

/// How many calls may be unanswered. More shortens the way of a lone request, fewer makes larger batches.
const CALLS_IN_FLIGHT: usize = 2;
/// Between two attempts to connect, at most; half to all of it is drawn.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

type Flight = BoxFuture<'static, Flown>;

struct Flown {
    epoch: u64,
    call: Call,
    sent: Instant,
    result: Result<Reply, StoreError>,
}

/// Runs until the instance has left.
pub(super) async fn run(desk: Arc<Desk>) {
    if desk.store.local().is_some() {
        return ring_alarms(desk).await;
    }
    let mut failures = 0;
    loop {
        match open(&desk).await {
            Ok(link) => {
                drive(&desk, link, &mut failures).await;
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, "no connection to the store");
                desk.lock().give_up_after(failures, Instant::now());
            }
        }
        if desk.lock().has_left() {
            return;
        }
        pause(&desk, failures).await;
    }
}

/// A local store needs no connection, but somebody must notice that time has passed.
async fn ring_alarms(desk: Arc<Desk>) {
    loop {
        desk.combine();
        let alarm = desk.lock().alarm(Instant::now());
        tokio::select! {
            () = tokio::time::sleep_until(alarm) => {}
            () = desk.wake.notified() => {}
        }
        if desk.lock().has_left() {
            return;
        }
    }
}

/// Opens a connection, and answers meanwhile those who can't wait for it.
async fn open(desk: &Arc<Desk>) -> Result<Arc<dyn Link>, StoreError> {
    let mut opening = desk.store.open();
    loop {
        let alarm = turn_away(desk);
        tokio::select! {
            opened = &mut opening => return opened,
            () = desk.wake.notified() => {}
            () = tokio::time::sleep_until(alarm) => {}
        }
    }
}

/// Waits before the next attempt to connect, longer each time.
async fn pause(desk: &Arc<Desk>, failures: u32) {
    let longest = RECONNECT_PAUSE_MAX.min(Duration::from_millis(25) * (1 << failures.min(6)));
    let until = Instant::now() + longest.mul_f64(0.5 + fastrand::f64() / 2.0);
    loop {
        let alarm = turn_away(desk).min(until);
        tokio::select! {
            () = desk.wake.notified() => {}
            () = tokio::time::sleep_until(alarm) => {}
        }
        if Instant::now() >= until {
            return;
        }
    }
}

/// Reads the inbox while there is no connection; returns when to look again.
fn turn_away(desk: &Arc<Desk>) -> Instant {
    let now = Instant::now();
    let mut keeper = desk.lock();
    desk.read_inbox(&mut keeper, now);
    keeper.turn_away(now);
    let alarm = keeper.alarm(now);
    desk.deliver(keeper);
    alarm
}

/// Runs one connection until it fails or the instance has left.
async fn drive(desk: &Arc<Desk>, link: Arc<dyn Link>, failures: &mut u32) {
    let epoch = desk.lock().connected(Instant::now());
    let mut flights: FuturesUnordered<Flight> = FuturesUnordered::new();
    loop {
        let mut broken = false;
        let mut flown = depart(desk, &link, epoch, &mut flights).await;
        if flown.is_empty() {
            let alarm = desk.lock().alarm(Instant::now());
            tokio::select! {
                Some(landed) = flights.next() => flown.push(landed),
                () = desk.wake.notified() => {}
                () = tokio::time::sleep_until(alarm), if flights.len() < CALLS_IN_FLIGHT => {}
            }
        }
        for landed in flown {
            broken |= land(desk, landed);
        }
        if broken {
            // What is still in flight has an unknown outcome too: dropped here, asked again on the next connection.
            *failures += 1;
            desk.lock().disconnected(*failures, Instant::now());
            return;
        }
        *failures = 0;
        if desk.lock().has_left() {
            return;
        }
    }
}

/// Sends what the keeper has to say, as far as calls may be in flight; returns those answered on the spot.
async fn depart(
    desk: &Arc<Desk>,
    link: &Arc<dyn Link>,
    epoch: u64,
    flights: &mut FuturesUnordered<Flight>,
) -> Vec<Flown> {
    let mut answered = Vec::new();
    {
        let now = Instant::now();
        let mut keeper = desk.lock();
        desk.read_inbox(&mut keeper, now);
        desk.deliver(keeper);
    }
    while flights.len() < CALLS_IN_FLIGHT {
        let sent = Instant::now();
        let (caller, call) = {
            let mut keeper = desk.lock();
            let Some(call) = keeper.next_call(sent) else { break };
            (keeper.caller().clone(), call)
        };
        let link = Arc::clone(link);
        let mut flight: Flight = Box::pin(async move {
            let result = link.call(&caller, &call).await;
            Flown { epoch, call, sent, result }
        });
        // The first poll sends, so polling here keeps the order.
        match poll_immediate(&mut flight).await {
            Some(landed) => answered.push(landed),
            None => flights.push(flight),
        }
    }
    answered
}

/// Takes an answer in. True if the connection can't be trusted any more.
fn land(desk: &Arc<Desk>, flown: Flown) -> bool {
    let mut keeper = desk.lock();
    debug_assert_eq!(
        flown.epoch,
        keeper.caller().epoch,
        "answers of older connections are dropped"
    );
    let broken = flown.result.is_err();
    if let Err(error) = &flown.result {
        tracing::debug!(%error, "a call to the store failed");
    }
    keeper.on_reply(flown.call, flown.sent, Instant::now(), flown.result);
    desk.deliver(keeper);
    broken
}
