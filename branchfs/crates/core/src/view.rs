//! One branch as the kernel sees it: merged lookups over a stack of layers, copy-up, and changes to the top layer.
//!
//! A view knows no FUSE and no other branch. Its layers are ordered top first; the first is the branch's own and takes
//! all changes, the last is the base. The view of main has the base alone and changes it in place.
//!
//! Cost of the hot paths, in system calls beside the one round trip to the kernel: a lookup is one `statx` for each
//! layer until the name is found (plus two `getxattr` where directories of two layers merge); `getattr` is one `statx`;
//! `open` is one `openat` and one `statx`; `read` and `write` are one each; a first change copies up each parent directory once.
//!
//! Locking: a view is used under the mutex of its [`crate::mount::Mount`]; file content is read and written
//! outside it, on descriptors taken out of the handle table.

mod attr;
mod changed_paths;
mod copy_up;
mod dependencies;
mod handles;
mod listing;
mod location;
mod modify;
mod nodes;
mod open;
mod partial_files;
mod quota_hooks;
mod tree;

use std::collections::HashSet;
use std::hash::RandomState;
use std::sync::Arc;

use crate::layer::Layer;
pub(crate) use crate::layer_stack::is_hidden;
pub use crate::layer_stack::{HIDDEN, LayerPath};

pub use attr::kill_privileges_of;
pub(crate) use changed_paths::ChangedPaths;
pub use handles::Handles;
pub(crate) use location::Found;
pub use location::{NodeIndex, NodeLocation, ROOT};
pub use modify::{New, Owner};
pub use nodes::Nodes;
pub use open::OpenedFile;
pub use partial_files::Brought;
pub(crate) use partial_files::{PendingCopyUp, partial_copies_cut_off};
pub use tree::MergedTree;
pub(crate) use tree::{LayerReplacement, Outdated, attributes};

/// Whether a copy-up copies the content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyData {
    /// All of it.
    Yes,
    /// None: the file is about to be truncated.
    No,
}

/// A branch as programs use it: one method for each kind of request.
#[derive(Debug)]
pub struct View {
    /// Its objects.
    pub tree: MergedTree,
    /// The key of the hash that gives names their offsets in listings.
    offsets: RandomState,
    /// Nodes that may be written through a mapping.
    mapped: HashSet<NodeIndex>,
    pending: Option<Pending>,
}

/// A change of the layers below that is carried out when the view is used next: a commit costs the same however many
/// siblings live on.
#[derive(Debug)]
struct Pending {
    layers: Vec<Arc<Layer>>,
    /// As in [`LayerReplacement::Same`].
    changed: Option<Vec<Arc<ChangedPaths>>>,
}

impl View {
    /// A view of `layers`, top first.
    pub(crate) fn new(layers: Vec<Arc<Layer>>) -> Self {
        Self {
            tree: MergedTree::new(layers),
            offsets: RandomState::new(),
            mapped: HashSet::new(),
            pending: None,
        }
    }

    /// Replaces the layer stack before the view is used next ([`Self::catch_up`]). The view shows the same as before.
    pub(crate) fn replace_layers_later(
        &mut self,
        layers: Vec<Arc<Layer>>,
        changed: Option<&Arc<ChangedPaths>>,
    ) {
        let before = self.pending.take().map_or(Some(Vec::new()), |pending| pending.changed);
        let changed = before.zip(changed).map(|(mut before, changed)| {
            before.push(Arc::clone(changed));
            before
        });
        self.pending = Some(Pending { layers, changed });
    }

    /// Applies pending replacements of the layer stack.
    pub(crate) fn catch_up(&mut self) {
        if let Some(Pending { layers, changed }) = self.pending.take() {
            self.tree.replace_layers(layers, LayerReplacement::Same(changed.as_deref()));
        }
    }
}
