//! The parts of a plan for partial commits.
//!
//! Changes that are left out stay in the layer. Those in a new directory are moved aside before the directory is moved
//! into the base; deletions that are left out stay in the base. A renamed directory is committed as a whole or not at
//! all.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::{FileType, Statx};

use super::drift::refuse_mount_point;
use super::{BranchLayers, LayerDir, Planner, Task, kind_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::path_filter::PathFilter;
use crate::transaction::step::{Location, Metadata, Step};

/// Work that is left for a tree of which a part is removed.
enum Taken {
    Name(PathBuf, Location, Statx),
    /// Everything below the directory was examined.
    Kept(PathBuf, Location, Statx),
}

/// Decides which paths the commit includes.
pub(super) struct IncludedPaths<'a> {
    pub(super) layers: BranchLayers<'a>,
    pub(super) filter: &'a PathFilter,
    /// Renamed directories that are not moved, under both their names.
    pub(super) kept_renames: BTreeSet<PathBuf>,
}

impl IncludedPaths<'_> {
    pub(super) fn is_all(&self) -> bool {
        self.filter.is_all() && self.kept_renames.is_empty()
    }

    pub(super) fn includes(&self, path: &Path) -> bool {
        self.filter.includes(path) && !path.ancestors().any(|part| self.kept_renames.contains(part))
    }

    /// Whether an object of a layer at a path, or below it, is included.
    pub(super) fn includes_any(&self, path: &Path) -> Result<bool, Error> {
        if self.is_all() || self.includes(path) {
            return Ok(true);
        }
        for layer in &self.layers.request.layers {
            if self.includes_below(path, &Location::Store(layer.join(path)))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn includes_below(&self, path: &Path, place: &Location) -> Result<bool, Error> {
        let mut pending = vec![(path.to_path_buf(), place.clone())];
        while let Some((path, place)) = pending.pop() {
            let Some(stat) = self.layers.disk.stat(&place)? else { continue };
            let is_directory = kind_of(&stat) == FileType::Directory;
            // The object of the base at this path is replaced together with it.
            let is_hiding = matches!(place, Location::Store(_))
                && (!is_directory || self.layers.is_opaque(&place)?);
            if is_hiding {
                pending.push((path.clone(), Location::Base(path.clone())));
            }
            if !is_directory {
                continue;
            }
            for entry in self.layers.disk.list(&place)? {
                let path = path.join(&entry.name);
                if self.includes(&path) {
                    return Ok(true);
                }
                pending.push((path, place.join(&entry.name)));
            }
        }
        Ok(false)
    }

    /// Whether a path and everything below it is included. Lists the directories at `place` if there is a filter.
    pub(super) fn includes_whole(&self, path: &Path, place: &Location) -> Result<bool, Error> {
        if self.is_all() {
            return Ok(true);
        }
        let mut pending = vec![(path.to_path_buf(), place.clone())];
        while let Some((path, place)) = pending.pop() {
            if !self.includes(&path) {
                return Ok(false);
            }
            if self
                .layers
                .disk
                .stat(&place)?
                .is_none_or(|stat| kind_of(&stat) != FileType::Directory)
            {
                continue;
            }
            for entry in self.layers.disk.list(&place)? {
                pending.push((path.join(&entry.name), place.join(&entry.name)));
            }
        }
        Ok(true)
    }

    pub(super) fn includes_chain(&self, path: &Path, chain: &[LayerDir]) -> Result<bool, Error> {
        for source in chain {
            if !self.includes_whole(path, &source.now)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Planner<'_> {
    /// Records the directory `path` if the commit leaves out the directory itself or one of `names` in it.
    pub(super) fn record_partially_included<'n>(
        &mut self,
        path: &Path,
        mut names: impl Iterator<Item = &'n OsString>,
    ) {
        let includes_all = self.included.is_all()
            || (self.included.includes(path)
                && names.all(|name| self.included.includes(&path.join(name))));
        if !includes_all {
            self.partially_included.insert(path.to_path_buf());
        }
    }

    /// Keeps the mtime of a directory unless this commit adds or removes names in it: in the branch an excluded path
    /// may have changed it.
    pub(super) fn keep_times(&mut self) {
        if self.partially_included.is_empty() {
            return;
        }
        let mut moved = BTreeSet::new();
        for change in &self.plan.changes {
            if !matches!(
                change.change,
                ChangeKind::Modified | ChangeKind::Metadata | ChangeKind::Type
            ) {
                moved.extend(change.path.parent());
                moved.extend(change.from.as_deref().and_then(Path::parent));
            }
        }
        for step in &mut self.metadata {
            let Step::Metadata { path: Location::Base(path), new, old, .. } = step else {
                continue;
            };
            if self.partially_included.contains(path) && !moved.contains(path.as_path()) {
                new.mtime = old.mtime;
            }
        }
    }

    /// Chooses the renamed directories that are committed. `renamed` has their new and old paths.
    pub(super) fn choose_renamed(&mut self, renamed: &[(PathBuf, PathBuf)]) -> Result<(), Error> {
        if self.included.is_all() {
            return Ok(());
        }
        let selection = &self.request.selection;
        for (path, origin) in renamed {
            let is_skipped = selection.overlaps_skipped(path) || selection.overlaps_skipped(origin);
            match (self.included.includes(path), self.included.includes(origin)) {
                (true, true) if !is_skipped => {}
                (one, other)
                    if is_skipped || (!one && !other && !self.included.includes_any(path)?) =>
                {
                    self.included.kept_renames.extend([path.clone(), origin.clone()]);
                }
                _ => {
                    return Err(Error::Usage(format!(
                        "the directory {} was renamed to {}: choose both paths or neither; nothing was committed",
                        origin.display(),
                        path.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Removes the included paths that the branch deleted or replaced. A directory stays if it is excluded, or if an
    /// entry stays.
    pub(super) fn remove_included(
        &mut self,
        path: &Path,
        existing: &Location,
        found: &Statx,
    ) -> Result<(), Error> {
        let mut pending = vec![Taken::Name(path.to_path_buf(), existing.clone(), *found)];
        while let Some(taken) = pending.pop() {
            match taken {
                Taken::Name(path, existing, found)
                    if self.included.includes_whole(&path, &existing)? =>
                {
                    self.remove(&path, &existing, &found)?;
                }
                Taken::Name(path, existing, found) if kind_of(&found) == FileType::Directory => {
                    let entries = self.disk.list(&existing)?;
                    let below = entries
                        .iter()
                        .map(|entry| (path.join(&entry.name), existing.join(&entry.name)));
                    let below: Vec<(PathBuf, Location)> = below.collect();
                    pending.push(Taken::Kept(path, existing, found));
                    for (path, place) in below.into_iter().rev() {
                        if let Some(found) = self.existing(&place)? {
                            pending.push(Taken::Name(path, place, found));
                        }
                    }
                }
                Taken::Name(..) => {}
                Taken::Kept(path, existing, found) => {
                    self.keep_directory(&path, &existing, &found)?
                }
            }
        }
        Ok(())
    }

    /// A directory that stays although entries of it are removed: a rollback restores its time.
    fn keep_directory(
        &mut self,
        path: &Path,
        existing: &Location,
        found: &Statx,
    ) -> Result<(), Error> {
        let old = self.disk.metadata(existing)?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let new = Metadata { mtime: (seconds, now.subsec_nanos()), ..old.clone() };
        self.partially_included.insert(path.to_path_buf());
        let (path, before) = (Location::Base(path.to_path_buf()), existing.clone());
        self.metadata.push(Step::Metadata { path, before, ino: found.stx_ino, new, old });
        Ok(())
    }

    /// Refuses to replace a directory by an object of another type if something in it stays, and to replace an object
    /// by a directory that is excluded itself.
    pub(super) fn refuse_partial(
        &self,
        path: &Path,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        if found.is_none() || self.included.includes_whole(path, existing)? {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "{} is of another type in the branch: choose all of it or nothing; nothing was committed",
            path.display()
        )))
    }

    /// Plans a partially selected directory with which the branch replaced one of the base, name by name.
    pub(super) fn merge_replaced_dir(
        &mut self,
        path: &Path,
        sources: &[LayerDir],
        existing: &Location,
    ) -> Result<(), Error> {
        let mut tasks = Vec::new();
        if let Some(found) = self.existing(existing)? {
            refuse_mount_point(path, &found)?;
        }
        self.plan_metadata(path, &sources[0], existing)?;
        let mut names: BTreeMap<OsString, Option<usize>> = BTreeMap::new();
        for (position, source) in sources.iter().enumerate() {
            for entry in self.disk.list(&source.now)? {
                names.entry(entry.name).or_insert(Some(position));
            }
        }
        for entry in self.disk.list(existing)? {
            names.entry(entry.name).or_insert(None);
        }
        self.record_partially_included(path, names.keys());
        let all: Arc<[LayerDir]> = sources.into();
        for (name, position) in names {
            let first = position.unwrap_or(all.len());
            let (path, existing) = (path.join(&name), existing.join(&name));
            tasks.push(Task::MergedName { path, name, sources: Arc::clone(&all), first, existing });
        }
        self.pending.extend(tasks.into_iter().rev());
        Ok(())
    }

    /// Plans one name of such a directory; `sources` starts with the first layer that has it.
    pub(super) fn plan_merged_name(
        &mut self,
        path: &Path,
        name: &OsString,
        sources: &[LayerDir],
        existing: &Location,
    ) -> Result<(), Error> {
        let found = self.existing(existing)?;
        let own = match sources.first() {
            Some(source) => {
                let now = source.now.join(name);
                match self.disk.stat(&now)? {
                    Some(stat) if self.layers.is_whiteout(&now, &stat)? => None,
                    stat => stat,
                }
            }
            None => None,
        };
        match (own, found) {
            (None, Some(found)) => self.remove_included(path, existing, &found),
            (None, None) => Ok(()),
            (Some(own), Some(found))
                if kind_of(&own) == FileType::Directory
                    && kind_of(&found) == FileType::Directory =>
            {
                let made = self.layers.follow(sources, name, None)?;
                if made.is_redirected {
                    return self.plan_name(path, name, sources, existing);
                }
                if self.included.includes_any(path)?
                    || self.included.includes_below(path, existing)?
                {
                    self.merge_replaced_dir(path, &made.chain, existing)?;
                }
                Ok(())
            }
            (Some(_), _) => self.plan_name(path, name, sources, existing),
        }
    }
}
