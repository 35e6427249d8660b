//! The system calls that no safe library offers. All `unsafe` code of the crate is in this file; every function here
//! is safe to call with any arguments of its types.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// A private, read-only mount of the directory `directory`, reachable through the returned descriptor alone. What is
/// mounted below the directory is not in it. Whatever is opened beneath it cannot be written: `EROFS`.
///
/// Fails with `EPERM` without the privilege to mount, and with `ENOSYS` before Linux 5.12.
pub(crate) fn read_only_clone(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let clone = open_tree(directory, c"", flags)?;
    set_read_only(clone.as_fd())?;
    Ok(clone)
}

/// `struct mount_attr` of `mount_setattr(2)`.
#[repr(C)]
struct MountAttributes {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Makes the mount read-only whose root `mount` is.
fn set_read_only(mount: BorrowedFd<'_>) -> Result<(), Errno> {
    const MOUNT_ATTR_RDONLY: u64 = 1;
    let attributes =
        MountAttributes { attr_set: MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the path is a NUL-terminated constant and the kernel reads exactly the size given of `attributes`,
    // both of which outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// The error of the libc call that just failed on this thread.
fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, OFlags, openat};

    #[test]
    fn a_read_only_clone_can_be_read_but_not_written() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "content").unwrap();
        let open = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let original = openat(CWD, directory.path(), open, Mode::empty()).unwrap();
        let clone = read_only_clone(original.as_fd()).unwrap();

        openat(&clone, "file", OFlags::RDONLY, Mode::empty()).unwrap();
        let write = |name: &str, flags| openat(&clone, name, flags, Mode::RWXU).unwrap_err();
        assert_eq!(write("file", OFlags::WRONLY), Errno::ROFS);
        assert_eq!(write("new", OFlags::WRONLY | OFlags::CREATE), Errno::ROFS);
        // The mount of the original is untouched.
        openat(&original, "file", OFlags::WRONLY, Mode::empty()).unwrap();
    }
}
