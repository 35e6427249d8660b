//! Recovery without a mount: by `branchfs recover`, and by the guard, a process beside the daemon that recovers when the
//! daemon dies in the middle of a transaction.
//!
//! The guard is this program again, started with `recover --guard` and a pidfd of the daemon as its standard input. It has
//! a session of its own, so that what kills the daemon's process group leaves it alive, and holds nothing open but the
//! pidfd. The daemon kills it when it has ended in order. When the daemon has died, it does what `branchfs recover` does
//! where the journal holds an entry, and nothing otherwise; then it ends. Where it is killed too (a container, a control
//! group), the next mount or `branchfs recover` settles the transaction.
//!
//! Whoever recovers holds a lock on the store's journal before that on the store: a mount that finds the store locked waits
//! as long as the journal is locked too, instead of refusing ([`branchfs_core::workspace::Recovering`]).

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags};
use rustix::process::PidfdFlags;

use crate::log::{self, LogLevel};
use crate::sys;
use branchfs_core::error::Error;
use branchfs_core::workspace::{Policy, Recovering, Settings, Workspace, is_interrupted};

/// The options of [`recover`].
#[derive(Clone, Debug)]
pub struct RecoverOptions {
    /// The base directory.
    pub base: PathBuf,
    /// The store, where the base does not name it.
    pub store: Option<PathBuf>,
    /// How many commits can be undone at most.
    pub history_commits_max: usize,
    /// The lowest level that is logged.
    pub log_level: LogLevel,
}

/// Completes or rolls back interrupted transactions without mounting. Returns what was done. Waits for another process
/// that recovers.
///
/// # Errors
/// The store is in use by a mount, damaged, or belongs to another base.
pub fn recover(options: &RecoverOptions) -> Result<Vec<String>, Error> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let store = options.store.as_deref();
    let Some(_recovering) = Recovering::begin(&options.base, store)? else {
        return Ok(Vec::new()); // there is no store
    };
    if !is_interrupted(&options.base, store)? {
        return Ok(Vec::new());
    }
    log::begin(options.log_level);
    let settings = Settings {
        policy: Policy::FirstWinner,
        history_commits_max: options.history_commits_max,
        is_recovery: true,
        open_log: log::open_in_store,
    };
    let workspace = Workspace::open(&options.base, store, settings)?;
    for line in workspace.recovery() {
        tracing::warn!("recovery without a mount: {line}");
    }
    Ok(workspace.recovery().to_vec())
}

/// Waits until the process whose pidfd is the standard input has ended; then recovers.
///
/// # Errors
/// As [`recover`].
pub fn recover_after_death(options: &RecoverOptions) -> Result<(), Error> {
    // Closing, killing or unmounting by the daemon's user must not affect the guard. Errors of both calls have no
    // consequence.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    sys::close_inherited();
    let daemon = rustix::stdio::stdin();
    loop {
        let mut poll = [PollFd::new(&daemon, PollFlags::IN)];
        match rustix::event::poll(&mut poll, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Ok(()), // no pidfd: not started by a daemon
            Ok(_) => break,
        }
    }
    // The lock may be busy for a moment: a process looks whether the store is in use. A mount that has come recovers itself.
    for _ in 0..BUSY_TRIES_MAX {
        match recover(options) {
            Err(Error::Unsupported(_)) => std::thread::sleep(BUSY_POLL),
            other => return other.map(drop),
        }
    }
    Ok(())
}

/// How often the guard tries again while something has the lock.
const BUSY_TRIES_MAX: usize = 20;

/// How long it waits in between.
const BUSY_POLL: Duration = Duration::from_millis(20);

/// The daemon's side: its guard.
pub(crate) struct Guard(Child);

impl Guard {
    /// Starts the guard of this process.
    ///
    /// # Errors
    /// The system has no room for a process.
    pub(crate) fn start(
        workspace: &Workspace,
        history_commits_max: usize,
        log_level: LogLevel,
    ) -> std::io::Result<Self> {
        let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        let level = log_level.to_possible_value();
        let mut command = Command::new("/proc/self/exe"); // also when the program was replaced meanwhile
        command
            .arg0("branchfs")
            .args(["recover", "--guard", "--history", &history_commits_max.to_string()])
            .args(["--log-level", level.as_ref().map_or("info", |level| level.get_name())])
            .arg("--store")
            .arg(workspace.store())
            .arg(workspace.base())
            .stdin(Stdio::from(this))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Ends the guard: the daemon ends in order.
    pub(crate) fn dismiss(mut self) {
        // It may have been killed already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
