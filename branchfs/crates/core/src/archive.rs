//! A branch as an OCI layer: a tar archive of what it changes, written ([`export`]) and read ([`import`]).
//!
//! | in the archive | meaning |
//! |---|---|
//! | a member | the object, whole, in place of whatever the parent has; a directory merges with the parent's |
//! | `.wh.NAME`, an empty file | NAME is gone |
//! | `.wh..wh..opq` | nothing of the parent shows through in this directory |
//!
//! Times in nanoseconds, long names and extended attributes are PAX records (`mtime`, `path`, `linkpath`,
//! `SCHILY.xattr.*`), as GNU tar, bsdtar and the container engines read them. Access times are left out: reading changes
//! them, and two exports of a branch are the same bytes.
//!
//! Files with holes are in GNU tar's format for sparse files ([`sparse`]).
//!
//! A record of what it was made against is in front ([`against`]).
//!
//! The library `tar` knows the headers. Members, and what extends a header, are read here, with limits, for an archive may
//! come from anywhere.

mod against;
mod export;
mod sparse;
mod unpack;

pub use export::export;
pub use unpack::{OwnershipPolicy, Unpacked, unpack};

/// Begins the name of a whiteout.
const WHITEOUT: &[u8] = b".wh.";

/// Makes its directory opaque.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Begins a record with an extended attribute.
const XATTR: &str = "SCHILY.xattr.";

/// Of a header, of the end mark, and what content is filled up to.
const BLOCK_BYTES: usize = 512;

/// Longest header extension: names, and extended attributes, of which Linux takes 64 KiB a value.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

/// What errors name where the archive is written to.
const OUTPUT: &str = "the output";
