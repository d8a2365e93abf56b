//! A Redis of a test's own.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use deadpool_redis::redis::{self, Client, RedisResult, aio::MultiplexedConnection};
use tempfile::TempDir;

use crate::{
    config::{Secret, Store as Settings, StoreKind, WhenDown},
    store::RedisStore,
};

/// In front of every key of a test.
pub(super) const PREFIX: &str = "{test}:";

/// A Redis that ends with the test.
pub(super) struct Server {
    process: Child,
    pub(super) port: u16,
    _directory: TempDir,
}

impl Server {
    /// Starts one, and waits until it answers.
    ///
    /// # Panics
    /// If there is no `redis-server`: a test without one would prove nothing.
    pub(super) async fn start() -> Self {
        // The port is free now and may be taken in a moment, so that is tried more than once.
        for _ in 0..5 {
            if let Some(server) = Self::try_start().await {
                return server;
            }
        }
        panic!("redis-server doesn't start")
    }

    async fn try_start() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .arg("--dir")
            .arg(directory.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("the tests need redis-server in the path");
        let mut server = Self { process, port, _directory: directory };
        for _ in 0..500 {
            if server.process.try_wait().unwrap().is_some() {
                return None;
            }
            if let Ok(mut connection) = server.try_connect().await
                && redis::cmd("PING").exec_async(&mut connection).await.is_ok()
            {
                return Some(server);
            }
            super::pause(10).await;
        }
        None
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    async fn try_connect(&self) -> RedisResult<MultiplexedConnection> {
        Client::open(self.url())?.get_multiplexed_async_connection().await
    }

    /// A connection beside the store's.
    pub(super) async fn connect(&self) -> MultiplexedConnection {
        self.try_connect().await.unwrap()
    }

    pub(super) fn store(&self) -> Arc<RedisStore> {
        let url = Secret(self.url());
        let settings = Settings {
            kind: StoreKind::Redis(url.clone()),
            prefix: PREFIX.to_owned(),
            digest_key: None,
            when_down: WhenDown::Closed,
            op_timeout: Duration::from_secs(2),
        };
        RedisStore::new(&url, &settings).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
