//! The vocabulary of file systems that views and the FUSE filesystem share: attributes as `stat` shows them, and files that
//! the kernel reads and writes directly.

use std::os::fd::BorrowedFd;

use rustix::fs::{Statx, StatxTimestamp};

use crate::rooted_dir::Result;

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Time {
    /// Seconds since 1970; may be negative.
    pub seconds: i64,
    /// 0 to 999 999 999.
    pub nanoseconds: u32,
}

impl Time {
    /// Nanoseconds since 1970.
    pub(crate) fn as_nanoseconds(self) -> i64 {
        self.seconds.saturating_mul(1_000_000_000).saturating_add(self.nanoseconds.into())
    }
}

impl From<StatxTimestamp> for Time {
    fn from(time: StatxTimestamp) -> Self {
        Self { seconds: time.tv_sec, nanoseconds: time.tv_nsec }
    }
}

/// The attributes of an object, as `stat` shows them.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// Inode number.
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

impl Attributes {
    /// User id and group id.
    pub(crate) fn owner(&self) -> (u32, u32) {
        (self.uid, self.gid)
    }
}

impl From<&Statx> for Attributes {
    fn from(stat: &Statx) -> Self {
        Self {
            ino: stat.stx_ino,
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: stat.stx_atime.into(),
            mtime: stat.stx_mtime.into(),
            ctime: stat.stx_ctime.into(),
            mode: u32::from(stat.stx_mode),
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
            block_size: stat.stx_blksize,
        }
    }
}

/// The attributes that a request changes. `None` leaves an attribute unchanged.
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
    /// The handle of the open file through which the attributes are changed, if any.
    pub handle: Option<u64>,
    /// Drop set-user-id, set-group-id and capabilities.
    pub kill_privileges: bool,
}

/// A time that [`SetAttr`] sets.
#[derive(Clone, Copy, Debug)]
pub enum SetTime {
    /// The current time.
    Now,
    /// A given time.
    At(Time),
}

/// A file that is registered with [`BackingFiles`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingId(pub i32);

/// Registers backing files: files that the kernel reads and writes directly (passthrough).
pub trait BackingFiles: Send + Sync {
    /// Registers a file.
    ///
    /// # Errors
    /// The error of the kernel.
    fn open_backing(&self, file: BorrowedFd<'_>) -> Result<BackingId>;

    /// Ends the registration. Files that are open keep it.
    fn close_backing(&self, backing: BackingId);
}
