//! How many bytes a branch may add: its disk limit, counted as its layers grow.
//!
//! A [`Quota`] is one branch's budget. Below a limited branch every branch has one, for what a child adds its parent
//! takes over when the child is committed: so a charge goes to the branch and to all above it, and fits in each or is
//! refused (EDQUOT). A limited layer has a [`Ledger`], which knows what each of its files was charged
//! ([`FileAccount`]): what is given back when a file goes is what was charged for it, whatever the file system says by then.
//!
//! Two things are counted apart, each against the same limit. *Content*: the blocks of regular files, by 4 KiB; holes
//! are free, overwriting is free. *Names*: what directories, inodes and their names take, at a flat rate, so that a
//! flood of empty files has an end too. Extended attributes are not counted beyond that rate.
//!
//! Cost: nothing for a branch without a limit; for a write that stays in blocks a file has already, one load; for one
//! that appends, one uncontended mutex and one compare-and-swap for each branch of the line. Only files with holes are
//! asked of the file system, after each write that may fill one.
//!
//! Locking: a file's `state`, then nothing. `files` is a leaf.

mod file_account;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::overlay::is_whiteout;
use crate::rooted_dir::{Result, RootedDir};

pub use file_account::FileAccount;

/// The unit for content: the block size of nearly all file systems.
pub(crate) const BLOCK_BYTES: u64 = 4096;

/// The flat charge for a name: an inode, and a name of maximum length in its directory.
const NAME_BYTES: u64 = 512;

/// The flat charge for a directory: its first block.
const DIRECTORY_BYTES: u64 = 4096;

/// No limit of its own: charges are only passed on.
const UNLIMITED: u64 = u64::MAX;

/// The two kinds of charges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Content,
    Names,
}

/// One branch's budget.
#[derive(Debug)]
pub struct Quota {
    limit: AtomicU64,
    content: AtomicU64,
    names: AtomicU64,
    refusals: AtomicU64,
    /// The parent branch's.
    above: Option<Arc<Self>>,
}

impl Quota {
    /// The quota of a branch with this limit below that parent; `None` if neither has one.
    pub(crate) fn of(limit: Option<u64>, above: Option<&Arc<Self>>) -> Option<Arc<Self>> {
        if limit.is_none() && above.is_none() {
            return None;
        }
        Some(Arc::new(Self {
            limit: AtomicU64::new(limit.unwrap_or(UNLIMITED)),
            content: AtomicU64::new(0),
            names: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            above: above.cloned(),
        }))
    }

    /// Bytes of content in the branch's layers, and in those of its descendants.
    pub fn used(&self) -> u64 {
        self.content.load(Ordering::Relaxed)
    }

    /// The number of refused requests in the branch since the start.
    pub(crate) fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Bytes of content that may still be added; `None` without any limit.
    pub fn available(&self) -> Option<u64> {
        let limits = self
            .self_and_ancestors()
            .map(|quota| (quota.limit.load(Ordering::Relaxed), quota.used()));
        limits
            .filter(|(limit, _)| *limit != UNLIMITED)
            .map(|(limit, used)| limit.saturating_sub(used))
            .min()
    }

    /// Removes this branch's own limit after its commit into its parent. Only the limits of the ancestors remain.
    pub(crate) fn remove_limit(&self) {
        self.limit.store(UNLIMITED, Ordering::Relaxed);
    }

    /// This quota and those of the ancestors.
    fn self_and_ancestors(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |quota| quota.above.as_deref())
    }

    fn counter(&self, kind: Kind) -> &AtomicU64 {
        match kind {
            Kind::Content => &self.content,
            Kind::Names => &self.names,
        }
    }

    /// Charges bytes if every quota in the line has them available.
    fn charge(&self, kind: Kind, bytes: u64) -> Result<()> {
        for (depth, quota) in self.self_and_ancestors().enumerate() {
            let limit = quota.limit.load(Ordering::Relaxed);
            let take =
                |used: u64| used.checked_add(bytes).filter(|sum| bytes == 0 || *sum <= limit);
            let counter = quota.counter(kind);
            if counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                for taken in self.self_and_ancestors().take(depth) {
                    taken.counter(kind).fetch_sub(bytes, Ordering::Relaxed);
                }
                self.refusals.fetch_add(1, Ordering::Relaxed);
                return Err(Errno::DQUOT);
            }
        }
        Ok(())
    }

    /// Charges bytes that are on the disk already, even above the limit.
    fn force_charge(&self, kind: Kind, bytes: u64) {
        for quota in self.self_and_ancestors() {
            quota.counter(kind).fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn give_back(&self, kind: Kind, bytes: u64) {
        for quota in self.self_and_ancestors() {
            quota.counter(kind).fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

/// The charges of a limited layer, by object.
#[derive(Debug)]
pub struct Ledger {
    quota: Arc<Quota>,
    /// By inode number in the layer.
    files: Mutex<HashMap<u64, Arc<FileAccount>>>,
}

/// An object that is about to lose a name in the layer.
#[derive(Debug)]
pub(crate) struct PendingRemoval {
    ino: u64,
    kind: FileType,
    is_last_name: bool,
}

/// The charge for a name that is being created; returned unless it is kept.
#[derive(Debug)]
#[must_use]
pub(crate) struct NameCharge<'a> {
    quota: &'a Quota,
    bytes: u64,
}

impl NameCharge<'_> {
    /// The name was created: keeps the charge.
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for NameCharge<'_> {
    fn drop(&mut self) {
        self.quota.give_back(Kind::Names, self.bytes);
    }
}

fn name_bytes(kind: FileType) -> u64 {
    if kind == FileType::Directory { DIRECTORY_BYTES } else { NAME_BYTES }
}

impl Ledger {
    /// The ledger of a layer. Charges what the layer holds already, if it is on disk (after a restart), even above the
    /// limit.
    pub(crate) fn of(quota: Arc<Quota>, layer: Option<&RootedDir>) -> Result<Self> {
        let ledger = Self { quota, files: Mutex::default() };
        let mut pending = Vec::new();
        pending.extend(layer.map(|tree| (tree, PathBuf::new())));
        while let Some((tree, directory)) = pending.pop() {
            for entry in tree.list(&directory)? {
                let path = directory.join(&entry.name);
                let stat = tree.stat(&path)?;
                if is_whiteout(tree, &path, &stat)? {
                    continue;
                }
                let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
                ledger.quota.force_charge(Kind::Names, name_bytes(kind));
                match kind {
                    FileType::Directory => pending.push((tree, path)),
                    FileType::RegularFile => {
                        ledger.files().entry(stat.stx_ino).or_insert_with(|| {
                            Arc::new(FileAccount::found(Arc::clone(&ledger.quota), stat.stx_blocks))
                        });
                    }
                    _ => {}
                }
            }
        }
        Ok(ledger)
    }

    /// The quota to which changes in the layer are charged.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<FileAccount>>> {
        // A map insertion that panicked lost one entry at most; the file is then found anew.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges a name of an object of this kind.
    pub(crate) fn charge_name(&self, kind: FileType) -> Result<NameCharge<'_>> {
        let bytes = name_bytes(kind);
        self.quota.charge(Kind::Names, bytes)?;
        Ok(NameCharge { quota: &self.quota, bytes })
    }

    /// Charges a name that exists already, even above the limit.
    pub(crate) fn count_name(&self, kind: FileType) {
        self.quota.force_charge(Kind::Names, name_bytes(kind));
    }

    /// The account of a file that has no name in the layer (yet).
    pub(crate) fn new_file(&self) -> Arc<FileAccount> {
        Arc::new(FileAccount::new(Arc::clone(&self.quota)))
    }

    /// The account of a copy with `bytes` of content, charged in advance.
    pub(crate) fn new_copy(&self, bytes: u64) -> Result<Arc<FileAccount>> {
        let file_use = FileAccount::new(Arc::clone(&self.quota));
        file_use.reserve(bytes)?;
        Ok(Arc::new(file_use))
    }

    /// From now on this inode's account is that one.
    pub(crate) fn register(&self, ino: u64, file_use: Arc<FileAccount>) {
        let before = self.files().insert(ino, file_use);
        drop(before); // outside the lock: dropping an account returns its charge
    }

    /// The account of a file of the layer. A file without one gets a new account.
    pub(crate) fn file(&self, ino: u64) -> Arc<FileAccount> {
        let mut files = self.files();
        Arc::clone(files.entry(ino).or_insert_with(|| self.new_file()))
    }

    /// The charge of the object at `path` that is about to be removed; `None` if it has none.
    pub(crate) fn pending_removal(
        &self,
        layer: &RootedDir,
        path: &Path,
    ) -> Result<Option<PendingRemoval>> {
        let stat = match layer.stat(path) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        if is_whiteout(layer, path, &stat)? {
            return Ok(None);
        }
        Ok(Some(PendingRemoval {
            ino: stat.stx_ino,
            kind: FileType::from_raw_mode(u32::from(stat.stx_mode)),
            is_last_name: stat.stx_nlink == 1,
        }))
    }

    /// Returns the charge of a removed object. A file that is still open keeps its account until it is closed.
    pub(crate) fn left(&self, leaving: &PendingRemoval) {
        self.quota.give_back(Kind::Names, name_bytes(leaving.kind));
        if leaving.kind == FileType::RegularFile && leaving.is_last_name {
            let gone = self.files().remove(&leaving.ino);
            drop(gone); // as in `enter`
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(limit: Option<u64>, above: Option<&Arc<Quota>>) -> Arc<Quota> {
        Quota::of(limit, above).unwrap()
    }

    #[test]
    fn a_charge_fits_in_every_branch_of_the_line_or_is_taken_from_none() {
        let parent = quota(Some(100), None);
        let child = quota(Some(60), Some(&parent));
        let other = quota(None, Some(&parent));
        assert_eq!(child.charge(Kind::Content, 60), Ok(()));
        assert_eq!(child.charge(Kind::Content, 1), Err(Errno::DQUOT), "its own limit");
        assert_eq!(other.charge(Kind::Content, 41), Err(Errno::DQUOT), "its parent's");
        assert_eq!((parent.used(), child.used(), other.used()), (60, 60, 0));
        assert_eq!(
            (parent.available(), child.available(), other.available()),
            (Some(40), Some(0), Some(40))
        );
        child.give_back(Kind::Content, 60);
        assert_eq!((parent.used(), child.used()), (0, 0));
    }

    #[test]
    fn after_a_commit_only_the_parents_limit_holds() {
        let parent = quota(Some(100), None);
        let child = quota(Some(10), Some(&parent));
        child.charge(Kind::Content, 10).unwrap();
        child.remove_limit();
        assert_eq!(child.charge(Kind::Content, 90), Ok(()));
        assert_eq!(child.charge(Kind::Content, 1), Err(Errno::DQUOT));
    }

    #[test]
    fn without_any_limit_there_is_no_quota() {
        assert!(Quota::of(None, None).is_none());
    }

    #[test]
    fn names_and_content_are_counted_apart() {
        let only = quota(Some(4096), None);
        only.charge(Kind::Content, 4096).unwrap();
        assert_eq!(only.charge(Kind::Names, 4096), Ok(()));
        assert_eq!(only.charge(Kind::Names, 1), Err(Errno::DQUOT));
        assert_eq!(only.charge(Kind::Content, u64::MAX), Err(Errno::DQUOT), "and no overflow");
    }

    #[test]
    fn many_threads_never_take_more_than_there_is() {
        let parent = quota(Some(1000), None);
        let taken: u64 = std::thread::scope(|scope| {
            let work = |_| {
                scope.spawn(|| {
                    let child = quota(Some(900), Some(&parent));
                    (0..500).filter(|_| child.charge(Kind::Content, 1).is_ok()).count() as u64
                })
            };
            let threads: Vec<_> = (0..4).map(work).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((taken, parent.used()), (1000, 1000));
    }
}
