//! What our own work did to ctimes in the base ([`OwnCtimeChanges`]): the history tells of its transactions, the file `forgotten` of
//! those that it forgot or that were taken back, and of links that were deleted. Whoever reads or writes it has the turn.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FileType, OFlags};

use super::store_directory::{give, write_private};
use crate::error::{Context, Error};
use crate::no_follow;
use crate::rooted_dir::{Tree, check_length, stat_of};
use crate::scheduling::yield_now;
use crate::transaction::{
    EntryHeader, LoggedTransaction, OwnCtimeChanges, PendingUnlink, TransactionRoots,
};
use crate::write_set::Fingerprint;

/// Objects that are deleted in one turn: transactions wait as long as that.
const UNLINKED_AT_ONCE_MAX: usize = 64;

/// Names in the trash, by their beginnings, in which there may be links to objects of the base: veils, and what the
/// history kept.
const SHARING: [&str; 4] = ["veil-", "past-", "tx-", "lost-"];

fn path_in(home: &Path) -> PathBuf {
    home.join("forgotten")
}

/// The file `forgotten`, next to journal and history.
pub(super) struct CtimeLog {
    turn: Arc<Mutex<()>>,
    home_path: PathBuf,
    owner: (u32, u32),
}

impl CtimeLog {
    pub(super) fn new(turn: Arc<Mutex<()>>, home_path: PathBuf, owner: (u32, u32)) -> Self {
        Self { turn, home_path, owner }
    }

    pub(super) fn noted(&self) -> Result<OwnCtimeChanges, Error> {
        let path = path_in(&self.home_path);
        match no_follow::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(OwnCtimeChanges::default()),
            other => Ok(OwnCtimeChanges::parse(&other.at(&path)?)),
        }
    }

    /// Notes when a transaction touched the base that was taken back.
    pub(super) fn record_rollback(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
    ) -> Result<(), Error> {
        let line = OwnCtimeChanges::interval_line(decided.rollback_interval(disk)?);
        append(&self.home_path, self.owner, &line)
    }

    /// Notes when the transactions of `gone` changed the base, which the history is about to forget, and drops what no live
    /// branch and no commit that is `kept` is older than.
    pub(super) fn remember(
        &self,
        gone: &[EntryHeader],
        kept: &[EntryHeader],
        oldest_fork: Option<i64>,
    ) -> Result<(), Error> {
        /// The clock of the file system is behind by some ticks of a few milliseconds.
        const CLOCKS_APART_MAX: i64 = 1_000_000_000;
        let path = path_in(&self.home_path);
        let mut known = self.noted()?;
        let was_empty = known.is_empty();
        for past in gone {
            [Some(past.done), past.undone].into_iter().flatten().for_each(|one| known.add(one));
        }
        let oldest = kept.iter().map(|past| past.done.1).chain(oldest_fork).min();
        let oldest = oldest.map_or(i64::MAX, |oldest| oldest.saturating_sub(CLOCKS_APART_MAX));
        if !known.drop_before(oldest) && gone.is_empty() {
            return Ok(());
        }
        if known.is_empty() {
            return if was_empty { Ok(()) } else { no_follow::remove_file(&path).at(&path) };
        }
        let draft = path.with_extension("new");
        write_private(&draft, known.text().as_bytes())?;
        give(&draft, self.owner)?;
        no_follow::rename(&draft, &path).at(&path)
    }

    /// Before anything is deleted: notes what a crash kept from being noted.
    pub(super) fn finish_pending_unlink(&self) -> Result<(), Error> {
        /// A directory and what it lost may have got their times in two ticks of the clock.
        const TICK_NANOSECONDS_MAX: i64 = 10_000_000;
        let path = path_in(&self.home_path);
        if !no_follow::exists(&path).at(&path)? {
            return Ok(());
        }
        let Some(unlinking) = PendingUnlink::last(&no_follow::read(&path).at(&path)?) else {
            return Ok(());
        };
        let trash = Tree::open_root(&self.home_path.join("trash")).at(&self.home_path)?;
        // Where the directory is gone, all was noted.
        let Ok(directory) = trash.stat(&unlinking.directory) else { return Ok(()) };
        let latest = Fingerprint::of(&directory).ctime + TICK_NANOSECONDS_MAX;
        append(&self.home_path, self.owner, &unlinking.notes(latest))
    }

    pub(super) fn unlinker(&self) -> TrashCollector {
        let (turn, home) = (Arc::clone(&self.turn), self.home_path.clone());
        TrashCollector { turn, home, owner: self.owner }
    }
}

/// Deletes what is in the home's trash, in the background.
#[derive(Debug)]
pub(super) struct TrashCollector {
    turn: Arc<Mutex<()>>,
    home: PathBuf,
    owner: (u32, u32),
}

impl TrashCollector {
    /// Removes what is in a directory of the trash: first, and noting each, objects that have other links; then the rest.
    pub(super) fn remove(&self, trash: &Tree, name: &Path) -> Result<(), Error> {
        if SHARING.iter().any(|start| name.to_string_lossy().starts_with(start)) {
            self.unlink_shared(trash, name)?;
        }
        let between = || {
            yield_now();
            Ok(())
        };
        trash.remove_in_steps(name, &between).at(name)
    }

    fn unlink_shared(&self, trash: &Tree, name: &Path) -> Result<(), Error> {
        let mut pending = vec![name.to_path_buf()];
        while let Some(directory) = pending.pop() {
            let mut linked = Vec::new();
            for entry in trash.list(&directory).at(&directory)? {
                let path = directory.join(&entry.name);
                if check_length(&path).is_err() {
                    continue; // no transaction has moved anything there
                }
                if entry.kind == FileType::Directory {
                    pending.push(path);
                } else if trash.stat(&path).at(&path)?.stx_nlink > 1 {
                    linked.push(path);
                }
            }
            linked
                .chunks(UNLINKED_AT_ONCE_MAX)
                .try_for_each(|paths| self.unlink(trash, &directory, paths))?;
        }
        Ok(())
    }

    /// A death at any moment leaves a note, or the links.
    fn unlink(&self, trash: &Tree, directory: &Path, paths: &[PathBuf]) -> Result<(), Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut objects = Vec::new();
        for path in paths {
            objects.push((path, trash.open(path, OFlags::PATH).at(path)?));
        }
        let identity = |object: &OwnedFd| stat_of(object).map(|stat| Fingerprint::of(&stat));
        let known = objects.iter().filter_map(|(_, object)| identity(object).ok());
        let announced = PendingUnlink::line(directory, known.map(|known| (known.ino, known.ctime)));
        // A full disk has no room for it, and needs the room that this gives back.
        let _ = append(&self.home, self.owner, &announced);
        let mut notes = String::new();
        let unlinked = objects.iter().try_for_each(|(path, object)| {
            let before = identity(object).at(path)?;
            trash.remove_file(path).at(path)?;
            let left = identity(object).at(path)?;
            notes += &OwnCtimeChanges::unlinked_line(left.ino, before.ctime, left.ctime);
            Ok(())
        });
        append(&self.home, self.owner, &notes)?;
        unlinked
    }
}

/// Appends to the notes. Not synced: of what a loss of power takes, something is refused that need not be.
fn append(home: &Path, owner: (u32, u32), lines: &str) -> Result<(), Error> {
    let path = path_in(home);
    if !no_follow::exists(&path).at(&path)? {
        write_private(&path, b"")?;
        give(&path, owner)?;
    }
    let mut file = no_follow::open_file(&path, OFlags::WRONLY | OFlags::APPEND).at(&path)?;
    file.write_all(lines.as_bytes()).at(&path)
}
