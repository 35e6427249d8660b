//! Keeps processes from beginning to write in a branch while a commit or a fork waits for files that are open.
//!
//! The read-only mounts of [`super::covers`] stop a program whose paths lead through them. They do not stop one that
//! makes new files by paths relative to its working directory, or in a mount namespace of its own. Such programs are
//! traced (`ptrace`), with all their threads and children, and each thread is held before its next system call that would
//! write by a path. Files that are open are closed as usual meanwhile, and so the instant comes in which none is open.
//! Then, and when the daemon dies, the kernel lets all threads continue with that call.
//!
//! The threads are not changed. Some system calls that wait end with EINTR, as when a process is stopped and continued.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::proc_fds;
use crate::sys::{self, TraceStop};

/// The pause between two searches for processes that use the branch.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// The pause if no thread has stopped.
const IDLE_PAUSE: Duration = Duration::from_micros(30);

/// The largest number of threads that are stopped for a commit. With more, the commit is refused unless the kernel
/// makes the mount read-only without that.
const THREADS_MAX: usize = 4096;

/// Holds the writers of a branch as long as it exists.
#[derive(Debug)]
pub(super) struct HeldWriters {
    has_ended: Arc<AtomicBool>,
    has_held_more: Arc<AtomicBool>,
    /// All traced threads go on when it ends.
    tracer: Option<JoinHandle<()>>,
}

impl HeldWriters {
    /// Begins to hold the writers of the branch whose mount has the root `root`.
    pub(super) fn hold(root: BorrowedFd<'_>) -> std::io::Result<Self> {
        let root = rustix::io::dup(root)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let has_held_more = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&has_ended);
        let tracer = Tracer {
            root,
            traced: HashSet::new(),
            namespaces: HashSet::new(),
            has_held_more: Arc::clone(&has_held_more),
        };
        let run = move || tracer.run(&end);
        let tracer = thread::Builder::new().name("hold-writers".to_owned()).spawn(run)?;
        Ok(Self { has_ended, has_held_more, tracer: Some(tracer) })
    }

    /// Whether a thread was found or held since the last call.
    pub(super) fn has_held_more(&self) -> bool {
        self.has_held_more.swap(false, Ordering::Relaxed)
    }
}

impl Drop for HeldWriters {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        let ended = self.tracer.take().map(JoinHandle::join);
        if ended.is_some_and(|ended| ended.is_err()) {
            tracing::error!("the thread that holds the writers of a branch has panicked");
        }
    }
}

struct Tracer {
    root: OwnedFd,
    traced: HashSet<i32>,
    /// Other mount namespaces in which a process uses the branch.
    namespaces: HashSet<PathBuf>,
    has_held_more: Arc<AtomicBool>,
}

impl Tracer {
    fn run(mut self, has_ended: &AtomicBool) {
        let mut searched: Option<Instant> = None;
        while !has_ended.load(Ordering::Acquire) {
            if searched.is_none_or(|searched| searched.elapsed() >= SEARCH_PAUSE) {
                self.trace_users();
                searched = Some(Instant::now());
            }
            match sys::next_trace_stop() {
                Some((thread, stop)) => self.handle(thread, stop),
                None => thread::sleep(IDLE_PAUSE),
            }
        }
    }

    fn trace_users(&mut self) {
        for thread in proc_fds::threads_inside(self.root.as_fd(), &mut self.namespaces) {
            if self.traced.len() >= THREADS_MAX {
                return;
            }
            // It may have ended, or another program traces it.
            if !self.traced.contains(&thread) && sys::trace(thread).is_ok() {
                self.traced.insert(thread);
                self.has_held_more.store(true, Ordering::Relaxed);
            }
        }
    }

    fn handle(&mut self, thread: i32, stop: TraceStop) {
        self.traced.insert(thread); // the kernel traces what it starts
        let resumed = match stop {
            TraceStop::Entry(call, arguments) if writes_by_path(call, arguments) => {
                self.has_held_more.store(true, Ordering::Relaxed);
                return;
            }
            TraceStop::Entry(..) => sys::resume_traced(thread, 0),
            TraceStop::Other(signal) => sys::resume_traced(thread, signal),
            TraceStop::GroupStop => sys::listen_to_traced(thread),
            TraceStop::End => {
                self.traced.remove(&thread);
                return;
            }
        };
        if resumed.is_err() {
            self.traced.remove(&thread); // it was killed
        }
    }
}

/// Whether a system call may open a file for writing, or changes something, that it finds by a path.
fn writes_by_path(call: i64, arguments: [u64; 3]) -> bool {
    const WRITING: u64 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u64;
    /// `fchmodat2`, which the C library's bindings may lack.
    const FCHMODAT2: libc::c_long = 452;
    const CALLS: [libc::c_long; 18] = [
        libc::SYS_openat2, // its flags are in the memory of the process
        libc::SYS_open_by_handle_at,
        libc::SYS_mkdirat,
        libc::SYS_mknodat,
        libc::SYS_unlinkat,
        libc::SYS_symlinkat,
        libc::SYS_linkat,
        libc::SYS_renameat2,
        libc::SYS_truncate,
        libc::SYS_fchmodat,
        FCHMODAT2,
        libc::SYS_fchownat,
        libc::SYS_utimensat,
        libc::SYS_setxattr,
        libc::SYS_lsetxattr,
        libc::SYS_removexattr,
        libc::SYS_lremovexattr,
        libc::SYS_renameat,
    ];
    match libc::c_long::try_from(call).unwrap_or(-1) {
        libc::SYS_openat => arguments[2] & WRITING != 0,
        call if CALLS.contains(&call) => true,
        call => writes_by_former_call(call, arguments, WRITING),
    }
}

/// The calls without a directory descriptor, which later processors lack.
#[cfg(target_arch = "x86_64")]
fn writes_by_former_call(call: libc::c_long, arguments: [u64; 3], writing: u64) -> bool {
    const CALLS: [libc::c_long; 14] = [
        libc::SYS_creat,
        libc::SYS_mkdir,
        libc::SYS_mknod,
        libc::SYS_unlink,
        libc::SYS_rmdir,
        libc::SYS_symlink,
        libc::SYS_link,
        libc::SYS_rename,
        libc::SYS_chmod,
        libc::SYS_chown,
        libc::SYS_lchown,
        libc::SYS_utime,
        libc::SYS_utimes,
        libc::SYS_futimesat,
    ];
    (call == libc::SYS_open && arguments[1] & writing != 0) || CALLS.contains(&call)
}

#[cfg(not(target_arch = "x86_64"))]
fn writes_by_former_call(_call: libc::c_long, _arguments: [u64; 3], _writing: u64) -> bool {
    false
}
