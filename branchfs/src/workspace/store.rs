//! The store's directory: made, locked, and given to the base's owner.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Timespec, Timestamps};

use crate::error::{Context, Error};

/// Version of the store's format.
pub(crate) const FORMAT: &str = "branchfs 1\n";

/// Gives a path of the store to the base's owner, who can then always remove it.
pub(super) fn give(path: &Path, (uid, gid): (u32, u32)) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(path).at(path)?;
    if (metadata.uid(), metadata.gid()) == (uid, gid) {
        return Ok(());
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid)).at(path)
}

/// Writes a file that only its owner may read: the daemon runs without a umask.
pub(super) fn write_private(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).mode(0o600).open(path).at(path)?;
    io::Write::write_all(&mut file, content).at(path)
}

pub(super) fn make_store(store: &Path, owner: (u32, u32)) -> Result<(), Error> {
    let make = |path: &Path| match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.at(path).and_then(|()| give(path, owner)),
    };
    make(store)?;
    let format = store.join("format");
    match fs::read_to_string(&format) {
        Ok(found) if found == FORMAT => {}
        Ok(found) => {
            let found = found.trim();
            return Err(Error::Corrupt(format!(
                "{} says {found:?}, this program knows {:?}",
                format.display(),
                FORMAT.trim()
            )));
        }
        Err(_) => {
            for (name, content) in [(".gitignore", "*\n"), ("format", FORMAT)] {
                let path = store.join(name);
                write_private(&path, content.as_bytes())?;
                give(&path, owner)?;
            }
        }
    }
    ["branches", "layers", "journal", "history", "trash"]
        .iter()
        .try_for_each(|name| make(&store.join(name)))
}

pub(super) fn lock_store(store: &Path) -> Result<fs::File, Error> {
    let path = store.join("lock");
    let mut options = fs::OpenOptions::new();
    let file =
        options.create(true).truncate(false).write(true).mode(0o600).open(&path).at(&path)?;
    let owner = fs::metadata(store).at(store)?;
    give(&path, (owner.uid(), owner.gid()))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Unsupported(format!(
            "the store {} is in use by another mount: use that one, or unmount it first",
            store.display()
        ))),
        Err(error) => Err(error).at(&path),
    }
}

/// Removes a store that was made a moment ago, unless another mount has begun to use it.
pub(super) fn discard(store: &Path) -> Result<(), Error> {
    let _lock = lock_store(store)?;
    fs::remove_dir_all(store).at(store)
}

/// The lock's content while a daemon holds it; one that ends in order takes it away.
const IN_USE: &[u8] = b"in use\n";

/// Marks the store as in use, and tells whether it was still marked: then the last daemon did not end in order.
pub(super) fn mark_in_use(lock: &fs::File) -> io::Result<bool> {
    let was_in_use = lock.metadata()?.len() != 0;
    std::os::unix::fs::FileExt::write_all_at(lock, IN_USE, 0)?;
    Ok(was_in_use)
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
