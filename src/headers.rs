//! Which header fields cross the proxy, and what it adds about the client.
//!
//! Fields of the connection are stripped first and ours are added after, so that no `Connection:`
//! line can name one of ours and have it dropped.

use std::{net::IpAddr, time::Duration};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, FORWARDED, HOST, TE, TRANSFER_ENCODING,
    },
};

pub(crate) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
pub(crate) const TIDEGATE_DEGRADED: HeaderName = HeaderName::from_static("tidegate-degraded");
pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// What proves who the client is.
pub(crate) const CREDENTIALS: [HeaderName; 5] = [
    AUTHORIZATION,
    COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// What the proxy knows of the way a request came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way<'a> {
    /// The other end of the socket.
    pub(crate) peer: &'a HeaderValue,
    /// The client itself, where a trusted hop told.
    pub(crate) client: Option<IpAddr>,
    /// Whether the peer's forwarding headers count.
    pub(crate) trusted: bool,
    /// Whether it came over TLS.
    pub(crate) secure: bool,
}

/// Makes the client's fields fit for the upstream.
pub(crate) fn to_upstream(headers: &mut HeaderMap, way: &Way<'_>) {
    let doomed = doomed(headers, |name| is_untold(name, way.trusted));
    let wants_trailers =
        doomed.contains(&TE) && headers.get_all(TE).iter().any(|line| has_token(line, "trailers"));
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
    // Those of ours say that the answer is ours.
    let doomed = doomed(headers, |name| name.starts_with("tidegate-"));
    // Where both say how long the body is, only the framing that is stripped was true.
    if doomed.contains(&TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
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
pub(crate) fn add_timing(headers: &mut HeaderMap, queue: Duration, upstream: Option<Duration>) {
    let mut text = Text::default();
    text.push(b"queue;dur=");
    text.push_ms(queue);
    if let Some(upstream) = upstream {
        text.push(b", upstream;dur=");
        text.push_ms(upstream);
    }
    headers.append(SERVER_TIMING, text.value());
}

/// The fields that stay behind: those that mean this connection only, because they are known to or
/// because `Connection` names them, and what else is said to.
fn doomed(headers: &HeaderMap, is_doomed: impl Fn(&str) -> bool) -> Vec<HeaderName> {
    let is_doomed = |name: &&HeaderName| is_hop_by_hop(name.as_str()) || is_doomed(name.as_str());
    let mut names: Vec<_> = headers.keys().filter(is_doomed).cloned().collect();
    if !names.contains(&CONNECTION) {
        return names;
    }
    for line in headers.get_all(CONNECTION) {
        let tokens = line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        names.extend(
            tokens
                .filter(|token| !is_option(token))
                .filter_map(|token| HeaderName::from_bytes(token).ok())
                .filter(|name| !is_kept(name.as_str())),
        );
    }
    names
}

/// What a `Connection` line usually says, and which names no field that isn't doomed already.
fn is_option(token: &[u8]) -> bool {
    token.eq_ignore_ascii_case(b"keep-alive") || token.eq_ignore_ascii_case(b"close")
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
        "host"
            | "authorization"
            | "cookie"
            | "content-length"
            | "content-type"
            | "x-real-ip"
            | "x-request-id"
    ) || is_forwarding(name)
        || name.starts_with("tidegate-")
}

fn is_forwarding(name: &str) -> bool {
    name == "forwarded" || name.starts_with("x-forwarded-")
}

/// Fields that aren't the client's to tell: ours, the way's unless a trusted hop tells it, and their
/// twins with underscores, which many upstreams can't tell from the real ones.
fn is_untold(name: &str, trusted: bool) -> bool {
    if name.as_bytes().contains(&b'_') {
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

fn tell_the_way(headers: &mut HeaderMap, way: &Way<'_>) {
    let mut chain = way.peer.clone();
    if way.trusted {
        // `Forwarded` would have to agree with the others; most upstreams read those.
        headers.remove(FORWARDED);
        let hops = headers.get_all(X_FORWARDED_FOR).iter().chain([way.peer]);
        let hops: Vec<_> = hops.map(HeaderValue::as_bytes).collect();
        chain = HeaderValue::from_bytes(&hops.join(&b", "[..])).expect("joined from values");
    }
    headers.insert(X_FORWARDED_FOR, chain);
    let client = way.client.map(|client| HeaderValue::try_from(client.to_string()));
    let client = client.map(|text| text.expect("an address is ASCII"));
    headers.insert(X_REAL_IP, client.unwrap_or_else(|| way.peer.clone()));
    let scheme = HeaderValue::from_static(if way.secure { "https" } else { "http" });
    headers.entry(X_FORWARDED_PROTO).or_insert(scheme);
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
    fn push(&mut self, text: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + text.len()) {
            room.copy_from_slice(text);
            self.len += text.len();
        }
    }

    /// Digit by digit, since formatting would cost more than the rest of the head.
    fn push_ms(&mut self, time: Duration) {
        let tenths = time.as_secs().saturating_mul(10_000);
        let mut rest = tenths.saturating_add(u64::from(time.subsec_nanos() / 100_000));
        let mut digits = [b'0'; 21];
        let mut at = digits.len();
        let mut put = |byte| {
            at -= 1;
            digits[at] = byte;
        };
        put(digit(&mut rest));
        put(b'.');
        put(digit(&mut rest));
        while rest > 0 {
            put(digit(&mut rest));
        }
        self.push(&digits[at..]);
    }

    fn value(&self) -> HeaderValue {
        HeaderValue::from_bytes(&self.bytes[..self.len]).expect("written from digits and ASCII")
    }
}

/// Takes the last digit off a number.
fn digit(rest: &mut u64) -> u8 {
    let last = (*rest % 10) as u8;
    *rest /= 10;
    b'0' + last
}

#[cfg(test)]
mod tests;
