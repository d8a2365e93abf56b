//! The id under which a request can be found in the logs of every hop.

use http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest id that is taken over.
const LONGEST: usize = 128;

/// Letters, digits and a few signs, none of which needs escaping anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// A new one, which tells when the request came.
    pub(crate) fn new() -> Self {
        let text = Uuid::now_v7().hyphenated().encode_lower(&mut Uuid::encode_buffer()).to_owned();
        Self(HeaderValue::try_from(text).expect("hexadecimal digits and hyphens"))
    }

    /// The one that a trusted hop gave, if it gave one that will do; else a new one.
    pub(crate) fn of(headers: &HeaderMap, trusted: bool) -> Self {
        let mut lines = headers.get_all(X_REQUEST_ID).iter().filter(|_| trusted);
        match (lines.next(), lines.next()) {
            (Some(only), None) if is_fit(only.as_bytes()) => Self(only.clone()),
            _ => Self::new(),
        }
    }

    /// As a header tells it.
    pub(crate) fn value(&self) -> HeaderValue {
        self.0.clone()
    }

    /// As text.
    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

fn is_fit(id: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@~".contains(byte);
    (1..=LONGEST).contains(&id.len()) && id.iter().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_one_of_a_trusted_hop_is_taken_over() {
        let long = "a".repeat(LONGEST + 1);
        let cases: [(&[&str], bool, bool); 8] = [
            (&["Root=1-67891233-abc"], true, true),
            (&["Root=1-67891233-abc"], false, false),
            (&["a", "b"], true, false),
            (&[""], true, false),
            (&["a\"b"], true, false),
            (&["a b"], true, false),
            (&[&long], true, false),
            (&[], true, false),
        ];
        for (lines, trusted, taken) in cases {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(X_REQUEST_ID, HeaderValue::from_str(line).unwrap());
            }
            let id = RequestId::of(&headers, trusted);
            assert_eq!(lines.contains(&id.as_str()), taken, "{lines:?}");
            assert!(taken || Uuid::try_parse(id.as_str()).unwrap().get_version_num() == 7);
        }
    }
}
