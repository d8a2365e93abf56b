//! What operators say on the command line to an instance that runs.

use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

use super::on_runtime;
use crate::{
    cli,
    remote::{self, Ink, Remote, RemoteError},
};

/// Shows every limit of a running instance, once or over and over.
pub fn status(options: cli::Status) -> ExitCode {
    on_runtime(async {
        let instance = Remote::new(options.admin.url, None);
        if let Some(every) = options.watch {
            return watch(&instance, every, options.json).await;
        }
        let status = instance.status().await?;
        if options.json {
            println!("{status:#}");
        } else {
            print!("{}", remote::table(&status, Ink::of_stdout()));
        }
        Ok::<_, RemoteError>(())
    })
}

/// Until it is interrupted, or nobody reads any more. An instance that is away for a moment is waited for.
async fn watch(instance: &Remote, every: Duration, json: bool) -> Result<(), RemoteError> {
    let (ink, redraws) = (Ink::of_stdout(), io::stdout().is_terminal() && !json);
    loop {
        let text = match instance.status().await {
            Ok(status) if json => format!("{status}\n"),
            Ok(status) => remote::table(&status, ink) + if redraws { "" } else { "\n" },
            Err(error @ RemoteError::Unreachable(..)) => {
                let text = format!("{error}; trying again\n");
                if redraws {
                    text
                } else {
                    // Whoever reads figures from a pipe gets nothing else.
                    eprint!("{text}");
                    String::new()
                }
            }
            Err(error) => return Err(error),
        };
        let clear = if redraws { "\x1b[H\x1b[2J" } else { "" };
        let mut out = io::stdout().lock();
        if write!(out, "{clear}{text}").and_then(|()| out.flush()).is_err() {
            return Ok(());
        }
        drop(out);
        tokio::time::sleep(every).await;
    }
}

/// Shows a limit of a running instance, or changes it first.
pub fn limit(options: cli::Limit) -> ExitCode {
    on_runtime(async {
        let change = options.change();
        let instance = Remote::new(options.admin.url, options.token);
        let limit = instance.limit(&options.limit, change).await?;
        print!("{}", remote::line(&options.limit, &limit));
        Ok::<_, RemoteError>(())
    })
}

/// Lists who has slots of a limit.
pub fn holders(options: cli::Holders) -> ExitCode {
    on_runtime(async {
        let listed = Remote::new(options.admin.url, None).holders(&options.limit).await?;
        if options.json {
            println!("{listed:#}");
        } else {
            print!("{}", remote::holders(&listed, Ink::of_stdout()));
        }
        Ok::<_, RemoteError>(())
    })
}

/// Ends the request of a holder.
pub fn evict(options: cli::Evict) -> ExitCode {
    on_runtime(async {
        let instance = Remote::new(options.admin.url, options.token);
        let answer = instance.evict(&options.limit, options.holder, options.force).await?;
        print!("{}", remote::evicted(&answer));
        Ok::<_, RemoteError>(())
    })
}
