//! Changes of ownership: of files of the store, and of objects in a branch.
//!
//! Everything in the store outside of the layers' trees belongs to the store's owner, who must be able to read and
//! remove all of it without privileges. What is created by a privileged daemon is therefore given to the owner at once,
//! a directory while it is still empty. An object in a tree belongs to the user that created it, or to the owner of the
//! object that it is a copy of.
//!
//! An object at a path that has the right owner already is left alone: a change of owner sets its ctime, and clears
//! set-id bits and capabilities.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Stat, Statx, Uid};

use crate::no_follow;
use crate::rooted_dir::{self, RootedDir};

/// A user id and a group id.
pub type Ids = (u32, u32);

/// The owner in what `statx` returned.
pub(crate) fn of(stat: &Statx) -> Ids {
    (stat.stx_uid, stat.stx_gid)
}

/// The owner in what `fstat` returned.
pub(crate) fn of_stat(stat: &Stat) -> Ids {
    (stat.st_uid, stat.st_gid)
}

/// The owner of a directory of the store.
pub fn of_directory(path: &Path) -> io::Result<Ids> {
    let found = no_follow::open_directory(path)?.metadata()?;
    Ok((found.uid(), found.gid()))
}

/// Sets the owner of an object of the store.
pub(crate) fn set(path: &Path, owner: Ids) -> io::Result<()> {
    let (parent, name) = no_follow::parent(path)?;
    let found = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if of_stat(&found) == owner {
        return Ok(());
    }
    let (uid, gid) = raw(owner);
    Ok(rustix::fs::chownat(&parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Gives an object of the store to the owner of the directory that it is in.
pub(crate) fn set_from_parent(path: &Path) -> io::Result<()> {
    set(path, of_directory(path.parent().unwrap_or(path))?)
}

/// Creates a directory of the store. It may exist.
pub fn make_directory(path: &Path, owner: Ids) -> io::Result<()> {
    match no_follow::make_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| set(path, owner)),
    }
}

/// Sets the owner of an object in a tree.
pub(crate) fn set_in(tree: &RootedDir, path: &Path, owner: Ids) -> rooted_dir::Result<()> {
    if of(&tree.stat(path)?) == owner {
        return Ok(());
    }
    tree.set_owner(path, Some(owner.0), Some(owner.1))
}

/// Gives an object in a tree to the owner of the tree's root.
pub(crate) fn set_from_root(tree: &RootedDir, path: &Path) -> rooted_dir::Result<()> {
    set_in(tree, path, of(&tree.stat(Path::new(""))?))
}

/// Sets the owner of an open file or directory, also to the one that it has.
pub fn set_opened(file: impl AsFd, owner: Ids) -> rooted_dir::Result<()> {
    let (uid, gid) = raw(owner);
    rustix::fs::fchown(file, uid, gid)
}

fn raw((uid, gid): Ids) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_file_behind_a_linked_directory_is_not_changed() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("real")).unwrap();
        std::fs::write(place.path().join("real/file"), "").unwrap();
        std::os::unix::fs::symlink("real", place.path().join("through")).unwrap();
        assert!(set(&place.path().join("through/file"), (1, 1)).is_err());
        let owner = of_directory(&place.path().join("real")).unwrap();
        set(&place.path().join("real/file"), owner).unwrap();
    }
}
