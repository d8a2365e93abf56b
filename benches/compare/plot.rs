//! Draws the saved reports: bars as SVG, without a library. `cargo bench --bench compare -- plot`.

use std::{fmt::Write, fs, path::PathBuf};

use serde_json::Value;

use crate::{Result, children::DIR};

const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/images");
const WIDTH: f64 = 760.0;
/// Where bars begin, and how long the longest is.
const LEFT: f64 = 260.0;
const LONGEST: f64 = 400.0;
const LINE: f64 = 20.0;

/// A picture: some columns of some tables, by how their titles begin.
struct Chart {
    file: &'static str,
    title: &'static str,
    panels: &'static [(&'static str, &'static str)],
}

const CHARTS: [Chart; 7] = [
    Chart {
        file: "throughput",
        title: "Requests/s of one core",
        panels: &[
            ("Throughput, 32 connections", "req/s"),
            ("Throughput, 256 connections", "req/s"),
        ],
    },
    Chart {
        file: "cpu",
        title: "CPU microseconds a request",
        panels: &[
            ("Throughput, 32 connections", "CPU us"),
            ("HTTP/1.1 over TLS 1.3, 32 connections", "CPU us"),
            ("HTTP/2 over TLS 1.3, 32 connections of 8 streams", "CPU us"),
        ],
    },
    Chart {
        file: "memory",
        title: "KiB for each connection",
        panels: &[
            ("Memory: KiB for each connection", "waiting"),
            ("Memory: KiB for each connection", "idle"),
            ("Memory: KiB for each connection", "tunnels"),
        ],
    },
    Chart {
        file: "streams",
        title: "Server-sent events",
        panels: &[("2000 streams of", "CPU us an event"), ("2000 streams of", "added p99 ms")],
    },
    Chart {
        file: "transfer",
        title: "One large body",
        panels: &[("One download of", "MiB/s"), ("One upload of", "MiB/s")],
    },
    Chart {
        file: "growth",
        title: "Redis microseconds a request",
        panels: &[("Growth on one Redis", "Redis us a request")],
    },
    Chart {
        file: "instances",
        title: "Instances on one Redis",
        panels: &[("Instances on one Redis", "req/s")],
    },
];

/// Draws what there are figures for.
pub(crate) fn plot() -> Result<()> {
    let reports = reports()?;
    fs::create_dir_all(IMAGES)?;
    for chart in &CHARTS {
        if let Some(svg) = chart.draw(&reports) {
            let path = format!("{IMAGES}/bench-{}.svg", chart.file);
            fs::write(&path, svg)?;
            println!("{path}");
        }
    }
    Ok(())
}

/// The saved reports, the latest first.
fn reports() -> Result<Vec<Value>> {
    let mut paths: Vec<(_, PathBuf)> = Vec::new();
    for entry in fs::read_dir(DIR)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("report") && name.ends_with(".json") {
            paths.push((fs::metadata(&path)?.modified()?, path));
        }
    }
    paths.sort();
    let read = |(_, path)| Ok(serde_json::from_str(&fs::read_to_string(path)?)?);
    paths.into_iter().rev().map(read).collect()
}

impl Chart {
    /// None if no report has any of it.
    fn draw(&self, reports: &[Value]) -> Option<String> {
        let (mut body, mut y, mut from) = (String::new(), 56.0, None);
        for (title, column) in self.panels {
            let Some(Panel { report, title, column, bars }) = find(reports, title, column) else {
                continue;
            };
            from = from.or(Some(report));
            let head = format!("{title}: {column}");
            _ = writeln!(body, "{}", text(16.0, y, "start", "head", &head));
            let most = bars.iter().map(|bar| bar.1).fold(f64::MIN_POSITIVE, f64::max);
            for (name, value) in bars {
                y += LINE;
                let (length, class) = (
                    (LONGEST * value / most).max(1.0),
                    if name.contains("tidegate") { "ours" } else { "theirs" },
                );
                _ = writeln!(body, "{}", text(LEFT - 8.0, y, "end", "", &name));
                _ = writeln!(
                    body,
                    r#"<rect class="{class}" x="{LEFT}" y="{}" width="{length:.1}" height="{}"/>"#,
                    y - 12.0,
                    LINE - 5.0
                );
                let shown = crate::report::figure(value);
                _ = writeln!(body, "{}", text(LEFT + length + 6.0, y, "start", "", &shown));
            }
            y += 2.0 * LINE;
        }
        let facts = &from?["facts"];
        let fact = |name: &str| facts[name].as_str().unwrap_or("?").to_owned();
        let others = facts["others_percent"].as_f64().unwrap_or(f64::NAN);
        let foot = format!("{}, commit {}; others used {others:.1} %", fact("CPU"), fact("commit"));
        _ = writeln!(body, "{}", text(16.0, y, "start", "foot", &foot));
        if facts["short"] == true {
            let warning = "A short run, to see that it works: no figures to go by.";
            _ = writeln!(body, "{}", text(16.0, y + LINE, "start", "foot", warning));
        }
        let height = y + 2.0 * LINE;
        let title = text(16.0, 28.0, "start", "title", self.title);
        Some(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\">\n<style>text {{ font: 13px sans-serif; fill: #222 }} .title {{ font: bold \
             17px sans-serif }} .head {{ font-weight: bold }} .foot {{ font-size: 11px; fill: #666 }} .ours {{ fill: #0b7285 \
             }} .theirs {{ fill: #adb5bd }}</style>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n{title}\n\
             {body}</svg>\n"
        ))
    }
}

/// What a panel is drawn from.
struct Panel<'a> {
    report: &'a Value,
    /// The table's whole title, and the column's.
    title: &'a str,
    column: &'a str,
    bars: Vec<(String, f64)>,
}

/// The bars of a column, out of the latest report that has it.
fn find<'a>(reports: &'a [Value], title: &str, column: &str) -> Option<Panel<'a>> {
    reports.iter().find_map(|report| {
        let tables = report["tables"].as_array()?.iter();
        let named = |table: &&Value| table["title"].as_str().is_some_and(|t| t.starts_with(title));
        let table = tables.into_iter().find(named)?;
        let columns = table["columns"].as_array()?;
        let begins = |name: &Value| name.as_str().is_some_and(|name| name.starts_with(column));
        let place = columns.iter().position(begins)?;
        // A cell may say more than its number.
        let bar = |row: &Value| {
            let value = row[place].as_str()?.split(' ').next()?.parse().ok()?;
            Some((row[0].as_str()?.to_owned(), value))
        };
        let bars: Vec<_> = table["rows"].as_array()?.iter().filter_map(bar).collect();
        let title = table["title"].as_str()?;
        (!bars.is_empty()).then_some(Panel {
            report,
            title,
            column: columns[place].as_str()?,
            bars,
        })
    })
}

fn text(x: f64, y: f64, anchor: &str, class: &str, text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    format!(r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{text}</text>"#)
}
