//! The parser is asked for every key it knows, so that none can be missing here, or be here alone.

use std::{collections::BTreeSet, fs, path::Path};

use rcgen::{CertifiedKey, generate_simple_self_signed};

use super::{Key, Without, page, sections};
use crate::config::{Config, ConfigError};

/// What each key is tried in.
const BASE: &str = r#"
[server]
[limits.app]
slots = 3
[limits.other]
slots = 1
[limits.third]
slots = 1
[rates.app]
requests = 100
window = "1m"
[rates.some]
requests = 100
window = "1m"
[upstreams.app]
endpoints = ["http://127.0.0.1:3000"]
[upstreams.cheap]
endpoints = ["http://127.0.0.1:3001"]
[[routes]]
path = "/"
upstream = "app"
"#;

/// What a key needs beside it.
const COMPANIONS: &[(&str, &str, &str)] = &[
    ("server.tls.", "server.tls.cert", r#""cert.pem""#),
    ("server.tls.", "server.tls.key", r#""key.pem""#),
    ("traces.", "traces.endpoint", r#""http://127.0.0.1:4318""#),
    ("store.tls.", "store.url", r#""rediss://a""#),
    ("store.sentinel_", "store.url", r#""redis+sentinel://a:26379/primary""#),
    ("store.sentinel_user", "store.sentinel_password", r#""s3cret""#),
    ("store.tls.client", "store.tls.client_cert", r#""cert.pem""#),
    ("store.tls.client", "store.tls.client_key", r#""key.pem""#),
    ("upstreams.<name>.tls.", "upstreams.<name>.endpoints", r#"["https://a"]"#),
    ("upstreams.<name>.tls.client", "upstreams.<name>.tls.client_cert", r#""cert.pem""#),
    ("upstreams.<name>.tls.client", "upstreams.<name>.tls.client_key", r#""key.pem""#),
    ("upstreams.<name>.ping_interval", "upstreams.<name>.http2", "true"),
    ("upstreams.<name>.health.", "upstreams.<name>.health.path", r#""/""#),
    ("upstreams.<name>.ejection.", "upstreams.<name>.ejection.failures", "5"),
    ("upstreams.<name>.ejection.failures", "upstreams.<name>.ejection.share", "0.5"),
    ("limits.<name>.slots_for", "limits.<name>.key", r#""client-ip""#),
    ("limits.<name>.fence_header", "limits.<name>.slots", "1"),
    ("routes[].class.classes", "routes[].class.key", r#""client-ip""#),
    ("routes[].class.default", "routes[].class.header", r#""x-priority""#),
    ("routes[].weight.header", "routes[].weight.max", "4"),
    ("routes[].weight.bytes_per_slot", "routes[].weight.max", "4"),
    ("routes[].weight.max", "routes[].weight.header", r#""x-weight""#),
    ("routes[].on_full[].forward_credentials", "routes[].on_full[].upstream", r#""cheap""#),
    ("routes[].on_full[].body", "routes[].on_full[].respond", "200"),
    ("routes[].on_full[].content_type", "routes[].on_full[].respond", "200"),
];

/// What is no error to leave out alone because something else must be left out with it.
const HALVES: [&str; 4] = [".client_cert", ".client_key", "weight.header", "weight.bytes_per_slot"];

fn every_key() -> impl Iterator<Item = (String, &'static Key)> {
    sections().flat_map(|section| {
        section.keys.iter().map(|key| (format!("{}.{}", section.path, key.name), key))
    })
}

// === the parser's keys ===

/// The text of a file that holds one value.
fn nested(path: &str, value: &str) -> String {
    path.rsplit('.').fold(value.to_owned(), |value, part| match part.strip_suffix("[]") {
        Some(part) => format!("{{ {part} = [{value}] }}"),
        None if part.starts_with('<') => format!("{{ some = {value} }}"),
        None => format!("{{ {part} = {value} }}"),
    })
}

/// The rule that such a file breaks.
fn broken_rule(path: &str, value: &str) -> String {
    let text = nested(path, value);
    let text = text.trim_start_matches("{ ").trim_end_matches('}');
    // The outermost braces are the file itself; what was cut too much of is put back.
    let open = text.matches('{').count() - text.matches('}').count();
    let text = format!("{text}{}", "}".repeat(open));
    match Config::parse("keys.toml", &text, |_| None) {
        Err(ConfigError::Invalid { rule, .. }) => rule,
        other => panic!("{text}: {other:?}"),
    }
}

/// Every key that the parser takes at a place, in the words of its own error.
fn known_at(path: &str) -> Option<Vec<String>> {
    let rule = match path {
        "" => match Config::parse("keys.toml", "no_such_key = 0", |_| None) {
            Err(ConfigError::Invalid { rule, .. }) => rule,
            other => panic!("{other:?}"),
        },
        path => broken_rule(path, "{ no_such_key = 0 }"),
    };
    let (_, names) = rule.strip_prefix("unknown key")?.split_once("expected one of ")?;
    Some(names.split(", ").map(str::to_owned).collect())
}

/// Walks through all that the parser takes.
fn walk(path: &str, found: &mut BTreeSet<String>) {
    let below = [path.to_owned(), format!("{path}.<name>"), format!("{path}[]")]
        .into_iter()
        .filter(|shape| !path.is_empty() || shape.is_empty())
        .find_map(|shape| Some((known_at(&shape)?, shape)));
    let Some((names, shape)) = below else {
        found.insert(path.to_owned());
        return;
    };
    let is_table_alone = |value: &str| {
        let rule = broken_rule(path, value);
        rule.starts_with("must be a table") || rule.starts_with("must be a list")
    };
    if shape == path && !path.is_empty() && !(is_table_alone("0") && is_table_alone("\"some\"")) {
        found.insert(path.to_owned());
    }
    for name in names {
        walk(&if shape.is_empty() { name } else { format!("{shape}.{name}") }, found);
    }
}

#[test]
fn every_key_of_the_parser_is_told_and_no_other() {
    let mut taken = BTreeSet::new();
    walk("", &mut taken);
    assert!(taken.len() > 80, "{taken:?}");
    let told: BTreeSet<_> =
        every_key().map(|(path, _)| path.replace("<class>", "<name>")).collect();
    let missing: Vec<_> = taken.difference(&told).collect();
    let invented: Vec<_> = told.difference(&taken).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "missing {missing:?}, invented {invented:?}"
    );
}

// === defaults and examples ===

/// Puts a value into a table, at a path.
fn put(table: &mut toml::Table, path: &str, value: toml::Value) {
    let (first, rest) = path.split_once('.').map_or((path, None), |(a, b)| (a, Some(b)));
    let name = match first {
        "<name>" => "app",
        "<class>" => "background",
        first => first.trim_end_matches("[]"),
    };
    let Some(rest) = rest else {
        table.insert(name.to_owned(), value);
        return;
    };
    let empty = || toml::Value::Table(toml::Table::new());
    let inner = if first.ends_with("[]") {
        let list = table.entry(name).or_insert_with(|| toml::Value::Array(vec![empty()]));
        &mut list.as_array_mut().unwrap()[0]
    } else {
        table.entry(name).or_insert_with(empty)
    };
    put(inner.as_table_mut().unwrap(), rest, value);
}

/// The configuration of [`BASE`] with these values, as text; or what is wrong with it.
fn with(folder: &Path, values: &[(&str, &str)]) -> Result<String, ConfigError> {
    let mut table: toml::Table = BASE.parse().unwrap();
    for (path, literal) in values {
        let parsed: toml::Table = format!("value = {literal}").parse().unwrap();
        let value = match &parsed["value"] {
            toml::Value::String(file) if file.ends_with(".pem") => {
                folder.join(file).display().to_string().into()
            }
            value => value.clone(),
        };
        put(&mut table, path, value);
    }
    let name = folder.join("proxy.toml").display().to_string();
    let config = Config::parse(&name, &table.to_string(), |_| None)?;
    Ok(format!("{config:?}"))
}

#[test]
fn every_default_and_every_example_is_true() {
    let folder = tempfile::tempdir().unwrap();
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["a".to_owned()]).unwrap();
    for (file, text) in
        [("cert.pem", cert.pem()), ("ca.pem", cert.pem()), ("key.pem", signing_key.serialize_pem())]
    {
        fs::write(folder.path().join(file), text).unwrap();
    }
    for (path, key) in every_key() {
        let beside: Vec<(&str, &str)> = COMPANIONS
            .iter()
            .filter(|(prefix, companion, _)| path.starts_with(prefix) && path != *companion)
            .map(|(_, companion, value)| (*companion, *value))
            .collect();
        let and = |value| [beside.as_slice(), &[(path.as_str(), value)]].concat();
        let given = with(folder.path(), &and(key.example));
        let given = given.unwrap_or_else(|error| panic!("{path}: {error}"));
        match (key.default, with(folder.path(), &beside)) {
            (Without::Is(value), Ok(without)) => {
                assert_eq!(with(folder.path(), &and(value)).unwrap(), without, "{path}");
                assert_ne!(given, without, "{path}: the example changes nothing");
            }
            // What is required alone in a table that nothing else makes is no error without it.
            (Without::Required, without) => {
                assert!(without.is_err() || without.unwrap() != given, "{path} isn't required");
            }
            (_, Ok(without)) => assert_ne!(given, without, "{path}: the example changes nothing"),
            (_, Err(_)) => assert!(HALVES.iter().any(|half| path.ends_with(half)), "{path}"),
        }
    }
}

#[test]
fn the_page_is_as_the_code_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, page()).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page(), "UPDATE_DOCS=1 cargo test --lib config::keys writes it anew");
}
