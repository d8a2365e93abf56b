//! Reads the command line.

use std::{
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use clap_mangen::Man;
use uuid::Uuid;

use crate::{
    config::{AdminListen, Config, ConfigError, MOST_SLOTS, QuickOptions, Secret},
    remote::{AdminUrl, Change},
    size::{self, Known},
};

const DEFAULT_CONFIG: &str = "proxy.toml";

/// Returns what the command line asks for. A wrong one, `--help` and `--version` end the process.
pub fn parse() -> Command {
    command_of(Cli::parse())
}

#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    about = "A reverse proxy that holds a fleet-wide limit on requests in flight",
    long_about = "Tidegate is a reverse proxy that holds a fleet-wide limit on requests in flight. A request takes a slot before it \
                  leaves for the upstream and gives it back after the answer's last byte; when every slot is taken it waits in a \
                  bounded queue, or is refused with Retry-After. Instances that share a Redis share the slots.",
    after_help = "\
Examples:
  tidegate                                 run with proxy.toml
  tidegate check --config proxy.toml       explain the file, or say what is wrong with it
  tidegate run --upstream http://127.0.0.1:3000 --slots 20
                                           run without a file
  tidegate run --upstream http://127.0.0.1:3000 --slots 20 --store redis://127.0.0.1:6379
                                           the same on several machines: 20 in all
  tidegate demo                            watch a limit hold; nothing to install
  tidegate size --rate 400/s --hold 100ms  how many slots that takes
  tidegate status --watch                  what the limits of a running instance do, live
  tidegate holders llm                     who has the slots of a limit
  tidegate limit llm --slots 30            change a limit while it runs
  tidegate check --keys                    every key of the file, with its default

Exit status: 0 done, 1 failed at run time, 2 wrong usage or configuration."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the proxy (also without any subcommand)
    Run(Run),
    /// Checks a configuration file and explains it: routes, limits, figures, warnings
    Check(Check),
    /// Shows a limit at work: a sample upstream that fails above N, two instances, traffic, a live table
    Demo(Demo),
    /// Shows every limit of a running instance
    Status(Status),
    /// Lists who has the slots of a limit, the longest first
    Holders(Holders),
    /// Ends the request of one holder, wherever in the fleet it runs
    Evict(Evict),
    /// Shows a limit of a running instance, or changes its slots over the whole fleet
    Limit(Limit),
    /// Works out slots, rate or hold time from the other two, by Little's law
    Size(Size),
    /// Prints what lets a shell complete the command line
    Completions(Completions),
    /// Prints the manual page, for `man -l -`
    Man,
}

/// `tidegate completions`
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "\
Examples:
  tidegate completions bash > /usr/share/bash-completion/completions/tidegate
  tidegate completions zsh > /usr/share/zsh/vendor-completions/_tidegate
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish")]
pub struct Completions {
    /// Which shell
    pub shell: Shell,
}

/// The configuration file, by the flag or by itself.
#[derive(Args, Debug, Default)]
pub struct ConfigAt {
    /// Configuration file [default: proxy.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The same without the flag
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
}

/// `tidegate run`
#[derive(Args, Debug, Default)]
#[command(after_help = "\
Examples:
  tidegate run --config /etc/tidegate/proxy.toml
  tidegate run --listen 0.0.0.0:8080 --upstream http://127.0.0.1:3000 --slots 20
  tidegate run --upstream https://api.example.com --slots 50 --store redis://127.0.0.1:6379 --admin-listen none")]
pub struct Run {
    #[command(flatten)]
    config: ConfigAt,

    /// Runs without a file, in front of this http:// or https:// URL
    #[arg(long, value_name = "URL", requires = "slots", conflicts_with_all = ["config", "file"])]
    upstream: Option<String>,

    /// Requests in flight, fleet-wide: 0 to 1000000
    #[arg(long, value_name = "N", requires = "upstream")]
    slots: Option<u32>,

    /// Address and port for clients [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", requires = "upstream")]
    listen: Option<String>,

    /// Where slots are counted: memory: (per process), redis://…, rediss://… or redis+sentinel://… (fleet-wide) [default: memory:]
    #[arg(long, value_name = "URL", requires = "upstream", value_parser = secret)]
    store: Option<Secret>,

    /// Address and port for operators, or none [default: the file's, or 127.0.0.1:9900]
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<AdminListen>,

    /// Worker threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
}

/// `tidegate check`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate check                    proxy.toml
  tidegate check /etc/tidegate/proxy.toml
  tidegate check --keys")]
pub struct Check {
    /// Which file.
    #[command(flatten)]
    pub config: ConfigAt,

    /// Prints every key with its default and what it does, and checks nothing
    #[arg(long, conflicts_with_all = ["config", "file"])]
    pub keys: bool,
}

/// `tidegate demo`
#[derive(Args, Debug)]
pub struct Demo {
    /// Slots of the limit, and how many requests the sample upstream bears
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slots: u32,

    /// How long it runs, with a unit: 20s, 2m
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = humantime::parse_duration)]
    pub duration: Duration,

    /// Prints lines instead of a live table
    #[arg(long)]
    pub plain: bool,

    /// Only runs the sample upstream, at this address and port, until it is stopped
    #[arg(long, value_name = "ADDR")]
    pub provider_only: Option<SocketAddr>,
}

/// Which instance to ask.
#[derive(Args, Debug)]
pub struct AdminAt {
    /// An instance's admin listener
    #[arg(long = "admin", value_name = "URL", default_value = "http://127.0.0.1:9900")]
    pub url: AdminUrl,
}

/// `tidegate status`
#[derive(Args, Debug)]
#[command(after_help = "\
SLOTS, IN USE and WAITING are the whole fleet's. OLDEST is the longest wait, QUEUE how long the queue takes to empty, RATE how
many requests ask this instance in a second, HOLD how long one has its slot, LONGEST how long one of this instance has had it by
now, NEEDS the slots that takes by Little's law (RATE x HOLD), REFUSED what this instance refused since its start. Slots with a *
were set by an operator. While the store is away SLOTS and IN USE are of the time when it was last heard of, which is said, and
WAITING is this instance's. Colours need a terminal, and no NO_COLOR.

Examples:
  tidegate status                   once
  tidegate status --watch           every second; --watch 5s every five
  tidegate status --json | jq .limits.llm")]
pub struct Status {
    /// Prints JSON instead of a table; with --watch one object a line
    #[arg(long)]
    pub json: bool,

    /// Goes on, every second or as often as said: 500ms, 5s
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = every)]
    pub watch: Option<Duration>,

    /// Which instance.
    #[command(flatten)]
    pub admin: AdminAt,
}

/// `tidegate holders`
#[derive(Args, Debug)]
#[command(after_help = "\
A holder is the ID under which a request has its slots. With a key, KEY is the digest of its value. A plain client is a program
that takes slots in Redis without Tidegate; its AGE counts from when it last renewed.

Examples:
  tidegate holders llm
  tidegate holders llm --json | jq '.holders[] | select(.age_ms > 60000)'")]
pub struct Holders {
    /// The limit's name
    pub limit: String,

    /// Prints JSON instead of a table
    #[arg(long)]
    pub json: bool,

    /// Which instance.
    #[command(flatten)]
    pub admin: AdminAt,
}

/// `tidegate evict`
#[derive(Args, Debug)]
#[command(after_help = "\
The instance that runs the request cuts it, and its client sees the answer break off. The slot is free once the upstream's
connection is closed, so the upstream never sees more than N. What an instance left behind that is gone ends with its lease;
--force frees it at once, whatever the upstream still does for it.

Examples:
  tidegate holders llm              shows the ids
  tidegate evict llm 0198c2f0-7d5e-7c3a-9b7e-2f4f6a1d8e10")]
pub struct Evict {
    /// The limit's name
    pub limit: String,

    /// The holder, as `tidegate holders` lists it
    pub holder: Uuid,

    /// Frees at once what an instance left behind that is gone
    #[arg(long)]
    pub force: bool,

    /// The token under `[admin]`, where there is one
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true, value_parser = secret)]
    pub token: Option<Secret>,

    /// Which instance.
    #[command(flatten)]
    pub admin: AdminAt,
}

/// `tidegate limit`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate limit llm                shows it
  tidegate limit llm --slots 30     over the whole fleet, until --reset or a changed file
  tidegate limit llm --reset        as configured again")]
pub struct Limit {
    /// The limit's name
    pub limit: String,

    /// Slots from now on: 0 to 1000000; 0 admits nobody
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=i64::from(MOST_SLOTS)))]
    slots: Option<u32>,

    /// Goes back to what is configured
    #[arg(long, conflicts_with = "slots")]
    reset: bool,

    /// The token under `[admin]`, where there is one
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true, value_parser = secret)]
    pub token: Option<Secret>,

    /// Which instance.
    #[command(flatten)]
    pub admin: AdminAt,
}

/// `tidegate size`
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "\
Examples:
  tidegate size --rate 400/s --hold 100ms            how many slots it takes
  tidegate size --slots 20 --hold 100ms              which rate they serve
  tidegate size --slots 20 --rate 400/s              which hold time they bear
  tidegate size --rate 400/s --hold 100ms --slots 20 whether they are enough")]
pub struct Size {
    /// Requests on average: 400/s, 90/m, 1000/h
    #[arg(long, value_name = "RATE", value_parser = size::rate, required_unless_present_all = ["slots", "hold"])]
    rate: Option<f64>,

    /// How long one request takes on average: 100ms, 2s
    #[arg(long, value_name = "TIME", value_parser = hold, required_unless_present_all = ["slots", "rate"])]
    hold: Option<Duration>,

    /// The slots that there are
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SLOTS)))]
    slots: Option<u32>,

    /// How far the rate rises above its average: 1 to 100
    #[arg(long, value_name = "FACTOR", default_value_t = 1.5, value_parser = burst)]
    burst: f64,
}

impl Limit {
    /// Returns what is to be changed, if anything.
    pub fn change(&self) -> Option<Change> {
        self.slots.map(Change::Slots).or(self.reset.then_some(Change::Reset))
    }
}

impl Size {
    /// Returns what is known.
    pub fn known(&self) -> Known {
        Known { rate: self.rate, hold: self.hold, slots: self.slots, burst: self.burst }
    }
}

impl ConfigAt {
    /// Returns the file to read.
    pub fn path(&self) -> &Path {
        self.config.as_deref().or(self.file.as_deref()).unwrap_or(Path::new(DEFAULT_CONFIG))
    }
}

impl Run {
    /// Returns the file to read; none where flags stand for it.
    pub fn file(&self) -> Option<PathBuf> {
        match self.upstream {
            Some(_) => None,
            None => Some(self.config.path().to_owned()),
        }
    }

    /// Reads and checks the configuration, of the file or of the flags.
    pub fn load(&self) -> Result<Config, ConfigError> {
        let config = match (&self.upstream, self.slots) {
            (Some(upstream), Some(slots)) => {
                return Config::quick(self.quick(upstream, slots));
            }
            _ => Config::load(self.config.path())?,
        };
        match self.admin_listen {
            Some(admin_listen) => config.with_admin_listen(admin_listen),
            None => Ok(config),
        }
    }

    fn quick(&self, upstream: &str, slots: u32) -> QuickOptions {
        let listen = self.listen.as_deref().unwrap_or("127.0.0.1:8080");
        let store = self.store.clone();
        QuickOptions {
            listen: listen.to_owned(),
            upstream: upstream.to_owned(),
            slots,
            store_url: store.unwrap_or_else(|| Secret("memory:".to_owned())),
            admin_listen: self.admin_listen,
        }
    }
}

/// What lets a shell complete the command line.
pub fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tidegate", &mut script);
    script
}

/// The manual page: the command, then each subcommand, in roff.
///
/// # Errors
/// None, as it writes to memory; the signature is that of its parts.
pub fn manual() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let mut command = Cli::command();
    command.build();
    let man = Man::new(command.clone());
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    for subcommand in command.get_subcommands().filter(|command| command.get_name() != "help") {
        let name = format!("tidegate {}", subcommand.get_name());
        writeln!(page, ".SH {}", name.to_uppercase())?;
        let man = Man::new(subcommand.clone());
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
        man.render_extra_section(&mut page)?;
    }
    man.render_extra_section(&mut page)?;
    Ok(page)
}

fn command_of(cli: Cli) -> Command {
    cli.command.unwrap_or_else(|| Command::Run(Run::default()))
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=1024) => Ok(count),
        _ => Err("must be a whole number from 1 to 1024".to_owned()),
    }
}

fn hold(text: &str) -> Result<Duration, String> {
    let hold = humantime::parse_duration(text).ok().filter(|hold| !hold.is_zero());
    hold.ok_or_else(|| "must be a time above 0, such as 100ms or 2s".to_owned())
}

fn every(text: &str) -> Result<Duration, String> {
    let every = humantime::parse_duration(text).ok();
    let every = every.filter(|every| *every >= Duration::from_millis(100));
    every.ok_or_else(|| "must be a time of 100ms or more, such as 500ms or 5s".to_owned())
}

fn burst(text: &str) -> Result<f64, String> {
    let burst = text.parse().ok().filter(|burst| (1.0..=100.0).contains(burst));
    burst.ok_or_else(|| "must be a number from 1 to 100".to_owned())
}

// Any text will do: the checks of the configuration name the flag and hide the password.
fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    fn run(args: &[&str]) -> Run {
        let args = ["tidegate"].iter().chain(args);
        match command_of(Cli::try_parse_from(args).unwrap()) {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_subcommand_runs_the_default_file() {
        for args in [&[][..], &["run"][..]] {
            assert_eq!(run(args).file(), Some("proxy.toml".into()));
        }
    }

    #[test]
    fn a_file_is_named_with_its_flag_or_without() {
        assert_eq!(run(&["run", "--config", "a.toml"]).file(), Some("a.toml".into()));
        assert_eq!(run(&["run", "a.toml"]).file(), Some("a.toml".into()));
        for args in [&["check", "--config", "a.toml"][..], &["check", "a.toml"]] {
            let args = ["tidegate"].iter().chain(args);
            match command_of(Cli::try_parse_from(args).unwrap()) {
                Command::Check(check) => assert_eq!(check.config.path(), Path::new("a.toml")),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn flags_stand_for_a_file() {
        let run = run(&["run", "--upstream", "http://127.0.0.1:3000", "--slots", "7"]);
        assert_eq!(run.file(), None);
        let config = run.load().unwrap();
        assert_eq!(config.limits[0].slots, 7);
        assert_eq!(config.server.listen.to_string(), "127.0.0.1:8080");
    }

    #[test]
    fn admin_listen_overrides_the_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/proxy.toml");
        let off = run(&["run", "--config", file, "--admin-listen", "none"]);
        assert!(off.load().unwrap().admin.is_none());
        let same = run(&["run", "--config", file, "--admin-listen", "127.0.0.1:8080"]);
        let error = same.load().unwrap_err().to_string();
        assert!(error.starts_with("--admin-listen: must differ"), "{error}");
    }

    #[test]
    fn wrong_usage_exits_with_2() {
        let cases: [&[&str]; 23] = [
            &["run", "a", "--upstream", "http://a", "--slots", "1"],
            &["run", "a", "--config", "a"],
            &["check", "a", "b"],
            &["check", "a", "--keys"],
            &["run", "--slots", "7"],
            &["run", "--upstream", "http://a"],
            &["run", "--config", "a", "--upstream", "http://a", "--slots", "1"],
            &["run", "--admin-listen", "nowhere"],
            &["demo", "--duration", "20"],
            &["sing"],
            &["limit"],
            &["limit", "a", "--slots", "1", "--reset"],
            &["limit", "a", "--slots", "1000001"],
            &["status", "--admin", "127.0.0.1:9900"],
            &["status", "--watch", "1ms"],
            &["evict", "llm"],
            &["evict", "llm", "not-a-uuid"],
            &["size"],
            &["size", "--slots", "5"],
            &["size", "--rate", "400/s"],
            &["size", "--rate", "400", "--hold", "1s"],
            &["size", "--rate", "400/s", "--hold", "0s"],
            &["size", "--rate", "4/s", "--hold", "1s", "--burst", "0.5"],
        ];
        for args in cases {
            let args = ["tidegate"].iter().chain(args);
            let error = Cli::try_parse_from(args).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }

    #[test]
    fn a_limit_is_shown_set_or_reset() {
        let change = |args: &[&str]| {
            let args = ["tidegate", "limit", "llm"].iter().chain(args);
            match command_of(Cli::try_parse_from(args).unwrap()) {
                Command::Limit(limit) => limit.change(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(change(&[]), None);
        assert_eq!(change(&["--slots", "0"]), Some(Change::Slots(0)));
        assert_eq!(change(&["--reset", "--admin", "http://a:1"]), Some(Change::Reset));
    }

    #[test]
    fn two_of_three_make_a_size() {
        for args in [
            ["--rate", "4/s", "--hold", "1s"],
            ["--slots", "4", "--hold", "1s"],
            ["--slots", "4", "--rate", "4/s"],
        ] {
            let args = ["tidegate", "size"].iter().chain(&args);
            match command_of(Cli::try_parse_from(args).unwrap()) {
                Command::Size(size) => assert!(size::report(&size.known()).contains("burst")),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn help_tells_every_flag() {
        let error = Cli::try_parse_from(["tidegate", "run", "--help"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp);
        let help = error.to_string();
        for flag in [
            "--config",
            "--upstream",
            "--slots",
            "--listen",
            "--store",
            "--admin-listen",
            "Examples:",
        ] {
            assert!(help.contains(flag), "{flag} in {help}");
        }
    }

    #[test]
    fn the_manual_and_the_completions_tell_every_flag() {
        let manual = String::from_utf8(manual().unwrap()).unwrap();
        assert!(manual.contains(".TH tidegate 1"), "{manual}");
        let command = Cli::command();
        let flags = command.get_subcommands().flat_map(|command| command.get_arguments());
        let flags: Vec<_> = flags.filter_map(|flag| flag.get_long()).collect();
        assert!(flags.len() > 15, "{flags:?}");
        for flag in flags {
            // A hyphen is written `\\-` in roff.
            let in_roff = flag.replace('-', "\\-");
            assert!(manual.contains(&in_roff), "{flag} in {manual}");
            for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
                let script = String::from_utf8(completions(shell)).unwrap();
                assert!(script.contains(flag), "{flag} in {shell}");
            }
        }
    }

    #[test]
    fn the_store_stays_secret() {
        let run = run(&[
            "run",
            "--upstream",
            "http://a",
            "--slots",
            "1",
            "--store",
            "redis://:hunter2@b:x",
        ]);
        assert!(!format!("{run:?}").contains("hunter2"));
        let error = run.load().unwrap_err().to_string();
        assert!(error.starts_with("--store: must be"), "{error}");
        assert!(!error.contains("hunter2"));
    }
}
