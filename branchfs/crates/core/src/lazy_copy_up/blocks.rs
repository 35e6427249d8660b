//! The map of a partial copy: which blocks are its own.
//!
//! One bit for each block of 4 KiB, the lowest bit of a byte first; what the file does not reach is zero. It is written
//! after the content of the blocks.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::{BLOCK_BYTES, data_at, hole_at, write_all};
use crate::rooted_dir::Result;

/// The map, in memory and on disk.
#[derive(Debug)]
pub(super) struct Blocks {
    bits: Vec<u8>,
    file: OwnedFd,
    /// Whether the map on disk is up to date. False after an error, and for a copy of version 1, whose extents are its
    /// map.
    is_written: bool,
}

impl Blocks {
    /// Reads the map of `copy`. A block counts only if the copy has data there below `limit`: after a power failure the
    /// map may be newer than the content. Without a map on disk all data belongs to the copy.
    pub(super) fn load(file: OwnedFd, copy: &OwnedFd, limit: u64, has_map: bool) -> Result<Self> {
        let count = limit.div_ceil(BLOCK_BYTES);
        let length = usize::try_from(count.div_ceil(8)).map_err(|_| Errno::FBIG)?;
        let mut map = vec![if has_map { 0 } else { 0xff }; length];
        let mut read = 0;
        while has_map && read < length {
            match rustix::io::pread(&file, &mut map[read..], read as u64)? {
                0 => break,
                count => read += count,
            }
        }
        let mut blocks = Self { bits: vec![0; length], file, is_written: has_map };
        let mut at = 0;
        while let Some(data) = data_at(copy, at)?.filter(|data| *data < limit) {
            let hole = hole_at(copy, data)?;
            let end = if hole >= limit { count } else { hole / BLOCK_BYTES };
            for block in data.div_ceil(BLOCK_BYTES)..end {
                let (byte, bit) = place(block);
                blocks.bits[byte] |= map[byte] & bit;
            }
            at = hole;
        }
        Ok(blocks)
    }

    pub(super) fn has(&self, block: u64) -> bool {
        let (byte, bit) = place(block);
        self.bits.get(byte).is_some_and(|bits| bits & bit != 0)
    }

    /// The first block from `start` on that is in the map (`wanted`) or is not; `None` if there is none before `end`.
    pub(super) fn next(&self, start: u64, end: u64, wanted: bool) -> Option<u64> {
        let other = if wanted { 0 } else { 0xff };
        let mut block = start;
        while block < end {
            if block % 8 == 0 && self.bits.get(place(block).0).copied().unwrap_or(0) == other {
                block += 8;
            } else if self.has(block) == wanted {
                return Some(block);
            } else {
                block += 1;
            }
        }
        None
    }

    /// Prepares the map before content is written that it will name. `use_map` records that there is a map.
    pub(super) fn prepare(&mut self, use_map: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.is_written {
            write_all(&self.file, &self.bits, 0)?;
            rustix::fs::fdatasync(&self.file)?;
            use_map()?;
            self.is_written = true;
        }
        Ok(())
    }

    /// Adds blocks. If that fails the map does not change.
    pub(super) fn add(&mut self, start: u64, end: u64) -> Result<()> {
        let (first, last) = (place(start).0, place(end.saturating_sub(1)).0);
        let mut bytes = self.bits[first..=last].to_vec();
        for block in start..end {
            let (byte, bit) = place(block);
            bytes[byte - first] |= bit;
        }
        if let Err(error) = write_all(&self.file, &bytes, first as u64) {
            self.is_written = false;
            return Err(error);
        }
        self.bits[first..=last].copy_from_slice(&bytes);
        Ok(())
    }

    pub(super) fn sync(&self) -> Result<()> {
        rustix::fs::fdatasync(&self.file)
    }
}

/// The byte and the bit of a block.
fn place(block: u64) -> (usize, u8) {
    (usize::try_from(block / 8).unwrap_or(usize::MAX), 1 << (block % 8))
}
