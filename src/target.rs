//! Checks that a request means one thing only, whoever reads it, and settles which host it is for.

use http::{
    HeaderMap, HeaderValue, Method, Uri, Version,
    header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request::Parts,
    uri::PathAndQuery,
};

/// Why a request goes no further.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Objection {
    /// It can be read in two ways, or in none.
    Bad,
    /// `CONNECT` would make an open proxy of us, and the answer to a `TRACE` would tell what we added.
    Method,
    /// `OPTIONS *` asks the proxy itself.
    Server,
}

/// Checks the head and leaves exactly one `Host` in it: the one that routes and is forwarded.
pub(crate) fn settle(parts: &mut Parts) -> Result<(), Objection> {
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        return Err(Objection::Method);
    }
    settle_host(parts)?;
    check_framing(&parts.headers)?;
    match parts.uri.path() {
        "*" if parts.method == Method::OPTIONS => Err(Objection::Server),
        path if path.starts_with('/') => Ok(()),
        // `http://host?query`, or nothing at all; a host alone is for `CONNECT`.
        "" if parts.uri.scheme().is_some() => Ok(()),
        _ => Err(Objection::Bad),
    }
}

/// The target as the client sent it.
pub(crate) fn path_and_query(uri: &Uri) -> PathAndQuery {
    uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"))
}

/// The length the client announced, if it did.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn settle_host(parts: &mut Parts) -> Result<(), Objection> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Objection::Bad);
    }
    match (host, parts.uri.authority()) {
        // An HTTP/1.1 request must carry Host even where its target says more.
        (None, Some(_)) if parts.version == Version::HTTP_11 => return Err(Objection::Bad),
        (_, Some(authority)) => {
            let value = HeaderValue::from_str(authority.as_str()).map_err(|_| Objection::Bad)?;
            parts.headers.insert(HOST, value);
        }
        // Before HTTP/1.1 there was none, and what is sent on must have one.
        (None, None) if parts.version < Version::HTTP_11 => {
            parts.headers.insert(HOST, HeaderValue::from_static(""));
        }
        (None, None) => return Err(Objection::Bad),
        (Some(_), None) => {}
    }
    let host = parts.headers.get(HOST).map_or(&b""[..], HeaderValue::as_bytes);
    if is_host(host) { Ok(()) } else { Err(Objection::Bad) }
}

/// Whether everybody finds the same name and port in it: a name or an address, IPv6 in brackets, and digits behind the colon.
/// Nothing at all is fine too.
fn is_host(host: &[u8]) -> bool {
    let (name, port) = match host.iter().rposition(|byte| b":]".contains(byte)) {
        Some(at) if host[at] == b':' => (&host[..at], &host[at + 1..]),
        _ => (host, &b""[..]),
    };
    let is_name = match name {
        [b'[', inner @ .., b']'] => {
            inner.iter().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(byte))
        }
        _ => name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(byte)),
    };
    is_name && port.iter().all(u8::is_ascii_digit)
}

fn check_framing(headers: &HeaderMap) -> Result<(), Objection> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let length = lengths.next();
    if lengths.next().is_some() {
        return Err(Objection::Bad);
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else {
        return Ok(());
    };
    let is_chunked = coding.as_bytes().eq_ignore_ascii_case(b"chunked");
    if length.is_some() || !is_chunked || codings.next().is_some() {
        return Err(Objection::Bad);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn settled(
        target: &str,
        version: Version,
        method: Method,
        fields: &[(&str, &str)],
    ) -> Result<Option<String>, Objection> {
        let mut request = Request::builder().uri(target).version(version).method(method);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let mut parts = request.body(()).unwrap().into_parts().0;
        settle(&mut parts)?;
        let host = parts.headers.get(HOST);
        Ok(host.map(|host| host.to_str().unwrap().to_owned()))
    }

    #[test]
    fn exactly_one_host_is_left() {
        let get = |target, version, fields: &[(&str, &str)]| {
            settled(target, version, Method::GET, fields)
        };
        let (h1, h10, h2) = (Version::HTTP_11, Version::HTTP_10, Version::HTTP_2);
        assert_eq!(get("/", h1, &[("host", "a")]), Ok(Some("a".into())));
        assert_eq!(get("/", h1, &[]), Err(Objection::Bad));
        assert_eq!(get("/", h1, &[("host", "a"), ("host", "a")]), Err(Objection::Bad));
        assert_eq!(get("/", h1, &[("host", "a/b")]), Err(Objection::Bad));
        assert_eq!(get("/", h1, &[("host", "x@a")]), Err(Objection::Bad));
        for bad in
            ["a:b", "a:1:2", "::1", "[::1", "::1]", "[x]:", "[::1]x", "%61", "[fe80::1%25lo]"]
        {
            assert_eq!(get("/", h1, &[("host", bad)]), Err(Objection::Bad), "{bad}");
        }
        for fine in ["", "a", "a.b.", "a:80", "a:", "[::1]", "[::ffff:127.0.0.1]:80", "x_y", "a,b"]
        {
            assert_eq!(get("/", h1, &[("host", fine)]), Ok(Some(fine.into())));
        }
        assert_eq!(get("/", h10, &[]), Ok(Some("".into())));
        assert_eq!(get("/", h2, &[]), Err(Objection::Bad));
        assert_eq!(get("http://good:81/x", h1, &[("host", "evil")]), Ok(Some("good:81".into())));
        assert_eq!(get("http://good/x", h2, &[]), Ok(Some("good".into())));
    }

    #[test]
    fn doubtful_framing_is_refused() {
        let post = |fields: &[(&str, &str)]| {
            let mut all = vec![("host", "a")];
            all.extend(fields);
            settled("/", Version::HTTP_11, Method::POST, &all)
        };
        assert!(post(&[("transfer-encoding", "Chunked")]).is_ok());
        assert!(post(&[("content-length", "4")]).is_ok());
        for fields in [
            &[("content-length", "4"), ("transfer-encoding", "chunked")][..],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")],
            &[("content-length", "4"), ("content-length", "4")],
        ] {
            assert_eq!(post(fields), Err(Objection::Bad), "{fields:?}");
        }
    }

    #[test]
    fn what_asks_the_proxy_itself_goes_no_further() {
        let ask = |method, target| settled(target, Version::HTTP_11, method, &[("host", "a")]);
        assert_eq!(ask(Method::CONNECT, "a:22"), Err(Objection::Method));
        assert_eq!(ask(Method::TRACE, "/"), Err(Objection::Method));
        assert_eq!(ask(Method::GET, "a:22"), Err(Objection::Bad));
        assert_eq!(ask(Method::OPTIONS, "*"), Err(Objection::Server));
        assert_eq!(ask(Method::GET, "*"), Err(Objection::Bad));
    }
}
