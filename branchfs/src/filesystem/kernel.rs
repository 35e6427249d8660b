//! The kernel as the views see it: nodes by slot and index instead of node ids.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use branchfs_core::mount::{KernelCache, ViewId};
use branchfs_core::vfs::{self, BackingFiles};
use branchfs_core::view::NodeIndex;
use branchfs_fuse::{BackingId, FsResult, KernelNotifier};

use super::node_id;

pub(super) struct Kernel(pub(super) Arc<dyn KernelNotifier>);

impl KernelCache for Kernel {
    // A notification fails if the kernel knows no such node or name: then there is nothing to invalidate.

    fn invalidate_node(&self, slot: ViewId, index: NodeIndex) {
        let _ = self.0.invalidate_node(node_id(slot, index));
    }

    fn invalidate_entry(&self, slot: ViewId, parent: NodeIndex, name: &OsStr) {
        let _ = self.0.invalidate_entry(node_id(slot, parent), name);
    }

    fn expire_entry(&self, slot: ViewId, parent: NodeIndex, name: &OsStr) {
        let _ = self.0.expire_entry(node_id(slot, parent), name);
    }

    fn increment_epoch(&self) {
        let _ = self.0.increment_epoch();
    }
}

impl BackingFiles for Kernel {
    fn open_backing(&self, file: BorrowedFd<'_>) -> FsResult<vfs::BackingId> {
        self.0.open_backing(file).map(|backing| vfs::BackingId(backing.0))
    }

    fn close_backing(&self, backing: vfs::BackingId) {
        self.0.close_backing(BackingId(backing.0));
    }
}
