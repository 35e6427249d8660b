//! Changes to the names of a view: create, link, remove, rename.
//!
//! Two questions decide every change: what has the top layer under the name (nothing, a whiteout, an object), and what
//! do the layers below show there (it must be hidden by a whiteout once the top layer's object is gone). What must not be
//! seen half-made is built in scratch and renamed into place.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, RenameFlags, XattrFlags};
use rustix::io::Errno;

use super::accounts;
use super::copy_up::Content;
use super::{Found, Index, Place, View};
use crate::kernel::handler::Attributes;
use crate::layer::{Layer, identity};
use crate::overlay::DEVICE_XATTR;
use crate::seen::Expected;
use crate::tree::Result;

/// Mode bits that a change of owner clears.
const SET_ID: u32 = 0o6000;

/// Who a new object belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// What is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum New<'a> {
    File {
        mode: u32,
    },
    Directory {
        mode: u32,
    },
    Symlink {
        target: &'a OsStr,
    },
    /// `mode` has the type: fifo, socket or device.
    Special {
        mode: u32,
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

    /// Makes it at a free path of `tree`.
    fn make(&self, tree: &crate::tree::Tree, path: &Path) -> Result<Option<OwnedFd>> {
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

/// What the top layer has under a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Above {
    Nothing,
    Whiteout,
    Object(FileType),
}

impl View {
    /// Makes a new object; returns its node, attributes and, for a regular file, a descriptor that reads and writes.
    pub(crate) fn create(
        &mut self,
        parent: Index,
        name: &OsStr,
        new: New<'_>,
        umask: u32,
        owner: Owner,
    ) -> Result<(Index, Attributes, Option<OwnedFd>)> {
        if self.hides(parent, name) {
            return Err(Errno::PERM);
        }
        self.copy_up(parent, Content::Keep)?;
        let (top, path) = (self.top(), self.nodes.path(parent)?.join(name));
        let new = self.masked(parent, new, umask)?;
        let below = self.find_below(parent, name)?;
        let above = self.above(&top, &path)?;
        match (above, &below) {
            (Above::Object(_), _) | (Above::Nothing, Some(_)) => return Err(Errno::EXIST),
            _ => {}
        }
        let charge = accounts::charge_name(&top, new.kind())?;
        self.note_absent(parent, name)?;
        let hides = above == Above::Whiteout;
        let file = if hides || (is_device_zero(&new) && !top.is_base()) {
            let scratch = top.scratch();
            let file = new.make(top.work()?, &scratch)?;
            self.finish(parent, &top, Target::Scratch(&scratch), &new, owner, hides)?;
            top.place(
                &scratch,
                &path,
                if hides { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE },
            )?;
            if hides {
                top.work()?.remove_all(&scratch)?;
            }
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
        accounts::keep(charge);
        if let (Some(ledger), FileType::RegularFile) = (top.ledger(), new.kind()) {
            ledger.enter(stat.stx_ino, ledger.new_file());
        }
        let (index, attributes) = self.lookup(parent, name)?.ok_or(Errno::IO)?;
        Ok((index, attributes, file))
    }

    /// A regular file without a name.
    pub(crate) fn create_unnamed(
        &mut self,
        parent: Index,
        mode: u32,
        umask: u32,
        owner: Owner,
    ) -> Result<(Index, Attributes, OwnedFd)> {
        self.copy_up(parent, Content::Keep)?;
        let (top, directory) = (self.top(), self.nodes.path(parent)?);
        let new = self.masked(parent, New::File { mode }, umask)?;
        let file = top.tree.create_unnamed(&directory, new.mode())?;
        let made = rustix::fs::fstat(&file)?;
        if (made.st_uid, made.st_gid) != (owner.uid, owner.gid) {
            let gid = if self.gives_group(&top, &directory)? { made.st_gid } else { owner.gid };
            rustix::fs::fchown(
                &file,
                Some(rustix::fs::Uid::from_raw(owner.uid)),
                Some(rustix::fs::Gid::from_raw(gid)),
            )?;
            rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(new.mode()))?;
        }
        let flags = rustix::fs::AtFlags::EMPTY_PATH;
        let stat = rustix::fs::statx(&file, "", flags, rustix::fs::StatxFlags::BASIC_STATS)?;
        let index = self.nodes.add(FileType::RegularFile, Place::Orphan, None);
        let attributes = super::attributes(&stat, &top);
        self.nodes.get_mut(index)?.last_attributes = Some(attributes);
        Ok((index, attributes, file))
    }

    /// The umask counts only where the parent gives no default ACL (acl(5)).
    fn masked<'a>(&mut self, parent: Index, new: New<'a>, umask: u32) -> Result<New<'a>> {
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

    fn has_default_acl(&mut self, parent: Index) -> Result<bool> {
        if let Some(known) = self.nodes.get(parent)?.default_acl {
            return Ok(known);
        }
        let at = self.locate(parent)?;
        let known =
            at.layer.tree.get_xattr(&at.path, OsStr::new("system.posix_acl_default")).is_ok();
        self.nodes.get_mut(parent)?.default_acl = Some(known);
        Ok(known)
    }

    /// True where new entries of a directory get its group (set-group-id).
    fn gives_group(&self, top: &Layer, directory: &Path) -> Result<bool> {
        Ok(u32::from(top.tree.stat(directory)?.stx_mode) & 0o2000 != 0)
    }

    /// Gives a new object its owner, and the marks it needs to replace what is below.
    fn finish(
        &self,
        parent: Index,
        top: &Layer,
        target: Target<'_>,
        new: &New<'_>,
        owner: Owner,
        hides: bool,
    ) -> Result<()> {
        let directory = self.nodes.path(parent)?;
        let (tree, path) = match target {
            Target::Scratch(path) => (top.work()?, path),
            Target::Final(path) => (&top.tree, path),
        };
        let stat = tree.stat(path)?;
        let gives_group = self.gives_group(top, &directory)?;
        let gid = match target {
            Target::Final(_) if gives_group => stat.stx_gid,
            Target::Scratch(_) if gives_group => top.tree.stat(&directory)?.stx_gid,
            _ => owner.gid,
        };
        let mut mode = u32::from(stat.stx_mode) & 0o7777;
        if matches!(target, Target::Scratch(_)) {
            mode = new.mode();
            self.inherit_acl(top, &directory, path, new)?;
        }
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
            tree.set_xattr(path, OsStr::new(DEVICE_XATTR), b"0:0", XattrFlags::empty())?;
        }
        Ok(())
    }

    /// What is built in scratch does not inherit the default ACL of the directory it will stand in.
    fn inherit_acl(
        &self,
        top: &Layer,
        directory: &Path,
        scratch: &Path,
        new: &New<'_>,
    ) -> Result<()> {
        let default = match top.tree.get_xattr(directory, OsStr::new("system.posix_acl_default")) {
            Ok(value) if new.kind() != FileType::Symlink => value,
            _ => return Ok(()),
        };
        if new.kind() == FileType::Directory {
            top.work()?.set_xattr(
                scratch,
                OsStr::new("system.posix_acl_default"),
                &default,
                XattrFlags::empty(),
            )?;
        }
        top.work()?.set_xattr(
            scratch,
            OsStr::new("system.posix_acl_access"),
            &default,
            XattrFlags::empty(),
        )
    }

    /// Gives a node one more name.
    pub(crate) fn link(&mut self, index: Index, parent: Index, name: &OsStr) -> Result<Attributes> {
        if self.hides(parent, name) {
            return Err(Errno::PERM);
        }
        self.copy_up(index, Content::Keep)?;
        self.copy_up(parent, Content::Keep)?;
        let (top, path) = (self.top(), self.nodes.path(parent)?.join(name));
        let below = self.find_below(parent, name)?;
        let above = self.above(&top, &path)?;
        if matches!(above, Above::Object(_)) || (above == Above::Nothing && below.is_some()) {
            return Err(Errno::EXIST);
        }
        let charge = accounts::charge_name(&top, self.nodes.get(index)?.kind)?;
        self.note_absent(parent, name)?;
        let orphan = self.nodes.get(index)?.names.is_empty();
        let to = if above == Above::Whiteout { None } else { Some(&path) };
        if orphan {
            let file = self.open_file_of(index).ok_or(Errno::NOENT)?;
            if to.is_none() {
                top.tree.remove_file(&path)?;
            }
            top.tree.link_file(file.as_fd(), &path)?;
            let stat = top.tree.stat(&path)?;
            if let (Some(ledger), Some(file_use)) = (top.ledger(), self.file_use(index)?) {
                ledger.enter(stat.stx_ino, file_use);
            }
            self.nodes.get_mut(index)?.place = Place::Upper;
            self.nodes.set_inode(index, Some((top.id, stat.stx_ino)));
        } else {
            let from = self.nodes.path(index)?;
            match to {
                Some(path) => top.tree.link(&from, path)?,
                None => {
                    // A name for it in scratch takes the whiteout's place at once.
                    let scratch = top.scratch();
                    top.link_to_scratch(&from, &scratch)?;
                    top.place(&scratch, &path, RenameFlags::EXCHANGE)?;
                    top.work()?.remove_all(&scratch)?;
                }
            }
        }
        accounts::keep(charge);
        top.count_links(top.tree.stat(&path)?.stx_ino, 1)?;
        self.nodes.name(index, parent, name);
        self.getattr(index)
    }

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

    fn remove_name(
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
    fn uncount(&self, top: &Layer, path: &Path, below: Option<&Found>) -> Result<()> {
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
    fn remove_directory(&self, top: &Layer, path: &Path) -> Result<()> {
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
    fn orphan(&mut self, parent: Index, name: &OsStr, attributes: Option<Attributes>) {
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

    /// Renames as `renameat2` does.
    pub(crate) fn rename(
        &mut self,
        from: (Index, &OsStr),
        to: (Index, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        if self.hides(from.0, from.1) || self.hides(to.0, to.1) {
            return Err(Errno::PERM);
        }
        let (source, _) = self.lookup(from.0, from.1)?.ok_or(Errno::NOENT)?;
        let target = self.lookup(to.0, to.1)?;
        if flags.contains(RenameFlags::EXCHANGE) {
            let (target, _) = target.ok_or(Errno::NOENT)?;
            return self.exchange(from, source, to, target);
        }
        if let Some((target, _)) = target {
            if flags.contains(RenameFlags::NOREPLACE) {
                return Err(Errno::EXIST);
            }
            if target == source {
                return Ok(()); // two names of one object: rename(2) does nothing
            }
            self.may_replace(source, target)?;
        }
        self.copy_up(source, Content::Keep)?;
        self.copy_up(to.0, Content::Keep)?;
        self.copy_up(from.0, Content::Keep)?;
        let top = self.top();
        let (old, new) = (self.nodes.path(from.0)?.join(from.1), self.nodes.path(to.0)?.join(to.1));
        let below_old = self.find_below(from.0, from.1)?.is_some();
        let below_new = self.find_below(to.0, to.1)?;
        self.note_present(from.0, from.1)?;
        self.note_present(to.0, to.1)?;
        self.mark_moved(source, &top, &old, below_new.is_some())?;
        self.uncount(&top, &new, below_new.as_ref())?;
        let leaving = accounts::leaving(&top, &new)?;
        let whiteout = below_old || (flags.contains(RenameFlags::WHITEOUT) && !top.is_base());
        self.move_entry(&top, &old, &new, self.nodes.get(source)?.kind, whiteout)?;
        accounts::left(&top, leaving.as_ref());
        if flags.contains(RenameFlags::WHITEOUT) && top.is_base() {
            top.tree.make_node(&old, 0o020_000, 0)?;
        }
        if let Some((_, attributes)) = target {
            self.orphan(to.0, to.1, Some(attributes));
        }
        self.nodes.unname(from.0, from.1);
        self.nodes.name(source, to.0, to.1);
        Ok(())
    }

    fn may_replace(&self, source: Index, target: Index) -> Result<()> {
        let kinds = (self.nodes.get(source)?.kind, self.nodes.get(target)?.kind);
        match (kinds.0 == FileType::Directory, kinds.1 == FileType::Directory) {
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !self.is_empty(target)? => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    /// A directory that moves keeps what it merges with by a redirect, and does not merge with what it moves onto.
    fn mark_moved(
        &mut self,
        index: Index,
        top: &Layer,
        path: &Path,
        onto_something: bool,
    ) -> Result<()> {
        let origin = match &self.nodes.get(index)?.place {
            Place::Directory { lowers, .. } if lowers.is_empty() => None,
            Place::Directory { .. } => Some(path_below(top, path)?),
            _ => return Ok(()),
        };
        match origin {
            Some(origin) => top.set_redirect(path, &origin),
            None if onto_something => top.set_opaque(path),
            None => Ok(()),
        }
    }

    /// Moves an entry of the top layer, leaving a whiteout where `whiteout` asks for one.
    fn move_entry(
        &self,
        top: &Layer,
        old: &Path,
        new: &Path,
        kind: FileType,
        whiteout: bool,
    ) -> Result<()> {
        let is_directory = kind == FileType::Directory;
        if is_directory {
            top.tree.forget(old);
            top.tree.forget(new);
        }
        if is_directory && !top.is_base() && self.above(top, new)? != Above::Nothing {
            // A directory cannot be renamed over a whiteout or over a directory that holds whiteouts.
            top.tree.rename(old, new, RenameFlags::EXCHANGE)?;
            return if whiteout { top.put_whiteout(old) } else { top.tree.remove_all(old) };
        }
        if !whiteout {
            return top.tree.rename(old, new, RenameFlags::empty());
        }
        match top.tree.rename(old, new, RenameFlags::WHITEOUT) {
            Err(Errno::INVAL | Errno::PERM) => {
                top.tree.rename(old, new, RenameFlags::empty())?;
                top.put_whiteout(old)
            }
            other => other,
        }
    }

    fn exchange(
        &mut self,
        one: (Index, &OsStr),
        first: Index,
        other: (Index, &OsStr),
        second: Index,
    ) -> Result<()> {
        if first == second {
            return Ok(());
        }
        for index in [first, second, one.0, other.0] {
            self.copy_up(index, Content::Keep)?;
        }
        let top = self.top();
        let (old, new) =
            (self.nodes.path(one.0)?.join(one.1), self.nodes.path(other.0)?.join(other.1));
        self.note_present(one.0, one.1)?;
        self.note_present(other.0, other.1)?;
        if !top.is_base() {
            let below_new = self.find_below(other.0, other.1)?.is_some();
            let below_old = self.find_below(one.0, one.1)?.is_some();
            self.mark_moved(first, &top, &old, below_new)?;
            self.mark_moved(second, &top, &new, below_old)?;
        }
        top.tree.forget(&old);
        top.tree.forget(&new);
        top.tree.rename(&old, &new, RenameFlags::EXCHANGE)?;
        self.nodes.exchange(one, other);
        Ok(())
    }

    fn above(&self, top: &Layer, path: &Path) -> Result<Above> {
        match top.tree.stat(path) {
            Ok(stat) if top.is_whiteout(path, &stat) => Ok(Above::Whiteout),
            Ok(stat) => Ok(Above::Object(FileType::from_raw_mode(u32::from(stat.stx_mode)))),
            Err(Errno::NOENT) => Ok(Above::Nothing),
            Err(error) => Err(error),
        }
    }

    /// The path of a name in the base, where the directory is there too.
    fn base_path(&self, parent: Index, name: &OsStr) -> Option<PathBuf> {
        match &self.nodes.get(parent).ok()?.place {
            Place::Directory { lowers, .. } => {
                lowers.last().filter(|at| at.layer.is_base()).map(|at| at.path.join(name))
            }
            _ => None,
        }
    }

    /// Whether a veil stands between the branch and what the base has under a name.
    fn is_veiled(&self, parent: Index, name: &OsStr) -> Result<bool> {
        let Place::Directory { lowers, .. } = &self.nodes.get(parent)?.place else {
            return Ok(false);
        };
        for at in lowers.iter().filter(|at| at.layer.is_veil()) {
            match at.layer.tree.stat(&at.path.join(name)) {
                Ok(_) => return Ok(true),
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// The branch depends on a name of the base being free.
    fn note_absent(&self, parent: Index, name: &OsStr) -> Result<()> {
        self.note_base(parent, name, false)
    }

    /// The branch depends on what the base has under a name.
    fn note_present(&self, parent: Index, name: &OsStr) -> Result<()> {
        self.note_base(parent, name, true)
    }

    fn note_base(&self, parent: Index, name: &OsStr, present: bool) -> Result<()> {
        let top = self.top();
        let Some(path) = self.base_path(parent, name).filter(|_| !top.is_base()) else {
            return Ok(());
        };
        let Some(base) = self.layers.last() else {
            return Ok(());
        };
        if self.is_veiled(parent, name)? {
            return Ok(()); // the base has something else there than the branch sees, until that is undone
        }
        let expected = match base.tree.stat(&path) {
            Ok(stat) if present => Expected::Present(identity(&stat)),
            // Hidden by this branch already: the first note said what was there.
            Ok(_) => return Ok(()),
            Err(Errno::NOENT | Errno::NOTDIR) => Expected::Absent,
            Err(error) => return Err(error),
        };
        top.saw(&path, expected)
    }
}

/// The path by which the layers below the top one, taken together, show what the top one has at `path`. Not the path in
/// the layer that has it: a layer between may have moved what is around it.
fn path_below(top: &Layer, path: &Path) -> Result<PathBuf> {
    for ancestor in path.ancestors().filter(|ancestor| !ancestor.as_os_str().is_empty()) {
        if let Some(origin) = top.redirect(ancestor)? {
            let rest = path.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return Ok(if rest.as_os_str().is_empty() { origin } else { origin.join(rest) });
        }
    }
    Ok(path.to_path_buf())
}

/// Where a new object is being finished.
#[derive(Clone, Copy)]
enum Target<'p> {
    Scratch(&'p Path),
    Final(&'p Path),
}

/// A device 0:0 is the overlay format's whiteout: one that a user makes carries a mark from the start.
fn is_device_zero(new: &New<'_>) -> bool {
    matches!(new, New::Special { mode, device: (0, 0) } if FileType::from_raw_mode(*mode) == FileType::CharacterDevice)
}
