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
    config::{RedisAt, Secret, Store as Settings, StoreKind, StoreTls, WhenDown},
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
    pub(super) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// The same with more settings.
    ///
    /// # Panics
    /// If there is no `redis-server`: a test without one would prove nothing.
    pub(super) async fn start_with(settings: &[&str]) -> Self {
        // The port is free now and may be taken in a moment, so that is tried more than once.
        for _ in 0..5 {
            if let Some(server) = Self::try_start(settings).await {
                return server;
            }
        }
        panic!("redis-server doesn't start")
    }

    async fn try_start(settings: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        // In a Cluster nodes also listen 10,000 ports higher.
        let port = fastrand::u16(15_000..32_000);
        TcpListener::bind(("127.0.0.1", port)).ok()?;
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .arg("--dir")
            .arg(directory.path())
            .args(settings)
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

    pub(super) fn url(&self) -> String {
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
        store_at(&self.url(), PREFIX)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// A store at a URL, with a prefix.
pub(super) fn store_at(url: &str, prefix: &str) -> Arc<RedisStore> {
    let settings =
        Settings { op_timeout: Duration::from_secs(2), prefix: prefix.to_owned(), ..settings(url) };
    let StoreKind::Redis(at) = &settings.kind else { panic!("{url} isn't a Redis") };
    RedisStore::new(at, &settings, false).unwrap()
}

/// The settings of a store at a URL.
pub(super) fn settings(url: &str) -> Settings {
    let at = RedisAt { url: Secret(url.to_owned()), sentinels: None };
    Settings {
        kind: StoreKind::Redis(at),
        tls: StoreTls::default(),
        prefix: PREFIX.to_owned(),
        digest_key: None,
        when_down: WhenDown::Closed,
        op_timeout: Duration::from_millis(500),
    }
}

/// Three servers that are one Cluster.
pub(super) struct Cluster {
    pub(super) nodes: [Server; 3],
}

impl Cluster {
    pub(super) async fn start() -> Self {
        let node = || Server::start_with(&["--cluster-enabled", "yes"]);
        let nodes = [node().await, node().await, node().await];
        let addrs = nodes.each_ref().map(|node| format!("127.0.0.1:{}", node.port));
        let created = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(&addrs)
            .arg("--cluster-yes")
            .stdout(Stdio::null())
            .status()
            .expect("the tests need redis-cli in the path");
        assert!(created.success());
        for node in &nodes {
            let mut connection = node.connect().await;
            loop {
                let mut info = redis::cmd("CLUSTER");
                let info: String = info.arg("INFO").query_async(&mut connection).await.unwrap();
                if info.contains("cluster_state:ok") {
                    break;
                }
                super::pause(20).await;
            }
        }
        Self { nodes }
    }

    /// A connection to the node whose the keys with this prefix are.
    pub(super) async fn owner(&self, prefix: &str) -> MultiplexedConnection {
        for node in &self.nodes {
            let mut connection = node.connect().await;
            let mut get = redis::cmd("GET");
            if get.arg(prefix).exec_async(&mut connection).await.is_ok() {
                return connection;
            }
        }
        panic!("no node has {prefix}")
    }
}
