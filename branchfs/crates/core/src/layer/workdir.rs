//! What is being built in a layer's scratch directory: it goes again, with the room it takes, unless it was placed.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rustix::fs::{AtFlags, RenameFlags};

use super::Layer;
use crate::rooted_dir::{Result, Tree};

impl Layer {
    /// A name in `work/` that nothing has.
    pub(crate) fn scratch(&self) -> PathBuf {
        PathBuf::from(self.own().scratch.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// The scratch tree.
    pub(crate) fn work(&self) -> Result<&Tree> {
        self.own().work.tree()
    }

    /// Moves a finished object from scratch into the layer.
    pub(crate) fn place(&self, scratch: &Path, path: &Path, flags: RenameFlags) -> Result<()> {
        let (from, to) = (
            self.work()?.directory(Path::new(""))?,
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
        );
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::renameat_with(&*from, scratch, &*to, name, flags)
    }

    /// Moves an object of the layer into scratch.
    pub(crate) fn unplace(&self, path: &Path, scratch: &Path) -> Result<()> {
        let (from, to) = (
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
            self.work()?.directory(Path::new(""))?,
        );
        self.tree.forget(path);
        rustix::fs::renameat_with(
            &*from,
            path.file_name().unwrap_or(OsStr::new(".")),
            &*to,
            scratch,
            RenameFlags::NOREPLACE,
        )
    }

    /// Gives an object of the layer a name in scratch.
    pub(crate) fn link_to_scratch(&self, path: &Path, scratch: &Path) -> Result<()> {
        let (from, to) = (
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
            self.work()?.directory(Path::new(""))?,
        );
        rustix::fs::linkat(
            &*from,
            path.file_name().unwrap_or(OsStr::new(".")),
            &*to,
            scratch,
            AtFlags::empty(),
        )
    }
}

/// A name in scratch that nothing has.
#[derive(Debug)]
pub(crate) struct WorkEntry<'l> {
    layer: &'l Layer,
    path: PathBuf,
    is_placed: bool,
}

impl<'l> WorkEntry<'l> {
    pub(crate) fn new(layer: &'l Layer) -> Self {
        Self { layer, path: layer.scratch(), is_placed: false }
    }

    /// It has been renamed into the layer: nothing is left to remove.
    pub(crate) fn placed(mut self) {
        self.is_placed = true;
    }
}

impl Deref for WorkEntry<'_> {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkEntry<'_> {
    fn drop(&mut self) {
        if !self.is_placed {
            // The error that is on its way is the one to tell; the next start empties scratch in any case.
            let _ = self.layer.work().and_then(|work| work.remove_all(&self.path));
        }
    }
}
