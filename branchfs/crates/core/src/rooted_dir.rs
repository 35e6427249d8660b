//! A directory tree that is accessed only from its root descriptor: a layer, or the base.
//!
//! Every call resolves the parent directory beneath the root without following a symbolic link (`openat2` with
//! `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`), then acts on the last component only. So no name, link or race inside the
//! tree leads out of it. Parent descriptors are cached ([`crate::descriptors`]), so a repeated call in a directory costs one
//! system call. A path longer than the longest path of a branch with its prefix in the store fails with `ENAMETOOLONG`. The
//! recursive removal of a directory walks by descriptors and has no limit.
//!
//! The key of the cache is the unparsed path, because splitting paths would cost more than all other work here. Code that
//! renames or removes a directory must call [`RootedDir::invalidate`]. In a tree that other programs change, such as the base
//! ([`RootedDir::externally_modified`]), each use of a cached descriptor first checks that the path still leads to it, by one more system call.
//! Where the root is a mount in which the kernel follows no symbolic link ([`RootedDir::lower_of`]), a status takes one call with
//! the whole path: no directory is opened or checked.
//!
//! The root may be created later ([`RootedDir::without_root`]); until then all paths are missing. The root of a layer is reopened when
//! it is needed ([`RootedDir::reopened`]), so an unused branch has no open descriptor.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{
    AtFlags, Dev, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::descriptors::{Kept, Owner, open_directory, shared_directory, with_room};
use crate::no_follow::PATH_BYTES_MAX;
use crate::no_follow::{self, Refusal};
use crate::sys;

/// Longest path that the kernel accepts in one call: `PATH_MAX` without the terminating NUL.
const KERNEL_PATH_BYTES_MAX: usize = 4095;

/// Longest prefix that the store adds to such a path: `history/1795470613678/undone/layer-1795470613678/upper/`, and
/// reserve.
const STORE_PREFIX_BYTES_MAX: usize = 64;

/// Answer of the operating system.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// One entry of a directory as `getdents` returns it.
#[derive(Clone, Debug)]
pub struct DirectoryEntry {
    /// Its name in the directory.
    pub name: OsString,
    /// Its file type.
    pub kind: FileType,
    /// Its inode number.
    pub ino: u64,
}

/// A tree below one open directory.
#[derive(Debug)]
pub struct RootedDir {
    /// Boxed, because most layers have none.
    root: OnceLock<Box<Root>>,
    /// Other programs may move and remove directories in it.
    is_externally_modified: bool,
    /// The root is a mount of its own in which the kernel follows no symbolic link, and that contains no other mount.
    has_no_symlinks: bool,
    /// Directories that are kept open, by path. While one is open, its inode number is not reused.
    kept: Owner,
}

#[derive(Debug)]
enum Root {
    Held(Arc<OwnedFd>),
    /// Reopened when needed, at `path` below `above`; it must still be the same directory.
    Reopened {
        above: Arc<OwnedFd>,
        path: PathBuf,
        identity: (u32, u32, u64),
    },
}

/// The name under which the root is kept.
const ROOT: &str = "";

impl RootedDir {
    /// Returns the tree below an open directory.
    pub fn new(root: OwnedFd) -> Self {
        let tree = Self::without_root();
        let _ = tree.root.set(Box::new(Root::Held(Arc::new(root)))); // it is empty
        tree
    }

    /// A rooted directory whose root does not exist yet.
    pub(crate) fn without_root() -> Self {
        Self {
            root: OnceLock::new(),
            is_externally_modified: false,
            has_no_symlinks: false,
            kept: Owner::new(),
        }
    }

    /// The same, for a tree that other programs change, too.
    pub(crate) fn externally_modified(mut self) -> Self {
        self.is_externally_modified = true;
        self
    }

    /// The base `root` as a lower layer: through a read-only mount, so that a mistake would be `EROFS` and not a changed
    /// base, in which the kernel follows no symbolic link.
    ///
    /// # Errors
    /// Without the privilege to mount.
    pub(crate) fn lower_of(root: BorrowedFd<'_>) -> std::io::Result<Self> {
        let clone = sys::read_only_clone(root)?;
        let has_no_symlinks = sys::forbid_symlinks(clone.as_fd()).is_ok();
        Ok(Self { has_no_symlinks, ..Self::new(clone).externally_modified() })
    }

    /// Sets the root, which exists from now on: the directory `name` of the layer in `layer`.
    pub(crate) fn set_root(&self, layer: &Path, name: &str) -> Result<()> {
        let (parent, layer) = (layer.parent(), layer.file_name());
        let (Some(parent), Some(layer)) = (parent, layer) else { return Err(Errno::INVAL) };
        let (above, path) = (shared_directory(parent)?, Path::new(layer).join(name));
        let opened = open_root_at(&above, &path)?;
        let identity = identity(&stat_of(&opened)?);
        // One that came first is the same directory.
        let _ = self.root.set(Box::new(Root::Reopened { above, path, identity }));
        self.kept.keep(OsStr::new(ROOT), Kept { file: Arc::new(opened), identity });
        Ok(())
    }

    /// Whether the root is open: that of a layer exists after the first change.
    pub(crate) fn has_root(&self) -> bool {
        self.root.get().is_some()
    }

    /// Opens the directory at `path`, no component of which may be a symbolic link.
    pub fn open_root(path: &Path) -> Result<Self> {
        open_directory(path).map(Self::new)
    }

    /// The directory `name` of the layer in `layer`, reached without following a symbolic link.
    pub(crate) fn reopened(layer: &Path, name: &str) -> Result<Self> {
        let tree = Self::without_root();
        tree.set_root(layer, name)?;
        Ok(tree)
    }

    /// The root's descriptor.
    pub(crate) fn root(&self) -> Result<Arc<OwnedFd>> {
        match &**self.root.get().ok_or(Errno::NOENT)? {
            Root::Held(root) => Ok(Arc::clone(root)),
            Root::Reopened { above, path, identity: known } => {
                if let Some(kept) = self.kept.get(OsStr::new(ROOT)) {
                    return Ok(kept.file);
                }
                let file = Arc::new(open_root_at(above, path)?);
                let identity = identity(&stat_of(&file)?);
                if identity != *known {
                    return Err(Errno::STALE);
                }
                self.kept.keep(OsStr::new(ROOT), Kept { file: Arc::clone(&file), identity });
                Ok(file)
            }
        }
    }

    /// Closes the kept descriptors of `path` and everything below it; of all for an empty path.
    pub(crate) fn invalidate(&self, path: &Path) {
        let path = path.as_os_str().as_bytes();
        self.kept.invalidate(|kept| is_at_or_below(kept.as_bytes(), path));
    }

    /// The directory at `path`, for use with calls that take a directory descriptor.
    pub(crate) fn directory(&self, path: &Path) -> Result<Arc<OwnedFd>> {
        if path.as_os_str().is_empty() {
            return self.root();
        }
        check_total_length(path)?;
        if let Some(known) = self.kept.get(path.as_os_str()) {
            if !self.is_externally_modified || self.is_still(path, &known)? {
                return Ok(known.file);
            }
            self.invalidate(path);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open_beneath(&*self.root()?, path, flags)?;
        let identity =
            if self.is_externally_modified { identity(&stat_of(&opened)?) } else { (0, 0, 0) };
        let directory = Arc::new(opened);
        self.kept.keep(path.as_os_str(), Kept { file: Arc::clone(&directory), identity });
        Ok(directory)
    }

    /// Whether a path still leads to the directory `known`. A symbolic link on the path to the same directory makes no
    /// difference: the directory was found beneath the root.
    fn is_still(&self, path: &Path, known: &Kept) -> Result<bool> {
        match stat_in(&*self.root()?, path.as_os_str()) {
            Ok(stat) => Ok(identity(&stat) == known.identity),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => Ok(false), // opening it tells
            Err(error) => Err(error),
        }
    }

    fn parent<'p>(&self, path: &'p Path) -> Result<(Arc<OwnedFd>, &'p OsStr)> {
        check_total_length(path)?;
        match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Ok((self.directory(parent)?, name)),
            _ => Ok((self.root()?, OsStr::new("."))),
        }
    }

    /// As `statx(2)`; a symbolic link is not followed.
    pub fn stat(&self, path: &Path) -> Result<Statx> {
        if self.has_no_symlinks && leads_down(path) {
            return stat_in(&*self.root()?, path.as_os_str());
        }
        let (parent, name) = self.parent(path)?;
        stat_in(&parent, name)
    }

    /// The status of an entry of the directory at `path`.
    pub(crate) fn stat_entry(&self, path: &Path, name: &OsStr) -> Result<Statx> {
        if self.has_no_symlinks {
            return self.stat(&path.join(name));
        }
        stat_in(&*self.directory(path)?, name)
    }

    /// Opens an existing object; never follows a link, never creates.
    pub fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd> {
        check_total_length(path)?;
        if self.is_externally_modified && !path.as_os_str().is_empty() {
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return open_beneath(&*self.root()?, path, flags);
        }
        let (parent, name) = self.parent(path)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        with_room(|| rustix::fs::openat(&*parent, name, flags, Mode::empty()))
    }

    /// Opens a file of a store: a regular one that has no other hard links ([`crate::no_follow`]).
    pub(crate) fn open_own_file(
        &self,
        path: &Path,
        flags: OFlags,
    ) -> std::io::Result<std::fs::File> {
        let file = match self.open(path, flags | OFlags::NONBLOCK | OFlags::NOCTTY) {
            Err(Errno::LOOP) => return Err(Refusal::Symlink.into()),
            other => other?,
        };
        no_follow::check(&file)?;
        Ok(file.into())
    }

    /// Creates a regular file that must not exist yet, and opens it for reading and writing.
    pub(crate) fn create_file(&self, path: &Path, mode: u32) -> Result<OwnedFd> {
        let (parent, name) = self.parent(path)?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        with_room(|| rustix::fs::openat(&*parent, name, flags, mode))
    }

    /// Creates a file without a name in the directory at `path`.
    pub(crate) fn create_unnamed(&self, path: &Path, mode: u32) -> Result<OwnedFd> {
        let directory = self.directory(path)?;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        with_room(|| rustix::fs::openat(&*directory, ".", flags, mode))
    }

    pub(crate) fn make_directory(&self, path: &Path, mode: u32) -> Result<()> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(&*parent, name, Mode::from_raw_mode(mode & 0o7777))
    }

    /// Creates a special file; `mode` contains the type.
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

    /// Renames within the root. Before a directory moves, [`Self::invalidate`] both names.
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
        self.invalidate(path);
        let (parent, name) = self.parent(path)?;
        rustix::fs::unlinkat(&*parent, name, AtFlags::REMOVEDIR)
    }

    /// Removes the object at `path`, with everything below it. A missing object is success.
    pub(crate) fn remove_all(&self, path: &Path) -> Result<()> {
        self.remove_in_steps(path, &|| Ok(()))
    }

    /// As [`Self::remove_all`], with a call of `between` before each removal. Its error ends the removal.
    pub(crate) fn remove_in_steps(
        &self,
        path: &Path,
        between: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        self.invalidate(path);
        let (parent, name) = self.parent(path)?;
        remove_below(&parent, name, between)
    }

    /// Entries without `.` and `..`, in the order of the file system.
    pub fn list(&self, path: &Path) -> Result<Vec<DirectoryEntry>> {
        list_opened(self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?)
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

    /// A path that names the object itself, for calls that accept only paths (extended attributes).
    fn parent_and_name(&self, path: &Path) -> Result<(Arc<OwnedFd>, PathBuf)> {
        let (parent, name) = self.parent(path)?;
        let mut through = descriptor_path(parent.as_fd());
        through.push(name);
        Ok((parent, through))
    }

    pub(crate) fn get_xattr(&self, path: &Path, name: &OsStr) -> Result<Vec<u8>> {
        let (_parent, through) = self.parent_and_name(path)?;
        read_growing(|buffer| rustix::fs::lgetxattr(&through, name, buffer))
    }

    /// As [`Self::get_xattr`]; `None` if the object does not have the attribute. Other errors are returned.
    pub(crate) fn find_xattr(&self, path: &Path, name: &OsStr) -> Result<Option<Vec<u8>>> {
        match self.get_xattr(path, name) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn list_xattrs(&self, path: &Path) -> Result<Vec<u8>> {
        let (_parent, through) = self.parent_and_name(path)?;
        read_growing(|buffer| rustix::fs::llistxattr(&through, buffer))
    }

    pub(crate) fn set_xattr(
        &self,
        path: &Path,
        name: &OsStr,
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        let (_parent, through) = self.parent_and_name(path)?;
        rustix::fs::lsetxattr(&through, name, value, flags)
    }

    pub(crate) fn remove_xattr(&self, path: &Path, name: &OsStr) -> Result<()> {
        let (_parent, through) = self.parent_and_name(path)?;
        rustix::fs::lremovexattr(&through, name)
    }
}

/// Removes the object at `path` with everything below it, at any depth. A missing object is success. No component of
/// the path may be a symbolic link.
pub fn remove_path(path: &Path) -> Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL);
    };
    match open_directory(parent) {
        Ok(parent) => remove_below(&parent, name, &|| Ok(())),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A directory that is being emptied.
struct Emptied {
    name: OsString,
    /// The parent directory, which must be found again through `..`.
    parent: (u32, u32, u64),
    /// Entries that are still there.
    entries: Vec<DirectoryEntry>,
}

/// Removes the entry `name` of the directory `top` with everything below it. Two descriptors are open at a time,
/// whatever the depth: the way up leads through `..`, and each directory must be the one that the walk came from.
fn remove_below(top: &OwnedFd, name: &OsStr, between: &dyn Fn() -> Result<()>) -> Result<()> {
    let mut emptied: Vec<Emptied> = Vec::new();
    let mut here = with_room(|| rustix::io::fcntl_dupfd_cloexec(top, 0))?;
    let mut next = Some((name.to_os_string(), FileType::Unknown));
    loop {
        if let Some((name, kind)) = next.take() {
            between()?;
            if let Some(below) = remove_or_open(&here, &name, kind)? {
                let parent = identity(&stat_of(&here)?);
                let entries = list_opened(below.try_clone().map_err(to_errno)?)?;
                emptied.push(Emptied { name, parent, entries });
                here = below;
            }
        }
        let Some(last) = emptied.last_mut() else { return Ok(()) };
        if let Some(entry) = last.entries.pop() {
            next = Some((entry.name, entry.kind));
            continue;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::openat(&here, "..", flags, Mode::empty())?;
        if identity(&stat_of(&parent)?) != last.parent {
            return Err(Errno::STALE); // it was moved meanwhile
        }
        between()?;
        absent_is_success(rustix::fs::unlinkat(&parent, &*last.name, AtFlags::REMOVEDIR))?;
        emptied.pop();
        here = parent;
    }
}

/// Removes an entry other than a directory, or opens a directory. `None` if the entry is missing.
fn remove_or_open(parent: &OwnedFd, name: &OsStr, kind: FileType) -> Result<Option<OwnedFd>> {
    if kind != FileType::Directory {
        match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(None),
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT) => Ok(None),
        // An immutable file, for one: the refusal was the answer.
        Err(Errno::NOTDIR | Errno::LOOP) => Err(Errno::PERM),
        Err(error) => Err(error),
    }
}

fn absent_is_success(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// The number of an error of the standard library, for requests. `EIO` for one that has none.
pub(crate) fn to_errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn list_opened(opened: OwnedFd) -> Result<Vec<DirectoryEntry>> {
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

/// Compares bytes: splitting hundreds of long paths, as [`Path::starts_with`] does, costs milliseconds.
fn is_at_or_below(path: &[u8], ancestor: &[u8]) -> bool {
    let below = path.strip_prefix(ancestor);
    below.is_some_and(|rest| ancestor.is_empty() || rest.is_empty() || rest[0] == b'/')
}

/// Whether the kernel takes a path in one call, and it can only lead downwards from a root. Names with two dots in a row
/// are rare enough to go without.
fn leads_down(path: &Path) -> bool {
    let path = path.as_os_str().as_bytes();
    let is_relative = path.first().is_some_and(|first| *first != b'/');
    is_relative && path.len() <= KERNEL_PATH_BYTES_MAX && !path.windows(2).any(|two| two == b"..")
}

/// Refuses a path that is longer than any of a branch with its prefix in the store.
fn check_total_length(path: &Path) -> Result<()> {
    const LONGEST: usize = PATH_BYTES_MAX + STORE_PREFIX_BYTES_MAX;
    if path.as_os_str().len() > LONGEST { Err(Errno::NAMETOOLONG) } else { Ok(()) }
}

fn open_root_at(above: &OwnedFd, path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    with_room(|| rustix::fs::openat2(above, path, flags, Mode::empty(), beneath()))
}

/// Opens a path; one that is too long for one call is opened in two.
fn open_beneath(root: &OwnedFd, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    let bytes = path.as_os_str().as_bytes();
    let open = |at: &OwnedFd, path: &[u8], flags| {
        let path = OsStr::from_bytes(path);
        with_room(|| rustix::fs::openat2(at, path, flags, Mode::empty(), beneath()))
    };
    if bytes.len() <= KERNEL_PATH_BYTES_MAX {
        return open(root, bytes, flags);
    }
    let slash = bytes[..=KERNEL_PATH_BYTES_MAX].iter().rposition(|byte| *byte == b'/');
    let slash = slash.ok_or(Errno::NAMETOOLONG)?;
    let above = open(root, &bytes[..slash], OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
    open(&above, &bytes[slash + 1..], flags)
}

/// Refuses a path that is too long for an object of a branch.
pub(crate) fn check_length(path: &Path) -> Result<()> {
    if path.as_os_str().len() > PATH_BYTES_MAX { Err(Errno::NAMETOOLONG) } else { Ok(()) }
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

/// The present status of an open object.
pub fn stat_of(file: impl AsFd) -> Result<Statx> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of directories, each with a file in it, with a name of two bytes for each level.
    fn make_deep(top: &Path, levels: usize) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut here = rustix::fs::open(top, flags, Mode::empty()).unwrap();
        for _ in 0..levels {
            rustix::fs::mkdirat(&here, "dd", Mode::RWXU).unwrap();
            let create = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            rustix::fs::openat(&here, "file", create, Mode::RWXU).unwrap();
            here = rustix::fs::openat(&here, "dd", flags, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn a_tree_deeper_than_any_path_and_any_stack_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        make_deep(directory.path(), 20_000);
        let tree = RootedDir::open_root(directory.path()).unwrap();
        // The thread has less stack than one call for each level would need.
        std::thread::scope(|scope| {
            let small = std::thread::Builder::new().stack_size(128 * 1024);
            let removed = small.spawn_scoped(scope, || tree.remove_all(Path::new("dd"))).unwrap();
            removed.join().unwrap().unwrap();
        });
        assert_eq!(tree.list(Path::new("")).unwrap().len(), 1, "what is beside it stays");
    }

    #[test]
    fn a_path_longer_than_the_kernel_takes_is_refused_and_not_walked() {
        let directory = tempfile::tempdir().unwrap();
        make_deep(directory.path(), 3_000);
        let tree = RootedDir::open_root(directory.path()).unwrap();
        let path: PathBuf = std::iter::repeat_n("dd", 2_000).collect();
        for outcome in [tree.stat(&path).map(drop), tree.list(&path).map(drop)] {
            assert_eq!(outcome, Err(Errno::NAMETOOLONG));
        }
        tree.remove_all(Path::new("dd")).unwrap();
    }

    #[test]
    fn forgetting_a_directory_forgets_what_is_below_it_and_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let tree = RootedDir::open_root(directory.path()).unwrap();
        for path in ["a", "a/b", "ab"] {
            tree.make_directory(Path::new(path), 0o700).unwrap();
            tree.directory(Path::new(path)).unwrap();
        }
        tree.invalidate(Path::new("a"));
        assert_eq!(tree.kept.names(), ["ab"]);
        tree.invalidate(Path::new(""));
        assert!(tree.kept.names().is_empty());
    }

    /// `inside/file` is looked up after each of several replacements of `inside`, as other programs can make them.
    #[test]
    fn a_lower_layer_shows_nothing_behind_a_symlink_above_its_root_or_on_a_mount() {
        let directory = tempfile::tempdir().unwrap();
        let (base, outside) = (directory.path().join("base"), directory.path().join("outside"));
        for path in [&base, &outside, &base.join("inside")] {
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("file"), path.as_os_str().as_bytes()).unwrap();
        }
        let opened = open_directory(&base).unwrap();
        let tree = RootedDir::lower_of(opened.as_fd()).unwrap();
        assert!(tree.has_no_symlinks);
        let [file, up] = ["inside/file", "inside/../../outside/file"].map(Path::new);
        let absolute = outside.join("file");
        let found = |path: &Path| tree.stat(path).map(|stat| stat.stx_ino);
        let ino = |path: &Path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
        assert_eq!(found(file), Ok(ino(&base.join("inside/file"))));
        assert_eq!((found(up), found(&absolute)), (Err(Errno::XDEV), Err(Errno::XDEV)));
        // The parent directory is known now, as it is to any view that has looked something up in it.
        tree.directory(Path::new("inside")).unwrap();
        std::fs::rename(base.join("inside"), base.join("moved")).unwrap();
        for target in [outside.as_path(), Path::new("../outside"), Path::new("moved")] {
            std::os::unix::fs::symlink(target, base.join("inside")).unwrap();
            assert_eq!(found(file), Err(Errno::LOOP));
            let entry = tree.stat_entry(Path::new("inside"), OsStr::new("file"));
            assert_eq!(entry.map(drop), Err(Errno::LOOP));
            assert_eq!(tree.open(file, OFlags::RDONLY).map(drop), Err(Errno::LOOP));
            assert!(tree.list(Path::new("inside")).is_err());
            assert_eq!(
                tree.read_link(Path::new("inside")),
                Ok(target.as_os_str().as_bytes().to_vec())
            );
            std::fs::remove_file(base.join("inside")).unwrap();
        }
        std::fs::create_dir(base.join("inside")).unwrap();
        sys::read_only_clone(open_directory(&outside).unwrap().as_fd())
            .and_then(|clone| {
                let at = base.join("inside");
                let flags = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                Ok(rustix::mount::move_mount(&clone, "", rustix::fs::CWD, &at, flags)?)
            })
            .unwrap();
        let seen = found(file);
        crate::overlayfs_mount::unmount(&base.join("inside"), true).unwrap();
        assert_eq!(seen, Err(Errno::NOENT));
    }

    #[test]
    fn removing_follows_no_link_and_an_absent_path_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let (tree, outside) = (directory.path().join("tree"), directory.path().join("outside"));
        for made in [&tree, &outside] {
            std::fs::create_dir(made).unwrap();
        }
        std::fs::write(outside.join("file"), "kept").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        remove_path(&tree).unwrap();
        remove_path(&tree).unwrap();
        assert!(outside.join("file").exists() && !tree.exists());
    }
}
