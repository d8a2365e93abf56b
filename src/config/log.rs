//! What is told of requests: the log, and traces.

use http::{HeaderName, HeaderValue, Uri};

/// `[log]`
#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    /// How much the process says of itself: a level, or one for each part. `RUST_LOG` wins over it.
    pub level: String,
    /// The form of every line.
    pub format: LogFormat,
    /// Whether each request has a line.
    pub requests: bool,
    /// Of the requests that went well, which part has one, from 0 to 1.
    pub sample: f64,
}

/// `format`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, else JSON.
    Auto,
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// The rule for `level`: "info", or directives such as "info,tidegate::leases=debug".
///
/// # Errors
/// What it must be.
pub fn level(text: &str) -> Result<String, String> {
    let is_level = |word: &str| {
        ["off", "error", "warn", "info", "debug", "trace"]
            .contains(&word.to_ascii_lowercase().as_str())
    };
    let is_target = |word: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
        !word.is_empty() && word.chars().all(is_plain)
    };
    let is_directive = |part: &str| match part.split_once('=') {
        Some((target, word)) => is_target(target) && is_level(word),
        None => is_level(part),
    };
    if text.len() <= 1024 && text.split(',').all(is_directive) {
        return Ok(text.to_owned());
    }
    Err(r#"must be "off", "error", "warn", "info", "debug" or "trace", or one for each part, such as "info,tidegate::leases=debug""#.to_owned())
}

/// The rule for `sample`.
///
/// # Errors
/// What it must be.
pub fn sample(part: f64) -> Result<f64, String> {
    if (0.0..=1.0).contains(&part) {
        return Ok(part);
    }
    Err("must be from 0.0 to 1.0".to_owned())
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Auto, requests: false, sample: 1.0 }
    }
}

/// `[traces]`
#[derive(Clone, PartialEq)]
pub struct Traces {
    /// The collector; spans go to `/v1/traces` below it.
    pub endpoint: Uri,
    /// Of the requests whose trusted caller hasn't decided, which part is traced, from 0 to 1.
    pub sample: f64,
    /// What the collector calls this.
    pub service: String,
    /// Fields of each call to the collector; they may hold secrets.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

// The headers' values are secrets.
impl std::fmt::Debug for Traces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, sample, service, headers } = self;
        let headers: Vec<_> = headers.iter().map(|(name, _)| name).collect();
        f.debug_struct("Traces")
            .field("endpoint", endpoint)
            .field("sample", sample)
            .field("service", service)
            .field("headers", &headers)
            .finish()
    }
}
