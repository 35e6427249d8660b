//! The branches of one base: their records in the store, and the verbs that act on them.
//!
//! The store (docs/format.md) holds one record and at least one layer for each branch. A branch's stack is its own
//! layers on top of its parent's stack at the fork; committing into a parent *branch* puts the child's layers on top of
//! the parent's, which is O(1) and leaves every other view as it is. Committing into main is [`crate::commit`].
//!
//! Locking, in this order: `turn`, which commits, undos and whatever else the journal and the history are used by take one
//! after the other; `branches`, the table; the filesystem's gate. The table is locked through a short verb, and by a
//! commit only where it looks something up and where it happens: a commit that plans, copies and syncs holds its branch
//! ([`held`]) and nobody else. So does a comparison, and a fork with the branch it is forked from; an import takes the turn
//! too, so that what it is filled over stays as it is.

mod abort;
mod background;
mod beginning;
mod branch_guard;
mod branch_ref;
mod branches;
mod commit_into_branch;
mod commits;
mod conflicts;
#[cfg(test)]
mod crash_tests;
mod differences;
mod driver_sync;
mod external_store;
mod fail_stop;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod folding_tests;
mod history;
mod import;
mod inspection;
mod planning;
mod probe;
mod quiesce;
mod rebase;
mod records;
mod recovery;
mod rest;
mod store;
mod traces;
mod transaction;
mod veils;

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use crate::commit::{Change, Decided, Disk};
use crate::driver::Driver;
use crate::error::{Context, Error};
use crate::filesystem::{BranchFilesystem, Slot};
use crate::layer::Layer;
use crate::no_follow;
use crate::overlay::Namespace;
use crate::partial;
use crate::quota::Quota;
use crate::tree::Tree;

pub(crate) use branch_ref::{Selector, directory_name};
pub(crate) use commits::CommitOptions;
pub(crate) use history::{PastInfo, Towards};

use background::Background;
use branches::Branches;
pub(crate) use external_store::Located;
use external_store::Places;
pub(crate) use fail_stop::FailStop;
pub(crate) use inspection::inspect;
pub(crate) use probe::SCRATCH;
pub(crate) use rebase::Resolution;
pub(crate) use records::{DRAFT, LOG, is_cut_off};
use records::{Line, Record, Records};
pub(crate) use store::{
    FORMAT, Recovering, is_interrupted, lock_for_check, store_at, written_part,
};
use store::{KeptTimes, Lock, discard, give};

/// A branch's number; 0 is main. Never used twice.
pub(crate) type BranchId = u64;

/// The root branch.
pub(crate) const MAIN_BRANCH: BranchId = 0;

/// What happens to the siblings of a committed branch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
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
pub(crate) struct Settings {
    /// What happens to the siblings of a committed branch.
    pub(crate) policy: Policy,
    /// How many commits can be undone at most.
    pub(crate) history_commits_max: usize,
    /// Opened to recover alone, by a process that has a [`Recovering`].
    pub(crate) is_recovery: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::FirstWinner,
            history_commits_max: HISTORY_COMMITS_DEFAULT,
            is_recovery: false,
        }
    }
}

/// A branch that is open.
#[derive(Clone, Debug)]
struct Branch {
    record: Record,
    slot: Slot,
    /// Its whole stack, top first, ending with the base.
    stack: Vec<Arc<Layer>>,
    /// Where its disk use is limited, by itself or by a branch above it.
    quota: Option<Arc<Quota>>,
}

/// A branch as it is reported.
#[derive(Clone, Debug)]
pub(crate) struct BranchInfo {
    /// Its number.
    pub(crate) id: BranchId,
    /// Its name.
    pub(crate) name: String,
    /// Its parent's number.
    pub(crate) parent: BranchId,
    /// `/main/a/b`.
    pub(crate) branch_path: String,
    /// A sibling was committed first.
    pub(crate) is_stale: bool,
    /// It has live children.
    pub(crate) is_frozen: bool,
    /// Seconds since 1970.
    pub(crate) created: f64,
    /// Bytes that it may add.
    pub(crate) disk_limit: Option<u64>,
    /// Bytes that it and its children have added, where that is limited.
    pub(crate) disk_used: Option<u64>,
    /// How often it was refused more since the daemon started.
    pub(crate) disk_refusals: Option<u64>,
}

/// What a commit did, or would do.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    pub(crate) changes: Vec<Change>,
    pub(crate) stale: Vec<String>,
    /// Changed paths that were not committed: the branch goes on with them. It has ended where there are none.
    pub(crate) remaining: usize,
    /// Earlier commits that the history drops for this one: they can no longer be undone.
    pub(crate) forgotten: Vec<Forgotten>,
}

/// A commit that the history has dropped, or would drop.
#[derive(Clone, Debug)]
pub(crate) struct Forgotten {
    /// Its number.
    pub(crate) id: u64,
    /// Name of the branch it was.
    pub(crate) branch: String,
}

/// The base, its store and its branches.
pub(crate) struct Workspace {
    base_path: PathBuf,
    store_path: PathBuf,
    /// Where journal, history and veils are: the store, but where that is elsewhere ([`elsewhere`]).
    home_path: PathBuf,
    /// The store numbers its objects by itself.
    is_foreign: bool,
    owner: (u32, u32),
    namespace: Namespace,
    base: Arc<Layer>,
    disk_roots: (OwnedFd, OwnedFd),
    lock_file: Lock,
    /// Held as long as the workspace, where it is another one.
    _home_lock: Option<Lock>,
    /// What a crash left, and what was done about it, for who mounts.
    recovery: Vec<String>,
    pub(crate) filesystem: Arc<BranchFilesystem>,
    /// The background takes it too, to delete what shares objects with the base ([`traces`]).
    turn: Arc<Mutex<()>>,
    branches: Mutex<Branches>,
    records: Arc<Records>,
    /// A branch was held, and is no more.
    let_go: Condvar,
    settings: Settings,
    driver: OnceLock<Box<dyn Driver>>,
    background: Background,
    pub(crate) fail_stop: Arc<FailStop>,
    /// A transaction that was applied and is not complete; taken with the turn held.
    pending: Mutex<Option<Decided>>,
    /// The last number given to a branch, a layer or a transaction.
    last_number: AtomicU64,
}

impl Workspace {
    /// Opens the workspace over `base`, recovering what a crash left in `store`.
    ///
    /// # Errors
    /// Refuses where the store is in use, is damaged, or belongs to another base.
    pub(crate) fn open(
        base: &Path,
        store: Option<&Path>,
        settings: Settings,
    ) -> Result<Self, Error> {
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
        let places = Places::of(&base_path, store)?;
        let mut directories = vec![&places.store];
        directories.extend(Some(&places.home).filter(|_| places.is_elsewhere()));
        let made: Vec<&PathBuf> =
            directories.iter().copied().filter(|path| !path.exists()).collect();
        let waits = !settings.is_recovery;
        let claim =
            |path: &&PathBuf| store::claim(path, &base_path, owner, waits).map_err(probe::explain);
        let opened =
            directories.iter().map(claim).collect::<Result<Vec<Lock>, Error>>().and_then(|locks| {
                Self::open_store(&base_path, places.clone(), owner, settings, locks)
            });
        if opened.is_err() {
            // A mount that is refused leaves nothing behind; the error that is told is the first one.
            for path in made {
                let _ = KeptTimes::of(&base_path)
                    .and_then(|keep| discard(path).and_then(|()| keep.restore()));
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
        places: Places,
        owner: (u32, u32),
        settings: Settings,
        locks: Vec<Lock>,
    ) -> Result<Self, Error> {
        let mut locks = locks.into_iter();
        let lock_file = locks.next().expect("each directory of the store is locked");
        let base_path = base_path.to_path_buf();
        let canonical = |path: &Path| fs::canonicalize(path).at(path);
        let places =
            Places { store: canonical(&places.store)?, home: canonical(&places.home)?, ..places };
        places.pair(&base_path, owner)?;
        let Places { store: store_path, home: home_path, is_foreign } = places;
        let open = |path: &Path| Tree::open_root(path).at(path);
        let writable = open(&base_path)?.shared();
        // Lower layers are reached through a read-only mount: a mistake would be EROFS, not a changed base.
        let root = writable.root().at(&base_path)?;
        let lower = match crate::sys::read_only_clone(root.as_fd()) {
            Ok(root) => Tree::new(root).shared(),
            Err(_) => open(&base_path)?.shared(), // without the privilege to mount; views never write lower layers by design
        };
        let namespace = store::settle_marks(&store_path, probe::probe(&store_path, owner)?, owner)?;
        if home_path != store_path {
            probe::probe(&home_path, owner)?; // commits are carried out there
        }
        let duplicate = |tree: &Tree| tree.root().and_then(rustix::io::dup).at(&base_path);
        let disk_roots = (duplicate(&writable)?, duplicate(&open(&home_path)?)?);
        let (records, loaded) = Records::open(&store_path, owner)?;
        let filesystem = Arc::new(BranchFilesystem::new(Arc::new(Layer::base(writable))));
        let mut workspace = Self {
            records: Arc::new(records),
            owner,
            namespace,
            base: Arc::new(Layer::base(lower)),
            disk_roots,
            recovery: Vec::new(),
            lock_file,
            _home_lock: locks.next(),
            home_path,
            is_foreign,
            fail_stop: Arc::clone(&filesystem.fail_stop),
            background: Background::new(Arc::clone(&filesystem.fail_stop)),
            filesystem,
            turn: Arc::default(),
            branches: Mutex::default(),
            let_go: Condvar::new(),
            settings,
            driver: OnceLock::new(),
            pending: Mutex::default(),
            last_number: AtomicU64::new(0),
            base_path,
            store_path,
        };
        let recovered = workspace.recover(loaded);
        // After it: recovery may need the last block of a full disk.
        if let Err(error) = crate::log::open(&workspace.store_path, owner) {
            eprintln!("branchfs: the daemon has no log: {error}");
        }
        let before = store::state_before(&workspace.lock_file);
        let mut recovery = before.recovered;
        recovery.extend(recovered?);
        // A full disk has no room for the mark: the next start then says less, and this one goes on.
        if settings.is_recovery {
            let _ = store::mark_recovered(&workspace.lock_file, before.was_in_use, &recovery);
        } else {
            let _ = store::mark_in_use(&workspace.lock_file);
            if before.was_in_use {
                recovery.insert(0, "the last mount ended without being unmounted".to_owned());
                let names: Vec<String> =
                    workspace.lock().values().map(|branch| branch.record.name.clone()).collect();
                if !names.is_empty() {
                    recovery.push(format!("branches that are kept: {}", names.join(", ")));
                }
            }
        }
        workspace.recovery = recovery;
        if partial::is_possible_in(&workspace.store_path) {
            workspace.filesystem.copy_in_part();
        }
        Ok(workspace)
    }

    /// What a crash left, and what was done about it; empty after an ordinary end.
    pub(crate) fn recovery(&self) -> &[String] {
        &self.recovery
    }

    /// The base directory.
    pub(crate) fn base(&self) -> &Path {
        &self.base_path
    }

    /// The store.
    pub(crate) fn store(&self) -> &Path {
        &self.store_path
    }

    /// Owner and group of the base.
    pub(crate) fn owner(&self) -> (u32, u32) {
        self.owner
    }

    fn lock(&self) -> MutexGuard<'_, Branches> {
        // Every verb leaves the table right before it can fail or panic; a poisoned lock hides nothing half-done.
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disk(&self) -> Result<Disk, Error> {
        let duplicate = |root: &OwnedFd| rustix::io::dup(root).map(Tree::new).at(&self.base_path);
        Ok(Disk { base: duplicate(&self.disk_roots.0)?, store: duplicate(&self.disk_roots.1)? })
    }

    fn layer_path(&self, layer: u64) -> PathBuf {
        self.store_path.join("layers").join(layer.to_string())
    }

    /// Writes records as they are from now on. They are durable when this returns.
    fn write_records<'r>(
        &self,
        records: impl IntoIterator<Item = &'r Record>,
    ) -> Result<(), Error> {
        self.records.append(&records.into_iter().map(Line::of).collect::<Vec<_>>())?;
        self.records.sync()
    }

    /// The branch that a slot of the mount shows.
    pub(crate) fn id_at(&self, slot: Slot) -> Option<BranchId> {
        self.lock().iter().find(|(_, branch)| branch.slot == slot).map(|(id, _)| *id)
    }

    /// A branch and its ancestors, without main.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn lineage(&self, selector: &Selector) -> Result<Vec<BranchId>, Error> {
        let branches = self.lock();
        let first = selector.find(&branches)?;
        let above = |branch: &&Branch| branches.get(&branch.record.parent);
        Ok(std::iter::successors(first, above).map(|branch| branch.record.id).collect())
    }

    /// The name of an open branch; main is none.
    pub(crate) fn name_of(&self, id: BranchId) -> Option<String> {
        self.lock().get(&id).map(|branch| branch.record.name.clone())
    }

    /// All branches, oldest first.
    pub(crate) fn list(&self) -> Result<Vec<BranchInfo>, Error> {
        let branches = self.lock();
        branches.keys().map(|id| Self::info(&branches, *id)).collect()
    }

    fn info(branches: &Branches, id: BranchId) -> Result<BranchInfo, Error> {
        let branch = branches.get(&id).ok_or_else(|| Error::NotFound(id.to_string()))?;
        let mut names = vec![branch.record.name.as_str()];
        let mut parent = branch.record.parent;
        while let Some(above) = branches.get(&parent) {
            names.push(&above.record.name);
            parent = above.record.parent;
        }
        names.push("main");
        names.reverse();
        Ok(BranchInfo {
            id,
            name: branch.record.name.clone(),
            parent: branch.record.parent,
            branch_path: format!("/{}", names.join("/")),
            is_stale: branch.record.is_stale,
            is_frozen: !children_of(branches, id).is_empty(),
            created: branch.record.created as f64 / 1e9,
            disk_limit: branch.record.disk_limit,
            disk_used: branch.quota.as_ref().map(|quota| quota.used()),
            disk_refusals: branch.quota.as_ref().map(|quota| quota.refusals()),
        })
    }

    /// What the first change in a branch begins with.
    #[cfg(test)]
    fn make_layer_for_tests(&self, id: BranchId) {
        let slot = self.lock()[&id].slot;
        self.filesystem.mounted(slot).unwrap().lock().make_layer().unwrap();
    }

    fn make_directory(&self, path: &Path) -> Result<(), Error> {
        no_follow::make_directory(path).at(path)?;
        give(path, self.owner)
    }

    fn freeze(&self, slot: Slot) {
        if let Ok(mounted) = self.filesystem.mounted(slot) {
            mounted.freeze();
        }
    }

    fn thaw(&self, slot: Slot, times: usize) {
        if let Ok(mounted) = self.filesystem.mounted(slot) {
            (0..times).for_each(|_| mounted.thaw());
        }
    }

    /// Ends the use of the store; it is removed when it holds nothing.
    ///
    /// # Errors
    /// `Io`: the store is left where it is then.
    pub(crate) fn close(&self) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.driver().end();
        store::mark_closed(&self.lock_file).at(&self.store_path)?;
        if self.fail_stop.check().is_err() {
            return Ok(()); // recovery needs all of it
        }
        let keeps = |root: &Path, name: &str| match no_follow::names(&root.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            names => names.at(root).map(|names| !names.is_empty()),
        };
        if !self.lock().is_empty() {
            return Ok(());
        }
        self.records.clear()?;
        // What was saved of a damaged branch, logs that are wanted after their branches.
        if keeps(&self.store_path, "lost")?
            || no_follow::exists(&self.store_path.join("logs/kept")).unwrap_or(true)
        {
            return Ok(());
        }
        let keep = KeptTimes::of(&self.base_path)?;
        if self.is_elsewhere() {
            if !store::remove_in_time(&self.store_path, store::TRASH_WAIT_MAX)? {
                return Ok(());
            }
            let link = self.home_path.join("store");
            no_follow::remove_file(&link).at(&link)?;
        }
        // A transaction to be recovered at the next start, or a commit that can be undone.
        if keeps(&self.home_path, "journal")? || keeps(&self.home_path, "history")? {
            return Ok(());
        }
        store::remove_in_time(&self.home_path, store::TRASH_WAIT_MAX)?;
        keep.restore()
    }
}

fn children_of(branches: &Branches, id: BranchId) -> Vec<String> {
    let live = branches.children(id).filter(|branch| !branch.record.is_stale);
    live.map(|branch| branch.record.name.clone()).collect()
}

/// Live branches below `top`, children before their own children.
fn below(branches: &Branches, top: BranchId) -> Vec<BranchId> {
    let mut found = vec![top];
    let mut position = 0;
    while let Some(&parent) = found.get(position) {
        let live = branches.children(parent).filter(|branch| !branch.record.is_stale);
        found.extend(live.map(|branch| branch.record.id));
        position += 1;
    }
    found.split_off(1)
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}
