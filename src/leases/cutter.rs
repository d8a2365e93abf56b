//! The way from an order to evict, which may come from any instance, to the request that runs here.

use std::{fmt, sync::OnceLock};

use uuid::Uuid;

type Cut = dyn Fn(Uuid) -> bool + Send + Sync;

/// Whoever can end a request by its holder. None until requests are served.
#[derive(Default)]
pub(super) struct Cutter(OnceLock<Box<Cut>>);

impl Cutter {
    /// The first one stays.
    pub(super) fn set(&self, cut: Box<Cut>) {
        let _ = self.0.set(cut);
    }

    /// Ends a request; false if none runs here under that holder.
    pub(super) fn cut(&self, holder: Uuid) -> bool {
        self.0.get().is_some_and(|cut| cut(holder))
    }
}

impl fmt::Debug for Cutter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cutter")
    }
}
