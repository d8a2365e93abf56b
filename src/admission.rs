//! Decides whether a request may go to its upstream now, later or not at all.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use uuid::Uuid;

use crate::{config::Config, reason::Reason};

/// Hands out permits for the slots of every limit.
#[derive(Debug)]
pub struct Admission {
    routes: Vec<Vec<Arc<tokio::sync::Semaphore>>>,
    max_hold: Vec<Option<Duration>>,
}

/// The in-process guard that owns a holder: while it lives the request has its slots, and dropping it gives them back.
#[must_use = "dropping a permit gives its slots back"]
#[derive(Debug)]
pub struct Permit {
    id: Uuid,
    taken: Instant,
    max_hold: Option<Duration>,
    _slots: Vec<tokio::sync::OwnedSemaphorePermit>,
}

/// Why a request wasn't admitted. Nothing of it is kept anywhere.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The word for it.
    pub reason: Reason,
    /// Index of the limit that refused, if one did.
    pub limit: Option<usize>,
    /// How long a request would have to wait now, where that was measured.
    pub expected_wait: Option<Duration>,
}

impl Admission {
    /// STUB until the stores land.
    pub fn stub(config: &Config) -> Arc<Self> {
        let slots: Vec<_> = config
            .limits
            .iter()
            .map(|limit| Arc::new(tokio::sync::Semaphore::new(limit.slots as usize)))
            .collect();
        let routes = config
            .routes
            .iter()
            .map(|route| {
                route
                    .limits
                    .iter()
                    .map(|&limit| Arc::clone(&slots[limit]))
                    .collect()
            })
            .collect();
        let longest = |route: &crate::config::Route| {
            let holds = route.limits.iter();
            holds.filter_map(|&l| config.limits[l].max_hold).min()
        };
        let max_hold = config.routes.iter().map(longest).collect();
        Arc::new(Self { routes, max_hold })
    }

    /// Takes a slot of every limit of the route, waiting in their queues if need be.
    ///
    /// # Cancellation
    /// Dropping the future gives back whatever was taken and leaves every queue.
    ///
    /// # Errors
    /// A [`Refusal`] when a limit, the store or this process won't take the request.
    pub async fn admit(&self, route: usize) -> Result<Permit, Refusal> {
        let mut slots = Vec::new();
        for limit in &self.routes[route] {
            slots.push(
                Arc::clone(limit)
                    .acquire_owned()
                    .await
                    .expect("never closed"),
            );
        }
        Ok(Permit {
            id: Uuid::now_v7(),
            taken: Instant::now(),
            max_hold: self.max_hold[route],
            _slots: slots,
        })
    }
}

impl Permit {
    /// The id under which the slots are taken, new for every request.
    pub fn holder(&self) -> Uuid {
        self.id
    }

    /// When the slots were taken.
    pub fn taken(&self) -> Instant {
        self.taken
    }

    /// The longest this request may keep its slots; the shortest of its limits.
    pub fn max_hold(&self) -> Option<Duration> {
        self.max_hold
    }
}
