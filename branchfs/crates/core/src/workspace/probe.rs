//! Tests with scratch files whether the store's file system supports what BranchFS needs, before anything depends on
//! it.
//!
//! A file system may accept a call and not carry it out (a shared folder of a virtual machine has lost files in an
//! exchange of names), so the result is checked. Nothing is synced: the next probe removes what an interrupted one
//! left.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::error::{Context, Error};
use crate::ids::SCRATCH;
use crate::no_follow;
use crate::overlay::Namespace;
use crate::ownership;
use crate::rooted_dir::{RootedDir, remove_path};

/// Checks that layers and commits work in `store`, and determines the xattr namespace of the overlay format. `owner` is
/// the base's owner, who can remove what a killed process leaves.
///
/// # Errors
/// `Unsupported` with what is missing.
pub(super) fn probe(store: &Path, owner: (u32, u32)) -> Result<Namespace, Error> {
    let scratch = store.join(SCRATCH);
    clear(&scratch)?;
    let probe = Probe { store, scratch: &scratch, owner };
    let namespace = probe.namespace()?;
    let tried = probe.all();
    let cleared = clear(&scratch);
    match tried {
        // Without room nothing can be tried out. What a full disk keeps must be reachable all the same, to be committed
        // or given up; a change that the file system cannot do is an error when it is made.
        Err(Error::Io { source, .. }) if is_full(&source) => {}
        other => other?,
    }
    cleared.map(|()| namespace)
}

/// Checks that paths can be resolved without following symbolic links. `base` has none.
///
/// # Errors
/// `Unsupported`.
pub(super) fn require_openat2(base: &Path) -> Result<(), Error> {
    match RootedDir::open_root(base) {
        Err(Errno::NOSYS | Errno::PERM) => Err(Error::Unsupported(
            "openat2 is not available: it needs Linux 5.6, and in a container a seccomp profile that allows it (Docker 20.10)".to_owned(),
        )),
        other => other.map(drop).at(base),
    }
}

pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// Explains the error of a read-only file system.
pub(super) fn explain(error: Error) -> Error {
    match error {
        Error::Io { path, source } if source.raw_os_error() == Some(libc::EROFS) => {
            Error::Unsupported(format!(
                "{} is on a read-only file system: branches cannot be kept there, and nothing could be committed; mount it writable, or branch from a copy",
                path.display()
            ))
        }
        other => other,
    }
}

fn clear(scratch: &Path) -> Result<(), Error> {
    remove_path(scratch).at(scratch)
}

struct Probe<'p> {
    store: &'p Path,
    scratch: &'p Path,
    owner: (u32, u32),
}

impl Probe<'_> {
    fn all(&self) -> Result<(), Error> {
        no_follow::make_directory(self.scratch).at(self.scratch)?;
        ownership::set(self.scratch, self.owner).at(self.scratch)?;
        self.tells_cases_apart()?;
        self.has_whiteouts()?;
        self.has_links()?;
        self.exchanges()?;
        self.keeps_what_is_there()
    }

    fn lacks(&self, what: &str) -> Error {
        Error::Unsupported(format!(
            "the file system of {} {what}: branches cannot be kept there; use a directory on ext4, XFS, btrfs or tmpfs",
            self.store.display()
        ))
    }

    fn write(&self, name: &str) -> Result<(), Error> {
        let path = self.scratch.join(name);
        no_follow::write(&path, name.as_bytes()).at(&path)
    }

    fn holds(&self, name: &str, content: &str) -> bool {
        fs::read_to_string(self.scratch.join(name)).is_ok_and(|found| found == content)
    }

    /// Checks that names are case sensitive: two names of the branch could otherwise be one in the base at commit.
    fn tells_cases_apart(&self) -> Result<(), Error> {
        self.write("case")?;
        if self.scratch.join("CASE").exists() {
            return Err(self.lacks("does not distinguish upper and lower case"));
        }
        Ok(())
    }

    /// Every user may create a device 0:0 since Linux 5.8; overlayfs uses it for whiteouts.
    fn has_whiteouts(&self) -> Result<(), Error> {
        let path = self.scratch.join("whiteout");
        let made =
            rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), 0).is_ok();
        let is_there = fs::symlink_metadata(&path).is_ok_and(|found| {
            FileType::from_raw_mode(found.mode()) == FileType::CharacterDevice && found.rdev() == 0
        });
        if made && is_there {
            return Ok(());
        }
        Err(self.lacks("cannot hold whiteouts (device 0:0), as an overlay or FUSE cannot"))
    }

    fn has_links(&self) -> Result<(), Error> {
        self.write("one")?;
        let linked = fs::hard_link(self.scratch.join("one"), self.scratch.join("other"));
        if linked.is_ok() && self.holds("other", "one") {
            return Ok(());
        }
        Err(self.lacks("has no hard links"))
    }

    fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> Result<(), Errno> {
        let (from, to) = (self.scratch.join(from), self.scratch.join(to));
        rustix::fs::renameat_with(CWD, &from, CWD, &to, flags)
    }

    /// Commits exchange new objects with old ones.
    fn exchanges(&self) -> Result<(), Error> {
        self.write("old")?;
        self.write("new")?;
        let exchanged = self.rename("old", "new", RenameFlags::EXCHANGE).is_ok();
        if exchanged && self.holds("old", "new") && self.holds("new", "old") {
            return Ok(());
        }
        Err(self.lacks("cannot swap two names at once (RENAME_EXCHANGE)"))
    }

    /// Checks that renames can be made to fail if the target exists.
    fn keeps_what_is_there(&self) -> Result<(), Error> {
        self.write("mine")?;
        self.write("theirs")?;
        let refused = self.rename("mine", "theirs", RenameFlags::NOREPLACE) == Err(Errno::EXIST);
        let moved = self.rename("mine", "free", RenameFlags::NOREPLACE).is_ok();
        if refused && moved && self.holds("theirs", "theirs") && self.holds("free", "mine") {
            return Ok(());
        }
        Err(self.lacks("cannot rename without replacing (RENAME_NOREPLACE)"))
    }

    /// Tests on the store itself: its inode has space for an xattr even on a full disk.
    fn namespace(&self) -> Result<Namespace, Error> {
        for namespace in [Namespace::Trusted, Namespace::User] {
            let (path, name) = (self.store, namespace.opaque());
            if rustix::fs::lsetxattr(path, name, b"n", XattrFlags::empty()).is_ok() {
                rustix::fs::lremovexattr(path, name).at(path)?;
                if namespace == Namespace::User && crate::mount_table::is_in_mount(path)? {
                    break; // a branch takes these as the user's own, but no whiteouts
                }
                return Ok(namespace);
            }
        }
        Err(self.lacks("has no extended attributes for the marks of layers"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_leaves_nothing_and_survives_what_an_earlier_one_left() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = directory.path().join(SCRATCH);
        fs::create_dir(&scratch).unwrap();
        fs::write(scratch.join("old"), "left behind").unwrap();
        assert_eq!(probe(directory.path(), (0, 0)).unwrap(), Namespace::Trusted);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_left_by_a_killed_probe_can_be_removed_by_the_owner() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = directory.path().join(SCRATCH);
        let probe = Probe { store: directory.path(), scratch: &scratch, owner: (1000, 1000) };
        probe.all().unwrap();
        assert_eq!(fs::metadata(&scratch).unwrap().uid(), 1000);
        assert!(fs::read_dir(&scratch).unwrap().all(|entry| !entry.unwrap().path().is_dir()));
    }
}
