//! The rest of a branch after a partial commit: its record gets one new layer with the changes that stay.
//!
//! The layer is created before the commit is logged, from hard links to the files of the old layers, so nothing is
//! copied. Only a file with one committed and one remaining name is copied, since the base gets the object itself. The
//! commit replaces the old layers in the record by the new one instead of ending the branch. The old layers go into the
//! history (or into the trash, with an external store) without these links, so that the branch's files are not shared.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Statx};

use super::branch_table::Remainder;
use super::change_set::ChangeSet;
use super::tree_copy::copy_object;
use super::{Branch, Record, Workspace};
use crate::error::{Context, Error};
use crate::layer::{BASE, Layer};
use crate::object_copy::copy_metadata;
use crate::quota::Quota;
use crate::rooted_dir::RootedDir;
use crate::transaction::{Change, Item, Location, Plan, Rest, What};

/// The number of paths that a branch still changes after a partial commit; at least one.
pub(super) fn count_rest(branch: &Branch) -> usize {
    let counted = ChangeSet::of(branch).map(|work| work.paths().len());
    // The commit is applied: if the paths cannot be counted, report that there are some.
    counted.unwrap_or(1).max(1)
}

/// Estimates how many changed paths of the branch a plan leaves out. A renamed path of which one end is committed may
/// count twice.
pub(super) fn estimate_rest(branch: &Branch, plan: &Plan) -> Result<usize, Error> {
    if plan.rest.is_empty() {
        return Ok(0);
    }
    let ends = plan.changes.iter().flat_map(|one| [Some(&one.path), one.from.as_ref()]);
    let committed: HashSet<&PathBuf> = ends.flatten().collect();
    let is_left = |path: &PathBuf| !committed.contains(path);
    let is_left =
        |change: &&Change| is_left(&change.path) || change.from.as_ref().is_some_and(is_left);
    let work = ChangeSet::of(branch)?;
    let left: BTreeSet<&Path> =
        work.changes.iter().filter(is_left).map(|change| change.path.as_path()).collect();
    Ok(left.len().max(1))
}

/// Creates the layer with the rest of a planned commit; `None` if there is no rest. The layer belongs to no branch
/// until the commit is logged.
pub(super) fn make_rest(
    workspace: &Workspace,
    branch: &Branch,
    rest: &Rest,
) -> Result<Option<Remainder>, Error> {
    if rest.is_empty() {
        return Ok(None);
    }
    let id = workspace.store.next_number();
    let path = workspace.store.layer_path(id);
    let made = workspace.store.new_layer(id, true, &branch.stack).and_then(|layer| {
        workspace.store.records.sync()?; // after a power failure it is still known to belong to no branch
        let quota = Quota::of(branch.record.disk_limit, None); // its parent is main
        Filling::new(workspace, branch, &layer).fill_layer(rest)?;
        carry_reads(workspace, &branch.record, &layer)?;
        layer.set_quota(quota.clone()).at(&path)?;
        if workspace.store.is_external() {
            workspace.store.sync_store()?; // the commit syncs the part in the base
        }
        Ok(Remainder { layer: Arc::new(layer), quota })
    });
    made.map(Some).inspect_err(|_| workspace.store.remove_rest(id))
}

/// Copies the read set to the new layer. If the branch has none, neither has the layer.
fn carry_reads(workspace: &Workspace, record: &Record, layer: &Layer) -> Result<(), Error> {
    let log = workspace.store.layer_path(layer.id.0).join("reads");
    if !log.exists() {
        return Ok(());
    }
    match workspace.store.reads(record) {
        Ok(reads) => {
            reads.iter().try_for_each(|(path, read)| layer.record_read(path, *read)).at(&log)
        }
        Err(Error::Unsupported(_)) => fs::remove_file(&log).at(&log),
        Err(error) => Err(error),
    }
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

    fn fill_layer(&mut self, rest: &Rest) -> Result<(), Error> {
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
        self.describe(&Location::Store(root), Path::new(""))?;
        for (path, expected) in &rest.preconditions {
            self.layer.record_precondition(path, *expected).at(path)?;
        }
        for (ino, count) in &rest.hidden {
            let count = i32::try_from(*count).unwrap_or(i32::MAX);
            self.layer.hard_links().hide((BASE, *ino), count).at(self.path())?;
        }
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.workspace.store.layer_path(self.layer.id.0)
    }

    /// The layer of the branch that contains a location, and the path in it.
    fn source<'p>(&self, place: &'p Location) -> (&'w Layer, &'p Path) {
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
        attributes: &Location,
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

    fn describe(&self, from: &Location, path: &Path) -> Result<(), Error> {
        let (layer, from) = self.source(from);
        let stat = layer.tree.stat(from).at(path)?;
        copy_metadata((&layer.tree, from, &stat), (&self.layer.tree, path)).at(path)
    }

    /// Lets a copy of an object of the base show its inode number.
    fn keep_origin(&self, layer: &Layer, old: &Statx, path: &Path) -> Result<(), Error> {
        let Some(shown) = layer.origin_of(old.stx_ino) else { return Ok(()) };
        let made = self.layer.tree.stat(path).at(path)?;
        self.layer.set_origin(made.stx_ino, shown).at(path)
    }

    fn object(&mut self, path: &Path, from: &Location, is_shared: bool) -> Result<(), Error> {
        let (layer, from) = self.source(from);
        let stat = layer.tree.stat(from).at(path)?;
        // With an external store the base gets copies.
        if !is_shared || self.workspace.store.is_external() {
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

fn link(from: (&RootedDir, &Path), to: (&RootedDir, &Path)) -> crate::rooted_dir::Result<()> {
    let parent =
        |(tree, path): (&RootedDir, &Path)| tree.directory(path.parent().unwrap_or(Path::new("")));
    let name = |path: &Path| path.file_name().unwrap_or(OsStr::new(".")).to_os_string();
    let (source, target) = (parent(from)?, parent(to)?);
    rustix::fs::linkat(&*source, name(from.1), &*target, name(to.1), AtFlags::empty())
}
