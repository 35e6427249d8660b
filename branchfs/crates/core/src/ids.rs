//! Numbers of branches and layers, and names that several modules use.

use std::ffi::OsString;

/// A branch's number; 0 is main. Never used twice.
pub type BranchId = u64;

/// The root branch.
pub const MAIN_BRANCH: BranchId = 0;

/// Number of a layer; 0 is the base.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LayerId(pub u64);

/// A name as it is shown in the mount's root.
pub fn directory_name(branch: &str) -> OsString {
    let mut name = OsString::from("@");
    name.push(branch);
    name
}

/// The scratch directory in the store. The driver's probe, which comes later, has it too: what a kill leaves of either is
/// removed by the next mount.
pub const SCRATCH: &str = "probe";
