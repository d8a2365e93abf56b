use http::Request;
use http_body::Frame;

use super::*;
use crate::config::{Config, Step};

const TEXT: &str = r#"
    limits.app.slots = 1
    upstreams.app = { endpoints = ["http://127.0.0.1:3000"], limits = ["app"] }
    routes = [{ upstream = "app", on_full = [{ stale = "10m" }] }, { path = "/x", upstream = "app" }]
"#;

const TEN_MINUTES: Duration = Duration::from_secs(600);

fn copies() -> Arc<Copies> {
    Copies::new(&Config::parse("proxy.toml", TEXT, |_| None).unwrap()).unwrap()
}

fn get(target: &str) -> Parts {
    Request::get(target).header("host", "a").body(()).unwrap().into_parts().0
}

fn answer(length: usize) -> Response<()> {
    let head = Response::builder().header("content-length", length);
    head.header("cache-control", "max-age=60").body(()).unwrap()
}

fn tee(copies: &Arc<Copies>, target: &str, head: &Response<()>) -> Option<Box<Tee>> {
    let mut interest = copies.interest(0, &get(target), false)?;
    interest.sent(&get(target).headers);
    copies.answered(interest, head, Duration::ZERO)
}

fn copy(copies: &Arc<Copies>, target: &str, body: &'static [u8]) {
    let mut tee = tee(copies, target, &answer(body.len())).unwrap();
    assert!(tee.see(&Frame::data(Bytes::from_static(body))));
    tee.finish();
}

fn finds(copies: &Copies, target: &str) -> bool {
    copies.find(0, &get(target), TEN_MINUTES).is_some()
}

#[test]
fn without_a_step_for_it_there_is_none() {
    let mut config = Config::parse("proxy.toml", TEXT, |_| None).unwrap();
    config.routes[0].on_full.retain(|step| !matches!(step, Step::Stale { .. }));
    assert!(Copies::new(&config).is_none());
    assert!(copies().interest(1, &get("/x"), false).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_copy_ages_and_ends() {
    let copies = copies();
    copy(&copies, "/", b"body");
    let found = |copies: &Copies| {
        let found = copies.find(0, &get("/"), TEN_MINUTES)?;
        Some((found.age.as_secs(), found.ttl))
    };
    assert_eq!(found(&copies), Some((0, 60)));
    tokio::time::advance(Duration::from_secs(100)).await;
    assert_eq!(found(&copies), Some((100, -40)));
    tokio::time::advance(Duration::from_secs(560)).await;
    assert_eq!(found(&copies), Some((660, -600)));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(found(&copies), None);
}

#[tokio::test]
async fn all_copies_stay_within_their_bound() {
    static BODY: [u8; LONGEST_COPY] = [0; LONGEST_COPY];
    let copies = copies();
    for number in 0..100 {
        copy(&copies, &format!("/{number}"), &BODY);
        let bodies = copies.kept.iter().map(|(_, kept)| kept[0].body.len());
        assert!(bodies.sum::<usize>() <= KEPT, "after {number}");
    }
    assert!(finds(&copies, "/99") && finds(&copies, "/60") && !finds(&copies, "/0"));
    // And those in the making within theirs.
    let head = answer(LONGEST_COPY);
    let piece = Frame::data(Bytes::from_static(&BODY[..1]));
    let mut making: Vec<_> = (0..16).map(|_| tee(&copies, "/new", &head).unwrap()).collect();
    assert!(making.iter_mut().all(|tee| tee.see(&piece)));
    assert!(!tee(&copies, "/new", &head).unwrap().see(&piece));
    making.pop();
    assert!(tee(&copies, "/new", &head).unwrap().see(&piece));
    drop(making);
    assert_eq!(copies.in_the_making.taken(), 0);
}

#[tokio::test]
async fn one_target_has_a_few_variants() {
    let copies = copies();
    let of = |language: usize| {
        let mut parts = get("/");
        parts.headers.insert("accept-language", language.into());
        parts
    };
    let mut head = answer(0);
    head.headers_mut().insert("vary", "accept-language".parse().unwrap());
    for language in 0..=VARIANTS {
        let mut interest = copies.interest(0, &of(language), false).unwrap();
        interest.sent(&of(language).headers);
        copies.answered(interest, &head, Duration::ZERO).unwrap().finish();
    }
    let found = |language| copies.find(0, &of(language), TEN_MINUTES).is_some();
    assert!(!found(0) && (1..=VARIANTS).all(found));
}

#[tokio::test]
async fn a_body_that_could_be_cut_unseen_is_not_copied() {
    let copies = copies();
    let with = |name: &'static str, value: &'static str| {
        Response::builder().header(name, value).body(()).unwrap()
    };
    assert!(tee(&copies, "/", &with("transfer-encoding", "chunked")).is_some());
    assert!(tee(&copies, "/", &with("transfer-encoding", "gzip")).is_none());
    assert!(tee(&copies, "/", &with("connection", "close")).is_none());
    assert!(tee(&copies, "/", &with("content-length", "1048577")).is_none());
}
