//! Rebase: forks a branch again from the present state of its parent, with its changes on top.
//!
//! Nothing is copied: the branch keeps its layers, and its record gets a new fork time and the layers that its parent has
//! now. The changes stay the same, because no changed path was changed in the parent since the fork, or because the
//! caller forces the branch's version. Then the recorded state of the base is replaced by the present one, so that a later
//! commit compares with the new fork. The branch's record is synced first. A crash in between leaves the older recorded
//! state, which at worst causes a false conflict.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::branch_log::Line;
use super::branches::has_no_live_children;
use super::change_set::ChangeSet;
use super::commit_checks::plan_against;
use super::conflicts::CommittedChanges;
use super::driver_sync::hand_over_to_fuse;
use super::lower_files::transactions_since_fork;
use super::{Branch, BranchRef, MAIN_BRANCH, Policy, Workspace, now};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::mount::{FreezeGuard, MAIN};
use crate::overlayfs_upper::NormaliseFor;
use crate::transaction::{self, Metadata, TransactionRoots};
use crate::write_set::{Fingerprint, Precondition};

/// How to handle paths that both the branch and others changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// The branch is not rebased.
    Refuse,
    /// The branch's version is kept, and can be committed.
    Override,
    /// The branch's version is kept, and a commit finds the conflict again.
    Leave,
}

impl Workspace {
    /// Forks a stale or live branch again from its parent's present state and keeps its changes. Returns the conflicting
    /// paths. `dry_run` changes nothing.
    ///
    /// # Errors
    /// `Conflict` (lists the paths that both changed, unless forced), `Frozen`, `Busy`, `Stale` (the parent), `Stopped`, `Io`:
    /// the branch is unchanged. `Incomplete`: it was rebased, and transactions are stopped.
    pub fn rebase(
        &self,
        selector: &BranchRef,
        resolution: Resolution,
        dry_run: bool,
    ) -> Result<BTreeSet<PathBuf>, Error> {
        let _frozen = self.table.quiesce(selector)?;
        let _parent_frozen = self.table.quiesce_parent_of_stale(selector)?;
        let _transaction_lock = self.engine.begin_transaction()?;
        let held = self
            .table
            .hold(selector, has_no_live_children)?
            .ok_or_else(|| Error::Usage("main has no parent to be rebased onto".to_owned()))?;
        let branch = &held.branch;
        let parent = match branch.record.parent {
            MAIN_BRANCH => None,
            _ => Some(self.table.parent_of(branch)?),
        };
        if let Some(stale) = parent.as_ref().filter(|parent| parent.record.is_stale) {
            return Err(Error::Stale(stale.record.name.clone()));
        }
        let rebased = prepare_rebase(self, branch).and_then(|()| {
            let obstacles = find_obstacles(self, branch, parent.as_ref())?;
            if !obstacles.conflicts.is_empty() && resolution == Resolution::Refuse {
                return Err(conflict(&branch.record.name, obstacles.conflicts));
            }
            let cut_off = self.find_cut_off(branch, next_stack(self, branch, parent.as_ref()))?;
            if !cut_off.lost.is_empty() && resolution != Resolution::Leave {
                return Err(lost_content(&branch.record.name, cut_off.lost));
            }
            if !dry_run {
                cut_off.complete(self)?;
                obstacles.merge_attributes(branch)?;
                obstacles.open_shared(self, branch)?;
                let is_left = resolution == Resolution::Leave;
                let left = if is_left { obstacles.conflicts.clone() } else { BTreeSet::new() };
                move_onto(self, branch, parent.as_ref(), &left)?;
            }
            Ok(obstacles.conflicts)
        });
        drop(held);
        self.table.thaw_idle(&self.table.lock());
        self.store.empty_trash();
        rebased
    }
}

/// Stops all writes in the branch, and normalises its layers. A stale branch of an earlier mount, which has no driver any
/// more, is handed over to the FUSE view for that.
fn prepare_rebase(workspace: &Workspace, branch: &Branch) -> Result<(), Error> {
    let (driver, id) = (workspace.driver.current(), branch.record.id);
    if !branch.record.is_stale {
        workspace.table.refuse_open_files(branch)?;
    }
    driver.freeze(id, NormaliseFor::Whole)?;
    let is_frozen = driver.frozen().contains(&id);
    if branch.record.is_stale && !is_frozen && workspace.store.is_written_by_overlayfs(branch)? {
        hand_over_to_fuse(workspace, branch)?;
    }
    let mounted = workspace.table.mounted(branch)?;
    mounted.lock().tree.make_layer().at(&workspace.store.base_path)
}

/// The conflicts between a branch and its parent's present state.
fn find_obstacles(
    workspace: &Workspace,
    branch: &Branch,
    parent: Option<&Branch>,
) -> Result<Obstacles, Error> {
    let (theirs, conflicts, merged, shared) = match parent {
        None => {
            let (theirs, attributes) = theirs_of_main(workspace, branch)?;
            let _staged = workspace.stage(branch)?;
            let plan = plan_against(
                workspace,
                branch,
                workspace.engine.traces_since(branch)?,
                attributes,
                &theirs.created_directories(),
            )?;
            let written = theirs.conflicts_with(&plan.changes, &plan.written);
            let merged = plan.merged_attributes();
            let merged = merged.map(|(path, new)| (path.to_path_buf(), new.clone())).collect();
            (theirs, written.union(&plan.drift).cloned().collect(), merged, plan.shared)
        }
        Some(parent) => {
            let (ours, theirs) = (
                ChangeSet::of(branch)?,
                ChangeSet::since_fork(parent, branch)?.committed_changes(),
            );
            let written = ours.conflicts_with(&theirs);
            (theirs, written, Vec::new(), BTreeSet::new())
        }
    };
    let mut obstacles = Obstacles { conflicts, merged, shared };
    if workspace.store.settings.policy == Policy::Serializable {
        obstacles
            .conflicts
            .extend(theirs.conflicts_with_reads(&workspace.store.reads(&branch.record)?));
    }
    Ok(obstacles)
}

/// Returns the changes committed to main, or undone there, since the fork, and the earlier attributes of the objects.
/// They are in the snapshot layers, and for a stale branch in the history. Commits that have left the history are found by
/// their traces in the base.
fn theirs_of_main(
    workspace: &Workspace,
    branch: &Branch,
) -> Result<(CommittedChanges, BTreeMap<PathBuf, Metadata>), Error> {
    let record = &branch.record;
    let (mut theirs, mut attributes) =
        (workspace.store.committed_changes_of(record)?, BTreeMap::new());
    if !record.is_stale {
        return Ok((theirs, attributes));
    }
    for later in transactions_since_fork(&workspace.engine.disk()?, branch)? {
        theirs.add(&later.changes);
        for step in &later.steps {
            if let Some((path, old)) = step.attributes_before() {
                attributes.entry(path.to_path_buf()).or_insert_with(|| old.clone());
            }
        }
    }
    Ok((theirs, attributes))
}

/// Puts a branch on top of its parent's present state, and presents it. The conflicts in `left` stay conflicts.
fn move_onto(
    workspace: &Workspace,
    branch: &Branch,
    parent: Option<&Branch>,
    left: &BTreeSet<PathBuf>,
) -> Result<(), Error> {
    let parent_slot = parent.map_or(MAIN, |parent| parent.slot);
    let is_stale = branch.record.is_stale;
    let parent_freeze =
        is_stale.then(|| workspace.table.freeze_for_fork(parent_slot)).transpose()?;
    replace_fork(workspace, branch, parent, left, parent_freeze)
}

/// The layer stack of a branch on top of its parent's present state.
fn next_stack(workspace: &Workspace, branch: &Branch, parent: Option<&Branch>) -> Vec<Arc<Layer>> {
    let own = branch.stack.iter().take(branch.record.layers.len());
    let below =
        parent.map_or(vec![Arc::clone(&workspace.store.base)], |parent| parent.stack.clone());
    own.cloned().chain(below).collect()
}

fn replace_fork(
    workspace: &Workspace,
    branch: &Branch,
    parent: Option<&Branch>,
    left: &BTreeSet<PathBuf>,
    parent_freeze: Option<FreezeGuard>,
) -> Result<(), Error> {
    if workspace.store.is_written_by_overlayfs(branch)? {
        hand_over_to_fuse(workspace, branch)?; // the kernel has the old fork mounted
    }
    if let Some(parent) = parent {
        workspace.driver.freeze_parent(parent.record.id)?;
        ChangeSet::of(branch)?.merge_attributes(&ChangeSet::since_fork(parent, branch)?)?;
    }
    let own = &branch.stack[..branch.record.layers.len()];
    let stack = next_stack(workspace, branch, parent);
    let mut record = branch.record.clone();
    record.is_stale = false;
    record.created = now();
    record.lower_layers = parent.map_or(Vec::new(), |parent| {
        [&parent.record.layers[..], &parent.record.lower_layers].concat()
    });
    let base = parent.is_none().then(|| workspace.engine.disk()).transpose()?;
    workspace.store.sync_store()?; // the layers that the record names
    let mut branches = workspace.table.lock();
    workspace.store.records.append(&[Line::of(&record)])?; // the commit point
    let synced = workspace.store.records.sync();
    let gate = workspace.table.mount.block_requests();
    let quota = branch.quota.clone();
    let old = workspace.table.replace_view(&mut branches, record, stack, quota, parent_freeze);
    drop(gate);
    drop(branches);
    if let Some(old) = old {
        workspace.table.invalidate_kernel_cache(old);
    }
    if let Some(disk) = base {
        for (layer, number) in own.iter().zip(&branch.record.layers) {
            let path = workspace.store.layer_path(*number);
            let never = Precondition::Present(Fingerprint::NEVER);
            let now = |path: &Path| match left.contains(path) {
                true => Ok(never),
                false => present(&disk, path),
            };
            let noted = layer.update_preconditions(now).and_then(|()| {
                left.iter().try_for_each(|path| layer.record_precondition(path, never))
            });
            if let Err(error) = noted {
                // The older recorded state may cause a false conflict; nothing is lost.
                tracing::warn!("cannot rewrite the write set in {}: {error}", path.display());
            }
        }
    }
    synced.map_err(|source| {
        let error = Error::Incomplete { what: "rebase", source: Box::new(source) };
        workspace.engine.fail_stop.trip(error.to_string());
        error
    })?;
    workspace.store.drop_unused_snapshots(&workspace.table.lock(), &branch.record.lower_layers);
    tracing::info!("rebased branch {:?}", branch.record.name);
    Ok(())
}

/// The changes in the parent of a branch since its fork that concern the branch.
struct Obstacles {
    /// Paths that both changed.
    conflicts: BTreeSet<PathBuf>,
    /// Directories of the base that the branch has in its layers, with the attributes of both sides.
    merged: Vec<(PathBuf, Metadata)>,
    /// Directories that both created.
    shared: BTreeSet<PathBuf>,
}

impl Obstacles {
    /// Copies attributes that were set in the parent since the fork to the directories in the branch's layers, unless the
    /// branch changed them, because its copies would hide them.
    fn merge_attributes(&self, branch: &Branch) -> Result<(), Error> {
        let own = &branch.stack[..branch.record.layers.len()];
        for (path, merged) in &self.merged {
            for layer in own {
                match layer.tree.stat(path) {
                    Err(Errno::NOENT | Errno::NOTDIR) => continue,
                    other => drop(other.at(path)?),
                }
                let mut wanted = merged.clone();
                (wanted.atime, wanted.mtime) =
                    transaction::times_of(&layer.tree.stat(path).at(path)?);
                transaction::set_metadata(&layer.tree, path, &wanted).at(path)?;
                break;
            }
        }
        Ok(())
    }

    /// Lets the directories that both created show what the parent has in them. At the old fork nothing was below them,
    /// so that a crash before the rebase is decided changes nothing in the branch.
    fn open_shared(&self, workspace: &Workspace, branch: &Branch) -> Result<(), Error> {
        let opaque = OsStr::new(workspace.store.namespace.opaque());
        for path in &self.shared {
            for layer in &branch.stack[..branch.record.layers.len()] {
                match layer.tree.remove_xattr(path, opaque) {
                    Ok(()) | Err(Errno::NODATA | Errno::NOENT | Errno::NOTDIR) => {}
                    Err(error) => return Err(error).at(path),
                }
            }
        }
        Ok(())
    }
}

/// The object at a path of the base.
fn present(disk: &TransactionRoots, path: &Path) -> Result<Precondition, Errno> {
    match disk.base.stat(path) {
        Ok(stat) => Ok(Precondition::Present(Fingerprint::of(&stat))),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(Precondition::Absent),
        Err(error) => Err(error),
    }
}

fn conflict(name: &str, paths: BTreeSet<PathBuf>) -> Error {
    Error::Conflict {
        message: format!(
            "branch {name} cannot be rebased: its parent has changed at the same paths since the fork"
        ),
        paths: paths.into_iter().collect(),
        hint: "the branch is unchanged: rebase with --force to keep its version of these paths, or abort it",
    }
}

fn lost_content(name: &str, paths: BTreeSet<PathBuf>) -> Error {
    Error::Conflict {
        message: format!(
            "branch {name} cannot be rebased: it has only parts of these files, and the rest was removed from the base and from the history"
        ),
        paths: paths.into_iter().collect(),
        hint: "the branch is unchanged: put the original files back, or abort it; commit --rebase --skip rebases it without that content, and you can then delete these files in it",
    }
}
