//! A store that is not on the base's mount, so that files cannot be renamed between them.
//!
//! Such an external store consists of two directories. The *store* has the branches: their records and layers. The *base
//! store*, `.branching` in the base, has the journal, the history, and the snapshot layers, which link objects of the base.
//! Each has a link to the other (`.branching/store`, `STORE/base`), so that layers are never committed into another base.
//!
//! A commit into main first copies the branch's layers into the base store, under the same numbers ([`StagedLayers`]).
//! Then it is an ordinary commit. Staged layers of a commit that was not logged are removed at its end, or at the next
//! mount.

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
use crate::error::{Context, Error};
use crate::no_follow;
use crate::object_copy::{copy_content, copy_metadata};
use crate::overlay::{Namespace, is_private_xattr};
use crate::rooted_dir::{RootedDir, xattr_names};
use crate::view::HIDDEN;

/// The locations of the parts of a store.
#[derive(Clone, Debug)]
pub(super) struct StoreLayout {
    pub(super) store: PathBuf,
    pub(super) base_store: PathBuf,
    /// Whether the store's file system has its own inode numbers.
    pub(super) on_other_filesystem: bool,
}

impl StoreLayout {
    /// Determines whether `store` is an external store of `base`. Without `store`, it is the one that the base names,
    /// or the one in the base.
    ///
    /// # Errors
    /// `Unsupported` if the base names a store that does not exist.
    pub(super) fn of(base: &Path, store: Option<&Path>) -> Result<Self, Error> {
        let base_store = base.join(HIDDEN);
        let named = super::store_directory::named_in(&base_store)?;
        let store = match (store, named) {
            (Some(store), _) => resolved(store)?,
            (None, Some(named)) if named.exists() => Located::at(base)?.store,
            (None, Some(named)) => {
                return Err(Error::Unsupported(format!(
                    "branches of {} are kept in {}, which is not there: mount that file system first, or give them up by removing {}",
                    base.display(),
                    named.display(),
                    base_store.join("store").display()
                )));
            }
            (None, None) => base_store.clone(),
        };
        let made = if store.exists() { &store } else { store.parent().unwrap_or(base) };
        let (here, there) = (mount_of(base)?, mount_of(made)?);
        let base_store = if here == there { store.clone() } else { base_store };
        Ok(Self { store, base_store, on_other_filesystem: here.0 != there.0 })
    }

    pub(super) fn is_external(&self) -> bool {
        self.store != self.base_store
    }

    /// Links the store and its part in the base to each other.
    ///
    /// # Errors
    /// `Unsupported` if one belongs to another, or the part in the base has branches itself.
    pub(super) fn link_pair(&self, base: &Path, owner: (u32, u32)) -> Result<(), Error> {
        if !self.is_external() {
            return Ok(());
        }
        if BranchLog::has_branches(&self.base_store)? {
            return Err(Error::Unsupported(format!(
                "the base keeps branches in {}: mount it without --store, and commit or abort them first",
                self.base_store.display()
            )));
        }
        for (path, wanted) in
            [(self.base_store.join("store"), &*self.store), (self.store.join("base"), base)]
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
                    no_follow::chown(&path, owner).at(&path)?;
                }
                Err(error) => return Err(error).at(&path),
            }
        }
        Ok(())
    }
}

/// The parts of an existing store, found from a path of the user. A link to the other part may come from a stranger: it
/// counts only if the other part links back.
pub struct Located {
    /// The part with the lock and the branches.
    pub(crate) store: PathBuf,
    /// The part of the store that is in the base, if the store is external.
    pub(crate) base_store: Option<PathBuf>,
}

impl Located {
    /// The store at `path`, or of the base at `path`.
    ///
    /// # Errors
    /// `Refused` for a symbolic link in place of the store; `Unsupported` if its parts do not link to each other.
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
            return Ok(Self { store, base_store: Some(here) });
        }
        let Ok(base) = fs::read_link(here.join("base")) else {
            return Ok(Self { store: here, base_store: None });
        };
        let base_store = base.join(HIDDEN);
        agree((&base_store, "store"), &here, &here.join("base"))?;
        Ok(Self { store: here, base_store: Some(base_store) })
    }
}

/// Resolves symbolic links in the store path of a user. The name `.branching` itself is not followed: its parent
/// directory may be a stranger's.
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

/// Checks that the target of `link` has a link `name` in `other` back to `here`.
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

/// Copies of a branch's layers in the base, until a commit takes them.
pub(super) struct StagedLayers<'w> {
    pub(super) store: &'w Store,
    pub(super) layers: Vec<u64>,
}

impl StagedLayers<'_> {
    /// Hands the staged layers over to a commit that is being logged, which owns them from then on.
    pub(super) fn hand_over(mut self) -> Vec<u64> {
        std::mem::take(&mut self.layers)
    }
}

impl Drop for StagedLayers<'_> {
    fn drop(&mut self) {
        self.store.unstage(&self.layers);
    }
}

/// Copies a layer's content completely, including overlay attributes and hard links.
pub(super) struct TreeCopy {
    from: RootedDir,
    to: RootedDir,
    /// Inode number -> first name, of objects with several.
    linked: HashMap<u64, PathBuf>,
    /// The object that is being copied.
    pub(super) current: PathBuf,
}

/// Copies of a directory that are left to do.
enum Copying {
    Directory(PathBuf),
    /// All entries were copied.
    Attributes(PathBuf),
}

impl TreeCopy {
    pub(super) fn new(from: RootedDir, to: RootedDir) -> Self {
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

/// Copies an object other than a directory, with its overlay attributes.
pub(super) fn copy_object(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    (to, new): (&RootedDir, &Path),
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

/// Copies the attributes and the overlay attributes of an object.
fn describe(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    (to, new): (&RootedDir, &Path),
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
        let open = |place: &tempfile::TempDir| RootedDir::open_root(place.path()).unwrap();
        let mut copier = TreeCopy { linked, ..TreeCopy::new(open(&from), open(&to)) };
        assert_eq!(copier.all(), Err(rustix::io::Errno::NOENT));
        assert_eq!(fs::metadata(to.path().join("in")).unwrap().uid(), 1000);
    }
}
