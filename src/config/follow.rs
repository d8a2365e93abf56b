//! Which configuration may take the place of another one while the process runs.

use super::{Config, ConfigError, Limit, OnLeaseLost, Store};

impl Config {
    /// Checks that this one can follow on another without a restart.
    ///
    /// # Errors
    /// [`ConfigError::NeedsRestart`], with the first key that stands against it.
    pub fn check_follows(&self, before: &Self) -> Result<(), ConfigError> {
        let needs_restart =
            |key: &str, why| Err(ConfigError::NeedsRestart { key: key.to_owned(), why });
        if self.server.listen != before.server.listen {
            return needs_restart("server.listen", "the listener is bound at the start");
        }
        let admin = |config: &Self| config.admin.as_ref().map(|admin| admin.listen);
        if admin(self) != admin(before) {
            return needs_restart("admin.listen", "the listener is bound at the start");
        }
        let is_same_store =
            Store { when_down: before.store.when_down, ..self.store.clone() } == before.store;
        if !is_same_store {
            let why = "slots are held there, and only `when_down` may change meanwhile";
            return needs_restart("store", why);
        }
        if self.classes.order != before.classes.order {
            return needs_restart("classes.order", "requests wait in the queues of these classes");
        }
        for limit in &self.limits {
            let same = before.limits.iter().find(|known| known.name == limit.name);
            if same.is_some_and(|known| known.lease != limit.lease && is_cut(limit, known)) {
                let why = "running requests will be cut by the lease they began with";
                return needs_restart(&format!("limits.{}.lease", limit.name), why);
            }
        }
        Ok(())
    }
}

fn is_cut(limit: &Limit, known: &Limit) -> bool {
    [limit, known].iter().any(|limit| limit.on_lease_lost == OnLeaseLost::Cut)
}
