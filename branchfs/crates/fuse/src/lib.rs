//! The Linux FUSE protocol over `/dev/fuse`, for filesystems that need what other crates do not offer.
//!
//! - The node id of an object and the inode number that `stat` shows are independent. A copy-on-write filesystem needs
//!   that: an object keeps its inode number when it is copied up, and one lower file has a node in every branch.
//! - Passthrough (Linux 6.9): the kernel reads and writes a backing file directly.
//! - Epochs (Linux 6.16): one notification invalidates every cached name.
//!
//! Implement [`Filesystem`], mount it with [`Session::mount`] and call [`Session::serve`]. A [`KernelNotifier`] invalidates
//! what the kernel has cached. `examples/hello.rs` is a complete filesystem.
//!
//! The crate supports protocol versions 7.31 (Linux 5.4) to 7.45. Sources: fuse(4), and `include/uapi/linux/fuse.h` of the
//! kernel.

mod abi;
mod backing;
mod filesystem;
mod mount;
mod notify;
mod request_counters;
mod session;

pub use filesystem::{
    Attributes, BackingId, Caller, Capabilities, DirectorySink, Entry, FOREVER, Filesystem,
    FsResult, Handle, KernelNotifier, NodeId, OpenFlags, OpenReply, SetAttr, SetTime, Statfs, Time,
};
pub use mount::{MountError, MountOptions, unmount};
pub use session::Session;

/// The code of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
