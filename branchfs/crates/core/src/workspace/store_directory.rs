//! The store's directory: created, locked, and given to the base's owner.

use std::fs;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::external_store::{Located, is_absent, resolved};
use super::inspection::inspect;
use crate::error::{Context, Error};
use crate::mount_table;
use crate::no_follow;
use crate::overlay::Namespace;
use crate::ownership;
use crate::rooted_dir::{RootedDir, remove_path};
use crate::view::HIDDEN;

/// Version of the store's format.
pub const FORMAT: &str = "branchfs 2\n";

/// Explains why a directory cannot be given to the base's owner, if the group is the reason.
fn foreign_group(path: &Path, (uid, gid): (u32, u32), error: Error) -> Error {
    let is_refused =
        matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::EPERM));
    if !is_refused || uid != rustix::process::geteuid().as_raw() {
        return error;
    }
    // Nothing is in it yet. What cannot be removed is empty, and the next mount takes it.
    let _ = std::fs::remove_dir(path);
    Error::Unsupported(format!(
        "the directory belongs to group {gid}, which you are not a member of, so the group of its files could not be kept: \
         mount as root, or give the directory to a group of yours (chgrp)"
    ))
}

/// Removes trailing zeros, which file systems put in place of data that was not synced before a power failure.
pub fn trim_trailing_zeros(content: &[u8]) -> &[u8] {
    let end = content.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &content[..end]
}

pub(super) fn make_store(store: &Path, owner: (u32, u32)) -> Result<(), Error> {
    let make = |path: &Path| {
        match no_follow::make_directory(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.at(path).and_then(|()| {
                ownership::set(path, owner)
                    .at(path)
                    .map_err(|error| foreign_group(path, owner, error))
            })?,
        }
        let directory = no_follow::open_directory(path).at(path)?;
        // The base's default ACL would be inherited by all that is made in the store.
        match rustix::fs::fremovexattr(directory, "system.posix_acl_default") {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error).at(path),
        }
    };
    make(store)?;
    refuse_others(store)?;
    inspect(store)?;
    let format = store.join("format");
    let found = match no_follow::read(&format) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other.at(&format)?,
    };
    let found = trim_trailing_zeros(&found);
    if found != FORMAT.as_bytes() {
        // It is not synced when it is written: a loss of power may have left the beginning of it.
        if !FORMAT.as_bytes().starts_with(found) {
            return Err(Error::Corrupt(format!(
                "{} says {:?}, this program knows {:?}: commit or abort its branches with the \
                    version that created them, or remove the store if it has none",
                format.display(),
                String::from_utf8_lossy(found).trim(),
                FORMAT.trim()
            )));
        }
        for (name, content) in [(".gitignore", "*\n"), ("format", FORMAT)] {
            let path = store.join(name);
            no_follow::write(&path, content.as_bytes()).at(&path)?;
            ownership::set(&path, owner).at(&path)?;
        }
    }
    ["branches", "layers", "journal", "history", "trash"]
        .iter()
        .try_for_each(|name| make(&store.join(name)))?;
    set_topdir_flag(&store.join("layers"));
    Ok(())
}

/// Makes ext4 spread layers over the disk (the flag `TOPDIR`). ext4 skips recently deleted inodes, so after the deletion of
/// thousands of files in one block group, the few inodes of a new layer there take milliseconds. Other file systems ignore
/// this.
fn set_topdir_flag(layers: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let Ok(directory) = no_follow::open_directory(layers) else { return };
    if let Ok(flags) = ioctl_getflags(&directory) {
        let _ = ioctl_setflags(&directory, flags | IFlags::TOPDIR); // nothing but the time depends on it
    }
}

/// The xattr namespace of this store's layers: that of its first mount, because a later one with other rights would not
/// see the attributes. `possible` is the one that this mount can write.
pub(super) fn choose_xattr_namespace(
    store: &Path,
    possible: Namespace,
    owner: (u32, u32),
) -> Result<Namespace, Error> {
    let path = store.join("marks");
    // The target of a symbolic link is complete or missing, also after a power failure.
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
            match made.and_then(|()| ownership::set(&path, owner).at(&path)) {
                Err(Error::Io { source, .. }) if super::probe::is_full(&source) => {} // a later mount has room
                other => other?,
            }
            possible
        }
        Err(error) => return Err(error).at(&path),
    };
    namespace.set_for_process();
    Ok(namespace)
}

/// The file that a mount locks.
const LOCK: &str = "lock";

/// The files of the daemon's log, newest first.
pub const LOG_FILES: [&str; 2] = ["branchfs.log", "branchfs.log.1"];

/// The names that may exist in a store.
const NAMES: [&str; 22] = [
    ".gitignore",
    "agents",
    "base",
    "branches",
    LOG_FILES[0],
    LOG_FILES[1],
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
    "pruned",
    "pruned.new",
    "store",
    "trash",
    "lost+found",
];

/// Refuses a directory that has other things in it: they would go with the store.
fn refuse_others(store: &Path) -> Result<(), Error> {
    if no_follow::exists(&store.join("format")).at(store)? {
        return Ok(());
    }
    for name in no_follow::names(store).at(store)? {
        if !NAMES.iter().any(|known| name == *known) {
            return Err(Error::Unsupported(format!(
                "{} is not a store and not empty (it has {}): choose an empty or a new directory",
                store.display(),
                name.to_string_lossy()
            )));
        }
    }
    Ok(())
}

/// How long an unmount deletes the trash of a store that is otherwise empty.
pub(super) const TRASH_WAIT_MAX: Duration = Duration::from_secs(5);

/// As [`remove`], but only if its trash can be deleted within `wait`; else the store stays, and the next mount continues.
/// Returns whether the store is removed.
pub(super) fn remove_in_time(store: &Path, wait: Duration) -> Result<bool, Error> {
    let deadline = Instant::now() + wait;
    let in_time = || if Instant::now() < deadline { Ok(()) } else { Err(Errno::TIMEDOUT) };
    if let Ok(trash) = RootedDir::open_root(&store.join("trash")) {
        for entry in trash.list(Path::new("")).at(store)? {
            // Any other error is met, and reported, by the removal of the whole.
            if trash.remove_in_steps(Path::new(&entry.name), &in_time) == Err(Errno::TIMEDOUT) {
                tracing::info!(
                    "{} stays: the next mount deletes the rest of its trash",
                    store.display()
                );
                return Ok(false);
            }
        }
    }
    remove(store)?;
    Ok(true)
}

/// Removes an empty store whose lock the caller holds. Foreign files stay, and so does a directory that is a mount point.
/// The lock is removed last, because until then no other mount may use the store.
fn remove(store: &Path) -> Result<(), Error> {
    let before_lock = NAMES.iter().filter(|name| !["lost+found", LOCK].contains(name));
    for name in before_lock.chain(&[LOCK]) {
        let path = store.join(name);
        // The background may be emptying the trash at the same time.
        remove_path(&path).or_else(|_| remove_path(&path)).at(&path)?;
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

/// The locked file `lock` of a store. The lock is released when it is dropped.
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

/// Returns the store at `path`, or that of the base at `path`: the part with the lock and the branches.
///
/// # Errors
/// `NotFound`: there is no store.
pub fn store_at(path: &Path) -> Result<PathBuf, Error> {
    let Located { store, .. } = Located::at(path)?;
    if no_follow::exists(&store.join(LOCK)).at(&store)? {
        return Ok(store);
    }
    Err(Error::Usage(format!("there is no store at {}", path.display())))
}

/// Opens or creates a store, and locks it. If a mount that ends removes the store meanwhile, it is created again. With
/// `waits`, waits for a process that recovers without a mount, and for a mount that is about to end.
///
/// Creating the store restores the times of the base. Opening an existing one does not touch them, since a recovery in
/// another process may be setting them.
pub(super) fn claim(
    store: &Path,
    base: &Path,
    owner: (u32, u32),
    waits: bool,
) -> Result<Lock, Error> {
    const ATTEMPTS_MAX: usize = 100;
    let make = || match store.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let keep = TimesGuard::of(base)?;
            make_store(store, owner)?;
            keep.restore()
        }
        _ => make_store(store, owner),
    };
    for _ in 0..ATTEMPTS_MAX {
        match make().and_then(|()| lock_patiently(store, base, waits)) {
            Ok(lock) if lock.is_of(store)? => {
                make()?; // some of it may have been removed while it was made
                return Ok(lock);
            }
            Ok(_) => {}
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unsupported(format!(
        "the store {} is created and removed by other mounts at the same time: try again",
        store.display()
    )))
}

/// Locks a store. `waits` for a daemon without a mount: it begins or ends. A sandbox or container that is being started has
/// a copy of every mount for a moment, which the daemon of a mount that was unmounted serves.
fn lock_patiently(store: &Path, base: &Path, waits: bool) -> Result<Lock, Error> {
    const ENDING_MAX: Duration = Duration::from_secs(5);
    /// Attempts in a row, whatever time they take: the holder may have ended after each.
    const UNSEEN_MAX: usize = 10;
    const POLL: Duration = Duration::from_millis(10);
    let start = Instant::now();
    let mut unseen = 0;
    loop {
        let refused = match lock_store(store, waits) {
            Err(Error::Unsupported(refused)) if waits => refused,
            other => return other,
        };
        let Some(daemon) = locker(store) else {
            unseen += 1;
            if unseen == UNSEEN_MAX {
                return Err(Error::Unsupported(refused)); // of another process namespace
            }
            thread::sleep(POLL); // unlocked meanwhile
            continue;
        };
        unseen = 0;
        match mount_table::mount_of(daemon, base) {
            Ok(Some(at)) => {
                let at = at.display();
                return Err(Error::Unsupported(format!("{refused} (process {daemon}, at {at})")));
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Error::Unsupported(refused));
            }
            Ok(None) | Err(_) => {} // it has no mount, or is gone
        }
        if start.elapsed() >= ENDING_MAX {
            let users = mount_table::users_of_base(base);
            let users: Vec<_> = users.iter().map(|(pid, name)| format!("{pid} ({name})")).collect();
            let why = match users.is_empty() {
                true => "it has no mount here and has not ended: try again".to_owned(),
                false => format!(
                    "it serves copies of its mount in other mount namespaces until these processes end: {}",
                    users.join(", ")
                ),
            };
            return Err(Error::Unsupported(format!("{refused} (process {daemon}: {why})")));
        }
        thread::sleep(POLL);
    }
}

/// The process that has locked a store, where the kernel's table of locks shows it: `1: FLOCK ADVISORY WRITE 123 08:01:456 0
/// EOF`. The device is not compared: it is not always that of `stat`.
fn locker(store: &Path) -> Option<u32> {
    let inode = fs::symlink_metadata(store.join(LOCK)).ok()?.ino().to_string();
    let table = fs::read_to_string("/proc/locks").ok()?;
    table.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK")
            && words.get(5).and_then(|place| place.rsplit(':').next()) == Some(inode.as_str());
        if is_it { words.get(4)?.parse().ok() } else { None }
    })
}

/// Locks a store. `waits` for a process that recovers without a mount.
pub(super) fn lock_store(store: &Path, waits: bool) -> Result<Lock, Error> {
    let path = store.join(LOCK);
    let file = no_follow::open_file(&path, OFlags::RDWR | OFlags::CREATE).at(&path)?;
    ownership::set_from_parent(&path).at(&path)?;
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
pub fn lock_for_check(store: &Path) -> Result<Option<fs::File>, Error> {
    let path = store.join(LOCK);
    let file = match no_follow::open_file(&path, OFlags::RDONLY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.at(&path)?,
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
        let journal = match no_follow::open_directory(&path) {
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
pub struct Recovering {
    _journal: fs::File,
}

impl Recovering {
    /// Waits for other processes that recover. `None` if there is no store.
    ///
    /// # Errors
    /// `Io`.
    pub fn begin(base: &Path, store: Option<&Path>) -> Result<Option<Self>, Error> {
        let found = match store {
            Some(store) => resolved(store)?,
            None => match store_at(base) {
                Ok(found) => found,
                Err(Error::Usage(_)) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let path = found.join("journal");
        let journal = match no_follow::open_directory(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.at(&path)?,
        };
        rustix::fs::flock(&journal, rustix::fs::FlockOperation::LockExclusive).at(&path)?;
        Ok(Some(Self { _journal: journal }))
    }
}

/// Returns whether a journal has a transaction: a running one, or, without a daemon, an interrupted one.
///
/// # Errors
/// `Io`.
pub fn is_interrupted(base: &Path, store: Option<&Path>) -> Result<bool, Error> {
    let home = base.join(HIDDEN);
    for place in [store, Some(&home)].into_iter().flatten() {
        let place = match resolved(place) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        let journal = place.join("journal");
        match no_follow::names(&journal) {
            Ok(names) if names.is_empty() => {}
            Ok(_) => return Ok(true),
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(error).at(&journal),
        }
    }
    Ok(false)
}

/// Removes a store that was made a moment ago, unless another mount has begun to use it.
pub(super) fn remove_new_store(store: &Path) -> Result<(), Error> {
    let lock = lock_store(store, true)?;
    if lock.is_of(store)? { remove(store) } else { Ok(()) }
}

/// The first line of the lock's content while a daemon holds it; one that ends in order takes it away.
const IN_USE: &str = "in use\n";

/// The first line where a daemon had ended in order before a process recovered without a mount.
const RECOVERED: &str = "recovered\n";

/// The information that the lock file has about earlier mounts.
#[derive(Default)]
pub(super) struct Before {
    /// The last daemon did not shut down cleanly.
    pub(super) was_in_use: bool,
    /// What processes that recovered without a mount have done since, for the next mount to report.
    pub(super) recovered: Vec<String>,
}

pub(super) fn state_before(mut lock: &fs::File) -> Before {
    /// The base's owner may have written anything into the file.
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

/// Writes to the lock file that a daemon uses the store. Found at a mount, it means that the last daemon did not shut
/// down in order.
pub(super) fn mark_in_use(lock: &fs::File) -> io::Result<()> {
    write_state(lock, IN_USE)
}

/// Saves the messages of a recovery for the next mount to report.
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

/// Removes the mark of a mount from the lock file.
pub(super) fn mark_closed(lock: &fs::File) -> io::Result<()> {
    lock.set_len(0)
}

/// The base's root keeps its times when the store comes and goes inside it.
pub(super) struct TimesGuard {
    path: PathBuf,
    times: Timestamps,
}

impl TimesGuard {
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
    fn nothing_is_followed_out_of_an_untrusted_store() {
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
            assert!(matches!(refused, Error::Refused { .. }), "{name}: {refused}");
            assert_eq!(fs::read_dir(&precious).unwrap().count(), 1, "{name}");
        }
    }

    #[test]
    fn a_store_whose_trash_takes_too_long_to_delete_stays_for_the_next_mount() {
        let base = tempfile::tempdir().unwrap();
        let store = base.path().join(".branching");
        let owner = fs::metadata(base.path()).map(|found| (found.uid(), found.gid())).unwrap();
        make_store(&store, owner).unwrap();
        fs::create_dir_all(store.join("trash/layer-1-1/upper/d")).unwrap();
        assert!(!remove_in_time(&store, Duration::ZERO).unwrap());
        assert!(store.join("trash/layer-1-1/upper/d").exists() && store.join("format").exists());
        assert!(remove_in_time(&store, Duration::from_secs(60)).unwrap());
        assert!(!store.exists());
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
        let lock = claim(&store, base.path(), owner, true).unwrap();
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
        let lock = claim(&store, base.path(), owner, true).unwrap();
        let recovering = Recovering::begin(base.path(), Some(&store)).unwrap().unwrap();
        std::thread::scope(|scope| {
            let mount = scope.spawn(|| claim(&store, base.path(), owner, true));
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
