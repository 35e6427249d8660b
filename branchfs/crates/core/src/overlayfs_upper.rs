//! A layer that the kernel's overlayfs writes, and its conversion to a form that BranchFS can read.
//!
//! In addition to `upper/`, such a layer has `overlay/`, the kernel's work directory with its index of hard links. The
//! kernel leaves these objects in `upper/`:
//!
//! | object | converted by |
//! |---|---|
//! | a redirect relative to the parent's origin | writing the whole path; both mean the same to the kernel |
//! | a file without content (metacopy) | opening it for writing, which copies the content up |
//! | a hard link of the base with other names, which the index shows | changing each of them without effect |
//! | the mark `origin`: the file handle of the copied-up object | nothing; the drift check reads it ([`preconditions`]) |
//!
//! The first three are converted while the branch can still be written. Then writing is stopped, and the conversion is
//! repeated if there were changes in between. The kernel never notices a change below it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::descriptors::with_room;
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::no_follow;
use crate::object_copy::{copy_content, times};
use crate::overlay::{METACOPY_XATTR, Namespace, private_xattrs};
use crate::overlayfs_mount::{KernelMount, Layers};
use crate::ownership;
use crate::rooted_dir::{Result, RootedDir, remove_path};
use crate::view::HIDDEN;
use crate::write_set::{Fingerprint, Precondition};

/// How completely a layer is normalised for readers other than the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormaliseFor {
    /// As a commit needs it: a metacopy may stand for a file of the base of the same name.
    ForCommit,
    /// As the FUSE view of a nested branch needs it: every file has its content.
    Whole,
}

const ORIGIN_XATTR: &str = "trusted.overlay.origin";
const LINKS_XATTR: &str = "trusted.overlay.nlink";

/// How long to wait for the end of a detached mount. A process that is still inside keeps it.
const DETACHED_WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a start waits for the end of the mounts of an earlier daemon.
const EARLIER_WAIT_MAX: Duration = Duration::from_secs(30);

/// The kernel's work directory in a layer. If it exists, the kernel writes the layer.
pub(crate) const WORK: &str = "overlay";

/// Whether the kernel writes the layer in `directory`.
///
/// # Errors
/// `Io`.
pub(crate) fn is_written_by_overlayfs(directory: &Path) -> std::result::Result<bool, Error> {
    let work = directory.join(WORK);
    no_follow::exists(&work).at(work)
}

/// Converts a layer that is not mounted; mounts it temporarily if needed.
///
/// # Errors
/// `Unsupported`: a mount is needed, and the kernel cannot mount it here.
pub(crate) fn normalise_alone(
    directory: &Path,
    base: &Path,
    name: &str,
) -> std::result::Result<(), Error> {
    let mut pending =
        PendingConversion::of(directory, &open_directory(base)?, NormaliseFor::Whole)?;
    if pending.is_empty() && pending.linked.is_empty() {
        return Ok(());
    }
    let (upper, work) = (directory.join("upper"), directory.join(WORK));
    let layers = Layers { lower: base, upper: &upper, work: &work };
    let start = Instant::now();
    let mount = loop {
        match KernelMount::make(layers) {
            // A mount of the layer that was detached a moment ago ends in the background.
            Err(Errno::BUSY) if start.elapsed() < DETACHED_WAIT_MAX => {
                thread::sleep(Duration::from_millis(2));
            }
            Err(Errno::BUSY) => return Err(Error::InUse(name.to_owned())),
            other => break other,
        }
    };
    let mount = mount.map_err(|error| {
        Error::Unsupported(format!(
            "branch {name} cannot be used in this mount: the kernel's overlayfs wrote its layer and cannot be mounted here to complete it ({error}); the branch is kept: mount where the overlay driver works, or abort it"
        ))
    })?;
    let branch = RootedDir::new(rustix::io::dup(mount.root()).at(directory)?);
    pending.find_names(directory, &branch)?;
    pending.convert(directory, &branch)
}

/// Ends the use of a layer by overlayfs after its content was committed or normalised: its index holds one more link of
/// each object.
pub(crate) fn drop_index(directory: &Path) -> std::result::Result<(), Error> {
    let work = directory.join(WORK);
    if is_written_by_overlayfs(directory)? {
        let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
        show_store(&upper).at(directory)?;
    }
    remove_path(&work).at(&work)
}

/// Hides the store's name in a layer of the kernel's.
pub(super) fn hide_store(upper: &RootedDir) -> Result<()> {
    match upper.stat(Path::new(HIDDEN)) {
        Err(Errno::NOENT) => {}
        other => return other.map(drop),
    }
    let restore = times_of_root(upper)?;
    add_hidden(upper)?;
    restore().inspect_err(|_| {
        // The next attempt finds it as it was. The first error is the one to report.
        let _ = upper.remove_file(Path::new(HIDDEN)).and_then(|()| restore());
    })
}

/// Removes the name that hides the store; only the kernel's mount needs it.
fn show_store(upper: &RootedDir) -> Result<()> {
    let restore = times_of_root(upper)?;
    match upper.remove_file(Path::new(HIDDEN)) {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    }
    restore().inspect_err(|_| {
        let _ = add_hidden(upper).and_then(|()| restore()); // as above
    })
}

fn add_hidden(upper: &RootedDir) -> Result<()> {
    const WHITEOUT_MODE: u32 = 0o020_000;
    upper.make_node(Path::new(HIDDEN), WHITEOUT_MODE, 0)
}

/// Returns a function that restores the present times of a layer's root, because hiding a name is not a change.
fn times_of_root(upper: &RootedDir) -> Result<impl Fn() -> Result<()>> {
    let before = times(&upper.stat(Path::new(""))?);
    Ok(move || upper.set_times(Path::new(""), &before))
}

/// An object of the layer, and the path of its lower object.
struct Object {
    /// In the layer, and so in the branch.
    path: PathBuf,
    /// The path at which the kernel looks in the layers below.
    below: PathBuf,
    kind: FileType,
}

/// Calls `visit` for every object of a layer, directories before their entries.
fn walk(upper: &RootedDir, visit: &mut dyn FnMut(&Object) -> Result<()>) -> Result<()> {
    let mut pending = vec![(PathBuf::new(), PathBuf::new())];
    while let Some((directory, below)) = pending.pop() {
        let entries = match upper.list(&directory) {
            Err(Errno::NOENT) => continue, // it was moved or removed meanwhile
            other => other?,
        };
        for entry in entries {
            let path = directory.join(&entry.name);
            let below = match redirect(upper, &path, entry.kind)? {
                Some(redirect) => match redirect.strip_prefix(b"/") {
                    Some(whole) => PathBuf::from(OsStr::from_bytes(whole)),
                    None => below.join(OsStr::from_bytes(&redirect)),
                },
                None => below.join(&entry.name),
            };
            let object = Object { path, below, kind: entry.kind };
            match visit(&object) {
                Err(Errno::NOENT) => continue,
                other => other?,
            }
            if entry.kind == FileType::Directory {
                pending.push((object.path, object.below));
            }
        }
    }
    Ok(())
}

fn redirect(upper: &RootedDir, path: &Path, kind: FileType) -> Result<Option<Vec<u8>>> {
    if kind != FileType::Directory && kind != FileType::RegularFile {
        return Ok(None);
    }
    mark(upper, path, Namespace::Trusted.redirect())
}

fn mark(tree: &RootedDir, path: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    match tree.find_xattr(path, OsStr::new(name)) {
        Err(Errno::NOENT) => Ok(None),
        other => other,
    }
}

/// An object of the base with several links. Some of them may be outside of the base, or in the history.
#[derive(Debug)]
enum Linked {
    /// Every name in the branch must be a name in the layer.
    Whole,
    /// The layer has a metacopy. A commit sets the attributes on the object in the base: on all of its `links`.
    Attributes { links: i64, names: Vec<PathBuf> },
}

/// The objects of a layer that only the kernel can read.
#[derive(Debug, Default)]
pub struct PendingConversion {
    /// Directories with a relative redirect, and the absolute path of its target.
    relative: Vec<(PathBuf, PathBuf)>,
    /// Files without content.
    incomplete: Vec<PathBuf>,
    /// Objects of the base with several links, by inode number, that may have names which are not in the layer.
    linked: BTreeMap<u64, Linked>,
    /// Names of these objects in the branch that are not in the layer.
    unlinked: Vec<PathBuf>,
}

impl PendingConversion {
    /// Examines the layer in `directory`. Cost: its objects, and its index.
    pub(crate) fn of(
        directory: &Path,
        base: &OwnedFd,
        completion: NormaliseFor,
    ) -> std::result::Result<Self, Error> {
        let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
        let mut pending = Self::default();
        let walked = walk(&upper, &mut |object| {
            let redirect = redirect(&upper, &object.path, object.kind)?;
            if object.kind == FileType::Directory {
                if redirect.is_some_and(|redirect| !redirect.starts_with(b"/")) {
                    pending.relative.push((object.path.clone(), object.below.clone()));
                }
            } else if object.kind == FileType::RegularFile
                && (completion == NormaliseFor::Whole || redirect.is_some())
                && mark(&upper, &object.path, METACOPY_XATTR)?.is_some()
            {
                pending.incomplete.push(object.path.clone());
            }
            Ok(())
        });
        walked.at(directory)?;
        pending.find_linked(&directory.join(WORK).join("index"), base, completion)?;
        Ok(pending)
    }

    /// The index has an entry for each copied-up object with several names below, which is one more link of it.
    fn find_linked(
        &mut self,
        index: &Path,
        base: &OwnedFd,
        completion: NormaliseFor,
    ) -> std::result::Result<(), Error> {
        let tree = match RootedDir::open_root(index) {
            Err(Errno::NOENT) => return Ok(()),
            other => other.at(index)?,
        };
        for entry in tree.list(Path::new("")).at(index)? {
            let name = Path::new(&entry.name);
            let (Some(links), Some(origin)) = (
                mark(&tree, name, LINKS_XATTR).at(index)?,
                mark(&tree, name, ORIGIN_XATTR).at(index)?,
            ) else {
                continue;
            };
            let is_incomplete = mark(&tree, name, METACOPY_XATTR).at(index)?.is_some();
            let lower = match open_origin(base, &origin) {
                Err(Errno::STALE | Errno::NODATA) => continue, // removed from the base since
                other => other.at(index)?,
            };
            let below = crate::rooted_dir::stat_of(&lower).at(index)?;
            let here = tree.stat(name).at(index)?.stx_nlink;
            let links = shown_links(&links, here, below.stx_nlink);
            if is_incomplete && completion == NormaliseFor::ForCommit {
                let linked = Linked::Attributes { links, names: Vec::new() };
                self.linked.insert(below.stx_ino, linked);
            } else if links > i64::from(here) - 1 {
                self.linked.insert(below.stx_ino, Linked::Whole);
            }
        }
        Ok(())
    }

    /// Finds the names in `branch`, the mounted overlayfs, of objects with several links. Walks the whole branch, but
    /// only if there are such objects.
    pub(crate) fn find_names(
        &mut self,
        directory: &Path,
        branch: &RootedDir,
    ) -> std::result::Result<(), Error> {
        let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
        let mut pending = if self.linked.is_empty() { Vec::new() } else { vec![PathBuf::new()] };
        while let Some(parent) = pending.pop() {
            let entries = match branch.list(&parent) {
                Err(Errno::NOENT | Errno::NOTDIR) => continue, // renamed or removed meanwhile
                other => other.at(&parent)?,
            };
            for entry in entries {
                let path = parent.join(&entry.name);
                if entry.kind == FileType::Directory {
                    pending.push(path);
                } else {
                    unless_gone(self.find_name(&path, &upper, branch)).at(&path)?;
                }
            }
        }
        for linked in std::mem::take(&mut self.linked).into_values() {
            match linked {
                // A link outside of the base keeps its attributes: the names in the branch get a copy.
                Linked::Attributes { links, mut names } if links > names.len() as i64 => {
                    self.incomplete.extend(names.pop());
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn find_name(&mut self, path: &Path, upper: &RootedDir, branch: &RootedDir) -> Result<()> {
        let number = match branch.stat(path) {
            // It is in the layer, without content, and its lower file is gone.
            Err(Errno::STALE | Errno::IO) if upper.stat(path).is_ok() => return Ok(()),
            found => found?.stx_ino,
        };
        match self.linked.get_mut(&number) {
            None => {}
            Some(Linked::Attributes { names, .. }) => names.push(path.to_path_buf()),
            Some(Linked::Whole) => match upper.stat(path) {
                Ok(_) => {}
                Err(Errno::NOENT | Errno::NOTDIR) => self.unlinked.push(path.to_path_buf()),
                Err(error) => return Err(error),
            },
        }
        Ok(())
    }

    /// Whether nothing is left to do, after [`Self::find_names`].
    pub fn is_empty(&self) -> bool {
        self.relative.is_empty() && self.incomplete.is_empty() && self.unlinked.is_empty()
    }

    /// Converts the layer in `directory` through `branch`, the mounted overlayfs.
    pub fn convert(&self, directory: &Path, branch: &RootedDir) -> std::result::Result<(), Error> {
        let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
        for (path, below) in &self.relative {
            let mut value = b"/".to_vec();
            value.extend_from_slice(below.as_os_str().as_bytes());
            let name = OsStr::new(Namespace::Trusted.redirect());
            unless_gone(upper.set_xattr(path, name, &value, XattrFlags::empty())).at(path)?;
        }
        for path in &self.incomplete {
            match complete(branch, path) {
                Err(Errno::STALE | Errno::IO) => complete_from_origin(directory, &upper, path)?,
                other => unless_gone(other).at(path)?,
            }
        }
        // A change of nothing makes the kernel link the name in the layer too.
        for path in &self.unlinked {
            unless_gone(change_nothing(branch, path)).at(path)?;
        }
        Ok(())
    }
}

/// Ignores that an object is missing: the layer is checked again once writing has stopped.
fn unless_gone(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        other => other,
    }
}

/// The link count that the kernel shows: `U+1` is relative to the links in the layer, `L-1` to those below.
fn shown_links(value: &[u8], here: u32, below: u32) -> i64 {
    let text = String::from_utf8_lossy(value);
    let difference = text.get(1..).and_then(|digits| digits.parse::<i64>().ok()).unwrap_or(0);
    let from = if text.starts_with('L') { below } else { here };
    i64::from(from) + difference
}

/// Copies the content up by opening for writing, without changing the times.
fn complete(branch: &RootedDir, path: &Path) -> Result<()> {
    let before = branch.stat(path)?;
    let file = branch.open(path, OFlags::WRONLY | OFlags::NONBLOCK)?;
    rustix::fs::futimens(&file, &times(&before))
}

/// Copies the content into a file whose lower file in the base was replaced (`ESTALE`), moved or removed (`EIO`). The
/// kernel does not find the content by name any more, but the object exists as long as the base, a snapshot layer or the
/// history has it.
fn complete_from_origin(
    directory: &Path,
    upper: &RootedDir,
    path: &Path,
) -> std::result::Result<(), Error> {
    let copy = || {
        let origin = mark(upper, path, ORIGIN_XATTR)?.ok_or(Errno::STALE)?;
        let opened = open_directory(directory).map_err(|_| Errno::STALE)?;
        let handle = open_origin(&opened, &origin)?;
        let through = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let source = rustix::fs::open(through, flags, Mode::empty())?;
        let before = upper.stat(path)?;
        let target = upper.open(path, OFlags::WRONLY | OFlags::NONBLOCK)?;
        copy_content(source.as_fd(), target.as_fd(), before.stx_size)?;
        upper.remove_xattr(path, OsStr::new(METACOPY_XATTR))?;
        rustix::fs::futimens(&target, &times(&before))
    };
    copy().at(path)
}

fn change_nothing(branch: &RootedDir, path: &Path) -> Result<()> {
    let stat = branch.stat(path)?;
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Symlink {
        return branch.set_owner(path, Some(stat.stx_uid), Some(stat.stx_gid));
    }
    branch.set_mode(path, u32::from(stat.stx_mode))
}

/// Opens the object that a mark `origin` names: version, magic, length, flags, type, 16 bytes of the file system's
/// number, and the file system's own handle (`struct ovl_fb`).
fn open_origin(base: &OwnedFd, origin: &[u8]) -> Result<OwnedFd> {
    const MAGIC: u8 = 0xfb;
    const TYPE: usize = 4;
    const HANDLE: usize = 21;
    match (origin.get(1), origin.get(TYPE), origin.get(HANDLE..)) {
        (Some(&MAGIC), Some(kind), Some(handle)) => {
            crate::sys::open_by_handle(base, i32::from(*kind), handle)
        }
        _ => Err(Errno::NODATA),
    }
}

/// Returns the objects of the base that the layer in `directory` depends on: the copied-up objects must be unchanged
/// since the fork. The kernel does not record the time of a copy-up, so an external change between the fork and the copy-up
/// counts as drift, too.
pub(crate) fn preconditions(
    directory: &Path,
    base: &Path,
    is_as_forked: IsAsForked<'_>,
) -> std::result::Result<BTreeMap<PathBuf, Precondition>, Error> {
    let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
    let below = RootedDir::open_root(base).at(base)?;
    let opened = open_directory(base)?;
    let mut seen = BTreeMap::new();
    let walked = walk(&upper, &mut |object| {
        if let Some(origin) = mark(&upper, &object.path, ORIGIN_XATTR)? {
            let expected =
                precondition_of(&open_origin(&opened, &origin), object, &below, is_as_forked)?;
            if let Some(expected) = expected {
                seen.insert(object.below.clone(), expected);
            }
        }
        Ok(())
    });
    walked.at(directory)?;
    Ok(seen)
}

/// Returns whether an object of the base is unchanged since the fork, by its ctime.
pub(crate) type IsAsForked<'f> = &'f dyn Fn(&Fingerprint) -> bool;

/// Returns the expected object at a path of the base, given the copied-up one. `None` if it was renamed inside the branch;
/// the removed old name is checked separately.
fn precondition_of(
    origin: &Result<OwnedFd>,
    object: &Object,
    base: &RootedDir,
    is_as_forked: IsAsForked<'_>,
) -> Result<Option<Precondition>> {
    let origin = match origin {
        Ok(origin) => Fingerprint::of(&crate::rooted_dir::stat_of(origin)?),
        Err(Errno::STALE) => return Ok(Some(Precondition::Present(Fingerprint::NEVER))), // deleted by others
        Err(Errno::NODATA) => return Ok(None), // copied up from where files have no handle
        Err(error) => return Err(*error),
    };
    let now = match base.stat(&object.below) {
        Ok(stat) => Some(Fingerprint::of(&stat)),
        Err(Errno::NOENT | Errno::NOTDIR) => None,
        Err(error) => return Err(error),
    };
    let is_same = now.is_some_and(|now| now.ino == origin.ino);
    Ok(if object.kind == FileType::Directory {
        Some(Precondition::Present(if is_same { origin } else { Fingerprint::NEVER }))
    } else if !is_as_forked(&origin) {
        Some(Precondition::Present(Fingerprint::NEVER))
    } else {
        is_same.then_some(Precondition::Present(origin))
    })
}

/// Converts a normalised overlayfs layer into a FUSE layer: copies the facts in its xattrs to the layer's log, then
/// removes the xattrs, then the work directory. Idempotent; safe to interrupt.
pub(crate) fn convert_to_fuse_layer(
    directory: &Path,
    base: &Path,
    is_as_forked: IsAsForked<'_>,
    layer: &Layer,
) -> std::result::Result<(), Error> {
    for (path, expected) in preconditions(directory, base, is_as_forked)? {
        layer.record_precondition(&path, expected).at(directory)?;
    }
    let upper = RootedDir::open_root(&directory.join("upper")).at(directory)?;
    let opened = open_directory(base)?;
    let walked = walk(&upper, &mut |object| {
        if object.kind != FileType::Directory {
            if let Some(Ok(origin)) = mark(&upper, &object.path, ORIGIN_XATTR)?
                .map(|origin| open_origin(&opened, &origin))
            {
                let shown = crate::rooted_dir::stat_of(origin)?.stx_ino;
                layer.set_origin(upper.stat(&object.path)?.stx_ino, shown)?;
            }
        }
        Ok(())
    });
    walked.at(directory)?;
    layer.sync_log().at(directory)?;
    let strip = |path: &Path, kind: FileType| {
        let of_directories = [Namespace::Trusted.opaque(), Namespace::Trusted.redirect()];
        let kept = if kind == FileType::Directory { &of_directories[..] } else { &[] };
        for name in private_xattrs(&upper, path)? {
            if !kept.iter().any(|kept| name == *kept) {
                upper.remove_xattr(path, &name)?;
            }
        }
        Ok(())
    };
    strip(Path::new(""), FileType::Directory).at(directory)?;
    walk(&upper, &mut |object| strip(&object.path, object.kind)).at(directory)?;
    drop_index(directory)
}

/// A descriptor that file handles can be opened with.
pub fn open_directory(path: &Path) -> std::result::Result<OwnedFd, Error> {
    no_follow::open_directory(path).map(OwnedFd::from).at(path)
}

/// The objects of the layer in `layer`, mounted at `mount`, that only the kernel can read.
pub fn pending_conversion(
    layer: &Path,
    base: &OwnedFd,
    completion: NormaliseFor,
    mount: &KernelMount,
) -> std::result::Result<PendingConversion, Error> {
    let mut pending = PendingConversion::of(layer, base, completion)?;
    pending.find_names(layer, &tree_of(mount).at(layer)?)?;
    Ok(pending)
}

/// Returns the merged tree of an overlayfs, reached through a descriptor of its mount.
pub fn tree_of(mount: &KernelMount) -> Result<RootedDir> {
    rustix::io::dup(mount.root()).map(RootedDir::new)
}

/// Mounts an overlayfs over `base`, whose upper directory is that of the layer in `layer`. The mount is not attached to
/// a path yet.
pub fn mount_over(base: &Path, layer: &Path) -> std::result::Result<KernelMount, Error> {
    let (upper, work) = (layer.join("upper"), layer.join(WORK));
    RootedDir::open_root(&upper).and_then(|upper| hide_store(&upper)).at(&upper)?;
    let owner = ownership::of_directory(layer).at(layer)?;
    ownership::make_directory(&work, owner).at(&work)?;
    let mount = make_patiently(Layers { lower: base, upper: &upper, work: &work }).at(layer)?;
    give_work_to(&work, owner)?;
    Ok(mount)
}

/// Lets the kernel write a layer, at a temporary path, and normalises it for a commit.
#[cfg(test)]
pub(crate) fn write_for_tests(base: &Path, layer: &Path, write: impl FnOnce(&Path)) {
    let mount = mount_over(base, layer).unwrap();
    write(&crate::rooted_dir::descriptor_path(mount.root()));
    let base = open_directory(base).unwrap();
    loop {
        let pending = pending_conversion(layer, &base, NormaliseFor::ForCommit, &mount).unwrap();
        if pending.is_empty() {
            return;
        }
        pending.convert(layer, &tree_of(&mount).unwrap()).unwrap();
    }
}

/// Sets the owner of the `work` and `index` directories, which the kernel created as root, so that the store's owner
/// can remove the store.
pub fn give_work_to(work: &Path, owner: ownership::Ids) -> std::result::Result<(), Error> {
    for directory in ["work", "index"].map(|name| work.join(name)) {
        let opened = match no_follow::open_directory(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue, // no index: the probe finds out
            other => other.at(&directory)?,
        };
        ownership::set_opened(&opened, owner).at(&directory)?;
        opened.set_permissions(std::fs::Permissions::from_mode(0o700)).at(&directory)?;
    }
    Ok(())
}

/// Retries while the kernel still ends, and first syncs, the overlayfs of a killed daemon in the background.
fn make_patiently(layers: Layers<'_>) -> rustix::io::Result<KernelMount> {
    let deadline = Instant::now() + EARLIER_WAIT_MAX;
    loop {
        match with_room(|| KernelMount::make(layers)) {
            Err(Errno::BUSY) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(5))
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_counted_from_above_or_below() {
        assert_eq!(shown_links(b"U+0", 2, 9), 2);
        assert_eq!(shown_links(b"U-1", 3, 9), 2);
        assert_eq!(shown_links(b"L-1", 3, 9), 8);
    }
}
