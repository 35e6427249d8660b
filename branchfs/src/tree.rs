//! A directory tree that is only ever reached from its root descriptor: one layer, or the base.
//!
//! Every call resolves the parent directory beneath the root without following a symbolic link (`openat2` with
//! `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`), then acts on the last component alone. So no name, link or race inside the
//! tree leads out of it. Parent descriptors are cached: a repeated call in one directory costs one system call, and paths
//! longer than `PATH_MAX` work because a missing parent is opened from its own parent.
//!
//! The cache is keyed by path, as it is written: taking paths apart costs more than all else here. Whoever renames or removes a
//! directory tells the tree ([`Tree::forget`]). Where others do so as well, as in the base ([`Tree::shared`]), each use of a
//! cached descriptor first asks whether the path still leads there: one system call more.
//!
//! The root itself may come later ([`Tree::absent`]): until then there is nothing at any path.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{
    AtFlags, Dev, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

/// Parent descriptors kept at most; the cache is emptied when it is full.
const CACHED_DIRECTORIES_MAX: usize = 512;

/// Longest path given to the kernel in one call, below `PATH_MAX` (4096) with room for the descriptor's own path.
const PATH_BYTES_MAX: usize = 3800;

/// Answer of the operating system.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// One entry of a directory as `getdents` gives it.
#[derive(Clone, Debug)]
pub(crate) struct DirectoryEntry {
    pub(crate) name: OsString,
    pub(crate) kind: FileType,
    pub(crate) ino: u64,
}

/// A tree below one open directory.
#[derive(Debug)]
pub(crate) struct Tree {
    root: OnceLock<Arc<OwnedFd>>,
    /// Others move and remove directories in it.
    is_shared: bool,
    /// Leaf lock: nothing else is taken while it is held.
    parents: Mutex<HashMap<OsString, Parent>>,
}

/// A directory that is kept open, and what tells it from another one: while it is open, no other gets its number.
#[derive(Clone, Debug)]
struct Parent {
    directory: Arc<OwnedFd>,
    identity: (u32, u32, u64),
}

impl Tree {
    pub(crate) fn new(root: OwnedFd) -> Self {
        let tree = Self::absent();
        tree.appear(root);
        tree
    }

    /// A tree whose root is not there yet.
    pub(crate) fn absent() -> Self {
        Self { root: OnceLock::new(), is_shared: false, parents: Mutex::default() }
    }

    /// The same, where others work in it too.
    pub(crate) fn shared(self) -> Self {
        Self { is_shared: true, ..self }
    }

    /// The root is there from now on.
    pub(crate) fn appear(&self, root: OwnedFd) {
        let _ = self.root.set(Arc::new(root)); // one that came first is the same directory
    }

    /// Whether the root is there.
    pub(crate) fn is_there(&self) -> bool {
        self.root.get().is_some()
    }

    /// Opens the directory at `path`, which is trusted (it is not resolved beneath anything).
    pub(crate) fn open_root(path: &Path) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map(Self::new)
    }

    /// The root's descriptor.
    pub(crate) fn root(&self) -> Result<&Arc<OwnedFd>> {
        self.root.get().ok_or(Errno::NOENT)
    }

    /// Drops cached descriptors of `path` and everything below it.
    pub(crate) fn forget(&self, path: &Path) {
        let mut parents = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        parents.retain(|cached, _| !Path::new(cached).starts_with(path));
    }

    /// Drops all cached descriptors.
    pub(crate) fn forget_all(&self) {
        self.parents.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The directory at `path`, for use with calls that take a directory descriptor.
    pub(crate) fn directory(&self, path: &Path) -> Result<Arc<OwnedFd>> {
        let root = self.root()?;
        if path.as_os_str().is_empty() {
            return Ok(Arc::clone(root));
        }
        let parents = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        let known = parents.get(path.as_os_str()).cloned();
        drop(parents);
        if let Some(known) = known {
            if !self.is_shared || self.is_still(path, &known)? {
                return Ok(known.directory);
            }
            self.forget(path);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = if path.as_os_str().len() < PATH_BYTES_MAX {
            rustix::fs::openat2(&**root, path, flags, Mode::empty(), beneath())?
        } else {
            let (parent, name) = self.parent(path)?;
            rustix::fs::openat2(&*parent, name, flags, Mode::empty(), beneath())?
        };
        let identity = if self.is_shared { identity(&stat_of(&opened)?) } else { (0, 0, 0) };
        let directory = Arc::new(opened);
        let mut parents = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        if parents.len() >= CACHED_DIRECTORIES_MAX {
            parents.clear();
        }
        let known = Parent { directory: Arc::clone(&directory), identity };
        parents.insert(path.as_os_str().to_os_string(), known);
        Ok(directory)
    }

    /// Whether a path leads to a directory that was found there once. A symbolic link on the way that leads to the same
    /// directory changes nothing: it was found beneath the root.
    fn is_still(&self, path: &Path, known: &Parent) -> Result<bool> {
        let found = if path.as_os_str().len() < PATH_BYTES_MAX {
            stat_in(self.root()?, path.as_os_str())
        } else {
            let (parent, name) = self.parent(path)?;
            stat_in(&parent, name)
        };
        match found {
            Ok(stat) => Ok(identity(&stat) == known.identity),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => Ok(false), // opening it tells
            Err(error) => Err(error),
        }
    }

    fn parent<'p>(&self, path: &'p Path) -> Result<(Arc<OwnedFd>, &'p OsStr)> {
        match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Ok((self.directory(parent)?, name)),
            _ => Ok((Arc::clone(self.root()?), OsStr::new("."))),
        }
    }

    pub(crate) fn stat(&self, path: &Path) -> Result<Statx> {
        let (parent, name) = self.parent(path)?;
        stat_in(&parent, name)
    }

    /// What `stat` says of a name in the directory at `path`.
    pub(crate) fn stat_entry(&self, path: &Path, name: &OsStr) -> Result<Statx> {
        stat_in(&*self.directory(path)?, name)
    }

    /// Opens an existing object; never follows a link, never creates.
    pub(crate) fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd> {
        let is_short = path.as_os_str().len() < PATH_BYTES_MAX;
        if self.is_shared && is_short && !path.as_os_str().is_empty() {
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return rustix::fs::openat2(&**self.root()?, path, flags, Mode::empty(), beneath());
        }
        let (parent, name) = self.parent(path)?;
        rustix::fs::openat(
            &*parent,
            name,
            flags | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
    }

    /// Creates a regular file that must not exist yet, and opens it for reading and writing.
    pub(crate) fn create_file(&self, path: &Path, mode: u32) -> Result<OwnedFd> {
        let (parent, name) = self.parent(path)?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&*parent, name, flags, Mode::from_raw_mode(mode & 0o7777))
    }

    /// Creates a file without a name in the directory at `path`.
    pub(crate) fn create_unnamed(&self, path: &Path, mode: u32) -> Result<OwnedFd> {
        let directory = self.directory(path)?;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        rustix::fs::openat(&*directory, ".", flags, Mode::from_raw_mode(mode & 0o7777))
    }

    pub(crate) fn make_directory(&self, path: &Path, mode: u32) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(&*parent, name, Mode::from_raw_mode(mode & 0o7777))
    }

    /// Makes a special file; `mode` has the type.
    pub(crate) fn make_node(&self, path: &Path, mode: u32, device: Dev) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        let kind = FileType::from_raw_mode(mode);
        rustix::fs::mknodat(&*parent, name, kind, Mode::from_raw_mode(mode & 0o7777), device)
    }

    pub(crate) fn make_symlink(&self, path: &Path, target: &OsStr) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::symlinkat(target, &*parent, name)
    }

    pub(crate) fn read_link(&self, path: &Path) -> Result<Vec<u8>> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::readlinkat(&*parent, name, Vec::new())?.into_bytes())
    }

    pub(crate) fn link(&self, from: &Path, to: &Path) -> Result<()> {
        let (from_parent, from_name) = self.parent(from)?;
        let (to_parent, to_name) = self.parent(to)?;
        rustix::fs::linkat(&*from_parent, from_name, &*to_parent, to_name, AtFlags::empty())
    }

    /// Gives an unnamed open file a name.
    pub(crate) fn link_file(&self, file: BorrowedFd<'_>, to: &Path) -> Result<()> {
        let (parent, name) = self.parent(to)?;
        rustix::fs::linkat(
            rustix::fs::CWD,
            descriptor_path(file),
            &*parent,
            name,
            AtFlags::SYMLINK_FOLLOW,
        )
    }

    /// Renames inside the tree; cached descriptors below both names are dropped when `directory` says that one moves.
    pub(crate) fn rename(&self, from: &Path, to: &Path, flags: RenameFlags) -> Result<()> {
        let (from_parent, from_name) = self.parent(from)?;
        let (to_parent, to_name) = self.parent(to)?;
        rustix::fs::renameat_with(&*from_parent, from_name, &*to_parent, to_name, flags)
    }

    pub(crate) fn remove_file(&self, path: &Path) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent, name, AtFlags::empty())
    }

    pub(crate) fn remove_directory(&self, path: &Path) -> Result<()> {
        self.forget(path);
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent, name, AtFlags::REMOVEDIR)
    }

    /// Removes whatever is at `path`, with everything below it. Absent is success.
    pub(crate) fn remove_all(&self, path: &Path) -> Result<()> {
        self.remove_in_steps(path, &|| ())
    }

    /// As [`Self::remove_all`], with a call of `between` before each removal.
    pub(crate) fn remove_in_steps(&self, path: &Path, between: &dyn Fn()) -> Result<()> {
        between();
        match self.remove_file(path) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error),
        }
        for entry in self.list(path)? {
            self.remove_in_steps(&path.join(&entry.name), between)?;
        }
        self.remove_directory(path)
    }

    /// Entries without `.` and `..`, in the order of the file system.
    pub(crate) fn list(&self, path: &Path) -> Result<Vec<DirectoryEntry>> {
        let opened = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut entries = Vec::new();
        let mut buffer = Vec::with_capacity(32 * 1024);
        let mut reader = rustix::fs::RawDir::new(opened, buffer.spare_capacity_mut());
        while let Some(entry) = reader.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            entries.push(DirectoryEntry {
                name: OsString::from_vec(name.to_vec()),
                kind: entry.file_type(),
                ino: entry.ino(),
            });
        }
        Ok(entries)
    }

    pub(crate) fn set_mode(&self, path: &Path, mode: u32) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::chmodat(&*parent, name, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())
    }

    pub(crate) fn set_owner(&self, path: &Path, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::chownat(
            &*parent,
            name,
            uid.map(Uid::from_raw),
            gid.map(Gid::from_raw),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    }

    pub(crate) fn set_times(&self, path: &Path, times: &Timestamps) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::utimensat(&*parent, name, times, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// A path that names the object itself for calls that take only paths (extended attributes).
    fn named(&self, path: &Path) -> Result<(Arc<OwnedFd>, PathBuf)> {
        let (parent, name) = self.parent(path)?;
        let mut through = descriptor_path(parent.as_fd());
        through.push(name);
        Ok((parent, through))
    }

    pub(crate) fn get_xattr(&self, path: &Path, name: &OsStr) -> Result<Vec<u8>> {
        let (_parent, through) = self.named(path)?;
        read_growing(|buffer| rustix::fs::lgetxattr(&through, name, buffer))
    }

    pub(crate) fn list_xattrs(&self, path: &Path) -> Result<Vec<u8>> {
        let (_parent, through) = self.named(path)?;
        read_growing(|buffer| rustix::fs::llistxattr(&through, buffer))
    }

    pub(crate) fn set_xattr(
        &self,
        path: &Path,
        name: &OsStr,
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        let (_parent, through) = self.named(path)?;
        rustix::fs::lsetxattr(&through, name, value, flags)
    }

    pub(crate) fn remove_xattr(&self, path: &Path, name: &OsStr) -> Result<()> {
        let (_parent, through) = self.named(path)?;
        rustix::fs::lremovexattr(&through, name)
    }
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

fn stat_in(directory: &OwnedFd, name: &OsStr) -> Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(directory, name, flags, StatxFlags::BASIC_STATS)
}

/// Device and number.
fn identity(stat: &Statx) -> (u32, u32, u64) {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

/// What an open object is now.
pub(crate) fn stat_of(file: impl AsFd) -> Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::BASIC_STATS)
}

/// `/proc/self/fd/N`: names an open file for calls that take only paths.
pub(crate) fn descriptor_path(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Calls `read` with growing buffers until the value fits (`ERANGE` asks for more).
pub(crate) fn read_growing(read: impl Fn(&mut [u8]) -> Result<usize>) -> Result<Vec<u8>> {
    // Linux bounds both values and lists of extended attributes by 64 KiB.
    const XATTR_BYTES_MAX: usize = 64 * 1024;
    let mut buffer = vec![0; 256];
    loop {
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < XATTR_BYTES_MAX => {
                buffer.resize(XATTR_BYTES_MAX, 0)
            }
            Err(error) => return Err(error),
        }
    }
}

/// The names in a NUL-separated list.
pub(crate) fn xattr_names(list: &[u8]) -> impl Iterator<Item = &OsStr> {
    list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(OsStr::from_bytes)
}
