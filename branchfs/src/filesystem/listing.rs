//! Directory listings.
//!
//! The kernel opens and closes directories without a request and caches every listing that was read to its end. A
//! branch changes only through the kernel; other changes of it invalidate the cache ([`branchfs_core::mount`]). Other
//! programs may change main's directories at any time, so the kernel caches none of those.

use std::time::Duration;

use branchfs_fuse::Entry;

/// An entry of a listing without attributes.
pub(super) const NAME_ALONE: Entry = Entry {
    node: None,
    generation: 0,
    entry_ttl: Duration::ZERO,
    attributes_ttl: Duration::ZERO,
    attributes: None,
};

/// The `DT_*` value of a kind.
pub(super) fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
