//! Names that go.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::Above;
use crate::kernel::handler::Attributes;
use crate::layer::Layer;
use crate::tree::Result;
use crate::view::copy_up::Content;
use crate::view::{Found, Index, Place, View, accounts};

impl View {
    /// Removes a name that is no directory.
    pub(crate) fn unlink(&mut self, parent: Index, name: &OsStr) -> Result<()> {
        let (index, attributes) = self.lookup(parent, name)?.ok_or(Errno::NOENT)?;
        if self.nodes.get(index)?.kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        self.remove_name(parent, name, Some(attributes))
    }

    /// Removes an empty directory.
    pub(crate) fn rmdir(&mut self, parent: Index, name: &OsStr) -> Result<()> {
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
        parent: Index,
        name: &OsStr,
        attributes: Option<Attributes>,
    ) -> Result<()> {
        self.copy_up(parent, Content::Keep)?;
        let (top, path) = (self.top(), self.nodes.path(parent)?.join(name));
        let below = self.find_below(parent, name)?;
        self.note_present(parent, name)?;
        self.uncount(&top, &path, below.as_ref())?;
        let below = below.is_some();
        let leaving = accounts::leaving(&top, &path)?;
        match self.above(&top, &path)? {
            Above::Object(_) if below => top.put_whiteout(&path)?,
            Above::Object(FileType::Directory) => self.remove_directory(&top, &path)?,
            Above::Object(_) => top.tree.remove_file(&path)?,
            Above::Nothing if below => top.put_whiteout(&path)?,
            Above::Nothing | Above::Whiteout => return Err(Errno::NOENT),
        }
        accounts::left(&top, leaving.as_ref());
        self.orphan(parent, name, attributes);
        Ok(())
    }

    /// An object is about to lose its name at `path`: it shows one link less from now on.
    pub(super) fn uncount(&self, top: &Layer, path: &Path, below: Option<&Found>) -> Result<()> {
        match top.tree.stat(path) {
            Ok(stat) => top.count_links(stat.stx_ino, -1),
            Err(Errno::NOENT) => match below.and_then(|below| below.inode) {
                Some(origin) => top.hide_link(origin),
                None => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// A directory that shows no entries may still hold whiteouts.
    pub(super) fn remove_directory(&self, top: &Layer, path: &Path) -> Result<()> {
        match top.tree.remove_directory(path) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if !top.is_base() => {
                let scratch = top.scratch();
                top.unplace(path, &scratch)?;
                top.work()?.remove_all(&scratch)
            }
            other => other,
        }
    }

    /// A node loses a name; without any it lives on only while it is open.
    pub(super) fn orphan(&mut self, parent: Index, name: &OsStr, attributes: Option<Attributes>) {
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
            if !matches!(node.place, Place::Lower(_)) {
                node.place = Place::Orphan;
            }
            self.nodes.set_inode(index, None);
        }
        self.nodes.drop_unused(index);
    }
}
