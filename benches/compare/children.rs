//! The processes of the comparison: started on a CPU, measured from /proc, ended on drop.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpListener},
    num::NonZero,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    thread,
    time::Duration,
};

use tokio::{net::TcpStream, time};

use crate::Result;

/// Everything this run writes is in here.
pub(crate) const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/bench");

/// Ticks of the kernel's CPU accounting per second: 100 for every program that reads /proc.
const TICKS_PER_SECOND: f64 = 100.0;

/// Which CPUs a process may use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cpus {
    /// The first alone: the proxy that is measured.
    Proxy,
    /// All but the first: whatever the proxy talks to.
    Rest,
    /// All.
    Any,
}

impl Cpus {
    pub(crate) fn list(self) -> String {
        let last = cpus() - 1;
        match self {
            Self::Proxy => "0".to_owned(),
            Self::Rest => format!("{}-{last}", last.min(1)),
            Self::Any => format!("0-{last}"),
        }
    }

    /// Moves this process itself there, for a load that it makes on its own.
    pub(crate) fn take(self) -> Result<()> {
        let pid = std::process::id().to_string();
        let moved = Command::new("taskset").args(["-acp", &self.list(), &pid]).output()?;
        moved.status.success().then_some(()).ok_or_else(|| "taskset failed".into())
    }
}

/// A running process, listening on `port`.
#[derive(Debug)]
pub(crate) struct Proc {
    pub(crate) port: u16,
    child: Child,
}

impl Proc {
    /// Starts `command` and waits until it listens. Its output goes to `<name>.log`.
    ///
    /// The kernel ends it when this process ends, however that happens.
    pub(crate) async fn start(
        name: &str,
        port: u16,
        cpus: Cpus,
        command: &[String],
    ) -> Result<Self> {
        Self::start_with(name, port, cpus, command, Stdio::null()).await
    }

    /// The same, with something to begin with.
    pub(crate) async fn start_with(
        name: &str,
        port: u16,
        cpus: Cpus,
        command: &[String],
        stdin: Stdio,
    ) -> Result<Self> {
        let log = File::create(format!("{DIR}/{name}.log"))?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "taskset", "-c", &cpus.list()])
            .args(command)
            .stdin(stdin)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut this = Self { port, child };
        for _ in 0..100 {
            if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
                return Ok(this);
            }
            if let Some(status) = this.child.try_wait()? {
                return Err(format!("{name} ended at once ({status}): see {DIR}/{name}.log").into());
            }
            time::sleep(Duration::from_millis(50)).await;
        }
        Err(format!("{name} doesn't listen after 5 s: see {DIR}/{name}.log").into())
    }

    /// The process and its children.
    fn pids(&self) -> Vec<u32> {
        let pid = self.child.id();
        let children =
            fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(pid).chain(children).collect()
    }

    /// CPU seconds spent so far.
    pub(crate) fn cpu(&self) -> f64 {
        self.pids().into_iter().map(|pid| cpu(&pid.to_string(), 2)).sum()
    }

    /// Resident KiB. What processes share is counted once (Pss).
    pub(crate) fn memory(&self) -> f64 {
        self.kib("Pss:")
    }

    /// Resident KiB that no file is behind.
    pub(crate) fn anonymous(&self) -> f64 {
        self.kib("Anonymous:")
    }

    fn kib(&self, what: &str) -> f64 {
        let kib = |pid| {
            let maps = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            let line = maps.lines().find_map(|line| line.strip_prefix(what));
            line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        self.pids().into_iter().map(kib).sum()
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // TERM, and not `Child::kill`, for a killed nginx leaves its workers behind.
        _ = Command::new("kill").arg(self.child.id().to_string()).status();
        for _ in 0..100 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::park_timeout(Duration::from_millis(20));
        }
        _ = (self.child.kill(), self.child.wait());
    }
}

/// CPU seconds of a process, by the first `fields` of: user, system, user of ended children, system of those.
fn cpu(pid: &str, fields: usize) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = after_name.split(' ').skip(11).take(fields);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
}

/// CPU seconds that the machine spent on processes, and those of this process and its ended children.
///
/// The difference is what others did, if none of our children runs at either end.
pub(crate) fn machine_and_own_cpu() -> (f64, f64) {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks =
        stat.split_whitespace().skip(1).take(3).filter_map(|ticks| ticks.parse::<f64>().ok());
    (ticks.sum::<f64>() / TICKS_PER_SECOND, cpu("self", 4))
}

/// How many CPUs there were when this was first asked: before [`Cpus::take`] can leave fewer to this process.
pub(crate) fn cpus() -> usize {
    static CPUS: LazyLock<usize> =
        LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));
    *CPUS
}

/// How many files a process may open here.
pub(crate) fn descriptors() -> usize {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(1024)
}

/// A port that nobody listens on.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Fills the `@NAME@`s of a template and writes it to `DIR/<name>/<file>`.
pub(crate) fn fill(
    name: &str,
    file: &str,
    template: &str,
    values: &[(&str, &str)],
) -> Result<String> {
    let dir = PathBuf::from(DIR).join(name);
    fs::create_dir_all(&dir)?;
    let dir_name = dir.display().to_string();
    let mut text = template.to_owned();
    for (key, value) in values {
        text = text.replace(&format!("@{key}@"), value);
    }
    let text = text.replace("@DIR@", &dir_name);
    let path = dir.join(file);
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}
