//! The control files of the published BranchFS: `.branchfs_ctl` at the mount's root and in every branch's root.
//!
//! A mount has them only on request, because they sit where a branch's own processes work. The file of a branch means
//! that branch; the file at the root means the *current* branch, which is main until `switch:NAME` says otherwise. They
//! are driven by ioctls (fork, commit, abort: `ioctl-number(7)` of the published daemon) or by writing a word. Only an
//! errno comes back; the control socket says more.
//!
//! The files are nodes of the mount that no layer knows ([`crate::filesystem`] shows them, [`ControlFile`] is the
//! interface); nothing of them can be listed, committed, renamed or removed.

use std::sync::{Mutex, PoisonError, Weak};
use std::time::SystemTime;

use rustix::io::Errno;

use crate::filesystem::ControlFile;
use branchfs_core::error::Error;
use branchfs_core::mount::{MAIN, ViewId};
use branchfs_core::workspace::{BranchId, BranchRef, CommitOptions, MAIN_BRANCH, Workspace};
use branchfs_fuse::FsResult;

/// `_IOR('b', 0, [u8; 128])`: fork; hands out the new branch's name, padded with NUL.
const CREATE: u32 = 0x8080_6200;

/// `_IO('b', 1)`.
const COMMIT: u32 = 0x6201;

/// `_IO('b', 2)`.
const ABORT: u32 = 0x6202;

/// Size of the buffer that CREATE fills.
const NAME_BUFFER_BYTES: usize = 128;

/// A command written to a control file.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Command {
    /// Fork the branch; `None`: under a name that is chosen here.
    Create(Option<String>),
    Commit,
    Abort,
    /// Make another branch the current one.
    Switch(String),
}

impl Command {
    /// Reads a written command: a word, in either case, and after a colon a name. Blanks and NULs around are dropped.
    fn from_text(text: &[u8]) -> FsResult<Self> {
        let text = std::str::from_utf8(text).map_err(|_| Errno::INVAL)?;
        let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
        let (word, name) = match text.split_once(':') {
            Some((word, name)) => (word, Some(name.trim())),
            None => (text, None),
        };
        match (word.to_ascii_lowercase().as_str(), name) {
            ("create", name) => Ok(Self::Create(name.map(str::to_owned))),
            ("commit", None) => Ok(Self::Commit),
            ("abort", None) => Ok(Self::Abort),
            ("switch", Some(name)) => Ok(Self::Switch(name.to_owned())),
            _ => Err(Errno::INVAL),
        }
    }

    fn from_ioctl(number: u32) -> FsResult<Self> {
        match number {
            CREATE => Ok(Self::Create(None)),
            COMMIT => Ok(Self::Commit),
            ABORT => Ok(Self::Abort),
            _ => Err(Errno::NOTTY),
        }
    }
}

/// The control files of one mount.
pub(crate) struct ControlFiles {
    /// Weak: the workspace's filesystem owns this.
    workspace: Weak<Workspace>,
    /// The branch that the file at the root means, followed by its ancestors; the first one still open is used, else
    /// main.
    current: Mutex<Vec<BranchId>>,
}

impl ControlFiles {
    pub(crate) fn new(workspace: Weak<Workspace>) -> Self {
        Self { workspace, current: Mutex::new(Vec::new()) }
    }

    fn run(&self, slot: ViewId, command: &Command) -> FsResult<Option<String>> {
        let workspace = self.workspace.upgrade().ok_or(Errno::NODEV)?;
        let branch = self.meant(&workspace, slot)?;
        let selector = BranchRef::Id(branch);
        match command {
            Command::Create(name) => create(&workspace, name.as_deref(), &selector).map(Some),
            Command::Commit => workspace.commit(&selector, &CommitOptions::default()).map(|_| None),
            Command::Abort => workspace.abort(&selector).map(|()| None),
            Command::Switch(name) if slot == MAIN => {
                workspace.lineage(&BranchRef::Name(name.clone())).map(|lineage| {
                    *self.current() = lineage;
                    None
                })
            }
            Command::Switch(_) => return Err(Errno::INVAL),
        }
        .map_err(|error| {
            tracing::info!("{command:?} by the control file was refused: {error}");
            to_errno(&error)
        })
    }

    /// The branch that the control file in this view's root means.
    fn meant(&self, workspace: &Workspace, slot: ViewId) -> FsResult<BranchId> {
        if slot != MAIN {
            return workspace.id_at(slot).ok_or(Errno::STALE);
        }
        let mut current = self.current();
        let gone = current.iter().take_while(|id| workspace.name_of(**id).is_none()).count();
        current.drain(..gone);
        Ok(current.first().copied().unwrap_or(MAIN_BRANCH))
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Vec<BranchId>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner) // replaced and truncated as a whole
    }
}

impl ControlFile for ControlFiles {
    fn read(&self, slot: ViewId) -> FsResult<String> {
        let workspace = self.workspace.upgrade().ok_or(Errno::NODEV)?;
        let branch = self.meant(&workspace, slot)?;
        Ok(workspace.name_of(branch).unwrap_or_else(|| "main".to_owned()))
    }

    fn write(&self, slot: ViewId, text: &[u8]) -> FsResult<()> {
        self.run(slot, &Command::from_text(text)?).map(|_| ())
    }

    fn ioctl(&self, slot: ViewId, number: u32) -> FsResult<Vec<u8>> {
        let command = Command::from_ioctl(number)?;
        let mut handed_out = self.run(slot, &command)?.map(String::into_bytes).unwrap_or_default();
        if matches!(command, Command::Create(_)) {
            handed_out.resize(NAME_BUFFER_BYTES, 0);
        }
        Ok(handed_out)
    }
}

/// Forks; without a name, under one of the clock's time, which is tried again should it be taken.
fn create(workspace: &Workspace, name: Option<&str>, parent: &BranchRef) -> Result<String, Error> {
    loop {
        let name = name.map_or_else(chosen_name, str::to_owned);
        match workspace.create(&name, parent) {
            Ok(branch) => return Ok(branch.name),
            Err(Error::Exists(_)) if name.starts_with(CHOSEN) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The prefix of names that are chosen here.
const CHOSEN: &str = "branch-";

fn chosen_name() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{CHOSEN}{:016x}", since.as_nanos())
}

/// The one place where the errors of verbs become numbers.
fn to_errno(error: &Error) -> Errno {
    match error {
        Error::Usage(_) | Error::NothingChosen { .. } | Error::Name { .. } => Errno::INVAL,
        Error::Exists(_) => Errno::EXIST,
        Error::NotFound(_)
        | Error::NothingKept(_)
        | Error::NotNext { .. }
        | Error::NoSuchCommit(_) => Errno::NOENT,
        // What the published package takes for a conflict, and nothing else is.
        Error::Stale(_) | Error::Conflict { .. } => Errno::STALE,
        Error::Frozen { .. }
        | Error::Busy { .. }
        | Error::Written { .. }
        | Error::InUse(_)
        | Error::MountInUse
        | Error::Changed(_) => Errno::BUSY,
        Error::Unsupported(_) => Errno::OPNOTSUPP,
        Error::Refused { .. } => Errno::PERM,
        Error::PathTooLong { .. } => Errno::NAMETOOLONG,
        Error::Incomplete { .. } | Error::InDoubt { .. } | Error::Stopped(_) => Errno::IO,
        Error::Io { source, .. }
        | Error::Step { source, .. }
        | Error::NotDurable { source, .. } => Errno::from_io_error(source).unwrap_or(Errno::IO),
        Error::Corrupt(_) | Error::SeveralUnfinished { .. } => Errno::UCLEAN,
        Error::Panicked(_) => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_words_in_either_case_with_a_name_after_a_colon() {
        let create = |name: &str| Command::Create(Some(name.to_owned()));
        for (text, wanted) in [
            (&b"commit\n"[..], Ok(Command::Commit)),
            (b" Abort \0\0", Ok(Command::Abort)),
            (b"create", Ok(Command::Create(None))),
            (b"CREATE: Name ", Ok(create("Name"))),
            (b"create:a:b", Ok(create("a:b"))),
            (b"switch:x", Ok(Command::Switch("x".to_owned()))),
            (b"switch", Err(Errno::INVAL)),
            (b"commit:x", Err(Errno::INVAL)),
            (b"\xff", Err(Errno::INVAL)),
            (b"", Err(Errno::INVAL)),
        ] {
            assert_eq!(Command::from_text(text), wanted, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn numbers_are_those_of_the_published_package() {
        assert_eq!(Command::from_ioctl(0x8080_6200), Ok(Command::Create(None)));
        assert_eq!(Command::from_ioctl(0x6201), Ok(Command::Commit));
        assert_eq!(Command::from_ioctl(0x6202), Ok(Command::Abort));
        assert_eq!(Command::from_ioctl(0x8008_6601), Err(Errno::NOTTY), "FS_IOC_GETFLAGS");
        assert!(chosen_name().len() < NAME_BUFFER_BYTES, "a NUL ends it");
    }
}
