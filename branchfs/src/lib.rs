//! The daemon and the command of BranchFS: copy-on-write branches over an ordinary directory.
//!
//! `daemon` runs a mount. It shows the branches of a workspace ([`branchfs_core`]) through `filesystem`, which speaks FUSE
//! ([`branchfs_fuse`]), and through a `driver`; `control` answers requests of clients ([`protocol`]).

mod control;
mod control_files;
mod daemon;
mod driver;
mod filesystem;
#[cfg(test)]
mod folding_tests;
mod guard;
mod log;
pub mod protocol;
mod sys;

pub use branchfs_core::error::{Error, ErrorKind, with_causes};
pub use branchfs_core::fsck::{Damage, check};
pub use branchfs_core::workspace::{HISTORY_COMMITS_DEFAULT, Policy};
pub use daemon::{BACKGROUND, Options, control_socket, detach_and_notify, run, start, stop};
pub use driver::DriverKind;
pub use guard::{RecoverOptions, recover, recover_after_death};
pub use log::{LogLevel, open_log};
