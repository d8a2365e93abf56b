//! What the process writes: its own doings on stderr, a line for each request on stdout, and how much of either.
//!
//! What `[log]` says can be changed while the process runs; such an order holds until a configuration with another `[log]` is read.

use std::{
    fmt,
    io::{self, IsTerminal},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    reload,
    util::SubscriberInitExt,
};

use crate::config::{self, LogFormat};

mod sink;

use sink::Sink;

/// The log of a process.
#[derive(Debug)]
pub struct Log {
    process: Option<Process>,
    lines: Sink,
    /// Read for each request, unlike the rest.
    requests: AtomicBool,
    /// The bits of a number from 0 to 1.
    sample: AtomicU64,
    is_json: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    configured: config::Log,
    in_force: config::Log,
}

/// How the events of the process are written can be changed.
struct Process {
    set_level: Box<dyn Fn(&str) + Send + Sync>,
    set_json: Box<dyn Fn(bool) + Send + Sync>,
}

/// An order to log otherwise: null for what is configured, absent for what is.
#[derive(Debug, Default)]
pub struct Change {
    /// `level`
    pub level: Option<Option<String>>,
    /// `requests`
    pub requests: Option<Option<bool>>,
    /// `sample`
    pub sample: Option<Option<f64>>,
}

impl Log {
    /// The log of this process, from here on; once only.
    pub fn start() -> Arc<Self> {
        let config = by_the_environment(config::Log::default());
        let (level, level_handle) = reload::Layer::new(EnvFilter::new(&config.level));
        let (form, form_handle) = reload::Layer::new(form(!io::stderr().is_terminal()));
        tracing_subscriber::registry().with(level).with(form).init();
        let process = Process {
            // Fails only where the subscriber is gone.
            set_level: Box::new(move |level| drop(level_handle.reload(EnvFilter::new(level)))),
            set_json: Box::new(move |is_json| drop(form_handle.reload(self::form(is_json)))),
        };
        Arc::new(Self { process: Some(process), ..Self::of(config) })
    }

    /// One that leaves the process's own events to others.
    pub fn apart() -> Self {
        Self::of(config::Log::default())
    }

    fn of(config: config::Log) -> Self {
        Self {
            process: None,
            lines: Sink::default(),
            requests: AtomicBool::new(config.requests),
            sample: AtomicU64::new(config.sample.to_bits()),
            is_json: AtomicBool::new(is_json(config.format, io::stdout().is_terminal())),
            state: Mutex::new(State { configured: config.clone(), in_force: config }),
        }
    }

    /// Whether the process's own events are written as it says.
    pub(crate) fn is_the_process(&self) -> bool {
        self.process.is_some()
    }

    /// Follows a configuration, unless it says what the last one said.
    pub fn adopt(&self, config: &config::Log) {
        let config = by_the_environment(config.clone());
        let mut state = self.lock();
        if state.configured == config {
            return;
        }
        if let Some(process) = &self.process {
            (process.set_json)(is_json(config.format, io::stderr().is_terminal()));
        }
        state.configured = config.clone();
        self.put(&mut state, config);
    }

    /// Follows an order.
    pub fn change(&self, change: Change) {
        let mut state = self.lock();
        let configured = state.configured.clone();
        let mut next = state.in_force.clone();
        if let Some(level) = change.level {
            next.level = level.unwrap_or(configured.level);
        }
        if let Some(requests) = change.requests {
            next.requests = requests.unwrap_or(configured.requests);
        }
        if let Some(sample) = change.sample {
            next.sample = sample.unwrap_or(configured.sample);
        }
        self.put(&mut state, next);
    }

    fn put(&self, state: &mut State, next: config::Log) {
        if let Some(process) = &self.process
            && next.level != state.in_force.level
        {
            (process.set_level)(&next.level);
        }
        self.requests.store(next.requests, Relaxed);
        self.sample.store(next.sample.to_bits(), Relaxed);
        self.is_json.store(is_json(next.format, io::stdout().is_terminal()), Relaxed);
        state.in_force = next;
    }

    /// What is in force.
    pub fn in_force(&self) -> config::Log {
        self.lock().in_force.clone()
    }

    /// Whether requests have lines.
    pub(crate) fn has_requests(&self) -> bool {
        self.requests.load(Relaxed)
    }

    /// Whether this one of the requests that went well has a line.
    pub(crate) fn draws(&self) -> bool {
        let sample = f64::from_bits(self.sample.load(Relaxed));
        sample >= 1.0 || fastrand::f64() < sample
    }

    /// Whether lines are JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.is_json.load(Relaxed)
    }

    /// Hands a line to stdout, which may be slow. False if that is so slow that the line is lost.
    pub(crate) fn write(&self, line: String) -> bool {
        self.lines.write(line)
    }

    /// Waits until stdout has every line, but not longer than `patience`.
    pub fn flush(&self, patience: Duration) {
        self.lines.flush(patience);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Process")
    }
}

fn is_json(format: LogFormat, is_terminal: bool) -> bool {
    match format {
        LogFormat::Auto => !is_terminal,
        LogFormat::Text => false,
        LogFormat::Json => true,
    }
}

/// `RUST_LOG` wins over what is configured, but not over an operator's order.
fn by_the_environment(config: config::Log) -> config::Log {
    let level = std::env::var(EnvFilter::DEFAULT_ENV).ok();
    let level = level.filter(|level| !level.is_empty() && EnvFilter::try_new(level).is_ok());
    config::Log { level: level.unwrap_or(config.level.clone()), ..config }
}

fn form<S>(is_json: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let form = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    match is_json {
        true => form.json().flatten_event(true).map_event_format(Timed).boxed(),
        false => form.with_target(false).boxed(),
    }
}

/// JSON whose `timestamp` is called `time`, as in the lines of requests.
struct Timed<F>(F);

impl<S, N, F> FormatEvent<S, N> for Timed<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        // It comes first, so nothing that anybody said comes before it.
        writer.write_str(&line.replacen("{\"timestamp\":", "{\"time\":", 1))
    }
}
