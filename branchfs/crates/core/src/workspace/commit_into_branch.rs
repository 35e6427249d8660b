//! Committing into a parent branch, by what its branches did: one's own changes, and those of siblings that were first.
//!
//! A commit into a branch stacks layers, so that what siblings committed since a fork are the parent's layers that the
//! child's stack does not have. Both sides are found by walking layers; the cost follows the changed names.

use std::sync::Arc;

use super::branch_log::{Line, MergedChild};
use super::branches::{descendants, names_of};
use super::change_set::ChangeSet;
use super::commit_checks::{CHANGED_AFTER_READ, WRITTEN_BY_OTHERS, refuse_conflicts, sibling_won};
use super::commit_options::{CommitOptions, policy};
use super::driver_sync::hand_over_to_fuse;
use super::{Branch, Committed, Policy, Workspace};
use crate::error::{Context, Error};
use crate::injected_panics::panic_if_listed;
use crate::layer::Layer;
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
/// branches forked before still see the earlier parent. `None` if the child changes nothing: then nothing was done.
pub(super) fn commit_to_branch(
    workspace: &Workspace,
    child: &Branch,
    options: &CommitOptions,
) -> Result<Option<Committed>, Error> {
    let (id, parent) = (child.record.id, child.record.parent);
    let above = &workspace.table.parent_of(child)?; // its layers do not change: that takes a commit
    let (ours, theirs) = (ChangeSet::of(child)?, ChangeSet::since_fork(above, child)?);
    if ours.is_empty()? {
        return Ok(None);
    }
    refuse_nested(workspace, child, (&ours, &theirs), options)?;
    ours.merge_attributes(&theirs)?;
    let mounted = workspace.table.mount.mounted(above.slot).at(&workspace.store.base_path)?;
    mounted.lock().tree.make_layer().at(&workspace.store.base_path)?; // only the top layer of a branch may be missing
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
    record.merged_child = Some(Box::new(MergedChild { child: id, stale: stale.clone() }));
    panic_if_listed("nested-commit-locked");
    workspace.store.records.append(&[Line::of(&record)])?; // the commit point
    let synced = workspace.store.records.sync();
    let slot = above.slot;
    let gate = workspace.table.mount.block_requests();
    workspace.table.mark_stale(&mut branches, &stale);
    panic_if_listed("nested-commit-decided");
    let outdated = mounted.lock().tree.replace_layers(stack.clone(), LayerReplacement::Committed);
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
    Ok(Some(Committed { changes: ours.changes, stale: names, ..Committed::default() }))
}
