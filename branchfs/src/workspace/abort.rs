//! How a branch ends: aborted, or after its commit; and where the things of those that have ended go.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::branches::Branches;
use super::records::Line;
use super::{Branch, BranchId, Selector, Workspace, now};
use crate::error::Error;
use crate::filesystem::{MAIN, Mounted};
use crate::no_follow;

impl Workspace {
    /// Drops a branch and its children. Returns at once; space is given back in the background.
    ///
    /// # Errors
    /// `NotFound`, `Io`, `Stopped`. Nothing is dropped then.
    pub(crate) fn abort(&self, selector: &Selector) -> Result<(), Error> {
        self.admit_change()?;
        let mut branches = self.lock_unheld(selector, Branches::holds)?;
        self.fail_stop.check()?;
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main cannot be aborted".to_owned()))?;
        let (id, name) = (branch.record.id, branch.record.name.clone());
        self.abort_below(&mut branches, id)?;
        tracing::debug!("aborted {name:?}");
        self.thaw_presented(&branches);
        drop(branches);
        self.empty_trash();
        Ok(())
    }

    /// Drops a branch and all branches below it, stale ones too.
    pub(super) fn abort_below(&self, branches: &mut Branches, top: BranchId) -> Result<(), Error> {
        let mut dropped = vec![top];
        let mut position = 0;
        while let Some(parent) = dropped.get(position).copied() {
            dropped.extend(branches.children(parent).map(|child| child.record.id));
            position += 1;
        }
        let gone = dropped.iter().map(|id| Line::Gone { gone: *id });
        self.records.append(&gone.collect::<Vec<_>>())?;
        for id in dropped.iter().rev() {
            let Some(branch) = branches.remove(id) else { continue };
            if !branch.record.is_stale {
                let parent = branches.get(&branch.record.parent).map_or(MAIN, |parent| parent.slot);
                self.thaw(parent, 1);
            }
            self.retire_branch(branches, &branch);
        }
        Ok(())
    }

    /// Takes a branch, which is not in the table any more, out of the mount, and the layers that were its alone into the
    /// trash. Its record is ended by the caller.
    pub(super) fn retire_branch(&self, branches: &Branches, branch: &Branch) {
        self.driver().detach(branch.record.id);
        let mounted = {
            let _gate = self.filesystem.close_gate();
            self.filesystem.remove(branch.slot)
        };
        // Only branches below it could look through its layers, and there are none any more.
        for layer in &branch.record.layers {
            self.throw_away(&self.layer_path(*layer), "layer");
        }
        self.drop_unused_snapshots(branches, &branch.record.below);
        if let Some(mounted) = mounted {
            self.outdate(mounted);
        }
    }

    /// Moves snapshot layers into the trash through which no branch looks any more. Layers of branches are used by these.
    pub(super) fn drop_unused_snapshots(&self, branches: &Branches, below: &[u64]) {
        let is_used = |layer: &u64| {
            let mut records = branches.values().map(|other| &other.record);
            records.any(|other| other.layers.contains(layer) || other.below.contains(layer))
        };
        for layer in below.iter().filter(|layer| !is_used(layer)) {
            self.throw_away(&self.home_layer_path(*layer), "veil");
        }
    }

    /// Says that there is no such branch any more. It is not synced.
    pub(super) fn drop_record(&self, id: BranchId) -> Result<(), Error> {
        self.records.append(&[Line::Gone { gone: id }])
    }

    pub(super) fn drop_journal(&self, id: BranchId) {
        self.throw_away(&self.home_path.join("journal").join(id.to_string()), "failed");
        self.empty_trash(); // where the disk was full, the next try needs the room
    }

    pub(super) fn trash_name(&self, what: &str, number: u64) -> PathBuf {
        Path::new("trash").join(format!("{what}-{number}-{}", now()))
    }

    /// Moves something of the store into the trash. What cannot be moved stays where it is and is tried again at the
    /// next start: nothing refers to it any more.
    pub(super) fn throw_away(&self, path: &Path, what: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let root =
            if path.starts_with(&self.home_path) { &self.home_path } else { &self.store_path };
        let to = root.join("trash").join(format!("{what}-{name}-{}", now()));
        let _ = no_follow::rename(path, &to);
    }

    /// Deletes what is in the trash, in the background.
    pub(super) fn empty_trash(&self) {
        let mut trash = vec![self.home_path.join("trash")];
        trash.extend(self.is_elsewhere().then(|| self.store_path.join("trash")));
        self.background.empty(trash, self.unlinker());
    }

    /// Lets the kernel forget a branch that is gone or stale; its name at once, all it knows of a big one in the background.
    pub(super) fn outdate(&self, mounted: Arc<Mounted>) {
        /// So many nodes take well under a millisecond.
        const NODES_AT_ONCE_MAX: usize = 64;
        if mounted.lock_as_it_is().nodes.len() <= NODES_AT_ONCE_MAX {
            return self.filesystem.invalidate(&mounted);
        }
        self.filesystem.expire(&mounted);
        self.background.invalidate(&self.filesystem, mounted);
    }
}
