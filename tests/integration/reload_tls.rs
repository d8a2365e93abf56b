//! J74, J75: certificates, keys and roots that change while streams run over the old ones, in front and behind.

use std::sync::{Arc, Mutex};

use http::Method;
use http_body_util::BodyExt;
use tokio::{
    io,
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::aws_lc_rs,
        pki_types::PrivateKeyDer,
        version::{TLS12, TLS13},
    },
};

use crate::harness::{
    Carrier, Client, Proxy, Reload, Shown, Upstream, certificate, eventually, one_limit, shake,
    signal, whole, within,
};

const SECRET: [Carrier; 2] = [Carrier::Http1Tls, Carrier::Http2Tls];

async fn is_shown(proxy: &Proxy, shown: &Shown) -> bool {
    shake(proxy.addr(), shown, &TLS13, "h2").await.is_ok()
}

fn put(proxy: &Proxy, cert: &str, key: &str, shown: &Shown) {
    proxy.replace(cert, &shown.cert.pem());
    proxy.replace(key, &shown.signing_key.serialize_pem());
}

#[tokio::test]
async fn j74_new_handshakes_see_what_changed_and_streams_go_on() {
    for carrier in SECRET {
        let (upstream, first) = (Upstream::spawn().await, certificate());
        let conf = one_limit(&upstream, 4).showing(&first);
        let proxy = Proxy::spawn(&conf).await;
        let text = proxy.text(&conf);
        let mut client = carrier.call_as(&proxy, &first).await;
        let path = "/sse?events=4&gate=1";
        let mut stream = client.open(Method::GET, path, &[], whole("")).await;
        let mut goes_on = async || {
            upstream.open(1);
            loop {
                let event = within("an event", stream.frame()).await?.unwrap();
                // An end may come as an empty piece.
                if let Some(data) = event.into_data().ok().filter(|data| !data.is_empty()) {
                    return Some(data);
                }
            }
        };
        assert_eq!(goes_on().await.unwrap(), "data: 1\n\n");

        // The files, and the order to read them.
        let second = certificate();
        put(&proxy, "cert.pem", "key.pem", &second);
        let hangup = async || signal(proxy.pid(), "HUP");
        assert_eq!(proxy.reloaded(hangup).await, Reload::Applied);
        assert!(is_shown(&proxy, &second).await && !is_shown(&proxy, &first).await);
        assert_eq!(goes_on().await.unwrap(), "data: 2\n\n");

        // What the configuration says: other files, and another version.
        let third = certificate();
        put(&proxy, "cert3.pem", "key3.pem", &third);
        let other = text.replace("\"cert.pem\"", "\"cert3.pem\"");
        let other = other.replace("\"key.pem\"", "\"key3.pem\", min_version = \"1.3\"");
        assert_eq!(proxy.sighup(&other).await, Reload::Applied);
        assert!(is_shown(&proxy, &third).await && !is_shown(&proxy, &second).await);
        shake(proxy.addr(), &third, &TLS12, "h2").await.unwrap_err();
        assert_eq!(goes_on().await.unwrap(), "data: 3\n\n");

        // A pair that isn't one.
        let lines = || proxy.log().matches("as it was").count();
        let before = lines();
        let bad = other.replace("\"key3.pem\"", "\"key.pem\"");
        assert_eq!(proxy.sighup(&bad).await, Reload::Refused);
        assert!(is_shown(&proxy, &third).await);
        let log = proxy.log();
        let said = log.lines().find(|line| line.contains("as it was")).unwrap();
        assert!(said.contains("server.tls.key: must be the key of the certificate"), "{said}");
        assert_eq!(lines(), before + 1, "{log}");
        assert_eq!(goes_on().await.unwrap(), "data: 4\n\n");

        // And files that become one, which are noticed by themselves. Those of before concern nobody any more.
        assert_eq!(proxy.sighup(&other).await, Reload::Applied);
        let before = lines();
        proxy.replace("cert.pem", "no certificate");
        proxy.replace("key3.pem", &first.signing_key.serialize_pem());
        let said = "\"error\":\"the key must be the key of the certificate";
        eventually("it is noticed", async || proxy.log().contains(said)).await;
        assert!(is_shown(&proxy, &third).await);
        // By the time that the good key is seen, the old files would have been looked at too.
        let read = || proxy.log().matches("was read again").count();
        let before_read = read();
        put(&proxy, "cert3.pem", "key3.pem", &third);
        eventually("the good one is read", async || read() > before_read).await;
        let log = proxy.log();
        assert_eq!(lines(), before + 1, "{log}");

        assert_eq!(goes_on().await, None, "the end of the stream");
        // The old connection is none the worse.
        assert_eq!(client.get("/echo", &[]).await.status, 200);
    }
}

/// TLS in front of an upstream, with a certificate that may be exchanged.
struct Secured {
    port: u16,
    acceptor: Arc<Mutex<TlsAcceptor>>,
}

impl Secured {
    async fn spawn(upstream: &Upstream, shown: &Shown) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let acceptor = Arc::new(Mutex::new(showing(shown)));
        let (current, behind) = (Arc::clone(&acceptor), upstream.addr());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = current.lock().unwrap().clone();
                tokio::spawn(async move {
                    let mut front = acceptor.accept(stream).await?;
                    let mut back = TcpStream::connect(behind).await?;
                    io::copy_bidirectional(&mut front, &mut back).await
                });
            }
        });
        Self { port, acceptor }
    }

    fn show(&self, shown: &Shown) {
        *self.acceptor.lock().unwrap() = showing(shown);
    }
}

fn showing(shown: &Shown) -> TlsAcceptor {
    let key = PrivateKeyDer::try_from(shown.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![shown.cert.der().clone()], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

#[tokio::test]
async fn j75_an_upstreams_roots_change_and_streams_go_on() {
    let (upstream, first, second) = (Upstream::spawn().await, certificate(), certificate());
    let secured = Secured::spawn(&upstream, &first).await;
    let conf = one_limit(&upstream, 4)
        .endpoint(format!("https://localhost:{}", secured.port))
        .upstream("tls = { ca = \"ca.pem\" }")
        .file("ca.pem", first.cert.pem());
    let proxy = Proxy::spawn(&conf).await;
    let client = Client::new();
    let mut stream = client.events(proxy.addr(), "/sse?events=3&gate=1").await;
    let asked = async || {
        let answer = Client::new().get(proxy.addr(), "/echo").await;
        (answer.status, answer.header("tidegate-reason").to_owned())
    };
    let (served, refused) = ((200, String::new()), (502, "upstream_connect".to_owned()));
    let goes_on = async |stream: &mut crate::harness::Events| {
        upstream.open(1);
        stream.next().await
    };
    assert_eq!(goes_on(&mut stream).await.as_deref(), Some("1"));

    // The upstream has another certificate. Who is connected is so still; a busy connection lets nobody else in.
    secured.show(&second);
    assert_eq!(asked().await, refused);
    // A file that holds no root changes nothing, and is said once.
    let hangup = async || signal(proxy.pid(), "HUP");
    proxy.replace("ca.pem", "no certificate");
    assert_eq!(proxy.reloaded(hangup).await, Reload::Refused);
    let log = proxy.log();
    let said: Vec<_> = log.lines().filter(|line| line.contains("as it was")).collect();
    assert!(said.len() == 1 && said[0].contains("upstreams.llm.tls.ca: must be"), "{said:?}");
    secured.show(&first);
    assert_eq!(asked().await, served);
    secured.show(&second);

    // The text is the same, and what it leads to isn't.
    proxy.replace("ca.pem", &second.cert.pem());
    assert_eq!(proxy.reloaded(hangup).await, Reload::Applied);
    assert_eq!(asked().await, served);
    assert_eq!(goes_on(&mut stream).await.as_deref(), Some("2"));
    // The old root is none any more.
    let other = proxy.text(&conf).replace("ca.pem", "other.pem");
    proxy.replace("other.pem", &first.cert.pem());
    assert_eq!(proxy.sighup(&other).await, Reload::Applied);
    assert_eq!(asked().await, refused);
    assert_eq!(goes_on(&mut stream).await.as_deref(), Some("3"));
    assert_eq!(goes_on(&mut stream).await, None);
}
