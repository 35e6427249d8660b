//! A directory beside a layer's content that is made when it is first needed.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::no_follow;
use crate::tree::{DirectoryEntry, Result, Tree};

/// The directory, there or not.
#[derive(Debug)]
pub(super) struct Part {
    layer: PathBuf,
    name: &'static str,
    tree: OnceLock<Tree>,
}

impl Part {
    /// The directory `name` of the layer in `layer`.
    pub(super) fn new(layer: &Path, name: &'static str) -> Self {
        Self { layer: layer.to_path_buf(), name, tree: OnceLock::new() }
    }

    /// The directory, which is there from now on.
    pub(super) fn tree(&self) -> Result<&Tree> {
        if let Some(tree) = self.tree.get() {
            return Ok(tree);
        }
        make_directory(&self.layer.join(self.name))?;
        let tree = Tree::reopened(&self.layer, self.name)?;
        Ok(self.tree.get_or_init(|| tree))
    }

    /// What is in it; nothing where it was never needed.
    pub(super) fn list(&self) -> Result<Vec<DirectoryEntry>> {
        let path = self.layer.join(self.name);
        if self.tree.get().is_none() && matches!(no_follow::exists(&path), Ok(false)) {
            return Ok(Vec::new());
        }
        self.tree()?.list(Path::new(""))
    }
}

/// Makes a directory of a layer's; it may be there.
pub(super) fn make_directory(path: &Path) -> Result<()> {
    let made = match no_follow::make_directory(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other.and_then(|()| give_as_layer(path)),
    };
    made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Gives something in a layer's directory to the owner of that.
pub(crate) fn give_as_layer(path: &Path) -> io::Result<()> {
    let layer = no_follow::open_directory(path.parent().unwrap_or(path))?.metadata()?;
    no_follow::give(path, (layer.uid(), layer.gid()))
}
