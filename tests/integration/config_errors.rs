//! A mistake in the file is named with its place before anything starts.

use std::net::TcpListener;

use crate::harness::{Upstream, config_file, one_limit, run_to_end};

#[tokio::test]
async fn an_unknown_key_is_named_with_its_place_before_a_port_is_bound() {
    let upstream = Upstream::spawn().await;
    // Somebody else listens there: an attempt to bind would be the error instead.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap();
    let text = one_limit(&upstream, 1).limit("solts = 5").text(addr, addr);
    let line = 1 + text.lines().position(|line| line == "solts = 5").unwrap();
    let (_dir, file) = config_file(&text);
    let file = file.to_str().unwrap();

    let by_flag = ["run", "check"].map(|command| vec![command, "--config", file]);
    let by_itself = ["run", "check"].map(|command| vec![command, file]);
    for words in by_flag.into_iter().chain(by_itself) {
        let output = run_to_end(&words).await;
        let command = words.join(" ");
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{command}: {error}");
        assert!(error.contains(&format!("{file}:{line}:1")), "{command}: {error}");
        assert!(error.contains("solts"), "{command}: {error}");
    }
}

#[tokio::test]
async fn every_mistake_ends_with_2() {
    let upstream = Upstream::spawn().await;
    let addr = "127.0.0.1:0".parse().unwrap();
    let good = one_limit(&upstream, 1);
    for (bad, word) in [
        (good.clone().lease("a while"), "lease"),
        (good.clone().lease("1s"), "lease"),
        (good.clone().store_url("mysql://x".to_owned()), "url"),
        (good.clone().queue("{ size = -1 }"), "size"),
        (good.clone().upstream("host = \"mine\""), "host"),
    ] {
        let (_dir, file) = config_file(&bad.text(addr, addr));
        let output = run_to_end(&["check", "--config", file.to_str().unwrap()]).await;
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{word}: {error}");
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[tokio::test]
async fn a_missing_file_ends_with_2() {
    let output = run_to_end(&["check", "--config", "no-such-file.toml"]).await;
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no-such-file.toml"));
}

#[tokio::test]
async fn check_accepts_what_is_right() {
    let upstream = Upstream::spawn().await;
    let addr = "127.0.0.1:0".parse().unwrap();
    let (_dir, file) = config_file(&one_limit(&upstream, 1).text(addr, addr));
    let output = run_to_end(&["check", "--config", file.to_str().unwrap()]).await;
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{error}");
}
