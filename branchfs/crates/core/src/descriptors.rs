//! How the daemon shares the descriptors that its limit (`RLIMIT_NOFILE`) allows.
//!
//! | what | how many |
//! |---|---|
//! | files that programs have open in branches | as many as there are, but for the reserve; one more is `EMFILE` to that program alone |
//! | directories and logs of layers, kept open for the next use | a quarter of the limit, at most [`KEPT_MAX`]; the least recently used are closed, and all of them when anything else needs the room |
//! | control connections | as many as there are, but for half of the reserve |
//! | the reserve: commits and other transactions, copy-up, walks | an eighth of the limit, at least [`RESERVE_MIN`] |
//!
//! A kept descriptor is one of an [`Owner`], which can open it again from its path. So a branch that is not used holds
//! none as soon as others need them.
//!
//! Locking: the table is a leaf lock. No descriptor is opened or closed under it: a close may take long.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::error::Error;

type Result<T> = std::result::Result<T, Errno>;

/// Maximum number of kept descriptors, if the limit allows so many. Bounded because invalidating a directory examines
/// all of its tree.
const KEPT_MAX: usize = 1024;

/// A reserve smaller than this would not do for a commit.
const RESERVE_MIN: usize = 64;

/// Descriptors that a transaction needs at once: its directories, its journal, two files that are copied, and those of
/// the background thread.
const TRANSACTION_NEEDS: usize = 24;

/// A kept descriptor with its identity.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) file: Arc<OwnedFd>,
    /// Device and inode number, if the owner checks that the path still leads there.
    pub(crate) identity: (u32, u32, u64),
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    /// The clock at the last use.
    used: u64,
}

#[derive(Default)]
struct Table {
    owners: HashMap<u64, HashMap<OsString, Entry>>,
    count: usize,
    clock: u64,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The limit of this process, raised once before anything is opened.
fn limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let current = getrlimit(Resource::Nofile).current;
        current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
    })
}

fn reserve() -> usize {
    (limit() / 8).max(RESERVE_MIN)
}

impl Table {
    /// Makes room for one more. Returns the descriptors to close: the least recently used half.
    fn make_room(&mut self, kept_max: usize) -> Vec<Kept> {
        if self.count < kept_max {
            return Vec::new();
        }
        let mut used: Vec<u64> =
            self.owners.values().flatten().map(|(_, entry)| entry.used).collect();
        let middle = used.len() / 2;
        let (_, oldest_kept, _) = used.select_nth_unstable(middle);
        let oldest_kept = *oldest_kept;
        self.take(|entry| entry.used < oldest_kept)
    }

    fn take(&mut self, is_taken: impl Fn(&Entry) -> bool) -> Vec<Kept> {
        let mut taken = Vec::new();
        self.owners.retain(|_, entries| {
            taken.extend(take(entries, |_, entry| is_taken(entry)));
            !entries.is_empty()
        });
        self.count -= taken.len();
        taken
    }
}

/// Removes the entries of one owner that satisfy the condition.
fn take(
    entries: &mut HashMap<OsString, Entry>,
    is_taken: impl Fn(&OsStr, &Entry) -> bool,
) -> Vec<Kept> {
    let mut taken = Vec::new();
    entries.retain(|name, entry| {
        let goes = is_taken(name, entry);
        if goes {
            taken.push(entry.kept.clone());
        }
        !goes
    });
    taken
}

/// Keeps descriptors, each under a name. They are closed when this value is dropped.
#[derive(Debug)]
pub struct Owner(u64);

impl Owner {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The descriptor kept under a name.
    pub(crate) fn get(&self, name: &OsStr) -> Option<Kept> {
        let mut table = table();
        table.clock += 1;
        let clock = table.clock;
        let entry = table.owners.get_mut(&self.0)?.get_mut(name)?;
        entry.used = clock;
        Some(entry.kept.clone())
    }

    /// Keeps a descriptor under a name, in place of an earlier one of that name. Closes the descriptors that were used
    /// least recently if too many are kept.
    pub(crate) fn keep(&self, name: &OsStr, kept: Kept) {
        let mut table = table();
        let closed = table.make_room((limit() / 4).clamp(1, KEPT_MAX));
        table.clock += 1;
        let entry = Entry { kept, used: table.clock };
        let own = table.owners.entry(self.0).or_default();
        let before = own.insert(name.to_os_string(), entry);
        table.count += usize::from(before.is_none());
        drop(table);
        drop((closed, before));
    }

    /// Closes the kept descriptors whose names satisfy `is_forgotten`.
    pub(crate) fn invalidate(&self, is_forgotten: impl Fn(&OsStr) -> bool) {
        let mut table = table();
        let Some(own) = table.owners.get_mut(&self.0) else { return };
        let closed = take(own, |name, _| is_forgotten(name));
        if own.is_empty() {
            table.owners.remove(&self.0);
        }
        table.count -= closed.len();
        drop(table);
        drop(closed);
    }

    /// The names of all kept descriptors.
    #[cfg(test)]
    pub(crate) fn names(&self) -> Vec<OsString> {
        table().owners.get(&self.0).into_iter().flatten().map(|(name, _)| name.clone()).collect()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.invalidate(|_| true);
    }
}

/// Closes all kept descriptors that are not in use.
fn close_kept() {
    let closed = table().take(|_| true);
    drop(closed);
}

/// Opens something. If there are no free descriptors, it closes the kept ones and tries again.
pub fn with_room<T>(open: impl Fn() -> Result<T>) -> Result<T> {
    match open() {
        Err(Errno::MFILE | Errno::NFILE) => {
            close_kept();
            open()
        }
        other => other,
    }
}

/// As [`with_room`], for calls that return an error of the standard library.
pub(crate) fn with_room_io<T>(open: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    match open() {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            close_kept();
            open()
        }
        other => other,
    }
}

/// Whether one more descriptor leaves this many others.
fn leaves(others: usize) -> Result<()> {
    // The number that a new descriptor gets is the lowest that is free: as many are in use.
    let is_free = || {
        let number = rustix::io::fcntl_dupfd_cloexec(anchor()?, 0)?.as_raw_fd();
        let used = usize::try_from(number).unwrap_or(usize::MAX);
        if used.saturating_add(others) < limit() { Ok(()) } else { Err(Errno::MFILE) }
    };
    with_room(is_free)
}

/// A descriptor to be duplicated.
fn anchor() -> Result<&'static OwnedFd> {
    static ANCHOR: OnceLock<OwnedFd> = OnceLock::new();
    if ANCHOR.get().is_none() {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = rustix::fs::open("/", flags, Mode::empty())?;
        let _ = ANCHOR.set(opened); // one that came first is as good
    }
    ANCHOR.get().ok_or(Errno::MFILE)
}

/// Admits one more file that a program opens in a branch. `EMFILE`: only the reserve is left.
pub fn admit_file() -> Result<()> {
    leaves(reserve())
}

/// As [`admit_file`], for a file that is open already: it costs nothing as long as there is room.
pub(crate) fn admit_opened(file: BorrowedFd<'_>) -> Result<()> {
    // As in `leaves`: the file has the lowest number that was free.
    let number = usize::try_from(file.as_raw_fd()).unwrap_or(usize::MAX);
    if number.saturating_add(reserve()) < limit() { Ok(()) } else { admit_file() }
}

/// Admits one more control connection.
pub fn admit_connection() -> Result<()> {
    leaves(reserve() / 2)
}

/// Checks that a transaction can get the descriptors that it needs.
///
/// # Errors
/// `Unsupported`: programs and other branches use them.
pub(crate) fn admit_transaction() -> std::result::Result<(), Error> {
    let take = || {
        let taken = (0..TRANSACTION_NEEDS).map(|_| rustix::io::fcntl_dupfd_cloexec(anchor()?, 0));
        taken.collect::<Result<Vec<_>>>().map(drop)
    };
    with_room(take).map_err(|_| {
        Error::Unsupported(format!(
            "the daemon has opened all {} files that its limit allows, so nothing was begun: close files in branches, or mount under a higher limit (ulimit -Hn)",
            limit()
        ))
    })
}

/// Opens a directory with `O_PATH`. No component of its path may be a symbolic link.
pub(crate) fn open_directory(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    with_room(|| rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve))
}

/// A directory that many objects reopen their own from: one descriptor for all of them.
pub(crate) fn shared_directory(path: &Path) -> Result<Arc<OwnedFd>> {
    static SHARED: LazyLock<Mutex<HashMap<PathBuf, Weak<OwnedFd>>>> = LazyLock::new(Mutex::default);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = shared.get(path).and_then(Weak::upgrade) {
        return Ok(known);
    }
    shared.retain(|_, directory| directory.strong_count() > 0);
    let opened = Arc::new(open_directory(path)?);
    shared.insert(path.to_path_buf(), Arc::downgrade(&opened));
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Kept {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let file = Arc::new(rustix::fs::open("/", flags, Mode::empty()).unwrap());
        Kept { file, identity: (0, 0, 0) }
    }

    #[test]
    fn the_least_recently_used_descriptor_makes_room() {
        let mut table = Table::default();
        for number in 0..8 {
            let entry = Entry { kept: kept(), used: number };
            let own = table.owners.entry(number % 2).or_default();
            own.insert(number.to_string().into(), entry);
            table.count += 1;
        }
        assert!(table.make_room(9).is_empty());
        assert_eq!(table.make_room(8).len(), 4);
        let mut left: Vec<_> = table.owners.values().flatten().map(|(_, one)| one.used).collect();
        left.sort_unstable();
        assert_eq!((left, table.count), (vec![4, 5, 6, 7], 4));
    }

    #[test]
    fn an_owner_keeps_what_it_is_given_until_its_end() {
        let (owner, other) = (Owner::new(), Owner::new());
        let one = kept();
        let witness = Arc::downgrade(&one.file);
        owner.keep(OsStr::new("a"), one);
        assert!(owner.get(OsStr::new("a")).is_some());
        assert!(other.get(OsStr::new("a")).is_none());
        drop(owner);
        assert!(witness.upgrade().is_none());
    }
}
