//! Fail-stop: after an error that leaves the store in doubt no transaction is accepted until recovery has run.
//!
//! Two conditions stop transactions. A *doubt* (a rollback that failed, an `fsync` that failed, a panic) lasts until the
//! next mount, whose recovery reads the journal again. A *pending* transaction was applied, and only its last part
//! failed: the next request that would change the store repeats that part ([`crate::workspace`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;

/// Whether transactions are accepted.
#[derive(Debug, Default)]
pub struct FailStop {
    /// Leaf lock.
    reasons: Mutex<Reasons>,
}

#[derive(Debug, Default)]
struct Reasons {
    doubt: Option<String>,
    pending: Option<String>,
}

impl FailStop {
    /// Stops transactions until the next mount. The first reason is kept.
    pub fn trip(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::error!("transactions are stopped until the next mount: {reason}");
        self.lock().doubt.get_or_insert(reason);
    }

    /// Stops transactions until [`Self::complete`] is called.
    pub(crate) fn hold_for_pending(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::error!("transactions are stopped until the last one is complete: {reason}");
        self.lock().pending = Some(reason);
    }

    /// The pending transaction is complete.
    pub(crate) fn complete(&self) {
        self.lock().pending = None;
        tracing::info!("the pending transaction is complete");
    }

    /// Why transactions are stopped; `None` while they are accepted.
    pub(crate) fn reason(&self) -> Option<String> {
        let reasons = self.lock();
        reasons.doubt.as_ref().or(reasons.pending.as_ref()).cloned()
    }

    /// Whether only the next mount can recover.
    pub(crate) fn is_tripped(&self) -> bool {
        self.lock().doubt.is_some()
    }

    /// # Errors
    /// `Stopped` while transactions are not accepted.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.reason().map_or(Ok(()), |reason| Err(Error::Stopped(reason)))
    }

    fn lock(&self) -> MutexGuard<'_, Reasons> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner) // two independent words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completed_transaction_does_not_lift_a_doubt() {
        let stop = FailStop::default();
        stop.check().unwrap();
        stop.hold_for_pending("the history is full");
        assert_eq!(stop.reason().as_deref(), Some("the history is full"));
        stop.trip("a rollback failed");
        stop.trip("a later error");
        stop.complete();
        assert!(stop.is_tripped());
        assert!(
            matches!(stop.check(), Err(Error::Stopped(reason)) if reason == "a rollback failed")
        );
    }

    #[test]
    fn transactions_continue_after_the_pending_one_is_complete() {
        let stop = FailStop::default();
        stop.hold_for_pending("the history is full");
        stop.check().unwrap_err();
        stop.complete();
        stop.check().unwrap();
    }
}
