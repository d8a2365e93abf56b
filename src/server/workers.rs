//! The threads that serve connections. Each has a runtime of its own: what a connection's bytes wake runs on the thread they came in
//! on, and no request is passed from one to another.

use std::{
    future::Future,
    io, iter,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// Where connections may live. Dropping it ends those on threads of its own.
#[derive(Debug)]
pub struct Workers(Vec<Worker>);

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
    /// Its thread ends when this is dropped; none for the one that was there before.
    _thread: Option<oneshot::Sender<()>>,
}

/// A connection, as its worker counts it.
pub(super) struct Served(Arc<AtomicUsize>);

// === impl Workers ===

impl Workers {
    /// The current runtime alone.
    pub fn here() -> Self {
        Self(vec![Worker::here()])
    }

    /// The current runtime and as many threads as make `count` workers of it.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn start(count: usize) -> io::Result<Self> {
        iter::once(Ok(Worker::here()))
            .chain((1..count).map(Worker::start))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Has a connection served by whoever has the fewest; of those by the first, which is next to what all share.
    /// Its future keeps the count: another one around it would hold room for it twice.
    pub(super) fn serve<F>(&self, connection: impl FnOnce(Served) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let connections = |worker: &&Worker| worker.connections.load(Relaxed);
        let worker = self.0.iter().min_by_key(connections).expect("there is one");
        worker.runtime.spawn(connection(Served::by(worker)));
    }
}

#[cfg(test)]
impl Workers {
    /// How many connections they have.
    pub(super) fn connections(&self) -> usize {
        self.0.iter().map(|worker| worker.connections.load(Relaxed)).sum()
    }
}

impl Worker {
    fn here() -> Self {
        Self { runtime: Handle::current(), connections: Arc::default(), _thread: None }
    }

    fn start(number: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        thread::Builder::new().name(format!("worker {number}")).spawn(move || {
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        })?;
        Ok(Self { runtime: handle, connections: Arc::default(), _thread: Some(end) })
    }
}

impl Served {
    fn by(worker: &Worker) -> Self {
        worker.connections.fetch_add(1, Relaxed);
        Self(Arc::clone(&worker.connections))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
