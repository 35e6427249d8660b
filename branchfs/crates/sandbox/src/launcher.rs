//! The launcher: the process that the caller starts. It creates the namespaces with init in them, and waits for its end.
//!
//! It stays for two reasons. The kernel kills init when its parent dies (`PR_SET_PDEATHSIG`), but means by that the
//! thread that has started it; the launcher has one thread, and callers have many. And it watches the caller: a copy of
//! the caller's end of `line` in a forked process of the caller would keep that open.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, chdir, getppid, pidfd_open, pidfd_send_signal, umask,
    waitpid,
};

use crate::failure::{Failure, message};
use crate::init;
use crate::request::Request;
use crate::streams::Streams;
use crate::sys;

/// Keys and hang-ups concern the caller and the command in the foreground. SIGTERM still ends the launcher.
const IGNORED: [i32; 6] =
    [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

const WRONG_USAGE: u8 = 2;

/// Runs `branchfs sandbox` with what follows on the command line: the number of the descriptor that holds the request.
///
/// Returns when everything in the sandbox is dead. How the command ended is said on the request's `line`.
pub fn run(arguments: &[impl AsRef<OsStr>]) -> ExitCode {
    let words: Vec<_> = arguments.iter().map(|word| word.as_ref().to_str()).collect();
    let done = match words[..] {
        [Some(number)] => match number.parse() {
            Ok(number) => launch(number),
            Err(error) => Err(io::Error::other(error)),
        },
        _ => Err(io::Error::other("it takes the number of a descriptor")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("branchfs sandbox: {error}");
            ExitCode::from(WRONG_USAGE)
        }
    }
}

fn launch(number: RawFd) -> io::Result<()> {
    let request = Request::read(File::from(sys::inherited(number)?))?;
    let sent = request.descriptors.iter().map(|&(_, here)| here);
    sys::close_all_but(sent.chain([request.line, request.gate, 2]));
    chdir("/")?; // its directory must not keep a mount busy
    umask(Mode::from_raw_mode(0o022));
    sys::ignore_signals(&IGNORED);
    let Some(parent) = Pid::from_raw(request.parent) else {
        return Err(io::Error::other("the caller has no process id"));
    };
    let caller = pidfd_open(parent, PidfdFlags::empty())?;
    if getppid() != Some(parent) {
        return Ok(()); // it died before it could be watched
    }
    let streams = Streams::of(&request)?;
    let is_sandboxed = request.is_sandboxed;
    let pid = match sys::clone(namespaces(&request)) {
        Ok(0) => {
            drop(caller);
            init::run(request, streams)
        }
        Ok(pid) => pid,
        Err(errno) => {
            streams.say(&message("clone", &Failure::from(errno)));
            return Ok(());
        }
    };
    drop(streams);
    let pid = Pid::from_raw(pid).expect("a child's process id is positive");
    let init = pidfd_open(pid, PidfdFlags::empty())?;
    // What init and the command have is not to be held open here.
    sys::close_all_but([caller.as_raw_fd(), init.as_raw_fd()]);
    let mut ends = [
        PollFd::new(&init, PollFlags::IN),
        PollFd::from_borrowed_fd(caller.as_fd(), PollFlags::IN),
    ];
    while poll(&mut ends, None).is_err() {}
    if ends[0].revents().is_empty() {
        if !is_sandboxed {
            sys::exit(0); // init hears of that, and ends the others
        }
        let _ = pidfd_send_signal(&init, Signal::KILL); // it has ended meanwhile, or it is killed
    }
    while waitpid(Some(pid), WaitOptions::empty())
        .is_err_and(|errno| errno == rustix::io::Errno::INTR)
    {}
    Ok(())
}

fn namespaces(request: &Request) -> i32 {
    if !request.is_sandboxed {
        return 0;
    }
    let user = if request.is_user_namespace { libc::CLONE_NEWUSER } else { 0 };
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | user
}
