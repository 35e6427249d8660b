//! The charges of a change in a branch with a disk limit ([`crate::quota`]). Does nothing without a limit.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Statx};

use super::CopyData;
use super::{MergedTree, NodeIndex, NodeLocation, View};
use crate::layer::Layer;
use crate::lazy_copy_up::PartialCopy;
use crate::quota::{FileAccount, NameCharge, PendingRemoval};
use crate::rooted_dir::{Result, RootedDir};

/// The charge of a copy, made in advance.
#[must_use]
pub(super) struct Copying<'a> {
    name: Option<NameCharge<'a>>,
    file_use: Option<Arc<FileAccount>>,
}

impl<'a> Copying<'a> {
    /// Charges the copy of this object in advance.
    pub(super) fn charge(top: &'a Layer, stat: &Statx, content: CopyData) -> Result<Self> {
        let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
        let Some(ledger) = top.ledger() else {
            return Ok(Self { name: None, file_use: None });
        };
        let name = ledger.charge_name(kind)?;
        let file_use = match kind {
            FileType::RegularFile => Some(ledger.new_copy(copied_bytes(stat, content))?),
            _ => None,
        };
        Ok(Self { name: Some(name), file_use })
    }

    /// The copy is at `path` of `tree`, as inode `ino`.
    pub(super) fn made(self, top: &Layer, tree: &RootedDir, path: &Path, ino: u64) -> Result<()> {
        if let Some(name) = self.name {
            name.keep();
        }
        if let (Some(file_use), Some(ledger)) = (self.file_use, top.ledger()) {
            file_use.reopened(tree.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?.as_fd());
            ledger.register(ino, file_use);
        }
        Ok(())
    }
}

/// The charge for copying the content of an object: holes are not copied.
fn copied_bytes(stat: &Statx, content: CopyData) -> u64 {
    const STAT_BLOCK_BYTES: u64 = 512;
    match content {
        CopyData::Yes => (stat.stx_blocks * STAT_BLOCK_BYTES).min(stat.stx_size),
        CopyData::No => 0,
    }
}

/// Charges one more name; kept once the name exists.
pub(super) fn charge_name(top: &Layer, kind: FileType) -> Result<Option<NameCharge<'_>>> {
    top.ledger().map(|ledger| ledger.charge_name(kind)).transpose()
}

/// The charged name was created.
pub(super) fn keep(charge: Option<NameCharge<'_>>) {
    if let Some(charge) = charge {
        charge.keep();
    }
}

/// Charges a name that a lookup added, even above the limit.
pub(super) fn count_name(top: &Layer, kind: FileType) {
    if let Some(ledger) = top.ledger() {
        ledger.count_name(kind);
    }
}

/// The object that is about to lose the name `path` of the top layer.
pub(super) fn pending_removal(top: &Layer, path: &Path) -> Result<Option<PendingRemoval>> {
    top.ledger().map_or(Ok(None), |ledger| ledger.pending_removal(&top.tree, path))
}

/// Returns the charge of the removed object.
pub(super) fn left(top: &Layer, leaving: Option<&PendingRemoval>) {
    if let (Some(ledger), Some(leaving)) = (top.ledger(), leaving) {
        ledger.left(leaving);
    }
}

impl MergedTree {
    /// The account of a file of the top layer.
    pub(crate) fn file_use(&self, index: NodeIndex) -> Result<Option<Arc<FileAccount>>> {
        let Some(ledger) = self.layers[0].ledger() else {
            return Ok(None);
        };
        let node = self.nodes.get(index)?;
        match node.place {
            NodeLocation::Upper => {
                let at = self.locate(index)?;
                Ok(Some(ledger.file(at.layer.tree.stat(&at.path)?.stx_ino)))
            }
            // Open files keep its account; a file that never had a name gets one.
            NodeLocation::Orphan => {
                let known = node.handles.iter().find_map(|handle| self.handles.file_use(*handle));
                Ok(Some(known.unwrap_or_else(|| ledger.new_file())))
            }
            NodeLocation::Lower(_) | NodeLocation::Directory { .. } => Ok(None),
        }
    }
}

impl View {
    /// Adds the handle of a file that was opened or created.
    pub(crate) fn add_handle(
        &mut self,
        index: NodeIndex,
        file: OwnedFd,
        writable: bool,
        partial: Option<Arc<PartialCopy>>,
    ) -> Result<u64> {
        let file_use = self.tree.file_use(index)?;
        if let Some(file_use) = file_use.as_ref().filter(|_| writable) {
            file_use.reopened(file.as_fd());
        }
        let handle = self.tree.handles.add(index, file, writable, partial, file_use);
        self.tree.nodes.get_mut(index)?.handles.push(handle);
        Ok(handle)
    }

    /// Changes the size of a file of the top layer.
    pub(super) fn resize(&self, index: NodeIndex, file: &OwnedFd, size: u64) -> Result<()> {
        let partial = self.tree.partial_of(index)?;
        let change = || match &partial {
            Some(partial) => partial.resize(size),
            None => rustix::fs::ftruncate(file, size),
        };
        match self.tree.file_use(index)? {
            Some(file_use) => file_use.resize(file.as_fd(), size, change),
            None => change(),
        }
    }
}
