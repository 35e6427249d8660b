//! New directories, which are moved into the base as a whole.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};

use super::drift::refuse_mount_point;
use super::{LayerDir, Object, Planner, Task, kind_of};
use crate::error::Error;
use crate::rooted_dir::DirectoryEntry;
use crate::transaction::step::{Location, Step, XattrValue};
use crate::write_set::Precondition;

/// How an entry of a new directory is handled.
enum EntryHandling {
    /// It is moved along.
    Comes,
    /// A directory that is moved along with its entries.
    Directory,
    /// It does not.
    Stays,
    /// A directory that was moved there from elsewhere: its layer directory is moved aside first.
    Apart(LayerDir),
}

impl Planner<'_> {
    /// Moves a directory that exists in one layer only into the base, with everything in it.
    pub(super) fn put_whole(
        &mut self,
        path: &Path,
        only: &LayerDir,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(stat) = self.disk.stat(&only.now)? else {
            return Ok(());
        };
        let apart = self.exclude_whiteouts(only, path)?;
        self.remove_overlay_xattrs(&only.now, path, FileType::Directory)?;
        self.put(path, only.then.clone(), Object::of(&stat), existing, found)?;
        if self.layers.is_opaque(&only.now)? {
            let name = self.request.namespace.opaque().to_owned();
            self.plan.steps.push(Step::RemoveXattr {
                place: Location::Base(path.to_path_buf()),
                name,
                value: XattrValue(b"y".to_vec()),
            });
        }
        let moved = apart.into_iter().rev().map(|(path, source)| Task::Moved { path, source });
        self.pending.extend(moved);
        Ok(())
    }

    /// Whether a directory that the branch created was created by others, too, where nothing was at the fork.
    pub(super) fn is_shared(
        &self,
        path: &Path,
        existing: &Location,
        found: Option<&Statx>,
    ) -> bool {
        let request = self.request;
        *existing == Location::Base(path.to_path_buf())
            && found.is_some_and(|found| kind_of(found) == FileType::Directory)
            && (request.created_by_others.contains(path)
                || self.is_in_shared(path)
                || matches!(request.preconditions.get(path), Some(Precondition::Absent)))
    }

    /// Whether the directory above a path is one that both created.
    pub(super) fn is_in_shared(&self, path: &Path) -> bool {
        path.parent().is_some_and(|parent| self.plan.shared.contains(parent))
    }

    /// Plans such a directory. It is no conflict itself if both gave it the same attributes.
    pub(super) fn merge_shared(
        &mut self,
        path: &Path,
        chain: &[LayerDir],
        existing: &Location,
    ) -> Result<(), Error> {
        let Some(top) = chain.first() else { return Ok(()) };
        let (new, old) = (self.disk.metadata(&top.now)?, self.disk.metadata(existing)?);
        let is_equal =
            (new.mode, new.uid, new.gid, &new.xattrs) == (old.mode, old.uid, old.gid, &old.xattrs);
        if !is_equal && self.included.includes(path) {
            self.plan.drift.insert(path.to_path_buf());
        }
        if let Some(found) = self.disk.stat(existing)? {
            refuse_mount_point(path, &found)?;
        }
        self.plan.shared.insert(path.to_path_buf());
        self.merge(path, chain, existing)
    }

    /// A directory that was moved into a new one.
    pub(super) fn place_moved(&mut self, path: &Path, source: LayerDir) -> Result<(), Error> {
        let Some(redirect) = self.layers.redirect(&source.now, path)? else { return Ok(()) };
        let mut made = self.layers.follow_redirect(source.layer, &redirect)?;
        // In a new directory nothing of the base can be in its way.
        let nothing = source.now.clone();
        made.chain.insert(0, source);
        self.place_directory(path, made, &nothing, None)
    }

    /// Finds the objects that must not be moved with a new directory: whiteouts, and directories that were moved into
    /// it from elsewhere, whose layer directories are moved aside first (path, layer directory).
    fn exclude_whiteouts(
        &mut self,
        source: &LayerDir,
        path: &Path,
    ) -> Result<Vec<(PathBuf, LayerDir)>, Error> {
        let mut apart = Vec::new();
        let mut pending = vec![(source.clone(), path.to_path_buf())];
        while let Some((source, path)) = pending.pop() {
            let mut loses_entries = false;
            for entry in self.disk.list(&source.now)? {
                let (now, then) = (source.now.join(&entry.name), source.then.join(&entry.name));
                let inner = LayerDir { now, then, layer: source.layer };
                match self.classify_entry(&inner, &path.join(&entry.name), &entry)? {
                    EntryHandling::Comes => {}
                    EntryHandling::Directory => pending.push((inner, path.join(&entry.name))),
                    EntryHandling::Stays => loses_entries = true,
                    EntryHandling::Apart(part) => {
                        loses_entries = true;
                        apart.push((path.join(&entry.name), part));
                    }
                }
            }
            if loses_entries {
                self.keep_shown(&source, path)?;
            }
        }
        Ok(apart)
    }

    fn classify_entry(
        &mut self,
        source: &LayerDir,
        path: &Path,
        entry: &DirectoryEntry,
    ) -> Result<EntryHandling, Error> {
        let LayerDir { now, then, layer } = source;
        let is_directory = entry.kind == FileType::Directory;
        if entry.kind == FileType::CharacterDevice {
            if let Some(stat) = self.disk.stat(now)? {
                if self.layers.is_whiteout(now, &stat)? {
                    self.plan.stray_whiteouts.push(now.clone());
                    return Ok(EntryHandling::Stays);
                }
            }
        }
        let is_taken = self.included.includes_any(path)?;
        if !is_taken || (is_directory && self.layers.redirect(now, path)?.is_some()) {
            let Some(stat) = self.disk.stat(now)? else { return Ok(EntryHandling::Comes) };
            let (from, to, ino) = (then.clone(), self.temp_location(), stat.stx_ino);
            let step = Step::Rename { from, to: to.clone(), ino, directory: is_directory };
            self.plan.steps.push(step);
            let part = LayerDir { now: now.clone(), then: to, layer: *layer };
            return Ok(if is_taken { EntryHandling::Apart(part) } else { EntryHandling::Stays });
        }
        if is_directory && self.layers.is_opaque(now)? {
            let name = self.request.namespace.opaque().to_owned();
            let (place, value) = (Location::Base(path.to_path_buf()), XattrValue(b"y".to_vec()));
            self.metadata.push(Step::RemoveXattr { place, name, value });
        }
        self.remove_overlay_xattrs(now, path, entry.kind)?;
        self.added(path, entry.kind, entry.ino);
        Ok(if is_directory { EntryHandling::Directory } else { EntryHandling::Comes })
    }

    /// Keeps the times that the branch shows of a directory that loses entries before it is moved.
    fn keep_shown(&mut self, source: &LayerDir, path: PathBuf) -> Result<(), Error> {
        let shown = self.disk.metadata(&source.now)?;
        let ino = self.disk.stat(&source.now)?.map_or(0, |stat| stat.stx_ino);
        self.metadata.push(Step::Metadata {
            path: Location::Base(path),
            before: source.now.clone(),
            ino,
            new: shown.clone(),
            old: shown,
        });
        Ok(())
    }
}
