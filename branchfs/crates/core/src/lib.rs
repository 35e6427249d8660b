//! Branches on disk: workspaces, layers, views, commits and their recovery.
//!
//! A [`workspace`] holds the branches of one base, their records and the verbs on them. Its [`mount`] holds the [`view`] of
//! each branch: a merged tree over [`layer`]s. `transaction` applies a branch to the base, by a journal. The crate has no sockets,
//! no command line and no `/dev/fuse`: a program shows the views to the kernel, and may present branches by a [`driver`].

pub mod archive;
pub mod credentials;
pub mod descriptors;
pub mod diff;
#[cfg(any(test, feature = "testing"))]
pub mod documents;
pub mod driver;
pub mod error;
pub mod fail_stop;
#[cfg(test)]
mod faults;
pub mod file_io;
pub mod fsck;
pub mod ids;
pub mod injected_panics;
pub mod layer;
mod layer_stack;
pub mod lazy_copy_up;
pub mod mount;
pub mod mount_table;
pub mod no_follow;
pub mod object_copy;
pub mod overlay;
pub mod overlayfs_mount;
pub mod overlayfs_upper;
pub mod ownership;
pub mod path_filter;
pub mod quota;
pub mod rooted_dir;
pub mod scheduling;
pub mod sys;
pub mod transaction;
pub mod vfs;
pub mod view;
pub mod workspace;
pub mod write_set;
