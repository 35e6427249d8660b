//! The store's directory: made, locked, and given to the base's owner.

use std::fs;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Timespec, Timestamps};
use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::overlay::Namespace;
use crate::tree::remove_path;
use crate::view::HIDDEN;

/// Which layout of marks, and where the rest of a store that is in two places is.
const OUR_LINKS: [&str; 3] = ["marks", "store", "base"];

/// Version of the store's format.
pub(crate) const FORMAT: &str = "branchfs 2\n";

/// Gives a path of the store to the base's owner, who can then always remove it.
pub(super) fn give(path: &Path, (uid, gid): (u32, u32)) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(path).at(path)?;
    if (metadata.uid(), metadata.gid()) == (uid, gid) {
        return Ok(());
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).at(path)
}

/// What is left of a file that was not synced when the power went: file systems put zeros in place of the rest.
pub(crate) fn written_part(content: &[u8]) -> &[u8] {
    let end = content.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &content[..end]
}

/// Writes a file that only its owner may read: the daemon runs without a umask.
pub(super) fn write_private(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).mode(0o600).open(path).at(path)?;
    io::Write::write_all(&mut file, content).at(path)
}

pub(super) fn make_store(store: &Path, owner: (u32, u32)) -> Result<(), Error> {
    let make = |path: &Path| {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.at(path).and_then(|()| give(path, owner))?,
        }
        // The base's default ACL would be inherited by all that is made in the store.
        match rustix::fs::lremovexattr(path, "system.posix_acl_default") {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error).at(path),
        }
    };
    make(store)?;
    refuse_others(store)?;
    refuse_links(store)?;
    let format = store.join("format");
    let found = match fs::read(&format) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other.at(&format)?,
    };
    let found = written_part(&found);
    if found != FORMAT.as_bytes() {
        // It is not synced when it is written: a loss of power may have left the beginning of it.
        if !FORMAT.as_bytes().starts_with(found) {
            return Err(Error::Corrupt(format!(
                "{} says {:?}, this program knows {:?}: what branches are kept is for the version that made them to commit or drop; \
                 without any, remove the store",
                format.display(),
                String::from_utf8_lossy(found).trim(),
                FORMAT.trim()
            )));
        }
        for (name, content) in [(".gitignore", "*\n"), ("format", FORMAT)] {
            let path = store.join(name);
            write_private(&path, content.as_bytes())?;
            give(&path, owner)?;
        }
    }
    ["branches", "layers", "journal", "history", "trash"]
        .iter()
        .try_for_each(|name| make(&store.join(name)))?;
    spread(&store.join("layers"));
    Ok(())
}

/// Lets layers be far from one another on the disk, where the file system knows of such a thing (ext4). It passes over
/// inodes that were deleted a moment ago, and finds a free one only behind them: in a part of the disk where thousands of
/// files went, the few inodes of a new layer cost milliseconds. Elsewhere it costs what it costs.
fn spread(layers: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let Ok(directory) = fs::File::open(layers) else { return };
    if let Ok(flags) = ioctl_getflags(&directory) {
        let _ = ioctl_setflags(&directory, flags | IFlags::TOPDIR); // nothing but the time depends on it
    }
}

/// Which attributes carry the marks of this store's layers: those of its first mount, for a later one with other rights
/// would not see them. `possible` is what this mount can write.
pub(super) fn settle_marks(
    store: &Path,
    possible: Namespace,
    owner: (u32, u32),
) -> Result<Namespace, Error> {
    let path = store.join("marks");
    // A symbolic link's target is there whole or not at all, also after a loss of power.
    let namespace = match fs::read_link(&path) {
        Ok(word) if word.as_os_str() == Namespace::User.word() => Namespace::User,
        Ok(word)
            if word.as_os_str() == Namespace::Trusted.word() && possible != Namespace::Trusted =>
        {
            return Err(Error::Unsupported(format!(
                "the layers in {} were made with the privilege to set trusted attributes (CAP_SYS_ADMIN): mount it with that again",
                store.display()
            )));
        }
        Ok(word) if word.as_os_str() == Namespace::Trusted.word() => Namespace::Trusted,
        Ok(word) => {
            return Err(Error::Corrupt(format!("{} says {}", path.display(), word.display())));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = std::os::unix::fs::symlink(possible.word(), &path).at(&path);
            match made.and_then(|()| give(&path, owner)) {
                Err(Error::Io { source, .. }) if super::probe::is_full(&source) => {} // a later mount has room
                other => other?,
            }
            possible
        }
        Err(error) => return Err(error).at(&path),
    };
    namespace.settle();
    Ok(namespace)
}

/// The file whose lock a mount holds.
const LOCK: &str = "lock";

/// What a store may have in it.
const NAMES: [&str; 20] = [
    ".gitignore",
    "agents",
    "base",
    "branches",
    crate::log::FILES[0],
    crate::log::FILES[1],
    "format",
    "forgotten",
    "forgotten.new",
    "history",
    "journal",
    "layers",
    LOCK,
    "logs",
    "lost",
    "marks",
    "probe",
    "store",
    "trash",
    "lost+found",
];

/// Refuses a directory that has other things in it: they would go with the store.
fn refuse_others(store: &Path) -> Result<(), Error> {
    if store.join("format").exists() {
        return Ok(());
    }
    for entry in fs::read_dir(store).at(store)? {
        let name = entry.at(store)?.file_name();
        if !NAMES.iter().any(|known| name == *known) {
            return Err(Error::Unsupported(format!(
                "{} is no store, and has {} in it: choose an empty directory, or one to be made",
                store.display(),
                name.to_string_lossy()
            )));
        }
    }
    Ok(())
}

/// A store may have come with a stranger's directory. What a link in it leads to is not ours to empty as trash, or to write
/// layers into; who opens a pipe waits for ever.
///
/// # Errors
/// `Unsupported` with what it is that we cannot have made.
fn refuse_links(store: &Path) -> Result<(), Error> {
    let refuse = |path: &Path| {
        Err(Error::Unsupported(format!(
            "{} is a link or a pipe, which we do not make there: remove it, or the store with all that it holds",
            path.display()
        )))
    };
    if store.file_name() == Some(HIDDEN.as_ref())
        && fs::symlink_metadata(store).at(store)?.is_symlink()
    {
        return refuse(store);
    }
    for entry in fs::read_dir(store).at(store)? {
        let entry = entry.at(store)?;
        let kind = entry.file_type().at(store)?;
        let is_ours = OUR_LINKS.iter().any(|known| entry.file_name() == *known);
        if kind.is_fifo() || (kind.is_symlink() && !is_ours) {
            return refuse(&entry.path());
        }
    }
    Ok(())
}

/// Removes a store that keeps nothing, and whose lock the caller holds; what is not its own stays, and so does a directory that
/// something is mounted on. The lock goes last: until then another mount must not begin to use the store.
pub(super) fn remove(store: &Path) -> Result<(), Error> {
    let before_lock = NAMES.iter().filter(|name| !["lost+found", LOCK].contains(name));
    for name in before_lock.chain(&[LOCK]) {
        let path = store.join(name);
        let removed = match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => {
                // The background may be emptying the trash at the same time.
                let removed = remove_path(&path).or_else(|_| remove_path(&path));
                removed.map_err(io::Error::from)
            }
            Ok(_) => fs::remove_file(&path),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.at(&path)?,
        }
    }
    match fs::remove_dir(store) {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::EBUSY | libc::ENOTEMPTY | libc::EACCES | libc::EPERM)
            ) =>
        {
            Ok(())
        }
        other => other.at(store),
    }
}

/// The lock on a store, and its file.
#[derive(Debug)]
pub(super) struct Lock(fs::File);

impl Lock {
    /// Whether it is the lock of the store that is there now.
    fn is_of(&self, store: &Path) -> Result<bool, Error> {
        let path = store.join(LOCK);
        let own = self.0.metadata().at(&path)?;
        match fs::symlink_metadata(&path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).at(&path),
        }
    }
}

impl Deref for Lock {
    type Target = fs::File;

    fn deref(&self) -> &fs::File {
        &self.0
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing it is not enough: a process that is just being started has a copy of each descriptor until it runs.
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

/// The store at `path`, or of the base at `path`: the part that has the lock and the branches.
///
/// # Errors
/// `NotFound` where there is none.
pub(crate) fn store_at(path: &Path) -> Result<PathBuf, Error> {
    let inner = path.join(HIDDEN);
    let store = if inner.is_dir() { inner } else { path.to_path_buf() };
    let store = fs::read_link(store.join("store")).unwrap_or(store);
    match fs::symlink_metadata(store.join(LOCK)) {
        Ok(_) => Ok(store),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::Usage(format!("there is no store at {}", path.display())))
        }
        Err(error) => Err(error).at(&store),
    }
}

/// Makes a store where there is none, and locks it. A mount that ends may remove the store meanwhile, and its lock with it: then
/// it is made again. `waits` for a process that recovers without a mount.
pub(super) fn claim(store: &Path, owner: (u32, u32), waits: bool) -> Result<Lock, Error> {
    const ATTEMPTS_MAX: usize = 100;
    for _ in 0..ATTEMPTS_MAX {
        match make_store(store, owner).and_then(|()| lock_store(store, waits)) {
            Ok(lock) if lock.is_of(store)? => {
                make_store(store, owner)?; // some of it may have been removed while it was made
                return Ok(lock);
            }
            Ok(_) => {}
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unsupported(format!(
        "the store {} is made and removed by other mounts all the time: try again",
        store.display()
    )))
}

/// Locks a store. `waits` for a process that recovers without a mount.
pub(super) fn lock_store(store: &Path, waits: bool) -> Result<Lock, Error> {
    let path = store.join(LOCK);
    let mut options = fs::OpenOptions::new();
    options.create(true).truncate(false).read(true).write(true).mode(0o600);
    let file = options.open(&path).at(&path)?;
    let owner = fs::metadata(store).at(store)?;
    give(&path, (owner.uid(), owner.gid()))?;
    if try_lock(&file, store, waits)? {
        return Ok(Lock(file));
    }
    Err(Error::Unsupported(format!(
        "the store {} is in use by another mount: use that one, or unmount it first",
        store.display()
    )))
}

/// Locks a store that is not mounted to look at it. Waits for a process that recovers.
///
/// # Errors
/// `Unsupported` where it is mounted.
pub(crate) fn lock_for_check(store: &Path) -> Result<Option<fs::File>, Error> {
    let file = match fs::File::open(store.join(LOCK)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.at(store)?,
    };
    if try_lock(&file, store, true)? {
        return Ok(Some(file));
    }
    Err(Error::Unsupported(format!("the store {} is in use: unmount it first", store.display())))
}

fn try_lock(file: &fs::File, store: &Path, waits: bool) -> Result<bool, Error> {
    use rustix::fs::FlockOperation;
    let mut waits = waits;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if waits => {}
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(error).at(store),
        }
        let path = store.join("journal");
        let journal = match fs::File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false), // it is being removed
            other => other.at(&path)?,
        };
        let is_recovering =
            rustix::fs::flock(&journal, FlockOperation::NonBlockingLockShared).is_err();
        if is_recovering {
            rustix::fs::flock(&journal, FlockOperation::LockShared).at(&path)?;
        }
        waits = is_recovering; // otherwise it may have ended a moment ago: tried once more
    }
}

/// The lock of a process that recovers without a mount, on the journal's directory. It is taken before that on the store.
pub(crate) struct Recovering {
    _journal: fs::File,
}

impl Recovering {
    /// Waits for other processes that recover. `None` where there is no store.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn begin(base: &Path, store: Option<&Path>) -> Result<Option<Self>, Error> {
        let found = match store {
            Some(store) => store.to_path_buf(),
            None => match store_at(base) {
                Ok(found) => found,
                Err(Error::Usage(_)) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let path = found.join("journal");
        let journal = match fs::File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.at(&path)?,
        };
        rustix::fs::flock(&journal, rustix::fs::FlockOperation::LockExclusive).at(&path)?;
        Ok(Some(Self { _journal: journal }))
    }
}

/// Whether a journal holds a transaction: one that goes on, or, without a daemon, one that was interrupted.
pub(crate) fn is_interrupted(base: &Path, store: Option<&Path>) -> bool {
    let home = base.join(HIDDEN);
    [store, Some(&home)].into_iter().flatten().any(|place| {
        fs::read_dir(place.join("journal")).is_ok_and(|mut entries| entries.next().is_some())
    })
}

/// Removes a store that was made a moment ago, unless another mount has begun to use it.
pub(super) fn discard(store: &Path) -> Result<(), Error> {
    let lock = lock_store(store, true)?;
    if lock.is_of(store)? { remove(store) } else { Ok(()) }
}

/// The first line of the lock's content while a daemon holds it; one that ends in order takes it away.
const IN_USE: &str = "in use\n";

/// The first line where a daemon had ended in order before a process recovered without a mount.
const RECOVERED: &str = "recovered\n";

/// What the lock's content says of the time before.
#[derive(Default)]
pub(super) struct Before {
    /// The last daemon did not end in order.
    pub(super) was_in_use: bool,
    /// What processes that recovered without a mount have done since, for the next mount to report.
    pub(super) recovered: Vec<String>,
}

pub(super) fn state_before(mut lock: &fs::File) -> Before {
    /// The base's owner may have written anything there.
    const BYTES_MAX: u64 = 64 << 10;
    let mut content = Vec::new();
    if io::Read::read_to_end(&mut io::Read::take(&mut lock, BYTES_MAX), &mut content).is_err() {
        return Before::default();
    }
    let text = String::from_utf8_lossy(&content);
    let is_text = |line: &&str| !line.is_empty() && !line.contains(char::is_control);
    let recovered = text.lines().skip(1).filter(is_text).map(str::to_owned).collect();
    Before { was_in_use: !text.is_empty() && !text.starts_with(RECOVERED), recovered }
}

/// Marks the store as in use.
pub(super) fn mark_in_use(lock: &fs::File) -> io::Result<()> {
    write_state(lock, IN_USE)
}

/// Leaves what was done for the next mount to report.
pub(super) fn mark_recovered(
    lock: &fs::File,
    was_in_use: bool,
    recovered: &[String],
) -> io::Result<()> {
    let first = if was_in_use { IN_USE } else { RECOVERED };
    write_state(lock, &format!("{first}{}\n", recovered.join("\n")))
}

fn write_state(lock: &fs::File, content: &str) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(lock, content.as_bytes(), 0)?;
    lock.set_len(content.len() as u64)
}

/// Takes the mark away.
pub(super) fn mark_closed(lock: &fs::File) -> io::Result<()> {
    lock.set_len(0)
}

/// The base's root keeps its times when the store comes and goes inside it.
pub(super) struct KeptTimes {
    path: PathBuf,
    times: Timestamps,
}

impl KeptTimes {
    pub(super) fn of(path: &Path) -> Result<Self, Error> {
        let metadata = fs::metadata(path).at(path)?;
        let times = Timestamps {
            last_access: Timespec { tv_sec: metadata.atime(), tv_nsec: metadata.atime_nsec() },
            last_modification: Timespec {
                tv_sec: metadata.mtime(),
                tv_nsec: metadata.mtime_nsec(),
            },
        };
        Ok(Self { path: path.to_path_buf(), times })
    }

    pub(super) fn restore(&self) -> Result<(), Error> {
        rustix::fs::utimensat(CWD, &self.path, &self.times, rustix::fs::AtFlags::empty())
            .at(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_followed_out_of_a_store_that_a_stranger_made() {
        for name in ["trash", "layers", "history", "journal", "branches", "format", "lock", ""] {
            let base = tempfile::tempdir().unwrap();
            let (store, precious) = (base.path().join(".branching"), base.path().join("precious"));
            fs::create_dir(&precious).unwrap();
            fs::write(precious.join("file"), "kept").unwrap();
            if !name.is_empty() {
                fs::create_dir(&store).unwrap();
            }
            std::os::unix::fs::symlink(&precious, store.join(name).components().as_path()).unwrap();
            let owner = fs::metadata(base.path()).map(|found| (found.uid(), found.gid())).unwrap();
            let refused = make_store(&store, owner).unwrap_err();
            assert!(matches!(refused, Error::Unsupported(_)), "{name}: {refused}");
            assert_eq!(fs::read_dir(&precious).unwrap().count(), 1, "{name}");
        }
    }

    #[test]
    fn a_lock_that_was_given_back_is_free_though_a_child_still_has_its_descriptor() {
        let store = tempfile::tempdir().unwrap();
        let lock = lock_store(store.path(), true).unwrap();
        let _of_a_child = lock.try_clone().unwrap();
        assert!(lock_store(store.path(), true).is_err(), "it is held");
        drop(lock);
        lock_store(store.path(), true).unwrap();
    }

    #[test]
    fn a_store_that_is_being_removed_is_locked_until_nothing_else_is_left() {
        use rustix::fs::{IFlags, ioctl_setflags};
        let base = tempfile::tempdir().unwrap();
        let store = base.path().join(HIDDEN);
        let owner = fs::metadata(base.path()).map(|found| (found.uid(), found.gid())).unwrap();
        let lock = claim(&store, owner, true).unwrap();
        // Nothing can be removed from this directory.
        let trash = store.join("trash");
        fs::create_dir(trash.join("kept")).unwrap();
        let set = |flags| ioctl_setflags(fs::File::open(&trash).unwrap(), flags).unwrap();
        set(IFlags::IMMUTABLE);
        let removed = remove(&store);
        set(IFlags::empty());
        removed.unwrap_err();
        assert!(lock.is_of(&store).unwrap(), "the lock is there as long as the trash");
        remove(&store).unwrap();
        assert!(!store.exists());
    }

    #[test]
    fn a_store_whose_lock_was_removed_while_it_was_waited_for_is_made_again() {
        let base = tempfile::tempdir().unwrap();
        let store = base.path().join(HIDDEN);
        let owner = fs::metadata(base.path()).map(|found| (found.uid(), found.gid())).unwrap();
        let lock = claim(&store, owner, true).unwrap();
        let recovering = Recovering::begin(base.path(), Some(&store)).unwrap().unwrap();
        std::thread::scope(|scope| {
            let mount = scope.spawn(|| claim(&store, owner, true));
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!mount.is_finished(), "it waits");
            remove(&store).unwrap();
            drop(lock);
            drop(recovering);
            let claimed = mount.join().unwrap().unwrap();
            assert!(claimed.is_of(&store).unwrap());
            for name in ["format", "branches", "layers", "journal", "history", "trash"] {
                assert!(store.join(name).exists(), "{name}");
            }
        });
    }

    #[test]
    fn a_mount_waits_for_a_recovery_and_is_refused_by_another_mount() {
        let base = tempfile::tempdir().unwrap();
        let store = base.path().join(HIDDEN);
        let owner = fs::metadata(base.path()).map(|found| (found.uid(), found.gid())).unwrap();
        make_store(&store, owner).unwrap();
        let recovering = Recovering::begin(base.path(), Some(&store)).unwrap().unwrap();
        let lock = lock_store(&store, false).unwrap();
        std::thread::scope(|scope| {
            let mount = scope.spawn(|| lock_store(&store, true).map(drop));
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!mount.is_finished(), "it waits");
            drop(lock);
            drop(recovering);
            mount.join().unwrap().unwrap();
        });
        let _lock = lock_store(&store, true).unwrap();
        let refused = lock_store(&store, true).unwrap_err();
        assert!(refused.to_string().contains("in use by another mount"), "{refused}");
    }
}
