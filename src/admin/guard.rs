//! Who may change something: nobody's browser from another page, and off loopback only who has the token.

use http::{HeaderMap, StatusCode, Uri, header};

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
    fn a_token_counts_on_loopback_too() {
        assert_eq!(status(&guard("127.0.0.1:0", Some("a")), &[]), 401);
        let headers = [("authorization", "Bearer a")];
        assert_eq!(status(&guard("127.0.0.1:0", Some("a")), &headers), 200);
    }
}
