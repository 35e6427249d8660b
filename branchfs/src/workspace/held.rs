//! A branch that a commit is working on: planning, copying and syncing take their time, and other branches go on
//! meanwhile. Who wants to fork or end this one, or one above it, waits.

use std::sync::{MutexGuard, PoisonError};

use super::branches::Branches;
use super::commits::too_late;
use super::{Branch, BranchId, Selector, Workspace, children_of};
use crate::error::Error;

/// As long as it lives, the branch stays open, without children, and its layers are nobody else's.
pub(super) struct Held<'w> {
    workspace: &'w Workspace,
    pub(super) branch: Branch,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.workspace.lock().hold(None);
        self.workspace.let_go.notify_all();
    }
}

impl Workspace {
    /// Waits until no other transaction is under way; none begins while the guard lives.
    pub(super) fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner) // it guards nothing that could be half-done
    }

    /// Holds a branch that can be committed. Only whose turn it is may do that.
    ///
    /// # Errors
    /// `Usage` for main, `NotFound`, `Conflict` for a stale branch, `Frozen`.
    pub(super) fn hold(&self, selector: &Selector) -> Result<Held<'_>, Error> {
        let mut branches = self.lock();
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?
            .clone();
        let name = &branch.record.name;
        if branch.record.is_stale {
            return Err(too_late(name));
        }
        let children = children_of(&branches, branch.record.id);
        if !children.is_empty() {
            let children = children.join(", ");
            return Err(Error::Frozen { name: name.clone(), children });
        }
        branches.hold(Some(branch.record.id));
        Ok(Held { workspace: self, branch })
    }

    /// The table, as soon as no commit is under way that `is_concerned` with the branch. Main is never held.
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
