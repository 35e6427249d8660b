//! How a branch begins: its record, and what it is seen through.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::branch_ref::check_name;
use super::branches::Branches;
use super::records::{Line, Record};
use super::{Branch, BranchInfo, MAIN_BRANCH, Policy, Selector, Workspace, now};
use crate::archive::Unpacked;
use crate::error::{Context, Error};
use crate::filesystem::MAIN;
use crate::layer::{Layer, LayerId};
use crate::quota::Quota;

/// Most layers that a branch may lie on, the base among them: as many as the kernel's overlayfs takes. Lookups cost each of
/// them, and a directory that was renamed in each is followed through all.
const LAYERS_MAX: usize = 500;

/// A layer that an archive was unpacked into, and that nobody sees yet.
pub(super) struct Filled {
    pub(super) id: u64,
    pub(super) layer: Layer,
    pub(super) unpacked: Unpacked,
    /// Also over a parent that is not what the archive was made against.
    pub(super) force: bool,
}

impl Workspace {
    /// Opens a branch's own layer, which need not be on disk.
    pub(super) fn open_layer(&self, id: u64) -> Result<Layer, Error> {
        let path = self.layer_path(id);
        self.enter(Layer::open(LayerId(id), &path, self.namespace, self.is_foreign)?)
    }

    fn enter(&self, mut layer: Layer) -> Result<Layer, Error> {
        if self.settings.policy == Policy::Serializable {
            layer.record_reads()?;
        }
        layer.enter_in(self.records.clone());
        Ok(layer)
    }

    /// Creates a branch. O(1): a line in the log of records, whatever the size of the tree.
    ///
    /// # Errors
    /// `Name`, `Exists`, `NotFound` (parent), `Stale` (parent). Nothing is left behind then.
    pub(crate) fn create(&self, name: &str, parent: &Selector) -> Result<BranchInfo, Error> {
        self.create_limited(name, parent, None)
    }

    /// Creates a branch that may add so many bytes.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_limited(
        &self,
        name: &str,
        parent: &Selector,
        disk_limit: Option<u64>,
    ) -> Result<BranchInfo, Error> {
        self.create_filled(name, parent, disk_limit, None)
    }

    /// Creates a branch, perhaps with a layer that there is already. What takes its time, stopping the kernel's writing,
    /// holds the parent, and lets all other branches go on.
    pub(super) fn create_filled(
        &self,
        name: &str,
        parent: &Selector,
        disk_limit: Option<u64>,
        filled: Option<Filled>,
    ) -> Result<BranchInfo, Error> {
        check_name(OsStr::new(name))?;
        let _frozen = self.await_kernel_writers(parent)?;
        // What is below must stay what the layer is laid over: commits wait.
        let _turn = match filled {
            Some(_) => Some(self.begin_transaction()?),
            None => self.admit_change().map(|()| None)?,
        };
        let held = self.hold(parent, |_, parent| may_be_forked(parent))?;
        let created =
            self.create_below(name, held.as_ref().map(|held| &held.branch), disk_limit, filled);
        drop(held);
        if created.is_err() {
            self.thaw_presented(&self.lock());
        }
        created
    }

    fn create_below(
        &self,
        name: &str,
        parent: Option<&Branch>,
        disk_limit: Option<u64>,
        filled: Option<Filled>,
    ) -> Result<BranchInfo, Error> {
        let (parent_id, parent_slot) =
            parent.map_or((MAIN_BRANCH, MAIN), |parent| (parent.record.id, parent.slot));
        refuse_too_many_layers(parent)?;
        let quota = Quota::of(disk_limit, parent.and_then(|parent| parent.quota.as_ref()));
        let id = filled.as_ref().map_or_else(|| self.next_number(), |filled| filled.id);
        let path = self.layer_path(id);
        refuse_taken(&self.lock(), name)?;
        self.freeze_for_fork(parent_slot)?;
        // The kernel mounts what is there; an import has filled what is there. Others begin with the first change.
        let is_presented = filled.is_none() && self.would_present(parent_id, quota.as_ref());
        let begun = now();
        let made = self.freeze_presented(parent_id).and_then(|()| {
            let base = [Arc::clone(&self.base)];
            let below = parent.map_or(&base[..], |parent| &parent.stack);
            let settled = filled.map(|filled| filled.settle(name, below, quota.as_ref()));
            let settled = settled.transpose()?;
            // From here on the table stays as it is.
            let branches = self.lock();
            self.fail_stop.check()?;
            refuse_taken(&branches, name)?;
            let above = branches.get(&parent_id);
            if let Some(above) = above {
                may_be_forked(above)?;
            }
            let parent_stack = above.map_or(base.to_vec(), |above| above.stack.clone());
            // What others change in the base while a layer is laid over it comes after the fork.
            let created = if settled.is_some() { begun } else { now() };
            let ready = if is_presented { self.driver().take_ready(&path) } else { None };
            let layer = match (settled, &ready) {
                (Some(layer), _) => layer,
                (None, Some(_)) => self.ready_layer(id)?,
                (None, None) => self.new_layer(id, is_presented, &parent_stack)?,
            };
            layer.limit(quota.clone()).at(&path)?;
            let record = Record {
                id,
                name: name.to_owned(),
                parent: parent_id,
                layers: vec![id],
                below: above
                    .map(|above| [&above.record.layers[..], &above.record.below].concat())
                    .unwrap_or_default(),
                is_stale: false,
                created,
                disk_limit,
                absorbed: None,
            };
            self.records.append_new(&record)?;
            let mut stack = vec![Arc::new(layer)];
            stack.extend(parent_stack);
            Ok((branches, record, stack, ready))
        });
        let (mut branches, record, stack, ready) = made.inspect_err(|_| {
            self.throw_away(&path, "unmade");
            self.thaw(parent_slot, 1);
        })?;
        // From here on nothing writes to the parent: what the child sees is settled.
        let gate = self.filesystem.close_gate();
        let slot = self.filesystem.add(OsStr::new(name), parent_slot, stack.clone());
        drop(gate);
        self.filesystem.set_unsynced_record(slot, self.records.file());
        branches.insert(id, Branch { record, slot, stack, quota });
        // What the kernel did not write from the start is left to the FUSE view.
        if is_presented {
            if let Err(error) = self.driver().attach(id, name, ready) {
                self.abort_below(&mut branches, id)?;
                return Err(error);
            }
        }
        tracing::debug!("created {name:?}");
        let info = Self::info(&branches, id);
        drop(branches);
        if is_presented {
            self.sync_presented(id)?;
        }
        info
    }

    /// Makes the record of a branch durable that the driver presents. No sync of a file in it reaches the daemon, so this
    /// cannot wait for the first one, as in the FUSE view. Creates that run concurrently share the write of the disk.
    fn sync_presented(&self, id: u64) -> Result<(), Error> {
        let layers = self.store_path.join("layers");
        self.records.sync_with(&layers).inspect_err(|_| {
            let _ = self.abort(&Selector::Id(id)); // the error is the one that stood in its way
        })
    }

    /// The layer of a new branch, which was made ahead and is empty: a crash leaves nothing that somebody wrote.
    fn ready_layer(&self, id: u64) -> Result<Layer, Error> {
        let path = self.layer_path(id);
        let layer = Layer::absent(LayerId(id), &path, self.namespace, self.is_foreign);
        let layer = self.enter(layer)?;
        layer.adopt().at(&path)?;
        Ok(layer)
    }

    /// The layer of a new branch, `is_on_disk` or not.
    pub(super) fn new_layer(
        &self,
        id: u64,
        is_on_disk: bool,
        below: &[Arc<Layer>],
    ) -> Result<Layer, Error> {
        if is_on_disk {
            // Nobody's, until the record comes: a crash leaves nothing that somebody wrote.
            self.records.append(&[Line::Gone { gone: id }])?;
        }
        let path = self.layer_path(id);
        let layer = Layer::absent(LayerId(id), &path, self.namespace, self.is_foreign);
        let layer = self.enter(layer)?;
        if is_on_disk {
            let below = below.iter().find(|layer| layer.is_made()).expect("the base is there");
            layer.make(&below.tree).at(&path)?;
        }
        Ok(layer)
    }

    /// Numbers grow with the clock, so that none is used twice over restarts.
    pub(super) fn next_number(&self) -> u64 {
        let clock = u64::try_from(now() / 1_000_000).unwrap_or(0);
        let next = |last: u64| Some(clock.max(last + 1));
        let last = self.last_number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        last.map_or(clock, |last| clock.max(last + 1))
    }
}

impl Filled {
    fn settle(
        self,
        name: &str,
        below: &[Arc<Layer>],
        quota: Option<&Arc<Quota>>,
    ) -> Result<Layer, Error> {
        refuse_limited(name, quota)?;
        if !self.force {
            self.unpacked.check(below)?;
        }
        self.unpacked.settle(&self.layer, below)?;
        Ok(self.layer)
    }
}

pub(super) fn refuse_limited(name: &str, quota: Option<&Arc<Quota>>) -> Result<(), Error> {
    if quota.is_none() {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{name} would be below a branch with a disk limit, which an import does not heed"
    )))
}

fn refuse_too_many_layers(parent: Option<&Branch>) -> Result<(), Error> {
    match parent.filter(|parent| parent.stack.len() >= LAYERS_MAX) {
        Some(parent) => Err(Error::Unsupported(format!(
            "branch {} lies on {LAYERS_MAX} layers, the most there may be: commit its ancestors into main first",
            parent.record.name
        ))),
        None => Ok(()),
    }
}

pub(super) fn may_be_forked(parent: &Branch) -> Result<(), Error> {
    if parent.record.is_stale { Err(Error::Stale(parent.record.name.clone())) } else { Ok(()) }
}

pub(super) fn refuse_taken(branches: &Branches, name: &str) -> Result<(), Error> {
    if branches.named(name).is_some() { Err(Error::Exists(name.to_owned())) } else { Ok(()) }
}
