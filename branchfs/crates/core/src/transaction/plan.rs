//! Working out a commit: which steps turn the base into what the branch shows, and what stands against it.
//!
//! The walk goes through the branch's own layers alone; its cost follows the changed names. At each name the topmost
//! layer that has it decides:
//!
//! | layer | base | step |
//! |---|---|---|
//! | object | nothing | rename in |
//! | object | something | exchange |
//! | whiteout | something | rename out |
//! | directory, new or opaque | | as an object, whole; then what upper layers change in it |
//! | directory, merging | directory | recurse; its attributes last |
//! | directory with a redirect | | the base's directory moves there; recurse |

mod drift;
mod metadata;
mod new_directory;
mod plan_rest;
mod redirect;
mod selected_paths;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Statx};

use super::change::{Change, Renames, one_change_a_path};
use super::own_changes::OwnCtimeChanges;
use super::step::{Location, Metadata, Step, TransactionRoots, directory_of};
use super::watch::Displaced;
use crate::diff::ChangeKind;
use crate::error::{Context, Error};
use crate::overlay::{self, Namespace};
use crate::path_filter::PathFilter;
use crate::rooted_dir::check_length;
use crate::view::is_hidden;
use crate::write_set::{Fingerprint, Precondition};
use drift::{refuse_folding, refuse_immutable};
pub(crate) use plan_rest::{Item, Rest, What};
use redirect::ResolvedDir;
use selected_paths::IncludedPaths;

/// The input of a commit.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) transaction: u64,
    /// The branch's own layers, top first: directories in the store that hold the layer's content.
    pub(crate) layers: Vec<PathBuf>,
    pub(crate) namespace: Namespace,
    /// The preconditions of the layers in the base.
    pub(crate) preconditions: BTreeMap<PathBuf, Precondition>,
    /// When the branch was forked, nanoseconds since 1970. The criterion for paths without a precondition.
    pub(crate) forked: i64,
    /// Overlayfs wrote the layers: files may have its attributes, and may be metacopies.
    pub(crate) by_kernel: bool,
    /// Snapshot layers of the branch, top first: directories in the store (`crate::transaction::snapshot_layer`).
    pub(crate) snapshot_layers: Vec<PathBuf>,
    /// Attributes that objects of the base had at the fork and that our own transactions changed since, in addition to
    /// those that the snapshot layers show.
    pub(crate) attributes_at_fork: BTreeMap<PathBuf, Metadata>,
    /// Directories that other commits created since the fork where nothing was.
    pub(crate) created_by_others: BTreeSet<PathBuf>,
    /// Which changed paths are committed.
    pub(crate) selection: PathFilter,
    /// Changes that are not committed are dropped.
    pub(crate) drops_rest: bool,
    /// Changes of ctimes that are no drift.
    pub(crate) own_changes: OwnCtimeChanges,
    /// Inode number of a copied-up object in a layer -> that of its origin in the base.
    pub(crate) origins: HashMap<u64, u64>,
}

/// A worked-out commit.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Number of the transaction that it was worked out for.
    pub(crate) transaction: u64,
    pub(crate) steps: Vec<Step>,
    /// Sorted by path.
    pub(crate) changes: Vec<Change>,
    /// Paths that the branch wrote in addition to `changes`: the origins of moved directories, and names that both the
    /// branch and others removed.
    pub(crate) written: BTreeSet<PathBuf>,
    /// Paths of the base that were changed externally since the branch depended on them.
    pub(crate) drift: BTreeSet<PathBuf>,
    /// Directories that both the branch and others created since the fork. They are merged name by name.
    pub(crate) shared: BTreeSet<PathBuf>,
    /// Empty directories to create before the plan is logged.
    pub(crate) empty: Vec<Location>,
    /// Whiteouts that hide nothing and must not get into the base.
    pub(crate) stray_whiteouts: Vec<Location>,
    /// What the branch keeps: nothing if all of it is committed, or the rest is dropped.
    pub(crate) rest: Rest,
    /// Fingerprints of the objects that leave the base.
    pub(crate) displaced: Displaced,
    /// Bytes on disk of the objects that leave the base, which the history has to keep.
    pub(crate) displaced_bytes: u64,
}

impl Plan {
    /// Whether the plan changes nothing but times of directories. The root's attributes are only in the steps.
    pub(crate) fn changes_nothing(&self) -> bool {
        self.changes.is_empty() && self.steps.iter().all(Step::sets_times_alone)
    }
}

impl Plan {
    /// The attributes that the plan sets on directories of the base; external changes since the fork are kept.
    pub(crate) fn merged_attributes(&self) -> impl Iterator<Item = (&Path, &Metadata)> {
        self.steps.iter().filter_map(|step| match step {
            Step::Metadata { path: Location::Base(path), new, .. } => Some((path.as_path(), new)),
            _ => None,
        })
    }

    /// Records an object that leaves the base for a location in the store.
    fn displace(&mut self, to: &Location, stat: &Statx) {
        const BLOCK_BYTES: u64 = 512; // the unit of st_blocks, stat(2)
        self.displaced_bytes += stat.stx_blocks * BLOCK_BYTES;
        self.displaced.insert(to.clone(), Fingerprint::of(stat));
    }

    fn add_change(
        &mut self,
        path: &Path,
        change: ChangeKind,
        from: Option<PathBuf>,
        kind: FileType,
    ) {
        self.changes.push(Change { path: path.to_path_buf(), change, from, kind: kind.into() });
    }
}

/// A directory in one of the branch's layers: its present location, and its location when its children are moved.
#[derive(Clone, Debug)]
struct LayerDir {
    now: Location,
    then: Location,
    /// Position in the stack.
    layer: usize,
}

/// An object to be moved into the base.
#[derive(Clone, Copy, Debug)]
struct Object {
    kind: FileType,
    ino: u64,
}

impl Object {
    fn of(stat: &Statx) -> Self {
        Self { kind: kind_of(stat), ino: stat.stx_ino }
    }
}

/// Work that is left. The names of a directory are planned one after the other, each with everything below it: the task
/// on top comes first.
enum Task {
    /// A name of a directory that exists in the base's final tree; `first` is the first source that has it.
    Name {
        path: PathBuf,
        name: OsString,
        sources: Arc<[LayerDir]>,
        first: usize,
        existing: Location,
    },
    /// A name of a directory that is partially included (`selected_paths`).
    MergedName {
        path: PathBuf,
        name: OsString,
        sources: Arc<[LayerDir]>,
        first: usize,
        existing: Location,
    },
    /// A directory that was moved into a new one (`new_directory`).
    Moved { path: PathBuf, source: LayerDir },
}

/// The layers of the branch and the base, for lookups. Never changes the plan.
#[derive(Clone, Copy)]
struct BranchLayers<'a> {
    disk: &'a TransactionRoots,
    request: &'a Request,
}

struct Planner<'a> {
    disk: &'a TransactionRoots,
    request: &'a Request,
    layers: BranchLayers<'a>,
    included: IncludedPaths<'a>,
    plan: Plan,
    /// Directories of the base that move: path -> temporary location.
    moved: HashMap<PathBuf, Location>,
    metadata: Vec<Step>,
    /// Directories of the base that are partially included, or excluded themselves.
    partially_included: BTreeSet<PathBuf>,
    /// Deleted objects, and added objects that were copied from the base; a pair may be a rename.
    renames: Renames,
    /// Inode numbers of objects of the base of which a layer has a copy.
    copied: HashSet<u64>,
    pending: Vec<Task>,
    next: usize,
}

/// Works out the commit of a branch. Changes nothing.
pub(crate) fn plan(disk: &TransactionRoots, request: &Request) -> Result<Plan, Error> {
    let layers = BranchLayers { disk, request };
    let mut planner = Planner {
        disk,
        request,
        layers,
        included: IncludedPaths {
            layers,
            filter: &request.selection,
            kept_renames: BTreeSet::new(),
        },
        plan: Plan { transaction: request.transaction, ..Plan::default() },
        moved: HashMap::new(),
        metadata: Vec::new(),
        partially_included: BTreeSet::new(),
        renames: Renames::default(),
        copied: request.origins.values().copied().collect(),
        pending: Vec::new(),
        next: 0,
    };
    let root: Vec<LayerDir> = request
        .layers
        .iter()
        .enumerate()
        .map(|(layer, path)| LayerDir {
            now: Location::Store(path.clone()),
            then: Location::Store(path.clone()),
            layer,
        })
        .collect();
    planner.move_redirected(&root)?;
    planner.merge(Path::new(""), &root, &Location::Base(PathBuf::new()))?;
    planner.plan_pending()?;
    planner.keep_times();
    if !request.drops_rest && !planner.included.is_all() {
        planner.plan.rest = planner.rest(&root)?;
    }
    let mut plan = planner.plan;
    for change in &plan.changes {
        check_length(&change.path).at(&change.path)?;
    }
    plan.steps.append(&mut planner.metadata);
    plan.changes = planner.renames.joined(one_change_a_path(std::mem::take(&mut plan.changes)));
    Ok(plan)
}

impl BranchLayers<'_> {
    pub(super) fn is_opaque(&self, place: &Location) -> Result<bool, Error> {
        let tree = self.disk.tree(place);
        overlay::is_opaque(tree, place.path(), self.request.namespace).at(place.path())
    }

    pub(super) fn is_whiteout(&self, place: &Location, stat: &Statx) -> Result<bool, Error> {
        overlay::is_whiteout(self.disk.tree(place), place.path(), stat).at(place.path())
    }
}

impl Planner<'_> {
    /// A free location in the journal entry.
    fn temp_location(&mut self) -> Location {
        self.next += 1;
        Location::Store(directory_of(self.request.transaction).join(self.next.to_string()))
    }

    /// Plans a directory that exists in the base's final tree: `existing` is the present location of its entries,
    /// `path` their final path.
    fn merge(
        &mut self,
        path: &Path,
        sources: &[LayerDir],
        existing: &Location,
    ) -> Result<(), Error> {
        let mut names: BTreeMap<OsString, usize> = BTreeMap::new();
        for (position, source) in sources.iter().enumerate() {
            for entry in self.disk.list(&source.now)? {
                names.entry(entry.name).or_insert(position);
            }
        }
        let is_root = path.as_os_str().is_empty(); // it was tried out at the mount
        if !names.is_empty() && !is_root {
            refuse_folding(self.disk, existing)?;
        }
        self.plan_metadata(path, &sources[0], existing)?;
        self.record_partially_included(path, names.keys());
        let sources: Arc<[LayerDir]> = sources.into();
        self.pending.extend(names.into_iter().rev().map(|(name, first)| {
            let (path, existing) = (path.join(&name), existing.join(&name));
            Task::Name { path, name, sources: Arc::clone(&sources), first, existing }
        }));
        Ok(())
    }

    /// Plans until nothing is left to plan.
    fn plan_pending(&mut self) -> Result<(), Error> {
        while let Some(task) = self.pending.pop() {
            match task {
                Task::Name { path, name, sources, first, existing } => {
                    self.plan_name(&path, &name, &sources[first..], &existing)?;
                }
                Task::MergedName { path, name, sources, first, existing } => {
                    self.plan_merged_name(&path, &name, &sources[first..], &existing)?;
                }
                Task::Moved { path, source } => self.place_moved(&path, source)?,
            }
        }
        Ok(())
    }

    /// The object at a location of the base, unless it is moved away.
    fn existing(&self, place: &Location) -> Result<Option<Statx>, Error> {
        match place {
            Location::Base(path) if self.moved.contains_key(path) => Ok(None),
            _ => self.disk.stat(place),
        }
    }

    fn plan_name(
        &mut self,
        path: &Path,
        name: &std::ffi::OsStr,
        sources: &[LayerDir],
        existing: &Location,
    ) -> Result<(), Error> {
        if is_hidden(path) {
            return Ok(()); // the store, which the kernel's layers hide by a whiteout
        }
        let (now, then) = (sources[0].now.join(name), sources[0].then.join(name));
        let Some(stat) = self.disk.stat(&now)? else {
            return Ok(());
        };
        let found = self.existing(existing)?;
        if self.layers.is_whiteout(&now, &stat)? {
            if self.is_in_shared(path) {
                return Ok(()); // of a name that the branch created and removed
            }
            return match found {
                Some(found) => self.remove_included(path, existing, &found),
                None if !self.included.includes(path) => Ok(()),
                None => {
                    // Others removed it as well, or it moved away.
                    self.plan.written.insert(path.to_path_buf());
                    Ok(())
                }
            };
        }
        let kind = kind_of(&stat);
        let is_clash =
            |found: &Statx| kind != FileType::Directory || kind_of(found) != FileType::Directory;
        if self.is_in_shared(path)
            && self.included.includes(path)
            && found.as_ref().is_some_and(is_clash)
        {
            self.plan.drift.insert(path.to_path_buf());
        }
        if kind != FileType::Directory {
            if !self.included.includes(path) {
                return found.map_or(Ok(()), |found| self.remove_included(path, existing, &found));
            }
            self.refuse_partial(path, existing, found.as_ref())?;
            self.check(existing, found.as_ref())?;
            if self.layers.is_metacopy(&now, kind)? {
                return self.plan_attributes(path, &now, existing, found.as_ref());
            }
            self.remove_overlay_xattrs(&now, path, kind)?;
            return self.put(path, then, Object::of(&stat), existing, found.as_ref());
        }
        if !self.included.includes_any(path)? {
            return Ok(());
        }
        self.plan_directory(path, name, sources, existing, found.as_ref())
    }

    fn plan_directory(
        &mut self,
        path: &Path,
        name: &std::ffi::OsStr,
        sources: &[LayerDir],
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let here = match existing {
            Location::Base(path) => Some(path.clone()),
            Location::Store(_) => None,
        };
        let made = self.layers.follow(sources, name, here)?;
        self.place_directory(path, made, existing, found)
    }

    /// Plans a directory with the layer directories `made`; `existing` is the object of the base at its path.
    fn place_directory(
        &mut self,
        path: &Path,
        made: ResolvedDir,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let ResolvedDir { chain, origin, is_redirected } = made;
        if !is_redirected && self.is_shared(path, existing, found) {
            return self.merge_shared(path, &chain, existing);
        }
        if let Some(origin) = origin {
            let waiting = self.moved.get(&origin).filter(|_| is_redirected).cloned();
            if let Some(waiting) = waiting {
                return self.put_moved(path, &chain, existing, found, origin, waiting);
            }
            if *existing == Location::Base(origin.clone())
                && found.is_some_and(|found| kind_of(found) == FileType::Directory)
            {
                self.check(existing, found)?;
                if self.layers.was_missing_at_fork(path)? {
                    // A directory that merges with an externally created one is no change.
                    self.plan.written.insert(path.to_path_buf());
                }
                return self.merge(path, &chain, existing);
            }
            let below = Location::Base(origin);
            if is_redirected && self.disk.stat(&below)?.is_none() {
                self.check(&below, None)?; // others removed it
            }
        }
        let is_replaced = found.is_some_and(|found| kind_of(found) == FileType::Directory);
        if is_replaced
            && !(self.included.includes_whole(path, existing)?
                && self.included.includes_chain(path, &chain)?)
        {
            return self.merge_replaced_dir(path, &chain, existing);
        }
        if !is_replaced {
            self.refuse_partial(path, existing, found)?;
        }
        self.check(existing, found)?;
        match <[LayerDir; 1]>::try_from(chain) {
            Ok([only]) => self.put_whole(path, &only, existing, found),
            Err(chain) if chain.is_empty() => Ok(()),
            Err(chain) => {
                // Several layers make it up: an empty directory comes first, then what each of them has in it.
                let empty = self.temp_location();
                self.plan.empty.push(empty.clone());
                let stand_in = Object { kind: FileType::Directory, ino: 0 };
                self.put(path, empty.clone(), stand_in, existing, found)?;
                self.merge(path, &chain, &empty)
            }
        }
    }

    /// Exchanges an object of the layer with that of the base.
    fn put(
        &mut self,
        path: &Path,
        from: Location,
        Object { kind, ino }: Object,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let to = Location::Base(path.to_path_buf());
        match found {
            Some(found) => {
                self.plan.displace(&from, found);
                if kind_of(found) == FileType::Directory {
                    self.list_deleted(path, existing, &from)?;
                }
                let is_same_kind = kind_of(found) == kind;
                if is_same_kind {
                    self.layers.refuse_unseen_attributes(path, existing)?;
                }
                self.plan.add_change(
                    path,
                    if is_same_kind { ChangeKind::Modified } else { ChangeKind::Type },
                    None,
                    kind,
                );
                let directory =
                    kind == FileType::Directory || kind_of(found) == FileType::Directory;
                self.plan.steps.push(Step::Exchange {
                    one: from,
                    other: to,
                    ino_one: ino,
                    ino_other: found.stx_ino,
                    directory,
                });
            }
            None => {
                self.added(path, kind, ino);
                let directory = kind == FileType::Directory;
                self.plan.steps.push(Step::Rename { from, to, ino, directory });
            }
        }
        Ok(())
    }

    fn remove(&mut self, path: &Path, existing: &Location, found: &Statx) -> Result<(), Error> {
        self.check(existing, Some(found))?;
        let kind = kind_of(found);
        let (from, to) = (Location::Base(path.to_path_buf()), self.temp_location());
        self.plan.displace(&to, found);
        if self.copied.contains(&found.stx_ino) {
            self.layers.refuse_unseen_attributes(path, existing)?; // the branch moved it
        }
        if kind == FileType::Directory {
            self.list_deleted(path, existing, &to)?;
        }
        self.deleted(path, found);
        let directory = kind == FileType::Directory;
        self.plan.steps.push(Step::Rename { from, to, ino: found.stx_ino, directory });
        Ok(())
    }

    /// Lists everything below a removed directory as deleted, and checks it for drift. `aside` is the directory's new
    /// location.
    fn list_deleted(
        &mut self,
        path: &Path,
        existing: &Location,
        aside: &Location,
    ) -> Result<(), Error> {
        let mut pending = vec![(path.to_path_buf(), existing.clone(), aside.clone())];
        while let Some((directory, existing, aside)) = pending.pop() {
            let mut has_lost = false;
            for entry in self.disk.list(&existing)? {
                let (path, place) = (directory.join(&entry.name), existing.join(&entry.name));
                let Some(stat) = self.existing(&place)? else {
                    has_lost = true;
                    continue;
                };
                refuse_immutable(&path, &stat)?;
                self.check(&place, Some(&stat))?;
                if self.copied.contains(&stat.stx_ino) {
                    self.layers.refuse_unseen_attributes(&path, &place)?;
                }
                self.plan.displace(&aside.join(&entry.name), &stat);
                self.deleted(&path, &stat);
                if kind_of(&stat) == FileType::Directory {
                    self.check_unseen_directory(&path, &stat);
                    pending.push((path, place, aside.join(&entry.name)));
                }
            }
            if has_lost {
                self.keep_aside(&directory, &existing, &aside)?;
            }
        }
        Ok(())
    }

    /// Restores a removed directory's mtime on rollback when a subdirectory was moved out of it first.
    fn keep_aside(
        &mut self,
        path: &Path,
        existing: &Location,
        aside: &Location,
    ) -> Result<(), Error> {
        let Some(found) = self.disk.stat(existing)? else { return Ok(()) };
        let old = self.disk.metadata(existing)?;
        let (path, before) = (aside.clone(), Location::Base(path.to_path_buf()));
        self.metadata.push(Step::Metadata {
            path,
            before,
            ino: found.stx_ino,
            new: old.clone(),
            old,
        });
        Ok(())
    }

    /// `ino` is its number in the layer.
    fn added(&mut self, path: &Path, kind: FileType, ino: u64) {
        self.plan.add_change(path, ChangeKind::Added, None, kind);
        if let Some(origin) = self.request.origins.get(&ino) {
            self.renames.added(path, kind, *origin);
        }
    }

    fn deleted(&mut self, path: &Path, stat: &Statx) {
        self.plan.add_change(path, ChangeKind::Deleted, None, kind_of(stat));
        self.renames.deleted(path, kind_of(stat), stat.stx_ino);
    }
}

pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}
