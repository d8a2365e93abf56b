//! Who may change something: nobody's browser from another page, and off loopback only who has the token. And who may look.

use std::net::IpAddr;

use http::{HeaderMap, StatusCode, Uri, header, uri::Authority};

use crate::config::{self, Secret};

/// What a write must show.
#[derive(Debug)]
pub(super) struct Guard {
    token: Option<Secret>,
    on_loopback: bool,
}

/// A refusal, and why.
pub(super) type Denied = (StatusCode, &'static str);

impl Guard {
    pub(super) fn new(admin: Option<&config::Admin>) -> Self {
        Self {
            token: admin.and_then(|admin| admin.token.clone()),
            on_loopback: admin.is_some_and(|admin| admin.listen.ip().to_canonical().is_loopback()),
        }
    }

    /// Decides on any request by its `Host`. Where no token protects a listener on loopback, its address does; so a name that
    /// somebody else's DNS answers for must not lead a browser to it, whose pages would then be of the same origin.
    pub(super) fn check_host(&self, headers: &HeaderMap) -> Result<(), Denied> {
        if self.token.is_some() || !self.on_loopback {
            return Ok(());
        }
        let mut hosts = headers.get_all(header::HOST).iter();
        let is_ours = hosts.all(|host| host.to_str().is_ok_and(is_of_nobody_else));
        let why = "without a token under [admin] this listener answers to IP addresses and localhost only, not to this Host\n";
        if is_ours { Ok(()) } else { Err((StatusCode::MISDIRECTED_REQUEST, why)) }
    }

    /// Decides on a write by its head alone.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        if !is_same_origin(headers) {
            return Err((StatusCode::FORBIDDEN, "writes must not come from a page elsewhere\n"));
        }
        match &self.token {
            None if self.on_loopback => {}
            None => {
                let why = "writes off loopback need a token: set `token` under [admin]\n";
                return Err((StatusCode::FORBIDDEN, why));
            }
            Some(Secret(token)) => {
                let shown = bearer(headers).unwrap_or_default();
                if !is_equal(shown.as_bytes(), token.as_bytes()) {
                    let why = "writes need `Authorization: Bearer` with the token under [admin]\n";
                    return Err((StatusCode::UNAUTHORIZED, why));
                }
            }
        }
        // A form of another page can't send this type without asking first.
        if !is_json(headers) {
            let why = "the body must come as Content-Type: application/json\n";
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        Ok(())
    }
}

/// Browsers say where a write comes from; other clients say nothing.
fn is_same_origin(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(|site| site.as_bytes());
    if !matches!(site, None | Some(b"same-origin" | b"none")) {
        return false;
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let origin: Option<Uri> = origin.to_str().ok().and_then(|origin| origin.parse().ok());
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    match (origin.as_ref().filter(|uri| uri.scheme().is_some()).and_then(Uri::authority), host) {
        (Some(authority), Some(host)) => authority.as_str().eq_ignore_ascii_case(host),
        _ => false,
    }
}

/// An address, or `localhost`, with or without a port. No DNS is asked for these.
fn is_of_nobody_else(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    address.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("application/json")
}

/// Takes the same time wherever two texts of one length differ.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
    a.len() == b.len() && differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(listen: &str, token: Option<&str>) -> Guard {
        let token = token.map(|token| Secret(token.to_owned()));
        Guard::new(Some(&config::Admin { listen: listen.parse().unwrap(), token }))
    }

    fn status(guard: &Guard, headers: &[(&'static str, &str)]) -> u16 {
        let mut map = HeaderMap::new();
        map.insert(header::CONTENT_TYPE, "application/json; charset=utf-8".parse().unwrap());
        map.insert(header::HOST, "Admin:9900".parse().unwrap());
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        guard.check(&map).map_or_else(|(status, _)| status.as_u16(), |()| 200)
    }

    #[test]
    fn only_json_from_the_same_origin_is_taken() {
        let cases: [(&[(&str, &str)], u16); 11] = [
            (&[], 200),
            (&[("content-type", "Application/JSON")], 200),
            (&[("content-type", "text/plain")], 415),
            (&[("content-type", "")], 415),
            (&[("origin", "http://admin:9900")], 200),
            (&[("origin", "http://admin:9900"), ("sec-fetch-site", "same-origin")], 200),
            (&[("origin", "http://evil:9900")], 403),
            (&[("origin", "http://admin")], 403),
            (&[("origin", "null")], 403),
            (&[("sec-fetch-site", "cross-site")], 403),
            (&[("sec-fetch-site", "same-site")], 403),
        ];
        for listen in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            for (headers, expected) in cases {
                assert_eq!(status(&guard(listen, None), headers), expected, "{headers:?}");
            }
        }
    }

    #[test]
    fn off_loopback_there_must_be_a_token() {
        for listen in ["0.0.0.0:0", "[::]:0", "10.0.0.1:0"] {
            assert_eq!(status(&guard(listen, None), &[("authorization", "Bearer x")]), 403);
            let guard = guard(listen, Some("open sesame"));
            let cases = [
                ("Bearer open sesame", 200),
                ("bearer open sesame", 200),
                ("Bearer open sesamf", 401),
                ("Bearer open", 401),
                ("Bearer open sesame!", 401),
                ("Bearer ", 401),
                ("Basic open sesame", 401),
            ];
            for (authorization, expected) in cases {
                let headers = [("authorization", authorization)];
                assert_eq!(status(&guard, &headers), expected, "{authorization}");
            }
            assert_eq!(status(&guard, &[]), 401);
        }
    }

    #[test]
    fn names_that_others_answer_for_do_not_lead_here() {
        let check = |guard: &Guard, host: &str| {
            let mut map = HeaderMap::new();
            map.insert(header::HOST, host.parse().unwrap());
            guard.check_host(&map).map_or_else(|(status, _)| status.as_u16(), |()| 200)
        };
        let open = guard("127.0.0.1:0", None);
        let own =
            ["127.0.0.1:9900", "10.1.2.3", "[::1]:9900", "[::1]", "LocalHost:1", "a.localhost"];
        for host in own {
            assert_eq!(check(&open, host), 200, "{host}");
        }
        let others = [
            "evil.example:9900",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "localhost.",
            "",
            "2130706433",
            "127.1",
            "a b",
            "evil@evil.example",
        ];
        for host in others {
            assert_eq!(check(&open, host), 421, "{host}");
            assert_eq!(check(&guard("127.0.0.1:0", Some("a")), host), 200, "{host}");
            assert_eq!(check(&guard("0.0.0.0:0", None), host), 200, "{host}");
        }
        // HTTP/1.0, which no browser speaks.
        assert!(open.check_host(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn a_token_counts_on_loopback_too() {
        assert_eq!(status(&guard("127.0.0.1:0", Some("a")), &[]), 401);
        let headers = [("authorization", "Bearer a")];
        assert_eq!(status(&guard("127.0.0.1:0", Some("a")), &headers), 200);
    }
}
