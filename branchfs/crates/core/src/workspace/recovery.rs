//! The start of a workspace: the store is brought in line with what a crash left, and its branches are opened.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Branches;
use super::branch_log::{Loaded, MergedChild, Record};
use super::{Branch, BranchId, Workspace, history};
use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::layer::Layer;
use crate::mount::MAIN;
use crate::no_follow;
use crate::quota::Quota;
use crate::rooted_dir::remove_path;
use crate::transaction::{self, Kind};
use crate::view::HIDDEN;

/// Brings the store in line after a crash, and shows the branches that are in it.
pub(super) fn recover(workspace: &Workspace, mut loaded: Loaded) -> Result<Vec<String>, Error> {
    let mut done = Vec::new();
    workspace.store.ctime_log.finish_pending_unlink()?;
    let disk = workspace.engine.disk()?;
    let records = &mut loaded.records;
    let recovered = transaction::recover(&disk).map_err(|error| match error {
        Error::SeveralUnfinished { journal, transactions } => Error::SeveralUnfinished {
            journal: workspace.store.home_path.join(journal),
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
            workspace.engine.keep(&disk, &recovered.decided, history::oldest(records.values()))?;
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
    let last = records.keys().chain(&loaded.gone).copied().chain(numbers).max();
    workspace.store.last_number.store(last.unwrap_or(0), Ordering::Relaxed);
    let keep: Vec<u64> = records
        .values()
        .flat_map(|record| record.layers.iter().chain(&record.below).copied())
        .collect();
    if workspace.store.is_elsewhere() {
        let own: Vec<u64> =
            records.values().flat_map(|record| record.layers.iter().copied()).collect();
        let veils: Vec<u64> = keep.iter().copied().filter(|id| !own.contains(id)).collect();
        for (path, _) in unknown_layers(&workspace.store.home_path, &veils)? {
            workspace.store.move_to_trash(&path, "lost");
        }
    }
    clear_layers(workspace, &keep, &loaded.gone, &mut done)?;
    // A layer that could not be thrown away stays known as one that belongs to no branch.
    loaded.gone.retain(|id| no_follow::exists(&workspace.store.layer_path(*id)).unwrap_or(true));
    workspace.store.records.compact(&loaded)?;
    if !loaded.records.is_empty() {
        // The last daemon may have died without it; nobody else knows which records were not synced.
        workspace.store.records.sync_with(&workspace.store.store_path.join("layers"))?;
    }
    let mut branches = workspace.table.lock();
    for record in loaded.records.into_values() {
        let above = branches.get(&record.parent).and_then(|parent| parent.quota.as_ref());
        let quota = Quota::of(record.disk_limit, above);
        let stack = open_stack(workspace, &record, &loaded.made, &branches, quota.as_ref())?;
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

/// Goes on where a crash cut a commit into a branch short.
fn finish_merged_children(
    workspace: &Workspace,
    records: &mut BTreeMap<BranchId, Record>,
) -> Result<(), Error> {
    let absorbed: Vec<(BranchId, MergedChild)> = records
        .values_mut()
        .filter_map(|record| Some((record.id, record.absorbed.take()?)))
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

/// Takes those out of the records whose layer was there and is not, with those below them.
fn drop_damaged(
    workspace: &Workspace,
    loaded: &mut Loaded,
    done: &mut Vec<String>,
) -> Result<(), Error> {
    let Loaded { records, made, gone, .. } = loaded;
    let mut missing = BTreeSet::new();
    for layer in records.values().flat_map(|record| &record.layers) {
        // A loss of power may keep the removal of what was in a layer, and not that the layer was moved to the trash before.
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
                "branch {} is given up: its layer {} is not there, as after an abort that a loss of power cut short; if it was not aborted, what it changed is lost",
                record.name,
                workspace.store.layer_path(*layer).display()
            ));
        }
    }
    for id in given_up {
        for layer in records.remove(&id).into_iter().flat_map(|record| record.layers) {
            gone.remove(&layer); // what is left of it is not thrown away
        }
        workspace.store.drop_record(id)?;
    }
    Ok(())
}

/// Throws away what no record names, where it is known to be nobody's. A layer that is nobody's because a loss of power
/// took the record along is set aside: nothing of the branch was synced, but somebody has written there.
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
            "a branch was lost in a power cut before its record was on disk; no file in it had been synced; what was written to it is in {}",
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
        layer.limit(quota.cloned()).at(&path)?;
        stack.push(Arc::new(layer));
    }
    let known = |id: u64| {
        let mut layers = branches.values().flat_map(|branch| &branch.stack);
        layers.find(|layer| layer.id.0 == id).cloned()
    };
    // Nothing is read through a stale branch, and the layers of its parent may be gone.
    for id in record.below.iter().filter(|_| !record.is_stale) {
        stack.push(match known(*id) {
            Some(layer) => layer,
            None => {
                let path = workspace.store.home_layer_path(*id);
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
    format!("{what}, which was under way, {how}")
}

fn make_stale(records: &mut BTreeMap<BranchId, Record>, stale: &[BranchId]) {
    for id in stale {
        if let Some(record) = records.get_mut(id) {
            record.is_stale = true;
        }
    }
}

/// The layers in a store that are not to be kept, with their numbers, if these are any.
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

/// Whether somebody has written in a layer.
fn holds_changes(layer: &Path) -> Result<bool, Error> {
    let upper = layer.join("upper");
    let names = match no_follow::names(&upper) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.at(&upper)?,
    };
    Ok(names.iter().any(|name| name != HIDDEN))
}
