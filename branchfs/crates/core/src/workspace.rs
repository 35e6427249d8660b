//! The branches of one base: their records in the store, and the verbs that act on them.
//!
//! The store (docs/format.md) holds one record and at least one layer for each branch. A branch's stack is its own
//! layers on top of its parent's stack at the fork; committing into a parent *branch* puts the child's layers on top of
//! the parent's, which is O(1) and leaves every other view as it is. Committing into main is [`crate::transaction`].
//!
//! [`Workspace`] is a facade over four owners of state, each with its own locks: `Store` (files, layers, branch log, trash),
//! `Drivers`, `BranchTable` (branches, views, guards, freezes) and `TransactionEngine` (journal, history). Each uses only
//! those named before it.
//!
//! Lock order: the turn of the transaction engine, which serializes commits, undos and all other users of the journal and
//! the history; the table of branches; the filesystem's gate. Short verbs hold the table's lock throughout. A commit takes
//! it only for lookups and for publishing. While it plans, copies and syncs, it has a guard of its branch. A comparison has
//! a guard of its branch, too, and a fork of its parent. An import takes the turn, so that its parent does not change.

mod background;
mod branch_log;
mod branch_ref;
mod branch_table;
mod branches;
mod change_set;
mod commit;
mod commit_checks;
mod commit_into_branch;
mod commit_options;
mod conflicts;
#[cfg(test)]
mod crash_tests;
mod create_branch;
mod ctime_log;
mod differences;
mod driver_sync;
mod external_store;
#[cfg(test)]
mod fault_tests;
mod history;
mod import;
mod inspection;
mod lower_files;
mod partial_commit;
mod probe;
mod rebase;
mod recovery;
mod store;
mod store_directory;
mod transaction_engine;
mod tree_copy;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::lazy_copy_up;
use crate::mount::{Mount, ViewId};
use crate::rooted_dir::RootedDir;
use crate::transaction::Change;

pub use crate::ids::{BranchId, MAIN_BRANCH};
pub use branch_ref::BranchRef;
pub use commit_options::CommitOptions;
pub use history::{PastInfo, UndoDirection, UndoResult};

use background::Background;
use branch_log::{BranchLog, Record};
pub use branch_log::{DRAFT, LOG, is_cut_off};
use branch_table::{BranchTable, info};
use branches::{Branch, Branches, children_of};
use ctime_log::CtimeLog;
use driver_sync::Drivers;
pub use external_store::Located;
use external_store::StoreLayout;
pub use inspection::inspect;
pub use rebase::Resolution;
use recovery::recover;
use store::{StagedLayers, Store};
pub use store_directory::LOG_FILES;
pub use store_directory::{
    FORMAT, Recovering, is_interrupted, lock_for_check, store_at, trim_trailing_zeros,
};
use store_directory::{Lock, TimesGuard, remove_new_store};
use transaction_engine::TransactionEngine;

/// What happens to the siblings of a committed branch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The first child to commit wins, its siblings become stale.
    FirstWinner,
    /// Siblings live on; disjoint changes may all be committed.
    Snapshot,
    /// As snapshot, and what was read must be unchanged.
    Serializable,
}

impl Policy {
    /// The word of the command line and the protocol.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstWinner => "first-winner",
            Self::Snapshot => "snapshot",
            Self::Serializable => "serializable",
        }
    }
}

/// Commits kept for undo unless the mount says otherwise.
pub const HISTORY_COMMITS_DEFAULT: usize = 10;

/// Bytes on disk that the history may hold; older commits go first.
const HISTORY_BYTES_MAX: u64 = 1 << 30;

/// How a workspace behaves.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What happens to the siblings of a committed branch.
    pub policy: Policy,
    /// How many commits can be undone at most.
    pub history_commits_max: usize,
    /// Opened to recover alone, by a process that has a [`Recovering`].
    pub is_recovery: bool,
    /// Opens the log in the store, which then belongs to this process. Called with the store, and its owner and group, when
    /// recovery has ended.
    pub open_log: fn(&Path, (u32, u32)),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::FirstWinner,
            history_commits_max: HISTORY_COMMITS_DEFAULT,
            is_recovery: false,
            open_log: |_, _| (),
        }
    }
}

/// The reported state of a branch.
#[derive(Clone, Debug)]
pub struct BranchInfo {
    /// Its number.
    pub id: BranchId,
    /// Its name.
    pub name: String,
    /// Its parent's number.
    pub parent: BranchId,
    /// `/main/a/b`.
    pub branch_path: String,
    /// A sibling was committed first.
    pub is_stale: bool,
    /// It has live children.
    pub is_frozen: bool,
    /// Seconds since 1970.
    pub created: f64,
    /// Bytes that it may add.
    pub disk_limit: Option<u64>,
    /// Bytes that it and its children have added, where that is limited.
    pub disk_used: Option<u64>,
    /// The number of requests that the disk limit refused since the daemon started.
    pub disk_refusals: Option<u64>,
}

/// What a commit did, or would do.
#[derive(Debug, Default)]
pub struct Committed {
    /// The paths of the base that changed.
    pub changes: Vec<Change>,
    /// The names of the siblings that became stale.
    pub stale: Vec<String>,
    /// Number of changed paths that were not committed. The branch stays open with them; it has ended if this is 0.
    pub remaining: usize,
    /// Earlier commits that the history drops for this one: they can no longer be undone.
    pub forgotten: Vec<Forgotten>,
    /// Its number in the history; `None` if it cannot be undone.
    pub number: Option<u64>,
}

/// A commit that the history has dropped, or would drop.
#[derive(Clone, Debug)]
pub struct Forgotten {
    /// Its number.
    pub id: u64,
    /// Name of the branch it was.
    pub branch: String,
}

/// The branches of one base. A facade: each verb uses the four owners of the state, which have locks of their own.
pub struct Workspace {
    store: Arc<Store>,
    driver: Arc<Drivers>,
    table: Arc<BranchTable>,
    engine: TransactionEngine,
    /// Messages about the recovery from a crash, for the user who mounts.
    recovery: Vec<String>,
}

impl Workspace {
    /// Opens the workspace over `base`, recovering what a crash left in `store`.
    ///
    /// # Errors
    /// Refuses where the store is in use, is damaged, or belongs to another base.
    pub fn open(base: &Path, store: Option<&Path>, settings: Settings) -> Result<Self, Error> {
        let base_path = fs::canonicalize(base).at(base)?;
        let base_metadata = fs::metadata(&base_path).at(&base_path)?;
        if !base_metadata.is_dir() {
            return Err(Error::Unsupported(format!(
                "the base {} is not a directory",
                base_path.display()
            )));
        }
        fs::read_dir(&base_path).at(&base_path)?;
        probe::require_openat2(&base_path)?;
        let owner = (base_metadata.uid(), base_metadata.gid());
        let places = StoreLayout::of(&base_path, store)?;
        let mut directories = vec![&places.store];
        directories.extend(Some(&places.base_store).filter(|_| places.is_external()));
        let made: Vec<&PathBuf> =
            directories.iter().copied().filter(|path| !path.exists()).collect();
        let waits = !settings.is_recovery;
        let claim = |path: &&PathBuf| {
            store_directory::claim(path, &base_path, owner, waits).map_err(probe::explain)
        };
        let opened =
            directories.iter().map(claim).collect::<Result<Vec<Lock>, Error>>().and_then(|locks| {
                Self::open_store(&base_path, places.clone(), owner, settings, locks)
            });
        if opened.is_err() {
            // A refused mount leaves nothing behind; the first error is reported.
            for path in made {
                let _ = TimesGuard::of(&base_path)
                    .and_then(|keep| remove_new_store(path).and_then(|()| keep.restore()));
            }
        }
        opened
    }

    /// Opens a workspace whose last user has gone. A process that another test is about to start has a copy of his lock for
    /// a moment: that is waited for.
    #[cfg(test)]
    pub(crate) fn open_again(base: &Path, store: Option<&Path>, settings: Settings) -> Self {
        const LET_GO_MAX: std::time::Duration = std::time::Duration::from_secs(60);
        let start = std::time::Instant::now();
        loop {
            match Self::open(base, store, settings) {
                Err(Error::Unsupported(said))
                    if said.contains("in use by another mount") && start.elapsed() < LET_GO_MAX =>
                {
                    std::thread::yield_now();
                }
                other => return other.unwrap(),
            }
        }
    }

    fn open_store(
        base_path: &Path,
        places: StoreLayout,
        owner: (u32, u32),
        settings: Settings,
        locks: Vec<Lock>,
    ) -> Result<Self, Error> {
        let mut locks = locks.into_iter();
        let lock_file = locks.next().expect("each directory of the store is locked");
        let base_path = base_path.to_path_buf();
        let canonical = |path: &Path| fs::canonicalize(path).at(path);
        let places = StoreLayout {
            store: canonical(&places.store)?,
            base_store: canonical(&places.base_store)?,
            ..places
        };
        places.link_pair(&base_path, owner)?;
        let StoreLayout {
            store: store_path,
            base_store: base_store_path,
            on_other_filesystem: is_foreign,
        } = places;
        let open = |path: &Path| RootedDir::open_root(path).at(path);
        let writable = open(&base_path)?.externally_modified();
        let root = writable.root().at(&base_path)?;
        let lower = match RootedDir::lower_of(root.as_fd()) {
            Ok(lower) => lower,
            Err(_) => open(&base_path)?.externally_modified(), // without the privilege to mount; views never write lower layers by design
        };
        let namespace = store_directory::choose_xattr_namespace(
            &store_path,
            probe::probe(&store_path, owner)?,
            owner,
        )?;
        if base_store_path != store_path {
            probe::probe(&base_store_path, owner)?; // commits are carried out there
        }
        let duplicate = |tree: &RootedDir| tree.root().and_then(rustix::io::dup).at(&base_path);
        let disk_roots = (duplicate(&writable)?, duplicate(&open(&base_store_path)?)?);
        let (records, loaded) = BranchLog::open(&store_path, owner)?;
        let mount = Arc::new(Mount::new(Arc::new(Layer::base(writable))));
        let transaction_lock = Arc::new(Mutex::new(()));
        let store = Arc::new(Store {
            records: Arc::new(records),
            owner,
            namespace,
            base: Arc::new(Layer::base(lower)),
            settings,
            lock_file,
            _home_lock: locks.next(),
            ctime_log: CtimeLog::new(Arc::clone(&transaction_lock), base_store_path.clone(), owner),
            base_store_path,
            on_other_filesystem: is_foreign,
            background: Background::new(Arc::clone(&mount.fail_stop)),
            last_number: AtomicU64::new(0),
            base_path,
            store_path,
        });
        let driver = Arc::new(Drivers::default());
        let table = Arc::new(BranchTable::new(mount, Arc::clone(&store), Arc::clone(&driver)));
        let engine = TransactionEngine::new(Arc::clone(&table), transaction_lock, disk_roots);
        let mut workspace = Self { store, driver, table, engine, recovery: Vec::new() };
        let recovered = recover(&workspace, loaded);
        // After it: recovery may need the last block of a full disk.
        (settings.open_log)(&workspace.store.store_path, owner);
        let before = store_directory::state_before(&workspace.store.lock_file);
        let mut recovery = before.recovered;
        recovery.extend(recovered?);
        // A full disk has no room for the mark: the next start then reports less.
        if settings.is_recovery {
            let _ = store_directory::mark_recovered(
                &workspace.store.lock_file,
                before.was_in_use,
                &recovery,
            );
        } else {
            let _ = store_directory::mark_in_use(&workspace.store.lock_file);
            if before.was_in_use {
                recovery.insert(0, "the last mount ended without being unmounted".to_owned());
                let names: Vec<String> = workspace
                    .table
                    .lock()
                    .values()
                    .map(|branch| branch.record.name.clone())
                    .collect();
                if !names.is_empty() {
                    recovery.push(format!("branches that are kept: {}", names.join(", ")));
                }
            }
        }
        workspace.recovery = recovery;
        if lazy_copy_up::is_possible_in(&workspace.store.store_path) {
            workspace.table.mount.copy_in_part();
        }
        Ok(workspace)
    }

    /// Messages about the recovery from a crash; empty after an ordinary end.
    pub fn recovery(&self) -> &[String] {
        &self.recovery
    }

    /// The views of all branches.
    pub fn mount(&self) -> &Arc<Mount> {
        &self.table.mount
    }

    /// The base directory.
    pub fn base(&self) -> &Path {
        &self.store.base_path
    }

    /// The store.
    pub fn store(&self) -> &Path {
        &self.store.store_path
    }

    /// Owner and group of the base.
    pub fn owner(&self) -> (u32, u32) {
        self.store.owner
    }

    /// The branch that a slot of the mount shows.
    pub fn id_at(&self, slot: ViewId) -> Option<BranchId> {
        self.table.id_at(slot)
    }

    /// A branch and its ancestors, without main.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn lineage(&self, selector: &BranchRef) -> Result<Vec<BranchId>, Error> {
        self.table.lineage(selector)
    }

    /// The name of an open branch; `None` for main.
    pub fn name_of(&self, id: BranchId) -> Option<String> {
        self.table.name_of(id)
    }

    /// All branches, oldest first.
    ///
    /// # Errors
    /// `NotFound` if a branch ends meanwhile.
    pub fn list(&self) -> Result<Vec<BranchInfo>, Error> {
        self.table.list()
    }

    /// Whether the store is on another file system or mount than the base, so that commits copy.
    pub fn is_external(&self) -> bool {
        self.store.is_external()
    }

    /// Aborts a branch and its children. Returns immediately; space is freed in the background.
    ///
    /// # Errors
    /// `NotFound`, `Io`, `Stopped`. Nothing is aborted then.
    pub fn abort(&self, selector: &BranchRef) -> Result<(), Error> {
        self.engine.admit_change()?;
        let mut branches = self.table.lock_when_free(selector, Branches::holds)?;
        self.engine.fail_stop.check()?;
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main cannot be aborted".to_owned()))?;
        let (id, name) = (branch.record.id, branch.record.name.clone());
        self.table.abort_below(&mut branches, id)?;
        tracing::debug!("aborted {name:?}");
        self.table.thaw_idle(&branches);
        drop(branches);
        self.store.empty_trash();
        Ok(())
    }

    /// Copies the layers of a branch to the base's file system, with an external store.
    fn stage(&self, branch: &Branch) -> Result<StagedLayers<'_>, Error> {
        self.store.stage(self.driver.current(), branch.record.id, &branch.record)
    }

    /// Ends the use of the store; it is removed when it holds nothing.
    ///
    /// # Errors
    /// `Io`: the store is left where it is then.
    pub fn close(&self) -> Result<(), Error> {
        let _transaction_lock = self.engine.lock_transactions();
        self.store.mark_closed()?;
        if self.engine.fail_stop.check().is_err() {
            return Ok(()); // recovery needs all of it
        }
        if !self.table.lock().is_empty() {
            return Ok(());
        }
        self.store.remove_if_unused()
    }
}

#[cfg(test)]
impl Workspace {
    /// What the first change in a branch begins with.
    fn make_layer_for_tests(&self, id: BranchId) {
        let slot = self.table.lock()[&id].slot;
        self.table.mount.mounted(slot).unwrap().lock().tree.make_layer().unwrap();
    }
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}
