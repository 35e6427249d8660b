//! The journal of decided commits, and what is done about them after a crash.
//!
//! `journal/<tx>/plan` is a header line, a line of steps and a line with the checksum of both. It is written under
//! another name, synced and renamed, so it is there whole or not at all; the checksum guards against a disk that lied.
//! Beside it lie `rollback` (the commit failed and is being taken back) and the objects that the commit moved out.

use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::step::{Direction, Disk};
use super::{Plan, Step};
use crate::error::{Context, Error};

const JOURNAL: &str = "journal";
const PLAN: &str = "plan";
const ROLLBACK: &str = "rollback";

/// What a commit does to the registry of branches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    /// Number of the commit: the branch's id, which is never used twice.
    pub(crate) transaction: u64,
    /// The branch that is committed.
    pub(crate) branch: u64,
    /// Siblings that are stale with it.
    pub(crate) stale: Vec<u64>,
}

/// A commit whose plan is in the journal.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) header: Header,
    pub(super) steps: Vec<Step>,
}

/// A commit that a crash interrupted, settled.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) decided: Decided,
    /// The base is as the commit wanted it; otherwise it is as before.
    pub(crate) is_committed: bool,
}

/// Where the objects lie that a commit moves out of the base.
pub(crate) fn directory_of(transaction: u64) -> PathBuf {
    Path::new(JOURNAL).join(transaction.to_string())
}

impl Decided {
    /// Makes the layer durable, then decides: when this returns, the commit will happen.
    pub(crate) fn decide(disk: &Disk, header: Header, plan: Plan) -> Result<Self, Error> {
        let directory = directory_of(header.transaction);
        disk.store.make_directory(&directory, 0o700).at(&directory)?;
        // The owner of the store must be able to remove all of it.
        let owner = disk.store.stat(Path::new("")).at(&directory)?;
        let given = disk.store.set_owner(&directory, Some(owner.stx_uid), Some(owner.stx_gid));
        given.at(&directory)?;
        sync_file_system(disk, &Path::new("").join("."), Root::Store)?;
        let decided = Self { header, steps: plan.steps };
        decided.write(disk)?;
        Ok(decided)
    }

    fn write(&self, disk: &Disk) -> Result<(), Error> {
        let directory = directory_of(self.header.transaction);
        let damaged = |error: serde_json::Error| Error::Corrupt(error.to_string());
        let mut text = serde_json::to_vec(&self.header).map_err(damaged)?;
        text.push(b'\n');
        serde_json::to_writer(&mut text, &self.steps).map_err(damaged)?;
        text.push(b'\n');
        let checksum = crc32fast::hash(&text);
        text.extend_from_slice(format!("{checksum:08x}\n").as_bytes());
        write_durably(disk, &directory, PLAN, &text)?;
        sync_directory(disk, Path::new(JOURNAL))
    }

    /// Reads a plan; `None` where it is missing or not whole, so that nothing of it was done.
    pub(super) fn read(disk: &Disk, directory: &Path) -> Result<Option<Self>, Error> {
        let path = directory.join(PLAN);
        let file = match disk.store.open(&path, OFlags::RDONLY) {
            Err(Errno::NOENT) => return Ok(None),
            other => other.at(&path)?,
        };
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::fs::File::from(file), &mut bytes).at(&path)?;
        const CHECKSUM_LINE_BYTES: usize = 9;
        let Some((text, checksum)) =
            bytes.len().checked_sub(CHECKSUM_LINE_BYTES).map(|end| bytes.split_at(end))
        else {
            return Ok(None);
        };
        if format!("{:08x}\n", crc32fast::hash(text)).as_bytes() != checksum {
            return Ok(None);
        }
        let mut lines = text.split(|byte| *byte == b'\n');
        let (header, steps) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let damaged =
            |error: serde_json::Error| Error::Corrupt(format!("{}: {error}", path.display()));
        let header: Header = serde_json::from_slice(header).map_err(damaged)?;
        if header.version != VERSION {
            return Err(Error::Corrupt(format!(
                "{} has version {}, this program knows {VERSION}",
                path.display(),
                header.version
            )));
        }
        Ok(Some(Self { header, steps: serde_json::from_slice(steps).map_err(damaged)? }))
    }

    /// Does all steps. When one fails, those before it are taken back and the base is as before.
    pub(crate) fn apply(&self, disk: &Disk) -> Result<(), Error> {
        for (done, step) in self.steps.iter().enumerate() {
            if let Err(error) = step.run(disk, Direction::Forward) {
                return Err(match self.roll_back(disk, done) {
                    Ok(()) => error,
                    Err(second) => Error::Corrupt(format!(
                        "{error}; taking the commit back failed too: {second}; the journal is kept, the next mount settles it"
                    )),
                });
            }
        }
        Ok(())
    }

    /// How many steps were done. They are done in order, and the file systems we know make renames durable in order, so
    /// the last one that is found done tells; steps after it that can be repeated are repeated.
    fn done(&self, disk: &Disk) -> Result<usize, Error> {
        for (position, step) in self.steps.iter().enumerate().rev() {
            if step.is_done(disk)? == Some(true) {
                return Ok(position + 1);
            }
        }
        Ok(0)
    }

    fn roll_back(&self, disk: &Disk, done: usize) -> Result<(), Error> {
        self.mark_rollback(disk)?;
        for step in self.steps[..done].iter().rev() {
            step.run(disk, Direction::Back)?;
        }
        self.restore_metadata(disk)
    }

    /// Puts the times of directories back that moving entries in and out has touched.
    fn restore_metadata(&self, disk: &Disk) -> Result<(), Error> {
        for step in self.steps.iter().filter(|step| matches!(step, Step::Metadata { .. })) {
            step.run(disk, Direction::Back)?;
        }
        Ok(())
    }

    pub(super) fn mark_rollback(&self, disk: &Disk) -> Result<(), Error> {
        write_durably(disk, &directory_of(self.header.transaction), ROLLBACK, b"")
    }

    /// Makes the outcome durable. After this the journal entry may go.
    pub(crate) fn sync(disk: &Disk) -> Result<(), Error> {
        sync_file_system(disk, Path::new("."), Root::Base)
    }

    /// Takes the journal entry, with what the commit moved out of the base, to `to` in the store.
    pub(crate) fn retire(&self, disk: &Disk, to: &Path) -> Result<(), Error> {
        let directory = directory_of(self.header.transaction);
        disk.store.forget(&directory);
        disk.store.rename(&directory, to, rustix::fs::RenameFlags::NOREPLACE).at(&directory)?;
        sync_directory(disk, Path::new(JOURNAL))
    }
}

/// Format of the plan.
pub(crate) const VERSION: u32 = 1;

/// Settles every commit that a crash interrupted: forward, or back where it was being taken back. Can itself be
/// interrupted at any point. The caller brings the registry in line and then retires each.
pub(crate) fn recover(disk: &Disk) -> Result<Vec<Recovered>, Error> {
    let mut recovered = Vec::new();
    for entry in disk.store.list(Path::new(JOURNAL)).at(JOURNAL)? {
        let directory = Path::new(JOURNAL).join(&entry.name);
        let Some(decided) = Decided::read(disk, &directory)? else {
            disk.store.remove_all(&directory).at(&directory)?; // undecided: nothing was moved yet
            continue;
        };
        let is_committed = disk.stat(&super::Place::Store(directory.join(ROLLBACK)))?.is_none();
        let done = decided.done(disk)?;
        if is_committed {
            decided.steps[done..].iter().try_for_each(|step| step.run(disk, Direction::Forward))?;
        } else {
            decided.roll_back(disk, done)?;
        }
        Decided::sync(disk)?;
        recovered.push(Recovered { decided, is_committed });
    }
    Ok(recovered)
}

/// Which tree's file system.
enum Root {
    Base,
    Store,
}

fn sync_file_system(disk: &Disk, path: &Path, root: Root) -> Result<(), Error> {
    let tree = match root {
        Root::Base => &disk.base,
        Root::Store => &disk.store,
    };
    let opened = tree.open(path, OFlags::RDONLY | OFlags::DIRECTORY).at(path)?;
    rustix::fs::syncfs(opened.as_fd()).at(path)
}

fn sync_directory(disk: &Disk, path: &Path) -> Result<(), Error> {
    let opened = disk.store.open(path, OFlags::RDONLY | OFlags::DIRECTORY).at(path)?;
    rustix::fs::fsync(opened.as_fd()).at(path)
}

/// Writes a file so that after a crash it is there whole or not at all.
fn write_durably(disk: &Disk, directory: &Path, name: &str, content: &[u8]) -> Result<(), Error> {
    let path = directory.join(name);
    let mut draft = directory.join(name).into_os_string();
    draft.push(OsStr::new(".new"));
    let draft = PathBuf::from(draft);
    match disk.store.remove_file(&draft) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error).at(&draft),
    }
    let mut file = std::fs::File::from(disk.store.create_file(&draft, 0o600).at(&draft)?);
    file.write_all(content).at(&draft)?;
    file.sync_all().at(&draft)?;
    disk.store.rename(&draft, &path, rustix::fs::RenameFlags::empty()).at(&path)?;
    sync_directory(disk, directory)
}
