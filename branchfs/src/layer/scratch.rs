//! What is being built in a layer's scratch directory: it goes again, with the room it takes, unless it was placed.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use super::Layer;

/// A name in scratch that nothing has.
#[derive(Debug)]
pub(crate) struct Scratch<'l> {
    layer: &'l Layer,
    path: PathBuf,
    is_placed: bool,
}

impl<'l> Scratch<'l> {
    pub(crate) fn new(layer: &'l Layer) -> Self {
        Self { layer, path: layer.scratch(), is_placed: false }
    }

    /// It has been renamed into the layer: nothing is left to remove.
    pub(crate) fn placed(mut self) {
        self.is_placed = true;
    }
}

impl Deref for Scratch<'_> {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if !self.is_placed {
            // The error that is on its way is the one to tell; the next start empties scratch in any case.
            let _ = self.layer.work().and_then(|work| work.remove_all(&self.path));
        }
    }
}
