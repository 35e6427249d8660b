//! The lower file of a partial copy: a complete file, or a partial copy of a layer further down.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::record::LowerFingerprint;
use super::{BLOCK_BYTES, PartialCopy, data_at, hole_at, size_of, write_all};
use crate::object_copy::copy_range;
use crate::rooted_dir::Result;

/// The file from which a partial copy reads the blocks that it does not have.
#[derive(Debug)]
pub(crate) struct LowerFile {
    file: OwnedFd,
    /// The fingerprint that it must still have.
    fingerprint: LowerFingerprint,
    /// The partial copy, if it is one itself.
    partial: Option<Arc<PartialCopy>>,
}

impl LowerFile {
    /// Checks that `file` is the lower file with this fingerprint; `None` if it is not.
    pub(crate) fn new(
        file: OwnedFd,
        seen: LowerFingerprint,
        partial: Option<Arc<PartialCopy>>,
    ) -> Result<Option<Self>> {
        let original = Self { file, fingerprint: seen, partial };
        Ok(original.is_unchanged()?.then_some(original))
    }

    fn is_unchanged(&self) -> Result<bool> {
        Ok(LowerFingerprint::of(self.file.as_fd())? == self.fingerprint)
    }

    /// Fills `buffer` from `offset`; the range must be inside the file.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let (rest, at) = (&mut buffer[done..], offset + done as u64);
            let read = match &self.partial {
                None => {
                    rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *rest, at))?
                }
                Some(partial) => partial.read(rest, at)?,
            };
            if read == 0 {
                return Err(Errno::IO); // it is shorter than it was
            }
            done += read;
        }
        // Checked after the read: changes before or during it must not be mixed in.
        if self.is_unchanged()? { Ok(()) } else { Err(Errno::IO) }
    }

    /// Offset of the first data at or after `offset`; `None` if there is none.
    pub(super) fn data_at(&self, offset: u64) -> Result<Option<u64>> {
        match self.partial.as_ref().map(|partial| partial.seek_data(offset)) {
            None => data_at(&self.file, offset),
            Some(Err(Errno::NXIO)) => Ok(None),
            Some(found) => found.map(Some),
        }
    }

    /// Offset of the first hole at or after `offset`; the end of the file counts as one.
    pub(super) fn hole_at(&self, offset: u64) -> Result<u64> {
        match &self.partial {
            None => hole_at(&self.file, offset),
            Some(partial) => partial.seek_hole(offset),
        }
    }

    /// The number of 512-byte blocks that a complete copy of it would have.
    pub(super) fn blocks(&self) -> Result<u64> {
        match &self.partial {
            None => Ok(u64::try_from(rustix::fs::fstat(&self.file)?.st_blocks).unwrap_or(0)),
            Some(partial) => partial.blocks(),
        }
    }

    /// The data ranges in `start..end`.
    fn pieces(&self, start: u64, end: u64) -> impl Iterator<Item = Result<(u64, u64)>> {
        let mut at = start;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let next = || -> Result<Option<(u64, u64)>> {
                let end = end.min(size_of(&self.file)?);
                let Some(data) = self.data_at(at)?.filter(|data| *data < end) else {
                    return Ok(None);
                };
                Ok(Some((data, self.hole_at(data)?.min(end))))
            };
            let piece = next();
            at = piece.ok().flatten().map_or(end, |(_, stop)| stop);
            piece.transpose()
        })
    }

    /// The amount of data in `start..end`, in whole blocks (the last one takes a whole block on disk, too). `start` is
    /// the start of a block.
    pub(super) fn data_bytes(&self, start: u64, end: u64) -> Result<u64> {
        let length = |(start, end): (u64, u64)| end.next_multiple_of(BLOCK_BYTES) - start;
        self.pieces(start, end).map(|piece| piece.map(length)).sum()
    }

    /// Copies the data in `start..end` to the same offsets of `to`; holes stay holes.
    pub(super) fn copy_data(&self, to: &OwnedFd, start: u64, end: u64) -> Result<()> {
        for piece in self.pieces(start, end) {
            let (start, end) = piece?;
            if self.partial.is_none() {
                copy_range(self.file.as_fd(), to.as_fd(), start, end)?;
            } else {
                self.copy_by_hand(to, start, end)?;
            }
        }
        if self.is_unchanged()? { Ok(()) } else { Err(Errno::IO) }
    }

    fn copy_by_hand(&self, to: &OwnedFd, start: u64, end: u64) -> Result<()> {
        let mut buffer = vec![0; super::BUFFER_BYTES];
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            self.read(&mut buffer[..length], at)?;
            write_all(to, &buffer[..length], at)?;
            at += length as u64;
        }
        Ok(())
    }
}
