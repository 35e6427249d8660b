//! One layer: a branch's own changes in the overlay format, or the base.
//!
//! A layer on disk is `upper/` (the changes), `work/` (scratch on the same file system: things are built there and
//! renamed into place, so that no half-made object is ever visible), `links/` (copied-up objects that had several hard
//! links below, by layer and inode number: whichever other name is looked up later becomes a link to the copy) and
//! `writes` (what the changes depend on in the base, see [`crate::seen`]); and `partial/`, the files that were copied up
//! in part ([`crate::partial`]). All of it is made when it is first needed, `upper/` with the first change: until then
//! there is no layer on disk ([`Layer::is_made`]), and a branch costs its record alone. The base is a layer without
//! whiteouts, scratch or log.

mod copy;
mod links;
mod marks;
mod part;
mod scratch;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::Statx;
use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::no_follow;
use crate::overlay::Namespace;
use crate::partial::Parts;
use crate::quota::{Ledger, Quota};
use crate::seen::{Expected, Identity, Read, ReadSet, WriteSet};
use crate::tree::{Result, Tree};

pub(crate) use copy::{
    copy_attributes, copy_content, copy_metadata, copy_range, drop_inherited_acls,
    match_attributes, times,
};
use links::parse_link;
pub(crate) use part::give_as_layer;
use part::{Part, make_directory};
pub(crate) use scratch::Scratch;

/// Number of a layer; 0 is the base.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct LayerId(pub(crate) u64);

/// The base.
pub(crate) const BASE: LayerId = LayerId(0);

/// A layer, open.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) id: LayerId,
    /// The layer whose objects it holds: those of a veil are the base's, linked.
    pub(crate) origin: LayerId,
    /// The content.
    pub(crate) tree: Tree,
    own: Option<Own>,
}

/// Who keeps the books on layers, and is told when one is on disk.
pub(crate) trait Births: std::fmt::Debug + Send + Sync {
    fn made(&self, layer: LayerId) -> io::Result<()>;
}

/// What only a branch's layer has.
#[derive(Debug)]
struct Own {
    directory: PathBuf,
    births: OnceLock<Arc<dyn Births>>,
    work: Part,
    links: Part,
    parts: Parts,
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
    pub(crate) fn base(tree: Tree) -> Self {
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
            own.parts = Parts::open(directory)?;
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
    pub(crate) fn absent(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
        foreign: bool,
    ) -> Self {
        let own = Own {
            directory: directory.to_path_buf(),
            births: OnceLock::new(),
            work: Part::new(directory, "work"),
            links: Part::new(directory, "links"),
            parts: Parts::none(directory),
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
    pub(crate) fn enter_in(&self, births: Arc<dyn Births>) {
        if let Some(own) = &self.own {
            let _ = own.births.set(births); // set once, when it is opened
        }
    }

    /// Makes the layer, if it is not there, with the attributes of the directory that it lies over. A crash leaves all of
    /// it or, for what a mount takes for nothing, a part without a name of its own.
    pub(crate) fn make(&self, below: &Tree) -> Result<()> {
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

    /// Takes what is in its directory, with nothing in it, for this layer.
    pub(crate) fn adopt(&self) -> Result<()> {
        if let Some(births) = self.own().births.get() {
            let told = births.made(self.id);
            told.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        }
        self.tree.appear(&self.own().directory, "upper")
    }

    /// Notes that the branch read a path of its snapshot. One `write` for the first time, nothing after it.
    pub(crate) fn note_read(&self, path: &Path, read: Read) -> Result<()> {
        match self.own.as_ref().and_then(|own| own.reads.as_ref()) {
            Some(reads) => lock(reads).note(path, read),
            None => Ok(()),
        }
    }

    /// A veil in `directory`: a layer over the base that holds what the base had.
    pub(crate) fn open_veil(
        id: LayerId,
        directory: &Path,
        namespace: Namespace,
    ) -> std::result::Result<Self, Error> {
        let layer = Self::open(id, directory, namespace, false)?;
        layer.tree.root().at(directory)?; // it is there
        Ok(Self { origin: BASE, ..layer })
    }

    fn own(&self) -> &Own {
        self.own
            .as_ref()
            .expect("only a branch's layer is changed this way; the base is written in place")
    }

    /// The layer's files that were copied up in part; the base has none.
    pub(crate) fn parts(&self) -> Option<&Parts> {
        self.own.as_ref().map(|own| &own.parts)
    }

    /// Which extended attributes carry the layer's marks.
    pub(crate) fn namespace(&self) -> Namespace {
        self.own().namespace
    }

    /// Counts from now on what is added to the layer.
    pub(crate) fn limit(&self, quota: Option<Arc<Quota>>) -> Result<()> {
        if let Some(quota) = quota {
            let _ = self.own().ledger.set(Ledger::of(quota, self)?); // set once, at create or start
        }
        Ok(())
    }

    /// What the layer holds, where that is limited.
    pub(crate) fn ledger(&self) -> Option<&Ledger> {
        self.own.as_ref().and_then(|own| own.ledger.get())
    }

    /// True for the base: written in place, without whiteouts.
    pub(crate) fn is_base(&self) -> bool {
        self.own.is_none()
    }

    /// True for a layer that shows what the base was.
    pub(crate) fn is_veil(&self) -> bool {
        self.own.is_some() && self.origin == BASE
    }

    /// Inode number to show for an object of this layer. Numbers of a layer on another file system than the base's are
    /// moved out of the base's range.
    pub(crate) fn shown_ino(&self, ino: u64) -> u64 {
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
    pub(crate) fn saw(&self, base_path: &Path, expected: Expected) -> Result<()> {
        lock(&self.own().log).writes.seen(base_path, expected)
    }

    /// Replaces what the branch saw at each path of the base by what `now` tells.
    pub(crate) fn see_again(&self, now: impl Fn(&Path) -> Result<Expected>) -> Result<()> {
        lock(&self.own().log).writes.see_again(now)
    }

    /// Makes durable what was noted so far.
    pub(crate) fn sync_log(&self) -> Result<()> {
        lock(&self.own().log).writes.sync()
    }

    /// Notes that the object `ino` of this layer goes on showing the inode number of its origin.
    pub(crate) fn set_origin(&self, ino: u64, shown: u64) -> Result<()> {
        let mut log = lock(&self.own().log);
        log.origins.insert(ino, shown);
        log.writes.origin(ino, shown)
    }

    /// The inode number that the object `ino` of this layer goes on showing, if it is not its own.
    pub(crate) fn origin_of(&self, ino: u64) -> Option<u64> {
        self.own.as_ref().and_then(|own| lock(&own.log).origins.get(&ino).copied())
    }

    /// A new object has inode number `ino`: an earlier one's origin is not its own.
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

/// What identifies an object of the base for the drift check.
pub(crate) fn identity(stat: &Statx) -> Identity {
    Identity::of(stat)
}
