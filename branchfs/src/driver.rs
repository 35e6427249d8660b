//! What presents a branch as a directory: the mount's own FUSE view, or a kernel overlayfs mounted over it.
//!
//! The FUSE view of a branch is always there, at `MOUNTPOINT/@name`; a driver may cover it with something faster over the
//! same layer. So a driver only ever speeds up what works without it, and store, layers, records and commits are one
//! for all. A driver is told of a branch's life by the workspace, of each branch by one thread at a time, which never holds
//! the filesystem's gate: paths below the mountpoint are answered by our own request threads.

mod fuse;
mod kernel_layer;
mod kernel_mount;
mod mount_table;
mod open_files;
mod overlay;
mod spares;

use std::path::Path;

use crate::error::Error;
use crate::workspace::BranchId;

pub(crate) use fuse::Fuse;
pub(crate) use kernel_layer::{drop_index, is_by_kernel, make_plain, seen, settle_alone};
pub(crate) use mount_table::{clear_dead, covers, is_in_mount, is_root_of_mount, users_elsewhere};
pub(crate) use overlay::Overlay;
#[cfg(test)]
pub(crate) use overlay::write_for_tests;

/// Which driver is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Choice {
    /// The fastest that has full semantics here
    Auto,
    /// The kernel's FUSE
    Fuse,
    /// The kernel's overlayfs
    Overlay,
}

/// How far a branch's layer has to be brought into the form that other readers than the kernel know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    /// As a commit needs it: attributes alone may stand for a file of the base under the same name.
    ForCommit,
    /// As the FUSE view of a nested branch needs it: every file has its content.
    Whole,
}

/// A way to present branches.
pub(crate) trait Driver: Send + Sync {
    /// Its word on the command line.
    fn name(&self) -> &'static str;

    /// Whether this driver presents a branch that was made by `is_by_kernel` or is new (`None`).
    fn is_for(&self, is_by_kernel: Option<bool>) -> bool;

    /// Whether it presents this branch now.
    fn presents(&self, branch: BranchId) -> bool;

    /// Begins to make ahead what branches to come need.
    fn begin(&self);

    /// Makes something that was made ahead the layer in `layer`, if there is anything: it has changed nothing yet.
    fn take_ready(&self, layer: &Path) -> Option<Ready>;

    /// Presents the branch, whose layer has its number, at its directory: with what is ready, or with what is made now.
    fn attach(&self, branch: BranchId, name: &str, ready: Option<Ready>) -> Result<(), Error>;

    /// Brings a branch's layer into a form that others can read, while it may go on being written.
    fn settle(&self, branch: BranchId) -> Result<(), Error>;

    /// Stops all writing in a branch and brings its layer into a form that others can read. Branches that this driver
    /// does not present are not its business, here and below.
    ///
    /// # Errors
    /// `Busy` where files stay open for writing; the branch goes on as before then.
    fn freeze(&self, branch: BranchId, completion: Completion) -> Result<(), Error>;

    /// Lets writing go on.
    fn thaw(&self, branch: BranchId) -> Result<(), Error>;

    /// The branches that are frozen.
    fn frozen(&self) -> Vec<BranchId>;

    /// Uncovers a branch's directory. Whoever is inside keeps what he has open; no path leads there any more.
    fn detach(&self, branch: BranchId);

    /// Uncovers all branches, if none is in use, and does something; where that fails, all is as before.
    ///
    /// # Errors
    /// `InUse`, and those of `then`.
    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error>;

    /// Takes out of the store again what was made ahead: the mount is over.
    fn end(&self);
}

/// What a branch is presented with, made before there was the branch.
#[derive(Debug)]
pub(crate) struct Ready(kernel_mount::KernelMount);

/// A driver, and why it is not the other one.
pub(crate) struct Chosen {
    pub(crate) driver: Box<dyn Driver>,
    pub(crate) why_not: String,
}

/// What speaks against the overlay driver before anything is tried.
pub(crate) struct Circumstances {
    pub(crate) has_first_winner: bool,
    pub(crate) has_control_files: bool,
    pub(crate) is_store_elsewhere: bool,
}

/// Chooses the driver of a mount that is about to be made at `mountpoint`, an ordinary directory still.
///
/// # Errors
/// The overlay driver was asked for and cannot be had.
pub(crate) fn choose(
    choice: Choice,
    circumstances: &Circumstances,
    (base, store, mountpoint): (&Path, &Path, &Path),
) -> Result<Chosen, Error> {
    let fuse = |why_not: String| Chosen { driver: Box::new(Fuse), why_not };
    if choice == Choice::Fuse {
        return Ok(fuse("fuse was asked for".to_owned()));
    }
    let against = if !circumstances.has_first_winner {
        Err("it serves the policy first-winner alone".to_owned())
    } else if circumstances.is_store_elsewhere {
        Err("the store is not on the base's file system".to_owned())
    } else if circumstances.has_control_files {
        Err("its branches cannot show control files".to_owned())
    } else {
        overlay::probe(base, store, mountpoint)
    };
    match against {
        Ok(()) => {
            let driver = Box::new(Overlay::new(base, store, mountpoint));
            Ok(Chosen { driver, why_not: "overlay has its full semantics here".to_owned() })
        }
        Err(reason) if choice == Choice::Overlay => Err(Error::Unsupported(format!(
            "the overlay driver cannot be used here: {reason}; --driver fuse works without it"
        ))),
        Err(reason) => Ok(fuse(reason)),
    }
}
