//! One layer: a branch's own changes in the overlay format, or the base.
//!
//! A layer on disk is `upper/` (the changes), `work/` (scratch on the same file system: things are built there and
//! renamed into place, so that no half-made object is ever visible), `links/` (copied-up objects that had several hard
//! links below, by layer and inode number: whichever other name is looked up later becomes a link to the copy) and
//! `writes` (what the changes depend on in the base, see [`crate::seen`]); and `partial/`, the files that were copied up
//! in part ([`crate::partial`]). All of it is made when it is first needed, `upper/` with the first change: until then
//! there is no layer on disk ([`Layer::is_made`]), and a branch costs its record alone. The base is a layer without
//! whiteouts, scratch or log.

mod part;
mod scratch;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{
    AtFlags, FileType, RenameFlags, SeekFrom, Statx, StatxTimestamp, Timespec, Timestamps,
    XattrFlags,
};
use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::overlay::{self, Namespace};
use crate::partial::Parts;
use crate::quota::{Ledger, Quota};
use crate::seen::{Expected, Identity, Read, ReadSet, WriteSet};
use crate::tree::{Result, Tree, xattr_names};

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
        let upper = directory.join("upper");
        layer.tree = match Tree::open_root(&upper) {
            Err(Errno::NOENT) => return Ok(layer),
            other => other.at(&upper)?,
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
        std::fs::rename(&draft, own.directory.join("upper")).map_err(errno)?;
        if let Some(births) = own.births.get() {
            births.made(self.id).map_err(errno)?;
        }
        self.tree.appear(rustix::io::dup(made.root()?)?);
        Ok(())
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

    /// True where `stat` of `path` shows a whiteout.
    pub(crate) fn is_whiteout(&self, path: &Path, stat: &Statx) -> bool {
        if self.own.is_none() || !overlay::may_be_whiteout(stat) {
            return false;
        }
        self.tree.get_xattr(path, OsStr::new(overlay::DEVICE_XATTR)).is_err()
    }

    /// True where the directory at `path` hides what lower layers have there.
    pub(crate) fn is_opaque(&self, path: &Path) -> bool {
        self.own.as_ref().is_some_and(|own| {
            self.tree
                .get_xattr(path, OsStr::new(own.namespace.opaque()))
                .is_ok_and(|value| value == b"y")
        })
    }

    /// The redirect of the object at `path` as it is written.
    pub(crate) fn redirect_text(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let Some(own) = &self.own else {
            return Ok(None);
        };
        match self.tree.get_xattr(path, OsStr::new(own.namespace.redirect())) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// True where the file at `path` is without its content, which a lower layer has (the kernel's layers only).
    pub(crate) fn is_without_content(&self, path: &Path) -> bool {
        self.own.is_some() && self.tree.get_xattr(path, OsStr::new(overlay::METACOPY_XATTR)).is_ok()
    }

    /// Where the directory at `path` came from, if it was renamed over lower layers.
    pub(crate) fn redirect(&self, path: &Path) -> Result<Option<PathBuf>> {
        let Some(own) = &self.own else {
            return Ok(None);
        };
        match self.tree.get_xattr(path, OsStr::new(own.namespace.redirect())) {
            Ok(value) => overlay::parse_redirect(&value, path).map(Some).ok_or(Errno::IO),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn set_opaque(&self, path: &Path) -> Result<()> {
        self.set_opaque_in(&self.tree, path)
    }

    /// Marks a directory that is still in scratch, or in the layer.
    pub(crate) fn set_opaque_in(&self, tree: &Tree, path: &Path) -> Result<()> {
        tree.set_xattr(path, OsStr::new(self.own().namespace.opaque()), b"y", XattrFlags::empty())
    }

    /// Gives an object of the layer a name in scratch.
    pub(crate) fn link_to_scratch(&self, path: &Path, scratch: &Path) -> Result<()> {
        let (from, to) = (
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
            self.work()?.directory(Path::new(""))?,
        );
        rustix::fs::linkat(
            &*from,
            path.file_name().unwrap_or(OsStr::new(".")),
            &*to,
            scratch,
            AtFlags::empty(),
        )
    }

    pub(crate) fn set_redirect(&self, path: &Path, origin: &Path) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let mut value = b"/".to_vec();
        value.extend_from_slice(origin.as_os_str().as_bytes());
        self.tree.set_xattr(
            path,
            OsStr::new(self.own().namespace.redirect()),
            &value,
            XattrFlags::empty(),
        )
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

    /// Number of links to show for an object of this layer that has `links` names in it.
    pub(crate) fn shown_links(&self, ino: u64, links: u32) -> u32 {
        let shown = self.own.as_ref().and_then(|own| lock(&own.log).link_counts.get(&ino).copied());
        shown.unwrap_or(links)
    }

    /// An object goes on showing this many links.
    pub(crate) fn set_links(&self, ino: u64, links: u32) -> Result<()> {
        let mut log = lock(&self.own().log);
        log.link_counts.insert(ino, links);
        log.writes.links(ino, links)
    }

    /// One name more or less for an object whose links are counted.
    pub(crate) fn count_links(&self, ino: u64, change: i32) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let mut log = lock(&own.log);
        let Some(count) = log.link_counts.get_mut(&ino) else { return Ok(()) };
        *count = count.saturating_add_signed(change);
        let count = *count;
        log.writes.links(ino, count)
    }

    /// Remembers the copy at `path`, inode `ino`, of an object that had `links` names in a lower layer.
    pub(crate) fn keep_link(
        &self,
        origin: (LayerId, u64),
        path: &Path,
        ino: u64,
        links: u32,
    ) -> Result<()> {
        let own = self.own();
        let from = self.tree.directory(path.parent().unwrap_or(Path::new("")))?;
        let to = own.links.tree()?.directory(Path::new(""))?;
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::linkat(&*from, name, &*to, OsStr::new(&link_name(origin)), AtFlags::empty())?;
        let mut log = lock(&own.log);
        log.linked.insert(origin);
        log.link_counts.insert(ino, links);
        log.writes.links(ino, links)
    }

    /// This layer hides one of the names of a lower object.
    pub(crate) fn hide_link(&self, (layer, ino): (LayerId, u64)) -> Result<()> {
        let mut log = lock(&self.own().log);
        let count = log.hidden.entry((layer.0, ino)).or_default();
        *count += 1;
        let count = *count;
        log.writes.hidden((layer.0, ino), count)
    }

    /// How many of the names of a lower object this layer hides.
    pub(crate) fn hidden_links(&self, (layer, ino): (LayerId, u64)) -> u32 {
        let hidden =
            self.own.as_ref().and_then(|own| lock(&own.log).hidden.get(&(layer.0, ino)).copied());
        hidden.unwrap_or(0)
    }

    /// Whether this layer has a copy of a lower object that had several names.
    pub(crate) fn has_link(&self, origin: (LayerId, u64)) -> bool {
        self.own.as_ref().is_some_and(|own| lock(&own.log).linked.contains(&origin))
    }

    /// Gives such a copy one more of the names it had below.
    pub(crate) fn link_kept(&self, origin: (LayerId, u64), path: &Path) -> Result<()> {
        let from = self.own().links.tree()?.directory(Path::new(""))?;
        let to = self.tree.directory(path.parent().unwrap_or(Path::new("")))?;
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::linkat(&*from, OsStr::new(&link_name(origin)), &*to, name, AtFlags::empty())
    }

    /// Where a copy is kept: for copying it up from here into another layer.
    pub(crate) fn kept_link(&self, origin: (LayerId, u64)) -> Result<(&Tree, PathBuf)> {
        Ok((self.own().links.tree()?, PathBuf::from(link_name(origin))))
    }

    /// Whether some of the names below are not links to the copy yet.
    pub(crate) fn lacks_names(&self) -> Result<bool> {
        let Some(own) = &self.own else { return Ok(false) };
        for entry in own.links.list()? {
            let stat = own.links.tree()?.stat(Path::new(&entry.name))?;
            // One of its links is the one in `links`.
            if self.shown_links(stat.stx_ino, stat.stx_nlink) > stat.stx_nlink - 1 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Notes what the branch saw at a path of the base when it first depended on it.
    pub(crate) fn saw(&self, base_path: &Path, expected: Expected) -> Result<()> {
        lock(&self.own().log).writes.seen(base_path, expected)
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

    /// A new object has inode number `ino`: an earlier one's origin is not its own.
    pub(crate) fn forget_origin(&self, ino: u64) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let mut log = lock(&own.log);
        if log.origins.remove(&ino).is_some() { log.writes.forget(ino) } else { Ok(()) }
    }

    /// A name in `work/` that nothing has.
    pub(crate) fn scratch(&self) -> PathBuf {
        PathBuf::from(self.own().scratch.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// The scratch tree.
    pub(crate) fn work(&self) -> Result<&Tree> {
        self.own().work.tree()
    }

    /// Moves a finished object from scratch into the layer.
    pub(crate) fn place(&self, scratch: &Path, path: &Path, flags: RenameFlags) -> Result<()> {
        let (from, to) = (
            self.work()?.directory(Path::new(""))?,
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
        );
        let name = path.file_name().unwrap_or(OsStr::new("."));
        rustix::fs::renameat_with(&*from, scratch, &*to, name, flags)
    }

    /// Moves an object of the layer into scratch.
    pub(crate) fn unplace(&self, path: &Path, scratch: &Path) -> Result<()> {
        let (from, to) = (
            self.tree.directory(path.parent().unwrap_or(Path::new("")))?,
            self.work()?.directory(Path::new(""))?,
        );
        self.tree.forget(path);
        rustix::fs::renameat_with(
            &*from,
            path.file_name().unwrap_or(OsStr::new(".")),
            &*to,
            scratch,
            RenameFlags::NOREPLACE,
        )
    }

    /// Puts a whiteout at `path`, replacing whatever this layer has there.
    pub(crate) fn put_whiteout(&self, path: &Path) -> Result<()> {
        const WHITEOUT_MODE: u32 = 0o020_000;
        match self.tree.make_node(path, WHITEOUT_MODE, 0) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
        let scratch = self.scratch();
        self.work()?.make_node(&scratch, WHITEOUT_MODE, 0)?;
        self.place(&scratch, path, RenameFlags::EXCHANGE)?;
        self.tree.forget(path);
        self.work()?.remove_all(&scratch)
    }
}

fn link_name((layer, ino): (LayerId, u64)) -> String {
    format!("{}-{ino}", layer.0)
}

fn parse_link(name: &OsStr) -> Option<(LayerId, u64)> {
    let (layer, ino) = name.to_str()?.split_once('-')?;
    Some((LayerId(layer.parse().ok()?), ino.parse().ok()?))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic while the log was held leaves at most one record unwritten; drift checks treat that as unknown.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What identifies an object of the base for the drift check.
pub(crate) fn identity(stat: &Statx) -> Identity {
    Identity::of(stat)
}

fn timespec(time: StatxTimestamp) -> Timespec {
    Timespec { tv_sec: time.tv_sec, tv_nsec: i64::from(time.tv_nsec) }
}

/// Access and modification time of `stat`, for `utimensat`.
pub(crate) fn times(stat: &Statx) -> Timestamps {
    Timestamps {
        last_access: timespec(stat.stx_atime),
        last_modification: timespec(stat.stx_mtime),
    }
}

/// Gives an object owner, extended attributes and mode of another, and leaves its times.
pub(crate) fn copy_attributes(from: (&Tree, &Path), to: (&Tree, &Path)) -> Result<()> {
    let (kept, mut stat) = (to.0.stat(to.1)?, from.0.stat(from.1)?);
    for name in xattr_names(&to.0.list_xattrs(to.1)?) {
        if !overlay::is_private_xattr(name) && from.0.get_xattr(from.1, name).is_err() {
            to.0.remove_xattr(to.1, name)?;
        }
    }
    (stat.stx_atime, stat.stx_mtime) = (kept.stx_atime, kept.stx_mtime);
    copy_metadata((from.0, from.1, &stat), to)
}

/// Copies owner, extended attributes, mode and times of `from` to the object `to` (in this order: a change of owner
/// clears set-id bits and capabilities, and everything before the times touches them).
pub(crate) fn copy_metadata(from: (&Tree, &Path, &Statx), to: (&Tree, &Path)) -> Result<()> {
    let (source, path, stat) = from;
    let (target, new) = to;
    let made = target.stat(new)?;
    if (made.stx_uid, made.stx_gid) != (stat.stx_uid, stat.stx_gid) {
        target.set_owner(new, Some(stat.stx_uid), Some(stat.stx_gid))?;
    }
    match source.list_xattrs(path) {
        Ok(list) => {
            for name in xattr_names(&list).filter(|name| !overlay::is_private_xattr(name)) {
                let value = source.get_xattr(path, name)?;
                target.set_xattr(new, name, &value, XattrFlags::empty())?;
            }
        }
        Err(Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error),
    }
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::Symlink {
        target.set_mode(new, u32::from(stat.stx_mode))?;
    }
    target.set_times(new, &times(stat))
}

/// Copies `length` bytes of content, keeping holes. A file system that can share blocks does so.
pub(crate) fn copy_content(from: BorrowedFd<'_>, to: BorrowedFd<'_>, length: u64) -> Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    rustix::fs::ftruncate(to, length)?;
    let mut position = 0;
    while position < length {
        let start = match rustix::fs::seek(from, SeekFrom::Data(position)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(()),
            Err(Errno::INVAL) => position,
            Err(error) => return Err(error),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start)).unwrap_or(length).min(length);
        copy_range(from, to, start, end)?;
        position = end;
    }
    Ok(())
}

pub(crate) fn copy_range(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    start: u64,
    end: u64,
) -> Result<()> {
    let (mut read, mut write) = (start, start);
    while read < end {
        let wanted = usize::try_from(end - read).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut write), wanted) {
            Ok(0) => return Ok(()), // shortened behind our back
            Ok(_) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return copy_by_hand(from, to, read, end);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn copy_by_hand(from: BorrowedFd<'_>, to: BorrowedFd<'_>, start: u64, end: u64) -> Result<()> {
    const BUFFER_BYTES: usize = 1 << 20;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut position = start;
    while position < end {
        let wanted =
            usize::try_from(end - position).map_or(BUFFER_BYTES, |left| left.min(BUFFER_BYTES));
        let read = rustix::io::pread(from, &mut buffer[..wanted], position)?;
        if read == 0 {
            return Ok(());
        }
        let mut written = 0;
        while written < read {
            written += rustix::io::pwrite(to, &buffer[written..read], position + written as u64)?;
        }
        position += read as u64;
    }
    Ok(())
}
