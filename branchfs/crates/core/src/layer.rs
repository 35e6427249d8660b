//! One layer: a branch's own changes in the overlay format, or the base.
//!
//! A layer on disk has these parts:
//!
//! - `upper/`: the changes.
//! - `work/`: objects under construction, on the same file system; they are renamed into place when complete.
//! - `links/`: copied-up objects that had several hard links below, by layer and inode number. Another name that is looked
//!   up later becomes a link to the copy.
//! - `writes`: the objects of the base that the changes depend on, see [`crate::write_set`].
//! - `partial/`: partly copied-up files ([`crate::lazy_copy_up`]).
//!
//! Each part is created when it is first needed, `upper/` with the first change. Until then there is no layer on disk
//! ([`Layer::is_created`]), and a branch has only its record. The base is a layer without whiteouts, `work/` or log.

mod lazy_dir;
mod links;
mod overlay_xattrs;
mod workdir;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::lazy_copy_up::PartialCopyIndex;
use crate::no_follow;
use crate::object_copy::copy_metadata;
use crate::overlay::Namespace;
use crate::quota::{Ledger, Quota};
use crate::rooted_dir::{Result, RootedDir, to_errno};
use crate::write_set::{Precondition, Read, ReadSet, WriteSet};

use lazy_dir::{LazyDir, make_directory};
use links::parse_link;
pub(crate) use workdir::WorkEntry;

/// The id of the base as a layer.
pub(crate) const BASE: LayerId = LayerId(0);

/// An open layer of a stack: the base, a layer of a branch, or a snapshot layer.
#[derive(Debug)]
pub struct Layer {
    pub(crate) id: LayerId,
    /// The layer whose objects it holds. For a snapshot layer it is the base, whose objects it links.
    pub(crate) origin: LayerId,
    /// The directory tree that the layer adds to a view.
    pub tree: RootedDir,
    own: Option<UpperDir>,
}

/// Is notified when a layer is created on disk.
pub(crate) trait LayerObserver: std::fmt::Debug + Send + Sync {
    fn created(&self, layer: LayerId) -> io::Result<()>;
}

/// The fields of a branch's layer that the base does not have. Small, because there is one for each idle branch.
#[derive(Debug)]
struct UpperDir {
    directory: PathBuf,
    observer: OnceLock<Arc<dyn LayerObserver>>,
    namespace: Namespace,
    on_other_filesystem: bool,
    /// Created when it is first used: an idle branch has none.
    state: OnceLock<Box<State>>,
    /// Set if the branch or one of its ancestors has a disk limit.
    ledger: OnceLock<Box<Ledger>>,
    /// The read set, if the policy needs one.
    reads: Option<Box<Mutex<ReadSet>>>,
}

/// The state of a layer that is in use.
#[derive(Debug)]
struct State {
    work: LazyDir,
    links: LazyDir,
    partial_copies: PartialCopyIndex,
    scratch: AtomicU64,
    log: Mutex<Log>,
}

impl State {
    /// The state of a layer in `directory` that does not exist on disk.
    fn new(directory: &Path) -> Self {
        Self {
            work: LazyDir::new(directory, "work"),
            links: LazyDir::new(directory, "links"),
            partial_copies: PartialCopyIndex::none(directory),
            scratch: AtomicU64::new(0),
            log: Mutex::new(Log {
                writes: WriteSet::new(&directory.join("writes")),
                origins: HashMap::new(),
                linked: HashSet::new(),
                link_counts: HashMap::new(),
                hidden: HashMap::new(),
            }),
        }
    }

    /// Reads the state of a layer in `directory` that exists on disk.
    fn load(directory: &Path) -> std::result::Result<Self, Error> {
        let mut state = Self::new(directory);
        let links = state.links.list().at(directory)?;
        state.partial_copies = PartialCopyIndex::open(directory)?;
        let path = directory.join("writes");
        let loaded = WriteSet::load(&path).at(&path)?;
        state.log = Mutex::new(Log {
            writes: WriteSet::open(&path).at(&path)?,
            origins: loaded.origins,
            linked: links.iter().filter_map(|entry| parse_link(&entry.name)).collect(),
            link_counts: loaded.links,
            hidden: loaded.hidden,
        });
        Ok(state)
    }
}

impl UpperDir {
    fn state(&self) -> &State {
        self.state.get_or_init(|| Box::new(State::new(&self.directory)))
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A panic while the log was held leaves at most one record unwritten; drift checks treat that as unknown.
        self.state().log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Log {
    writes: WriteSet,
    /// Inode number in the layer -> inode number shown, for copied-up files.
    origins: HashMap<u64, u64>,
    /// Copied-up objects with several links below: lower layer and inode number.
    linked: HashSet<(LayerId, u64)>,
    /// Inode number in the layer -> number of links shown.
    link_counts: HashMap<u64, u32>,
    /// Layer and inode number of a lower object -> how many of its names this layer hides.
    hidden: HashMap<(u64, u64), u32>,
}

impl Layer {
    /// The base as the lowest layer of a stack. `tree` is the base directory.
    pub fn base(tree: RootedDir) -> Self {
        Self { id: BASE, origin: BASE, tree, own: None }
    }

    /// Opens a branch's layer in `directory`, which need not exist yet. `on_other_filesystem`: on another one than that
    /// of the base.
    pub(crate) fn open(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
        on_other_filesystem: bool,
    ) -> std::result::Result<Self, Error> {
        let mut layer = Self::not_created(id, directory, namespace, on_other_filesystem);
        layer.tree = match RootedDir::reopened(directory, "upper") {
            Err(Errno::NOENT) => return Ok(layer),
            other => other.at(directory.join("upper"))?,
        };
        if let Some(own) = &mut layer.own {
            own.state = OnceLock::from(Box::new(State::load(directory)?));
        }
        Ok(layer)
    }

    /// A new branch's layer in `directory`, which does not exist.
    pub fn not_created(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
        on_other_filesystem: bool,
    ) -> Self {
        let own = UpperDir {
            directory: directory.to_path_buf(),
            observer: OnceLock::new(),
            namespace,
            on_other_filesystem,
            state: OnceLock::new(),
            ledger: OnceLock::new(),
            reads: None,
        };
        Self { id, origin: id, tree: RootedDir::without_root(), own: Some(own) }
    }

    /// Opens the read set, so that reads of the branch are recorded from now on.
    pub(crate) fn record_reads(&mut self) -> std::result::Result<(), Error> {
        if let Some(own) = &mut self.own {
            make_directory(&own.directory).at(&own.directory)?;
            let log = own.directory.join("reads");
            own.reads = Some(Box::new(Mutex::new(ReadSet::open(&log).at(&log)?)));
        }
        Ok(())
    }

    /// Whether it exists on disk. A layer that does not has no changes.
    pub(crate) fn is_created(&self) -> bool {
        self.tree.has_root()
    }

    /// Sets the observer that is notified when the layer is created on disk.
    pub(crate) fn set_observer(&self, observer: Arc<dyn LayerObserver>) {
        if let Some(own) = &self.own {
            let _ = own.observer.set(observer); // set once, when it is opened
        }
    }

    /// Creates the layer if it does not exist, with the attributes of the directory below it. A crash leaves the
    /// complete layer, or a temporary directory that a mount ignores.
    pub fn create(&self, below: &RootedDir) -> Result<()> {
        if self.is_created() {
            return Ok(());
        }
        let (own, root) = (self.own(), Path::new(""));
        make_directory(&own.directory)?;
        let draft = own.directory.join("upper.new");
        make_directory(&draft)?;
        let made = RootedDir::open_root(&draft)?;
        let stat = below.stat(root)?;
        copy_metadata((below, root, &stat), (&made, root))?;
        no_follow::rename(&draft, &own.directory.join("upper")).map_err(to_errno)?;
        // From here on the layer exists; the branch log learns it before anything is written into it.
        if let Some(observer) = self.own().observer.get() {
            observer.created(self.id).map_err(to_errno)?;
        }
        self.tree.set_root(&self.own().directory, "upper")
    }

    /// Adds a path of the snapshot to the read set. One `write` the first time, nothing after that.
    pub(crate) fn record_read(&self, path: &Path, read: Read) -> Result<()> {
        match self.own.as_ref().and_then(|own| own.reads.as_ref()) {
            Some(reads) => {
                let mut reads = reads.lock().unwrap_or_else(PoisonError::into_inner);
                reads.record(path, read)
            }
            None => Ok(()),
        }
    }

    /// Opens a snapshot layer in `directory`: a layer over the base with the base's earlier content.
    pub(crate) fn open_snapshot(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
    ) -> std::result::Result<Self, Error> {
        let layer = Self::open(id, directory, namespace, false)?;
        layer.tree.root().at(directory)?; // it is there
        Ok(Self { origin: BASE, ..layer })
    }

    fn own(&self) -> &UpperDir {
        self.own
            .as_ref()
            .expect("only a branch's layer is changed this way; the base is written in place")
    }

    /// The layer's files that were copied up in part; the base has none.
    pub(crate) fn partial_copies(&self) -> Option<&PartialCopyIndex> {
        self.own.as_ref().map(|own| &own.state().partial_copies)
    }

    /// The namespace of the layer's overlay attributes.
    pub(crate) fn namespace(&self) -> Namespace {
        self.own().namespace
    }

    /// Starts counting the disk usage of the layer.
    pub(crate) fn set_quota(&self, quota: Option<Arc<Quota>>) -> Result<()> {
        if let Some(quota) = quota {
            let ledger = Ledger::of(quota, self.is_created().then_some(&self.tree))?;
            let _ = self.own().ledger.set(Box::new(ledger)); // set once, at create or start
        }
        Ok(())
    }

    /// The ledger of the layer, if the branch has a disk limit.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.own.as_ref().and_then(|own| own.ledger.get().map(AsRef::as_ref))
    }

    /// True for the base: written in place, without whiteouts.
    pub(crate) fn is_base(&self) -> bool {
        self.own.is_none()
    }

    /// True for a snapshot layer.
    pub(crate) fn is_snapshot(&self) -> bool {
        self.own.is_some() && self.origin == BASE
    }

    /// The inode number to show for an object of this layer. Numbers of a layer on another file system are moved out of
    /// the base's range.
    pub(crate) fn st_ino(&self, ino: u64) -> u64 {
        const OTHER_FILE_SYSTEM: u64 = 1 << 62;
        match &self.own {
            Some(own) => match own.log().origins.get(&ino) {
                Some(shown) => *shown,
                None if own.on_other_filesystem => ino | OTHER_FILE_SYSTEM,
                None => ino,
            },
            None => ino,
        }
    }

    /// Records the precondition of a path of the base when the branch first depends on it.
    pub(crate) fn record_precondition(
        &self,
        base_path: &Path,
        expected: Precondition,
    ) -> Result<()> {
        self.own().log().writes.record_precondition(base_path, expected)
    }

    /// Replaces the recorded state of each path of the base by that of `now`.
    pub(crate) fn update_preconditions(
        &self,
        now: impl Fn(&Path) -> Result<Precondition>,
    ) -> Result<()> {
        self.own().log().writes.update_preconditions(now)
    }

    /// Syncs the recorded dependencies.
    pub(crate) fn sync_log(&self) -> Result<()> {
        self.own().log().writes.sync()
    }

    /// Records that the object `ino` of this layer shows the inode number of its origin.
    pub(crate) fn set_origin(&self, ino: u64, shown: u64) -> Result<()> {
        let mut log = self.own().log();
        log.origins.insert(ino, shown);
        log.writes.origin(ino, shown)
    }

    /// The inode number that the object `ino` of this layer shows, if it is not its own.
    pub(crate) fn origin_of(&self, ino: u64) -> Option<u64> {
        self.own.as_ref().and_then(|own| own.log().origins.get(&ino).copied())
    }

    /// Removes the origin recorded for inode number `ino`, which a new object has reused.
    pub(crate) fn forget_origin(&self, ino: u64) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let mut log = own.log();
        if log.origins.remove(&ino).is_some() { log.writes.record_removed(ino) } else { Ok(()) }
    }
}
