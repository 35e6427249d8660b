//! Directory listings.
//!
//! The kernel opens and closes directories without a request and caches every listing that was read to its end. A
//! branch changes only through the kernel; other changes of it invalidate the cache ([`super::invalidation`]). Other
//! programs may change main's directories at any time, so the kernel caches none of those.

use std::ffi::OsStr;
use std::time::Duration;

use super::{BranchFilesystem, MAIN, MountedBranch};
use branchfs_core::view::{NodeIndex, View};
use branchfs_fuse::{DirectorySink, Entry, FsResult, NodeId};

/// An entry of a listing without attributes.
const NAME_ALONE: Entry = Entry {
    node: None,
    generation: 0,
    entry_ttl: Duration::ZERO,
    attributes_ttl: Duration::ZERO,
    attributes: None,
};

impl BranchFilesystem {
    pub(super) fn list(
        &self,
        node: NodeId,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> FsResult<()> {
        let (slot, index) = Self::split(node);
        if let (MAIN, Some(kernel)) = (slot, self.kernel.get().filter(|_| offset > 0)) {
            // The kernel has cached the part that was read. It must be invalidated before the end is reported: the
            // kernel does not cache an incomplete listing.
            let _ = kernel.invalidate_node(node); // the kernel may keep none: as good
        }
        let _pass = self.mount.enter_request();
        let mounted = self.mount.mounted(slot)?;
        let mut view = mounted.live()?;
        let listing = view.listing(index, offset)?;
        let push = |sink: &mut dyn DirectorySink, ino: u64, next: u64, kind: u8, name: &OsStr| {
            if plus {
                sink.push_plus(&NAME_ALONE, ino, next, kind, name)
            } else {
                sink.push(ino, next, kind, name)
            }
        };
        const DIRECTORY: u8 = 4;
        let own_ino = |view: &View| view.getattr(index).map_or(1, |own| own.ino);
        if offset == 0 && !push(sink, own_ino(&view), 1, DIRECTORY, OsStr::new(".")) {
            return Ok(());
        }
        if offset <= 1 && !push(sink, view.parent_ino(index), 2, DIRECTORY, OsStr::new("..")) {
            return Ok(());
        }
        let rest = &listing[listing.partition_point(|listed| listed.offset <= offset)..];
        if rest.is_empty() && offset > 0 {
            view.end_listing(index);
        }
        for listed in rest {
            let (entry, next, kind) = (&listed.entry, listed.offset, kind_of(listed.entry.kind));
            if plus && !sink.has_room(&entry.name) {
                break;
            }
            let found = if plus {
                self.entry_attributes(&mounted, &mut view, index, &entry.name)
            } else {
                None
            };
            let pushed = match &found {
                Some((child, told)) => {
                    let ino = told.attributes.map_or(entry.ino, |attributes| attributes.ino);
                    let pushed = sink.push_plus(told, ino, next, kind, &entry.name);
                    if !pushed {
                        view.nodes.drop_lookups(*child, 1);
                    }
                    pushed
                }
                None => push(sink, entry.ino, next, kind, &entry.name),
            };
            if !pushed {
                break;
            }
        }
        Ok(())
    }

    /// The attributes of an entry in a READDIRPLUS reply, with one reference to its node. Empty if they are of no use:
    /// the kernel knows the name, or may not cache it; it is a branch's directory, or it is gone.
    fn entry_attributes(
        &self,
        mounted: &MountedBranch,
        view: &mut View,
        directory: NodeIndex,
        name: &OsStr,
    ) -> Option<(NodeIndex, Entry)> {
        if mounted.slot == MAIN
            || view.nodes.has_lookups(directory, name)
            || self.branch_entry(mounted, directory, name).is_some()
        {
            return None;
        }
        let (child, attributes) = view.lookup(directory, name).ok().flatten()?;
        view.nodes.add_lookup(child);
        Some((child, Self::entry_of(mounted, view, child, attributes)))
    }
}

/// The `DT_*` value of a kind.
fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
