//! Names of endpoints, looked up again and again beside the requests.

use std::{io, net::SocketAddr, sync::Weak, time::Duration};

use super::endpoints::Endpoints;

/// How long one lookup may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How soon a lookup that failed is repeated, if that is sooner than the next one.
const AGAIN: Duration = Duration::from_secs(1);

/// What to look up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Name {
    async fn look_up(self) -> io::Result<Vec<SocketAddr>> {
        let found = tokio::net::lookup_host((self.host.as_str(), self.port));
        let found = tokio::time::timeout(PATIENCE, found).await.map_err(io::Error::other)?;
        found.map(Iterator::collect)
    }
}

/// Tells the endpoints what a name stands for, for as long as they exist.
pub(super) async fn follow(endpoints: Weak<Endpoints>, entry: usize, name: Name, every: Duration) {
    follow_with(endpoints, entry, every, || name.clone().look_up()).await;
}

async fn follow_with<F: Future<Output = io::Result<Vec<SocketAddr>>>>(
    endpoints: Weak<Endpoints>,
    entry: usize,
    every: Duration,
    look_up: impl Fn() -> F,
) {
    let mut was_found = None;
    loop {
        let found = look_up().await.and_then(|addrs| match addrs.is_empty() {
            true => Err(io::Error::other("no address")),
            false => Ok(addrs),
        });
        let Some(endpoints) = endpoints.upgrade() else {
            return;
        };
        let (upstream, endpoint) = endpoints.names(entry);
        match &found {
            Err(error) if was_found != Some(false) => {
                tracing::warn!(upstream, endpoint, %error, "the name can't be looked up");
            }
            Ok(_) if was_found == Some(false) => {
                tracing::info!(upstream, endpoint, "the name can be looked up again");
            }
            _ => {}
        }
        endpoints.found(entry, found.as_deref().ok(), was_found.is_none());
        drop(endpoints);
        was_found = Some(found.is_ok());
        tokio::time::sleep(if found.is_ok() { every } else { every.min(AGAIN) }).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What the name stands for, in the hands of the test.
    type Answer = Arc<Mutex<io::Result<Vec<SocketAddr>>>>;

    fn named() -> (Arc<Endpoints>, Answer) {
        let config = super::super::tests::config("http://127.0.0.1:1");
        let endpoints = Endpoints::awaiting(&config);
        let answer: Answer = Arc::new(Mutex::new(Ok(Vec::new())));
        let shown = Arc::clone(&answer);
        let every = Duration::from_secs(30);
        let look_up = move || {
            std::future::ready(match &*shown.lock().unwrap() {
                Ok(addrs) => Ok(addrs.clone()),
                Err(error) => Err(io::Error::from(error.kind())),
            })
        };
        tokio::spawn(follow_with(Arc::downgrade(&endpoints), 0, every, look_up));
        (endpoints, answer)
    }

    fn addrs(last: &[u8]) -> Vec<SocketAddr> {
        last.iter().map(|last| SocketAddr::from(([127, 0, 0, *last], 80))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn g59_a_name_is_looked_up_again_and_all_its_addresses_are_used() {
        let (endpoints, answer) = named();
        *answer.lock().unwrap() = Ok(addrs(&[1, 2]));
        assert!(endpoints.first().await.is_some());
        assert_eq!(endpoints.addrs(), addrs(&[1, 2]));
        let before = endpoints.choose().unwrap();
        *answer.lock().unwrap() = Ok(addrs(&[2, 3, 4]));
        tokio::time::sleep(Duration::from_secs(29)).await;
        assert_eq!(endpoints.addrs(), addrs(&[1, 2]));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(endpoints.addrs(), addrs(&[2, 3, 4]));
        drop(before);
    }

    #[tokio::test(start_paused = true)]
    async fn g59_a_lookup_that_fails_changes_nothing_and_is_soon_repeated() {
        let (endpoints, answer) = named();
        *answer.lock().unwrap() = Ok(addrs(&[1]));
        assert!(endpoints.first().await.is_some());
        *answer.lock().unwrap() = Err(io::ErrorKind::NotFound.into());
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(endpoints.addrs(), addrs(&[1]));
        *answer.lock().unwrap() = Ok(addrs(&[7]));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(endpoints.addrs(), addrs(&[7]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_stands_for_nothing_is_not_waited_for() {
        let (endpoints, answer) = named();
        *answer.lock().unwrap() = Err(io::ErrorKind::NotFound.into());
        let began = tokio::time::Instant::now();
        assert!(endpoints.first().await.is_none());
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
