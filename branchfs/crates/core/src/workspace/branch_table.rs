//! The table of open branches and their views: lookups, guards, freezes, and how branches come and go.
//!
//! Lock order: `branches`, then the gate of the mount. Verbs that take long do not keep the table locked: they hold a
//! [`BranchGuard`] of one branch. Verbs that fork, commit or end this branch, or end one above it, wait for the guard;
//! other branches are not affected.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::branch_log::{Line, Record, oldest};
use super::branches::{Branch, Branches, children_of};
use super::driver_sync::Drivers;
use super::store::{SnapshotLayer, Store};
use super::{BranchId, BranchInfo, BranchRef, MAIN_BRANCH};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::mount::{FreezeGuard, MAIN, Mount, MountedBranch, ViewId};
use crate::quota::Quota;
use crate::transaction::Header;
use crate::view::View;

/// How long a verb waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// The rest of a branch after a partial commit.
pub(super) struct Remainder {
    pub(super) layer: Arc<Layer>,
    pub(super) quota: Option<Arc<Quota>>,
}

/// A branch that continues with its rest.
pub(super) struct Continued {
    pub(super) branch: Branch,
    pub(super) outdated: Option<Arc<MountedBranch>>,
    pub(super) _frozen: Option<FreezeGuard>,
}

/// The table of branches with the views that the mount shows of them.
pub(super) struct BranchTable {
    branches: Mutex<Branches>,
    /// Signalled when a branch guard is dropped.
    released: Condvar,
    pub(super) mount: Arc<Mount>,
    pub(super) store: Arc<Store>,
    pub(super) driver: Arc<Drivers>,
}

/// As long as it exists, the branch stays open and without children, and no other verb uses its layers.
pub(super) struct BranchGuard<'w> {
    table: &'w BranchTable,
    pub(super) branch: Branch,
}

impl Drop for BranchGuard<'_> {
    fn drop(&mut self) {
        self.table.lock().release(self.branch.record.id);
        self.table.released.notify_all();
    }
}

impl BranchTable {
    pub(super) fn new(mount: Arc<Mount>, store: Arc<Store>, driver: Arc<Drivers>) -> Self {
        Self { branches: Mutex::default(), released: Condvar::new(), mount, store, driver }
    }

    /// The branch in the mount.
    ///
    /// # Errors
    /// `Io` with `ESTALE` if it has ended.
    pub(super) fn mounted(&self, branch: &Branch) -> Result<Arc<MountedBranch>, Error> {
        self.mount.mounted(branch.slot).at(&self.store.base_path)
    }

    /// Aborts a branch and all its descendants, also stale ones.
    pub(super) fn abort_below(&self, branches: &mut Branches, top: BranchId) -> Result<(), Error> {
        let mut dropped = vec![top];
        let mut position = 0;
        while let Some(parent) = dropped.get(position).copied() {
            dropped.extend(branches.children(parent).map(|child| child.record.id));
            position += 1;
        }
        let gone = dropped.iter().map(|id| Line::Deleted { layer: *id });
        self.store.records.append(&gone.collect::<Vec<_>>())?;
        for id in dropped.iter().rev() {
            let Some(branch) = branches.remove(id) else { continue };
            self.remove_branch(branches, &branch);
        }
        Ok(())
    }

    /// Removes a branch, which is not in the table any more, from the mount, and moves its layers into the trash. The
    /// caller ends its record.
    pub(super) fn remove_branch(&self, branches: &Branches, branch: &Branch) {
        self.driver.current().detach(branch.record.id);
        let mounted = {
            let _gate = self.mount.block_requests();
            self.mount.remove(branch.slot)
        };
        // Only branches below it could look through its layers, and there are none any more.
        for layer in &branch.record.layers {
            self.store.move_to_trash(&self.store.layer_path(*layer), "layer");
        }
        self.store.drop_unused_snapshots(branches, &branch.record.lower_layers);
        if let Some(mounted) = mounted {
            self.invalidate_kernel_cache(mounted);
        }
    }

    /// Invalidates an ended or stale branch in the kernel's caches: its name immediately, the rest of a big one in the background.
    pub(super) fn invalidate_kernel_cache(&self, mounted: Arc<MountedBranch>) {
        /// Up to so many nodes are invalidated at once, which takes well under a millisecond.
        const NODES_AT_ONCE_MAX: usize = 64;
        if mounted.nodes() <= NODES_AT_ONCE_MAX {
            return self.mount.invalidate(&mounted);
        }
        self.mount.expire(&mounted);
        self.store.background.invalidate(&self.mount, mounted);
    }

    /// Takes the guard of a branch once it is free; `None` for main.
    ///
    /// # Errors
    /// `NotFound`, `Unsupported` for a branch that could not be presented, and the error of `check`.
    pub(super) fn hold(
        &self,
        selector: &BranchRef,
        check: impl FnOnce(&Branches, &Branch) -> Result<(), Error>,
    ) -> Result<Option<BranchGuard<'_>>, Error> {
        let mut branches = self.lock_when_free(selector, Branches::is_held)?;
        let Some(branch) = selector.find(&branches)?.cloned() else { return Ok(None) };
        self.driver.refuse_unreadable(branch.record.id)?;
        check(&branches, &branch)?;
        branches.hold(branch.record.id);
        Ok(Some(BranchGuard { table: self, branch }))
    }

    /// Locks the table once `is_concerned` is false for the branch. Main is never guarded.
    pub(super) fn lock_when_free(
        &self,
        selector: &BranchRef,
        is_concerned: impl Fn(&Branches, BranchId) -> bool,
    ) -> Result<MutexGuard<'_, Branches>, Error> {
        let mut branches = self.lock();
        while let Some(branch) = selector.find(&branches)? {
            if !is_concerned(&branches, branch.record.id) {
                break;
            }
            branches = self.released.wait(branches).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(branches)
    }

    pub(super) fn parent_of(&self, branch: &Branch) -> Result<Branch, Error> {
        let parent = branch.record.parent;
        let branches = self.lock();
        let found = branches.get(&parent).ok_or_else(|| Error::NotFound(parent.to_string()))?;
        Ok((**found).clone())
    }

    /// Removes a branch from the table after its commit to the base. Its record was removed with the transaction.
    pub(super) fn remove_committed(&self, branches: &mut Branches, id: BranchId) {
        let Some(mut committed) = branches.remove(&id) else { return };
        if !self.store.is_external() {
            committed.record.layers.clear(); // they go with the commit
        }
        self.remove_branch(branches, &committed);
    }

    /// Thaws the branches that have no live children any more.
    pub(super) fn thaw_idle(&self, branches: &Branches) {
        if self.mount.fail_stop.is_tripped() {
            return; // a branch whose layers may hold objects of the base stays read-only
        }
        for id in self.driver.current().frozen() {
            if children_of(branches, id).is_empty() && !branches.is_held(id) {
                // The verb itself has succeeded. Writes to a branch that stays read-only fail with an error.
                if let Err(error) = self.driver.current().thaw(id) {
                    tracing::error!("a branch stays read-only: {error}");
                }
            }
        }
    }

    /// When the oldest live branch was forked.
    pub(super) fn oldest_fork(&self) -> Option<i64> {
        oldest(self.lock().values().map(|branch| &branch.record))
    }

    /// Freezes a branch and waits a moment for its open files to be closed: the daemon learns of a close after the
    /// caller has continued. Other verbs can run meanwhile. The branch stays frozen until the guard is dropped.
    pub(super) fn quiesce(&self, selector: &BranchRef) -> Result<Option<FreezeGuard>, Error> {
        self.wait_until_closed(selector, View::writable_files)
    }

    /// The same before a fork, for files that the kernel writes by passthrough.
    pub(super) fn quiesce_passthrough(
        &self,
        selector: &BranchRef,
    ) -> Result<Option<FreezeGuard>, Error> {
        self.wait_until_closed(selector, View::passthrough_writable_files)
    }

    /// The same for the parent of a stale branch, which a rebase forks again.
    pub(super) fn quiesce_parent_of_stale(
        &self,
        selector: &BranchRef,
    ) -> Result<Option<FreezeGuard>, Error> {
        let branches = self.lock();
        let stale = selector.find(&branches)?.filter(|branch| branch.record.is_stale);
        let Some(parent) = stale.map(|branch| branch.record.parent) else { return Ok(None) };
        drop(branches);
        self.quiesce_passthrough(&BranchRef::Id(parent))
    }

    fn wait_until_closed(
        &self,
        selector: &BranchRef,
        files: impl Fn(&mut View) -> Vec<PathBuf>,
    ) -> Result<Option<FreezeGuard>, Error> {
        let branches = self.lock();
        let Some(branch) = selector.find(&branches)?.filter(|branch| !branch.record.is_stale)
        else {
            return Ok(None);
        };
        let mounted = self.mounted(branch)?;
        drop(branches);
        let frozen = mounted.freeze();
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        while Instant::now() < deadline && !files(&mut frozen.mounted().lock_as_it_is()).is_empty()
        {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Some(frozen))
    }

    pub(super) fn refuse_open_files(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.mounted(branch)?;
        let paths = mounted.lock_as_it_is().writable_files();
        if paths.is_empty() {
            return Ok(());
        }
        Err(Error::Busy { name: branch.record.name.clone(), paths, users: Vec::new() })
    }

    /// Freezes a branch that is about to be forked. A freeze does not stop passthrough writers; their files must be
    /// closed first (see [`Self::quiesce_passthrough`]).
    pub(super) fn freeze_for_fork(&self, slot: ViewId) -> Result<FreezeGuard, Error> {
        let mounted = self.mount.mounted(slot).at(&self.store.base_path)?;
        let frozen = mounted.freeze();
        let paths = mounted.lock_as_it_is().passthrough_writable_files();
        if paths.is_empty() {
            return Ok(frozen);
        }
        Err(Error::Written {
            name: mounted.name.to_string_lossy().into_owned(),
            paths,
            users: Vec::new(),
        })
    }

    /// Under the gate: shows the rest of a branch over the new base after a partial commit. The new view is frozen as
    /// long as the guard lives.
    pub(super) fn continue_with_rest(
        &self,
        branches: &mut Branches,
        id: BranchId,
        Remainder { layer, quota }: Remainder,
    ) -> Option<Continued> {
        let Branch { mut record, stack, .. } = (**branches.get(&id)?).clone();
        let below = &stack[record.layers.len()..];
        let stack = std::iter::once(Arc::clone(&layer)).chain(below.iter().cloned()).collect();
        record.layers = vec![layer.id.0];
        let outdated = self.replace_view(branches, record, stack, quota, None);
        let branch = (**branches.get(&id)?).clone();
        let frozen = self.mount.mounted(branch.slot).ok().map(|mounted| mounted.freeze());
        Some(Continued { branch, outdated, _frozen: frozen })
    }

    /// Under the gate: gives a branch another record and another stack. A branch that was stale brings the freeze of
    /// its parent. Returns its old view.
    pub(super) fn replace_view(
        &self,
        branches: &mut Branches,
        record: Record,
        stack: Vec<Arc<Layer>>,
        quota: Option<Arc<Quota>>,
        parent_freeze: Option<FreezeGuard>,
    ) -> Option<Arc<MountedBranch>> {
        let slot_of = |id: BranchId| branches.get(&id).map(|branch| branch.slot);
        let parent = match record.parent {
            MAIN_BRANCH => crate::mount::MAIN,
            parent => slot_of(parent).unwrap_or(crate::mount::MAIN),
        };
        let old = slot_of(record.id).and_then(|slot: ViewId| self.mount.remove(slot));
        let slot = self.mount.add(OsStr::new(&record.name), parent, stack.clone());
        let freeze = branches.take_parent_freeze(record.id).or(parent_freeze);
        branches.insert(Branch { record, slot, stack, quota }, freeze);
        old
    }

    pub(super) fn main_layer(&self) -> Arc<Layer> {
        let main = self.mount.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().tree.top()
    }

    /// Under the gate: from the next request on these branches return ESTALE, and they do not freeze their parent any
    /// more.
    pub(super) fn mark_stale(&self, branches: &mut Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.set_stale(*id) else { continue };
            self.mount.set_stale(branch.slot);
        }
    }

    pub(super) fn notify_stale(&self, branches: &Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get(id) else { continue }; // aborted meanwhile
            self.driver.current().hide(*id);
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                self.invalidate_kernel_cache(mounted);
            }
        }
    }

    /// Under the gate: inserts the snapshot layer into the stacks of branches forked before, so that they still see the
    /// earlier base, and removes the snapshot layer of an undone commit.
    pub(super) fn insert_snapshot_layer(
        &self,
        branches: &mut Branches,
        header: &Header,
        snapshot_layer: Option<&SnapshotLayer>,
    ) {
        for id in &header.readers {
            let (Some(branch), Some((layer, changed_paths))) =
                (branches.get_mut(id), snapshot_layer)
            else {
                continue;
            };
            branch.record.lower_layers.push(layer.id.0);
            let lowest = branch.stack.len() - 1;
            branch.stack.insert(lowest, Arc::clone(layer));
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                mounted.replace_layers_later(branch.stack.clone(), Some(changed_paths));
            }
        }
        for id in &header.resumed {
            let (Some(branch), Some(dropped_snapshot)) =
                (branches.get_mut(id), header.dropped_snapshot)
            else {
                continue;
            };
            branch.record.lower_layers.retain(|layer| *layer != dropped_snapshot);
            branch.stack.retain(|layer| layer.id.0 != dropped_snapshot);
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                mounted.replace_layers_later(branch.stack.clone(), None);
            }
        }
    }

    /// Whether any branch is stale.
    pub(super) fn has_stale(&self) -> bool {
        self.lock().values().any(|branch| branch.record.is_stale)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Branches> {
        // Every verb leaves the table right before it can fail or panic; a poisoned lock hides nothing half-done.
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open branch that has this view.
    pub(super) fn id_at(&self, slot: ViewId) -> Option<BranchId> {
        self.lock().iter().find(|(_, branch)| branch.slot == slot).map(|(id, _)| *id)
    }

    /// A branch and its ancestors, without main.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn lineage(&self, selector: &BranchRef) -> Result<Vec<BranchId>, Error> {
        let branches = self.lock();
        let first = selector.find(&branches)?;
        let above = |branch: &&Branch| Some(&**branches.get(&branch.record.parent)?);
        Ok(std::iter::successors(first, above).map(|branch| branch.record.id).collect())
    }

    /// The name of an open branch; `None` for main.
    pub(super) fn name_of(&self, id: BranchId) -> Option<String> {
        self.lock().get(&id).map(|branch| branch.record.name.clone())
    }

    /// All branches, oldest first.
    pub(super) fn list(&self) -> Result<Vec<BranchInfo>, Error> {
        let branches = self.lock();
        branches.keys().map(|id| info(&branches, *id)).collect()
    }
}

pub(super) fn info(branches: &Branches, id: BranchId) -> Result<BranchInfo, Error> {
    let branch = branches.get(&id).ok_or_else(|| Error::NotFound(id.to_string()))?;
    let mut names = vec![branch.record.name.as_str()];
    let mut parent = branch.record.parent;
    while let Some(above) = branches.get(&parent) {
        names.push(&above.record.name);
        parent = above.record.parent;
    }
    names.push("main");
    names.reverse();
    Ok(BranchInfo {
        id,
        name: branch.record.name.clone(),
        parent: branch.record.parent,
        branch_path: format!("/{}", names.join("/")),
        is_stale: branch.record.is_stale,
        is_frozen: !children_of(branches, id).is_empty(),
        created: branch.record.created as f64 / 1e9,
        disk_limit: branch.record.disk_limit,
        disk_used: branch.quota.as_ref().map(|quota| quota.used()),
        disk_refusals: branch.quota.as_ref().map(|quota| quota.refusals()),
    })
}
