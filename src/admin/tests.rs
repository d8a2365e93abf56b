//! Asks the admin listener over a connection, as operators do.

use serde_json::Value;

use super::*;
use crate::{
    config::{QuickOptions, Secret},
    remote::{Change, Remote, RemoteError},
    store::MemoryStore,
};

async fn start(token: Option<&str>) -> String {
    let mut config = Config::quick(QuickOptions {
        listen: "127.0.0.1:0".to_owned(),
        upstream: "http://127.0.0.1:1".to_owned(),
        slots: 7,
        store_url: Secret("memory:".to_owned()),
        admin_listen: None,
    })
    .unwrap();
    config.admin.as_mut().unwrap().token = token.map(|token| Secret(token.to_owned()));
    let metrics = Metrics::new(&config);
    let store = Arc::new(MemoryStore::new());
    let admission = Admission::start(&config, store, Arc::clone(&metrics));
    // Dropping the sender leaves the last value in place.
    let (_, draining) = watch::channel(false);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::new(Log::apart());
    let admin = Admin::new(&config, admission, metrics, Vec::new(), Arc::default(), draining, log);
    tokio::spawn(serve(listener, Arc::new(ArcSwap::new(admin))));
    url
}

fn remote(url: &str, token: Option<&str>) -> Remote {
    Remote::new(url.parse().unwrap(), token.map(|token| Secret(token.to_owned())))
}

fn refused(answer: Result<Value, RemoteError>) -> (u16, String) {
    match answer {
        Err(RemoteError::Refused(status, why)) => (status.as_u16(), why),
        other => panic!("{other:?}"),
    }
}

/// Sends a request as it is, and returns the status.
async fn send(url: &str, method: &str, path: &str, kind: &str, body: &str) -> u16 {
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .build_http();
    let request = Request::builder()
        .method(method)
        .uri(format!("{url}{path}"))
        .header(header::CONTENT_TYPE, kind)
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap();
    client.request(request).await.unwrap().status().as_u16()
}

#[tokio::test]
async fn a_limit_is_shown_alone_as_in_the_status() {
    let url = start(None).await;
    let remote = remote(&url, None);
    let limit = remote.limit("default", None).await.unwrap();
    assert_eq!(limit["slots"], 7);
    assert_eq!(limit["in_use"], 0);
    assert_eq!(remote.status().await.unwrap()["limits"]["default"], limit);
    let (status, why) = refused(remote.limit("other", None).await);
    assert_eq!((status, &*why), (404, "no limit of this name; there is default"));
    let (status, _) = refused(remote.limit("other", Some(Change::Slots(1))).await);
    assert_eq!(status, 404);
}

#[tokio::test]
async fn a_change_passes_every_check() {
    let url = start(None).await;
    for change in [Change::Slots(3), Change::Reset, Change::Slots(0)] {
        match remote(&url, None).limit("default", Some(change)).await {
            Ok(limit) => assert!(limit["slots"].is_u64(), "{limit}"),
            // The store's refusal, not the listener's.
            Err(error) => assert!(error.to_string().contains("the store"), "{error}"),
        }
    }
}

#[tokio::test]
async fn bad_changes_are_refused() {
    let url = start(None).await;
    let long = format!("{{\"slots\": 1{}}}", " ".repeat(2000));
    let bodies = [
        "",
        "1",
        "null",
        "[]",
        "{}",
        "{\"slots\": -1}",
        "{\"slots\": 1.5}",
        "{\"slots\": \"1\"}",
        "{\"slots\": true}",
        "{\"slots\": 1000001}",
        "{\"slots\": 1, \"lease\": 1}",
        "{\"slots\": 1} x",
        &long,
    ];
    for body in bodies {
        let status = send(&url, "PATCH", "/limits/default", "application/json", body).await;
        assert_eq!(status, 400, "{body}");
    }
    let good = "{\"slots\": 1}";
    assert_eq!(send(&url, "PATCH", "/limits/default", "text/plain", good).await, 415);
    assert_eq!(send(&url, "PUT", "/limits/default", "application/json", good).await, 405);
    assert_eq!(send(&url, "PATCH", "/status", "application/json", good).await, 405);
    assert_eq!(send(&url, "GET", "/limits/", "", "").await, 404);
    assert_eq!(send(&url, "GET", "/limits/default/", "", "").await, 404);
}

#[tokio::test]
async fn the_token_opens_writes_and_reads_need_none() {
    let url = start(Some("sesame")).await;
    assert!(remote(&url, None).limit("default", None).await.is_ok());
    for wrong in [None, Some("other")] {
        let (status, why) =
            refused(remote(&url, wrong).limit("default", Some(Change::Reset)).await);
        assert_eq!(status, 401, "{why}");
    }
    let right = remote(&url, Some("sesame")).limit("default", Some(Change::Reset)).await;
    assert!(!matches!(&right, Err(RemoteError::Refused(status, _)) if status.is_client_error()));
}
