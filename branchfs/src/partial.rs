//! Big files are copied up in part: the copy is a sparse file that gets a block when one is written.
//!
//! The first byte written to a file of 1 GiB would cost a copy of 1 GiB where the file system cannot share blocks. So
//! the copy begins as one hole of the original's size, and
//!
//! > **below `limit`, a hole of the copy shows what the original has there; data, and all above, is the copy's own.**
//!
//! A write that covers a block in part brings the rest of the block from the original first. `limit` is the original's
//! size, or less once the copy was truncated: what comes back when it grows again is zeros. Zeros in place of content
//! (punching a hole) are written as such. So there is no map beside the file that could disagree with it after a crash:
//! the file system's own list of extents is the map, and it keeps that in line with the data.
//!
//! What says that a file is such a copy, of what, and to which limit, is an extended attribute of the file itself
//! ([`Record`]), set before the file is renamed into the layer. It goes when the copy is whole and that is on disk.
//! Order on every change: content first, then the attribute; what is found is never more than `min(limit, size)`.
//!
//! This needs exact answers of `SEEK_DATA`, for blocks of zeros too, which [`is_possible_in`] tries out; elsewhere files
//! are copied whole. Whoever changes the original behind our back makes its parts unreadable (EIO), never mixed.
//!
//! Locking: `limit` is read by readers and written by everything that changes the file; nothing is taken below it.

mod original;
mod parts;
mod record;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps};
use rustix::io::Errno;

use crate::overlay::Namespace;
use crate::tree::{Result, Tree};

pub(crate) use original::Original;
pub(crate) use parts::Parts;
pub(crate) use record::{Record, Seen};

/// What is brought from the original at once; every file system's block divides it or is tried out.
const BLOCK_BYTES: u64 = 4096;

/// Such a block of zeros.
const EMPTY_BLOCK: [u8; 4096] = [0; 4096];

/// Most that is held in memory while content is moved.
const BUFFER_BYTES: usize = 1 << 20;

/// A file that was copied up in part, open.
#[derive(Debug)]
pub(crate) struct PartialCopy {
    /// Open for reading and writing.
    file: OwnedFd,
    /// `None`: it cannot be found any more.
    original: Option<Original>,
    namespace: Namespace,
    limit: RwLock<u64>,
}

impl PartialCopy {
    /// The copy `file`, which is open for reading and writing and has `record`.
    pub(crate) fn new(
        file: OwnedFd,
        record: &Record,
        original: Option<Original>,
        namespace: Namespace,
    ) -> Result<Self> {
        let limit = record.limit.min(size_of(&file)?);
        Ok(Self { file, original, namespace, limit: RwLock::new(limit) })
    }

    fn reading(&self) -> RwLockReadGuard<'_, u64> {
        // A panic while it was held leaves a limit that is too high at worst until the next open; never a wrong one
        // below what was written, for content comes first.
        self.limit.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> RwLockWriteGuard<'_, u64> {
        self.limit.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn original(&self) -> Result<&Original> {
        self.original.as_ref().ok_or(Errno::IO)
    }

    /// Whether nothing is left to be brought from the original: then the file can be used without us, as long as
    /// whatever makes holes comes here.
    pub(crate) fn is_filled(&self) -> bool {
        let limit = self.reading();
        *limit == 0 || hole_at(&self.file, 0).is_ok_and(|hole| hole >= *limit)
    }

    /// Reads at `offset`; fewer bytes only at the end of the file.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let limit = self.reading();
        read_merged(&self.file, *limit, || self.original(), buffer, offset)
    }

    /// Writes at `offset`.
    pub(crate) fn write(&self, data: &[u8], offset: u64) -> Result<usize> {
        let limit = self.writing();
        self.write_locked(data, offset, *limit)
    }

    fn write_locked(&self, data: &[u8], offset: u64, limit: u64) -> Result<usize> {
        let end = offset + data.len() as u64;
        if offset % BLOCK_BYTES != 0 {
            self.fill(offset, limit)?;
        }
        if end % BLOCK_BYTES != 0 {
            self.fill(end, limit)?;
        }
        rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, data, offset))
    }

    /// Brings the block around `offset` from the original, unless it is here already.
    fn fill(&self, offset: u64, limit: u64) -> Result<()> {
        let start = offset - offset % BLOCK_BYTES;
        if start >= limit || data_at(&self.file, start)? == Some(start) {
            return Ok(());
        }
        let length = BLOCK_BYTES.min(limit - start);
        let mut block = EMPTY_BLOCK;
        let block = &mut block[..usize::try_from(length).unwrap_or(0)];
        self.original()?.read(block, start)?;
        write_all(&self.file, block, start)
    }

    /// Gives the file another size.
    pub(crate) fn resize(&self, size: u64) -> Result<()> {
        let mut limit = self.writing();
        rustix::fs::ftruncate(&self.file, size)?;
        if size < *limit {
            *limit = size;
            self.keep_limit(size)?;
        }
        Ok(())
    }

    /// Writes the limit down; a copy with nothing left of the original is a file like others.
    fn keep_limit(&self, limit: u64) -> Result<()> {
        if limit == 0 {
            return Record::remove(self.file.as_fd(), self.namespace);
        }
        let mut record = Record::read(self.file.as_fd(), self.namespace)?.ok_or(Errno::IO)?;
        record.limit = limit;
        record.write(self.file.as_fd(), self.namespace)
    }

    /// As `fallocate(2)`.
    pub(crate) fn allocate(&self, mode: FallocateFlags, offset: u64, length: u64) -> Result<()> {
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::UNSHARE_RANGE;
        let zeros = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !(known | zeros).contains(mode) {
            return Err(Errno::OPNOTSUPP); // what would move content; FUSE refuses it before it comes here
        }
        let limit = self.writing();
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        if !mode.intersects(zeros) {
            // Allocated without being written, a block is neither data nor hole: bring it before.
            self.fill_range(offset, end, *limit)?;
            return rustix::fs::fallocate(&self.file, mode, offset, length);
        }
        let buffer = vec![0; BUFFER_BYTES];
        let mut at = offset;
        while at < end.min(*limit) {
            let wanted = (end.min(*limit) - at).min(BUFFER_BYTES as u64);
            let written = &buffer[..usize::try_from(wanted).unwrap_or(0)];
            at += self.write_locked(written, at, *limit)? as u64;
        }
        if at < end {
            self.fill(at, *limit)?;
            rustix::fs::fallocate(&self.file, mode, at, end - at)?;
        }
        Ok(())
    }

    /// Brings whatever of `start..end` is not here yet; holes of the original are written as zeros.
    fn fill_range(&self, start: u64, end: u64, limit: u64) -> Result<()> {
        let end = end.min(limit);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut at = start - start % BLOCK_BYTES;
        while at < end {
            let data = data_at(&self.file, at)?.unwrap_or(limit);
            if data <= at {
                at = hole_at(&self.file, at)?;
                continue;
            }
            // A whole number of blocks, but for the last.
            let stop = data.min(end.next_multiple_of(BLOCK_BYTES)).min(limit);
            let length = (stop - at).min(BUFFER_BYTES as u64);
            let piece = &mut buffer[..usize::try_from(length).unwrap_or(0)];
            self.original()?.read(piece, at)?;
            write_all(&self.file, piece, at)?;
            at += length;
        }
        Ok(())
    }

    /// `SEEK_DATA` of what the file shows.
    pub(crate) fn seek_data(&self, offset: u64) -> Result<u64> {
        let limit = self.reading();
        let own = data_at(&self.file, offset)?;
        let originals = match &self.original {
            Some(original) if offset < *limit => {
                original.data_at(offset)?.filter(|data| data < &limit)
            }
            _ => None,
        };
        own.into_iter().chain(originals).min().ok_or(Errno::NXIO)
    }

    /// `SEEK_HOLE` of what the file shows.
    pub(crate) fn seek_hole(&self, offset: u64) -> Result<u64> {
        let limit = self.reading();
        let mut at = offset;
        loop {
            if data_at(&self.file, at)? == Some(at) {
                at = hole_at(&self.file, at)?;
                continue;
            }
            let original = self.original.as_ref().filter(|_| at < *limit);
            match original {
                Some(original) if original.data_at(at)? == Some(at) => {
                    // Where this ends in the middle of a block, the rest of the block is the copy's.
                    let end = original.hole_at(at)?.min(*limit);
                    at = data_at(&self.file, at)?.map_or(end, |data| data.min(end));
                }
                _ => {
                    let size = size_of(&self.file)?;
                    return if offset >= size { Err(Errno::NXIO) } else { Ok(at.min(size)) };
                }
            }
        }
    }

    /// Copies what the file shows to the empty file `to`, with its holes.
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

    /// Brings all that is missing, keeps the file's times, and makes it a file like others once that is on disk.
    pub(crate) fn complete(&self) -> Result<()> {
        let mut limit = self.writing();
        if *limit == 0 {
            return Ok(());
        }
        let stat = rustix::fs::fstat(&self.file)?;
        let mut at = 0;
        while at < *limit {
            let data = data_at(&self.file, at)?.unwrap_or(*limit).min(*limit);
            if data > at {
                self.original()?.copy_data(&self.file, at, data)?;
            }
            at = if data < *limit { hole_at(&self.file, data)? } else { *limit };
        }
        let time = |seconds, nanoseconds: u64| Timespec {
            tv_sec: seconds,
            tv_nsec: i64::try_from(nanoseconds).unwrap_or(0),
        };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec as u64),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec as u64),
        };
        rustix::fs::futimens(&self.file, &times)?;
        rustix::fs::fdatasync(&self.file)?;
        *limit = 0;
        self.keep_limit(0)
    }
}

/// Reads what a copy shows: its own data, and below `limit` in its holes the original's.
fn read_merged<'o>(
    file: &OwnedFd,
    limit: u64,
    original: impl Fn() -> Result<&'o Original>,
    buffer: &mut [u8],
    offset: u64,
) -> Result<usize> {
    let size = size_of(file)?;
    let wanted = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
    let length = buffer.len().min(wanted);
    let mut done = 0;
    while done < length {
        let at = offset + done as u64;
        let rest = &mut buffer[done..length];
        let data = if at < limit { data_at(file, at)?.unwrap_or(limit).min(limit) } else { at };
        let (end, is_own) = if data > at {
            (data, false)
        } else if at < limit {
            (hole_at(file, at)?, true)
        } else {
            (size, true)
        };
        let count = usize::try_from(end - at).unwrap_or(usize::MAX).min(rest.len());
        let part = &mut rest[..count];
        let read = if is_own {
            rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *part, at))?
        } else {
            original()?.read(part, at)?;
            count
        };
        if read == 0 {
            break; // shortened meanwhile
        }
        done += read;
    }
    Ok(done)
}

/// Where data begins at or after `offset`; `None`: nowhere.
fn data_at(file: &OwnedFd, offset: u64) -> Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where a hole begins at or after `offset`, which is inside the file; its end is one.
fn hole_at(file: &OwnedFd, offset: u64) -> Result<u64> {
    rustix::fs::seek(file, SeekFrom::Hole(offset))
}

fn size_of(file: &OwnedFd) -> Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}

fn write_all(file: &OwnedFd, data: &[u8], offset: u64) -> Result<()> {
    let mut written = 0;
    while written < data.len() {
        let at = offset + written as u64;
        written += rustix::io::retry_on_intr(|| rustix::io::pwrite(file, &data[written..], at))?;
    }
    Ok(())
}

/// Tries out in `directory` whether its file system keeps holes exactly as they were made, on disk too.
pub(crate) fn is_possible_in(directory: &Path) -> bool {
    const SIZE: u64 = 1 << 20;
    const MIDDLE: u64 = 128 * BLOCK_BYTES;
    let probe = || -> Result<bool> {
        let tree = Tree::open_root(directory)?;
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
