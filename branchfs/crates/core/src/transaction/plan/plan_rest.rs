//! The rest of a branch: the layer that, over the base after a partial commit, shows the same as the branch before.
//!
//! The walk visits the branch's own layers, like the plan, and compares each name with the base after the planned steps
//! ([`PathMap`]). A name that the commit puts into the base is left out; every other one is added to the new layer. So layer
//! and base together show the branch, for any plan.
//!
//! The recorded dependencies on the base are kept: under the new path if the commit moved a directory, and not at all where
//! the commit changed the base itself. For paths that were skipped because of external changes, [`Fingerprint::NEVER`] is
//! recorded, so that a later commit reports the conflict again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Statx};

use super::redirect::ResolvedDir;
use super::{LayerDir, Planner, kind_of};
use crate::error::Error;
use crate::transaction::path_map::PathMap;
use crate::transaction::step::{Location, Metadata, Step};
use crate::view::is_hidden;
use crate::write_set::{Fingerprint, Precondition};

/// The rest: what a branch keeps after a partial commit.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    /// Directories before their entries.
    pub(crate) items: Vec<Item>,
    /// Their preconditions in the base.
    pub(crate) preconditions: BTreeMap<PathBuf, Precondition>,
    /// Objects of the base with several names -> the number of these names that the items hide.
    pub(crate) hidden: HashMap<u64, u32>,
    /// Inode numbers of objects that are committed under one name, and stay under another.
    pub(crate) split: BTreeSet<u64>,
    /// The attributes of the root are a change that was not committed.
    pub(crate) has_root: bool,
}

impl Rest {
    /// Returns whether no change is left in the branch.
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty() && !self.has_root
    }
}

/// A name of the new layer.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) path: PathBuf,
    pub(crate) what: What,
}

/// The object at a name of the new layer; locations are in the layers of the branch.
#[derive(Debug)]
pub(crate) enum What {
    /// With the attributes of another one.
    Directory { attributes: Location, is_opaque: bool, redirect: Option<PathBuf> },
    /// An object of a layer. `is_shared`: the commit moves it into the base under another name.
    Object { from: Location, is_shared: bool },
    /// A whiteout, because the base has an object there.
    Whiteout,
}

/// A directory of the branch that is left to compare.
struct Directory {
    path: PathBuf,
    /// Its parts in the layers, top first.
    sources: Vec<LayerDir>,
    /// The directory of the base that it merges with, by its present path.
    origin: Option<PathBuf>,
    /// The directory that the base has there after the commit, by its path then.
    below: Option<PathBuf>,
}

/// An object that was found.
struct KeptObject {
    place: Location,
    kind: FileType,
    stat: Option<Statx>,
}

struct Comparison<'p, 'a> {
    planner: &'p Planner<'a>,
    moves: PathMap,
    /// Attributes that the commit sets on directories of the base.
    attributes: HashMap<&'p Path, &'p Metadata>,
    rest: Rest,
    /// Directories that are items only because of their entries.
    on_the_way: HashSet<PathBuf>,
    /// Inode numbers of objects of the layers that the commit moves into the base.
    committed: HashSet<u64>,
    pending: Vec<Directory>,
}

impl Planner<'_> {
    /// Plans the rest of the branch. Costs the changed names.
    pub(super) fn rest(&self, root: &[LayerDir]) -> Result<Rest, Error> {
        let mut moves = PathMap::default();
        self.plan.steps.iter().for_each(|step| moves.add(step));
        let attributes = self.metadata.iter().filter_map(|step| match step {
            Step::Metadata { path: Location::Base(path), new, .. } => Some((path.as_path(), new)),
            _ => None,
        });
        let mut comparison = Comparison {
            planner: self,
            moves,
            attributes: attributes.collect(),
            rest: Rest::default(),
            on_the_way: HashSet::new(),
            committed: HashSet::new(),
            pending: vec![Directory {
                path: PathBuf::new(),
                sources: root.to_vec(),
                origin: Some(PathBuf::new()),
                below: Some(PathBuf::new()),
            }],
        };
        while let Some(directory) = comparison.pending.pop() {
            comparison.directory(&directory)?;
        }
        let root_path = Path::new("");
        comparison.rest.has_root =
            comparison.has_own_attributes(root_path, &root[0].now, root_path)?;
        comparison.finish()
    }
}

impl Comparison<'_, '_> {
    fn directory(&mut self, directory: &Directory) -> Result<(), Error> {
        let disk = self.planner.disk;
        let mut names: BTreeSet<OsString> = BTreeSet::new();
        for source in &directory.sources {
            names.extend(disk.list(&source.now)?.into_iter().map(|entry| entry.name));
        }
        if directory.origin.is_none() {
            // The base keeps its directory and the content that was not selected; the branch shows none of it.
            let below = directory.below.as_ref().and_then(|below| self.place_after(below));
            if let Some(place @ Location::Base(_)) = below {
                names.extend(disk.list(&place)?.into_iter().map(|entry| entry.name));
            }
        }
        names.iter().try_for_each(|name| self.name(directory, name))
    }

    fn name(&mut self, directory: &Directory, name: &OsStr) -> Result<(), Error> {
        let path = directory.path.join(name);
        if is_hidden(&path) {
            return Ok(());
        }
        let here = directory.below.as_ref().map(|below| below.join(name));
        let below = here.as_deref().map(|here| self.after(here)).transpose()?.flatten();
        let Some((first, stat)) = self.first(&directory.sources, name)? else {
            if below.is_some() {
                self.whiteout(path, below.as_ref());
            }
            return Ok(());
        };
        let sources = &directory.sources[first..];
        let now = sources[0].now.join(name);
        if self.planner.layers.is_whiteout(&now, &stat)? {
            // A snapshot layer may show an object that the base does not have any more.
            let is_needed = !self.planner.request.snapshot_layers.is_empty()
                && !self.planner.included.includes(&path);
            if below.is_some() || is_needed {
                self.whiteout(path, below.as_ref());
            }
            return Ok(());
        }
        if kind_of(&stat) != FileType::Directory {
            if below.as_ref().is_some_and(|below| below.place == now) {
                self.committed.insert(stat.stx_ino);
            } else {
                self.object(path, now, &stat, below.as_ref());
            }
            return Ok(());
        }
        let inner = directory.origin.as_ref().map(|origin| origin.join(name));
        let made = self.planner.layers.follow(sources, name, inner)?;
        self.own_directory(path, made, here, below)
    }

    fn own_directory(
        &mut self,
        path: PathBuf,
        made: ResolvedDir,
        here: Option<PathBuf>,
        found: Option<KeptObject>,
    ) -> Result<(), Error> {
        let found = found.filter(|found| found.kind == FileType::Directory);
        let origin = match made.origin {
            Some(origin) if self.is_directory_now(&origin)? => Some(origin),
            _ => None,
        };
        let mut redirect = None;
        let below = match (&origin, &found) {
            (Some(origin), found) => {
                let is = |found: &KeptObject| found.place == Location::Base(origin.clone());
                if found.as_ref().is_some_and(is) {
                    here
                } else if self.place_after(origin) == Some(Location::Base(origin.clone())) {
                    redirect = Some(origin.clone()); // its renaming was not taken
                    redirect.clone()
                } else {
                    None
                }
            }
            // It was moved with the commit, as a whole or because of an entry.
            (None, Some(KeptObject { place: Location::Store(_), .. })) => here,
            (None, Some(_)) => {
                here.filter(|here| self.moves.touches(&Location::Base(here.clone())))
            }
            (None, None) => None,
        };
        let mut is_opaque = false;
        for one in &made.chain {
            is_opaque |= self.planner.layers.is_opaque(&one.now)?;
        }
        let is_opaque = below.is_none() && (found.is_some() || is_opaque);
        let attributes = made.chain[0].now.clone();
        let is_on_the_way = match &below {
            Some(below) if redirect.is_none() => {
                !self.has_own_attributes(&path, &attributes, below)?
            }
            _ => false,
        };
        if is_on_the_way {
            self.on_the_way.insert(path.clone());
        }
        let what = What::Directory { attributes, is_opaque, redirect };
        self.rest.items.push(Item { path: path.clone(), what });
        self.pending.push(Directory { path, sources: made.chain, origin, below });
        Ok(())
    }

    fn object(&mut self, path: PathBuf, from: Location, stat: &Statx, below: Option<&KeptObject>) {
        self.hide(below);
        let is_shared = stat.stx_nlink > 1; // determined at the end
        self.rest.items.push(Item { path, what: What::Object { from, is_shared } });
    }

    fn whiteout(&mut self, path: PathBuf, below: Option<&KeptObject>) {
        self.hide(below);
        self.rest.items.push(Item { path, what: What::Whiteout });
    }

    /// Counts a name of the base that is hidden.
    fn hide(&mut self, below: Option<&KeptObject>) {
        let Some(KeptObject { kind, stat: Some(stat), .. }) = below else { return };
        if *kind != FileType::Directory && stat.stx_nlink > 1 {
            *self.rest.hidden.entry(stat.stx_ino).or_default() += 1;
        }
    }

    /// The first of some directories that has a name.
    fn first(&self, sources: &[LayerDir], name: &OsStr) -> Result<Option<(usize, Statx)>, Error> {
        for (position, source) in sources.iter().enumerate() {
            if let Some(stat) = self.planner.disk.stat(&source.now.join(name))? {
                return Ok(Some((position, stat)));
            }
        }
        Ok(None)
    }

    /// The present location of the object that the base will have at a path; it may not exist.
    fn place_after(&self, path: &Path) -> Option<Location> {
        self.moves.origin(&Location::Base(path.to_path_buf()))
    }

    /// The object at a path of the base after the commit.
    fn after(&self, path: &Path) -> Result<Option<KeptObject>, Error> {
        let Some(place) = self.place_after(path) else { return Ok(None) };
        if self.planner.plan.empty.contains(&place) {
            return Ok(Some(KeptObject { place, kind: FileType::Directory, stat: None }));
        }
        let Some(stat) = self.planner.disk.stat(&place)? else { return Ok(None) };
        if matches!(place, Location::Store(_)) && self.planner.layers.is_whiteout(&place, &stat)? {
            return Ok(None); // it is removed from the directory that it would come with
        }
        Ok(Some(KeptObject { place, kind: kind_of(&stat), stat: Some(stat) }))
    }

    fn is_directory_now(&self, path: &Path) -> Result<bool, Error> {
        let stat = self.planner.disk.stat(&Location::Base(path.to_path_buf()))?;
        Ok(stat.is_some_and(|stat| kind_of(&stat) == FileType::Directory))
    }

    /// Whether the branch gave a directory, which the base will have at `below`, attributes that are not committed.
    fn has_own_attributes(
        &self,
        path: &Path,
        shown: &Location,
        below: &Path,
    ) -> Result<bool, Error> {
        if self.planner.included.includes(path) {
            return Ok(false);
        }
        let ours = self.planner.disk.metadata(shown)?;
        if self
            .planner
            .layers
            .metadata_at_fork(below)?
            .is_some_and(|then| ours.is_but_for_times(&then))
        {
            return Ok(false); // others changed them
        }
        let then = match (self.attributes.get(below), self.place_after(below)) {
            (Some(new), _) => (*new).clone(),
            (None, Some(place)) if !self.planner.plan.empty.contains(&place) => {
                self.planner.disk.metadata(&place)?
            }
            _ => return Ok(true),
        };
        Ok(!ours.is_but_for_times(&then))
    }

    /// Removes empty directories, and returns the objects that the base has, too.
    fn finish(self) -> Result<Rest, Error> {
        let Self { planner, moves, mut rest, on_the_way, committed, .. } = self;
        let mut filled: HashSet<PathBuf> = HashSet::new();
        let mut items = Vec::new();
        for mut item in rest.items.into_iter().rev() {
            if on_the_way.contains(&item.path) && !filled.contains(&item.path) {
                continue;
            }
            if let What::Object { from, is_shared: is_shared @ true } = &mut item.what {
                let ino = planner.disk.stat(from)?.map(|stat| stat.stx_ino);
                let split = ino.filter(|ino| committed.contains(ino));
                *is_shared = split.is_some();
                rest.split.extend(split);
            }
            filled.extend(item.path.parent().map(Path::to_path_buf));
            items.push(item);
        }
        items.reverse();
        rest.items = items;
        rest.preconditions = seen_after(&planner.request.preconditions, &moves);
        for skipped in planner.request.selection.skipped() {
            rest.preconditions.insert(skipped.clone(), Precondition::Present(Fingerprint::NEVER));
        }
        Ok(rest)
    }
}

/// The preconditions by the paths that the objects have after the moves, without those of objects that the moves
/// removed or added.
fn seen_after(
    seen: &BTreeMap<PathBuf, Precondition>,
    moves: &PathMap,
) -> BTreeMap<PathBuf, Precondition> {
    let is_at = |now: &Path, then: &Path| {
        moves.origin(&Location::Base(then.to_path_buf())) == Some(Location::Base(now.to_path_buf()))
    };
    let moved: Vec<(&Path, &Path)> = moves.within_base().collect();
    let path_after = |path: &Path| {
        if is_at(path, path) {
            return Some(path.to_path_buf());
        }
        let renamed =
            moved.iter().filter_map(|(from, to)| Some(to.join(path.strip_prefix(from).ok()?)));
        renamed.into_iter().find(|then| is_at(path, then))
    };
    seen.iter().filter_map(|(path, expected)| Some((path_after(path)?, *expected))).collect()
}
