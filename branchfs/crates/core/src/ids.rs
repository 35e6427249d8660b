//! Numbers of branches and layers, and names that several modules use.

use std::ffi::OsString;

/// A branch's number; 0 is main. Never used twice.
pub type BranchId = u64;

/// The root branch.
pub const MAIN_BRANCH: BranchId = 0;

/// Number of a layer; 0 is the base.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LayerId(pub u64);

/// The name of a branch in the root of the mount.
pub fn directory_name(branch: &str) -> OsString {
    let mut name = OsString::from("@");
    name.push(branch);
    name
}

/// The scratch directory in the store. The driver's probe uses the same one later. The next mount removes what a killed
/// daemon left in it.
pub const SCRATCH: &str = "probe";
