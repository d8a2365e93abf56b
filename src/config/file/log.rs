//! The mirror of `[log]` and `[traces]`.

use serde::Deserialize;
use toml::Spanned;

use super::FileFields;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileLog {
    pub(in crate::config) level: Option<Spanned<String>>,
    pub(in crate::config) format: Option<Spanned<String>>,
    pub(in crate::config) requests: Option<Spanned<bool>>,
    pub(in crate::config) sample: Option<Spanned<f64>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileTraces {
    pub(in crate::config) endpoint: Option<Spanned<String>>,
    pub(in crate::config) sample: Option<Spanned<f64>>,
    pub(in crate::config) service: Option<Spanned<String>>,
    #[serde(default)]
    pub(in crate::config) headers: FileFields,
}
