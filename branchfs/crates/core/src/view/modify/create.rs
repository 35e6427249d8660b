//! New objects.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, RenameFlags, XattrFlags};
use rustix::io::Errno;

use super::{UpperEntry, upper_entry};
use crate::layer::{Layer, WorkEntry};
use crate::overlay::mark_device;
use crate::ownership;
use crate::rooted_dir::Result;
use crate::vfs::Attributes;
use crate::view::CopyData;
use crate::view::listing::is_store;
use crate::view::{NodeIndex, NodeLocation, View, quota_hooks};

/// Mode bits that a change of owner clears.
const SET_ID: u32 = 0o6000;

/// The owner of a new object.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// The type and content of a new object.
#[derive(Clone, Copy, Debug)]
pub enum New<'a> {
    /// A regular file.
    File {
        /// Permission bits.
        mode: u32,
    },
    /// A directory.
    Directory {
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Symlink {
        /// The path that it names.
        target: &'a OsStr,
    },
    /// A FIFO, socket or device.
    Special {
        /// File type and permission bits, as in `st_mode`.
        mode: u32,
        /// Its device number, as `(major, minor)`.
        device: (u32, u32),
    },
}

impl New<'_> {
    fn mode(&self) -> u32 {
        match self {
            Self::File { mode } | Self::Directory { mode } | Self::Special { mode, .. } => {
                *mode & 0o7777
            }
            Self::Symlink { .. } => 0o777,
        }
    }

    fn kind(&self) -> FileType {
        match self {
            Self::File { .. } => FileType::RegularFile,
            Self::Directory { .. } => FileType::Directory,
            Self::Symlink { .. } => FileType::Symlink,
            Self::Special { mode, .. } => FileType::from_raw_mode(*mode),
        }
    }

    /// Creates it at a free path of `tree`.
    fn make(&self, tree: &crate::rooted_dir::RootedDir, path: &Path) -> Result<Option<OwnedFd>> {
        match self {
            Self::File { mode } => return tree.create_file(path, *mode).map(Some),
            Self::Directory { mode } => tree.make_directory(path, *mode)?,
            Self::Symlink { target } => tree.make_symlink(path, target)?,
            Self::Special { mode, device } => {
                tree.make_node(path, *mode, rustix::fs::makedev(device.0, device.1))?;
            }
        }
        Ok(None)
    }
}

/// The location where a new object is finished.
#[derive(Clone, Copy)]
enum Target<'p> {
    WorkEntry(&'p Path),
    Final(&'p Path),
}

impl View {
    /// Creates a new object; returns its node, attributes and, for a regular file, a descriptor for reading and
    /// writing.
    pub fn create(
        &mut self,
        parent: NodeIndex,
        name: &OsStr,
        new: New<'_>,
        umask: u32,
        owner: Owner,
    ) -> Result<(NodeIndex, Attributes, Option<OwnedFd>)> {
        if is_store(parent, name) {
            return Err(Errno::PERM);
        }
        let (top, path) = (self.tree.top(), self.new_path(parent, name)?);
        self.tree.copy_up(parent, CopyData::Yes)?;
        let new = self.masked(parent, new, umask)?;
        let below = self.tree.find_below(parent, name)?;
        let above = upper_entry(&top, &path)?;
        match (above, &below) {
            (UpperEntry::Object(_), _) | (UpperEntry::Nothing, Some(_)) => {
                return Err(Errno::EXIST);
            }
            _ => {}
        }
        let charge = quota_hooks::charge_name(&top, new.kind())?;
        self.tree.record_absent(parent, name)?;
        let hides = above == UpperEntry::Whiteout;
        let file = if hides || (is_device_zero(&new) && !top.is_base()) {
            let room = WorkEntry::new(&top);
            self.make_room(parent, &top, &room)?;
            let scratch = room.join("new");
            let file = new.make(top.work()?, &scratch)?;
            self.finish(parent, &top, Target::WorkEntry(&scratch), &new, owner, hides)?;
            let flags = if hides { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
            top.rename_into_upper(&scratch, &path, flags)?;
            file
        } else {
            let file = new.make(&top.tree, &path)?;
            if let Err(error) = self.finish(parent, &top, Target::Final(&path), &new, owner, false)
            {
                top.tree.remove_all(&path)?;
                return Err(error);
            }
            file
        };
        let stat = top.tree.stat(&path)?;
        top.forget_origin(stat.stx_ino)?;
        quota_hooks::keep(charge);
        if let (Some(ledger), FileType::RegularFile) = (top.ledger(), new.kind()) {
            ledger.register(stat.stx_ino, ledger.new_file());
        }
        let (index, attributes) = self.tree.lookup(parent, name)?.ok_or(Errno::IO)?;
        Ok((index, attributes, file))
    }

    /// A regular file without a name.
    pub fn create_unnamed(
        &mut self,
        parent: NodeIndex,
        mode: u32,
        umask: u32,
        owner: Owner,
    ) -> Result<(NodeIndex, Attributes, OwnedFd)> {
        self.tree.copy_up(parent, CopyData::Yes)?;
        let (top, directory) = (self.tree.top(), self.tree.nodes.path(parent)?);
        let new = self.masked(parent, New::File { mode }, umask)?;
        let file = top.tree.create_unnamed(&directory, new.mode())?;
        let made = rustix::fs::fstat(&file)?;
        if (made.st_uid, made.st_gid) != (owner.uid, owner.gid) {
            let gid = if gives_group(&top, &directory)? { made.st_gid } else { owner.gid };
            ownership::set_opened(&file, (owner.uid, gid))?;
            rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(new.mode()))?;
        }
        let flags = rustix::fs::AtFlags::EMPTY_PATH;
        let stat = rustix::fs::statx(&file, "", flags, rustix::fs::StatxFlags::BASIC_STATS)?;
        let index = self.tree.nodes.add(FileType::RegularFile, NodeLocation::Orphan, None);
        let attributes = crate::view::attributes(&stat, &top);
        self.tree.nodes.get_mut(index)?.last_attributes = Some(attributes);
        Ok((index, attributes, file))
    }

    /// Applies the umask, unless the parent has a default ACL (acl(5)).
    fn masked<'a>(&mut self, parent: NodeIndex, new: New<'a>, umask: u32) -> Result<New<'a>> {
        let masked = |mode: u32| mode & !(umask & 0o777);
        if self.has_default_acl(parent)? {
            return Ok(new);
        }
        Ok(match new {
            New::File { mode } => New::File { mode: masked(mode) },
            New::Directory { mode } => New::Directory { mode: masked(mode) },
            New::Special { mode, device } => New::Special { mode: masked(mode), device },
            New::Symlink { .. } => new,
        })
    }

    fn has_default_acl(&mut self, parent: NodeIndex) -> Result<bool> {
        if let Some(known) = self.tree.nodes.get(parent)?.default_acl {
            return Ok(known);
        }
        let at = self.tree.locate(parent)?;
        let acl = at.layer.tree.find_xattr(&at.path, OsStr::new("system.posix_acl_default"))?;
        let known = acl.is_some();
        self.tree.nodes.get_mut(parent)?.default_acl = Some(known);
        Ok(known)
    }

    /// Creates a work directory in which new objects inherit the ACL of `parent`.
    fn make_room(&mut self, parent: NodeIndex, top: &Layer, room: &Path) -> Result<()> {
        const DEFAULT_ACL: &str = "system.posix_acl_default";
        top.work()?.make_directory(room, 0o700)?;
        if !self.has_default_acl(parent)? {
            return Ok(());
        }
        let at = self.tree.locate(parent)?;
        let acl = at.layer.tree.get_xattr(&at.path, OsStr::new(DEFAULT_ACL))?;
        top.work()?.set_xattr(room, OsStr::new(DEFAULT_ACL), &acl, XattrFlags::empty())
    }

    /// Sets the owner of a new object, and the xattrs that it needs to replace an object below.
    fn finish(
        &self,
        parent: NodeIndex,
        top: &Layer,
        target: Target<'_>,
        new: &New<'_>,
        owner: Owner,
        hides: bool,
    ) -> Result<()> {
        let directory = self.tree.nodes.path(parent)?;
        let (tree, path) = match target {
            Target::WorkEntry(path) => (top.work()?, path),
            Target::Final(path) => (&top.tree, path),
        };
        let stat = tree.stat(path)?;
        let gives_group = gives_group(top, &directory)?;
        let gid = match target {
            Target::Final(_) if gives_group => stat.stx_gid,
            Target::WorkEntry(_) if gives_group => top.tree.stat(&directory)?.stx_gid,
            _ => owner.gid,
        };
        let mut mode = u32::from(stat.stx_mode) & 0o7777;
        if gives_group && new.kind() == FileType::Directory {
            mode |= 0o2000;
        }
        if (stat.stx_uid, stat.stx_gid) != (owner.uid, gid) {
            tree.set_owner(path, Some(owner.uid), Some(gid))?;
        }
        let owner_cleared = mode & SET_ID != 0 && (stat.stx_uid, stat.stx_gid) != (owner.uid, gid);
        if new.kind() != FileType::Symlink
            && (owner_cleared || mode != u32::from(stat.stx_mode) & 0o7777)
        {
            tree.set_mode(path, mode)?;
        }
        if hides && new.kind() == FileType::Directory {
            top.set_opaque_in(tree, path)?;
        }
        if is_device_zero(new) && !top.is_base() {
            mark_device(tree, path)?;
        }
        Ok(())
    }
}

/// Whether new entries of a directory get its group (set-group-id).
fn gives_group(top: &Layer, directory: &Path) -> Result<bool> {
    Ok(u32::from(top.tree.stat(directory)?.stx_mode) & 0o2000 != 0)
}

/// A device 0:0 is a whiteout in the overlay format: one that a user creates is marked from the start.
fn is_device_zero(new: &New<'_>) -> bool {
    matches!(new, New::Special { mode, device: (0, 0) } if FileType::from_raw_mode(*mode) == FileType::CharacterDevice)
}
