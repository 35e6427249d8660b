//! The node table of one view: what the kernel knows of a branch.
//!
//! A node is an object, not a name: hard links share one. Its path in the top layer is the chain of its first name and
//! its parents' names, so renaming a directory moves everything below it for free. Where a node's content lies is its
//! [`NodeLocation`]. A node is dropped when the kernel has forgotten it, nothing has it open and no child node hangs below it:
//! the table is as large as the kernel's own cache.
//!
//! The kernel has one page cache for each node, which every open descriptor and mapping fills. So a file's node never
//! changes from one object to another with different content: where a name comes to mean another object, it gets a new
//! node ([`Nodes::supersede_names`]). The old node stays with the descriptors that have it open, and with the old
//! object. Copy-up keeps the node, because the copy has the same content.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::changed_paths::ChangedPaths;
use super::handles::Backing;
use super::location::{Found, NodeIndex, NodeLocation, ROOT};
use crate::ids::LayerId;
use crate::layer_stack::LayerPath;
use crate::rooted_dir::{DirectoryEntry, Result};
use crate::vfs::Attributes;
use crate::write_set::Fingerprint;

/// A name in a listing, with the offset from which on the rest follows.
#[derive(Debug)]
pub struct Listed {
    pub offset: u64,
    pub entry: DirectoryEntry,
}

/// An object that the kernel knows by a node id.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) kind: FileType,
    /// Every name the kernel has looked up: (parent, name). Empty for orphans and the root.
    pub(crate) names: Vec<(NodeIndex, OsString)>,
    pub(crate) place: NodeLocation,
    /// Key in `by_inode`.
    inode: Option<(LayerId, u64)>,
    /// The number of references that the kernel holds.
    lookups: u64,
    /// Handles of the open file descriptions of the object.
    pub(crate) handles: Vec<u64>,
    /// The attributes of an orphan that is not open.
    pub(crate) last_attributes: Option<Attributes>,
    /// Whether the directory has a default ACL, once known.
    pub(crate) default_acl: Option<bool>,
    /// The backing file, if the kernel reads and writes the open file directly; `None` if it sends requests.
    pub(crate) backing: Option<Backing>,
    /// The node was open at least once.
    pub(crate) was_opened: bool,
    /// The current listing of a directory.
    pub(crate) listing: Option<Arc<[Listed]>>,
    /// The kernel's page cache of the node may be older than what was written to the backing file.
    pub(crate) pages_outdated: bool,
    /// State of a lower file when the kernel got its attributes; its pages are of that state too.
    pub(crate) identity: Option<Fingerprint>,
    /// Its names lead to another object now: opening it by a path that the kernel resolved earlier answers ESTALE.
    pub(crate) superseded: bool,
}

/// The nodes of one view, by number, by name and by inode.
#[derive(Debug)]
pub struct Nodes {
    table: HashMap<NodeIndex, Node>,
    /// The children of each directory that has any.
    by_name: HashMap<NodeIndex, HashMap<OsString, NodeIndex>>,
    by_inode: HashMap<(LayerId, u64), NodeIndex>,
    next: NodeIndex,
}

impl Nodes {
    pub(crate) fn new(root: NodeLocation) -> Self {
        let mut nodes = Self {
            table: HashMap::new(),
            by_name: HashMap::new(),
            by_inode: HashMap::new(),
            next: ROOT,
        };
        let root = nodes.add(FileType::Directory, root, None);
        nodes.table.get_mut(&root).expect("just added").lookups = 1; // never dropped
        nodes
    }

    pub(crate) fn get(&self, index: NodeIndex) -> Result<&Node> {
        self.table.get(&index).ok_or(Errno::STALE)
    }

    pub(crate) fn get_mut(&mut self, index: NodeIndex) -> Result<&mut Node> {
        self.table.get_mut(&index).ok_or(Errno::STALE)
    }

    pub(crate) fn child(&self, parent: NodeIndex, name: &OsStr) -> Option<NodeIndex> {
        self.by_name.get(&parent)?.get(name).copied()
    }

    pub(crate) fn by_inode(&self, inode: (LayerId, u64)) -> Option<NodeIndex> {
        self.by_inode.get(&inode).copied()
    }

    /// Every node, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (NodeIndex, &Node)> {
        self.table.iter().map(|(index, node)| (*index, node))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Adds a node that has no name and no reference yet.
    pub(crate) fn add(
        &mut self,
        kind: FileType,
        place: NodeLocation,
        inode: Option<(LayerId, u64)>,
    ) -> NodeIndex {
        let index = self.next;
        self.next += 1;
        let node = Node {
            kind,
            names: Vec::new(),
            place,
            inode,
            lookups: 0,
            handles: Vec::new(),
            last_attributes: None,
            default_acl: None,
            backing: None,
            was_opened: false,
            listing: None,
            pages_outdated: false,
            identity: None,
            superseded: false,
        };
        self.table.insert(index, node);
        if let Some(inode) = inode {
            self.by_inode.insert(inode, index);
        }
        index
    }

    /// Adds a name to a node; another node with that name loses it.
    pub(crate) fn name(&mut self, index: NodeIndex, parent: NodeIndex, name: &OsStr) {
        match self.child(parent, name) {
            Some(known) if known == index => return,
            Some(_) => drop(self.unname(parent, name)),
            None => {}
        }
        self.by_name.entry(parent).or_default().insert(name.to_os_string(), index);
        if let Some(node) = self.table.get_mut(&index) {
            node.names.push((parent, name.to_os_string()));
        }
    }

    /// Removes a name; returns the node that had it.
    pub(crate) fn unname(&mut self, parent: NodeIndex, name: &OsStr) -> Option<NodeIndex> {
        let index = self.remove_child(parent, name)?;
        if let Some(node) = self.table.get_mut(&index) {
            node.names.retain(|(of, own)| (*of, own.as_os_str()) != (parent, name));
        }
        self.drop_unused(parent);
        Some(index)
    }

    fn remove_child(&mut self, parent: NodeIndex, name: &OsStr) -> Option<NodeIndex> {
        let children = self.by_name.get_mut(&parent)?;
        let index = children.remove(name);
        if children.is_empty() {
            self.by_name.remove(&parent);
        }
        index
    }

    /// Removes one name from a node, because the name means another object now or at its next lookup. Without any name
    /// left, the node keeps the object at `place` for its open files.
    pub(crate) fn split_node(&mut self, parent: NodeIndex, name: &OsStr, place: NodeLocation) {
        let Some(index) = self.unname(parent, name) else {
            return;
        };
        let Some(node) = self.table.get_mut(&index).filter(|node| node.names.is_empty()) else {
            return;
        };
        (node.place, node.superseded) = (place, true);
        self.set_inode(index, None);
        self.drop_unused(index);
    }

    /// Exchanges two names.
    pub(crate) fn exchange(&mut self, one: (NodeIndex, &OsStr), other: (NodeIndex, &OsStr)) {
        let (first, second) = (self.child(one.0, one.1), self.child(other.0, other.1));
        self.unname(one.0, one.1);
        self.unname(other.0, other.1);
        if let Some(first) = first {
            self.name(first, other.0, other.1);
        }
        if let Some(second) = second {
            self.name(second, one.0, one.1);
        }
    }

    /// By which inode the node can be found.
    pub(crate) fn inode(&self, index: NodeIndex) -> Option<(LayerId, u64)> {
        self.table.get(&index).and_then(|node| node.inode)
    }

    /// The object is now this inode of this layer (`None`: it can no longer be found by inode).
    pub(crate) fn set_inode(&mut self, index: NodeIndex, inode: Option<(LayerId, u64)>) {
        let Some(node) = self.table.get_mut(&index) else {
            return;
        };
        if let Some(old) = std::mem::replace(&mut node.inode, inode) {
            if self.by_inode.get(&old) == Some(&index) {
                self.by_inode.remove(&old);
            }
        }
        if let Some(inode) = inode {
            self.by_inode.insert(inode, index);
        }
    }

    /// Whether the kernel holds a reference to the node of this name.
    pub fn has_lookups(&self, parent: NodeIndex, name: &OsStr) -> bool {
        self.child(parent, name).is_some_and(|index| self.table[&index].lookups > 0)
    }

    /// The kernel gets one more reference.
    pub fn add_lookup(&mut self, index: NodeIndex) {
        if let Some(node) = self.table.get_mut(&index) {
            node.lookups += 1;
        }
    }

    /// The kernel drops references.
    pub fn drop_lookups(&mut self, index: NodeIndex, count: u64) {
        let Some(node) = self.table.get_mut(&index) else {
            return;
        };
        node.lookups = node.lookups.saturating_sub(count);
        self.drop_unused(index);
    }

    /// Drops a node, and then its parents, if they are not in use.
    pub(crate) fn drop_unused(&mut self, index: NodeIndex) {
        let mut pending = vec![index];
        while let Some(index) = pending.pop() {
            let Some(node) = self.table.get(&index) else { continue };
            let has_children = self.by_name.contains_key(&index);
            if index == ROOT || node.lookups > 0 || has_children || !node.handles.is_empty() {
                continue;
            }
            self.set_inode(index, None);
            let names = self.table.remove(&index).map(|node| node.names).unwrap_or_default();
            for (parent, name) in names {
                self.remove_child(parent, &name);
                pending.push(parent);
            }
        }
    }

    /// Removes a name from a node; without a name the node exists only while it is open.
    pub(super) fn orphan(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        attributes: Option<Attributes>,
    ) {
        let Some(index) = self.unname(parent, name) else {
            return;
        };
        let Ok(node) = self.get_mut(index) else {
            return;
        };
        if node.names.is_empty() {
            node.last_attributes = attributes.map(|last| Attributes {
                nlink: if node.kind == FileType::Directory {
                    0
                } else {
                    last.nlink.saturating_sub(1)
                },
                ..last
            });
            if !matches!(node.place, NodeLocation::Lower(_)) {
                node.place = NodeLocation::Orphan;
            }
            self.set_inode(index, None);
        }
        self.drop_unused(index);
    }

    /// The node for a lookup result: the one known by that name or that inode, or a new one.
    /// `is_base`: the view is that of the base, in which others rename, remove and create files, so an inode with one link
    /// has no other name any more.
    pub(super) fn intern(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        found: Found,
        is_base: bool,
    ) -> NodeIndex {
        let known = self.child(parent, name);
        if let Some(index) = known.filter(|index| self.is_same_object(*index, &found)) {
            return index;
        }
        let linked = found.inode.and_then(|inode| self.by_inode(inode));
        let index = match linked.filter(|index| self.is_other_name(*index, &found, is_base)) {
            Some(index) => index,
            None => {
                let index = self.add(found.kind, found.place, found.inode);
                if let Ok(node) = self.get_mut(index) {
                    node.identity = found.identity;
                }
                index
            }
        };
        if known.is_some_and(|known| known != index) {
            self.supersede_name(parent, name);
        }
        self.name(index, parent, name);
        index
    }

    /// Whether a node with the inode of an object that was found under another name is that object.
    fn is_other_name(&self, index: NodeIndex, found: &Found, is_base: bool) -> bool {
        let is_linked = !is_base || found.attributes.nlink > 1;
        self.get(index).is_ok_and(|node| {
            let is_known = node.names.is_empty() || is_linked;
            node.kind == found.kind && node.identity == found.identity && is_known
        })
    }

    /// Takes a name of a file that means another object now from its node.
    fn supersede_name(&mut self, parent: NodeIndex, name: &OsStr) {
        let node = self.child(parent, name).and_then(|index| self.get(index).ok());
        let Some(node) = node else { return };
        let place = match &node.place {
            NodeLocation::Lower(at) => NodeLocation::Lower(at.clone()),
            _ => NodeLocation::Orphan,
        };
        self.split_node(parent, name, place);
    }

    /// Removes all names from a node whose names now lead to another object.
    pub(crate) fn supersede_names(&mut self, index: NodeIndex) {
        let names = self.get(index).map(|node| node.names.clone()).unwrap_or_default();
        for (parent, name) in names {
            self.supersede_name(parent, &name);
        }
    }

    fn is_same_object(&self, index: NodeIndex, found: &Found) -> bool {
        let Ok(node) = self.get(index) else {
            return false;
        };
        let place_is_same = match (&node.place, &found.place) {
            (NodeLocation::Directory { .. }, NodeLocation::Directory { .. })
            | (NodeLocation::Upper, NodeLocation::Upper) => true,
            (NodeLocation::Lower(one), NodeLocation::Lower(other)) => {
                one.layer.id == other.layer.id
            }
            _ => false,
        };
        let inode_is_same = match found.inode {
            Some(inode) => self.by_inode(inode) == Some(index),
            None => true,
        };
        let state_is_same = node.identity == found.identity;
        node.kind == found.kind && place_is_same && inode_is_same && state_is_same
    }

    /// Whether a node shows an object of the base at a path that changed.
    pub(super) fn is_over(&self, index: NodeIndex, changed: &[Arc<ChangedPaths>]) -> bool {
        let is_changed = |at: &LayerPath| {
            at.layer.is_base() && changed.iter().any(|changed| changed.changes(&at.path))
        };
        match self.get(index).map(|node| &node.place) {
            Ok(NodeLocation::Directory { lowers, .. }) => lowers.iter().any(is_changed),
            Ok(NodeLocation::Lower(at)) => is_changed(at),
            _ => false,
        }
    }

    /// The node's path in the top layer.
    pub(crate) fn path(&self, index: NodeIndex) -> Result<PathBuf> {
        let mut parts: Vec<&OsStr> = Vec::new();
        let mut at = index;
        while at != ROOT {
            let (parent, name) = self.get(at)?.names.first().ok_or(Errno::NOENT)?;
            parts.push(name);
            at = *parent;
        }
        Ok(parts.iter().rev().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> NodeLocation {
        NodeLocation::Directory { upper: true, lowers: Arc::new([]) }
    }

    #[test]
    fn renaming_a_directory_moves_the_paths_below_it() {
        let mut nodes = Nodes::new(directory());
        let folder = nodes.add(FileType::Directory, directory(), None);
        nodes.name(folder, ROOT, OsStr::new("old"));
        let file = nodes.add(FileType::RegularFile, NodeLocation::Upper, None);
        nodes.name(file, folder, OsStr::new("file"));
        nodes.add_lookup(file);
        nodes.add_lookup(folder);
        nodes.unname(ROOT, OsStr::new("old"));
        nodes.name(folder, ROOT, OsStr::new("new"));
        assert_eq!(nodes.path(file), Ok(PathBuf::from("new/file")));
    }

    #[test]
    fn a_forgotten_node_goes_with_parents_that_only_it_kept() {
        let mut nodes = Nodes::new(directory());
        let folder = nodes.add(FileType::Directory, directory(), None);
        nodes.name(folder, ROOT, OsStr::new("d"));
        let file = nodes.add(FileType::RegularFile, NodeLocation::Upper, None);
        nodes.name(file, folder, OsStr::new("f"));
        nodes.add_lookup(folder);
        nodes.add_lookup(file);
        nodes.drop_lookups(folder, 1);
        assert!(nodes.get(folder).is_ok(), "a child still needs it");
        nodes.drop_lookups(file, 1);
        assert_eq!(nodes.all().count(), 1, "only the root is left");
        assert_eq!(nodes.child(ROOT, OsStr::new("d")), None);
    }
}
