//! An upstream behind TLS: the roots are the system's, the name is the endpoint's, and neither is taken on trust.

use std::sync::Arc;

use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig, crypto::aws_lc_rs, pki_types::PrivateKeyDer,
        server::WebPkiClientVerifier,
    },
};

use crate::harness::{Client, Conf, Proxy, Upstream, one_limit};

fn certificate(name: &str) -> CertifiedKey<KeyPair> {
    generate_simple_self_signed([name.to_owned()]).unwrap()
}

/// A TLS server that answers every request on a connection; returns its port and a file with its certificate.
async fn secure(name: &str) -> (u16, TempDir, String) {
    let server = certificate(name);
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("roots.pem");
    std::fs::write(&file, server.cert.pem()).unwrap();
    (serve(&server, None).await, dir, file.to_string_lossy().into_owned())
}

/// Asks its clients for this certificate, if one is given.
async fn serve(server: &CertifiedKey<KeyPair>, client: Option<&CertifiedKey<KeyPair>>) -> u16 {
    let key = PrivateKeyDer::try_from(server.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let mut roots = RootCertStore::empty();
            roots.add(client.cert.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let config = builder.with_single_cert(vec![server.cert.der().clone()], key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut read = [0; 4096];
                while let Ok(1..) = stream.read(&mut read).await {
                    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret";
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    port
}

async fn behind(host: &str, port: u16, lines: &'static str) -> Conf {
    let conf = one_limit(&Upstream::spawn().await, 1).endpoint(format!("https://{host}:{port}"));
    conf.upstream(lines)
}

/// The reason of a refusal, or nothing after an answer of the upstream.
async fn reason(conf: &Conf) -> String {
    let proxy = Proxy::spawn(conf).await;
    let answer = Client::new().get(proxy.addr(), "/").await;
    let reason = answer.header("tidegate-reason").to_owned();
    assert_eq!(answer.status, if reason.is_empty() { 200 } else { 502 }, "{reason}");
    assert_eq!(reason.is_empty(), &answer.body[..] == b"secret");
    reason
}

#[tokio::test]
async fn j75_an_own_root_counts_and_only_for_its_names() {
    for (host, name, refused) in [
        ("localhost", "localhost", ""),
        ("127.0.0.1", "127.0.0.1", ""),
        ("127.0.0.1", "localhost", "upstream_connect"),
        ("localhost", "127.0.0.1", "upstream_connect"),
    ] {
        let server = certificate(name);
        let port = serve(&server, None).await;
        let conf = behind(host, port, "tls = { ca = \"ca.pem\" }").await;
        let conf = conf.file("ca.pem", server.cert.pem());
        assert_eq!(reason(&conf).await, refused, "{host} shows {name}");
    }
}

#[tokio::test]
async fn j75_an_upstream_that_asks_who_comes_is_told() {
    let (server, client, other) =
        (certificate("localhost"), certificate("tidegate"), certificate("tidegate"));
    let port = serve(&server, Some(&client)).await;
    let lines = r#"tls = { ca = "ca.pem", client_cert = "cert.pem", client_key = "key.pem" }"#;
    for (shown, refused) in [(&client, false), (&other, true)] {
        let conf = behind("localhost", port, lines).await;
        let conf = conf
            .file("ca.pem", server.cert.pem())
            .file("cert.pem", shown.cert.pem())
            .file("key.pem", shown.signing_key.serialize_pem());
        assert_eq!(!reason(&conf).await.is_empty(), refused);
    }
}

#[tokio::test]
async fn j75_insecure_accepts_anyone_and_says_so_loudly() {
    let port = serve(&certificate("elsewhere"), None).await;
    let proxy = Proxy::spawn(&behind("localhost", port, "tls = { insecure = true }").await).await;
    assert_eq!(&Client::new().get(proxy.addr(), "/").await.body[..], b"secret");
    let log = proxy.log();
    assert!(log.contains("INSECURE") && log.contains("\"level\":\"WARN\""), "{log}");
}

#[tokio::test]
async fn a_certificate_of_a_known_root_is_accepted() {
    let (port, _dir, roots) = secure("localhost").await;
    let conf = one_limit(&Upstream::spawn().await, 1).endpoint(format!("https://localhost:{port}"));
    let proxy = Proxy::spawn_with(&conf, &[("SSL_CERT_FILE", &roots)]).await;
    for _ in 0..3 {
        let answer = Client::new().get(proxy.addr(), "/").await;
        assert_eq!((answer.status, &answer.body[..]), (200, &b"secret"[..]));
    }
}

#[tokio::test]
async fn an_unknown_root_and_a_wrong_name_are_refused() {
    let (port, _dir, roots) = secure("elsewhere").await;
    for environment in [&[("SSL_CERT_FILE", &*roots)][..], &[]] {
        let conf =
            one_limit(&Upstream::spawn().await, 1).endpoint(format!("https://localhost:{port}"));
        let proxy = Proxy::spawn_with(&conf, environment).await;
        for _ in 0..3 {
            let answer = Client::new().get(proxy.addr(), "/").await;
            assert_eq!(answer.header("tidegate-reason"), "upstream_connect", "{environment:?}");
            assert_eq!(answer.status, 502);
        }
        assert_eq!(proxy.limit("llm").await["in_use"], 0);
    }
}
