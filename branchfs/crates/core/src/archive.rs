//! A branch as an OCI layer: a tar archive of what it changes, written ([`export()`]) and read ([`unpack()`]).
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

/// Prefix of a whiteout's name.
const WHITEOUT: &[u8] = b".wh.";

/// Name of the file that makes its directory opaque.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Prefix of the key of a record with an extended attribute.
const XATTR: &str = "SCHILY.xattr.";

/// Size of a header and of the end mark; content is padded to a multiple.
const BLOCK_BYTES: usize = 512;

/// Longest header extension: names, and extended attributes, of which Linux takes 64 KiB a value.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

/// Names the output in errors.
const OUTPUT: &str = "the output";
