//! What every key of the file means: `docs/configuration.md` is this, and `tidegate check --keys` prints it. A test walks through
//! all that the parser accepts, compares each default with the one in force, and tries each example.

use std::fmt::Write;

mod limits;
mod process;
mod routes;
#[cfg(test)]
mod tests;

/// A table of the file and its keys.
#[derive(Debug)]
pub struct Section {
    /// As it is written in the file.
    pub title: &'static str,
    /// What goes in front of its keys.
    pub path: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Every key that it may hold.
    pub keys: &'static [Key],
}

/// A key.
#[derive(Debug)]
pub struct Key {
    /// Below the section's path.
    pub name: &'static str,
    /// What kind of value, in which unit, and between which bounds.
    pub takes: &'static str,
    /// What holds without it.
    pub default: Without,
    /// A value that changes something.
    pub example: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

/// What holds without a key.
#[derive(Clone, Copy, Debug)]
pub enum Without {
    /// The same as with this value.
    Is(&'static str),
    /// It depends on other keys.
    Depends(&'static str),
    /// It must be given.
    Required,
    /// Nothing.
    Off,
}

use Without::{Depends, Is, Off, Required};

const fn key(
    name: &'static str,
    takes: &'static str,
    default: Without,
    example: &'static str,
    meaning: &'static str,
) -> Key {
    Key { name, takes, default, example, meaning }
}

/// Every section, in the order of `proxy.toml`.
pub fn sections() -> impl Iterator<Item = &'static Section> {
    [process::SECTIONS, limits::SECTIONS, routes::SECTIONS].into_iter().flatten()
}

/// `docs/configuration.md`.
pub fn page() -> String {
    let mut page = String::from(
        "# Every key\n\n\
         `tidegate check --keys` prints this page, `tidegate check` explains a file, and [proxy.toml](../proxy.toml) is one to begin \
         with.\n\n\
         A *time* is a text with a unit: `\"250ms\"`, `\"10s\"`, `\"5m\"`, `\"1h\"`, at most 365 days. An *address* is an IP address and \
         a port. A *file* counts from the configuration's folder, under `[store]` from the working directory. `${VAR}` in any text is replaced from the environment. A key that isn't known, and a value out of bounds, are errors \
         that name the place. *Required* counts where the table is written at all.\n",
    );
    for Section { title, purpose, keys, .. } in sections() {
        let _ = write!(
            page,
            "\n## `{title}`\n\n{purpose}\n\n| key | value | default | example | meaning |\n|---|---|---|---|---|\n"
        );
        for Key { name, takes, default, example, meaning } in *keys {
            let default = match default {
                Is(value) => format!("`{value}`"),
                Depends(on) => (*on).to_owned(),
                Required => "required".to_owned(),
                Off => "–".to_owned(),
            };
            let _ = writeln!(page, "| `{name}` | {takes} | {default} | `{example}` | {meaning} |");
        }
    }
    page
}
