//! A store that is not on the base's mount, so that files cannot be renamed between them.
//!
//! Such an external store consists of two directories. The *store* has the branches: their records and layers. The *base
//! store*, `.branching` in the base, has the journal, the history, and the snapshot layers, which link objects of the base.
//! Each has a link to the other (`.branching/store`, `STORE/base`), so that layers are never committed into another base.
//!
//! A commit into main first copies the branch's layers into the base store, under the same numbers ([`super::store::StagedLayers`]).
//! Then it is an ordinary commit. Staged layers of a commit that was not logged are removed at its end, or at the next
//! mount.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use super::branch_log::BranchLog;
use crate::error::{Context, Error};
use crate::no_follow;
use crate::ownership;
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
        let named = named_in(&base_store)?;
        let store = match (store, named) {
            (Some(store), _) => resolved(store)?,
            (None, Some(named)) if named.exists() => Located::at(base)?.store,
            (None, Some(named)) => {
                return Err(Error::Unsupported(format!(
                    "branches of {} are kept in {}, which is missing: mount that file system \
                        first, or drop the branches by removing {}",
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
                        "{} says {}, not {}: a store belongs to one base; if the directory was \
                            moved, update the link",
                        path.display(),
                        found.display(),
                        wanted.display()
                    )));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    std::os::unix::fs::symlink(wanted, &path).at(&path)?;
                    ownership::set(&path, owner).at(&path)?;
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
        if let Some(store) = named_in(&here)? {
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

/// The external store that the base's part of the store names.
fn named_in(home: &Path) -> Result<Option<PathBuf>, Error> {
    let link = home.join("store");
    match fs::read_link(&link) {
        Ok(store) => Ok(Some(store)),
        Err(error) if is_absent(&error) || error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error).at(&link),
    }
}

pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
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

/// Device number (major, minor) and mount id of a path. A rename works only where both are equal.
fn mount_of(path: &Path) -> Result<((u32, u32), u64), Error> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    let found = rustix::fs::statx(CWD, path, AtFlags::empty(), wanted).at(path)?;
    // Before Linux 5.8 statx has no mount id: the mounts are then assumed to be the same.
    let is_told = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(((found.stx_dev_major, found.stx_dev_minor), if is_told { found.stx_mnt_id } else { 0 }))
}
