//! Several threads serve connections, each with connections to the upstream of its own. Clients and the upstream see one proxy.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

use crate::harness::{Client, Conf, Proxy, Raw, Redis, Upstream, get, one_limit, within};

/// Clients of which each is served by another thread: those who come have their places, one on each.
async fn one_for_each(proxy: &Proxy, threads: usize) -> Vec<Raw> {
    let mut clients = Vec::new();
    for _ in 0..threads {
        let mut client = Raw::connect(proxy.addr()).await;
        ask(&mut client, "/hold?ms=0").await;
        clients.push(client);
    }
    clients
}

async fn ask(client: &mut Raw, path: &str) {
    client.write(&get(path)).await.unwrap();
    answered(client).await;
}

async fn answered(client: &mut Raw) {
    let answer = client.answer().await.expect("an answer");
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
}

async fn on_threads(conf: &Conf, threads: usize) -> Proxy {
    let proxy = Proxy::spawn_on_threads(conf, threads).await;
    assert_eq!(proxy.workers(), threads);
    proxy
}

#[tokio::test]
async fn connections_to_the_upstream_are_no_more_than_requests_at_once() {
    let upstream = Upstream::spawn().await;
    let proxy = on_threads(&one_limit(&upstream, 10), 3).await;
    let mut clients = one_for_each(&proxy, 3).await;

    for _ in 0..3 {
        for client in &mut clients {
            ask(client, "/hold?ms=0").await;
        }
    }
    assert_eq!(upstream.connections(), 1, "one request at a time, from three threads");

    for round in 1..=3 {
        for (number, client) in clients.iter_mut().enumerate() {
            client.write(&get("/gate")).await.unwrap();
            upstream.wait_current(number + 1).await;
        }
        upstream.open(3);
        for client in &mut clients {
            answered(client).await;
        }
        assert_eq!(upstream.connections(), 3, "in round {round} of three requests at once");
    }
}

#[tokio::test]
async fn a_connection_that_has_a_task_serves_other_threads_too() {
    let upstream = Upstream::spawn().await;
    let proxy = on_threads(&one_limit(&upstream, 10), 2).await;
    let mut clients = one_for_each(&proxy, 2).await;
    // More than is read before a slot is taken, so it is streamed.
    let size = 1024 * 1024;
    let upload = [
        format!("POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: {size}\r\n\r\n").into_bytes(),
        vec![b'x'; size],
    ]
    .concat();

    for round in 0..6 {
        let (one, other) = (round % 2, (round + 1) % 2);
        clients[one].write(&upload).await.unwrap();
        answered(&mut clients[one]).await;
        ask(&mut clients[other], "/hold?ms=0").await;
    }

    assert_eq!(upstream.connections(), 1);
}

/// An upstream that answers with the target of the request. When it may, it does something more behind the first answer on each
/// connection, and says so.
async fn spawn_odd(more: &'static [u8], closes: bool) -> (String, Odd) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (done, did) = mpsc::unbounded_channel();
    let may = Arc::new(Semaphore::new(0));
    let odd = Odd { may: Arc::clone(&may), did };
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve_oddly(stream, more, closes, Arc::clone(&may), done.clone()));
        }
    });
    (url, odd)
}

struct Odd {
    may: Arc<Semaphore>,
    did: mpsc::UnboundedReceiver<()>,
}

async fn serve_oddly(
    mut stream: TcpStream,
    more: &'static [u8],
    closes: bool,
    may: Arc<Semaphore>,
    done: mpsc::UnboundedSender<()>,
) {
    let (mut received, mut answered) = (Vec::new(), 0);
    loop {
        let text = String::from_utf8_lossy(&received).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n")
            && body.len() >= if head.starts_with("POST") { 4 } else { 0 }
        {
            let target = head.split(' ').nth(1).unwrap();
            let length = target.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{target}");
            stream.write_all(answer.as_bytes()).await.unwrap();
            received.clear();
            answered += 1;
            if answered == 1 {
                may.acquire().await.unwrap().forget();
                stream.write_all(more).await.unwrap();
                if closes {
                    stream.shutdown().await.unwrap();
                }
                done.send(()).unwrap();
            }
        }
        if stream.read_buf(&mut received).await.unwrap_or(0) == 0 {
            return;
        }
    }
}

/// What each of two threads gets, one behind the other, over connections that the upstream has spoiled meanwhile.
async fn after_spoiling(more: &'static [u8], closes: bool, method: &str) {
    let (url, mut odd) = spawn_odd(more, closes).await;
    let conf = one_limit(&Upstream::spawn().await, 10).endpoint(url);
    let proxy = on_threads(&conf, 2).await;
    let mut clients = [Raw::connect(proxy.addr()).await, Raw::connect(proxy.addr()).await];
    let body = if method == "POST" { "content-length: 4\r\n\r\nbody" } else { "\r\n" };
    for round in 0..6 {
        let client = &mut clients[round % 2];
        let target = format!("/{round}");
        let request = format!("{method} {target} HTTP/1.1\r\nhost: test\r\n{body}");
        client.write(request).await.unwrap();
        let answer = String::from_utf8(client.answer().await.unwrap()).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{method} {target} behind {more:?}: {answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{target}")), "{target}: {answer}");
        odd.may.add_permits(1);
        within("the upstream spoils its connection", odd.did.recv()).await.unwrap();
    }
}

#[tokio::test]
async fn what_came_unasked_on_another_threads_connection_is_nobodys_answer() {
    let evil = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nEVIL";
    let late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    for method in ["GET", "POST"] {
        after_spoiling(evil, false, method).await;
        after_spoiling(late, true, method).await;
    }
}

#[tokio::test]
async fn a_connection_of_another_thread_that_was_closed_is_not_used() {
    for method in ["GET", "POST"] {
        after_spoiling(b"", true, method).await;
    }
}

#[tokio::test]
async fn the_limit_is_that_of_all_threads() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let embedded = on_threads(&one_limit(&upstream, 6), 4).await;
    let shared = on_threads(&one_limit(&upstream, 6).redis(&redis), 4).await;
    for proxy in [&embedded, &shared] {
        let mut all = JoinSet::new();
        for _ in 0..60 {
            let addr = proxy.addr();
            all.spawn(async move {
                let client = Client::new();
                for _ in 0..5 {
                    assert_eq!(client.get(addr, "/hold?ms=5").await.status, 200);
                }
            });
        }
        all.join_all().await;
        assert_eq!(upstream.take_highest(), 6);
    }
    redis.wait_in_use("llm", 0).await;
}

#[tokio::test]
async fn a_drain_waits_for_the_requests_of_every_thread() {
    let (upstream, redis) = (Upstream::spawn().await, Redis::spawn().await);
    let mut proxy = on_threads(&one_limit(&upstream, 10).redis(&redis), 3).await;
    let mut clients = one_for_each(&proxy, 3).await;
    for client in &mut clients {
        client.write(&get("/gate")).await.unwrap();
    }
    upstream.wait_current(3).await;

    proxy.sigterm();
    upstream.open(3);
    for client in &mut clients {
        answered(client).await;
    }
    assert!(proxy.wait_exit().await.success());
    assert_eq!(redis.in_use("llm").await, 0);
}
