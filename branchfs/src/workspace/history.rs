//! Undo and redo of commits to main, and how long they are kept (S12).
//!
//! The history is a stack in the store: commits in the order they were made, the last ones of which may be undone. A new
//! commit drops what is undone. Taking a commit back is a transaction like a commit: decided in the journal, carried out
//! under the gate, rolled forward or back after a crash.

use std::fs;
use std::path::PathBuf;

use super::branches::Branches;
use super::store::{give, write_private};
use super::{BranchId, Committed, HISTORY_BYTES_MAX, Record, Workspace, now};
use crate::commit::{
    self, Decided, Disk, Header, Interval, Kind, Outline, Past, Reversal, VERSION,
};
use crate::error::{Context, Error};

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
        let _turn = self.take_turn();
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
        let later = intervals(&history, finished);
        let transaction = self.next_number();
        let plan = commit::reverse(
            &disk,
            &Reversal { past: decided, finished, later: &later, transaction },
        )?;
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
            let committed = Committed { changes: plan.changes, stale: Vec::new() };
            return Ok(Reverted { entry, committed });
        }
        let header = reversal_header(plan.transaction, kind, past.commit.header.name.clone());
        let address = |branches: &Branches| Ok(self.address(header, audience(branches)?));
        let committed = self.conclude(&disk, self.transact(&disk, plan, address)?)?;
        Ok(Reverted { entry, committed })
    }

    /// The undo of the last commit, as it would be decided.
    #[cfg(test)]
    pub(crate) fn plan_undo_for_tests(&self) -> Result<(Disk, Header, commit::Plan), Error> {
        let disk = self.disk()?;
        let history = commit::history(&disk)?;
        let past = history.last().ok_or(Error::NothingKept("undo"))?;
        let transaction = self.next_number();
        let later = intervals(&history, past.done.1);
        let reversal =
            Reversal { past: &past.commit, finished: past.done.1, later: &later, transaction };
        let plan = commit::reverse(&disk, &reversal)?;
        let kind = Kind::Undo { commit: past.commit.header.transaction };
        let name = past.commit.header.name.clone();
        Ok((disk, reversal_header(transaction, kind, name), plan))
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
        let _turn = self.take_turn();
        let history = commit::outline(&self.disk()?)?;
        let old = &history[..history.len().saturating_sub(keep)];
        let oldest = self.oldest_fork();
        for past in old {
            self.forget(past, oldest)?;
        }
        self.empty_trash();
        Ok((old.len(), old.iter().map(|past| past.header.displaced_bytes).sum()))
    }

    /// When the oldest live branch was forked.
    pub(super) fn oldest_fork(&self) -> Option<i64> {
        oldest(self.lock().values().map(|branch| &branch.record))
    }

    /// Takes a transaction that happened into the history. What a new commit has undone for good goes, and what is over
    /// the limits. `oldest` is when the oldest live branch was forked.
    pub(super) fn keep(
        &self,
        disk: &Disk,
        decided: &Decided,
        oldest: Option<i64>,
    ) -> Result<(), Error> {
        let number = decided.header.transaction;
        decided.finish(disk, &self.trash_name("tx", number))?;
        if !matches!(decided.header.kind, Kind::Commit { .. }) {
            return Ok(());
        }
        let mut kept = 0;
        let mut bytes = 0;
        for past in commit::outline(disk)?.iter().rev() {
            kept += 1;
            bytes += past.header.displaced_bytes;
            let is_over = kept > self.settings.history_commits_max || bytes > HISTORY_BYTES_MAX;
            if past.undone.is_some() || is_over {
                self.forget(past, oldest)?;
            }
        }
        Ok(())
    }

    fn forget(&self, past: &Outline, oldest: Option<i64>) -> Result<(), Error> {
        let passed: Vec<Interval> = [Some(past.done), past.undone].into_iter().flatten().collect();
        self.remember(&passed, oldest)?;
        let number = past.header.transaction;
        let from = self.home_path.join(&past.directory);
        let to = self.home_path.join(self.trash_name("past", number));
        fs::rename(&from, to).at(&from)
    }

    /// When our own transactions changed the base.
    pub(super) fn own_intervals(&self, disk: &Disk) -> Result<Vec<Interval>, Error> {
        let mut own = self.forgotten()?;
        for past in commit::outline(disk)? {
            own.extend([Some(past.done), past.undone].into_iter().flatten());
        }
        Ok(own)
    }

    fn forgotten_path(&self) -> PathBuf {
        self.home_path.join("forgotten")
    }

    /// When transactions changed the base that the history has forgotten since. A line that a loss of power has damaged
    /// is passed over: then a commit is refused that need not be.
    fn forgotten(&self) -> Result<Vec<Interval>, Error> {
        let path = self.forgotten_path();
        let text = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.at(&path)?,
        };
        let interval = |line: &str| {
            let (start, end) = line.split_once(' ')?;
            Some((start.parse().ok()?, end.parse().ok()?))
        };
        Ok(String::from_utf8_lossy(&text).lines().filter_map(interval).collect())
    }

    /// Notes for branches that live on when transactions changed the base that are to be forgotten.
    fn remember(&self, passed: &[Interval], oldest: Option<i64>) -> Result<(), Error> {
        /// The clock of the file system is behind by some ticks of a few milliseconds.
        const CLOCKS_APART_MAX: i64 = 1_000_000_000;
        let path = self.forgotten_path();
        let Some(oldest) = oldest else {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                other => other.at(&path),
            };
        };
        let mut known = self.forgotten()?;
        known.extend(passed);
        known.retain(|(_, end)| end.saturating_add(CLOCKS_APART_MAX) >= oldest);
        let lines: Vec<String> =
            known.iter().map(|(start, end)| format!("{start} {end}\n")).collect();
        let draft = path.with_extension("new");
        write_private(&draft, lines.concat().as_bytes())?;
        give(&draft, self.owner)?;
        fs::rename(&draft, &path).at(&path)
    }
}

/// When the oldest of these branches was forked that is not stale.
pub(super) fn oldest<'r>(records: impl Iterator<Item = &'r Record>) -> Option<i64> {
    records.filter(|record| !record.is_stale).map(|record| record.created).min()
}

fn reversal_header(transaction: u64, kind: Kind, name: String) -> Header {
    Header {
        version: VERSION,
        transaction,
        kind,
        name,
        layers: Vec::new(),
        stale: Vec::new(),
        veil: None,
        observers: Vec::new(),
        unveiled: Vec::new(),
        lifted: None,
        decided: now(),
        displaced_bytes: 0,
    }
}

/// Those that began at `since` or later.
fn intervals(history: &[Past], since: i64) -> Vec<Interval> {
    let undone = |past: &Past| past.undone.as_ref().map(|(_, interval)| *interval);
    history
        .iter()
        .flat_map(|past| [Some(past.done), undone(past)])
        .flatten()
        .filter(|(start, _)| *start >= since)
        .collect()
}

fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}
