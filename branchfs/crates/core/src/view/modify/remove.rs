//! Names that go.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::UpperEntry;
use crate::layer::{Layer, WorkEntry};
use crate::rooted_dir::Result;
use crate::vfs::Attributes;
use crate::view::CopyData;
use crate::view::{Found, NodeIndex, NodeLocation, View, quota_hooks};

impl View {
    /// Removes a name of an object other than a directory.
    pub fn unlink(&mut self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        let (index, attributes) = self.lookup(parent, name)?.ok_or(Errno::NOENT)?;
        if self.nodes.get(index)?.kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        self.remove_name(parent, name, Some(attributes))
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        let (index, attributes) = self.lookup(parent, name)?.ok_or(Errno::NOENT)?;
        if self.nodes.get(index)?.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        if !self.is_empty(index)? {
            return Err(Errno::NOTEMPTY);
        }
        self.remove_name(parent, name, Some(attributes))
    }

    pub(super) fn remove_name(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        attributes: Option<Attributes>,
    ) -> Result<()> {
        self.copy_up(parent, CopyData::Yes)?;
        let (top, path) = (self.top(), self.nodes.path(parent)?.join(name));
        let below = self.find_below(parent, name)?;
        self.note_present(parent, name)?;
        let leaving = quota_hooks::pending_removal(&top, &path)?;
        let above = self.above(&top, &path)?;
        self.counting_less(&top, &path, below.as_ref(), || match above {
            UpperEntry::Object(_) | UpperEntry::Nothing if below.is_some() => {
                top.put_whiteout(&path)
            }
            UpperEntry::Object(FileType::Directory) => self.remove_directory(&top, &path),
            UpperEntry::Object(_) => top.tree.remove_file(&path),
            UpperEntry::Nothing | UpperEntry::Whiteout => Err(Errno::NOENT),
        })?;
        quota_hooks::left(&top, leaving.as_ref());
        self.orphan(parent, name, attributes);
        Ok(())
    }

    /// Runs `change`, which removes the name `path` from its object, and decreases the shown link count. The count is
    /// logged first, and again if the change fails.
    pub(super) fn counting_less(
        &self,
        top: &Layer,
        path: &Path,
        below: Option<&Found>,
        change: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let count: Box<dyn Fn(i32) -> Result<()> + '_> = match top.tree.stat(path) {
            Ok(stat) => Box::new(move |less| top.hard_links().change_count(stat.stx_ino, -less)),
            Err(Errno::NOENT) => match below.and_then(|below| below.inode) {
                Some(origin) => Box::new(move |less| top.hard_links().hide(origin, less)),
                None => return change(),
            },
            Err(error) => return Err(error),
        };
        count(1)?;
        change().inspect_err(|_| {
            let _ = count(-1); // the first error is the one to report
        })
    }

    /// Removes the upper directory, which shows no entries but may contain whiteouts.
    pub(super) fn remove_directory(&self, top: &Layer, path: &Path) -> Result<()> {
        match top.tree.remove_directory(path) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if !top.is_base() => {
                let scratch = WorkEntry::new(top); // removes what comes there
                top.rename_out_of_upper(path, &scratch)
            }
            other => other,
        }
    }

    /// Removes a name from a node; without a name the node exists only while it is open.
    pub(super) fn orphan(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        attributes: Option<Attributes>,
    ) {
        let Some(index) = self.nodes.unname(parent, name) else {
            return;
        };
        let Ok(node) = self.nodes.get_mut(index) else {
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
            self.nodes.set_inode(index, None);
        }
        self.nodes.drop_unused(index);
    }
}
