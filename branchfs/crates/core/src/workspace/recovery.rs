//! Starting a workspace: recovers the store after a crash, and opens its branches.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Branches;
use super::branch_log::{LoadedLog, MergedChild, Record, oldest};
use super::{Branch, BranchId, Workspace};
use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::layer::Layer;
use crate::mount::MAIN;
use crate::no_follow;
use crate::quota::Quota;
use crate::rooted_dir::remove_path;
use crate::transaction::{self, Kind};
use crate::view::HIDDEN;

/// Recovers the store after a crash, and adds its branches to the mount.
pub(super) fn recover(workspace: &Workspace, mut loaded: LoadedLog) -> Result<Vec<String>, Error> {
    let mut done = Vec::new();
    workspace.store.ctime_log.finish_pending_unlink()?;
    let disk = workspace.engine.disk()?;
    let records = &mut loaded.records;
    let recovered = transaction::recover(&disk).map_err(|error| match error {
        Error::SeveralUnfinished { journal, transactions } => Error::SeveralUnfinished {
            journal: workspace.store.base_store_path.join(journal),
            transactions,
        },
        other => other,
    })?;
    if let Some(recovered) = recovered {
        let header = &recovered.decided.header;
        let trash = workspace.store.trash_name("tx", header.transaction);
        done.push(describe(header.kind, recovered.is_committed, records));
        if recovered.is_committed {
            make_stale(records, &header.stale);
            workspace.store.restack_records(records, &disk, &recovered.decided)?;
            workspace.store.release_layers(&recovered.decided)?;
            match (header.kind, &header.rest) {
                (Kind::Commit { branch }, Some(rest)) => {
                    records.entry(branch).and_modify(|record| record.layers = vec![rest.layer]);
                }
                (Kind::Commit { branch }, None) if records.remove(&branch).is_some() => {
                    workspace.store.drop_record(branch)?;
                }
                _ => {}
            }
            workspace.store.write_records(records.values())?;
            workspace.engine.add_to_history(&disk, &recovered.decided, oldest(records.values()))?;
        } else {
            header.rest.iter().for_each(|rest| workspace.store.remove_rest(rest.layer));
            workspace.store.ctime_log.record_rollback(&disk, &recovered.decided)?;
            recovered.decided.discard(&disk, &trash)?;
        }
    }
    finish_merged_children(workspace, records)?;
    drop_damaged(workspace, &mut loaded, &mut done)?;
    let records = &loaded.records;
    let past = transaction::history(&disk)?;
    let numbers = past.iter().map(|past| past.commit.header.transaction);
    let last = records.keys().chain(&loaded.deleted).copied().chain(numbers).max();
    workspace.store.last_number.store(last.unwrap_or(0), Ordering::Relaxed);
    let keep: Vec<u64> = records
        .values()
        .flat_map(|record| record.layers.iter().chain(&record.lower_layers).copied())
        .collect();
    if workspace.store.is_external() {
        let own: Vec<u64> =
            records.values().flat_map(|record| record.layers.iter().copied()).collect();
        let snapshot_layers: Vec<u64> =
            keep.iter().copied().filter(|id| !own.contains(id)).collect();
        for (path, _) in unknown_layers(&workspace.store.base_store_path, &snapshot_layers)? {
            workspace.store.move_to_trash(&path, "lost");
        }
    }
    clear_layers(workspace, &keep, &loaded.deleted, &mut done)?;
    // A layer that could not be deleted stays recorded as one without a branch.
    loaded.deleted.retain(|id| no_follow::exists(&workspace.store.layer_path(*id)).unwrap_or(true));
    workspace.store.records.compact(&loaded)?;
    if !loaded.records.is_empty() {
        // The last daemon may have died before it synced; which records are durable is unknown.
        workspace.store.records.sync_with(&workspace.store.store_path.join("layers"))?;
    }
    let mut branches = workspace.table.lock();
    for record in loaded.records.into_values() {
        let above = branches.get(&record.parent).and_then(|parent| parent.quota.as_ref());
        let quota = Quota::of(record.disk_limit, above);
        let stack = open_stack(workspace, &record, &loaded.created, &branches, quota.as_ref())?;
        let parent = branches.get(&record.parent).map_or(MAIN, |parent| parent.slot);
        let slot = workspace.table.mount.add(OsStr::new(&record.name), parent, stack.clone());
        let freeze = if record.is_stale {
            workspace.table.mount.set_stale(slot);
            None
        } else {
            Some(workspace.table.mount.mounted(parent).at(&workspace.store.base_path)?.freeze())
        };
        branches.insert(Branch { record, slot, stack, quota }, freeze);
    }
    drop(branches);
    workspace.store.empty_trash();
    Ok(done)
}

/// Completes commits into branches that a crash interrupted.
fn finish_merged_children(
    workspace: &Workspace,
    records: &mut BTreeMap<BranchId, Record>,
) -> Result<(), Error> {
    let absorbed: Vec<(BranchId, MergedChild)> = records
        .values_mut()
        .filter_map(|record| Some((record.id, *record.merged_child.take()?)))
        .collect();
    for (parent, MergedChild { child, stale }) in absorbed {
        make_stale(records, &stale);
        records.remove(&child);
        workspace.store.drop_record(child)?;
        workspace
            .store
            .write_records(stale.iter().chain([&parent]).filter_map(|id| records.get(id)))?;
    }
    Ok(())
}

/// Drops the records whose layer is missing although it was created, with the branches below them.
fn drop_damaged(
    workspace: &Workspace,
    loaded: &mut LoadedLog,
    done: &mut Vec<String>,
) -> Result<(), Error> {
    let LoadedLog { records, created: made, deleted: gone, .. } = loaded;
    let mut missing = BTreeSet::new();
    for layer in records.values().flat_map(|record| &record.layers) {
        // After a power failure the removal of a layer's content may be durable, and the earlier move of the layer to
        // the trash not.
        let upper = workspace.store.layer_path(*layer).join("upper");
        if made.contains(layer) && !no_follow::exists(&upper).at(upper)? {
            missing.insert(*layer);
        }
    }
    let mut given_up = BTreeSet::new();
    // Parents come before their children.
    for record in records.values() {
        let lost = record.layers.iter().find(|layer| missing.contains(layer));
        if lost.is_some() || given_up.contains(&record.parent) {
            given_up.insert(record.id);
        }
        if let Some(layer) = lost {
            done.push(format!(
                "branch {} was dropped: its layer {} is missing (an abort interrupted by a power \
                    failure?); if it was not aborted, its changes are lost",
                record.name,
                workspace.store.layer_path(*layer).display()
            ));
        }
    }
    for id in given_up {
        for layer in records.remove(&id).into_iter().flat_map(|record| record.layers) {
            gone.remove(&layer); // the rest of it is kept
        }
        workspace.store.drop_record(id)?;
    }
    Ok(())
}

/// Deletes layers that no record names, if no data can be lost. A layer whose record was lost in a power failure is
/// moved to `lost/`: nothing of the branch was synced, but it has data.
fn clear_layers(
    workspace: &Workspace,
    keep: &[u64],
    gone: &BTreeSet<u64>,
    done: &mut Vec<String>,
) -> Result<(), Error> {
    for (path, id) in unknown_layers(&workspace.store.store_path, keep)? {
        let is_nobodys = id.is_none_or(|id| gone.contains(&id))
            || no_follow::exists(&path.join("changes")).at(&path)?;
        if is_nobodys || !holds_changes(&path)? {
            workspace.store.move_to_trash(&path, "lost");
            continue;
        }
        let lost = workspace.store.store_path.join("lost");
        if !no_follow::exists(&lost).at(&lost)? {
            workspace.store.make_directory(&lost)?;
        }
        let to = lost.join(path.file_name().unwrap_or_default());
        no_follow::rename(&path, &to).at(&path)?;
        done.push(format!(
            "a branch was lost in a power cut before its record was on disk; no file in it had \
                been synced; its files are in {}",
            to.display()
        ));
    }
    Ok(())
}

/// Opens a recorded branch's layers on top of its parent's stack.
fn open_stack(
    workspace: &Workspace,
    record: &Record,
    made: &BTreeSet<u64>,
    branches: &Branches,
    quota: Option<&Arc<Quota>>,
) -> Result<Vec<Arc<Layer>>, Error> {
    let mut stack = Vec::new();
    for layer in &record.layers {
        let path = workspace.store.layer_path(*layer);
        let work = path.join("work");
        remove_path(&work).at(&work)?;
        let is_made = made.contains(layer);
        let layer = workspace.store.open_layer(*layer)?;
        if is_made {
            layer.tree.root().at(path.join("upper"))?; // it is there
        }
        layer.set_quota(quota.cloned()).at(&path)?;
        stack.push(Arc::new(layer));
    }
    let known = |id: u64| {
        let mut layers = branches.values().flat_map(|branch| &branch.stack);
        layers.find(|layer| layer.id.0 == id).cloned()
    };
    // Nothing is read through a stale branch, and the layers of its parent may be gone.
    for id in record.lower_layers.iter().filter(|_| !record.is_stale) {
        stack.push(match known(*id) {
            Some(layer) => layer,
            None => {
                let path = workspace.store.base_store_layer_path(*id);
                Arc::new(Layer::open_snapshot(LayerId(*id), &path, workspace.store.namespace)?)
            }
        });
    }
    stack.push(Arc::clone(&workspace.store.base));
    Ok(stack)
}

/// A sentence about a transaction that a crash cut short.
fn describe(kind: Kind, is_committed: bool, records: &BTreeMap<BranchId, Record>) -> String {
    let what = match kind {
        Kind::Commit { branch } => match records.get(&branch) {
            Some(record) => format!("the commit of {}", record.name),
            None => "a commit".to_owned(),
        },
        Kind::Undo { .. } => "an undo".to_owned(),
        Kind::Redo { .. } => "a redo".to_owned(),
    };
    let how = if is_committed { "was finished" } else { "was taken back" };
    format!("{what}, which was interrupted, {how}")
}

fn make_stale(records: &mut BTreeMap<BranchId, Record>, stale: &[BranchId]) {
    for id in stale {
        if let Some(record) = records.get_mut(id) {
            record.is_stale = true;
        }
    }
}

/// The layers in a store that are not to be kept, with their numbers if they have one.
fn unknown_layers(store: &Path, keep: &[u64]) -> Result<Vec<(PathBuf, Option<u64>)>, Error> {
    let directory = store.join("layers");
    let mut found = Vec::new();
    for name in no_follow::names(&directory).at(&directory)? {
        let id = name.to_str().and_then(|name| name.parse().ok());
        if !id.is_some_and(|id| keep.contains(&id)) {
            found.push((directory.join(&name), id));
        }
    }
    Ok(found)
}

/// Whether a layer contains objects, apart from the whiteout that hides the store.
fn holds_changes(layer: &Path) -> Result<bool, Error> {
    let upper = layer.join("upper");
    let names = match no_follow::names(&upper) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.at(&upper)?,
    };
    Ok(names.iter().any(|name| name != HIDDEN))
}
