//! The branches of one base: their records in the store, and the verbs that act on them.
//!
//! The store (docs/format.md) holds one record and at least one layer for each branch. A branch's stack is its own
//! layers on top of its parent's stack at the fork; committing into a parent *branch* puts the child's layers on top of
//! the parent's, which is O(1) and leaves every other view as it is. Committing into main is [`crate::commit`].
//!
//! Locking, in this order: `turn`, which commits, undos and whatever else the journal and the history are used by take one
//! after the other; `branches`, the table; the filesystem's gate. The table is locked through a short verb, and by a
//! commit only where it looks something up and where it happens: a commit that plans, copies and syncs holds its branch
//! ([`held`]) and nobody else.

mod background;
mod branches;
mod commits;
mod conflicts;
#[cfg(test)]
mod crash_tests;
mod differences;
mod elsewhere;
mod held;
mod history;
mod import;
mod nested;
mod presentation;
mod probe;
mod selector;
mod store;
mod veils;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::commit::{self, Change, Disk, Kind};
use crate::driver::Driver;
use crate::error::{Context, Error};
use crate::filesystem::{Filesystem, MAIN, Mounted, Slot};
use crate::layer::{Layer, LayerId, copy_metadata};
use crate::overlay::Namespace;
use crate::partial;
use crate::quota::Quota;
use crate::tree::Tree;

pub(crate) use commits::CommitOptions;
pub(crate) use history::{PastInfo, Towards};
pub(crate) use selector::{Selector, directory_name};

use background::Background;
pub(crate) use background::stand_back;
use branches::Branches;
use elsewhere::Places;
use selector::check_name;
pub(crate) use store::{FORMAT, written_part};
use store::{KeptTimes, Lock, discard, give, lock_store, make_store, write_private};

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
}

impl Default for Settings {
    fn default() -> Self {
        Self { policy: Policy::FirstWinner, history_commits_max: HISTORY_COMMITS_DEFAULT }
    }
}

/// A branch as the store records it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    id: BranchId,
    name: String,
    parent: BranchId,
    /// Own layers, top first.
    layers: Vec<u64>,
    /// Those between its own and the base, top first: the parent's at the fork, and the veils of commits since.
    below: Vec<u64>,
    is_stale: bool,
    /// Nanoseconds since 1970.
    created: i64,
    /// Bytes that the branch may add.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk_limit: Option<u64>,
    /// A commit into this branch that the other records may not know of yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    absorbed: Option<Absorbed>,
}

/// A child that was committed into its parent, and the branches that are stale with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Absorbed {
    child: BranchId,
    stale: Vec<BranchId>,
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
}

/// Records that are written and not yet in their place: only when all of them are synced may one be there.
#[must_use]
struct Drafts(Vec<(BranchId, PathBuf)>);

/// Fills a layer that nobody sees yet.
type Fill<'f> = Box<dyn FnOnce(&Layer, &[Arc<Layer>]) -> Result<(), Error> + 'f>;

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
    pub(crate) filesystem: Arc<Filesystem>,
    turn: Mutex<()>,
    branches: Mutex<Branches>,
    /// A branch was held, and is no more.
    let_go: Condvar,
    settings: Settings,
    driver: OnceLock<Box<dyn Driver>>,
    background: Background,
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
        let owner = (base_metadata.uid(), base_metadata.gid());
        let places = Places::of(&base_path, store)?;
        let keep = KeptTimes::of(&base_path)?;
        let mut directories = vec![&places.home];
        directories.extend(Some(&places.store).filter(|_| places.is_elsewhere()));
        let made: Vec<&PathBuf> =
            directories.iter().copied().filter(|path| !path.exists()).collect();
        let opened = directories
            .iter()
            .try_for_each(|path| make_store(path, owner).map_err(probe::explain))
            .and_then(|()| keep.restore())
            .and_then(|()| Self::open_store(&base_path, places.clone(), owner, settings));
        if opened.is_err() {
            // A mount that is refused leaves nothing behind; the error that is told is the first one.
            for path in made {
                let _ = discard(path).and_then(|()| keep.restore());
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
    ) -> Result<Self, Error> {
        let base_path = base_path.to_path_buf();
        let canonical = |path: &Path| fs::canonicalize(path).at(path);
        let places =
            Places { store: canonical(&places.store)?, home: canonical(&places.home)?, ..places };
        let lock = lock_store(&places.store)?;
        let home_lock = places.is_elsewhere().then(|| lock_store(&places.home)).transpose()?;
        places.pair(&base_path, owner)?;
        let Places { store: store_path, home: home_path, is_foreign } = places;
        let open = |path: &Path| Tree::open_root(path).at(path);
        let writable = open(&base_path)?;
        // Lower layers are reached through a read-only mount: a mistake would be EROFS, not a changed base.
        let lower = match crate::sys::read_only_clone(writable.root()) {
            Ok(root) => Tree::new(root),
            Err(_) => open(&base_path)?, // without the privilege to mount; views never write lower layers by design
        };
        let namespace = store::settle_marks(&store_path, probe::probe(&store_path)?, owner)?;
        if home_path != store_path {
            probe::probe(&home_path)?; // commits are carried out there
        }
        let duplicate = |tree: &Tree| rustix::io::dup(tree.root()).at(&base_path);
        let disk_roots = (duplicate(&writable)?, duplicate(&open(&home_path)?)?);
        let mut workspace = Self {
            owner,
            namespace,
            base: Arc::new(Layer::base(lower)),
            disk_roots,
            recovery: Vec::new(),
            lock_file: lock,
            _home_lock: home_lock,
            home_path,
            is_foreign,
            filesystem: Arc::new(Filesystem::new(Arc::new(Layer::base(writable)))),
            turn: Mutex::default(),
            branches: Mutex::default(),
            let_go: Condvar::new(),
            settings,
            driver: OnceLock::new(),
            background: Background::default(),
            last_number: AtomicU64::new(0),
            base_path,
            store_path,
        };
        let mut recovery = workspace.recover()?;
        // A full disk has no room for the mark: the next start then says less, and this one goes on.
        if store::mark_in_use(&workspace.lock_file).unwrap_or(false) {
            recovery.insert(0, "the last mount ended without being unmounted".to_owned());
            let names: Vec<String> =
                workspace.lock().values().map(|branch| branch.record.name.clone()).collect();
            if !names.is_empty() {
                recovery.push(format!("branches that are kept: {}", names.join(", ")));
            }
        }
        workspace.recovery = recovery;
        // After it: recovery may need the last block of a full disk.
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

    fn record_path(&self, id: BranchId) -> PathBuf {
        self.store_path.join("branches").join(format!("{id}.json"))
    }

    /// Writes the record of a new branch. It is not synced: see [`Filesystem::set_unsynced_record`].
    fn write_new_record(&self, record: &Record) -> Result<(), Error> {
        let path = self.record_path(record.id);
        fs::rename(self.draft_record(record)?, &path).at(&path)
    }

    /// Replaces a record. After a loss of power it is the old one or the new one.
    fn write_record(&self, record: &Record) -> Result<(), Error> {
        let (path, draft) = (self.record_path(record.id), self.draft_record(record)?);
        fs::File::open(&draft).and_then(|file| file.sync_data()).at(&draft)?;
        fs::rename(&draft, &path).at(&path)
    }

    /// Drafts the records of those of the branches that there are.
    fn draft_records<'i>(
        &self,
        branches: &Branches,
        ids: impl Iterator<Item = &'i BranchId>,
    ) -> Result<Drafts, Error> {
        let mut drafts = Vec::new();
        for id in ids {
            if let Some(branch) = branches.get(id) {
                drafts.push((*id, self.draft_record(&branch.record)?));
            }
        }
        Ok(Drafts(drafts))
    }

    /// Puts drafts, which are synced, in the place of the records; those of branches that were aborted meanwhile go.
    fn put_records(&self, branches: &Branches, Drafts(drafts): Drafts) -> Result<(), Error> {
        for (id, draft) in drafts {
            if branches.contains_key(&id) {
                let path = self.record_path(id);
                fs::rename(draft, &path).at(&path)?;
            } else {
                fs::remove_file(&draft).at(&draft)?;
            }
        }
        Ok(())
    }

    /// Makes the records' directory durable.
    fn sync_records(&self) -> Result<(), Error> {
        let path = self.store_path.join("branches");
        fs::File::open(&path).and_then(|directory| directory.sync_all()).at(&path)
    }

    fn draft_record(&self, record: &Record) -> Result<PathBuf, Error> {
        let draft = self.record_path(record.id).with_extension("new");
        let text = serde_json::to_vec(record).map_err(|error| Error::Corrupt(error.to_string()))?;
        write_private(&draft, &text)?;
        give(&draft, self.owner)?;
        Ok(draft)
    }

    /// Brings the store in line after a crash, and shows the branches that are in it.
    fn recover(&self) -> Result<Vec<String>, Error> {
        let mut done = Vec::new();
        let disk = self.disk()?;
        let mut records = self.read_records(&mut done)?;
        for recovered in commit::recover(&disk)? {
            let header = &recovered.decided.header;
            let trash = self.trash_name("tx", header.transaction);
            done.push(describe(header.kind, recovered.is_committed, &records));
            if !recovered.is_committed {
                recovered.decided.discard(&disk, &trash)?;
                continue;
            }
            for id in &header.stale {
                if let Some(record) = records.get_mut(id) {
                    record.is_stale = true;
                    self.write_record(record)?;
                }
            }
            self.veil_records(&mut records, &disk, &recovered.decided)?;
            if let Kind::Commit { branch } = header.kind {
                if let Some(mut record) = records.remove(&branch) {
                    self.unlink_kept(&record)?;
                    record.layers.clear(); // they go with the commit; copies of them are nobody's now
                    self.drop_record(&record)?;
                }
            }
            self.sync_records_elsewhere()?;
            self.keep(&disk, &recovered.decided, history::oldest(records.values()))?;
        }
        self.settle_absorbed(&mut records)?;
        let past = commit::history(&disk)?;
        let numbers = past.iter().map(|past| past.commit.header.transaction);
        let last = records.keys().copied().chain(numbers).max();
        self.last_number.store(last.unwrap_or(0), Ordering::Relaxed);
        let keep: Vec<u64> = records
            .values()
            .flat_map(|record| record.layers.iter().chain(&record.below).copied())
            .collect();
        if self.is_elsewhere() {
            let own: Vec<u64> =
                records.values().flat_map(|record| record.layers.iter().copied()).collect();
            let veils: Vec<u64> = keep.iter().copied().filter(|id| !own.contains(id)).collect();
            self.drop_unknown_layers(&self.home_path, &veils)?;
        }
        self.drop_unknown_layers(&self.store_path, &keep)?;
        let mut branches = self.lock();
        for record in records.into_values() {
            let above = branches.get(&record.parent).and_then(|parent| parent.quota.as_ref());
            let quota = Quota::of(record.disk_limit, above);
            let stack = self.open_stack(&record, &branches, quota.as_ref())?;
            let parent = branches.get(&record.parent).map_or(MAIN, |parent| parent.slot);
            let slot = self.filesystem.add(OsStr::new(&record.name), parent, stack.clone());
            if record.is_stale {
                self.filesystem.set_stale(slot);
            } else {
                self.freeze(parent);
            }
            branches.insert(record.id, Branch { record, slot, stack, quota });
        }
        drop(branches);
        self.empty_trash();
        Ok(done)
    }

    /// Goes on where a crash cut a commit into a branch short.
    fn settle_absorbed(&self, records: &mut BTreeMap<BranchId, Record>) -> Result<(), Error> {
        let absorbed: Vec<(BranchId, Absorbed)> = records
            .values_mut()
            .filter_map(|record| Some((record.id, record.absorbed.take()?)))
            .collect();
        for (parent, Absorbed { child, stale }) in absorbed {
            for id in stale {
                if let Some(record) = records.get_mut(&id).filter(|record| !record.is_stale) {
                    record.is_stale = true;
                    self.write_record(record)?;
                }
            }
            if let Some(child) = records.remove(&child) {
                self.drop_record(&child)?;
            }
            self.write_record(&records[&parent])?;
        }
        Ok(())
    }

    /// All records. Of those that a loss of power has cut off nothing was synced in the branch, nor in one below it: they
    /// go, and what was written all the same is set aside; `done` gets a sentence on each.
    fn read_records(&self, done: &mut Vec<String>) -> Result<BTreeMap<BranchId, Record>, Error> {
        let directory = self.store_path.join("branches");
        let mut records: BTreeMap<BranchId, Record> = BTreeMap::new();
        let mut torn = BTreeSet::new();
        for entry in fs::read_dir(&directory).at(&directory)? {
            let path = entry.at(&directory)?.path();
            let id = path.file_stem().and_then(OsStr::to_str).and_then(|stem| stem.parse().ok());
            if path.extension() != Some(OsStr::new("json")) {
                fs::remove_file(&path).at(&path)?; // a draft that was never finished
                continue;
            }
            let damaged = |what: &str| Error::Corrupt(format!("{}: {what}", path.display()));
            let text = fs::read(&path).at(&path)?;
            match (serde_json::from_slice::<Record>(store::written_part(&text)), id) {
                (Ok(record), Some(id)) if record.id == id => drop(records.insert(id, record)),
                (Ok(_), _) => return Err(damaged("it is another branch's record")),
                (Err(error), Some(id)) if error.is_eof() => drop(torn.insert(id)),
                (Err(error), _) => return Err(damaged(&error.to_string())),
            }
        }
        // A child's record is synced after its parent's.
        while let Some(id) =
            records.values().find(|record| torn.contains(&record.parent)).map(|record| record.id)
        {
            records.remove(&id);
            torn.insert(id);
        }
        for id in torn {
            done.push(self.set_aside(id)?);
        }
        Ok(records)
    }

    /// Takes a branch out of the store whose record a loss of power has damaged. What its layer holds is kept in `lost`.
    fn set_aside(&self, id: BranchId) -> Result<String, Error> {
        let (record, layer) = (self.record_path(id), self.layer_path(id));
        let is_empty = match fs::read_dir(layer.join("upper")) {
            Ok(mut entries) => entries.next().is_none(),
            Err(_) => true, // half made, or gone
        };
        if is_empty {
            fs::remove_file(&record).at(&record)?;
            return Ok("an empty branch was lost with the power".to_owned());
        }
        let lost = self.store_path.join("lost");
        if !lost.exists() {
            self.make_directory(&lost)?;
        }
        // The layer first: without its record it would be thrown away.
        for (from, to) in [(&layer, id.to_string()), (&record, format!("{id}.json"))] {
            let to = lost.join(to);
            fs::rename(from, &to).at(from)?;
        }
        Ok(format!(
            "a branch was lost with the power, nothing in it had been synced; what was written of it is in {}",
            lost.join(id.to_string()).display()
        ))
    }

    fn drop_unknown_layers(&self, store: &Path, keep: &[u64]) -> Result<(), Error> {
        let directory = store.join("layers");
        for entry in fs::read_dir(&directory).at(&directory)? {
            let entry = entry.at(&directory)?;
            let known = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
                .is_some_and(|id| keep.contains(&id));
            if !known {
                self.throw_away(&entry.path(), "lost");
            }
        }
        Ok(())
    }

    /// Opens a recorded branch's layers on top of its parent's stack.
    fn open_stack(
        &self,
        record: &Record,
        branches: &Branches,
        quota: Option<&Arc<Quota>>,
    ) -> Result<Vec<Arc<Layer>>, Error> {
        let mut stack = Vec::new();
        for layer in &record.layers {
            let path = self.layer_path(*layer);
            commits::remove_tree(&path.join("work"))?;
            let layer = self.open_layer(*layer)?;
            layer.limit(quota.cloned()).at(&path)?;
            stack.push(Arc::new(layer));
        }
        let known = |id: u64| {
            let mut layers = branches.values().flat_map(|branch| &branch.stack);
            layers.find(|layer| layer.id.0 == id).cloned()
        };
        // Nothing is read through a stale branch, and the layers of its parent may be gone.
        for id in record.below.iter().filter(|_| !record.is_stale) {
            stack.push(match known(*id) {
                Some(layer) => layer,
                None => {
                    let path = self.home_layer_path(*id);
                    Arc::new(Layer::open_veil(LayerId(*id), &path, self.namespace)?)
                }
            });
        }
        stack.push(Arc::clone(&self.base));
        Ok(stack)
    }

    /// Opens a branch's own layer.
    fn open_layer(&self, id: u64) -> Result<Layer, Error> {
        let path = self.layer_path(id);
        let mut layer = Layer::open(LayerId(id), &path, self.namespace, self.is_foreign)?;
        if self.settings.policy == Policy::Serializable {
            layer.record_reads(&path.join("reads"))?;
        }
        Ok(layer)
    }

    fn make_directory(&self, path: &Path) -> Result<(), Error> {
        fs::DirBuilder::new().mode(0o700).create(path).at(path)?;
        give(path, self.owner)
    }

    /// Creates a branch. O(1): two directories and a record, whatever the size of the tree.
    ///
    /// # Errors
    /// `Name`, `Exists`, `NotFound` (parent), `Stale` (parent). Nothing is left behind then.
    pub(crate) fn create(&self, name: &str, parent: &Selector) -> Result<BranchInfo, Error> {
        self.create_limited(name, parent, None)
    }

    /// Creates a branch that may add so many bytes.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_limited(
        &self,
        name: &str,
        parent: &Selector,
        disk_limit: Option<u64>,
    ) -> Result<BranchInfo, Error> {
        self.create_filled(name, parent, disk_limit, None)
    }

    /// Creates a branch whose layer `fill` fills before anybody sees it: it gets the layer, and the stack below.
    fn create_filled(
        &self,
        name: &str,
        parent: &Selector,
        disk_limit: Option<u64>,
        fill: Option<Fill<'_>>,
    ) -> Result<BranchInfo, Error> {
        check_name(OsStr::new(name))?;
        let _frozen = self.await_kernel_writers(parent)?;
        let mut branches = self.lock_unheld(parent, Branches::is_held)?;
        if branches.named(name).is_some() {
            return Err(Error::Exists(name.to_owned()));
        }
        let above = parent.find(&branches)?.and_then(|parent| parent.quota.as_ref());
        let quota = Quota::of(disk_limit, above);
        let (parent_id, parent_slot, parent_stack) = match parent.find(&branches)? {
            None => (MAIN_BRANCH, MAIN, vec![Arc::clone(&self.base)]),
            Some(parent) if parent.record.is_stale => {
                return Err(Error::Stale(parent.record.name.clone()));
            }
            Some(parent) => (parent.record.id, parent.slot, parent.stack.clone()),
        };
        let id = self.next_number();
        let path = self.layer_path(id);
        self.freeze_for_fork(parent_slot)?;
        self.freeze_presented(parent_id).inspect_err(|_| self.thaw(parent_slot, 1))?;
        let is_filled = fill.is_some();
        let created = now();
        let made = self.make_layer(id, &path, &parent_stack).and_then(|layer| {
            layer.limit(quota.clone()).at(&path)?;
            if let Some(fill) = fill {
                if quota.is_some() {
                    return Err(Error::Unsupported(format!(
                        "{name} would be below a branch with a disk limit, which an import does not heed"
                    )));
                }
                fill(&layer, &parent_stack)?;
            }
            let record = Record {
                id,
                name: name.to_owned(),
                parent: parent_id,
                layers: vec![id],
                below: branches
                    .get(&parent_id)
                    .map(|parent| [&parent.record.layers[..], &parent.record.below].concat())
                    .unwrap_or_default(),
                is_stale: false,
                created,
                disk_limit,
                absorbed: None,
            };
            self.write_new_record(&record)?;
            Ok((layer, record))
        });
        let (layer, record) = made.inspect_err(|_| {
            self.throw_away(&path, "unmade");
            self.thaw(parent_slot, 1);
            self.thaw_presented(&branches);
        })?;
        let mut stack = vec![Arc::new(layer)];
        stack.extend(parent_stack);
        // From here on nothing writes to the parent: what the child sees is settled.
        let gate = self.filesystem.close_gate();
        let slot = self.filesystem.add(OsStr::new(name), parent_slot, stack.clone());
        drop(gate);
        self.filesystem.set_unsynced_record(slot, self.record_path(id));
        branches.insert(id, Branch { record, slot, stack, quota });
        // What the kernel did not write from the start is left to the FUSE view.
        let presented = if is_filled { Ok(()) } else { self.present_new(&branches[&id]) };
        if let Err(error) = presented {
            self.abort_one(&mut branches, id)?;
            return Err(error);
        }
        Self::info(&branches, id)
    }

    fn make_layer(&self, id: u64, path: &Path, parent: &[Arc<Layer>]) -> Result<Layer, Error> {
        self.make_directory(path)?;
        let upper = path.join("upper");
        self.make_directory(&upper)?;
        let layer = self.open_layer(id)?;
        let root = Path::new("");
        let top = &parent[0].tree;
        let stat = top.stat(root).at(&self.base_path)?;
        copy_metadata((top, root, &stat), (&layer.tree, root)).at(&upper)?;
        Ok(layer)
    }

    /// Numbers grow with the clock, so that none is used twice over restarts.
    fn next_number(&self) -> u64 {
        let clock = u64::try_from(now() / 1_000_000).unwrap_or(0);
        let next = |last: u64| Some(clock.max(last + 1));
        let last = self.last_number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        last.map_or(clock, |last| clock.max(last + 1))
    }

    /// Drops a branch and its children. Returns at once; space is given back in the background.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub(crate) fn abort(&self, selector: &Selector) -> Result<(), Error> {
        let mut branches = self.lock_unheld(selector, Branches::holds)?;
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main cannot be aborted".to_owned()))?;
        let id = branch.record.id;
        self.abort_one(&mut branches, id)?;
        self.thaw_presented(&branches);
        drop(branches);
        self.empty_trash();
        Ok(())
    }

    fn abort_one(&self, branches: &mut Branches, id: BranchId) -> Result<(), Error> {
        let children: Vec<BranchId> = branches.children(id).map(|child| child.record.id).collect();
        for child in children {
            self.abort_one(branches, child)?;
        }
        let Some(branch) = branches.remove(&id) else {
            return Ok(());
        };
        if !branch.record.is_stale {
            let parent = branches.get(&branch.record.parent).map_or(MAIN, |parent| parent.slot);
            self.thaw(parent, 1);
        }
        self.retire_branch(branches, &branch)
    }

    /// Takes a branch, which is not in the table any more, out of the mount, and the layers that were its alone into the
    /// trash.
    fn retire_branch(&self, branches: &Branches, branch: &Branch) -> Result<(), Error> {
        self.driver().detach(branch.record.id);
        let mounted = {
            let _gate = self.filesystem.close_gate();
            self.filesystem.remove(branch.slot)
        };
        self.drop_record(&branch.record)?;
        let is_used = |layer: &u64| {
            let mut others = branches.values().map(|other| &other.record);
            others.any(|other| other.layers.contains(layer) || other.below.contains(layer))
        };
        // Only branches below it could look through its layers, and there are none any more.
        for layer in &branch.record.layers {
            self.throw_away(&self.layer_path(*layer), "layer");
        }
        // Those of branches above it are used by these.
        for veil in branch.record.below.iter().filter(|layer| !is_used(layer)) {
            self.throw_away(&self.home_layer_path(*veil), "veil");
        }
        if let Some(mounted) = mounted {
            self.outdate(mounted);
        }
        Ok(())
    }

    fn drop_record(&self, record: &Record) -> Result<(), Error> {
        let path = self.record_path(record.id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.at(&path)?,
        }
        Ok(())
    }

    fn drop_journal(&self, id: BranchId) {
        self.throw_away(&self.home_path.join("journal").join(id.to_string()), "failed");
        self.empty_trash(); // where the disk was full, the next try needs the room
    }

    fn trash_name(&self, what: &str, number: u64) -> PathBuf {
        Path::new("trash").join(format!("{what}-{number}-{}", now()))
    }

    /// Moves something of the store into the trash. What cannot be moved stays where it is and is tried again at the
    /// next start: nothing refers to it any more.
    fn throw_away(&self, path: &Path, what: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let root =
            if path.starts_with(&self.home_path) { &self.home_path } else { &self.store_path };
        let to = root.join("trash").join(format!("{what}-{name}-{}", now()));
        let _ = fs::rename(path, to);
    }

    /// Deletes what is in the trash, in the background.
    fn empty_trash(&self) {
        let mut trash = vec![self.home_path.join("trash")];
        trash.extend(self.is_elsewhere().then(|| self.store_path.join("trash")));
        self.background.empty(trash);
    }

    /// Lets the kernel forget a branch that is gone or stale; its name at once, all it knows of a big one in the background.
    fn outdate(&self, mounted: Arc<Mounted>) {
        /// So many nodes take well under a millisecond.
        const NODES_AT_ONCE_MAX: usize = 64;
        if mounted.lock().nodes.len() <= NODES_AT_ONCE_MAX {
            return self.filesystem.invalidate(&mounted);
        }
        self.filesystem.expire(&mounted);
        self.background.invalidate(&self.filesystem, mounted);
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
        store::mark_closed(&self.lock_file).at(&self.store_path)?;
        let keeps = |root: &Path, name: &str| match fs::read_dir(root.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            entries => entries.at(root).map(|mut entries| entries.next().is_some()),
        };
        // Branches, what was saved of a damaged one, logs that are wanted after their branches.
        if !self.lock().is_empty()
            || keeps(&self.store_path, "lost")?
            || self.store_path.join("logs/kept").exists()
        {
            return Ok(());
        }
        let keep = KeptTimes::of(&self.base_path)?;
        if self.is_elsewhere() {
            store::remove(&self.store_path)?;
            let link = self.home_path.join("store");
            fs::remove_file(&link).at(&link)?;
        }
        // A transaction to be recovered at the next start, or a commit that can be undone.
        if keeps(&self.home_path, "journal")? || keeps(&self.home_path, "history")? {
            return Ok(());
        }
        store::remove(&self.home_path)?;
        keep.restore()
    }
}

/// A sentence about a transaction that a crash cut short.
fn describe(kind: Kind, is_committed: bool, records: &BTreeMap<BranchId, Record>) -> String {
    let what = match kind {
        Kind::Commit { branch } => match records.get(&branch) {
            Some(record) => format!("the commit of {}", record.name),
            None => "a commit".to_owned(),
        },
        Kind::Undo { .. } => "an undo".to_owned(),
        Kind::Redo { .. } => "a redo".to_owned(),
    };
    let how = if is_committed { "was finished" } else { "was taken back" };
    format!("{what}, which was under way, {how}")
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
