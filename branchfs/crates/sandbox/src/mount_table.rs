//! Reads the mount table of this process (proc_pid_mountinfo(5)), and makes the listed mounts read-only.

use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatVfsMountFlags, StatxFlags, statvfs, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

use crate::failure::{Context, Failure, Result};

pub(crate) const MOUNT_TABLE: &str = "/proc/self/mountinfo";
const SOURCES: [&str; 2] = ["branchfs", "branchfs-branch"];

/// One line of the table.
pub(crate) struct Mount {
    /// The file system, as major:minor.
    device: Vec<u8>,
    /// Which directory of the file system is mounted.
    pub(crate) root: PathBuf,
    pub(crate) point: PathBuf,
    options: Vec<u8>,
    kind: Vec<u8>,
    pub(crate) source: PathBuf,
    super_options: Vec<u8>,
}

impl Mount {
    /// Whether the mount is read-only; the file system may be so besides.
    pub(crate) fn is_read_only(&self) -> bool {
        self.options.split(|&byte| byte == b',').any(|option| option == b"ro")
    }

    /// Whether a BranchFS daemon serves it; its source is the base directory then.
    pub(crate) fn is_branchfs(&self) -> bool {
        self.kind == b"fuse.branchfs"
    }

    /// Whether it is the root of a BranchFS, whose attributes are answers of the daemon.
    pub(crate) fn answers(&self) -> bool {
        self.is_branchfs() && self.root == Path::new("/")
    }

    /// Whether it is a BranchFS, an overlayfs mount of one of its branches, or a DaxFS branch.
    pub(crate) fn has_branches(&self) -> bool {
        let mark = b"branch=/main/";
        let is_daxfs = self.kind == b"daxfs"
            && self.super_options.windows(mark.len()).any(|part| part == mark);
        self.is_branchfs() || is_daxfs || SOURCES.iter().any(|name| self.source == Path::new(name))
    }

    fn flags(&self) -> MountFlags {
        let known = [
            (&b"nosuid"[..], MountFlags::NOSUID),
            (b"nodev", MountFlags::NODEV),
            (b"noexec", MountFlags::NOEXEC),
            (b"noatime", MountFlags::NOATIME),
            (b"nodiratime", MountFlags::NODIRATIME),
        ];
        let options = self.options.split(|&byte| byte == b',');
        let set = options.filter_map(|option| known.iter().find(|(name, _)| *name == option));
        set.map(|(_, flag)| *flag).collect()
    }
}

/// Returns all mounts, the oldest first, with those that others hide.
pub(crate) fn read() -> Result<Vec<Mount>> {
    let table = fs::read(MOUNT_TABLE).at(MOUNT_TABLE)?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

/// Returns the id of the mount in which an open file lies.
pub(crate) fn id_of(file: &OwnedFd) -> Result<u64> {
    Ok(statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// Returns the mount ids in the content of a `mountinfo` file.
pub(crate) fn ids(table: &[u8]) -> Vec<u64> {
    let lines = table.split(|&byte| byte == b'\n');
    let ids = lines.filter_map(|line| line.split(|&byte| byte == b' ').next());
    ids.filter_map(|id| std::str::from_utf8(id).ok()?.parse().ok()).collect()
}

/// Parses one line: `36 35 98:0 /root /point rw [optional …] - fstype source super-options`.
fn parse(line: &[u8]) -> Option<Mount> {
    let end = line.windows(3).position(|part| part == b" - ")?;
    let mut fields = line[..end].split(|&byte| byte == b' ').skip(2);
    let mut tail = line[end + 3..].splitn(3, |&byte| byte == b' ');
    Some(Mount {
        device: fields.next()?.to_vec(),
        root: unescaped(fields.next()?).into(),
        point: unescaped(fields.next()?).into(),
        options: fields.next()?.to_vec(),
        kind: tail.next()?.to_vec(),
        source: unescaped(tail.next()?).into(),
        super_options: tail.next()?.to_vec(),
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescaped(field: &[u8]) -> OsString {
    let mut text = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        rest = after;
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', more @ ..]) =
            (first, after)
        {
            text.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
            rest = more;
        } else {
            text.push(*first);
        }
    }
    OsString::from_vec(text)
}

/// Returns the mounts whose mount points are not below another one of them.
pub(crate) fn outermost<'a>(mounts: impl Iterator<Item = &'a Mount>) -> Vec<&'a Mount> {
    let mut sorted: Vec<_> = mounts.collect();
    sorted.sort_by_key(|mount| mount.point.as_os_str().len());
    let mut found: Vec<&Mount> = Vec::new();
    for mount in sorted {
        let is_below =
            |other: &&Mount| other.point != mount.point && mount.point.starts_with(&other.point);
        if !found.iter().any(is_below) {
            found.push(mount);
        }
    }
    found
}

/// Remounts each of these mounts read-only. Skips mounts that are hidden under others or whose server is dead.
pub(crate) fn make_read_only(mounts: &[Mount]) -> Result<()> {
    for mount in mounts.iter().filter(|mount| !mount.is_read_only()) {
        let flags = mount.flags() | MountFlags::BIND | MountFlags::RDONLY;
        match mount_remount(&mount.point, flags, c"") {
            // The errors of a mount that is hidden under another one, or whose server is dead.
            Err(Errno::INVAL | Errno::NOENT | Errno::ACCESS | Errno::NOTCONN | Errno::NOTDIR) => {}
            done => done.at(&mount.point)?,
        }
    }
    Ok(())
}

/// Lists where else `path` can be reached: a file system may be mounted more than once.
pub(crate) fn places_of(path: &Path, mounts: &[Mount]) -> Vec<PathBuf> {
    let mut places = vec![path.to_owned()];
    let Some(own) = around(path, mounts) else { return places };
    let within = joined(&own.root, path.strip_prefix(&own.point).unwrap_or(path));
    for mount in mounts.iter().filter(|mount| mount.device == own.device) {
        if let Ok(below) = within.strip_prefix(&mount.root) {
            let place = joined(&mount.point, below);
            if place != path && fs::symlink_metadata(&place).is_ok() {
                places.push(place);
            }
        } else if mount.root.starts_with(&within) {
            places.push(mount.point.clone());
        }
    }
    places
}

/// Returns the mount that `path` lies in: of two at one place the younger one.
pub(crate) fn around<'a>(path: &Path, mounts: &'a [Mount]) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.as_os_str().as_bytes().len())
}

fn joined(directory: &Path, relative: &Path) -> PathBuf {
    if relative.as_os_str().is_empty() { directory.to_owned() } else { directory.join(relative) }
}

/// The flags of the mount at a path, which a bind remount must repeat.
pub(crate) fn kept_flags(path: &Path) -> Result<MountFlags> {
    let known = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
    ];
    let found = statvfs(path).map_err(Failure::from).at(path)?.f_flag;
    Ok(known.iter().filter(|(flag, _)| found.contains(*flag)).map(|(_, flag)| *flag).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:30 / /mnt/a\\040b ro,nosuid,noexec - fuse.branchfs /base rw
31 22 254:0 /home /data rw - ext4 /dev/vda rw
32 30 0:31 /x /mnt/a\\040b/@one rw master:7 - overlay branchfs-branch rw,lowerdir=/l
";

    fn table() -> Vec<Mount> {
        TABLE.split('\n').filter_map(|line| parse(line.as_bytes())).collect()
    }

    #[test]
    fn a_line_is_read_with_what_the_kernel_has_escaped() {
        let table = table();
        assert_eq!(table.len(), 4);
        assert_eq!(table[1].point, Path::new("/mnt/a b"));
        assert!(table[1].is_read_only() && table[1].answers() && table[1].has_branches());
        assert_eq!(table[1].flags(), MountFlags::NOSUID | MountFlags::NOEXEC);
        assert!(table[3].has_branches() && !table[3].answers());
        assert!(!table[0].has_branches() && !table[0].is_read_only());
        assert_eq!(ids(TABLE.as_bytes()), [22, 30, 31, 32]);
    }

    #[test]
    fn the_outermost_mounts_are_those_below_no_other() {
        let table = table();
        let found = outermost(table.iter().filter(|mount| mount.has_branches()));
        assert_eq!(
            found.iter().map(|mount| &mount.point).collect::<Vec<_>>(),
            [Path::new("/mnt/a b")]
        );
    }

    #[test]
    fn a_path_is_found_at_the_other_mounts_of_its_file_system() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().to_str().unwrap();
        let lines =
            format!("1 0 8:1 / {top}/one rw - ext4 x rw\n2 0 8:1 /deep {top}/two rw - ext4 x rw\n");
        let table: Vec<_> = lines.split('\n').filter_map(|line| parse(line.as_bytes())).collect();
        fs::create_dir_all(place.path().join("two/file")).unwrap();
        let [one, two] = ["one", "two"].map(|name| place.path().join(name));
        assert_eq!(around(&one.join("deep"), &table).unwrap().point, one);
        let found = places_of(&one.join("deep/file"), &table);
        assert_eq!(found, [one.join("deep/file"), two.join("file")]);
        assert_eq!(places_of(&one.join("deep/gone"), &table), [one.join("deep/gone")]);
        assert_eq!(places_of(&one, &table), [one.clone(), two]);
    }
}
