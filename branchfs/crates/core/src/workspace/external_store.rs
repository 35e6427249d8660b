//! A store that is not on the base's mount, so that files cannot be renamed between them.
//!
//! There are two directories then. The *store* has the branches: their records and layers. The *home*, `.branching` in the
//! base, has the journal, the history, and the snapshot layers, which link objects of the base. Each has a link to the
//! other (`home/store`, `store/base`), so that layers are never committed into another base.
//!
//! A commit into main first copies the branch's layers into the home, under the same numbers ([`StagedLayers`]). Then it is an
//! ordinary commit. Staged layers of an undecided commit are removed at its end, or at the next mount.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, OFlags, Statx, StatxFlags, XattrFlags};

use super::branch_log::BranchLog;
use super::store::Store;
use super::store_directory::give;
use crate::error::{Context, Error};
use crate::no_follow;
use crate::object_copy::{copy_content, copy_metadata};
use crate::overlay::{Namespace, is_private_xattr};
use crate::rooted_dir::{Tree, xattr_names};
use crate::view::HIDDEN;

/// Where the parts of a store are.
#[derive(Clone, Debug)]
pub(super) struct StoreLayout {
    pub(super) store: PathBuf,
    pub(super) home: PathBuf,
    /// Whether the store's file system has its own inode numbers.
    pub(super) is_foreign: bool,
}

impl StoreLayout {
    /// Finds out what `store` is to `base`; without one, it is the one that the base names, or in the base.
    ///
    /// # Errors
    /// `Unsupported` where the base names a store that is not there.
    pub(super) fn of(base: &Path, store: Option<&Path>) -> Result<Self, Error> {
        let home = base.join(HIDDEN);
        let named = super::store_directory::named_in(&home)?;
        let store = match (store, named) {
            (Some(store), _) => resolved(store)?,
            (None, Some(named)) if named.exists() => Located::at(base)?.store,
            (None, Some(named)) => {
                return Err(Error::Unsupported(format!(
                    "branches of {} are kept in {}, which is not there: mount that file system first, or give them up by removing {}",
                    base.display(),
                    named.display(),
                    home.join("store").display()
                )));
            }
            (None, None) => home.clone(),
        };
        let made = if store.exists() { &store } else { store.parent().unwrap_or(base) };
        let (here, there) = (mount_of(base)?, mount_of(made)?);
        let home = if here == there { store.clone() } else { home };
        Ok(Self { store, home, is_foreign: here.0 != there.0 })
    }

    pub(super) fn is_elsewhere(&self) -> bool {
        self.store != self.home
    }

    /// Ties store and home to one another.
    ///
    /// # Errors
    /// `Unsupported` where one belongs to another, or the home keeps branches itself.
    pub(super) fn pair(&self, base: &Path, owner: (u32, u32)) -> Result<(), Error> {
        if !self.is_elsewhere() {
            return Ok(());
        }
        if BranchLog::has_branches(&self.home)? {
            return Err(Error::Unsupported(format!(
                "the base keeps branches in {}: mount it without --store, and commit or abort them first",
                self.home.display()
            )));
        }
        for (path, wanted) in
            [(self.home.join("store"), &*self.store), (self.store.join("base"), base)]
        {
            match fs::read_link(&path) {
                Ok(found) if found == wanted => {}
                Ok(found) => {
                    return Err(Error::Unsupported(format!(
                        "{} says {}, not {}: a store belongs to one base; where the directory was moved, set the link right",
                        path.display(),
                        found.display(),
                        wanted.display()
                    )));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    std::os::unix::fs::symlink(wanted, &path).at(&path)?;
                    give(&path, owner)?;
                }
                Err(error) => return Err(error).at(&path),
            }
        }
        Ok(())
    }
}

/// The parts of a store that is there, found from a path of the user's. What names the other part of a store may come from
/// a stranger: a link counts only where the other part names this one.
pub struct Located {
    /// The part with the lock and the branches.
    pub(crate) store: PathBuf,
    /// The base's own part, where that is another one.
    pub(crate) home: Option<PathBuf>,
}

impl Located {
    /// The store at `path`, or of the base at `path`.
    ///
    /// # Errors
    /// `Refused` for a symbolic link in the store's place; `Unsupported` where a store's parts do not name each other.
    pub(crate) fn at(path: &Path) -> Result<Self, Error> {
        let path = fs::canonicalize(path).at(path)?;
        let inner = path.join(HIDDEN);
        let is_base = match no_follow::open_directory(&inner) {
            Ok(_) => true,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                false
            }
            Err(error) => return Err(error).at(&inner),
        };
        let here = if is_base { inner } else { path };
        if let Some(store) = super::store_directory::named_in(&here)? {
            let base = here.parent().unwrap_or(&here);
            agree((&store, "base"), base, &here.join("store"))?;
            return Ok(Self { store, home: Some(here) });
        }
        let Ok(base) = fs::read_link(here.join("base")) else {
            return Ok(Self { store: here, home: None });
        };
        let home = base.join(HIDDEN);
        agree((&home, "store"), &here, &here.join("base"))?;
        Ok(Self { store: here, home: Some(home) })
    }
}

/// The path of a store that a user gave, without symbolic links. The name `.branching` itself is not followed: the directory
/// that holds it may be a stranger's.
pub(super) fn resolved(store: &Path) -> Result<PathBuf, Error> {
    let is_given = !store.ends_with(HIDDEN) && store.exists();
    match (store.parent(), store.file_name()) {
        (Some(parent), Some(name)) if !is_given => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(fs::canonicalize(parent).at(store)?.join(name))
        }
        _ => fs::canonicalize(store).at(store),
    }
}

/// Refuses what `link` says, unless the link `name` in `other`, which it leads to, says `here`.
fn agree((other, name): (&Path, &str), here: &Path, link: &Path) -> Result<(), Error> {
    if fs::read_link(other.join(name)).is_ok_and(|back| back == here) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{} names {}, which does not name {} in turn and is not its other part: nothing was read or written there; remove the link if the directory came from somebody else, or mount with --store",
        link.display(),
        other.display(),
        here.display()
    )))
}

/// Device and mount of a path.
fn mount_of(path: &Path) -> Result<((u32, u32), u64), Error> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    let found = rustix::fs::statx(CWD, path, AtFlags::empty(), wanted).at(path)?;
    // Before Linux 5.8 statx has no mount id: the mounts are then assumed to be the same.
    let is_told = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(((found.stx_dev_major, found.stx_dev_minor), if is_told { found.stx_mnt_id } else { 0 }))
}

/// Copies of a branch's layers in the home, as long as no commit has taken them.
pub(super) struct StagedLayers<'w> {
    pub(super) store: &'w Store,
    pub(super) layers: Vec<u64>,
}

impl StagedLayers<'_> {
    /// Returns the staged layers to a commit that is being decided, which owns them from then on.
    pub(super) fn hand_over(mut self) -> Vec<u64> {
        std::mem::take(&mut self.layers)
    }
}

impl Drop for StagedLayers<'_> {
    fn drop(&mut self) {
        self.store.unstage(&self.layers);
    }
}

/// Copies a layer's content: all of every object, marks of the overlay format and hard links too.
pub(super) struct TreeCopy {
    from: Tree,
    to: Tree,
    /// Inode number -> first name, of objects with several.
    linked: HashMap<u64, PathBuf>,
    /// What is being copied.
    pub(super) current: PathBuf,
}

/// What is left to copy of a directory.
enum Copying {
    Directory(PathBuf),
    /// All that is in it has been copied.
    Attributes(PathBuf),
}

impl TreeCopy {
    pub(super) fn new(from: Tree, to: Tree) -> Self {
        Self { from, to, linked: HashMap::new(), current: PathBuf::new() }
    }

    /// Copies everything below the root, and the root's attributes.
    pub(super) fn all(&mut self) -> Result<(), rustix::io::Errno> {
        let mut pending = vec![Copying::Directory(PathBuf::new())];
        while let Some(copying) = pending.pop() {
            match copying {
                Copying::Directory(directory) => {
                    let entries = self.from.list(&directory)?;
                    pending.push(Copying::Attributes(directory.clone()));
                    for entry in entries {
                        let path = directory.join(&entry.name);
                        self.current.clone_from(&path);
                        let stat = self.from.stat(&path)?;
                        if entry.kind == FileType::Directory {
                            self.to.make_directory(&path, 0o700)?;
                            // While it is empty, so that its owner can remove it after a kill.
                            self.to.set_owner(&path, Some(stat.stx_uid), Some(stat.stx_gid))?;
                            pending.push(Copying::Directory(path));
                        } else {
                            self.object(&path, &stat)?;
                        }
                    }
                }
                // Last: entries were made in it since.
                Copying::Attributes(directory) => {
                    let stat = self.from.stat(&directory)?;
                    self.describe(&directory, &stat)?;
                }
            }
        }
        Ok(())
    }

    fn object(&mut self, path: &Path, stat: &Statx) -> Result<(), rustix::io::Errno> {
        if stat.stx_nlink > 1 {
            if let Some(first) = self.linked.get(&stat.stx_ino) {
                return self.to.link(first, path);
            }
            self.linked.insert(stat.stx_ino, path.to_path_buf());
        }
        copy_object((&self.from, path, stat), (&self.to, path))
    }

    fn describe(&self, path: &Path, stat: &Statx) -> Result<(), rustix::io::Errno> {
        describe((&self.from, path, stat), (&self.to, path))
    }
}

/// Copies an object other than a directory, with the marks of the overlay format.
pub(super) fn copy_object(
    (from, path, stat): (&Tree, &Path, &Statx),
    (to, new): (&Tree, &Path),
) -> Result<(), rustix::io::Errno> {
    let mode = u32::from(stat.stx_mode);
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => {
            let source = from.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
            let target = to.create_file(new, 0o600)?;
            copy_content(source.as_fd(), target.as_fd(), stat.stx_size)?;
        }
        FileType::Symlink => {
            let target = from.read_link(path)?;
            to.make_symlink(new, OsStr::from_bytes(&target))?;
        }
        _ => {
            let device = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
            to.make_node(new, mode, device)?;
        }
    }
    describe((from, path, stat), (to, new))
}

/// Copies the attributes of an object, and the marks of the overlay format.
fn describe(
    (from, path, stat): (&Tree, &Path, &Statx),
    (to, new): (&Tree, &Path),
) -> Result<(), rustix::io::Errno> {
    let list = match from.list_xattrs(path) {
        Err(rustix::io::Errno::OPNOTSUPP) => Vec::new(),
        other => other?,
    };
    // Partial copies have been completed before.
    let is_partial = |name: &OsStr| {
        [Namespace::Trusted, Namespace::User].iter().any(|one| name == one.partial())
    };
    for name in xattr_names(&list).filter(|name| is_private_xattr(name) && !is_partial(name)) {
        let value = from.get_xattr(path, name)?;
        to.set_xattr(new, name, &value, XattrFlags::empty())?;
    }
    copy_metadata((from, path, stat), (to, new))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, chown};

    use super::*;

    /// Cut short at a file in the directory: a link to a first name that is not there.
    #[test]
    fn what_is_copied_in_part_is_its_owners() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (one, other) = (from.path().join("in/one"), from.path().join("in/other"));
        fs::create_dir(from.path().join("in")).unwrap();
        fs::write(&one, "content").unwrap();
        fs::hard_link(&one, other).unwrap();
        chown(from.path().join("in"), Some(1000), Some(1000)).unwrap();
        let linked = HashMap::from([(fs::metadata(&one).unwrap().ino(), "missing".into())]);
        let open = |place: &tempfile::TempDir| Tree::open_root(place.path()).unwrap();
        let mut copier = TreeCopy { linked, ..TreeCopy::new(open(&from), open(&to)) };
        assert_eq!(copier.all(), Err(rustix::io::Errno::NOENT));
        assert_eq!(fs::metadata(to.path().join("in")).unwrap().uid(), 1000);
    }
}
