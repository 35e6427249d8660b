//! The interface of a driver: a way to present branches as directories that is faster than the FUSE view.
//!
//! The FUSE view of a branch always exists, at `MOUNTPOINT/@name`. A driver may mount a faster file system over it, from
//! the same layer. Store, layers, records and commits are the same for all drivers. The workspace calls the driver from one
//! thread at a time for each branch. It never holds the gate of the mount then, because request threads of the same process
//! serve paths below the mount point.

use crate::error::Error;
use crate::ids::BranchId;
use crate::overlayfs_upper::NormaliseFor;

/// A way to present branches.
pub trait Driver: Send + Sync {
    /// Its word on the command line.
    fn name(&self) -> &'static str;

    /// Whether this driver presents a branch that overlayfs wrote (`true`) or BranchFS wrote (`false`), or a new one
    /// (`None`).
    fn is_for(&self, is_by_kernel: Option<bool>) -> bool;

    /// Whether it presents this branch now.
    fn serves(&self, branch: BranchId) -> bool;

    /// Presents the branch at its directory. Its layer has the branch's number.
    fn attach(&self, branch: BranchId, name: &str) -> Result<(), Error>;

    /// Converts a branch's layer to a form that BranchFS can read, while it may still be written.
    fn convert(&self, branch: BranchId) -> Result<(), Error>;

    /// Stops all writes in a branch and normalises its layer. This and the following methods ignore branches that this
    /// driver does not present.
    ///
    /// # Errors
    /// `Busy`: files stay open for writing. The branch is writable as before.
    fn freeze(&self, branch: BranchId, completion: NormaliseFor) -> Result<(), Error>;

    /// Allows writes again.
    fn thaw(&self, branch: BranchId) -> Result<(), Error>;

    /// The branches for which [`Self::freeze`] succeeded and [`Self::thaw`] was not called since.
    fn frozen(&self) -> Vec<BranchId>;

    /// Unmounts the directory of a branch that became stale, as [`Self::detach`] does. The branch can still be frozen, for a
    /// rebase.
    fn hide(&self, branch: BranchId);

    /// Unmounts a branch's directory. Processes inside keep their open files; no path leads to them any more.
    fn detach(&self, branch: BranchId);

    /// Unmounts all branches that are not hidden, if none is in use, then calls `then`. If that fails, the branches are
    /// mounted again.
    ///
    /// # Errors
    /// `InUse`, and those of `then`.
    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error>;
}

/// The driver without mounts of its own: branches are seen through the FUSE views of the mount.
#[derive(Debug)]
pub struct Fuse;

impl Driver for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn is_for(&self, _is_by_kernel: Option<bool>) -> bool {
        false
    }

    fn serves(&self, _branch: BranchId) -> bool {
        true
    }

    fn attach(&self, _branch: BranchId, _name: &str) -> Result<(), Error> {
        Ok(())
    }

    fn convert(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn freeze(&self, _branch: BranchId, _completion: NormaliseFor) -> Result<(), Error> {
        Ok(())
    }

    fn thaw(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn frozen(&self) -> Vec<BranchId> {
        Vec::new()
    }

    fn hide(&self, _branch: BranchId) {}

    fn detach(&self, _branch: BranchId) {}

    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        then()
    }
}
