use super::*;

fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

fn passed(fields: &[(&'static str, &'static str)], trusted: bool) -> HeaderMap {
    let mut headers = map(fields);
    let way = Way {
        peer: &HeaderValue::from_static("10.0.0.1"),
        client: trusted.then(|| [198, 51, 100, 7].into()),
        trusted,
        secure: false,
    };
    to_upstream(&mut headers, &way);
    headers
}

#[test]
fn fields_of_the_connection_stay_behind() {
    let headers = passed(
        &[
            ("connection", ""),
            ("connection", "close, X-Own ,Authorization, host, x-forwarded-for, tidegate-x"),
            ("x-own", "1"),
            ("authorization", "Bearer x"),
            ("host", "h"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "close"),
            ("proxy-authorization", "Basic x"),
            ("te", "gzip, Trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("http2-settings", "x"),
            ("expect", "100-continue"),
            ("trailer", "x-sum"),
            ("x-other", "kept"),
        ],
        false,
    );
    let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "authorization",
            "host",
            "te",
            "trailer",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-other",
            "x-real-ip"
        ]
    );
    assert_eq!(headers["te"], "trailers");
}

#[test]
fn an_untrusted_peer_tells_nothing_about_the_way() {
    let headers = passed(
        &[
            ("host", "h.example"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
            ("x-forwarded-prefix", "/evil"),
            ("forwarded", "for=6.6.6.6"),
            ("x-real-ip", "6.6.6.6"),
            ("x_forwarded_for", "6.6.6.6"),
            ("x_real-ip", "6.6.6.6"),
            ("tidegate-slot", "1"),
            ("tidegate_slot", "1"),
            ("content_length", "1"),
            ("x_harmless", "kept"),
        ],
        false,
    );
    assert_eq!(
        headers,
        map(&[
            ("host", "h.example"),
            ("x_harmless", "kept"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-real-ip", "10.0.0.1"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-host", "h.example"),
        ])
    );
}

#[test]
fn a_trusted_peer_is_added_to_the_chain() {
    let headers = passed(
        &[
            ("host", "h"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-for", "198.51.100.7"),
            ("x-forwarded-proto", "https"),
            ("tidegate-slot", "1"),
        ],
        true,
    );
    assert_eq!(headers["x-forwarded-for"], "6.6.6.6, 198.51.100.7, 10.0.0.1");
    assert_eq!(headers["x-real-ip"], "198.51.100.7");
    assert_eq!(headers["x-forwarded-proto"], "https");
    assert!(!headers.contains_key("tidegate-slot"));
}

#[test]
fn cookie_crumbs_become_one_line_and_other_lines_stay_apart() {
    let headers =
        passed(&[("cookie", "a=1"), ("cookie", "b=2"), ("x-n", "1"), ("x-n", "2")], false);
    assert_eq!(headers.get_all("cookie").iter().count(), 1);
    assert_eq!(headers["cookie"], "a=1; b=2");
    assert_eq!(headers.get_all("x-n").iter().count(), 2);
}

#[test]
fn the_answer_loses_its_connection_and_a_doubtful_length() {
    let mut headers = map(&[
        ("connection", "keep-alive, x-own"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("upgrade", "h2c"),
        ("x-own", "1"),
        ("transfer-encoding", "chunked"),
        ("content-length", "5"),
        ("tidegate-reason", "queue_full"),
        ("set-cookie", "a"),
        ("set-cookie", "b"),
    ]);
    to_client(&mut headers);
    assert_eq!(headers, map(&[("set-cookie", "a"), ("set-cookie", "b")]));
}

#[test]
fn trailers_cannot_claim_what_headers_cannot() {
    let mut trailers = map(&[
        ("x-sum", "1"),
        ("authorization", "x"),
        ("x-forwarded-for", "6.6.6.6"),
        ("tidegate-slot", "1"),
        ("transfer-encoding", "chunked"),
    ]);
    clean_trailers(&mut trailers);
    assert_eq!(trailers, map(&[("x-sum", "1")]));
}

#[test]
fn timing_is_in_milliseconds() {
    let mut headers = HeaderMap::new();
    let us = Duration::from_micros;
    add_timing(&mut headers, us(1_250), Some(us(30)));
    assert_eq!(headers["server-timing"], "queue;dur=1.2, upstream;dur=0.0");
    add_timing(&mut headers, us(61_002_999), None);
    let lines: Vec<_> = headers.get_all("server-timing").iter().collect();
    assert_eq!(lines[1], "queue;dur=61002.9");
    let mut headers = HeaderMap::new();
    add_timing(&mut headers, Duration::MAX, Some(Duration::MAX));
    assert!(headers.contains_key("server-timing"));
}
