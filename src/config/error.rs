//! Shows the operator what is wrong, where, and never a password.

use std::{cmp::Reverse, fmt, io::IsTerminal, ops::Range};

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("{path}: can't be read: {source}")]
    Read {
        /// The path as it was given.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The file breaks a rule. The first line reads `proxy.toml:12:9: limits.llm.lease: must be at least 2s`.
    #[error("{place}: {}{rule}\n{snippet}", KeyPrefix(key))]
    Invalid {
        /// File, line and column.
        place: String,
        /// The dotted key; empty where the text isn't TOML.
        key: String,
        /// What must hold.
        rule: String,
        /// The source line with carets under the value.
        snippet: String,
    },
    /// A running instance can't change this.
    #[error("{key}: changes with a restart only: {why}")]
    NeedsRestart {
        /// The dotted key.
        key: String,
        /// What stands against it.
        why: &'static str,
    },
    /// A flag breaks a rule.
    #[error("{flag}: {rule}")]
    Flag {
        /// The flag, `--slots`.
        flag: &'static str,
        /// What must hold.
        rule: String,
    },
}

impl ConfigError {
    /// Without the colours that it has on a terminal.
    pub fn plain(&self) -> String {
        let text = self.to_string();
        let mut parts = text.split("\x1b[");
        let first = parts.next().unwrap_or_default();
        let rest = parts.map(|part| part.split_once('m').map_or(part, |(_, rest)| rest));
        [first].into_iter().chain(rest).collect()
    }
}

struct KeyPrefix<'a>(&'a str);

impl fmt::Display for KeyPrefix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => Ok(()),
            key => write!(f, "{key}: "),
        }
    }
}

/// A broken rule and its place in the text. The key follows from the place.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) rule: String,
    span: Range<usize>,
    missing: Option<&'static str>,
    other: Option<Range<usize>>,
}

impl Problem {
    pub(super) fn new(span: Range<usize>, rule: impl Into<String>) -> Self {
        Self { rule: rule.into(), span, missing: None, other: None }
    }

    /// A key that must be there, under what `span` points at.
    pub(super) fn missing(span: Range<usize>, key: &'static str, rule: impl Into<String>) -> Self {
        Self { missing: Some(key), ..Self::new(span, rule) }
    }

    /// Shows a second place that this one disagrees with.
    pub(super) fn against(self, other: Range<usize>) -> Self {
        Self { other: Some(other), ..self }
    }
}

impl From<toml::de::Error> for Problem {
    fn from(error: toml::de::Error) -> Self {
        let span = error.span().unwrap_or_default();
        Self::new(span, plain(&mask(error.message())))
    }
}

/// Puts a message of serde into the words of the file's author.
fn plain(message: &str) -> String {
    if let Some(rest) = message.strip_prefix("unknown field `") {
        return unknown_key(rest);
    }
    let mismatch =
        message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    // The value itself stays out: it may come from the environment.
    match mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((_, "f64")) => "must be a number".to_owned(),
        Some((_, "a boolean")) => "must be true or false".to_owned(),
        Some((_, "i64")) => "must be a whole number".to_owned(),
        Some((_, "a string")) => "must be a text in quotes".to_owned(),
        Some((_, "a sequence")) => "must be a list".to_owned(),
        Some((_, "a map")) => "must be a table".to_owned(),
        Some((_, expected)) => format!("must be {expected}"),
        None => message.to_owned(),
    }
}

/// `rest` is serde's "field`, expected one of `a`, `b`".
fn unknown_key(rest: &str) -> String {
    let mut names = rest.split('`').step_by(2);
    let key = names.next().unwrap_or_default();
    let expected: Vec<_> = names.filter(|name| !name.is_empty()).collect();
    let nearest = expected
        .iter()
        .map(|name| (strsim::damerau_levenshtein(key, name), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len() / 3 + 1);
    let hint = match nearest {
        Some((_, name)) => format!(", did you mean `{name}`?"),
        None => ",".to_owned(),
    };
    format!("unknown key{hint} expected one of {}", expected.join(", "))
}

/// A file's text with the place of every key, fit to be shown.
pub(super) struct Source {
    name: String,
    shown: String,
    places: Vec<Place>,
}

/// Where a name or a value stands.
struct Place {
    span: Range<usize>,
    key: String,
    is_value: bool,
}

impl Source {
    /// A text that isn't TOML.
    pub(super) fn unparsed(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), shown: calm(&mask(text)), places: Vec::new() }
    }

    pub(super) fn parsed(name: &str, text: &str, tree: &DeTable<'_>) -> Self {
        let mut places = Vec::new();
        collect_table(tree, "", &mut places);
        let mut shown = calm(&mask(text));
        for place in places.iter().filter(|place| place.is_secret()) {
            blacken(&mut shown, place.span.clone());
        }
        Self { name: name.to_owned(), shown, places }
    }

    pub(super) fn show(&self, problem: Problem) -> ConfigError {
        let (line, column) = self.position(problem.span.start);
        let mut key = escaped(self.key_at(&problem.span));
        if let Some(missing) = problem.missing {
            key = dotted(&key, missing);
        }
        let mut rule = escaped(&problem.rule);
        // The one message of the parser that speaks of a key and doesn't name it.
        if rule == "duplicate key"
            && let Some(name) = self.shown.get(problem.span.clone())
        {
            rule = format!("duplicate key {name}");
        }
        ConfigError::Invalid {
            place: format!("{}:{line}:{column}", self.name),
            key,
            snippet: self.snippet(&problem),
            rule,
        }
    }

    fn position(&self, offset: usize) -> (usize, usize) {
        let before = self.shown.get(..offset).unwrap_or(&self.shown);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }

    /// The innermost key around a place.
    fn key_at(&self, span: &Range<usize>) -> &str {
        self.places
            .iter()
            .filter(|Place { span: around, .. }| {
                around.start <= span.start && span.start < around.end && span.end <= around.end
            })
            .min_by_key(|place| (place.span.len(), Reverse(place.key.len())))
            .map_or("", |place| &place.key)
    }

    fn snippet(&self, problem: &Problem) -> String {
        let clamp = |span: &Range<usize>| {
            let end = span.end.min(self.shown.len());
            span.start.min(end)..end
        };
        let mut snippet = Snippet::source(&self.shown)
            .annotation(AnnotationKind::Primary.span(clamp(&problem.span)));
        if let Some(other) = &problem.other {
            snippet = snippet.annotation(AnnotationKind::Context.span(clamp(other)));
        }
        let coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let renderer = if coloured { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[Group::with_level(Level::ERROR).element(snippet)])
    }
}

impl Place {
    /// Whether this is a value under `[store]` or `[admin]` that isn't known to be harmless: a misspelled `url` is a secret too.
    fn is_secret(&self) -> bool {
        let table = self.key.split('.').next().unwrap_or_default();
        let harmless = matches!(&*self.key, "store.op_timeout" | "store.prefix" | "admin.listen");
        self.is_value && matches!(table, "store" | "admin") && !harmless
    }
}

fn collect_table(table: &DeTable<'_>, parent: &str, places: &mut Vec<Place>) {
    for (name, value) in table {
        let key = dotted(parent, name.get_ref());
        places.push(Place { span: name.span(), key: key.clone(), is_value: false });
        collect_value(value, key, places);
    }
}

fn collect_value(value: &Spanned<DeValue<'_>>, key: String, places: &mut Vec<Place>) {
    match value.get_ref() {
        DeValue::Table(table) => collect_table(table, &key, places),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect_value(item, format!("{key}[{index}]"), places);
            }
        }
        _ => {}
    }
    places.push(Place { span: value.span(), key, is_value: !value.get_ref().is_table() });
}

fn dotted(parent: &str, key: &str) -> String {
    match parent {
        "" => key.to_owned(),
        parent => format!("{parent}.{key}"),
    }
}

/// Blackens what may be a password in a text that can't be trusted to parse: the rest of a line after `redis://`, and user and
/// password of any other URL.
fn mask(text: &str) -> String {
    let mut shown = text.to_owned();
    for (colon, separator) in text.match_indices("://") {
        let start = colon + separator.len();
        let line = text[start..].lines().next().unwrap_or_default();
        let scheme = text[..colon].to_ascii_lowercase();
        let secret = if scheme.ends_with("redis") || scheme.ends_with("rediss") {
            line.len()
        } else {
            line.rfind('@').map_or(0, |at| at + 1)
        };
        blacken(&mut shown, start..start + secret);
    }
    shown
}

/// A text that does nothing to a terminal, and doesn't read other than it is.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_tricky(letter) {
            true => out.extend(letter.escape_unicode()),
            false => out.push(letter),
        }
    }
    out
}

/// The same for a text of lines, of which every offset is kept.
fn calm(text: &str) -> String {
    let shown = |letter: char| match letter {
        '\n' | '\r' | '\t' => letter.to_string(),
        letter if is_tricky(letter) => "?".repeat(letter.len_utf8()),
        letter => letter.to_string(),
    };
    text.chars().map(shown).collect()
}

fn is_tricky(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Overwrites a range and keeps every offset.
fn blacken(text: &mut String, range: Range<usize>) {
    let black: String = text[range.clone()]
        .chars()
        .map(|letter| match letter {
            '\n' | '"' | '\'' => letter.to_string(),
            letter => "*".repeat(letter.len_utf8()),
        })
        .collect();
    text.replace_range(range, &black);
}
