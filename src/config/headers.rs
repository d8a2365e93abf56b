//! Header fields that the operator sets, adds and removes.

use http::{HeaderMap, HeaderName, HeaderValue};

/// `request_headers` and `response_headers` of a route, and `set_headers` of an upstream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeaderRules {
    pub(super) remove: Vec<HeaderName>,
    pub(super) set: Vec<(HeaderName, HeaderValue)>,
    pub(super) add: Vec<(HeaderName, HeaderValue)>,
}

impl HeaderRules {
    /// Removes first, then sets, then adds.
    pub fn apply(&self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        for (name, value) in &self.set {
            headers.insert(name.clone(), value.clone());
        }
        for (name, value) in &self.add {
            headers.append(name.clone(), value.clone());
        }
    }
}
