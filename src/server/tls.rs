//! TLS for clients: the handshake, and a certificate that is read again when its files change.

use std::{
    sync::{Arc, PoisonError, RwLock, Weak},
    time::Duration,
};

use rustls::{
    ServerConfig,
    crypto::aws_lc_rs::{self, Ticketer},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use tokio::{
    task::AbortHandle,
    time::{self, MissedTickBehavior},
};
use tokio_rustls::TlsAcceptor;

use crate::config::{Identity, ServerTls, TlsVersion};

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What makes a plain connection a secret one.
pub(super) struct Tls {
    pub(super) acceptor: TlsAcceptor,
    watch: AbortHandle,
}

/// The certificate that is shown now.
#[derive(Debug)]
struct Shown(RwLock<Arc<CertifiedKey>>);

impl Tls {
    /// Looks at the files no longer. Connections that have shaken hands need none, and may live long.
    pub(super) fn retire(&self) {
        self.watch.abort();
    }
}

/// Shows a certificate and watches its files. Inside the runtime.
pub(super) fn front(settings: &ServerTls) -> Tls {
    let versions = match settings.min_version {
        TlsVersion::Tls12 => &[&TLS13, &TLS12][..],
        TlsVersion::Tls13 => &[&TLS13],
    };
    let shown = Arc::new(Shown(RwLock::new(settings.identity.certified())));
    let watch = tokio::spawn(watch(settings.identity.clone(), Arc::downgrade(&shown)));
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(versions)
        .expect("the provider knows both versions")
        .with_no_client_auth()
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    match Ticketer::new() {
        Ok(ticketer) => config.ticketer = ticketer,
        Err(error) => tracing::warn!(%error, "TLS sessions are resumed from memory alone"),
    }
    Tls { acceptor: TlsAcceptor::from(Arc::new(config)), watch: watch.abort_handle() }
}

/// Reads the files again when they changed. What can't be used changes nothing.
async fn watch(mut identity: Identity, shown: Weak<Shown>) {
    let mut seen = identity.stamps();
    let mut ticks = time::interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(shown) = shown.upgrade() else {
            return;
        };
        let now = on_disk(&identity, Identity::stamps_now).await;
        if now == seen {
            continue;
        }
        seen = now;
        match on_disk(&identity, Identity::again).await {
            Ok(new) => {
                *shown.0.write().unwrap_or_else(PoisonError::into_inner) = new.certified();
                identity = new;
                tracing::info!("the certificate for clients was read again");
            }
            Err(error) => tracing::warn!(%error, "the certificate for clients stays as it was"),
        }
    }
}

/// Files may lie on a slow disk, which must keep no connection waiting.
async fn on_disk<T: Send + 'static>(
    identity: &Identity,
    look: impl FnOnce(&Identity) -> T + Send + 'static,
) -> T {
    let identity = identity.clone();
    let looked = tokio::task::spawn_blocking(move || look(&identity)).await;
    looked.expect("looking at files doesn't panic")
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }
}
