//! One branch as the kernel sees it: merged lookups over a stack of layers, copy-up, and changes to the top layer.
//!
//! A view knows no FUSE and no other branch. Its layers are ordered top first; the first is the branch's own and takes
//! all changes, the last is the base. The view of main has the base alone and changes it in place.
//!
//! Cost of the hot paths, in system calls beside the one round trip to the kernel: a lookup is one `statx` for each
//! layer until the name is found (plus two `getxattr` where directories of two layers merge); `getattr` is one `statx`;
//! `open` is one `openat`; `read` and `write` are one each; a first change copies up each parent directory once.
//!
//! Locking: a view is used under the mutex of its [`crate::filesystem::Filesystem`]; file content is read and written
//! outside it, on descriptors taken out of the handle table.

mod accounts;
mod attributes;
mod change;
mod copy_up;
mod handles;
mod in_part;
mod listing;
mod nodes;
mod open;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::hash::RandomState;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use crate::commit::Woven;
use crate::kernel::handler::{Attributes, Time};
use crate::layer::Layer;
use crate::seen::Read;
use crate::tree::Result;

pub(crate) use attributes::kill_privileges_of;
pub(crate) use change::{New, Owner};
pub(crate) use handles::Handles;
pub(crate) use in_part::Unfinished;
pub(crate) use nodes::{At, Index, Nodes, Place, ROOT};
pub(crate) use open::OpenedFile;

/// The store's directory in the base, hidden from every view.
pub(crate) const HIDDEN: &str = ".branching";

/// Whether a path relative to the base is the store. No other name is reserved.
pub(crate) fn is_hidden(base_path: &Path) -> bool {
    base_path.as_os_str() == HIDDEN
}

/// A branch's tree.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) layers: Vec<Arc<Layer>>,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    /// What makes the offsets of a listing of its names.
    offsets: RandomState,
    /// Nodes that somebody may write to through a mapping.
    mapped: HashSet<Index>,
    /// Big files may be copied up in part.
    pub(crate) copies_in_part: Arc<AtomicBool>,
}

/// A node, and one of its names, that the kernel may hold an outdated answer for.
pub(crate) type Outdated = (Index, Option<(Index, OsString)>);

/// What a merged lookup found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) kind: FileType,
    pub(crate) place: Place,
    /// Layer and inode number of the object itself (not of a directory).
    pub(crate) inode: Option<(crate::layer::LayerId, u64)>,
    pub(crate) attributes: Attributes,
}

impl View {
    /// A view of `layers`, top first.
    pub(crate) fn new(layers: Vec<Arc<Layer>>) -> Self {
        let root = root_place(&layers);
        Self {
            layers,
            nodes: Nodes::new(root),
            handles: Handles::default(),
            offsets: RandomState::new(),
            mapped: HashSet::new(),
            copies_in_part: Arc::default(),
        }
    }

    /// The layer that takes changes.
    pub(crate) fn top(&self) -> Arc<Layer> {
        Arc::clone(&self.layers[0])
    }

    /// Looks `name` up in a directory and remembers its node. The caller takes the kernel's reference.
    pub(crate) fn lookup(
        &mut self,
        parent: Index,
        name: &OsStr,
    ) -> Result<Option<(Index, Attributes)>> {
        let Some(mut found) = self.find(parent, name)? else {
            self.note_missing(parent, name)?;
            return Ok(None);
        };
        if let (Place::Lower(at), Some(origin)) = (&found.place, found.inode) {
            let at = at.clone();
            if self.join_links(parent, name, &at, origin)? {
                found = self.find(parent, name)?.ok_or(Errno::IO)?;
            }
        }
        let attributes = found.attributes;
        Ok(Some((self.enter(parent, name, found), attributes)))
    }

    /// The node for something found: the one that is known under that name or by that inode, or a new one.
    fn enter(&mut self, parent: Index, name: &OsStr, found: Found) -> Index {
        let known = self.nodes.child(parent, name);
        if let Some(index) = known.filter(|index| self.same(*index, &found)) {
            return index;
        }
        let index = match found.inode.and_then(|inode| self.nodes.by_inode(inode)) {
            Some(index) if self.nodes.get(index).is_ok_and(|node| node.kind == found.kind) => index,
            _ => self.nodes.add(found.kind, found.place, found.inode),
        };
        self.nodes.name(index, parent, name);
        index
    }

    fn same(&self, index: Index, found: &Found) -> bool {
        let Ok(node) = self.nodes.get(index) else {
            return false;
        };
        let place_is_same = match (&node.place, &found.place) {
            (Place::Directory { .. }, Place::Directory { .. }) | (Place::Upper, Place::Upper) => {
                true
            }
            (Place::Lower(one), Place::Lower(other)) => one.layer.id == other.layer.id,
            _ => false,
        };
        let inode_is_same = match found.inode {
            Some(inode) => self.nodes.by_inode(inode) == Some(index),
            None => true,
        };
        node.kind == found.kind && place_is_same && inode_is_same
    }

    /// The layers that have a directory, with its path in each, top first.
    fn sources(&self, directory: Index) -> Result<Cow<'_, [At]>> {
        match &self.nodes.get(directory)?.place {
            Place::Directory { upper: false, lowers } => Ok(Cow::Borrowed(lowers)),
            Place::Directory { upper: true, lowers } => {
                let mut sources = Vec::with_capacity(lowers.len() + 1);
                sources.push(At { layer: self.top(), path: self.nodes.path(directory)? });
                sources.extend(lowers.iter().cloned());
                Ok(Cow::Owned(sources))
            }
            Place::Orphan => Err(Errno::NOENT),
            Place::Upper | Place::Lower(_) => Err(Errno::NOTDIR),
        }
    }

    /// What the branch has under `name` in a directory.
    pub(crate) fn find(&self, parent: Index, name: &OsStr) -> Result<Option<Found>> {
        self.find_in(&self.sources(parent)?, name)
    }

    /// What the layers below the top one have under `name`: what a change there must hide.
    pub(crate) fn find_below(&self, parent: Index, name: &OsStr) -> Result<Option<Found>> {
        match &self.nodes.get(parent)?.place {
            Place::Directory { lowers, .. } if !lowers.is_empty() => self.find_in(lowers, name),
            _ => Ok(None),
        }
    }

    fn find_in(&self, sources: &[At], name: &OsStr) -> Result<Option<Found>> {
        let mut merged: Option<Merged> = None;
        for (position, source) in sources.iter().enumerate() {
            let path = source.path.join(name);
            let layer = &source.layer;
            if layer.is_base() && is_hidden(&path) {
                continue;
            }
            let stat = match layer.tree.stat_entry(&source.path, name) {
                Ok(stat) => stat,
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(error) => return Err(error),
            };
            if layer.is_whiteout(&path, &stat) {
                break;
            }
            let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
            if kind != FileType::Directory {
                return Ok(Some(match merged {
                    Some(merged) => merged.finish(),
                    None => self.object(kind, At { layer: Arc::clone(layer), path }, &stat),
                }));
            }
            let at = At { layer: Arc::clone(layer), path };
            let is_top = layer.id == self.layers[0].id;
            let rest = &sources[position + 1..];
            let (opaque, redirect) = if layer.is_base() || self.is_lowest(layer) {
                (true, None)
            } else {
                (layer.is_opaque(&at.path), layer.redirect(&at.path)?)
            };
            match &mut merged {
                None => merged = Some(Merged::new(at.clone(), &stat, is_top)),
                Some(merged) => merged.add(at.clone(), &stat),
            }
            if opaque {
                break;
            }
            if let Some(origin) = redirect {
                for below in self.resolve_below(&at.layer, &origin)? {
                    let stat = below.layer.tree.stat(&below.path)?;
                    if let Some(merged) = &mut merged {
                        merged.add(below, &stat);
                    }
                }
                break;
            }
            if rest.is_empty() {
                break;
            }
        }
        Ok(merged.map(Merged::finish))
    }

    fn is_lowest(&self, layer: &Layer) -> bool {
        self.layers.last().is_some_and(|last| last.id == layer.id)
    }

    /// The directories that `path` names in the layers below `layer`, as a redirect asks for.
    fn resolve_below(&self, layer: &Layer, path: &Path) -> Result<Vec<At>> {
        let position =
            self.layers.iter().position(|other| other.id == layer.id).ok_or(Errno::IO)?;
        let mut at: Vec<At> = self.layers[position + 1..]
            .iter()
            .map(|layer| At { layer: Arc::clone(layer), path: PathBuf::new() })
            .collect();
        for name in path {
            at = match self.find_in(&at, name)?.map(|found| found.place) {
                Some(Place::Directory { lowers, .. }) => lowers.to_vec(),
                _ => return Ok(Vec::new()),
            };
        }
        Ok(at)
    }

    fn object(&self, kind: FileType, at: At, stat: &Statx) -> Found {
        let layer = Arc::clone(&at.layer);
        let is_top = layer.id == self.layers[0].id;
        // Only linked objects need to be found again by inode; in the top layer any may be linked later.
        let inode = (is_top || stat.stx_nlink > 1).then_some((layer.origin, stat.stx_ino));
        Found {
            kind,
            place: if is_top { Place::Upper } else { Place::Lower(at) },
            inode,
            attributes: self.object_attributes(stat, &layer),
        }
    }

    /// Attributes of an object that is no directory: names that layers above hide are no links.
    pub(crate) fn object_attributes(&self, stat: &Statx, layer: &Layer) -> Attributes {
        let mut found = attributes(stat, layer);
        if stat.stx_nlink > 1 {
            let above = self.layers.iter().take_while(|other| other.id != layer.id);
            let hidden: u32 =
                above.map(|other| other.hidden_links((layer.origin, stat.stx_ino))).sum();
            found.nlink = found.nlink.saturating_sub(hidden);
        }
        found
    }

    /// Where a node's content is now: layer and path. `ENOENT` for orphans.
    pub(crate) fn locate(&self, index: Index) -> Result<At> {
        match &self.nodes.get(index)?.place {
            Place::Directory { upper: true, .. } | Place::Upper => {
                Ok(At { layer: self.top(), path: self.nodes.path(index)? })
            }
            Place::Directory { upper: false, lowers } => {
                lowers.first().cloned().ok_or(Errno::NOENT)
            }
            Place::Lower(at) => Ok(at.clone()),
            Place::Orphan => Err(Errno::NOENT),
        }
    }

    /// A descriptor of an orphan that somebody has open.
    pub(crate) fn open_file_of(&self, index: Index) -> Option<Arc<OwnedFd>> {
        let node = self.nodes.get(index).ok()?;
        node.handles.iter().find_map(|handle| self.handles.file(*handle).ok())
    }

    /// Makes the stack `layers` the view's, after a commit into this branch, or below it (then only nodes whose path in
    /// the base is in `changed` are looked up anew). Returns the nodes and names that were looked up: the kernel may hold
    /// outdated answers for them.
    pub(crate) fn restack(
        &mut self,
        layers: Vec<Arc<Layer>>,
        changed: Option<&Woven>,
    ) -> Vec<Outdated> {
        self.layers = layers;
        if let Ok(root) = self.nodes.get_mut(ROOT) {
            root.place = root_place(&self.layers);
        }
        let mut outdated = vec![(ROOT, None)];
        let mut children: HashMap<Index, Vec<(Index, OsString)>> = HashMap::new();
        for (index, node) in self.nodes.all() {
            for (parent, name) in &node.names {
                children.entry(*parent).or_default().push((index, name.clone()));
            }
        }
        let mut pending = vec![ROOT];
        while let Some(parent) = pending.pop() {
            for (index, name) in children.remove(&parent).unwrap_or_default() {
                if changed.is_some_and(|changed| !self.is_over(index, changed)) {
                    pending.push(index);
                    continue;
                }
                outdated.push((index, Some((parent, name.clone()))));
                let found = self.find(parent, &name).ok().flatten();
                let kind = self.nodes.get(index).map(|node| node.kind);
                match found {
                    Some(found) if Ok(found.kind) == kind => {
                        let is_directory = found.kind == FileType::Directory;
                        self.nodes.set_inode(index, found.inode);
                        if let Ok(node) = self.nodes.get_mut(index) {
                            node.place = found.place;
                            node.default_acl = None;
                        }
                        if is_directory {
                            pending.push(index);
                        }
                    }
                    _ => {
                        self.nodes.unname(parent, &name);
                        self.nodes.set_inode(index, None);
                        if let Ok(node) = self.nodes.get_mut(index) {
                            node.place = Place::Orphan;
                        }
                    }
                }
            }
        }
        outdated
    }

    /// Whether a node shows something of the base at a path where that has changed.
    fn is_over(&self, index: Index, changed: &Woven) -> bool {
        let is_changed = |at: &At| at.layer.is_base() && changed.changes(&at.path);
        match self.nodes.get(index).map(|node| &node.place) {
            Ok(Place::Directory { lowers, .. }) => lowers.iter().any(is_changed),
            Ok(Place::Lower(at)) => is_changed(at),
            _ => false,
        }
    }

    /// The branch read this path of its snapshot. Only noted where the policy asks for it.
    fn note_read(&self, path: &Path, read: Read) -> Result<()> {
        self.layers[0].note_read(path, read)
    }

    /// A name was looked up in vain: noted under its path in the snapshot.
    fn note_missing(&self, parent: Index, name: &OsStr) -> Result<()> {
        match &self.nodes.get(parent)?.place {
            Place::Directory { lowers, .. } => match lowers.first() {
                Some(below) => self.note_read(&below.path.join(name), Read::Missing),
                None => Ok(()), // new in this branch, with all that is in it
            },
            _ => Ok(()),
        }
    }
}

/// The root is a directory of every layer that is there.
fn root_place(layers: &[Arc<Layer>]) -> Place {
    let lowers = layers[1..]
        .iter()
        .filter(|layer| layer.is_made())
        .map(|layer| At { layer: Arc::clone(layer), path: PathBuf::new() })
        .collect();
    Place::Directory { upper: layers[0].is_made(), lowers }
}

/// Directories of several layers under one name, as they are found from the top down.
struct Merged {
    upper: bool,
    lowers: Vec<At>,
    attributes: Attributes,
    directories: u32,
}

impl Merged {
    fn new(at: At, stat: &Statx, is_top: bool) -> Self {
        let attributes = attributes(stat, &at.layer);
        let lowers = if is_top { Vec::new() } else { vec![at] };
        Self { upper: is_top, lowers, attributes, directories: 1 }
    }

    fn add(&mut self, at: At, stat: &Statx) {
        // The lowest directory's number stays the same whatever is copied up above it.
        self.attributes.ino = at.layer.shown_ino(stat.stx_ino);
        self.lowers.push(at);
        self.directories += 1;
    }

    fn finish(mut self) -> Found {
        if self.directories > 1 {
            self.attributes.nlink = 1; // unknown without a listing; 1 is the value that tools take for that
        }
        Found {
            kind: FileType::Directory,
            place: Place::Directory { upper: self.upper, lowers: self.lowers.into() },
            inode: None,
            attributes: self.attributes,
        }
    }
}

/// `stat` of an object in `layer` as the kernel wants it, with the inode number and links to show.
pub(crate) fn attributes(stat: &Statx, layer: &Layer) -> Attributes {
    let time =
        |time: rustix::fs::StatxTimestamp| Time { seconds: time.tv_sec, nanoseconds: time.tv_nsec };
    Attributes {
        ino: layer.shown_ino(stat.stx_ino),
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: time(stat.stx_atime),
        mtime: time(stat.stx_mtime),
        ctime: time(stat.stx_ctime),
        mode: u32::from(stat.stx_mode),
        nlink: layer.shown_links(stat.stx_ino, stat.stx_nlink),
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
        block_size: stat.stx_blksize,
    }
}
