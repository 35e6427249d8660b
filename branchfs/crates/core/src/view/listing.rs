//! Directory listings: the names of all layers, merged once when a directory is read from its start.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::hash::BuildHasher;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::nodes::Listed;
use super::{MergedTree, NodeIndex, View, is_hidden};
use crate::rooted_dir::{DirectoryEntry, Result};
use crate::write_set::Read;

/// Offsets up to this are those of `.` and `..`.
const DOTS_OFFSET_MAX: u64 = 2;

impl MergedTree {
    /// Every name of a directory, without `.` and `..`.
    pub(crate) fn list(&self, node: NodeIndex) -> Result<Vec<DirectoryEntry>> {
        let sources = match self.sources(node) {
            Err(Errno::NOENT) => return Ok(Vec::new()), // removed while open: empty
            other => other?,
        };
        let mut entries: Vec<DirectoryEntry> = Vec::new();
        // Names and whiteouts of the layers so far. Only needed where layers merge.
        let mut seen: HashSet<std::ffi::OsString> = HashSet::new();
        let merges = sources.len() > 1;
        for source in sources.iter() {
            let listed = match source.layer.tree.list(&source.path) {
                // Others removed it from the base, or put something else there, since it was looked up.
                Err(Errno::NOENT | Errno::NOTDIR) if source.layer.is_base() => continue,
                other => other?,
            };
            for mut entry in listed {
                if source.layer.is_base()
                    && source.path.as_os_str().is_empty()
                    && is_hidden(entry.name.as_ref())
                {
                    continue;
                }
                if merges && !seen.insert(entry.name.clone()) {
                    continue;
                }
                if is_whiteout(source, &entry)? {
                    continue;
                }
                entry.ino = match entry.kind {
                    // Which directories below it merges with, if any, takes a lookup to know.
                    FileType::Directory if !source.layer.is_base() => {
                        let found = self.layers.find_in(&sources, &entry.name)?;
                        found.map_or(entry.ino, |found| found.attributes.ino)
                    }
                    _ => source.layer.st_ino(entry.ino),
                };
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    /// Whether a directory has no entries.
    pub(crate) fn is_empty(&self, node: NodeIndex) -> Result<bool> {
        Ok(self.list(node)?.is_empty())
    }
}

impl View {
    /// The listing of a directory, by offset. A read from the start creates a new one.
    ///
    /// Directories have no open handle, so several processes may read one at the same time. An offset is a hash of the
    /// name: it means the same in every listing, whatever was added and removed in between. Two names with the same
    /// hash, one of which a reader could miss, have a probability of 2^-63, and the key of the hash is secret.
    pub fn listing(&mut self, node: NodeIndex, offset: u64) -> Result<Arc<[Listed]>> {
        let known = &self.tree.nodes.get(node)?.listing;
        if let Some(listing) = known.as_ref().filter(|_| offset > 0) {
            return Ok(Arc::clone(listing));
        }
        if let super::NodeLocation::Directory { lowers, .. } = &self.tree.nodes.get(node)?.place {
            if let Some(below) = lowers.first() {
                self.tree.layers.record_read(&below.path, Read::Names)?;
            }
        }
        let with_offset = |entry: DirectoryEntry| {
            let hash = self.offsets.hash_one(&entry.name) >> 1; // an offset is a signed number
            Listed { offset: hash.max(DOTS_OFFSET_MAX + 1), entry }
        };
        let mut listing: Vec<Listed> = self.tree.list(node)?.into_iter().map(with_offset).collect();
        listing.sort_unstable_by_key(|listed| listed.offset);
        let listing: Arc<[Listed]> = listing.into();
        self.tree.nodes.get_mut(node)?.listing = Some(Arc::clone(&listing));
        Ok(listing)
    }

    /// A reader has reached the end: other readers get a new listing.
    pub fn end_listing(&mut self, node: NodeIndex) {
        if let Ok(node) = self.tree.nodes.get_mut(node) {
            node.listing = None;
        }
    }

    /// The inode number to list for `..`: the parent's if it is known.
    pub fn parent_ino(&self, node: NodeIndex) -> u64 {
        let parent = self
            .tree
            .nodes
            .get(node)
            .ok()
            .and_then(|node| node.names.first().map(|(parent, _)| *parent));
        self.tree.getattr(parent.unwrap_or(node)).map_or(0, |attributes| attributes.ino)
    }
}

fn is_whiteout(source: &super::LayerPath, entry: &DirectoryEntry) -> Result<bool> {
    if source.layer.is_base() || entry.kind != FileType::CharacterDevice {
        return Ok(false);
    }
    let path = source.path.join(&entry.name);
    match source.layer.tree.stat(&path) {
        Ok(stat) => source.layer.is_whiteout(&path, &stat),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a listing of this directory must not contain the name.
pub(super) fn is_store(node: NodeIndex, name: &OsStr) -> bool {
    node == super::ROOT && is_hidden(name.as_ref())
}
