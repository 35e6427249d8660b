//! Committing into a parent branch, by what its branches did: one's own changes, and those of siblings that were first.
//!
//! A commit into a branch stacks layers, so that what siblings committed since a fork are the parent's layers that the
//! child's stack does not have. Both sides are found by walking layers; the cost follows the changed names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::branch_log::{Line, MergedChild};
use super::branch_table::names_of;
use super::commit::Commit;
use super::commit_checks::policy;
use super::commit_checks::{CHANGED_AFTER_READ, WRITTEN_BY_OTHERS, refuse_conflicts, sibling_won};
use super::conflicts::CommittedChanges;
use super::driver_sync::hand_over_to_fuse;
use super::{Branch, CommitOptions, Committed, Policy, Workspace, descendants};
use crate::diff::{Pair, RenamedDirs, Side, Walked, rename_by_inode, walk};
use crate::error::{Context, Error};
use crate::injected_panics::panic_if_listed;
use crate::layer::Layer;
use crate::object_copy::copy_attributes;
use crate::overlay::user_xattrs;
use crate::rooted_dir::RootedDir;
use crate::transaction::{Change, ChangeKind};
use crate::view::LayerReplacement;

/// Refuses a commit into a branch that has conflicts, unless it is forced.
pub(super) fn refuse_nested(
    workspace: &Workspace,
    child: &Branch,
    (ours, theirs): (&ChangeSet, &ChangeSet),
    options: &CommitOptions,
) -> Result<(), Error> {
    let record = &child.record;
    let policy = policy(workspace, options);
    let reads = match policy {
        Policy::Serializable => workspace.store.reads(record)?,
        Policy::FirstWinner | Policy::Snapshot => Vec::new(),
    };
    let theirs = theirs.committed_changes();
    if options.force || theirs.is_empty() {
        return Ok(());
    }
    if policy == Policy::FirstWinner && !options.rebase {
        return Err(sibling_won(&record.name));
    }
    let written = ours.conflicts_with(&theirs);
    refuse_conflicts(&record.name, WRITTEN_BY_OTHERS, &written)?;
    refuse_conflicts(&record.name, CHANGED_AFTER_READ, &theirs.conflicts_with_reads(&reads))
}

/// A commit into a parent branch: the child's layers become the top layers of the parent. Other stacks do not change:
/// branches forked before still see the earlier parent.
pub(super) fn commit_to_branch(commit: &Commit<'_>) -> Result<Committed, Error> {
    let Commit { workspace, branch: child, options } = *commit;
    let (id, parent) = (child.record.id, child.record.parent);
    let above = &workspace.table.parent_of(child)?; // its layers do not change: that takes a commit
    let (ours, theirs) = (ChangeSet::of(child)?, ChangeSet::since_fork(above, child)?);
    if ours.is_empty()? {
        return commit.commit_nothing();
    }
    refuse_nested(workspace, child, (&ours, &theirs), options)?;
    ours.merge_attributes(&theirs)?;
    let mounted = workspace.table.mount.mounted(above.slot).at(&workspace.store.base_path)?;
    mounted.lock().make_layer().at(&workspace.store.base_path)?; // only the top layer of a branch may be missing
    let branches = workspace.table.lock();
    hand_over_to_fuse(workspace, above)?; // the kernel cannot mount what several layers make up
    drop(branches);
    // One rename of one record is the commit; what it names must be on disk first.
    workspace.store.sync_store()?;
    let mut branches = workspace.table.lock();
    let stale = match policy(workspace, options) {
        Policy::FirstWinner => {
            let mut rivals = descendants(&branches, parent);
            rivals.retain(|rival| *rival != id); // it has no live children
            rivals
        }
        Policy::Snapshot | Policy::Serializable => Vec::new(),
    };
    let own = child.record.layers.len();
    let stack: Vec<Arc<Layer>> = child.stack[..own].iter().chain(&above.stack).cloned().collect();
    let mut record = above.record.clone();
    record.layers = child.record.layers.iter().chain(&record.layers).copied().collect();
    record.merged_child = Some(MergedChild { child: id, stale: stale.clone() });
    panic_if_listed("nested-commit-locked");
    workspace.store.records.append(&[Line::of(&record)])?; // the commit point
    let synced = workspace.store.records.sync();
    let slot = above.slot;
    let gate = workspace.table.mount.block_requests();
    workspace.table.mark_stale(&mut branches, &stale);
    panic_if_listed("nested-commit-decided");
    let outdated = mounted.lock().replace_layers(stack.clone(), LayerReplacement::Committed);
    drop(gate);
    let names = names_of(&branches, &stale);
    if let Some(above) = branches.get_mut(&parent) {
        (above.record, above.stack) = (record, stack);
    }
    if let Some(mut child) = branches.remove(&id) {
        if let Some(quota) = &child.quota {
            quota.remove_limit();
        }
        child.record.layers.clear(); // they are the parent's now
        workspace.table.remove_branch(&branches, &child);
    }
    // Lines become durable in order: the merged child is complete in all records when the last of these lines is
    // durable.
    if let Some(above) = branches.get_mut(&parent) {
        above.record.merged_child = None;
    }
    let concerned = stale.iter().chain([&parent]).filter_map(|id| branches.get(id));
    let lines = concerned.map(|branch| Line::of(&branch.record));
    let lines: Vec<Line> = std::iter::once(Line::Deleted { layer: id }).chain(lines).collect();
    panic_if_listed("nested-commit-visible");
    let completed = synced.and_then(|()| workspace.store.records.append(&lines));
    workspace.table.mount.invalidate_outdated(slot, &outdated);
    workspace.table.notify_stale(&branches, &stale);
    completed.map_err(|source| {
        let error = Error::Incomplete { what: "commit", source: Box::new(source) };
        workspace.engine.fail_stop.trip(error.to_string());
        error
    })?;
    let count = ours.changes.len();
    let (name, into) = (&child.record.name, &above.record.name);
    tracing::info!("committed {name:?} into {into:?}, {count} paths changed");
    Ok(Committed { changes: ours.changes, stale: names, ..Committed::default() })
}

/// The changes that a group of layers makes to the layers below.
#[derive(Debug, Default)]
pub(super) struct ChangeSet {
    walked: Walked,
    /// Sorted by path.
    pub(super) changes: Vec<Change>,
}

impl ChangeSet {
    /// The changes of a branch since its fork.
    pub(super) fn of(branch: &Branch) -> Result<Self, Error> {
        Self::over(branch, branch.record.layers.len())
    }

    /// The changes that were committed into `parent` since `child` was forked from it.
    pub(super) fn since_fork(parent: &Branch, child: &Branch) -> Result<Self, Error> {
        let is_new = |layer: &&u64| !child.record.lower_layers.contains(layer);
        Self::over(parent, parent.record.layers.iter().take_while(is_new).count())
    }

    fn over(branch: &Branch, own: usize) -> Result<Self, Error> {
        if own == 0 {
            return Ok(Self::default());
        }
        let (own, below) = branch.stack.split_at(own);
        let mut walked = walk(own, below, RenamedDirs::Collapse)?;
        walked.pairs = rename_by_inode(walked.pairs);
        let mut changes = Vec::new();
        for pair in &walked.pairs {
            changes.extend(change(pair)?);
        }
        Ok(Self { walked, changes })
    }

    /// Whether these layers change nothing.
    pub(super) fn is_empty(&self) -> Result<bool, Error> {
        // The root's attributes are no change of a path.
        Ok(self.changes.is_empty() && changed_directories(&self.walked.pairs)?.is_empty())
    }

    /// The changed paths; a path with a change of type counts once.
    pub(super) fn paths(&self) -> BTreeSet<&Path> {
        self.changes.iter().map(|change| change.path.as_path()).collect()
    }

    pub(super) fn committed_changes(&self) -> CommittedChanges {
        let mut theirs = CommittedChanges::default();
        theirs.add(&self.changes);
        theirs
    }

    /// The paths at which `theirs` conflict with the writes of these layers. Paths that the layers hide count as
    /// written: on top of `theirs` they would hide them.
    pub(super) fn conflicts_with(&self, theirs: &CommittedChanges) -> BTreeSet<PathBuf> {
        theirs.conflicts_with(&self.changes, &self.walked.opaque_paths)
    }

    /// Applies the attributes that only `theirs` changed to the directories of these layers: the child's copies would
    /// hide them.
    pub(super) fn merge_attributes(&self, theirs: &Self) -> Result<(), Error> {
        let theirs = changed_directories(&theirs.walked.pairs)?;
        if theirs.is_empty() {
            return Ok(());
        }
        let ours = changed_directories(&self.walked.pairs)?;
        for pair in &self.walked.pairs {
            let Some(after) = pair.after.as_ref().filter(|side| side.is_directory()) else {
                continue;
            };
            let Some(from) = theirs.get(after.path.as_path()) else { continue };
            if !ours.contains_key(after.path.as_path()) {
                let to = (&after.layer.tree, after.place.as_path());
                copy_attributes((&from.layer.tree, &from.place), to).at(&after.path)?;
            }
        }
        Ok(())
    }
}

/// The directories, including the root, that exist on both sides with different attributes, with their attributes after
/// the change.
fn changed_directories(pairs: &[Pair]) -> Result<BTreeMap<&Path, &Side>, Error> {
    let mut found = BTreeMap::new();
    for pair in pairs {
        let (Some(before), Some(after)) = (&pair.before, &pair.after) else { continue };
        let are_directories = before.is_directory() && after.is_directory();
        if are_directories && attributes_differ(before, after)? {
            found.insert(after.path.as_path(), after);
        }
    }
    Ok(found)
}

/// The change at a path; `None` for a directory that is only a parent of changes, and for the root.
fn change(pair: &Pair) -> Result<Option<Change>, Error> {
    let (kind, side, from) = match (&pair.before, &pair.after) {
        (None, Some(after)) => (ChangeKind::Added, after, None),
        (Some(before), None) => (ChangeKind::Deleted, before, None),
        (Some(before), Some(after)) if before.kind() != after.kind() => {
            (ChangeKind::Type, after, None)
        }
        (Some(before), Some(after)) if before.path != after.path && !pair.keeps_name => {
            (ChangeKind::Renamed, after, Some(before.path.clone()))
        }
        (Some(before), Some(after)) if after.is_directory() => {
            if after.path.as_os_str().is_empty() || !attributes_differ(before, after)? {
                return Ok(None);
            }
            (ChangeKind::Metadata, after, None)
        }
        (Some(_), Some(after)) => (ChangeKind::Modified, after, None),
        (None, None) => return Ok(None),
    };
    Ok(Some(Change { path: side.path.clone(), change: kind, from, kind: side.kind().into() }))
}

fn attributes_differ(one: &Side, other: &Side) -> Result<bool, Error> {
    Ok((one.stat.mode, one.stat.owner) != (other.stat.mode, other.stat.owner)
        || xattrs(&one.layer.tree, &one.place)? != xattrs(&other.layer.tree, &other.place)?)
}

fn xattrs(tree: &RootedDir, path: &Path) -> Result<BTreeMap<OsString, Vec<u8>>, Error> {
    let names = user_xattrs(tree, path).at(path)?;
    let value = |name: OsString| {
        let value = tree.get_xattr(path, &name).at(path)?;
        Ok((name, value))
    };
    names.into_iter().map(value).collect()
}
