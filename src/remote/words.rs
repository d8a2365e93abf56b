//! What an instance answers, in words and tables. Nothing in it is trusted: a name may come from any instance or client.

use std::io::{self, IsTerminal};

use serde_json::Value;

use crate::config::escaped;

/// Whether words are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink(bool);

/// How urgent a word is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tone {
    Plain,
    Faint,
    Warn,
    Bad,
}

/// Stands behind slots that each value of a key has.
const EACH: &str = " each";

/// What is so while the store's memory may be incomplete.
const ANEW: &str = "slots are being counted anew";

/// One cell of a table.
struct Cell(String, Tone);

impl Ink {
    /// Without any colour.
    pub const NONE: Self = Self(false);

    /// For stdout: coloured on a terminal, unless `NO_COLOR` says no.
    pub fn of_stdout() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self(io::stdout().is_terminal() && !refused)
    }

    fn paint(self, text: &str, tone: Tone) -> String {
        let code = match tone {
            _ if !self.0 => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Faint => "2",
            Tone::Warn => "33",
            Tone::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// One row for each limit of `/status`.
pub fn table(status: &Value, ink: Ink) -> String {
    let titles = [
        "LIMIT", "SLOTS", "IN USE", "WAITING", "OLDEST", "QUEUE", "RATE", "HOLD", "LONGEST",
        "NEEDS", "REFUSED",
    ];
    let limits = status["limits"].as_object().into_iter().flatten();
    let rows = limits.map(|(name, limit)| {
        let figures = Figures::of(limit);
        let full = if figures.is_full { Tone::Warn } else { Tone::Plain };
        let waits = if figures.waiting > 0 { Tone::Warn } else { Tone::Plain };
        let refuses = if figures.refused > 0 { Tone::Bad } else { Tone::Plain };
        vec![
            Cell(escaped(name), full),
            Cell(figures.slots, Tone::Plain),
            Cell(figures.in_use, full),
            Cell(figures.waiting.to_string(), waits),
            Cell(figures.oldest, waits),
            Cell(figures.queue, waits),
            Cell(figures.rate, Tone::Plain),
            Cell(figures.hold, Tone::Plain),
            Cell(figures.longest, if figures.is_slow { Tone::Warn } else { Tone::Plain }),
            Cell(figures.needed, Tone::Plain),
            Cell(figures.refused.to_string(), refuses),
        ]
    });
    let table = head(status, ink) + &laid_out(&titles, 1, rows.collect(), ink);
    let has = |key: &str| {
        let mut limits = status["limits"].as_object().into_iter().flatten();
        limits.any(|(_, limit)| limit[key] == true)
    };
    let set =
        if has("overridden") { "* set by an operator, over what is configured\n" } else { "" };
    let each = "each: so many for each value of its key; the other figures are of all values in use here\n";
    table + set + if has("keyed") { each } else { "" }
}

/// One row for each holder.
pub fn holders(listed: &Value, ink: Ink) -> String {
    let titles = ["AGE", "SLOTS", "CLASS", "ROUTE", "INSTANCE", "ID", "KEY"];
    let word = |value: &Value| Cell(value.as_str().map_or("-".to_owned(), escaped), Tone::Plain);
    let holders = listed["holders"].as_array().into_iter().flatten();
    let rows: Vec<Vec<Cell>> = holders
        .map(|holder| {
            let instance = match holder["instance"].as_str() {
                None => Cell("a plain client".to_owned(), Tone::Faint),
                Some(_) => word(&holder["instance"]),
            };
            vec![
                Cell(time(holder["age_ms"].as_f64()), Tone::Plain),
                Cell(plain(&holder["weight"]), Tone::Plain),
                word(&holder["class"]),
                word(&holder["route"]),
                instance,
                word(&holder["id"]),
                word(&holder["key"]),
            ]
        })
        .collect();
    let nobody = rows.is_empty();
    let table = || laid_out(&titles, titles.len(), rows, ink);
    match (listed["recovering"] == true, nobody) {
        (false, false) => table(),
        (false, true) => "nobody holds a slot\n".to_owned(),
        (true, false) => ink.paint(ANEW, Tone::Warn) + ": some holders may be missing\n" + &table(),
        (true, true) => ink.paint(ANEW, Tone::Warn) + ": no holder is known yet\n",
    }
}

/// What became of an eviction.
pub fn evicted(answer: &Value) -> &'static str {
    match answer["evicted"].as_str() {
        Some("cut") => "cut; its slot is free once the upstream's connection is closed\n",
        Some("told") => "its instance was told to cut it\n",
        Some("removed") => "removed; its instance is gone\n",
        _ => "done\n",
    }
}

/// One limit in one line.
pub fn line(name: &str, limit: &Value) -> String {
    let Figures { in_use, waiting, oldest, hold, queue, .. } = Figures::of(limit);
    let set = if limit["overridden"] == true { " (set by an operator)" } else { "" };
    let slots = plain(&limit["slots"]);
    let each = if limit["keyed"] == true { " for each value of its key" } else { "" };
    let anew = if limit["recovering"] == true { ", being counted anew" } else { "" };
    let stale = match limit["stale_ms"].as_f64().filter(|_| limit["keyed"] != true) {
        Some(age) if age > 0.0 => format!(", stale: of {} ago", time(Some(age))),
        _ => String::new(),
    };
    format!(
        "{name}: {slots} slots{each}{set}, {in_use} in use, {waiting} waiting, oldest {oldest}, hold {hold}, queue {queue}{anew}{stale}\n"
    )
}

fn head(status: &Value, ink: Ink) -> String {
    let store = &status["store"];
    let up = store["up"].as_bool() == Some(true);
    let store = escaped(store["kind"].as_str().unwrap_or("-"));
    let store =
        if up { format!("{store} up") } else { ink.paint(&format!("{store} down"), Tone::Bad) };
    let mut head =
        format!("instance {}, store {store}", escaped(status["instance"].as_str().unwrap_or("-")));
    for (key, word) in [("recovery", ", recovering"), ("draining", ", draining")] {
        if status[key].as_bool() == Some(true) {
            head += &ink.paint(word, Tone::Warn);
        }
    }
    let instances = status["instances"].as_array().map(Vec::as_slice).unwrap_or_default();
    let gone = instances.iter().filter(|instance| instance["gone"] == true).count();
    let living = instances.len() - gone;
    if living > 1 {
        head += &format!(", {living} instances");
    }
    if gone > 0 {
        head += &ink.paint(&format!(", {gone} gone"), Tone::Warn);
    }
    let limits = status["limits"].as_object().into_iter().flatten();
    let ages = limits.filter(|_| !up).filter_map(|(_, limit)| limit["stale_ms"].as_f64());
    if let Some(age) = ages.reduce(f64::max) {
        let stale = format!("; what follows is stale, of {} ago", time(Some(age)));
        head += &ink.paint(&stale, Tone::Bad);
    }
    if status["last_reload"]["worked"] == false {
        let at = escaped(status["last_reload"]["at"].as_str().unwrap_or("-"));
        let refused = format!("\nthe configuration of {at} was refused; an older one is in force");
        head += &ink.paint(&refused, Tone::Bad);
    }
    for ill in ill(status) {
        head += &ink.paint(&format!("\n{ill}"), Tone::Bad);
    }
    head + "\n"
}

/// What is wrong with endpoints, each in a line.
fn ill(status: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for (upstream, of) in status["upstreams"].as_object().into_iter().flatten() {
        for endpoint in of["endpoints"].as_array().into_iter().flatten() {
            let name = escaped(endpoint["endpoint"].as_str().unwrap_or("-"));
            let mut say = |who: &str, how: &str| {
                lines.push(format!("upstream {}: {who} {how}", escaped(upstream)))
            };
            let addresses = endpoint["addresses"].as_array().map_or(&[][..], Vec::as_slice);
            if addresses.is_empty() {
                say(&name, "has no address");
            }
            for at in addresses {
                let address = escaped(at["address"].as_str().unwrap_or("-"));
                let who =
                    if name == address { name.clone() } else { format!("{name} ({address})") };
                match at["state"].as_str().filter(|word| *word != "up") {
                    Some(word) => say(&who, &format!("is {}", escaped(word))),
                    None if at["silent_ms"].is_u64() => {
                        let silent = time(at["silent_ms"].as_f64());
                        say(&who, &format!("has answered no request for {silent}"));
                    }
                    None => {}
                }
            }
        }
    }
    lines
}

/// A table whose first `words` columns are words, and the others figures, which stand right.
fn laid_out(titles: &[&str], words: usize, rows: Vec<Vec<Cell>>, ink: Ink) -> String {
    let titles = titles.iter().map(|title| Cell((*title).to_owned(), Tone::Faint)).collect();
    let rows: Vec<Vec<Cell>> = std::iter::once(titles).chain(rows).collect();
    let width_of = |column: usize| rows.iter().map(|row| row[column].0.chars().count()).max();
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|column| width_of(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (Cell(text, tone), width)) in row.iter().zip(&widths).enumerate() {
            let padded =
                if column < words { format!("{text:<width$}") } else { format!("{text:>width$}") };
            line += if column == 0 { "" } else { "  " };
            line += &ink.paint(&padded, *tone);
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

fn plain(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), |n| n.to_string())
}

fn time(ms: Option<f64>) -> String {
    match ms {
        None => "-".to_owned(),
        Some(ms) if ms < 1000.0 => format!("{ms:.0}ms"),
        Some(ms) if ms < 600_000.0 => format!("{:.1}s", ms / 1000.0),
        Some(ms) => format!("{:.0}min", ms / 60_000.0),
    }
}

struct Figures {
    slots: String,
    in_use: String,
    is_full: bool,
    waiting: u64,
    oldest: String,
    queue: String,
    rate: String,
    hold: String,
    longest: String,
    is_slow: bool,
    needed: String,
    refused: u64,
}

impl Figures {
    fn of(limit: &Value) -> Self {
        let sum = |key: &str| {
            let counts = limit[key].as_object().into_iter().flatten();
            counts.filter_map(|(_, count)| count.as_u64()).sum()
        };
        let waiting = sum("waiting");
        let oldest = limit["oldest_wait_ms"].as_f64().filter(|_| waiting > 0);
        let is_keyed = limit["keyed"] == true;
        let longest = limit["longest_hold_ms"].as_f64();
        Self {
            slots: {
                let mark = if limit["overridden"] == true { "*" } else { "" };
                let each = if is_keyed { EACH } else { "" };
                format!("{}{mark}{each}", plain(&limit["slots"]))
            },
            in_use: plain(&limit["in_use"]),
            is_full: !is_keyed && limit["in_use"].as_u64() >= limit["slots"].as_u64(),
            waiting,
            oldest: time(oldest),
            queue: match limit["queue_seconds"].as_f64() {
                None if waiting > 0 && limit["slots"] == 0 => "never".to_owned(),
                seconds => time(seconds.map(|seconds| seconds * 1000.0)),
            },
            rate: limit["arrival_rate"]
                .as_f64()
                .map_or("-".to_owned(), |rate| format!("{rate:.1}/s")),
            hold: time(limit["hold_ms"].as_f64()),
            longest: time(longest),
            is_slow: longest
                .zip(limit["max_hold_ms"].as_f64())
                .is_some_and(|(held, most)| held >= 0.8 * most),
            needed: limit["needed_slots"]
                .as_f64()
                .map_or("-".to_owned(), |slots| format!("{slots:.1}")),
            refused: sum("refused"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn busy() -> Value {
        json!({
            "slots": 20, "in_use": 20, "waiting": { "critical": 1, "normal": 12 },
            "oldest_wait_ms": 1240, "hold_ms": 151.6, "queue_seconds": 0.0985, "arrival_rate": 140.25,
            "longest_hold_ms": 1_500_000, "max_hold_ms": 1_800_000, "overridden": true, "stale_ms": 12_000,
            "needed_slots": 21.26, "refused": { "queue_full": 3, "queue_timeout": 4 },
        })
    }

    fn status() -> Value {
        let idle = json!({
            "slots": 5, "in_use": 0, "waiting": {}, "oldest_wait_ms": 0, "hold_ms": null,
            "queue_seconds": null, "longest_hold_ms": null, "stale_ms": 12_000,
        });
        json!({
            "instance": "i", "store": { "kind": "redis", "up": false }, "recovery": true,
            "draining": false, "limits": { "a-long-name": busy(), "db": idle },
            "instances": [{ "gone": false }, { "gone": false }, { "gone": true }],
        })
    }

    #[test]
    fn status_is_a_table() {
        let expected = "\
instance i, store redis down, recovering, 2 instances, 1 gone; what follows is stale, of 12.0s ago
LIMIT        SLOTS  IN USE  WAITING  OLDEST  QUEUE     RATE   HOLD  LONGEST  NEEDS  REFUSED
a-long-name    20*      20       13    1.2s   98ms  140.2/s  152ms    25min   21.3        7
db               5       0        0       -      -        -      -        -      -        0
* set by an operator, over what is configured
";
        assert_eq!(table(&status(), Ink::NONE), expected);
    }

    #[test]
    fn what_is_ill_stands_above_the_table() {
        let address = |address: &str, state: &str, silent: Value| json!({ "address": address, "state": state, "in_flight": 0, "silent_ms": silent });
        let endpoint = |endpoint: &str, addresses: Vec<Value>| json!({ "endpoint": endpoint, "ejections": 0, "addresses": addresses });
        let endpoints = [
            endpoint("10.0.0.1:80", vec![address("10.0.0.1:80", "up", json!(null))]),
            endpoint("10.0.0.2:80", vec![address("10.0.0.2:80", "up", json!(12_000))]),
            endpoint("db:80", vec![address("10.0.0.3:80", "ejected", json!(5))]),
            endpoint("gone", vec![]),
        ];
        let status = json!({
            "instance": "i", "store": { "kind": "redis", "up": true },
            "upstreams": { "a\u{1b}": { "endpoints": endpoints } },
            "last_reload": { "at": "2026-01-02T03:04:05Z", "worked": false },
        });
        let expected = "\
instance i, store redis up
the configuration of 2026-01-02T03:04:05Z was refused; an older one is in force
upstream a\\u{1b}: 10.0.0.2:80 has answered no request for 12.0s
upstream a\\u{1b}: db:80 (10.0.0.3:80) is ejected
upstream a\\u{1b}: gone has no address
";
        assert_eq!(head(&status, Ink::NONE), expected);
    }

    #[test]
    fn slots_of_a_key_are_marked_and_a_queue_without_slots_never_ends() {
        let mut limit = json!({ "slots": 1, "in_use": 4, "waiting": {}, "keyed": true });
        let status = json!({ "limits": { "tenant": limit.clone() } });
        let text = table(&status, Ink::NONE);
        assert!(text.contains("\ntenant  1 each       4 "), "{text}");
        assert!(text.ends_with("of all values in use here\n"), "{text}");
        assert!(line("t", &limit).starts_with("t: 1 slots for each value of its key, 4 in use"));
        limit =
            json!({ "slots": 0, "in_use": 0, "waiting": { "normal": 1 }, "queue_seconds": null });
        assert!(line("t", &limit).ends_with(", queue never\n"), "{}", line("t", &limit));
    }

    #[test]
    fn what_is_counted_anew_is_not_told_as_it_is() {
        let limit = json!({ "slots": 2, "in_use": 1, "recovering": true, "stale_ms": 500 });
        assert!(line("llm", &limit).ends_with(", being counted anew, stale: of 500ms ago\n"));
        let listed = json!({ "holders": [], "recovering": true });
        let expected = "slots are being counted anew: no holder is known yet\n";
        assert_eq!(holders(&listed, Ink::NONE), expected);
    }

    #[test]
    fn colours_change_no_column() {
        let coloured = table(&status(), Ink(true));
        assert!(coloured.contains("\x1b[1;31mredis down\x1b[0m"), "{coloured}");
        let mut bare = coloured;
        for code in ["\x1b[0m", "\x1b[2m", "\x1b[33m", "\x1b[1;31m"] {
            bare = bare.replace(code, "");
        }
        assert_eq!(bare, table(&status(), Ink::NONE));
    }

    #[test]
    fn a_limit_is_a_line() {
        let expected = "llm: 20 slots (set by an operator), 20 in use, 13 waiting, oldest 1.2s, hold 152ms, queue 98ms, stale: of 12.0s ago\n";
        assert_eq!(line("llm", &busy()), expected);
    }

    #[test]
    fn no_name_does_anything_to_a_terminal() {
        let holder = json!({
            "id": "\u{1b}]0;title\u{7}", "instance": null, "route": "a\u{202e}b\r\n", "class": null,
            "weight": 1, "age_ms": 900_000, "key": null,
        });
        let text = holders(&json!({ "holders": [holder] }), Ink::NONE);
        let expected = "15min  1      -      a\\u{202e}b\\u{d}\\u{a}  a plain client  \\u{1b}]0;title\\u{7}  -";
        assert_eq!(text.lines().nth(1), Some(expected), "{text}");
        assert_eq!(holders(&json!({ "holders": [] }), Ink::NONE), "nobody holds a slot\n");
    }
}
