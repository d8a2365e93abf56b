//! The mirror of health checks and ejection.

use serde::Deserialize;
use toml::Spanned;

use super::FileDuration;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { path = \"/health\" }")]
pub(in crate::config) struct FileHealthCheck {
    pub(in crate::config) path: Option<Spanned<String>>,
    pub(in crate::config) interval: Option<Spanned<FileDuration>>,
    pub(in crate::config) timeout: Option<Spanned<FileDuration>>,
    pub(in crate::config) healthy: Option<Spanned<i64>>,
    pub(in crate::config) unhealthy: Option<Spanned<i64>>,
    pub(in crate::config) statuses: Option<Vec<Spanned<i64>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { failures = 5 }")]
pub(in crate::config) struct FileEjection {
    pub(in crate::config) failures: Option<Spanned<i64>>,
    pub(in crate::config) statuses: Option<Vec<Spanned<i64>>>,
    pub(in crate::config) time: Option<Spanned<FileDuration>>,
    pub(in crate::config) max_time: Option<Spanned<FileDuration>>,
    pub(in crate::config) share: Option<Spanned<f64>>,
}
