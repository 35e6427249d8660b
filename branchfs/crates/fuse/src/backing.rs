//! The ioctls of `/dev/fuse` that register backing files. All `unsafe` code of the crate is in this file; its functions
//! are safe to call with any arguments of their types.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Registers `file` with the FUSE connection `device`. The kernel reads and writes its content directly.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ELOOP` if the filesystem of `file` is stacked too high.
pub(crate) fn open_backing(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<i32, Errno> {
    /// `struct fuse_backing_map`.
    #[repr(C)]
    struct BackingMap {
        fd: i32,
        flags: u32,
        padding: u64,
    }
    // _IOW(229, 1, struct fuse_backing_map)
    const BACKING_OPEN: libc::c_ulong = 0x4010_e501;
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the kernel reads one `fuse_backing_map`, which outlives the call, and keeps no pointer.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_OPEN as _, &raw const map) };
    if id > 0 { Ok(id) } else { Err(last_error()) }
}

/// Unregisters the backing file `id`. Files that were opened through it keep working.
pub(crate) fn close_backing(device: BorrowedFd<'_>, id: i32) -> Result<(), Errno> {
    // _IOW(229, 2, uint32_t)
    const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;
    // SAFETY: the kernel reads four bytes of `id`, which outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE as _, &raw const id) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
