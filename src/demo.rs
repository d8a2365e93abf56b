//! `tidegate demo`: a sample provider that really refuses above its limit, and steady traffic to it through real instances.
//!
//! [`Provider::start`] gives the address that the instances proxy to; [`drive`] sends the traffic through them and watches the provider's
//! own count. What is in front of the provider isn't known here: without a proxy the same traffic makes it answer 429.

use std::{
    fmt,
    io::{self, Write},
    net::SocketAddr,
    pin::pin,
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, timeout_at},
};

mod provider;
mod traffic;

use provider::Counts;
pub use provider::Provider;
use traffic::{Client, Tally};

/// What the demonstration does.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long the traffic lasts.
    pub duration: Duration,
    /// How many clients send one request after the other, in all. More than the provider's slots, so that a queue forms.
    pub clients: usize,
    /// Whether the table is drawn over itself; otherwise there is a line every second.
    pub terminal: bool,
}

impl Options {
    /// Twenty seconds, four clients for each slot.
    pub fn for_slots(slots: usize) -> Self {
        Self {
            duration: Duration::from_secs(20),
            clients: slots * 4,
            terminal: io::IsTerminal::is_terminal(&io::stdout()),
        }
    }
}

/// What came of it. Its text begins with the highest count the provider saw.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The most streams the provider had open at once, refused ones included.
    pub highest: usize,
    /// The most it allows.
    pub allowed: usize,
    /// Streams the clients read to their end.
    pub served: u64,
    /// The provider's own refusals: what the proxy is there to prevent.
    pub too_many: u64,
    /// The proxy's refusals.
    pub refused: u64,
    /// Requests that ended in any other way.
    pub failed: u64,
    /// Half of the requests waited no longer for their answer's head.
    pub wait_p50: Duration,
    /// Ninety-nine of a hundred waited no longer.
    pub wait_p99: Duration,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { highest, allowed, .. } = self;
        writeln!(f, "highest count the provider saw: {highest} of {allowed} allowed")?;
        writeln!(
            f,
            "{} streams served, {} refused by the provider (429), {} refused by Tidegate (503), {} failed",
            self.served, self.too_many, self.refused, self.failed
        )?;
        writeln!(
            f,
            "wait for a slot: p50 {} ms, p99 {} ms",
            self.wait_p50.as_millis(),
            self.wait_p99.as_millis()
        )
    }
}

/// Sends traffic through the instances, one client after the other to each, until the time is over or Ctrl-C. The caller prints the
/// summary.
pub async fn drive(
    provider: Provider,
    instances: Vec<SocketAddr>,
    options: Options,
) -> io::Result<Summary> {
    let (tally, start) = (Tally::default(), Instant::now());
    let mut clients = JoinSet::new();
    for instance in instances.iter().cycle().take(options.clients) {
        clients.spawn(Client::new(*instance, tally.clone()).run());
    }
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    let mut display = Display {
        slots: provider.slots(),
        instances: instances.len(),
        drawn: false,
        options: &options,
    };
    let second = Duration::from_secs(1);
    let mut second = interval_at(start + second, second);
    second.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let end = start + options.duration;
    loop {
        tokio::select! {
            interrupted = &mut interrupted => {
                interrupted?;
                break;
            }
            tick = timeout_at(end, second.tick()) => match tick {
                Ok(now) => display.show(now - start, provider.counts(), &tally)?,
                Err(_) => break,
            },
        }
    }
    let (counts, total) = (provider.counts(), tally.total());
    clients.shutdown().await;
    Ok(Summary {
        highest: counts.highest,
        allowed: provider.slots(),
        served: total.served,
        too_many: counts.refused,
        refused: total.refused,
        failed: total.failed,
        wait_p50: total.wait(50),
        wait_p99: total.wait(99),
    })
}

/// What is shown while it runs.
struct Display<'a> {
    slots: usize,
    instances: usize,
    drawn: bool,
    options: &'a Options,
}

impl Display<'_> {
    fn show(&mut self, at: Duration, provider: Counts, tally: &Tally) -> io::Result<()> {
        let (total, recent) = (tally.total(), tally.take_recent());
        let waiting = tally.waiting();
        let Self { slots, instances, .. } = self;
        let Options { duration, clients, terminal } = self.options;
        let (at, duration) = (at.as_secs(), duration.as_secs());
        let (p50, p99) = (recent.wait(50).as_millis(), recent.wait(99).as_millis());
        let Counts { open, highest, refused: too_many } = provider;
        let (served, refused, failed) = (total.served, total.refused, total.failed);
        let mut out = io::stdout().lock();
        if !terminal {
            return writeln!(
                out,
                "{at:>4} s  provider open {open} highest {highest} of {slots}, 429s {too_many} | clients waiting {waiting} served {served} refused {refused} failed {failed} | wait p50 {p50} ms p99 {p99} ms"
            );
        }
        if self.drawn {
            // Back to the table's first line.
            write!(out, "\x1b[5A")?;
        }
        self.drawn = true;
        let bar = "█".repeat(open.min(*slots)) + &"░".repeat(slots.saturating_sub(open));
        for line in [
            format!(
                "{instances} instances, one limit of {slots} slots, {clients} clients, {at} of {duration} s"
            ),
            format!("provider   open {open:<5} {bar}"),
            format!("           highest {highest} of {slots} allowed, {too_many} refused (429)"),
            format!(
                "clients    waiting {waiting:<5} served {served:<7} refused {refused} (503), failed {failed}"
            ),
            format!("wait       p50 {p50} ms, p99 {p99} ms in the last second"),
        ] {
            writeln!(out, "\x1b[2K{line}")?;
        }
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(clients: usize) -> Options {
        Options { duration: Duration::from_millis(1500), clients, terminal: false }
    }

    #[tokio::test]
    async fn the_provider_refuses_above_its_slots() {
        let provider = Provider::start(2).await.unwrap();
        let addr = provider.addr();
        let summary = drive(provider, vec![addr], options(8)).await.unwrap();
        assert!(summary.highest > 2, "{summary}");
        assert!(summary.too_many > 0, "{summary}");
        assert!(summary.served > 0, "{summary}");
    }

    #[tokio::test]
    async fn within_its_slots_it_serves_everyone() {
        let provider = Provider::start(3).await.unwrap();
        let addr = provider.addr();
        let summary = drive(provider, vec![addr], options(3)).await.unwrap();
        assert_eq!((summary.highest, summary.too_many), (3, 0), "{summary}");
        assert_eq!((summary.refused, summary.failed), (0, 0), "{summary}");
        let text = summary.to_string();
        let first = text.lines().next();
        assert_eq!(first, Some("highest count the provider saw: 3 of 3 allowed"));
    }
}
