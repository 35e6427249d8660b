//! Undo and redo of commits to main, and how long they are kept (S12).
//!
//! The history is a stack in the store: the commits in order, of which the last ones may be undone. A new commit removes the
//! undone ones. An undo is a transaction like a commit: logged in the journal, executed under the gate, rolled forward or
//! back after a crash.

use super::Branches;
use super::commit_checks::header;
use super::transaction_engine::affected_branches;
use super::{BranchId, Committed, Workspace};
use crate::error::Error;
use crate::transaction::{self, Change, HistoryEntry, Kind, UndoRequest};

/// The reported entry of a commit in the history.
#[derive(Clone, Debug)]
pub struct PastInfo {
    /// Number of the commit.
    pub id: u64,
    /// Name of the branch it was.
    pub branch: String,
    /// Seconds since 1970.
    pub committed: f64,
    /// When it was undone, seconds since 1970.
    pub undone: Option<f64>,
    /// The number of changed paths.
    pub changes: usize,
    /// Bytes on disk that are kept for its undo.
    pub bytes: u64,
}

impl PastInfo {
    fn of(past: &HistoryEntry) -> Self {
        let header = &past.commit.header;
        Self {
            id: header.transaction,
            branch: header.name.clone(),
            committed: seconds(header.decided),
            undone: past.undone.as_ref().map(|(undo, _)| seconds(undo.header.decided)),
            changes: past.commit.changes.len(),
            bytes: header.displaced_bytes,
        }
    }
}

/// The result of an undo or a redo.
#[derive(Debug)]
pub struct UndoResult {
    /// The commit that was undone or redone.
    pub entry: PastInfo,
    /// The changes in main, and the branches that became stale.
    pub committed: Committed,
}

/// Which way to go in the history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UndoDirection {
    /// Undo the last commit.
    Undo,
    /// Apply the last undone commit again.
    Redo,
}

impl Workspace {
    /// Undoes the last commit to main, or redoes the last undone one, if it is `commit` or `commit` is `None`.
    ///
    /// # Errors
    /// `NothingKept`; `NotNext` if it is not `commit`; `Frozen` while main has live children (`force` makes them stale);
    /// `Conflict` if the committed paths were changed since (`force` moves the changed objects aside); `Io`. Main is
    /// unchanged then.
    pub fn revert(
        &self,
        towards: UndoDirection,
        commit: Option<u64>,
        force: bool,
        dry_run: bool,
    ) -> Result<UndoResult, Error> {
        let _transaction_lock = self.engine.begin_transaction()?;
        let disk = self.engine.disk()?;
        let history = transaction::history(&disk)?;
        let undone = history.iter().position(|past| past.undone.is_some());
        let at = match towards {
            UndoDirection::Undo => undone.unwrap_or(history.len()).checked_sub(1),
            UndoDirection::Redo => undone,
        };
        let Some(past) = at.map(|at| &history[at]) else {
            return Err(Error::NothingKept(match towards {
                UndoDirection::Undo => "undo",
                UndoDirection::Redo => "redo",
            }));
        };
        if let Some(wanted) = commit.filter(|wanted| *wanted != past.commit.header.transaction) {
            return Err(Error::NotNext {
                wanted,
                next: past.commit.header.transaction,
                name: past.commit.header.name.clone(),
            });
        }
        let commit = past.commit.header.transaction;
        let (decided, (_, finished), kind) = match &past.undone {
            None => (&past.commit, past.done, Kind::Undo { commit }),
            Some((undo, interval)) => (undo, *interval, Kind::Redo { commit }),
        };
        let dropped_snapshot = past.snapshot_layer;
        // Checked now and again when it is applied: branches may be created meanwhile.
        let affected = |branches: &Branches| {
            let affected =
                affected_branches(branches, self.store.settings.policy, None, dropped_snapshot);
            if affected.stale.is_empty() || force {
                return Ok(affected);
            }
            let name = |id: &BranchId| branches[id].record.name.as_str();
            let names: Vec<&str> = affected.stale.iter().map(name).collect();
            Err(Error::Frozen { name: "main".to_owned(), children: names.join(", ") })
        };
        affected(&self.table.lock())?;
        let own_changes = self.engine.own_changes(&disk)?;
        let transaction = self.store.next_number();
        let reversal =
            UndoRequest { past: decided, finished, own_changes: &own_changes, transaction };
        let plan = transaction::plan_undo(&disk, &reversal)?;
        if !plan.drift.is_empty() && !force {
            let word = if towards == UndoDirection::Undo { "undone" } else { "done again" };
            let name = &past.commit.header.name;
            let message = format!(
                "the commit of {name} cannot be {word}: its paths were changed since; main is \
                    unchanged"
            );
            return Err(Error::Conflict {
                message,
                paths: plan.drift.into_iter().collect(),
                hint: "check these paths; --force sets the later changes aside",
            });
        }
        let entry = PastInfo::of(past);
        if dry_run {
            let committed = Committed { changes: plan.changes, ..Committed::default() };
            return Ok(UndoResult { entry, committed });
        }
        let header = header(plan.transaction, kind, past.commit.header.name.clone());
        let address =
            |branches: &Branches| Ok(self.engine.set_affected(header, affected(branches)?));
        let logged = self.engine.log(&disk, plan, address)?;
        let applied = self.engine.apply(&disk, logged)?;
        let committed = self.engine.publish(&disk, applied, None)?;
        Ok(UndoResult { entry, committed })
    }

    /// The commits in the history, oldest first.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    pub fn history(&self) -> Result<Vec<PastInfo>, Error> {
        let _transaction_lock = self.engine.lock_transactions();
        Ok(transaction::history(&self.engine.disk()?)?.iter().map(PastInfo::of).collect())
    }

    /// A commit in the history, with its changes, sorted by path.
    ///
    /// # Errors
    /// `NoSuchCommit`, `Io`, `Corrupt`.
    pub fn past_commit(&self, commit: u64) -> Result<(PastInfo, Vec<Change>), Error> {
        let _transaction_lock = self.engine.lock_transactions();
        let history = transaction::history(&self.engine.disk()?)?;
        let past = history.into_iter().find(|past| past.commit.header.transaction == commit);
        let past = past.ok_or(Error::NoSuchCommit(commit))?;
        Ok((PastInfo::of(&past), past.commit.changes))
    }

    /// The number of the newest commit that was removed from the history and not undone before; 0 if there is none.
    ///
    /// # Errors
    /// `Io`.
    pub fn newest_pruned(&self) -> Result<u64, Error> {
        self.engine.newest_pruned()
    }

    /// Removes all but the newest `keep` commits from the history. Returns their number, and their size in bytes on
    /// disk.
    ///
    /// # Errors
    /// `Io`.
    pub fn prune(&self, keep: usize) -> Result<(usize, u64), Error> {
        let _transaction_lock = self.engine.begin_transaction()?;
        let disk = self.engine.disk()?;
        let mut old = transaction::outline(&disk)?;
        let kept = old.split_off(old.len().saturating_sub(keep));
        if !old.is_empty() {
            self.complete_stale_branches()?;
        }
        self.engine.drop_from_history(&old, &kept, self.table.oldest_fork())?;
        self.store.empty_trash();
        tracing::info!("{} commits were removed from the history", old.len());
        Ok((old.len(), old.iter().map(|past| past.header.displaced_bytes).sum()))
    }
}

#[cfg(test)]
impl Workspace {
    /// The plan of the undo or redo of the only commit.
    pub(crate) fn plan_revert_for_tests(
        &self,
        towards: UndoDirection,
    ) -> Result<(transaction::TransactionRoots, transaction::Header, transaction::Plan), Error>
    {
        let disk = self.engine.disk()?;
        let history = transaction::history(&disk)?;
        let past = history.last().ok_or(Error::NothingKept("undo"))?;
        let commit = past.commit.header.transaction;
        let (decided, (_, finished), kind) = match (towards, &past.undone) {
            (UndoDirection::Undo, _) => (&past.commit, past.done, Kind::Undo { commit }),
            (UndoDirection::Redo, None) => return Err(Error::NothingKept("redo")),
            (UndoDirection::Redo, Some((undo, interval))) => {
                (undo, *interval, Kind::Redo { commit })
            }
        };
        let own_changes = self.engine.own_changes(&disk)?;
        let transaction = self.store.next_number();
        let reversal =
            UndoRequest { past: decided, finished, own_changes: &own_changes, transaction };
        let plan = transaction::plan_undo(&disk, &reversal)?;
        let name = past.commit.header.name.clone();
        Ok((disk, header(transaction, kind, name), plan))
    }
}

fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}
