//! Keeps files of a branch from being opened for writing while a commit or a fork waits for those that are open.
//!
//! The kernel makes an overlayfs read-only only while no file of it is open for writing. It has no call that first refuses
//! new opens and then waits, because overlayfs cannot be frozen (`FIFREEZE`). Here read-only mounts refuse new opens: an
//! open for writing through them fails before it counts as a writer.
//!
//! - One over the branch, for all that find it by its path.
//! - One over each file that is written, for processes that have their working directory, or another open directory, in the
//!   branch. The search for these files is repeated: each search finds some of the files that are opened and closed all
//!   the time, so that a process that opens the same names repeatedly is stopped in the end.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use branchfs_core::error::{Context, Error};
use branchfs_core::overlayfs_mount::ReadOnlyCover;
use branchfs_core::overlayfs_upper::open_directory;

use super::proc_fds;

/// How long one search through a layer takes at most.
const SEARCH_MAX: Duration = Duration::from_millis(100);

/// The pause between two searches, in which the files that are open may drain.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// The read-only mounts over one branch and its files.
pub(super) struct Covers {
    root: OwnedFd,
    mounts: Vec<ReadOnlyCover>,
    searched: Option<Instant>,
}

impl Covers {
    /// Covers the branch that is mounted at `directory`.
    pub(super) fn new(directory: &Path) -> Result<Self, Error> {
        let root = open_directory(directory)?;
        let cover = ReadOnlyCover::new(root.as_fd()).at(directory)?;
        Ok(Self { root, mounts: vec![cover], searched: None })
    }

    /// Covers files of the layer in `layer` that are open for writing, if the last search is a while ago. Returns whether
    /// it found one that was not covered.
    pub(super) fn cover_written(&mut self, layer: &Path) -> bool {
        if self.searched.is_some_and(|searched| searched.elapsed() < SEARCH_PAUSE) {
            return false;
        }
        let mut paths = proc_fds::written_in(&layer.join("upper"), Instant::now() + SEARCH_MAX);
        paths.extend(proc_fds::blocking(self.root.as_fd()).into_iter().map(|open| open.path));
        let before = self.mounts.len();
        for path in paths {
            match ReadOnlyCover::over_file(self.root.as_fd(), &path) {
                Ok(cover) => self.mounts.push(cover),
                Err(Errno::XDEV | Errno::NOENT | Errno::NOTDIR) => {} // covered, or gone
                Err(error) => tracing::warn!("{} cannot be covered: {error}", path.display()),
            }
        }
        self.searched = Some(Instant::now());
        self.mounts.len() > before
    }
}
