//! What must hold for whatever somebody else writes: the targets of `fuzz/`, which tests run on cheaper guesses as well.

use std::net::{IpAddr, Ipv4Addr};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{
    client,
    config::Config,
    headers::{self, Way, X_FORWARDED_FOR},
};

pub use crate::store::fuzzing::reply;

/// A configuration is valid or tells why not, and never what the environment holds.
pub fn config(text: &[u8]) {
    let Ok(text) = str::from_utf8(text) else { return };
    let secret = "hidden-in-the-environment";
    if let Err(error) = Config::parse("proxy.toml", text, |_| Some(secret.to_owned())) {
        let told = error.to_string();
        assert!(!told.is_empty() && !told.contains(secret), "{told}");
    }
}

/// Whatever the lines of a head, `name: value` each, the upstream hears of the peer as the last hop; and who isn't trusted is the
/// client, whomever they name.
pub fn forwarded(lines: &[u8]) {
    let mut fields = HeaderMap::new();
    for line in lines.split(|byte| *byte == b'\n').take(64) {
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (name, value) = (&line[..colon], line.get(colon + 1..).unwrap_or_default());
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            fields.append(name, value);
        }
    }
    let (near, far) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(192, 0, 2, 1));
    let networks = ["10.0.0.0/8".parse().expect("a network")];
    for peer in [near, far].map(IpAddr::from) {
        let trusted = client::is_trusted(peer, &networks);
        let address = client::address(peer, &fields, &networks);
        assert!(trusted || address == peer, "{address}");
        let value = HeaderValue::try_from(peer.to_string()).expect("an address is ASCII");
        let client = trusted.then_some(address);
        let mut passed = fields.clone();
        headers::to_upstream(&mut passed, &Way { peer: &value, client, trusted, secure: false });
        let hops: Vec<_> = passed.get_all(X_FORWARDED_FOR).iter().collect();
        let [hops] = hops[..] else { panic!("{hops:?}") };
        assert!(hops.as_bytes().ends_with(value.as_bytes()), "{hops:?}");
        assert!(trusted || hops == value, "{hops:?}");
        assert_eq!(passed.get_all("x-real-ip").iter().count(), 1);
        assert!(!passed.contains_key("connection") && !passed.contains_key("transfer-encoding"));
        headers::to_client(&mut passed);
        headers::clean_trailers(&mut passed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces of something valid, in an order that isn't.
    fn pieces(of: &'static str, separator: char) -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => prop::sample::select(of.split(separator).collect::<Vec<_>>()).prop_map(str::to_owned),
            1 => "[ -~\n]{0,12}",
        ];
        prop::collection::vec(piece, 0..40)
            .prop_map(move |pieces| pieces.join(&separator.to_string()))
    }

    proptest! {
        #[test]
        fn a_configuration_tells_why_it_is_wrong(
            words in pieces(include_str!("../proxy.toml"), ' '),
            lines in pieces(include_str!("../proxy.toml"), '\n'),
            at in any::<prop::sample::Index>(),
        ) {
            config(words.as_bytes());
            config(lines.as_bytes());
            // The whole file, with something in the middle of it.
            let mut text = include_str!("../proxy.toml").as_bytes().to_vec();
            let at = at.index(text.len());
            text.splice(at..at, words.bytes().take(20));
            config(&text);
        }

        #[test]
        fn forwarded_headers_are_believed_of_the_trusted_alone(
            lines in pieces(include_str!("../fuzz/corpus/forwarded/hops"), '\n'),
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            forwarded(lines.as_bytes());
            forwarded(&[b"x-forwarded-for:", &bytes[..]].concat());
        }

        #[test]
        fn a_reply_is_read_or_refused(
            values in prop::collection::vec(
                prop_oneof![
                    (-2_i64..9).prop_map(|int| format!(":{int}\r\n")),
                    any::<i64>().prop_map(|int| format!(":{int}\r\n")),
                    Just("$36\r\n0190163d-8694-739b-aea5-966c26f8ad91\r\n".to_owned()),
                    Just("$7\r\n3 5 ,7,\r\n".to_owned()),
                    Just("$-1\r\n".to_owned()),
                    Just("*1\r\n:-1\r\n".to_owned()),
                ],
                0..24,
            ),
            bytes in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            reply(format!("*{}\r\n{}", values.len(), values.concat()).as_bytes());
            reply(&bytes);
        }
    }
}
