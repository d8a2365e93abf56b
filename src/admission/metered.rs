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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        config::{AdminListen, Config, QuickOptions, Secret},
        metrics::Metrics,
    };

    /// Notes by which epochs it was called, in the order of the calls.
    #[derive(Debug, Default)]
    struct Listed(Mutex<Vec<u64>>);

    impl Link for Listed {
        fn call<'a>(
            &'a self,
            caller: &'a Caller,
            _: &'a Call,
        ) -> BoxFuture<'a, Result<Reply, StoreError>> {
            self.0.lock().unwrap().push(caller.epoch);
            Box::pin(std::future::ready(Err(StoreError::Stale)))
        }
    }

    #[tokio::test]
    async fn calls_keep_their_order_however_their_answers_are_awaited() {
        let config = Config::quick(QuickOptions {
            listen: "127.0.0.1:0".to_owned(),
            upstream: "http://127.0.0.1:1".to_owned(),
            slots: 1,
            store_url: Secret("memory:".to_owned()),
            admin_listen: Some(AdminListen::Off),
        });
        let listed = Arc::new(Listed::default());
        let inner: Arc<dyn Link> = listed.clone();
        let link = Metered { inner, metrics: Metrics::new(&config.unwrap()).store() };
        let caller = |epoch| Caller { instance: Uuid::nil(), epoch, gap: 0, presence: 0 };
        let (first, second, call) = (caller(1), caller(2), Call::default());
        let (first, second) = (link.call(&first, &call), link.call(&second, &call));
        assert!(second.await.is_err() && first.await.is_err());
        assert_eq!(*listed.0.lock().unwrap(), [1, 2]);
    }
}
