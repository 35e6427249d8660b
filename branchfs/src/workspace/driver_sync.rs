//! How the driver follows what happens to branches: the workspace decides, [`crate::driver`] presents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::branches::Branches;
use super::{Branch, BranchId, MAIN_BRANCH, Workspace, children_of};
use crate::commit::Traces;
use crate::driver::{self, Completion, Driver, Fuse};
use crate::error::{Context, Error};
use crate::quota::Quota;
use crate::seen::{Expected, Identity};
use crate::view::Restacking;

impl Workspace {
    /// The driver; the FUSE view alone until there is one.
    pub(crate) fn driver(&self) -> &dyn Driver {
        self.driver.get().map_or(&Fuse, AsRef::as_ref)
    }

    /// What presents a branch.
    pub(crate) fn driver_of(&self, branch: BranchId) -> &'static str {
        if self.driver().presents(branch) { self.driver().name() } else { Fuse.name() }
    }

    /// Lets `driver` present all branches there are and will be.
    ///
    /// # Errors
    /// A branch that it wrote before cannot be presented now.
    pub(crate) fn present(&self, driver: Box<dyn Driver>) -> Result<(), Error> {
        let branches = self.lock();
        let _ = self.driver.set(driver); // set once, at start
        for branch in branches.values().filter(|branch| !branch.record.is_stale) {
            let is_by_kernel = self.is_by_kernel(branch)?;
            if self.is_presented(branch, is_by_kernel) {
                self.driver().attach(branch.record.id, &branch.record.name, None)?;
            } else if is_by_kernel {
                self.leave_to_fuse(branch)?;
            }
        }
        for branch in branches.values() {
            if !children_of(&branches, branch.record.id).is_empty() {
                self.driver().freeze(branch.record.id, Completion::Whole)?;
            }
        }
        self.driver().begin();
        Ok(())
    }

    /// Only a branch of main with a single layer can be a kernel mount, and only the base below it: the kernel cannot mount
    /// a snapshot layer, whose files are those of the base.
    fn is_presented(&self, branch: &Branch, is_by_kernel: bool) -> bool {
        branch.record.layers == [branch.record.id]
            && branch.record.below.is_empty()
            && self.may_present(branch.record.parent, branch.quota.as_ref())
            && self.driver().is_for(Some(is_by_kernel))
    }

    /// Whether a new branch of this parent would be one.
    pub(super) fn would_present(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        self.may_present(parent, quota) && self.driver().is_for(None)
    }

    fn may_present(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        parent == MAIN_BRANCH && quota.is_none() // nobody counts what the kernel writes
    }

    /// Whether the kernel wrote the branch's layer.
    pub(super) fn is_by_kernel(&self, branch: &Branch) -> Result<bool, Error> {
        for layer in &branch.record.layers {
            if driver::is_by_kernel(&self.layer_path(*layer))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets the FUSE view go on with a branch that the kernel wrote.
    pub(super) fn leave_to_fuse(&self, branch: &Branch) -> Result<(), Error> {
        let record = &branch.record;
        self.driver().detach(record.id);
        let traces = self.traces_since(branch)?;
        let is_as_forked = |found: &Identity| is_as_forked(found, record.created, &traces);
        for layer in &branch.stack {
            let directory = self.layer_path(layer.id.0);
            if record.layers.contains(&layer.id.0) && driver::is_by_kernel(&directory)? {
                driver::settle_alone(&directory, &self.base_path, &record.name)?;
                driver::make_plain(&directory, &self.base_path, &is_as_forked, layer)?;
            }
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().restack(branch.stack.clone(), Restacking::Same(None));
        Ok(())
    }

    /// Stops all writing in a branch that is about to be forked.
    pub(super) fn freeze_presented(&self, parent: BranchId) -> Result<(), Error> {
        match self.driver().freeze(parent, Completion::Whole) {
            Err(Error::Busy { name, paths }) => Err(Error::Written { name, paths }),
            other => other,
        }
    }

    /// Lets those branches be written again that have no live children any more.
    pub(super) fn thaw_presented(&self, branches: &Branches) {
        if self.fail_stop.is_tripped() {
            return; // a branch whose layers may hold objects of the base stays read-only
        }
        for id in self.driver().frozen() {
            if children_of(branches, id).is_empty() && !branches.is_held(id) {
                // A branch that stays read-only says so to whoever writes there; the verb itself has succeeded.
                if let Err(error) = self.driver().thaw(id) {
                    tracing::error!("a branch stays read-only: {error}");
                }
            }
        }
    }

    /// Ends the mount, if nobody uses it or a branch.
    ///
    /// # Errors
    /// `InUse`; everything goes on then.
    pub(crate) fn unmount(&self, mountpoint: &Path) -> Result<(), Error> {
        let _turn = self.take_turn();
        let _branches = self.lock(); // no branch may come or go meanwhile
        self.driver().release(&|| match branchfs_fuse::unmount(mountpoint, false) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(Error::MountInUse),
            other => other.at(mountpoint),
        })
    }

    /// What the branch's kernel-written layers depend on in the base.
    pub(super) fn seen_by_kernel(
        &self,
        branch: &Branch,
        traces: &Traces,
        seen: &mut BTreeMap<PathBuf, Expected>,
    ) -> Result<(), Error> {
        let is_as_forked = |found: &Identity| is_as_forked(found, branch.record.created, traces);
        for layer in branch.record.layers.iter().rev().map(|layer| self.layer_path(*layer)) {
            if driver::is_by_kernel(&layer)? {
                let found = driver::seen(&layer, &self.base_path, &is_as_forked)?;
                for (path, expected) in found {
                    seen.entry(path).or_insert(expected);
                }
            }
        }
        Ok(())
    }
}

/// What our own transactions did to a ctime since the fork is no change; they leave the time of content alone.
fn is_as_forked(found: &Identity, forked: i64, traces: &Traces) -> bool {
    let is_ours = |ctime: i64| traces.covers(ctime, i64::MIN) && found.mtime <= forked;
    traces.same(found.ino, found.ctime).any(|ctime| ctime <= forked || is_ours(ctime))
}
