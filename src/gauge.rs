//! A bound on what this process holds at once: requests, or bytes.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// How much is taken, and how much may be.
#[derive(Debug)]
pub(crate) struct Gauge {
    taken: AtomicUsize,
    cap: AtomicUsize,
}

/// A part of a gauge. Dropping it gives the part back.
#[must_use = "dropping a share gives it back"]
#[derive(Debug)]
pub(crate) struct Share {
    gauge: Arc<Gauge>,
    size: usize,
}

impl Gauge {
    pub(crate) fn new(cap: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), cap: cap.into() })
    }

    /// A part of this size, or none if it doesn't fit.
    pub(crate) fn take(self: &Arc<Self>, size: usize) -> Option<Share> {
        let share = Share { gauge: Arc::clone(self), size };
        // Taken first, so that a share that doesn't fit gives itself back.
        let before = self.taken.fetch_add(size, Ordering::Relaxed);
        (before + size <= self.cap.load(Ordering::Relaxed)).then_some(share)
    }

    /// Lets more or less be taken from now on.
    pub(crate) fn set_cap(&self, cap: usize) {
        self.cap.store(cap, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.gauge.taken.fetch_sub(self.size, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_kept() {
        let gauge = Gauge::new(3);
        let two = gauge.take(2).unwrap();
        assert!(gauge.take(2).is_none());
        let one = gauge.take(1).unwrap();
        assert_eq!(gauge.taken(), 3);
        drop((one, two));
        assert_eq!(gauge.taken(), 0);
    }

    #[test]
    fn a_lower_cap_takes_nothing_back() {
        let gauge = Gauge::new(3);
        let two = gauge.take(2).unwrap();
        gauge.set_cap(1);
        assert!(gauge.take(1).is_none());
        drop(two);
        assert!(gauge.take(1).is_some());
    }
}
