//! The system calls that no safe library offers and that only the daemon needs. All `unsafe` code of the crate is in this
//! file; every function here is safe to call with any arguments of its types.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

/// The supplementary groups of the process that connected to a Unix socket.
pub(crate) fn peer_groups(socket: &UnixStream) -> io::Result<Vec<u32>> {
    const SO_PEERGROUPS: libc::c_int = 59; // asm-generic/socket.h; the C library's binding lacks it
    // Linux allows a process 65536 groups; most have fewer than this.
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(groups.as_slice()))
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: the kernel writes at most `bytes` bytes, the size of the buffer, which outlives the call; every bit
        // pattern is a group id.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        // Also where the buffer is too small the kernel says how much there is.
        let count = bytes as usize / size_of::<libc::gid_t>();
        let error = io::Error::last_os_error();
        if result != 0 && !(error.raw_os_error() == Some(libc::ERANGE) && count > groups.len()) {
            return Err(error);
        }
        groups.resize(count, 0);
        if result == 0 {
            return Ok(groups);
        }
    }
}

/// Closes all descriptors but the standard ones. Only for a process that has opened nothing itself.
pub(crate) fn close_inherited() {
    // SAFETY: close_range takes numbers. Nothing in this process owns a descriptor above the standard ones.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
}

/// Where the line about a fatal signal goes.
static FATAL_SIGNAL_LOG: AtomicI32 = AtomicI32::new(libc::STDERR_FILENO);

/// Writes a line to `file` when a fatal signal ends the process.
pub(crate) fn set_fatal_signal_log(file: std::os::fd::RawFd) {
    FATAL_SIGNAL_LOG.store(file, Ordering::Relaxed);
}

/// The signals that end a process because of a fault in it, with the line that is logged.
const FATAL_SIGNALS: [(libc::c_int, &str); 5] = [
    (libc::SIGABRT, "FATAL: SIGABRT ends the daemon\n"),
    (libc::SIGBUS, "FATAL: SIGBUS ends the daemon\n"),
    (libc::SIGFPE, "FATAL: SIGFPE ends the daemon\n"),
    (libc::SIGILL, "FATAL: SIGILL ends the daemon\n"),
    (libc::SIGSEGV, "FATAL: SIGSEGV ends the daemon\n"),
];

/// What these signals did before, in the same order: the Rust runtime reports stack overflows on two of them.
static FORMER_ACTIONS: OnceLock<Vec<libc::sigaction>> = OnceLock::new();

/// Logs a line when one of these signals comes; then it does what it did before.
pub(crate) fn log_fatal_signals() {
    let former = FATAL_SIGNALS.iter().map(|(signal, _)| {
        // SAFETY: all zeros is a valid `sigaction`; the kernel writes it, and reads nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(*signal, std::ptr::null(), &raw mut action);
            action
        }
    });
    if FORMER_ACTIONS.set(former.collect()).is_err() {
        return;
    }
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = log_fatal;
    for (signal, _) in FATAL_SIGNALS {
        // SAFETY: the handler calls async-signal-safe functions alone, and runs on the stack that the runtime gives each
        // thread for signals.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

extern "C" fn log_fatal(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    let Some(known) = FATAL_SIGNALS.iter().position(|(number, _)| *number == signal) else {
        return;
    };
    let line = FATAL_SIGNALS[known].1;
    // SAFETY: write, sigaction and raise are async-signal-safe, and so is reading a `OnceLock`. The kernel hands a valid
    // `siginfo_t` to a handler with SA_SIGINFO.
    unsafe {
        libc::write(FATAL_SIGNAL_LOG.load(Ordering::Relaxed), line.as_ptr().cast(), line.len());
        let is_fault = (*info).si_code > 0;
        match FORMER_ACTIONS.get() {
            // The faulting instruction runs again when this returns, and the former handler sees it.
            Some(former) if is_fault => {
                libc::sigaction(signal, &raw const former[known], std::ptr::null_mut());
            }
            // A process sent it, or `abort`: it is delivered again when this returns.
            _ => {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
}

/// What a traced thread has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TraceStop {
    /// It is about to make this system call, by its number and the first three arguments.
    Entry(i64, [u64; 3]),
    /// A signal stops its whole process.
    GroupStop,
    /// Anything else; it continues with this signal, or 0.
    Other(i32),
    /// The thread has ended.
    End,
}

const PTRACE_SYSCALL: libc::c_long = 24;
const PTRACE_SEIZE: libc::c_long = 0x4206;
const PTRACE_INTERRUPT: libc::c_long = 0x4207;
const PTRACE_LISTEN: libc::c_long = 0x4208;
const PTRACE_GET_SYSCALL_INFO: libc::c_long = 0x420e;

fn ptrace(request: libc::c_long, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests of this file take numbers, but for PTRACE_GET_SYSCALL_INFO, whose caller gives size and address of
    // a buffer that outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, thread, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Traces a thread, and the threads and processes that it starts, for as long as the calling thread lives: when that
/// ends, however it does, the kernel lets all go on. The thread stops at its next system call.
pub(crate) fn trace(thread: i32) -> io::Result<()> {
    // TRACESYSGOOD, TRACEFORK, TRACEVFORK and TRACECLONE: of the first, a stop at a system call is never taken for a signal.
    const OPTIONS: usize = 1 | 1 << 1 | 1 << 2 | 1 << 3;
    ptrace(PTRACE_SEIZE, thread, 0, OPTIONS)?;
    ptrace(PTRACE_INTERRUPT, thread, 0, 0)
}

/// Lets a traced thread run to its next stop.
pub(crate) fn resume_traced(thread: i32, signal: i32) -> io::Result<()> {
    ptrace(PTRACE_SYSCALL, thread, 0, usize::try_from(signal).unwrap_or(0))
}

/// Leaves a traced thread in the stop of its whole process.
pub(crate) fn listen_to_traced(thread: i32) -> io::Result<()> {
    ptrace(PTRACE_LISTEN, thread, 0, 0)
}

/// The next stop of a thread that the calling thread traces, if there is one now.
pub(crate) fn next_trace_stop() -> Option<(i32, TraceStop)> {
    const EVENT_STOP: i32 = 128;
    const AT_SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    // SAFETY: the kernel writes the status, which outlives the call. Without WNOTHREAD it might be that of a child that
    // another thread waits for.
    let thread = unsafe { libc::waitpid(-1, &raw mut status, flags) };
    if thread <= 0 {
        return None;
    }
    if !libc::WIFSTOPPED(status) {
        return Some((thread, TraceStop::End));
    }
    let stop = match (status >> 16, libc::WSTOPSIG(status)) {
        (EVENT_STOP, libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) => {
            TraceStop::GroupStop
        }
        (0, AT_SYSTEM_CALL) => entered_call(thread).unwrap_or(TraceStop::Other(0)),
        (0, signal) => TraceStop::Other(signal),
        _ => TraceStop::Other(0),
    };
    Some((thread, stop))
}

/// The system call that a thread stops before; `None` after one.
fn entered_call(thread: i32) -> Option<TraceStop> {
    const ENTRY: u8 = 1;
    // `struct ptrace_syscall_info`: `op` is the first byte, the number of the call follows after 24 bytes, then six arguments.
    let mut info = [0_u64; 16];
    ptrace(PTRACE_GET_SYSCALL_INFO, thread, size_of_val(&info), info.as_mut_ptr() as usize).ok()?;
    let number = i64::try_from(info[3]).ok()?;
    (info[0].to_ne_bytes()[0] == ENTRY)
        .then_some(TraceStop::Entry(number, [info[4], info[5], info[6]]))
}
