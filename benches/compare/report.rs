//! The report: tables as aligned text for the terminal and as Markdown for the README, and the machine.

use std::{fmt::Write, fs, process::Command};

use serde_json::{Map, Value, json};

use crate::children::{DIR, cpus, machine_and_own_cpu};

/// The middle of what was measured; NaN when nothing was.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A number as it is printed.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "-".to_owned(),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// The share of the machine that processes other than ours used, in percent.
#[derive(Debug)]
pub(crate) struct Disturbance {
    machine: f64,
    own: f64,
    since: tokio::time::Instant,
}

impl Disturbance {
    pub(crate) fn watch() -> Self {
        let (machine, own) = machine_and_own_cpu();
        Self { machine, own, since: tokio::time::Instant::now() }
    }

    pub(crate) fn percent(&self) -> f64 {
        let (machine, own) = machine_and_own_cpu();
        let cpus = cpus() as f64;
        let others = (machine - self.machine) - (own - self.own);
        100.0 * others.max(0.0) / (self.since.elapsed().as_secs_f64() * cpus)
    }
}

/// The report as it grows: printed at once, written at the end.
#[derive(Debug, Default)]
pub(crate) struct Report {
    markdown: String,
    /// The latest heading.
    title: String,
    /// The same for programs: facts, and every table with its title.
    facts: Map<String, Value>,
    tables: Vec<Value>,
}

impl Report {
    pub(crate) fn heading(&mut self, text: &str) {
        println!("\n{text}\n");
        text.clone_into(&mut self.title);
        _ = write!(self.markdown, "\n### {text}\n\n");
    }

    pub(crate) fn line(&mut self, text: &str) {
        println!("{text}");
        _ = write!(self.markdown, "{text}\n\n");
    }

    pub(crate) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.to_owned(), value.into());
    }

    pub(crate) fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        self.tables.push(json!({ "title": self.title, "columns": head, "rows": rows }));
        let width = |column: usize| {
            let cells =
                rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([head[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
        let line = |row: &Vec<String>, between: &str| {
            let cells = row.iter().zip(&widths).enumerate();
            let cells =
                cells.map(
                    |(i, (cell, &w))| {
                        if i == 0 { format!("{cell:<w$}") } else { format!("{cell:>w$}") }
                    },
                );
            cells.collect::<Vec<_>>().join(between)
        };
        let rule = widths
            .iter()
            .enumerate()
            .map(|(i, &w)| if i == 0 { "-".repeat(w) } else { "-".repeat(w - 1) + ":" });
        _ = writeln!(
            self.markdown,
            "| {} |\n| {} |",
            line(&head, " | "),
            rule.collect::<Vec<_>>().join(" | ")
        );
        println!("{}", line(&head, "  "));
        for row in rows {
            println!("{}", line(row, "  "));
            _ = writeln!(self.markdown, "| {} |", line(row, " | "));
        }
        println!();
        self.markdown.push('\n');
    }

    pub(crate) fn list(&mut self, items: &[(&str, String)]) {
        for (name, text) in items {
            println!("{name:<16}  {text}");
            _ = writeln!(self.markdown, "- {name}: {text}");
            self.fact(name, text.as_str());
        }
    }

    /// Writes it, a report of some sections under a name of its own; says where it is.
    pub(crate) fn save(&self, only: &str) -> crate::Result<String> {
        let name = if only.is_empty() { "report" } else { &format!("report-{only}") };
        let path = format!("{DIR}/{}", name.replace(',', "-"));
        fs::write(format!("{path}.md"), &self.markdown)?;
        let all = json!({ "facts": self.facts, "tables": self.tables });
        fs::write(format!("{path}.json"), serde_json::to_string_pretty(&all)?)?;
        Ok(format!("{path}.md and {path}.json"))
    }
}

/// What this runs on, and the versions of everything.
pub(crate) fn machine() -> Vec<(&'static str, String)> {
    let read = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split([':', '=']).nth(1).unwrap_or("?").trim().trim_matches('"').to_owned()
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let programs = [
        ("Tidegate", format!("{DIR}/tidegate --version")),
        ("commit", "git rev-parse --short HEAD".to_owned()),
        ("rustc", "rustc --version".to_owned()),
        ("HAProxy", "haproxy -v".to_owned()),
        ("nginx", "nginx -v".to_owned()),
        ("nginx Lua module", "dpkg-query -W libnginx-mod-http-lua".to_owned()),
        ("Redis", "redis-server --version".to_owned()),
        ("wrk", "wrk --version".to_owned()),
        ("h2load", "h2load --version".to_owned()),
    ];
    let mut items = vec![
        ("CPU", format!("{} x {}", cpus(), read("/proc/cpuinfo", "model name"))),
        ("memory", read("/proc/meminfo", "MemTotal")),
        ("system", format!("{}, Linux {}", read("/etc/os-release", "PRETTY_NAME"), kernel.trim())),
        (
            "build",
            if is_trained() { "trained: make release" } else { "cargo build --release" }.to_owned(),
        ),
    ];
    items.extend(programs.map(|(name, command)| (name, first_line(&command))));
    items
}

/// Whether the program under test is the one that is released.
fn is_trained() -> bool {
    let program = |folder| fs::read(format!("{folder}/tidegate"));
    matches!((program(DIR), program("target/trained")), (Ok(tested), Ok(trained)) if tested == trained)
}

/// The first line that a command says, on whichever stream.
fn first_line(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap_or_default()).args(words).output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().next().unwrap_or("not available").trim().to_owned()
}
