//! A mounted branch: its view and its state.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{MAIN, ViewId};
use crate::layer::Layer;
use crate::rooted_dir::Result;
use crate::view::{ChangedPaths, View};

/// Whether a branch is live or stale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum BranchState {
    Live,
    /// A sibling was committed first, or the branch is gone: all requests return ESTALE.
    Stale,
}

/// A view with the data that requests need before they lock it.
#[derive(Debug)]
pub struct MountedBranch {
    /// Its number in the mount.
    pub slot: ViewId,
    /// The branch's name; empty for main.
    pub(crate) name: Arc<OsStr>,
    /// Slot of the parent branch.
    pub parent: ViewId,
    pub(super) status: AtomicU8,
    /// The number of freezes. Live children and a running commit freeze a branch.
    freezes: AtomicUsize,
    /// The file with the branch's record, until the first sync in the branch: a branch that is lost in a power failure
    /// takes its unsynced files with it.
    pub(super) unsynced_record: Mutex<Option<Arc<File>>>,
    view: Mutex<LazyView>,
}

/// A view, which is created when it is first used: an idle branch has its layers only.
#[derive(Debug)]
enum LazyView {
    Idle { layers: Vec<Arc<Layer>>, copies_in_part: Arc<AtomicBool> },
    Used(Box<View>),
}

impl LazyView {
    fn used(&mut self) -> &mut View {
        if let Self::Idle { layers, copies_in_part } = self {
            let mut view = View::new(std::mem::take(layers));
            view.tree.copies_in_part = Arc::clone(copies_in_part);
            *self = Self::Used(Box::new(view));
        }
        match self {
            Self::Used(view) => view,
            Self::Idle { .. } => unreachable!("it was just created"),
        }
    }
}

/// The lock on a view. The view of an idle branch is created when it is locked.
#[derive(Debug)]
pub struct ViewGuard<'m>(MutexGuard<'m, LazyView>);

impl Deref for ViewGuard<'_> {
    type Target = View;

    fn deref(&self) -> &View {
        match &*self.0 {
            LazyView::Used(view) => view,
            LazyView::Idle { .. } => unreachable!("it was created when it was locked"),
        }
    }
}

impl DerefMut for ViewGuard<'_> {
    fn deref_mut(&mut self) -> &mut View {
        self.0.used()
    }
}

impl MountedBranch {
    pub(super) fn new(
        slot: ViewId,
        name: Arc<OsStr>,
        parent: ViewId,
        layers: Vec<Arc<Layer>>,
        copies_in_part: Arc<AtomicBool>,
    ) -> Self {
        Self {
            slot,
            name,
            parent,
            status: AtomicU8::new(BranchState::Live as u8),
            freezes: AtomicUsize::new(0),
            unsynced_record: Mutex::new(None),
            view: Mutex::new(LazyView::Idle { layers, copies_in_part }),
        }
    }

    /// Locks the view in any state, with its present layers. For requests, and for verbs in their turn: the base must
    /// not be changing.
    pub fn lock(&self) -> ViewGuard<'_> {
        let mut view = self.lock_as_it_is();
        view.catch_up();
        view
    }

    /// The view with its layers as of the last request: only for operations on its nodes and handles.
    pub fn lock_as_it_is(&self) -> ViewGuard<'_> {
        let mut view = self.lazy();
        view.used();
        ViewGuard(view)
    }

    fn lazy(&self) -> MutexGuard<'_, LazyView> {
        // A request that panicked may have left the node table behind the layers; the layers themselves are sound, and
        // lookups bring the table in line again.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what [`View::replace_layers_later`] does. An idle branch has no nodes, so only its layers are replaced.
    pub(crate) fn replace_layers_later(
        &self,
        new: Vec<Arc<Layer>>,
        changed: Option<&Arc<ChangedPaths>>,
    ) {
        match &mut *self.lazy() {
            LazyView::Idle { layers, .. } => *layers = new,
            LazyView::Used(view) => view.replace_layers_later(new, changed),
        }
    }

    /// The number of nodes that the kernel knows.
    pub(crate) fn nodes(&self) -> usize {
        match &*self.lazy() {
            LazyView::Idle { .. } => 0,
            LazyView::Used(view) => view.tree.nodes.len(),
        }
    }

    /// Locks the view for a request that reads.
    ///
    /// # Errors
    /// ESTALE if the branch is stale or gone.
    pub fn live(&self) -> Result<ViewGuard<'_>> {
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
    pub fn writable(&self) -> Result<ViewGuard<'_>> {
        let view = self.live()?;
        if self.is_frozen() { Err(Errno::ROFS) } else { Ok(view) }
    }

    /// The views whose root contains the branch as `@name`.
    pub(super) fn places(&self) -> impl Iterator<Item = (ViewId, OsString)> {
        let mut name = OsString::from("@");
        name.push(&self.name);
        let below = Some(self.parent).filter(|parent| *parent != MAIN);
        [MAIN].into_iter().chain(below).map(move |slot| (slot, name.clone()))
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.freezes.load(Ordering::Acquire) > 0
    }

    /// Makes changes in the branch fail as long as the guard exists.
    pub(crate) fn freeze(self: &Arc<Self>) -> FreezeGuard {
        self.freezes.fetch_add(1, Ordering::AcqRel);
        FreezeGuard(Arc::clone(self))
    }
}

/// Keeps a branch frozen as long as it exists. The only way to change the number of freezes.
#[derive(Debug)]
pub(crate) struct FreezeGuard(Arc<MountedBranch>);

impl FreezeGuard {
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
