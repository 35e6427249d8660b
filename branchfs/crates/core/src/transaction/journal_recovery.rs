//! Recovery of the transaction that a crash or an error interrupted.

use std::path::{Path, PathBuf};

use super::journal::{FINISHED, LoggedTransaction, PLAN, ROLLBACK};
use super::step::{Direction, JOURNAL, Location, TransactionRoots};
use crate::error::{Context, Error};

/// An interrupted transaction that was completed or rolled back.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) decided: LoggedTransaction,
    /// The transaction was completed; otherwise it was rolled back.
    pub(crate) is_committed: bool,
}

/// Recovers the interrupted transaction, if there is one: completes it, or continues its rollback. Can itself be
/// interrupted at any point. The caller updates the branch records, then finishes or discards the entry.
///
/// # Errors
/// `SeveralUnfinished`, `Io`, `Corrupt`.
pub(crate) fn recover(disk: &TransactionRoots) -> Result<Option<Recovered>, Error> {
    let mut unfinished = unfinished(disk)?;
    if unfinished.len() > 1 {
        return Err(Error::SeveralUnfinished {
            journal: PathBuf::from(JOURNAL),
            transactions: unfinished.iter().map(|decided| decided.header.transaction).collect(),
        });
    }
    let Some(decided) = unfinished.pop() else { return Ok(None) };
    let is_committed = disk.stat(&Location::Store(decided.directory.join(ROLLBACK)))?.is_none();
    let progress = decided.progress(disk)?;
    if is_committed {
        let left = &decided.steps[progress.forward..];
        left.iter().try_for_each(|step| step.run(disk, Direction::Forward))?;
    } else {
        decided.rollback(disk, progress.back)?;
    }
    LoggedTransaction::sync(disk)?;
    Ok(Some(Recovered { decided, is_committed }))
}

/// The logged transactions in the journal, oldest first. Entries that were never logged are removed: they hold nothing.
pub(crate) fn unfinished(disk: &TransactionRoots) -> Result<Vec<LoggedTransaction>, Error> {
    let mut found = Vec::new();
    for entry in disk.store.list(Path::new(JOURNAL)).at(JOURNAL)? {
        let directory = Path::new(JOURNAL).join(&entry.name);
        match LoggedTransaction::read(disk, &directory)? {
            Some(decided) => found.push(decided),
            None => {
                refuse_holding(disk, &directory)?;
                disk.store.remove_all(&directory).at(&directory)?;
            }
        }
    }
    found.sort_by_key(|decided| decided.header.transaction);
    Ok(found)
}

/// An entry without a complete plan was never logged, and holds nothing but empty directories. One that holds more has
/// lost its plan: its objects may be the only copies.
fn refuse_holding(disk: &TransactionRoots, directory: &Path) -> Result<(), Error> {
    for entry in disk.store.list(directory).at(directory)? {
        let path = directory.join(&entry.name);
        let is_ours = entry.name.to_string_lossy().starts_with(PLAN) || entry.name == FINISHED;
        let is_empty = entry.kind == rustix::fs::FileType::Directory
            && disk.store.list(&path).at(&path)?.is_empty();
        if !is_ours && !is_empty {
            return Err(Error::Corrupt(format!(
                "{} has no valid plan, but holds {}, which came out of the base",
                directory.display(),
                entry.name.to_string_lossy()
            )));
        }
    }
    Ok(())
}
