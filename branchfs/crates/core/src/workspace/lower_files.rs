//! Keeps the content that branches read through their partial copies ([`crate::lazy_copy_up`]), before they would lose it.
//!
//! A commit moves the lower file of a partial copy into the history, or to another path of the base. A branch that is stale
//! by that commit no longer has the lower file in its layer stack, and neither has a live one after its rebase. The steps
//! of the transactions since the fork lead to the place of the lower file now, and its fingerprint confirms it. So the
//! copy is completed before the branch is rebased, and before the history drops a commit. Before that, a layer that
//! overlayfs wrote is completed, too: its metacopies find their content by file handle, wherever it lies.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::driver_sync::convert_for_fuse;
use super::{Branch, BranchRef, Workspace};
use crate::error::Error;
use crate::layer::Layer;
use crate::overlayfs_upper::NormaliseFor;
use crate::transaction::{self, Location, LoggedTransaction, PathMap, TransactionRoots};
use crate::view::{Brought, PendingCopyUp, partial_copies_cut_off};

/// The partial copies of a branch that its next layer stack would cut off from their lower files.
pub(super) struct CutOff {
    /// They can be completed now.
    found: Vec<PendingCopyUp>,
    /// Paths of copies whose lower file is nowhere any more.
    pub(super) lost: BTreeSet<PathBuf>,
}

impl Workspace {
    /// Finds the partial copies that `next`, the next layer stack of the branch, would cut off.
    pub(super) fn find_cut_off(
        &self,
        branch: &Branch,
        next: Vec<Arc<Layer>>,
    ) -> Result<CutOff, Error> {
        let own = branch.record.layers.len();
        let copies = partial_copies_cut_off(branch.stack.clone(), next, own)?;
        let mut cut_off = CutOff { found: Vec::new(), lost: BTreeSet::new() };
        if copies.is_empty() {
            return Ok(cut_off);
        }
        let disk = self.engine.disk()?;
        let transactions = transactions_since_fork(&disk, branch)?;
        let steps = transactions.iter().rev().flat_map(|later| later.steps.iter().rev());
        let moves = PathMap::reversing(steps);
        let find = |path: &Path| match moves.origin(&Location::Base(path.to_path_buf())) {
            Some(place) => disk.open(&place),
            None => Ok(None),
        };
        for copy in copies {
            if copy.find_original(find)? {
                cut_off.found.push(copy);
            } else {
                cut_off.lost.insert(copy.path().to_path_buf());
            }
        }
        Ok(cut_off)
    }

    /// Completes the partial copies and the metacopies of stale branches, before commits are dropped from the history.
    ///
    /// # Errors
    /// `Io`, with the path of the copy; `Busy`. The content of all branches is unchanged.
    pub(super) fn complete_stale_branches(&self) -> Result<(), Error> {
        let has_partial_copies = |branch: &Branch| {
            let own = branch.stack.iter().take(branch.record.layers.len());
            own.filter_map(|layer| layer.partial_copies()).any(|copies| !copies.is_empty())
        };
        let branches = self.table.lock();
        let stale = branches.values().filter(|branch| branch.record.is_stale);
        let stale: Vec<Branch> = stale.map(|branch| Branch::clone(branch)).collect();
        drop(branches);
        for branch in stale {
            if !has_partial_copies(&branch) && !self.store.is_written_by_overlayfs(&branch)? {
                continue;
            }
            let held = match self.table.hold(&BranchRef::Id(branch.record.id), |_, _| Ok(())) {
                Ok(Some(held)) => held,
                Ok(None) | Err(Error::NotFound(_)) => continue, // aborted since
                Err(error) => return Err(error),
            };
            if self.store.is_written_by_overlayfs(&held.branch)? {
                self.driver.current().freeze(held.branch.record.id, NormaliseFor::Whole)?;
                // Once the history has dropped a commit, only a ctime shows what it changed.
                convert_for_fuse(self, &held.branch, &self.engine.deleted_links()?)?;
            }
            self.find_cut_off(&held.branch, held.branch.stack.clone())?.complete(self)?;
        }
        Ok(())
    }
}

impl CutOff {
    /// Completes the copies, durably.
    pub(super) fn complete(self, workspace: &Workspace) -> Result<(), Error> {
        if self.found.is_empty() {
            return Ok(());
        }
        Brought::bring(self.found)?.finish()?;
        workspace.store.sync_store()
    }
}

/// The transactions of others on main since a branch was forked, oldest first, as far as the history has them. Of a
/// commit and its undo, the branch concerns neither if it saw neither.
pub(super) fn transactions_since_fork(
    disk: &TransactionRoots,
    branch: &Branch,
) -> Result<Vec<LoggedTransaction>, Error> {
    let record = &branch.record;
    let mut transactions = Vec::new();
    for past in transaction::history(disk)? {
        let is_later =
            |one: &LoggedTransaction, begun: i64| one.header.decided.max(begun) > record.created;
        // A part of this branch.
        let is_own = past.commit.header.kind == transaction::Kind::Commit { branch: record.id };
        let is_later_commit = is_later(&past.commit, past.done.0);
        transactions.extend(match past.undone {
            None => Some(past.commit).filter(|_| is_later_commit && !is_own),
            // The branch saw the commit, or neither.
            Some((undo, when)) => {
                let is_later_undo = is_later(&undo, when.0);
                Some(undo).filter(|_| is_later_undo && !is_later_commit)
            }
        });
    }
    Ok(transactions)
}
