//! Objects of a store, named by absolute path and reached without following a symbolic link.
//!
//! A store may have come with a stranger's directory (a repository, an archive), and the base's owner, who is not always
//! the daemon's user, may put anything into it. So no component of a path may be a symbolic link, a FIFO or a device is
//! never waited for, and a file that has other hard links is refused: its content may belong to something outside. Paths
//! below a root that is open already go through [`crate::rooted_dir::RootedDir`] instead.
//!
//! The caller resolves the store's own path (`fs::canonicalize`) before it gets here.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Longest path below the root of a branch. It is less than `PATH_MAX`, so that the same object can be named
/// below the directories of the store that it passes through, such as `layers/1795470613678/upper/`.
pub(crate) const PATH_BYTES_MAX: usize = 4068;

/// Only the owner may read and write it: the daemon runs without a umask.
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);
const PRIVATE_DIRECTORY: Mode = Mode::from_raw_mode(0o700);

/// Why an object of a store is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("it is a symbolic link, or is reached through one")]
    Symlink,
    #[error("it is not a regular file")]
    NotRegular,
    #[error("it is not a directory")]
    NotDirectory,
    #[error("it has other hard links")]
    HardLink,
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, refusal)
    }
}

/// Adds the meaning of an error to its message.
fn explain(error: Errno) -> io::Error {
    if error == Errno::LOOP { Refusal::Symlink.into() } else { error.into() }
}

fn open(path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    let mut flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if !flags.contains(OFlags::PATH) {
        flags |= OFlags::NONBLOCK | OFlags::NOCTTY;
    }
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(CWD, path, flags, mode, resolve).map_err(explain)
}

/// Opens a regular file with one name. With `CREATE` a missing one is created, accessible only by its owner.
pub fn open_file(path: &Path, flags: OFlags) -> io::Result<File> {
    // Opening a device has effects, so it is looked at first.
    match open(path, OFlags::PATH, Mode::empty()) {
        Ok(found) => check(&found)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound && flags.contains(OFlags::CREATE) => {
        }
        Err(error) => return Err(error),
    }
    let mode = if flags.contains(OFlags::CREATE) { PRIVATE_FILE } else { Mode::empty() };
    let truncates = flags.contains(OFlags::TRUNC);
    let opened = open(path, flags.difference(OFlags::TRUNC), mode)?;
    check(&opened)?;
    let file = File::from(opened);
    if truncates {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Refuses anything but a regular file with exactly one name. A file that was replaced in the meantime has none.
pub fn check(file: &OwnedFd) -> io::Result<()> {
    let found = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Symlink {
        return Err(Refusal::Symlink.into());
    }
    if !FileType::from_raw_mode(found.st_mode).is_file() {
        return Err(Refusal::NotRegular.into());
    }
    if found.st_nlink > 1 { Err(Refusal::HardLink.into()) } else { Ok(()) }
}

/// The content of a file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_file(path, OFlags::RDONLY)?.read_to_end(&mut content)?;
    Ok(content)
}

/// Replaces the content of a file, or creates it.
pub(crate) fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    open_file(path, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?.write_all(content)
}

/// Opens a directory for reading. The error names the type of what is there instead.
pub fn open_directory(path: &Path) -> io::Result<File> {
    let opened = open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
    opened.map(File::from).map_err(|error| {
        let found =
            if error.kind() == io::ErrorKind::NotADirectory { stat(path) } else { Ok(None) };
        match found.map(|found| found.map(|found| FileType::from_raw_mode(found.st_mode))) {
            Ok(Some(FileType::Symlink)) => Refusal::Symlink.into(),
            Ok(Some(_)) => Refusal::NotDirectory.into(),
            _ => error,
        }
    })
}

/// The names in a directory without `.` and `..`, unsorted.
pub(crate) fn names(path: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::new(open_directory(path)?)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(std::os::unix::ffi::OsStringExt::from_vec(name));
        }
    }
    Ok(names)
}

/// The status of the object at a path itself; `None` if there is none.
pub(crate) fn stat(path: &Path) -> io::Result<Option<Stat>> {
    match open(path, OFlags::PATH, Mode::empty()) {
        Ok(found) => Ok(Some(rustix::fs::fstat(&found)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether there is an object at a path, which may be a symbolic link to nowhere.
pub(crate) fn exists(path: &Path) -> io::Result<bool> {
    stat(path).map(|found| found.is_some())
}

/// The parent directory of a path, and the name in it.
pub(crate) fn parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    Ok((open(parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?, name))
}

/// Creates a directory that only its owner can access.
pub(crate) fn make_directory(path: &Path) -> io::Result<()> {
    let (parent, name) = parent(path)?;
    Ok(rustix::fs::mkdirat(&parent, name, PRIVATE_DIRECTORY)?)
}

/// Renames an object, replacing an existing file.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let ((from, name), (to, new_name)) = (parent(from)?, parent(to)?);
    Ok(rustix::fs::renameat(&from, name, &to, new_name)?)
}

/// Removes a name that is not a directory's.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    let (parent, name) = parent(path)?;
    Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_a_file_with_one_name_reached_through_directories_is_opened() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("real")).unwrap();
        fs::write(place.path().join("real/outside"), "content").unwrap();
        let script = "ln -s real/outside symlink; ln -s real through; mkfifo fifo; mknod device c 1 3; mkdir directory";
        let made = Command::new("sh").args(["-c", script]).current_dir(place.path()).status();
        assert!(made.unwrap().success());
        let flags = [
            OFlags::RDONLY,
            OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE,
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC,
        ];
        let refused = |name: &str| {
            flags.map(|flags| {
                let error = open_file(&place.path().join(name), flags).unwrap_err();
                *error.get_ref().unwrap().downcast_ref::<Refusal>().unwrap()
            })
        };
        assert_eq!(refused("symlink"), [Refusal::Symlink; 3]);
        assert_eq!(refused("through/outside"), [Refusal::Symlink; 3]);
        for name in ["fifo", "device", "directory"] {
            assert_eq!(refused(name), [Refusal::NotRegular; 3], "{name}");
        }
        fs::hard_link(place.path().join("real/outside"), place.path().join("hard")).unwrap();
        assert_eq!(refused("hard"), [Refusal::HardLink; 3]);
        assert_eq!(fs::read_to_string(place.path().join("real/outside")).unwrap(), "content");
    }

    #[test]
    fn nothing_is_changed_through_a_linked_directory() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("real")).unwrap();
        fs::write(place.path().join("real/file"), "content").unwrap();
        std::os::unix::fs::symlink("real", place.path().join("through")).unwrap();
        let (there, here) = (place.path().join("through/file"), place.path().join("moved"));
        assert!(remove_file(&there).is_err() && rename(&there, &here).is_err());
        assert!(exists(&there).is_err());
        assert!(make_directory(&place.path().join("through/new")).is_err());
        assert!(names(&place.path().join("through")).is_err());
        assert_eq!(names(&place.path().join("real")).unwrap(), ["file"]);
    }
}
