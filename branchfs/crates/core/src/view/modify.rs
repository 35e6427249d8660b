//! Changes to the names of a view: create, link, remove, rename.
//!
//! Two questions decide every change: what has the top layer under the name (nothing, a whiteout, an object), and what
//! do the layers below show there (it must be hidden by a whiteout once the top layer's object is gone). What must not be
//! seen half-made is built in scratch and renamed into place.

#[cfg(test)]
mod change_fault_tests;
mod create;
mod remove;
mod rename;

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, RenameFlags};
use rustix::io::Errno;

use super::CopyData;
use super::listing::is_store;
use super::quota_hooks;
use super::{NodeIndex, NodeLocation, View};
use crate::layer::{Layer, WorkEntry};
use crate::rooted_dir::{Result, check_length, stat_of};
use crate::vfs::Attributes;
pub use create::{New, Owner};

/// What the top layer has under a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UpperEntry {
    Nothing,
    Whiteout,
    Object(FileType),
}

impl View {
    /// Gives a node one more name.
    pub fn link(
        &mut self,
        index: NodeIndex,
        parent: NodeIndex,
        name: &OsStr,
    ) -> Result<Attributes> {
        if is_store(parent, name) {
            return Err(Errno::PERM);
        }
        let (top, path) = (self.tree.top(), self.new_path(parent, name)?);
        self.tree.copy_up(index, CopyData::Yes)?;
        self.tree.copy_up(parent, CopyData::Yes)?;
        let below = self.tree.find_below(parent, name)?;
        let above = upper_entry(&top, &path)?;
        if matches!(above, UpperEntry::Object(_))
            || (above == UpperEntry::Nothing && below.is_some())
        {
            return Err(Errno::EXIST);
        }
        let charge = quota_hooks::charge_name(&top, self.tree.nodes.get(index)?.kind)?;
        self.tree.record_absent(parent, name)?;
        // Without a name it can be reached through an open file alone.
        let file = match self.tree.nodes.get(index)?.names.is_empty() {
            true => Some(self.tree.open_file_of(index).ok_or(Errno::NOENT)?),
            false => None,
        };
        let place = || match (&file, above) {
            (Some(file), UpperEntry::Whiteout) => exchange_whiteout(&top, &path, |scratch| {
                top.work()?.link_file(file.as_fd(), scratch)
            }),
            (Some(file), _) => top.tree.link_file(file.as_fd(), &path),
            (None, UpperEntry::Whiteout) => exchange_whiteout(&top, &path, |scratch| {
                top.link_to_scratch(&self.tree.nodes.path(index)?, scratch)
            }),
            (None, _) => top.tree.link(&self.tree.nodes.path(index)?, &path),
        };
        let ino = match &file {
            Some(file) => stat_of(file)?.stx_ino,
            None => top.tree.stat(&self.tree.nodes.path(index)?)?.stx_ino,
        };
        top.hard_links().change_count(ino, 1)?;
        place().inspect_err(|_| {
            let _ = top.hard_links().change_count(ino, -1); // the first error is the one to report
        })?;
        if file.is_some() {
            if let (Some(ledger), Some(file_use)) = (top.ledger(), self.tree.file_use(index)?) {
                ledger.register(ino, file_use);
            }
            self.tree.nodes.get_mut(index)?.place = NodeLocation::Upper;
            self.tree.nodes.set_inode(index, Some((top.id, ino)));
        }
        quota_hooks::keep(charge);
        self.tree.nodes.name(index, parent, name);
        self.tree.getattr(index)
    }

    /// The path of a name that is about to be made.
    fn new_path(&self, parent: NodeIndex, name: &OsStr) -> Result<PathBuf> {
        let path = self.tree.nodes.path(parent)?.join(name);
        check_length(&path)?;
        Ok(path)
    }
}

fn upper_entry(top: &Layer, path: &Path) -> Result<UpperEntry> {
    match top.tree.stat(path) {
        Ok(stat) if top.is_whiteout(path, &stat)? => Ok(UpperEntry::Whiteout),
        Ok(stat) => Ok(UpperEntry::Object(FileType::from_raw_mode(u32::from(stat.stx_mode)))),
        Err(Errno::NOENT) => Ok(UpperEntry::Nothing),
        Err(error) => Err(error),
    }
}

/// Puts what `link` gives a name in scratch in the place of the whiteout at `path`, in one step.
fn exchange_whiteout(
    top: &Layer,
    path: &Path,
    link: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let scratch = WorkEntry::new(top); // has the whiteout in the end, and removes it
    link(&scratch)?;
    top.rename_into_upper(&scratch, path, RenameFlags::EXCHANGE)
}
