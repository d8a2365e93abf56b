//! Whatever stands in a page as a command, a configuration or a link is tried.

use std::{collections::BTreeSet, fs, path::Path};

use tempfile::TempDir;
use tokio::process::Command;

use super::{pages, root};
use crate::harness::{config_file, tidegate, within};

/// A block of a page, of the language behind its three backticks.
struct Block {
    page: String,
    language: String,
    text: String,
}

fn blocks(wanted: &[&str]) -> Vec<Block> {
    let mut blocks = Vec::new();
    for path in pages() {
        let page = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(path).unwrap();
        let mut parts = text.split("```");
        parts.next();
        while let (Some(block), Some(_)) = (parts.next(), parts.next()) {
            let (language, text) = block.split_once('\n').unwrap();
            if wanted.contains(&language) {
                let (page, language, text) = (page.clone(), language.to_owned(), text.to_owned());
                blocks.push(Block { page, language, text });
            }
        }
    }
    assert!(!blocks.is_empty(), "no block of {wanted:?}");
    blocks
}

/// The variables of the environment that a text names.
fn variables(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let names = text.split("${").skip(1).filter_map(|rest| Some(rest.split_once('}')?.0));
    names.map(|name| (name, if name.ends_with("URL") { "redis://a" } else { "some" }))
}

#[tokio::test]
async fn every_configuration_is_one() {
    let repository = ["proxy.toml", "deploy/compose.toml", "deploy/deb/proxy.toml"].map(|path| {
        let text = fs::read_to_string(root().join(path)).unwrap();
        Block { page: path.to_owned(), language: "toml".to_owned(), text }
    });
    for Block { page, text, .. } in blocks(&["toml"]).into_iter().chain(repository) {
        let (_folder, path) = config_file(&text);
        let mut check = tidegate();
        check.args(["check", "--config"]).arg(path).envs(variables(&text));
        let checked = within("a check", check.output()).await.unwrap();
        let said = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "{page}:\n{text}\n{said}");
    }
}

/// The commands of a block: lines that end with a backslash go on, and `#` begins a comment.
fn commands(text: &str) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let lines = text.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    // Quotes matter to no word that is looked at.
    lines
        .map(|line| {
            line.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()
        })
        .collect()
}

#[tokio::test]
async fn every_command_exists() {
    let elsewhere = [
        "curl",
        "cp",
        "dpkg",
        "docker",
        "kubectl",
        "systemctl",
        "sudo",
        "promtool",
        "make",
        "UPDATE_DOCS=1",
        "TIDEGATE_SIM_SEEDS=1000",
        "git",
        "redis-cli",
        "python3",
        "haproxy",
        "nginx",
    ];
    let mut tried = BTreeSet::new();
    for Block { page, text, .. } in blocks(&["sh"]) {
        for words in commands(&text) {
            let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
            if words[0] == "sudo" {
                words.remove(0);
            }
            if words.starts_with(&["cargo", "run", "--release", "--"]) {
                words.splice(..4, ["tidegate"]);
            }
            let file = root().join(words[0]);
            match words[0] {
                "tidegate" => {
                    // What a pipe or a redirection does is the shell's.
                    let end = words.iter().position(|word| [">", "|", "&"].contains(word));
                    let words = &words[1..end.unwrap_or(words.len())];
                    // Asked for its help, a command reads all that stands before, and does nothing.
                    let mut command = tidegate();
                    command.args(words).arg("--help");
                    let output = within("help", command.output()).await.unwrap();
                    let said = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{page}: {words:?}: {said}");
                    tried.insert(words.first().map(|word| (*word).to_owned()));
                }
                "cargo" | "cd" => {}
                word if elsewhere.contains(&word) => {}
                _ => assert!(file.is_file(), "{page}: there is no {}", file.display()),
            }
            for word in &words[1..] {
                if word.starts_with("deploy/") || word.starts_with("tests/") {
                    let path = root().join(word.trim_end_matches('/'));
                    assert!(path.exists(), "{page}: there is no {word}");
                }
            }
        }
    }
    assert!(tried.len() >= 6, "{tried:?}");
}

#[tokio::test]
async fn size_answers_as_the_pages_say() {
    for Block { page, text, .. } in blocks(&["console"]) {
        let mut parts = text.split("$ ").skip(1);
        for part in &mut parts {
            let (command, said) = part.split_once('\n').unwrap();
            let words: Vec<&str> = command.split_whitespace().collect();
            assert_eq!(words[0], "tidegate", "{page}: {command}");
            let output = within("a command", tidegate().args(&words[1..]).output()).await.unwrap();
            let real = String::from_utf8(output.stdout).unwrap();
            assert_eq!(real.trim_end(), said.trim_end(), "{page}: {command}");
        }
    }
}

#[tokio::test]
async fn haproxy_and_nginx_take_their_configurations() {
    for Block { page, language, text } in blocks(&["haproxy", "nginx"]) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("proxy.conf");
        let mut command = Command::new(&language);
        if language == "haproxy" {
            fs::write(&path, &text).unwrap();
            command.args(["-c", "-f"]).arg(&path);
        } else {
            // Where nginx writes by default only root may.
            let at = folder.path().display();
            let (main, http) = (
                format!("pid {at}/pid; error_log {at}/log;"),
                format!(
                    "access_log off; client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;"
                ),
            );
            fs::write(&path, format!("{main}\nevents {{}}\nhttp {{\n{http}\n{text}\n}}\n"))
                .unwrap();
            command.args(["-t", "-c"]).arg(&path);
        }
        let output = within("a check", command.output()).await;
        let output = output.unwrap_or_else(|error| {
            panic!("{language} is needed: tests/run.sh installs it ({error})")
        });
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{page}:\n{text}\n{said}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut links = 0;
    for path in pages() {
        let text = fs::read_to_string(&path).unwrap();
        let here = path.parent().unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if link.is_empty() || link.contains("://") {
                continue;
            }
            assert!(here.join(Path::new(link)).exists(), "{}: {link}", path.display());
            links += 1;
        }
    }
    assert!(links > 10, "{links} links");
}

#[test]
fn the_readme_is_under_two_screens() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.lines().count() <= 130, "{} lines", readme.lines().count());
}
