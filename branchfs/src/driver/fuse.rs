//! The driver that adds nothing: branches are seen through the mount's own FUSE views.

use std::path::Path;

use super::{Completion, Driver, Ready};
use crate::error::Error;
use crate::workspace::BranchId;

/// The mount itself.
#[derive(Debug)]
pub(crate) struct Fuse;

impl Driver for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn is_for(&self, _is_by_kernel: Option<bool>) -> bool {
        false
    }

    fn presents(&self, _branch: BranchId) -> bool {
        true
    }

    fn begin(&self) {}

    fn take_ready(&self, _layer: &Path) -> Option<Ready> {
        None
    }

    fn attach(&self, _branch: BranchId, _name: &str, _ready: Option<Ready>) -> Result<(), Error> {
        Ok(())
    }

    fn settle(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn freeze(&self, _branch: BranchId, _completion: Completion) -> Result<(), Error> {
        Ok(())
    }

    fn thaw(&self, _branch: BranchId) -> Result<(), Error> {
        Ok(())
    }

    fn frozen(&self) -> Vec<BranchId> {
        Vec::new()
    }

    fn detach(&self, _branch: BranchId) {}

    fn release(&self, then: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        then()
    }

    fn end(&self) {}
}
