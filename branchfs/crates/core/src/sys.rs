//! The system calls that no safe library offers. All `unsafe` code of the crate is in this file; every function here
//! is safe to call with any arguments of its types.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// A private, read-only mount of the directory `directory`, reachable only through the returned descriptor. It does not
/// contain mounts below the directory. Opening for writing beneath it fails with `EROFS`.
///
/// Fails with `EPERM` without the privilege to mount, and with `ENOSYS` before Linux 5.12.
pub(crate) fn read_only_clone(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let clone = open_tree(directory, c"", flags)?;
    set_mount_read_only(clone.as_fd(), true)?;
    Ok(clone)
}

/// In the mount with the root `mount`, no path leads through a symbolic link any more (`ELOOP`), nor into a mount that is
/// made later. `mount` must be a clone that is attached nowhere ([`read_only_clone`]).
///
/// Fails with `EINVAL` before Linux 5.14.
pub(crate) fn forbid_symlinks(mount: BorrowedFd<'_>) -> Result<(), Errno> {
    const MOUNT_ATTR_NOSYMFOLLOW: u64 = 0x0020_0000;
    let attributes = MountAttributes {
        attr_set: MOUNT_ATTR_NOSYMFOLLOW,
        propagation: libc::MS_PRIVATE,
        ..MountAttributes::default()
    };
    set_mount_attributes(mount, &attributes)
}

/// `struct mount_attr` of `mount_setattr(2)`.
#[repr(C)]
#[derive(Default)]
struct MountAttributes {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Makes the mount with the root `mount` read-only or writable. Other mounts of its file system do not change.
pub(crate) fn set_mount_read_only(mount: BorrowedFd<'_>, is_read_only: bool) -> Result<(), Errno> {
    const MOUNT_ATTR_RDONLY: u64 = 1;
    let (attr_set, attr_clr) =
        if is_read_only { (MOUNT_ATTR_RDONLY, 0) } else { (0, MOUNT_ATTR_RDONLY) };
    set_mount_attributes(mount, &MountAttributes { attr_set, attr_clr, ..Default::default() })
}

fn set_mount_attributes(mount: BorrowedFd<'_>, attributes: &MountAttributes) -> Result<(), Errno> {
    // SAFETY: the path is a NUL-terminated constant and the kernel reads exactly the size given of `attributes`,
    // both of which outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attributes),
            size_of::<MountAttributes>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether a process has the inode of `file` open for writing, or mapped writable through a descriptor that is closed
/// by now; `None` if that cannot be determined. `file` itself must be read-only. `owner` is the file's owner.
///
/// The kernel grants a read lease only if no process can write. Without `CAP_LEASE` only the owner may request one.
pub fn is_being_written(file: BorrowedFd<'_>, owner: u32) -> Option<bool> {
    let ask = || {
        // SAFETY: F_SETLEASE takes a number.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
        if result == 0 {
            // SAFETY: as above. The lease goes, so that no later open has to break it.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
            return Ok(false);
        }
        match last_error() {
            Errno::AGAIN => Ok(true),
            error => Err(error),
        }
    };
    match ask() {
        Err(Errno::ACCESS) => {
            // SAFETY: the raw call changes this thread's file system user alone, and no memory.
            let before = unsafe { libc::syscall(libc::SYS_setfsuid, owner) };
            let answer = ask();
            // SAFETY: as above.
            unsafe { libc::syscall(libc::SYS_setfsuid, before) };
            answer.ok()
        }
        answer => answer.ok(),
    }
}

/// Opens the object that the handle `bytes` of a file system's own type `kind` names, with `O_PATH`. `on` is an open
/// directory of that file system.
///
/// Fails with `ESTALE` if the object is gone, and with `EPERM` without `CAP_DAC_READ_SEARCH`.
pub(crate) fn open_by_handle(on: impl AsFd, kind: i32, bytes: &[u8]) -> Result<OwnedFd, Errno> {
    /// `struct file_handle` of `open_by_handle_at(2)`, with room for the longest handle there is.
    #[repr(C)]
    struct FileHandle {
        handle_bytes: u32,
        handle_type: i32,
        f_handle: [u8; libc::MAX_HANDLE_SZ as usize],
    }
    let mut f_handle = [0; libc::MAX_HANDLE_SZ as usize];
    f_handle.get_mut(..bytes.len()).ok_or(Errno::INVAL)?.copy_from_slice(bytes);
    let handle_bytes = u32::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    let mut handle = FileHandle { handle_bytes, handle_type: kind, f_handle };
    // SAFETY: the kernel reads `handle_bytes` bytes of `f_handle`, which has at least as many, and `handle` outlives the
    // call. A descriptor that it returns is owned by nobody else.
    unsafe {
        let opened = libc::syscall(
            libc::SYS_open_by_handle_at,
            on.as_fd().as_raw_fd(),
            &raw mut handle,
            libc::O_PATH | libc::O_CLOEXEC,
        );
        let opened = i32::try_from(opened).map_err(|_| Errno::IO)?;
        if opened < 0 { Err(last_error()) } else { Ok(OwnedFd::from_raw_fd(opened)) }
    }
}

/// Sets the slice of the calling thread, 0 for the usual one, and how nice it is, if it is a thread as most are: where the
/// user asked for another kind of scheduling, that stays.
pub(crate) fn schedule(nice: Option<i32>, slice_nanoseconds: u64) -> Result<(), Errno> {
    let size = size_of::<libc::sched_attr>();
    // SAFETY: a `sched_attr` is numbers alone.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes of `attributes`, which outlives the call.
    let asked = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if asked != 0 {
        return Err(last_error());
    }
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attributes.sched_nice =
        nice.map_or(attributes.sched_nice, |nice| nice.max(attributes.sched_nice));
    attributes.sched_runtime = slice_nanoseconds;
    // SAFETY: the kernel reads `attributes`, which says its size itself and outlives the call.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if set == 0 { Ok(()) } else { Err(last_error()) }
}

/// The error of the libc call that just failed on this thread.
fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Makes the listed system calls of this thread, and of the threads that it starts, wait for an answer through the
/// returned descriptor (seccomp user notification). Cannot be undone while the threads live.
#[cfg(test)]
pub(crate) fn intercept_calls(calls: &[libc::c_long]) -> io::Result<OwnedFd> {
    let number = |number: libc::c_long| u32::try_from(number).map_err(io::Error::other);
    let statement = |code: u32, k: u32| {
        let code = u16::try_from(code).map_err(io::Error::other)?;
        io::Result::Ok(libc::sock_filter { code, jt: 0, jf: 0, k })
    };
    let load_number = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)?;
    let mut program = vec![load_number];
    for call in calls {
        let jump = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number(*call)?)?;
        program.push(libc::sock_filter { jf: 1, ..jump });
        program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF)?);
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW)?);
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: prctl takes numbers here; the kernel copies the program, which outlives the call. The descriptor that it
    // returns is owned by nobody else.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        let listener = libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const filter,
        );
        match i32::try_from(listener) {
            Ok(listener) if listener >= 0 => Ok(OwnedFd::from_raw_fd(listener)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Answers one call that [`intercept_calls`] holds: `decide` takes its number, and returns the error with which it fails,
/// or `None` to let it happen. Returns false when all threads concerned have ended.
#[cfg(test)]
pub(crate) fn answer_call(
    listener: BorrowedFd<'_>,
    decide: impl FnOnce(libc::c_long) -> Option<i32>,
) -> bool {
    const RECEIVE: libc::c_ulong = 0xc050_2100; // SECCOMP_IOCTL_NOTIF_RECV
    const CONTINUE: u32 = 1; // SECCOMP_USER_NOTIF_FLAG_CONTINUE
    const SEND: libc::c_ulong = 0xc018_2101; // SECCOMP_IOCTL_NOTIF_SEND
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`, one `seccomp_notif` (zeros, as it wants it) and one
    // `seccomp_notif_resp`, which outlive the calls.
    unsafe {
        libc::poll(&raw mut poll, 1, -1);
        if poll.revents & libc::POLLIN == 0 {
            return poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) == 0;
        }
        let mut call: libc::seccomp_notif = std::mem::zeroed();
        if libc::ioctl(listener.as_raw_fd(), RECEIVE as _, &raw mut call) != 0 {
            return true; // the thread ended meanwhile
        }
        let error = decide(libc::c_long::from(call.data.nr));
        let answer = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: error.map_or(0, |error| -error),
            flags: if error.is_none() { CONTINUE } else { 0 },
        };
        libc::ioctl(listener.as_raw_fd(), SEND as _, &raw const answer);
    }
    true
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

    #[test]
    fn a_writer_is_noticed_for_as_long_as_it_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "content").unwrap();
        std::os::unix::fs::chown(&path, Some(1000), None).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        assert_eq!(is_being_written(file.as_fd(), 1000), Some(false));
        let writer = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        assert_eq!(is_being_written(file.as_fd(), 1000), Some(true));
        drop(writer);
        assert_eq!(is_being_written(file.as_fd(), 1000), Some(false));
    }

    /// The calling thread's scheduling: policy and niceness.
    fn scheduling() -> (u32, i32) {
        let size = size_of::<libc::sched_attr>();
        // SAFETY: as in `schedule`.
        unsafe {
            let mut attributes: libc::sched_attr = std::mem::zeroed();
            assert_eq!(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0), 0);
            (attributes.sched_policy, attributes.sched_nice)
        }
    }

    #[test]
    fn a_thread_becomes_nicer_and_never_less_so() {
        let thread = std::thread::spawn(|| {
            let before = scheduling();
            schedule(None, 100_000).unwrap();
            assert_eq!(scheduling(), before);
            let (policy, nice) = before;
            for (asked, had) in [(nice + 3, nice + 3), (nice, nice + 3), (nice + 4, nice + 4)] {
                schedule(Some(asked), 100_000).unwrap();
                assert_eq!(scheduling(), (policy, had));
            }
        });
        thread.join().unwrap();
    }

    #[test]
    fn scheduling_of_another_kind_stays() {
        let thread = std::thread::spawn(|| {
            let (kind, parameters) = (libc::SCHED_BATCH, libc::sched_param { sched_priority: 0 });
            // SAFETY: the kernel reads `parameters`, which outlives the call.
            assert_eq!(unsafe { libc::sched_setscheduler(0, kind, &raw const parameters) }, 0);
            let before = scheduling();
            schedule(Some(before.1 + 3), 100_000).unwrap();
            assert_eq!(scheduling(), before);
        });
        thread.join().unwrap();
    }
}
