//! The control files: one in the root of main and of every branch, where the mount has them.

use std::ffi::OsStr;
use std::time::Duration;

use super::{BranchFilesystem, INDEX_BITS, MAIN, MountedBranch, ViewId, attributes, node_id};
use branchfs_core::vfs;
use branchfs_core::view::{NodeIndex, ROOT};
use branchfs_fuse::{Entry, FsResult, Handle, NodeId};

/// Name of the control file in the root of main and of every branch.
const CONTROL_FILE: &str = ".branchfs_ctl";

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

impl BranchFilesystem {
    /// Shows a control file in the root of every view. Called at most once, at start.
    pub(crate) fn show_control_files(&self, control_file: Box<dyn ControlFile>) {
        let _ = self.control_file.set(control_file); // set once, at start
    }

    /// The operations of control files, if this node is a control file.
    pub(super) fn control_file(&self, index: NodeIndex) -> Option<&dyn ControlFile> {
        if index == CONTROL_INDEX { self.control_file.get().map(AsRef::as_ref) } else { None }
    }

    pub(super) fn is_control_name(&self, parent: NodeIndex, name: &OsStr) -> bool {
        parent == ROOT && name == CONTROL_FILE && self.control_file.get().is_some()
    }

    /// Attributes of a control file. Only the base's owner may open it; the kernel checks that.
    pub(super) fn control_attributes(&self) -> FsResult<vfs::Attributes> {
        let root = self.mount.mounted(MAIN)?.lock().tree.getattr(ROOT)?;
        let mode = libc::S_IFREG | 0o600;
        Ok(vfs::Attributes { ino: CONTROL_INDEX, size: 0, blocks: 0, mode, nlink: 1, ..root })
    }

    pub(super) fn control_entry(&self, slot: ViewId) -> FsResult<Entry> {
        Ok(Entry {
            node: Some(node_id(slot, CONTROL_INDEX)),
            generation: 0,
            entry_ttl: Duration::ZERO,
            attributes_ttl: Duration::ZERO,
            attributes: Some(attributes(self.control_attributes()?)),
        })
    }

    /// The attributes of a view's root. A stale branch shows them too where its control file must be found, for it is
    /// to be aborted; nothing else of it is.
    pub(super) fn root_attributes(&self, mounted: &MountedBranch) -> FsResult<vfs::Attributes> {
        match mounted.live() {
            Ok(view) => view.tree.getattr(ROOT),
            Err(_) if self.control_file.get().is_some() => mounted.lock().tree.getattr(ROOT),
            Err(error) => Err(error),
        }
    }

    pub(super) fn control_file_at(&self, node: NodeId) -> (ViewId, Option<&dyn ControlFile>) {
        let (slot, index) = Self::split(node);
        (slot, self.control_file(index))
    }
}
