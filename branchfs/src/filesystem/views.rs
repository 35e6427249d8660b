//! The views of the mount as the kernel addresses them, with branches and control files in their roots.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::io::Errno;

use super::control_file::{CONTROL_FILE, CONTROL_INDEX, ControlFile};
use super::{attributes, entry, entry_of, node_id, split};
use branchfs_core::file_io::FileIo;
use branchfs_core::mount::{MAIN, Mount, MountedBranch, ViewId};
use branchfs_core::quota::FileAccount;
use branchfs_core::vfs;
use branchfs_core::view::{CopyData, New, NodeIndex, Owner, ROOT, View};
use branchfs_fuse::{Caller, Entry, FOREVER, FsResult, Handle, NodeId};

/// All views of one mount.
pub(crate) struct Views {
    pub(super) mount: Arc<Mount>,
    /// Set where the mount has control files.
    pub(super) control_file: OnceLock<Box<dyn ControlFile>>,
    /// Whether the kernel can invalidate all names at once. Known after INIT.
    pub(super) has_epoch: OnceLock<bool>,
}

impl Views {
    pub(super) fn new(mount: Arc<Mount>) -> Self {
        Self { mount, control_file: OnceLock::new(), has_epoch: OnceLock::new() }
    }

    /// Whether the kernel may cache that a name does not exist: only if all such names can be invalidated together.
    pub(super) fn may_cache_absence(&self, mounted: &MountedBranch) -> bool {
        mounted.slot != MAIN && !self.mount.has_covers() && self.has_epoch.get() == Some(&true)
    }

    pub(super) fn at(&self, node: NodeId) -> FsResult<(Arc<MountedBranch>, NodeIndex)> {
        let (slot, index) = split(node);
        Ok((self.mount.mounted(slot)?, index))
    }

    /// `/@name` at the root of main or of the branch's parent.
    pub(super) fn branch_entry(
        &self,
        mounted: &MountedBranch,
        index: NodeIndex,
        name: &OsStr,
    ) -> Option<FsResult<Entry>> {
        let branch = OsStr::from_bytes(name.as_bytes().strip_prefix(b"@")?);
        if index != ROOT {
            return None;
        }
        let found = self.mount.view_named(branch)?;
        if mounted.slot != MAIN && found.parent != mounted.slot {
            return None;
        }
        Some(
            self.root_attributes(&found)
                .map(|attributes| Entry { entry_ttl: FOREVER, ..entry(&found, ROOT, attributes) }),
        )
    }

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
        let (slot, index) = split(node);
        (slot, self.control_file(index))
    }

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

    /// The attributes of an entry in a READDIRPLUS reply, with one reference to its node. Empty if they are of no use:
    /// the kernel knows the name, or may not cache it; it is a branch's directory, or it is gone.
    pub(super) fn entry_attributes(
        &self,
        mounted: &MountedBranch,
        view: &mut View,
        directory: NodeIndex,
        name: &OsStr,
    ) -> Option<(NodeIndex, Entry)> {
        if mounted.slot == MAIN
            || view.tree.nodes.has_lookups(directory, name)
            || self.branch_entry(mounted, directory, name).is_some()
        {
            return None;
        }
        let (child, attributes) = view.tree.lookup(directory, name).ok().flatten()?;
        view.tree.nodes.add_lookup(child);
        Some((child, entry_of(mounted, view, child, attributes)))
    }
}
