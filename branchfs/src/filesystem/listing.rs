//! Directories as they are listed.
//!
//! The kernel opens and closes directories by itself and keeps every listing that was read to its end. A branch changes
//! through the kernel alone, and what outdates it otherwise is told ([`super::invalidation`]). Others may change main's
//! directories at any time: of them the kernel is made to keep nothing.

use std::ffi::OsStr;
use std::time::Duration;

use super::{BranchFilesystem, MAIN, MountedBranch};
use branchfs_core::view::{NodeIndex, View};
use branchfs_fuse::{DirectorySink, Entry, FsResult, NodeId};

/// An entry of a listing that says no more than the name.
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
            // Who reads on has kept what came so far. Before the end is told: a listing that lacks pages is none.
            let _ = kernel.invalidate_node(node); // the kernel may keep none: as good
        }
        let _pass = self.pass();
        let mounted = self.mounted(slot)?;
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
            let found =
                if plus { self.tell(&mounted, &mut view, index, &entry.name) } else { None };
            let pushed = match &found {
                Some((child, told)) => {
                    let ino = told.attributes.map_or(entry.ino, |attributes| attributes.ino);
                    let pushed = sink.push_plus(told, ino, next, kind, &entry.name);
                    if !pushed {
                        view.nodes.forget(*child, 1);
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

    /// What a listing tells the kernel about a name beside the name, with one reference to its node. Nothing where that is
    /// no use: the kernel knows the name, or may not keep it; it is a branch's, or nothing has it any more.
    fn tell(
        &self,
        mounted: &MountedBranch,
        view: &mut View,
        directory: NodeIndex,
        name: &OsStr,
    ) -> Option<(NodeIndex, Entry)> {
        if mounted.slot == MAIN
            || view.nodes.is_remembered(directory, name)
            || self.branch_entry(mounted, directory, name).is_some()
        {
            return None;
        }
        let (child, attributes) = view.lookup(directory, name).ok().flatten()?;
        view.nodes.remember(child);
        Some((child, Self::entry_of(mounted, view, child, attributes)))
    }
}

/// The `DT_*` value of a kind.
fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
