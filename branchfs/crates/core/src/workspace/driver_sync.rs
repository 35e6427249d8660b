//! Keeps the driver in step with the branches: the workspace changes branches, [`crate::driver`] presents them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::{Branch, BranchId, MAIN_BRANCH, Workspace, children_of};
use crate::driver::{Driver, Fuse};
use crate::error::Error;
use crate::overlayfs_upper::{self, NormaliseFor};
use crate::quota::Quota;
use crate::transaction::OwnCtimeChanges;
use crate::view::LayerReplacement;
use crate::write_set::{Fingerprint, Precondition};

/// The driver of the mount, and the branches that it cannot present.
#[derive(Default)]
pub(super) struct Drivers {
    driver: OnceLock<Box<dyn Driver>>,
    /// Branches that neither the driver nor the FUSE view can present in this mount, with the reason.
    unreadable: OnceLock<BTreeMap<BranchId, String>>,
}

impl Drivers {
    /// Sets the driver, once, at start.
    pub(super) fn set(&self, driver: Box<dyn Driver>) {
        let _ = self.driver.set(driver);
    }

    /// The driver; the driver `fuse` until one is set.
    pub(super) fn current(&self) -> &dyn Driver {
        self.driver.get().map_or(&Fuse, AsRef::as_ref)
    }

    /// Refuses a branch that could not be presented.
    ///
    /// # Errors
    /// `Unsupported`.
    pub(super) fn refuse_unreadable(&self, branch: BranchId) -> Result<(), Error> {
        match self.unreadable.get().and_then(|branches| branches.get(&branch)) {
            Some(message) => Err(Error::Unsupported(message.clone())),
            None => Ok(()),
        }
    }

    /// The name of the driver that presents a branch.
    pub(super) fn driver_of(&self, branch: BranchId) -> &'static str {
        if self.current().serves(branch) { self.current().name() } else { Fuse.name() }
    }

    /// Only a branch of main with a single layer can be a kernel mount, and only over the base: the kernel cannot mount
    /// a snapshot layer, whose files are those of the base.
    pub(super) fn serves(&self, branch: &Branch, is_by_kernel: bool) -> bool {
        branch.record.layers == [branch.record.id]
            && branch.record.lower_layers.is_empty()
            && self.may_serve(branch.record.parent, branch.quota.as_ref())
            && self.current().is_for(Some(is_by_kernel))
    }

    /// Whether a new branch of this parent would be one.
    pub(super) fn would_serve(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        self.may_serve(parent, quota) && self.current().is_for(None)
    }

    fn may_serve(&self, parent: BranchId, quota: Option<&Arc<Quota>>) -> bool {
        parent == MAIN_BRANCH && quota.is_none() // writes of the kernel are not counted
    }

    /// Stops all writing in a branch that is about to be forked.
    pub(super) fn freeze_parent(&self, parent: BranchId) -> Result<(), Error> {
        match self.current().freeze(parent, NormaliseFor::Whole) {
            Err(Error::Busy { name, paths, users }) => Err(Error::Written { name, paths, users }),
            other => other,
        }
    }
}

impl Workspace {
    /// The name of the driver that presents a branch.
    pub fn driver_of(&self, branch: BranchId) -> &'static str {
        self.driver.driver_of(branch)
    }

    /// Sets the driver, which presents all present and future branches. A branch that it cannot present is left to the
    /// FUSE view. If that cannot read the branch, files of the branch return `ESTALE` and verbs on it are refused until
    /// the next mount. Returns messages about these.
    ///
    /// # Errors
    /// `Io`; `Unsupported` if processes of an earlier mount use a branch.
    pub fn attach_all(&self, driver: Box<dyn Driver>) -> Result<Vec<String>, Error> {
        let branches = self.table.lock();
        self.driver.set(driver);
        let (mut messages, mut unreadable) = (Vec::new(), BTreeMap::new());
        for branch in branches.values().filter(|branch| !branch.record.is_stale) {
            let (id, name) = (branch.record.id, &branch.record.name);
            let is_by_kernel = self.store.is_written_by_overlayfs(branch)?;
            let refused = match self.driver.serves(branch, is_by_kernel) {
                true => match self.driver.current().attach(id, name) {
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
                self.driver.current().freeze(branch.record.id, NormaliseFor::Whole)?;
            }
        }
        Ok(messages)
    }

    /// Ends the mount with `unmount`, if no process uses a branch.
    ///
    /// # Errors
    /// `InUse`, and the errors of `unmount`: the mount continues.
    pub fn unmount(&self, unmount: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        let _transaction_lock = self.engine.lock_transactions();
        let _branches = self.table.lock(); // no branch may come or go meanwhile
        self.driver.current().release(unmount)
    }
}

/// Converts a branch that overlayfs wrote, so that the FUSE view presents it. A branch that the driver has frozen must be
/// normalised whole.
pub(super) fn hand_over_to_fuse(workspace: &Workspace, branch: &Branch) -> Result<(), Error> {
    convert_for_fuse(workspace, branch, &workspace.engine.traces_since(branch)?)
}

/// The same. An object of the base whose ctime is in `own_changes` counts as unchanged since the fork.
pub(super) fn convert_for_fuse(
    workspace: &Workspace,
    branch: &Branch,
    own_changes: &OwnCtimeChanges,
) -> Result<(), Error> {
    let record = &branch.record;
    let driver = workspace.driver.current();
    // Normalised through its own mount. Another mount would be refused while a process still has files of this one open.
    let is_normalised = driver.frozen().contains(&record.id);
    driver.detach(record.id);
    let is_as_forked = |found: &Fingerprint| is_as_forked(found, record.created, own_changes);
    for layer in &branch.stack {
        let directory = workspace.store.layer_path(layer.id.0);
        if record.layers.contains(&layer.id.0)
            && overlayfs_upper::is_written_by_overlayfs(&directory)?
        {
            if !is_normalised {
                let base = &workspace.store.base_path;
                overlayfs_upper::normalise_alone(&directory, base, &record.name)?;
            }
            overlayfs_upper::convert_to_fuse_layer(
                &directory,
                &workspace.store.base_path,
                &is_as_forked,
                layer,
            )?;
        }
    }
    let mounted = workspace.table.mounted(branch)?;
    mounted.lock().tree.replace_layers(branch.stack.clone(), LayerReplacement::Same(None));
    Ok(())
}

/// The preconditions in the base of the branch's layers that overlayfs wrote.
pub(super) fn seen_by_kernel(
    workspace: &Workspace,
    branch: &Branch,
    own_changes: &OwnCtimeChanges,
    seen: &mut BTreeMap<PathBuf, Precondition>,
) -> Result<(), Error> {
    let is_as_forked =
        |found: &Fingerprint| is_as_forked(found, branch.record.created, own_changes);
    for layer in branch.record.layers.iter().rev().map(|layer| workspace.store.layer_path(*layer)) {
        if overlayfs_upper::is_written_by_overlayfs(&layer)? {
            let found =
                overlayfs_upper::preconditions(&layer, &workspace.store.base_path, &is_as_forked)?;
            for (path, expected) in found {
                seen.entry(path).or_insert(expected);
            }
        }
    }
    Ok(())
}

/// Whether the kernel refuses to mount a layer because of its content: xattrs for another base, an interrupted
/// conversion, damage.
fn is_refusal(error: &Error) -> bool {
    const REFUSALS: [i32; 4] = [libc::ESTALE, libc::ENODATA, libc::EIO, libc::EINVAL];
    matches!(error, Error::Io { source, .. } if REFUSALS.iter().any(|one| source.raw_os_error() == Some(*one)))
}

/// Whether an object is as at the fork: its ctime may have been changed by our own transactions, which do not change
/// the mtime.
fn is_as_forked(found: &Fingerprint, forked: i64, own_changes: &OwnCtimeChanges) -> bool {
    let is_ours = |ctime: i64| own_changes.contains(ctime, i64::MIN) && found.mtime <= forked;
    own_changes
        .equivalent_ctimes(found.ino, found.ctime)
        .any(|ctime| ctime <= forked || is_ours(ctime))
}
