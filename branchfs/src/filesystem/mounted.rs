//! A branch as it is mounted: its view, and how it stands.

use std::ffi::OsString;
use std::fs::File;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::{INDEX_BITS, MAIN, Slot};
use crate::view::{Index, ROOT, View};
use branchfs_fuse::{Attributes, Entry, FOREVER, FsResult, NodeId};

/// How a branch stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Status {
    Live,
    /// A sibling was committed first, or the branch is gone: everything answers ESTALE.
    Stale,
}

/// A view with what requests need to know before they lock it.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) slot: Slot,
    /// The branch's name; empty for main.
    pub(crate) name: OsString,
    /// Slot of the parent branch.
    pub(crate) parent: Slot,
    pub(super) status: AtomicU8,
    /// Live children, and a commit under way, freeze a branch.
    freezes: AtomicUsize,
    /// The file with the branch's record, as long as nobody has asked for something in the branch to be durable: a branch
    /// that is lost with the power takes its files with it.
    pub(super) unsynced_record: Mutex<Option<Arc<File>>>,
    view: Mutex<View>,
}

impl Mounted {
    pub(super) fn new(slot: Slot, name: OsString, parent: Slot, view: View) -> Self {
        Self {
            slot,
            name,
            parent,
            status: AtomicU8::new(Status::Live as u8),
            freezes: AtomicUsize::new(0),
            unsynced_record: Mutex::new(None),
            view: Mutex::new(view),
        }
    }

    /// The view, whatever its state, with the layers that it has now. For requests, and for verbs in their turn: the base
    /// must not be changing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, View> {
        let mut view = self.lock_as_it_is();
        view.catch_up();
        view
    }

    /// The view with the layers that it had when it was last used: for what concerns its nodes and handles alone.
    pub(crate) fn lock_as_it_is(&self) -> MutexGuard<'_, View> {
        // A request that panicked may have left the node table behind the layers; the layers themselves are sound, and
        // lookups bring the table in line again.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn live(&self) -> FsResult<MutexGuard<'_, View>> {
        if self.status.load(Ordering::Acquire) == Status::Live as u8 {
            Ok(self.lock())
        } else {
            Err(Errno::STALE)
        }
    }

    pub(super) fn writable(&self) -> FsResult<MutexGuard<'_, View>> {
        let view = self.live()?;
        if self.is_frozen() { Err(Errno::ROFS) } else { Ok(view) }
    }

    /// The directories and names under which the branch is found.
    pub(super) fn places(&self) -> impl Iterator<Item = (NodeId, OsString)> {
        let mut name = OsString::from("@");
        name.push(&self.name);
        let below = Some(self.parent).filter(|parent| *parent != MAIN);
        [MAIN]
            .into_iter()
            .chain(below)
            .map(move |slot| (NodeId(slot << INDEX_BITS | ROOT), name.clone()))
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.freezes.load(Ordering::Acquire) > 0
    }

    pub(crate) fn freeze(&self) {
        self.freezes.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn thaw(&self) {
        let lower = |freezes: usize| Some(freezes.saturating_sub(1)); // never fails
        let before = self.freezes.fetch_update(Ordering::AcqRel, Ordering::Acquire, lower);
        debug_assert!(before != Ok(0), "a branch is thawed that is not frozen");
    }

    /// Main is looked at anew each time: others may change the base.
    pub(super) fn ttl(&self) -> Duration {
        if self.slot == MAIN { Duration::ZERO } else { FOREVER }
    }

    /// Every path into a branch passes main's root: the kernel may keep its attributes for a moment.
    pub(super) fn attributes_ttl(&self, index: Index) -> Duration {
        const MAIN_ROOT: Duration = Duration::from_secs(1);
        if self.slot == MAIN && index == ROOT { MAIN_ROOT } else { self.ttl() }
    }

    pub(super) fn entry(&self, index: Index, attributes: Attributes) -> Entry {
        Entry {
            node: Some(NodeId(self.slot << INDEX_BITS | index)),
            generation: 0,
            entry_ttl: self.ttl(),
            attributes_ttl: self.ttl(),
            attributes: Some(attributes),
        }
    }
}
