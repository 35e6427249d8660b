//! The commits that can be undone, as their entries in the store tell of them.

use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::journal::{FINISHED, HISTORY, Header, LoggedTransaction, PLAN, REDONE, UNDONE};
use super::own_changes::Interval;
use super::step::{Location, TransactionRoots};
use crate::error::{Context, Error};

/// A commit of the history.
#[derive(Debug)]
pub(crate) struct HistoryEntry {
    pub(crate) commit: LoggedTransaction,
    /// When it was done last.
    pub(crate) done: Interval,
    /// The veil over it, or over its undo while it is undone.
    pub(crate) veil: Option<u64>,
    /// Its undo, while it is undone.
    pub(crate) undone: Option<(LoggedTransaction, Interval)>,
}

/// Every commit of the history, oldest first; the last ones may be undone. An entry that cannot be read is left alone:
/// it can be pruned, not undone.
pub(crate) fn history(disk: &TransactionRoots) -> Result<Vec<HistoryEntry>, Error> {
    let mut entries = Vec::new();
    for entry in disk.store.list(Path::new(HISTORY)).at(HISTORY)? {
        let directory = Path::new(HISTORY).join(&entry.name);
        let Some(commit) = LoggedTransaction::read(disk, &directory)? else {
            continue;
        };
        let times = EntryTimes::of(disk, &directory)?;
        let veil = if times.was_redone {
            read_number(disk, &directory.join(REDONE))?
        } else {
            commit.header.veil
        };
        let undone = LoggedTransaction::read(disk, &directory.join(UNDONE))?.zip(times.undone);
        let veil = match &undone {
            Some((undo, _)) => undo.header.veil,
            None => veil,
        };
        entries.push(HistoryEntry { commit, done: times.done, veil, undone });
    }
    entries.sort_by_key(|past| past.commit.header.transaction);
    Ok(entries)
}

/// A commit of the history, without what it did.
#[derive(Debug)]
pub(crate) struct EntryHeader {
    pub(crate) header: Header,
    /// Its entry in the store.
    pub(crate) directory: PathBuf,
    /// When it was done last.
    pub(crate) done: Interval,
    /// When it was undone, while it is.
    pub(crate) undone: Option<Interval>,
}

/// As [`history`], reading only the first line of each plan: what a commit needs to know of those before it.
pub(crate) fn outline(disk: &TransactionRoots) -> Result<Vec<EntryHeader>, Error> {
    let mut entries = Vec::new();
    for entry in disk.store.list(Path::new(HISTORY)).at(HISTORY)? {
        let directory = Path::new(HISTORY).join(&entry.name);
        let plan = directory.join(PLAN);
        let file = match disk.store.open_own_file(&plan, OFlags::RDONLY) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.at(&plan)?,
        };
        let mut line = Vec::new();
        let mut reader = std::io::BufReader::new(file);
        std::io::BufRead::read_until(&mut reader, b'\n', &mut line).at(&plan)?;
        let Ok(header) = serde_json::from_slice(&line) else { continue }; // as one that cannot be read
        let times = EntryTimes::of(disk, &directory)?;
        entries.push(EntryHeader { header, directory, done: times.done, undone: times.undone });
    }
    entries.sort_by_key(|outline| outline.header.transaction);
    Ok(entries)
}

/// When the transactions of an entry of the history were carried out.
struct EntryTimes {
    done: Interval,
    was_redone: bool,
    undone: Option<Interval>,
}

impl EntryTimes {
    fn of(disk: &TransactionRoots, directory: &Path) -> Result<Self, Error> {
        let redone = interval(disk, directory, REDONE)?;
        let done = match redone {
            Some(redone) => redone,
            None => interval(disk, directory, PLAN)?.unwrap_or_default(),
        };
        let undone = interval(disk, &directory.join(UNDONE), PLAN)?;
        Ok(Self { done, was_redone: redone.is_some(), undone })
    }
}

/// From the file `start` of an entry to its end, where both are there.
pub(super) fn interval(
    disk: &TransactionRoots,
    directory: &Path,
    start: &str,
) -> Result<Option<Interval>, Error> {
    let end = modified(disk, &directory.join(FINISHED))?;
    Ok(modified(disk, &directory.join(start))?.zip(end))
}

fn modified(disk: &TransactionRoots, path: &Path) -> Result<Option<i64>, Error> {
    let stat = disk.stat(&Location::Store(path.to_path_buf()))?;
    Ok(stat.map(|stat| stat.stx_mtime.tv_sec * 1_000_000_000 + i64::from(stat.stx_mtime.tv_nsec)))
}

fn read_number(disk: &TransactionRoots, path: &Path) -> Result<Option<u64>, Error> {
    let mut file = disk.store.open_own_file(path, OFlags::RDONLY).at(path)?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut file, &mut text).at(path)?;
    Ok(text.parse().ok())
}
