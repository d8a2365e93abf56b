//! A store whose calls are measured.

use std::sync::Arc;

use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    metrics::StoreMetrics,
    store::{
        BoxFuture, Call, Caller, Link, Push, Reply, SetSpec, SetStatus, SlotStore, StoreError,
    },
};

/// Measures the calls of a store that doesn't answer at once.
pub(super) fn metered(store: Arc<dyn SlotStore>, metrics: StoreMetrics) -> Arc<dyn SlotStore> {
    match store.local() {
        Some(_) => store,
        None => Arc::new(Metered { inner: store, metrics }),
    }
}

#[derive(Debug)]
struct Metered<T> {
    inner: T,
    metrics: StoreMetrics,
}

impl SlotStore for Metered<Arc<dyn SlotStore>> {
    fn open(&self) -> BoxFuture<'_, Result<Arc<dyn Link>, StoreError>> {
        Box::pin(async {
            let inner = self.inner.open().await?;
            let link: Arc<dyn Link> = Arc::new(Metered { inner, metrics: self.metrics.clone() });
            Ok(link)
        })
    }

    fn subscribe(&self, instance: Uuid, push: Push) {
        self.inner.subscribe(instance, push);
    }

    fn status<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<SetStatus, StoreError>> {
        self.inner.status(spec)
    }
}

impl Link for Metered<Arc<dyn Link>> {
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>> {
        Box::pin(async {
            let sent = Instant::now();
            let reply = self.inner.call(caller, call).await;
            self.metrics.called(reply.is_ok(), sent.elapsed());
            reply
        })
    }
}
