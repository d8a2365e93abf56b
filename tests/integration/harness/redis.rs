use std::{net::SocketAddr, process::Stdio};

use deadpool_redis::redis::{self, FromRedisValue, Value};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{eventually, signal, unused_addr};

/// A private `redis-server` without persistence, so that a restart comes back empty. Killed on drop.
pub(crate) struct Redis {
    addr: SocketAddr,
    server: Child,
    dir: TempDir,
}

impl Redis {
    pub(crate) async fn spawn() -> Self {
        let dir = TempDir::new().unwrap();
        let addr = unused_addr();
        let server = start(addr, &dir);
        let redis = Self { addr, server, dir };
        redis.answers().await;
        redis
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Runs one command on a connection of its own.
    pub(crate) async fn cli<T: FromRedisValue>(&self, words: &[&str]) -> T {
        match self.try_cli(words).await {
            Ok(reply) => reply,
            Err(error) => panic!("redis: {}: {error}", words.join(" ")),
        }
    }

    /// How many slots of a limit are in use.
    pub(crate) async fn in_use(&self, limit: &str) -> usize {
        self.cli(&["ZCARD", &format!("sem:{limit}")]).await
    }

    /// The holders of a limit's slots.
    pub(crate) async fn holders(&self, limit: &str) -> Vec<String> {
        self.cli(&["ZRANGE", &format!("sem:{limit}"), "0", "-1"]).await
    }

    /// How many requests wait for a slot, in all classes.
    pub(crate) async fn waiting(&self, limit: &str) -> usize {
        let pattern = format!("sem:{limit}:wait:*");
        let queues: Vec<String> = self.cli(&["KEYS", &pattern]).await;
        let mut waiting = 0;
        for queue in queues {
            waiting += self.cli::<usize>(&["ZCARD", &queue]).await;
        }
        waiting
    }

    pub(crate) async fn wait_in_use(&self, limit: &str, slots: usize) {
        eventually(&format!("{slots} slots of {limit} in use"), async || {
            self.in_use(limit).await == slots
        })
        .await;
    }

    pub(crate) async fn wait_waiting(&self, limit: &str, waiters: usize) {
        eventually(&format!("{waiters} waiters for {limit}"), async || {
            self.waiting(limit).await == waiters
        })
        .await;
    }

    /// How often scripts were called since the last `CONFIG RESETSTAT`.
    pub(crate) async fn script_calls(&self) -> u64 {
        self.calls(&["eval", "evalsha", "fcall"]).await
    }

    /// How often the commands named were called since the last `CONFIG RESETSTAT`, from `INFO commandstats`.
    pub(crate) async fn calls(&self, commands: &[&str]) -> u64 {
        let stats: String = self.cli(&["INFO", "commandstats"]).await;
        commands
            .iter()
            .filter_map(|command| {
                let (_, rest) = stats.split_once(&format!("cmdstat_{command}:calls="))?;
                rest.split(',').next()?.parse::<u64>().ok()
            })
            .sum()
    }

    /// Has the server remember every command from now on.
    pub(crate) async fn log_calls(&self) {
        self.cli::<()>(&["CONFIG", "SET", "slowlog-max-len", "100000"]).await;
        self.cli::<()>(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]).await;
        self.cli::<()>(&["SLOWLOG", "RESET"]).await;
    }

    /// The script of every call since [`Redis::log_calls`], by its hash.
    pub(crate) async fn logged_scripts(&self) -> Vec<String> {
        type Entry = (u64, u64, u64, Vec<String>, String, String);
        let log: Vec<Entry> = self.cli(&["SLOWLOG", "GET", "-1"]).await;
        log.into_iter()
            .filter(|(.., words, _, _)| words[0].eq_ignore_ascii_case("evalsha"))
            .map(|(.., words, _, _)| words[1].clone())
            .collect()
    }

    /// The score of a member of a set, none if it isn't in there.
    pub(crate) async fn score(&self, key: &str, member: &str) -> Option<f64> {
        self.cli(&["ZSCORE", key, member]).await
    }

    /// Every key with all that is in it, as text.
    pub(crate) async fn everything(&self) -> Vec<String> {
        let mut texts = Vec::new();
        for key in self.cli::<Vec<String>>(&["KEYS", "*"]).await {
            let kind: String = self.cli(&["TYPE", &key]).await;
            let value: Value = match kind.as_str() {
                "hash" => self.cli(&["HGETALL", &key]).await,
                "zset" => self.cli(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await,
                // Gone meanwhile.
                "none" => continue,
                _ => panic!("{key} is a {kind}"),
            };
            texts.push(format!("{key} {}", spelled(&value)));
        }
        texts
    }

    /// Kills the server, with all that it remembers.
    pub(crate) async fn kill9(&mut self) {
        self.server.kill().await.unwrap();
    }

    /// Starts it again, empty, at the same address.
    pub(crate) async fn restart(&mut self) {
        self.kill9().await;
        self.server = start(self.addr, &self.dir);
        self.answers().await;
    }

    /// Freezes the server; connections stay open and nothing is answered.
    pub(crate) fn pause(&self) {
        signal(self.server.id().unwrap(), "STOP");
    }

    pub(crate) fn resume(&self) {
        signal(self.server.id().unwrap(), "CONT");
    }

    async fn answers(&self) {
        eventually("redis-server answers", async || self.try_cli::<Value>(&["PING"]).await.is_ok())
            .await;
    }

    async fn try_cli<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.url())?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut connection).await
    }
}

fn spelled(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Array(values) => Vec::from_iter(values.iter().map(spelled)).join(" "),
        other => format!("{other:?}"),
    }
}

fn start(addr: SocketAddr, dir: &TempDir) -> Child {
    let port = addr.port().to_string();
    Command::new("redis-server")
        .args(["--port", &port, "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| {
            panic!("these tests need redis-server (7.0 or later) on the PATH; tests/run.sh installs it: {error}")
        })
}
