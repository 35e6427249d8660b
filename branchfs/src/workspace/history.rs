//! Undo and redo of commits to main, and how long they are kept (S12).
//!
//! The history is a stack in the store: commits in the order they were made, the last ones of which may be undone. A new
//! commit drops what is undone. Taking a commit back is a transaction like a commit: decided in the journal, carried out
//! under the gate, rolled forward or back after a crash.

use super::branches::Branches;
use super::planning::header;
use super::{BranchId, Committed, Forgotten, HISTORY_BYTES_MAX, Record, Workspace};
use crate::commit::{self, Decided, Disk, Kind, Outline, Past, Plan, Reversal};
use crate::error::{Context, Error};
use crate::no_follow;

/// A commit of the history as it is reported.
#[derive(Clone, Debug)]
pub(crate) struct PastInfo {
    /// Its number.
    pub(crate) id: u64,
    /// Name of the branch it was.
    pub(crate) branch: String,
    /// Seconds since 1970.
    pub(crate) committed: f64,
    /// When it was undone, seconds since 1970.
    pub(crate) undone: Option<f64>,
    /// How many paths it changed.
    pub(crate) changes: usize,
    /// Bytes on disk that are kept for its undo.
    pub(crate) bytes: u64,
}

impl PastInfo {
    fn of(past: &Past) -> Self {
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

/// What was taken back, or done again.
#[derive(Debug)]
pub(crate) struct Reverted {
    pub(crate) entry: PastInfo,
    /// What changed in main, and which branches are stale with it.
    pub(crate) committed: Committed,
}

/// Which way to go in the history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Towards {
    /// Undo.
    Past,
    /// Redo.
    Future,
}

impl Workspace {
    /// Takes the last commit to main back, or does the last one that was taken back again.
    ///
    /// # Errors
    /// `NothingKept`; `Frozen` while main has live children (`force` makes them stale); `Conflict` where others changed
    /// what the commit left (`force` moves that aside); `Io`. Main is as before then.
    pub(crate) fn revert(
        &self,
        towards: Towards,
        force: bool,
        dry_run: bool,
    ) -> Result<Reverted, Error> {
        let _turn = self.begin_transaction()?;
        let disk = self.disk()?;
        let history = commit::history(&disk)?;
        let undone = history.iter().position(|past| past.undone.is_some());
        let at = match towards {
            Towards::Past => undone.unwrap_or(history.len()).checked_sub(1),
            Towards::Future => undone,
        };
        let Some(past) = at.map(|at| &history[at]) else {
            return Err(Error::NothingKept(match towards {
                Towards::Past => "undo",
                Towards::Future => "redo",
            }));
        };
        let commit = past.commit.header.transaction;
        let (decided, (_, finished), kind) = match &past.undone {
            None => (&past.commit, past.done, Kind::Undo { commit }),
            Some((undo, interval)) => (undo, *interval, Kind::Redo { commit }),
        };
        let lifted = past.veil;
        // Asked at once, and again when it happens: branches may come meanwhile.
        let audience = |branches: &Branches| {
            let audience = self.audience(branches, self.settings.policy, None, lifted);
            if audience.stale.is_empty() || force {
                return Ok(audience);
            }
            let name = |id: &BranchId| branches[id].record.name.as_str();
            let names: Vec<&str> = audience.stale.iter().map(name).collect();
            Err(Error::Frozen { name: "main".to_owned(), children: names.join(", ") })
        };
        audience(&self.lock())?;
        let traces = self.traces(&disk)?;
        let transaction = self.next_number();
        let reversal = Reversal { past: decided, finished, traces: &traces, transaction };
        let plan = commit::reverse(&disk, &reversal)?;
        if !plan.drift.is_empty() && !force {
            let word = if towards == Towards::Past { "undone" } else { "done again" };
            let name = &past.commit.header.name;
            let message = format!(
                "the commit of {name} cannot be {word}: others changed what it left; main is unchanged"
            );
            return Err(Error::Conflict {
                message,
                paths: plan.drift.into_iter().collect(),
                hint: "look at these paths; --force sets aside what others did there",
            });
        }
        let entry = PastInfo::of(past);
        if dry_run {
            let committed = Committed { changes: plan.changes, ..Committed::default() };
            return Ok(Reverted { entry, committed });
        }
        let header = header(plan.transaction, kind, past.commit.header.name.clone());
        let address = |branches: &Branches| Ok(self.address(header, audience(branches)?));
        let committed = self.conclude(&disk, self.transact(&disk, plan, address)?, None)?;
        Ok(Reverted { entry, committed })
    }

    /// The undo or redo of the only commit, as it would be decided.
    #[cfg(test)]
    pub(crate) fn plan_revert_for_tests(
        &self,
        towards: Towards,
    ) -> Result<(Disk, commit::Header, commit::Plan), Error> {
        let disk = self.disk()?;
        let history = commit::history(&disk)?;
        let past = history.last().ok_or(Error::NothingKept("undo"))?;
        let commit = past.commit.header.transaction;
        let (decided, (_, finished), kind) = match (towards, &past.undone) {
            (Towards::Past, _) => (&past.commit, past.done, Kind::Undo { commit }),
            (Towards::Future, None) => return Err(Error::NothingKept("redo")),
            (Towards::Future, Some((undo, interval))) => (undo, *interval, Kind::Redo { commit }),
        };
        let traces = self.traces(&disk)?;
        let transaction = self.next_number();
        let reversal = Reversal { past: decided, finished, traces: &traces, transaction };
        let plan = commit::reverse(&disk, &reversal)?;
        let name = past.commit.header.name.clone();
        Ok((disk, header(transaction, kind, name), plan))
    }

    /// The commits that are kept, oldest first.
    ///
    /// # Errors
    /// `Io`, `Corrupt`.
    pub(crate) fn history(&self) -> Result<Vec<PastInfo>, Error> {
        let _turn = self.take_turn();
        Ok(commit::history(&self.disk()?)?.iter().map(PastInfo::of).collect())
    }

    /// Forgets all but the newest `keep` commits. Returns how many went, and the bytes on disk they held.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn prune(&self, keep: usize) -> Result<(usize, u64), Error> {
        let _turn = self.begin_transaction()?;
        let disk = self.disk()?;
        let mut old = commit::outline(&disk)?;
        let kept = old.split_off(old.len().saturating_sub(keep));
        self.forget(&old, &kept, self.oldest_fork())?;
        self.empty_trash();
        tracing::info!("{} commits were removed from the history", old.len());
        Ok((old.len(), old.iter().map(|past| past.header.displaced_bytes).sum()))
    }

    /// When the oldest live branch was forked.
    pub(super) fn oldest_fork(&self) -> Option<i64> {
        oldest(self.lock().values().map(|branch| &branch.record))
    }

    /// Takes a transaction that happened into the history. Commits that were undone go first, as a new commit ends their
    /// redo; then what is over the limits, which is returned. `oldest` is when the oldest live branch was forked.
    pub(super) fn keep(
        &self,
        disk: &Disk,
        decided: &Decided,
        oldest: Option<i64>,
    ) -> Result<Vec<Forgotten>, Error> {
        let header = &decided.header;
        let is_commit = matches!(header.kind, Kind::Commit { .. });
        if is_commit {
            let (mut undone, kept): (Vec<_>, Vec<_>) =
                commit::outline(disk)?.into_iter().partition(|past| past.undone.is_some());
            undone.reverse(); // the last one first: where this stops half-way, the rest is still a stack
            let oldest = oldest.map_or(header.decided, |oldest| oldest.min(header.decided));
            self.forget(&undone, &kept, Some(oldest))?;
        }
        decided.finish(disk, &self.trash_name("tx", header.transaction))?;
        if !is_commit {
            return Ok(Vec::new());
        }
        Ok(self.trim(disk, header.transaction, oldest).unwrap_or_else(|error| {
            // The transaction is complete; the next commit does it.
            tracing::warn!("commits over the limits of the history stay: {error}");
            Vec::new()
        }))
    }

    /// Drops the oldest commits that are over the limits. Returns those that were there before the commit `newest`.
    fn trim(&self, disk: &Disk, newest: u64, oldest: Option<i64>) -> Result<Vec<Forgotten>, Error> {
        let mut gone = commit::outline(disk)?;
        let sizes: Vec<u64> = gone.iter().map(|past| past.header.displaced_bytes).collect();
        let kept = gone.split_off(self.count_over_limits(&sizes));
        self.forget(&gone, &kept, oldest)?;
        Ok(forgotten(gone.iter().filter(|past| past.header.transaction != newest)))
    }

    /// The commits that a commit by this plan would push out of the history.
    pub(super) fn forgotten_by(&self, plan: &Plan) -> Result<Vec<Forgotten>, Error> {
        if plan.changes_nothing() {
            return Ok(Vec::new());
        }
        let mut kept = commit::outline(&self.disk()?)?;
        kept.retain(|past| past.undone.is_none());
        let sizes = kept.iter().map(|past| past.header.displaced_bytes);
        let sizes: Vec<u64> = sizes.chain([plan.displaced_bytes]).collect();
        Ok(forgotten(kept.iter().take(self.count_over_limits(&sizes))))
    }

    /// How many of the oldest commits are over the limits of the history, given the bytes that each keeps on disk, oldest
    /// first. The newest is within them whatever its size, unless no history is wanted.
    fn count_over_limits(&self, sizes: &[u64]) -> usize {
        let mut bytes = 0;
        let fits = |size: &&u64| {
            bytes += **size;
            bytes <= HISTORY_BYTES_MAX
        };
        let count = sizes.iter().rev().take_while(fits).count();
        sizes.len() - count.max(1).min(self.settings.history_commits_max).min(sizes.len())
    }

    /// Moves commits out of the history; `kept` are those that stay.
    fn forget(
        &self,
        gone: &[Outline],
        kept: &[Outline],
        oldest_fork: Option<i64>,
    ) -> Result<(), Error> {
        self.remember(gone, kept, oldest_fork)?;
        for past in gone {
            let from = self.home_path.join(&past.directory);
            let to = self.home_path.join(self.trash_name("past", past.header.transaction));
            no_follow::rename(&from, &to).at(&from)?;
        }
        Ok(())
    }
}

fn forgotten<'o>(gone: impl Iterator<Item = &'o Outline>) -> Vec<Forgotten> {
    let forgotten = |past: &Outline| Forgotten {
        id: past.header.transaction,
        branch: past.header.name.clone(),
    };
    gone.map(forgotten).collect()
}

/// When the oldest of these branches was forked that is not stale.
pub(super) fn oldest<'r>(records: impl Iterator<Item = &'r Record>) -> Option<i64> {
    records.filter(|record| !record.is_stale).map(|record| record.created).min()
}

fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}
