//! A request's line in the log: JSON, or `key=value` for people.

use std::{
    fmt::{Display, Write},
    time::Duration,
};

use tokio::time::Instant;

use super::{Facts, plain};

/// How much is shown of a path, and of anything else that a client says.
const PATH: usize = 1024;
const WORD: usize = 256;

/// The line, with its end.
pub(super) fn of(facts: &Facts, now: Instant, is_json: bool) -> String {
    let mut line = Line::new(is_json);
    let admission = facts.admission();
    line.text("time", &humantime::format_rfc3339_millis(facts.began_at).to_string());
    line.text("request_id", facts.id.as_str());
    line.text("client", &facts.client.to_canonical().to_string());
    line.option("method", facts.method(WORD));
    line.option("host", facts.host(WORD));
    line.option("path", facts.path(PATH));
    line.option("route", facts.route().map(|route| plain(route.name.as_bytes(), WORD)));
    line.option("class", facts.class());
    line.option("limits", facts.route().map(|route| route.limits.join(",")));
    line.option("refused_by", admission.and_then(|admission| admission.refused_by.as_deref()));
    line.number("status", facts.status.map(|status| status.as_u16()));
    line.option("reason", facts.reason.map(|reason| reason.as_str()));
    line.text("end", facts.end.as_str());
    line.number("wait_ms", admission.map(|admission| Ms(admission.waited)));
    let since = |began: Instant| facts.answered.map(|answered| Ms(answered - began));
    line.number("upstream_ms", facts.upstream.as_ref().and_then(|call| since(call.began)));
    line.number("first_byte_ms", since(facts.began));
    line.number("total_ms", Some(Ms(now - facts.began)));
    line.number("bytes", Some(facts.bytes));
    line.option("upstream", facts.called().map(|upstream| &*upstream.name));
    line.option("endpoint", facts.endpoint());
    line.option("holder", facts.upstream.as_ref().map(|call| call.holder.to_string()));
    let degraded = facts.degraded.as_ref().map(|step| plain(step.as_bytes(), WORD));
    line.option("degraded", degraded);
    let shadow = admission.and_then(|admission| admission.shadow);
    line.option("shadow", shadow.map(|reason| reason.as_str()));
    line.option("trace", facts.trace.map(|trace| trace.id.to_string()));
    line.end()
}

struct Line {
    text: String,
    is_json: bool,
}

/// In milliseconds, with the microseconds behind the point.
struct Ms(Duration);

impl Line {
    fn new(is_json: bool) -> Self {
        let mut text = String::with_capacity(640);
        text.push_str(if is_json { "{" } else { "" });
        Self { text, is_json }
    }

    fn key(&mut self, key: &str) {
        let is_first = self.text.len() <= 1;
        let put = match (self.is_json, is_first) {
            (true, true) => write!(self.text, "\"{key}\":"),
            (true, false) => write!(self.text, ",\"{key}\":"),
            (false, true) => write!(self.text, "{key}="),
            (false, false) => write!(self.text, " {key}="),
        };
        put.expect("writing to a string can't fail");
    }

    /// What isn't there is null, or a hyphen.
    fn nothing(&mut self) {
        self.text.push_str(if self.is_json { "null" } else { "-" });
    }

    /// Printable ASCII, so that only quotes and backslashes need escaping.
    fn text(&mut self, key: &str, value: &str) {
        self.key(key);
        let is_word = |c: char| c.is_ascii_graphic() && !"\"\\=".contains(c);
        if !self.is_json && !value.is_empty() && value != "-" && value.chars().all(is_word) {
            self.text.push_str(value);
            return;
        }
        self.text.push('"');
        for c in value.chars() {
            if matches!(c, '"' | '\\') {
                self.text.push('\\');
            }
            self.text.push(c);
        }
        self.text.push('"');
    }

    fn option(&mut self, key: &str, value: Option<impl AsRef<str>>) {
        match value {
            Some(value) => self.text(key, value.as_ref()),
            None => {
                self.key(key);
                self.nothing();
            }
        }
    }

    fn number(&mut self, key: &str, value: Option<impl Display>) {
        self.key(key);
        match value {
            Some(value) => {
                write!(self.text, "{value}").expect("writing to a string can't fail");
            }
            None => self.nothing(),
        }
    }

    fn end(mut self) -> String {
        self.text.push_str(if self.is_json { "}\n" } else { "\n" });
        self.text
    }
}

impl Display for Ms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0.as_millis(), self.0.subsec_micros() % 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_bytes_make_no_second_line_and_no_second_key() {
        let hostile = b"/a\r\nb\x1b[31m\"c\\ d=e\0\xff\x7f\xc2\x85";
        let shown = plain(hostile, PATH);
        assert_eq!(shown, "/a\\x0d\\x0ab\\x1b[31m\"c\\\\ d=e\\x00\\xff\\x7f\\xc2\\x85");
        let mut json = Line::new(true);
        json.text("path", &shown);
        json.number("bytes", Some(1));
        json.option("class", None::<&str>);
        let json = json.end();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["path"], shown);
        assert!(value["class"].is_null() && value["bytes"] == 1);
        let mut text = Line::new(false);
        text.text("path", &shown);
        text.text("word", "plain");
        text.text("empty", "");
        text.text("hyphen", "-");
        text.option("class", None::<&str>);
        let text = text.end();
        assert!(text.ends_with("\" word=plain empty=\"\" hyphen=\"-\" class=-\n"), "{text}");
        for line in [&json, &text] {
            let body = line.strip_suffix('\n').unwrap();
            assert!(body.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{line:?}");
        }
        assert_eq!(plain(&[b'a'; 2000], 10), "aaaaaaaaaa...");
    }

    #[test]
    fn times_are_in_milliseconds() {
        let shown = |micros| Ms(Duration::from_micros(micros)).to_string();
        assert_eq!((&*shown(0), &*shown(1_002_003)), ("0.000", "1002.003"));
    }
}
