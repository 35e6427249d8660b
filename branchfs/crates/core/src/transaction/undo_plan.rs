//! Undo and redo: plans the steps of a transaction in reverse, each compared with the present base.
//!
//! An object that the transaction put into the base must be unchanged: the same inode, and no ctime after the end of the
//! transaction, except for our own changes since ([`super::own_changes`]). Directories that it added are compared recursively.
//! The name of a removed object must be free. Each difference is drift. A forced plan moves externally changed objects
//! aside with the new transaction.
//!
//! All steps are planned before the first is executed, so their paths are translated by the moves planned so far.
//!
//! Cost: one `statx` for each step, and for each object below a directory that the transaction added.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::fs::{FileType, Statx};

use super::change::{Change, one_change_a_path};
use super::journal::LoggedTransaction;
use super::own_changes::OwnCtimeChanges;
use super::path_map::PathMap;
use super::plan::{Plan, kind_of};
use super::step::{Location, Metadata, Step, TransactionRoots, directory_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::write_set::Fingerprint;

/// The transaction to reverse.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UndoRequest<'a> {
    pub(crate) past: &'a LoggedTransaction,
    /// When the transaction was applied, nanoseconds since 1970 by the clock of the file system.
    pub(crate) finished: i64,
    /// Changes of ctimes that are no drift.
    pub(crate) own_changes: &'a OwnCtimeChanges,
    /// Number of the undo transaction.
    pub(crate) transaction: u64,
}

/// Works out how to undo a transaction. Changes nothing.
pub(crate) fn plan_undo(
    disk: &TransactionRoots,
    reversal: &UndoRequest<'_>,
) -> Result<Plan, Error> {
    let moved_out = reversal.past.steps.iter().filter_map(moved_out).collect();
    let mut planner = UndoPlanner {
        disk,
        reversal,
        plan: Plan { transaction: reversal.transaction, ..Plan::default() },
        moves: PathMap::default(),
        moved_out,
        next: 0,
    };
    let (last, first): (Vec<&Step>, Vec<&Step>) =
        reversal.past.steps.iter().partition(|step| matches!(step, Step::Metadata { .. }));
    for step in first.into_iter().rev() {
        planner.rollback_all(step)?;
    }
    for step in last {
        planner.take_back_metadata(step)?;
    }
    let changes = reversal.past.changes.iter().map(|change| planner.reversed(change));
    let changes = changes.collect::<Result<Vec<_>, _>>()?.concat();
    Ok(Plan { changes: one_change_a_path(changes), ..planner.plan })
}

fn moved_out(step: &Step) -> Option<&Location> {
    match step {
        Step::Rename { from: Location::Base(_), to: to @ Location::Store(_), .. } => Some(to),
        _ => None,
    }
}

struct UndoPlanner<'a> {
    disk: &'a TransactionRoots,
    reversal: &'a UndoRequest<'a>,
    plan: Plan,
    moves: PathMap,
    /// Locations to which the transaction moved objects of the base.
    moved_out: BTreeSet<&'a Location>,
    next: usize,
}

impl UndoPlanner<'_> {
    /// The changes that take a change back. All steps must be planned. A directory that was renamed over another object
    /// goes back to its earlier path, and the object returns.
    fn reversed(&self, change: &Change) -> Result<Vec<Change>, Error> {
        let back = |path: &Path, kind| Change {
            path: path.to_path_buf(),
            change: kind,
            from: None,
            kind: change.kind,
        };
        let Some(from) = &change.from else {
            return Ok(vec![back(
                &change.path,
                match change.change {
                    ChangeKind::Added => ChangeKind::Deleted,
                    ChangeKind::Deleted => ChangeKind::Added,
                    kind => kind,
                },
            )]);
        };
        let mut changes = Vec::new();
        if change.change != ChangeKind::Renamed {
            if let Some((_, stat)) = self.now(&Location::Base(change.path.clone()))? {
                let kind = kind_of(&stat).into();
                changes.push(Change { kind, ..back(&change.path, ChangeKind::Added) });
            }
        }
        let from_here = Some(change.path.clone());
        changes.push(Change { from: from_here, ..back(from, ChangeKind::Renamed) });
        Ok(changes)
    }

    fn rollback_all(&mut self, step: &Step) -> Result<(), Error> {
        match step {
            Step::Rename { from, to, ino, directory } => {
                self.take_back_rename((from, to), *ino, *directory)
            }
            Step::Exchange { one, other, ino_one, ino_other, directory } => {
                self.take_back_exchange((one, other), (*ino_one, *ino_other), *directory)
            }
            // The mark meant the layer; its object is marked no more wherever it goes.
            Step::RemoveXattr { .. } | Step::Metadata { .. } => Ok(()),
        }
    }

    fn take_back_rename(
        &mut self,
        (from, to): (&Location, &Location),
        ino: u64,
        directory: bool,
    ) -> Result<(), Error> {
        if let (Location::Store(_), Location::Store(_), None) = (from, to, self.now(to)?) {
            return Ok(()); // it was set aside for the branch, which has kept it
        }
        let (mut ino, mut directory) = (ino, directory);
        if let Location::Base(path) = to {
            let Some((real, stat)) = self.now(to)? else {
                self.plan.drift.insert(path.clone());
                return Ok(()); // forced: others removed it, so there is nothing to take away
            };
            if stat.stx_ino != ino {
                self.plan.drift.insert(path.clone());
                (ino, directory) = (stat.stx_ino, directory || is_directory(&stat));
            } else if !self.moved_out.contains(from) {
                // A directory of the base that was only moved is not compared: external changes stay in it.
                self.check(&real, path, &stat, from)?;
            }
        }
        if let Location::Base(path) = from {
            self.make_room(from, path)?;
        }
        self.push(Step::Rename { from: to.clone(), to: from.clone(), ino, directory });
        Ok(())
    }

    fn take_back_exchange(
        &mut self,
        (one, other): (&Location, &Location),
        (ino_one, ino_other): (u64, u64),
        directory: bool,
    ) -> Result<(), Error> {
        let path = other.path();
        let step = match self.now(other)? {
            None => {
                self.plan.drift.insert(path.to_path_buf());
                self.make_room(other, path)?;
                Step::Rename { from: one.clone(), to: other.clone(), ino: ino_other, directory }
            }
            Some((real, stat)) => {
                if stat.stx_ino == ino_one {
                    self.check(&real, path, &stat, one)?;
                } else {
                    self.plan.drift.insert(path.to_path_buf());
                }
                Step::Exchange {
                    one: one.clone(),
                    other: other.clone(),
                    ino_one: ino_other,
                    ino_other: stat.stx_ino,
                    directory: directory || is_directory(&stat),
                }
            }
        };
        self.push(step);
        Ok(())
    }

    /// Restores the attributes that the transaction changed on a directory; external changes stay.
    fn take_back_metadata(&mut self, step: &Step) -> Result<(), Error> {
        let Step::Metadata { path, before, ino, new, old } = step else { return Ok(()) };
        let found = self.disk.stat(path)?.filter(|stat| stat.stx_ino == *ino);
        if found.is_none() {
            if let Location::Base(path) = path {
                self.plan.drift.insert(path.clone());
            }
            return Ok(());
        }
        let current = self.disk.metadata(path)?;
        let (wanted, has_drifted) = restore_metadata(new, old, &current, self.reversal.finished);
        if has_drifted {
            self.plan.drift.insert(path.path().to_path_buf());
        }
        self.plan.steps.push(Step::Metadata {
            path: before.clone(),
            before: path.clone(),
            ino: *ino,
            new: wanted,
            old: current,
        });
        Ok(())
    }

    /// Frees a path of the base, which may have been used externally.
    fn make_room(&mut self, place: &Location, path: &Path) -> Result<(), Error> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let is_there = self.now(&Location::Base(parent.to_path_buf()))?;
        if !is_there.is_some_and(|(_, stat)| is_directory(&stat)) {
            return Err(Error::Conflict {
                message: format!(
                    "{} cannot be put back: the directory that contained it was removed",
                    path.display()
                ),
                paths: vec![path.to_path_buf()],
                hint: "make the directory again, then repeat it",
            });
        }
        if let Some((_, stat)) = self.now(place)? {
            self.plan.drift.insert(path.to_path_buf());
            self.next += 1;
            let aside = directory_of(self.reversal.transaction).join(self.next.to_string());
            self.push(Step::Rename {
                from: place.clone(),
                to: Location::Store(aside),
                ino: stat.stx_ino,
                directory: is_directory(&stat),
            });
        }
        Ok(())
    }

    fn push(&mut self, step: Step) {
        self.moves.add(&step);
        self.plan.steps.push(step);
    }

    /// The present location of the object that will be at `place` after the steps planned so far.
    fn now(&self, place: &Location) -> Result<Option<(Location, Statx)>, Error> {
        let Some(real) = self.moves.origin(place) else { return Ok(None) };
        Ok(self.disk.stat(&real)?.map(|stat| (real, stat)))
    }

    /// Checks that an object that moves into the store is as the transaction left it.
    fn check(
        &mut self,
        real: &Location,
        path: &Path,
        stat: &Statx,
        to: &Location,
    ) -> Result<(), Error> {
        let UndoRequest { finished, own_changes, .. } = *self.reversal;
        let is_ours = |ctime: i64| ctime <= finished || own_changes.contains(ctime, finished);
        let mut pending = vec![(real.clone(), path.to_path_buf(), *stat, to.clone())];
        while let Some((real, path, stat, to)) = pending.pop() {
            self.plan.displaced.insert(to.clone(), Fingerprint::of(&stat));
            if is_directory(&stat) {
                for entry in self.disk.list(&real)? {
                    let (real, path) = (real.join(&entry.name), path.join(&entry.name));
                    if self.moves.origin(&Location::Base(path.clone())).as_ref() != Some(&real) {
                        continue; // it leaves by a step of its own, which has looked at it
                    }
                    if let Some(stat) = self.disk.stat(&real)? {
                        pending.push((real, path, stat, to.join(&entry.name)));
                    }
                }
            }
            if !own_changes
                .equivalent_ctimes(stat.stx_ino, Fingerprint::of(&stat).ctime)
                .any(is_ours)
            {
                self.plan.drift.insert(path);
            }
        }
        Ok(())
    }
}

fn is_directory(stat: &Statx) -> bool {
    kind_of(stat) == FileType::Directory
}

/// Returns the attributes to restore, and whether they were changed externally.
fn restore_metadata(
    new: &Metadata,
    old: &Metadata,
    current: &Metadata,
    finished: i64,
) -> (Metadata, bool) {
    let mut has_drifted = false;
    let mut wanted = current.clone();
    let mut pick = |changed: bool, drifted: bool| {
        has_drifted |= changed && drifted;
        changed
    };
    if pick(new.mode != old.mode, current.mode != new.mode) {
        wanted.mode = old.mode;
    }
    if pick(
        (new.uid, new.gid) != (old.uid, old.gid),
        (current.uid, current.gid) != (new.uid, new.gid),
    ) {
        (wanted.uid, wanted.gid) = (old.uid, old.gid);
    }
    if pick(new.xattrs != old.xattrs, current.xattrs != new.xattrs) {
        wanted.xattrs.clone_from(&old.xattrs);
    }
    // If entries were added or removed externally since, the later mtime is kept.
    let (seconds, nanoseconds) = current.mtime;
    if current.mtime == new.mtime || seconds * 1_000_000_000 + i64::from(nanoseconds) <= finished {
        wanted.mtime = old.mtime;
    }
    wanted.atime = old.atime.max(current.atime);
    (wanted, has_drifted)
}
