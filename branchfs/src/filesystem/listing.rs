//! Directory listings.
//!
//! The kernel opens and closes directories without a request and caches every listing that was read to its end. A
//! branch changes only through the kernel; other changes of it invalidate the cache ([`branchfs_core::mount`]). Other
//! programs may change main's directories at any time, so the kernel caches none of those.

use std::ffi::OsStr;
use std::time::Duration;

use super::{BranchFilesystem, MAIN, MountedBranch};
use branchfs_core::view::{NodeIndex, View};
use branchfs_fuse::Entry;

/// An entry of a listing without attributes.
pub(super) const NAME_ALONE: Entry = Entry {
    node: None,
    generation: 0,
    entry_ttl: Duration::ZERO,
    attributes_ttl: Duration::ZERO,
    attributes: None,
};

impl BranchFilesystem {
    /// The attributes of an entry in a READDIRPLUS reply, with one reference to its node. Empty if they are of no use:
    /// the kernel knows the name, or may not cache it; it is a branch's directory, or it is gone.
    pub(super) fn entry_attributes(
        &self,
        mounted: &MountedBranch,
        view: &mut View,
        directory: NodeIndex,
        name: &OsStr,
    ) -> Option<(NodeIndex, Entry)> {
        if mounted.slot == MAIN
            || view.tree.nodes.has_lookups(directory, name)
            || self.branch_entry(mounted, directory, name).is_some()
        {
            return None;
        }
        let (child, attributes) = view.tree.lookup(directory, name).ok().flatten()?;
        view.tree.nodes.add_lookup(child);
        Some((child, Self::entry_of(mounted, view, child, attributes)))
    }
}

/// The `DT_*` value of a kind.
pub(super) fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
