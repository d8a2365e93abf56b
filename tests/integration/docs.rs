//! What the documentation says exists, and what exists is in it; and whatever can be run in it, runs.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::Value;
use tidegate::reason::Reason;

use crate::harness::{Client, Proxy, Raw, Upstream, one_limit, tidegate, within};

mod examples;
mod python;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every page, the README first.
fn pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<_> = docs.filter(|path| path.extension() == Some("md".as_ref())).collect();
    pages.sort();
    assert!(pages.len() > 10, "{pages:?}");
    [root().join("README.md")].into_iter().chain(pages).collect()
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join("docs").join(name)).unwrap()
}

/// The cells of every row of a text's tables whose first cell is in backticks.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.trim_matches('|').split(" |").map(str::trim).collect()).collect()
}

/// What stands in backticks.
fn words(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn assert_same<T: Ord + std::fmt::Debug>(what: &str, told: &BTreeSet<T>, real: &BTreeSet<T>) {
    assert!(!real.is_empty(), "no {what}");
    let missing: Vec<_> = real.difference(told).collect();
    let invented: Vec<_> = told.difference(real).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "{what} missing in the docs: {missing:?}, and invented there: {invented:?}"
    );
}

#[tokio::test]
async fn every_metric_is_told_with_its_type_its_labels_and_its_help() {
    let upstream = Upstream::spawn().await;
    let route = "rates = [\"some\"]\non_full = [{ respond = 200 }]\n\
                 [rates.some]\nrequests = 100\nwindow = \"1m\"\n";
    let conf = one_limit(&upstream, 0).queue("0").limit("mode = \"shadow\"").route(route);
    let shadow = Proxy::spawn(&conf).await;
    assert_eq!(Client::new().get(shadow.addr(), "/status/200").await.status, 200);
    let full = Proxy::spawn(&one_limit(&upstream, 0).queue("0").route(route)).await;
    assert_eq!(
        Client::new().get(full.addr(), "/status/200").await.header("tidegate-degraded"),
        "respond"
    );
    let crowded = one_limit(&upstream, 1).server("proxy_protocol = [\"10.0.0.0/8\"]");
    let crowded = Proxy::spawn(&crowded).await;
    let closed = Raw::get(crowded.addr(), "/status/200").await.read_to_end().await;
    assert!(closed.unwrap_or_default().is_empty());

    let mut real = BTreeSet::new();
    let mut labels = std::collections::BTreeMap::<String, BTreeSet<String>>::new();
    for proxy in [&shadow, &full, &crowded] {
        let text = Client::new().get(proxy.admin(), "/metrics").await;
        let text = String::from_utf8(text.body.to_vec()).unwrap();
        let mut help = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ').unwrap().1.trim_end_matches('.');
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                let total = if kind == "counter" { "_total" } else { "" };
                real.insert((format!("{name}{total}"), kind.to_owned(), help.to_owned()));
            } else if let Some((name, rest)) = line.split_once('{') {
                let name = ["_bucket", "_sum", "_count"]
                    .iter()
                    .find_map(|part| name.strip_suffix(part))
                    .unwrap_or(name);
                let names = rest.split(['{', ',']).filter_map(|pair| Some(pair.split_once('=')?.0));
                let names = names.filter(|name| *name != "le").map(str::to_owned);
                labels.entry(name.to_owned()).or_default().extend(names);
            }
        }
    }
    let text = page("metrics.md");
    let rows = rows(&text);
    let told: BTreeSet<_> = rows
        .iter()
        .map(|row| (row[0].trim_matches('`').to_owned(), row[1].to_owned(), row[3].to_owned()))
        .collect();
    assert_same("metrics", &told, &real);
    for row in &rows {
        let name = row[0].trim_matches('`');
        let told: BTreeSet<String> =
            row[2].split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        assert_eq!(labels.remove(name).unwrap_or_default(), told, "labels of {name}");
        assert!(row[4].len() > 5, "what to do when {name} moves");
    }
}

#[test]
fn every_reason_is_told_with_its_status() {
    let text = page("troubleshooting.md");
    let told: BTreeSet<_> = rows(&text)
        .iter()
        .map(|row| (row[0].trim_matches('`').to_owned(), row[1].to_owned()))
        .collect();
    let real = Reason::ALL.into_iter();
    let real =
        real.map(|reason| (reason.as_str().to_owned(), reason.answer().0.as_u16().to_string()));
    assert_same("reasons", &told, &real.collect());
}

#[tokio::test]
async fn every_endpoint_and_every_key_of_the_status_is_told() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 1)).await;
    let text = page("operating.md");
    let (endpoints, rest) = text.split_once("## By the command line").unwrap();
    let (_, status) = rest.split_once("## `/status`").unwrap();
    let (status, _) = status.split_once("\n## ").unwrap();

    let told: BTreeSet<_> =
        rows(endpoints).iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    let client = Client::new();
    let answer = client.get(proxy.admin(), "/nowhere").await;
    let answer = String::from_utf8(answer.body.to_vec()).unwrap();
    let (_, real) = answer.split_once("there are ").unwrap();
    assert_same("endpoints", &told, &real.split_whitespace().map(str::to_owned).collect());
    // The events never end, and nobody holds a slot here.
    for endpoint in told.into_iter().filter(|path| path != "/events" && !path.contains("<id>")) {
        let answer = client.get(proxy.admin(), &endpoint.replace("<name>", "llm")).await;
        assert_eq!(answer.status, 200, "{endpoint}");
    }

    let told: BTreeSet<_> = rows(status)
        .iter()
        .flat_map(|row| words(row[0]).map(|key| key.rsplit('.').next().unwrap().to_owned()))
        .collect();
    let status = proxy.status().await;
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let all = keys(&status).into_iter().chain(keys(&status["limits"]["llm"]));
    assert_same("keys of /status", &told, &all.filter(|key| key != "limits").collect());
}

#[tokio::test]
async fn the_page_of_the_command_line_is_as_the_program_says() {
    let help = async |words: &[&str]| {
        let output = tidegate().args(words).arg("--help").stdin(Stdio::null()).output();
        let output = within("help", output).await.unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let all = help(&[]).await;
    let (_, commands) = all.split_once("Commands:\n").unwrap();
    let names = commands.lines().take_while(|line| !line.is_empty());
    let names: Vec<&str> = names
        .filter_map(|line| {
            line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
        })
        .filter(|name| *name != "help")
        .collect();
    assert!(names.len() > 6, "{names:?}");
    let mut page = format!(
        "# The command line\n\nWhat `--help` says; `tidegate man` prints the same as a manual page, and `tidegate completions` what \
         lets a shell\ncomplete it.\n\n```text\n{}```\n",
        all
    );
    for name in names {
        page += &format!("\n## `tidegate {name}`\n\n```text\n{}```\n", help(&[name]).await);
    }
    let page: String = page.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    let path = root().join("docs/command-line.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "UPDATE_DOCS=1 cargo test --test integration docs:: writes it anew");
}
