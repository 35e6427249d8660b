//! Names that go.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::ids::LayerId;
use crate::layer::{Layer, WorkEntry};
use crate::rooted_dir::Result;
use crate::vfs::Attributes;
use crate::view::CopyData;
use crate::view::{Found, NodeIndex, NodeLocation, View, quota_hooks};

/// An object whose links may be counted.
#[derive(Clone, Copy)]
pub(super) enum Counted {
    /// This inode of the top layer.
    Above(u64),
    /// This object of a lower layer.
    Below((LayerId, u64)),
}

/// Runs `change`, which takes a name from an object, and decreases the link count that it shows. The count is logged
/// first, and again if the change fails.
pub(super) fn counting_less(
    top: &Layer,
    counted: Option<Counted>,
    change: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let count = |less: i32| match counted {
        Some(Counted::Above(ino)) => top.hard_links().change_count(ino, -less),
        Some(Counted::Below(origin)) => top.hard_links().hide(origin, less),
        None => Ok(()),
    };
    count(1)?;
    change().inspect_err(|_| {
        let _ = count(-1); // the first error is the one to report
    })
}

impl View {
    /// Removes a name of an object other than a directory.
    pub fn unlink(&mut self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        let (index, attributes) = self.tree.lookup(parent, name)?.ok_or(Errno::NOENT)?;
        if self.tree.nodes.get(index)?.kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        self.remove_name(parent, name, index, attributes)
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        let (index, attributes) = self.tree.lookup(parent, name)?.ok_or(Errno::NOENT)?;
        if self.tree.nodes.get(index)?.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        if !self.tree.is_empty(index)? {
            return Err(Errno::NOTEMPTY);
        }
        self.remove_name(parent, name, index, attributes)
    }

    /// Removes a name that was just looked up: its node says what it has in the top layer and below.
    fn remove_name(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        index: NodeIndex,
        attributes: Attributes,
    ) -> Result<()> {
        self.tree.copy_up(parent, CopyData::Yes)?;
        let (top, path) = (self.tree.top(), self.tree.nodes.path(parent)?.join(name));
        let node = self.tree.nodes.get(index)?;
        let is_above =
            matches!(node.place, NodeLocation::Upper | NodeLocation::Directory { upper: true, .. });
        let is_below = !is_above || self.tree.find_below(parent, name)?.is_some();
        let counted = match &node.place {
            NodeLocation::Upper => self.tree.nodes.inode(index).map(|(_, ino)| Counted::Above(ino)),
            NodeLocation::Lower(_) => self.tree.nodes.inode(index).map(Counted::Below),
            NodeLocation::Directory { .. } | NodeLocation::Orphan => None,
        };
        let is_directory = node.kind == FileType::Directory;
        self.tree.record_removed(parent, name, index)?;
        let leaving = quota_hooks::pending_removal(&top, &path)?;
        counting_less(&top, counted, || match (is_below, is_directory) {
            (true, _) => top.put_whiteout(&path),
            (false, true) => remove_directory(&top, &path),
            (false, false) => top.tree.remove_file(&path),
        })?;
        quota_hooks::left(&top, leaving.as_ref());
        self.tree.nodes.orphan(parent, name, Some(attributes));
        Ok(())
    }
}

/// Whose link count changes when `path` of the top layer stops naming its object, or the one below it.
pub(super) fn counted(top: &Layer, path: &Path, below: Option<&Found>) -> Result<Option<Counted>> {
    match top.tree.stat(path) {
        Ok(stat) => Ok(Some(Counted::Above(stat.stx_ino))),
        Err(Errno::NOENT) => Ok(below.and_then(|below| below.inode).map(Counted::Below)),
        Err(error) => Err(error),
    }
}

/// Removes the upper directory, which shows no entries but may contain whiteouts.
pub(super) fn remove_directory(top: &Layer, path: &Path) -> Result<()> {
    match top.tree.remove_directory(path) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if !top.is_base() => {
            let scratch = WorkEntry::new(top); // removes what comes there
            top.rename_out_of_upper(path, &scratch)
        }
        other => other,
    }
}
