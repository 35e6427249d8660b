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
//!
//! Redirected directories are moved out of the base first, deepest first, so that chains and swaps of renames need no
//! order among themselves.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx, StatxAttributes};
use serde::{Deserialize, Serialize};

use super::journal::{Interval, directory_of};
use super::step::{Disk, Mark, Metadata, Place, Step};
use crate::error::{Context, Error};
use crate::overlay::{DEVICE_XATTR, METACOPY_XATTR, Namespace, may_be_whiteout, parse_redirect};
use crate::seen::{Expected, Identity};
use crate::selection::Selection;
use crate::view::is_hidden;

/// What is to be committed.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) transaction: u64,
    /// The branch's own layers, top first: directories in the store that hold the layer's content.
    pub(crate) layers: Vec<PathBuf>,
    pub(crate) namespace: Namespace,
    /// What the layers depend on in the base.
    pub(crate) seen: BTreeMap<PathBuf, Expected>,
    /// When the branch was forked, nanoseconds since 1970: the measure for paths that were never noted.
    pub(crate) forked: i64,
    /// The kernel's overlayfs wrote the layers: files bear its marks, and may be without their content.
    pub(crate) by_kernel: bool,
    /// Layers that show what the base was at the fork, top first: directories in the store (`crate::commit::veil`).
    pub(crate) veils: Vec<PathBuf>,
    /// What of the branch is committed.
    pub(crate) selection: Selection,
    /// When our own transactions changed the base: a ctime of then is no drift.
    pub(crate) own: Vec<Interval>,
}

/// How a path of the base changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChangeKind {
    /// It is new.
    Added,
    /// Its content or target is another.
    Modified,
    /// It is gone.
    Deleted,
    /// It was moved here.
    Renamed,
    /// It is of another type.
    Type,
    /// Its mode, owner or extended attributes are others: of a directory, or of a file whose content nobody touched.
    Metadata,
}

/// What a changed path is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ObjectKind {
    File,
    Directory,
    Symlink,
    /// A device, fifo or socket.
    Other,
}

impl From<FileType> for ObjectKind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Symlink,
            _ => Self::Other,
        }
    }
}

/// One changed path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(crate) struct Change {
    #[serde(with = "super::step::hex")]
    pub(crate) path: PathBuf,
    pub(crate) change: ChangeKind,
    /// Where it was, if it was renamed.
    #[serde(with = "super::step::hex_option", default, skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<PathBuf>,
    pub(crate) kind: ObjectKind,
}

/// A worked-out commit.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Number of the transaction that it was worked out for.
    pub(crate) transaction: u64,
    pub(crate) steps: Vec<Step>,
    /// Sorted by path.
    pub(crate) changes: Vec<Change>,
    /// Paths the branch wrote, beside those of `changes`: where a directory came from that it moved, and names that it
    /// removed and others did too.
    pub(crate) written: BTreeSet<PathBuf>,
    /// Paths of the base that others changed since the branch depended on them.
    pub(crate) drift: BTreeSet<PathBuf>,
    /// Directories to make, empty, before the plan is decided.
    pub(crate) empty: Vec<Place>,
    /// Whiteouts that hide nothing and must not come into the base.
    pub(crate) litter: Vec<Place>,
    /// Bytes on disk of what leaves the base: what keeping it for an undo costs.
    pub(crate) displaced_bytes: u64,
}

/// A directory of one of the branch's layers: where it is now, and where it will be when its children are moved.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) now: Place,
    pub(super) then: Place,
    /// Position in the stack.
    pub(super) layer: usize,
}

/// What a directory of the branch is made of.
#[derive(Debug, Default)]
struct Made {
    /// Its parts in the layers, top first.
    chain: Vec<Source>,
    /// The directory of the base that it merges with.
    origin: Option<PathBuf>,
    /// That directory has another path.
    is_redirected: bool,
}

/// What is to be put somewhere.
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

/// Sorts, and folds what was deleted and added at one path into one change.
pub(super) fn one_change_a_path(changes: Vec<Change>) -> Vec<Change> {
    let mut by_path: BTreeMap<PathBuf, Change> = BTreeMap::new();
    for change in changes {
        let folded = match by_path.get(&change.path) {
            Some(known)
                if known.change == ChangeKind::Deleted || change.change == ChangeKind::Deleted =>
            {
                let new = if change.change == ChangeKind::Deleted { known.clone() } else { change };
                let is_same_kind =
                    by_path.get(&new.path).is_some_and(|known| known.kind == new.kind);
                Change {
                    change: if is_same_kind { ChangeKind::Modified } else { ChangeKind::Type },
                    ..new
                }
            }
            _ => change,
        };
        by_path.insert(folded.path.clone(), folded);
    }
    by_path.into_values().collect()
}

pub(super) struct Planner<'a> {
    pub(super) disk: &'a Disk,
    pub(super) request: &'a Request,
    /// Renamed directories that stay where they are, under both their names (`super::selected`).
    pub(super) unmoved: BTreeSet<PathBuf>,
    pub(super) plan: Plan,
    /// Directories of the base that move: path -> where they wait.
    moved: HashMap<PathBuf, Place>,
    pub(super) metadata: Vec<Step>,
    /// Directories of the base of which something is left out, or that are not taken themselves.
    pub(super) left_out: BTreeSet<PathBuf>,
    next: usize,
}

/// Works out the commit of a branch. Changes nothing.
pub(crate) fn plan(disk: &Disk, request: &Request) -> Result<Plan, Error> {
    let mut planner = Planner {
        disk,
        request,
        unmoved: BTreeSet::new(),
        plan: Plan { transaction: request.transaction, ..Plan::default() },
        moved: HashMap::new(),
        metadata: Vec::new(),
        left_out: BTreeSet::new(),
        next: 0,
    };
    let root: Vec<Source> = request
        .layers
        .iter()
        .enumerate()
        .map(|(layer, path)| Source {
            now: Place::Store(path.clone()),
            then: Place::Store(path.clone()),
            layer,
        })
        .collect();
    planner.move_redirected(&root)?;
    planner.merge(Path::new(""), &root, &Place::Base(PathBuf::new()))?;
    planner.keep_times();
    let mut plan = planner.plan;
    plan.steps.append(&mut planner.metadata);
    plan.changes = one_change_a_path(std::mem::take(&mut plan.changes));
    Ok(plan)
}

impl Planner<'_> {
    /// A free place beside the journal entry's plan.
    fn aside(&mut self) -> Place {
        self.next += 1;
        Place::Store(directory_of(self.request.transaction).join(self.next.to_string()))
    }

    /// First of all, every directory of the base that is elsewhere in the branch leaves its place.
    fn move_redirected(&mut self, root: &[Source]) -> Result<(), Error> {
        let mut renamed = Vec::new();
        for source in root {
            self.find_redirects(&source.now, Path::new(""), &mut renamed)?;
        }
        self.choose_renamed(&renamed)?;
        let origins: BTreeSet<PathBuf> = renamed
            .into_iter()
            .map(|(_, origin)| origin)
            .filter(|origin| !self.unmoved.contains(origin))
            .collect();
        // Sorted paths have parents before children; in reverse the deepest leave first.
        for origin in origins.into_iter().rev() {
            let from = Place::Base(origin.clone());
            let Some(stat) = self.disk.stat(&from)? else {
                self.plan.drift.insert(origin);
                continue;
            };
            self.check_present(&origin, &stat);
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
        directory: &Place,
        path: &Path,
        found: &mut Vec<(PathBuf, PathBuf)>,
    ) -> Result<(), Error> {
        for entry in self.disk.list(directory)? {
            if entry.kind != FileType::Directory {
                continue;
            }
            let (place, path) = (directory.join(&entry.name), path.join(&entry.name));
            if let Some(origin) = self.origin(&place, &path)? {
                self.plan.written.insert(origin.clone());
                if self.disk.stat(&Place::Base(origin.clone()))?.is_some() {
                    found.push((path.clone(), origin));
                }
            }
            self.find_redirects(&place, &path, found)?;
        }
        Ok(())
    }

    fn redirect(&self, place: &Place, path: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(value) = self.disk.xattr(place, self.request.namespace.redirect()) else {
            return Ok(None);
        };
        let origin = parse_redirect(&value, path);
        origin.map(Some).ok_or_else(|| {
            Error::Corrupt(format!("{} has a redirect that leads out", path.display()))
        })
    }

    pub(super) fn is_opaque(&self, place: &Place) -> bool {
        self.disk.xattr(place, self.request.namespace.opaque()).is_some_and(|value| value == b"y")
    }

    pub(super) fn is_whiteout(&self, place: &Place, stat: &Statx) -> bool {
        may_be_whiteout(stat) && self.disk.xattr(place, DEVICE_XATTR).is_none()
    }

    /// Plans a directory that exists in the base's final tree: `existing` is where its present entries are now, `path`
    /// is where they will be.
    fn merge(&mut self, path: &Path, sources: &[Source], existing: &Place) -> Result<(), Error> {
        let mut names: BTreeMap<OsString, usize> = BTreeMap::new();
        for (position, source) in sources.iter().enumerate() {
            for entry in self.disk.list(&source.now)? {
                names.entry(entry.name).or_insert(position);
            }
        }
        if !names.is_empty() || !path.as_os_str().is_empty() {
            self.plan_metadata(path, &sources[0], existing)?;
        }
        self.note_left_out(path, names.keys());
        for (name, position) in names {
            self.plan_name(&path.join(&name), &name, &sources[position..], &existing.join(&name))?;
        }
        Ok(())
    }

    /// The attributes that a directory of the base had at the fork, if our own transactions may have changed them since.
    fn metadata_at_fork(&self, path: &Path) -> Result<Option<Metadata>, Error> {
        for veil in &self.request.veils {
            let place = Place::Store(veil.join(path));
            let stat = self.disk.stat(&place)?;
            if stat.is_some_and(|stat| kind_of(&stat) == FileType::Directory) {
                return self.disk.metadata(&place).map(Some);
            }
        }
        Ok(None)
    }

    /// Whether a path of the base was free at the fork, as far as our own transactions may have filled it since.
    fn was_missing_at_fork(&self, path: &Path) -> Result<bool, Error> {
        for veil in &self.request.veils {
            let place = Place::Store(veil.join(path));
            if let Some(stat) = self.disk.stat(&place)? {
                return Ok(self.is_whiteout(&place, &stat));
            }
        }
        Ok(false)
    }

    /// What is now at a place of the base, unless it moved away.
    pub(super) fn existing(&self, place: &Place) -> Result<Option<Statx>, Error> {
        match place {
            Place::Base(path) if self.moved.contains_key(path) => Ok(None),
            _ => self.disk.stat(place),
        }
    }

    pub(super) fn plan_name(
        &mut self,
        path: &Path,
        name: &std::ffi::OsStr,
        sources: &[Source],
        existing: &Place,
    ) -> Result<(), Error> {
        if is_hidden(path) {
            return Ok(()); // the store, which the kernel's layers hide by a whiteout
        }
        let (now, then) = (sources[0].now.join(name), sources[0].then.join(name));
        let Some(stat) = self.disk.stat(&now)? else {
            return Ok(());
        };
        let found = self.existing(existing)?;
        if self.is_whiteout(&now, &stat) {
            return match found {
                Some(found) => self.remove_taken(path, existing, &found),
                None if !self.takes(path) => Ok(()),
                None => {
                    // Others removed it as well, or it moved away.
                    self.plan.written.insert(path.to_path_buf());
                    Ok(())
                }
            };
        }
        let kind = kind_of(&stat);
        if kind != FileType::Directory {
            if !self.takes(path) {
                return Ok(());
            }
            self.refuse_partial(path, existing, found.as_ref())?;
            self.check(existing, found.as_ref())?;
            if self.is_attributes_alone(&now, kind) {
                return self.plan_attributes(path, &now, existing, found.as_ref());
            }
            self.strip_marks(&now, path, kind)?;
            return self.put(path, then, Object::of(&stat), existing, found.as_ref());
        }
        if !self.takes_any(path)? {
            return Ok(());
        }
        self.plan_directory(path, name, sources, existing, found.as_ref())
    }

    fn plan_directory(
        &mut self,
        path: &Path,
        name: &std::ffi::OsStr,
        sources: &[Source],
        existing: &Place,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let here = match existing {
            Place::Base(path) => Some(path.clone()),
            Place::Store(_) => None,
        };
        let made = self.follow(sources, name, here)?;
        self.place_directory(path, made, existing, found)
    }

    /// What the directory `name` of `sources` is made of; `here` is its path in the base, where it merges with that.
    fn follow(
        &self,
        sources: &[Source],
        name: &std::ffi::OsStr,
        here: Option<PathBuf>,
    ) -> Result<Made, Error> {
        let mut made = Made::default();
        for source in sources {
            let (now, then) = (source.now.join(name), source.then.join(name));
            let Some(stat) = self.disk.stat(&now)? else { continue };
            if kind_of(&stat) != FileType::Directory {
                return Ok(made); // a whiteout, or hidden by what is above
            }
            made.chain.push(Source { now: now.clone(), then, layer: source.layer });
            if self.is_opaque(&now) {
                return Ok(made);
            }
            if let Some(redirect) = self.redirect(&now, Path::new(name))? {
                let below = self.follow_redirect(source.layer, &redirect)?;
                made.chain.extend(below.chain);
                return Ok(Made { origin: below.origin, is_redirected: true, ..made });
            }
        }
        Ok(Made { origin: here, ..made })
    }

    /// What a redirect in a layer means: the layers below know the directory under that path, and may have renamed any
    /// part of it themselves.
    fn follow_redirect(&self, layer: usize, redirect: &Path) -> Result<Made, Error> {
        let roots = self.request.layers.iter().enumerate().skip(layer + 1);
        let root = |(layer, path): (usize, &PathBuf)| {
            let place = Place::Store(path.clone());
            Source { now: place.clone(), then: place, layer }
        };
        let mut made = Made {
            chain: roots.map(root).collect(),
            origin: Some(PathBuf::new()),
            is_redirected: true,
        };
        for name in redirect {
            let here = made.origin.map(|origin| origin.join(name));
            made = Made { is_redirected: true, ..self.follow(&made.chain, name, here)? };
        }
        Ok(made)
    }

    /// The path in the base that a redirect at `place` leads to in the end; `None` for a directory of the branch's own.
    fn origin(&self, place: &Place, path: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(redirect) = self.redirect(place, path)? else { return Ok(None) };
        let is_in = |layer: &&PathBuf| place.path().starts_with(layer);
        let layer = self.request.layers.iter().position(|layer| is_in(&layer)).unwrap_or(0);
        Ok(self.follow_redirect(layer, &redirect)?.origin)
    }

    /// Plans a directory that is made of `made`; `existing` is what the base has in its place.
    fn place_directory(
        &mut self,
        path: &Path,
        made: Made,
        existing: &Place,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Made { chain, origin, is_redirected } = made;
        if let Some(origin) = origin {
            let waiting = self.moved.get(&origin).filter(|_| is_redirected).cloned();
            if let Some(waiting) = waiting {
                return self.put_moved(path, &chain, existing, found, origin, waiting);
            }
            if *existing == Place::Base(origin.clone())
                && found.is_some_and(|found| kind_of(found) == FileType::Directory)
            {
                self.check(existing, found)?;
                if self.was_missing_at_fork(path)? {
                    // A directory that merges with the one that others made is no change of its own.
                    self.plan.written.insert(path.to_path_buf());
                }
                return self.merge(path, &chain, existing);
            }
            let below = Place::Base(origin);
            if is_redirected && self.disk.stat(&below)?.is_none() {
                self.check(&below, None)?; // others removed it
            }
        }
        let is_anew = found.is_some_and(|found| kind_of(found) == FileType::Directory);
        if is_anew && !(self.takes_whole(path, existing)? && self.takes_chain(path, &chain)?) {
            return self.merge_anew(path, &chain, existing);
        }
        if !is_anew {
            self.refuse_partial(path, existing, found)?;
        }
        self.check(existing, found)?;
        match <[Source; 1]>::try_from(chain) {
            Ok([only]) => self.put_whole(path, &only, existing, found),
            Err(chain) if chain.is_empty() => Ok(()),
            Err(chain) => {
                // Several layers make it up: an empty directory comes first, then what each of them has in it.
                let empty = self.aside();
                self.plan.empty.push(empty.clone());
                let stand_in = Object { kind: FileType::Directory, ino: 0 };
                self.put(path, empty.clone(), stand_in, existing, found)?;
                self.merge(path, &chain, &empty)
            }
        }
    }

    /// A directory that one layer alone has comes into the base with all that is in it.
    fn put_whole(
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

    /// A directory of the base that was renamed, with what the branch changed in it.
    fn put_moved(
        &mut self,
        path: &Path,
        chain: &[Source],
        existing: &Place,
        found: Option<&Statx>,
        origin: PathBuf,
        waiting: Place,
    ) -> Result<(), Error> {
        if let Some(found) = found {
            self.remove(path, existing, found)?;
        } else {
            self.check(existing, None)?;
        }
        let now = Place::Base(origin.clone());
        let Some(stat) = self.disk.stat(&now)? else {
            return Ok(());
        };
        let to = Place::Base(path.to_path_buf());
        self.plan.steps.push(Step::Rename {
            from: waiting,
            to,
            ino: stat.stx_ino,
            directory: true,
        });
        self.change(path, ChangeKind::Renamed, Some(origin), FileType::Directory);
        self.merge(path, chain, &now)
    }

    /// Moves an object of the layer into the base, in exchange for what is there.
    fn put(
        &mut self,
        path: &Path,
        from: Place,
        Object { kind, ino }: Object,
        existing: &Place,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let to = Place::Base(path.to_path_buf());
        match found {
            Some(found) => {
                self.displace(found);
                if kind_of(found) == FileType::Directory {
                    self.list_deleted(path, existing)?;
                }
                let is_same_kind = kind_of(found) == kind;
                self.change(
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
                self.change(path, ChangeKind::Added, None, kind);
                let directory = kind == FileType::Directory;
                self.plan.steps.push(Step::Rename { from, to, ino, directory });
            }
        }
        Ok(())
    }

    pub(super) fn remove(
        &mut self,
        path: &Path,
        existing: &Place,
        found: &Statx,
    ) -> Result<(), Error> {
        self.check(existing, Some(found))?;
        self.displace(found);
        let kind = kind_of(found);
        if kind == FileType::Directory {
            self.list_deleted(path, existing)?;
        }
        self.change(path, ChangeKind::Deleted, None, kind);
        let (from, to) = (Place::Base(path.to_path_buf()), self.aside());
        let directory = kind == FileType::Directory;
        self.plan.steps.push(Step::Rename { from, to, ino: found.stx_ino, directory });
        Ok(())
    }

    fn displace(&mut self, stat: &Statx) {
        const BLOCK_BYTES: u64 = 512; // the unit of st_blocks, stat(2)
        self.plan.displaced_bytes += stat.stx_blocks * BLOCK_BYTES;
    }

    /// Everything below a removed directory is deleted too, and must be what the branch knew.
    fn list_deleted(&mut self, path: &Path, existing: &Place) -> Result<(), Error> {
        for entry in self.disk.list(existing)? {
            let (path, place) = (path.join(&entry.name), existing.join(&entry.name));
            let Some(stat) = self.existing(&place)? else {
                continue;
            };
            let kind = kind_of(&stat);
            refuse_immutable(&path, &stat)?;
            self.check(&place, Some(&stat))?;
            self.displace(&stat);
            if kind == FileType::Directory {
                self.list_deleted(&path, &place)?;
            }
            self.change(&path, ChangeKind::Deleted, None, kind);
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
            self.change(&path, ChangeKind::Added, None, entry.kind);
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

    /// An object comes into the base without the marks that it bears in the layer. What makes a directory opaque is seen
    /// to where that is planned.
    fn strip_marks(&mut self, now: &Place, path: &Path, kind: FileType) -> Result<(), Error> {
        if kind != FileType::CharacterDevice && !self.request.by_kernel {
            return Ok(());
        }
        let namespace = self.request.namespace;
        for (name, value) in self.disk.marks(now)? {
            if name == namespace.opaque() {
                continue;
            }
            let name = name.to_string_lossy().into_owned(); // names of attributes are ASCII
            let place = Place::Base(path.to_path_buf());
            self.metadata.push(Step::Strip { place, name, value });
        }
        Ok(())
    }

    /// A file of which the branch changed the attributes alone: the layer has it without its content, which the base has
    /// under the same name.
    fn is_attributes_alone(&self, now: &Place, kind: FileType) -> bool {
        kind == FileType::RegularFile
            && self.request.by_kernel
            && self.disk.xattr(now, METACOPY_XATTR).is_some()
            && self.disk.xattr(now, self.request.namespace.redirect()).is_none()
    }

    fn plan_attributes(
        &mut self,
        path: &Path,
        now: &Place,
        existing: &Place,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(found) = found.filter(|found| kind_of(found) == FileType::RegularFile) else {
            // The branch has no content that could be put in its place, whoever wins.
            let message = "the content of a file that the branch changed the attributes of is gone from the base";
            return Err(Error::Conflict {
                message: message.to_owned(),
                paths: vec![path.to_path_buf()],
                hint: "the branch is still open: abort it, and start again from a new one",
            });
        };
        let (new, old) = (self.disk.metadata(now)?, self.disk.metadata(existing)?);
        self.change(path, ChangeKind::Metadata, None, FileType::RegularFile);
        let (path, before) = (Place::Base(path.to_path_buf()), existing.clone());
        self.metadata.push(Step::Metadata { path, before, ino: found.stx_ino, new, old });
        Ok(())
    }

    /// A directory on both sides takes the attributes that the branch shows.
    pub(super) fn plan_metadata(
        &mut self,
        path: &Path,
        top: &Source,
        existing: &Place,
    ) -> Result<(), Error> {
        let mut new = self.disk.metadata(&top.now)?;
        let is_made = self.plan.empty.contains(existing);
        let old = if is_made { new.clone() } else { self.disk.metadata(existing)? };
        if let Place::Base(path) = existing {
            if let Some(then) = self.metadata_at_fork(path)? {
                new.keep_changes(&then, &old);
            }
        }
        if !self.takes(path) {
            new = Metadata { mtime: new.mtime, ..old.clone() }; // on the way to something that is taken
        }
        let is_changed =
            (new.mode, new.uid, new.gid, &new.xattrs) != (old.mode, old.uid, old.gid, &old.xattrs);
        if is_changed && !path.as_os_str().is_empty() {
            self.change(path, ChangeKind::Metadata, None, FileType::Directory);
        }
        // Others who added or removed entries since the fork have left a later time, which is then the right one.
        let (seconds, nanoseconds) = old.mtime;
        if seconds * 1_000_000_000 + i64::from(nanoseconds) > self.request.forked {
            new.mtime = new.mtime.max(old.mtime);
        }
        let ino = self.disk.stat(existing)?.map_or(0, |stat| stat.stx_ino);
        self.metadata.push(Step::Metadata {
            path: Place::Base(path.to_path_buf()),
            before: existing.clone(),
            ino,
            new,
            old,
        });
        Ok(())
    }

    fn change(&mut self, path: &Path, change: ChangeKind, from: Option<PathBuf>, kind: FileType) {
        self.plan.changes.push(Change {
            path: path.to_path_buf(),
            change,
            from,
            kind: kind.into(),
        });
    }

    /// Compares what the base has at a place with what the branch saw there.
    fn check(&mut self, existing: &Place, found: Option<&Statx>) -> Result<(), Error> {
        let Place::Base(path) = existing else {
            return Ok(());
        };
        match found {
            Some(stat) => self.check_present(path, stat),
            None => {
                if matches!(self.request.seen.get(path), Some(Expected::Present(_)))
                    && !self.moved.contains_key(path)
                {
                    self.plan.drift.insert(path.clone());
                }
            }
        }
        Ok(())
    }

    fn check_present(&mut self, path: &Path, stat: &Statx) {
        let now = Identity::of(stat);
        let is_ours =
            self.request.own.iter().any(|(start, end)| (*start..=*end).contains(&now.ctime));
        let has_drifted = match self.request.seen.get(path) {
            Some(Expected::Present(then)) => {
                // A commit and its undo leave an object as it was but for its ctime.
                let then = if is_ours { Identity { ctime: now.ctime, ..*then } } else { *then };
                !then.still(&now)
            }
            Some(Expected::Absent) => true,
            // Never noted: a directory's times change with its entries, which are compared by themselves.
            None => !now.is_directory() && now.ctime > self.request.forked && !is_ours,
        };
        if has_drifted {
            self.plan.drift.insert(path.to_path_buf());
        }
    }
}

pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}

/// What `rm -r` would leave standing is not taken away with the directory around it: nobody could delete it later.
fn refuse_immutable(path: &Path, stat: &Statx) -> Result<(), Error> {
    if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
        return Err(rustix::io::Errno::PERM).at(path);
    }
    Ok(())
}
