//! The interface between a filesystem and the kernel: the [`Filesystem`] trait, with one method per FUSE request, and the
//! types of its arguments and results.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::io::Errno;

/// A node id: identifies an object between the kernel and the filesystem. Users never see it. 1 is the root of the mount.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u64);

/// A file handle: identifies an open file. The filesystem chooses it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(pub u64);

/// A time to live that does not end: the kernel caches the reply until it is invalidated.
pub const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The file system uid and gid of the calling process, in the user namespace of the process that mounted.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Effective (file system) user.
    pub uid: u32,
    /// Effective (file system) group.
    pub gid: u32,
}

/// A point in time: seconds since 1970 and nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Time {
    /// Seconds; may be negative.
    pub seconds: i64,
    /// 0 to 999 999 999.
    pub nanoseconds: u32,
}

/// The attributes of an object, as `stat` shows them.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// Inode number. Independent of the node id.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// 512-byte blocks in use.
    pub blocks: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// File type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Number of hard links.
    pub nlink: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Device number of a device node: `(major, minor)`.
    pub rdev: (u32, u32),
    /// Preferred I/O size.
    pub block_size: u32,
}

/// The reply to a request that gives the kernel a node (LOOKUP, MKDIR, …). The kernel holds one more reference to the node
/// until FORGET.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The node. `None` is a negative entry: the name does not exist, and the kernel may cache that.
    pub node: Option<NodeId>,
    /// Distinguishes two objects that use the same node id one after the other.
    pub generation: u64,
    /// How long the kernel may cache the name.
    pub entry_ttl: Duration,
    /// How long the kernel may cache the attributes.
    pub attributes_ttl: Duration,
    /// The attributes; `None` only in a negative entry.
    pub attributes: Option<Attributes>,
}

/// The reply to OPEN and CREATE.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenReply {
    /// The handle that later requests carry.
    pub handle: Option<Handle>,
    /// Keep the page cache of an earlier open (`FOPEN_KEEP_CACHE`).
    pub keep_cache: bool,
    /// Bypass the page cache (`FOPEN_DIRECT_IO`).
    pub direct_io: bool,
    /// The kernel reads and writes this file directly (`FOPEN_PASSTHROUGH`).
    pub backing: Option<BackingId>,
}

/// A registered backing file of one mount: see [`KernelNotifier::open_backing`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingId(pub i32);

/// The attributes that SETATTR changes. `None` leaves an attribute unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// User id of the owner.
    pub uid: Option<u32>,
    /// Group id.
    pub gid: Option<u32>,
    /// New size in bytes: the file is truncated or extended.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// The open file through which the attributes are changed, if any.
    pub handle: Option<Handle>,
    /// Drop set-user-id, set-group-id and capabilities (`FATTR_KILL_SUIDGID`).
    pub kill_privileges: bool,
}

/// A time that SETATTR sets.
#[derive(Clone, Copy, Debug)]
pub enum SetTime {
    /// The current time.
    Now,
    /// A given time.
    At(Time),
}

/// The figures of a filesystem, as `statfs` shows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statfs {
    /// Size, in units of `fragment_size`.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for unprivileged users.
    pub blocks_available: u64,
    /// Number of inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Preferred I/O size in bytes.
    pub block_size: u32,
    /// Size of a block in bytes.
    pub fragment_size: u32,
    /// Longest name in bytes.
    pub name_max: u32,
}

/// The flags of OPEN and CREATE.
#[derive(Clone, Copy, Debug)]
pub struct OpenFlags {
    /// The `O_*` flags of the caller (without `O_CREAT`, `O_EXCL`, `O_NOCTTY` for OPEN).
    pub flags: u32,
    /// `O_TRUNC` also drops the set-id bits (`FUSE_OPEN_KILL_SUIDGID`).
    pub kill_privileges: bool,
}

/// The kernel's buffer for directory entries.
pub trait DirectorySink {
    /// Adds an entry. `kind` is a `DT_*` value. Returns false if the buffer is full: stop then.
    fn push(&mut self, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool;
    /// Adds an entry with attributes (READDIRPLUS). Pass an entry without a node for `.` and `..`. Returns false if the
    /// buffer is full: the kernel has then taken no reference to the node.
    fn push_plus(&mut self, entry: &Entry, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool;
    /// Whether an entry with a name of this length fits. Saves a lookup whose result would not fit.
    fn has_room(&self, name: &OsStr) -> bool;
}

/// The result of a request.
pub type FsResult<T> = Result<T, Errno>;

/// The optional features of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// The kernel supports `FUSE_NOTIFY_INC_EPOCH` (Linux 6.16).
    pub epoch: bool,
    /// The kernel supports backing files (`FUSE_PASSTHROUGH`, Linux 6.9), and the mount asked for them.
    pub passthrough: bool,
}

/// A filesystem. Each method handles the FUSE request of its name (fuse(4), `linux/fuse.h`).
///
/// Several threads call the methods concurrently. A method that is not overridden replies `ENOSYS`; the kernel does not send
/// most such requests again.
#[expect(unused_variables, reason = "defaults ignore their arguments")]
pub trait Filesystem: Send + Sync + 'static {
    /// Called once, after the first request, before all other methods.
    fn init(&self, capabilities: &Capabilities) {}
    /// The mount has ended.
    fn destroy(&self) {}
    /// Looks up a name in a directory. The kernel takes a reference to the node of the reply.
    fn lookup(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        Err(Errno::NOSYS)
    }
    /// The kernel drops `count` references to a node.
    fn forget(&self, node: NodeId, count: u64) {}
    /// Returns the attributes, and how long the kernel may cache them.
    fn getattr(&self, node: NodeId, handle: Option<Handle>) -> FsResult<(Attributes, Duration)> {
        Err(Errno::NOSYS)
    }
    /// Changes attributes. Returns the new ones, and how long the kernel may cache them.
    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttr,
    ) -> FsResult<(Attributes, Duration)> {
        Err(Errno::NOSYS)
    }
    /// Returns the target of a symbolic link.
    fn readlink(&self, node: NodeId) -> FsResult<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    /// Creates an object that is neither a directory nor a symbolic link. `mode` has the file type. The filesystem
    /// applies `umask`, unless the parent has a default ACL (`FUSE_DONT_MASK`).
    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: (u32, u32),
    ) -> FsResult<Entry> {
        Err(Errno::NOSYS)
    }
    /// Creates a directory. `umask` as in [`Self::mknod`].
    fn mkdir(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> FsResult<Entry> {
        Err(Errno::NOSYS)
    }
    /// Removes a name of an object that is not a directory.
    fn unlink(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Removes an empty directory.
    fn rmdir(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Creates a symbolic link.
    fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> FsResult<Entry> {
        Err(Errno::NOSYS)
    }
    /// Renames an object. `flags`: `RENAME_NOREPLACE`, `RENAME_EXCHANGE`, `RENAME_WHITEOUT`.
    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Creates another name of a node.
    fn link(
        &self,
        caller: &Caller,
        node: NodeId,
        new_parent: NodeId,
        new_name: &OsStr,
    ) -> FsResult<Entry> {
        Err(Errno::NOSYS)
    }
    /// Opens a file.
    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> FsResult<OpenReply> {
        Err(Errno::NOSYS)
    }
    /// Creates a file and opens it. `umask` as in [`Self::mknod`].
    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        Err(Errno::NOSYS)
    }
    /// Creates a file without a name and opens it (`O_TMPFILE`).
    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        Err(Errno::NOSYS)
    }
    /// Fills `buffer` from `offset`; returns the number of bytes read, which is smaller only at the end of the file.
    fn read(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        buffer: &mut [u8],
    ) -> FsResult<usize> {
        Err(Errno::NOSYS)
    }
    /// Writes `data` at `offset`; returns the number of bytes written. `kill_privileges`: drop the set-id bits.
    fn write(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        data: &[u8],
        kill_privileges: bool,
    ) -> FsResult<usize> {
        Err(Errno::NOSYS)
    }
    /// A descriptor of the open file was closed. `close` returns the error.
    fn flush(&self, node: NodeId, handle: Handle) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// The last descriptor and mapping of the open file are gone.
    fn release(&self, node: NodeId, handle: Handle) {}
    /// Writes the content of a file to stable storage; its metadata too, unless `data_only`.
    fn fsync(&self, node: NodeId, handle: Handle, data_only: bool) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Allocates or deallocates room; `mode` as in `fallocate(2)`.
    fn fallocate(
        &self,
        caller: &Caller,
        node: NodeId,
        handle: Handle,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Finds the next data or hole. `whence`: `SEEK_DATA` or `SEEK_HOLE`.
    fn lseek(&self, node: NodeId, handle: Handle, offset: u64, whence: u32) -> FsResult<u64> {
        Err(Errno::NOSYS)
    }
    /// Copies `length` bytes between two open files, each with an offset; returns the number of bytes copied.
    fn copy_file_range(
        &self,
        caller: &Caller,
        from: (NodeId, Handle, u64),
        to: (NodeId, Handle, u64),
        length: u64,
        flags: u64,
    ) -> FsResult<usize> {
        Err(Errno::NOSYS)
    }
    /// Adds the entries after `offset` (0: from the start) to `sink`; with [`DirectorySink::push_plus`] if `plus`.
    /// Directories are not opened: the kernel caches a complete listing until it is invalidated.
    fn readdir(
        &self,
        caller: &Caller,
        node: NodeId,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Writes a directory to stable storage.
    fn fsyncdir(&self, node: NodeId, data_only: bool) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Returns the whole value. The session handles a request for its size, and `ERANGE`.
    fn getxattr(&self, node: NodeId, name: &OsStr) -> FsResult<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    /// Sets an extended attribute. `acl_kill_sgid`: a change of the access ACL also drops the set-group-ID bit.
    fn setxattr(
        &self,
        caller: &Caller,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Returns the names of all extended attributes, each with a NUL at its end.
    fn listxattr(&self, node: NodeId) -> FsResult<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    /// Removes an extended attribute.
    fn removexattr(&self, caller: &Caller, node: NodeId, name: &OsStr) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// Returns the figures of the filesystem.
    fn statfs(&self, node: NodeId) -> FsResult<Statfs> {
        Err(Errno::NOSYS)
    }
    /// Handles an ioctl; returns its output, whose size `command` encodes.
    fn ioctl(&self, node: NodeId, command: u32) -> FsResult<Vec<u8>> {
        Err(Errno::NOTTY)
    }
    /// Whether a WRITE or IOCTL of this node may wait for other requests. The session then dispatches it on a thread of
    /// its own, so that it does not delay others.
    fn may_block(&self, node: NodeId) -> bool {
        false
    }
    /// Writes the whole filesystem to stable storage.
    fn syncfs(&self, node: NodeId) -> FsResult<()> {
        Err(Errno::NOSYS)
    }
    /// A method has panicked. The session replies `EIO` and continues.
    fn panicked(&self) {}
    /// Called before each request with its name, as [`KernelNotifier::request_counts`] gives it. For tracing and fault
    /// injection.
    fn request_received(&self, name: &'static str) {}
}

/// Notifications to the kernel, which invalidate what it has cached, and its registry of backing files.
///
/// Do not call a method that invalidates while you hold a lock that a request needs: the kernel may wait for the reply
/// to that request before it accepts the notification.
pub trait KernelNotifier: Send + Sync {
    /// Invalidates the attributes and the cached content of a node. A node that the kernel does not know is no error.
    fn invalidate_node(&self, node: NodeId) -> FsResult<()>;
    /// Invalidates one name in a directory. A name that the kernel does not know is no error.
    fn invalidate_entry(&self, parent: NodeId, name: &OsStr) -> FsResult<()>;
    /// Expires one name in a directory: the kernel looks it up again and drops the cached node if it has changed. The
    /// cost does not depend on what is below it. Before Linux 6.2 the same as [`Self::invalidate_entry`].
    fn expire_entry(&self, parent: NodeId, name: &OsStr) -> FsResult<()>;
    /// Expires every cached name. `ENOSYS` if the kernel does not support epochs.
    fn increment_epoch(&self) -> FsResult<()>;
    /// Invalidates the attributes of a node and keeps its cached content. Never waits.
    fn invalidate_attributes(&self, node: NodeId) -> FsResult<()>;
    /// Puts content into the page cache of a node. Only for a node that has never been open: no page of it is locked.
    fn store(&self, node: NodeId, content: &[u8]) -> FsResult<()>;
    /// Registers a backing file. `EPERM` without `CAP_SYS_ADMIN`; `ELOOP` if its filesystem is stacked too high. May be
    /// called with locks held.
    fn open_backing(&self, file: BorrowedFd<'_>) -> FsResult<BackingId>;
    /// Unregisters a backing file. Open files keep working.
    fn close_backing(&self, backing: BackingId);
    /// Returns how many requests of each kind the kernel has sent.
    fn request_counts(&self) -> Vec<(&'static str, u64)>;
}
