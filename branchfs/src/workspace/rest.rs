//! A branch that goes on after a part of it was committed: its record names one new layer, which holds the rest.
//!
//! The layer is made before the commit is decided, out of links to the files of the old layers, so that nothing is copied;
//! but a file of which one name is committed and another stays is copied, for the base gets the object itself. The commit
//! replaces the old layers in the record by the new one, where it otherwise ends the branch. The old ones go into the
//! history (or, where the store is elsewhere, into the trash), without the links: a file in the branch is not shared.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Statx};

use super::branches::Branches;
use super::commit_into_branch::Work;
use super::external_store::copy_object;
use super::quiesce::Frozen;
use super::{Branch, BranchId, MAIN_BRANCH, Record, Workspace};
use crate::commit::{Change, Decided, Item, Kept, Kind, Place, Plan, Rest, What};
use crate::error::{Context, Error};
use crate::filesystem::{Mounted, Slot};
use crate::layer::{BASE, Layer, copy_metadata};
use crate::quota::Quota;
use crate::tree::{Tree, remove_path};

/// What a branch goes on with.
pub(super) struct Remainder {
    pub(super) layer: Arc<Layer>,
    quota: Option<Arc<Quota>>,
}

/// A branch that has just gone on.
pub(super) struct Continued {
    branch: Branch,
    pub(super) outdated: Option<Arc<Mounted>>,
    _frozen: Option<Frozen>,
}

impl Continued {
    /// How many paths the branch still changes; at least one.
    pub(super) fn count(&self) -> usize {
        let counted = Work::of(&self.branch).map(|work| work.paths().len());
        // The commit has happened: who cannot be told how many is told that there are some.
        counted.unwrap_or(1).max(1)
    }
}

/// How many of the paths that a branch changed a plan leaves, without a look at what it would make of the base: one that
/// was renamed, and of which one end is committed, may count twice.
pub(super) fn estimate_rest(branch: &Branch, plan: &Plan) -> Result<usize, Error> {
    if plan.rest.is_empty() {
        return Ok(0);
    }
    let ends = plan.changes.iter().flat_map(|one| [Some(&one.path), one.from.as_ref()]);
    let committed: HashSet<&PathBuf> = ends.flatten().collect();
    let is_left = |path: &PathBuf| !committed.contains(path);
    let is_left =
        |change: &&Change| is_left(&change.path) || change.from.as_ref().is_some_and(is_left);
    let work = Work::of(branch)?;
    let left: BTreeSet<&Path> =
        work.changes.iter().filter(is_left).map(|change| change.path.as_path()).collect();
    Ok(left.len().max(1))
}

impl Workspace {
    /// Makes the layer of what a planned commit leaves of a branch, nobody's until the commit is decided; `None` where it
    /// leaves nothing.
    pub(super) fn make_rest(
        &self,
        branch: &Branch,
        rest: &Rest,
    ) -> Result<Option<Remainder>, Error> {
        if rest.is_empty() {
            return Ok(None);
        }
        let id = self.next_number();
        let path = self.layer_path(id);
        let made = self.new_layer(id, true, &branch.stack).and_then(|layer| {
            self.records.sync()?; // after a loss of power it is still known as nobody's
            let quota = Quota::of(branch.record.disk_limit, None); // its parent is main
            Filling::new(self, branch, &layer).fill(rest)?;
            self.carry_reads(&branch.record, &layer)?;
            layer.limit(quota.clone()).at(&path)?;
            if self.is_elsewhere() {
                self.sync_store()?; // the commit syncs the home
            }
            Ok(Remainder { layer: Arc::new(layer), quota })
        });
        made.map(Some).inspect_err(|_| self.unmake_rest(id))
    }

    /// Removes such a layer again, whose files are the branch's too, and show that in their numbers of links.
    pub(super) fn unmake_rest(&self, id: u64) {
        let path = self.layer_path(id);
        if remove_path(&path).is_err() {
            self.throw_away(&path, "unmade"); // or the next mount does
            self.empty_trash();
        }
    }

    /// Lets the layer have read what the branch has read. Where that was not recorded, it is not from here on either.
    fn carry_reads(&self, record: &Record, layer: &Layer) -> Result<(), Error> {
        let log = self.layer_path(layer.id.0).join("reads");
        if !log.exists() {
            return Ok(());
        }
        match self.reads(record) {
            Ok(reads) => {
                reads.iter().try_for_each(|(path, read)| layer.note_read(path, *read)).at(&log)
            }
            Err(Error::Unsupported(_)) => fs::remove_file(&log).at(&log),
            Err(error) => Err(error),
        }
    }

    /// Under the gate: a branch whose part was committed shows the rest over the new base. Its new view is frozen as long as
    /// the guard lives.
    pub(super) fn go_on_with(
        &self,
        branches: &mut Branches,
        id: BranchId,
        Remainder { layer, quota }: Remainder,
    ) -> Option<Continued> {
        let Branch { mut record, stack, .. } = branches.get(&id)?.clone();
        let below = &stack[record.layers.len()..];
        let stack = std::iter::once(Arc::clone(&layer)).chain(below.iter().cloned()).collect();
        record.layers = vec![layer.id.0];
        let outdated = self.replace_view(branches, record, stack, quota);
        let branch = branches.get(&id)?.clone();
        let frozen = self.filesystem.mounted(branch.slot).ok().map(Frozen::new);
        Some(Continued { branch, outdated, _frozen: frozen })
    }

    /// Under the gate: shows a branch with another record and another stack at its name. Returns its old view.
    pub(super) fn replace_view(
        &self,
        branches: &mut Branches,
        record: Record,
        stack: Vec<Arc<Layer>>,
        quota: Option<Arc<Quota>>,
    ) -> Option<Arc<Mounted>> {
        let slot_of = |id: BranchId| branches.get(&id).map(|branch| branch.slot);
        let parent = match record.parent {
            MAIN_BRANCH => crate::filesystem::MAIN,
            parent => slot_of(parent).unwrap_or(crate::filesystem::MAIN),
        };
        let old = slot_of(record.id).and_then(|slot: Slot| self.filesystem.remove(slot));
        let slot = self.filesystem.add(OsStr::new(&record.name), parent, stack.clone());
        branches.insert(record.id, Branch { record, slot, stack, quota });
        old
    }

    /// Ends what a committed branch's layers still have outside of the base. Can be repeated.
    pub(super) fn release_layers(&self, decided: &Decided) -> Result<(), Error> {
        let header = &decided.header;
        if let Some(kept) = &header.rest {
            self.unlink_rest(decided, kept)?;
        }
        self.unlink_kept(&header.layers)?;
        if self.is_elsewhere() && matches!(header.kind, Kind::Commit { .. }) {
            // The base has got copies.
            header
                .layers
                .iter()
                .for_each(|layer| self.throw_away(&self.layer_path(*layer), "layer"));
        }
        Ok(())
    }

    /// Removes the names in the old layers of what the rest is made of, and of what the base has got under another name.
    fn unlink_rest(&self, decided: &Decided, kept: &Kept) -> Result<(), Error> {
        let mut linked = HashSet::new();
        visit(&self.layer_path(kept.layer).join("upper"), &mut |_, _, stat| {
            if stat.stx_nlink > 1 {
                linked.insert(stat.stx_ino);
            }
            Ok(())
        })?;
        let split: HashSet<u64> = kept.split.iter().copied().collect();
        let layers = || decided.header.layers.iter();
        let committed = layers().map(|layer| self.home_layer_path(*layer).join("upper"));
        let aside = decided.set_aside().map(|place| self.home_path.join(place));
        let committed: Vec<PathBuf> = committed.chain(aside).collect();
        if !self.is_elsewhere() {
            return unlink_all(&committed, &linked.union(&split).copied().collect());
        }
        let own: Vec<PathBuf> =
            layers().map(|layer| self.layer_path(*layer).join("upper")).collect();
        unlink_all(&own, &linked)?;
        unlink_all(&committed, &split)
    }
}

/// Removes all names at, or below, some places that objects with these inode numbers have there.
fn unlink_all(places: &[PathBuf], inos: &HashSet<u64>) -> Result<(), Error> {
    if inos.is_empty() {
        return Ok(());
    }
    let mut unlink = |tree: &Tree, path: &Path, stat: &Statx| match inos.contains(&stat.stx_ino) {
        true => tree.remove_file(path).at(path),
        false => Ok(()),
    };
    places.iter().try_for_each(|place| visit(place, &mut unlink))
}

/// Visits everything but directories at `place`: what is below that directory, or that object. There may be nothing.
fn visit(
    place: &Path,
    each: &mut dyn FnMut(&Tree, &Path, &Statx) -> Result<(), Error>,
) -> Result<(), Error> {
    let (Some(parent), Some(name)) = (place.parent(), place.file_name()) else { return Ok(()) };
    let tree = match Tree::open_root(parent) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        other => other.at(parent)?,
    };
    let mut pending = vec![PathBuf::from(name)];
    while let Some(path) = pending.pop() {
        let stat = match tree.stat(&path) {
            Err(rustix::io::Errno::NOENT) => continue,
            other => other.at(&path)?,
        };
        if FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory {
            let entries = tree.list(&path).at(&path)?;
            pending.extend(entries.into_iter().map(|entry| path.join(entry.name)));
        } else {
            each(&tree, &path, &stat)?;
        }
    }
    Ok(())
}

/// A new layer that is being filled.
struct Filling<'w> {
    workspace: &'w Workspace,
    branch: &'w Branch,
    layer: &'w Layer,
    /// Inode number of a shared object in the old layer -> the copy.
    copies: HashMap<u64, PathBuf>,
}

impl<'w> Filling<'w> {
    fn new(workspace: &'w Workspace, branch: &'w Branch, layer: &'w Layer) -> Self {
        Self { workspace, branch, layer, copies: HashMap::new() }
    }

    fn fill(&mut self, rest: &Rest) -> Result<(), Error> {
        for Item { path, what } in &rest.items {
            match what {
                What::Directory { attributes, is_opaque, redirect } => {
                    self.directory(path, attributes, *is_opaque, redirect.as_deref())?;
                }
                What::Object { from, is_shared } => self.object(path, from, *is_shared)?,
                What::Whiteout => self.layer.put_whiteout(path).at(path)?,
            }
        }
        // Last: entries were made in them since.
        for Item { path, what } in rest.items.iter().rev() {
            if let What::Directory { attributes, .. } = what {
                self.describe(attributes, path)?;
            }
        }
        let root = Path::new("layers").join(self.branch.record.layers[0].to_string()).join("upper");
        self.describe(&Place::Store(root), Path::new(""))?;
        for (path, expected) in &rest.seen {
            self.layer.saw(path, *expected).at(path)?;
        }
        for (ino, count) in &rest.hidden {
            let count = i32::try_from(*count).unwrap_or(i32::MAX);
            self.layer.hide_links((BASE, *ino), count).at(self.path())?;
        }
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.workspace.layer_path(self.layer.id.0)
    }

    /// The layer of the branch that a place is in, and the path there.
    fn source<'p>(&self, place: &'p Place) -> (&'w Layer, &'p Path) {
        let layers = self.branch.stack.iter().zip(&self.branch.record.layers);
        let mut found = layers.filter_map(|(layer, id)| {
            let upper = Path::new("layers").join(id.to_string()).join("upper");
            Some((&**layer, place.path().strip_prefix(upper).ok()?))
        });
        found.next().expect("the plan takes items from the branch's own layers")
    }

    fn directory(
        &self,
        path: &Path,
        attributes: &Place,
        is_opaque: bool,
        redirect: Option<&Path>,
    ) -> Result<(), Error> {
        self.layer.tree.make_directory(path, 0o700).at(path)?;
        if is_opaque {
            self.layer.set_opaque(path).at(path)?;
        }
        if let Some(redirect) = redirect {
            self.layer.set_redirect(path, redirect).at(path)?;
        }
        let (layer, from) = self.source(attributes);
        self.keep_origin(layer, &layer.tree.stat(from).at(path)?, path)
    }

    fn describe(&self, from: &Place, path: &Path) -> Result<(), Error> {
        let (layer, from) = self.source(from);
        let stat = layer.tree.stat(from).at(path)?;
        copy_metadata((&layer.tree, from, &stat), (&self.layer.tree, path)).at(path)
    }

    /// A copy of an object of the base goes on showing its inode number.
    fn keep_origin(&self, layer: &Layer, old: &Statx, path: &Path) -> Result<(), Error> {
        let Some(shown) = layer.origin_of(old.stx_ino) else { return Ok(()) };
        let made = self.layer.tree.stat(path).at(path)?;
        self.layer.set_origin(made.stx_ino, shown).at(path)
    }

    fn object(&mut self, path: &Path, from: &Place, is_shared: bool) -> Result<(), Error> {
        let (layer, from) = self.source(from);
        let stat = layer.tree.stat(from).at(path)?;
        // Where the store is elsewhere the base gets copies.
        if !is_shared || self.workspace.is_elsewhere() {
            link((&layer.tree, from), (&self.layer.tree, path)).at(path)?;
        } else if let Some(copy) = self.copies.get(&stat.stx_ino) {
            self.layer.tree.link(copy, path).at(path)?;
        } else {
            copy_object((&layer.tree, from, &stat), (&self.layer.tree, path)).at(path)?;
            self.copies.insert(stat.stx_ino, path.to_path_buf());
        }
        self.keep_origin(layer, &stat, path)
    }
}

fn link(from: (&Tree, &Path), to: (&Tree, &Path)) -> crate::tree::Result<()> {
    let parent =
        |(tree, path): (&Tree, &Path)| tree.directory(path.parent().unwrap_or(Path::new("")));
    let name = |path: &Path| path.file_name().unwrap_or(OsStr::new(".")).to_os_string();
    let (source, target) = (parent(from)?, parent(to)?);
    rustix::fs::linkat(&*source, name(from.1), &*target, name(to.1), AtFlags::empty())
}
