//! A branch as it is mounted: its view, and how it stands.

use std::ffi::OsString;
use std::fs::File;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{MAIN, ViewId};
use crate::rooted_dir::Result;
use crate::view::View;

/// How a branch stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum BranchState {
    Live,
    /// A sibling was committed first, or the branch is gone: everything answers ESTALE.
    Stale,
}

/// A view with what requests need to know before they lock it.
#[derive(Debug)]
pub struct MountedBranch {
    /// Its number in the mount.
    pub slot: ViewId,
    /// The branch's name; empty for main.
    pub(crate) name: OsString,
    /// Slot of the parent branch.
    pub parent: ViewId,
    pub(super) status: AtomicU8,
    /// Live children, and a commit under way, freeze a branch.
    freezes: AtomicUsize,
    /// The file with the branch's record, as long as nobody has asked for something in the branch to be durable: a branch
    /// that is lost with the power takes its files with it.
    pub(super) unsynced_record: Mutex<Option<Arc<File>>>,
    view: Mutex<View>,
}

impl MountedBranch {
    pub(super) fn new(slot: ViewId, name: OsString, parent: ViewId, view: View) -> Self {
        Self {
            slot,
            name,
            parent,
            status: AtomicU8::new(BranchState::Live as u8),
            freezes: AtomicUsize::new(0),
            unsynced_record: Mutex::new(None),
            view: Mutex::new(view),
        }
    }

    /// The view, whatever its state, with the layers that it has now. For requests, and for verbs in their turn: the base
    /// must not be changing.
    pub fn lock(&self) -> MutexGuard<'_, View> {
        let mut view = self.lock_as_it_is();
        view.catch_up();
        view
    }

    /// The view with the layers that it had when it was last used: for what concerns its nodes and handles alone.
    pub fn lock_as_it_is(&self) -> MutexGuard<'_, View> {
        // A request that panicked may have left the node table behind the layers; the layers themselves are sound, and
        // lookups bring the table in line again.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the view for a request that reads.
    ///
    /// # Errors
    /// ESTALE if the branch is stale or gone.
    pub fn live(&self) -> Result<MutexGuard<'_, View>> {
        if self.status.load(Ordering::Acquire) == BranchState::Live as u8 {
            Ok(self.lock())
        } else {
            Err(Errno::STALE)
        }
    }

    /// Locks the view for a request that writes.
    ///
    /// # Errors
    /// ESTALE if the branch is stale or gone, EROFS if it is frozen.
    pub fn writable(&self) -> Result<MutexGuard<'_, View>> {
        let view = self.live()?;
        if self.is_frozen() { Err(Errno::ROFS) } else { Ok(view) }
    }

    /// The views in whose root the branch is found as `@name`.
    pub(super) fn places(&self) -> impl Iterator<Item = (ViewId, OsString)> {
        let mut name = OsString::from("@");
        name.push(&self.name);
        let below = Some(self.parent).filter(|parent| *parent != MAIN);
        [MAIN].into_iter().chain(below).map(move |slot| (slot, name.clone()))
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.freezes.load(Ordering::Acquire) > 0
    }

    /// Makes changes in the branch fail while the guard exists.
    pub(crate) fn freeze(self: &Arc<Self>) -> FreezeGuard {
        self.freezes.fetch_add(1, Ordering::AcqRel);
        FreezeGuard(Arc::clone(self))
    }
}

/// Keeps a branch frozen while it exists. The only way to change the count of freezes.
#[derive(Debug)]
pub(crate) struct FreezeGuard(Arc<MountedBranch>);

impl FreezeGuard {
    /// The branch that is frozen.
    pub(crate) fn mounted(&self) -> &MountedBranch {
        &self.0
    }

    /// Leaves the branch frozen until the next mount.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for FreezeGuard {
    /// After a panic the branch stays frozen: its layers may hold objects of the base.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.freezes.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
