//! How the driver follows what happens to branches: the workspace decides, [`crate::driver`] presents.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::{Branch, BranchId, MAIN_BRANCH, Workspace, children_of};
use crate::driver::{Driver, Fuse};
use crate::error::Error;
use crate::overlayfs_upper::{self, Completion};
use crate::quota::Quota;
use crate::transaction::OwnCtimeChanges;
use crate::view::Restacking;
use crate::write_set::{Fingerprint, Precondition};

/// The driver of the mount.
#[derive(Default)]
pub(super) struct Drivers {
    driver: OnceLock<Box<dyn Driver>>,
    /// Branches that neither the driver nor the FUSE view can show in this mount, and why.
    unreadable: OnceLock<BTreeMap<BranchId, String>>,
}

impl Drivers {
    /// Sets the driver, once, at start.
    pub(super) fn set(&self, driver: Box<dyn Driver>) {
        let _ = self.driver.set(driver);
    }

    /// The driver; the FUSE view alone until there is one.
    pub(super) fn current(&self) -> &dyn Driver {
        self.driver.get().map_or(&Fuse, AsRef::as_ref)
    }

    /// Refuses a branch that [`Workspace::present`] could not show.
    ///
    /// # Errors
    /// `Unsupported`.
    pub(super) fn refuse_unreadable(&self, branch: BranchId) -> Result<(), Error> {
        match self.unreadable.get().and_then(|branches| branches.get(&branch)) {
            Some(message) => Err(Error::Unsupported(message.clone())),
            None => Ok(()),
        }
    }

    /// What presents a branch.
    pub(super) fn driver_of(&self, branch: BranchId) -> &'static str {
        if self.current().presents(branch) { self.current().name() } else { Fuse.name() }
    }

    /// Only a branch of main with a single layer can be a kernel mount, and only the base below it: the kernel cannot mount
    /// a snapshot layer, whose files are those of the base.
    pub(super) fn serves(&self, branch: &Branch, is_by_kernel: bool) -> bool {
        branch.record.layers == [branch.record.id]
            && branch.record.below.is_empty()
            && self.may_serve(branch.record.parent, branch.quota.as_ref())
            && self.current().is_for(Some(is_by_kernel))
    }

    /// Whether a new branch of this parent would be one.
    pub(super) fn would_serve(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        self.may_serve(parent, quota) && self.current().is_for(None)
    }

    fn may_serve(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        parent == MAIN_BRANCH && quota.is_none() // nobody counts what the kernel writes
    }

    /// Stops all writing in a branch that is about to be forked.
    pub(super) fn freeze_parent(&self, parent: BranchId) -> Result<(), Error> {
        match self.current().freeze(parent, Completion::Whole) {
            Err(Error::Busy { name, paths, users }) => Err(Error::Written { name, paths, users }),
            other => other,
        }
    }
}

impl Workspace {
    /// What presents a branch.
    pub fn driver_of(&self, branch: BranchId) -> &'static str {
        self.driver.driver_of(branch)
    }

    /// Lets `driver` present all branches there are and will be. A branch that it cannot present is left to the FUSE view.
    /// Where that cannot read the branch, files of the branch answer `ESTALE` and verbs on it are refused until the next
    /// mount. Returns messages about these.
    ///
    /// # Errors
    /// `Io`; `Unsupported` where processes of an earlier mount use a branch.
    pub fn present(&self, driver: Box<dyn Driver>) -> Result<Vec<String>, Error> {
        let branches = self.table.lock();
        self.driver.set(driver);
        let (mut messages, mut unreadable) = (Vec::new(), BTreeMap::new());
        for branch in branches.values().filter(|branch| !branch.record.is_stale) {
            let (id, name) = (branch.record.id, &branch.record.name);
            let is_by_kernel = self.store.is_written_by_overlayfs(branch)?;
            let refused = match self.driver.serves(branch, is_by_kernel) {
                true => match self.driver.current().attach(id, name, None) {
                    Ok(()) => continue,
                    Err(error) if is_refusal(&error) => Some(error),
                    Err(error) => return Err(error),
                },
                false if is_by_kernel => None,
                false => continue,
            };
            match (hand_over_to_fuse(self, branch), refused) {
                (Ok(()), None) => {}
                (Ok(()), Some(error)) => messages.push(format!(
                    "branch {name} is presented by fuse, because the kernel's overlayfs refuses its layer: {error}"
                )),
                (Err(Error::Unsupported(message)), _) => {
                    messages.push(message.clone());
                    self.table.mount.set_stale(branch.slot);
                    unreadable.insert(id, message);
                }
                (Err(error), _) => return Err(error),
            }
        }
        let _ = self.driver.unreadable.set(unreadable); // once, as the driver
        for branch in branches.values() {
            if !children_of(&branches, branch.record.id).is_empty() {
                self.driver.current().freeze(branch.record.id, Completion::Whole)?;
            }
        }
        self.driver.current().begin();
        Ok(messages)
    }

    /// Ends the mount with `unmount`, if no process uses a branch.
    ///
    /// # Errors
    /// `InUse`, and the errors of `unmount`: the mount continues.
    pub fn unmount(&self, unmount: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        let _turn = self.engine.take_turn();
        let _branches = self.table.lock(); // no branch may come or go meanwhile
        self.driver.current().release(unmount)
    }
}

/// Lets the FUSE view go on with a branch that the kernel wrote.
pub(super) fn hand_over_to_fuse(workspace: &Workspace, branch: &Branch) -> Result<(), Error> {
    let record = &branch.record;
    workspace.driver.current().detach(record.id);
    let traces = workspace.engine.traces_since(branch)?;
    let is_as_forked = |found: &Fingerprint| is_as_forked(found, record.created, &traces);
    for layer in &branch.stack {
        let directory = workspace.store.layer_path(layer.id.0);
        if record.layers.contains(&layer.id.0)
            && overlayfs_upper::is_written_by_overlayfs(&directory)?
        {
            overlayfs_upper::normalise_alone(&directory, &workspace.store.base_path, &record.name)?;
            overlayfs_upper::convert_to_fuse_layer(
                &directory,
                &workspace.store.base_path,
                &is_as_forked,
                layer,
            )?;
        }
    }
    let mounted = workspace.table.mounted(branch)?;
    mounted.lock().restack(branch.stack.clone(), Restacking::Same(None));
    Ok(())
}

/// What the branch's kernel-written layers depend on in the base.
pub(super) fn seen_by_kernel(
    workspace: &Workspace,
    branch: &Branch,
    traces: &OwnCtimeChanges,
    seen: &mut BTreeMap<PathBuf, Precondition>,
) -> Result<(), Error> {
    let is_as_forked = |found: &Fingerprint| is_as_forked(found, branch.record.created, traces);
    for layer in branch.record.layers.iter().rev().map(|layer| workspace.store.layer_path(*layer)) {
        if overlayfs_upper::is_written_by_overlayfs(&layer)? {
            let found = overlayfs_upper::seen(&layer, &workspace.store.base_path, &is_as_forked)?;
            for (path, expected) in found {
                seen.entry(path).or_insert(expected);
            }
        }
    }
    Ok(())
}

/// Whether the kernel refuses to mount a layer because of what is in it: marks of another base, a conversion that was
/// interrupted, damage.
fn is_refusal(error: &Error) -> bool {
    const REFUSALS: [i32; 4] = [libc::ESTALE, libc::ENODATA, libc::EIO, libc::EINVAL];
    matches!(error, Error::Io { source, .. } if REFUSALS.iter().any(|one| source.raw_os_error() == Some(*one)))
}

/// What our own transactions did to a ctime since the fork is no change; they leave the time of content alone.
fn is_as_forked(found: &Fingerprint, forked: i64, traces: &OwnCtimeChanges) -> bool {
    let is_ours = |ctime: i64| traces.covers(ctime, i64::MIN) && found.mtime <= forked;
    traces.same(found.ino, found.ctime).any(|ctime| ctime <= forked || is_ours(ctime))
}
