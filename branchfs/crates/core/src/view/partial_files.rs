//! Lazy copy-up ([`crate::lazy_copy_up`]) in a view: creates partial copies and finds their lower files.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, OFlags, Statx};
use rustix::io::Errno;

use super::CopyData;
use super::open::big_file_bytes;
use super::{MergedTree, NodeIndex, NodeLocation};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::layer_stack::{LayerPath, LayerStack};
use crate::lazy_copy_up::{
    LowerFile, LowerFingerprint, OPEN_FLAGS, PartialCopy, PartialCopyIndex, Record,
};
use crate::rooted_dir::Result;
use crate::vfs::Attributes;

impl LayerStack {
    /// As above, for an object of one of the view's layers.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn partial_of_layer(
        &self,
        layer: &Arc<Layer>,
        path: &Path,
        ino: u64,
    ) -> std::result::Result<Option<Arc<PartialCopy>>, Error> {
        if layer.partial_copies().is_none_or(PartialCopyIndex::is_empty) {
            return Ok(None);
        }
        let at = LayerPath { layer: Arc::clone(layer), path: path.to_path_buf() };
        self.partial_at(&at, Some(ino)).at(path)
    }

    /// The partial copy at a path, if it is one. `ino` is its inode number if that is known.
    pub(super) fn partial_at(
        &self,
        at: &LayerPath,
        ino: Option<u64>,
    ) -> Result<Option<Arc<PartialCopy>>> {
        let Some(parts) = at.layer.partial_copies().filter(|parts| !parts.is_empty()) else {
            return Ok(None);
        };
        let ino = match ino {
            Some(ino) => ino,
            None => at.layer.tree.stat(&at.path)?.stx_ino,
        };
        if !parts.has(ino) {
            return Ok(None);
        }
        parts.get(ino, || {
            let file = at.layer.tree.open(&at.path, OPEN_FLAGS)?;
            let namespace = at.layer.namespace();
            let Some(record) = Record::read(file.as_fd(), namespace)? else {
                return Ok(None); // complete by now, or a later object with the same inode number
            };
            let original = self.original(&at.layer, &record)?;
            PartialCopy::new(file, parts.map(ino)?, &record, original, namespace).map(Some)
        })
    }

    /// Sets the block count in the attributes of a partial copy to that of a complete copy.
    pub(super) fn count_blocks(
        &self,
        attributes: &mut Attributes,
        at: &LayerPath,
        stat: &Statx,
    ) -> Result<()> {
        if FileType::from_raw_mode(attributes.mode) == FileType::RegularFile {
            if let Some(partial) = self.partial_at(at, Some(stat.stx_ino))? {
                attributes.blocks = partial.blocks()?;
            }
        }
        Ok(())
    }

    /// The lower file of the copy with `record` in `layer`: at its recorded place, or in another layer further down if
    /// a commit has moved it there.
    fn original(&self, layer: &Layer, record: &Record) -> Result<Option<LowerFile>> {
        let below = self.iter().skip_while(|other| other.id != layer.id).skip(1);
        let (then, others): (Vec<_>, Vec<_>) = below.partition(|other| other.id == record.layer);
        for candidate in then.into_iter().chain(others) {
            let file = match candidate.tree.open(&record.path, OFlags::RDONLY | OFlags::NONBLOCK) {
                Ok(file) => file,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => continue,
                Err(error) => return Err(error),
            };
            if LowerFingerprint::of(file.as_fd())? != record.fingerprint {
                continue;
            }
            let at = LayerPath { layer: Arc::clone(candidate), path: record.path.clone() };
            let partial = self.partial_at(&at, Some(record.fingerprint.ino))?;
            return LowerFile::new(file, record.fingerprint, partial);
        }
        Ok(None)
    }

    fn record_in(&self, layer: &Layer, file: &OwnedFd) -> Result<Option<Record>> {
        match layer.partial_copies() {
            Some(parts) if parts.has(rustix::fs::fstat(file)?.st_ino) => {
                Record::read(file.as_fd(), layer.namespace())
            }
            _ => Ok(None),
        }
    }

    /// Fills `copy`, an empty file of the top layer, from `source`: by sharing all blocks if the file system supports
    /// it, else as a partial copy.
    pub(super) fn begin_copy(
        &self,
        source: &LayerPath,
        stat: &Statx,
        copy: &OwnedFd,
    ) -> Result<()> {
        let top = Arc::clone(&self[0]);
        let file = source.layer.tree.open(&source.path, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let seen = LowerFingerprint::of(file.as_fd())?;
        if (seen.ino, seen.size) != (stat.stx_ino, stat.stx_size) {
            return Err(Errno::STALE); // others have put something else in its place since
        }
        let is_partial = self.record_in(&source.layer, &file)?.is_some();
        if !is_partial && rustix::fs::ioctl_ficlone(copy, &file).is_ok() {
            return Ok(());
        }
        rustix::fs::ftruncate(copy, seen.size)?;
        let (layer, path) = (source.layer.id, source.path.clone());
        let record = Record { has_map: true, limit: seen.size, layer, path, fingerprint: seen };
        record.write(copy.as_fd(), top.namespace())?;
        top.partial_copies().ok_or(Errno::IO)?.mark(rustix::fs::fstat(copy)?.st_ino)
    }

    /// Every partial copy of the view's layers.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn partial_copies(&self) -> std::result::Result<Vec<PendingCopyUp>, Error> {
        let mut found = Vec::new();
        for layer in self.iter() {
            if layer.partial_copies().is_some_and(|parts| !parts.is_empty()) {
                self.find_partial_copies(layer, &mut found)?;
            }
        }
        Ok(found)
    }

    fn find_partial_copies(
        &self,
        layer: &Arc<Layer>,
        found: &mut Vec<PendingCopyUp>,
    ) -> std::result::Result<(), Error> {
        let Some(parts) = layer.partial_copies() else { return Ok(()) };
        let mut pending = vec![PathBuf::new()];
        while let Some(directory) = pending.pop() {
            for entry in layer.tree.list(&directory).at(&directory)? {
                let path = directory.join(&entry.name);
                match entry.kind {
                    FileType::Directory => pending.push(path),
                    FileType::RegularFile if parts.has(entry.ino) => {
                        let at = LayerPath { layer: Arc::clone(layer), path };
                        let copy = self.partial_at(&at, Some(entry.ino)).at(&at.path)?;
                        found.push(PendingCopyUp { at, ino: entry.ino, copy });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

impl MergedTree {
    /// The partial copy of a node; `None` if the object is another one, or a complete file.
    pub(crate) fn partial_of(&self, index: NodeIndex) -> Result<Option<Arc<PartialCopy>>> {
        let node = self.nodes.get(index)?;
        match &node.place {
            NodeLocation::Upper | NodeLocation::Lower(_) if !node.names.is_empty() => {
                self.layers.partial_at(&self.locate(index)?, None)
            }
            NodeLocation::Directory { .. } => Ok(None),
            // Without a name, it is reachable through open descriptors only.
            _ => Ok(node.handles.iter().find_map(|handle| self.handles.partial(*handle))),
        }
    }

    /// Returns whether a partial copy-up of an object pays.
    pub(super) fn is_copied_in_part(&self, stat: &Statx, content: CopyData) -> bool {
        self.copies_in_part.load(Ordering::Relaxed)
            && content == CopyData::Yes
            && FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::RegularFile
            && stat.stx_size >= big_file_bytes()
            && stat.stx_nlink == 1
            // With a disk limit the complete copy is charged, and so it is made.
            && self.layers[0].ledger().is_none()
    }
}

/// A file of a layer that was copied up in part. It can be completed without the view.
pub(crate) struct PendingCopyUp {
    at: LayerPath,
    ino: u64,
    /// `None` if the copy is complete but its marker file is left.
    copy: Option<Arc<PartialCopy>>,
}

impl PendingCopyUp {
    /// Its path in its layer.
    pub(crate) fn path(&self) -> &Path {
        &self.at.path
    }

    fn is_cut_off_in(&self, stack: &LayerStack) -> Result<bool> {
        let Some(copy) = self.copy.as_ref().filter(|copy| !copy.is_complete()) else {
            return Ok(false);
        };
        match copy.record()? {
            Some(record) => Ok(stack.original(&self.at.layer, &record)?.is_none()),
            None => Ok(false),
        }
    }

    /// Whether its lower file is known, or is the one that `find` opens for its path in the base.
    ///
    /// # Errors
    /// `Io`, and the errors of `find`.
    pub(crate) fn find_original(
        &self,
        find: impl FnOnce(&Path) -> std::result::Result<Option<OwnedFd>, Error>,
    ) -> std::result::Result<bool, Error> {
        let Some(copy) = self.copy.as_ref().filter(|copy| !copy.has_original()) else {
            return Ok(true);
        };
        let Some(record) = copy.record().at(self.path())? else { return Ok(true) };
        match find(&record.path)? {
            Some(file) => copy.read_from(file).at(self.path()),
            None => Ok(false),
        }
    }
}

/// The partial copies in the first `own` layers of a stack that have missing blocks, and whose lower file `next`, a stack with
/// the same own layers, does not have.
///
/// # Errors
/// `Io`.
pub(crate) fn partial_copies_cut_off(
    present: Vec<Arc<Layer>>,
    next: Vec<Arc<Layer>>,
    own: usize,
) -> std::result::Result<Vec<PendingCopyUp>, Error> {
    let (present, next) = (LayerStack::new(present), LayerStack::new(next));
    let mut found = Vec::new();
    for layer in &present[..own] {
        if layer.partial_copies().is_some_and(|parts| !parts.is_empty()) {
            present.find_partial_copies(layer, &mut found)?;
        }
    }
    let mut cut_off = Vec::new();
    for pending in found {
        if pending.is_cut_off_in(&next).at(pending.path())? {
            cut_off.push(pending);
        }
    }
    Ok(cut_off)
}

/// Completed partial copies. When dropped before `finish`, the added blocks are removed again.
pub struct Brought(Vec<PendingCopyUp>);

impl Brought {
    /// Completes the copies before a commit to the base, which has no access to lower layers.
    ///
    /// # Errors
    /// `Io`, with the path of the copy: its original was changed, or the disk is full. All copies are unchanged then.
    pub(crate) fn bring(unfinished: Vec<PendingCopyUp>) -> std::result::Result<Self, Error> {
        let brought = Self(unfinished);
        for PendingCopyUp { at, copy, .. } in &brought.0 {
            copy.as_ref().map_or(Ok(()), |copy| copy.bring()).at(&at.path)?;
        }
        Ok(brought)
    }

    /// Turns them into ordinary files.
    ///
    /// # Errors
    /// `Io`, with the path of the copy. Those before it are finished.
    pub(crate) fn finish(mut self) -> std::result::Result<(), Error> {
        while let Some(PendingCopyUp { at, ino, copy }) = self.0.last() {
            copy.as_ref().map_or(Ok(()), |copy| copy.finish()).at(&at.path)?;
            if let Some(parts) = at.layer.partial_copies() {
                parts.unmark(*ino);
            }
            self.0.pop();
        }
        Ok(())
    }
}

impl Drop for Brought {
    fn drop(&mut self) {
        for copy in self.0.iter().filter_map(|unfinished| unfinished.copy.as_ref()) {
            let _ = copy.withdraw(); // what stays takes room, and is never shown
        }
    }
}
