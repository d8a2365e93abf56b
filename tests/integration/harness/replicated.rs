//! A primary and its replica, and a Sentinel that is told which of them counts.

use super::{Redis, Relay, Sentinels, eventually};

/// A primary that needs its replica, which hears it through a relay.
pub(crate) struct Replicated {
    pub(crate) primary: Redis,
    pub(crate) replica: Redis,
    relay: Relay,
    sentinels: Sentinels,
}

impl Replicated {
    pub(crate) async fn spawn() -> Self {
        let needs = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "2"];
        let primary = Redis::spawn_with(&needs).await;
        let relay = Relay::to(primary.addr()).await;
        let port = relay.addr().port().to_string();
        // Where it says to be nobody is, or the Sentinel would have it hear the primary itself.
        let hears = ["--replicaof", "127.0.0.1", &port, "--replica-announce-port", "1"];
        let replica = Redis::spawn_with(&hears).await;
        eventually("the replica is in step", async || {
            let info: String = replica.cli(&["INFO", "replication"]).await;
            info.contains("master_link_status:up")
        })
        .await;
        let sentinels = Sentinels::spawn(1, &primary).await;
        Self { primary, replica, relay, sentinels }
    }

    /// Where the Sentinel is asked.
    pub(crate) fn url(&self) -> String {
        self.sentinels.url()
    }

    /// The replica hears nothing more, though the primary hears it well.
    pub(crate) fn cut_off(&self) {
        self.relay.lose_replies();
    }

    /// The replica is the primary from now on.
    pub(crate) async fn promote(&self) {
        self.replica.cli::<()>(&["REPLICAOF", "NO", "ONE"]).await;
        self.sentinels.cli::<()>(0, &["SENTINEL", "REMOVE", "main"]).await.unwrap();
        let port = self.replica.addr().port().to_string();
        let watch = ["SENTINEL", "MONITOR", "main", "127.0.0.1", &port, "1"];
        self.sentinels.cli::<()>(0, &watch).await.unwrap();
    }
}
