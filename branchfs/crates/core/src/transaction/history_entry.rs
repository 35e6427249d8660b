//! The commits that can be undone, as recorded by their entries in the store.

use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::journal::{HISTORY, Header, LoggedTransaction, PLAN, REDONE, UNDONE, time_span};
use super::own_changes::Interval;
use super::step::TransactionRoots;
use crate::error::{Context, Error};

/// A commit that can be undone or, while it is undone, redone.
#[derive(Debug)]
pub(crate) struct HistoryEntry {
    pub(crate) commit: LoggedTransaction,
    /// When it was done last.
    pub(crate) done: Interval,
    /// The snapshot layer over it, or over its undo while it is undone.
    pub(crate) snapshot_layer: Option<u64>,
    /// Its undo, while it is undone.
    pub(crate) undone: Option<(LoggedTransaction, Interval)>,
}

/// Every commit of the history, oldest first; the last ones may be undone. An entry that cannot be read is skipped: it
/// can be pruned, not undone.
pub(crate) fn history(disk: &TransactionRoots) -> Result<Vec<HistoryEntry>, Error> {
    let mut entries = Vec::new();
    for entry in disk.store.list(Path::new(HISTORY)).at(HISTORY)? {
        let directory = Path::new(HISTORY).join(&entry.name);
        let Some(commit) = LoggedTransaction::read(disk, &directory)? else {
            continue;
        };
        let times = EntryTimes::of(disk, &directory)?;
        let snapshot_layer = if times.was_redone {
            read_number(disk, &directory.join(REDONE))?
        } else {
            commit.header.snapshot_layer
        };
        let undone = LoggedTransaction::read(disk, &directory.join(UNDONE))?.zip(times.undone);
        let snapshot_layer = match &undone {
            Some((undo, _)) => undo.header.snapshot_layer,
            None => snapshot_layer,
        };
        entries.push(HistoryEntry { commit, done: times.done, snapshot_layer, undone });
    }
    entries.sort_by_key(|past| past.commit.header.transaction);
    Ok(entries)
}

/// A commit of the history, without its steps and changes.
#[derive(Debug)]
pub(crate) struct EntryHeader {
    pub(crate) header: Header,
    /// Its entry in the store.
    pub(crate) directory: PathBuf,
    /// When it was done last.
    pub(crate) done: Interval,
    /// When it was undone; `None` unless it is undone.
    pub(crate) undone: Option<Interval>,
}

/// As [`history`], but reads only the first line of each plan, which is enough for a commit.
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
        let redone = time_span(disk, directory, REDONE)?;
        let done = match redone {
            Some(redone) => redone,
            None => time_span(disk, directory, PLAN)?.unwrap_or_default(),
        };
        let undone = time_span(disk, &directory.join(UNDONE), PLAN)?;
        Ok(Self { done, was_redone: redone.is_some(), undone })
    }
}

fn read_number(disk: &TransactionRoots, path: &Path) -> Result<Option<u64>, Error> {
    let mut file = disk.store.open_own_file(path, OFlags::RDONLY).at(path)?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut file, &mut text).at(path)?;
    Ok(text.parse().ok())
}
