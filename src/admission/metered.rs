//! A store whose calls are measured.

use std::sync::Arc;

use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    metrics::StoreMetrics,
    store::{
        BoxFuture, Call, Caller, Evict, Evicted, Holder, Link, Push, Reply, SetSpec, SetStatus,
        SlotStore, StoreError,
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

    fn holders<'a>(&'a self, spec: &'a SetSpec) -> BoxFuture<'a, Result<Vec<Holder>, StoreError>> {
        self.inner.holders(spec)
    }

    fn evict<'a>(
        &'a self,
        spec: &'a SetSpec,
        evict: &'a Evict,
    ) -> BoxFuture<'a, Result<Evicted, StoreError>> {
        self.inner.evict(spec, evict)
    }
}

impl Link for Metered<Arc<dyn Link>> {
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let sent = Instant::now();
        // Called here and not in the future, since the order of calls is that of these.
        let reply = self.inner.call(caller, call);
        Box::pin(async move {
            let reply = reply.await;
            self.metrics.called(reply.is_ok(), sent.elapsed());
            reply
        })
    }
}
