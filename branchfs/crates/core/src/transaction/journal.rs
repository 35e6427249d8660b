//! The journal of logged transactions.
//!
//! `journal/<tx>/plan` has a header line, a line of steps, a line of changes and a line with the checksum of the three. It
//! is written to a temporary name, synced and renamed, so it is complete or absent; the checksum detects a disk that
//! ignored the sync. The directory also has `rollback` (the transaction failed and is being rolled back) and the objects
//! that were moved out of the base.
//!
//! A completed commit becomes `history/<tx>`. Its layers are in `layer-<id>`, with the before-images of exchanges; `<n>` has
//! a deleted object. Its undo becomes `undone` in it, until a redo removes it. A plan has the paths at the time of its
//! writing; [`LoggedTransaction::read`] translates them to the present ones.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags, Timespec, Timestamps};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::own_changes::Interval;
use super::progress::{Progress, progress};
use super::step::{Direction, JOURNAL, Location, TransactionRoots, directory_of};
use super::watch::{Displaced, Watch};
use super::{Change, Plan, Step};
use crate::error::{Context, Error};
use crate::injected_panics::panic_if_listed;
use crate::ownership;

pub(super) const HISTORY: &str = "history";
pub(super) const PLAN: &str = "plan";
pub(super) const ROLLBACK: &str = "rollback";
/// Its mtime is when the transaction ended.
pub(super) const FINISHED: &str = "finished";
/// The undo of a commit, inside the commit's entry.
pub(super) const UNDONE: &str = "undone";
/// Its mtime is the time when the commit's last redo was logged; its content is the number of the redo's snapshot
/// layer.
pub(super) const REDONE: &str = "redone";

/// The kind of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Commits this branch.
    Commit { branch: u64 },
    /// Undoes this commit.
    Undo { commit: u64 },
    /// Does this commit again, after an undo.
    Redo { commit: u64 },
}

impl Kind {
    /// Its word in messages.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Commit { .. } => "commit",
            Self::Undo { .. } => "undo",
            Self::Redo { .. } => "redo",
        }
    }
}

/// The description of a transaction, with its effect on other branches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    /// Its number, unique and increasing with the time of logging.
    pub(crate) transaction: u64,
    pub(crate) kind: Kind,
    /// Name of the committed branch.
    pub(crate) name: String,
    /// Layers that move into the entry with a commit: those of the branch.
    pub(crate) layers: Vec<u64>,
    /// The layer with the rest of the branch, after a partial commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rest: Option<Kept>,
    /// Branches that are stale with it.
    pub(crate) stale: Vec<u64>,
    /// The snapshot layer through which the siblings see the earlier base, if there are siblings.
    #[serde(rename = "veil")]
    pub(crate) snapshot_layer: Option<u64>,
    /// Branches that get the snapshot layer.
    #[serde(rename = "observers")]
    pub(crate) readers: Vec<u64>,
    /// Branches whose lowest snapshot layer is not needed any more, because the base is again as it shows.
    #[serde(rename = "unveiled")]
    pub(crate) resumed: Vec<u64>,
    #[serde(rename = "lifted")]
    pub(crate) dropped_snapshot: Option<u64>,
    /// When it was logged, nanoseconds since 1970.
    pub(crate) decided: i64,
    /// Bytes on disk that it moves out of the base.
    pub(crate) displaced_bytes: u64,
}

/// The rest of a branch of which a part is committed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The layer that holds it.
    pub(crate) layer: u64,
    /// Inode numbers of committed objects that had other names in the branch: the rest has copies.
    pub(crate) split: Vec<u64>,
}

/// A transaction whose plan is in the journal, or in the history.
#[derive(Debug)]
pub(crate) struct LoggedTransaction {
    pub(crate) header: Header,
    /// Its entry in the store.
    pub(crate) directory: PathBuf,
    pub(crate) steps: Vec<Step>,
    pub(crate) changes: Vec<Change>,
    /// Not part of the entry: unknown after a crash.
    pub(super) displaced: Displaced,
}

fn history_of(commit: u64) -> PathBuf {
    Path::new(HISTORY).join(commit.to_string())
}

fn layer_of(layer: u64) -> PathBuf {
    Path::new("layers").join(layer.to_string())
}

fn layer_in(entry: &Path, layer: u64) -> PathBuf {
    entry.join(format!("layer-{layer}"))
}

/// A transaction that is ready to be logged: its journal entry exists, and everything that its plan names is on disk.
#[derive(Debug)]
pub(crate) struct Prepared {
    directory: PathBuf,
    steps: Vec<Step>,
    changes: Vec<Change>,
    displaced: Displaced,
}

impl Prepared {
    /// Creates the journal entry, and makes the layer durable.
    pub(crate) fn new(disk: &TransactionRoots, plan: Plan) -> Result<Self, Error> {
        let directory = directory_of(plan.transaction);
        disk.store.make_directory(&directory, 0o700).at(&directory)?;
        ownership::set_from_root(&disk.store, &directory).at(&directory)?;
        let mut steps = plan.steps;
        for place in &plan.empty {
            let path = place.path();
            disk.store.make_directory(path, 0o700).at(path)?;
            let ino = disk.store.stat(path).at(path)?.stx_ino;
            steps.iter_mut().for_each(|step| step.set_inode(place, ino));
        }
        sync_file_system(disk, &Path::new("").join("."), Root::Store)?;
        Ok(Self { directory, steps, changes: plan.changes, displaced: plan.displaced })
    }

    /// Logs the transaction: the commit point. When this returns, the transaction will be completed.
    pub(crate) fn log(
        self,
        disk: &TransactionRoots,
        header: Header,
    ) -> Result<LoggedTransaction, Error> {
        let Self { directory, steps, changes, displaced } = self;
        let decided = LoggedTransaction { header, directory, steps, changes, displaced };
        decided.write(disk)?;
        Ok(decided)
    }
}

impl LoggedTransaction {
    fn write(&self, disk: &TransactionRoots) -> Result<(), Error> {
        let damaged = |error: serde_json::Error| Error::Corrupt(error.to_string());
        let mut text = serde_json::to_vec(&self.header).map_err(damaged)?;
        text.push(b'\n');
        serde_json::to_writer(&mut text, &self.steps).map_err(damaged)?;
        text.push(b'\n');
        serde_json::to_writer(&mut text, &self.changes).map_err(damaged)?;
        text.push(b'\n');
        let checksum = crc32fast::hash(&text);
        text.extend_from_slice(format!("{checksum:08x}\n").as_bytes());
        mark_now(disk, &self.directory.join(FINISHED))?; // on a full disk its end has an inode for that
        // The entry is on disk since the file system was synced; the rename goes with the file. If a disk keeps the name and
        // not the content, the checksum is wrong: then no step was executed yet.
        let plan = self.directory.join(PLAN);
        let draft = self.directory.join("plan.new");
        let mut file = create(disk, &draft)?;
        file.write_all(&text).at(&draft)?;
        disk.store.rename(&draft, &plan, RenameFlags::empty()).at(&plan)?;
        file.sync_all().or_not_durable(&plan)
    }

    /// Reads the plan in `directory`; `None` if it is missing or incomplete, so that none of its steps was executed.
    pub(crate) fn read(disk: &TransactionRoots, directory: &Path) -> Result<Option<Self>, Error> {
        let path = directory.join(PLAN);
        let mut file = match disk.store.open_own_file(&path, OFlags::RDONLY) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.at(&path)?,
        };
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut bytes).at(&path)?;
        let Some(text) = checked(&bytes) else {
            return Ok(None);
        };
        let mut lines = text.split(|byte| *byte == b'\n');
        let mut line = || lines.next().unwrap_or_default();
        let damaged =
            |error: serde_json::Error| Error::Corrupt(format!("{}: {error}", path.display()));
        let (header, steps, changes) = (line(), line(), line());
        let version = serde_json::from_slice::<Versioned>(header).map_err(damaged)?.version;
        if ![VERSION, VERSION_WITH_REST].contains(&version) {
            return Err(Error::Corrupt(format!(
                "{} has version {version}, this program knows {VERSION} and {VERSION_WITH_REST}",
                path.display(),
            )));
        }
        let mut decided = Self {
            header: serde_json::from_slice(header).map_err(damaged)?,
            directory: directory.to_path_buf(),
            steps: serde_json::from_slice(steps).map_err(damaged)?,
            changes: serde_json::from_slice(changes).map_err(damaged)?,
            displaced: Displaced::new(),
        };
        decided.follow(disk)?;
        Ok(Some(decided))
    }

    /// Translates the locations in the store to the present ones: the entry may have moved, and its layers into it.
    fn follow(&mut self, disk: &TransactionRoots) -> Result<(), Error> {
        let mut moved = vec![(directory_of(self.header.transaction), self.directory.clone())];
        for layer in &self.header.layers {
            let kept = layer_in(&self.directory, *layer);
            if disk.stat(&Location::Store(kept.clone()))?.is_some() {
                moved.push((layer_of(*layer), kept));
            }
        }
        moved.retain(|(from, to)| from != to);
        if moved.is_empty() {
            return Ok(());
        }
        let follow = |place: &mut Location| {
            let Location::Store(path) = place else { return };
            for (from, to) in &moved {
                if let Ok(rest) = path.strip_prefix(from) {
                    *path = to.join(rest);
                    return;
                }
            }
        };
        for step in &mut self.steps {
            step.places_mut().into_iter().for_each(follow);
        }
        Ok(())
    }

    /// Paths in the store of objects that were moved aside because the branch keeps them.
    pub(crate) fn set_aside(&self) -> impl Iterator<Item = &Path> {
        self.steps.iter().filter_map(|step| match step {
            Step::Rename { from: Location::Store(_), to: Location::Store(to), .. } => {
                Some(to.as_path())
            }
            _ => None,
        })
    }

    /// Executes all steps. If one fails, or a removed object was changed meanwhile, all steps are rolled back.
    pub(crate) fn apply(&self, disk: &TransactionRoots) -> Result<(), Error> {
        let emptied = self.times_of_sources(disk)?;
        let mut watch = Watch::new(disk, &self.displaced);
        let mut done = 0;
        let mut run_all = || {
            for step in &self.steps {
                if done == self.steps.len() / 2 {
                    panic_if_listed("transaction-half-applied");
                }
                watch.before(step)?;
                step.run(disk, Direction::Forward).map_err(|error| step.with_step(error))?;
                done += 1;
            }
            watch.after_all()
        };
        run_all().map_err(|error| {
            let taken_back = self.rollback(disk, done).and_then(|()| {
                emptied.iter().try_for_each(|(path, times)| disk.set_store_times(path, times))
            });
            rolled_back(error, taken_back)
        })
    }

    /// The times of the directories that objects are moved out of, which a rollback restores.
    fn times_of_sources(
        &self,
        disk: &TransactionRoots,
    ) -> Result<BTreeMap<PathBuf, Timestamps>, Error> {
        let mut times = BTreeMap::new();
        for step in &self.steps {
            let (Step::Rename { from: Location::Store(path), .. }
            | Step::Exchange { one: Location::Store(path), .. }) = step
            else {
                continue;
            };
            let Some(parent) = path.parent() else { continue };
            if times.contains_key(parent) {
                continue;
            }
            // One that is not there yet is made by an earlier step, out of a directory that is.
            if let Some(stat) = disk.stat(&Location::Store(parent.to_path_buf()))? {
                times.insert(parent.to_path_buf(), crate::object_copy::times(&stat));
            }
        }
        Ok(times)
    }

    /// How many steps were done before a crash.
    pub(super) fn progress(&self, disk: &TransactionRoots) -> Result<Progress, Error> {
        progress(disk, &self.steps).map_err(|error| match error {
            Error::Corrupt(why) => Error::Corrupt(format!(
                "transaction {} was interrupted, and how far it got cannot be determined: {why}; {} is kept, nothing was changed",
                self.header.transaction,
                self.directory.display()
            )),
            other => other,
        })
    }

    pub(super) fn rollback(&self, disk: &TransactionRoots, done: usize) -> Result<(), Error> {
        self.mark_rollback(disk)?;
        for step in self.steps[..done].iter().rev() {
            step.run(disk, Direction::Back)?;
        }
        self.restore_metadata(disk)
    }

    /// Restores the times of directories that were changed by moving entries in and out.
    fn restore_metadata(&self, disk: &TransactionRoots) -> Result<(), Error> {
        for step in self.steps.iter().filter(|step| matches!(step, Step::Metadata { .. })) {
            step.run(disk, Direction::Back)?;
        }
        Ok(())
    }

    /// Rolls back a transaction that was carried out and then failed with `error`, before anyone has seen it. Returns
    /// the error to report.
    pub(crate) fn rollback_all(&self, disk: &TransactionRoots, error: Error) -> Error {
        rolled_back(error, self.rollback(disk, self.steps.len()))
    }

    /// The time span in which a transaction that was just rolled back changed the base.
    pub(crate) fn rollback_interval(&self, disk: &TransactionRoots) -> Result<Interval, Error> {
        mark_now(disk, &self.directory.join(FINISHED))?;
        Ok(time_span(disk, &self.directory, PLAN)?.unwrap_or_default())
    }

    pub(super) fn mark_rollback(&self, disk: &TransactionRoots) -> Result<(), Error> {
        let mark = self.directory.join(ROLLBACK);
        if disk.stat(&Location::Store(mark.clone()))?.is_none() {
            create(disk, &mark)?;
        }
        // With all steps before it: syncing the file alone may make it durable ahead of them (btrfs).
        Self::sync(disk)
    }

    /// Half of the steps, as a crash in their middle leaves them.
    #[cfg(test)]
    pub(crate) fn run_half_for_tests(&self, disk: &TransactionRoots) -> Result<(), Error> {
        let half = &self.steps[..self.steps.len() / 2];
        half.iter().try_for_each(|step| step.run(disk, Direction::Forward))
    }

    /// Makes the outcome durable. After this the journal entry may be removed.
    pub(crate) fn sync(disk: &TransactionRoots) -> Result<(), Error> {
        sync_file_system(disk, Path::new("."), Root::Base)
    }

    /// Moves the journal entry of an applied transaction into the history; an entry that it replaces goes to `trash`, a
    /// free name in the store. Can be repeated after a crash at any point.
    pub(crate) fn finish(&self, disk: &TransactionRoots, trash: &Path) -> Result<(), Error> {
        match self.header.kind {
            Kind::Commit { .. } => {
                mark_now(disk, &self.directory.join(FINISHED))?;
                for layer in &self.header.layers {
                    let (from, to) = (layer_of(*layer), layer_in(&self.directory, *layer));
                    move_in_store(disk, &from, &to)?;
                }
                move_in_store(disk, &self.directory, &history_of(self.header.transaction))?;
            }
            Kind::Undo { commit } => {
                mark_now(disk, &self.directory.join(FINISHED))?;
                move_in_store(disk, &self.directory, &history_of(commit).join(UNDONE))?;
            }
            Kind::Redo { commit } => {
                let entry = history_of(commit);
                let redone = entry.join(REDONE);
                let snapshot_layer = self
                    .header
                    .snapshot_layer
                    .map_or(String::new(), |snapshot_layer| snapshot_layer.to_string());
                write_now(disk, &redone, snapshot_layer.as_bytes())?;
                let plan = self.directory.join(PLAN);
                let decided = disk.store.stat(&plan).at(&plan)?.stx_mtime;
                let time = Timespec { tv_sec: decided.tv_sec, tv_nsec: decided.tv_nsec.into() };
                let times = Timestamps { last_access: time, last_modification: time };
                disk.store.set_times(&redone, &times).at(&redone)?;
                mark_now(disk, &entry.join(FINISHED))?;
                let undone = entry.join(UNDONE);
                let discarded = PathBuf::from(format!("{}-undone", trash.display()));
                move_in_store(disk, &undone, &discarded)?;
                move_in_store(disk, &self.directory, trash)?;
            }
        }
        // Recovery must not replay it over later changes of the base; a rename is atomic in both directories.
        sync_directory(disk, Path::new(JOURNAL))
    }

    /// Moves the journal entry of a transaction that was rolled back to `trash`, a free name in the store.
    pub(crate) fn discard(&self, disk: &TransactionRoots, trash: &Path) -> Result<(), Error> {
        Self::sync(disk)?; // the base first: without the entry nothing would roll it back after a power loss
        discard(disk, self.header.transaction, trash)
    }
}

/// Moves the journal entry of a transaction of which no step is in effect to `trash`, durably.
pub(crate) fn discard(
    disk: &TransactionRoots,
    transaction: u64,
    trash: &Path,
) -> Result<(), Error> {
    move_in_store(disk, &directory_of(transaction), trash)?;
    sync_directory(disk, Path::new(JOURNAL))
}

/// The time span from the mtime of `start` to that of `finished`; `None` if either file is missing.
pub(super) fn time_span(
    disk: &TransactionRoots,
    directory: &Path,
    start: &str,
) -> Result<Option<Interval>, Error> {
    let end = modified(disk, &directory.join(FINISHED))?;
    Ok(modified(disk, &directory.join(start))?.zip(end))
}

fn modified(disk: &TransactionRoots, path: &Path) -> Result<Option<i64>, Error> {
    let stat = disk.stat(&Location::Store(path.to_path_buf()))?;
    Ok(stat.map(|stat| stat.stx_mtime.tv_sec * 1_000_000_000 + i64::from(stat.stx_mtime.tv_nsec)))
}

/// The error of a transaction that failed with `failed`, after a rollback with this outcome.
fn rolled_back(failed: Error, rollback: Result<(), Error>) -> Error {
    match rollback {
        Ok(()) => failed,
        Err(rollback) => Error::InDoubt { failed: Box::new(failed), rollback: Box::new(rollback) },
    }
}

/// Format of the plan.
pub(crate) const VERSION: u32 = 2;

/// The version of a plan with a rest: a program that does not know it would end the branch.
pub(crate) const VERSION_WITH_REST: u32 = 3;

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// The text of a plan without its checksum line, if that is right.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    const CHECKSUM_LINE_BYTES: usize = 9;
    let (text, checksum) = bytes.split_at(bytes.len().checked_sub(CHECKSUM_LINE_BYTES)?);
    (format!("{:08x}\n", crc32fast::hash(text)).as_bytes() == checksum).then_some(text)
}

/// Which tree's file system.
enum Root {
    Base,
    Store,
}

fn sync_file_system(disk: &TransactionRoots, path: &Path, root: Root) -> Result<(), Error> {
    let tree = match root {
        Root::Base => &disk.base,
        Root::Store => &disk.store,
    };
    let opened = tree.open(path, OFlags::RDONLY | OFlags::DIRECTORY).at(path)?;
    rustix::fs::syncfs(opened.as_fd()).or_not_durable(path)
}

fn sync_directory(disk: &TransactionRoots, path: &Path) -> Result<(), Error> {
    let opened = disk.store.open(path, OFlags::RDONLY | OFlags::DIRECTORY).or_not_durable(path)?;
    rustix::fs::fsync(opened.as_fd()).or_not_durable(path)
}

/// Moves a directory of the store. A missing one was moved before a crash.
fn move_in_store(disk: &TransactionRoots, from: &Path, to: &Path) -> Result<(), Error> {
    disk.store.invalidate(from);
    disk.store.invalidate(to);
    match disk.store.rename(from, to, RenameFlags::NOREPLACE) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error).at(from),
    }
}

/// Creates an empty file, replacing an older one, so that its times are current by the file system's clock.
fn mark_now(disk: &TransactionRoots, path: &Path) -> Result<(), Error> {
    write_now(disk, path, b"")
}

fn write_now(disk: &TransactionRoots, path: &Path, content: &[u8]) -> Result<(), Error> {
    match disk.store.remove_file(path) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error).at(path),
    }
    create(disk, path)?.write_all(content).at(path)
}

/// Creates a file in the store.
fn create(disk: &TransactionRoots, path: &Path) -> Result<std::fs::File, Error> {
    let file = disk.store.create_file(path, 0o600).at(path)?;
    ownership::set_from_root(&disk.store, path).at(path)?;
    Ok(std::fs::File::from(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::{assert_examples, assert_fields, example};

    #[test]
    fn the_document_of_the_format_has_the_lines_of_a_plan() {
        assert_examples::<Header>("Plan header");
        assert_fields::<Header>("Plan header", "field", &example("Plan header", ""));
        assert_fields::<Kept>("Plan header", "rest", &example("Plan header", "/rest"));
        assert_examples::<Vec<Step>>("Steps");
        assert_examples::<Vec<Change>>("Changes");
        assert_fields::<Change>("Changes", "field", &example("Changes", "/0"));
    }
}
