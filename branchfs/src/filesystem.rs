//! The FUSE filesystem: main at the root of the mount, every branch at `/@name`. Each request of the kernel goes to the view
//! of [`branchfs_core::mount`] that it is for.
//!
//! A node id is `slot << 40 | index`: the slot of a view, and a node of it. Slot 0 is main, so that `/` is node 1. A node of
//! a branch that is gone answers ESTALE.

mod control_file;
mod fuse_ops;
mod kernel;
mod listing;
mod passthrough;
mod views;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use branchfs_core::mount::{MAIN, Mount, MountedBranch, ViewId};
use branchfs_core::vfs;
use branchfs_core::view::{NodeIndex, ROOT, View};
use branchfs_fuse::{Attributes, Entry, FOREVER, KernelNotifier, NodeId, Time};

pub(crate) use control_file::ControlFile;
use kernel::{Kernel, Notifications};
use passthrough::Passthrough;
use views::Views;

/// Bits of a node number that name the node within its view.
const INDEX_BITS: u32 = 40;

/// The extended attribute of the mount's root that names the control socket.
pub(crate) const CONTROL_XATTR: &str = "user.branchfs.control";

/// Another that lists what no process in a branch should reach, for sandboxes: base, store, control socket, a NUL
/// between two.
const PRIVATE_XATTR: &str = "user.branchfs.private";

/// The filesystem of one mount.
pub(crate) struct BranchFilesystem {
    pub(crate) views: Views,
    pub(crate) passthrough: Passthrough,
    pub(crate) notifications: Notifications,
    control_socket: OnceLock<OsString>,
    private: OnceLock<Vec<u8>>,
}

impl BranchFilesystem {
    /// The filesystem of the views in `mount`.
    pub(crate) fn new(mount: Arc<Mount>) -> Self {
        Self {
            views: Views::new(mount),
            passthrough: Passthrough::default(),
            notifications: Notifications::default(),
            control_socket: OnceLock::new(),
            private: OnceLock::new(),
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
        self.views.mount.connect(Arc::clone(&adapter) as _);
        self.passthrough.connect(adapter);
        self.notifications.connect(kernel);
        let _ = self.control_socket.set(control_socket.as_os_str().to_os_string()); // set once, at start
        let _ = self.private.set(paths.join(&0));
    }
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

fn split(node: NodeId) -> (ViewId, NodeIndex) {
    (node.0 >> INDEX_BITS, node.0 & ((1 << INDEX_BITS) - 1))
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
