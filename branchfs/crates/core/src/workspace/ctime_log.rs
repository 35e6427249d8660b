//! The log of ctimes in the base that our own work changed ([`OwnCtimeChanges`]). The history has its own transactions;
//! the file `forgotten` has those that were dropped from it or rolled back, and deleted links. Readers and writers hold
//! the transaction lock.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FileType, OFlags};

use crate::error::{Context, Error};
use crate::no_follow;
use crate::ownership;
use crate::rooted_dir::{RootedDir, check_length, stat_of};
use crate::transaction::{
    EntryHeader, LoggedTransaction, OwnCtimeChanges, PendingUnlink, TransactionRoots,
};
use crate::write_set::Fingerprint;

/// Number of objects that are deleted under one lock: transactions wait as long as that.
const UNLINKED_AT_ONCE_MAX: usize = 64;

/// Prefixes of names in the trash that may contain links to objects of the base: snapshot layers, and history entries.
const SHARING: [&str; 4] = ["veil-", "past-", "tx-", "lost-"];

fn path_in(base_store: &Path) -> PathBuf {
    base_store.join("forgotten")
}

/// The file `forgotten`, next to journal and history.
pub(super) struct CtimeLog {
    transaction_lock: Arc<Mutex<()>>,
    base_store_path: PathBuf,
    owner: (u32, u32),
}

impl CtimeLog {
    pub(super) fn new(
        transaction_lock: Arc<Mutex<()>>,
        base_store_path: PathBuf,
        owner: (u32, u32),
    ) -> Self {
        Self { transaction_lock, base_store_path, owner }
    }

    pub(super) fn noted(&self) -> Result<OwnCtimeChanges, Error> {
        let path = path_in(&self.base_store_path);
        match no_follow::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(OwnCtimeChanges::default()),
            other => Ok(OwnCtimeChanges::parse(&other.at(&path)?)),
        }
    }

    /// Records the time span in which a rolled back transaction changed the base.
    pub(super) fn record_rollback(
        &self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
    ) -> Result<(), Error> {
        let line = OwnCtimeChanges::interval_line(decided.rollback_interval(disk)?);
        append(&self.base_store_path, self.owner, &line)
    }

    /// Records when the transactions of `gone`, which are about to leave the history, changed the base. Drops spans
    /// older than every live branch and every commit in `kept`.
    pub(super) fn record_forgotten(
        &self,
        gone: &[EntryHeader],
        kept: &[EntryHeader],
        oldest_fork: Option<i64>,
    ) -> Result<(), Error> {
        /// The clock of the file system is behind by some ticks of a few milliseconds.
        const CLOCKS_APART_MAX: i64 = 1_000_000_000;
        let path = path_in(&self.base_store_path);
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
        no_follow::write(&draft, known.text().as_bytes()).at(&draft)?;
        ownership::set(&draft, self.owner).at(&draft)?;
        no_follow::rename(&draft, &path).at(&path)
    }

    /// Before anything is deleted: records a deletion that a crash interrupted.
    pub(super) fn finish_pending_unlink(&self) -> Result<(), Error> {
        /// The times of a directory and of an entry that it lost may be two ticks of the clock apart.
        const TICK_NANOSECONDS_MAX: i64 = 10_000_000;
        let path = path_in(&self.base_store_path);
        if !no_follow::exists(&path).at(&path)? {
            return Ok(());
        }
        let Some(unlinking) = PendingUnlink::last(&no_follow::read(&path).at(&path)?) else {
            return Ok(());
        };
        let trash =
            RootedDir::open_root(&self.base_store_path.join("trash")).at(&self.base_store_path)?;
        // If the directory is gone, everything was recorded.
        let Ok(directory) = trash.stat(&unlinking.directory) else { return Ok(()) };
        let latest = Fingerprint::of(&directory).ctime + TICK_NANOSECONDS_MAX;
        append(&self.base_store_path, self.owner, &unlinking.notes(latest))
    }

    pub(super) fn unlinker(&self) -> TrashCollector {
        let (transaction_lock, base_store) =
            (Arc::clone(&self.transaction_lock), self.base_store_path.clone());
        TrashCollector { transaction_lock, base_store, owner: self.owner }
    }
}

/// Empties the trash in the base's part of the store, in the background.
#[derive(Debug)]
pub(super) struct TrashCollector {
    transaction_lock: Arc<Mutex<()>>,
    base_store: PathBuf,
    owner: (u32, u32),
}

impl TrashCollector {
    /// Removes a directory of the trash: first the objects that have other links, recording each; then the rest.
    pub(super) fn remove(&self, trash: &RootedDir, name: &Path) -> Result<(), Error> {
        if SHARING.iter().any(|start| name.to_string_lossy().starts_with(start)) {
            self.unlink_shared(trash, name)?;
        }
        trash.remove_all(name).at(name)
    }

    fn unlink_shared(&self, trash: &RootedDir, name: &Path) -> Result<(), Error> {
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

    /// Unlinks objects and records their ctimes. After a crash at any point either the record or the links exist.
    fn unlink(&self, trash: &RootedDir, directory: &Path, paths: &[PathBuf]) -> Result<(), Error> {
        let _transaction_lock =
            self.transaction_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut objects = Vec::new();
        for path in paths {
            objects.push((path, trash.open(path, OFlags::PATH).at(path)?));
        }
        let identity = |object: &OwnedFd| stat_of(object).map(|stat| Fingerprint::of(&stat));
        let known = objects.iter().filter_map(|(_, object)| identity(object).ok());
        let announced =
            PendingUnlink::log_line(directory, known.map(|known| (known.ino, known.ctime)));
        // A full disk has no room for it, and needs the room that this gives back.
        let _ = append(&self.base_store, self.owner, &announced);
        let mut notes = String::new();
        let unlinked = objects.iter().try_for_each(|(path, object)| {
            let before = identity(object).at(path)?;
            trash.remove_file(path).at(path)?;
            let left = identity(object).at(path)?;
            notes += &OwnCtimeChanges::unlinked_line(left.ino, before.ctime, left.ctime);
            Ok(())
        });
        append(&self.base_store, self.owner, &notes)?;
        unlinked
    }
}

/// Appends to the log. Not synced: if a power failure loses lines, a commit may be refused without need.
fn append(base_store: &Path, owner: (u32, u32), lines: &str) -> Result<(), Error> {
    let path = path_in(base_store);
    if !no_follow::exists(&path).at(&path)? {
        no_follow::write(&path, b"").at(&path)?;
        ownership::set(&path, owner).at(&path)?;
    }
    let mut file = no_follow::open_file(&path, OFlags::WRONLY | OFlags::APPEND).at(&path)?;
    file.write_all(lines.as_bytes()).at(&path)
}
