//! Tidegate beside HAProxy, nginx and nginx with a semaphore in Lua: `make bench`.
//!
//! Sections, each of which starts its own processes: `throughput` (what a proxy and a limit cost), `tls` and `http2` (the same for
//! clients that speak those), `streams` and `transfer` (many small events, one large body), `runtime` (threads or processes),
//! `handover` (what waiting costs), `growth` (what N, waiters, keys and instances cost on Redis), `connections` (memory), `waiters`
//! (what a waiter costs Redis), `refusal` (what a storm costs). Rounds are interleaved: every candidate is measured once in each, so
//! a ratio compares neighbours in time, and the median of the rounds is shown.
//!
//! **Pinning.** Each candidate has CPU 0 to itself, with one worker thread; wrk, the upstream and Redis
//! share the other CPUs. So requests/s is what one core of proxy carries, as long as the column `core`
//! says that this core was busy: where it isn't, the rest was the bottleneck. The upstream is 20 lines of
//! Rust, for nothing answers 1 KB with less CPU. In the hand-over nobody is short of CPU, so nothing is
//! pinned there.
//!
//! Environment: `BENCH_ROUNDS` (3), `BENCH_SECONDS` (2, of each load; some sections' loads last longer by a factor),
//! `BENCH_ONLY` (sections, with commas between), `BENCH_CANDIDATES` (the same for those of `throughput` and `handover`: two
//! alone, over many rounds, can be compared more closely), `BENCH_SHORT` (set: a tenth of the connections, streams and bytes,
//! to see that it works). `cargo bench --bench compare -- plot` draws the saved reports.

use std::{env, process::ExitCode};

use candidates::Candidate;
use children::{Cpus, DIR};
use report::{Disturbance, Report, figure};

mod candidates;
mod children;
mod connections;
mod growth;
mod handover;
mod instances;
mod load;
mod plot;
mod protocols;
mod refusal;
mod report;
mod runtime;
mod serve;
mod streams;
mod throughput;
mod transfer;
mod upstream;
mod waiters;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

/// How long and how often to measure, and what came of it.
#[derive(Debug)]
struct Run {
    rounds: usize,
    seconds: u64,
    /// Whether this is only to see that everything works.
    short: bool,
    /// The names of those whose throughput and hand-over are measured, with commas between; of all if it is empty.
    candidates: String,
    report: Report,
    marks: Vec<Mark>,
    failures: Vec<String>,
}

/// A ratio that Tidegate is to reach.
#[derive(Debug)]
struct Mark {
    name: String,
    ratio: f64,
    bound: Bound,
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Run {
    /// So many, or a tenth in a short run.
    fn at_most(&self, count: usize) -> usize {
        if self.short { count / 10 } else { count }
    }

    fn compares(&self, candidate: Candidate) -> bool {
        self.candidates.is_empty()
            || self.candidates.split(',').any(|name| name == candidate.name())
    }

    fn mark(&mut self, name: impl Into<String>, ratio: f64, bound: Bound) {
        self.marks.push(Mark { name: name.into(), ratio, bound });
    }

    /// A candidate that doesn't start is missing from its section, and fails the run. Those that aren't
    /// Tidegate come from Debian and have to start.
    fn missing(&mut self, candidate: Candidate, error: Error) -> Result<()> {
        if !candidate.is_tidegate() {
            return Err(error);
        }
        let failure = format!("{}: not available: {error}", candidate.name());
        if !self.failures.contains(&failure) {
            self.failures.push(failure);
        }
        Ok(())
    }

    fn show_marks(&mut self) {
        if self.marks.is_empty() {
            return;
        }
        let row = |mark: &Mark| {
            let (bound, met) = match mark.bound {
                Bound::AtLeast(bound) => (format!(">= {bound}"), mark.ratio >= bound),
                Bound::AtMost(bound) => (format!("<= {bound}"), mark.ratio <= bound),
            };
            let verdict = if mark.ratio.is_nan() {
                "not measured"
            } else if met {
                "reached"
            } else {
                "MISSED"
            };
            vec![mark.name.clone(), bound, figure(mark.ratio), verdict.to_owned()]
        };
        let rows: Vec<_> = self.marks.iter().map(row).collect();
        self.report.heading("Marks");
        self.report.table(&["ratio within the run", "mark", "measured", ""], &rows);
    }
}

/// The parts of the comparison, each of which starts its own processes.
const SECTIONS: [&str; 11] = [
    "throughput",
    "tls",
    "http2",
    "streams",
    "transfer",
    "runtime",
    "handover",
    "growth",
    "connections",
    "waiters",
    "refusal",
];

async fn measure(section: &str, run: &mut Run) -> Result<()> {
    match section {
        "throughput" => throughput::section(run).await,
        "tls" => protocols::tls(run).await,
        "http2" => protocols::http2(run).await,
        "streams" => streams::section(run).await,
        "transfer" => transfer::section(run).await,
        "runtime" => runtime::section(run).await,
        "handover" => handover::section(run).await,
        "growth" => growth::section(run).await,
        "connections" => connections::section(run).await,
        "waiters" => waiters::section(run).await,
        "refusal" => refusal::section(run).await,
        other => Err(format!("BENCH_ONLY: there is no {other}, but {SECTIONS:?}").into()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // Cargo itself adds one.
    let args: Vec<String> = env::args().filter(|arg| arg != "--bench").collect();
    let done = match args.get(1..) {
        Some([role, kind, port]) if role == "upstream" => {
            serve::serve(kind, port).await.map(|()| true)
        }
        Some([role]) if role == "plot" => plot::plot().map(|()| true),
        _ => compare().await,
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what is asked for and saves the report. False if something was missing or answered wrongly.
async fn compare() -> Result<bool> {
    std::fs::create_dir_all(DIR)?;
    let number = |name, default: u64| env::var(name).map_or(Ok(default), |value| value.parse());
    let mut run = Run {
        rounds: usize::try_from(number("BENCH_ROUNDS", 3)?)?,
        seconds: number("BENCH_SECONDS", 2)?,
        short: env::var_os("BENCH_SHORT").is_some(),
        candidates: env::var("BENCH_CANDIDATES").unwrap_or_default(),
        report: Report::default(),
        marks: Vec::new(),
        failures: Vec::new(),
    };
    let only = env::var("BENCH_ONLY").unwrap_or_default();
    let sections: Vec<&str> =
        if only.is_empty() { SECTIONS.to_vec() } else { only.split(',').collect() };

    candidates::make_certificate()?;
    run.report.heading("Machine");
    let machine = report::machine();
    run.report.list(&machine);
    let disturbance = Disturbance::watch();
    for section in sections {
        if let Err(error) = measure(section, &mut run).await {
            run.failures.push(format!("{section}: {error}"));
            Cpus::Any.take()?;
        }
        // What comes later may go wrong as well.
        run.report.save(&only)?;
    }
    run.show_marks();
    let others = disturbance.percent();
    let verdict = if others > 3.0 { "DISTURBED: measure again" } else { "undisturbed" };
    run.report.line(&format!(
        "Other processes used {others:.1} % of the machine's CPU meanwhile: {verdict}."
    ));
    for failure in &run.failures {
        run.report.line(&format!("FAILED: {failure}"));
    }
    run.report.fact("rounds", run.rounds);
    run.report.fact("seconds", run.seconds);
    run.report.fact("short", run.short);
    run.report.fact("others_percent", others);
    run.report.fact("failures", &*run.failures);
    println!("saved to {}", run.report.save(&only)?);
    Ok(run.failures.is_empty())
}
