//! Attributes and extended attributes of a node.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use super::CopyData;
use super::{MergedTree, NodeIndex, NodeLocation, ROOT, View, attributes};
use crate::overlay::is_private_xattr;
use crate::rooted_dir::{Result, RootedDir, descriptor_path, read_growing, stat_of, xattr_names};
use crate::vfs::{Attributes, SetAttr, SetTime};
use crate::write_set::Read;

/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

/// A kind of extended attribute that writing to a file removes.
const CAPABILITY: &str = "security.capability";

impl MergedTree {
    /// Returns the attributes of a node.
    pub fn getattr(&self, index: NodeIndex) -> Result<Attributes> {
        let node = self.nodes.get(index)?;
        match &node.place {
            NodeLocation::Directory { upper, lowers } => {
                let at = self.locate(index)?;
                let stat = at.layer.tree.stat(&at.path)?;
                let mut found = attributes(&stat, &at.layer);
                let is_merged = usize::from(*upper) + lowers.len() > 1;
                // A branch's root as well, before and after the first change.
                if is_merged || (index == ROOT && self.layers.len() > 1) {
                    found.nlink = 1;
                }
                if let Some(lowest) = lowers.last().filter(|_| is_merged) {
                    let stat = lowest.layer.tree.stat(&lowest.path)?;
                    found.ino = lowest.layer.st_ino(stat.stx_ino);
                }
                Ok(found)
            }
            NodeLocation::Upper | NodeLocation::Lower(_) if !node.names.is_empty() => {
                let at = self.locate(index)?;
                let mut stat = at.layer.tree.stat(&at.path)?;
                if matches!(node.place, NodeLocation::Lower(_))
                    && !self.is_as_looked_up(index, &stat)?
                {
                    // Others replaced or changed it in the base: open files still show the old object.
                    if let Some(file) = self.open_file_of(index) {
                        stat = stat_of(&file)?;
                    }
                }
                let mut found = self.layers.object_attributes(&stat, &at.layer);
                self.layers.count_blocks(&mut found, &at, &stat)?;
                Ok(found)
            }
            _ => self.orphan_attributes(index),
        }
    }

    fn orphan_attributes(&self, index: NodeIndex) -> Result<Attributes> {
        let last = self.nodes.get(index)?.last_attributes;
        let Some(file) = self.open_file_of(index) else {
            return last.ok_or(Errno::STALE);
        };
        let stat = stat_of(&file)?;
        let mut found = attributes(&stat, &self.layers[0]);
        found.ino = last.map_or(stat.stx_ino, |last| last.ino);
        if let Some(partial) = self.partial_of(index)? {
            found.blocks = partial.blocks()?;
        }
        if let NodeLocation::Lower(_) = self.nodes.get(index)?.place {
            found.nlink = found.nlink.saturating_sub(1); // hidden by a whiteout, not unlinked
        }
        Ok(found)
    }
}

impl View {
    /// Changes attributes. Order: size, owner, mode, times; a change of owner clears set-id bits as on any file system.
    pub fn setattr(&mut self, index: NodeIndex, changes: &SetAttr) -> Result<Attributes> {
        let content = if changes.size == Some(0) { CopyData::No } else { CopyData::Yes };
        self.tree.copy_up(index, content)?;
        if self.tree.nodes.get(index)?.names.is_empty() && index != ROOT {
            self.setattr_orphan(index, changes)?;
            return self.tree.getattr(index);
        }
        let at = self.tree.locate(index)?;
        let tree = &at.layer.tree;
        if let Some(size) = changes.size {
            match changes.handle.and_then(|handle| self.tree.handles.file(handle).ok()) {
                Some(file) => self.resize(index, &file, size)?,
                None => self.resize(index, &tree.open(&at.path, OFlags::WRONLY)?, size)?,
            }
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            tree.set_owner(&at.path, changes.uid, changes.gid)?;
        }
        if let Some(mode) = changes.mode {
            tree.set_mode(&at.path, mode)?;
        }
        if changes.kill_privileges || changes.size.is_some() {
            kill_privileges(tree, &at.path, changes.kill_privileges)?;
        }
        if let Some(times) = timestamps(changes) {
            tree.set_times(&at.path, &times)?;
        }
        self.tree.getattr(index)
    }

    fn setattr_orphan(&mut self, index: NodeIndex, changes: &SetAttr) -> Result<()> {
        let own = changes.handle.and_then(|handle| self.tree.handles.file(handle).ok());
        let Some(file) = own.or_else(|| self.tree.open_file_of(index)) else {
            return Err(Errno::NOENT);
        };
        let through = descriptor_path(file.as_fd());
        if let Some(size) = changes.size {
            self.resize(index, &file, size)?;
        }
        if changes.kill_privileges || changes.size.is_some() {
            kill_privileges_of(&*file, changes.kill_privileges)?;
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            let (uid, gid) = (
                changes.uid.map(rustix::fs::Uid::from_raw),
                changes.gid.map(rustix::fs::Gid::from_raw),
            );
            rustix::fs::chownat(rustix::fs::CWD, &through, uid, gid, AtFlags::empty())?;
        }
        if let Some(mode) = changes.mode {
            rustix::fs::chmod(&through, Mode::from_raw_mode(mode & 0o7777))?;
        }
        if let Some(times) = timestamps(changes) {
            rustix::fs::utimensat(rustix::fs::CWD, &through, &times, AtFlags::empty())?;
        }
        Ok(())
    }

    /// Returns the target of a symbolic link.
    pub fn readlink(&self, index: NodeIndex) -> Result<Vec<u8>> {
        let at = self.tree.locate(index)?;
        if let NodeLocation::Lower(at) = &self.tree.nodes.get(index)?.place {
            self.tree.layers.record_read(&at.path, Read::Content)?;
        }
        at.layer.tree.read_link(&at.path)
    }

    /// Returns an extended attribute; those of the overlay format are hidden.
    pub fn getxattr(&self, index: NodeIndex, name: &OsStr) -> Result<Vec<u8>> {
        if is_private_xattr(name) {
            return Err(Errno::NODATA);
        }
        match self.tree.locate(index) {
            Ok(at) => at.layer.tree.get_xattr(&at.path, name),
            Err(error) => {
                let file = self.tree.open_file_of(index).ok_or(error)?;
                read_growing(|buffer| rustix::fs::fgetxattr(&*file, name, buffer))
            }
        }
    }

    /// Returns the names of the extended attributes, each with a NUL after it.
    pub fn listxattr(&self, index: NodeIndex) -> Result<Vec<u8>> {
        let list = match self.tree.locate(index) {
            Ok(at) => at.layer.tree.list_xattrs(&at.path)?,
            Err(error) => {
                let file = self.tree.open_file_of(index).ok_or(error)?;
                read_growing(|buffer| rustix::fs::flistxattr(&*file, buffer))?
            }
        };
        let mut shown = Vec::with_capacity(list.len());
        for name in xattr_names(&list).filter(|name| !is_private_xattr(name)) {
            shown.extend_from_slice(name.as_encoded_bytes());
            shown.push(0);
        }
        Ok(shown)
    }

    /// Sets an extended attribute.
    pub fn setxattr(
        &mut self,
        index: NodeIndex,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        kill_sgid: bool,
    ) -> Result<()> {
        if is_private_xattr(name) {
            return Err(Errno::PERM);
        }
        self.tree.copy_up(index, CopyData::Yes)?;
        self.tree.nodes.get_mut(index)?.default_acl = None;
        let flags = XattrFlags::from_bits_retain(flags);
        match self.tree.locate(index) {
            Ok(at) => {
                at.layer.tree.set_xattr(&at.path, name, value, flags)?;
                if kill_sgid {
                    let mode = u32::from(at.layer.tree.stat(&at.path)?.stx_mode);
                    at.layer.tree.set_mode(&at.path, mode & !0o2000)?;
                }
                Ok(())
            }
            Err(error) => {
                let file = self.tree.open_file_of(index).ok_or(error)?;
                rustix::fs::fsetxattr(&*file, name, value, flags)
            }
        }
    }

    /// Removes an extended attribute.
    pub fn removexattr(&mut self, index: NodeIndex, name: &OsStr) -> Result<()> {
        if is_private_xattr(name) {
            return Err(Errno::NODATA);
        }
        self.tree.copy_up(index, CopyData::Yes)?;
        self.tree.nodes.get_mut(index)?.default_acl = None;
        match self.tree.locate(index) {
            Ok(at) => at.layer.tree.remove_xattr(&at.path, name),
            Err(error) => {
                let file = self.tree.open_file_of(index).ok_or(error)?;
                rustix::fs::fremovexattr(&*file, name)
            }
        }
    }
}

/// Removes capabilities after a change of content, and the set-id bits if `set_id` is set. The kernel leaves this to
/// the filesystem, and says whether the caller's write clears set-id bits.
fn kill_privileges(tree: &RootedDir, path: &std::path::Path, set_id: bool) -> Result<()> {
    let mode = u32::from(tree.stat(path)?.stx_mode);
    if let Some(mode) = without_set_id(mode).filter(|_| set_id) {
        tree.set_mode(path, mode)?;
    }
    match tree.remove_xattr(path, OsStr::new(CAPABILITY)) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
        Err(error) => Err(error),
    }
}

/// As [`kill_privileges`], for an open file. Returns whether its mode changed, which the kernel does not expect
/// of a write.
pub fn kill_privileges_of(file: impl AsFd, set_id: bool) -> Result<bool> {
    let file = file.as_fd();
    let mode = if set_id { without_set_id(rustix::fs::fstat(file)?.st_mode) } else { None };
    if let Some(mode) = mode {
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode & 0o7777))?;
    }
    if rustix::fs::fgetxattr(file, CAPABILITY, &mut [0_u8; 0]) == Err(Errno::NODATA) {
        return Ok(mode.is_some()); // as nearly always: cheaper to ask than to remove
    }
    match rustix::fs::fremovexattr(file, CAPABILITY) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(mode.is_some()),
        Err(error) => Err(error),
    }
}

/// The mode without the set-id bits that a write clears. Set-group-id without group execution (mandatory locking)
/// stays.
fn without_set_id(mode: u32) -> Option<u32> {
    const GROUP_EXECUTE: u32 = 0o010;
    if FileType::from_raw_mode(mode) != FileType::RegularFile || mode & SET_ID == 0 {
        return None;
    }
    let kept = if mode & GROUP_EXECUTE == 0 { mode & !0o4000 } else { mode & !SET_ID };
    (kept != mode).then_some(kept)
}

fn timestamps(changes: &SetAttr) -> Option<Timestamps> {
    const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    if changes.atime.is_none() && changes.mtime.is_none() {
        return None;
    }
    let convert = |time: Option<SetTime>| match time {
        None => OMIT,
        Some(SetTime::Now) => NOW,
        Some(SetTime::At(time)) => {
            Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanoseconds) }
        }
    };
    Some(Timestamps {
        last_access: convert(changes.atime),
        last_modification: convert(changes.mtime),
    })
}
