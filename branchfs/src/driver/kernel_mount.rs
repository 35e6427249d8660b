//! One kernel overlayfs, by the system calls of the new mount interface.
//!
//! The file system is held by a mount that is attached nowhere. What is attached are clones of it, so that they can be
//! unmounted (and found busy) without our own descriptor in the way, and so that an unmounted one does not end the file
//! system then and there: the end of an overlayfs syncs the whole file system below it, which may take seconds.
//!
//! Before Linux 6.15 only what is attached can be cloned. There the mount is attached once, for the moment that it takes to
//! clone it, and each clone that is attached later leaves another for the next time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::CWD;
use rustix::io::{Errno, Result};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};

use crate::no_follow;

/// Shown as the source of our overlay mounts. Not "branchfs": that is the mount they lie in.
pub(crate) const SOURCE: &str = "branchfs-branch";

/// An overlayfs, alive as long as this or a mount of it.
#[derive(Debug)]
pub(crate) struct KernelMount {
    mount: OwnedFd,
    /// What is attached the next time, where a clone has to be made before it is needed.
    next: Mutex<Option<OwnedFd>>,
}

/// What an overlayfs is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers<'p> {
    pub(crate) lower: &'p Path,
    pub(crate) upper: &'p Path,
    pub(crate) work: &'p Path,
}

impl KernelMount {
    /// Makes a file system. Every option is asked for; the kernel drops what it cannot give without a word, see
    /// [`super::overlay::probe`]. The end of one that is read-only until then syncs nothing.
    pub(crate) fn make(layers: Layers<'_>, is_read_only: bool) -> Result<Self> {
        let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(&context, "source", SOURCE)?;
        set_directory(&context, "lowerdir+", layers.lower)?;
        set_directory(&context, "upperdir", layers.upper)?;
        set_directory(&context, "workdir", layers.work)?;
        for option in ["index", "redirect_dir", "metacopy"] {
            rustix::mount::fsconfig_set_string(&context, option, "on")?;
        }
        if is_read_only {
            rustix::mount::fsconfig_set_flag(&context, "ro")?;
        }
        rustix::mount::fsconfig_create(&context)?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        let mount = rustix::mount::fsmount(&context, flags, MountAttrFlags::empty())?;
        Ok(Self { mount, next: Mutex::new(None) })
    }

    /// Mounts it at a directory.
    pub(crate) fn attach(&self, at: &Path) -> Result<()> {
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

    /// Lets nobody write any more, through whichever mount of it; `BUSY` while a file is open for writing. Or lets them.
    pub(crate) fn set_read_only(&self, is_read_only: bool) -> Result<()> {
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let context = rustix::mount::fspick(&self.mount, "", flags)?;
        rustix::mount::fsconfig_set_flag(&context, if is_read_only { "ro" } else { "rw" })?;
        rustix::mount::fsconfig_reconfigure(&context)
    }

    /// Its root directory.
    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
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

/// By descriptor, which allows any name and shows the path in the table of mounts; before Linux 6.13 by path.
fn set_directory(context: &OwnedFd, key: &str, path: &Path) -> Result<()> {
    let opened = no_follow::open_directory(path);
    let directory = opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::LOOP))?;
    match rustix::mount::fsconfig_set_fd(context, key, &directory) {
        Err(Errno::INVAL) => rustix::mount::fsconfig_set_string(context, key, path),
        other => other,
    }
}

/// Takes away the topmost mount at `at`. `lazily`: although it is in use.
pub(crate) fn unmount(at: &Path, lazily: bool) -> Result<()> {
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(at, flags | UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// What Linux before 6.15 needs works with later ones too.
    #[test]
    fn a_mount_is_attached_in_turn_and_found_idle_each_time() {
        let place = tempfile::tempdir().unwrap();
        let [lower, upper, work, at] = ["lower", "upper", "work", "at"].map(|name| {
            let path = place.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        });
        fs::write(lower.join("below"), "as it was").unwrap();
        let layers = Layers { lower: &lower, upper: &upper, work: &work };
        let mount = KernelMount::make(layers, false).unwrap();
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
