//! A change of main: decided in the journal, applied under the gate, and made visible to all branches.
//!
//! Its commit point is the plan in the journal. What fails before leaves main as it was; what fails while the steps are
//! applied rolls them back. After that the transaction happens: an error in its last part ([`Workspace::complete`])
//! stops other transactions ([`super::fail_stop`]) until the part was repeated, here or by the recovery of a mount.

use std::sync::{Arc, MutexGuard, PoisonError, RwLockWriteGuard};

use super::branches::Branches;
use super::records::Line;
use super::rest::{Continued, Remainder};
use super::veils::Veil;
use super::{BranchId, Committed, Forgotten, Workspace};
use crate::commit::{self, Decided, Disk, Header, Kind, Plan, Prepared};
use crate::descriptors::admit_transaction;
use crate::error::Error;
use crate::filesystem::MAIN;
use crate::injected_panics::panic_if_listed;
use crate::layer::Layer;

/// A transaction that was applied, and that nobody has seen yet.
pub(super) struct Happened<'w> {
    branches: MutexGuard<'w, Branches>,
    gate: RwLockWriteGuard<'w, ()>,
    decided: Decided,
    /// What others go on seeing the base through.
    veil: Option<Veil>,
}

impl Workspace {
    /// Waits until no other transaction is under way, and completes the last one if its last part failed. No other
    /// transaction begins while the guard lives.
    ///
    /// # Errors
    /// `Stopped`; `Unsupported` where the daemon could not open the files that a transaction needs.
    pub(super) fn begin_transaction(&self) -> Result<MutexGuard<'_, ()>, Error> {
        let turn = self.take_turn();
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(decided) = pending.take() {
            let completed = self.disk().and_then(|disk| self.complete(&disk, &decided));
            match completed {
                Ok(_) => self.fail_stop.complete(),
                Err(error) => self.stop(decided, &error, &mut pending),
            }
        }
        self.fail_stop.check()?;
        admit_transaction()?;
        Ok(turn)
    }

    /// As [`Self::begin_transaction`], for a change of the store that does not exclude transactions. Whoever then locks
    /// the table checks once more.
    ///
    /// # Errors
    /// `Stopped`.
    pub(super) fn admit_change(&self) -> Result<(), Error> {
        match self.fail_stop.check() {
            Ok(()) => Ok(()),
            Err(_) => self.begin_transaction().map(drop),
        }
    }

    /// Stops transactions: the last part of `decided` failed with `error`. It is repeated unless a sync failed: then a
    /// sync that succeeds proves nothing about what was written before.
    fn stop(&self, decided: Decided, error: &Error, pending: &mut Option<Decided>) {
        let what = decided.header.kind.word();
        let reason = format!("the {what} was applied, but completing it failed: {error}");
        if matches!(error, Error::NotDurable { .. }) {
            self.fail_stop.trip(reason);
        } else {
            self.fail_stop.hold_for_pending(reason);
            *pending = Some(decided);
        }
    }

    /// Decides a transaction and applies it. `address` makes its header when it is about to happen. The table of
    /// branches is locked from there on; not before, while the file system syncs.
    ///
    /// # Errors
    /// `InDoubt`, with which transactions are stopped. After any other error main is as before.
    pub(super) fn transact(
        &self,
        disk: &Disk,
        plan: Plan,
        address: impl FnOnce(&Branches) -> Result<Header, Error>,
    ) -> Result<Happened<'_>, Error> {
        let number = plan.transaction;
        self.refuse_unfinished(disk)?;
        panic_if_listed("transaction-planned");
        let prepared = Prepared::new(disk, plan).inspect_err(|_| self.drop_journal(number))?;
        panic_if_listed("transaction-prepared");
        let branches = self.lock();
        panic_if_listed("transaction-locked");
        let header = address(&branches).inspect_err(|_| self.drop_journal(number))?;
        // What fails here may have left a plan that the next mount would carry out.
        let decided = prepared.decide(disk, header).map_err(|error| {
            let discarded = commit::discard(disk, number, &self.trash_name("failed", number));
            self.after_rollback(error, discarded)
        })?;
        panic_if_listed("transaction-decided");
        let gate = self.filesystem.close_gate();
        match self.carry_out(disk, &decided) {
            Ok(veil) => Ok(Happened { branches, gate, decided, veil }),
            Err(error) => {
                drop(gate);
                if !error.is_as_before() {
                    self.fail_stop.trip(error.to_string());
                    return Err(error);
                }
                // Without the note a later undo may be refused that need not be.
                let _ = self.note_taken_back(disk, &decided);
                let discarded = decided.discard(disk, &self.trash_name("failed", number));
                Err(self.after_rollback(error, discarded))
            }
        }
    }

    /// The error of a transaction that was rolled back after `failed`, and whose journal entry was `discarded` or not. The
    /// next mount would act on an entry that stays.
    fn after_rollback(&self, failed: Error, discarded: Result<(), Error>) -> Error {
        match discarded {
            Ok(()) => {
                self.empty_trash(); // where the disk was full, the next try needs the room
                failed
            }
            Err(rollback) => {
                let error =
                    Error::InDoubt { failed: Box::new(failed), rollback: Box::new(rollback) };
                self.fail_stop.trip(error.to_string());
                error
            }
        }
    }

    /// Refuses a transaction while an earlier one is in the journal: recovery would apply it after this one.
    fn refuse_unfinished(&self, disk: &Disk) -> Result<(), Error> {
        if let Some(decided) = commit::unfinished(disk)?.first() {
            let (what, number) = (decided.header.kind.word(), decided.header.transaction);
            self.fail_stop.trip(format!("the journal holds the unfinished {what} {number}"));
        }
        self.fail_stop.check()
    }

    /// Makes a transaction that was applied visible, makes it durable, and moves it into the history. A committed branch goes
    /// on with `rest`, or ends.
    ///
    /// # Errors
    /// `Incomplete`, with which transactions are stopped.
    pub(super) fn conclude(
        &self,
        disk: &Disk,
        happened: Happened<'_>,
        rest: Option<Remainder>,
    ) -> Result<Committed, Error> {
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
        let header = decided.header.clone();
        let changes = decided.changes.clone();
        self.settle_stale(&mut branches, &header.stale);
        self.veil(&mut branches, &header, veil.as_ref());
        let mut continued = None;
        if let (Kind::Commit { branch }, Some(rest)) = (header.kind, rest) {
            continued = self.go_on_with(&mut branches, branch, rest);
        }
        panic_if_listed("transaction-visible");
        drop(gate);
        let stale = names_of(&branches, &header.stale);
        match header.kind {
            Kind::Commit { branch } if header.rest.is_none() => {
                self.retire_committed(&mut branches, branch);
            }
            _ => {}
        }
        drop(branches);
        let remaining = continued.as_ref().map_or(0, Continued::count);
        let completed = self.complete(disk, &decided);
        if let Err(error) = &completed {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            self.stop(decided, error, &mut pending);
        }
        if let Some(outdated) = continued.and_then(|continued| continued.outdated) {
            self.outdate(outdated);
        }
        self.tell_stale(&self.lock(), &header.stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        match completed {
            Ok(forgotten) => Ok(Committed { stale, changes, remaining, forgotten }),
            Err(error) => {
                Err(Error::Incomplete { what: header.kind.word(), source: Box::new(error) })
            }
        }
    }

    /// The last part of a transaction that was applied. Can be repeated: the journal entry becomes history at its end.
    fn complete(&self, disk: &Disk, decided: &Decided) -> Result<Vec<Forgotten>, Error> {
        let header = &decided.header;
        self.release_layers(decided)?;
        let branches = self.lock();
        let line =
            |id| branches.get(&id).map_or(Line::Gone { gone: id }, |one| Line::of(&one.record));
        let committed = match header.kind {
            Kind::Commit { branch } => Some(line(branch)),
            Kind::Undo { .. } | Kind::Redo { .. } => None,
        };
        let concerned = header.stale.iter().chain(&header.observers).chain(&header.unveiled);
        let concerned = concerned.filter_map(|id| branches.get(id));
        let lines = committed.into_iter().chain(concerned.map(|branch| Line::of(&branch.record)));
        self.records.append(&lines.collect::<Vec<_>>())?;
        panic_if_listed("transaction-recorded");
        drop(branches);
        // Together with the base, where they are on one file system. The journal entry stays until then.
        Decided::sync(disk)?;
        if self.is_elsewhere() {
            self.records.sync()?;
        }
        panic_if_listed("transaction-synced");
        self.drop_lifted(&self.lock(), header)?;
        let forgotten = self.keep(disk, decided, self.oldest_fork())?;
        panic_if_listed("transaction-kept");
        Ok(forgotten)
    }

    /// Under the gate: the steps, and the veil over them. When either fails, all is taken back.
    fn carry_out(&self, disk: &Disk, decided: &Decided) -> Result<Option<Veil>, Error> {
        decided.apply(disk)?;
        panic_if_listed("transaction-applied");
        let Some(id) = decided.header.veil else { return Ok(None) };
        self.weave(disk, decided, id).map(Some).map_err(|error| {
            self.throw_away(&self.home_layer_path(id), "veil");
            decided.take_back(disk, error)
        })
    }

    fn main_layer(&self) -> Arc<Layer> {
        let main = self.filesystem.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().top()
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
