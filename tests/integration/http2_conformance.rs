//! What RFC 9113 forbids, sent to Tidegate and to a plain hyper: both must answer alike, so nothing that stands around hyper here makes it
//! more lenient or more fragile. And tools that others wrote must be served clean.

use std::{collections::BTreeSet, net::SocketAddr};

use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::generate_simple_self_signed;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
};

use crate::harness::{Carrier, Proxy, Upstream, one_limit, within};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
/// Of DATA and HEADERS.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const BOTH: u8 = END_STREAM | END_HEADERS;
const ACK: u8 = 1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A field as a literal that isn't indexed.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    fields.iter().flat_map(|(name, value)| field(name, value)).collect()
}

const GET: [(&str, &str); 4] =
    [(":method", "GET"), (":scheme", "http"), (":path", "/status/200"), (":authority", "a")];
const POST: [(&str, &str); 4] =
    [(":method", "POST"), (":scheme", "http"), (":path", "/status/200"), (":authority", "a")];

/// A GET with more behind it.
fn get_with(more: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, BOTH, 1, &[fields(&GET), fields(more)].concat())
}

fn setting(id: u16, value: u32) -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
}

fn window(stream: u32, more: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
}

/// What is sent behind the preface and SETTINGS.
fn cases() -> Vec<(&'static str, Vec<u8>)> {
    let get = |stream| frame(HEADERS, BOTH, stream, &fields(&GET));
    let post = || frame(HEADERS, END_HEADERS, 1, &fields(&POST));
    let open = |length| {
        let length = [("content-length", length)];
        frame(HEADERS, END_HEADERS, 1, &[fields(&POST), fields(&length)].concat())
    };
    let only = |skip: &str| {
        let kept: Vec<_> = GET.iter().filter(|(name, _)| *name != skip).copied().collect();
        frame(HEADERS, BOTH, 1, &fields(&kept))
    };
    let padded = [&[200][..], &fields(&GET)].concat();
    let with_priority = |on: u32| [&on.to_be_bytes()[..], &[1], &fields(&GET)].concat();
    vec![
        ("a request", get(1)),
        ("5.1 DATA on an idle stream", frame(DATA, END_STREAM, 1, b"x")),
        ("5.1 RST_STREAM on an idle stream", frame(RST_STREAM, 0, 1, &[0, 0, 0, 8])),
        ("5.1 WINDOW_UPDATE on an idle stream", window(1, 100)),
        ("5.1 CONTINUATION on an idle stream", frame(CONTINUATION, END_HEADERS, 1, &fields(&GET))),
        ("5.1 DATA on a half-closed stream", [get(1), frame(DATA, END_STREAM, 1, b"x")].concat()),
        ("5.1 HEADERS on a half-closed stream", [get(1), get(1)].concat()),
        ("5.1.1 an even stream", get(2)),
        ("5.1.1 a lower stream", [get(5), get(3)].concat()),
        (
            "5.3.1 HEADERS that depend on themselves",
            frame(HEADERS, BOTH | 0x20, 1, &with_priority(1)),
        ),
        ("4.1 a frame of an unknown kind", frame(0x16, 0, 0, b"12345678")),
        (
            "4.2 a frame that is too large",
            [post(), frame(DATA, END_STREAM, 1, &[0; 16_385])].concat(),
        ),
        ("4.3 a field block that can't be read", frame(HEADERS, BOTH, 1, &[0x80])),
        (
            "4.3 a table that is too large",
            frame(HEADERS, BOTH, 1, &[&[0x3f, 0xff, 0xff, 0x7f][..], &fields(&GET)].concat()),
        ),
        ("6.1 DATA on stream 0", frame(DATA, END_STREAM, 0, b"x")),
        (
            "6.1 more padding than DATA",
            [post(), frame(DATA, END_STREAM | 8, 1, &[6, 0, 0])].concat(),
        ),
        ("6.2 HEADERS on stream 0", get(0)),
        ("6.2 more padding than HEADERS", frame(HEADERS, BOTH | 8, 1, &padded)),
        (
            "6.2 a frame amid a field block",
            [frame(HEADERS, END_STREAM, 1, &fields(&GET)), window(0, 1)].concat(),
        ),
        (
            "6.2 HEADERS of another amid a field block",
            [frame(HEADERS, END_STREAM, 1, &fields(&GET)), get(3)].concat(),
        ),
        ("6.3 PRIORITY on stream 0", frame(PRIORITY, 0, 0, &[0, 0, 0, 0, 1])),
        ("6.3 a short PRIORITY", frame(PRIORITY, 0, 1, &[0, 0, 0, 0])),
        ("6.4 RST_STREAM on stream 0", frame(RST_STREAM, 0, 0, &[0, 0, 0, 8])),
        ("6.4 a short RST_STREAM", [get(1), frame(RST_STREAM, 0, 1, &[0, 0, 8])].concat()),
        ("6.5 SETTINGS that acknowledge and say", frame(SETTINGS, ACK, 0, &[0; 6])),
        ("6.5 SETTINGS on a stream", frame(SETTINGS, 0, 1, &[0; 6])),
        ("6.5 SETTINGS of an odd length", frame(SETTINGS, 0, 0, &[0; 5])),
        ("6.5.2 a push that is neither", setting(2, 2)),
        ("6.5.2 a window that is too large", setting(4, 1 << 31)),
        ("6.5.2 frames that are too small", setting(5, 100)),
        ("6.5.2 frames that are too large", setting(5, 1 << 24)),
        ("6.5.2 a setting nobody knows", setting(0x99, 1)),
        (
            "6.6 PUSH_PROMISE of a client",
            frame(PUSH_PROMISE, END_HEADERS, 1, &[&[0, 0, 0, 2][..], &fields(&GET)].concat()),
        ),
        ("6.7 PING on a stream", frame(PING, 0, 1, b"12345678")),
        ("6.7 a short PING", frame(PING, 0, 0, b"1234567")),
        ("6.8 GOAWAY on a stream", frame(GOAWAY, 0, 1, &[0; 8])),
        ("6.9 a window that grows by nothing", window(0, 0)),
        ("6.9 a stream's window that grows by nothing", [post(), window(1, 0)].concat()),
        ("6.9 a short WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 0, &[0, 0, 1])),
        (
            "6.9.1 a window that overflows",
            [window(0, 0x7fff_ffff), window(0, 0x7fff_ffff)].concat(),
        ),
        (
            "6.9.1 a stream's window that overflows",
            [post(), window(1, 0x7fff_ffff), window(1, 0x7fff_ffff)].concat(),
        ),
        (
            "6.10 CONTINUATION behind a whole block",
            [post(), frame(CONTINUATION, END_HEADERS, 1, &field("x", "y"))].concat(),
        ),
        (
            "8.1 trailers that aren't the end",
            [post(), frame(HEADERS, END_HEADERS, 1, &field("x", "y"))].concat(),
        ),
        ("8.1.1 more than was said", [open("1"), frame(DATA, END_STREAM, 1, b"xyz")].concat()),
        ("8.1.1 less than was said", [open("9"), frame(DATA, END_STREAM, 1, b"xyz")].concat()),
        ("8.2.1 a name in capitals", get_with(&[("X-Test", "a")])),
        ("8.2.2 a field of the connection", get_with(&[("connection", "keep-alive")])),
        ("8.2.2 TE", get_with(&[("te", "gzip")])),
        ("8.3 a pseudo field nobody knows", get_with(&[(":test", "a")])),
        ("8.3 a pseudo field of answers", get_with(&[(":status", "200")])),
        (
            "8.3 a pseudo field behind others",
            frame(HEADERS, BOTH, 1, &[field("x", "y"), fields(&GET)].concat()),
        ),
        (
            "8.3 a pseudo field among trailers",
            [post(), frame(HEADERS, BOTH, 1, &field(":method", "GET"))].concat(),
        ),
        ("8.3.1 no method", only(":method")),
        ("8.3.1 no scheme", only(":scheme")),
        ("8.3.1 no path", only(":path")),
        (
            "8.3.1 an empty path",
            frame(
                HEADERS,
                BOTH,
                1,
                &[fields(&GET[..2]), field(":path", ""), fields(&GET[3..])].concat(),
            ),
        ),
        ("8.3.1 two methods", get_with(&[(":method", "GET")])),
        ("8.3.1 two paths", get_with(&[(":path", "/")])),
    ]
}

/// How a server takes it: which errors it names, of a stream or of the connection, and whether it goes on.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reaction {
    of_streams: BTreeSet<(u32, u32)>,
    of_connection: BTreeSet<u32>,
    goes_on: bool,
}

async fn react(addr: SocketAddr, bytes: &[u8]) -> Reaction {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let start = [PREFACE, &frame(SETTINGS, 0, 0, b"")].concat();
    let ping = frame(PING, 0, 0, b"tidegate");
    let all = [&start[..], bytes, &ping].concat();
    // It may close before all is written.
    let _ = stream.write_all(&all).await;
    let (mut reaction, mut echoes) = (Reaction::default(), 0);
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).await.is_err() {
            return reaction;
        }
        let length = number(&[0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        if stream.read_exact(&mut payload).await.is_err() {
            return reaction;
        }
        match head[3] {
            RST_STREAM => {
                reaction.of_streams.insert((number(&head[5..]), number(&payload)));
            }
            GOAWAY => {
                reaction.of_connection.insert(number(&payload[4..8]));
            }
            PING if head[4] & ACK != 0 => {
                // What the first came ahead of was said before the second.
                echoes += 1;
                if echoes == 2 {
                    reaction.goes_on = true;
                    return reaction;
                }
                let _ = stream.write_all(&ping).await;
            }
            _ => {}
        }
    }
}

/// hyper with nothing around it.
async fn plain_hyper() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(async |request: Request<Incoming>| {
                let _ = request.into_body().collect().await;
                Ok::<_, std::convert::Infallible>(Response::new(Full::new(bytes::Bytes::new())))
            });
            let server = http2::Builder::new(TokioExecutor::new());
            tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}

#[tokio::test]
async fn what_is_forbidden_is_taken_as_plain_hyper_takes_it() {
    let upstream = Upstream::spawn().await;
    let proxy = Proxy::spawn(&one_limit(&upstream, 100)).await;
    let plain = plain_hyper().await;
    let (mut objections, mut differences) = (0, Vec::new());
    for (name, bytes) in cases() {
        let ours = within(name, react(proxy.addr(), &bytes)).await;
        let theirs = within(name, react(plain, &bytes)).await;
        let objected =
            !theirs.goes_on || !theirs.of_streams.is_empty() || !theirs.of_connection.is_empty();
        objections += usize::from(objected);
        if ours != theirs {
            differences.push(format!("{name}: {ours:?}, but {theirs:?}"));
        }
    }
    assert!(differences.is_empty(), "{differences:#?}");
    assert!(objections > 45, "only {objections} were objected to");
}

#[tokio::test]
async fn b14_a_request_that_names_no_host_is_refused_in_our_own_words() {
    let upstream = Upstream::spawn().await;
    for carrier in Carrier::HTTP2 {
        let proxy = carrier.spawn(one_limit(&upstream, 1)).await;
        for (fields_of, reason) in [
            (&GET[..3], "bad_request"),
            (&[(":method", "GET"), (":scheme", "http"), (":path", "*"), GET[3]], "bad_request"),
            (&[(":method", "TRACE"), GET[1], GET[2], GET[3]], "method_not_allowed"),
        ] {
            let mut client = carrier.raw(&proxy).await;
            client.write(PREFACE).await.unwrap();
            client.write(frame(SETTINGS, 0, 0, b"")).await.unwrap();
            client.write(frame(HEADERS, BOTH, 1, &fields(fields_of))).await.unwrap();
            client.read_until(&format!("\"reason\":\"{reason}\"")).await;
        }
    }
    assert_eq!(upstream.total(), 0);
}

#[tokio::test]
async fn nghttp_and_h2load_are_served_clean() {
    let upstream = Upstream::spawn().await;
    let shown = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let plain = one_limit(&upstream, 1000);
    let secret = plain
        .clone()
        .server("tls = { cert = \"cert.pem\", key = \"key.pem\" }")
        .file("cert.pem", shown.cert.pem())
        .file("key.pem", shown.signing_key.serialize_pem());
    for (scheme, conf) in [("http", plain), ("https", secret)] {
        let proxy = Proxy::spawn(&conf).await;
        let url = |path: &str| format!("{scheme}://{}{path}", proxy.addr());
        let load = ["-n", "2000", "-c", "8", "-m", "16", &url("/big?bytes=5000")];
        let said = run("h2load", &load).await;
        assert!(said.contains("2000 succeeded, 0 failed, 0 errored, 0 timeout"), "{said}");
        assert!(said.contains("status codes: 2000 2xx, 0 3xx, 0 4xx, 0 5xx"), "{said}");
        // Several at once, with a body there and back, and every frame checked by nghttp2.
        let body = proxy.folder().join("log");
        let url = url("/echo");
        let nghttp = ["-nv", "-d", body.to_str().unwrap(), "-m", "4", &url];
        let said = run("nghttp", &nghttp).await;
        assert_eq!(said.matches(":status: 200").count(), 4, "{said}");
        for bad in ["RST_STREAM", "PROTOCOL_ERROR", "[ERROR]"] {
            assert!(!said.contains(bad), "{bad} in {said}");
        }
    }
}

async fn run(tool: &str, words: &[&str]) -> String {
    let ran = within(tool, Command::new(tool).args(words).kill_on_drop(true).output()).await;
    let ran = ran.unwrap_or_else(|error| {
        panic!("{tool} can't be run ({error}): tests/run.sh installs nghttp2-client")
    });
    assert!(ran.status.success(), "{tool}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}
