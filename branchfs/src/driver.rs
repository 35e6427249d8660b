//! Chooses the driver of a mount: the FUSE views alone, or the kernel's overlayfs mounted over them.

mod covers;
mod held_writers;
mod overlay;
mod proc_fds;

use std::path::Path;

use branchfs_core::driver::{Driver, Fuse};
use branchfs_core::error::Error;

use overlay::Overlay;

/// The argument of `--driver`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum DriverKind {
    /// The fastest that has full semantics here
    Auto,
    /// The kernel's FUSE
    Fuse,
    /// The kernel's overlayfs
    Overlay,
}

/// A driver, and why it is not the other one.
pub(crate) struct SelectedDriver {
    pub(crate) driver: Box<dyn Driver>,
    pub(crate) why_not: String,
}

/// What speaks against the overlay driver before anything is tried.
pub(crate) struct Constraints {
    pub(crate) has_first_winner: bool,
    pub(crate) has_control_files: bool,
    pub(crate) is_store_elsewhere: bool,
}

/// Chooses the driver of a mount that is about to be made at `mountpoint`, an ordinary directory still.
///
/// # Errors
/// The overlay driver was asked for and cannot be had.
pub(crate) fn choose(
    choice: DriverKind,
    circumstances: &Constraints,
    (base, store, mountpoint): (&Path, &Path, &Path),
) -> Result<SelectedDriver, Error> {
    let fuse = |why_not: String| SelectedDriver { driver: Box::new(Fuse), why_not };
    if choice == DriverKind::Fuse {
        return Ok(fuse("fuse was asked for".to_owned()));
    }
    let against = if !circumstances.has_first_winner {
        Err("it supports only the policy first-winner".to_owned())
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
            Ok(SelectedDriver { driver, why_not: "overlay has its full semantics here".to_owned() })
        }
        Err(reason) if choice == DriverKind::Overlay => Err(Error::Unsupported(format!(
            "the overlay driver cannot be used here: {reason}; --driver fuse works without it"
        ))),
        Err(reason) => Ok(fuse(reason)),
    }
}
