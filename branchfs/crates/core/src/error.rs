//! The errors of operations on branches, with the error kinds of the control protocol (docs/control.md).

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::no_follow::PATH_BYTES_MAX;
use crate::no_follow::Refusal;

/// The kinds of errors in the control protocol. `docs/control.md` says what each means and what state it leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// A malformed request, or a commit with nothing to commit.
    Usage,
    /// An invalid branch name.
    Name,
    /// An open branch has the name.
    Exists,
    /// There is no such branch or commit.
    NotFound,
    /// A sibling was committed first.
    Stale,
    /// The commit would overwrite changes of others.
    Conflict,
    /// The branch has live children.
    Frozen,
    /// Files are open for writing, or changed while they were read.
    Busy,
    /// The mount does not support it.
    Unsupported,
    /// The operating system returned an error.
    Io,
    /// The transaction was applied, but its last phase failed.
    Incomplete,
    /// The transaction failed, and so did its rollback.
    InDoubt,
    /// An earlier transaction needs recovery.
    Stopped,
    /// The store is damaged.
    Corrupt,
}

/// An error with its causes, without repeating a cause that is already in the text.
#[must_use]
pub fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    for cause in causes.map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// An operation on branches failed. Unless a variant says otherwise, nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request cannot be understood.
    #[error("{0}")]
    Usage(String),
    /// A branch cannot have this name.
    #[error("{} is not a branch name: {reason}", name.to_string_lossy())]
    Name {
        /// The name as given.
        name: OsString,
        /// The rule it breaks.
        reason: &'static str,
    },
    /// A branch of this name is open.
    #[error("a branch named {0} is open already")]
    Exists(String),
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NotFound(String),
    /// There is no commit to undo, or to redo.
    #[error("there is no commit to {0}")]
    NothingKept(&'static str),
    /// The commit to be undone or redone is not the next one.
    #[error("commit {wanted} is not the next one; that is commit {next} of branch {name}")]
    NotNext {
        /// The commit of the request.
        wanted: u64,
        /// The commit that is to be undone or redone next.
        next: u64,
        /// Name of the branch whose commit `next` is.
        name: String,
    },
    /// There is no such commit in the history.
    #[error("there is no commit {0} in the history")]
    NoSuchCommit(u64),
    /// A sibling was committed first.
    #[error("branch {0} is stale: a sibling was committed first")]
    Stale(String),
    /// A commit would overwrite changes that others made.
    #[error("{message}")]
    Conflict {
        /// What happened.
        message: String,
        /// The paths in question, relative to the workspace.
        paths: Vec<PathBuf>,
        /// What to do next.
        hint: &'static str,
    },
    /// The path filter includes none of the paths that the branch changed, and the rest would be dropped.
    #[error("none of the {count} paths that branch {name} changed {wanted}")]
    NothingChosen {
        /// Name of the branch.
        name: String,
        /// The number of paths that the branch changed.
        count: usize,
        /// The first of these paths.
        first: PathBuf,
        /// The operation that was requested.
        wanted: String,
    },
    /// The branch has live children.
    #[error("{}", frozen(.name, .children))]
    Frozen {
        /// The frozen branch.
        name: String,
        /// Names of its live children.
        children: String,
    },
    /// Files are open for writing, or deleted and still open.
    #[error("branch {name} has {}", what_is_open(paths))]
    Busy {
        /// Name of the branch.
        name: String,
        /// The files that are open. Paths of deleted files end with ` (deleted)`.
        paths: Vec<PathBuf>,
        /// The processes that have them open, if known, as number and name. If no file was found, the processes that
        /// use the branch.
        users: Vec<String>,
    },
    /// A branch cannot be forked while files in it are open for writing, or deleted and still open.
    #[error(
        "branch {name} cannot be forked: it has {}, which a fork must freeze",
        what_is_open(paths)
    )]
    Written {
        /// Name of the branch.
        name: String,
        /// The files that are open. Paths of deleted files end with ` (deleted)`.
        paths: Vec<PathBuf>,
        /// The processes that have them open, if known, as number and name. If no file was found, the processes that
        /// use the branch.
        users: Vec<String>,
    },
    /// A branch is in use.
    #[error(
        "branch {0} is in use: end the processes that have files or their working directory in it"
    )]
    InUse(String),
    /// The mount is in use.
    #[error(
        "the mount is in use: end the processes that have files or their working directory in it"
    )]
    MountInUse,
    /// An object changed while it was read.
    #[error("{} was changed while it was read", .0.display())]
    Changed(PathBuf),
    /// This mount cannot do it.
    #[error("{0}")]
    Unsupported(String),
    /// The operating system returned an error.
    #[error("cannot access {}: {source}", path.display())]
    Io {
        /// The path that was accessed.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// An object of the store is not one that BranchFS creates there.
    #[error(
        "{} is refused: {reason}, which BranchFS does not create in a store. Nothing was read from it or written to it",
        path.display()
    )]
    Refused {
        /// Path of the object in the store.
        path: PathBuf,
        /// What the object is, as a clause: "it is a symbolic link".
        reason: String,
    },
    /// A path is longer than any that a branch may have.
    #[error(
        "a path at or below {} is too long: BranchFS handles at most {PATH_BYTES_MAX} bytes below the root, and 255 in a name",
        shortened(path)
    )]
    PathTooLong {
        /// The path that was accessed: the path itself, or a directory above it.
        path: PathBuf,
    },
    /// A step of a commit, an undo or a redo failed; everything is as before.
    #[error("cannot access {}: {source}", path.display())]
    Step {
        /// The kind of the step.
        step: &'static str,
        /// Path in the base.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Syncing failed: the data may be lost in a power failure. A later sync that succeeds proves nothing.
    #[error("cannot sync {}: {source}; it may not survive a power loss", path.display())]
    NotDurable {
        /// The path that was synced.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A transaction was applied, but its last part (syncing, the branch records, the history) failed.
    #[error("the {what} was applied, but completing it failed: {source}")]
    Incomplete {
        /// "commit", "undo" or "redo".
        what: &'static str,
        /// The first error after the transaction was applied.
        source: Box<Error>,
    },
    /// A transaction failed, and undoing its steps failed too.
    #[error(
        "the transaction failed ({failed}), and it was not rolled back completely ({rollback}): the base directory may be partly old and partly new until recovery has run"
    )]
    InDoubt {
        /// Why the transaction failed.
        failed: Box<Error>,
        /// Why the rollback failed.
        rollback: Box<Error>,
    },
    /// An earlier error left the store in doubt.
    #[error(
        "nothing was changed: no transaction is accepted before an earlier one is recovered: {0}"
    )]
    Stopped(String),
    /// The daemon panicked while it handled the request.
    #[error(
        "{0} failed with an internal error of the daemon: it may or may not have taken effect. No transaction is accepted until the next mount"
    )]
    Panicked(String),
    /// The journal holds more than one logged transaction.
    #[error(
        "{} holds {} unfinished transactions ({}), of which only the last can be recovered: applying an older one would overwrite later changes. Nothing was changed",
        journal.display(), transactions.len(), list(transactions)
    )]
    SeveralUnfinished {
        /// The journal directory.
        journal: PathBuf,
        /// Their numbers, oldest first.
        transactions: Vec<u64>,
    },
    /// The store is damaged.
    #[error("the store is damaged: {0}")]
    Corrupt(String),
}

/// The message for a branch that has children; of main, only undo and redo are refused for that.
fn frozen(name: &str, children: &str) -> String {
    if name == "main" {
        return format!("branches of the directory are open ({children}); nothing was changed");
    }
    format!(
        "branch {name} has live children ({children}): it is frozen until they are committed or aborted"
    )
}

/// Whether the disk, or the user's share of it, is full.
fn is_full(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

impl Error {
    /// The kind that the control protocol reports.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Usage(_) | Self::NothingChosen { .. } => ErrorKind::Usage,
            Self::Name { .. } => ErrorKind::Name,
            Self::Exists(_) => ErrorKind::Exists,
            Self::NotFound(_)
            | Self::NothingKept(_)
            | Self::NotNext { .. }
            | Self::NoSuchCommit(_) => ErrorKind::NotFound,
            Self::Stale(_) => ErrorKind::Stale,
            Self::Conflict { .. } => ErrorKind::Conflict,
            Self::Frozen { .. } => ErrorKind::Frozen,
            Self::Busy { .. }
            | Self::Written { .. }
            | Self::InUse(_)
            | Self::MountInUse
            | Self::Changed(_) => ErrorKind::Busy,
            Self::Unsupported(_) | Self::Refused { .. } => ErrorKind::Unsupported,
            Self::Io { .. }
            | Self::PathTooLong { .. }
            | Self::Step { .. }
            | Self::NotDurable { .. } => ErrorKind::Io,
            Self::Incomplete { .. } => ErrorKind::Incomplete,
            Self::InDoubt { .. } | Self::Panicked(_) => ErrorKind::InDoubt,
            Self::Stopped(_) => ErrorKind::Stopped,
            Self::Corrupt(_) | Self::SeveralUnfinished { .. } => ErrorKind::Corrupt,
        }
    }

    /// The next step for the user, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Exists(_) => "choose another name, or commit or abort the open branch first",
            Self::Stale(_) => "abort it, and start again from a new branch",
            Self::Conflict { hint, .. } => hint,
            Self::NothingChosen { first, .. } => {
                let hint = format!(
                    "the branch is still open; the first is '{}'; a pattern with a slash starts at the root",
                    first.display()
                );
                return Some(hint.into());
            }
            Self::NothingKept(_) | Self::NotNext { .. } | Self::NoSuchCommit(_) => {
                "see branchfs history for what is kept"
            }
            Self::Frozen { name, .. } if name == "main" => {
                "commit or abort them first; --force makes them stale"
            }
            Self::Frozen { .. } => "commit or abort the children first",
            Self::Busy { paths, users, .. } | Self::Written { paths, users, .. }
                if paths.is_empty() =>
            {
                return Some(hint_without_files(users).into());
            }
            Self::Busy { users, .. } | Self::Written { users, .. } if !users.is_empty() => {
                let users = users.join(", ");
                let hint = format!("close them, or end the processes that have them open: {users}");
                return Some(hint.into());
            }
            Self::Busy { .. } => "end the processes that write there, then commit again",
            Self::Written { .. } => "close them, or end the processes that write there",
            Self::Changed(_) => "stop the processes that write to it, then try again",
            Self::NotDurable { .. } => "check the disk, then try again",
            Self::Incomplete { source, .. } if matches!(**source, Self::NotDurable { .. }) => {
                "do not repeat it; check the disk, then unmount and mount again, which recovers it"
            }
            Self::Incomplete { .. } => {
                "do not repeat it; fix the cause: the next commit, or else the next mount, completes it"
            }
            Self::InDoubt { .. } => {
                "fix the cause, then unmount and mount again: the mount recovers the base directory"
            }
            Self::Panicked(_) => {
                "run branchfs log for the cause, then unmount and mount again, which runs the recovery"
            }
            Self::Stopped(_) => {
                "fix the cause and try again; if that is still refused, unmount and mount again, which runs the recovery"
            }
            Self::SeveralUnfinished { .. } => {
                "back up the base directory and its store, move all but the last of these directories out of the journal, then mount again"
            }
            Self::Corrupt(_) => "keep the store as it is and look at it before anything is removed",
            Self::Refused { .. } => {
                "the store may come from a stranger: remove that object, or the whole store with the branches in it; replace a file of your own that has other hard links by a copy (cp -p)"
            }
            Self::PathTooLong { .. } => "move or remove what is nested so deeply, then try again",
            Self::Io { source, .. } | Self::Step { source, .. } if is_full(source) => {
                "free space, then try again; aborting a branch frees what it wrote"
            }
            Self::Io { source, .. } | Self::Step { source, .. }
                if is_out_of_descriptors(source) =>
            {
                "close files that are open in branches, or mount under a higher limit of open files (ulimit -Hn)"
            }
            Self::Step { .. } => "check its permissions and attributes (lsattr), then try again",
            Self::Usage(_)
            | Self::Name { .. }
            | Self::NotFound(_)
            | Self::InUse(_)
            | Self::MountInUse
            | Self::Unsupported(_)
            | Self::Io { .. } => return None,
        };
        Some(hint.into())
    }

    /// The error of the operating system, if this is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. }
            | Self::Refused { path, .. }
            | Self::PathTooLong { path }
            | Self::Step { path, .. }
            | Self::NotDurable { path, .. } => Some(path),
            Self::Incomplete { source, .. } => source.path(),
            Self::InDoubt { rollback, .. } => rollback.path(),
            _ => None,
        }
    }

    /// The step of a transaction that failed.
    #[must_use]
    pub fn step(&self) -> Option<&'static str> {
        match self {
            Self::Step { step, .. } => Some(step),
            _ => None,
        }
    }

    /// Whether the failed transaction had no effect: main and the branch are as before.
    pub(crate) fn is_as_before(&self) -> bool {
        !matches!(self, Self::Incomplete { .. } | Self::InDoubt { .. })
    }

    /// The paths the error is about.
    #[must_use]
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            Self::Conflict { paths, .. }
            | Self::Busy { paths, .. }
            | Self::Written { paths, .. } => paths,
            _ => &[],
        }
    }
}

fn what_is_open(paths: &[PathBuf]) -> &'static str {
    let is_deleted = |path: &&PathBuf| path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)");
    match paths.iter().filter(is_deleted).count() {
        0 => "files open for writing",
        deleted if deleted == paths.len() => "deleted files or directories that are still open",
        _ => "files open for writing, and deleted ones that are still open",
    }
}

fn hint_without_files(users: &[String]) -> String {
    let who = match users {
        [] => "no process was found that uses the branch: those that do come and go, or are not visible from here".to_owned(),
        users => format!("these processes use the branch: {}", users.join(", ")),
    };
    format!(
        "no file was found that stays open; end the programs that write there, then try again; {who}"
    )
}

fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

/// A path, shortened to the length that a message can show.
fn shortened(path: &Path) -> String {
    const SHOWN_CHARACTERS_MAX: usize = 200;
    let text = path.to_string_lossy();
    if text.chars().count() <= SHOWN_CHARACTERS_MAX {
        return text.into_owned();
    }
    let start: String = text.chars().take(SHOWN_CHARACTERS_MAX).collect();
    format!("{start}...")
}

/// Adds the path to an error of the operating system.
pub trait Context<T> {
    /// "cannot access PATH: …"
    fn at(self, path: impl AsRef<Path>) -> Result<T, Error>;

    /// "cannot sync PATH: …", the error of a sync.
    fn or_not_durable(self, path: impl AsRef<Path>) -> Result<T, Error>
    where
        Self: Sized,
    {
        self.at(path).map_err(|error| match error {
            Error::Io { path, source } => Error::NotDurable { path, source },
            other => other,
        })
    }
}

impl<T> Context<T> for Result<T, Errno> {
    fn at(self, path: impl AsRef<Path>) -> Result<T, Error> {
        self.map_err(|errno| match (path.as_ref().to_path_buf(), errno) {
            (path, Errno::NAMETOOLONG) => Error::PathTooLong { path },
            (path, errno) => Error::Io { path, source: errno.into() },
        })
    }
}

impl<T> Context<T> for std::io::Result<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T, Error> {
        self.map_err(|source| {
            let path = path.as_ref().to_path_buf();
            match source.get_ref().and_then(|inner| inner.downcast_ref::<Refusal>()) {
                Some(refusal) => Error::Refused { path, reason: refusal.to_string() },
                None => Error::Io { path, source },
            }
        })
    }
}
