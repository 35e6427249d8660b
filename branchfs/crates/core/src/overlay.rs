//! The overlay format of a layer, as the kernel's overlayfs has it (Documentation/filesystems/overlayfs.rst).
//!
//! | on disk | meaning |
//! |---|---|
//! | character device 0:0 | whiteout: the name is gone |
//! | character device 0:0 with `trusted.branchfs.device` | a device 0:0 that a user made |
//! | directory with `NS.overlay.opaque` = `y` | hides what lower layers have there |
//! | directory with `NS.overlay.redirect` = `/path` | merges with `/path` of the lower layers: it was renamed |
//! | file with `trusted.overlay.metacopy` | attributes alone; the content is the lower layers' (the kernel's layers only) |
//!
//! `NS` is `trusted` where that may be written (`CAP_SYS_ADMIN`), else `user`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, Statx, XattrFlags};
use rustix::io::Errno;

use crate::rooted_dir::{Result, RootedDir, xattr_names};

/// Marks a device 0:0 that is not a whiteout.
pub(crate) const DEVICE_XATTR: &str = "trusted.branchfs.device";

/// Marks a metacopy of the kernel: the content is in a lower layer.
pub(crate) const METACOPY_XATTR: &str = "trusted.overlay.metacopy";

/// The namespace of the overlay attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Namespace {
    /// `trusted.overlay.*`
    Trusted,
    /// `user.overlay.*`
    User,
}

impl Namespace {
    pub(crate) fn opaque(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.overlay.opaque",
            Self::User => "user.overlay.opaque",
        }
    }

    /// Marks a partial copy ([`crate::lazy_copy_up`]).
    pub(crate) fn partial(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.branchfs.partial",
            Self::User => "user.branchfs.partial",
        }
    }

    pub(crate) fn redirect(self) -> &'static str {
        match self {
            Self::Trusted => "trusted.overlay.redirect",
            Self::User => "user.overlay.redirect",
        }
    }
}

impl Namespace {
    /// The target of the link `marks` in the store, which records the namespace.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Trusted => "trusted",
            Self::User => "user",
        }
    }

    /// Sets the namespace in this process: a daemon serves one store. Until then it is `Trusted`.
    pub(crate) fn set_for_process(self) {
        HAS_USER_MARKS.store(self == Self::User, Ordering::Relaxed);
    }
}

/// The overlay attributes of this store are in the `user` namespace; then `trusted` ones are the users' own.
static HAS_USER_MARKS: AtomicBool = AtomicBool::new(false);

/// Whether an object may be a whiteout, judged by its status.
pub(crate) fn may_be_whiteout(stat: &Statx) -> bool {
    FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::CharacterDevice
        && (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0)
}

/// The names of an object's extended attributes that users see; none on a file system without extended attributes.
pub(crate) fn user_xattrs(tree: &RootedDir, path: &Path) -> Result<Vec<OsString>> {
    xattrs(tree, path, |name| !is_private_xattr(name))
}

/// The names of those that belong to the format.
pub(crate) fn private_xattrs(tree: &RootedDir, path: &Path) -> Result<Vec<OsString>> {
    xattrs(tree, path, is_private_xattr)
}

fn xattrs(tree: &RootedDir, path: &Path, is_wanted: fn(&OsStr) -> bool) -> Result<Vec<OsString>> {
    let list = match tree.list_xattrs(path) {
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        other => other?,
    };
    Ok(xattr_names(&list).filter(|name| is_wanted(name)).map(OsStr::to_os_string).collect())
}

/// Extended attributes that belong to the format: never shown, never copied, never committed. All others are the users',
/// also those that begin with `user.branchfs.`, and with `user.overlay.` where the marks are `trusted` attributes.
pub(crate) fn is_private_xattr(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let is_trusted =
        name.starts_with(b"trusted.overlay.") || name.starts_with(b"trusted.branchfs.");
    let is_of_user =
        || name.starts_with(b"user.overlay.") || name == Namespace::User.partial().as_bytes();
    is_trusted || (HAS_USER_MARKS.load(Ordering::Relaxed) && is_of_user())
}

/// Where the lower layers have the directory or the content of an object with a redirect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Redirect {
    /// At this path from the root.
    Path(PathBuf),
    /// Under this name in the same directory. Only the kernel writes it.
    Sibling(OsString),
}

impl Redirect {
    /// `None` for one that leads out of the layer.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        let target = Path::new(OsStr::from_bytes(value));
        let path = target.strip_prefix("/").unwrap_or(target);
        let stays_inside = path.components().all(|part| matches!(part, Component::Normal(_)));
        let name = path.file_name().filter(|_| stays_inside)?;
        match target.is_absolute() {
            true => Some(Self::Path(path.to_path_buf())),
            false => (name == path.as_os_str()).then(|| Self::Sibling(name.to_os_string())),
        }
    }

    /// The path in the lower layers that it names as the redirect of the object at `path`.
    pub(crate) fn of(self, path: &Path) -> PathBuf {
        match self {
            Self::Path(origin) => origin,
            Self::Sibling(name) => path.with_file_name(name),
        }
    }
}

/// Whether the object at `path` is a whiteout; `stat` is its status.
pub(crate) fn is_whiteout(tree: &RootedDir, path: &Path, stat: &Statx) -> Result<bool> {
    Ok(may_be_whiteout(stat) && tree.find_xattr(path, OsStr::new(DEVICE_XATTR))?.is_none())
}

/// Marks the device 0:0 at `path` as one that a user made, and no whiteout.
pub(crate) fn mark_device(tree: &RootedDir, path: &Path) -> Result<()> {
    tree.set_xattr(path, OsStr::new(DEVICE_XATTR), b"0:0", XattrFlags::empty())
}

/// What a directory of a layer merges with in the layers below.
#[derive(Debug)]
pub(crate) enum Below {
    /// Nothing: it is opaque.
    Nothing,
    /// The directory with its name.
    SameName,
    /// The directory that its redirect leads to.
    Redirected(Redirect),
}

/// What the directory at `path` of a layer merges with. The one place that says how opaque marks and redirects go together.
///
/// # Errors
/// `EUCLEAN` for a redirect that leads out of the layer.
pub(crate) fn below(tree: &RootedDir, path: &Path, namespace: Namespace) -> Result<Below> {
    if is_opaque(tree, path, namespace)? {
        return Ok(Below::Nothing);
    }
    Ok(redirect(tree, path, namespace)?.map_or(Below::SameName, Below::Redirected))
}

/// Whether the directory at `path` of a layer hides those of lower layers.
pub(crate) fn is_opaque(tree: &RootedDir, path: &Path, namespace: Namespace) -> Result<bool> {
    let value = tree.find_xattr(path, OsStr::new(namespace.opaque()))?;
    Ok(value.is_some_and(|value| value == b"y"))
}

/// The redirect of the object at `path` of a layer, if it has one.
///
/// # Errors
/// `EUCLEAN` for one that leads out of the layer.
pub(crate) fn redirect(
    tree: &RootedDir,
    path: &Path,
    namespace: Namespace,
) -> Result<Option<Redirect>> {
    match tree.find_xattr(path, OsStr::new(namespace.redirect()))? {
        Some(value) => Redirect::parse(&value).map(Some).ok_or(Errno::UCLEAN),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_stays_inside_the_layer() {
        let parse = |value: &str| Some(Redirect::parse(value.as_bytes())?.of(Path::new("a/b")));
        assert_eq!(parse("/x/y"), Some(PathBuf::from("x/y")));
        assert_eq!(parse("y"), Some(PathBuf::from("a/y")));
        assert_eq!(parse("/x/../../etc"), None);
        assert_eq!(parse("/"), None);
        assert_eq!(parse(".."), None);
    }
}
