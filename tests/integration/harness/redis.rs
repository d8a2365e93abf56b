use std::{collections::HashMap, net::SocketAddr, process::Stdio};

use deadpool_redis::redis::{self, FromRedisValue, Value};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{eventually, signal, unused_addr};

/// A private `redis-server` without persistence, so that a restart comes back empty. Killed on drop.
pub(crate) struct Redis {
    addr: SocketAddr,
    server: Child,
    dir: TempDir,
    settings: Vec<String>,
}

impl Redis {
    pub(crate) async fn spawn() -> Self {
        Self::spawn_with(&[]).await
    }

    /// With more settings, such as `["--requirepass", "x"]`.
    pub(crate) async fn spawn_with(settings: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let addr = unused_addr();
        let settings: Vec<_> = settings.iter().map(|&word| word.to_owned()).collect();
        let server = start(addr, &dir, &settings);
        let redis = Self { addr, server, dir, settings };
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
        self.server = start(self.addr, &self.dir, &self.settings);
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
        eventually("redis-server answers", async || match self.try_cli::<Value>(&["PING"]).await {
            Ok(_) => true,
            Err(error) => error.code() == Some("NOAUTH"),
        })
        .await;
    }

    /// The same, where the server may be gone.
    pub(crate) async fn try_cli<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        run(&self.url(), words).await
    }
}

/// Sentinels that watch one primary under the name `main`, killed on drop.
pub(crate) struct Sentinels {
    addrs: Vec<SocketAddr>,
    _processes: Vec<(Child, TempDir)>,
}

impl Sentinels {
    /// Starts so many, of which most have to agree on a failover.
    pub(crate) async fn spawn(count: usize, primary: &Redis) -> Self {
        let addrs: Vec<_> = (0..count).map(|_| unused_addr()).collect();
        let watch =
            format!("sentinel monitor main 127.0.0.1 {} {}", primary.addr.port(), count / 2 + 1);
        let patience =
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000";
        let start = |addr: &SocketAddr| {
            let (dir, port) = (TempDir::new().unwrap(), addr.port());
            let file = dir.path().join("sentinel.conf");
            std::fs::write(&file, format!("port {port}\nbind 127.0.0.1\n{watch}\n{patience}\n"))
                .unwrap();
            let mut command = Command::new("redis-server");
            command.arg(file).arg("--sentinel").current_dir(dir.path()).stdout(Stdio::null());
            (command.kill_on_drop(true).spawn().unwrap(), dir)
        };
        let processes = addrs.iter().map(start).collect();
        let sentinels = Self { addrs, _processes: processes };
        eventually("the Sentinels know each other", async || {
            let known: Vec<_> =
                (0..count).map(|index| sentinels.fact(index, "num-other-sentinels")).collect();
            let known = futures_util::future::join_all(known).await;
            known.iter().all(|known| known.as_deref() == Some(&*(count - 1).to_string()))
        })
        .await;
        sentinels
    }

    pub(crate) fn url(&self) -> String {
        let addrs: Vec<_> = self.addrs.iter().map(SocketAddr::to_string).collect();
        format!("redis+sentinel://{}/main", addrs.join(","))
    }

    /// The port of the primary, as the first of them says.
    pub(crate) async fn primary(&self) -> u16 {
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"];
        let (_, port): (String, u16) = self.cli(0, &words).await.unwrap();
        port
    }

    /// One of the facts that `SENTINEL MASTER` tells.
    pub(crate) async fn fact(&self, index: usize, name: &str) -> Option<String> {
        let facts: HashMap<String, String> =
            self.cli(index, &["SENTINEL", "MASTER", "main"]).await.ok()?;
        facts.get(name).cloned()
    }

    /// Runs one command on one of them.
    pub(crate) async fn cli<T: FromRedisValue>(
        &self,
        index: usize,
        words: &[&str],
    ) -> redis::RedisResult<T> {
        run(&format!("redis://{}", self.addrs[index]), words).await
    }
}

async fn run<T: FromRedisValue>(url: &str, words: &[&str]) -> redis::RedisResult<T> {
    let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await
}

fn spelled(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Array(values) => Vec::from_iter(values.iter().map(spelled)).join(" "),
        other => format!("{other:?}"),
    }
}

fn start(addr: SocketAddr, dir: &TempDir, settings: &[String]) -> Child {
    let port = addr.port().to_string();
    Command::new("redis-server")
        .args(["--port", &port, "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .args(settings)
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| {
            panic!("these tests need redis-server (7.0 or later) on the PATH; tests/run.sh installs it: {error}")
        })
}
