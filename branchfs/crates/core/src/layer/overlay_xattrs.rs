//! The overlay attributes of a layer: whiteouts, opaque directories, redirects.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::{RenameFlags, Statx, XattrFlags};
use rustix::io::Errno;

use super::{Layer, WorkEntry};
use crate::overlay::{self, Below, Redirect};
use crate::rooted_dir::{Result, RootedDir};

impl Layer {
    /// Whether the object at `path` is a whiteout; `stat` is its status.
    pub(crate) fn is_whiteout(&self, path: &Path, stat: &Statx) -> Result<bool> {
        if self.own.is_none() {
            return Ok(false);
        }
        overlay::is_whiteout(&self.tree, path, stat)
    }

    /// What the directory at `path` merges with in the layers below. `EUCLEAN` for a redirect that leads out of the layer.
    pub(crate) fn below(&self, path: &Path) -> Result<Below> {
        match &self.own {
            Some(own) => overlay::below(&self.tree, path, own.namespace),
            None => Ok(Below::Nothing),
        }
    }

    /// Whether the file at `path` is a metacopy (only in layers that overlayfs wrote).
    pub(crate) fn is_without_content(&self, path: &Path) -> Result<bool> {
        let metacopy = OsStr::new(overlay::METACOPY_XATTR);
        Ok(self.own.is_some() && self.tree.find_xattr(path, metacopy)?.is_some())
    }

    /// The redirect of the object at `path`, if it has one. `EUCLEAN` for one that leads out of the layer.
    pub(crate) fn redirect(&self, path: &Path) -> Result<Option<Redirect>> {
        match &self.own {
            Some(own) => overlay::redirect(&self.tree, path, own.namespace),
            None => Ok(None),
        }
    }

    pub(crate) fn set_opaque(&self, path: &Path) -> Result<()> {
        self.set_opaque_in(&self.tree, path)
    }

    /// Makes a directory opaque that is in the work directory or in the layer.
    pub(crate) fn set_opaque_in(&self, tree: &RootedDir, path: &Path) -> Result<()> {
        tree.set_xattr(path, OsStr::new(self.own().namespace.opaque()), b"y", XattrFlags::empty())
    }

    pub(crate) fn set_redirect(&self, path: &Path, origin: &Path) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let mut value = b"/".to_vec();
        value.extend_from_slice(origin.as_os_str().as_bytes());
        self.tree.set_xattr(
            path,
            OsStr::new(self.own().namespace.redirect()),
            &value,
            XattrFlags::empty(),
        )
    }

    /// Creates a whiteout at `path`, replacing the object there.
    pub(crate) fn put_whiteout(&self, path: &Path) -> Result<()> {
        const WHITEOUT_MODE: u32 = 0o020_000;
        match self.tree.make_node(path, WHITEOUT_MODE, 0) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
        let scratch = WorkEntry::new(self); // receives the earlier object, and removes it
        self.work()?.make_node(&scratch, WHITEOUT_MODE, 0)?;
        self.rename_into_upper(&scratch, path, RenameFlags::EXCHANGE)?;
        self.tree.invalidate(path);
        Ok(())
    }
}
