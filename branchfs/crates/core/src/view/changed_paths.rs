//! The paths of the base that a transaction changed, as far as views need them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The paths that a view must look up again after a snapshot layer was inserted.
#[derive(Debug, Default)]
pub(crate) struct ChangedPaths {
    /// Paths at which the snapshot layer has an object.
    pub(crate) paths: BTreeSet<PathBuf>,
    /// Directories that were moved in the base, with everything below them.
    pub(crate) moved: Vec<PathBuf>,
}

impl ChangedPaths {
    /// Whether a view must look up this path of the base again.
    pub(crate) fn changes(&self, path: &Path) -> bool {
        self.paths.contains(path) || self.moved.iter().any(|moved| path.starts_with(moved))
    }
}
