//! Rules about header fields.

use http::{HeaderName, HeaderValue};
use toml::Spanned;

use super::{At, Found, each};
use crate::config::{
    HeaderRules,
    file::{FileFields, FileHeaderRules, FileValue},
    rules,
};

pub(super) fn rules_of(file: &FileHeaderRules) -> Found<HeaderRules> {
    Ok(HeaderRules {
        remove: each(&file.remove, rules::ruled_header)?,
        set: fields(&file.set)?,
        add: fields(&file.add)?,
    })
}

pub(super) fn setting(file: &FileFields) -> Found<HeaderRules> {
    Ok(HeaderRules { set: fields(file)?, ..HeaderRules::default() })
}

pub(super) fn fields(file: &FileFields) -> Found<Vec<(HeaderName, HeaderValue)>> {
    let field = |(name, value): (&Spanned<String>, &Spanned<FileValue>)| {
        let name = rules::ruled_header(name.get_ref()).at(name.span())?;
        Ok((name, rules::header_value(&value.get_ref().0).at(value.span())?))
    };
    file.iter().map(field).collect()
}
