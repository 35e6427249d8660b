//! Fault injection for tests: the file system calls of an operation, and of the threads that it starts, wait for an answer
//! (seccomp user notification), which lets them happen or fail.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

/// Calls that reach a file system.
const CALLS: &[libc::c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_getdents64,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmodat,
    libc::SYS_fchmod,
    libc::SYS_fchownat,
    libc::SYS_fchown,
    libc::SYS_utimensat,
    libc::SYS_lgetxattr,
    libc::SYS_llistxattr,
    libc::SYS_lsetxattr,
    libc::SYS_lremovexattr,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_copy_file_range,
    libc::SYS_statfs,
    libc::SYS_flock,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_newfstatat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
];

/// Records the time from which on calls may fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    has_begun: AtomicBool,
}

impl Faults {
    /// From here on calls may fail.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    /// From here on all calls happen.
    pub(crate) fn end(&self) {
        self.has_begun.store(false, Ordering::Release);
    }
}

/// Runs an operation in a separate thread. `decide` gets the number of each call, and returns the error with which it
/// fails. Returns when all threads that the operation started have ended.
pub(crate) fn with_faults<T: Send>(
    mut decide: impl FnMut(libc::c_long) -> Option<i32>,
    operation: impl FnOnce(&Faults) -> T + Send,
) -> T {
    let (send, receive) = mpsc::channel();
    let faults = Faults::default();
    thread::scope(|scope| {
        let running = scope.spawn(|| {
            send.send(crate::sys::intercept_calls(CALLS).expect("seccomp can be used")).unwrap();
            operation(&faults)
        });
        let listener = receive.recv().unwrap();
        let decide =
            |call| faults.has_begun.load(Ordering::Acquire).then(|| decide(call)).flatten();
        let mut decide = decide;
        while crate::sys::answer_call(listener.as_fd(), &mut decide) {}
        running.join().unwrap()
    })
}
