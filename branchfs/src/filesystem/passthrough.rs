//! Files that the kernel reads and writes in our stead (FUSE passthrough).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use super::{MAIN, MountedBranch};
use branchfs_core::vfs::BackingFiles;
use branchfs_fuse::Capabilities;

/// Passthrough of one mount.
#[derive(Default)]
pub(crate) struct Passthrough {
    backing_files: OnceLock<Arc<dyn BackingFiles>>,
    /// Why it is not used; empty if it is used. Known after INIT.
    reason: OnceLock<String>,
    /// A file of the store, to try it with.
    probe: OnceLock<OwnedFd>,
}

impl Passthrough {
    pub(super) fn connect(&self, backing_files: Arc<dyn BackingFiles>) {
        let _ = self.backing_files.set(backing_files); // set once, at start
    }

    /// What INIT will try passthrough out with: a file on the file system of the layers. Without one it stays off.
    pub(crate) fn offer(&self, probe: OwnedFd) {
        let _ = self.probe.set(probe); // set once, at start
    }

    /// Why passthrough is not used; empty if it is used.
    pub(crate) fn reason(&self) -> &str {
        self.reason.get().map_or("the mount is not ready yet", String::as_str)
    }

    /// Finds out whether it can be used.
    pub(super) fn init(&self, capabilities: &Capabilities) {
        let _ = self.reason.set(self.probed(capabilities)); // INIT comes once
    }

    fn probed(&self, capabilities: &Capabilities) -> String {
        let (Some(probe), Some(kernel)) = (self.probe.get(), self.backing_files.get()) else {
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
        let is_on = mounted.slot != MAIN && self.reason.get().is_some_and(String::is_empty);
        self.backing_files.get().filter(|_| is_on)
    }
}
