//! Init: the first process of a sandbox. It makes the surroundings, gives up its privileges, forks the command, and then
//! only waits: for the command's end, for orphans to reap, for a message of the caller. Its messages on `line`:
//!
//! ```text
//! init says                                       the caller says
//! {"hello":true} and a pidfd of itself            "T"   SIGTERM to all
//! {"failed":STEP,"errno":N,…}                     "C"   SIGCONT to all
//! {"stopped":true}                                "S"   SIGSTOP to all
//! {"status":N,"cpu":S,"peak":B,"seconds":S,       (closes it: end at once)
//!  "timed_out":false,"is_uncovered":false}
//! ```
//!
//! Its end is the end of everything: it is process 1 of the namespace. Without a sandbox it is the subreaper of its
//! descendants, and kills them before it ends.

use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use rustix::process::{
    DumpableBehavior, PidfdFlags, Signal, WaitOptions, chdir, getpid, ioctl_tiocsctty, pidfd_open,
    set_child_subreaper, set_dumpable_behavior, set_parent_process_death_signal, setsid, wait,
};

use crate::failure::{Context, Failure, Result, message};
use crate::masked_files::Watch;
use crate::request::Request;
use crate::rootfs::{RootFs, bound_sockets};
use crate::streams::Streams;
use crate::{child, descendants, netns, privileges, sys};

const EXIT_KILLED: i32 = 137;
/// Between SIGTERM and the end when the time is over.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);
/// On a busy machine a receiver waits for a processor; a longer wait means that it is stuck.
const SEND_WAIT_MAX: Duration = Duration::from_secs(60);
const SEND_PAUSE: Duration = Duration::from_millis(2);
const MESSAGE_BYTES_MAX: usize = 16;

/// Makes the sandbox and attends it. This process is in its namespaces.
pub(crate) fn run(request: Request, streams: Streams) -> ! {
    let is_sandboxed = request.is_sandboxed;
    let mut init = Init { request, streams, watch: None, step: String::from("starting") };
    match init.prepare().and_then(|()| init.start()) {
        Ok((pid, signals)) => init.supervise(pid, &signals),
        Err(failure) => {
            init.streams.say(&message(&init.step, &failure));
            end(EXIT_KILLED, is_sandboxed)
        }
    }
}

/// Ends, and all that was started with it.
fn end(code: i32, is_sandboxed: bool) -> ! {
    if !is_sandboxed {
        descendants::kill_all();
    }
    sys::exit(code)
}

struct Init {
    request: Request,
    streams: Streams,
    watch: Option<Watch>,
    step: String,
}

impl Init {
    fn prepare(&mut self) -> Result<()> {
        // It may be gone, and its number another's, before the caller can look it up by that.
        let own = pidfd_open(getpid(), PidfdFlags::empty()).calling("pidfd_open")?;
        self.send_descriptor(b"{\"hello\":true}", own)?;
        if !self.request.is_sandboxed {
            return self.prepare_plain();
        }
        set_parent_process_death_signal(Some(Signal::KILL)).calling("prctl")?;
        if self.request.is_user_namespace {
            self.step = "mapping the user into the namespace".into();
            map_own_user(self.request.user)?;
        }
        self.step = "finding the sockets of other programs".into();
        let sockets = bound_sockets()?; // all that are named in this network, before it is left
        if !self.request.sandbox.network {
            self.step = "making a network".into();
            netns::enter()?;
        }
        let owner = self.request.owner.unwrap_or(self.request.user);
        let mut view = RootFs::new(&self.request.sandbox, owner, sockets);
        let built = view.build();
        let (step, watch) = view.into_parts();
        self.watch = watch;
        if built.is_err() {
            self.step = step;
        }
        let writable = built?;
        self.step = "giving up privileges".into();
        let descriptors = self.streams.descriptors.iter();
        let outputs = descriptors.filter(|(number, _)| matches!(number, 1 | 2));
        privileges::give_up(
            self.request.owner,
            &writable,
            outputs.map(|(_, file)| file.as_fd()),
            &self.request.filter.0,
        )
    }

    /// Without a sandbox: to know its descendants is the most that can be done.
    fn prepare_plain(&mut self) -> Result<()> {
        set_child_subreaper(Some(getpid())).calling("prctl")?;
        self.step = "becoming the workspace's owner".into();
        if let Some(owner) = self.request.owner {
            privileges::become_user(owner)?;
        }
        self.step = "entering the workspace".into();
        let sandbox = &self.request.sandbox;
        let directory = sandbox.start_directory(sandbox.view.path());
        chdir(&directory).at(directory)
    }

    /// Forks the command. Returns its process id in here, and where signals arrive.
    fn start(&mut self) -> Result<(i32, OwnedFd)> {
        self.step = "starting the process".into();
        // Without a process namespace no process dies with init: when the launcher dies, init has to end the others.
        let heeded: &[i32] = match self.request.is_sandboxed {
            true => &[libc::SIGCHLD],
            false => &[libc::SIGCHLD, libc::SIGTERM],
        };
        let signals = sys::signal_descriptor(heeded).calling("signalfd")?;
        if !self.request.is_sandboxed {
            set_parent_process_death_signal(Some(Signal::TERM)).calling("prctl")?;
        }
        // No process inside may inspect or trace init, although it has the same user: set before the first one is
        // started. A program that is executed can inspect itself again.
        set_dumpable_behavior(DumpableBehavior::NotDumpable).calling("prctl")?;
        if self.request.is_terminal_own {
            self.step = "starting a session on the terminal".into();
            // Init leads the session, so that the command, in a process group of its own, can be stopped by a key: the
            // kernel does not stop a group that no process in the session could continue.
            setsid().calling("setsid")?;
            let mut descriptors = self.streams.descriptors.iter();
            if let Some((_, file)) =
                descriptors.find(|(number, _)| Some(*number) == self.request.terminal)
            {
                ioctl_tiocsctty(file)?;
            }
        }
        let pid = sys::clone(0).calling("clone")?;
        if pid == 0 {
            let line = self.streams.line.try_clone()?;
            let gate = self.streams.gate.take();
            let descriptors = std::mem::take(&mut self.streams.descriptors);
            child::run(&self.request, Streams { line, gate, descriptors });
        }
        self.streams.gate = None;
        self.streams.descriptors.clear();
        let watch = self.watch.as_ref().map(|watch| watch.as_fd().as_raw_fd());
        let line = self.streams.line.as_raw_fd();
        sys::close_all_but([line, signals.as_raw_fd()].into_iter().chain(watch));
        Ok((pid, signals))
    }

    fn supervise(&mut self, pid: i32, signals: &OwnedFd) -> ! {
        let started = Instant::now();
        let limit = self.request.wall_seconds;
        let mut deadline =
            limit.and_then(|limit| started.checked_add(Duration::try_from_secs_f64(limit).ok()?));
        let mut is_timed_out = false;
        loop {
            let mut events = vec![
                PollFd::new(&self.streams.line, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
            ];
            if let Some(watch) = &self.watch {
                events.push(PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::PRI));
            }
            let wait = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let _ = poll(&mut events, wait.map(timespec).as_ref()); // interrupted or not: all is looked at
            let [has_message, has_signal] = [0, 1].map(|place| !events[place].revents().is_empty());
            if self.watch.as_ref().is_some_and(|watch| !watch.is_whole()) {
                let _ = sys::kill(-1, libc::SIGKILL);
                self.report(libc::SIGKILL, started, false, true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                if is_timed_out {
                    self.report(libc::SIGKILL, started, true, false);
                }
                is_timed_out = true;
                deadline = Some(Instant::now() + TIMEOUT_GRACE);
                self.signal_all(libc::SIGTERM);
            }
            if has_signal {
                while let Some(signal) = sys::next_signal(signals) {
                    if signal == libc::SIGTERM {
                        end(EXIT_KILLED, self.request.is_sandboxed);
                    }
                }
                self.reap(pid, started, is_timed_out);
            }
            if has_message {
                match self.heard() {
                    Some(b'T') => self.signal_all(libc::SIGTERM),
                    Some(b'C') => self.signal_all(libc::SIGCONT),
                    Some(b'S') => self.signal_all(libc::SIGSTOP),
                    _ => end(EXIT_KILLED, self.request.is_sandboxed),
                }
            }
        }
    }

    /// Returns the caller's next message; `None` if it is gone, and may not have read the last one.
    fn heard(&self) -> Option<u8> {
        let mut word = [0; MESSAGE_BYTES_MAX];
        match recv(&self.streams.line, &mut word, RecvFlags::empty()) {
            Ok((_, length)) if length > 0 => Some(word[0]),
            _ => None,
        }
    }

    fn reap(&self, pid: i32, started: Instant, is_timed_out: bool) {
        while let Ok(Some((found, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if found.as_raw_nonzero().get() != pid {
                continue;
            }
            if !status.stopped() {
                self.report(status.as_raw(), started, is_timed_out, false);
            }
            if !self.streams.say(b"{\"stopped\":true}") {
                end(EXIT_KILLED, self.request.is_sandboxed);
            }
        }
    }

    /// Says how the command ended, and ends.
    fn report(&self, status: i32, started: Instant, timed_out: bool, is_uncovered: bool) -> ! {
        let (cpu, peak) = sys::children_usage();
        let report = serde_json::json!({
            "status": status, "timed_out": timed_out, "cpu": cpu, "peak": peak,
            "seconds": started.elapsed().as_secs_f64(), "is_uncovered": is_uncovered,
        });
        let is_heard = self.streams.say(report.to_string().as_bytes());
        end(if is_heard { 0 } else { EXIT_KILLED }, self.request.is_sandboxed)
    }

    /// Signals every process of the namespace but init, or every descendant. A stopped process is woken to receive it.
    fn signal_all(&self, number: i32) {
        if !self.request.is_sandboxed {
            return descendants::signal_all(number);
        }
        if sys::kill(-1, number).is_ok() && number != libc::SIGSTOP {
            let _ = sys::kill(-1, libc::SIGCONT);
        }
    }

    /// Sends a descriptor on `line`. The kernel limits how many descriptors of a user are in flight, so this may wait.
    fn send_descriptor(&self, message: &[u8], descriptor: OwnedFd) -> Result<()> {
        let deadline = Instant::now() + SEND_WAIT_MAX;
        loop {
            let files = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
            let slices = [IoSlice::new(message)];
            match sendmsg(&self.streams.line, &slices, &mut ancillary, SendFlags::NOSIGNAL) {
                Err(Errno::TOOMANYREFS) if Instant::now() < deadline => {
                    std::thread::sleep(SEND_PAUSE);
                }
                sent => return sent.map(drop).map_err(Failure::from),
            }
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Maps the user to itself: without a mapping all files would belong to the overflow user.
fn map_own_user((uid, gid): (u32, u32)) -> Result<()> {
    let maps = [
        ("setgroups", String::from("deny")),
        ("uid_map", format!("{uid} {uid} 1")),
        ("gid_map", format!("{gid} {gid} 1")),
    ];
    for (name, text) in maps {
        let file = format!("/proc/self/{name}");
        fs::write(&file, text).at(file)?;
    }
    Ok(())
}
