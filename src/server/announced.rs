//! The PROXY protocol, in which a balancer says whose connection it brings.
//!
//! It stands before everything else, TLS included, so not one byte more than it has may be read. Version 1 is a line whose
//! length only its end tells; version 2 says its length. What a balancer adds to the address isn't looked at.

use std::{io, net::SocketAddr};

use proxy_header::{ParseConfig, Protocol, ProxyHeader};
use tokio::io::{AsyncRead, AsyncReadExt};

/// What `PROXY UNKNOWN\r\n` takes, and no header is shorter.
const SHORTEST: usize = 15;
/// The fixed part of version 2, which ends with the length of the rest.
const FIXED: usize = 16;
/// The longest line of version 1.
const LONGEST_LINE: usize = 107;
/// The longest rest of version 2: some certificates fit in.
const LONGEST_REST: usize = 4096;

/// Why there is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unannounced {
    /// The peer left, perhaps after it saw that somebody listens.
    Gone,
    /// What it sent isn't the protocol.
    Wrong,
}

impl From<io::Error> for Unannounced {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

/// Reads the header; none if it names no address, as a balancer's own health checks do.
pub(super) async fn read<T>(io: &mut T) -> Result<Option<SocketAddr>, Unannounced>
where
    T: AsyncRead + Unpin,
{
    let mut header = vec![0; SHORTEST];
    io.read_exact(&mut header).await?;
    match header[0] {
        b'P' => {
            // What isn't a header needn't have an end.
            if !header.starts_with(b"PROXY ") {
                return Err(Unannounced::Wrong);
            }
            while !header.ends_with(b"\r\n") {
                let missing = if header.ends_with(b"\r") { 1 } else { 2 };
                extend(io, &mut header, missing, LONGEST_LINE).await?;
            }
        }
        _ => {
            extend(io, &mut header, FIXED - SHORTEST, FIXED).await?;
            let rest = u16::from_be_bytes([header[FIXED - 2], header[FIXED - 1]]);
            if !header.starts_with(b"\r\n\r\n\0\r\nQUIT\n") {
                return Err(Unannounced::Wrong);
            }
            extend(io, &mut header, rest.into(), FIXED + LONGEST_REST).await?;
        }
    }
    parse(&header)
}

async fn extend<T: AsyncRead + Unpin>(
    io: &mut T,
    header: &mut Vec<u8>,
    by: usize,
    longest: usize,
) -> Result<(), Unannounced> {
    let before = header.len();
    if before + by > longest {
        return Err(Unannounced::Wrong);
    }
    header.resize(before + by, 0);
    io.read_exact(&mut header[before..]).await?;
    Ok(())
}

/// Takes a whole header in, and nothing behind it.
fn parse(header: &[u8]) -> Result<Option<SocketAddr>, Unannounced> {
    let config = ParseConfig { include_tlvs: false, allow_v1: true, allow_v2: true };
    match ProxyHeader::parse(header, config) {
        Ok((parsed, length)) if length == header.len() => match parsed.proxied_address() {
            Some(address) if address.protocol == Protocol::Datagram => Err(Unannounced::Wrong),
            address => Ok(address.map(|address| address.source)),
        },
        _ => Err(Unannounced::Wrong),
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use proptest::prelude::*;

    use super::*;

    /// What is said of these bytes, and how many stay unread. All are there, so nothing is waited for.
    fn read_from(mut bytes: &[u8]) -> (Result<Option<SocketAddr>, Unannounced>, usize) {
        let said = read(&mut bytes).now_or_never().expect("bytes don't wait");
        (said, bytes.len())
    }

    fn version_2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [b"\r\n\r\n\0\r\nQUIT\n", &[command, family][..], &length, rest].concat()
    }

    const IPV4: &[u8] = &[192, 0, 2, 7, 10, 0, 0, 1, 0x1f, 0x90, 0, 80];

    #[test]
    fn what_names_an_address() {
        let address = |text: &str| Ok(Some(text.parse().unwrap()));
        let tlvs = [IPV4, b"\x03\0\x04abcd", b"\x20\0\x01x"].concat();
        let ipv6 = [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[1], &[0; 16], &[0, 9, 0, 80]].concat();
        let cases = [
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 8080 80\r\n".to_vec(), "192.0.2.7:8080"),
            (b"PROXY TCP6 2001:db8::1 ::1 9 80\r\n".to_vec(), "[2001:db8::1]:9"),
            (version_2(0x21, 0x11, IPV4), "192.0.2.7:8080"),
            (version_2(0x21, 0x11, &tlvs), "192.0.2.7:8080"),
            (version_2(0x21, 0x21, &ipv6), "[2001:db8::1]:9"),
        ];
        for (header, text) in cases {
            let request = [&header[..], b"GET / HTTP/1.1\r\n"].concat();
            assert_eq!(read_from(&request), (address(text), 16), "{text}");
        }
    }

    #[test]
    fn what_names_none() {
        for header in [
            b"PROXY UNKNOWN\r\n".to_vec(),
            b"PROXY UNKNOWN ::1 ::1 1 2\r\n".to_vec(),
            version_2(0x20, 0x00, b""),
            version_2(0x20, 0x11, IPV4),
            version_2(0x21, 0x00, b"anything"),
            version_2(0x21, 0x31, &[b'/'; 216]),
        ] {
            assert_eq!(read_from(&header), (Ok(None), 0), "{header:?}");
        }
    }

    #[test]
    fn what_is_wrong() {
        let long = [&b"PROXY TCP4 "[..], &[b'1'; 200]].concat();
        for bytes in [
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_vec(),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\0\0\0\0\0\0".to_vec(),
            b"PROXY TCP4 192.0.2.7 10.0.0.1 80800 80\r\n".to_vec(),
            b"PROXY TCP4 ::1 ::1 80 80\r\n".to_vec(),
            b"PROXY TCP4 192.0.2.7 10.0.0.1 80\r\n".to_vec(),
            b"PROXY UDP4 192.0.2.7 10.0.0.1 80 80\r\n".to_vec(),
            b"PROXY TCP4 192.0.2.7 10.0.0.1 80 80\nGET / HTTP/1.1\r\n\r\n".to_vec(),
            long,
            version_2(0x31, 0x11, IPV4),
            version_2(0x22, 0x11, IPV4),
            version_2(0x21, 0x11, &IPV4[1..]),
            version_2(0x21, 0x12, IPV4),
            version_2(0x21, 0x41, IPV4),
            version_2(0x21, 0x31, b"/short"),
            version_2(0x21, 0x11, &[IPV4, &[0; LONGEST_REST]].concat()),
        ] {
            assert_eq!(read_from(&bytes).0, Err(Unannounced::Wrong), "{bytes:?}");
        }
    }

    #[test]
    fn what_ends_early() {
        let header = version_2(0x21, 0x11, IPV4);
        for length in 0..header.len() {
            assert_eq!(read_from(&header[..length]).0, Err(Unannounced::Gone), "{length}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics_or_reads_on(
            start in prop::sample::select(vec![
                &b"PROXY TCP4 "[..], b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n\x21\x11", b"\r\n\r\n\0\r\nQUIT\n", b"",
            ]),
            rest in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let bytes = [start, &rest].concat();
            let (said, left) = read_from(&bytes);
            if let Ok(Some(_)) = said {
                prop_assert_eq!(parse(&bytes[..bytes.len() - left]), said);
            }
        }
    }
}
