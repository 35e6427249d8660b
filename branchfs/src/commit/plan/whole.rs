//! New directories, which come into the base whole.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};

use super::{Object, Planner, Source};
use crate::commit::step::{Mark, Place, Step};
use crate::error::Error;

impl Planner<'_> {
    /// A directory that one layer alone has comes into the base with all that is in it.
    pub(super) fn put_whole(
        &mut self,
        path: &Path,
        only: &Source,
        existing: &Place,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(stat) = self.disk.stat(&only.now)? else {
            return Ok(());
        };
        let apart = self.purify(only, path)?;
        self.strip_marks(&only.now, path, FileType::Directory)?;
        self.put(path, only.then.clone(), Object::of(&stat), existing, found)?;
        if self.is_opaque(&only.now) {
            let name = self.request.namespace.opaque().to_owned();
            self.plan.steps.push(Step::Strip {
                place: Place::Base(path.to_path_buf()),
                name,
                value: Mark(b"y".to_vec()),
            });
        }
        for (path, source) in apart {
            let Some(redirect) = self.redirect(&source.now, &path)? else { continue };
            let mut made = self.follow_redirect(source.layer, &redirect)?;
            // In a new directory nothing of the base can be in its way.
            let nothing = source.now.clone();
            made.chain.insert(0, source);
            self.place_directory(&path, made, &nothing, None)?;
        }
        Ok(())
    }

    /// A new directory goes into the base whole. Finds what must not go with it: whiteouts, and directories that were
    /// moved into it from elsewhere, whose part here is set aside first (path, part).
    fn purify(&mut self, source: &Source, path: &Path) -> Result<Vec<(PathBuf, Source)>, Error> {
        let mut apart = Vec::new();
        let mut loses_entries = false;
        for entry in self.disk.list(&source.now)? {
            let (now, then) = (source.now.join(&entry.name), source.then.join(&entry.name));
            let path = path.join(&entry.name);
            if entry.kind == FileType::CharacterDevice {
                if let Some(stat) = self.disk.stat(&now)? {
                    if self.is_whiteout(&now, &stat) {
                        self.plan.litter.push(now);
                        loses_entries = true;
                        continue;
                    }
                }
            }
            if !self.takes_any(&path)? {
                if let Some(stat) = self.disk.stat(&now)? {
                    loses_entries = true;
                    let directory = entry.kind == FileType::Directory;
                    let (to, ino) = (self.aside(), stat.stx_ino);
                    self.plan.steps.push(Step::Rename { from: then, to, ino, directory });
                }
                continue;
            }
            if entry.kind == FileType::Directory {
                if self.redirect(&now, &path)?.is_some() {
                    let Some(stat) = self.disk.stat(&now)? else {
                        continue;
                    };
                    loses_entries = true;
                    let to = self.aside();
                    self.plan.steps.push(Step::Rename {
                        from: then,
                        to: to.clone(),
                        ino: stat.stx_ino,
                        directory: true,
                    });
                    apart.push((path, Source { now, then: to, layer: source.layer }));
                    continue;
                }
                if self.is_opaque(&now) {
                    let name = self.request.namespace.opaque().to_owned();
                    self.metadata.push(Step::Strip {
                        place: Place::Base(path.clone()),
                        name,
                        value: Mark(b"y".to_vec()),
                    });
                }
                let inner = Source { now: now.clone(), then, layer: source.layer };
                apart.extend(self.purify(&inner, &path)?);
            }
            self.strip_marks(&now, &path, entry.kind)?;
            self.added(&path, entry.kind, entry.ino);
        }
        if loses_entries {
            // Its times are what the branch shows, not when its entries were sorted out.
            let (shown, path) = (self.disk.metadata(&source.now)?, Place::Base(path.to_path_buf()));
            let ino = self.disk.stat(&source.now)?.map_or(0, |stat| stat.stx_ino);
            self.metadata.push(Step::Metadata {
                path,
                before: source.now.clone(),
                ino,
                new: shown.clone(),
                old: shown,
            });
        }
        Ok(apart)
    }
}
