//! The command: a table of contents.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use tidegate::{
    app, check,
    cli::{self, Command},
    config::{Config, ConfigError, keys},
    reload::Source,
    size,
    systemd::Sockets,
};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Wrong usage or configuration, as clap has it.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let sockets = Sockets::take();
    let command = cli::parse();
    let log = app::init();
    match command {
        Command::Run(run) => {
            let (file, threads) = (run.file(), run.threads);
            let mut source = Source::new(file, move || run.load());
            let sockets = match sockets {
                Ok(sockets) => sockets,
                Err(error) => {
                    eprintln!("tidegate: the sockets that were handed over can't be used: {error}");
                    return ExitCode::FAILURE;
                }
            };
            with_config(source.load(), |config| app::main(config, source, sockets, threads, log))
        }
        Command::Check(options) if options.keys => write(keys::page().as_bytes()),
        Command::Check(options) => with_config(Config::load(options.config.path()), |config| {
            print!("{}", check::report(&config));
            ExitCode::SUCCESS
        }),
        Command::Demo(options) => app::demo(&options),
        Command::Status(options) => app::status(options),
        Command::Holders(options) => app::holders(options),
        Command::Evict(options) => app::evict(options),
        Command::Limit(options) => app::limit(options),
        Command::Size(options) => {
            print!("{}", size::report(&options.known()));
            ExitCode::SUCCESS
        }
        Command::Completions(options) => write(&cli::completions(options.shell)),
        Command::Man => write(&cli::manual().expect("writing to memory can't fail")),
    }
}

/// Writes to a reader who may have seen enough, such as `head`.
fn write(text: &[u8]) -> ExitCode {
    match io::stdout().write_all(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("tidegate: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

fn with_config(
    config: Result<Config, ConfigError>,
    then: impl FnOnce(Config) -> ExitCode,
) -> ExitCode {
    match config {
        Ok(config) => then(config),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(EXIT_USAGE)
        }
    }
}
