//! The control files: one in the root of main and of every branch, where the mount has them.

use super::{INDEX_BITS, ViewId};
use branchfs_core::view::NodeIndex;
use branchfs_fuse::{FsResult, Handle};

/// Name of the control file in the root of main and of every branch.
pub(super) const CONTROL_FILE: &str = ".branchfs_ctl";

/// The control file's node in its view: no table of nodes grows so far.
pub(super) const CONTROL_INDEX: NodeIndex = (1 << INDEX_BITS) - 1;

/// Handle of an open control file: nothing is kept for it, and no view has this number.
pub(super) const CONTROL_HANDLE: Handle = Handle(0);

/// The operations of control files (`crate::control_files`). A control file is identified by the view in whose root it
/// is.
///
/// Writes and ioctls may take as long as a commit and wait for other requests.
pub(crate) trait ControlFile: Send + Sync {
    /// Returns the content of the control file of a view.
    fn read(&self, slot: ViewId) -> FsResult<String>;
    /// Carries out a command.
    fn write(&self, slot: ViewId, text: &[u8]) -> FsResult<()>;
    /// Carries out an ioctl; returns its output.
    fn ioctl(&self, slot: ViewId, number: u32) -> FsResult<Vec<u8>>;
}
