//! What the scripts cost the server, where nobody waits. Run it with `--ignored --nocapture`.

use deadpool_redis::redis;

use super::{rig::*, server::Server, *};

/// Of so many rounds the median counts, since other work on the machine spoils some.
const ROUNDS: usize = 51;
const CALLS: usize = 20;

#[tokio::test]
#[ignore = "a measurement"]
async fn time_in_the_server_per_call() {
    let server = Server::start().await;
    let mut raw = server.connect().await;
    let link = server.store().open().await.unwrap();
    let id = Uuid::now_v7();
    let caller = Caller { instance: id, epoch: 1, gap: FOR_EVER, presence: FOR_EVER };
    let set = Arc::new(SetSpec { lease: 15_000, ..set(1_000) });
    for batch in [1, 16] {
        let (mut acquiring, mut releasing) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let asks: Vec<Ask> = (0..CALLS * batch).map(|_| ask(&set)).collect();
            reset(&mut raw).await;
            for asks in asks.chunks(batch) {
                let acquire = |ask: &Ask| Acquire {
                    ask: ask.clone(),
                    waited: 0,
                    may_wait: true,
                    again: false,
                };
                let call = Call { acquires: asks.iter().map(acquire).collect(), ..Call::default() };
                let reply = link.call(&caller, &call).await.unwrap().acquires.unwrap();
                assert!(reply.outcomes.iter().all(|&outcome| outcome == Acquired::Granted));
            }
            acquiring.push(micros(&mut raw).await);
            reset(&mut raw).await;
            for asks in asks.chunks(batch) {
                let release =
                    |ask: &Ask| Release { ask: ask.clone(), queued: false, refund: false };
                let call = Call { releases: asks.iter().map(release).collect(), ..Call::default() };
                let reply = link.call(&caller, &call).await.unwrap().releases.unwrap();
                assert!(reply.outcomes.iter().all(|&outcome| outcome == Released::Released));
            }
            releasing.push(micros(&mut raw).await);
        }
        let [acquire, release] = [acquiring, releasing].map(median);
        println!("{batch:2} in a call: acquire {acquire:.1} µs, release {release:.1} µs");
    }
    reset(&mut raw).await;
    let empty = redis::Script::new("return 1");
    empty.prepare_invoke().invoke_async::<u32>(&mut raw).await.unwrap();
    reset(&mut raw).await;
    for _ in 0..1_000 {
        empty.prepare_invoke().invoke_async::<u32>(&mut raw).await.unwrap();
    }
    println!("an empty script: {:.1} µs", micros(&mut raw).await);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
