//! Which header fields cross the proxy, and what it adds about the client.
//!
//! Fields of the connection are stripped first and ours are added after, so that no `Connection:`
//! line can name one of ours and have it dropped.

use std::{fmt::Write, net::IpAddr};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONNECTION, CONTENT_LENGTH, COOKIE, FORWARDED, HOST, TE, TRANSFER_ENCODING},
};

pub(crate) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// What the proxy knows of the way a request came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// The other end of the socket.
    pub(crate) peer: IpAddr,
    /// The client itself, where a trusted hop told.
    pub(crate) client: IpAddr,
    /// Whether the peer's forwarding headers count.
    pub(crate) trusted: bool,
}

/// Makes the client's fields fit for the upstream.
pub(crate) fn to_upstream(headers: &mut HeaderMap, way: &Way) {
    let wants_trailers = headers.get_all(TE).iter().any(|line| has_token(line, "trailers"));
    let mut doomed = of_the_connection(headers);
    doomed.extend(headers.keys().filter(|name| is_untold(name.as_str(), way.trusted)).cloned());
    for name in doomed {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    join_cookies(headers);
    tell_the_way(headers, way);
}

/// Makes the upstream's fields fit for the client.
pub(crate) fn to_client(headers: &mut HeaderMap) {
    // Where both say how long the body is, only the framing that was stripped was true.
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    let mut doomed = of_the_connection(headers);
    // Ours say that the answer is ours.
    let ours = headers.keys().filter(|name| name.as_str().starts_with("tidegate-"));
    doomed.extend(ours.cloned());
    for name in doomed {
        headers.remove(name);
    }
}

/// Drops what a client must not slip past the header checks at the end of its body.
pub(crate) fn clean_trailers(trailers: &mut HeaderMap) {
    let doomed: Vec<_> = trailers
        .keys()
        .filter(|name| {
            let name = name.as_str();
            is_hop_by_hop(name) || is_kept(name) || is_untold(name, false)
        })
        .cloned()
        .collect();
    for name in doomed {
        trailers.remove(name);
    }
}

/// Appends `Server-Timing`, in whole and tenth milliseconds.
pub(crate) fn add_timing(headers: &mut HeaderMap, queue_us: u128, upstream_us: Option<u128>) {
    let mut text = Text::default();
    let _ = write!(text, "queue;dur={}.{}", queue_us / 1000, queue_us / 100 % 10);
    if let Some(us) = upstream_us {
        let _ = write!(text, ", upstream;dur={}.{}", us / 1000, us / 100 % 10);
    }
    headers.append(SERVER_TIMING, text.value());
}

/// The fields that mean this connection only: the known ones and those that `Connection` names.
fn of_the_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let mut names: Vec<_> =
        headers.keys().filter(|name| is_hop_by_hop(name.as_str())).cloned().collect();
    for line in headers.get_all(CONNECTION) {
        let tokens = line.as_bytes().split(|byte| *byte == b',');
        names.extend(
            tokens
                .filter_map(|token| HeaderName::from_bytes(token.trim_ascii()).ok())
                .filter(|name| !is_kept(name.as_str())),
        );
    }
    names
}

fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "te"
            | "upgrade"
            | "expect"
            | "transfer-encoding"
            | "proxy-connection"
            | "proxy-authorization"
            | "proxy-authenticate"
            | "http2-settings"
    )
}

/// Fields that no `Connection` line may name away: dropping one would change who asks, or for what.
fn is_kept(name: &str) -> bool {
    matches!(
        name,
        "host" | "authorization" | "cookie" | "content-length" | "content-type" | "x-real-ip"
    ) || is_forwarding(name)
        || name.starts_with("tidegate-")
}

fn is_forwarding(name: &str) -> bool {
    name == "forwarded" || name.starts_with("x-forwarded-")
}

/// Fields that aren't the client's to tell: ours, the way's unless a trusted hop tells it, and their
/// twins with underscores, which many upstreams can't tell from the real ones.
fn is_untold(name: &str, trusted: bool) -> bool {
    if name.contains('_') {
        let twin = name.replace('_', "-");
        return is_kept(&twin) || is_hop_by_hop(&twin);
    }
    name.starts_with("tidegate-") || (!trusted && (is_forwarding(name) || name == "x-real-ip"))
}

/// HTTP/2 may split the cookie into crumbs, HTTP/1.1 has one line.
fn join_cookies(headers: &mut HeaderMap) {
    let mut crumbs = headers.get_all(COOKIE).iter();
    if crumbs.next().is_none() || crumbs.next().is_none() {
        return;
    }
    let lines: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    let joined = HeaderValue::from_bytes(&lines.join(&b"; "[..])).expect("joined from values");
    headers.insert(COOKIE, joined);
}

fn tell_the_way(headers: &mut HeaderMap, way: &Way) {
    let mut text = Text::default();
    let _ = write!(text, "{}", way.peer);
    let peer = text.value();
    // `Forwarded` would have to agree with the others; most upstreams read those.
    headers.remove(FORWARDED);
    let chain = headers.get_all(X_FORWARDED_FOR).iter();
    let mut hops: Vec<_> = chain.map(HeaderValue::as_bytes).collect();
    let chain = if hops.is_empty() {
        peer.clone()
    } else {
        hops.push(peer.as_bytes());
        HeaderValue::from_bytes(&hops.join(&b", "[..])).expect("joined from values")
    };
    headers.insert(X_FORWARDED_FOR, chain);
    if way.client == way.peer {
        headers.insert(X_REAL_IP, peer);
    } else {
        let mut text = Text::default();
        let _ = write!(text, "{}", way.client);
        headers.insert(X_REAL_IP, text.value());
    }
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
}

fn has_token(line: &HeaderValue, wanted: &str) -> bool {
    line.as_bytes()
        .split(|byte| *byte == b',')
        .any(|token| token.trim_ascii().eq_ignore_ascii_case(wanted.as_bytes()))
}

/// A short text made without the heap. What doesn't fit is cut off.
struct Text {
    bytes: [u8; 96],
    len: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self { bytes: [0; 96], len: 0 }
    }
}

impl Text {
    fn value(&self) -> HeaderValue {
        HeaderValue::from_bytes(&self.bytes[..self.len]).expect("written from numbers and ASCII")
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len());
        room.ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
