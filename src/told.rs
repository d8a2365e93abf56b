//! What an upstream is told of the slot under which a request comes, so that it can tell a late one from the present one.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{admission::Permit, config::Config};

/// The headers in which an upstream is told.
#[derive(Debug)]
pub(crate) struct Told {
    holder: Vec<HeaderName>,
    fence: Vec<HeaderName>,
}

impl Told {
    /// For a request that takes these limits.
    pub(crate) fn of(config: &Config, limits: &[usize]) -> Self {
        let limits = || limits.iter().map(|&limit| &config.limits[limit]);
        Self {
            holder: limits().filter_map(|limit| limit.holder_header.clone()).collect(),
            fence: limits().filter_map(|limit| limit.fence_header.clone()).collect(),
        }
    }

    /// Writes them, over whatever the client sent under these names.
    pub(crate) fn tell(&self, headers: &mut HeaderMap, permit: &Permit) {
        for name in &self.holder {
            let holder = HeaderValue::try_from(permit.holder().to_string());
            headers.insert(name, holder.expect("hex digits and hyphens"));
        }
        for name in &self.fence {
            headers.remove(name);
            if let Some(fence) = permit.fence() {
                headers.insert(name, fence.into());
            }
        }
    }
}
