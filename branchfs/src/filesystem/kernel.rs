//! The kernel as the views see it: nodes by slot and index instead of node ids.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use branchfs_core::file_io::FileIo;
use branchfs_core::mount::{KernelCache, MAIN, MountedBranch, ViewId};
use branchfs_core::vfs::{self, BackingFiles};
use branchfs_core::view::{NodeIndex, OpenedFile, View};
use branchfs_fuse::{BackingId, FsResult, KernelNotifier, NodeId};

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

/// Notifications to the kernel; before the mount none is sent. Errors are ignored: the kernel may not have cached what is
/// invalidated.
#[derive(Default)]
pub(crate) struct Notifications(OnceLock<Arc<dyn KernelNotifier>>);

impl Notifications {
    pub(super) fn connect(&self, kernel: Arc<dyn KernelNotifier>) {
        let _ = self.0.set(kernel); // set once, at start
    }

    /// How many requests of each kind the kernel has sent so far.
    pub(crate) fn request_counts(&self) -> Vec<(&'static str, u64)> {
        self.0.get().map_or_else(Vec::new, |kernel| kernel.request_counts())
    }

    pub(super) fn invalidate_attributes(&self, node: NodeId) {
        let _ = self.0.get().map(|kernel| kernel.invalidate_attributes(node));
    }

    pub(super) fn invalidate_node(&self, node: NodeId) {
        let _ = self.0.get().map(|kernel| kernel.invalidate_node(node));
    }

    /// Stores the content of a small file in the kernel's page cache when it is first opened. That saves the READ, and
    /// a GETATTR after it (the kernel assumes that each READ changes the access time). The view is locked, so that no
    /// open file can write in between.
    pub(super) fn store_content(
        &self,
        mounted: &MountedBranch,
        view: &View,
        node: NodeId,
        file: &OpenedFile,
    ) {
        let Some(kernel) = self.0.get().filter(|_| mounted.slot != MAIN) else {
            return;
        };
        // An error here occurs again, and is reported, when the kernel sends the request.
        if let Some(Ok(content)) =
            file.unread_bytes.map(|size| view.tree.handles.content(file.handle, size))
        {
            let _ = kernel.store(node, &content);
        }
    }

    /// Removes capabilities after a change of content, and the set-id bits if `set_id` is set.
    pub(super) fn kill_privileges(
        &self,
        node: NodeId,
        content: &FileIo,
        set_id: bool,
    ) -> FsResult<()> {
        if branchfs_core::view::kill_privileges_of(&*content.file, set_id)? {
            self.invalidate_attributes(node);
        }
        Ok(())
    }
}
