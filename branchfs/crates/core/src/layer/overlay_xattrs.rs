//! A layer's marks, in the overlay format: whiteouts, opaque directories, redirects.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::{RenameFlags, Statx, XattrFlags};
use rustix::io::Errno;

use super::{Layer, WorkEntry};
use crate::overlay;
use crate::rooted_dir::{Result, Tree};

impl Layer {
    /// True where `stat` of `path` shows a whiteout.
    pub(crate) fn is_whiteout(&self, path: &Path, stat: &Statx) -> Result<bool> {
        if self.own.is_none() {
            return Ok(false);
        }
        overlay::is_whiteout(&self.tree, path, stat)
    }

    /// True where the directory at `path` hides what lower layers have there.
    pub(crate) fn is_opaque(&self, path: &Path) -> Result<bool> {
        let Some(own) = &self.own else {
            return Ok(false);
        };
        let value = self.tree.find_xattr(path, OsStr::new(own.namespace.opaque()))?;
        Ok(value.is_some_and(|value| value == b"y"))
    }

    /// The redirect of the object at `path` as it is written.
    pub(crate) fn redirect_text(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let Some(own) = &self.own else {
            return Ok(None);
        };
        self.tree.find_xattr(path, OsStr::new(own.namespace.redirect()))
    }

    /// True where the file at `path` is without its content, which a lower layer has (the kernel's layers only).
    pub(crate) fn is_without_content(&self, path: &Path) -> Result<bool> {
        let metacopy = OsStr::new(overlay::METACOPY_XATTR);
        Ok(self.own.is_some() && self.tree.find_xattr(path, metacopy)?.is_some())
    }

    /// Where the directory at `path` came from, if it was renamed over lower layers.
    pub(crate) fn redirect(&self, path: &Path) -> Result<Option<PathBuf>> {
        match self.redirect_text(path)? {
            Some(value) => overlay::parse_redirect(&value, path).map(Some).ok_or(Errno::IO),
            None => Ok(None),
        }
    }

    pub(crate) fn set_opaque(&self, path: &Path) -> Result<()> {
        self.set_opaque_in(&self.tree, path)
    }

    /// Marks a directory that is still in scratch, or in the layer.
    pub(crate) fn set_opaque_in(&self, tree: &Tree, path: &Path) -> Result<()> {
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

    /// Puts a whiteout at `path`, replacing whatever this layer has there.
    pub(crate) fn put_whiteout(&self, path: &Path) -> Result<()> {
        const WHITEOUT_MODE: u32 = 0o020_000;
        match self.tree.make_node(path, WHITEOUT_MODE, 0) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
        let scratch = WorkEntry::new(self); // has what was there in the end, and removes it
        self.work()?.make_node(&scratch, WHITEOUT_MODE, 0)?;
        self.place(&scratch, path, RenameFlags::EXCHANGE)?;
        self.tree.forget(path);
        Ok(())
    }
}
