//! What a filesystem offers to the kernel: one method per FUSE request, in terms of plain Rust values.
//!
//! The session decodes a request, calls one method and encodes its answer. Methods may be called from several threads
//! at once. An answer is `Result<_, Errno>`; a method that is not overridden answers `ENOSYS`, which the kernel
//! remembers for most requests and does not send again.
//!
//! Node numbers ([`NodeId`]) name an object between kernel and daemon and are never shown to users;
//! [`Attributes::ino`] is the inode number that `stat` shows. The two are independent on purpose: an object that is
//! copied up keeps its inode number, and one lower file has a node in every branch.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::io::Errno;

/// A node number as the kernel knows it. 1 is the root of the mount.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct NodeId(pub u64);

/// The number of an open file or directory, chosen by the filesystem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Handle(pub u64);

/// How long the kernel may keep an answer. `FOREVER` until it is invalidated explicitly.
pub(crate) const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Who asks: file system uid and gid of the calling process, as seen in the daemon's user namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Effective (file system) user.
    pub(crate) uid: u32,
    /// Effective (file system) group.
    pub(crate) gid: u32,
}

/// A point in time: seconds since 1970 and nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Time {
    /// Seconds, may be negative.
    pub(crate) seconds: i64,
    /// 0 to 999 999 999.
    pub(crate) nanoseconds: u32,
}

/// What `stat` shows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    /// Shown inode number.
    pub(crate) ino: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// 512-byte blocks in use.
    pub(crate) blocks: u64,
    /// Last access.
    pub(crate) atime: Time,
    /// Last change of content.
    pub(crate) mtime: Time,
    /// Last change of the inode.
    pub(crate) ctime: Time,
    /// File type and permission bits, as in `st_mode`.
    pub(crate) mode: u32,
    /// Number of hard links.
    pub(crate) nlink: u32,
    /// Owner.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// Device number of a device node: `(major, minor)`.
    pub(crate) rdev: (u32, u32),
    /// Preferred I/O size.
    pub(crate) block_size: u32,
}

/// An answer that gives the kernel a node (LOOKUP, MKDIR, …): it holds one more reference until FORGET.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// The node; `None` is a negative entry: the name does not exist and the kernel may remember that.
    pub(crate) node: Option<NodeId>,
    /// Tells apart two lives of one node number.
    pub(crate) generation: u64,
    /// How long the name may be kept.
    pub(crate) entry_ttl: Duration,
    /// How long the attributes may be kept.
    pub(crate) attributes_ttl: Duration,
    /// Attributes; `None` only in a negative entry.
    pub(crate) attributes: Option<Attributes>,
}

/// How an open file is served.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Opened {
    /// Number for later requests.
    pub(crate) handle: Option<Handle>,
    /// Keep the page cache of an earlier open (`FOPEN_KEEP_CACHE`).
    pub(crate) keep_cache: bool,
    /// Bypass the page cache (`FOPEN_DIRECT_IO`).
    pub(crate) direct_io: bool,
    /// Read and write this file instead, without asking again (`FOPEN_PASSTHROUGH`).
    pub(crate) backing: Option<BackingId>,
}

/// Number of a file that the kernel reads and writes in our stead; of one mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BackingId(pub(crate) i32);

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changes {
    /// Permission bits.
    pub(crate) mode: Option<u32>,
    /// Owner.
    pub(crate) uid: Option<u32>,
    /// Group.
    pub(crate) gid: Option<u32>,
    /// Size in bytes.
    pub(crate) size: Option<u64>,
    /// Access time.
    pub(crate) atime: Option<SetTime>,
    /// Modification time.
    pub(crate) mtime: Option<SetTime>,
    /// The open file through which the change comes, if any.
    pub(crate) handle: Option<Handle>,
    /// Drop set-user-id, set-group-id and capabilities (`FATTR_KILL_SUIDGID`).
    pub(crate) kill_privileges: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SetTime {
    /// The current time.
    Now,
    /// A given time.
    At(Time),
}

/// What `statfs` shows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statfs {
    pub(crate) blocks: u64,
    pub(crate) blocks_free: u64,
    pub(crate) blocks_available: u64,
    pub(crate) files: u64,
    pub(crate) files_free: u64,
    pub(crate) block_size: u32,
    pub(crate) fragment_size: u32,
    pub(crate) name_max: u32,
}

/// Flags of an open or create request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenFlags {
    /// `O_*` flags as the caller gave them (without `O_CREAT`, `O_EXCL`, `O_NOCTTY` for OPEN).
    pub(crate) flags: u32,
    /// `O_TRUNC` must also drop set-id bits (`FUSE_OPEN_KILL_SUIDGID`).
    pub(crate) kill_privileges: bool,
}

/// Collects directory entries until the kernel's buffer is full.
pub(crate) trait DirectorySink {
    /// Adds a plain entry. `kind` is a `DT_*` value. Returns false when it did not fit: stop then.
    fn push(&mut self, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool;
    /// Adds an entry with attributes (READDIRPLUS); for `.` and `..` give an entry without a node. Returns false when
    /// it did not fit: the node's reference is then not taken by the kernel and must be given back.
    fn push_plus(&mut self, entry: &Entry, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool;
    /// True where room for a name of this length would be left, so that a costly look-up can be spared.
    fn has_room(&self, name: &OsStr) -> bool;
}

/// Shorthand for the answer of a request.
pub(crate) type Answer<T> = Result<T, Errno>;

/// What the kernel offers; known at INIT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// The kernel understands `FUSE_NOTIFY_INC_EPOCH`.
    pub(crate) epoch: bool,
    /// The kernel can read and write backing files (`FUSE_PASSTHROUGH`, Linux 6.9).
    pub(crate) passthrough: bool,
}

/// A filesystem, as the kernel asks for it: each method is the FUSE request of its name (fuse(4), linux/fuse.h).
#[expect(unused_variables, reason = "defaults ignore their arguments")]
pub(crate) trait Handler: Send + Sync + 'static {
    fn init(&self, capabilities: &Capabilities) {}
    fn destroy(&self) {}
    fn lookup(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<Entry> {
        Err(Errno::NOSYS)
    }
    /// Gives back `count` references.
    fn forget(&self, node: NodeId, count: u64) {}
    fn getattr(&self, node: NodeId, handle: Option<Handle>) -> Answer<(Attributes, Duration)> {
        Err(Errno::NOSYS)
    }
    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &Changes,
    ) -> Answer<(Attributes, Duration)> {
        Err(Errno::NOSYS)
    }
    fn readlink(&self, node: NodeId) -> Answer<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    /// `mode` has the file type; `umask` has not been applied (`FUSE_DONT_MASK`): the filesystem does, unless the
    /// parent has a default ACL.
    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: (u32, u32),
    ) -> Answer<Entry> {
        Err(Errno::NOSYS)
    }
    fn mkdir(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> Answer<Entry> {
        Err(Errno::NOSYS)
    }
    fn unlink(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn rmdir(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> Answer<Entry> {
        Err(Errno::NOSYS)
    }
    /// `flags`: `RENAME_NOREPLACE`, `RENAME_EXCHANGE`, `RENAME_WHITEOUT`.
    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn link(
        &self,
        caller: &Caller,
        node: NodeId,
        new_parent: NodeId,
        new_name: &OsStr,
    ) -> Answer<Entry> {
        Err(Errno::NOSYS)
    }
    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Answer<Opened> {
        Err(Errno::NOSYS)
    }
    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        Err(Errno::NOSYS)
    }
    /// `O_TMPFILE`.
    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        Err(Errno::NOSYS)
    }
    /// Fills `buffer` from `offset`; returns the bytes read, fewer only at the end of the file.
    fn read(&self, node: NodeId, handle: Handle, offset: u64, buffer: &mut [u8]) -> Answer<usize> {
        Err(Errno::NOSYS)
    }
    fn write(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        data: &[u8],
        kill_privileges: bool,
    ) -> Answer<usize> {
        Err(Errno::NOSYS)
    }
    /// One descriptor of the open file is closed.
    fn flush(&self, node: NodeId, handle: Handle) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    /// The last descriptor and mapping are gone. Nobody receives an error.
    fn release(&self, node: NodeId, handle: Handle) {}
    fn fsync(&self, node: NodeId, handle: Handle, data_only: bool) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn fallocate(
        &self,
        caller: &Caller,
        node: NodeId,
        handle: Handle,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    /// `SEEK_DATA` and `SEEK_HOLE` only.
    fn lseek(&self, node: NodeId, handle: Handle, offset: u64, whence: u32) -> Answer<u64> {
        Err(Errno::NOSYS)
    }
    fn copy_file_range(
        &self,
        caller: &Caller,
        from: (NodeId, Handle, u64),
        to: (NodeId, Handle, u64),
        length: u64,
        flags: u64,
    ) -> Answer<usize> {
        Err(Errno::NOSYS)
    }
    /// Entries after `offset` (0: from the start); `plus` asks for [`DirectorySink::push_plus`]. Directories are never
    /// opened: the kernel keeps a listing that was read to its end until it is told to forget it.
    fn readdir(
        &self,
        caller: &Caller,
        node: NodeId,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn fsyncdir(&self, node: NodeId, data_only: bool) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    /// The whole value; the session answers the size question and `ERANGE`.
    fn getxattr(&self, node: NodeId, name: &OsStr) -> Answer<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    fn setxattr(
        &self,
        caller: &Caller,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    /// Names separated and ended by NUL.
    fn listxattr(&self, node: NodeId) -> Answer<Vec<u8>> {
        Err(Errno::NOSYS)
    }
    fn removexattr(&self, caller: &Caller, node: NodeId, name: &OsStr) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    fn statfs(&self, node: NodeId) -> Answer<Statfs> {
        Err(Errno::NOSYS)
    }
    /// `command` is the ioctl's number; returns what it hands out, of the size that the number encodes.
    fn ioctl(&self, node: NodeId, command: u32) -> Answer<Vec<u8>> {
        Err(Errno::NOTTY)
    }
    /// Whether a WRITE or IOCTL of this node may wait for other requests: the session then answers it on a thread of
    /// its own, so that the others are never held up.
    fn waits_for_others(&self, node: NodeId) -> bool {
        false
    }
    fn syncfs(&self, node: NodeId) -> Answer<()> {
        Err(Errno::NOSYS)
    }
    /// A method has panicked. The session answers EIO and continues.
    fn panicked(&self) {}
}

/// Tells the kernel to forget what it has cached.
///
/// None of these may be called while a lock is held that a request needs: the kernel may be waiting for an answer
/// before it can take the invalidation.
pub(crate) trait Kernel: Send + Sync {
    /// Forgets attributes and pages of a node. `ENOENT` (the kernel does not know it) is success.
    fn invalidate_node(&self, node: NodeId) -> Answer<()>;
    /// Forgets one name in a directory. `ENOENT` is success.
    fn invalidate_entry(&self, parent: NodeId, name: &OsStr) -> Answer<()>;
    /// Lets one name in a directory be looked up again, and what it named be used no more if it is another then. Costs the
    /// same whatever is below it. Before Linux 6.2 as [`Self::invalidate_entry`].
    fn expire_entry(&self, parent: NodeId, name: &OsStr) -> Answer<()>;
    /// Makes every cached name be looked up again. `ENOSYS` where the kernel cannot.
    fn increment_epoch(&self) -> Answer<()>;
    /// Forgets the attributes of a node and keeps its pages. Waits for nothing.
    fn invalidate_attributes(&self, node: NodeId) -> Answer<()>;
    /// Gives the kernel the content of a node whose pages nobody can have locked: one that has never been open.
    fn store(&self, node: NodeId, content: &[u8]) -> Answer<()>;
    /// Registers a file as backing file. `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` where its file system is stacked too
    /// high. Needs no lock to be free.
    fn open_backing(&self, file: BorrowedFd<'_>) -> Answer<BackingId>;
    /// Ends that; files that are open go on.
    fn close_backing(&self, backing: BackingId);
    /// How many requests of each kind the kernel has sent so far.
    fn requests(&self) -> Vec<(&'static str, u64)>;
}
