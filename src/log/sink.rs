//! Stdout behind a bounded queue, so that whoever reads it slowly slows no request.

use std::{
    io::{self, BufWriter, Write},
    sync::{
        OnceLock,
        mpsc::{self, Receiver, SyncSender},
    },
    thread,
    time::Duration,
};

/// How many lines may wait for stdout.
const LINES: usize = 8192;

/// Starts its thread with the first line.
#[derive(Debug, Default)]
pub(super) struct Sink(OnceLock<SyncSender<Order>>);

#[derive(Debug)]
enum Order {
    Line(String),
    Flush(SyncSender<()>),
}

impl Sink {
    pub(super) fn write(&self, line: String) -> bool {
        let queue = self.0.get_or_init(|| {
            let (queue, orders) = mpsc::sync_channel(LINES);
            // Without its thread every line is lost, and counted.
            let _ = thread::Builder::new().name("log".to_owned()).spawn(|| follow(orders));
            queue
        });
        queue.try_send(Order::Line(line)).is_ok()
    }

    pub(super) fn flush(&self, patience: Duration) {
        let Some(queue) = self.0.get() else { return };
        let (done, is_done) = mpsc::sync_channel(1);
        if queue.try_send(Order::Flush(done)).is_ok() {
            let _ = is_done.recv_timeout(patience);
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the thread owns its end")]
fn follow(orders: Receiver<Order>) {
    let mut out = BufWriter::new(io::stdout());
    // Whoever closed stdout wants no lines.
    while let Ok(order) = orders.recv() {
        let mut next = Some(order);
        while let Some(order) = next {
            match order {
                Order::Line(line) => {
                    let _ = out.write_all(line.as_bytes());
                }
                Order::Flush(done) => {
                    let _ = out.flush();
                    let _ = done.try_send(());
                }
            }
            next = orders.try_recv().ok();
        }
        let _ = out.flush();
    }
}
