//! The mirror of classes, rates and what a route does with them, and of keys that have a short form.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use toml::Spanned;

use super::{FileDuration, Named, rules};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileClasses {
    pub(in crate::config) order: Option<Spanned<Vec<Spanned<String>>>>,
    pub(in crate::config) ageing: Option<Spanned<FileDuration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileClassPolicy {
    pub(in crate::config) share: Option<Spanned<f64>>,
    pub(in crate::config) queue: Option<Spanned<FileQueue>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileRate {
    pub(in crate::config) requests: Option<Spanned<i64>>,
    pub(in crate::config) window: Option<Spanned<FileDuration>>,
    pub(in crate::config) key: Option<Spanned<String>>,
    pub(in crate::config) mode: Option<Spanned<String>>,
}

/// One step of `on_full`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileStep {
    pub(in crate::config) upstream: Option<Spanned<String>>,
    pub(in crate::config) forward_credentials: Option<Spanned<bool>>,
    pub(in crate::config) stale: Option<Spanned<FileDuration>>,
    pub(in crate::config) respond: Option<Spanned<i64>>,
    pub(in crate::config) body: Option<Spanned<String>>,
    pub(in crate::config) content_type: Option<Spanned<String>>,
}

/// `queue`: a table, or a number for its size alone.
pub(in crate::config) type FileQueue = ShortOr<FileQueueTable>;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileQueueTable {
    pub(in crate::config) size: Option<Spanned<i64>>,
    pub(in crate::config) timeout: Option<Spanned<FileDuration>>,
}

/// `class`: a table, or a name.
pub(in crate::config) type FileClass = ShortOr<FileClassTable>;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileClassTable {
    pub(in crate::config) header: Option<Spanned<String>>,
    pub(in crate::config) key: Option<Spanned<String>>,
    #[serde(default)]
    pub(in crate::config) classes: Named<Spanned<String>>,
    pub(in crate::config) default: Option<Spanned<String>>,
}

/// `weight`: a table, or a number.
pub(in crate::config) type FileWeight = ShortOr<FileWeightTable>;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
pub(in crate::config) struct FileWeightTable {
    pub(in crate::config) header: Option<Spanned<String>>,
    pub(in crate::config) bytes_per_slot: Option<Spanned<FileBytes>>,
    pub(in crate::config) max: Option<Spanned<i64>>,
}

/// A table, or something shorter that says its main part.
#[derive(Debug)]
pub(in crate::config) enum ShortOr<T: HasShort> {
    Short(T::Short),
    Table(T),
}

/// A table with a short form.
pub(in crate::config) trait HasShort {
    type Short: Bare;
    const EXPECTED: &'static str;
}

impl HasShort for FileQueueTable {
    type Short = i64;
    const EXPECTED: &'static str = r#"a number or a table such as { size = 200, timeout = "10s" }"#;
}

impl HasShort for FileClassTable {
    type Short = String;
    const EXPECTED: &'static str =
        r#"a class or a table such as { header = "x-priority", default = "normal" }"#;
}

impl HasShort for FileWeightTable {
    type Short = i64;
    const EXPECTED: &'static str =
        r#"a number or a table such as { bytes_per_slot = "1MiB", max = 8 }"#;
}

/// A value of one word: a number or a text.
pub(in crate::config) trait Bare: Sized {
    fn number(_: i64) -> Option<Self> {
        None
    }

    fn text(_: &str) -> Option<Self> {
        None
    }
}

impl Bare for i64 {
    fn number(number: i64) -> Option<Self> {
        Some(number)
    }
}

impl Bare for String {
    fn text(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

// By hand, since serde's untagged enums lose the spans inside them.
impl<'de, T: HasShort + Deserialize<'de>> Deserialize<'de> for ShortOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShortOrVisitor<T>(PhantomData<T>);
        impl<'de, T: HasShort + Deserialize<'de>> Visitor<'de> for ShortOrVisitor<T> {
            type Value = ShortOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<ShortOr<T>, E> {
                let wrong = || E::invalid_type(de::Unexpected::Signed(number), &self);
                T::Short::number(number).map(ShortOr::Short).ok_or_else(wrong)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ShortOr<T>, E> {
                let wrong = || E::invalid_type(de::Unexpected::Str(text), &self);
                T::Short::text(text).map(ShortOr::Short).ok_or_else(wrong)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ShortOr<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(ShortOr::Table)
            }
        }
        deserializer.deserialize_any(ShortOrVisitor(PhantomData))
    }
}

/// A size such as "1MiB", or plain bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) struct FileBytes(pub(in crate::config) u64);

impl<'de> Deserialize<'de> for FileBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;
        impl Visitor<'_> for BytesVisitor {
            type Value = FileBytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(r#"a size such as "1MiB", "64KiB" or a number of bytes"#)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<FileBytes, E> {
                rules::bytes(text).map(FileBytes).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<FileBytes, E> {
                rules::some_bytes(u64::try_from(number).ok()).map(FileBytes).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(BytesVisitor)
    }
}
