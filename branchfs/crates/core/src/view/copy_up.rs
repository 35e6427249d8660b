//! Copy-up: bringing an object of a lower layer into the top layer before it is changed.
//!
//! A copy is built in the layer's scratch directory and renamed into place, so a crash leaves either nothing or the whole
//! object. The precondition of that path in the base is recorded first (the write set, S8 of docs/semantics.md), the shown
//! inode number afterwards. The parent's times are restored: copying up is not a change by the user.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, RenameFlags, Statx};
use rustix::io::Errno;

use super::quota_hooks::{self, Copying};
use super::{CopyData, LayerPath, MergedTree, NodeIndex, NodeLocation, ROOT};
use crate::ids::LayerId;
use crate::layer::{Layer, WorkEntry};
use crate::object_copy::{copy_content, copy_file, copy_metadata, create_like, times};
use crate::overlay;
use crate::ownership;
use crate::rooted_dir::{Result, RootedDir};
use crate::write_set::{Fingerprint, Precondition};

impl MergedTree {
    /// Copies the node up, if it is not in the top layer. Directories are copied without their entries.
    pub fn copy_up(&mut self, index: NodeIndex, content: CopyData) -> Result<()> {
        match &self.nodes.get(index)?.place {
            NodeLocation::Upper | NodeLocation::Directory { upper: true, .. } => Ok(()),
            NodeLocation::Directory { upper: false, .. } => self.copy_up_directories(index),
            NodeLocation::Lower(_) if self.nodes.get(index)?.names.is_empty() => {
                self.copy_up_orphan(index)
            }
            NodeLocation::Lower(_) => self.copy_up_object(index, content),
            NodeLocation::Orphan => Ok(()), // changed through its descriptor
        }
    }

    /// Creates the top layer on disk, if it does not exist.
    pub fn make_layer(&mut self) -> Result<()> {
        let NodeLocation::Directory { upper: false, lowers } = &self.nodes.get(ROOT)?.place else {
            return Ok(());
        };
        let below = lowers.first().ok_or(Errno::NOENT)?;
        self.layers[0].create(&below.layer.tree)?;
        if let NodeLocation::Directory { upper, .. } = &mut self.nodes.get_mut(ROOT)?.place {
            *upper = true;
        }
        Ok(())
    }

    /// A directory that exists only in lower layers, and its ancestors like that.
    fn copy_up_directories(&mut self, index: NodeIndex) -> Result<()> {
        let mut missing = vec![index];
        while let Some(index) = missing.last().copied().filter(|index| *index != ROOT) {
            let (parent, _) = self.nodes.get(index)?.names.first().ok_or(Errno::NOENT)?;
            match &self.nodes.get(*parent)?.place {
                NodeLocation::Directory { upper: false, .. } => missing.push(*parent),
                _ => break,
            }
        }
        missing.into_iter().rev().try_for_each(|index| match index {
            ROOT => self.make_layer(),
            index => self.copy_up_directory(index),
        })
    }

    fn copy_up_directory(&mut self, index: NodeIndex) -> Result<()> {
        let source = self.locate(index)?;
        let stat = source.layer.tree.stat(&source.path)?;
        self.layers.record(
            &source.layer,
            &source.path,
            Precondition::Present(Fingerprint::of(&stat)),
        )?;
        let (top, path) = (self.top(), self.nodes.path(index)?);
        let charge = quota_hooks::charge_name(&top, FileType::Directory)?;
        let scratch = WorkEntry::new(&top);
        top.work()?.make_directory(&scratch, 0o700)?;
        copy_metadata((&source.layer.tree, &source.path, &stat), (top.work()?, &scratch))?;
        keep_parent_times(&top, &path, || {
            top.rename_into_upper(&scratch, &path, RenameFlags::NOREPLACE)
        })?;
        scratch.placed();
        quota_hooks::keep(charge);
        if let NodeLocation::Directory { upper, .. } = &mut self.nodes.get_mut(index)?.place {
            *upper = true;
        }
        Ok(())
    }

    fn copy_up_object(&mut self, index: NodeIndex, content: CopyData) -> Result<()> {
        let names = self.nodes.get(index)?.names.clone();
        for (parent, _) in &names {
            self.copy_up(*parent, CopyData::Yes)?;
        }
        let source = self.locate(index)?;
        let mut stat = source.layer.tree.stat(&source.path)?;
        if !self.is_as_looked_up(index, &stat)? {
            // The kernel may have cached pages of the old object, which must not become those of the copy.
            self.nodes.supersede_names(index);
            return Err(Errno::STALE);
        }
        self.layers.record(
            &source.layer,
            &source.path,
            Precondition::Present(Fingerprint::of(&stat)),
        )?;
        let (top, path) = (self.top(), self.nodes.path(index)?);
        let partial = self.layers.partial_at(&source, Some(stat.stx_ino))?;
        if let Some(partial) = &partial {
            stat.stx_blocks = partial.blocks()?;
        }
        let copying = Copying::charge(&top, &stat, content)?;
        let scratch = WorkEntry::new(&top);
        let original = (&source.layer.tree, &*source.path, &stat);
        copy_object(original, (top.work()?, &scratch), |copy| match &partial {
            _ if self.is_copied_in_part(&stat, content) => {
                self.layers.begin_copy(&source, &stat, copy)
            }
            Some(partial) if content == CopyData::Yes => partial.copy_to(copy),
            _ if content == CopyData::No => Ok(()),
            _ => copy_file(original, copy),
        })?;
        let made = top.work()?.stat(&scratch)?;
        keep_parent_times(&top, &path, || {
            top.rename_into_upper(&scratch, &path, RenameFlags::NOREPLACE)
        })?;
        scratch.placed();
        copying.made(&top, &top.tree, &path, made.stx_ino)?;
        top.set_origin(made.stx_ino, source.layer.st_ino(stat.stx_ino))?;
        if stat.stx_nlink > 1 {
            let links = self.layers.object_attributes(&stat, &source.layer).nlink;
            top.hard_links().keep_copy(
                (source.layer.origin, stat.stx_ino),
                &path,
                made.stx_ino,
                links,
            )?;
        }
        let node = self.nodes.get_mut(index)?;
        (node.place, node.identity) = (NodeLocation::Upper, None);
        self.nodes.set_inode(index, Some((top.id, made.stx_ino)));
        self.link_other_names(index, &top, &path, &names[1..])?;
        self.reopen_handles(index, &top, &path)
    }

    /// Keeps hard links that are known under several names one object.
    fn link_other_names(
        &mut self,
        index: NodeIndex,
        top: &Arc<Layer>,
        path: &Path,
        names: &[(NodeIndex, std::ffi::OsString)],
    ) -> Result<()> {
        for (parent, name) in names {
            if let Some(below) = self.find_below(*parent, name)? {
                if let NodeLocation::Lower(at) = &below.place {
                    let stat = at.layer.tree.stat(&at.path)?;
                    self.layers.record(
                        &at.layer,
                        &at.path,
                        Precondition::Present(Fingerprint::of(&stat)),
                    )?;
                }
            }
            let other = self.nodes.path(*parent)?.join(name);
            let charge = quota_hooks::charge_name(top, FileType::RegularFile)?;
            keep_parent_times(top, &other, || top.tree.link(path, &other))?;
            quota_hooks::keep(charge);
        }
        debug_assert!(self.nodes.get(index).is_ok());
        Ok(())
    }

    /// A name that a lower layer has is one of several of an object that was copied up under another name: it becomes a
    /// link to the copy. Returns whether it did.
    pub(crate) fn link_copied_up(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        at: &LayerPath,
        origin: (LayerId, u64),
    ) -> Result<bool> {
        let mut above = self.layers.iter().take_while(|layer| layer.id != at.layer.id);
        let Some(holder) = above.find(|layer| layer.hard_links().has_copy(origin)).cloned() else {
            return Ok(false);
        };
        self.copy_up(parent, CopyData::Yes)?;
        let stat = at.layer.tree.stat(&at.path)?;
        self.layers.record(&at.layer, &at.path, Precondition::Present(Fingerprint::of(&stat)))?;
        let (top, path) = (self.top(), self.nodes.path(parent)?.join(name));
        if holder.id == top.id {
            keep_parent_times(&top, &path, || top.hard_links().link_copy(origin, &path))?;
            quota_hooks::count_name(&top, FileType::RegularFile);
            return Ok(true);
        }
        // The copy is a frozen parent's: this branch gets one of its own.
        let (links, kept) = holder.hard_links().copy_path(origin)?;
        let (scratch, stat) = (WorkEntry::new(&top), links.stat(&kept)?);
        let copying = Copying::charge(&top, &stat, CopyData::Yes)?;
        let original = (links, &*kept, &stat);
        copy_object(original, (top.work()?, &scratch), |copy| copy_file(original, copy))?;
        let made = top.work()?.stat(&scratch)?;
        keep_parent_times(&top, &path, || {
            top.rename_into_upper(&scratch, &path, RenameFlags::NOREPLACE)
        })?;
        scratch.placed();
        copying.made(&top, &top.tree, &path, made.stx_ino)?;
        Ok(true)
    }

    /// Creates every name of each copied-up object in the layer, before a commit. Walks the whole tree, but only if the
    /// branch changed an object with names that it never looked up.
    pub(crate) fn link_all_copied_up(&mut self) -> Result<()> {
        let mut lacks = false;
        for layer in self.layers.iter() {
            lacks |= layer.hard_links().lacks_names()?;
        }
        let mut pending = if lacks { vec![ROOT] } else { Vec::new() };
        while let Some(directory) = pending.pop() {
            for entry in self.list(directory)? {
                if let Some((index, _)) = self.lookup(directory, &entry.name)? {
                    if self.nodes.get(index)?.kind == FileType::Directory {
                        pending.push(index);
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes open handles of the lower file read the copy, so that they see later writes.
    fn reopen_handles(&mut self, index: NodeIndex, top: &Arc<Layer>, path: &Path) -> Result<()> {
        let handles = self.nodes.get(index)?.handles.clone();
        if handles.is_empty() {
            return Ok(());
        }
        // A file that was open for writing is in a lower layer once a child has been committed into the branch.
        let is_written = self.handles.written().any(|written| written == index);
        let access = if is_written { OFlags::RDWR } else { OFlags::RDONLY };
        let file = Arc::new(top.tree.open(path, access)?);
        let (file_use, partial) = (self.file_use(index)?, self.partial_of(index)?);
        for handle in handles {
            let (file, account) = (Arc::clone(&file), file_use.clone());
            self.handles.replace_file(handle, file, partial.clone(), account);
        }
        Ok(())
    }

    /// Copies up an open file that has no name any more and is still in a lower layer: the copy has no name either.
    fn copy_up_orphan(&mut self, index: NodeIndex) -> Result<()> {
        let Some(file) = self.open_file_of(index) else {
            return Err(Errno::NOENT);
        };
        self.make_layer()?;
        let top = self.top();
        let stat = rustix::fs::fstat(&file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let file_use = top.ledger().map(|ledger| ledger.new_copy(size)).transpose()?;
        let copy = top.work()?.create_unnamed(Path::new(""), stat.st_mode)?;
        match self.partial_of(index)? {
            Some(partial) => partial.copy_to(&copy)?,
            None => copy_content(file.as_fd(), copy.as_fd(), size)?,
        }
        if let Some(file_use) = &file_use {
            file_use.reopened(copy.as_fd());
        }
        ownership::set_opened(&copy, ownership::of_stat(&stat))?;
        rustix::fs::fchmod(&copy, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
        let copy = Arc::new(copy);
        for handle in self.nodes.get(index)?.handles.clone() {
            self.handles.replace_file(handle, Arc::clone(&copy), None, file_use.clone());
        }
        self.nodes.get_mut(index)?.place = NodeLocation::Orphan;
        Ok(())
    }
}

/// Copies an object other than a directory, with all its metadata, to a free path; `fill` writes the content of a
/// regular file.
fn copy_object(
    from: (&RootedDir, &Path, &Statx),
    (to, scratch): (&RootedDir, &Path),
    fill: impl FnOnce(&OwnedFd) -> Result<()>,
) -> Result<()> {
    create_like(from, (to, scratch), fill)?;
    copy_metadata(from, (to, scratch))?;
    if overlay::may_be_whiteout(from.2) {
        overlay::mark_device(to, scratch)?; // otherwise the copy would be a whiteout
    }
    Ok(())
}

/// Runs `change`, which adds a name at `path`, and restores the times of its parent.
fn keep_parent_times(top: &Layer, path: &Path, change: impl FnOnce() -> Result<()>) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new(""));
    let before = top.tree.stat(parent)?;
    change()?;
    top.tree.set_times(parent, &times(&before))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_in_the_place_of_a_file_blocks_no_request() {
        let directory = tempfile::tempdir().unwrap();
        let tree = RootedDir::open_root(directory.path()).unwrap();
        std::fs::write(directory.path().join("file"), "content").unwrap();
        let stat = tree.stat(Path::new("file")).unwrap();
        tree.remove_file(Path::new("file")).unwrap();
        tree.make_node(Path::new("file"), libc::S_IFIFO | 0o600, 0).unwrap();
        let (from, to) = (Path::new("file"), Path::new("copy"));
        let from = (&tree, from, &stat);
        let copied = copy_object(from, (&tree, to), |copy| copy_file(from, copy));
        assert_eq!(copied, Err(Errno::STALE));
    }
}
