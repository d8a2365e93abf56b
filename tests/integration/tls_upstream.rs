//! An upstream behind TLS: the roots are the system's, the name is the endpoint's, and neither is taken on trust.

use std::sync::Arc;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::aws_lc_rs, pki_types::PrivateKeyDer},
};

use crate::harness::{Client, Proxy, Upstream, one_limit};

/// A TLS server that answers every request on a connection; returns its port and a file with its certificate.
async fn secure(name: &str) -> (u16, TempDir, String) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed([name.to_owned()]).unwrap();
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("roots.pem");
    std::fs::write(&file, cert.pem()).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
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
    (port, dir, file.to_string_lossy().into_owned())
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
