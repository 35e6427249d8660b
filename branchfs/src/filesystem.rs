//! The mount: main at its root, every branch at `/@name`, and the kernel's requests led to the view they are for.
//!
//! A node number is `slot << 40 | index`: which view, and which node of it. Slot 0 is main, so that `/` is node 1. Slots
//! are never used twice; a node of a branch that is gone answers ESTALE.
//!
//! Locking, in this order: `gate` (every request reads; whoever changes what views are made of writes), `views`, one
//! view's mutex. File content is read and written under the gate alone. Nothing here is held while the kernel is told
//! to forget something: it may be waiting for an answer.

mod control_file;
mod durability;
mod file_content;
mod invalidation;
mod listing;
mod making;
mod mounted;
mod passthrough;
mod requests;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use rustix::io::Errno;

use crate::layer::Layer;
use crate::view::{Index, ROOT, View};
use crate::workspace::FailStop;
use branchfs_fuse::{Attributes, Capabilities, Entry, FOREVER, FsResult, KernelNotifier, NodeId};
pub(crate) use control_file::ControlFile;
pub(crate) use mounted::Mounted;
use mounted::Status;

/// Bits of a node number that name the node within its view.
const INDEX_BITS: u32 = 40;

/// The extended attribute of the mount's root that names the control socket.
pub(crate) const CONTROL_XATTR: &str = "user.branchfs.control";

/// Another that lists what no process in a branch should reach, for sandboxes: base, store, control socket, a NUL
/// between two.
const PRIVATE_XATTR: &str = "user.branchfs.private";

/// Number of a view; 0 is main.
pub(crate) type Slot = u64;

/// Main's slot.
pub(crate) const MAIN: Slot = 0;

/// All views of one mount.
pub(crate) struct BranchFilesystem {
    gate: RwLock<()>,
    views: RwLock<Views>,
    control_socket: OnceLock<OsString>,
    private: OnceLock<Vec<u8>>,
    capabilities: OnceLock<Capabilities>,
    kernel: OnceLock<Arc<dyn KernelNotifier>>,
    /// Why the kernel does not read and write files in our stead; empty where it does. Known after INIT.
    passthrough: OnceLock<String>,
    /// Shared with the workspace; a request that panics trips it.
    pub(crate) fail_stop: Arc<FailStop>,
    /// A file of the store, to try that out with.
    probe: OnceLock<OwnedFd>,
    has_covers: AtomicBool,
    /// Big files may be copied up in part.
    copies_in_part: Arc<AtomicBool>,
    /// Set where the mount has control files.
    control_file: OnceLock<Box<dyn ControlFile>>,
}

#[derive(Debug)]
struct Views {
    by_slot: HashMap<Slot, Arc<Mounted>>,
    by_name: HashMap<OsString, Slot>,
    next: Slot,
}

impl BranchFilesystem {
    /// A mount with main alone, over `base`.
    pub(crate) fn new(base: Arc<Layer>) -> Self {
        let main = Arc::new(Mounted::new(MAIN, OsString::new(), MAIN, View::new(vec![base])));
        let views = Views {
            by_slot: HashMap::from([(MAIN, main)]),
            by_name: HashMap::new(),
            next: MAIN + 1,
        };
        Self {
            gate: RwLock::new(()),
            views: RwLock::new(views),
            control_socket: OnceLock::new(),
            private: OnceLock::new(),
            capabilities: OnceLock::new(),
            kernel: OnceLock::new(),
            passthrough: OnceLock::new(),
            fail_stop: Arc::default(),
            probe: OnceLock::new(),
            has_covers: AtomicBool::new(false),
            copies_in_part: Arc::default(),
            control_file: OnceLock::new(),
        }
    }

    /// Lets big files be copied up in part from now on ([`crate::partial`]).
    pub(crate) fn copy_in_part(&self) {
        self.copies_in_part.store(true, Ordering::Relaxed);
    }

    /// Sets what is known only once the mount and its socket are there.
    pub(crate) fn connect(
        &self,
        kernel: Arc<dyn KernelNotifier>,
        control_socket: &Path,
        private: &[&Path],
    ) {
        let paths: Vec<&[u8]> = private.iter().map(|path| path.as_os_str().as_bytes()).collect();
        let _ = self.kernel.set(kernel); // these are set once, at start
        let _ = self.control_socket.set(control_socket.as_os_str().to_os_string());
        let _ = self.private.set(paths.join(&0));
    }

    /// How many requests of each kind the kernel has sent so far.
    pub(crate) fn requests(&self) -> Vec<(&'static str, u64)> {
        self.kernel.get().map_or_else(Vec::new, |kernel| kernel.request_counts())
    }

    fn entry_of(mounted: &Mounted, view: &mut View, index: Index, found: Attributes) -> Entry {
        let entry = mounted.entry(index, found);
        if view.has_settled(index) {
            entry
        } else {
            Entry { attributes_ttl: Duration::ZERO, ..entry }
        }
    }

    /// Holds up all requests while what views are made of changes.
    pub(crate) fn close_gate(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the gate open.
    pub(crate) fn pass(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mounted view of a slot.
    pub(crate) fn mounted(&self, slot: Slot) -> FsResult<Arc<Mounted>> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.by_slot.get(&slot).cloned().ok_or(Errno::STALE)
    }

    /// Shows a new branch at `/@name`. The caller made sure that the name is free.
    pub(crate) fn add(&self, name: &OsStr, parent: Slot, layers: Vec<Arc<Layer>>) -> Slot {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let slot = views.next;
        views.next += 1;
        let mut view = View::new(layers);
        view.copies_in_part = Arc::clone(&self.copies_in_part);
        let mounted = Arc::new(Mounted::new(slot, name.to_os_string(), parent, view));
        views.by_slot.insert(slot, mounted);
        views.by_name.insert(name.to_os_string(), slot);
        slot
    }

    /// Makes everything in a branch answer ESTALE; its name stays until it is removed.
    pub(crate) fn set_stale(&self, slot: Slot) {
        if let Ok(mounted) = self.mounted(slot) {
            mounted.status.store(Status::Stale as u8, Ordering::Release);
        }
    }

    /// Takes a branch out of the mount. Returns its view: dropping that closes all its files.
    pub(crate) fn remove(&self, slot: Slot) -> Option<Arc<Mounted>> {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let mounted = views.by_slot.remove(&slot)?;
        views.by_name.remove(&mounted.name);
        mounted.status.store(Status::Stale as u8, Ordering::Release);
        Some(mounted)
    }

    fn split(node: NodeId) -> (Slot, Index) {
        (node.0 >> INDEX_BITS, node.0 & ((1 << INDEX_BITS) - 1))
    }

    fn at(&self, node: NodeId) -> FsResult<(Arc<Mounted>, Index)> {
        let (slot, index) = Self::split(node);
        Ok((self.mounted(slot)?, index))
    }

    /// `/@name` at the root of main or of the branch's parent.
    fn branch_entry(
        &self,
        mounted: &Mounted,
        index: Index,
        name: &OsStr,
    ) -> Option<FsResult<Entry>> {
        let branch = OsStr::from_bytes(name.as_bytes().strip_prefix(b"@")?);
        if index != ROOT {
            return None;
        }
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        let found = views.by_slot.get(views.by_name.get(branch)?)?;
        if mounted.slot != MAIN && found.parent != mounted.slot {
            return None;
        }
        Some(
            self.root_attributes(found)
                .map(|attributes| Entry { entry_ttl: FOREVER, ..found.entry(ROOT, attributes) }),
        )
    }
}
