//! The mirror of rules about header fields. Their values may be secrets from the environment.

use std::fmt;

use serde::Deserialize;
use toml::Spanned;

use super::Named;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table")]
pub(in crate::config) struct FileHeaderRules {
    pub(in crate::config) set: FileFields,
    pub(in crate::config) add: FileFields,
    pub(in crate::config) remove: Option<Vec<Spanned<String>>>,
}

/// Values by the name of their field.
pub(in crate::config) type FileFields = Named<Spanned<FileValue>>;

#[derive(Deserialize)]
#[serde(transparent)]
pub(in crate::config) struct FileValue(pub(in crate::config) String);

impl fmt::Debug for FileValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileValue(…)")
    }
}
