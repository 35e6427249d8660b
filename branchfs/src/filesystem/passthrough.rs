//! Files that the kernel reads and writes in our stead (FUSE passthrough).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::{BranchFilesystem, MAIN, MountedBranch};
use branchfs_core::vfs::BackingFiles;
use branchfs_fuse::Capabilities;

impl BranchFilesystem {
    /// What INIT will try passthrough out with: a file on the file system of the layers. Without one it stays off.
    pub(crate) fn offer_passthrough(&self, probe: OwnedFd) {
        let _ = self.probe.set(probe); // set once, at start
    }

    /// Why passthrough is not used; empty if it is used.
    pub(crate) fn passthrough(&self) -> &str {
        self.passthrough.get().map_or("the mount is not ready yet", String::as_str)
    }

    pub(super) fn try_passthrough(&self, capabilities: &Capabilities) -> String {
        let (Some(probe), Some(kernel)) = (self.probe.get(), self.kernel.get()) else {
            return "switched off".to_owned();
        };
        if !capabilities.passthrough {
            return "the kernel has no FUSE passthrough (Linux 6.9)".to_owned();
        }
        match kernel.open_backing(probe.as_fd()) {
            Ok(backing) => {
                kernel.close_backing(backing);
                String::new()
            }
            Err(Errno::PERM) => "it takes CAP_SYS_ADMIN".to_owned(),
            Err(Errno::LOOP) => {
                "the base's file system already stacks on too many others".to_owned()
            }
            Err(error) => format!("the kernel refuses the base's files: {error}"),
        }
    }

    /// The notifier that registers backing files of a branch. Main has none: freezing it must reach open files, and
    /// other programs change the base.
    pub(super) fn backer(&self, mounted: &MountedBranch) -> Option<&Arc<dyn BackingFiles>> {
        let is_on = mounted.slot != MAIN && self.passthrough.get().is_some_and(String::is_empty);
        self.backing_files.get().filter(|_| is_on)
    }
}
