use std::{
    borrow::Cow,
    fs::{DirEntry, File},
    net::{SocketAddr, TcpListener},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{ExitStatus, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{Client, Redis, Shown, Upstream, eventually, signal, unused_addr, within};

/// The program under test.
pub(crate) fn tidegate() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.kill_on_drop(true);
    command
}

/// A configuration with the one limit `llm` in front of one upstream. Unless said otherwise its lease is so long that only a release
/// can free a slot, and its queue so large and patient that nobody is refused.
pub(crate) fn one_limit(upstream: &Upstream, slots: u32) -> Conf {
    Conf {
        slots,
        endpoint: upstream.url(),
        store: "memory:".to_owned(),
        lease: "10m",
        queue: "{ size = 2000, timeout = \"2m\" }",
        extra: [const { Cow::Borrowed("") }; 4],
        tail: String::new(),
        files: Vec::new(),
    }
}

/// The text of a configuration, but for the listeners, which [`Proxy::spawn`] chooses.
#[derive(Clone)]
pub(crate) struct Conf {
    slots: u32,
    endpoint: String,
    store: String,
    lease: &'static str,
    queue: &'static str,
    /// More lines for `[server]`, `[store]`, `[limits.llm]` and `[upstreams.llm]`.
    extra: [Cow<'static, str>; 4],
    /// More lines for `[[routes]]`, and whole sections behind it.
    tail: String,
    /// What lies beside the file.
    files: Vec<(&'static str, String)>,
}

impl Conf {
    pub(crate) fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    pub(crate) fn redis(self, redis: &Redis) -> Self {
        self.store_url(redis.url())
    }

    pub(crate) fn store_url(mut self, url: String) -> Self {
        self.store = url;
        self
    }

    pub(crate) fn lease(mut self, lease: &'static str) -> Self {
        self.lease = lease;
        self
    }

    pub(crate) fn queue(mut self, queue: &'static str) -> Self {
        self.queue = queue;
        self
    }

    pub(crate) fn server(mut self, lines: impl Into<Cow<'static, str>>) -> Self {
        self.extra[0] = lines.into();
        self
    }

    pub(crate) fn store(mut self, lines: impl Into<Cow<'static, str>>) -> Self {
        self.extra[1] = lines.into();
        self
    }

    pub(crate) fn limit(mut self, lines: impl Into<Cow<'static, str>>) -> Self {
        self.extra[2] = lines.into();
        self
    }

    pub(crate) fn upstream(mut self, lines: impl Into<Cow<'static, str>>) -> Self {
        self.extra[3] = lines.into();
        self
    }

    pub(crate) fn route(mut self, lines: impl Into<String>) -> Self {
        self.tail = lines.into();
        self
    }

    /// A file in the folder of the configuration.
    pub(crate) fn file(mut self, name: &'static str, text: String) -> Self {
        self.files.push((name, text));
        self
    }

    /// TLS for clients, with this certificate, besides the other lines of `[server]`.
    pub(crate) fn showing(self, shown: &Shown) -> Self {
        let lines =
            format!("{}\ntls = {{ cert = \"cert.pem\", key = \"key.pem\" }}", self.extra[0]);
        self.server(lines)
            .file("cert.pem", shown.cert.pem())
            .file("key.pem", shown.signing_key.serialize_pem())
    }

    /// Another address for the upstream.
    pub(crate) fn endpoint(mut self, url: String) -> Self {
        self.endpoint = url;
        self
    }

    /// Other addresses for the upstream.
    pub(crate) fn endpoints<const N: usize>(self, urls: [String; N]) -> Self {
        self.endpoint(urls.join("\", \""))
    }

    pub(crate) fn text(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let Self {
            slots,
            endpoint,
            store,
            lease,
            queue,
            extra: [server_lines, store_lines, limit_lines, upstream_lines],
            tail,
            files: _,
        } = self;
        format!(
            r#"[server]
listen = "{listen}"
{server_lines}

[admin]
listen = "{admin}"

[store]
url = "{store}"
{store_lines}

[limits.llm]
slots = {slots}
lease = "{lease}"
queue = {queue}
{limit_lines}

[upstreams.llm]
endpoints = ["{endpoint}"]
limits = ["llm"]
{upstream_lines}

[[routes]]
path = "/"
upstream = "llm"
{tail}
"#
        )
    }
}

/// What became of a configuration that was read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reload {
    Applied,
    Refused,
}

/// One instance of the program, killed on drop. If its test fails, what it wrote is printed.
pub(crate) struct Proxy {
    addr: SocketAddr,
    admin: SocketAddr,
    process: Child,
    dir: TempDir,
}

impl Proxy {
    /// `tidegate run --config` with this configuration, ready.
    pub(crate) async fn spawn(conf: &Conf) -> Self {
        Self::spawn_with(conf, &[]).await
    }

    /// The same with so many worker threads.
    pub(crate) async fn spawn_on_threads(conf: &Conf, threads: usize) -> Self {
        Self::spawn_by(conf, |command| command.args(["--threads", &threads.to_string()])).await
    }

    /// The same with more environment.
    pub(crate) async fn spawn_with(conf: &Conf, environment: &[(&str, &str)]) -> Self {
        Self::spawn_by(conf, |command| command.envs(environment.iter().copied())).await
    }

    async fn spawn_by(conf: &Conf, more: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let (dir, addr, admin) = (TempDir::new().unwrap(), unused_addr(), unused_addr());
        let file = dir.path().join("proxy.toml");
        std::fs::write(&file, conf.text(addr, admin)).unwrap();
        for (name, text) in &conf.files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let mut command = tidegate();
        more(command.args(["run", "--config"]).arg(file));
        Self::start(command, dir, addr, admin).await
    }

    /// `tidegate run --listen … --upstream … --slots …`, ready. The limit is named `default`.
    pub(crate) async fn quick(upstream: &Upstream, slots: u32) -> Self {
        let (dir, addr, admin) = (TempDir::new().unwrap(), unused_addr(), unused_addr());
        let mut command = tidegate();
        command
            .args(["run", "--listen", &addr.to_string()])
            .args(["--upstream", &upstream.url()])
            .args(["--slots", &slots.to_string()])
            .args(["--admin-listen", &admin.to_string()]);
        Self::start(command, dir, addr, admin).await
    }

    /// The same with something else for stdout.
    pub(crate) async fn spawn_into(conf: &Conf, stdout: Stdio) -> Self {
        let (dir, addr, admin) = (TempDir::new().unwrap(), unused_addr(), unused_addr());
        let file = dir.path().join("proxy.toml");
        std::fs::write(&file, conf.text(addr, admin)).unwrap();
        let mut command = tidegate();
        command.args(["run", "--config"]).arg(file).stdout(stdout);
        Self::start_by("/readyz", command, dir, addr, admin).await
    }

    /// The same, alive but perhaps never ready.
    pub(crate) async fn spawn_unready(conf: &Conf) -> Self {
        let (dir, addr, admin) = (TempDir::new().unwrap(), unused_addr(), unused_addr());
        let file = dir.path().join("proxy.toml");
        std::fs::write(&file, conf.text(addr, admin)).unwrap();
        let mut command = tidegate();
        command.args(["run", "--config"]).arg(file);
        Self::start_until("/livez", command, dir, addr, admin).await
    }

    /// The same with sockets that listen already, handed over as systemd does. Dropping it leaves them open.
    pub(crate) async fn spawn_on(
        conf: &Conf,
        clients: &TcpListener,
        operators: &TcpListener,
        environment: &[(&str, &str)],
    ) -> Self {
        let dir = TempDir::new().unwrap();
        let (addr, admin) = (clients.local_addr().unwrap(), operators.local_addr().unwrap());
        let file = dir.path().join("proxy.toml");
        // Where it would listen by itself.
        std::fs::write(&file, conf.text(unused_addr(), unused_addr())).unwrap();
        let hand_over = "exec 3<&0 4<&1 </dev/null >&2; LISTEN_PID=$$ LISTEN_FDS=2 exec \"$@\"";
        let handed = |socket: &TcpListener| OwnedFd::from(socket.try_clone().unwrap());
        let mut command = Command::new("sh");
        command
            .args(["-c", hand_over, "sh", env!("CARGO_BIN_EXE_tidegate"), "run", "--config"])
            .arg(file)
            .envs(environment.iter().copied())
            .kill_on_drop(true)
            .stdin(handed(clients))
            .stdout(handed(operators));
        Self::start_by("/readyz", command, dir, addr, admin).await
    }

    async fn start(command: Command, dir: TempDir, addr: SocketAddr, admin: SocketAddr) -> Self {
        Self::start_until("/readyz", command, dir, addr, admin).await
    }

    async fn start_until(
        path: &str,
        mut command: Command,
        dir: TempDir,
        addr: SocketAddr,
        admin: SocketAddr,
    ) -> Self {
        command.stdout(log_in(&dir));
        Self::start_by(path, command, dir, addr, admin).await
    }

    /// The same with what `command` has for stdout.
    async fn start_by(
        path: &str,
        mut command: Command,
        dir: TempDir,
        addr: SocketAddr,
        admin: SocketAddr,
    ) -> Self {
        let process = command.current_dir(dir.path()).stderr(log_in(&dir)).spawn().unwrap();
        let mut proxy = Self { addr, admin, process, dir };
        eventually(&format!("{path} says 200"), async || {
            if let Some(status) = proxy.process.try_wait().unwrap() {
                panic!("tidegate ended before it was ready: {status}");
            }
            proxy.admin_status(path).await == Some(200)
        })
        .await;
        proxy
    }

    /// Where clients connect.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where operators connect.
    pub(crate) fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// The status of a path on the admin listener, none if nobody listens.
    pub(crate) async fn admin_status(&self, path: &str) -> Option<u16> {
        let answer = Client::new().try_get(self.admin, path).await.ok()?;
        Some(answer.status)
    }

    /// `/status`.
    pub(crate) async fn status(&self) -> Value {
        let answer = Client::new().get(self.admin, "/status").await;
        serde_json::from_slice(&answer.body).unwrap()
    }

    /// A sample of `/metrics`, 0 where there is none.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let answer = Client::new().get(self.admin, "/metrics").await;
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        let sample = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        sample.map_or(0.0, |value| value.parse().unwrap())
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The status object of one limit, from `/status`.
    pub(crate) async fn limit(&self, name: &str) -> Value {
        let status = self.status().await;
        match &status["limits"] {
            Value::Array(limits) => limits.iter().find(|limit| limit["name"] == name).cloned(),
            limits => limits.get(name).cloned(),
        }
        .unwrap_or_else(|| panic!("no limit {name} in {status}"))
    }

    /// Replaces a file in the folder of the configuration.
    pub(crate) fn rewrite(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }

    /// The text of its file by another configuration, with the same listeners.
    pub(crate) fn text(&self, conf: &Conf) -> String {
        conf.text(self.addr, self.admin)
    }

    /// Puts this text in the place of its file, as editors do, and waits until it was read.
    pub(crate) async fn reconfigure(&self, text: &str) -> Reload {
        self.reloaded(async || self.replace("proxy.toml", text)).await
    }

    /// The same by SIGHUP.
    pub(crate) async fn sighup(&self, text: &str) -> Reload {
        self.reloaded(async || {
            self.replace("proxy.toml", text);
            signal(self.pid(), "HUP");
        })
        .await
    }

    /// What becomes of the next attempt to read the configuration, which this is about to cause.
    pub(crate) async fn reloaded(&self, cause: impl AsyncFnOnce()) -> Reload {
        let counts = async || {
            let count = async |result| {
                self.metric(&format!("tidegate_config_reloads_total{{result=\"{result}\"}}")).await
            };
            (count("applied").await, count("refused").await)
        };
        let before = counts().await;
        cause().await;
        let mut after = before;
        eventually("the configuration was read again", async || {
            after = counts().await;
            after != before
        })
        .await;
        if after.0 > before.0 { Reload::Applied } else { Reload::Refused }
    }

    /// Puts a new file in the place of one, in one step.
    pub(crate) fn replace(&self, name: &str, text: &str) {
        self.rewrite(".new", text);
        std::fs::rename(self.dir.path().join(".new"), self.dir.path().join(name)).unwrap();
    }

    /// The folder of the configuration.
    pub(crate) fn folder(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn sigterm(&self) {
        signal(self.pid(), "TERM");
    }

    pub(crate) fn sigstop(&self) {
        signal(self.pid(), "STOP");
    }

    pub(crate) fn sigcont(&self) {
        signal(self.pid(), "CONT");
    }

    pub(crate) async fn kill9(&mut self) {
        self.process.kill().await.unwrap();
    }

    pub(crate) async fn wait_exit(&mut self) -> ExitStatus {
        within("tidegate ends", self.process.wait()).await.unwrap()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id().unwrap()
    }

    /// How many threads serve connections.
    pub(crate) fn workers(&self) -> usize {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let name = |thread: std::io::Result<DirEntry>| {
            std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap_or_default()
        };
        1 + threads.map(name).filter(|name| name.starts_with("worker ")).count()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- tidegate on {} wrote:\n{}---", self.addr, self.log());
        }
    }
}

fn log_in(dir: &TempDir) -> File {
    File::options().create(true).append(true).open(dir.path().join("log")).unwrap()
}

/// A file with this text and the directory that keeps it.
pub(crate) fn config_file(text: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("proxy.toml");
    std::fs::write(&file, text).unwrap();
    (dir, file)
}

/// Runs the program to its end.
pub(crate) async fn run_to_end(words: &[&str]) -> Output {
    let what = format!("tidegate {} ends", words.join(" "));
    within(&what, tidegate().args(words).output()).await.unwrap()
}
