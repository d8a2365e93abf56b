//! Who serves which connection.

use std::thread::ThreadId;

use tokio::sync::mpsc;

use super::*;

/// Serves connections that tell on which thread they are, and end when they are told to.
struct Threads {
    workers: Workers,
    tell: mpsc::UnboundedSender<ThreadId>,
    told: mpsc::UnboundedReceiver<ThreadId>,
}

impl Threads {
    fn start(count: usize) -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        Self { workers: Workers::start(count).unwrap(), tell, told }
    }

    /// The thread of a connection that stays until what comes with it is dropped.
    async fn serve(&mut self) -> (ThreadId, oneshot::Sender<()>) {
        let (end, ended) = oneshot::channel::<()>();
        let tell = self.tell.clone();
        self.workers.serve(|served| async move {
            tell.send(std::thread::current().id()).unwrap();
            let _ = ended.await;
            drop(served);
        });
        (self.told.recv().await.unwrap(), end)
    }
}

#[tokio::test]
async fn whoever_has_the_fewest_connections_gets_the_next() {
    let mut threads = Threads::start(3);
    let (first, first_end) = threads.serve().await;
    assert_eq!(first, std::thread::current().id());
    let (second, second_end) = threads.serve().await;
    let (third, third_end) = threads.serve().await;
    assert!(second != first && third != first && third != second);

    let (fourth, fourth_end) = threads.serve().await;
    assert_eq!(fourth, first, "as busy as the others");
    let before = threads.workers.connections();
    drop(second_end);
    while threads.workers.connections() == before {
        tokio::task::yield_now().await;
    }
    assert_eq!(threads.serve().await.0, second);
    drop((first_end, third_end, fourth_end));
}

#[tokio::test]
async fn dropping_them_ends_what_they_serve() {
    let mut threads = Threads::start(2);
    let (_here, _end) = threads.serve().await;
    let (held, dropped) = oneshot::channel::<()>();
    threads.workers.serve(|served| async move {
        std::future::pending::<()>().await;
        drop((held, served));
    });
    drop(threads);
    assert!(time::timeout(PATIENCE, dropped).await.unwrap().is_err());
}
