//! Snapshot layers: the layer that goes over a changed base so that a branch which was forked before still sees the
//! earlier state (snapshot isolation, S6).
//!
//! It is the inverse of a transaction in the overlay format. Objects that the transaction replaced or deleted are hard
//! links to the before-images in the journal entry. Objects that it added are hidden by whiteouts. A directory that it
//! moved is redirected to its present path in the base. A directory with changed attributes is included with its
//! earlier ones; a file whose attributes alone were changed, in place, is copied. Apart from that only directories and
//! devices 0:0 are created; the cost follows the changed names, and the names in deleted directories.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Statx};
use rustix::io::Errno;

use super::journal::LoggedTransaction;
use super::path_map::{PathMap, with_rest};
use super::plan::kind_of;
use super::step::{Location, Metadata, Step, TransactionRoots, set_metadata};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::object_copy::{copy_file, copy_metadata, create_like};
use crate::overlay::{self, may_be_whiteout};
use crate::view::ChangedPaths;

/// Fills the empty layer `snapshot_layer` with the inverse of a transaction that was applied and is still in the journal.
pub(crate) fn build_snapshot_layer(
    disk: &TransactionRoots,
    decided: &LoggedTransaction,
    snapshot: &Layer,
) -> Result<ChangedPaths, Error> {
    let mut moves = PathMap::default();
    let mut attributes = BTreeMap::new();
    for step in decided.steps.iter().rev() {
        moves.add_reversed(step);
        if let Step::Metadata { before: Location::Base(path), old, .. } = step {
            attributes.insert(path.clone(), old.clone());
        }
    }
    let mut builder = SnapshotLayerBuilder {
        disk,
        snapshot_layer: snapshot,
        moves: moves.base_entries(),
        attributes,
        links: HashMap::new(),
        changed_paths: ChangedPaths::default(),
    };
    builder.build_snapshot_layer()?;
    Ok(builder.changed_paths)
}

/// Copies of trees that are left to do.
enum Copying {
    Object(PathBuf, Location, Statx),
    /// Everything in the directory was copied: sets its attributes.
    ImportedLayer(PathBuf, Location, Statx),
}

struct SnapshotLayerBuilder<'a> {
    disk: &'a TransactionRoots,
    snapshot_layer: &'a Layer,
    /// Earlier path in the base -> present location, or `None` if nothing existed there.
    moves: BTreeMap<PathBuf, Option<Location>>,
    /// Attributes that directories of the base had.
    attributes: BTreeMap<PathBuf, Metadata>,
    /// Links that an object had before it was linked here.
    links: HashMap<u64, u32>,
    changed_paths: ChangedPaths,
}

impl SnapshotLayerBuilder<'_> {
    fn build_snapshot_layer(&mut self) -> Result<(), Error> {
        let root = PathBuf::new();
        self.changed_paths.paths.insert(root.clone());
        let keys = self.moves.keys().chain(self.attributes.keys());
        // Sorted paths have parents before children.
        for path in keys.cloned().collect::<BTreeSet<PathBuf>>() {
            match self.moves.get(&path).cloned() {
                Some(origin) => self.put(&path, origin.as_ref())?,
                None => self.put_attributed(&path)?,
            }
        }
        // A branch without a layer on disk shows the attributes of the snapshot layer's root.
        let base = Location::Base(root.clone());
        if let Some(stat) = self.disk.stat(&base)? {
            let from = (self.disk.tree(&base), root.as_path(), &stat);
            copy_metadata(from, (&self.snapshot_layer.tree, &root)).at(&root)?;
        }
        // Last: entries were made in them since.
        self.attributes.keys().try_for_each(|path| self.set_attributes(path))
    }

    /// The present location of the object that the base had at a path.
    fn now(&self, path: &Path) -> Option<Location> {
        for root in path.ancestors() {
            if let Some(origin) = self.moves.get(root) {
                let rest = path.strip_prefix(root).ok()?;
                return origin.as_ref().map(|origin| with_rest(origin, rest));
            }
        }
        Some(Location::Base(path.to_path_buf()))
    }

    fn put(&mut self, path: &Path, origin: Option<&Location>) -> Result<(), Error> {
        let parent = path.parent().unwrap_or(Path::new(""));
        self.directory(parent)?;
        self.changed_paths.paths.insert(path.to_path_buf());
        let stat = origin.map(|origin| self.disk.stat(origin)).transpose()?.flatten();
        let (Some(origin), Some(stat)) = (origin, stat) else {
            // Only objects that the base shows below must be hidden: the snapshot layer may contain the whole parent.
            let shown = match (self.now(parent), path.file_name()) {
                (Some(Location::Base(parent)), Some(name)) => Location::Base(parent.join(name)),
                _ => return Ok(()),
            };
            return match self.disk.stat(&shown)? {
                Some(_) => self.snapshot_layer.put_whiteout(path).at(path),
                None => Ok(()),
            };
        };
        match origin {
            Location::Base(now) if kind_of(&stat) == FileType::Directory => {
                self.make_directory(path, &stat, origin)?;
                self.changed_paths.moved.push(path.to_path_buf());
                self.snapshot_layer.set_redirect(path, now).at(path)
            }
            _ => self.copy(path, origin, &stat),
        }
    }

    /// Links an object of the journal entry, or all that is in a directory there.
    fn copy(&mut self, path: &Path, from: &Location, stat: &Statx) -> Result<(), Error> {
        let mut pending = vec![Copying::Object(path.to_path_buf(), from.clone(), *stat)];
        while let Some(copying) = pending.pop() {
            match copying {
                Copying::Object(path, from, stat) if kind_of(&stat) == FileType::Directory => {
                    self.make_directory(&path, &stat, &from)?;
                    self.snapshot_layer.set_opaque(&path).at(&path)?;
                    let entries = self.disk.list(&from)?;
                    pending.push(Copying::ImportedLayer(path.clone(), from.clone(), stat));
                    for entry in entries {
                        let (path, from) = (path.join(&entry.name), from.join(&entry.name));
                        if self.moves.contains_key(&path) {
                            continue; // by itself
                        }
                        if let Some(stat) = self.disk.stat(&from)? {
                            pending.push(Copying::Object(path, from, stat));
                        }
                    }
                }
                Copying::Object(path, from, stat) => {
                    self.link(&path, &from, &stat)?;
                    self.changed_paths.paths.insert(path);
                }
                Copying::ImportedLayer(path, from, stat) => {
                    let (tree, from) = (self.disk.tree(&from), from.path());
                    copy_metadata((tree, from, &stat), (&self.snapshot_layer.tree, &path))
                        .at(&path)?;
                }
            }
        }
        Ok(())
    }

    fn link(&mut self, path: &Path, from: &Location, stat: &Statx) -> Result<(), Error> {
        if may_be_whiteout(stat) {
            let tree = &self.snapshot_layer.tree;
            tree.make_node(path, u32::from(stat.stx_mode), 0).at(path)?;
            copy_metadata((self.disk.tree(from), from.path(), stat), (tree, path)).at(path)?;
            return overlay::mark_device(tree, path).at(path);
        }
        let parent = |path: &Path| path.parent().unwrap_or(Path::new("")).to_path_buf();
        let name = |path: &Path| path.file_name().unwrap_or(OsStr::new(".")).to_os_string();
        let (source, target) = (
            self.disk.tree(from).directory(&parent(from.path())).at(from.path())?,
            self.snapshot_layer.tree.directory(&parent(path)).at(path)?,
        );
        let flags = AtFlags::empty();
        rustix::fs::linkat(&*source, name(from.path()), &*target, name(path), flags).at(path)?;
        let links = *self.links.entry(stat.stx_ino).or_insert(stat.stx_nlink);
        self.snapshot_layer.hard_links().set_count(stat.stx_ino, links).at(path)
    }

    /// Adds an object whose attributes the transaction changed in place: a directory is merged; a file is copied,
    /// because its content has not moved and a link would share the new attributes.
    fn put_attributed(&mut self, path: &Path) -> Result<(), Error> {
        let from = Location::Base(path.to_path_buf());
        let Some(stat) = self.disk.stat(&from)? else { return Ok(()) };
        if kind_of(&stat) == FileType::Directory {
            return self.directory(path);
        }
        self.directory(path.parent().unwrap_or(Path::new("")))?;
        self.changed_paths.paths.insert(path.to_path_buf());
        let (base, tree) = (self.disk.tree(&from), &self.snapshot_layer.tree);
        let original = (base, path, &stat);
        create_like(original, (tree, path), |copy| copy_file(original, copy)).at(path)?;
        copy_metadata(original, (tree, path)).at(path)?;
        let made = tree.stat(path).at(path)?;
        self.snapshot_layer.set_origin(made.stx_ino, stat.stx_ino).at(path)?;
        self.snapshot_layer.hard_links().set_count(made.stx_ino, stat.stx_nlink).at(path)
    }

    /// Adds a directory of the base on the path to an object; it merges with that of the base.
    fn directory(&mut self, path: &Path) -> Result<(), Error> {
        let is_new = |path: &&Path| !self.changed_paths.paths.contains(*path);
        let missing: Vec<&Path> = path.ancestors().take_while(is_new).collect();
        for path in missing.into_iter().rev() {
            self.changed_paths.paths.insert(path.to_path_buf());
            let Some(existing) = self.now(path) else { continue };
            if let Some(stat) = self.disk.stat(&existing)? {
                self.make_directory(path, &stat, &existing)?;
            }
        }
        Ok(())
    }

    fn make_directory(&mut self, path: &Path, stat: &Statx, from: &Location) -> Result<(), Error> {
        self.changed_paths.paths.insert(path.to_path_buf());
        let tree = &self.snapshot_layer.tree;
        match tree.make_directory(path, 0o700) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).at(path),
        }
        copy_metadata((self.disk.tree(from), from.path(), stat), (tree, path)).at(path)?;
        let made = tree.stat(path).at(path)?;
        self.snapshot_layer.set_origin(made.stx_ino, stat.stx_ino).at(path)
    }

    fn set_attributes(&self, path: &Path) -> Result<(), Error> {
        let Some(wanted) = self.attributes.get(path) else { return Ok(()) };
        match self.snapshot_layer.tree.stat(path) {
            Ok(_) => set_metadata(&self.snapshot_layer.tree, path, wanted).at(path),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error).at(path),
        }
    }
}
