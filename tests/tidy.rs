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

/// Whether a file is there for tests alone: `tests.rs`, `testing.rs`, and whatever lies in a folder of one of these names.
fn is_for_tests(path: &Path) -> bool {
    let below = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let parts = below.with_extension("");
    parts.iter().any(|part| part == "tests" || part == "testing")
}

/// The text without the items that only tests see.
fn without_tests(mut text: &str) -> String {
    let mut kept = String::new();
    while let Some((before, item)) = text.split_once("#[cfg(test)]") {
        kept.push_str(before);
        let mut depth = 0;
        let end = item.find(|c| {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            depth == 0 && (c == ';' || c == '}')
        });
        text = &item[end.map_or(item.len(), |end| end + 1)..];
    }
    kept + text
}

/// Every `name` of `crate::name`, and of `crate::{name, …}` over however many lines and braces.
fn imports(text: &str) -> Vec<String> {
    let name = |part: &str| -> String {
        part.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut names = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        if !rest.starts_with('{') {
            names.push(name(rest));
            continue;
        }
        let mut depth = 0;
        for (at, c) in rest.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
            if depth == 1 && (c == '{' || c == ',') {
                names.push(name(&rest[at + 1..]));
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn imports_are_found_however_they_are_written() {
    let text = "use super::x;\nuse crate::a::b;\nuse crate::{\n    c,\n    d::{\n        E,\n        f::{G, h},\n    }, i,\n};\n\
                #[cfg(test)]\nmod testing;\nlet j = crate::j::new();\n\
                #[cfg(test)]\nmod tests {\n    use crate::k;\n    fn l() { m(); }\n}\nuse crate::n;\n";
    assert_eq!(imports(&without_tests(text)), ["a", "c", "d", "i", "j", "n"]);
}

#[test]
fn imports_point_one_way() {
    let leaves = ["ledger", "reason", "route", "headers", "target", "gauge"];
    for path in files("src", "rs") {
        if is_for_tests(&path) {
            continue;
        }
        let (room, text) = (room(&path), without_tests(&fs::read_to_string(&path).unwrap()));
        for import in imports(&text) {
            let forbidden = match room.as_str() {
                "main" | "app" | "demo" | "lib" => false,
                "store" => !["store", "ledger", "config"].contains(&import.as_str()),
                "leases" => !["leases", "store"].contains(&import.as_str()),
                "admission" => !["admission", "leases", "store", "metrics", "config", "reason"]
                    .contains(&import.as_str()),
                "copies" => !["config", "gauge", "headers", "target"].contains(&import.as_str()),
                "log" | "traces" => import != room && import != "config",
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
        let longest = if is_for_tests(&path) { 1200 } else { 700 };
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
