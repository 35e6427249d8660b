//! A change of main: decided in the journal, carried out under the gate, and told to all whom it concerns.

use std::sync::{Arc, MutexGuard, RwLockWriteGuard};

use super::branches::Branches;
use super::records::Line;
use super::{BranchId, Committed, Workspace};
use crate::commit::{Decided, Disk, Header, Kind, Plan, Prepared, Woven};
use crate::error::Error;
use crate::filesystem::MAIN;
use crate::layer::Layer;

/// A transaction that has happened, and of which nobody has seen anything yet.
pub(super) struct Happened<'w> {
    branches: MutexGuard<'w, Branches>,
    gate: RwLockWriteGuard<'w, ()>,
    decided: Decided,
    /// What others go on seeing the base through.
    veil: Option<(Arc<Layer>, Woven)>,
}

impl Workspace {
    /// Decides a transaction and carries it out. `address` makes its header when it is about to happen. The table of
    /// branches is locked from there on; not before, while the file system syncs.
    ///
    /// # Errors
    /// It did not happen: main is as before, unless the error is `Corrupt`.
    pub(super) fn transact(
        &self,
        disk: &Disk,
        plan: Plan,
        address: impl FnOnce(&Branches) -> Result<Header, Error>,
    ) -> Result<Happened<'_>, Error> {
        let number = plan.transaction;
        let prepared = Prepared::new(disk, plan).inspect_err(|_| self.drop_journal(number))?;
        let branches = self.lock();
        let decided = address(&branches)
            .and_then(|header| prepared.decide(disk, header))
            .inspect_err(|_| self.drop_journal(number))?;
        let gate = self.filesystem.close_gate();
        match self.carry_out(disk, &decided) {
            Ok(veil) => Ok(Happened { branches, gate, decided, veil }),
            Err(error) => {
                drop(gate);
                if !matches!(error, Error::Corrupt(_)) {
                    // Without the note a later undo may be refused that need not be.
                    let _ = self.note_taken_back(disk, &decided);
                    self.drop_journal(number); // all is taken back: the entry holds nothing of the base
                }
                Err(error)
            }
        }
    }

    /// Lets everybody know of a transaction that has happened, makes it durable, and takes it into the history.
    ///
    /// # Errors
    /// Where it may not be durable, or something is left for the next mount to settle; it has happened.
    pub(super) fn conclude(&self, disk: &Disk, happened: Happened<'_>) -> Result<Committed, Error> {
        let Happened { mut branches, gate, decided, veil } = happened;
        let what = match decided.header.kind {
            Kind::Commit { .. } => "committed",
            Kind::Undo { .. } => "undone: the commit of",
            Kind::Redo { .. } => "redone: the commit of",
        };
        let count = decided.changes.len();
        tracing::info!("{what} {:?}, {count} paths changed", decided.header.name);
        for layer in [&self.base, &self.main_layer()] {
            layer.tree.forget_all();
        }
        let header = &decided.header;
        self.settle_stale(&mut branches, &header.stale);
        self.veil(&mut branches, header, veil.as_ref())?;
        drop(gate);
        let stale = names_of(&branches, &header.stale);
        if let Kind::Commit { branch } = header.kind {
            self.retire_committed(&mut branches, branch)?;
        }
        let concerned = header.stale.iter().chain(&header.observers).chain(&header.unveiled);
        self.append_records(&branches, concerned)?;
        drop(branches);
        // Together with the base, where they are on one file system. The journal forgets why only after it.
        let synced = Decided::sync(disk);
        if self.is_elsewhere() {
            self.records.sync()?;
        }
        self.drop_lifted(&self.lock(), header)?;
        let forgotten = self.keep(disk, &decided, self.oldest_fork())?;
        self.tell_stale(&self.lock(), &header.stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        synced.map_err(|error| Error::NotDurable(error.to_string()))?;
        Ok(Committed { stale, changes: decided.changes, forgotten })
    }

    /// Under the gate: the steps, and the veil over them. When either fails, all is taken back.
    fn carry_out(
        &self,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<Option<(Arc<Layer>, Woven)>, Error> {
        decided.apply(disk)?;
        let Some(id) = decided.header.veil else { return Ok(None) };
        match self.weave(disk, decided, id) {
            Ok(veil) => Ok(Some(veil)),
            Err(error) => {
                decided.take_back(disk)?;
                self.throw_away(&self.home_layer_path(id), "veil");
                Err(error)
            }
        }
    }

    fn main_layer(&self) -> Arc<Layer> {
        let main = self.filesystem.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().top()
    }

    /// Writes the records of those of the branches that there are. They are not synced.
    pub(super) fn append_records<'i>(
        &self,
        branches: &Branches,
        ids: impl Iterator<Item = &'i BranchId>,
    ) -> Result<(), Error> {
        let found = ids.filter_map(|id| branches.get(id));
        self.records.append(&found.map(|branch| Line::of(&branch.record)).collect::<Vec<_>>())
    }

    /// Under the gate: from the next request on these branches answer ESTALE, and freeze nobody any more.
    pub(super) fn settle_stale(&self, branches: &mut Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get_mut(id) else { continue };
            branch.record.is_stale = true;
            self.filesystem.set_stale(branch.slot);
            let parent = branch.record.parent;
            self.thaw(branches.get(&parent).map_or(MAIN, |parent| parent.slot), 1);
        }
    }

    pub(super) fn tell_stale(&self, branches: &Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get(id) else { continue }; // aborted meanwhile
            self.driver().detach(*id);
            if let Ok(mounted) = self.filesystem.mounted(branch.slot) {
                self.outdate(mounted);
            }
        }
    }
}

pub(super) fn names_of(branches: &Branches, ids: &[BranchId]) -> Vec<String> {
    ids.iter().map(|id| branches[id].record.name.clone()).collect()
}
