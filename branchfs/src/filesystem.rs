//! The mount: main at its root, every branch at `/@name`, and the kernel's requests led to the view they are for.
//!
//! A node number is `slot << 40 | index`: which view, and which node of it. Slot 0 is main, so that `/` is node 1. Slots
//! are never used twice; a node of a branch that is gone answers ESTALE.
//!
//! Locking, in this order: `gate` (every request reads; whoever changes what views are made of writes), `views`, one
//! view's mutex. File content is read and written under the gate alone. Nothing here is held while the kernel is told
//! to forget something: it may be waiting for an answer.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;

use crate::content::Content;
use crate::kernel::handler::{
    Answer, Attributes, Caller, Capabilities, Changes, DirectorySink, Entry, FOREVER, Handle,
    Handler, Kernel, NodeId, OpenFlags, Opened, Statfs,
};
use crate::layer::Layer;
use crate::quota::{FileUse, Ledger, Quota};
use crate::view::{Index, New, OpenedFile, Owner, ROOT, View};

/// Bits of a node number that name the node within its view.
const INDEX_BITS: u32 = 40;

/// The extended attribute of the mount's root that names the control socket.
pub(crate) const CONTROL_XATTR: &str = "user.branchfs.control";

/// Another that lists what no process in a branch should reach, for sandboxes: base, store, control socket, a NUL
/// between two.
const PRIVATE_XATTR: &str = "user.branchfs.private";

/// Name of the control file in the root of main and of every branch.
const CONTROL_FILE: &str = ".branchfs_ctl";

/// The control file's node in its view: no table of nodes grows so far.
const CONTROL_INDEX: Index = (1 << INDEX_BITS) - 1;

/// Handle of an open control file: nothing is kept for it, and no view has this number.
const CONTROL_HANDLE: Handle = Handle(0);

/// What the control files do (`crate::control_files`): each is named by the view in whose root it is.
///
/// Writes and ioctls may take as long as a commit and wait for other requests.
pub(crate) trait ControlFile: Send + Sync {
    /// Its content.
    fn read(&self, slot: Slot) -> Answer<String>;
    /// Carries out a command.
    fn write(&self, slot: Slot, text: &[u8]) -> Answer<()>;
    /// Carries out an ioctl; returns what it hands out.
    fn ioctl(&self, slot: Slot, number: u32) -> Answer<Vec<u8>>;
}

/// Number of a view; 0 is main.
pub(crate) type Slot = u64;

/// Main's slot.
pub(crate) const MAIN: Slot = 0;

/// How a branch stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Status {
    Live,
    /// A sibling was committed first, or the branch is gone: everything answers ESTALE.
    Stale,
}

/// A view with what requests need to know before they lock it.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) slot: Slot,
    /// The branch's name; empty for main.
    pub(crate) name: OsString,
    /// Slot of the parent branch.
    pub(crate) parent: Slot,
    status: AtomicU8,
    /// Live children, and a commit under way, freeze a branch.
    freezes: AtomicUsize,
    /// The branch's record, as long as nobody has asked for something in the branch to be durable: a branch that is lost
    /// with the power takes its files with it.
    unsynced_record: Mutex<Option<PathBuf>>,
    view: Mutex<View>,
}

impl Mounted {
    fn new(slot: Slot, name: OsString, parent: Slot, view: View) -> Self {
        Self {
            slot,
            name,
            parent,
            status: AtomicU8::new(Status::Live as u8),
            freezes: AtomicUsize::new(0),
            unsynced_record: Mutex::new(None),
            view: Mutex::new(view),
        }
    }

    /// The view, whatever its state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, View> {
        // A request that panicked may have left the node table behind the layers; the layers themselves are sound, and
        // lookups bring the table in line again.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Answer<MutexGuard<'_, View>> {
        if self.status.load(Ordering::Acquire) == Status::Live as u8 {
            Ok(self.lock())
        } else {
            Err(Errno::STALE)
        }
    }

    fn writable(&self) -> Answer<MutexGuard<'_, View>> {
        let view = self.live()?;
        if self.is_frozen() { Err(Errno::ROFS) } else { Ok(view) }
    }

    /// The directories and names under which the branch is found.
    fn places(&self) -> impl Iterator<Item = (NodeId, OsString)> {
        let mut name = OsString::from("@");
        name.push(&self.name);
        let below = Some(self.parent).filter(|parent| *parent != MAIN);
        [MAIN]
            .into_iter()
            .chain(below)
            .map(move |slot| (NodeId(slot << INDEX_BITS | ROOT), name.clone()))
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.freezes.load(Ordering::Acquire) > 0
    }

    pub(crate) fn freeze(&self) {
        self.freezes.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn thaw(&self) {
        self.freezes.fetch_sub(1, Ordering::AcqRel);
    }

    /// Main is looked at anew each time: others may change the base.
    fn ttl(&self) -> Duration {
        if self.slot == MAIN { Duration::ZERO } else { FOREVER }
    }

    /// Every path into a branch passes main's root: the kernel may keep its attributes for a moment.
    fn attributes_ttl(&self, index: Index) -> Duration {
        const MAIN_ROOT: Duration = Duration::from_secs(1);
        if self.slot == MAIN && index == ROOT { MAIN_ROOT } else { self.ttl() }
    }

    fn entry(&self, index: Index, attributes: Attributes) -> Entry {
        Entry {
            node: Some(NodeId(self.slot << INDEX_BITS | index)),
            generation: 0,
            entry_ttl: self.ttl(),
            attributes_ttl: self.ttl(),
            attributes: Some(attributes),
        }
    }
}

/// All views of one mount.
pub(crate) struct Filesystem {
    gate: RwLock<()>,
    views: RwLock<Views>,
    control_socket: OnceLock<OsString>,
    private: OnceLock<Vec<u8>>,
    capabilities: OnceLock<Capabilities>,
    kernel: OnceLock<Arc<dyn Kernel>>,
    /// Why the kernel does not read and write files in our stead; empty where it does. Known after INIT.
    passthrough: OnceLock<String>,
    /// A file of the store, to try that out with.
    probe: OnceLock<OwnedFd>,
    has_covers: AtomicBool,
    /// Big files may be copied up in part.
    copies_in_part: Arc<AtomicBool>,
    /// Set where the mount has control files.
    control_file: OnceLock<Box<dyn ControlFile>>,
}

#[derive(Debug)]
struct Views {
    by_slot: HashMap<Slot, Arc<Mounted>>,
    by_name: HashMap<OsString, Slot>,
    next: Slot,
}

impl Filesystem {
    /// A mount with main alone, over `base`.
    pub(crate) fn new(base: Arc<Layer>) -> Self {
        let main = Arc::new(Mounted::new(MAIN, OsString::new(), MAIN, View::new(vec![base])));
        let views = Views {
            by_slot: HashMap::from([(MAIN, main)]),
            by_name: HashMap::new(),
            next: MAIN + 1,
        };
        Self {
            gate: RwLock::new(()),
            views: RwLock::new(views),
            control_socket: OnceLock::new(),
            private: OnceLock::new(),
            capabilities: OnceLock::new(),
            kernel: OnceLock::new(),
            passthrough: OnceLock::new(),
            probe: OnceLock::new(),
            has_covers: AtomicBool::new(false),
            copies_in_part: Arc::default(),
            control_file: OnceLock::new(),
        }
    }

    /// Lets big files be copied up in part from now on ([`crate::partial`]).
    pub(crate) fn copy_in_part(&self) {
        self.copies_in_part.store(true, Ordering::Relaxed);
    }

    /// Shows control files from now on.
    pub(crate) fn show_control_files(&self, control_file: Box<dyn ControlFile>) {
        let _ = self.control_file.set(control_file); // set once, at start
    }

    /// The control file, if this node is one.
    fn control_file(&self, index: Index) -> Option<&dyn ControlFile> {
        if index == CONTROL_INDEX { self.control_file.get().map(AsRef::as_ref) } else { None }
    }

    fn is_control_name(&self, parent: Index, name: &OsStr) -> bool {
        parent == ROOT && name == CONTROL_FILE && self.control_file.get().is_some()
    }

    /// It belongs to the base's owner and nobody else may open it: the kernel sees to that.
    fn control_attributes(&self) -> Answer<Attributes> {
        let root = self.mounted(MAIN)?.lock().getattr(ROOT)?;
        let mode = libc::S_IFREG | 0o600;
        Ok(Attributes { ino: CONTROL_INDEX, size: 0, blocks: 0, mode, nlink: 1, ..root })
    }

    fn control_entry(&self, slot: Slot) -> Answer<Entry> {
        Ok(Entry {
            node: Some(NodeId(slot << INDEX_BITS | CONTROL_INDEX)),
            generation: 0,
            entry_ttl: Duration::ZERO,
            attributes_ttl: Duration::ZERO,
            attributes: Some(self.control_attributes()?),
        })
    }

    /// The attributes of a view's root. A stale branch shows them too where its control file must be found, for it is
    /// to be aborted; nothing else of it is.
    fn root_attributes(&self, mounted: &Mounted) -> Answer<Attributes> {
        match mounted.live() {
            Ok(view) => view.getattr(ROOT),
            Err(_) if self.control_file.get().is_some() => mounted.lock().getattr(ROOT),
            Err(error) => Err(error),
        }
    }

    /// Sets what is known only once the mount and its socket are there.
    pub(crate) fn connect(
        &self,
        kernel: Arc<dyn Kernel>,
        control_socket: &Path,
        private: &[&Path],
    ) {
        let paths: Vec<&[u8]> = private.iter().map(|path| path.as_os_str().as_bytes()).collect();
        let _ = self.kernel.set(kernel); // these are set once, at start
        let _ = self.control_socket.set(control_socket.as_os_str().to_os_string());
        let _ = self.private.set(paths.join(&0));
    }

    /// What INIT will try passthrough out with: a file on the file system of the layers. Without one it stays off.
    pub(crate) fn offer_passthrough(&self, probe: OwnedFd) {
        let _ = self.probe.set(probe); // set once, at start
    }

    /// Why there is no passthrough; empty where there is.
    pub(crate) fn passthrough(&self) -> &str {
        self.passthrough.get().map_or("the mount is not ready yet", String::as_str)
    }

    /// How many requests of each kind the kernel has sent so far.
    pub(crate) fn requests(&self) -> Vec<(&'static str, u64)> {
        self.kernel.get().map_or_else(Vec::new, |kernel| kernel.requests())
    }

    fn try_passthrough(&self, capabilities: &Capabilities) -> String {
        let (Some(probe), Some(kernel)) = (self.probe.get(), self.kernel.get()) else {
            return "switched off".to_owned();
        };
        if !capabilities.passthrough {
            return "the kernel has no FUSE passthrough (Linux 6.9)".to_owned();
        }
        match kernel.open_backing(probe.as_fd()) {
            Ok(backing) => {
                kernel.close_backing(backing);
                String::new()
            }
            Err(Errno::PERM) => "it takes CAP_SYS_ADMIN".to_owned(),
            Err(Errno::LOOP) => {
                "the base's file system is itself stacked on others too high".to_owned()
            }
            Err(error) => format!("the kernel refuses the base's files: {error}"),
        }
    }

    /// Who takes backing files of a branch. Main is read and written by asking: freezing it must reach open files, and
    /// others change the base.
    fn backer(&self, mounted: &Mounted) -> Option<&Arc<dyn Kernel>> {
        let is_on = mounted.slot != MAIN && self.passthrough.get().is_some_and(String::is_empty);
        self.kernel.get().filter(|_| is_on)
    }

    /// Attributes that somebody may be changing through a mapping are asked for each time.
    fn attributes_ttl_of(mounted: &Mounted, view: &mut View, index: Index) -> Duration {
        if view.has_settled(index) { mounted.attributes_ttl(index) } else { Duration::ZERO }
    }

    fn entry_of(mounted: &Mounted, view: &mut View, index: Index, found: Attributes) -> Entry {
        let entry = mounted.entry(index, found);
        if view.has_settled(index) {
            entry
        } else {
            Entry { attributes_ttl: Duration::ZERO, ..entry }
        }
    }

    /// Holds up all requests while what views are made of changes.
    pub(crate) fn close_gate(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mounted view of a slot.
    pub(crate) fn mounted(&self, slot: Slot) -> Answer<Arc<Mounted>> {
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        views.by_slot.get(&slot).cloned().ok_or(Errno::STALE)
    }

    /// Shows a new branch at `/@name`. The caller made sure that the name is free.
    pub(crate) fn add(&self, name: &OsStr, parent: Slot, layers: Vec<Arc<Layer>>) -> Slot {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let slot = views.next;
        views.next += 1;
        let mut view = View::new(layers);
        view.copies_in_part = Arc::clone(&self.copies_in_part);
        let mounted = Arc::new(Mounted::new(slot, name.to_os_string(), parent, view));
        views.by_slot.insert(slot, mounted);
        views.by_name.insert(name.to_os_string(), slot);
        slot
    }

    /// Makes everything in a branch answer ESTALE; its name stays until it is removed.
    pub(crate) fn set_stale(&self, slot: Slot) {
        if let Ok(mounted) = self.mounted(slot) {
            mounted.status.store(Status::Stale as u8, Ordering::Release);
        }
    }

    /// Takes a branch out of the mount. Returns its view: dropping that closes all its files.
    pub(crate) fn remove(&self, slot: Slot) -> Option<Arc<Mounted>> {
        let mut views = self.views.write().unwrap_or_else(PoisonError::into_inner);
        let mounted = views.by_slot.remove(&slot)?;
        views.by_name.remove(&mounted.name);
        mounted.status.store(Status::Stale as u8, Ordering::Release);
        Some(mounted)
    }

    /// Tells the kernel that a branch's answers are outdated: `/@name` with all names below it, which the kernel takes away
    /// itself, mounts on them too, and the attributes of what somebody still has open. Names elsewhere keep their life: other
    /// branches' files may be covered by mounts. Called without any lock held. Cost: one notification for each node that the
    /// kernel knows.
    pub(crate) fn invalidate(&self, mounted: &Mounted) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        // The kernel may have forgotten all of it by itself: nothing is lost when an invalidation finds nothing.
        for (root, name) in mounted.places() {
            let _ = kernel.invalidate_entry(root, &name);
        }
        let nodes: Vec<_> = mounted.lock().nodes.all().map(|(index, _)| index).collect();
        for index in nodes {
            let _ = kernel.invalidate_node(NodeId(mounted.slot << INDEX_BITS | index));
        }
    }

    /// Lets the kernel ask again for `/@name`, at a cost that does not depend on what it knows below: who goes there by a path
    /// learns that the branch is gone. [`Self::invalidate`] is to follow.
    pub(crate) fn expire(&self, mounted: &Mounted) {
        for (root, name) in mounted.places() {
            if let Some(kernel) = self.kernel.get() {
                let _ = kernel.expire_entry(root, &name); // as above
            }
        }
    }

    /// From now on branches are covered by other mounts, which the kernel takes away with the names they lie on: no
    /// epoch may end the life of all names at once.
    pub(crate) fn expect_covers(&self) {
        self.has_covers.store(true, Ordering::Relaxed);
    }

    /// Lets the kernel forget what it keeps of main's root after a commit; the rest of main is asked for each time.
    pub(crate) fn invalidate_main(&self) {
        if let Some(kernel) = self.kernel.get() {
            let _ = kernel.invalidate_node(NodeId(MAIN << INDEX_BITS | ROOT)); // forgotten already: as good
        }
    }

    /// Lets the kernel forget what a commit into this branch has outdated.
    pub(crate) fn invalidate_outdated(&self, slot: Slot, outdated: &[crate::view::Outdated]) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        // Names that did not exist are cached too and known to nobody here: only an epoch reaches them.
        if !self.has_covers.load(Ordering::Relaxed) {
            let _ = kernel.increment_epoch(); // where it cannot, absence is not cached
        }
        for (index, name) in outdated {
            if let Some((parent, name)) = name {
                let _ = kernel.invalidate_entry(NodeId(slot << INDEX_BITS | parent), name);
            }
            let _ = kernel.invalidate_node(NodeId(slot << INDEX_BITS | index));
        }
    }

    /// Names that are absent may be remembered by the kernel only if it can be made to forget all of them at once.
    fn may_cache_absence(&self, mounted: &Mounted) -> bool {
        mounted.slot != MAIN
            && !self.has_covers.load(Ordering::Relaxed)
            && self.capabilities.get().is_some_and(|capabilities| capabilities.epoch)
    }

    fn split(node: NodeId) -> (Slot, Index) {
        (node.0 >> INDEX_BITS, node.0 & ((1 << INDEX_BITS) - 1))
    }

    fn control_file_at(&self, node: NodeId) -> (Slot, Option<&dyn ControlFile>) {
        let (slot, index) = Self::split(node);
        (slot, self.control_file(index))
    }

    fn at(&self, node: NodeId) -> Answer<(Arc<Mounted>, Index)> {
        let (slot, index) = Self::split(node);
        Ok((self.mounted(slot)?, index))
    }

    /// `/@name` at the root of main or of the branch's parent.
    fn branch_entry(&self, mounted: &Mounted, index: Index, name: &OsStr) -> Option<Answer<Entry>> {
        let branch = OsStr::from_bytes(name.as_bytes().strip_prefix(b"@")?);
        if index != ROOT {
            return None;
        }
        let views = self.views.read().unwrap_or_else(PoisonError::into_inner);
        let found = views.by_slot.get(views.by_name.get(branch)?)?;
        if mounted.slot != MAIN && found.parent != mounted.slot {
            return None;
        }
        Some(
            self.root_attributes(found)
                .map(|attributes| Entry { entry_ttl: FOREVER, ..found.entry(ROOT, attributes) }),
        )
    }

    /// Tells that a new branch's record has been written, but not synced.
    pub(crate) fn set_unsynced_record(&self, slot: Slot, record: PathBuf) {
        if let Ok(mounted) = self.mounted(slot) {
            *mounted.unsynced_record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        }
    }

    /// What is synced in a branch for the first time needs the branch's record on disk, and those above it.
    fn sync_records(&self, node: NodeId) -> Answer<()> {
        let (mut slot, _) = Self::split(node);
        while slot != MAIN {
            let mounted = self.mounted(slot)?;
            let mut record = mounted.unsynced_record.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(path) = record.as_ref() {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
                    Ok(file) => rustix::fs::fsync(file)?,
                    Err(Errno::NOENT) => {} // the branch has just ended
                    Err(error) => return Err(error),
                }
                *record = None;
            }
            drop(record);
            slot = mounted.parent;
        }
        Ok(())
    }

    fn file(&self, node: NodeId, handle: Handle) -> Answer<Arc<OwnedFd>> {
        let (mounted, _) = self.at(node)?;
        let view = mounted.live()?;
        view.handles.file(handle.0)
    }

    fn content(&self, node: NodeId, handle: Handle) -> Answer<Content> {
        let (mounted, _) = self.at(node)?;
        let view = mounted.live()?;
        Ok(Content { file: view.handles.file(handle.0)?, partial: view.handles.partial(handle.0) })
    }

    fn writable_content(
        &self,
        node: NodeId,
        handle: Handle,
    ) -> Answer<(Content, Option<Arc<FileUse>>)> {
        let (mounted, _) = self.at(node)?;
        let view = mounted.writable()?;
        let (file, partial) = (view.handles.file(handle.0)?, view.handles.partial(handle.0));
        Ok((Content { file, partial }, view.handles.file_use(handle.0)))
    }

    fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new: New<'_>,
        umask: u32,
    ) -> Answer<(Entry, Option<OwnedFd>)> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        self.refuse_branch_name(&mounted, parent, name)?;
        let mut view = mounted.writable()?;
        let owner = Owner { uid: caller.uid, gid: caller.gid };
        let (index, attributes, file) = view.create(parent, name, new, umask, owner)?;
        view.nodes.remember(index);
        Ok((mounted.entry(index, attributes), file))
    }

    /// The name of an open branch cannot be taken by something else in the root.
    fn refuse_branch_name(&self, mounted: &Mounted, parent: Index, name: &OsStr) -> Answer<()> {
        if self.is_control_name(parent, name) {
            return Err(Errno::EXIST);
        }
        match self.branch_entry(mounted, parent, name) {
            Some(_) => Err(Errno::EXIST),
            None => Ok(()),
        }
    }

    fn opened(mounted: &Mounted, file: &OpenedFile) -> Opened {
        Opened {
            handle: Some(Handle(file.handle)),
            // Not with a backing file: the kernel takes that for a mistake.
            keep_cache: mounted.slot != MAIN && file.backing.is_none() && file.keeps_pages,
            backing: file.backing,
            ..Opened::default()
        }
    }
}

impl Handler for Filesystem {
    fn init(&self, capabilities: &Capabilities) {
        // INIT comes once.
        let _ = self.capabilities.set(*capabilities);
        let _ = self.passthrough.set(self.try_passthrough(capabilities));
    }

    fn lookup(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<Entry> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        if let Some(entry) = self.branch_entry(&mounted, parent, name) {
            return entry;
        }
        if self.is_control_name(parent, name) {
            return self.control_entry(mounted.slot);
        }
        let mut view = mounted.live()?;
        if let Some((index, attributes)) = view.lookup(parent, name)? {
            view.nodes.remember(index);
            return Ok(Self::entry_of(&mounted, &mut view, index, attributes));
        }
        let may_become_branch = parent == ROOT && name.as_bytes().starts_with(b"@");
        if may_become_branch || !self.may_cache_absence(&mounted) {
            return Err(Errno::NOENT);
        }
        Ok(Entry {
            node: None,
            generation: 0,
            entry_ttl: FOREVER,
            attributes_ttl: FOREVER,
            attributes: None,
        })
    }

    fn forget(&self, node: NodeId, count: u64) {
        let _pass = self.pass();
        if let Ok((mounted, index)) = self.at(node) {
            if index != ROOT {
                mounted.lock().nodes.forget(index, count);
            }
        }
    }

    fn getattr(&self, node: NodeId, handle: Option<Handle>) -> Answer<(Attributes, Duration)> {
        let _ = handle;
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        if self.control_file(index).is_some() {
            return Ok((self.control_attributes()?, Duration::ZERO));
        }
        if index == ROOT {
            return Ok((self.root_attributes(&mounted)?, mounted.attributes_ttl(index)));
        }
        let mut view = mounted.live()?;
        Ok((view.getattr(index)?, Self::attributes_ttl_of(&mounted, &mut view, index)))
    }

    fn setattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        changes: &Changes,
    ) -> Answer<(Attributes, Duration)> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        if self.control_file(index).is_some() {
            // A shell that redirects to it truncates it first.
            let only_size =
                changes.mode.is_none() && changes.uid.is_none() && changes.gid.is_none();
            let attributes = if only_size { self.control_attributes() } else { Err(Errno::PERM) };
            return Ok((attributes?, Duration::ZERO));
        }
        let mut view = mounted.writable()?;
        let attributes = view.setattr(index, changes)?;
        let ttl = if view.has_settled(index) { mounted.ttl() } else { Duration::ZERO };
        Ok((attributes, ttl))
    }

    fn readlink(&self, node: NodeId) -> Answer<Vec<u8>> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        mounted.live()?.readlink(index)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: (u32, u32),
    ) -> Answer<Entry> {
        let new = match rustix::fs::FileType::from_raw_mode(mode) {
            rustix::fs::FileType::RegularFile => New::File { mode },
            _ => New::Special { mode, device: rdev },
        };
        self.make(caller, parent, name, new, umask).map(|(entry, _)| entry)
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> Answer<Entry> {
        self.make(caller, parent, name, New::Directory { mode }, umask).map(|(entry, _)| entry)
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> Answer<Entry> {
        self.make(caller, parent, name, New::Symlink { target }, 0).map(|(entry, _)| entry)
    }

    fn unlink(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        if self.is_control_name(parent, name) {
            return Err(Errno::PERM);
        }
        mounted.writable()?.unlink(parent, name)
    }

    fn rmdir(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        if self.branch_entry(&mounted, parent, name).is_some() {
            return Err(Errno::BUSY);
        }
        mounted.writable()?.rmdir(parent, name)
    }

    fn rename(
        &self,
        _caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        let (new_slot, new_parent) = Self::split(new_parent);
        if new_slot != mounted.slot {
            return Err(Errno::XDEV); // another branch
        }
        for (parent, name) in [(parent, name), (new_parent, new_name)] {
            if self.branch_entry(&mounted, parent, name).is_some() {
                return Err(Errno::BUSY);
            }
            if self.is_control_name(parent, name) {
                return Err(Errno::PERM);
            }
        }
        mounted.writable()?.rename(
            (parent, name),
            (new_parent, new_name),
            RenameFlags::from_bits_retain(flags),
        )
    }

    fn link(
        &self,
        _caller: &Caller,
        node: NodeId,
        new_parent: NodeId,
        new_name: &OsStr,
    ) -> Answer<Entry> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        let (new_slot, new_parent) = Self::split(new_parent);
        if new_slot != mounted.slot {
            return Err(Errno::XDEV);
        }
        self.refuse_branch_name(&mounted, new_parent, new_name)?;
        let mut view = mounted.writable()?;
        let attributes = view.link(index, new_parent, new_name)?;
        view.nodes.remember(index);
        Ok(Self::entry_of(&mounted, &mut view, index, attributes))
    }

    fn open(&self, _caller: &Caller, node: NodeId, flags: OpenFlags) -> Answer<Opened> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        if self.control_file(index).is_some() {
            return Ok(Opened {
                handle: Some(CONTROL_HANDLE),
                direct_io: true,
                ..Opened::default()
            });
        }
        let wanted = OFlags::from_bits_retain(flags.flags);
        let changes = wanted.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC);
        let mut view = if changes { mounted.writable()? } else { mounted.live()? };
        let file = view.open(index, wanted, flags.kill_privileges, self.backer(&mounted))?;
        drop(view);
        if let (true, Some(kernel)) = (file.outdates_attributes, self.kernel.get()) {
            let _ = kernel.invalidate_attributes(node); // the kernel may have none: as good
        }
        Ok(Self::opened(&mounted, &file))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let (entry, file) = self.make(caller, parent, name, New::File { mode }, umask)?;
        let (mounted, index) = self.at(entry.node.ok_or(Errno::IO)?)?;
        let mut view = mounted.live()?;
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file = view.serve(index, file.ok_or(Errno::IO)?, access, self.backer(&mounted))?;
        let attributes = entry.attributes.ok_or(Errno::IO)?;
        let entry = Self::entry_of(&mounted, &mut view, index, attributes);
        Ok((entry, Self::opened(&mounted, &file)))
    }

    fn tmpfile(
        &self,
        caller: &Caller,
        parent: NodeId,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let _pass = self.pass();
        let (mounted, parent) = self.at(parent)?;
        let mut view = mounted.writable()?;
        let owner = Owner { uid: caller.uid, gid: caller.gid };
        let (index, attributes, file) = view.create_unnamed(parent, mode, umask, owner)?;
        view.nodes.remember(index);
        let access = OFlags::from_bits_retain(flags.flags) & OFlags::RWMODE;
        let file = view.serve(index, file, access, self.backer(&mounted))?;
        let entry = Self::entry_of(&mounted, &mut view, index, attributes);
        Ok((entry, Self::opened(&mounted, &file)))
    }

    fn read(&self, node: NodeId, handle: Handle, offset: u64, buffer: &mut [u8]) -> Answer<usize> {
        if let (slot, Some(control_file)) = self.control_file_at(node) {
            let content = control_file.read(slot)?;
            let rest = usize::try_from(offset).ok().and_then(|from| content.as_bytes().get(from..));
            let count = rest.map_or(0, |rest| rest.len().min(buffer.len()));
            buffer[..count].copy_from_slice(&rest.unwrap_or_default()[..count]);
            return Ok(count);
        }
        let _pass = self.pass();
        self.content(node, handle)?.read(offset, buffer)
    }

    fn write(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        data: &[u8],
        kill_privileges: bool,
    ) -> Answer<usize> {
        if let (slot, Some(control_file)) = self.control_file_at(node) {
            return control_file.write(slot, data).map(|()| data.len());
        }
        let _pass = self.pass();
        let (content, file_use) = self.writable_content(node, handle)?;
        if kill_privileges {
            crate::view::kill_privileges_of(&*content.file)?;
        }
        let write = || content.write(offset, data);
        match file_use {
            Some(file_use) => {
                file_use.write(content.file.as_fd(), offset, data.len() as u64, write)
            }
            None => write(),
        }
    }

    fn flush(&self, _node: NodeId, _handle: Handle) -> Answer<()> {
        Err(Errno::NOSYS) // every write has reached the layer already; the kernel stops asking
    }

    fn release(&self, node: NodeId, handle: Handle) {
        let _pass = self.pass();
        let Ok((mounted, _)) = self.at(node) else {
            return;
        };
        mounted.lock().close(handle.0);
    }

    fn fsync(&self, node: NodeId, handle: Handle, data_only: bool) -> Answer<()> {
        self.sync_records(node)?;
        let file = self.file(node, handle)?;
        if data_only { rustix::fs::fdatasync(&*file) } else { rustix::fs::fsync(&*file) }
    }

    fn fallocate(
        &self,
        node: NodeId,
        handle: Handle,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Answer<()> {
        let _pass = self.pass();
        let (Content { file, partial }, file_use) = self.writable_content(node, handle)?;
        let mode = FallocateFlags::from_bits_retain(mode);
        match (file_use, partial) {
            (Some(file_use), _) => file_use.allocate(file.as_fd(), mode, offset, length),
            (None, Some(partial)) => partial.allocate(mode, offset, length),
            (None, None) => rustix::fs::fallocate(&*file, mode, offset, length),
        }
    }

    fn lseek(&self, node: NodeId, handle: Handle, offset: u64, whence: u32) -> Answer<u64> {
        const SEEK_DATA: u32 = 3;
        const SEEK_HOLE: u32 = 4;
        let Content { file, partial } = self.content(node, handle)?;
        match (whence, partial) {
            (SEEK_DATA, Some(partial)) => partial.seek_data(offset),
            (SEEK_HOLE, Some(partial)) => partial.seek_hole(offset),
            (SEEK_DATA, None) => rustix::fs::seek(&*file, SeekFrom::Data(offset)),
            (SEEK_HOLE, None) => rustix::fs::seek(&*file, SeekFrom::Hole(offset)),
            _ => Err(Errno::INVAL),
        }
    }

    fn copy_file_range(
        &self,
        from: (NodeId, Handle, u64),
        to: (NodeId, Handle, u64),
        length: u64,
        _flags: u64,
    ) -> Answer<usize> {
        let _pass = self.pass();
        let source = self.content(from.0, from.1)?;
        let (target, file_use) = self.writable_content(to.0, to.1)?;
        let copy = |length: u64| target.copy_from(&source, from.2, to.2, length);
        let Some(file_use) = file_use else { return copy(length) };
        // Asked for more than there is, it copies what there is: no more is to be taken.
        let size = u64::try_from(rustix::fs::fstat(&*source.file)?.st_size).unwrap_or(0);
        let length = length.min(size.saturating_sub(from.2));
        file_use.write(target.file.as_fd(), to.2, length, || copy(length))
    }

    fn opendir(&self, _caller: &Caller, node: NodeId, _flags: u32) -> Answer<Opened> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        let mut view = mounted.live()?;
        let handle = view.handles.add_directory(index);
        view.nodes.get_mut(index)?.handles.push(handle);
        let cached = mounted.slot != MAIN;
        Ok(Opened {
            handle: Some(Handle(handle)),
            cache_directory: cached,
            keep_cache: cached,
            ..Opened::default()
        })
    }

    fn readdir(
        &self,
        _caller: &Caller,
        node: NodeId,
        handle: Handle,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        let mut view = mounted.live()?;
        let listed = view.listing(index, handle.0, offset)?;
        let none = Entry {
            node: None,
            generation: 0,
            entry_ttl: Duration::ZERO,
            attributes_ttl: Duration::ZERO,
            attributes: None,
        };
        let push = |sink: &mut dyn DirectorySink, ino: u64, next: u64, name: &str| {
            const DIRECTORY: u8 = 4;
            if plus {
                sink.push_plus(&none, ino, next, DIRECTORY, OsStr::new(name))
            } else {
                sink.push(ino, next, DIRECTORY, OsStr::new(name))
            }
        };
        if offset == 0 && !push(sink, view.getattr(index).map_or(1, |own| own.ino), 1, ".") {
            return Ok(());
        }
        if offset <= 1 && !push(sink, view.parent_ino(index), 2, "..") {
            return Ok(());
        }
        let start = usize::try_from(offset.saturating_sub(2)).map_err(|_| Errno::INVAL)?;
        for (position, entry) in listed.entries.iter().enumerate().skip(start) {
            let next = position as u64 + 3;
            let kind = kind_of(entry.kind);
            if !plus {
                if !sink.push(entry.ino, next, kind, &entry.name) {
                    break;
                }
                continue;
            }
            if !sink.has_room(&entry.name) {
                break;
            }
            // Shadowed by a branch of that name, or removed since the listing was taken: the name alone.
            let shadowed = self.branch_entry(&mounted, index, &entry.name).is_some();
            let found =
                if shadowed { None } else { view.lookup(index, &entry.name).ok().flatten() };
            let pushed = match found {
                Some((child, attributes)) => {
                    view.nodes.remember(child);
                    let found = Self::entry_of(&mounted, &mut view, child, attributes);
                    let pushed = sink.push_plus(&found, attributes.ino, next, kind, &entry.name);
                    if !pushed {
                        view.nodes.forget(child, 1);
                    }
                    pushed
                }
                None => sink.push_plus(&none, entry.ino, next, kind, &entry.name),
            };
            if !pushed {
                break;
            }
        }
        Ok(())
    }

    fn releasedir(&self, node: NodeId, handle: Handle) {
        self.release(node, handle);
    }

    fn fsyncdir(&self, node: NodeId, _handle: Handle, _data_only: bool) -> Answer<()> {
        self.sync_records(node)?;
        let (mounted, index) = self.at(node)?;
        let at = mounted.live()?.locate(index)?;
        rustix::fs::fsync(at.layer.tree.open(&at.path, OFlags::RDONLY | OFlags::DIRECTORY)?)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> Answer<Vec<u8>> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        if mounted.slot == MAIN && index == ROOT {
            if name == CONTROL_XATTR {
                let path = self.control_socket.get().ok_or(Errno::NODATA)?;
                return Ok(path.as_bytes().to_vec());
            }
            if name == PRIVATE_XATTR {
                return self.private.get().cloned().ok_or(Errno::NODATA);
            }
        }
        let is_apart =
            self.control_file.get().is_some() && (index == ROOT || index == CONTROL_INDEX);
        match mounted.live() {
            Ok(view) if index != CONTROL_INDEX => view.getxattr(index, name),
            // The kernel asks for ACLs on its way to the control file, also of a stale branch.
            _ if is_apart => Err(Errno::NODATA),
            other => other.and(Err(Errno::STALE)),
        }
    }

    fn setxattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        mounted.writable()?.setxattr(index, name, value, flags, acl_kill_sgid)
    }

    fn listxattr(&self, node: NodeId) -> Answer<Vec<u8>> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        if self.control_file(index).is_some() {
            return Ok(Vec::new());
        }
        mounted.live()?.listxattr(index)
    }

    fn removexattr(&self, _caller: &Caller, node: NodeId, name: &OsStr) -> Answer<()> {
        let _pass = self.pass();
        let (mounted, index) = self.at(node)?;
        mounted.writable()?.removexattr(index, name)
    }

    fn ioctl(&self, node: NodeId, command: u32) -> Answer<Vec<u8>> {
        match self.control_file_at(node) {
            (slot, Some(control_file)) => control_file.ioctl(slot, command),
            (_, None) => Err(Errno::NOTTY),
        }
    }

    fn waits_for_others(&self, node: NodeId) -> bool {
        self.control_file_at(node).1.is_some()
    }

    fn statfs(&self, node: NodeId) -> Answer<Statfs> {
        let (mounted, _) = self.at(node)?;
        let root = mounted.live()?.top();
        let opened =
            root.tree.open(std::path::Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY)?;
        let found = rustix::fs::fstatvfs(opened.as_fd())?;
        let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        // Under a disk limit the branch is as large as that.
        let quota = root.ledger().map(Ledger::quota);
        let left = quota.and_then(Quota::left).map(|left| left / found.f_frsize.max(1));
        let used = quota.map_or(0, Quota::used) / found.f_frsize.max(1);
        let within = |value: u64| left.map_or(value, |left| value.min(left));
        Ok(Statfs {
            blocks: left.map_or(found.f_blocks, |left| found.f_blocks.min(left + used)),
            blocks_free: within(found.f_bfree),
            blocks_available: within(found.f_bavail),
            files: found.f_files,
            files_free: found.f_ffree,
            block_size: narrow(found.f_bsize),
            fragment_size: narrow(found.f_frsize),
            name_max: narrow(found.f_namemax),
        })
    }

    fn syncfs(&self, node: NodeId) -> Answer<()> {
        let (mounted, _) = self.at(node)?;
        let top = mounted.live()?.top();
        rustix::fs::syncfs(
            top.tree.open(std::path::Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY)?,
        )
    }
}

/// The `DT_*` value of a kind.
fn kind_of(kind: rustix::fs::FileType) -> u8 {
    const MODE_SHIFT: u32 = 12;
    u8::try_from(kind.as_raw_mode() >> MODE_SHIFT).unwrap_or(0)
}
