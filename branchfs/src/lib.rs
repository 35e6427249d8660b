//! BranchFS: copy-on-write branches over an ordinary directory.
//!
//! `daemon` runs a mount; it holds a `workspace` (branches, their records and verbs), which shows its branches through
//! `filesystem` (the kernel's requests, led to the `view` of one branch over its `layer`s) and commits them by `commit`.

mod archive;
mod check;
mod commit;
mod content;
mod control;
mod control_files;
mod daemon;
mod descriptors;
mod difference;
mod driver;
mod error;
#[cfg(test)]
mod faults;
mod filesystem;
mod guard;
mod injected_panics;
mod layer;
mod log;
mod no_follow;
mod overlay;
mod partial;
mod peer;
mod quota;
mod scheduling;
mod seen;
mod selection;
mod sys;
mod tree;
mod view;
mod workspace;

pub use check::{Damage, check};
pub use daemon::{BACKGROUND, Options, announce, control_socket, run, start, stop};
pub use driver::Choice;
pub use error::Error;
pub use guard::{RecoverOptions, recover, recover_after_death};
pub use log::{LogLevel, open_log};
pub use workspace::{HISTORY_COMMITS_DEFAULT, Policy};
