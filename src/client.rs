//! Says who sent a request: the nearest hop that isn't one of our own.

use std::net::IpAddr;

use http::HeaderMap;
use ipnet::IpNet;

use crate::headers::X_FORWARDED_FOR;

/// Whether forwarding headers from this address count.
pub(crate) fn is_trusted(address: IpAddr, trusted: &[IpNet]) -> bool {
    let address = address.to_canonical();
    trusted.iter().any(|net| net.contains(&address))
}

/// The right-most untrusted hop. Whatever stands left of it may be invented.
pub(crate) fn address(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let mut client = peer.to_canonical();
    if !is_trusted(client, trusted) {
        return client;
    }
    let lines: Vec<_> = headers.get_all(X_FORWARDED_FOR).iter().collect();
    let hops = lines.iter().rev().flat_map(|line| line.to_str().unwrap_or_default().rsplit(','));
    for hop in hops {
        let Some(hop) = parse(hop.trim()) else {
            return client;
        };
        client = hop;
        if !is_trusted(client, trusted) {
            return client;
        }
    }
    client
}

/// An address, perhaps with a port, perhaps in brackets.
fn parse(hop: &str) -> Option<IpAddr> {
    let address = hop
        .parse()
        .or_else(|_| hop.parse().map(|socket: std::net::SocketAddr| socket.ip()))
        .or_else(|_| hop.trim_matches(['[', ']']).parse());
    address.ok().map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_right_most_untrusted_hop_is_the_client() {
        let trusted = ["10.0.0.0/8".parse().unwrap()];
        let who = |peer: &str, lines: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(X_FORWARDED_FOR, HeaderValue::from_static(line));
            }
            address(peer.parse().unwrap(), &headers, &trusted).to_string()
        };
        assert_eq!(who("192.0.2.1", &["198.51.100.7"]), "192.0.2.1");
        assert_eq!(who("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(who("10.0.0.1", &["6.6.6.6, 198.51.100.7, 10.1.1.1"]), "198.51.100.7");
        assert_eq!(who("10.0.0.1", &["6.6.6.6", "198.51.100.7"]), "198.51.100.7");
        assert_eq!(who("::ffff:10.0.0.1", &["::ffff:198.51.100.7"]), "198.51.100.7");
        assert_eq!(who("10.0.0.1", &["[2001:db8::1]:443"]), "2001:db8::1");
        assert_eq!(who("10.0.0.1", &["6.6.6.6, junk, 10.2.2.2"]), "10.2.2.2");
    }
}
