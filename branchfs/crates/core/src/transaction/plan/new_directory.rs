//! New directories, which come into the base whole.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};

use super::{Object, Planner, Source, Task};
use crate::error::Error;
use crate::rooted_dir::DirectoryEntry;
use crate::transaction::step::{Location, Step, XattrValue};

/// What becomes of an entry of a new directory.
enum Purified {
    /// It comes along.
    Comes,
    /// It comes along, with what is in it.
    Directory,
    /// It does not.
    Stays,
    /// It was moved there from elsewhere: its part in the layer is set aside first.
    Apart(Source),
}

impl Planner<'_> {
    /// A directory that one layer alone has comes into the base with all that is in it.
    pub(super) fn put_whole(
        &mut self,
        path: &Path,
        only: &Source,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(stat) = self.disk.stat(&only.now)? else {
            return Ok(());
        };
        let apart = self.purify(only, path)?;
        self.strip_marks(&only.now, path, FileType::Directory)?;
        self.put(path, only.then.clone(), Object::of(&stat), existing, found)?;
        if self.is_opaque(&only.now)? {
            let name = self.request.namespace.opaque().to_owned();
            self.plan.steps.push(Step::Strip {
                place: Location::Base(path.to_path_buf()),
                name,
                value: XattrValue(b"y".to_vec()),
            });
        }
        let moved = apart.into_iter().rev().map(|(path, source)| Task::Moved { path, source });
        self.pending.extend(moved);
        Ok(())
    }

    /// A directory that was moved into a new one.
    pub(super) fn place_moved(&mut self, path: &Path, source: Source) -> Result<(), Error> {
        let Some(redirect) = self.redirect(&source.now, path)? else { return Ok(()) };
        let mut made = self.follow_redirect(source.layer, &redirect)?;
        // In a new directory nothing of the base can be in its way.
        let nothing = source.now.clone();
        made.chain.insert(0, source);
        self.place_directory(path, made, &nothing, None)
    }

    /// A new directory goes into the base whole. Finds what must not go with it: whiteouts, and directories that were
    /// moved into it from elsewhere, whose part here is set aside first (path, part).
    fn purify(&mut self, source: &Source, path: &Path) -> Result<Vec<(PathBuf, Source)>, Error> {
        let mut apart = Vec::new();
        let mut pending = vec![(source.clone(), path.to_path_buf())];
        while let Some((source, path)) = pending.pop() {
            let mut loses_entries = false;
            for entry in self.disk.list(&source.now)? {
                let (now, then) = (source.now.join(&entry.name), source.then.join(&entry.name));
                let inner = Source { now, then, layer: source.layer };
                match self.purify_entry(&inner, &path.join(&entry.name), &entry)? {
                    Purified::Comes => {}
                    Purified::Directory => pending.push((inner, path.join(&entry.name))),
                    Purified::Stays => loses_entries = true,
                    Purified::Apart(part) => {
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

    fn purify_entry(
        &mut self,
        source: &Source,
        path: &Path,
        entry: &DirectoryEntry,
    ) -> Result<Purified, Error> {
        let Source { now, then, layer } = source;
        let is_directory = entry.kind == FileType::Directory;
        if entry.kind == FileType::CharacterDevice {
            if let Some(stat) = self.disk.stat(now)? {
                if self.is_whiteout(now, &stat)? {
                    self.plan.litter.push(now.clone());
                    return Ok(Purified::Stays);
                }
            }
        }
        let is_taken = self.takes_any(path)?;
        if !is_taken || (is_directory && self.redirect(now, path)?.is_some()) {
            let Some(stat) = self.disk.stat(now)? else { return Ok(Purified::Comes) };
            let (from, to, ino) = (then.clone(), self.aside(), stat.stx_ino);
            let step = Step::Rename { from, to: to.clone(), ino, directory: is_directory };
            self.plan.steps.push(step);
            let part = Source { now: now.clone(), then: to, layer: *layer };
            return Ok(if is_taken { Purified::Apart(part) } else { Purified::Stays });
        }
        if is_directory && self.is_opaque(now)? {
            let name = self.request.namespace.opaque().to_owned();
            let (place, value) = (Location::Base(path.to_path_buf()), XattrValue(b"y".to_vec()));
            self.metadata.push(Step::Strip { place, name, value });
        }
        self.strip_marks(now, path, entry.kind)?;
        self.added(path, entry.kind, entry.ino);
        Ok(if is_directory { Purified::Directory } else { Purified::Comes })
    }

    /// The times of a directory that loses entries on its way are what the branch shows, not when they were sorted out.
    fn keep_shown(&mut self, source: &Source, path: PathBuf) -> Result<(), Error> {
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
