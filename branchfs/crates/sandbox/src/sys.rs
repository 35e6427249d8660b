//! The system calls that rustix does not offer. All `unsafe` code of the crate is in this file; every function here is
//! safe to call with any arguments of its types, in a process that has one thread.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_int};
use std::mem::{MaybeUninit, zeroed};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::io::Errno;

type Result<T> = std::result::Result<T, Errno>;

/// Signals of the C library, which it neither reports nor lets anybody set.
const SIGNALS_MAX: c_int = 64;

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn checked(result: i64) -> Result<i64> {
    if result < 0 { Err(last_error()) } else { Ok(result) }
}

/// Forks, into new namespaces if `flags` has `CLONE_NEW*`; returns 0 in the child.
pub(crate) fn clone(flags: c_int) -> Result<i32> {
    let flags = i64::from(flags | libc::SIGCHLD);
    // SAFETY: without a stack and CLONE_VM the child is a copy of this process, as after fork(2). It has one thread,
    // so no lock is held by a thread that the child lacks.
    let pid = checked(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })?;
    Ok(i32::try_from(pid).expect("a process id has 32 bits"))
}

/// Ends this process without running its exit handlers: those belong to the process it was forked from.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: _exit(2) takes any number.
    unsafe { libc::_exit(code) }
}

/// Gives this process new namespaces.
pub(crate) fn unshare(flags: c_int) -> Result<()> {
    // SAFETY: no flag given here takes anything from other threads: there are none.
    checked(unsafe { libc::unshare(flags) }.into()).map(drop)
}

/// Executes a program. Returns only if that fails.
pub(crate) fn execute(path: &CStr, argv: &[CString], environment: &[CString]) -> Errno {
    let pointers = |texts: &[CString]| {
        texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
    };
    let (argv, environment) = (pointers(argv), pointers(environment));
    // SAFETY: both arrays end with a null pointer, and they point to NUL-terminated texts that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
    last_error()
}

/// Takes over an inherited descriptor: it is closed with the value, and not inherited any further.
pub(crate) fn inherited(number: RawFd) -> Result<OwnedFd> {
    // SAFETY: fcntl(2) fails for a number that is not open.
    checked(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) }.into())?;
    // SAFETY: it is open, and the request names each descriptor once, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Gives an open file the number `to`, which is inherited by programs.
pub(crate) fn place(file: RawFd, to: RawFd) -> Result<()> {
    // SAFETY: the caller gives numbers whose files no value of this process uses any more.
    checked(unsafe { libc::dup2(file, to) }.into()).map(drop)
}

/// Closes all descriptors but these.
pub(crate) fn close_all_but(wanted: impl IntoIterator<Item = RawFd>) {
    let mut wanted: Vec<_> = wanted.into_iter().filter_map(|fd| u32::try_from(fd).ok()).collect();
    wanted.sort_unstable();
    let mut next = 0;
    for kept in wanted.into_iter().map(Some).chain([None]) {
        let last = kept.map_or(u32::MAX, |kept| kept.saturating_sub(1));
        if kept != Some(0) && next <= last {
            // SAFETY: the caller keeps every descriptor that a value of this process still uses.
            unsafe { libc::syscall(libc::SYS_close_range, next, last, 0) };
        }
        next = kept.unwrap_or(u32::MAX).saturating_add(1).max(next);
    }
}

/// Ignores these signals. Programs that this process executes ignore them, too.
pub(crate) fn ignore_signals(numbers: &[c_int]) {
    for &number in numbers {
        set_action(number, libc::SIG_IGN);
    }
}

/// Treats all signals in the default way but those to be ignored, and blocks none.
pub(crate) fn reset_signals(ignored: &[c_int]) {
    for number in 1..=SIGNALS_MAX {
        let action = if ignored.contains(&number) { libc::SIG_IGN } else { libc::SIG_DFL };
        set_action(number, action);
    }
    block_signals(&[]);
}

fn set_action(number: c_int, action: libc::sighandler_t) {
    // SAFETY: an action is plain data; no handler is installed. It fails for signals that cannot be set.
    unsafe {
        let mut set: libc::sigaction = zeroed();
        set.sa_sigaction = action;
        libc::sigaction(number, &raw const set, ptr::null_mut());
    }
}

fn signal_set(numbers: &[c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set; sigaddset refuses a number that is none.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &number in numbers {
            libc::sigaddset(set.as_mut_ptr(), number);
        }
        set.assume_init()
    }
}

/// Blocks these signals, and no other.
pub(crate) fn block_signals(numbers: &[c_int]) {
    let set = signal_set(numbers);
    // SAFETY: the set is initialized and outlives the call.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut()) };
}

/// Blocks these signals, and returns a descriptor to read them from.
pub(crate) fn signal_descriptor(numbers: &[c_int]) -> Result<OwnedFd> {
    block_signals(numbers);
    let set = signal_set(numbers);
    // SAFETY: the set is initialized and outlives the call.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    checked(fd.into())?;
    // SAFETY: it was just opened, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the next signal of a `signal_descriptor`, without waiting.
pub(crate) fn next_signal(signals: &OwnedFd) -> Option<c_int> {
    let mut signal = MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: at most `size` bytes are written.
    let taken = unsafe { libc::read(signals.as_raw_fd(), signal.as_mut_ptr().cast(), size) };
    if usize::try_from(taken) != Ok(size) {
        return None;
    }
    // SAFETY: the kernel has written all of it.
    let number = unsafe { signal.assume_init() }.ssi_signo;
    c_int::try_from(number).ok()
}

/// Sends a signal to one process, or with -1 to all that can be signalled but this one.
pub(crate) fn kill(pid: i32, signal: c_int) -> Result<()> {
    // SAFETY: kill(2) takes any numbers.
    checked(unsafe { libc::kill(pid, signal) }.into()).map(drop)
}

/// CPU seconds of the children that were waited for, and the most memory in bytes that one of them had.
pub(crate) fn children_usage() -> (f64, i64) {
    // SAFETY: a struct of numbers, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    #[expect(clippy::cast_precision_loss, reason = "seconds of a process are far below 2^52")]
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_maxrss.saturating_mul(1024))
}

/// Leaves the keys of the session behind.
pub(crate) fn join_new_keyring() -> Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
    let name: *const libc::c_char = ptr::null();
    // SAFETY: without a name a new keyring is made; nothing is read.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, name) };
    checked(result).map(drop)
}

/// Brings the loopback interface of this network namespace up.
pub(crate) fn raise_loopback() -> Result<()> {
    let handle = UdpSocket::bind("0.0.0.0:0").map_err(|error| {
        Errno::from_io_error(&error).unwrap_or(Errno::IO) //
    })?;
    // SAFETY: the request is a plain struct whose name is NUL-terminated, and the kernel reads and writes no more.
    unsafe {
        let mut request: libc::ifreq = zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        checked(libc::ioctl(handle.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request).into())?;
        let up = libc::c_short::try_from(libc::IFF_UP).expect("the flag is 1");
        request.ifr_ifru.ifru_flags |= up;
        checked(libc::ioctl(handle.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request).into())?;
    }
    Ok(())
}
