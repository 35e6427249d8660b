//! What a change costs where the branch has a disk limit ([`crate::quota`]). Without one all of this is nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Statx};

use super::copy_up::Content;
use super::{NodeIndex, NodeLocation, View};
use crate::layer::Layer;
use crate::lazy_copy_up::PartialCopy;
use crate::quota::{FileAccount, NameCharge, PendingRemoval};
use crate::rooted_dir::{Result, Tree};

/// What the copy of an object was charged in advance.
#[must_use]
pub(super) struct Copying<'a> {
    name: Option<NameCharge<'a>>,
    file_use: Option<Arc<FileAccount>>,
}

impl<'a> Copying<'a> {
    /// Takes what a copy of this object will take.
    pub(super) fn expect(top: &'a Layer, stat: &Statx, content: Content) -> Result<Self> {
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
    pub(super) fn made(self, top: &Layer, tree: &Tree, path: &Path, ino: u64) -> Result<()> {
        if let Some(name) = self.name {
            name.keep();
        }
        if let (Some(file_use), Some(ledger)) = (self.file_use, top.ledger()) {
            file_use.reopened(tree.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?.as_fd());
            ledger.enter(ino, file_use);
        }
        Ok(())
    }
}

/// What copying the content of an object takes: holes are not copied.
fn copied_bytes(stat: &Statx, content: Content) -> u64 {
    const STAT_BLOCK_BYTES: u64 = 512;
    match content {
        Content::Keep => (stat.stx_blocks * STAT_BLOCK_BYTES).min(stat.stx_size),
        Content::Drop => 0,
    }
}

/// Takes what one more name costs; kept once the name is there.
pub(super) fn charge_name(top: &Layer, kind: FileType) -> Result<Option<NameCharge<'_>>> {
    top.ledger().map(|ledger| ledger.charge_name(kind)).transpose()
}

/// The name that was charged is there.
pub(super) fn keep(charge: Option<NameCharge<'_>>) {
    if let Some(charge) = charge {
        charge.keep();
    }
}

/// A name that is there whatever it costs: a lookup made it.
pub(super) fn count_name(top: &Layer, kind: FileType) {
    if let Some(ledger) = top.ledger() {
        ledger.count_name(kind);
    }
}

/// What is about to lose the name `path` of the top layer.
pub(super) fn pending_removal(top: &Layer, path: &Path) -> Result<Option<PendingRemoval>> {
    top.ledger().map_or(Ok(None), |ledger| ledger.pending_removal(&top.tree, path))
}

/// It has lost it.
pub(super) fn left(top: &Layer, leaving: Option<&PendingRemoval>) {
    if let (Some(ledger), Some(leaving)) = (top.ledger(), leaving) {
        ledger.left(leaving);
    }
}

impl View {
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
            // Whoever has it open keeps its account; a file that never had a name gets one.
            NodeLocation::Orphan => {
                let known = node.handles.iter().find_map(|handle| self.handles.file_use(*handle));
                Ok(Some(known.unwrap_or_else(|| ledger.new_file())))
            }
            NodeLocation::Lower(_) | NodeLocation::Directory { .. } => Ok(None),
        }
    }

    /// Adds the handle of a file that was opened or made.
    pub(crate) fn add_handle(
        &mut self,
        index: NodeIndex,
        file: OwnedFd,
        writable: bool,
        partial: Option<Arc<PartialCopy>>,
    ) -> Result<u64> {
        let file_use = self.file_use(index)?;
        if let Some(file_use) = file_use.as_ref().filter(|_| writable) {
            file_use.reopened(file.as_fd());
        }
        let handle = self.handles.add(index, file, writable, partial, file_use);
        self.nodes.get_mut(index)?.handles.push(handle);
        Ok(handle)
    }

    /// Gives a file of the top layer another size.
    pub(super) fn resize(&self, index: NodeIndex, file: &OwnedFd, size: u64) -> Result<()> {
        let partial = self.partial_of(index)?;
        let change = || match &partial {
            Some(partial) => partial.resize(size),
            None => rustix::fs::ftruncate(file, size),
        };
        match self.file_use(index)? {
            Some(file_use) => file_use.resize(file.as_fd(), size, change),
            None => change(),
        }
    }
}
