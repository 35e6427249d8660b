//! Renamed directories of the base: where they wait while the rest moves, and where a redirect in a layer leads.
//!
//! They leave the base first, deepest first, so that chains and swaps of renames need no order among themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use super::{BranchLayers, LayerDir, Planner, kind_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::overlay::{self, Below, Redirect};
use crate::transaction::step::{Location, Step};

/// The layer directories and the directory of the base that a directory of the branch is merged from.
#[derive(Debug, Default)]
pub(super) struct ResolvedDir {
    /// Its parts in the layers, top first.
    pub(super) chain: Vec<LayerDir>,
    /// The directory of the base that it merges with.
    pub(super) origin: Option<PathBuf>,
    /// Whether `origin` differs from the directory's own path, because it was renamed.
    pub(super) is_redirected: bool,
}

impl BranchLayers<'_> {
    /// Finds the renamed directories below `root`: new and old path, if the old one exists in the base. All old paths are
    /// added to `written`.
    fn find_redirects(
        &self,
        root: &Location,
        found: &mut Vec<(PathBuf, PathBuf)>,
        written: &mut BTreeSet<PathBuf>,
    ) -> Result<(), Error> {
        let mut pending = vec![(root.clone(), PathBuf::new())];
        while let Some((directory, path)) = pending.pop() {
            for entry in self.disk.list(&directory)? {
                if entry.kind != FileType::Directory {
                    continue;
                }
                let (place, path) = (directory.join(&entry.name), path.join(&entry.name));
                if let Some(origin) = self.origin(&place, &path)? {
                    written.insert(origin.clone());
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
        let namespace = self.request.namespace;
        let found = overlay::redirect(self.disk.tree(place), place.path(), namespace);
        Ok(found.map_err(|error| damage(error, path))?.map(|redirect| redirect.of(path)))
    }

    /// Resolves the directory `name` of `sources`; `here` is its path in the base, if it merges with that.
    ///
    /// [`crate::layer_stack`] returns what a branch shows. A plan asks for something else: the path in the base that the
    /// branch's own layers lead to, also if others have removed the directory there, which is drift.
    pub(super) fn follow(
        &self,
        sources: &[LayerDir],
        name: &std::ffi::OsStr,
        here: Option<PathBuf>,
    ) -> Result<ResolvedDir, Error> {
        let mut made = ResolvedDir::default();
        for (position, source) in sources.iter().enumerate() {
            let (now, then) = (source.now.join(name), source.then.join(name));
            let Some(stat) = self.disk.stat(&now)? else { continue };
            if kind_of(&stat) != FileType::Directory {
                return Ok(made); // a whiteout, or hidden by an upper layer
            }
            let (tree, namespace) = (self.disk.tree(&now), self.request.namespace);
            let below = overlay::below(tree, now.path(), namespace);
            let redirect = match below.map_err(|error| damage(error, now.path()))? {
                Below::SameName => None,
                Below::Nothing => Some(ResolvedDir::default()),
                Below::Redirected(Redirect::Path(path)) => {
                    Some(self.follow_redirect(source.layer, &path)?)
                }
                Below::Redirected(Redirect::Sibling(other)) => {
                    let here = here.as_ref().map(|here| here.with_file_name(&other));
                    let below = self.follow(&sources[position + 1..], &other, here)?;
                    Some(ResolvedDir { is_redirected: true, ..below })
                }
            };
            made.chain.push(LayerDir { now, then, layer: source.layer });
            if let Some(below) = redirect {
                made.chain.extend(below.chain);
                return Ok(ResolvedDir { chain: made.chain, ..below });
            }
        }
        Ok(ResolvedDir { origin: here, ..made })
    }

    /// Resolves a redirect in a layer. The layers below know the directory by that path, and may have renamed any part
    /// of it themselves.
    pub(super) fn follow_redirect(
        &self,
        layer: usize,
        redirect: &Path,
    ) -> Result<ResolvedDir, Error> {
        let roots = self.request.layers.iter().enumerate().skip(layer + 1);
        let root = |(layer, path): (usize, &PathBuf)| {
            let place = Location::Store(path.clone());
            LayerDir { now: place.clone(), then: place, layer }
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

    /// The path in the base that a redirect at `place` finally leads to; `None` for a directory that only the branch
    /// has.
    pub(super) fn origin(&self, place: &Location, path: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(redirect) = self.redirect(place, path)? else { return Ok(None) };
        let is_in = |layer: &&PathBuf| place.path().starts_with(layer);
        let layer = self.request.layers.iter().position(|layer| is_in(&layer)).unwrap_or(0);
        Ok(self.follow_redirect(layer, &redirect)?.origin)
    }
}

/// The error of a redirect of the object at `path`.
fn damage(error: Errno, path: &Path) -> Error {
    match error {
        Errno::UCLEAN => {
            Error::Corrupt(format!("{} has a redirect that leads out", path.display()))
        }
        _ => Error::Io { path: path.to_path_buf(), source: error.into() },
    }
}

impl Planner<'_> {
    /// Moves every directory of the base that the branch renamed out of its place. These are the first steps.
    pub(super) fn move_redirected(&mut self, root: &[LayerDir]) -> Result<(), Error> {
        let mut renamed = Vec::new();
        for source in root {
            self.layers.find_redirects(&source.now, &mut renamed, &mut self.plan.written)?;
        }
        self.choose_renamed(&renamed)?;
        let origins: BTreeSet<PathBuf> = renamed
            .into_iter()
            .map(|(_, origin)| origin)
            .filter(|origin| !self.included.kept_renames.contains(origin))
            .collect();
        // Sorted paths have parents before children; in reverse the deepest leave first.
        for origin in origins.into_iter().rev() {
            let from = Location::Base(origin.clone());
            let Some(stat) = self.disk.stat(&from)? else {
                self.plan.drift.insert(origin);
                continue;
            };
            self.check_present(&origin, &stat)?;
            let to = self.temp_location();
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

    /// Plans a renamed directory of the base, with the branch's changes in it.
    pub(super) fn put_moved(
        &mut self,
        path: &Path,
        chain: &[LayerDir],
        existing: &Location,
        found: Option<&Statx>,
        origin: PathBuf,
        waiting: Location,
    ) -> Result<(), Error> {
        if let Some(found) = found {
            if !self.included.includes_whole(path, existing)? {
                return Err(Error::Usage(format!(
                    "{} was replaced by the directory {}: choose all of it or nothing; nothing was committed",
                    path.display(),
                    origin.display()
                )));
            }
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
        self.plan.add_change(path, ChangeKind::Renamed, Some(origin), FileType::Directory);
        self.merge(path, chain, &now)
    }
}
