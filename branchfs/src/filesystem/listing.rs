//! Directories as they are listed.

use std::ffi::OsStr;
use std::time::Duration;

use rustix::io::Errno;

use super::Filesystem;
use crate::kernel::handler::{Answer, DirectorySink, Entry, Handle, NodeId};

impl Filesystem {
    pub(super) fn list(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        let mut view = mounted.live()?;
        let listed = view.listing(index, handle.0, offset)?;
        let none = Entry {
            node: None,
            generation: 0,
            entry_ttl: Duration::ZERO,
            attributes_ttl: Duration::ZERO,
            attributes: None,
        };
        let push = |sink: &mut dyn DirectorySink, ino: u64, next: u64, name: &str| {
            const DIRECTORY: u8 = 4;
            if plus {
                sink.push_plus(&none, ino, next, DIRECTORY, OsStr::new(name))
            } else {
                sink.push(ino, next, DIRECTORY, OsStr::new(name))
            }
        };
        if offset == 0 && !push(sink, view.getattr(index).map_or(1, |own| own.ino), 1, ".") {
            return Ok(());
        }
        if offset <= 1 && !push(sink, view.parent_ino(index), 2, "..") {
            return Ok(());
        }
        let start = usize::try_from(offset.saturating_sub(2)).map_err(|_| Errno::INVAL)?;
        for (position, entry) in listed.entries.iter().enumerate().skip(start) {
            let next = position as u64 + 3;
            let kind = kind_of(entry.kind);
            if !plus {
                if !sink.push(entry.ino, next, kind, &entry.name) {
                    break;
                }
                continue;
            }
            if !sink.has_room(&entry.name) {
                break;
            }
            // Shadowed by a branch of that name, or removed since the listing was taken: the name alone.
            let shadowed = self.branch_entry(&mounted, index, &entry.name).is_some();
            let found =
                if shadowed { None } else { view.lookup(index, &entry.name).ok().flatten() };
            let pushed = match found {
                Some((child, attributes)) => {
                    view.nodes.remember(child);
                    let found = Self::entry_of(&mounted, &mut view, child, attributes);
                    let pushed = sink.push_plus(&found, attributes.ino, next, kind, &entry.name);
                    if !pushed {
                        view.nodes.forget(child, 1);
                    }
                    pushed
                }
                None => sink.push_plus(&none, entry.ino, next, kind, &entry.name),
            };
            if !pushed {
                break;
            }
        }
        Ok(())
    }
}

/// The `DT_*` value of a kind.
fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
