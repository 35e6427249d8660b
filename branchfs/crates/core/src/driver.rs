//! The interface of a driver: a way to present branches as directories that is faster than the FUSE view.
//!
//! The FUSE view of a branch always exists, at `MOUNTPOINT/@name`. A driver may mount a faster file system over it, from
//! the same layer. Store, layers, records and commits are the same for all drivers. The workspace calls the driver from one
//! thread at a time for each branch. It never holds the gate of the mount then, because request threads of the same process
//! serve paths below the mount point.

use std::path::Path;

use crate::error::Error;
use crate::ids::BranchId;
use crate::overlayfs_mount::KernelMount;
use crate::overlayfs_upper::Completion;

/// A way to present branches.
pub trait Driver: Send + Sync {
    /// Its word on the command line.
    fn name(&self) -> &'static str;

    /// Whether this driver presents a branch that was made by `is_written_by_overlayfs` or is new (`None`).
    fn is_for(&self, is_by_kernel: Option<bool>) -> bool;

    /// Whether it presents this branch now.
    fn presents(&self, branch: BranchId) -> bool;

    /// Begins to make ahead what branches to come need.
    fn begin(&self);

    /// Makes something that was made ahead the layer in `layer`, if there is anything: it has changed nothing yet.
    fn take_prepared(&self, layer: &Path) -> Option<PreparedMount>;

    /// Presents the branch at its directory, by a prepared mount or a new one. Its layer has the branch's number.
    fn attach(
        &self,
        branch: BranchId,
        name: &str,
        ready: Option<PreparedMount>,
    ) -> Result<(), Error>;

    /// Converts a branch's layer to a form that BranchFS can read, while it may still be written.
    fn settle(&self, branch: BranchId) -> Result<(), Error>;

    /// Stops all writes in a branch and converts its layer. Branches that this driver does not present are ignored, here
    /// and below.
    ///
    /// # Errors
    /// `Busy`: files stay open for writing. The branch is writable as before.
    fn freeze(&self, branch: BranchId, completion: Completion) -> Result<(), Error>;

    /// Allows writes again.
    fn thaw(&self, branch: BranchId) -> Result<(), Error>;

    /// The branches that are frozen.
    fn frozen(&self) -> Vec<BranchId>;

    /// Uncovers a branch's directory. Whoever is inside keeps what he has open; no path leads there any more.
    fn detach(&self, branch: BranchId);

    /// Uncovers all branches, if none is in use, and does something; where that fails, all is as before.
    ///
    /// # Errors
    /// `InUse`, and those of `then`.
    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error>;

    /// Removes prepared layers from the store at the end of the mount.
    fn end(&self);
}

/// What a branch is presented with, made before there was the branch.
#[derive(Debug)]
pub struct PreparedMount(pub KernelMount);

/// The driver that adds nothing: branches are seen through the FUSE views of the mount.
#[derive(Debug)]
pub struct Fuse;

impl Driver for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn is_for(&self, _is_by_kernel: Option<bool>) -> bool {
        false
    }

    fn presents(&self, _branch: BranchId) -> bool {
        true
    }

    fn begin(&self) {}

    fn take_prepared(&self, _layer: &Path) -> Option<PreparedMount> {
        None
    }

    fn attach(
        &self,
        _branch: BranchId,
        _name: &str,
        _ready: Option<PreparedMount>,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn settle(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn freeze(&self, _branch: BranchId, _completion: Completion) -> Result<(), Error> {
        Ok(())
    }

    fn thaw(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn frozen(&self) -> Vec<BranchId> {
        Vec::new()
    }

    fn detach(&self, _branch: BranchId) {}

    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        then()
    }

    fn end(&self) {}
}
