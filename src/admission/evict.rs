//! Who has the slots of a limit, and how an operator ends the request of one of them.

use uuid::Uuid;

use super::*;

/// What became of an order to evict a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// Its request was cut here; the slots are back once the upstream's connection is closed.
    Cut,
    /// It is another instance's, which was told to cut it.
    Told,
    /// It is ours, and no request runs under it: it is just coming or going, or kept for the next request.
    Idle,
    /// Another instance has it, which doesn't hear just now.
    Deaf,
    /// Its instance is gone: it ends with its lease, or at once if the operator insists.
    Gone,
    /// Its instance is gone, and so are its slots.
    Removed,
    /// A plain client has it, and can't be told.
    Plain,
    /// Nobody has it.
    Unknown,
}

impl Eviction {
    /// For logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cut => "cut",
            Self::Told => "its instance was told",
            Self::Idle => "no request runs under it",
            Self::Deaf => "its instance doesn't hear",
            Self::Gone => "its instance is gone",
            Self::Removed => "removed",
            Self::Plain => "a plain client has it",
            Self::Unknown => "nobody has it",
        }
    }
}

impl Admission {
    /// Names whoever ends a request by its holder, and says whether it was there.
    pub fn cut_by(&self, cut: impl Fn(Uuid) -> bool + Send + Sync + 'static) {
        self.leases.cut_by(cut);
    }

    /// Who has slots of a limit, as the store has it now; the longest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn holders(&self, limit: usize) -> Result<Vec<Holder>, StoreError> {
        self.store.holders(&self.limits[limit]).await
    }

    /// Ends the request of a holder, wherever it runs; `force` removes at once what an instance left behind that is gone.
    ///
    /// # Errors
    /// See [`StoreError`]. What runs here is cut even then.
    pub async fn evict(&self, limit: usize, id: Uuid, force: bool) -> Result<Eviction, StoreError> {
        match self.ask_to_evict(limit, id, force).await {
            Ok(Evicted::Mine) if self.leases.cut(id) => Ok(Eviction::Cut),
            Err(_) if self.leases.cut(id) => Ok(Eviction::Cut),
            Ok(Evicted::Mine) => Ok(Eviction::Idle),
            Ok(Evicted::Told) => Ok(Eviction::Told),
            Ok(Evicted::Deaf) => Ok(Eviction::Deaf),
            Ok(Evicted::Gone) => Ok(Eviction::Gone),
            Ok(Evicted::Removed) => Ok(Eviction::Removed),
            Ok(Evicted::Plain) => Ok(Eviction::Plain),
            Ok(Evicted::Unknown) => Ok(Eviction::Unknown),
            Err(error) => Err(error),
        }
    }

    async fn ask_to_evict(
        &self,
        limit: usize,
        id: Uuid,
        force: bool,
    ) -> Result<Evicted, StoreError> {
        let set = self.set_of(limit, id).await?;
        let Some(set) = set else { return Ok(Evicted::Unknown) };
        let presence = self.outlook().presence.as_millis() as i64;
        let evict = Evict { id, instance: self.instance(), presence, force };
        self.store.evict(&set, &evict).await
    }

    /// Which set has it, where a limit has one for each value of its key.
    async fn set_of(&self, limit: usize, id: Uuid) -> Result<Option<Arc<SetSpec>>, StoreError> {
        let set = &self.limits[limit];
        if !set.keyed {
            return Ok(Some(Arc::clone(set)));
        }
        let id = id.to_string();
        let holders = self.store.holders(set).await?;
        let holder = holders.into_iter().find(|holder| holder.id == id);
        Ok(holder.map(|holder| Arc::new(SetSpec { key: holder.set, ..SetSpec::clone(set) })))
    }
}
