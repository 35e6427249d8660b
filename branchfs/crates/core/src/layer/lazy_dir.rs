//! A directory beside a layer's content that is created when it is first needed.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::no_follow;
use crate::ownership;
use crate::rooted_dir::{DirectoryEntry, Result, RootedDir, to_errno};

/// A directory of a layer that may not exist yet.
#[derive(Debug)]
pub(super) struct LazyDir {
    layer: PathBuf,
    name: &'static str,
    tree: OnceLock<RootedDir>,
}

impl LazyDir {
    /// The directory `name` of the layer in the directory `layer`. Nothing is created yet.
    pub(super) fn new(layer: &Path, name: &'static str) -> Self {
        Self { layer: layer.to_path_buf(), name, tree: OnceLock::new() }
    }

    /// The directory; creates it if it does not exist.
    pub(super) fn tree(&self) -> Result<&RootedDir> {
        if let Some(tree) = self.tree.get() {
            return Ok(tree);
        }
        make_directory(&self.layer.join(self.name))?;
        let tree = RootedDir::reopened(&self.layer, self.name)?;
        Ok(self.tree.get_or_init(|| tree))
    }

    /// Its entries; none if it was never created.
    pub(super) fn list(&self) -> Result<Vec<DirectoryEntry>> {
        let path = self.layer.join(self.name);
        if self.tree.get().is_none() && matches!(no_follow::exists(&path), Ok(false)) {
            return Ok(Vec::new());
        }
        self.tree()?.list(Path::new(""))
    }
}

/// Creates a directory of a layer; it may exist.
pub(super) fn make_directory(path: &Path) -> Result<()> {
    let owner = ownership::of_directory(path.parent().unwrap_or(path));
    owner.and_then(|owner| ownership::make_directory(path, owner)).map_err(to_errno)
}
