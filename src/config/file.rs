//! Reads TOML into a mirror of it, in which every value still knows its place in the text.

use std::{collections::BTreeMap, fmt, path::Path, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{self, Visitor},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    Config, ConfigError,
    error::{Problem, Source},
    resolve::resolve,
    rules,
};

mod headers;
mod health;
mod log;
mod policy;

pub(super) use headers::{FileFields, FileHeaderRules, FileValue};
pub(super) use health::{FileEjection, FileHealthCheck};
pub(super) use log::{FileLog, FileTraces};
pub(super) use policy::{
    FileClass, FileClassPolicy, FileClassTable, FileClasses, FileQueue, FileQueueTable, FileRate,
    FileStep, FileWeight, FileWeightTable, ShortOr,
};

impl Config {
    /// Reads and checks a file, with `${VAR}` taken from the environment.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: name.clone(), source })?;
        Self::parse(&name, &text, |variable| std::env::var(variable).ok())
    }

    /// Checks a text. `name` is what errors call the file, and `env` looks variables up.
    pub fn parse(
        name: &str,
        text: &str,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let mut tree = match DeTable::parse(text) {
            Ok(tree) => tree,
            Err(error) => return Err(Source::unparsed(name, text).show(Problem::from(error))),
        };
        let source = Source::parsed(name, text, tree.get_ref());
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        expand(tree.get_mut(), &env)
            .and_then(|()| Ok(FileConfig::deserialize(toml::Deserializer::from(tree))?))
            .and_then(|file| resolve(file, text.len(), folder))
            .map_err(|problem| source.show(problem))
    }
}

/// Replaces `${VAR}` in every string of a table.
fn expand(table: &mut DeTable<'_>, env: &dyn Fn(&str) -> Option<String>) -> Result<(), Problem> {
    table.iter_mut().try_for_each(|(_, value)| expand_value(value, env))
}

fn expand_value(
    value: &mut Spanned<DeValue<'_>>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(), Problem> {
    let span = value.span();
    match value.get_mut() {
        DeValue::String(text) => {
            let expanded = rules::expand(text, env).map_err(|rule| Problem::new(span, rule))?;
            *text = expanded.into();
            Ok(())
        }
        DeValue::Array(items) => items.iter_mut().try_for_each(|item| expand_value(item, env)),
        DeValue::Table(table) => expand(table, env),
        _ => Ok(()),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table")]
pub(super) struct FileConfig {
    pub(super) server: FileServer,
    pub(super) admin: FileAdmin,
    pub(super) log: FileLog,
    pub(super) traces: Option<Spanned<FileTraces>>,
    pub(super) store: FileStore,
    pub(super) classes: FileClasses,
    pub(super) limits: Named<FileLimit>,
    pub(super) rates: Named<FileRate>,
    pub(super) upstreams: Named<FileUpstream>,
    pub(super) routes: Vec<Spanned<FileRoute>>,
}

/// Tables by name. The span of a name is where an error about a missing key points.
pub(super) type Named<T> = BTreeMap<Spanned<String>, T>;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileServer {
    pub(super) listen: Option<Spanned<String>>,
    pub(super) tls: Option<Spanned<FileServerTls>>,
    pub(super) max_in_flight: Option<Spanned<i64>>,
    pub(super) max_connections: Option<Spanned<i64>>,
    pub(super) max_connections_per_address: Option<Spanned<i64>>,
    pub(super) proxy_protocol: Option<Vec<Spanned<String>>>,
    pub(super) trusted_proxies: Option<Vec<Spanned<String>>>,
    pub(super) header_timeout: Option<Spanned<FileDuration>>,
    pub(super) keepalive_timeout: Option<Spanned<FileDuration>>,
    pub(super) stall_timeout: Option<Spanned<FileDuration>>,
    pub(super) drain_delay: Option<Spanned<FileDuration>>,
    pub(super) drain_timeout: Option<Spanned<FileDuration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileServerTls {
    pub(super) cert: Option<Spanned<String>>,
    pub(super) key: Option<Spanned<String>>,
    pub(super) min_version: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileUpstreamTls {
    pub(super) ca: Option<Spanned<String>>,
    pub(super) client_cert: Option<Spanned<String>>,
    pub(super) client_key: Option<Spanned<String>>,
    pub(super) insecure: Option<Spanned<bool>>,
}

// No Debug that shows it: the token is a secret.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileAdmin {
    pub(super) listen: Option<Spanned<String>>,
    pub(super) token: Option<Spanned<String>>,
}

impl fmt::Debug for FileAdmin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileAdmin").field("listen", &self.listen).finish_non_exhaustive()
    }
}

// No Debug that shows it: the URL may hold a password, the key is a secret.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileStore {
    pub(super) url: Option<Spanned<String>>,
    pub(super) tls: Option<Spanned<FileStoreTls>>,
    pub(super) op_timeout: Option<Spanned<FileDuration>>,
    pub(super) when_down: Option<Spanned<String>>,
    pub(super) prefix: Option<Spanned<String>>,
    pub(super) digest_key: Option<Spanned<String>>,
    pub(super) sentinel_user: Option<Spanned<String>>,
    pub(super) sentinel_password: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { ca = \"ca.pem\" }")]
pub(super) struct FileStoreTls {
    pub(super) ca: Option<Spanned<String>>,
    pub(super) client_cert: Option<Spanned<String>>,
    pub(super) client_key: Option<Spanned<String>>,
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").finish_non_exhaustive()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileLimit {
    pub(super) slots: Option<Spanned<i64>>,
    pub(super) lease: Option<Spanned<FileDuration>>,
    pub(super) max_hold: Option<Spanned<FileDuration>>,
    pub(super) queue: Option<Spanned<FileQueue>>,
    pub(super) recovery: Option<Spanned<String>>,
    pub(super) on_lease_lost: Option<Spanned<String>>,
    #[serde(default)]
    pub(super) classes: Named<FileClassPolicy>,
    pub(super) key: Option<Spanned<String>>,
    pub(super) slots_for: Option<Spanned<Named<Spanned<i64>>>>,
    pub(super) status: Option<Spanned<i64>>,
    pub(super) mode: Option<Spanned<String>>,
    pub(super) holder_header: Option<Spanned<String>>,
    pub(super) fence_header: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileUpstream {
    pub(super) endpoints: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) resolve_interval: Option<Spanned<FileDuration>>,
    pub(super) max_connection_age: Option<Spanned<FileDuration>>,
    pub(super) http2: Option<Spanned<bool>>,
    pub(super) ping_interval: Option<Spanned<FileDuration>>,
    pub(super) health: Option<Spanned<FileHealthCheck>>,
    pub(super) ejection: Option<Spanned<FileEjection>>,
    pub(super) limits: Option<Vec<Spanned<String>>>,
    pub(super) connect_timeout: Option<Spanned<FileDuration>>,
    pub(super) response_timeout: Option<Spanned<FileDuration>>,
    pub(super) idle_timeout: Option<Spanned<FileDuration>>,
    pub(super) linger: Option<Spanned<FileDuration>>,
    pub(super) on_client_gone: Option<Spanned<String>>,
    pub(super) host: Option<Spanned<String>>,
    pub(super) tls: Option<Spanned<FileUpstreamTls>>,
    pub(super) tunnel_timeout: Option<Spanned<FileDuration>>,
    #[serde(default)]
    pub(super) set_headers: FileFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(super) struct FileRoute {
    pub(super) name: Option<Spanned<String>>,
    pub(super) host: Option<Spanned<String>>,
    pub(super) path: Option<Spanned<String>>,
    pub(super) methods: Option<Vec<Spanned<String>>>,
    pub(super) upstream: Option<Spanned<String>>,
    pub(super) limits: Option<Vec<Spanned<String>>>,
    pub(super) rates: Option<Vec<Spanned<String>>>,
    pub(super) class: Option<Spanned<FileClass>>,
    pub(super) weight: Option<Spanned<FileWeight>>,
    pub(super) dialect: Option<Spanned<String>>,
    #[serde(default)]
    pub(super) on_full: Vec<Spanned<FileStep>>,
    pub(super) deadline_header: Option<Spanned<String>>,
    pub(super) strip_prefix: Option<Spanned<bool>>,
    #[serde(default)]
    pub(super) request_headers: FileHeaderRules,
    #[serde(default)]
    pub(super) response_headers: FileHeaderRules,
}

/// A duration such as "250ms".
#[derive(Clone, Copy, Debug)]
pub(super) struct FileDuration(pub(super) Duration);

impl<'de> Deserialize<'de> for FileDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DurationVisitor;
        impl Visitor<'_> for DurationVisitor {
            type Value = FileDuration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(r#"a duration such as "250ms", "10s" or "5m""#)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<FileDuration, E> {
                rules::duration(text).map(FileDuration).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<FileDuration, E> {
                Err(E::custom(format!(
                    r#"a bare number has no unit: write "{number}s" or "{number}ms""#
                )))
            }
        }
        deserializer.deserialize_any(DurationVisitor)
    }
}
