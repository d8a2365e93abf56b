//! Rules about the source itself: arrows of import, size of files, headers of scripts.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == ending) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no .{ending} below {folder}");
    found
}

/// The room a source file belongs to: `src/store/redis.rs` is `store`.
fn room(path: &Path) -> String {
    let below = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let first = below.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// Every `crate::name` in a file, tests left out.
fn imports(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let mut names = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let mut take = |part: &str| {
            let name: String = part
                .trim_start()
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            if !name.is_empty() {
                names.push(name);
            }
        };
        match rest.strip_prefix('{') {
            Some(list) => list.split("};").next().unwrap().lines().for_each(&mut take),
            None => take(rest),
        }
    }
    names
}

#[test]
fn imports_point_one_way() {
    let leaves = ["ledger", "reason", "route", "headers", "target", "gauge"];
    for path in files("src", "rs") {
        if path.ends_with("tests.rs") || path.parent().unwrap().ends_with("tests") {
            continue;
        }
        let (room, text) = (room(&path), fs::read_to_string(&path).unwrap());
        for import in imports(&text) {
            let forbidden = match room.as_str() {
                "main" | "app" | "demo" | "lib" => false,
                "store" => !["store", "ledger", "config"].contains(&import.as_str()),
                "leases" => !["leases", "store"].contains(&import.as_str()),
                "admission" => !["admission", "leases", "store", "metrics", "config", "reason"]
                    .contains(&import.as_str()),
                "server" => !["server", "config"].contains(&import.as_str()),
                leaf if leaves.contains(&leaf) => import != leaf && import != "config",
                _ => ["app", "main", "cli", "demo"].contains(&import.as_str()),
            };
            assert!(!forbidden, "{}: {room} must not import {import}", path.display());
        }
    }
}

#[test]
fn redis_is_named_in_the_store_alone() {
    for path in files("src", "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let names_it = text.contains("deadpool_redis") || text.contains("redis::cmd");
        // The rules of the configuration borrow the client's parser for the URL.
        let inside =
            path.to_string_lossy().contains("src/store/") || path.ends_with("config/rules.rs");
        assert!(inside || !names_it, "{} speaks to Redis", path.display());
    }
}

#[test]
fn files_are_short_enough_to_read() {
    for path in files("src", "rs") {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        let longest = if path.ends_with("tests.rs") { 1200 } else { 700 };
        assert!(lines <= longest, "{} has {lines} lines", path.display());
        assert!(!path.ends_with("mod.rs"), "{}: name the file after its module", path.display());
    }
}

#[test]
fn every_script_says_what_it_does() {
    for path in files("scripts", "lua") {
        let text = fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let first = text.lines().find(|line| line.starts_with("-- ")).unwrap_or_default();
        if path.parent().unwrap().ends_with("shared") {
            assert!(first.starts_with("-- Shared by"), "{name} has no header");
            continue;
        }
        assert!(
            first.starts_with(&format!("-- {}:", name.trim_end_matches(".lua"))),
            "{name}: {first}"
        );
        for part in ["-- KEYS", "ARGV", "-- Returns:"] {
            assert!(text.contains(part), "{name} doesn't document {part}");
        }
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/scripts.rs");
        let used = fs::read_to_string(scripts).unwrap();
        assert!(used.contains(&name), "{name} is used nowhere");
    }
}
