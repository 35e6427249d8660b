//! The kernel's FUSE protocol over `/dev/fuse`: our own thin layer.
//!
//! No released crate lets a node's number differ from the inode number it shows, which copy-up and one lower file seen
//! through many branches need; the protocol itself is small. Sources: fuse(4), and the kernel's `include/uapi/linux/fuse.h`
//! (protocol 7.31 to 7.45).
//!
//! [`handler`] is the interface to the filesystem, [`session`] reads requests and sends answers, [`notifier`] tells what
//! nobody asked, [`wire`] is the byte layout, [`mount`] makes and ends the mount.

pub(crate) mod handler;
mod mount;
mod notifier;
mod requests;
mod session;
mod wire;

pub(crate) use mount::unmount;
pub(crate) use session::Session;
