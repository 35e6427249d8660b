//! Renamed directories of the base: where they wait while the rest moves, and what a redirect in a layer leads to.
//!
//! They leave the base first, deepest first, so that chains and swaps of renames need no order among themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};

use super::{Planner, Source, kind_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::overlay::parse_redirect;
use crate::transaction::step::{Location, Step};

/// What a directory of the branch is made of.
#[derive(Debug, Default)]
pub(super) struct ResolvedDir {
    /// Its parts in the layers, top first.
    pub(super) chain: Vec<Source>,
    /// The directory of the base that it merges with.
    pub(super) origin: Option<PathBuf>,
    /// That directory has another path.
    pub(super) is_redirected: bool,
}

impl Planner<'_> {
    /// First of all, every directory of the base that is elsewhere in the branch leaves its place.
    pub(super) fn move_redirected(&mut self, root: &[Source]) -> Result<(), Error> {
        let mut renamed = Vec::new();
        for source in root {
            self.find_redirects(&source.now, &mut renamed)?;
        }
        self.choose_renamed(&renamed)?;
        let origins: BTreeSet<PathBuf> = renamed
            .into_iter()
            .map(|(_, origin)| origin)
            .filter(|origin| !self.unmoved.contains(origin))
            .collect();
        // Sorted paths have parents before children; in reverse the deepest leave first.
        for origin in origins.into_iter().rev() {
            let from = Location::Base(origin.clone());
            let Some(stat) = self.disk.stat(&from)? else {
                self.plan.drift.insert(origin);
                continue;
            };
            self.check_present(&origin, &stat)?;
            let to = self.aside();
            self.plan.steps.push(Step::Rename {
                from,
                to: to.clone(),
                ino: stat.stx_ino,
                directory: true,
            });
            self.moved.insert(origin, to);
        }
        Ok(())
    }

    fn find_redirects(
        &mut self,
        root: &Location,
        found: &mut Vec<(PathBuf, PathBuf)>,
    ) -> Result<(), Error> {
        let mut pending = vec![(root.clone(), PathBuf::new())];
        while let Some((directory, path)) = pending.pop() {
            for entry in self.disk.list(&directory)? {
                if entry.kind != FileType::Directory {
                    continue;
                }
                let (place, path) = (directory.join(&entry.name), path.join(&entry.name));
                if let Some(origin) = self.origin(&place, &path)? {
                    self.plan.written.insert(origin.clone());
                    if self.disk.stat(&Location::Base(origin.clone()))?.is_some() {
                        found.push((path.clone(), origin));
                    }
                }
                pending.push((place, path));
            }
        }
        Ok(())
    }

    pub(super) fn redirect(&self, place: &Location, path: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(value) = self.disk.xattr(place, self.request.namespace.redirect())? else {
            return Ok(None);
        };
        let origin = parse_redirect(&value, path);
        origin.map(Some).ok_or_else(|| {
            Error::Corrupt(format!("{} has a redirect that leads out", path.display()))
        })
    }

    /// What the directory `name` of `sources` is made of; `here` is its path in the base, where it merges with that.
    pub(super) fn follow(
        &self,
        sources: &[Source],
        name: &std::ffi::OsStr,
        here: Option<PathBuf>,
    ) -> Result<ResolvedDir, Error> {
        let mut made = ResolvedDir::default();
        for source in sources {
            let (now, then) = (source.now.join(name), source.then.join(name));
            let Some(stat) = self.disk.stat(&now)? else { continue };
            if kind_of(&stat) != FileType::Directory {
                return Ok(made); // a whiteout, or hidden by what is above
            }
            made.chain.push(Source { now: now.clone(), then, layer: source.layer });
            if self.is_opaque(&now)? {
                return Ok(made);
            }
            if let Some(redirect) = self.redirect(&now, Path::new(name))? {
                let below = self.follow_redirect(source.layer, &redirect)?;
                made.chain.extend(below.chain);
                return Ok(ResolvedDir { origin: below.origin, is_redirected: true, ..made });
            }
        }
        Ok(ResolvedDir { origin: here, ..made })
    }

    /// What a redirect in a layer means: the layers below know the directory under that path, and may have renamed any
    /// part of it themselves.
    pub(super) fn follow_redirect(
        &self,
        layer: usize,
        redirect: &Path,
    ) -> Result<ResolvedDir, Error> {
        let roots = self.request.layers.iter().enumerate().skip(layer + 1);
        let root = |(layer, path): (usize, &PathBuf)| {
            let place = Location::Store(path.clone());
            Source { now: place.clone(), then: place, layer }
        };
        let mut made = ResolvedDir {
            chain: roots.map(root).collect(),
            origin: Some(PathBuf::new()),
            is_redirected: true,
        };
        for name in redirect {
            let here = made.origin.map(|origin| origin.join(name));
            made = ResolvedDir { is_redirected: true, ..self.follow(&made.chain, name, here)? };
        }
        Ok(made)
    }

    /// The path in the base that a redirect at `place` leads to in the end; `None` for a directory of the branch's own.
    fn origin(&self, place: &Location, path: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(redirect) = self.redirect(place, path)? else { return Ok(None) };
        let is_in = |layer: &&PathBuf| place.path().starts_with(layer);
        let layer = self.request.layers.iter().position(|layer| is_in(&layer)).unwrap_or(0);
        Ok(self.follow_redirect(layer, &redirect)?.origin)
    }

    /// A directory of the base that was renamed, with what the branch changed in it.
    pub(super) fn put_moved(
        &mut self,
        path: &Path,
        chain: &[Source],
        existing: &Location,
        found: Option<&Statx>,
        origin: PathBuf,
        waiting: Location,
    ) -> Result<(), Error> {
        if let Some(found) = found {
            self.remove(path, existing, found)?;
        } else {
            self.check(existing, None)?;
        }
        let now = Location::Base(origin.clone());
        let Some(stat) = self.disk.stat(&now)? else {
            return Ok(());
        };
        let to = Location::Base(path.to_path_buf());
        self.plan.steps.push(Step::Rename {
            from: waiting,
            to,
            ino: stat.stx_ino,
            directory: true,
        });
        self.change(path, ChangeKind::Renamed, Some(origin), FileType::Directory);
        self.merge(path, chain, &now)
    }
}
