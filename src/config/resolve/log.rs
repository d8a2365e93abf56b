//! `[log]` and `[traces]`.

use toml::Spanned;

use super::{At, Found, headers, or, or_text, required};
use crate::config::{
    Log, LogFormat, Traces,
    file::{FileLog, FileTraces},
    log, rules,
};

pub(super) fn log(file: &FileLog) -> Found<Log> {
    let default = Log::default();
    Ok(Log {
        level: or_text(&file.level, &default.level, log::level)?,
        format: or_text(&file.format, "auto", |text| match text {
            "auto" => Ok(LogFormat::Auto),
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(r#"must be "auto", "text" or "json""#.to_owned()),
        })?,
        requests: file.requests.as_ref().map_or(default.requests, |requests| *requests.get_ref()),
        sample: or(&file.sample, default.sample, log::sample)?,
    })
}

pub(super) fn traces(file: &Spanned<FileTraces>) -> Found<Traces> {
    let (span, file) = (file.span(), file.get_ref());
    let endpoint = required(span, &file.endpoint, "endpoint")?;
    Ok(Traces {
        endpoint: rules::endpoint(endpoint.get_ref()).at(endpoint.span())?,
        sample: or(&file.sample, 1.0, log::sample)?,
        service: or_text(&file.service, "tidegate", |text| {
            rules::route_name(text).map(|()| text.to_owned())
        })?,
        headers: headers::fields(&file.headers)?,
    })
}
