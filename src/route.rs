//! Finds the route of a request: exact host, wildcard host, any host; then the longest path prefix; then the method.
//!
//! The upstream may read a path differently than it was sent (`/a/../b`, `/%62`, `//b`). A path that
//! would lead elsewhere under one of those readings is refused, since it could slip past a limit.

use std::cmp::Reverse;

use http::{HeaderValue, Method};

use crate::config::{HostPattern, Route};

/// Every route, the most specific first.
#[derive(Debug)]
pub(crate) struct Routes {
    entries: Vec<Entry>,
}

/// Why no route takes a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// Neither host nor path lead anywhere.
    NoRoute,
    /// Only the method is wrong; these would do.
    Method(HeaderValue),
    /// The path leads to different routes, depending on who reads it.
    Ambiguous,
}

#[derive(Debug)]
struct Entry {
    /// Index into `Config::routes`.
    index: usize,
    host: HostPattern,
    /// Without its last slash, so that it ends on a segment border.
    prefix: String,
    methods: Vec<Method>,
}

impl Routes {
    pub(crate) fn new(routes: &[Route]) -> Self {
        let mut entries: Vec<_> = routes
            .iter()
            .enumerate()
            .map(|(index, route)| Entry {
                index,
                host: route.host.clone(),
                prefix: route.path.trim_end_matches('/').to_owned(),
                methods: route.methods.clone(),
            })
            .collect();
        // Stable, so that of two equal routes the first in the file wins.
        entries
            .sort_by_key(|entry| (Reverse(specificity(&entry.host)), Reverse(entry.prefix.len())));
        Self { entries }
    }

    /// The index of the route for this request. `host` may carry a port; `path` is as the client sent it.
    pub(crate) fn find(&self, method: &Method, host: &str, path: &str) -> Result<usize, Miss> {
        let host = bare_host(host);
        let found = self.choose(method, host, path);
        if is_plain(path) {
            return found;
        }
        for reading in 0..4 {
            let read = normalise(path, reading & 1 != 0, reading & 2 != 0);
            if self.choose(method, host, &read) != found {
                return Err(Miss::Ambiguous);
            }
        }
        found
    }

    /// The longest prefix decides before the method does, so that a route can't be left through another method.
    fn choose(&self, method: &Method, host: &str, path: &str) -> Result<usize, Miss> {
        let mut candidates = self.entries.iter().filter(|entry| entry.leads(host, path));
        let Some(best) = candidates.next() else {
            return Err(Miss::NoRoute);
        };
        if best.takes(method) {
            return Ok(best.index);
        }
        let mut allowed = best.methods.clone();
        for twin in candidates.take_while(|e| e.host == best.host && e.prefix == best.prefix) {
            if twin.takes(method) {
                return Ok(twin.index);
            }
            allowed.extend(twin.methods.iter().cloned());
        }
        Err(Miss::Method(allow(&allowed)))
    }
}

impl Entry {
    fn leads(&self, host: &str, path: &str) -> bool {
        let host_fits = match &self.host {
            HostPattern::Any => true,
            HostPattern::Exact(exact) => exact.eq_ignore_ascii_case(host),
            HostPattern::Suffix(suffix) => {
                host.len() > suffix.len()
                    && host
                        .as_bytes()
                        .split_at(host.len() - suffix.len())
                        .1
                        .eq_ignore_ascii_case(suffix.as_bytes())
            }
        };
        host_fits
            && path
                .strip_prefix(self.prefix.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    fn takes(&self, method: &Method) -> bool {
        self.methods.is_empty() || self.methods.contains(method)
    }
}

fn specificity(host: &HostPattern) -> (u8, usize) {
    match host {
        HostPattern::Exact(_) => (2, 0),
        HostPattern::Suffix(suffix) => (1, suffix.len()),
        HostPattern::Any => (0, 0),
    }
}

fn allow(methods: &[Method]) -> HeaderValue {
    let names: Vec<_> = methods.iter().map(Method::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).expect("methods are tokens")
}

/// The host without port and without the root's dot.
fn bare_host(host: &str) -> &str {
    let end = match host.strip_prefix('[') {
        Some(_) => host.find(']').map_or(host.len(), |at| at + 1),
        None => host.rfind(':').unwrap_or(host.len()),
    };
    let bare = &host[..end];
    bare.strip_suffix('.').unwrap_or(bare)
}

/// Whether everybody reads this path alike.
fn is_plain(path: &str) -> bool {
    let mut last = 0;
    !path.bytes().any(|byte| {
        let odd = matches!(byte, b'%' | b'\\') || (last == b'/' && matches!(byte, b'.' | b'/'));
        last = byte;
        odd
    })
}

/// The path as an upstream might read it: escapes decoded, dot segments resolved, and perhaps
/// encoded slashes and backslashes taken for slashes and runs of slashes for one.
fn normalise(path: &str, slashes_decoded: bool, slashes_merged: bool) -> String {
    let decoded = decode(path, slashes_decoded);
    let mut segments: Vec<&str> = Vec::new();
    let mut rest = decoded.split('/').skip(1).peekable();
    while let Some(segment) = rest.next() {
        let is_last = rest.peek().is_none();
        // Some servers cut parameters off before they look for dots: `/..;x/`.
        match segment.split(';').next() {
            Some(".") if is_last => segments.push(""),
            Some(".") => {}
            Some("..") => {
                segments.pop();
                if is_last {
                    segments.push("");
                }
            }
            Some("") if slashes_merged && !is_last => {}
            _ => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

fn decode(path: &str, slashes: bool) -> String {
    let bytes = path.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| path.get(at + 1..at + 3))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(b'/' | b'\\') if !slashes => out.push(b'%'),
            Some(b'/' | b'\\') => {
                out.push(b'/');
                at += 2;
            }
            Some(byte) => {
                out.push(byte);
                at += 2;
            }
            None if bytes[at] == b'\\' && slashes => out.push(b'/'),
            None => out.push(bytes[at]),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(of: &[(&str, &str, &[Method])]) -> Routes {
        let routes: Vec<_> = of
            .iter()
            .map(|(host, path, methods)| Route {
                host: match host.strip_prefix('*') {
                    _ if host.is_empty() => HostPattern::Any,
                    Some(suffix) => HostPattern::Suffix(suffix.to_owned()),
                    None => HostPattern::Exact((*host).to_owned()),
                },
                methods: methods.to_vec(),
                ..Route::plain(path)
            })
            .collect();
        Routes::new(&routes)
    }

    #[test]
    fn host_goes_before_path() {
        let table = routes(&[
            ("", "/v1/chat/", &[]),
            ("*.example.com", "/", &[]),
            ("a.example.com", "/v1/", &[]),
            ("*.deep.example.com", "/", &[]),
        ]);
        let find = |host, path| table.find(&Method::GET, host, path);
        assert_eq!(find("a.example.com", "/v1/chat/x"), Ok(2));
        assert_eq!(find("A.Example.COM:8443", "/v1/chat/x"), Ok(2));
        assert_eq!(find("a.example.com.", "/v1"), Ok(2));
        assert_eq!(find("a.example.com", "/other"), Ok(1));
        assert_eq!(find("x.deep.example.com", "/other"), Ok(3));
        assert_eq!(find("example.com", "/v1/chat/"), Ok(0));
        assert_eq!(find("[::1]:80", "/v1/chat"), Ok(0));
        assert_eq!(find("elsewhere", "/"), Err(Miss::NoRoute));
    }

    #[test]
    fn the_longest_prefix_on_a_segment_border_wins() {
        let table = routes(&[("", "/", &[]), ("", "/v1/", &[]), ("", "/v1/chat", &[])]);
        let find = |path| table.find(&Method::GET, "h", path);
        assert_eq!(find("/v1"), Ok(1));
        assert_eq!(find("/v1/"), Ok(1));
        assert_eq!(find("/v12"), Ok(0));
        assert_eq!(find("/v1/chat"), Ok(2));
        assert_eq!(find("/v1/chat/x"), Ok(2));
        assert_eq!(find("/v1/chats"), Ok(1));
    }

    #[test]
    fn a_wrong_method_is_told_the_right_ones() {
        let table =
            routes(&[("", "/", &[]), ("", "/v1/", &[Method::POST]), ("", "/v1/", &[Method::PUT])]);
        assert_eq!(table.find(&Method::PUT, "h", "/v1/"), Ok(2));
        assert_eq!(
            table.find(&Method::GET, "h", "/v1/"),
            Err(Miss::Method(HeaderValue::from_static("POST, PUT")))
        );
    }

    #[test]
    fn a_path_that_could_lead_elsewhere_is_refused() {
        let table = routes(&[("", "/", &[]), ("", "/v1/", &[])]);
        for path in [
            "/x/../v1/chat",
            "/x/%2e%2E/v1/chat",
            "/x%2f..%2Fv1/",
            "/%76%31/chat",
            "//v1/chat",
            "/x/..;a/v1/",
            "/./v1/",
            "/v1/../secret",
            "/v1/..",
            "/x\\..\\v1/",
            "/v1%2fchat",
        ] {
            assert_eq!(table.find(&Method::GET, "h", path), Err(Miss::Ambiguous), "{path}");
        }
    }

    #[test]
    fn an_odd_path_that_leads_the_same_way_passes() {
        let table = routes(&[("", "/", &[]), ("", "/v1/", &[])]);
        for (path, route) in [
            ("/a%2Fb//c/../d/%2e%2e/x", 0),
            ("/v1/a%20b/../c", 1),
            ("/v1//chat", 1),
            ("/v1/100%", 1),
            ("/v1/%e2%82%ac%zz", 1),
            ("/.well-known/x", 0),
        ] {
            assert_eq!(table.find(&Method::GET, "h", path), Ok(route), "{path}");
        }
    }
}
