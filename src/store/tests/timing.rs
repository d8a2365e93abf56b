//! What the scripts cost the server, where nobody waits. Run it with `--ignored --nocapture`.

use deadpool_redis::redis;

use super::{server::Server, *};

const CALLS: u32 = 2_000;

#[tokio::test]
#[ignore = "a measurement"]
async fn time_in_the_server_per_call() {
    let server = Server::start().await;
    let mut raw = server.connect().await;
    let link = server.store().open().await.unwrap();
    let caller = Caller { instance: Uuid::now_v7(), epoch: 1, gap: 1 << 40, presence: 1 << 40 };
    let set = Arc::new(SetSpec {
        key: "timing".into(),
        slots: 1_000,
        lease: 15_000,
        grant_ttl: 3_000,
        recovery: 0,
        queue: 100,
        ageing: 5_000,
        classes: classes(),
    });
    for batch in [1, 16] {
        let (mut acquiring, mut releasing) = (0.0, 0.0);
        for _ in 0..10 {
            let mut calls = Vec::new();
            for _ in 0..CALLS / 10 / batch.min(8) {
                let asks = (0..batch).map(|_| Ask {
                    id: Uuid::now_v7(),
                    wants: [Want { set: Arc::clone(&set), weight: 1 }].into(),
                    class: 1,
                    route: "example.com/v1/".into(),
                });
                calls.push(Vec::from_iter(asks));
            }
            // Some hundred slots at most are taken at a time.
            for calls in calls.chunks(320 / batch as usize) {
                reset(&mut raw).await;
                for asks in calls {
                    let acquires = asks.iter().cloned().map(|ask| Acquire {
                        ask,
                        waited: 0,
                        may_wait: true,
                        again: false,
                    });
                    let call = Call { acquires: acquires.collect(), ..Call::default() };
                    let reply = link.call(&caller, &call).await.unwrap().acquires.unwrap();
                    assert!(reply.outcomes.iter().all(|&outcome| outcome == Acquired::Granted));
                }
                acquiring += micros(&mut raw).await * calls.len() as f64;
                reset(&mut raw).await;
                for asks in calls {
                    let releases = asks.iter().cloned().map(|ask| Release { ask, queued: false });
                    let call = Call { releases: releases.collect(), ..Call::default() };
                    let reply = link.call(&caller, &call).await.unwrap().releases.unwrap();
                    assert!(reply.outcomes.iter().all(|&outcome| outcome == Released::Released));
                }
                releasing += micros(&mut raw).await * calls.len() as f64;
            }
        }
        let calls = f64::from(CALLS / 10 / batch.min(8) * 10);
        println!(
            "{batch:2} in a call: acquire {:.1} µs, release {:.1} µs",
            acquiring / calls,
            releasing / calls
        );
    }
}

async fn reset(raw: &mut redis::aio::MultiplexedConnection) {
    redis::cmd("CONFIG").arg("RESETSTAT").exec_async(raw).await.unwrap();
}

/// What the server's own clock says of EVALSHA.
async fn micros(raw: &mut redis::aio::MultiplexedConnection) -> f64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query_async(raw).await.unwrap();
    let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
    let value = line.split("usec_per_call=").nth(1).unwrap().split(',').next().unwrap();
    value.parse().unwrap()
}
