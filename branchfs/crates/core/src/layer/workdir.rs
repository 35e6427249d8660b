//! Objects under construction in a layer's work directory. They are removed, and their charge is returned, unless they
//! are renamed into the upper layer.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rustix::fs::{AtFlags, RenameFlags};

use super::Layer;
use crate::rooted_dir::{Result, RootedDir};

impl Layer {
    /// An unused name in `work/`.
    pub(crate) fn scratch(&self) -> PathBuf {
        PathBuf::from(self.own().state().scratch.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// The scratch tree.
    pub(crate) fn work(&self) -> Result<&RootedDir> {
        self.own().state().work.tree()
    }

    /// Moves a finished object from scratch into the layer.
    pub(crate) fn rename_into_upper(
        &self,
        scratch: &Path,
        path: &Path,
        flags: RenameFlags,
    ) -> Result<()> {
        let (from, to) = (
            self.work()?.directory(Path::new(""))?,
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
        );
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::renameat_with(&*from, scratch, &*to, name, flags)
    }

    /// Moves an object of the layer into scratch.
    pub(crate) fn rename_out_of_upper(&self, path: &Path, scratch: &Path) -> Result<()> {
        let (from, to) = (
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
            self.work()?.directory(Path::new(""))?,
        );
        self.tree.invalidate(path);
        rustix::fs::renameat_with(
            &*from,
            path.file_name().unwrap_or(OsStr::new(".")),
            &*to,
            scratch,
            RenameFlags::NOREPLACE,
        )
    }

    /// Links an object of the layer into the work directory.
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

/// A name in the work directory, whose object is removed on drop.
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

    /// It was renamed into the upper layer: nothing is left to remove.
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
            // The earlier error is the one to report; the next start empties the work directory in any case.
            let _ = self.layer.work().and_then(|work| work.remove_all(&self.path));
        }
    }
}
