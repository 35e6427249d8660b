//! The kernel's table of mounts, as this process sees it (`/proc/self/mountinfo`).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error};
use crate::overlayfs_mount::SOURCE;

const TABLE: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Debug)]
pub struct Entry {
    /// Which directory of the file system is seen there.
    pub(crate) root: PathBuf,
    /// Absolute path of the mountpoint.
    pub point: PathBuf,
    pub(crate) kind: String,
    pub(crate) source: PathBuf,
    /// `major:minor` of the file system.
    device: String,
    /// Options of the file system, not of the mount.
    pub options: String,
}

/// All mounts, oldest first.
pub fn read() -> Result<Vec<Entry>, Error> {
    read_from(Path::new(TABLE)).at(TABLE)
}

fn read_from(table: &Path) -> std::io::Result<Vec<Entry>> {
    let table = std::fs::read(table)?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// `36 35 98:0 /root /point rw,noatime optional… - type source options`
fn parse(line: &[u8]) -> Option<Entry> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    let text = |at: usize| fields.get(at).map(|field| String::from_utf8_lossy(field).into_owned());
    Some(Entry {
        root: unescape(fields.get(3)?),
        point: unescape(fields.get(4)?),
        kind: text(dash + 1)?,
        source: unescape(fields.get(dash + 2)?),
        device: text(2)?,
        options: text(dash + 3)?,
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = rest.get(1..4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &rest[4..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Whether branches below a mountpoint have mounts of their own, which must be unmounted first.
pub fn has_branch_mounts(mountpoint: &Path) -> bool {
    let is_ours =
        |entry: &Entry| entry.source == Path::new(SOURCE) && entry.point.starts_with(mountpoint);
    read().is_ok_and(|entries| entries.iter().any(is_ours))
}

/// Whether a path is the root of a mounted BranchFS. Only there the attributes of the directory are answers of the
/// daemon. Elsewhere the directory's owner has set them.
pub fn is_root_of_mount(mountpoint: &Path) -> Result<bool, Error> {
    let place = place_of(mountpoint)?;
    let entries = read()?;
    let last = entries.iter().rev().find(|entry| entry.point == place);
    Ok(last.is_some_and(|entry| entry.kind == "fuse.branchfs" && entry.root == Path::new("/")))
}

/// Whether the innermost mount that contains a directory is one of BranchFS.
pub(crate) fn is_in_mount(directory: &Path) -> Result<bool, Error> {
    let place = place_of(directory)?;
    let entries = read()?;
    // Of several mounts at one place the last one counts.
    let around = entries.iter().filter(|entry| place.starts_with(&entry.point));
    let nearest = around.max_by_key(|entry| entry.point.as_os_str().len());
    Ok(nearest.is_some_and(|entry| entry.kind == "fuse.branchfs"))
}

/// The path of a mountpoint without symbolic links, even if its daemon is gone.
fn place_of(mountpoint: &Path) -> Result<PathBuf, Error> {
    match std::fs::canonicalize(mountpoint) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {}
        other => return other.at(mountpoint),
    }
    match (mountpoint.parent(), mountpoint.file_name()) {
        // The mountpoint itself cannot be resolved any more, but what it lies in can.
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(std::fs::canonicalize(parent).at(parent)?.join(name))
        }
        _ => Ok(mountpoint.to_path_buf()),
    }
}

/// The mountpoint without symbolic links, if a killed daemon has left its mount there: a connection without a server.
pub fn dead_mount(mountpoint: &Path) -> Result<Option<PathBuf>, Error> {
    let is_dead = std::fs::metadata(mountpoint)
        .is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN));
    if !is_dead {
        return Ok(None);
    }
    let place = place_of(mountpoint)?;
    let is_ours = |entry: &Entry| entry.point == place && entry.kind == "fuse.branchfs";
    Ok(read()?.iter().any(is_ours).then_some(place))
}

/// The processes, one of each other mount namespace that has a mount of the file system `device`: number and name.
pub fn users_elsewhere(device: u64) -> Vec<(u32, String)> {
    let wanted = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    users_of(|entry| entry.device == wanted)
}

/// The same of mounts over the base `base`.
pub(crate) fn users_of_base(base: &Path) -> Vec<(u32, String)> {
    users_of(|entry| is_over(entry, base))
}

/// The same of overlayfs mounts with the upper directory `upper`.
pub fn users_of_upper(upper: &Path) -> Vec<(u32, String)> {
    let is_upper = |option: &[u8]| {
        option.strip_prefix(b"upperdir=").is_some_and(|path| unescape(path) == upper)
    };
    users_of(|entry| {
        entry.source == Path::new(SOURCE)
            && entry.options.as_bytes().split(|byte| *byte == b',').any(is_upper)
    })
}

/// The mountpoint of the base `base` in the mount namespace of a process. `Err` if its table cannot be read.
pub(crate) fn mount_of(process: u32, base: &Path) -> std::io::Result<Option<PathBuf>> {
    let entries = read_from(Path::new(&format!("/proc/{process}/mountinfo")))?;
    Ok(entries.into_iter().find(|entry| is_over(entry, base)).map(|entry| entry.point))
}

fn is_over(entry: &Entry, base: &Path) -> bool {
    entry.kind == "fuse.branchfs" && entry.source == base
}

fn users_of(is_it: impl Fn(&Entry) -> bool) -> Vec<(u32, String)> {
    let (mut namespaces, mut users) = (std::collections::HashSet::new(), Vec::new());
    namespaces.extend(std::fs::read_link("/proc/self/ns/mnt"));
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes come and go meanwhile, and some may not be looked at.
        let Ok(namespace) = std::fs::read_link(entry.path().join("ns/mnt")) else { continue };
        let has_it = || {
            read_from(&entry.path().join("mountinfo")).is_ok_and(|table| table.iter().any(&is_it))
        };
        if namespaces.insert(namespace) && has_it() {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            users.push((pid, name.trim().to_owned()));
        }
    }
    users
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_line_is_read_with_its_escapes() {
        let line =
            br"51 27 0:40 / /tmp/t\303\251\040st\134040 rw shared:1 - overlay branch rw,index=on";
        let entry = parse(line).unwrap();
        assert_eq!(entry.point.as_os_str().as_bytes(), b"/tmp/t\xc3\xa9 st\\040");
        assert_eq!(entry.kind, "overlay");
        assert_eq!(entry.options, "rw,index=on");
    }
}
