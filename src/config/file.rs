//! From TOML text to a checked configuration, or an error that names the key, the line and the rule.

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);
