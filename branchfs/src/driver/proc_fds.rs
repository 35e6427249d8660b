//! Finds what keeps a file system from becoming read-only: files that are open for writing, deleted files that are
//! still open, and the processes that have them open.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, FileType, OFlags, Statx, StatxFlags};

use branchfs_core::rooted_dir::{RootedDir, stat_of};
use branchfs_core::sys;

/// What keeps a file system from being made read-only.
pub(crate) struct Open {
    /// Path below its root. That of a deleted file ends with ` (deleted)`.
    pub(crate) path: PathBuf,
    /// The directory of the process in `/proc`.
    process: PathBuf,
}

/// What any process that we can look into has open below `root` and either open for writing or deleted. May miss some: see
/// [`written_in`].
pub(crate) fn blocking(root: BorrowedFd<'_>) -> Vec<Open> {
    let Some((device, tree)) = file_system_of(root) else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes() {
        let directories = ["cwd", "root"].map(|link| process.join(link));
        for link in directories.into_iter().chain(entries(&process.join("fd"))) {
            let Some(status) = status_on(device, &link) else { continue };
            let Ok(name) = fs::read_link(&link) else { continue };
            let kind = FileType::from_raw_mode(status.stx_mode.into());
            let is_directory = kind == FileType::Directory;
            // The kernel shows the number of links that a file of the base has there, of one name too.
            let is_deleted = has_deleted_name(&name) && (is_directory || status.stx_nlink <= 1);
            if is_deleted || (!is_directory && is_for_writing(&process, &link)) {
                let path = path_below(&tree, &name, status.stx_ino, is_deleted);
                found.extend(path.map(|path| Open { path, process: process.clone() }));
            }
        }
    }
    found
}

/// The threads of other processes that have something open on the file system of `root`, or their working directory
/// there. `namespaces` are the other mount namespaces in which such a process was found, now or before: of these, all
/// threads.
pub(crate) fn threads_inside(root: BorrowedFd<'_>, namespaces: &mut HashSet<PathBuf>) -> Vec<i32> {
    let namespace_of = |process: &Path| fs::read_link(process.join("ns/mnt")).ok();
    let own = std::process::id().to_string();
    let Some(device) = device_of(root) else { return Vec::new() };
    let own_namespace = namespace_of(Path::new("/proc/self"));
    let is_there = |link: PathBuf| status_on(device, &link).is_some();
    let processes: Vec<PathBuf> = processes().filter(|process| !process.ends_with(&own)).collect();
    let mut inside = Vec::new();
    for process in &processes {
        if ["cwd", "root"].iter().any(|link| is_there(process.join(link)))
            || entries(&process.join("fd")).into_iter().any(is_there)
        {
            namespaces.extend(
                namespace_of(process).filter(|found| Some(found) != own_namespace.as_ref()),
            );
            inside.push(process);
        }
    }
    let beside = processes.iter().filter(|process| {
        !namespaces.is_empty()
            && namespace_of(process).is_some_and(|found| namespaces.contains(&found))
    });
    inside.extend(beside);
    let tasks = inside.into_iter().flat_map(|process| entries(&process.join("task")));
    tasks.filter_map(|task| task.file_name()?.to_str()?.parse().ok()).collect()
}

/// Deleted files below `root` that any process has mapped.
pub(crate) fn mapped_and_deleted(root: BorrowedFd<'_>) -> Vec<Open> {
    let Some((device, tree)) = file_system_of(root) else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes() {
        for (number, name) in mappings(&process, device) {
            if has_deleted_name(&name) {
                let path = path_below(&tree, &name, number, true);
                found.extend(path.map(|path| Open { path, process: process.clone() }));
            }
        }
    }
    found
}

/// The paths, and the processes as number and name.
pub(crate) fn paths_and_users(found: Vec<Open>) -> (Vec<PathBuf>, Vec<String>) {
    let (mut paths, mut users): (Vec<_>, Vec<_>) =
        found.into_iter().map(|open| (open.path, describe(&open.process))).unzip();
    paths.sort();
    paths.dedup();
    users.sort();
    users.dedup();
    (paths, users)
}

fn file_system_of(root: BorrowedFd<'_>) -> Option<(u64, RootedDir)> {
    Some((device_of(root)?, rustix::io::dup(root.as_fd()).map(RootedDir::new).ok()?))
}

/// The status of the target of a link in `/proc`, if it is on `device`. Sends no request to a network or FUSE server,
/// which might not answer.
fn status_on(device: u64, link: &Path) -> Option<Statx> {
    let (flags, mask) = (AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
    let status = rustix::fs::statx(CWD, link, flags, mask).ok()?;
    let found = rustix::fs::makedev(status.stx_dev_major, status.stx_dev_minor);
    (found == device).then_some(status)
}

fn has_deleted_name(name: &Path) -> bool {
    name.as_os_str().as_bytes().ends_with(b" (deleted)")
}

/// Paths in the upper directory of a layer that are open or mapped for writing in whichever process, also in those that we
/// cannot look into. Files without a name are missed, and after `deadline` the rest.
pub(crate) fn written_in(upper: &Path, deadline: Instant) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let Ok(tree) = RootedDir::open_root(upper) else { return paths };
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        // A file that is gone by now is not open by that name either.
        for entry in tree.list(&directory).unwrap_or_default() {
            if Instant::now() >= deadline {
                return paths;
            }
            let path = directory.join(&entry.name);
            match entry.kind {
                FileType::Directory => directories.push(path),
                FileType::RegularFile if is_open_for_writing(&tree, &path) => paths.push(path),
                _ => {}
            }
        }
    }
    paths.sort();
    paths
}

fn is_open_for_writing(tree: &RootedDir, path: &Path) -> bool {
    let opened = tree.open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW);
    let Ok(file) = opened else { return false };
    let owner = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_uid);
    sys::is_being_written(file.as_fd(), owner).unwrap_or(false)
}

/// The other processes that have something of the file system of `root` open, as number and name.
pub(crate) fn users(root: BorrowedFd<'_>) -> Vec<String> {
    let Some(device) = device_of(root) else { return Vec::new() };
    let is_there = |link: PathBuf| status_on(device, &link).is_some();
    let uses = |process: &PathBuf| {
        ["cwd", "root"].iter().any(|link| is_there(process.join(link)))
            || entries(&process.join("fd")).into_iter().any(is_there)
            || !mappings(process, device).is_empty()
    };
    let own = std::process::id().to_string();
    let others = processes().filter(|process| !process.ends_with(&own) && uses(process));
    others.map(|process| describe(&process)).collect()
}

/// Number and name of a process.
fn describe(process: &Path) -> String {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    let number = process.file_name().unwrap_or_default().to_string_lossy();
    format!("{number} ({})", name.trim())
}

/// The files of a device that a process has mapped, by inode number and path: `7f3c…-7f3d… rw-s 00000000 08:01 1234 /path`.
fn mappings(process: &Path, device: u64) -> Vec<(u64, PathBuf)> {
    let wanted = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    let table = fs::read(process.join("maps")).unwrap_or_default();
    let parse = |line: &[u8]| {
        let mut words = line.splitn(6, |byte| *byte == b' ');
        let number = match (words.nth(3)?, words.next()?) {
            (device, number) if device == wanted.as_bytes() => std::str::from_utf8(number).ok()?,
            _ => return None,
        };
        let path = words.next().unwrap_or_default().trim_ascii_start();
        Some((number.parse().ok()?, PathBuf::from(OsStr::from_bytes(path))))
    };
    table.split(|byte| *byte == b'\n').filter_map(parse).collect()
}

fn device_of(root: BorrowedFd<'_>) -> Option<u64> {
    let stat = stat_of(root).ok()?;
    Some(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let is_process = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_bytes().iter().all(u8::is_ascii_digit))
    };
    entries(Path::new("/proc")).into_iter().filter(is_process)
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    // A process that is gone by now has nothing open.
    let listed = fs::read_dir(directory).into_iter().flatten();
    listed.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// `flags:` in fdinfo is octal; its last two bits are the access mode.
fn is_for_writing(process: &Path, descriptor: &Path) -> bool {
    let name = descriptor.file_name().unwrap_or(OsStr::new("."));
    let text = fs::read_to_string(process.join("fdinfo").join(name)).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|flags| u64::from_str_radix(flags.trim(), 8).ok()).is_some_and(|f| f & 3 != 0)
}

/// The path below the root is an end of the path that the process sees; the inode tells which one. For a deleted file
/// it is the longest end whose directory exists.
fn path_below(tree: &RootedDir, whole: &Path, number: u64, is_deleted: bool) -> Option<PathBuf> {
    let parts: Vec<_> = whole.iter().filter(|part| *part != "/").collect();
    let ends = (0..parts.len()).map(|start| parts[start..].iter().collect::<PathBuf>());
    let is_it = |end: &PathBuf| match tree.stat(end) {
        Ok(stat) => !is_deleted && stat.stx_ino == number,
        Err(_) => is_deleted && end.parent().is_some_and(|parent| tree.stat(parent).is_ok()),
    };
    ends.into_iter().find(is_it)
}
