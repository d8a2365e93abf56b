//! Notices when the configuration is to be read again, and reads it.
//!
//! The file is looked at rather than listened to: editors put a new file in its place, and Kubernetes swaps a link to its
//! folder, so what is watched must be what the path leads to now.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{self, Instant},
};

use crate::config::{Config, ConfigError};

/// How often the file is looked at. It must look the same twice, or it may be half written.
const LOOK: Duration = Duration::from_millis(500);

type Load = dyn Fn() -> Result<Config, ConfigError> + Send + Sync;

/// Where the configuration comes from.
pub struct Source {
    load: Arc<Load>,
    /// None where flags stand for a file.
    file: Option<PathBuf>,
    /// The file as it was last read.
    read: Option<Stamp>,
}

/// Hears of every reason to read the configuration again.
#[derive(Debug)]
pub struct Reloads {
    source: Source,
    hangup: Signal,
}

/// What tells one version of a file from the next: which file, when it was written, how long it is.
type Stamp = (u64, u64, Option<SystemTime>, u64);

impl Source {
    /// Reads by `load`, and watches `file` if there is one.
    pub fn new(
        file: Option<PathBuf>,
        load: impl Fn() -> Result<Config, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Self { load: Arc::new(load), file, read: None }
    }

    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(&mut self) -> Result<Config, ConfigError> {
        // Before the file is read, so that no change is missed.
        self.read = self.file.as_deref().and_then(stamp);
        (self.load)()
    }

    async fn load_aside(&mut self) -> Result<Config, ConfigError> {
        let (load, file) = (Arc::clone(&self.load), self.file.clone());
        let loaded = tokio::task::spawn_blocking(move || {
            let read = file.as_deref().and_then(stamp);
            (read, load())
        });
        let (read, loaded) = loaded.await.expect("reading a configuration doesn't panic");
        self.read = read;
        loaded
    }

    /// Resolves when the file isn't what was read, and has settled.
    async fn changed(&self) {
        let Some(file) = &self.file else {
            return std::future::pending().await;
        };
        let mut before = self.read;
        let mut ticks = time::interval_at(Instant::now() + LOOK, LOOK);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let file = file.clone();
            // It may lie on a slow disk.
            let seen = tokio::task::spawn_blocking(move || stamp(&file)).await;
            let seen = seen.expect("looking at a file doesn't panic");
            // A file that is missing is about to be replaced.
            if seen.is_some() && seen != self.read && seen == before {
                return;
            }
            before = seen;
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Reloads {
    /// From now on SIGHUP is no end of the process. Inside the runtime.
    pub fn of(source: Source) -> Self {
        let hangup = signal(SignalKind::hangup()).expect("signals can be watched");
        Self { source, hangup }
    }

    /// Waits for the next reason, and reads the configuration then.
    pub async fn next(&mut self) -> Result<Config, ConfigError> {
        tokio::select! {
            _ = self.hangup.recv() => tracing::info!("SIGHUP: the configuration is read again"),
            () = self.source.changed() => tracing::info!("the configuration changed and is read again"),
        }
        self.source.load_aside().await
    }
}

/// What the path leads to now, over however many links.
fn stamp(file: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.modified().ok(), metadata.len()))
}
