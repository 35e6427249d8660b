//! Who is writing in a branch: waited for, and refused, before it is committed or forked.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Branch, Selector, Workspace};
use crate::error::{Context, Error};
use crate::filesystem::{Mounted, Slot};
use crate::view::View;

/// How long a commit waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Keeps a branch from being changed as long as it lives.
pub(super) struct Frozen(Arc<Mounted>);

impl Frozen {
    pub(super) fn new(mounted: Arc<Mounted>) -> Self {
        mounted.freeze();
        Self(mounted)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

impl Workspace {
    /// Closing a file is told to us after the caller goes on: gives it a moment, in which other verbs go on. The branch is
    /// frozen from then on until the guard is dropped.
    pub(super) fn await_writers(&self, selector: &Selector) -> Result<Option<Frozen>, Error> {
        self.await_none_of(selector, View::written)
    }

    /// The same before a fork, for those that the kernel serves by itself.
    pub(super) fn await_kernel_writers(
        &self,
        selector: &Selector,
    ) -> Result<Option<Frozen>, Error> {
        self.await_none_of(selector, View::written_by_kernel)
    }

    fn await_none_of(
        &self,
        selector: &Selector,
        files: impl Fn(&mut View) -> Vec<PathBuf>,
    ) -> Result<Option<Frozen>, Error> {
        let branches = self.lock();
        let Some(branch) = selector.find(&branches)?.filter(|branch| !branch.record.is_stale)
        else {
            return Ok(None);
        };
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        drop(branches);
        let frozen = Frozen::new(mounted);
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        while Instant::now() < deadline && !files(&mut frozen.0.lock_as_it_is()).is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Some(frozen))
    }

    pub(super) fn refuse_writers(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let paths = mounted.lock_as_it_is().written();
        if paths.is_empty() {
            return Ok(());
        }
        Err(Error::Busy { name: branch.record.name.clone(), paths })
    }

    /// Freezes a branch that is about to be forked. What the kernel writes by itself no freezing stops: it must be
    /// closed, for which [`Self::await_kernel_writers`] has given time.
    pub(super) fn freeze_for_fork(&self, slot: Slot) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        mounted.freeze();
        let paths = mounted.lock_as_it_is().written_by_kernel();
        if paths.is_empty() {
            return Ok(());
        }
        mounted.thaw();
        Err(Error::Written { name: mounted.name.to_string_lossy().into_owned(), paths })
    }
}
