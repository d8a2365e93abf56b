//! What the differential test configures, hears and prints.

use super::*;

/// The lowest class has hardly room to wait, and the last instance knows others than the first.
pub(super) fn some_classes(which: usize) -> Arc<[ClassSpec]> {
    let [high, normal, mut low]: [ClassSpec; 3] = classes().to_vec().try_into().unwrap();
    low.queue = 2;
    let odd = ClassSpec { name: "odd".into(), share: 0.75, queue: 3 };
    match which {
        0 => [high, normal, low].into(),
        1 => [odd, high, low].into(),
        _ => [high, normal, low, odd].into(),
    }
}

/// Classes of which each may have everything.
pub(super) fn equals() -> Arc<[ClassSpec]> {
    classes().iter().map(|class| ClassSpec { share: 1.0, ..class.clone() }).collect()
}

pub(super) type Heard = Arc<Mutex<Vec<(Uuid, Uuid, Notice)>>>;

pub(super) fn rate_spec(rate: usize) -> RateSpec {
    RateSpec {
        key: format!("rate{rate}").into(),
        requests: [3, 1, 5][rate],
        window: [60, 40, 200][rate],
        shadow: rate == 1,
        rate,
    }
}

/// What a set's configuration says to begin with.
pub(super) fn base(set: usize) -> (u32, i64) {
    [(6, 200), (4, 300), (2, 120), (3, 250)][set]
}

pub(super) async fn listen(store: &RedisStore, id: Uuid, heard: &Heard) {
    let (subscribed, mut is_subscribed) = tokio::sync::mpsc::unbounded_channel();
    let heard = Arc::clone(heard);
    let push = move |event| match event {
        Event::Granted(granted) => heard.lock().unwrap().push((id, granted, Notice::Granted)),
        Event::Displaced(gone) => heard.lock().unwrap().push((id, gone, Notice::Displaced)),
        Event::Evicted(evicted) => heard.lock().unwrap().push((id, evicted, Notice::Evicted)),
        Event::Wanted => heard.lock().unwrap().push((id, Uuid::nil(), Notice::Wanted)),
        Event::Subscribed => _ = subscribed.send(()),
        Event::Unsubscribed => panic!("the subscription broke"),
    };
    store.subscribe(id, Arc::new(push));
    is_subscribed.recv().await.unwrap();
}

/// A counter that is zero may be there or not; how queues are called is only Redis's concern.
pub(super) fn significant(field: &String, value: &mut String) -> bool {
    let counter = field == "waiting" || field == "swept" || field.starts_with("waiters:");
    !(counter && value == "0") && field != "queues"
}

/// Without the times, which depend on when exactly one looks.
pub(super) fn status_text(status: &SetStatus) -> String {
    let waiting: Vec<u32> = status.waiting.iter().map(|class| class.0).collect();
    let by_instance = BTreeMap::from_iter(&status.by_instance);
    let SetStatus { slots, lease, used, recovery, .. } = status;
    format!("{slots} {lease} {used} {waiting:?} {by_instance:?} {recovery}")
}

pub(super) fn brief(call: &Call) -> String {
    let wants = |ask: &Ask| -> String {
        let want = |want: &Want| format!("{}x{} ", want.set.key, want.weight);
        format!("{} class {} {}", ask.id, ask.class, ask.wants.iter().map(want).collect::<String>())
    };
    let mut text = String::new();
    for Release { ask, queued, refund } in &call.releases {
        text += &format!("release {} queued {queued} refund {refund}; ", wants(ask));
    }
    if let Some(Heartbeat { subscribed, leaving, beats, .. }) = &call.heartbeat {
        text += &format!("heartbeat subscribed {subscribed} leaving {leaving} ");
        for beat in beats {
            text += &format!("{}: ", beat.set.key);
            for renew in &beat.renew {
                text += &format!("renew {} lapsed {}, ", renew.ask.id, renew.lapsed);
            }
        }
    }
    for Acquire { ask, waited, may_wait, again } in &call.acquires {
        text +=
            &format!("acquire {} waited {waited} may_wait {may_wait} again {again}; ", wants(ask));
    }
    text
}

pub(super) fn acquired(outcome: Acquired) -> &'static str {
    match outcome {
        Acquired::Granted => "Granted",
        Acquired::Waiting { .. } => "Waiting",
        Acquired::Shadowed { .. } => "Shadowed",
        Acquired::Shed { why: Shed::Full { .. }, .. } => "Full",
        Acquired::Shed { why: Shed::Recovering, .. } => "Recovering",
        Acquired::Shed { why: Shed::TooHeavy, .. } => "TooHeavy",
        Acquired::Shed { why: Shed::RateLimited { .. }, .. } => "RateLimited",
        Acquired::NoMemory => "NoMemory",
    }
}

pub(super) fn released(outcome: Released) -> &'static str {
    match outcome {
        Released::Released => "Released",
        Released::Dequeued => "Dequeued",
        Released::Unknown => "Unknown",
    }
}
