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
//! ([`Layer::is_made`]), and a branch has only its record. The base is a layer without whiteouts, `work/` or log.

mod lazy_dir;
mod links;
mod overlay_xattrs;
mod workdir;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::lazy_copy_up::PartialCopyIndex;
use crate::no_follow;
use crate::object_copy::copy_metadata;
use crate::overlay::Namespace;
use crate::quota::{Ledger, Quota};
use crate::rooted_dir::{Result, Tree};
use crate::write_set::{Precondition, Read, ReadSet, WriteSet};

use lazy_dir::{LazyDir, make_directory};
use links::parse_link;
pub(crate) use workdir::WorkEntry;

/// The base.
pub(crate) const BASE: LayerId = LayerId(0);

/// A layer, open.
#[derive(Debug)]
pub struct Layer {
    pub(crate) id: LayerId,
    /// The layer whose objects it holds: those of a veil are the base's, linked.
    pub(crate) origin: LayerId,
    /// The content.
    pub tree: Tree,
    own: Option<UpperDir>,
}

/// Is notified when a layer is created on disk.
pub(crate) trait LayerObserver: std::fmt::Debug + Send + Sync {
    fn made(&self, layer: LayerId) -> io::Result<()>;
}

/// What only a branch's layer has.
#[derive(Debug)]
struct UpperDir {
    directory: PathBuf,
    births: OnceLock<Arc<dyn LayerObserver>>,
    work: LazyDir,
    links: LazyDir,
    parts: PartialCopyIndex,
    namespace: Namespace,
    foreign: bool,
    scratch: AtomicU64,
    log: Mutex<Log>,
    /// Set where the branch has a disk limit, or one above it has.
    ledger: OnceLock<Ledger>,
    /// What the branch read, where the policy asks for it.
    reads: Option<Mutex<ReadSet>>,
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
    /// The base, through `tree`.
    pub fn base(tree: Tree) -> Self {
        Self { id: BASE, origin: BASE, tree, own: None }
    }

    /// A branch's layer in `directory`, which need not exist yet. `foreign`: it is on another file system than the base.
    pub(crate) fn open(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
        foreign: bool,
    ) -> std::result::Result<Self, Error> {
        let mut layer = Self::absent(id, directory, namespace, foreign);
        layer.tree = match Tree::reopened(directory, "upper") {
            Err(Errno::NOENT) => return Ok(layer),
            other => other.at(directory.join("upper"))?,
        };
        if let Some(own) = &mut layer.own {
            let links = own.links.list().at(directory)?;
            own.parts = PartialCopyIndex::open(directory)?;
            let path = directory.join("writes");
            let loaded = WriteSet::load(&path).at(&path)?;
            own.log = Mutex::new(Log {
                writes: WriteSet::open(&path).at(&path)?,
                origins: loaded.origins,
                linked: links.iter().filter_map(|entry| parse_link(&entry.name)).collect(),
                link_counts: loaded.links,
                hidden: loaded.hidden,
            });
        }
        Ok(layer)
    }

    /// A new branch's layer in `directory`, which does not exist.
    pub fn absent(id: LayerId, directory: &Path, namespace: Namespace, foreign: bool) -> Self {
        let own = UpperDir {
            directory: directory.to_path_buf(),
            births: OnceLock::new(),
            work: LazyDir::new(directory, "work"),
            links: LazyDir::new(directory, "links"),
            parts: PartialCopyIndex::none(directory),
            namespace,
            foreign,
            scratch: AtomicU64::new(0),
            log: Mutex::new(Log {
                writes: WriteSet::new(&directory.join("writes")),
                origins: HashMap::new(),
                linked: HashSet::new(),
                link_counts: HashMap::new(),
                hidden: HashMap::new(),
            }),
            ledger: OnceLock::new(),
            reads: None,
        };
        Self { id, origin: id, tree: Tree::absent(), own: Some(own) }
    }

    /// From now on, what the branch reads is noted in the log `reads`, which is there from now on.
    pub(crate) fn record_reads(&mut self) -> std::result::Result<(), Error> {
        if let Some(own) = &mut self.own {
            make_directory(&own.directory).at(&own.directory)?;
            let log = own.directory.join("reads");
            own.reads = Some(Mutex::new(ReadSet::open(&log).at(&log)?));
        }
        Ok(())
    }

    /// Whether it is on disk: one that is not has changed nothing.
    pub(crate) fn is_made(&self) -> bool {
        self.tree.is_there()
    }

    /// Tells these books when it is made.
    pub(crate) fn set_observer(&self, births: Arc<dyn LayerObserver>) {
        if let Some(own) = &self.own {
            let _ = own.births.set(births); // set once, when it is opened
        }
    }

    /// Creates the layer if it does not exist, with the attributes of the directory below it. A crash leaves the whole
    /// layer, or a part under a temporary name, which a mount ignores.
    pub fn make(&self, below: &Tree) -> Result<()> {
        if self.is_made() {
            return Ok(());
        }
        let (own, root) = (self.own(), Path::new(""));
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        make_directory(&own.directory)?;
        let draft = own.directory.join("upper.new");
        make_directory(&draft)?;
        let made = Tree::open_root(&draft)?;
        let stat = below.stat(root)?;
        copy_metadata((below, root, &stat), (&made, root))?;
        no_follow::rename(&draft, &own.directory.join("upper")).map_err(errno)?;
        self.adopt()
    }

    /// Records that the layer exists, and uses the empty one in its directory.
    pub(crate) fn adopt(&self) -> Result<()> {
        if let Some(births) = self.own().births.get() {
            let told = births.made(self.id);
            told.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        }
        self.tree.appear(&self.own().directory, "upper")
    }

    /// Notes that the branch read a path of its snapshot. One `write` for the first time, nothing after it.
    pub(crate) fn record_read(&self, path: &Path, read: Read) -> Result<()> {
        match self.own.as_ref().and_then(|own| own.reads.as_ref()) {
            Some(reads) => lock(reads).note(path, read),
            None => Ok(()),
        }
    }

    /// A veil in `directory`: a layer over the base that holds what the base had.
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
    pub(crate) fn parts(&self) -> Option<&PartialCopyIndex> {
        self.own.as_ref().map(|own| &own.parts)
    }

    /// Which extended attributes carry the layer's marks.
    pub(crate) fn namespace(&self) -> Namespace {
        self.own().namespace
    }

    /// Starts counting the disk usage of the layer.
    pub(crate) fn limit(&self, quota: Option<Arc<Quota>>) -> Result<()> {
        if let Some(quota) = quota {
            let _ = self.own().ledger.set(Ledger::of(quota, self.is_made().then_some(&self.tree))?); // set once, at create or start
        }
        Ok(())
    }

    /// What the layer holds, where that is limited.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.own.as_ref().and_then(|own| own.ledger.get())
    }

    /// True for the base: written in place, without whiteouts.
    pub(crate) fn is_base(&self) -> bool {
        self.own.is_none()
    }

    /// True for a layer that shows what the base was.
    pub(crate) fn is_snapshot(&self) -> bool {
        self.own.is_some() && self.origin == BASE
    }

    /// Inode number to show for an object of this layer. Numbers of a layer on another file system than the base's are
    /// moved out of the base's range.
    pub(crate) fn st_ino(&self, ino: u64) -> u64 {
        const OTHER_FILE_SYSTEM: u64 = 1 << 62;
        match &self.own {
            Some(own) => match lock(&own.log).origins.get(&ino) {
                Some(shown) => *shown,
                None if own.foreign => ino | OTHER_FILE_SYSTEM,
                None => ino,
            },
            None => ino,
        }
    }

    /// Notes what the branch saw at a path of the base when it first depended on it.
    pub(crate) fn record_precondition(
        &self,
        base_path: &Path,
        expected: Precondition,
    ) -> Result<()> {
        lock(&self.own().log).writes.seen(base_path, expected)
    }

    /// Replaces the recorded state of each path of the base by that of `now`.
    pub(crate) fn update_preconditions(
        &self,
        now: impl Fn(&Path) -> Result<Precondition>,
    ) -> Result<()> {
        lock(&self.own().log).writes.update_preconditions(now)
    }

    /// Syncs the recorded dependencies.
    pub(crate) fn sync_log(&self) -> Result<()> {
        lock(&self.own().log).writes.sync()
    }

    /// Records that the object `ino` of this layer shows the inode number of its origin.
    pub(crate) fn set_origin(&self, ino: u64, shown: u64) -> Result<()> {
        let mut log = lock(&self.own().log);
        log.origins.insert(ino, shown);
        log.writes.origin(ino, shown)
    }

    /// The inode number that the object `ino` of this layer shows, if it is not its own.
    pub(crate) fn origin_of(&self, ino: u64) -> Option<u64> {
        self.own.as_ref().and_then(|own| lock(&own.log).origins.get(&ino).copied())
    }

    /// Removes the origin recorded for inode number `ino`, which a new object has reused.
    pub(crate) fn forget_origin(&self, ino: u64) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let mut log = lock(&own.log);
        if log.origins.remove(&ino).is_some() { log.writes.forget(ino) } else { Ok(()) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic while the log was held leaves at most one record unwritten; drift checks treat that as unknown.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
