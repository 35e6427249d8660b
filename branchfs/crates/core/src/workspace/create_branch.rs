//! Creating a branch: its record, its layer and its view.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::Branches;
use super::branch_log::Record;
use super::branch_ref::check_name;
use super::info;
use super::{Branch, BranchInfo, BranchRef, MAIN_BRANCH, Workspace, now};
use crate::archive::Unpacked;
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::mount::MAIN;
use crate::quota::Quota;

/// Maximum number of layers in the stack of a branch, including the base: as many as overlayfs supports. Lookups pass
/// through each of them, and a directory that was renamed in each is followed through all.
const LAYERS_MAX: usize = 500;

/// A layer with an unpacked archive that is not visible yet.
pub(super) struct ImportedLayer {
    pub(super) layer: Layer,
    pub(super) unpacked: Unpacked,
    /// Load the archive also if the parent differs from the state that it was made against.
    pub(super) force: bool,
}

impl Workspace {
    /// Creates a branch. O(1): one line in the branch log, whatever the size of the tree.
    ///
    /// # Errors
    /// `Name`, `Exists`, `NotFound` (parent), `Stale` (parent). Nothing is left behind then.
    pub fn create(&self, name: &str, parent: &BranchRef) -> Result<BranchInfo, Error> {
        self.create_limited(name, parent, None)
    }

    /// Creates a branch with a disk limit in bytes.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_limited(
        &self,
        name: &str,
        parent: &BranchRef,
        disk_limit: Option<u64>,
    ) -> Result<BranchInfo, Error> {
        create_filled(self, name, parent, disk_limit, self.store.next_number(), None)
    }

    /// Creates a branch, and before it exists writes the line `+ID NAME` to a file of leases, so that a client that is
    /// killed at any step leaves no branch without a lease. A lease whose branch was not created stays in the file, and its number is
    /// not used again.
    ///
    /// # Errors
    /// As [`Self::create`], and `Io` if the line cannot be written. No branch is left behind then.
    pub fn create_leased(
        &self,
        name: &str,
        parent: &BranchRef,
        disk_limit: Option<u64>,
        leases: &mut impl Write,
    ) -> Result<BranchInfo, Error> {
        check_name(OsStr::new(name))?;
        let id = self.store.next_number();
        write_lease(id, name, leases)?;
        create_filled(self, name, parent, disk_limit, id, None)
    }
}

/// Writes the lease of a branch that does not exist yet.
pub(super) fn write_lease(id: u64, name: &str, leases: &mut impl Write) -> Result<(), Error> {
    let line = format!("+{id} {name}\n");
    leases.write_all(line.as_bytes()).at(Path::new("the file of leases"))
}

/// Creates a branch, optionally with an existing layer. Stopping the kernel's writes may take time, in which only the
/// parent is guarded.
pub(super) fn create_filled(
    workspace: &Workspace,
    name: &str,
    parent: &BranchRef,
    disk_limit: Option<u64>,
    id: u64,
    filled: Option<ImportedLayer>,
) -> Result<BranchInfo, Error> {
    check_name(OsStr::new(name))?;
    let _frozen = workspace.table.quiesce_passthrough(parent)?;
    // An import compares the archive with the parent, which must not change meanwhile: commits wait.
    let _transaction_lock = match filled {
        Some(_) => Some(workspace.engine.begin_transaction()?),
        None => workspace.engine.admit_change().map(|()| None)?,
    };
    let held = workspace.table.hold(parent, |_, parent| may_be_forked(parent))?;
    let above = held.as_ref().map(|held| &held.branch);
    let created = create_below(workspace, name, above, disk_limit, id, filled);
    drop(held);
    if created.is_err() {
        workspace.table.thaw_idle(&workspace.table.lock());
    }
    created
}

fn create_below(
    workspace: &Workspace,
    name: &str,
    parent: Option<&Branch>,
    disk_limit: Option<u64>,
    id: u64,
    filled: Option<ImportedLayer>,
) -> Result<BranchInfo, Error> {
    let (parent_id, parent_slot) =
        parent.map_or((MAIN_BRANCH, MAIN), |parent| (parent.record.id, parent.slot));
    refuse_too_many_layers(parent)?;
    let quota = Quota::of(disk_limit, parent.and_then(|parent| parent.quota.as_ref()));
    let path = workspace.store.layer_path(id);
    refuse_taken(&workspace.table.lock(), name)?;
    let frozen = workspace.table.freeze_for_fork(parent_slot)?;
    // The kernel needs the layer for its mount, and an import has filled it. Other layers are created by the first change.
    let is_presented = filled.is_none() && workspace.driver.would_serve(parent_id, quota.as_ref());
    let begun = now();
    let made = workspace.driver.freeze_parent(parent_id).and_then(|()| {
        let base = [Arc::clone(&workspace.store.base)];
        let below = parent.map_or(&base[..], |parent| &parent.stack);
        let settled = filled.map(|filled| filled.finish(name, below, quota.as_ref()));
        let settled = settled.transpose()?;
        // The table does not change from here on.
        let branches = workspace.table.lock();
        workspace.engine.fail_stop.check()?;
        refuse_taken(&branches, name)?;
        let above = branches.get(&parent_id);
        if let Some(above) = above {
            may_be_forked(above)?;
        }
        let parent_stack = above.map_or(base.to_vec(), |above| above.stack.clone());
        // External changes of the base while a layer is mounted over it count as later than the fork.
        let created = if settled.is_some() { begun } else { now() };
        let layer = match settled {
            Some(layer) => layer,
            None => workspace.store.new_layer(id, is_presented, &parent_stack)?,
        };
        layer.set_quota(quota.clone()).at(&path)?;
        let record = Record {
            id,
            name: name.to_owned(),
            parent: parent_id,
            layers: vec![id],
            lower_layers: above
                .map(|above| [&above.record.layers[..], &above.record.lower_layers].concat())
                .unwrap_or_default(),
            is_stale: false,
            created,
            disk_limit,
            merged_child: None,
        };
        workspace.store.records.append_new(&record)?;
        let mut stack = vec![Arc::new(layer)];
        stack.extend(parent_stack);
        Ok((branches, record, stack))
    });
    let (mut branches, record, stack) = made.inspect_err(|_| {
        workspace.store.move_to_trash(&path, "unmade");
    })?;
    // The parent does not change from here on, and what the child sees of it is fixed.
    let gate = workspace.table.mount.block_requests();
    let slot = workspace.table.mount.add(OsStr::new(name), parent_slot, stack.clone());
    drop(gate);
    workspace.table.mount.set_unsynced_record(slot, workspace.store.records.file());
    branches.insert(Branch { record, slot, stack, quota }, Some(frozen));
    // A layer that overlayfs did not write from the start is left to the FUSE view.
    if is_presented {
        if let Err(error) = workspace.driver.current().attach(id, name) {
            workspace.table.abort_below(&mut branches, id)?;
            return Err(error);
        }
    }
    tracing::debug!("created {name:?}");
    let info = info(&branches, id);
    drop(branches);
    if is_presented {
        sync_presented(workspace, id)?;
    }
    info
}

/// Makes the record of a presented branch durable. The daemon does not see syncs of its files, so this cannot wait for
/// the first sync as in the FUSE view. Concurrent creates share the disk write.
fn sync_presented(workspace: &Workspace, id: u64) -> Result<(), Error> {
    let layers = workspace.store.store_path.join("layers");
    workspace.store.records.sync_with(&layers).inspect_err(|_| {
        let _ = workspace.abort(&BranchRef::Id(id)); // the error is the one that stood in its way
    })
}

impl ImportedLayer {
    fn finish(
        self,
        name: &str,
        below: &[Arc<Layer>],
        quota: Option<&Arc<Quota>>,
    ) -> Result<Layer, Error> {
        refuse_disk_limit(name, quota)?;
        if !self.force {
            self.unpacked.check(below)?;
        }
        self.unpacked.finish(&self.layer, below)?;
        Ok(self.layer)
    }
}

pub(super) fn refuse_disk_limit(name: &str, quota: Option<&Arc<Quota>>) -> Result<(), Error> {
    if quota.is_none() {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{name} would be below a branch with a disk limit, which an import ignores"
    )))
}

fn refuse_too_many_layers(parent: Option<&Branch>) -> Result<(), Error> {
    match parent.filter(|parent| parent.stack.len() >= LAYERS_MAX) {
        Some(parent) => Err(Error::Unsupported(format!(
            "branch {} lies on {LAYERS_MAX} layers, which is the maximum: commit its ancestors \
                into main first",
            parent.record.name
        ))),
        None => Ok(()),
    }
}

pub(super) fn may_be_forked(parent: &Branch) -> Result<(), Error> {
    if parent.record.is_stale { Err(Error::Stale(parent.record.name.clone())) } else { Ok(()) }
}

pub(super) fn refuse_taken(branches: &Branches, name: &str) -> Result<(), Error> {
    if branches.by_name(name).is_some() { Err(Error::Exists(name.to_owned())) } else { Ok(()) }
}
