//! A kernel overlayfs, mounted by the new mount system calls.
//!
//! A detached mount keeps the file system alive. Clones of it are attached, so that they can be unmounted (or found busy)
//! independently of our descriptor. The unmount of a clone does not end the file system, because that syncs the whole file
//! system below, which may take seconds.
//!
//! Before Linux 6.15 only attached mounts can be cloned. There the mount is attached briefly to clone it, and each clone is
//! cloned again before it is attached.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};

use crate::rooted_dir::{descriptor_path, to_errno};
use crate::{no_follow, sys};

/// The source of our overlay mounts in the mount table. Not "branchfs", which is that of the mount that contains them.
pub(crate) const SOURCE: &str = "branchfs-branch";

/// An overlayfs, alive as long as this or a mount of it.
#[derive(Debug)]
pub struct KernelMount {
    mount: OwnedFd,
    /// The mount to attach next time, if a clone must be made before it is needed.
    next: Mutex<Option<OwnedFd>>,
}

/// The directories of an overlayfs.
#[derive(Clone, Copy, Debug)]
pub struct Layers<'p> {
    /// `lowerdir`: never written.
    pub lower: &'p Path,
    /// `upperdir`: takes the changes.
    pub upper: &'p Path,
    /// `workdir`: on the same file system as `upper`.
    pub work: &'p Path,
}

/// Whether the attributes of a layer contain the UUID of the file system.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uuid {
    Ignored,
    /// For layers that were created before UUIDs were ignored.
    Compared,
}

impl KernelMount {
    /// Creates an overlayfs. It requests every option; the kernel silently drops those that it does not support, see the
    /// probe of the driver.
    ///
    /// The layer records only the base's file handle, without the UUID of its file system: all is on one file system, and
    /// some ways to copy a disk change its UUID. The kernel refuses a layer that was recorded with a UUID when it is mounted
    /// without, and reports that before it writes anything.
    pub fn make(layers: Layers<'_>) -> Result<Self> {
        match Self::make_with(layers, Uuid::Ignored) {
            Err(Errno::STALE) => Self::make_with(layers, Uuid::Compared),
            other => other,
        }
    }

    fn make_with(layers: Layers<'_>, uuid: Uuid) -> Result<Self> {
        let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(&context, "source", SOURCE)?;
        set_directory(&context, "lowerdir+", layers.lower)?;
        set_directory(&context, "upperdir", layers.upper)?;
        set_directory(&context, "workdir", layers.work)?;
        for option in ["index", "redirect_dir", "metacopy"] {
            rustix::mount::fsconfig_set_string(&context, option, "on")?;
        }
        if uuid == Uuid::Ignored {
            rustix::mount::fsconfig_set_string(&context, "uuid", "off")?;
        }
        rustix::mount::fsconfig_create(&context)?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        let mount = rustix::mount::fsmount(&context, flags, MountAttrFlags::empty())?;
        Ok(Self { mount, next: Mutex::new(None) })
    }

    /// Mounts it at a directory.
    pub fn attach(&self, at: &Path) -> Result<()> {
        match clone(&self.mount, Path::new("")) {
            Err(Errno::INVAL) => self.attach_in_turn(at),
            made => place(&made?, at),
        }
    }

    fn attach_in_turn(&self, at: &Path) -> Result<()> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = next.take() {
            place(&first, at)?;
            *next = Some(clone(CWD, at)?);
            return Ok(());
        }
        place(&self.mount, at)?;
        let cloned = clone(CWD, at).and_then(|first| Ok((first, clone(CWD, at)?)));
        unmount(at, true)?;
        let (first, second) = cloned?;
        place(&first, at)?;
        *next = Some(second);
        Ok(())
    }

    /// Makes the file system read-only for all its mounts, or writable again. `BUSY` while a file is open for writing.
    pub fn set_read_only(&self, is_read_only: bool) -> Result<()> {
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let context = rustix::mount::fspick(&self.mount, "", flags)?;
        rustix::mount::fsconfig_set_flag(&context, if is_read_only { "ro" } else { "rw" })?;
        rustix::mount::fsconfig_reconfigure(&context)
    }

    /// The root directory of the mount, which need not be attached to a path.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// A read-only mount over another mount of the same file system, or over a file of it. While it exists, opening a path that
/// leads through it for writing fails with `EROFS`; open files are not affected.
#[derive(Debug)]
pub struct ReadOnlyCover {
    mount: OwnedFd,
}

impl ReadOnlyCover {
    /// Covers the mount with the root `root`. Paths that begin at a directory in the mount, such as a working
    /// directory, do not lead through the cover.
    pub fn new(root: BorrowedFd<'_>) -> Result<Self> {
        let mount = sys::read_only_clone(root).map_err(to_errno)?;
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(&mount, "", root, "", flags)?;
        Ok(Self { mount })
    }

    /// Covers the regular file at `path` in the mount with the root `root`. All paths to the file that begin in the
    /// mount lead through the cover.
    ///
    /// # Errors
    /// `XDEV` if the file is covered, `INVAL` for anything but a regular file.
    pub fn over_file(root: BorrowedFd<'_>, path: &Path) -> Result<Self> {
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?;
        let mode = rustix::fs::fstat(&file)?.st_mode;
        if FileType::from_raw_mode(mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        Self::new(file.as_fd())
    }
}

impl Drop for ReadOnlyCover {
    fn drop(&mut self) {
        // A process whose working directory is in it stays there and is not affected.
        let uncovered = sys::set_mount_read_only(self.mount.as_fd(), false).and_then(|()| {
            rustix::mount::unmount(descriptor_path(self.mount.as_fd()), UnmountFlags::DETACH)
        });
        match uncovered {
            // The kernel takes it away with the name of the file.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => tracing::error!("part of a branch stays read-only: {error}"),
        }
    }
}

/// A mount of the directory at `path`, attached nowhere. Follows no symbolic link.
pub fn detached_mount(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    clone(directory, Path::new(""))
}

/// A mount of the same file system, attached nowhere. An empty path: of the descriptor's own.
fn clone(directory: impl AsFd, path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(directory, path, flags)
}

fn place(mount: &OwnedFd, at: &Path) -> Result<()> {
    rustix::mount::move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Sets a directory by descriptor, which allows any name and shows the path in the mount table; before Linux 6.13 by
/// path.
fn set_directory(context: &OwnedFd, key: &str, path: &Path) -> Result<()> {
    let opened = no_follow::open_directory(path);
    let directory = opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::LOOP))?;
    match rustix::mount::fsconfig_set_fd(context, key, &directory) {
        Err(Errno::INVAL) => rustix::mount::fsconfig_set_string(context, key, path),
        other => other,
    }
}

/// Unmounts the topmost mount at `at`. `lazily`: even if it is in use.
pub fn unmount(at: &Path, lazily: bool) -> Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(at, flags | UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    /// Creates directories of these names in `place`.
    fn directories<const N: usize>(place: &Path, names: [&str; N]) -> [PathBuf; N] {
        names.map(|name| {
            let path = place.join(name);
            fs::create_dir(&path).unwrap();
            path
        })
    }

    /// On tmpfs, which always has a UUID.
    #[test]
    fn a_layer_that_was_marked_with_a_uuid_is_mounted_as_before() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let [lower, upper, work] = directories(place.path(), ["lower", "upper", "work"]);
        let layers = Layers { lower: &lower, upper: &upper, work: &work };
        drop(KernelMount::make_with(layers, Uuid::Compared).unwrap());
        let refused = KernelMount::make_with(layers, Uuid::Ignored);
        assert_eq!(refused.err(), Some(Errno::STALE));
        KernelMount::make(layers).unwrap();
    }

    /// What Linux before 6.15 needs works with later ones too.
    #[test]
    fn a_mount_is_attached_in_turn_and_found_idle_each_time() {
        let place = tempfile::tempdir().unwrap();
        let names = ["lower", "upper", "work", "at"];
        let [lower, upper, work, at] = directories(place.path(), names);
        fs::write(lower.join("below"), "as it was").unwrap();
        let layers = Layers { lower: &lower, upper: &upper, work: &work };
        let mount = KernelMount::make(layers).unwrap();
        for round in 0..3 {
            mount.attach_in_turn(&at).unwrap();
            assert_eq!(fs::read_to_string(at.join("below")).unwrap(), "as it was");
            fs::write(at.join(format!("made-{round}")), "").unwrap();
            unmount(&at, false).unwrap();
            assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "another mount is left below");
        }
        assert!(upper.join("made-2").exists());
    }
}
