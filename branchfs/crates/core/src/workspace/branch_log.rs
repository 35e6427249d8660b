//! The records of the branches: an append-only log, `branches/log` in the store.
//!
//! A line has the new state of a branch (the last one counts), or the end of a branch number, or says that a layer is on
//! disk. So a new branch costs one `write` and no inode, and one sync makes related lines durable: a power loss leaves a
//! prefix of the lines. The log ends at the first line that is incomplete or contains zeros; a line that is damaged in
//! another way refuses the mount. The mount rewrites the log without outdated lines.
//!
//! Space is reserved, and new branches do not use it, so that branches can end on a full disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::BranchId;
use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::layer::LayerObserver;
use crate::no_follow;
use crate::ownership;

/// The log's name in `branches`.
pub const LOG: &str = "log";

/// Temporary name of the rewritten log.
pub const DRAFT: &str = "log.new";

/// Space reserved behind the end of the log: so many bytes of lines can be written even on a full disk.
const ROOM_BYTES: u64 = 32 << 10;

/// `BTRFS_SUPER_MAGIC`, linux/magic.h.
const BTRFS: rustix::fs::FsWord = 0x9123_683e;

/// A branch as the store records it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) id: BranchId,
    pub(super) name: String,
    pub(super) parent: BranchId,
    /// Own layers, top first.
    pub(super) layers: Vec<u64>,
    /// The layers between its own and the base, top first: those of the parent at the fork, and snapshot layers since.
    #[serde(rename = "below")]
    pub(super) lower_layers: Vec<u64>,
    pub(super) is_stale: bool,
    /// Nanoseconds since 1970.
    pub(super) created: i64,
    /// Bytes that the branch may add.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) disk_limit: Option<u64>,
    /// A commit into this branch that other records may not reflect yet.
    #[serde(rename = "absorbed", default, skip_serializing_if = "Option::is_none")]
    pub(super) merged_child: Option<Box<MergedChild>>,
}

/// A child that was committed into its parent, and the branches that are stale with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MergedChild {
    pub(super) child: BranchId,
    pub(super) stale: Vec<BranchId>,
}

/// A line of the log.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Line {
    /// The number belongs to no branch: the branch has ended, or was not created.
    Deleted {
        #[serde(rename = "gone")]
        layer: u64,
    },
    /// The layer exists on disk from here on; before, its branch has no changes.
    LayerCreated {
        #[serde(rename = "made")]
        layer: u64,
    },
    Branch(Box<Record>),
}

impl Line {
    pub(super) fn of(record: &Record) -> Self {
        Self::Branch(Box::new(record.clone()))
    }
}

/// What the lines of a log say: the last line of a branch counts.
#[derive(Debug, Default)]
pub(super) struct LoadedLog {
    pub(super) records: BTreeMap<BranchId, Record>,
    /// Layers that were on disk.
    pub(super) created: BTreeSet<u64>,
    /// Numbers that belong to no branch.
    pub(super) deleted: BTreeSet<u64>,
    lines: usize,
    /// Bytes up to the end of the last complete line.
    valid_bytes: usize,
}

impl LoadedLog {
    fn add(&mut self, line: Line) {
        self.lines += 1;
        match line {
            Line::Branch(record) => {
                self.deleted.remove(&record.id);
                self.records.insert(record.id, *record);
            }
            Line::Deleted { layer: gone } => {
                self.records.remove(&gone);
                self.deleted.insert(gone);
            }
            Line::LayerCreated { layer: made } => drop(self.created.insert(made)),
        }
    }

    /// Reads a log.
    ///
    /// # Errors
    /// `Corrupt`: a line is damaged, and not by a loss of power.
    fn of(text: &[u8], path: &Path) -> Result<Self, Error> {
        let mut loaded = Self::default();
        for (number, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let error = match serde_json::from_slice(line) {
                Ok(found) if line.ends_with(b"\n") => {
                    loaded.add(found);
                    loaded.valid_bytes += line.len();
                    continue;
                }
                Ok(_) => break,
                Err(error) => error,
            };
            if is_cut_off(line) {
                break;
            }
            let number = number + 1;
            return Err(Error::Corrupt(format!("{}, line {number}: {error}", path.display())));
        }
        Ok(loaded)
    }
}

/// Returns whether a power loss may have left this part of a line: its beginning, followed by zeros in place of data that
/// was not synced.
pub fn is_cut_off(line: &[u8]) -> bool {
    let written = line.split(|byte| *byte == 0).next().unwrap_or_default();
    if written.len() == line.len() && line.ends_with(b"\n") {
        return false;
    }
    serde_json::from_slice::<serde_json::Value>(written)
        .map_or_else(|error| error.is_eof(), |_| true)
}

/// The branch log, open for appending.
#[derive(Debug)]
pub(super) struct BranchLog {
    path: PathBuf,
    owner: (u32, u32),
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    file: Arc<File>,
    length: u64,
    /// The disk has space for the log up to here.
    room: u64,
}

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let file = no_follow::open_file(path, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
        let length = file.metadata()?.len();
        let mut log = Self { file: Arc::new(file), length, room: length };
        log.take_room();
        Ok(log)
    }

    /// Reserves space. If the file system does not support it, lines are written as long as it has space.
    fn take_room(&mut self) {
        for taken in [2 * ROOM_BYTES, ROOM_BYTES] {
            match rustix::fs::fallocate(&*self.file, FallocateFlags::KEEP_SIZE, self.length, taken)
            {
                Ok(()) => return self.room = self.length + taken,
                Err(Errno::NOSPC | Errno::DQUOT) => {}
                Err(_) => return self.room = u64::MAX,
            }
        }
    }

    /// Whether the reserved space is left behind a text.
    fn has_room(&mut self, text: &[u8]) -> bool {
        let wanted = self.length + text.len() as u64 + ROOM_BYTES;
        if wanted > self.room {
            self.take_room();
        }
        wanted <= self.room
    }

    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        let _ = self.has_room(text); // the space was reserved for this
        if let Err(error) = (&*self.file).write_all(text) {
            // A full disk may take half a line, which would end the log for every later reader.
            let _ = self.cut(self.length);
            return Err(error);
        }
        self.length += text.len() as u64;
        Ok(())
    }

    /// Truncates the log, and with it the reserved space.
    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        (self.length, self.room) = (length, length);
        Ok(())
    }
}

impl BranchLog {
    /// Opens and reads the log of a store. Removes an incomplete line that a power failure left at the end.
    pub(super) fn open(store: &Path, owner: (u32, u32)) -> Result<(Self, LoadedLog), Error> {
        let directory = store.join("branches");
        let path = directory.join(LOG);
        match no_follow::remove_file(&directory.join(DRAFT)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).at(path),
            _ => {}
        }
        let log = Log::open(&path).at(&path)?;
        ownership::set(&path, owner).at(&path)?;
        let text = no_follow::read(&path).at(&path)?;
        let loaded = LoadedLog::of(&text, &path)?;
        let records = Self { path, owner, log: Mutex::new(log) };
        if loaded.valid_bytes < text.len() {
            records.lock().cut(loaded.valid_bytes as u64).at(&records.path)?;
        }
        Ok((records, loaded))
    }

    /// Whether the log in the store directory records open branches. `false` without a log.
    pub(super) fn has_branches(store: &Path) -> Result<bool, Error> {
        let path = store.join("branches").join(LOG);
        match no_follow::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            text => Ok(!LoadedLog::of(&text.at(&path)?, &path)?.records.is_empty()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner) // an append is complete or undone
    }

    /// Appends lines, all of them or none. They are not synced.
    pub(super) fn append(&self, lines: &[Line]) -> Result<(), Error> {
        self.lock().append(&text_of(lines)?).at(&self.path)
    }

    /// Appends the record of a new branch, but not into the reserved space, which is for ending branches.
    pub(super) fn append_new(&self, record: &Record) -> Result<(), Error> {
        let text = text_of(&[Line::of(record)])?;
        let mut log = self.lock();
        if !log.has_room(&text) {
            return Err(Errno::NOSPC).at(&self.path);
        }
        log.append(&text).at(&self.path)
    }

    /// Makes all lines durable.
    pub(super) fn sync(&self) -> Result<(), Error> {
        let file = self.file();
        file.sync_data().or_not_durable(&self.path)
    }

    /// Syncs the log, and with it earlier renames of layers: journaling file systems keep the order of changes. btrfs syncs
    /// only the file, so the names are synced separately there.
    pub(super) fn sync_with(&self, layers: &Path) -> Result<(), Error> {
        let directory = no_follow::open_directory(layers).at(layers)?;
        let status = rustix::fs::fstatfs(&directory).at(layers)?;
        if status.f_type == BTRFS {
            rustix::fs::fsync(&directory).at(layers)?;
        }
        self.sync()
    }

    /// The log file; syncing it makes all lines durable.
    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.lock().file)
    }

    /// Removes the log: no branch is left.
    pub(super) fn clear(&self) -> Result<(), Error> {
        match no_follow::remove_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()), // the store was removed
            other => other.at(&self.path),
        }
    }

    /// Rewrites the log without outdated lines if there are many. On a full disk the log stays unchanged.
    pub(super) fn compact(&self, loaded: &LoadedLog) -> Result<(), Error> {
        let mut lines: Vec<Line> = loaded.records.values().map(Line::of).collect();
        let is_named = |id: &u64| loaded.records.values().any(|record| record.layers.contains(id));
        let made = loaded.created.iter().copied().filter(is_named);
        lines.extend(made.map(|made| Line::LayerCreated { layer: made }));
        lines.extend(loaded.deleted.iter().map(|gone| Line::Deleted { layer: *gone }));
        if loaded.lines <= lines.len() {
            return Ok(());
        }
        let draft = self.path.with_file_name(DRAFT);
        let replace = || {
            no_follow::write(&draft, &text_of(&lines)?).at(&draft)?;
            ownership::set(&draft, self.owner).at(&draft)?;
            let file = no_follow::open_file(&draft, OFlags::RDONLY).at(&draft)?;
            file.sync_data().at(&draft)?;
            no_follow::rename(&draft, &self.path).at(&self.path)?;
            let directory = self.path.parent().unwrap_or(&self.path);
            no_follow::open_directory(directory).and_then(|file| file.sync_all()).at(directory)
        };
        let mut log = self.lock();
        match replace() {
            Err(Error::Io { source, .. }) if super::probe::is_full(&source) => {
                let _ = no_follow::remove_file(&draft); // the next mount does
                return Ok(());
            }
            other => other?,
        }
        *log = Log::open(&self.path).at(&self.path)?;
        Ok(())
    }
}

impl LayerObserver for BranchLog {
    fn created(&self, layer: LayerId) -> io::Result<()> {
        let line = text_of(&[Line::LayerCreated { layer: layer.0 }]).map_err(io::Error::other)?;
        self.lock().append(&line)
    }
}

fn text_of(lines: &[Line]) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut text, line)
            .map_err(|error| Error::Corrupt(error.to_string()))?;
        text.push(b'\n');
    }
    Ok(text)
}

/// The fork time of the oldest of these branches that is not stale.
pub(super) fn oldest<'r>(records: impl Iterator<Item = &'r Record>) -> Option<i64> {
    records.filter(|record| !record.is_stale).map(|record| record.created).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::{assert_examples, assert_fields, example};

    #[test]
    fn the_document_of_the_format_has_the_lines_of_the_log() {
        assert_examples::<Line>("Branch log");
        assert_fields::<Record>("Branch record", "field", &example("Branch log", ""));
        assert_fields::<MergedChild>(
            "Branch record",
            "absorbed",
            &example("Branch log", "/absorbed"),
        );
    }
}
