//! The FUSE filesystem: main at the root of the mount, every branch at `/@name`. Each request of the kernel goes to the view
//! of [`branchfs_core::mount`] that it is for.
//!
//! A node id is `slot << 40 | index`: the slot of a view, and a node of it. Slot 0 is main, so that `/` is node 1. A node of
//! a branch that is gone answers ESTALE.

mod control_file;
mod create;
mod fuse_ops;
mod io;
mod kernel;
mod listing;
mod passthrough;

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use branchfs_core::mount::{MAIN, Mount, MountedBranch, ViewId};
use branchfs_core::vfs::{self, BackingFiles};
use branchfs_core::view::{NodeIndex, ROOT, View};
use branchfs_fuse::{
    Attributes, Capabilities, Entry, FOREVER, FsResult, KernelNotifier, NodeId, Time,
};

pub(crate) use control_file::ControlFile;
use kernel::Kernel;

/// Bits of a node number that name the node within its view.
const INDEX_BITS: u32 = 40;

/// The extended attribute of the mount's root that names the control socket.
pub(crate) const CONTROL_XATTR: &str = "user.branchfs.control";

/// Another that lists what no process in a branch should reach, for sandboxes: base, store, control socket, a NUL
/// between two.
const PRIVATE_XATTR: &str = "user.branchfs.private";

/// The filesystem of one mount.
pub(crate) struct BranchFilesystem {
    mount: Arc<Mount>,
    control_socket: OnceLock<OsString>,
    private: OnceLock<Vec<u8>>,
    capabilities: OnceLock<Capabilities>,
    kernel: OnceLock<Arc<dyn KernelNotifier>>,
    backing_files: OnceLock<Arc<dyn BackingFiles>>,
    /// Why passthrough is not used; empty if it is used. Known after INIT.
    passthrough: OnceLock<String>,
    /// A file of the store, to try passthrough with.
    probe: OnceLock<OwnedFd>,
    /// Set where the mount has control files.
    control_file: OnceLock<Box<dyn ControlFile>>,
}

impl BranchFilesystem {
    /// The filesystem of the views in `mount`.
    pub(crate) fn new(mount: Arc<Mount>) -> Self {
        Self {
            mount,
            control_socket: OnceLock::new(),
            private: OnceLock::new(),
            capabilities: OnceLock::new(),
            kernel: OnceLock::new(),
            backing_files: OnceLock::new(),
            passthrough: OnceLock::new(),
            probe: OnceLock::new(),
            control_file: OnceLock::new(),
        }
    }

    /// Sets what is known only after mounting and opening the socket.
    pub(crate) fn connect(
        &self,
        kernel: Arc<dyn KernelNotifier>,
        control_socket: &Path,
        private: &[&Path],
    ) {
        let paths: Vec<&[u8]> = private.iter().map(|path| path.as_os_str().as_bytes()).collect();
        let adapter = Arc::new(Kernel(Arc::clone(&kernel)));
        self.mount.connect(Arc::clone(&adapter) as _);
        let _ = self.backing_files.set(adapter); // these are set once, at start
        let _ = self.kernel.set(kernel);
        let _ = self.control_socket.set(control_socket.as_os_str().to_os_string());
        let _ = self.private.set(paths.join(&0));
    }

    /// How many requests of each kind the kernel has sent so far.
    pub(crate) fn requests(&self) -> Vec<(&'static str, u64)> {
        self.kernel.get().map_or_else(Vec::new, |kernel| kernel.request_counts())
    }

    fn entry_of(
        mounted: &MountedBranch,
        view: &mut View,
        index: NodeIndex,
        found: vfs::Attributes,
    ) -> Entry {
        let entry = entry(mounted, index, found);
        if view.attributes_are_stable(index) {
            entry
        } else {
            Entry { attributes_ttl: Duration::ZERO, ..entry }
        }
    }

    /// Whether the kernel may cache that a name does not exist: only if all such names can be invalidated together.
    fn may_cache_absence(&self, mounted: &MountedBranch) -> bool {
        mounted.slot != MAIN
            && !self.mount.has_covers()
            && self.capabilities.get().is_some_and(|capabilities| capabilities.epoch)
    }

    fn split(node: NodeId) -> (ViewId, NodeIndex) {
        (node.0 >> INDEX_BITS, node.0 & ((1 << INDEX_BITS) - 1))
    }

    fn at(&self, node: NodeId) -> FsResult<(Arc<MountedBranch>, NodeIndex)> {
        let (slot, index) = Self::split(node);
        Ok((self.mount.mounted(slot)?, index))
    }

    /// `/@name` at the root of main or of the branch's parent.
    fn branch_entry(
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
}

/// How long the kernel may cache names and attributes. Never those of main: other processes may change the base.
fn ttl(mounted: &MountedBranch) -> Duration {
    if mounted.slot == MAIN { Duration::ZERO } else { FOREVER }
}

/// Every path into a branch passes the root of main: the kernel may keep its attributes for a moment.
fn attributes_ttl(mounted: &MountedBranch, index: NodeIndex) -> Duration {
    const MAIN_ROOT: Duration = Duration::from_secs(1);
    if mounted.slot == MAIN && index == ROOT { MAIN_ROOT } else { ttl(mounted) }
}

fn entry(mounted: &MountedBranch, index: NodeIndex, found: vfs::Attributes) -> Entry {
    Entry {
        node: Some(node_id(mounted.slot, index)),
        generation: 0,
        entry_ttl: ttl(mounted),
        attributes_ttl: ttl(mounted),
        attributes: Some(attributes(found)),
    }
}

fn node_id(slot: ViewId, index: NodeIndex) -> NodeId {
    NodeId(slot << INDEX_BITS | index)
}

fn attributes(found: vfs::Attributes) -> Attributes {
    let time = |time: vfs::Time| Time { seconds: time.seconds, nanoseconds: time.nanoseconds };
    Attributes {
        ino: found.ino,
        size: found.size,
        blocks: found.blocks,
        atime: time(found.atime),
        mtime: time(found.mtime),
        ctime: time(found.ctime),
        mode: found.mode,
        nlink: found.nlink,
        uid: found.uid,
        gid: found.gid,
        rdev: found.rdev,
        block_size: found.block_size,
    }
}
