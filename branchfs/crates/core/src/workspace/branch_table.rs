//! The table of open branches and their views: lookups, guards, freezes, and how branches come and go.
//!
//! Lock order: `branches`, then the gate of the mount. Verbs that take long do not keep the table locked: they hold a
//! [`BranchGuard`] of one branch. Verbs that fork, commit or end this branch, or end one above it, wait for the guard;
//! other branches are not affected.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::branch_log::{Line, Record};
use super::driver_sync::Drivers;
use super::history::oldest;
use super::partial_commit::{Continued, Remainder};
use super::store::{Store, Veil};
use super::{BranchId, BranchInfo, BranchRef, MAIN_BRANCH};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::mount::{FreezeGuard, MAIN, Mount, MountedBranch, ViewId};
use crate::quota::Quota;
use crate::transaction::Header;
use crate::view::View;

/// How long a verb waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// A branch that is open.
#[derive(Clone, Debug)]
pub(super) struct Branch {
    pub(super) record: Record,
    pub(super) slot: ViewId,
    /// Its whole stack, top first, ending with the base.
    pub(super) stack: Vec<Arc<Layer>>,
    /// Its disk usage, if it or an ancestor has a limit.
    pub(super) quota: Option<Arc<Quota>>,
}

/// Open branches by number, oldest first.
#[derive(Debug, Default)]
pub(super) struct Branches {
    by_id: BTreeMap<BranchId, Branch>,
    /// Names and parents never change.
    by_name: HashMap<String, BranchId>,
    children: HashMap<BranchId, BTreeSet<BranchId>>,
    held: BTreeSet<BranchId>,
    /// The freeze of the parent, for each branch that is not stale.
    parent_freezes: HashMap<BranchId, FreezeGuard>,
}

impl Branches {
    /// Adds a branch, which freezes its parent unless it is stale.
    pub(super) fn insert(&mut self, branch: Branch, parent_freeze: Option<FreezeGuard>) {
        let id = branch.record.id;
        debug_assert_eq!(parent_freeze.is_none(), branch.record.is_stale, "branch {id}");
        self.parent_freezes.extend(parent_freeze.map(|freeze| (id, freeze)));
        self.by_name.insert(branch.record.name.clone(), id);
        self.children.entry(branch.record.parent).or_default().insert(id);
        self.by_id.insert(id, branch);
    }

    pub(super) fn remove(&mut self, id: &BranchId) -> Option<Branch> {
        let branch = self.by_id.remove(id)?;
        self.parent_freezes.remove(id);
        self.by_name.remove(&branch.record.name);
        if let Some(siblings) = self.children.get_mut(&branch.record.parent) {
            siblings.remove(id);
            if siblings.is_empty() {
                self.children.remove(&branch.record.parent);
            }
        }
        Some(branch)
    }

    /// Marks a branch as stale: it freezes its parent no longer.
    pub(super) fn set_stale(&mut self, id: BranchId) -> Option<&Branch> {
        self.parent_freezes.remove(&id);
        let branch = self.by_id.get_mut(&id)?;
        branch.record.is_stale = true;
        Some(branch)
    }

    /// Takes the freeze of a branch's parent out of the table, for a branch that is inserted again.
    pub(super) fn take_parent_freeze(&mut self, id: BranchId) -> Option<FreezeGuard> {
        self.parent_freezes.remove(&id)
    }

    pub(super) fn named(&self, name: &str) -> Option<&Branch> {
        self.by_id.get(self.by_name.get(name)?)
    }

    pub(super) fn hold(&mut self, id: BranchId) {
        self.held.insert(id);
    }

    pub(super) fn let_go(&mut self, id: BranchId) {
        self.held.remove(&id);
    }

    /// Whether this branch, or one below it, is held.
    pub(super) fn holds(&self, id: BranchId) -> bool {
        let above = |below: &BranchId| self.by_id.get(below).map(|branch| branch.record.parent);
        let lineage = |held: &BranchId| std::iter::successors(Some(*held), above);
        self.held.iter().flat_map(lineage).any(|found| found == id)
    }

    /// Whether this branch itself is held.
    pub(super) fn is_held(&self, id: BranchId) -> bool {
        self.held.contains(&id)
    }

    /// Those forked from this branch, stale ones too.
    pub(super) fn children(&self, id: BranchId) -> impl Iterator<Item = &Branch> {
        self.children.get(&id).into_iter().flatten().filter_map(|child| self.by_id.get(child))
    }
}

impl Deref for Branches {
    type Target = BTreeMap<BranchId, Branch>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

/// For a branch that changes; branches come and go by the methods above.
impl DerefMut for Branches {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.by_id
    }
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

/// While it exists, the branch stays open and without children, and no other verb uses its layers.
pub(super) struct BranchGuard<'w> {
    table: &'w BranchTable,
    pub(super) branch: Branch,
}

impl Drop for BranchGuard<'_> {
    fn drop(&mut self) {
        self.table.lock().let_go(self.branch.record.id);
        self.table.released.notify_all();
    }
}

impl BranchTable {
    pub(super) fn new(mount: Arc<Mount>, store: Arc<Store>, driver: Arc<Drivers>) -> Self {
        Self { branches: Mutex::default(), released: Condvar::new(), mount, store, driver }
    }

    /// The view of a branch.
    pub(super) fn mounted(&self, branch: &Branch) -> Result<Arc<MountedBranch>, Error> {
        self.mount.mounted(branch.slot).at(&self.store.base_path)
    }

    /// Drops a branch and all branches below it, stale ones too.
    pub(super) fn abort_below(&self, branches: &mut Branches, top: BranchId) -> Result<(), Error> {
        let mut dropped = vec![top];
        let mut position = 0;
        while let Some(parent) = dropped.get(position).copied() {
            dropped.extend(branches.children(parent).map(|child| child.record.id));
            position += 1;
        }
        let gone = dropped.iter().map(|id| Line::Deleted { gone: *id });
        self.store.records.append(&gone.collect::<Vec<_>>())?;
        for id in dropped.iter().rev() {
            let Some(branch) = branches.remove(id) else { continue };
            self.remove_branch(branches, &branch);
        }
        Ok(())
    }

    /// Takes a branch, which is not in the table any more, out of the mount, and the layers that were its alone into the
    /// trash. Its record is ended by the caller.
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
        self.store.drop_unused_snapshots(branches, &branch.record.below);
        if let Some(mounted) = mounted {
            self.invalidate_kernel_cache(mounted);
        }
    }

    /// Invalidates an ended or stale branch in the kernel's caches: its name immediately, the rest of a big one in the background.
    pub(super) fn invalidate_kernel_cache(&self, mounted: Arc<MountedBranch>) {
        /// So many nodes take well under a millisecond.
        const NODES_AT_ONCE_MAX: usize = 64;
        if mounted.lock_as_it_is().nodes.len() <= NODES_AT_ONCE_MAX {
            return self.mount.invalidate(&mounted);
        }
        self.mount.expire(&mounted);
        self.store.background.invalidate(&self.mount, mounted);
    }

    /// Holds a branch, as soon as nobody else does; `None` for main.
    ///
    /// # Errors
    /// `NotFound`, `Unsupported` for a branch that could not be shown, and what `check` finds against it.
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

    /// The table, as soon as the branch is not held any more in the way that `is_concerned` says. Main is never held.
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
        self.lock().get(&parent).cloned().ok_or_else(|| Error::NotFound(parent.to_string()))
    }

    /// Takes a branch out of the table whose commit to the base has happened. Its record ends with the transaction.
    pub(super) fn remove_committed(&self, branches: &mut Branches, id: BranchId) {
        let Some(mut committed) = branches.remove(&id) else { return };
        if !self.store.is_elsewhere() {
            committed.record.layers.clear(); // they go with the commit
        }
        self.remove_branch(branches, &committed);
    }

    /// Lets those branches be written again that have no live children any more.
    pub(super) fn thaw_idle(&self, branches: &Branches) {
        if self.mount.fail_stop.is_tripped() {
            return; // a branch whose layers may hold objects of the base stays read-only
        }
        for id in self.driver.current().frozen() {
            if children_of(branches, id).is_empty() && !branches.is_held(id) {
                // A branch that stays read-only says so to whoever writes there; the verb itself has succeeded.
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

    /// Closing a file is told to us after the caller goes on: gives it a moment, in which other verbs go on. The branch is
    /// frozen from then on until the guard is dropped.
    pub(super) fn await_writers(&self, selector: &BranchRef) -> Result<Option<FreezeGuard>, Error> {
        self.await_none_of(selector, View::written)
    }

    /// The same before a fork, for those that the kernel serves by itself.
    pub(super) fn await_kernel_writers(
        &self,
        selector: &BranchRef,
    ) -> Result<Option<FreezeGuard>, Error> {
        self.await_none_of(selector, View::written_by_kernel)
    }

    fn await_none_of(
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

    pub(super) fn refuse_writers(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.mounted(branch)?;
        let paths = mounted.lock_as_it_is().written();
        if paths.is_empty() {
            return Ok(());
        }
        Err(Error::Busy { name: branch.record.name.clone(), paths, users: Vec::new() })
    }

    /// Freezes a branch that is about to be forked. What the kernel writes by itself no freezing stops: it must be
    /// closed, for which [`Self::await_kernel_writers`] has given time.
    pub(super) fn freeze_for_fork(&self, slot: ViewId) -> Result<FreezeGuard, Error> {
        let mounted = self.mount.mounted(slot).at(&self.store.base_path)?;
        let frozen = mounted.freeze();
        let paths = mounted.lock_as_it_is().written_by_kernel();
        if paths.is_empty() {
            return Ok(frozen);
        }
        Err(Error::Written {
            name: mounted.name.to_string_lossy().into_owned(),
            paths,
            users: Vec::new(),
        })
    }

    /// Under the gate: a branch whose part was committed shows the rest over the new base. Its new view is frozen as long as
    /// the guard lives.
    pub(super) fn continue_with_rest(
        &self,
        branches: &mut Branches,
        id: BranchId,
        Remainder { layer, quota }: Remainder,
    ) -> Option<Continued> {
        let Branch { mut record, stack, .. } = branches.get(&id)?.clone();
        let below = &stack[record.layers.len()..];
        let stack = std::iter::once(Arc::clone(&layer)).chain(below.iter().cloned()).collect();
        record.layers = vec![layer.id.0];
        let outdated = self.replace_view(branches, record, stack, quota, None);
        let branch = branches.get(&id)?.clone();
        let frozen = self.mount.mounted(branch.slot).ok().map(|mounted| mounted.freeze());
        Some(Continued { branch, outdated, _frozen: frozen })
    }

    /// Under the gate: shows a branch with another record and another stack at its name. A branch that was stale comes with
    /// the freeze of its parent. Returns its old view.
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
        main.lock().top()
    }

    /// Under the gate: from the next request on these branches return ESTALE and no longer freeze their parent.
    pub(super) fn mark_stale(&self, branches: &mut Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.set_stale(*id) else { continue };
            self.mount.set_stale(branch.slot);
        }
    }

    pub(super) fn notify_stale(&self, branches: &Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get(id) else { continue }; // aborted meanwhile
            self.driver.current().detach(*id);
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                self.invalidate_kernel_cache(mounted);
            }
        }
    }

    /// Under the gate: everybody forked before goes on seeing what was.
    pub(super) fn veil(&self, branches: &mut Branches, header: &Header, veil: Option<&Veil>) {
        for id in &header.observers {
            let (Some(branch), Some((layer, woven))) = (branches.get_mut(id), veil) else {
                continue;
            };
            branch.record.below.push(layer.id.0);
            let lowest = branch.stack.len() - 1;
            branch.stack.insert(lowest, Arc::clone(layer));
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                mounted.lock_as_it_is().restack_later(branch.stack.clone(), Some(woven));
            }
        }
        for id in &header.unveiled {
            let (Some(branch), Some(lifted)) = (branches.get_mut(id), header.lifted) else {
                continue;
            };
            branch.record.below.retain(|layer| *layer != lifted);
            branch.stack.retain(|layer| layer.id.0 != lifted);
            if let Ok(mounted) = self.mount.mounted(branch.slot) {
                mounted.lock_as_it_is().restack_later(branch.stack.clone(), None);
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Branches> {
        // Every verb leaves the table right before it can fail or panic; a poisoned lock hides nothing half-done.
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The branch that a slot of the mount shows.
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
        let above = |branch: &&Branch| branches.get(&branch.record.parent);
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

pub(super) fn children_of(branches: &Branches, id: BranchId) -> Vec<String> {
    let live = branches.children(id).filter(|branch| !branch.record.is_stale);
    live.map(|branch| branch.record.name.clone()).collect()
}

/// Live branches below `top`, children before their own children.
pub(super) fn below(branches: &Branches, top: BranchId) -> Vec<BranchId> {
    let mut found = vec![top];
    let mut position = 0;
    while let Some(&parent) = found.get(position) {
        let live = branches.children(parent).filter(|branch| !branch.record.is_stale);
        found.extend(live.map(|branch| branch.record.id));
        position += 1;
    }
    found.split_off(1)
}

pub(super) fn names_of(branches: &Branches, ids: &[BranchId]) -> Vec<String> {
    ids.iter().map(|id| branches[id].record.name.clone()).collect()
}
