//! New objects, and files as they are opened.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{BranchFilesystem, MAIN, MountedBranch, entry};
use branchfs_core::descriptors::admit_file;
use branchfs_core::view::{New, NodeIndex, OpenedFile, Owner, View};
use branchfs_fuse::{BackingId, Caller, Entry, FsResult, Handle, NodeId, OpenFlags, OpenReply};

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
        view.nodes.add_lookup(index);
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
        if let Some(Ok(content)) = file.unread_bytes.map(|size| view.content(file.handle, size)) {
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

    pub(super) fn create_file(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        (mode, umask): (u32, u32),
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        admit_file()?; // before the file is made
        let (entry, file) = self.make(caller, parent, name, New::File { mode }, umask)?;
        let (mounted, index) = self.at(entry.node.ok_or(Errno::IO)?)?;
        let mut view = mounted.live()?;
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file =
            view.register_new(index, file.ok_or(Errno::IO)?, access, self.backer(&mounted))?;
        let ttl =
            if view.attributes_are_stable(index) { entry.attributes_ttl } else { Duration::ZERO };
        let entry = Entry { attributes_ttl: ttl, ..entry };
        Ok((entry, Self::opened(&mounted, &file)))
    }

    pub(super) fn create_unnamed(
        &self,
        caller: &Caller,
        parent: NodeId,
        (mode, umask): (u32, u32),
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        admit_file()?;
        let _pass = self.mount.enter_request();
        let (mounted, parent) = self.at(parent)?;
        let mut view = mounted.writable()?;
        let owner = Owner { uid: caller.uid, gid: caller.gid };
        let (index, attributes, file) = view.create_unnamed(parent, mode, umask, owner)?;
        view.nodes.add_lookup(index);
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file = view.register_new(index, file, access, self.backer(&mounted))?;
        let entry = Self::entry_of(&mounted, &mut view, index, attributes);
        Ok((entry, Self::opened(&mounted, &file)))
    }
}
