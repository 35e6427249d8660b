//! The views of one mount: main, and every branch.
//!
//! A view is named by its slot; main has 0. Slots are never used twice.
//!
//! Locking, in this order: `gate` (each request reads it; a verb that changes what views are made of writes it), `views`, the
//! mutex of one view. File content is read and written under the gate alone. Nothing here is locked while the kernel is
//! notified: it may wait for a reply.

mod invalidation;
mod mounted_branch;
mod unsynced;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::io::Errno;

use crate::fail_stop::FailStop;
use crate::layer::Layer;
use crate::rooted_dir::Result;

pub use invalidation::KernelCache;
use mounted_branch::BranchState;
pub(crate) use mounted_branch::FreezeGuard;
pub use mounted_branch::{MountedBranch, ViewGuard};

/// Number of a view; 0 is main.
pub type ViewId = u64;

/// The view of main.
pub const MAIN: ViewId = 0;

/// All views of one mount.
pub struct Mount {
    gate: RwLock<()>,
    views: RwLock<Views>,
    kernel: OnceLock<Arc<dyn KernelCache>>,
    /// Shared with the workspace; a request that panics trips it.
    pub fail_stop: Arc<FailStop>,
    has_covers: AtomicBool,
    /// Big files may be copied up in part.
    copies_in_part: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Views {
    by_slot: HashMap<ViewId, Arc<MountedBranch>>,
    by_name: HashMap<Arc<OsStr>, ViewId>,
    next: ViewId,
}

impl Mount {
    /// A mount with main only, over `base`.
    #[must_use]
    pub fn new(base: Arc<Layer>) -> Self {
        let copies_in_part = Arc::default();
        let main = MountedBranch::new(
            MAIN,
            Arc::from(OsStr::new("")),
            MAIN,
            vec![base],
            Arc::clone(&copies_in_part),
        );
        let views = Views {
            by_slot: HashMap::from([(MAIN, Arc::new(main))]),
            by_name: HashMap::new(),
            next: MAIN + 1,
        };
        Self {
            gate: RwLock::new(()),
            views: RwLock::new(views),
            kernel: OnceLock::new(),
            fail_stop: Arc::default(),
            has_covers: AtomicBool::new(false),
            copies_in_part,
        }
    }

    /// Enables lazy copy-up of big files ([`crate::lazy_copy_up`]).
    pub(crate) fn copy_in_part(&self) {
        self.copies_in_part.store(true, Ordering::Relaxed);
    }

    /// Sets the kernel that caches the answers of views.
    pub fn connect(&self, kernel: Arc<dyn KernelCache>) {
        let _ = self.kernel.set(kernel); // set once, at start
    }

    /// Blocks all requests while views change.
    pub(crate) fn block_requests(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the gate shared during a request.
    pub fn enter_request(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mounted branch of a view id.
    ///
    /// # Errors
    /// `ESTALE` if its branch is gone.
    pub fn mounted(&self, slot: ViewId) -> Result<Arc<MountedBranch>> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.by_slot.get(&slot).cloned().ok_or(Errno::STALE)
    }

    /// The open branch with this name, if there is one.
    pub fn view_named(&self, name: &OsStr) -> Option<Arc<MountedBranch>> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.by_slot.get(views.by_name.get(name)?).cloned()
    }

    /// Adds the view of a new branch. The caller has checked that the name is free.
    pub fn add(&self, name: &OsStr, parent: ViewId, layers: Vec<Arc<Layer>>) -> ViewId {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let slot = views.next;
        views.next += 1;
        let name: Arc<OsStr> = name.into();
        let copies_in_part = Arc::clone(&self.copies_in_part);
        let mounted = MountedBranch::new(slot, Arc::clone(&name), parent, layers, copies_in_part);
        views.by_slot.insert(slot, Arc::new(mounted));
        views.by_name.insert(name, slot);
        slot
    }

    /// Makes all requests in a branch fail with ESTALE; its name stays until it is removed.
    pub(crate) fn set_stale(&self, slot: ViewId) {
        if let Ok(mounted) = self.mounted(slot) {
            mounted.status.store(BranchState::Stale as u8, Ordering::Release);
        }
    }

    /// Removes the view of a branch and returns it: dropping that closes all its files.
    pub(crate) fn remove(&self, slot: ViewId) -> Option<Arc<MountedBranch>> {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let mounted = views.by_slot.remove(&slot)?;
        views.by_name.remove(&mounted.name);
        mounted.status.store(BranchState::Stale as u8, Ordering::Release);
        Some(mounted)
    }
}
