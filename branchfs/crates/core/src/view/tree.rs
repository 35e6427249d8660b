//! The merged tree of one branch: its layers, the nodes that the kernel knows and the files that are open.
//!
//! The tree answers where an object is, brings it into the top layer, and records what the branch then depends on. The
//! requests of programs are those of [`super::View`].

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use super::location::Found;
use super::nodes::Node;
use super::{ChangedPaths, Handles, NodeIndex, NodeLocation, Nodes, ROOT};
use crate::layer::Layer;
use crate::layer_stack::{LayerPath, LayerStack, Merged, MergedDir};
use crate::rooted_dir::Result;
use crate::vfs::Attributes;
use crate::write_set::Fingerprint;

/// The objects of a branch.
#[derive(Debug)]
pub struct MergedTree {
    pub(crate) layers: LayerStack,
    /// The nodes that the kernel knows.
    pub nodes: Nodes,
    /// The open files.
    pub handles: Handles,
    /// Big files may be copied up in part.
    pub(crate) copies_in_part: Arc<AtomicBool>,
}

/// Why a view gets a new layer stack.
#[derive(Clone, Copy)]
pub(crate) enum LayerReplacement<'w> {
    /// A child was committed into the branch: its layers are the top.
    Committed,
    /// Layers below changed, and the view still shows the same. With paths: only objects at these paths of the base are
    /// looked up again.
    Same(Option<&'w [Arc<ChangedPaths>]>),
}

/// A node, and one of its names, for which the kernel may have an outdated answer.
pub(crate) type Outdated = (NodeIndex, Option<(NodeIndex, OsString)>);

impl LayerStack {
    /// Looks up `name` in the directories `sources` of these layers, top first.
    pub(super) fn find_in(&self, sources: &[LayerPath], name: &OsStr) -> Result<Option<Found>> {
        match self.find(sources, None, name)? {
            Some(found) if found.is_directory() => Ok(Some(self.directory(found))),
            Some(mut found) => {
                let at = found.at.parts.pop().ok_or(Errno::IO)?;
                self.object(found.kind(), at, &found.stat).map(Some)
            }
            None => Ok(None),
        }
    }

    /// The result of a lookup that found a directory.
    fn directory(&self, found: Merged) -> Found {
        let Merged { at: MergedDir { mut parts, .. }, stat, lowest_ino, .. } = found;
        let mut attributes = attributes(&stat, &parts[0].layer);
        if let [_, .., lowest] = &parts[..] {
            // The lowest directory's number stays the same whatever is copied up above it.
            attributes.ino = lowest.layer.st_ino(lowest_ino);
            attributes.nlink = 1; // unknown without a listing; 1 is the value that tools take for that
        }
        let upper = parts[0].layer.id == self[0].id;
        let lowers = parts.split_off(usize::from(upper)).into();
        let place = NodeLocation::Directory { upper, lowers };
        Found { kind: FileType::Directory, place, inode: None, identity: None, attributes }
    }

    /// The result of a lookup that found an object other than a directory.
    fn object(&self, kind: FileType, at: LayerPath, stat: &Statx) -> Result<Found> {
        let layer = Arc::clone(&at.layer);
        let is_top = layer.id == self[0].id;
        // Only linked objects need to be found again by inode; in the top layer any may be linked later.
        let inode = (is_top || stat.stx_nlink > 1).then_some((layer.origin, stat.stx_ino));
        let is_lower_file = !is_top && kind == FileType::RegularFile;
        let mut attributes = self.object_attributes(stat, &layer);
        self.count_blocks(&mut attributes, &at, stat)?;
        Ok(Found {
            kind,
            place: if is_top { NodeLocation::Upper } else { NodeLocation::Lower(at) },
            inode,
            identity: is_lower_file.then(|| Fingerprint::of(stat)),
            attributes,
        })
    }

    /// Attributes of an object other than a directory. Names that upper layers hide do not count as links.
    pub(crate) fn object_attributes(&self, stat: &Statx, layer: &Layer) -> Attributes {
        let mut found = attributes(stat, layer);
        if stat.stx_nlink > 1 {
            let above = self.iter().take_while(|other| other.id != layer.id);
            let hidden: u32 =
                above.map(|other| other.hard_links().hidden((layer.origin, stat.stx_ino))).sum();
            found.nlink = found.nlink.saturating_sub(hidden);
        }
        found
    }
}

impl MergedTree {
    pub(super) fn new(layers: Vec<Arc<Layer>>) -> Self {
        let root = root_place(&layers);
        Self {
            layers: LayerStack::new(layers),
            nodes: Nodes::new(root),
            handles: Handles::default(),
            copies_in_part: Arc::default(),
        }
    }

    /// The layer that takes the writes of the branch.
    pub fn top(&self) -> Arc<Layer> {
        Arc::clone(&self.layers[0])
    }

    /// Looks up `name` in a directory. Who passes the node to the kernel counts the lookup ([`Nodes::add_lookup`]).
    pub fn lookup(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
    ) -> Result<Option<(NodeIndex, Attributes)>> {
        let Some(mut found) = self.find(parent, name)? else {
            self.record_missing(parent, name)?;
            return Ok(None);
        };
        if let (NodeLocation::Lower(at), Some(origin)) = (&found.place, found.inode) {
            let at = at.clone();
            if self.link_copied_up(parent, name, &at, origin)? {
                found = self.find(parent, name)?.ok_or(Errno::IO)?;
            }
        }
        let attributes = found.attributes;
        Ok(Some((self.nodes.intern(parent, name, found, self.layers[0].is_base()), attributes)))
    }

    /// The layers that have a directory, with its path in each, top first.
    pub(super) fn sources(&self, directory: NodeIndex) -> Result<Cow<'_, [LayerPath]>> {
        match &self.nodes.get(directory)?.place {
            NodeLocation::Directory { upper: false, lowers } => Ok(Cow::Borrowed(lowers)),
            NodeLocation::Directory { upper: true, lowers } => {
                let mut sources = Vec::with_capacity(lowers.len() + 1);
                sources.push(LayerPath { layer: self.top(), path: self.nodes.path(directory)? });
                sources.extend(lowers.iter().cloned());
                Ok(Cow::Owned(sources))
            }
            NodeLocation::Orphan => Err(Errno::NOENT),
            NodeLocation::Upper | NodeLocation::Lower(_) => Err(Errno::NOTDIR),
        }
    }

    /// Looks up `name` in a directory of the branch.
    pub(crate) fn find(&self, parent: NodeIndex, name: &OsStr) -> Result<Option<Found>> {
        self.layers.find_in(&self.sources(parent)?, name)
    }

    /// Looks up `name` in the layers below the top one: the object that a change must hide.
    pub(crate) fn find_below(&self, parent: NodeIndex, name: &OsStr) -> Result<Option<Found>> {
        match &self.nodes.get(parent)?.place {
            NodeLocation::Directory { lowers, .. } if !lowers.is_empty() => {
                self.layers.find_in(lowers, name)
            }
            _ => Ok(None),
        }
    }

    /// The layer and path of a node's content. `ENOENT` for orphans.
    pub fn locate(&self, index: NodeIndex) -> Result<LayerPath> {
        match &self.nodes.get(index)?.place {
            NodeLocation::Directory { upper: true, .. } | NodeLocation::Upper => {
                Ok(LayerPath { layer: self.top(), path: self.nodes.path(index)? })
            }
            NodeLocation::Directory { upper: false, lowers } => {
                lowers.first().cloned().ok_or(Errno::NOENT)
            }
            NodeLocation::Lower(at) => Ok(at.clone()),
            NodeLocation::Orphan => Err(Errno::NOENT),
        }
    }

    /// The open descriptor of an orphan.
    pub(crate) fn open_file_of(&self, index: NodeIndex) -> Option<Arc<OwnedFd>> {
        let node = self.nodes.get(index).ok()?;
        node.handles.iter().find_map(|handle| self.handles.file(*handle).ok())
    }

    /// Replaces the stack of layers. Returns the nodes and names that were looked up again: the kernel may hold outdated
    /// answers for them. A name that means another object than before gets a new node when it is looked up next.
    pub(crate) fn replace_layers(
        &mut self,
        layers: Vec<Arc<Layer>>,
        reason: LayerReplacement<'_>,
    ) -> Vec<Outdated> {
        let old_top = self.top();
        self.layers = LayerStack::new(layers);
        if let Ok(root) = self.nodes.get_mut(ROOT) {
            root.place = root_place(&self.layers);
        }
        let mut outdated = vec![(ROOT, None)];
        let mut children: HashMap<NodeIndex, Vec<(NodeIndex, OsString)>> = HashMap::new();
        for (index, node) in self.nodes.all() {
            for (parent, name) in &node.names {
                children.entry(*parent).or_default().push((index, name.clone()));
            }
        }
        // A directory, its path in the old top layer, and whether it is still there.
        let mut pending = vec![(ROOT, PathBuf::new(), true)];
        while let Some((parent, directory, is_there)) = pending.pop() {
            for (index, name) in children.remove(&parent).unwrap_or_default() {
                let old_path = directory.join(&name);
                if matches!(reason, LayerReplacement::Same(Some(changed)) if !self.nodes.is_over(index, changed))
                {
                    pending.push((index, old_path, is_there));
                    continue;
                }
                outdated.push((index, Some((parent, name.clone()))));
                let found = if is_there { self.find(parent, &name).ok().flatten() } else { None };
                let Ok(node) = self.nodes.get(index) else { continue };
                let is_directory = node.kind == FileType::Directory;
                let before = match &node.place {
                    NodeLocation::Upper => {
                        LayerPath { layer: Arc::clone(&old_top), path: old_path.clone() }
                    }
                    // Found under another of its names above.
                    NodeLocation::Lower(at) if at.layer.id == old_top.id => {
                        LayerPath { layer: Arc::clone(&old_top), path: old_path.clone() }
                    }
                    NodeLocation::Lower(at) => at.clone(),
                    NodeLocation::Directory { .. } | NodeLocation::Orphan => {
                        LayerPath { layer: Arc::clone(&old_top), path: PathBuf::new() }
                    }
                };
                match found.filter(|found| is_kept(node, &before, found, &reason)) {
                    Some(found) => {
                        self.nodes.set_inode(index, found.inode);
                        if let Ok(node) = self.nodes.get_mut(index) {
                            (node.place, node.identity) = (found.place, found.identity);
                            node.default_acl = None;
                        }
                        pending.push((index, old_path, true));
                    }
                    None => {
                        let place = if is_directory {
                            NodeLocation::Orphan
                        } else {
                            NodeLocation::Lower(before)
                        };
                        self.nodes.split_node(parent, &name, place);
                        pending.push((index, old_path, false));
                    }
                }
            }
        }
        outdated
    }
}

/// Whether a node keeps its name. `found` is the object that the name means now, `before` was the node's object.
fn is_kept(node: &Node, before: &LayerPath, found: &Found, reason: &LayerReplacement<'_>) -> bool {
    if node.kind != found.kind || node.kind == FileType::Directory {
        return node.kind == found.kind;
    }
    match (reason, &found.place) {
        (LayerReplacement::Committed, NodeLocation::Lower(at)) => {
            (at.layer.id, &at.path) == (before.layer.id, &before.path)
        }
        (LayerReplacement::Committed, _) => false,
        // Its content is the same, unless others changed it in the base.
        (LayerReplacement::Same(_), _) => match (node.identity, found.identity) {
            (Some(before), Some(now)) => before.has_content_of(&now),
            (before, now) => before == now,
        },
    }
}

/// The root directory, merged from all layers that exist.
fn root_place(layers: &[Arc<Layer>]) -> NodeLocation {
    let lowers = layers[1..]
        .iter()
        .filter(|layer| layer.is_created())
        .map(|layer| LayerPath { layer: Arc::clone(layer), path: PathBuf::new() })
        .collect();
    NodeLocation::Directory { upper: layers[0].is_created(), lowers }
}

/// The attributes of an object in `layer` as the kernel shows them, with the inode number and links to show.
pub(crate) fn attributes(stat: &Statx, layer: &Layer) -> Attributes {
    Attributes {
        ino: layer.st_ino(stat.stx_ino),
        nlink: layer.hard_links().shown(stat.stx_ino, stat.stx_nlink),
        ..Attributes::from(stat)
    }
}
