//! Where the content of a node lies.

use std::sync::Arc;

use rustix::fs::FileType;

use crate::ids::LayerId;
use crate::layer_stack::LayerPath;
use crate::vfs::Attributes;
use crate::write_set::Fingerprint;

/// Index of a node within its view; 1 is the branch's root directory.
pub type NodeIndex = u64;

/// The branch's root directory.
pub const ROOT: NodeIndex = 1;

/// The location of a node's content.
#[derive(Clone, Debug)]
pub enum NodeLocation {
    /// A directory: in the top layer at its own path (`upper`), merged with directories of lower layers, top first.
    Directory {
        /// Whether the upper layer has the directory.
        upper: bool,
        /// The directories in lower layers, top first.
        lowers: Arc<[LayerPath]>,
    },
    /// An object of the top layer, at the node's own path.
    Upper,
    /// An object of a lower layer, not copied up.
    Lower(LayerPath),
    /// It has no name any more and exists while it is open.
    Orphan,
}

/// The result of a merged lookup.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) kind: FileType,
    pub(crate) place: NodeLocation,
    /// Layer and inode number of the object itself (not of a directory).
    pub(crate) inode: Option<(LayerId, u64)>,
    /// State of a regular file of a lower layer.
    pub(crate) identity: Option<Fingerprint>,
    pub(crate) attributes: Attributes,
}
