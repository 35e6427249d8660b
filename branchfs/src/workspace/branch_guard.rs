//! A branch that a verb is working on which takes its time: a commit plans, copies and syncs, a comparison walks. Other
//! branches go on meanwhile. Who wants to fork, commit or end this one, or end one above it, waits.

use std::sync::{MutexGuard, PoisonError};

use super::branches::Branches;
use super::{Branch, BranchId, Selector, Workspace};
use crate::error::Error;

/// As long as it lives, the branch stays open, without children, and its layers are nobody else's.
pub(super) struct Held<'w> {
    workspace: &'w Workspace,
    pub(super) branch: Branch,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.workspace.lock().let_go(self.branch.record.id);
        self.workspace.let_go.notify_all();
    }
}

impl Workspace {
    /// Waits until no other transaction is under way; none begins while the guard lives.
    pub(super) fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner) // it guards nothing that could be half-done
    }

    /// Holds a branch, as soon as nobody else does; `None` for main.
    ///
    /// # Errors
    /// `NotFound`, and what `check` finds against it.
    pub(super) fn hold(
        &self,
        selector: &Selector,
        check: impl FnOnce(&Branches, &Branch) -> Result<(), Error>,
    ) -> Result<Option<Held<'_>>, Error> {
        let mut branches = self.lock_unheld(selector, Branches::is_held)?;
        let Some(branch) = selector.find(&branches)?.cloned() else { return Ok(None) };
        check(&branches, &branch)?;
        branches.hold(branch.record.id);
        Ok(Some(Held { workspace: self, branch }))
    }

    /// The table, as soon as the branch is not held any more in the way that `is_concerned` says. Main is never held.
    pub(super) fn lock_unheld(
        &self,
        selector: &Selector,
        is_concerned: impl Fn(&Branches, BranchId) -> bool,
    ) -> Result<MutexGuard<'_, Branches>, Error> {
        let mut branches = self.lock();
        while let Some(branch) = selector.find(&branches)? {
            if !is_concerned(&branches, branch.record.id) {
                break;
            }
            branches = self.let_go.wait(branches).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(branches)
    }
}
