//! The rules on single values. An `Err` is the rule that was broken, ready to follow a key or a flag; none repeats a value,
//! since it may be a secret from the environment.

use std::{
    fs::File,
    io::Read,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    time::Duration,
};

use deadpool_redis::redis::IntoConnectionInfo;
use http::{
    HeaderName, HeaderValue, Method, StatusCode, Uri, header,
    uri::{Authority, PathAndQuery},
};
use ipnet::IpNet;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

use super::{
    Dialect, HostHeader, HostPattern, Key, Limit, MOST_SLOTS, Mode, OnClientGone, OnLeaseLost,
    Recovery, RedisAt, Secret, Sentinels, StoreKind, TlsVersion, WhenDown,
};

type Rule<T> = Result<T, String>;

/// How many slots a limit may have.
pub(super) const SLOTS: RangeInclusive<i64> = 0..=MOST_SLOTS as i64;

/// Keeps sums of a duration and a clock far from overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How many slots one request may take.
pub(super) const WEIGHTS: RangeInclusive<i64> = 1..=1_000;

/// More than any chain of certificates; a device has no end.
const LONGEST_FILE: u64 = 1 << 20;

const SHORTEST_LEASE: Duration = Duration::from_secs(2);

/// Replaces each `${VAR}` by the variable's value.
pub(super) fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Rule<String> {
    let mut parts = text.split("${");
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part
            .split_once('}')
            .filter(|(name, _)| is_variable(name))
            .ok_or("`${` must be followed by a variable's name and `}`")?;
        let value = env(name).ok_or_else(|| format!("environment variable {name} is not set"))?;
        expanded.push_str(&value);
        expanded.push_str(rest);
    }
    Ok(expanded)
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

pub(super) fn duration(text: &str) -> Rule<Duration> {
    let duration = humantime::parse_duration(text)
        .map_err(|_| r#"must be a duration such as "250ms", "10s" or "5m""#)?;
    if duration > LONGEST {
        return Err("must be at most 365days".to_owned());
    }
    Ok(duration)
}

pub(super) fn positive(duration: Duration) -> Rule<Duration> {
    if duration < Duration::from_millis(1) {
        return Err("must be at least 1ms".to_owned());
    }
    Ok(duration)
}

pub(super) fn lease(lease: Duration, op_timeout: Duration) -> Rule<Duration> {
    if lease < SHORTEST_LEASE {
        return Err("must be at least 2s".to_owned());
    }
    if lease < 4 * op_timeout {
        return Err(format!(
            "must be at least 4 x store.op_timeout, here {}",
            humantime::format_duration(4 * op_timeout)
        ));
    }
    Ok(lease)
}

pub(super) fn within<T: TryFrom<i64>>(number: i64, range: RangeInclusive<i64>) -> Rule<T> {
    T::try_from(number)
        .ok()
        .filter(|_| range.contains(&number))
        .ok_or_else(|| format!("must be {} to {}", range.start(), range.end()))
}

pub(super) fn name(text: &str) -> Rule<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if text.is_empty() || text.len() > 128 || !text.bytes().all(allowed) {
        return Err(
            "a name must be 1 to 128 letters, digits, `.`, `_` or `-` (in ASCII)".to_owned()
        );
    }
    Ok(())
}

pub(super) fn route_name(text: &str) -> Rule<()> {
    if text.is_empty() || text.len() > 128 || text.chars().any(char::is_control) {
        return Err("must be 1 to 128 bytes without control characters".to_owned());
    }
    Ok(())
}

pub(super) fn address(text: &str) -> Rule<SocketAddr> {
    text.parse().map_err(|_| {
        r#"must be an IP address and a port, such as "127.0.0.1:8080" or "[::]:8080""#.to_owned()
    })
}

/// Two listeners can't share an address, unless the system picks the port.
pub(super) fn apart(server: SocketAddr, admin: SocketAddr) -> Rule<()> {
    if server == admin && server.port() != 0 {
        return Err(format!(
            "must differ from the other listener's address, {server} is taken twice"
        ));
    }
    Ok(())
}

/// A route to the operators' listener would let clients in there.
pub(super) fn not_admin(endpoint: &Uri, admin: SocketAddr) -> Rule<()> {
    let default = if endpoint.scheme_str() == Some("https") { 443 } else { 80 };
    let host = endpoint.host().unwrap_or_default().trim_matches(['[', ']']);
    let leads_there = match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) => {
            ip == admin.ip()
                || ip.is_unspecified()
                || (admin.ip().is_unspecified() && ip.is_loopback())
        }
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    };
    if leads_there && endpoint.port_u16().unwrap_or(default) == admin.port() {
        return Err("must not lead an upstream to the listener for operators".to_owned());
    }
    Ok(())
}

pub(super) fn tls_version(text: &str) -> Rule<TlsVersion> {
    match text {
        "1.2" => Ok(TlsVersion::Tls12),
        "1.3" => Ok(TlsVersion::Tls13),
        _ => Err(r#"must be "1.2" or "1.3""#.to_owned()),
    }
}

pub(super) fn network(text: &str) -> Rule<IpNet> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_| r#"must be a CIDR, such as "10.0.0.0/8" or "fd00::/8""#.to_owned())
}

pub(super) fn store_kind(url: &str) -> Rule<StoreKind> {
    if url == "memory:" {
        return Ok(StoreKind::Memory);
    }
    let schemes = [
        ("redis://", "redis", false),
        ("rediss://", "rediss", false),
        ("redis+sentinel://", "redis", true),
        ("rediss+sentinel://", "rediss", true),
    ];
    let found = schemes
        .iter()
        .find_map(|(begin, plain, asked)| Some((url.strip_prefix(begin)?, plain, asked)));
    let Some((rest, plain, &has_sentinels)) = found else {
        return Err(
            r#"must be "memory:" or begin with redis://, rediss://, redis+sentinel:// or rediss+sentinel://"#
                .to_owned(),
        );
    };
    if !has_sentinels {
        let url = redis_url(url.to_owned()).ok_or(
            "must be a Redis URL, redis://[user][:password@]host[:port][/database], with special characters in user and password percent-encoded",
        )?;
        return Ok(StoreKind::Redis(RedisAt { url, sentinels: None }));
    }
    let at = sentinels(rest, plain).ok_or(
        "must be redis+sentinel://[user][:password@]host:port,host2:port/name-of-the-primary, with special characters in user and password percent-encoded",
    )?;
    Ok(StoreKind::Redis(at))
}

/// The client's own parser decides, but it drops line breaks, and its error may repeat the password.
fn redis_url(url: String) -> Option<Secret> {
    let is_one_word = !url.contains(|letter: char| letter.is_whitespace() || letter.is_control());
    (is_one_word && url.as_str().into_connection_info().is_ok()).then_some(Secret(url))
}

/// What stands behind the scheme of a URL with Sentinels: who to be, who to ask, and for whom.
fn sentinels(rest: &str, scheme: &str) -> Option<RedisAt> {
    let (authority, name) = rest.split_once('/')?;
    let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    let addrs: Vec<_> = hosts
        .split(',')
        .map(|host| {
            redis_url(format!("redis://{host}"))?;
            let authority = host.parse::<Authority>().ok()?;
            let host = authority.host().trim_matches(['[', ']']).to_owned();
            Some((host, authority.port_u16().unwrap_or(26_379)))
        })
        .collect::<Option<_>>()?;
    let at = if login.is_empty() { "" } else { "@" };
    let url = redis_url(format!("{scheme}://{login}{at}{}", hosts.split(',').next()?))?;
    self::name(name).ok()?;
    let name = name.to_owned();
    let sentinels = Some(Sentinels { addrs, name, user: None, password: None });
    Some(RedisAt { url, sentinels })
}

/// Sentinels are asked with a password of their own only where there are any.
pub(super) fn sentinels_of(kind: &mut StoreKind) -> Rule<&mut Sentinels> {
    match kind {
        StoreKind::Redis(RedisAt { sentinels: Some(sentinels), .. }) => Ok(sentinels),
        _ => Err("needs a url that begins with redis+sentinel:// or rediss+sentinel://".to_owned()),
    }
}

/// Certificates mean something only where the connection is encrypted.
pub(super) fn is_encrypted(kind: &StoreKind) -> Rule<()> {
    match kind {
        StoreKind::Redis(at) if at.url.0.starts_with("rediss://") => Ok(()),
        _ => Err("needs a url that begins with rediss:// or rediss+sentinel://".to_owned()),
    }
}

/// The text of a file with certificates.
pub(super) fn certificates(path: &str) -> Rule<String> {
    let text = text_of(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(text),
        _ => Err("must be a file with certificates in PEM".to_owned()),
    }
}

/// The text of a file with a key.
pub(super) fn private_key(path: &str) -> Rule<Secret> {
    let text = text_of(path)?;
    match PrivateKeyDer::from_pem_slice(text.as_bytes()) {
        Ok(_) => Ok(Secret(text)),
        Err(_) => Err("must be a file with a private key in PEM".to_owned()),
    }
}

fn text_of(path: &str) -> Rule<String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST_FILE).read_to_string(&mut text));
    read.map_err(|error| format!("the file can't be read: {error}"))?;
    Ok(text)
}

pub(super) fn prefix(text: &str) -> Rule<()> {
    if text.len() > 128 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("must be at most 128 printable ASCII characters without spaces".to_owned());
    }
    Ok(())
}

pub(super) fn endpoint(text: &str) -> Rule<Uri> {
    let uri: Uri = text.parse().map_err(|_| r#"must be a URL such as "http://127.0.0.1:3000""#)?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err("must begin with http:// or https://".to_owned());
    }
    if text.contains('#') || uri.query().is_some() {
        return Err("must have no query and no fragment".to_owned());
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    if authority.contains('@') {
        return Err("must have no user and no password".to_owned());
    }
    let host = uri.host().unwrap_or_default();
    let has_valid_port = authority == host || uri.port_u16().is_some_and(|port| port != 0);
    if host.is_empty() || !has_valid_port {
        return Err("must name a host and, after a colon, a port from 1 to 65535".to_owned());
    }
    Ok(uri)
}

/// What an endpoint is asked for when it is asked how it is.
pub(super) fn health_path(text: &str) -> Rule<PathAndQuery> {
    let path = text.parse().ok().filter(|_| text.starts_with('/') && !text.contains('#'));
    path.ok_or_else(|| r#"must be a path such as "/health""#.to_owned())
}

pub(super) fn status(number: i64) -> Rule<StatusCode> {
    let status = within(number, 100..=599).map(StatusCode::from_u16)?;
    status.map_err(|_| "must be a status".to_owned())
}

/// A request must mean the same at each endpoint of an upstream, and each counts once.
pub(super) fn fits_in(endpoint: &Uri, others: &[Uri]) -> Rule<()> {
    let Some(first) = others.first() else {
        return Ok(());
    };
    let base = |uri: &Uri| uri.path().trim_end_matches('/').to_owned();
    if endpoint.scheme() != first.scheme() || base(endpoint) != base(first) {
        return Err("must have the same scheme and path as the first endpoint".to_owned());
    }
    if others.iter().any(|other| other.authority() == endpoint.authority()) {
        return Err("is listed twice".to_owned());
    }
    Ok(())
}

pub(super) fn host_pattern(text: &str) -> Rule<HostPattern> {
    let host = text.to_ascii_lowercase();
    if host == "*" {
        return Err("must name a host; leave the key out for any host".to_owned());
    }
    let pattern = match host.strip_prefix('*') {
        Some(suffix) if suffix.starts_with('.') => HostPattern::Suffix(suffix.to_owned()),
        _ => HostPattern::Exact(host.clone()),
    };
    if !is_host(host.strip_prefix("*.").unwrap_or(&host)) {
        return Err(
            r#"must be a host such as "example.com" or "*.example.com" (`*.` only in front, no port, no scheme, ASCII)"#
                .to_owned(),
        );
    }
    Ok(pattern)
}

fn is_host(text: &str) -> bool {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if let Some(address) = bracketed {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    text.len() <= 253
        && text
            .split('.')
            .all(|label| !label.is_empty() && label.len() <= 63 && label.bytes().all(allowed))
}

pub(super) fn path(text: &str) -> Rule<()> {
    if !text.starts_with('/') {
        return Err("must begin with `/`".to_owned());
    }
    let is_path = !text.contains(['?', '#', '*']) && text.parse::<PathAndQuery>().is_ok();
    if !is_path {
        return Err(
            "must be a plain path prefix: no `*`, no query, no fragment, no spaces".to_owned()
        );
    }
    Ok(())
}

pub(super) fn method(text: &str) -> Rule<Method> {
    let rule = || r#"must be an HTTP method, such as "GET""#.to_owned();
    let method = Method::from_bytes(text.as_bytes()).map_err(|_| rule())?;
    let upper = text.to_ascii_uppercase();
    if text != upper && is_standard(&upper) {
        return Err(format!("methods are upper case: write \"{upper}\""));
    }
    Ok(method)
}

fn is_standard(method: &str) -> bool {
    matches!(
        method,
        "GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS" | "TRACE" | "CONNECT"
    )
}

pub(super) fn window(window: Duration) -> Rule<Duration> {
    let longest = Duration::from_secs(24 * 60 * 60);
    if window < Duration::from_millis(1) || window > longest {
        return Err("must be 1ms to 1d".to_owned());
    }
    Ok(window)
}

pub(super) fn bytes(text: &str) -> Rule<u64> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)];
    let found = units.iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, size)));
    some_bytes(
        found.and_then(|(number, size)| number.trim().parse::<u64>().ok()?.checked_mul(*size)),
    )
}

pub(super) fn some_bytes(number: Option<u64>) -> Rule<u64> {
    let rule = || r#"must be a size of at least one byte, such as "1MiB" or "64KiB""#.to_owned();
    number.filter(|number| *number > 0).ok_or_else(rule)
}

pub(super) fn share(share: f64) -> Rule<f64> {
    if share > 0.0 && share <= 1.0 {
        return Ok(share);
    }
    Err("must be above 0 and at most 1".to_owned())
}

pub(super) fn secret(text: &str) -> Rule<Secret> {
    if text.is_empty() || text.len() > 1024 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("must be 1 to 1024 printable ASCII characters without spaces".to_owned());
    }
    Ok(Secret(text.to_owned()))
}

pub(super) fn header(text: &str) -> Rule<HeaderName> {
    HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| r#"must be the name of a header, such as "x-tenant""#.to_owned())
}

/// A header that the proxy adds must not be one that HTTP itself lives by.
pub(super) fn own_header(text: &str) -> Rule<HeaderName> {
    let name = self::header(text)?;
    let taken = [
        header::HOST,
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
        header::EXPECT,
    ];
    if taken.contains(&name) {
        return Err(r#"must be a header of its own, such as "x-holder""#.to_owned());
    }
    Ok(name)
}

/// The number of a grant means something only to an upstream that sees one holder after the other.
pub(super) fn fence_header(
    text: &str,
    most_slots: u32,
    mode: Mode,
    holder_header: Option<&HeaderName>,
) -> Rule<HeaderName> {
    let name = own_header(text)?;
    if most_slots > 1 {
        return Err("needs slots = 1: one number can't tell several holders apart from those \
                    before them; holder_header tells an upstream each holder's id"
            .to_owned());
    }
    if mode == Mode::Shadow {
        return Err("needs mode = \"enforce\": in shadow mode several hold at once".to_owned());
    }
    if holder_header == Some(&name) {
        return Err("must differ from holder_header".to_owned());
    }
    Ok(name)
}

/// A header that the operator may set or remove: whoever answered must stay visible.
pub(super) fn ruled_header(text: &str) -> Rule<HeaderName> {
    let name = own_header(text)?;
    if name.as_str().starts_with("tidegate-") {
        return Err("must not be one of Tidegate's own".to_owned());
    }
    Ok(name)
}

/// A request has the number of one grant.
pub(super) fn one_fence<'a>(limits: impl Iterator<Item = &'a Limit>) -> Rule<()> {
    let fenced: Vec<_> = limits.filter(|limit| limit.fence_header.is_some()).collect();
    match fenced[..] {
        [] | [_] => Ok(()),
        [first, second, ..] => Err(format!(
            "takes limits `{}` and `{}`, which both have a fence_header: a request carries one number",
            first.name, second.name
        )),
    }
}

/// Kept out of every log: it may be a secret.
pub(super) fn header_value(text: &str) -> Rule<HeaderValue> {
    let mut value = HeaderValue::from_str(text).map_err(
        |_| "must be the value of a header: visible letters, spaces and tabs in one line",
    )?;
    value.set_sensitive(true);
    Ok(value)
}

pub(super) fn content_type(text: &str) -> Rule<HeaderValue> {
    let value = HeaderValue::from_str(text).ok().filter(|_| text.contains('/'));
    value.ok_or_else(|| r#"must be a media type, such as "application/json""#.to_owned())
}

pub(super) fn answer_status(number: i64) -> Rule<StatusCode> {
    let number = within::<u16>(number, 200..=599)?;
    StatusCode::from_u16(number).map_err(|_| "must be 200 to 599".to_owned())
}

pub(super) fn refusal_status(number: i64) -> Rule<StatusCode> {
    match number {
        503 => Ok(StatusCode::SERVICE_UNAVAILABLE),
        429 => Ok(StatusCode::TOO_MANY_REQUESTS),
        529 => answer_status(number),
        _ => Err("must be 503, 429 or 529".to_owned()),
    }
}

pub(super) fn key(text: &str) -> Rule<Key> {
    if text == "client-ip" {
        return Ok(Key::ClientIp);
    }
    let name = text.strip_prefix("header:").and_then(|name| header(name).ok());
    name.map(Key::Header)
        .ok_or_else(|| r#"must be "client-ip" or a header, such as "header:x-tenant""#.to_owned())
}

pub(super) fn mode(text: &str) -> Rule<Mode> {
    match text {
        "enforce" => Ok(Mode::Enforce),
        "shadow" => Ok(Mode::Shadow),
        _ => Err(r#"must be "enforce" or "shadow""#.to_owned()),
    }
}

pub(super) fn dialect(text: &str) -> Rule<Dialect> {
    match text {
        "problem" => Ok(Dialect::Problem),
        "openai" => Ok(Dialect::OpenAi),
        "anthropic" => Ok(Dialect::Anthropic),
        "text" => Ok(Dialect::Text),
        _ => Err(r#"must be "problem", "openai", "anthropic" or "text""#.to_owned()),
    }
}

pub(super) fn recovery(text: &str) -> Rule<Recovery> {
    match text {
        "fast" => Ok(Recovery::Fast),
        "strict" => Ok(Recovery::Strict),
        _ => Err(r#"must be "fast" or "strict""#.to_owned()),
    }
}

pub(super) fn when_down(text: &str) -> Rule<WhenDown> {
    match text {
        "closed" => Ok(WhenDown::Closed),
        "local-share" => Ok(WhenDown::LocalShare),
        "open" => Ok(WhenDown::Open),
        _ => Err(r#"must be "closed", "local-share" or "open""#.to_owned()),
    }
}

pub(super) fn on_lease_lost(text: &str) -> Rule<OnLeaseLost> {
    match text {
        "keep" => Ok(OnLeaseLost::Keep),
        "cut" => Ok(OnLeaseLost::Cut),
        _ => Err(r#"must be "keep" or "cut""#.to_owned()),
    }
}

/// A request must outlast the wait for its next renewal, or every one of them would be cut.
pub(super) fn lease_to_cut(limit: &Limit, op_timeout: Duration, linger: Duration) -> Rule<()> {
    if limit.guarded_for(op_timeout).saturating_sub(linger) >= limit.lease / 3 {
        return Ok(());
    }
    Err(format!(
        "must leave a third of itself when linger ({}), store.op_timeout, 200ms and 2 % are taken off, since on_lease_lost is \"cut\"",
        humantime::format_duration(linger)
    ))
}

pub(super) fn on_client_gone(text: &str) -> Rule<OnClientGone> {
    match text {
        "cancel" => Ok(OnClientGone::Cancel),
        "finish" => Ok(OnClientGone::Finish),
        _ => Err(r#"must be "cancel" or "finish""#.to_owned()),
    }
}

pub(super) fn host_header(text: &str) -> Rule<HostHeader> {
    match text {
        "upstream" => Ok(HostHeader::Upstream),
        "keep" => Ok(HostHeader::Keep),
        _ => Err(r#"must be "upstream" or "keep""#.to_owned()),
    }
}
