//! Opening files: whether the daemon or the kernel reads and writes the content.
//!
//! The kernel can read and write a *backing file* directly (passthrough). Data then has native cost, and all branches
//! share one copy of a lower file in the page cache. All open descriptors of a node must use the same mode, so the first
//! open decides, until the last close:
//!
//! | opened | served | reason |
//! |---|---|---|
//! | for writing | by the kernel | no request for each write |
//! | a big file | by the kernel | no second copy in memory |
//! | a small file for reading | by the daemon, cached | cheapest to open; readers see a copy-up meanwhile |
//! | a file that is mapped writable after its descriptor was closed | by the kernel | our pages would not show the writes |
//! | a file of a layer with a disk limit | by the daemon | writes are counted in advance |
//! | a partly copied-up file ([`crate::lazy_copy_up`]) | by the daemon | only the daemon knows where its parts are |
//! | a file with set-id bits or capabilities, for writing | by the daemon | the kernel would keep them, with our rights |
//!
//! A big file of a lower layer that is open for reading through the kernel cannot be replaced by its copy. After its
//! copy-up, the next open returns ESTALE. The kernel looks the name up again and finds a *new* node; existing readers keep
//! the old node with the old content. Lower layers are opened read-only, the base on a read-only mount. The kernel reopens
//! backing files with the caller's flags, so this prevents a fault from writing to the base.
//!
//! Writes through a mapping cause no request. While a writable mapping may exist, attributes are not cached and the
//! branch is not committed ([`View::attributes_are_stable`]).

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustix::fs::{Mode, OFlags, Statx};
use rustix::io::Errno;

use super::CopyData;
use super::handles::Backing;
use super::{MergedTree, NodeIndex, NodeLocation, View};
use crate::descriptors::admit_opened;
use crate::ids::LayerId;
use crate::rooted_dir::{Result, stat_of};
use crate::vfs::{BackingFiles, BackingId};
use crate::write_set::{Fingerprint, Read};

/// From this size on a file is big. `BRANCHFS_BIG_FILE_BYTES` in the daemon's environment sets another: tests need not
/// move so much then.
pub(crate) fn big_file_bytes() -> u64 {
    const BIG_FILE_BYTES: u64 = 16 << 20;
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let set = std::env::var("BRANCHFS_BIG_FILE_BYTES").ok();
        set.and_then(|bytes| bytes.parse().ok()).unwrap_or(BIG_FILE_BYTES)
    })
}

/// Files up to this size are usually read as a whole.
const SMALL_FILE_BYTES: usize = 32 << 10;

/// Open flag of a program that is being started (`__FMODE_EXEC`); the file stays open until the program ends.
const EXECUTED: u32 = 0o40;

/// Set-user-id and set-group-id.
const SET_ID: u16 = 0o6000;

/// The reply to an open request.
#[derive(Debug)]
pub struct OpenedFile {
    /// The number by which later requests name the open file.
    pub handle: u64,
    /// Set if the kernel reads and writes the file directly.
    pub backing: Option<BackingId>,
    /// Size of a small file at its first open for reading, when the kernel has no pages of it.
    pub unread_bytes: Option<usize>,
    /// The kernel's cached pages of the node are current.
    pub keeps_pages: bool,
    /// The kernel's cached attributes must be dropped: they changed, or may change from now on without a request.
    pub outdates_attributes: bool,
}

impl MergedTree {
    /// Whether the attributes of a lower file are those that the kernel knows.
    pub(super) fn is_as_looked_up(&self, index: NodeIndex, stat: &Statx) -> Result<bool> {
        let known = self.nodes.get(index)?.identity;
        Ok(known.is_none_or(|known| known == Fingerprint::of(stat)))
    }

    /// The layer that a regular file's content is in.
    fn content_layer(&self, index: NodeIndex) -> Result<LayerId> {
        Ok(match &self.nodes.get(index)?.place {
            NodeLocation::Lower(at) => at.layer.id,
            NodeLocation::Upper | NodeLocation::Orphan | NodeLocation::Directory { .. } => {
                self.layers[0].id
            }
        })
    }

    /// Whether open files of the node use a file that is not the node's any more.
    fn is_superseded(&self, index: NodeIndex) -> Result<bool> {
        let node = self.nodes.get(index)?;
        let layer = self.content_layer(index)?;
        Ok(!node.names.is_empty()
            && node.backing.as_ref().is_some_and(|backing| backing.layer != layer))
    }

    fn is_being_written(&self, index: NodeIndex) -> bool {
        // File systems without leases cannot say; there a mapping without a descriptor goes unnoticed.
        self.find_writers(index).unwrap_or(false)
    }

    /// Whether anything may be written to the node's file; `None` if that cannot be determined.
    fn find_writers(&self, index: NodeIndex) -> Option<bool> {
        let Ok(at) = self.locate(index) else {
            return Some(false); // nothing to commit, and nothing that a name leads to
        };
        let Ok(file) = at.layer.tree.open(&at.path, OFlags::RDONLY | OFlags::NONBLOCK) else {
            return Some(false);
        };
        let owner = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_uid);
        crate::sys::is_being_written(file.as_fd(), owner)
    }
}

impl View {
    /// Opens the content of a regular file; for writing it is copied up first. `kernel` takes backing files. The caller
    /// has admitted an open for writing ([`crate::descriptors::admit_file`]), which changes something before there is a
    /// descriptor. `ESTALE`: the name leads to a new node from now on.
    pub fn open(
        &mut self,
        index: NodeIndex,
        flags: OFlags,
        kill_privileges: bool,
        kernel: Option<&Arc<dyn BackingFiles>>,
    ) -> Result<OpenedFile> {
        let access = flags & OFlags::RWMODE;
        let writable = matches!(access, OFlags::WRONLY | OFlags::RDWR);
        let truncate = flags.contains(OFlags::TRUNC);
        if self.tree.nodes.get(index)?.superseded {
            return Err(Errno::STALE); // looked up again, the path leads to another node
        }
        if truncate
            && !writable
            && self.tree.handles.is_executed(&self.tree.nodes.get(index)?.handles)
        {
            // The kernel asks us to truncate before it finds that the file must not be written to.
            return Err(Errno::TXTBSY);
        }
        if writable || truncate {
            self.tree.copy_up(index, if truncate { CopyData::No } else { CopyData::Yes })?;
        }
        if self.tree.is_superseded(index)? {
            self.split_node(index)?;
            return Err(Errno::STALE);
        }
        if let NodeLocation::Lower(at) = &self.tree.nodes.get(index)?.place {
            self.tree.layers.record_read(&at.path, Read::Content)?;
        }
        let file = self.open_content(index, writable, truncate)?;
        if !writable && !truncate {
            admit_opened(file.as_fd())?;
        }
        let mut stat = stat_of(&file)?;
        if !self.is_object(index, &stat)? {
            self.tree.nodes.supersede_names(index);
            return Err(Errno::STALE);
        }
        let has_lost_privileges =
            truncate && super::attr::kill_privileges_of(&file, kill_privileges)?;
        if has_lost_privileges {
            stat = stat_of(&file)?;
        }
        let mut opened = self.choose_backing(index, file, &stat, access, kernel)?;
        opened.outdates_attributes |= has_lost_privileges;
        if flags.bits() & EXECUTED != 0 {
            self.tree.handles.mark_executed(opened.handle);
        }
        Ok(opened)
    }

    /// Whether a file with this status that was opened by the node's path is the object that the kernel has attributes and pages of.
    /// Others may have changed or replaced it in the base.
    fn is_object(&self, index: NodeIndex, stat: &Statx) -> Result<bool> {
        let node = self.tree.nodes.get(index)?;
        Ok(match &node.place {
            NodeLocation::Lower(_) => self.tree.is_as_looked_up(index, stat)?,
            NodeLocation::Upper => {
                self.tree.nodes.inode(index).is_none_or(|(_, known)| known == stat.stx_ino)
            }
            NodeLocation::Orphan | NodeLocation::Directory { .. } => true,
        })
    }

    /// A descriptor of a node's content.
    fn open_content(&self, index: NodeIndex, writable: bool, truncate: bool) -> Result<OwnedFd> {
        // Reading and writing: a write through a private mapping reads the page first.
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let at = match self.tree.locate(index) {
            Ok(at) => at,
            Err(error) => {
                // An orphan is opened again through a descriptor that is still there (/proc/self/fd).
                let file = self.tree.open_file_of(index).ok_or(error)?;
                return open_again(&file, access);
            }
        };
        let trunc = if truncate { OFlags::TRUNC } else { OFlags::empty() };
        if let Some(partial) = self.tree.partial_of(index)?.filter(|_| truncate) {
            partial.resize(0)?;
        }
        let open = || at.layer.tree.open(&at.path, access | trunc | OFlags::NONBLOCK);
        match self.tree.file_use(index)? {
            Some(file_use) if truncate => {
                let before = at.layer.tree.open(&at.path, OFlags::PATH)?;
                file_use.resize(before.as_fd(), 0, open)
            }
            _ => open(),
        }
    }

    /// Registers a new file that is open, see [`Self::choose_backing`].
    pub fn register_new(
        &mut self,
        index: NodeIndex,
        file: OwnedFd,
        access: OFlags,
        kernel: Option<&Arc<dyn BackingFiles>>,
    ) -> Result<OpenedFile> {
        let stat = stat_of(&file)?;
        self.choose_backing(index, file, &stat, access, kernel)
    }

    /// Registers an open file and decides whether the kernel or the daemon serves it. `stat` is the file's status,
    /// `access` the caller's access mode.
    fn choose_backing(
        &mut self,
        index: NodeIndex,
        file: OwnedFd,
        stat: &Statx,
        access: OFlags,
        kernel: Option<&Arc<dyn BackingFiles>>,
    ) -> Result<OpenedFile> {
        let writable = access != OFlags::RDONLY;
        let layer = self.tree.content_layer(index)?;
        if writable && layer != self.tree.layers[0].id {
            return Err(Errno::IO); // never: it would be written to the layer of another
        }
        let backing = self.tree.nodes.get(index)?.backing.as_ref();
        if writable && backing.is_some_and(|backing| backing.layer != layer) {
            return Err(Errno::STALE); // without a name, and copied up since: no name leads to the copy
        }
        let partial = self.tree.partial_of(index)?;
        let mut unread_bytes = None;
        if self.tree.nodes.get(index)?.handles.is_empty() {
            // Writes within a disk limit are charged in advance.
            let is_counted =
                layer == self.tree.layers[0].id && self.tree.layers[0].ledger().is_some();
            let is_whole = partial.as_ref().is_none_or(|partial| partial.is_complete());
            let is_by_kernel =
                writable || stat.stx_size >= big_file_bytes() || !self.attributes_are_stable(index);
            let backing = kernel
                .filter(|_| is_by_kernel && is_whole && !is_counted)
                .filter(|_| !(writable && has_privileges(&file, stat)))
                // If the kernel refuses the backing file, for whatever reason, the daemon serves the file.
                .and_then(|kernel| {
                    // The kernel keeps what it gets open as long as any program has the file open. For a file that is open
                    // for writing that would hide whether any of them still writes: see `paths_with_mapped`.
                    let reading =
                        if writable { open_again(&file, OFlags::RDONLY).ok() } else { None };
                    let registered = reading.as_ref().unwrap_or(&file);
                    Some((kernel, kernel.open_backing(registered.as_fd()).ok()?))
                })
                .map(|(kernel, id)| (id, Arc::clone(kernel)));
            let at = self.tree.locate(index).ok();
            let node = self.tree.nodes.get_mut(index)?;
            let backing = backing.map(|(id, kernel)| Backing { id, at, layer, kernel });
            if !writable && !node.was_opened && partial.is_none() {
                let bytes = usize::try_from(stat.stx_size).unwrap_or(usize::MAX);
                unread_bytes = Some(bytes).filter(|bytes| (1..=SMALL_FILE_BYTES).contains(bytes));
            }
            node.backing = backing;
            node.was_opened = true;
        }
        let handle = self.add_handle(index, file, writable, partial)?;
        let node = self.tree.nodes.get_mut(index)?;
        let backing = node.backing.as_ref().map(|backing| backing.id);
        let keeps_pages = !node.pages_outdated;
        node.pages_outdated = writable && backing.is_some();
        let may_map = backing.is_some() && access == OFlags::RDWR;
        let outdates_attributes = may_map && self.mapped.insert(index);
        Ok(OpenedFile { handle, backing, unread_bytes, keeps_pages, outdates_attributes })
    }

    /// Closes an open file.
    pub fn close(&mut self, handle: u64) {
        if let Some((file_use, file)) = self.tree.handles.counted(handle) {
            file_use.closed(file.as_fd());
        }
        let Some(index) = self.tree.handles.remove(handle) else {
            return;
        };
        if let Ok(node) = self.tree.nodes.get_mut(index) {
            node.handles.retain(|open| *open != handle);
            if node.handles.is_empty() {
                node.backing = None;
            }
        }
        self.tree.nodes.drop_unused(index);
    }

    /// Detaches a node from its names, which get a new node at the next lookup. Existing opens keep it.
    fn split_node(&mut self, index: NodeIndex) -> Result<()> {
        let last = self.tree.getattr(index).ok();
        let node = self.tree.nodes.get_mut(index)?;
        node.last_attributes = last;
        let before = node.backing.as_ref().and_then(|backing| backing.at.clone());
        let place = before.map_or(NodeLocation::Orphan, NodeLocation::Lower);
        for (parent, name) in node.names.clone() {
            self.tree.nodes.split_node(parent, &name, place.clone());
        }
        Ok(())
    }

    /// Whether the node's content and attributes change by requests only; false while a writable mapping may
    /// exist.
    pub fn attributes_are_stable(&mut self, index: NodeIndex) -> bool {
        if !self.mapped.contains(&index) {
            return true;
        }
        let has_settled = match self.tree.nodes.get(index) {
            Ok(node) if !node.handles.is_empty() => false,
            Ok(_) => !self.tree.is_being_written(index),
            Err(_) => true, // a mapping would have kept the kernel from forgetting it
        };
        if has_settled {
            self.mapped.remove(&index);
        }
        has_settled
    }

    /// The files that programs can write: open for writing, or mapped writable after they were closed.
    pub(crate) fn writable_files(&mut self) -> Vec<PathBuf> {
        let open = self.tree.handles.written().collect();
        paths_with_mapped(self, open)
    }

    /// Those of them that the kernel writes without a request, which a freeze does not stop.
    pub(crate) fn passthrough_writable_files(&mut self) -> Vec<PathBuf> {
        let MergedTree { nodes, handles, .. } = &self.tree;
        let is_backed =
            |index: &NodeIndex| nodes.get(*index).is_ok_and(|node| node.backing.is_some());
        let open = handles.written().filter(is_backed).collect();
        paths_with_mapped(self, open)
    }
}

/// The paths of the nodes, and of the files that may be mapped writable though they were closed. Programs may have those
/// open for reading.
fn paths_with_mapped(view: &mut View, mut written: Vec<NodeIndex>) -> Vec<PathBuf> {
    let mut mapped: Vec<NodeIndex> = view.mapped.iter().copied().collect();
    mapped.retain(|index| {
        !view.attributes_are_stable(*index) && view.tree.find_writers(*index).unwrap_or(true)
    });
    written.append(&mut mapped);
    let mut paths: Vec<PathBuf> =
        written.into_iter().filter_map(|index| view.tree.nodes.path(index).ok()).collect();
    paths.sort();
    paths.dedup();
    paths
}

/// Opens a file that is open in another access mode.
fn open_again(file: &OwnedFd, access: OFlags) -> Result<OwnedFd> {
    let through = crate::rooted_dir::descriptor_path(file.as_fd());
    rustix::fs::open(through, access | OFlags::CLOEXEC, Mode::empty())
}

/// Whether a write by another user must remove set-id bits or capabilities from the file.
fn has_privileges(file: &OwnedFd, stat: &Statx) -> bool {
    stat.stx_mode & SET_ID != 0
        || !matches!(
            rustix::fs::fgetxattr(file, "security.capability", &mut [0_u8; 0]),
            Err(Errno::NODATA | Errno::OPNOTSUPP)
        )
}
