//! Who has files of a file system open for writing: what stands against stopping all writing.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::tree::{Tree, stat_of};

/// Paths below `root` that are open for writing in any process we can look into. May miss some: files without a name, and
/// mappings whose descriptor is closed.
pub(crate) fn written(root: BorrowedFd<'_>) -> Vec<PathBuf> {
    let Ok(stat) = stat_of(root) else { return Vec::new() };
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let Ok(tree) = rustix::io::dup(root.as_fd()).map(Tree::new) else { return Vec::new() };
    let mut paths = Vec::new();
    for process in entries(Path::new("/proc")) {
        let is_process =
            process.file_name().is_some_and(|name| name.as_bytes()[0].is_ascii_digit());
        if !is_process {
            continue;
        }
        for descriptor in entries(&process.join("fd")) {
            let Ok(found) = fs::metadata(&descriptor) else { continue };
            if found.dev() == device && !found.is_dir() && is_for_writing(&process, &descriptor) {
                paths.extend(path_below(&tree, &descriptor, found.ino()));
            }
        }
    }
    paths.sort();
    paths.dedup();
    paths
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

/// A descriptor's path as its process sees it ends with the path below the root: which end it is, the inode tells.
fn path_below(tree: &Tree, descriptor: &Path, ino: u64) -> Option<PathBuf> {
    let whole = fs::read_link(descriptor).ok()?;
    let parts: Vec<_> = whole.iter().filter(|part| *part != "/").collect();
    let ends = (0..parts.len()).map(|start| parts[start..].iter().collect::<PathBuf>());
    ends.into_iter().find(|end| tree.stat(end).is_ok_and(|stat| stat.stx_ino == ino))
}
