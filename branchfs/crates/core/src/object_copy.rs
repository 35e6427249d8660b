//! Copying objects: their attributes, and their content without its holes.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{
    FileType, OFlags, SeekFrom, Statx, StatxTimestamp, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;

use crate::overlay::user_xattrs;
use crate::ownership;
use crate::rooted_dir::{Result, RootedDir};

fn timespec(time: StatxTimestamp) -> Timespec {
    Timespec { tv_sec: time.tv_sec, tv_nsec: i64::from(time.tv_nsec) }
}

/// Access and modification time of `stat`, for `utimensat`.
pub fn times(stat: &Statx) -> Timestamps {
    Timestamps {
        last_access: timespec(stat.stx_atime),
        last_modification: timespec(stat.stx_mtime),
    }
}

/// Gives an object the owner, extended attributes and mode of another, and leaves its times. Extended attributes that `from`
/// does not have are removed.
pub fn copy_attributes(from: (&RootedDir, &Path), to: (&RootedDir, &Path)) -> Result<()> {
    let (kept, mut stat) = (to.0.stat(to.1)?, from.0.stat(from.1)?);
    (stat.stx_atime, stat.stx_mtime) = (kept.stx_atime, kept.stx_mtime);
    for name in user_xattrs(to.0, to.1)? {
        if from.0.find_xattr(from.1, &name)?.is_none() {
            to.0.remove_xattr(to.1, &name)?;
        }
    }
    copy_metadata((from.0, from.1, &stat), to)
}

/// Removes the ACLs that a new object has inherited from the directory it was made in, except those that it is to have.
pub fn drop_inherited_acls(
    tree: &RootedDir,
    path: &Path,
    is_kept: impl Fn(&OsStr) -> Result<bool>,
) -> Result<()> {
    for name in user_xattrs(tree, path)? {
        if name.as_bytes().starts_with(b"system.posix_acl_") && !is_kept(&name)? {
            tree.remove_xattr(path, &name)?;
        }
    }
    Ok(())
}

/// Copies owner, extended attributes, mode and times of `from` to the object `to` (in this order: a change of owner
/// clears set-id bits and capabilities, and everything before the times touches them). ACLs that `from` does not have
/// are removed: a new object may have inherited them, and with them others would have access.
pub fn copy_metadata(from: (&RootedDir, &Path, &Statx), to: (&RootedDir, &Path)) -> Result<()> {
    let (source, path, stat) = from;
    let (target, new) = to;
    ownership::set_in(target, new, ownership::of(stat))?;
    drop_inherited_acls(target, new, |name| Ok(source.find_xattr(path, name)?.is_some()))?;
    for name in user_xattrs(source, path)? {
        let value = source.get_xattr(path, &name)?;
        target.set_xattr(new, &name, &value, XattrFlags::empty())?;
    }
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::Symlink {
        target.set_mode(new, u32::from(stat.stx_mode))?;
    }
    target.set_times(new, &times(stat))
}

/// Creates an object of the type of another one that is no directory, with its device number or the path that it names.
/// `fill` writes the content of a regular file. [`copy_metadata`] does the rest.
pub(crate) fn create_like(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    (to, new): (&RootedDir, &Path),
    fill: impl FnOnce(&OwnedFd) -> Result<()>,
) -> Result<()> {
    let mode = u32::from(stat.stx_mode);
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => fill(&to.create_file(new, 0o600)?),
        FileType::Symlink => to.make_symlink(new, OsStr::from_bytes(&from.read_link(path)?)),
        _ => {
            let device = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
            to.make_node(new, mode, device)
        }
    }
}

/// Copies the content of a regular file into an empty one.
///
/// # Errors
/// `ESTALE` if another object has taken its place since.
pub(crate) fn copy_file(
    (from, path, stat): (&RootedDir, &Path, &Statx),
    to: &OwnedFd,
) -> Result<()> {
    if stat.stx_size == 0 {
        return Ok(());
    }
    // Others may have put a fifo in its place since: opening that must not wait for a writer.
    let original = from.open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&original)?.st_mode);
    if kind != FileType::RegularFile {
        return Err(Errno::STALE);
    }
    copy_content(original.as_fd(), to.as_fd(), stat.stx_size)
}

/// Copies `length` bytes of content, keeping holes. A file system that can share blocks does so.
pub fn copy_content(from: BorrowedFd<'_>, to: BorrowedFd<'_>, length: u64) -> Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    rustix::fs::ftruncate(to, length)?;
    let mut position = 0;
    while position < length {
        let start = match rustix::fs::seek(from, SeekFrom::Data(position)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => position,
            Err(error) => return Err(error),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start)).unwrap_or(length).min(length);
        copy_range(from, to, start, end)?;
        position = end;
    }
    refuse_shortened(from, length)
}

/// Refuses a file that has become shorter: the missing part would be zeros in its copy.
fn refuse_shortened(from: BorrowedFd<'_>, length: u64) -> Result<()> {
    let size = u64::try_from(rustix::fs::fstat(from)?.st_size).unwrap_or(0);
    if size < length { Err(Errno::STALE) } else { Ok(()) }
}

/// Copies a range of bytes of a file to the same offset of another file.
pub fn copy_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>, start: u64, end: u64) -> Result<()> {
    let (mut read, mut write) = (start, start);
    while read < end {
        let wanted = usize::try_from(end - read).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut write), wanted) {
            Ok(0) => return Ok(()), // shortened behind our back
            Ok(_) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return copy_by_hand(from, to, read, end);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn copy_by_hand(from: BorrowedFd<'_>, to: BorrowedFd<'_>, start: u64, end: u64) -> Result<()> {
    const BUFFER_BYTES: usize = 1 << 20;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut position = start;
    while position < end {
        let wanted =
            usize::try_from(end - position).map_or(BUFFER_BYTES, |left| left.min(BUFFER_BYTES));
        let read = rustix::io::pread(from, &mut buffer[..wanted], position)?;
        if read == 0 {
            return Ok(());
        }
        let mut written = 0;
        while written < read {
            written += rustix::io::pwrite(to, &buffer[written..read], position + written as u64)?;
        }
        position += read as u64;
    }
    Ok(())
}
