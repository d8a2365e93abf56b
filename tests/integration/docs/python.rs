//! A plain client of the set, as the documentation prints it, shares a limit with an instance.

use std::{fs, path::Path, process::Stdio};

use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::Command,
};

use super::{page, root};
use crate::harness::{Client, Proxy, Redis, Upstream, eventually, one_limit, within};

/// What a program does with the function of the page.
const MAIN: &str = "
import redis, sys
client = redis.Redis.from_url(sys.argv[1])
try:
    with slot(client, 'llm', 1, lease=2.0, wait=float(sys.argv[2])):
        print('held', flush=True)
        sys.stdin.readline()
    print('released', flush=True)
except TimeoutError as error:
    print(error, flush=True)
";

#[tokio::test]
async fn a_python_client_and_an_instance_count_each_other() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let proxy = Proxy::spawn(&one_limit(&upstream, 1).redis(&redis).lease("2s")).await;
    let folder = TempDir::new().unwrap();
    let script = folder.path().join("plain.py");
    let text = page("python.md");
    let block = text.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    fs::write(&script, format!("{block}{MAIN}")).unwrap();

    let mut holder = python(&script, &redis, "10").stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert_eq!(within("a slot", lines.next_line()).await.unwrap().unwrap(), "held");
    let member = redis.holders("llm").await.pop().unwrap();
    let taken = redis.score("sem:llm", &member).await.unwrap();
    let addr = proxy.addr();
    let request = tokio::spawn(async move { Client::new().get(addr, "/gate").await });
    redis.wait_waiting("llm", 1).await;
    // Renewed for longer than a lease, and counted by the instance all the time.
    eventually("the client renews", async || {
        redis.score("sem:llm", &member).await.is_some_and(|score| score > taken + 2000.0)
    })
    .await;
    assert_eq!(upstream.total(), 0);
    assert_eq!(redis.waiting("llm").await, 1);

    holder.stdin.take().unwrap().write_all(b"\n").await.unwrap();
    assert_eq!(within("the end", lines.next_line()).await.unwrap().unwrap(), "released");
    upstream.wait_current(1).await;
    let refused = within("a refusal", python(&script, &redis, "0").output()).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&refused.stdout).trim(), "no slot of llm became free");
    upstream.open(1);
    assert_eq!(request.await.unwrap().status, 200);
}

fn python(script: &Path, redis: &Redis, wait: &str) -> Command {
    let interpreter = root().join("target/sdk-venv/bin/python");
    assert!(interpreter.exists(), "tests/run.sh makes {}", interpreter.display());
    let mut command = Command::new(interpreter);
    command.arg(script).args([&redis.url(), wait]).stdout(Stdio::piped()).kill_on_drop(true);
    command
}
