//! What a branch changes, compared with its parent as it was at the fork (S14 of docs/semantics.md).
//!
//! Two steps. The *walk* ([`walk()`]) goes through the branch's own layers alone and pairs every object it finds with what
//! the parent has in its place: [`Pair`]s, by reading names and attributes. The *comparison* ([`compare()`]) looks at the
//! pairs, reads content where attributes do not tell, finds renames, and drops what is the same after all.
//! [`patch`] and [`crate::archive::export()`] write the pairs out.
//!
//! Cost: the walk costs the changed names; the comparison reads a file only where both sides have it, or have one of the
//! same size elsewhere.
//!
//! The walk is done while the branch stands still. What comes after it is not: every object is opened by its path and
//! must then be the inode that the walk saw ([`content`]), so that a branch that is committed, or written to, meanwhile
//! gives an error and never a mixture.

mod compare;
mod content;
mod patch;
mod stack;
mod walk;

use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{FileType, Statx};

use crate::layer::Layer;
use crate::layer_stack::LayerPath;
use crate::lazy_copy_up::PartialCopy;
use crate::vfs::Attributes;

pub use compare::{ChangeKind, ChangedField};
pub use compare::{Difference, compare, match_pairs, rename_by_inode};
pub use content::{OpenedFile, Reader};
pub use patch::{Statistics, statistics, write_patch};
pub use stack::find_below;
pub use walk::{RenamedDirs, Walked, list_view, walk};

/// One object on one side: its path in the view and its layer.
#[derive(Clone, Debug)]
pub struct Side {
    /// Path in the view; empty for the root.
    pub(crate) path: PathBuf,
    pub(crate) layer: Arc<Layer>,
    /// Path in the layer. It differs from `path` below a renamed directory.
    pub(crate) place: PathBuf,
    /// With the inode number and the links that it has in the layer.
    pub(crate) stat: Attributes,
    /// The object that has the content, if this one is a metacopy: a file in the layer with attributes only.
    pub(crate) content: Option<Box<Side>>,
    /// The partial copy, if the file is one: then its content cannot be read from its layer alone.
    pub(crate) partial: Option<Arc<PartialCopy>>,
}

impl Side {
    fn new(path: PathBuf, at: LayerPath, stat: &Statx) -> Self {
        let LayerPath { layer, path: place } = at;
        Self { path, layer, place, stat: stat.into(), content: None, partial: None }
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.mode)
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind() == FileType::Directory
    }

    /// The permission bits.
    pub(crate) fn mode(&self) -> u32 {
        self.stat.mode & 0o7777
    }

    /// The object that has the content.
    fn data(&self) -> &Self {
        self.content.as_deref().unwrap_or(self)
    }

    /// Identifies the object across copies: the inode number that every branch shows for it.
    fn st_ino(&self) -> u64 {
        self.layer.st_ino(self.stat.ino)
    }
}

/// An object before and after. At least one of them is set.
#[derive(Clone, Debug)]
pub struct Pair {
    pub(crate) before: Option<Side>,
    pub(crate) after: Option<Side>,
    /// It still has its name, in a directory that may have been renamed.
    pub(crate) keeps_name: bool,
}
