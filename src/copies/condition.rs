//! Conditional requests, as far as a cache may answer them (RFC 9111, 4.3.2).

use http::{HeaderMap, header};

/// Whether a request depends on the state of the thing itself, which a copy can't tell.
pub(super) fn is_for_the_upstream(asked: &HeaderMap) -> bool {
    asked.contains_key(header::IF_MATCH) || asked.contains_key(header::IF_UNMODIFIED_SINCE)
}

/// Whether the client has what the copy has.
pub(super) fn is_unmodified(asked: &HeaderMap, copy: &HeaderMap) -> bool {
    let text = |headers: &HeaderMap, name| {
        headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    if asked.contains_key(header::IF_NONE_MATCH) {
        let etag = text(copy, header::ETAG);
        let etag = etag.as_deref().and_then(|etag| etag.split('"').nth(1));
        let mut lines = asked.get_all(header::IF_NONE_MATCH).iter();
        return lines.any(|line| {
            // Between every other pair of quotes is a tag; whether it is weak doesn't matter here.
            line.to_str().is_ok_and(|line| {
                let mut tags = line.split('"').skip(1).step_by(2);
                line.trim() == "*" || tags.any(|tag| Some(tag) == etag)
            })
        });
    }
    let date = |headers, name| httpdate::parse_http_date(&text(headers, name)?).ok();
    let since = date(asked, header::IF_MODIFIED_SINCE);
    let modified = date(copy, header::LAST_MODIFIED);
    modified.zip(since).is_some_and(|(modified, since)| modified <= since)
}

/// Drops what tells of a body that isn't sent.
pub(super) fn leave_validators(headers: &mut HeaderMap) {
    let of_the_body = [
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CONTENT_LANGUAGE,
        header::CONTENT_LENGTH,
    ];
    for name in of_the_body {
        headers.remove(name);
    }
}
