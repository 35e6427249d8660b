//! The process that becomes the command, from its fork off init to the first instruction of the program.
//!
//! Where it has limits it waits at the gate until the caller has put it under them, so that nothing of the user's ever
//! runs without. On the gate it says `here`; a program that cannot be executed is reported as `errno text`, and the gate
//! closes without another message when all went well.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::Mode;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Resource, Rlimit, getpgrp, setpgid, setrlimit, setsid, umask};
use rustix::termios::tcsetpgrp;

use crate::request::{Bytes, Request};
use crate::streams::Streams;
use crate::sys;

const HERE: &[u8] = b"here";
const PATH_DEFAULT: &[u8] = b"/bin:/usr/bin";

/// As a shell reports it: a program that was found and cannot be executed.
const EXIT_CANNOT_EXECUTE: i32 = 126;

/// Becomes the command.
pub(crate) fn run(request: &Request, streams: Streams) -> ! {
    let Ok(gate) = place_descriptors(streams) else { sys::exit(EXIT_CANNOT_EXECUTE) };
    umask(Mode::from_raw_mode(request.umask));
    sys::reset_signals(&request.ignored_signals);
    match request.terminal {
        Some(terminal) => take_terminal(terminal),
        None => drop(setsid()),
    }
    let _ = send(&gate, HERE, SendFlags::NOSIGNAL);
    if request.is_limited {
        let mut word = [0; 16];
        match recv(&gate, &mut word, RecvFlags::empty()) {
            Ok((_, length)) if length > 0 => {}
            _ => sys::exit(EXIT_CANNOT_EXECUTE), // the caller has given up
        }
    }
    let refusal = execute(request);
    let _ = send(&gate, &refusal, SendFlags::NOSIGNAL);
    sys::exit(EXIT_CANNOT_EXECUTE);
}

/// Gives each descriptor the number it is to have, and closes all that was not sent. Returns the gate.
fn place_descriptors(streams: Streams) -> Result<OwnedFd, Errno> {
    let Streams { line, gate, descriptors } = streams;
    // Copies above all numbers that are wanted: none is overwritten before it is placed.
    let above = descriptors.iter().map(|&(number, _)| number).max().unwrap_or(0).max(2) + 1;
    let gate = gate.expect("the gate is closed after the fork");
    let moved_gate = fcntl_dupfd_cloexec(&gate, above)?;
    let moved = descriptors
        .iter()
        .map(|(number, file)| Ok((*number, fcntl_dupfd_cloexec(file, above)?)))
        .collect::<Result<Vec<_>, Errno>>()?;
    drop((line, gate, descriptors));
    for (number, file) in &moved {
        sys::place(file.as_raw_fd(), *number)?;
    }
    let numbers: Vec<_> = moved.iter().map(|&(number, _)| number).collect();
    drop(moved);
    sys::close_all_but(numbers.into_iter().chain([moved_gate.as_raw_fd()]));
    Ok(moved_gate)
}

/// Makes this process the foreground of the terminal, as a shell does, before the program can say a word. Were it left
/// to the caller, a key that is struck at the first output would still go to the caller's group.
fn take_terminal(terminal: i32) {
    let _ = setpgid(None, None);
    sys::block_signals(&[libc::SIGTTOU]);
    // The terminal may be gone (hung up): the program will see that itself.
    if let Ok(copy) = sys::inherited(terminal) {
        let _ = tcsetpgrp(copy.as_fd(), getpgrp());
        let _ = fcntl_setfd_inheritable(&copy);
        std::mem::forget(copy); // it is the program's
    }
    sys::block_signals(&[]);
}

fn fcntl_setfd_inheritable(file: &OwnedFd) -> Result<(), Errno> {
    rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())
}

/// Executes the program, which is looked for as execvp(3) does. Returns what to say when that fails.
fn execute(request: &Request) -> Vec<u8> {
    let (Some(argv), Some(environment)) = (texts(&request.argv), environment(request)) else {
        return b"0 ValueError: embedded null byte".to_vec();
    };
    if let Some((soft, hard)) = request.open_files {
        let _ =
            setrlimit(Resource::Nofile, Rlimit { current: limited(soft), maximum: limited(hard) });
    }
    let mut refusal = None;
    for path in places(request) {
        let errno = match CString::new(path) {
            Ok(path) => sys::execute(&path, &argv, &environment),
            Err(_) => Errno::INVAL,
        };
        // An error at an existing path says more than that another path is missing.
        if refusal.is_none_or(is_missing) && !(refusal.is_some() && is_missing(errno)) {
            refusal = Some(errno);
        }
    }
    let errno = refusal.unwrap_or(Errno::NOENT);
    format!("{} ", errno.raw_os_error()).into_bytes()
}

fn limited(limit: u64) -> Option<u64> {
    (limit != libc::RLIM_INFINITY).then_some(limit)
}

fn is_missing(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR)
}

fn texts(words: &[Bytes]) -> Option<Vec<CString>> {
    words.iter().map(|word| CString::new(word.0.clone()).ok()).collect()
}

fn environment(request: &Request) -> Option<Vec<CString>> {
    let pairs = request.environment.iter();
    pairs.map(|(name, value)| CString::new([&name.0[..], b"=", &value.0].concat()).ok()).collect()
}

/// Where the program may be.
fn places(request: &Request) -> Vec<Vec<u8>> {
    let name = &request.argv[0].0;
    if name.contains(&b'/') {
        return vec![name.clone()];
    }
    let set = request.environment.iter().find(|(variable, _)| variable.0 == b"PATH");
    let path = set.map_or(PATH_DEFAULT, |(_, value)| &value.0);
    let directories = path.split(|&byte| byte == b':');
    directories
        .map(|directory| match directory {
            [] | [.., b'/'] => [directory, name].concat(),
            _ => [directory, b"/", name].concat(),
        })
        .collect()
}
