//! Partial copy-up of big files: the copy is a sparse file, into which a block is copied when it is written.
//!
//! Without block sharing in the file system, writing the first byte of a file of 1 GiB would copy 1 GiB. So the copy
//! starts as a hole of the original's size, with this invariant:
//!
//! > **Below `limit`, blocks in the copy's map belong to the copy, and other blocks are those of the original. At and above
//! > `limit`, all blocks belong to the copy.**
//!
//! A write to a part of a block first copies the rest of the block from the original. `limit` is the original's size, or
//! less after the copy was truncated; when it grows again, the new part is zeros. Zeros that replace content (punching a
//! hole) are written as data.
//!
//! The map ([`blocks`]) is a separate file with a bit for each block of 4 KiB. A bit is set after the whole block was
//! written. So data that a failed write, a full disk or a killed daemon leaves in the copy is never visible. The file
//! system's extents are not sufficient, because reserved blocks stay as zeros. Such leftovers are removed after an error,
//! and before the block is written again. After a power loss the map may be newer than the content, so a bit counts only
//! where the copy has data. `fsync` syncs the content first, then the map.
//!
//! An extended attribute of the file ([`Record`]) has the original and the limit. It is set before the file is renamed into
//! the layer, and removed after the complete copy was synced. Every change writes the content first, then the map or the
//! attribute. The original is read only below `min(limit, size)`.
//!
//! This requires that `SEEK_DATA` is exact, also for blocks of zeros, which [`is_possible_in`] tests. Otherwise files are
//! copied as a whole. If the original is changed externally, its parts become unreadable (EIO); versions are never mixed.
//!
//! Locking: reads take the state shared, changes take it exclusively. Below it only the states of originals are locked
//! that are partial copies themselves.

mod blocks;
mod lower_file;
mod partial_copy_index;
mod record;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps};
use rustix::io::Errno;

use crate::overlay::Namespace;
use crate::rooted_dir::{Result, RootedDir};

use blocks::Blocks;
pub(crate) use lower_file::LowerFile;
pub(crate) use partial_copy_index::PartialCopyIndex;
pub(crate) use record::{LowerFingerprint, Record};

/// Size of a copy from the original; a multiple of the block size of usual file systems, others are tested.
const BLOCK_BYTES: u64 = 4096;

/// An empty block.
const EMPTY_BLOCK: [u8; 4096] = [0; 4096];

/// Most that is held in memory while content is moved.
const BUFFER_BYTES: usize = 1 << 20;

/// A file that was copied up in part, open.
#[derive(Debug)]
pub struct PartialCopy {
    /// Open for reading and writing.
    file: OwnedFd,
    /// Not set if it cannot be found.
    original: OnceLock<LowerFile>,
    namespace: Namespace,
    state: RwLock<State>,
}

/// The state that changes with the file.
#[derive(Debug)]
struct State {
    /// Below this offset, blocks that are not in the map show the original.
    limit: u64,
    blocks: Blocks,
    /// Bytes of data of the original that are hidden by now, once counted.
    hidden_bytes: Option<u64>,
}

/// A piece of the file with one owner.
struct Run {
    end: u64,
    is_own: bool,
}

impl State {
    /// The longest piece of one kind that begins at `at`, up to `end`.
    fn run(&self, at: u64, end: u64) -> Run {
        if at >= self.limit {
            return Run { end, is_own: true };
        }
        let is_own = self.blocks.has(at / BLOCK_BYTES);
        let last = end.min(self.limit).div_ceil(BLOCK_BYTES);
        let next = self.blocks.next(at / BLOCK_BYTES, last, !is_own).unwrap_or(last);
        Run { end: (next * BLOCK_BYTES).min(end).min(self.limit), is_own }
    }

    /// The pieces of `start..end` that still read from the original.
    fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let end = end.min(self.limit);
        let mut pieces = Vec::new();
        let mut at = start;
        while at < end {
            let run = self.run(at, end);
            if !run.is_own {
                pieces.push((at, run.end));
            }
            at = run.end;
        }
        pieces
    }
}

impl PartialCopy {
    /// The copy `file`, which is open for reading and writing and has `record`; `map` is the file of its map.
    pub(crate) fn new(
        file: OwnedFd,
        map: OwnedFd,
        record: &Record,
        original: Option<LowerFile>,
        namespace: Namespace,
    ) -> Result<Self> {
        let limit = record.limit.min(size_of(&file)?);
        let blocks = Blocks::load(map, &file, limit, record.has_map)?;
        let state = RwLock::new(State { limit, blocks, hidden_bytes: None });
        let original = original.map_or_else(OnceLock::new, OnceLock::from);
        let copy = Self { file, original, namespace, state };
        if limit < record.limit {
            // It was cut by a daemon that ended before it wrote that down; growing must bring zeros.
            copy.keep_limit(limit)?;
        }
        Ok(copy)
    }

    fn reading(&self) -> RwLockReadGuard<'_, State> {
        // A panic while it was held leaves a state that shows less of the copy at worst until the next open; never a
        // wrong block, for content comes first.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn original(&self) -> Result<&LowerFile> {
        self.original.get().ok_or(Errno::IO)
    }

    /// Whether the lower file was found.
    pub(crate) fn has_original(&self) -> bool {
        self.original.get().is_some()
    }

    /// Lets the copy read from a lower file that lies where its layers do not have it. `false` if `file` is another one.
    pub(crate) fn read_from(&self, file: OwnedFd) -> Result<bool> {
        let Some(record) = self.record()? else { return Ok(false) };
        let found = LowerFile::new(file, record.fingerprint, None)?;
        Ok(found.is_some_and(|found| self.original.set(found).is_ok()))
    }

    /// Its record; `None` if it is complete.
    pub(crate) fn record(&self) -> Result<Option<Record>> {
        Record::read(self.file.as_fd(), self.namespace)
    }

    /// Whether no block is left to copy from the original. Then the file can be used directly, except by calls that
    /// make holes.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.reading();
        state.missing(0, state.limit).is_empty()
    }

    /// Reads at `offset`; returns fewer bytes only at the end of the file.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let state = self.reading();
        let wanted = size_of(&self.file)?.saturating_sub(offset);
        let length = buffer.len().min(usize::try_from(wanted).unwrap_or(usize::MAX));
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let run = state.run(at, offset + length as u64);
            let part = &mut buffer[done..done + usize::try_from(run.end - at).unwrap_or(0)];
            let read = if run.is_own {
                rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *part, at))?
            } else {
                self.original()?.read(part, at)?;
                part.len()
            };
            if read == 0 {
                break; // shortened meanwhile
            }
            done += read;
        }
        Ok(done)
    }

    /// Writes at `offset`, after it has fetched blocks that the data covers only in part. Returns the number of bytes
    /// written, which may be fewer than given.
    pub(crate) fn write(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.write_locked(&mut self.writing(), data, offset)
    }

    fn write_locked(&self, state: &mut State, data: &[u8], offset: u64) -> Result<usize> {
        let end = offset + data.len() as u64;
        for edge in [offset, end] {
            if edge % BLOCK_BYTES != 0 {
                self.fetch_block(state, edge)?;
            }
        }
        let new = state.missing(offset, end);
        if new.is_empty() {
            return rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, data, offset));
        }
        state.blocks.prepare(|| self.use_map())?;
        self.remove_leftovers(&new)?;
        let (written, failed) = write_most(&self.file, data, offset);
        let mut done = offset + written as u64;
        if state.run(done, done + 1).is_own || done == end {
            // All written data is in complete blocks.
        } else {
            done = (done - done % BLOCK_BYTES).max(offset);
        }
        let taken = self.take(state, offset, done);
        if done < end || taken.is_err() {
            self.give_back(&state.missing(offset, end));
        }
        taken?;
        match failed {
            Some(error) if done == offset => Err(error),
            _ => Ok(usize::try_from(done - offset).unwrap_or(0)),
        }
    }

    /// Marks the blocks of `start..end`, which are completely written, as the copy's own.
    fn take(&self, state: &mut State, start: u64, end: u64) -> Result<()> {
        let new = state.missing(start, end);
        if let (Some(hidden), Some(original)) = (state.hidden_bytes, self.original.get()) {
            let bytes = new.iter().map(|(start, end)| original.data_bytes(*start, *end));
            state.hidden_bytes = bytes.sum::<Result<u64>>().ok().map(|bytes| hidden + bytes);
        }
        for (start, end) in new {
            state.blocks.add(start / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES))?;
        }
        Ok(())
    }

    /// Removes what an earlier failure left in blocks that are about to be written. It must not reappear after a power
    /// failure, when the map names these blocks already.
    fn remove_leftovers(&self, pieces: &[(u64, u64)]) -> Result<()> {
        let mut removed = false;
        for (start, end) in pieces {
            if data_at(&self.file, *start)?.is_some_and(|data| data < *end) {
                punch(&self.file, *start, *end)?;
                removed = true;
            }
        }
        if removed { rustix::fs::fdatasync(&self.file) } else { Ok(()) }
    }

    /// Frees the space that a failed write left in blocks that still read from the original.
    fn give_back(&self, pieces: &[(u64, u64)]) {
        for (start, end) in pieces {
            // A leftover takes space and is removed before the block is written; it is never visible.
            let _ = punch(&self.file, *start, *end);
        }
    }

    /// Copies the block around `offset` from the original, if it is missing.
    fn fetch_block(&self, state: &mut State, offset: u64) -> Result<()> {
        let start = offset - offset % BLOCK_BYTES;
        self.fill_range(state, start, start + BLOCK_BYTES)
    }

    /// Copies the missing blocks of `start..end` from the original. Holes are written as zeros.
    fn fill_range(&self, state: &mut State, start: u64, end: u64) -> Result<()> {
        let start = start - start % BLOCK_BYTES;
        let new = state.missing(start, end.next_multiple_of(BLOCK_BYTES));
        if new.is_empty() {
            return Ok(());
        }
        state.blocks.prepare(|| self.use_map())?;
        self.remove_leftovers(&new)?;
        let bring = |from: u64, to: u64| {
            let mut buffer = vec![0; usize::try_from(to - from).unwrap_or(0)];
            self.original()?.read(&mut buffer, from)?;
            write_all(&self.file, &buffer, from)
        };
        for (start, end) in new {
            let mut at = start;
            while at < end {
                let stop = (at + BUFFER_BYTES as u64).min(end);
                if let Err(error) = bring(at, stop).and_then(|()| self.take(state, at, stop)) {
                    self.give_back(&state.missing(at, end));
                    return Err(error);
                }
                at = stop;
            }
        }
        Ok(())
    }

    /// Changes the size of the file.
    pub(crate) fn resize(&self, size: u64) -> Result<()> {
        let mut state = self.writing();
        rustix::fs::ftruncate(&self.file, size)?;
        if size < state.limit {
            (state.limit, state.hidden_bytes) = (size, None);
            self.keep_limit(size)?;
        }
        Ok(())
    }

    /// Records the limit. A copy without blocks of the original becomes an ordinary file.
    fn keep_limit(&self, limit: u64) -> Result<()> {
        if limit == 0 {
            return Record::remove(self.file.as_fd(), self.namespace);
        }
        self.change_record(|record| record.limit = limit)
    }

    /// Writes a block map for a copy of an earlier version, which used its extents as the map.
    fn use_map(&self) -> Result<()> {
        self.change_record(|record| record.has_map = true)
    }

    fn change_record(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = Record::read(self.file.as_fd(), self.namespace)?.ok_or(Errno::IO)?;
        change(&mut record);
        record.write(self.file.as_fd(), self.namespace)
    }

    /// As `fallocate(2)`. The blocks of the range become the copy's own.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for modes that move content.
    pub fn allocate(&self, mode: FallocateFlags, offset: u64, length: u64) -> Result<()> {
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::UNSHARE_RANGE;
        let zeros = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !(known | zeros).contains(mode) {
            return Err(Errno::OPNOTSUPP); // what would move content; FUSE refuses it before it comes here
        }
        let state = &mut *self.writing();
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        if !mode.intersects(zeros) {
            self.fill_range(state, offset, end)?;
            return rustix::fs::fallocate(&self.file, mode, offset, length);
        }
        let buffer = vec![0; BUFFER_BYTES];
        let mut at = offset;
        while at < end.min(state.limit) {
            let wanted = (end.min(state.limit) - at).min(BUFFER_BYTES as u64);
            let written = &buffer[..usize::try_from(wanted).unwrap_or(0)];
            at += self.write_locked(state, written, at)? as u64;
        }
        if at < end {
            self.fetch_block(state, at)?;
            rustix::fs::fallocate(&self.file, mode, at, end - at)?;
        }
        Ok(())
    }

    /// `SEEK_DATA` on the content that the file shows.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        let state = self.reading();
        let size = size_of(&self.file)?;
        let mut at = offset;
        while at < size {
            let run = state.run(at, size);
            let data = match self.original.get() {
                _ if run.is_own => data_at(&self.file, at)?,
                Some(original) => original.data_at(at)?,
                None => Some(at), // reading it fails; a hole would be taken for zeros
            };
            if let Some(data) = data.filter(|data| *data < run.end) {
                return Ok(data);
            }
            at = run.end;
        }
        Err(Errno::NXIO)
    }

    /// `SEEK_HOLE` on the content that the file shows.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        let state = self.reading();
        let size = size_of(&self.file)?;
        if offset >= size {
            return Err(Errno::NXIO);
        }
        let mut at = offset;
        while at < size {
            let run = state.run(at, size);
            let hole = match self.original.get() {
                _ if run.is_own => hole_at(&self.file, at)?,
                Some(original) => original.hole_at(at)?,
                None => run.end,
            };
            if hole < run.end {
                return Ok(hole);
            }
            at = run.end;
        }
        Ok(size)
    }

    /// The number of 512-byte blocks that a complete copy would have.
    pub(crate) fn blocks(&self) -> Result<u64> {
        const STAT_BLOCK_BYTES: u64 = 512;
        let mut state = self.writing();
        let stat = rustix::fs::fstat(&self.file)?;
        let own = u64::try_from(stat.st_blocks).unwrap_or(0);
        let Some(original) = self.original.get() else {
            // Without blocks it would be taken for a hole; reading it fails.
            return Ok(own.max(size_of(&self.file)?.div_ceil(STAT_BLOCK_BYTES)));
        };
        if state.limit == 0 {
            return Ok(own);
        }
        let hidden = match state.hidden_bytes {
            Some(hidden) => hidden,
            None => {
                let mut shown = 0;
                for (start, end) in state.missing(0, state.limit) {
                    shown += original.data_bytes(start, end)?;
                }
                original.data_bytes(0, u64::MAX)?.saturating_sub(shown)
            }
        };
        state.hidden_bytes = Some(hidden);
        Ok(own + original.blocks()?.saturating_sub(hidden / STAT_BLOCK_BYTES))
    }

    /// Copies the content that the file shows to the empty file `to`, with its holes.
    pub(crate) fn copy_to(&self, to: &OwnedFd) -> Result<()> {
        rustix::fs::ftruncate(to, size_of(&self.file)?)?;
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut at = 0;
        loop {
            at = match self.seek_data(at) {
                Ok(data) => data,
                Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error),
            };
            let end = self.seek_hole(at)?;
            while at < end {
                let length = usize::try_from((end - at).min(BUFFER_BYTES as u64)).unwrap_or(0);
                let read = self.read(&mut buffer[..length], at)?;
                if read == 0 {
                    return Err(Errno::IO);
                }
                write_all(to, &buffer[..read], at)?;
                at += read as u64;
            }
        }
    }

    /// Copies all missing blocks, and keeps the file's times. They become visible with [`Self::finish`];
    /// [`Self::withdraw`] frees them.
    pub(crate) fn bring(&self) -> Result<()> {
        let state = self.writing();
        let missing = state.missing(0, state.limit);
        let times = times_of(&self.file)?;
        let bring = || -> Result<()> {
            self.remove_leftovers(&missing)?;
            for (start, end) in &missing {
                self.original()?.copy_data(&self.file, *start, *end)?;
            }
            rustix::fs::fdatasync(&self.file)
        };
        let brought = bring();
        if brought.is_err() {
            self.give_back(&missing);
        }
        rustix::fs::futimens(&self.file, &times)?;
        brought
    }

    /// Frees the blocks that [`Self::bring`] copied.
    pub(crate) fn withdraw(&self) -> Result<()> {
        let state = self.writing();
        let times = times_of(&self.file)?;
        self.give_back(&state.missing(0, state.limit));
        rustix::fs::futimens(&self.file, &times)
    }

    /// Turns the copy into an ordinary file: all blocks were copied and synced.
    pub(crate) fn finish(&self) -> Result<()> {
        let mut state = self.writing();
        rustix::fs::fdatasync(&self.file)?;
        self.keep_limit(0)?;
        state.limit = 0;
        Ok(())
    }

    /// As `fsync(2)` or `fdatasync(2)`.
    pub(crate) fn sync(&self, data_only: bool) -> Result<()> {
        if data_only {
            rustix::fs::fdatasync(&self.file)?;
        } else {
            rustix::fs::fsync(&self.file)?;
        }
        self.reading().blocks.sync()
    }
}

fn times_of(file: &OwnedFd) -> Result<Timestamps> {
    let stat = rustix::fs::fstat(file)?;
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanoseconds).unwrap_or(0),
    };
    Ok(Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec as u64),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec as u64),
    })
}

/// Writes as much as possible; returns the number of bytes, and the error that ended it early.
fn write_most(file: &OwnedFd, data: &[u8], offset: u64) -> (usize, Option<Errno>) {
    let mut written = 0;
    while written < data.len() {
        let at = offset + written as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(file, &data[written..], at)) {
            Ok(0) => return (written, Some(Errno::IO)),
            Ok(count) => written += count,
            Err(error) => return (written, Some(error)),
        }
    }
    (written, None)
}

fn punch(file: &OwnedFd, start: u64, end: u64) -> Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, start, end - start)
}

/// Offset of the first data at or after `offset`; `None` if there is none.
fn data_at(file: &OwnedFd, offset: u64) -> Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Offset of the first hole at or after `offset`, which is inside the file; the end of the file counts as one.
fn hole_at(file: &OwnedFd, offset: u64) -> Result<u64> {
    rustix::fs::seek(file, SeekFrom::Hole(offset))
}

fn size_of(file: &OwnedFd) -> Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}

fn write_all(file: &OwnedFd, data: &[u8], offset: u64) -> Result<()> {
    match write_most(file, data, offset) {
        (_, Some(error)) => Err(error),
        _ => Ok(()),
    }
}

/// Tests in `directory` whether its file system keeps holes exactly, on disk too.
pub(crate) fn is_possible_in(directory: &Path) -> bool {
    const SIZE: u64 = 1 << 20;
    const MIDDLE: u64 = 128 * BLOCK_BYTES;
    let probe = || -> Result<bool> {
        let tree = RootedDir::open_root(directory)?;
        let file = tree.create_unnamed(Path::new(""), 0o600)?;
        rustix::fs::ftruncate(&file, SIZE)?;
        // Zeros: a file system that takes them for a hole would show the original in their place.
        write_all(&file, &EMPTY_BLOCK, MIDDLE)?;
        let is_exact = || -> Result<bool> {
            Ok(data_at(&file, 0)? == Some(MIDDLE)
                && hole_at(&file, 0)? == 0
                && hole_at(&file, MIDDLE)? == MIDDLE + BLOCK_BYTES
                && data_at(&file, MIDDLE + BLOCK_BYTES)?.is_none())
        };
        let before = is_exact()?;
        rustix::fs::fdatasync(&file)?;
        Ok(before && is_exact()?)
    };
    // Whatever fails here, copying whole files works.
    probe().unwrap_or(false)
}

/// Opens the file of a copy so that it can be read and written.
pub(crate) const OPEN_FLAGS: OFlags = OFlags::RDWR.union(OFlags::NONBLOCK);

#[cfg(test)]
mod tests;
