//! Content of open files: read and written under the gate alone.

use std::sync::Arc;

use super::BranchFilesystem;
use branchfs_core::file_io::FileIo;
use branchfs_core::quota::FileAccount;
use branchfs_core::view::CopyData;
use branchfs_fuse::{Caller, FsResult, Handle, NodeId};

impl BranchFilesystem {
    pub(super) fn content(&self, node: NodeId, handle: Handle) -> FsResult<FileIo> {
        let (mounted, _) = self.at(node)?;
        let view = mounted.live()?;
        Ok(FileIo {
            file: view.tree.handles.file(handle.0)?,
            partial: view.tree.handles.partial(handle.0),
        })
    }

    pub(super) fn writable_content(
        &self,
        node: NodeId,
        handle: Handle,
    ) -> FsResult<(FileIo, Option<Arc<FileAccount>>)> {
        let (mounted, index) = self.at(node)?;
        let mut view = mounted.writable()?;
        // After a commit of a child the former top layer is a lower layer.
        view.tree.copy_up(index, CopyData::Yes)?;
        let (file, partial) =
            (view.tree.handles.file(handle.0)?, view.tree.handles.partial(handle.0));
        Ok((FileIo { file, partial }, view.tree.handles.file_use(handle.0)))
    }

    /// Removes capabilities after a change of content, and the set-id bits if `set_id` is set.
    pub(super) fn kill_privileges(
        &self,
        node: NodeId,
        content: &FileIo,
        set_id: bool,
    ) -> FsResult<()> {
        if branchfs_core::view::kill_privileges_of(&*content.file, set_id)? {
            if let Some(kernel) = self.kernel.get() {
                let _ = kernel.invalidate_attributes(node); // the kernel may have none: as good
            }
        }
        Ok(())
    }
}

/// Whether a change of content by this caller takes set-id bits away. The kernel does not say so of these requests; that
/// root may have given up `CAP_FSETID` goes unnoticed.
pub(super) fn loses_set_id(caller: &Caller) -> bool {
    caller.uid != 0
}
