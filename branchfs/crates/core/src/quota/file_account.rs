//! The disk usage charged for one file of a limited layer.
//!
//! A file that is written sequentially has contiguous blocks: `dense_prefix` is their end, and overwriting them is free. As long
//! as the file has no other blocks (it is not `sparse`), its usage is computed. For a file with holes, or with blocks beyond
//! its end, the file system is queried: for the next hole before a write, and for the number of blocks after it.
//!
//! Dropping the account releases the charge: with the layer, or when the file has no name and is not open any more.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, SeekFrom};

use super::{BLOCK_BYTES, Kind, Quota};
use crate::rooted_dir::Result;

/// The unit of `stat`'s block count.
const STAT_BLOCK_BYTES: u64 = 512;

/// One file's account.
#[derive(Debug)]
pub struct FileAccount {
    quota: Arc<Quota>,
    /// The file has all blocks below this offset, a multiple of the block size. Only lowered under `state`.
    dense_prefix: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    charged: u64,
    /// There may be blocks beyond `dense_prefix`.
    sparse: bool,
}

impl FileAccount {
    /// An empty file's.
    pub(super) fn new(quota: Arc<Quota>) -> Self {
        Self { quota, dense_prefix: AtomicU64::new(0), state: Mutex::default() }
    }

    /// Creates the account of a file with this number of blocks, as returned by `stat`.
    pub(super) fn found(quota: Arc<Quota>, stat_blocks: u64) -> Self {
        let charged = stat_blocks * STAT_BLOCK_BYTES;
        quota.force_charge(Kind::Content, charged);
        let state = Mutex::new(State { charged, sparse: true });
        Self { quota, dense_prefix: AtomicU64::new(0), state }
    }

    /// Charges bytes that are about to be copied into the empty file; [`Self::reopened`] corrects the charge
    /// afterwards.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let mut state = self.lock();
        self.quota.charge(Kind::Content, bytes)?;
        state.charged += bytes;
        state.sparse = true;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What panicked may have left a charge too high, never blocks without one; the next reckoning mends it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes `length` bytes of the file at `offset` by `change`, if there is room. `change` returns the number of changed bytes.
    pub fn write(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        change: impl FnOnce() -> Result<usize>,
    ) -> Result<usize> {
        let end = offset.saturating_add(length);
        if end <= self.dense_prefix.load(Ordering::Acquire) {
            return change();
        }
        let mut state = self.lock();
        let taken = self.take(&mut state, file, offset, end)?;
        let outcome = change();
        let written = outcome.as_ref().map_or(0, |count| *count as u64);
        self.adjust_charge(&mut state, file, offset, offset + written, taken);
        outcome
    }

    /// `fallocate`, in all its modes.
    pub fn allocate(
        &self,
        file: BorrowedFd<'_>,
        mode: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let end = offset.saturating_add(length);
        let change = || rustix::fs::fallocate(file, mode, offset, length);
        let mut state = self.lock();
        if mode.is_empty() {
            let taken = self.take(&mut state, file, offset, end)?;
            let outcome = change();
            let reached = if outcome.is_ok() { end } else { offset };
            self.adjust_charge(&mut state, file, offset, reached, taken);
            return outcome;
        }
        state.sparse = true;
        let takes = !mode.intersects(
            FallocateFlags::PUNCH_HOLE
                | FallocateFlags::COLLAPSE_RANGE
                | FallocateFlags::INSERT_RANGE,
        );
        let taken = if takes {
            self.take(&mut state, file, offset, end)?
        } else {
            self.dense_prefix.fetch_min(block_start(offset), Ordering::AcqRel);
            0
        };
        let outcome = change();
        self.adjust_charge(&mut state, file, offset, offset, taken);
        outcome
    }

    /// Changes the size of the file by `change`. Growing adds a hole, which is free.
    pub(crate) fn resize<T>(
        &self,
        file: BorrowedFd<'_>,
        size: u64,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut state = self.lock();
        let dense_prefix =
            self.dense_prefix.fetch_min(block_end(size), Ordering::AcqRel).min(block_end(size));
        let outcome = change();
        if outcome.is_err() || state.sparse {
            state.sparse = true;
            self.recount(&mut state, file);
        } else {
            self.set(&mut state, dense_prefix);
        }
        if size == 0 && outcome.is_ok() && state.charged == 0 {
            state.sparse = false;
        }
        outcome
    }

    /// The file was opened, or filled: determines whether it has holes.
    pub(crate) fn reopened(&self, file: BorrowedFd<'_>) {
        let mut state = self.lock();
        if !state.sparse {
            return;
        }
        self.recount(&mut state, file);
        let (Ok(stat), Ok(hole)) =
            (rustix::fs::fstat(file), rustix::fs::seek(file, SeekFrom::Hole(0)))
        else {
            return; // an empty file has no hole to be found; others are asked again at the next write
        };
        self.dense_prefix.fetch_max(block_start(hole), Ordering::AcqRel);
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if hole >= size {
            self.dense_prefix.fetch_max(block_end(size), Ordering::AcqRel);
            state.sparse = state.charged > block_end(size);
        }
    }

    /// A writer closes the file: charges what racing changes left uncharged.
    pub(crate) fn closed(&self, file: BorrowedFd<'_>) {
        let mut state = self.lock();
        if state.sparse {
            self.recount(&mut state, file);
        } else if let Ok(stat) = rustix::fs::fstat(file) {
            // Blocks that the file system holds ready beyond the end (XFS does) go when the file is closed.
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let there = blocks_of(&stat).min(block_end(size));
            if there > state.charged {
                self.set(&mut state, there);
            }
        }
    }

    /// Charges the most that a change of `offset..end` can add.
    fn take(&self, state: &mut State, file: BorrowedFd<'_>, offset: u64, end: u64) -> Result<u64> {
        let dense_prefix = self.dense_prefix.load(Ordering::Acquire);
        if end <= dense_prefix {
            return Ok(0);
        }
        if offset > dense_prefix {
            state.sparse = true;
        }
        if state.sparse && fills_no_hole(file, offset, end) {
            return Ok(0);
        }
        let bytes = block_end(end) - dense_prefix.max(block_start(offset)).min(block_end(end));
        match self.quota.charge(Kind::Content, bytes) {
            Ok(()) => {
                state.charged += bytes;
                Ok(bytes)
            }
            Err(_) if state.sparse && has_all_blocks(file, end) => {
                self.quota.refusals.fetch_sub(1, Ordering::Relaxed);
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// Corrects the charge after a change from `offset` to `reached`, for which `taken` was charged.
    fn adjust_charge(
        &self,
        state: &mut State,
        file: BorrowedFd<'_>,
        offset: u64,
        reached: u64,
        taken: u64,
    ) {
        let dense_prefix = self.dense_prefix.load(Ordering::Acquire);
        let reaches_on = reached > offset && offset <= dense_prefix;
        if reaches_on {
            self.dense_prefix.fetch_max(block_end(reached), Ordering::AcqRel);
        }
        if state.sparse {
            self.recount(state, file);
        } else {
            let added =
                if reaches_on { block_end(reached).saturating_sub(dense_prefix) } else { 0 };
            self.set(state, state.charged - taken + added);
        }
    }

    /// Re-reads the file's block count and corrects the charge.
    fn recount(&self, state: &mut State, file: BorrowedFd<'_>) {
        if let Ok(stat) = rustix::fs::fstat(file) {
            self.set(state, blocks_of(&stat));
        }
    }

    fn set(&self, state: &mut State, charged: u64) {
        if charged > state.charged {
            self.quota.force_charge(Kind::Content, charged - state.charged);
        } else {
            self.quota.give_back(Kind::Content, state.charged - charged);
        }
        state.charged = charged;
    }
}

impl Drop for FileAccount {
    fn drop(&mut self) {
        let charged = self.lock().charged;
        self.quota.give_back(Kind::Content, charged);
    }
}

fn block_start(offset: u64) -> u64 {
    offset - offset % BLOCK_BYTES
}

fn block_end(offset: u64) -> u64 {
    offset.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX - u64::MAX % BLOCK_BYTES)
}

fn blocks_of(stat: &rustix::fs::Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * STAT_BLOCK_BYTES
}

fn fills_no_hole(file: BorrowedFd<'_>, offset: u64, end: u64) -> bool {
    let size = rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    end <= size && rustix::fs::seek(file, SeekFrom::Hole(offset)).is_ok_and(|hole| hole >= end)
}

/// Whether all blocks up to `end` exist. Preallocated blocks look like holes until they are written, so the block count
/// is compared with the size.
fn has_all_blocks(file: BorrowedFd<'_>, end: u64) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        end <= size && blocks_of(&stat) >= block_end(size)
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::io::Errno;

    use super::*;

    fn is_refusal(outcome: &Result<usize>) -> bool {
        matches!(outcome, Err(Errno::DQUOT))
    }

    const LIMIT: u64 = 16 * BLOCK_BYTES;

    struct Tried {
        file: File,
        quota: Arc<Quota>,
        file_use: FileAccount,
    }

    impl Tried {
        fn new() -> Self {
            let quota = Quota::of(Some(LIMIT), None).unwrap();
            let file_use = FileAccount::new(Arc::clone(&quota));
            Self { file: tempfile::tempfile().unwrap(), quota, file_use }
        }

        fn write(&self, offset: u64, length: u64) -> Result<usize> {
            let data = vec![1; usize::try_from(length).unwrap()];
            let write = || rustix::io::pwrite(&self.file, &data, offset);
            self.file_use.write(self.file.as_fd(), offset, length, write)
        }

        fn resize(&self, size: u64) {
            let resize = || rustix::fs::ftruncate(&self.file, size);
            self.file_use.resize(self.file.as_fd(), size, resize).unwrap();
        }

        fn allocate(&self, mode: FallocateFlags, offset: u64, length: u64) -> Result<()> {
            self.file_use.allocate(self.file.as_fd(), mode, offset, length)
        }

        fn blocks(&self) -> u64 {
            self.quota.used() / BLOCK_BYTES
        }

        fn there(&self) -> u64 {
            blocks_of(&rustix::fs::fstat(&self.file).unwrap()) / BLOCK_BYTES
        }
    }

    #[test]
    fn appending_is_counted_by_block_and_overwriting_is_not() {
        let tried = Tried::new();
        for step in 0..50 {
            tried.write(step * 100, 100).unwrap();
        }
        assert_eq!(tried.blocks(), 2);
        for _ in 0..100 {
            tried.write(10, 4000).unwrap();
        }
        assert_eq!(tried.blocks(), 2);
    }

    #[test]
    fn exactly_the_limit_fits_and_one_byte_more_does_not() {
        let tried = Tried::new();
        assert_eq!(tried.write(0, LIMIT), Ok(usize::try_from(LIMIT).unwrap()));
        assert!(is_refusal(&tried.write(LIMIT, 1)));
        assert!(is_refusal(&tried.write(LIMIT * 1000, 1)), "nor far beyond the end");
        assert_eq!(tried.write(0, LIMIT), Ok(usize::try_from(LIMIT).unwrap()), "over itself");
        assert_eq!(tried.file.metadata().unwrap().len(), LIMIT);
    }

    #[test]
    fn holes_are_free_until_they_are_filled() {
        let tried = Tried::new();
        tried.resize(1 << 40);
        assert_eq!(tried.blocks(), 0);
        for position in [1 << 30, 1 << 20, 1 << 35] {
            tried.write(position, 1).unwrap();
        }
        assert_eq!(tried.blocks(), 3);
        for block in 0..LIMIT / BLOCK_BYTES {
            let _ = tried.write((1 << 21) + 2 * block * BLOCK_BYTES, 1);
        }
        assert!(is_refusal(&tried.write(1 << 22, 1)));
        assert!(tried.there() <= LIMIT / BLOCK_BYTES, "no more on the disk than allowed");
        assert_eq!(tried.write(1 << 30, 4096), Ok(4096), "what is there can be written again");
    }

    #[test]
    fn truncated_bytes_are_given_back() {
        let tried = Tried::new();
        tried.write(0, LIMIT).unwrap();
        tried.resize(BLOCK_BYTES + 1);
        assert_eq!(tried.blocks(), 2);
        tried.resize(0);
        assert_eq!(tried.blocks(), 0);
        tried.write(0, LIMIT).unwrap();
    }

    #[test]
    fn preallocated_bytes_count_at_once_and_can_be_written() {
        let tried = Tried::new();
        assert_eq!(tried.allocate(FallocateFlags::empty(), 0, LIMIT + 1), Err(Errno::DQUOT));
        tried.allocate(FallocateFlags::empty(), 0, LIMIT).unwrap();
        assert_eq!(tried.quota.used(), LIMIT);
        tried.write(0, LIMIT).unwrap();
        assert_eq!(tried.quota.used(), LIMIT);
    }

    #[test]
    fn bytes_preallocated_beyond_the_end_count_too() {
        let tried = Tried::new();
        tried.write(0, 1).unwrap();
        tried.allocate(FallocateFlags::KEEP_SIZE, 0, LIMIT).unwrap();
        assert_eq!(tried.quota.used(), LIMIT);
        assert_eq!(
            tried.allocate(FallocateFlags::KEEP_SIZE, LIMIT, BLOCK_BYTES),
            Err(Errno::DQUOT)
        );
    }

    #[test]
    fn punched_holes_are_given_back_and_cost_again_when_filled() {
        let tried = Tried::new();
        tried.write(0, LIMIT).unwrap();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        tried.allocate(punch, 0, LIMIT / 2).unwrap();
        assert_eq!(tried.quota.used(), LIMIT / 2);
        tried.write(0, LIMIT / 2).unwrap();
        assert_eq!(tried.quota.used(), LIMIT);
        assert!(is_refusal(&tried.write(LIMIT, 1)));
    }

    #[test]
    fn a_write_that_fails_costs_nothing() {
        let tried = Tried::new();
        let full = || Err(Errno::NOSPC);
        let outcome = tried.file_use.write(tried.file.as_fd(), 0, LIMIT, full);
        assert_eq!((outcome, tried.quota.used()), (Err(Errno::NOSPC), 0));
        let short = || rustix::io::pwrite(&tried.file, &[1; 10], 0);
        tried.file_use.write(tried.file.as_fd(), 0, LIMIT, short).unwrap();
        assert_eq!(tried.blocks(), 1);
    }

    #[test]
    fn a_file_found_at_start_is_known_again_when_it_is_opened() {
        let tried = Tried::new();
        tried.write(0, 3 * BLOCK_BYTES).unwrap();
        let quota = Quota::of(Some(LIMIT), None).unwrap();
        let found = FileAccount::found(Arc::clone(&quota), 3 * BLOCK_BYTES / STAT_BLOCK_BYTES);
        found.reopened(tried.file.as_fd());
        assert_eq!(quota.used(), 3 * BLOCK_BYTES);
        assert_eq!(found.dense_prefix.load(Ordering::Relaxed), 3 * BLOCK_BYTES);
        assert!(!found.lock().sparse);
        drop(found);
        assert_eq!(quota.used(), 0, "what goes gives back");
    }

    #[test]
    fn random_changes_are_counted_as_the_file_system_counts_them() {
        let tried = Tried::new();
        let mut seed: u64 = 7;
        let mut next = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for step in 0..2000 {
            let (offset, length) = (next(2 * LIMIT), 1 + next(2 * BLOCK_BYTES));
            match next(10) {
                0 => tried.resize(offset),
                1 => {
                    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    tried.allocate(punch, offset, length).unwrap();
                }
                2 => drop(tried.allocate(FallocateFlags::empty(), offset, length)),
                _ => drop(tried.write(offset, length)),
            }
            // The file system's extent list may need a block that cannot be predicted.
            assert!(tried.quota.used() <= LIMIT + BLOCK_BYTES, "step {step}");
            assert!(tried.blocks().abs_diff(tried.there()) <= 1, "step {step}");
        }
    }
}
