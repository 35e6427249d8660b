//! The daemon's log: `branchfs.log` in the store, and `branchfs.log.1`, the older half.
//!
//! Lines are written through `tracing`. When the file has [`BYTES_MAX`] bytes it replaces the older one, so that both
//! together are bounded (tracing-appender rotates by time alone, which bounds nothing). The lock on the store decides who
//! writes: the daemon, and after its death the process that recovers.
//!
//! A log that cannot be written never stops the daemon: the lines are lost. Lines that come before the store is open wait
//! in memory. Standard error of a daemon in the background is the log too, for the messages of the Rust runtime (a stack
//! overflow, a failed allocation); so are the lines that the handler of fatal signals writes.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{Mode, OFlags};
use tracing_subscriber::filter::LevelFilter;

use crate::sys;
use branchfs_core::error::{Context, Error};
use branchfs_core::no_follow;
use branchfs_core::ownership;
use branchfs_core::workspace::LOG_FILES;

/// Bytes that one file holds at most, but for the line that exceeds it.
const BYTES_MAX: u64 = 1 << 20;

/// Bytes that wait for the store to be opened.
const WAITING_BYTES_MAX: usize = 64 << 10;

/// The lowest level that is logged: each level includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum LogLevel {
    /// Nothing
    Off,
    /// Panics, and errors after which something is left to recover
    Error,
    /// Recoveries
    Warn,
    /// Start, driver, commits, refusals and shutdown
    Info,
    /// Creates and aborts
    Debug,
    /// All there is
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Off => Self::OFF,
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// The process's log. Without it, as in unit tests, nothing is logged.
static LOG: OnceLock<Mutex<Log>> = OnceLock::new();

struct Log {
    sink: Sink,
    bytes_max: u64,
    /// Standard error is the log.
    has_stderr: bool,
}

enum Sink {
    /// Lines that wait for the store.
    Waiting(Vec<u8>),
    /// The store, and the file in it.
    Open(OwnedFd, File),
}

/// Sends the lines of this process to the log, and panics and fatal signals too.
pub(crate) fn begin(level: LogLevel) {
    let waiting = Sink::Waiting(Vec::new());
    let log = Log { sink: waiting, bytes_max: BYTES_MAX, has_stderr: false };
    if LOG.set(Mutex::new(log)).is_err() {
        return;
    }
    let lines = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_target(false)
        .with_writer(|| Writer);
    // Fails where a subscriber is set already, which only this function does.
    let _ = tracing::subscriber::set_global_default(lines.finish());
    std::panic::set_hook(Box::new(log_panic));
    sys::log_fatal_signals();
}

/// Opens the log of a store whose lock this process holds, and writes the lines that wait. In a process without a log it
/// does nothing.
///
/// # Errors
/// The file cannot be made, or is not a regular file. The daemon goes on without it.
fn open(store: &Path, owner: (u32, u32)) -> Result<(), Error> {
    let Some(mut log) = lock() else { return Ok(()) };
    let path = store.join(LOG_FILES[0]);
    let store = OwnedFd::from(no_follow::open_directory(store).at(store)?);
    let mut file = open_file(&store, owner).at(&path)?;
    if let Sink::Waiting(lines) = &log.sink {
        let _ = file.write_all(lines); // without room for them they are lost
    }
    sys::set_fatal_signal_log(file.as_raw_fd());
    log.sink = Sink::Open(store, file);
    Ok(())
}

/// As [`open`]. Without a log the daemon continues and says so.
pub(crate) fn open_in_store(store: &Path, owner: (u32, u32)) {
    if let Err(error) = open(store, owner) {
        eprintln!("branchfs: the daemon has no log: {error}");
    }
}

/// Makes the log the standard error of the process. Returns whether there is one.
pub(crate) fn take_stderr() -> bool {
    let Some(mut log) = lock() else { return false };
    let Sink::Open(_, file) = &log.sink else { return false };
    log.has_stderr = rustix::stdio::dup2_stderr(file).is_ok();
    log.has_stderr
}

fn lock() -> Option<MutexGuard<'static, Log>> {
    // Each line leaves it whole.
    LOG.get().map(|log| log.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Opens the newer file. The store belongs to the base's owner, who may have put anything there: a symbolic link is not
/// followed, and a FIFO, a device or a file with another name is refused.
fn open_file(store: &OwnedFd, owner: (u32, u32)) -> io::Result<File> {
    let flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let file = rustix::fs::openat(store, LOG_FILES[0], flags, Mode::RUSR | Mode::WUSR)?;
    no_follow::check(&file)?;
    ownership::set_opened(&file, owner)?;
    Ok(File::from(file))
}

impl Log {
    fn write(&mut self, line: &[u8]) {
        match &mut self.sink {
            Sink::Waiting(lines) if lines.len() + line.len() <= WAITING_BYTES_MAX => {
                lines.extend_from_slice(line);
            }
            Sink::Waiting(_) => {}
            Sink::Open(..) => {
                // A full disk or a read-only one: the line is lost, the daemon goes on.
                let _ = self.write_to_file(line);
            }
        }
    }

    fn write_to_file(&mut self, line: &[u8]) -> io::Result<()> {
        let Sink::Open(store, file) = &mut self.sink else { return Ok(()) };
        let found = file.metadata()?;
        if found.len() >= self.bytes_max {
            rustix::fs::renameat(&*store, LOG_FILES[0], &*store, LOG_FILES[1])?;
            let owner = std::os::unix::fs::MetadataExt::uid(&found);
            let group = std::os::unix::fs::MetadataExt::gid(&found);
            *file = open_file(store, (owner, group))?;
            sys::set_fatal_signal_log(file.as_raw_fd());
            if self.has_stderr {
                rustix::stdio::dup2_stderr(file.as_fd())?;
            }
        }
        file.write_all(line)
    }
}

/// Writes to the process's log: `tracing` passes complete lines.
struct Writer;

impl Write for Writer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(mut log) = lock() {
            log.write(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn log_panic(panic: &std::panic::PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let message = format!(
        "panic in thread {:?}: {panic}\n{}",
        thread.name().unwrap_or("unnamed"),
        std::backtrace::Backtrace::force_capture()
    );
    tracing::error!("{message}");
    if !lock().is_some_and(|log| log.has_stderr) {
        eprintln!("branchfs: {message}");
    }
}

/// Opens the existing log files of a store, of a base, or of a mount's base, oldest first.
///
/// # Errors
/// There is no store at `path`, or the log is not a regular file.
pub fn open_log(path: &Path) -> Result<Vec<File>, Error> {
    let store = branchfs_core::workspace::store_at(path)?;
    let mut files = Vec::new();
    for path in LOG_FILES.iter().rev().map(|name| store.join(name)) {
        match no_follow::open_file(&path, OFlags::RDONLY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => files.push(other.at(&path)?),
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn opened(store: &Path, bytes_max: u64) -> Log {
        let directory = rustix::fs::open(store, OFlags::DIRECTORY, Mode::empty()).unwrap();
        let file = open_file(&directory, (1000, 1000)).unwrap();
        Log { sink: Sink::Open(directory, file), bytes_max, has_stderr: false }
    }

    #[test]
    fn two_files_hold_the_newest_lines_and_belong_to_the_owner() {
        let store = tempfile::tempdir().unwrap();
        let mut log = opened(store.path(), 100);
        for number in 0..1000 {
            log.write(format!("line {number}\n").as_bytes());
        }
        let files = LOG_FILES.map(|name| store.path().join(name));
        for file in &files {
            let found = fs::metadata(file).unwrap();
            assert!(found.len() < 110, "{}", found.len());
            assert_eq!((found.uid(), found.mode() & 0o777), (1000, 0o600));
        }
        let [newer, older] = files.map(|file| fs::read_to_string(file).unwrap());
        let text = older + &newer;
        assert!(text.ends_with("line 998\nline 999\n"), "{text}");
        assert!(text.lines().count() > 10, "{text}");
        assert_eq!(fs::read_dir(store.path()).unwrap().count(), 2);
    }

    #[test]
    fn nothing_is_written_through_a_link_or_into_a_pipe() {
        for make in ["ln -s ../outside", "ln ../outside", "mkfifo", "mkdir"] {
            let place = tempfile::tempdir().unwrap();
            let store = place.path().join("store");
            fs::create_dir(&store).unwrap();
            fs::write(place.path().join("outside"), "content").unwrap();
            let script = format!("{make} {}", LOG_FILES[0]);
            let mut shell = std::process::Command::new("sh");
            assert!(shell.args(["-c", &script]).current_dir(&store).status().unwrap().success());
            let directory = rustix::fs::open(&store, OFlags::DIRECTORY, Mode::empty()).unwrap();
            assert!(open_file(&directory, (1000, 1000)).is_err(), "{make}");
            let outside = place.path().join("outside");
            assert_eq!(fs::read_to_string(&outside).unwrap(), "content", "{make}");
            assert_eq!(fs::metadata(&outside).unwrap().uid(), 0, "{make}");
        }
    }
}
