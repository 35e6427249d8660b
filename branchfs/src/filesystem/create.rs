//! What the requests for new objects and opened files share.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::{BranchFilesystem, MAIN, MountedBranch, entry};
use branchfs_core::view::{New, NodeIndex, OpenedFile, Owner, View};
use branchfs_fuse::{BackingId, Caller, Entry, FsResult, Handle, NodeId, OpenReply};

impl BranchFilesystem {
    pub(super) fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new: New<'_>,
        umask: u32,
    ) -> FsResult<(Entry, Option<OwnedFd>)> {
        let _pass = self.mount.enter_request();
        let (mounted, parent) = self.at(parent)?;
        self.refuse_branch_name(&mounted, parent, name)?;
        let mut view = mounted.writable()?;
        let owner = Owner { uid: caller.uid, gid: caller.gid };
        let (index, attributes, file) = view.create(parent, name, new, umask, owner)?;
        view.tree.nodes.add_lookup(index);
        Ok((entry(&mounted, index, attributes), file))
    }

    /// The name of an open branch cannot be taken by something else in the root.
    pub(super) fn refuse_branch_name(
        &self,
        mounted: &MountedBranch,
        parent: NodeIndex,
        name: &OsStr,
    ) -> FsResult<()> {
        if self.is_control_name(parent, name) {
            return Err(Errno::EXIST);
        }
        match self.branch_entry(mounted, parent, name) {
            Some(_) => Err(Errno::EXIST),
            None => Ok(()),
        }
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
        let Some(kernel) = self.kernel.get().filter(|_| mounted.slot != MAIN) else {
            return;
        };
        // An error here occurs again, and is reported, when the kernel sends the request.
        if let Some(Ok(content)) =
            file.unread_bytes.map(|size| view.tree.handles.content(file.handle, size))
        {
            let _ = kernel.store(node, &content);
        }
    }

    pub(super) fn opened(mounted: &MountedBranch, file: &OpenedFile) -> OpenReply {
        OpenReply {
            handle: Some(Handle(file.handle)),
            // Not with a backing file: the kernel takes that for a mistake.
            keep_cache: mounted.slot != MAIN && file.backing.is_none() && file.keeps_pages,
            backing: file.backing.map(|backing| BackingId(backing.0)),
            ..OpenReply::default()
        }
    }
}
