//! Random work on a tree: operations that are drawn from a seed, and what a program sees of them.

use std::ffi::OsStr;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, XattrFlags};

/// A small generator (xorshift64): the seed is all there is to repeat a run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

/// A few names, so that operations meet: plain, with a newline, outside UTF-8.
pub fn name(random: &mut Random) -> &'static OsStr {
    const NAMES: [&[u8]; 6] = [b"a", b"b", b"c d", b"new\nline", b"\xff\xfe", b"e"];
    OsStr::from_bytes(NAMES[random.below(NAMES.len())])
}

pub fn path(random: &mut Random) -> PathBuf {
    (0..=random.below(3)).map(|_| name(random)).collect()
}

/// One operation on a tree; the outcome is what a program sees.
#[derive(Debug)]
pub enum Operation {
    Write(PathBuf, Vec<u8>),
    Patch(PathBuf, u64, u8),
    Truncate(PathBuf, u64),
    MakeDirectory(PathBuf),
    Symlink(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Remove(PathBuf),
    RemoveDirectory(PathBuf),
    RemoveTree(PathBuf),
    Rename(PathBuf, PathBuf),
    Exchange(PathBuf, PathBuf),
    Mode(PathBuf, u32),
    Owner(PathBuf, u32),
    Attribute(PathBuf, u8),
    Fifo(PathBuf),
}

pub fn operation(random: &mut Random) -> Operation {
    let target = path(random);
    match random.below(20) {
        0..=3 => {
            let length = random.below(3) * 5000;
            let byte = u8::try_from(random.below(256)).unwrap();
            Operation::Write(target, vec![byte; length])
        }
        4 => Operation::Patch(target, random.below(9000) as u64, 7),
        5 => Operation::Truncate(target, random.below(9000) as u64),
        6..=8 => Operation::MakeDirectory(target),
        9 => Operation::Symlink(path(random), target),
        10 => Operation::Link(path(random), target),
        11 => Operation::Remove(target),
        12 => Operation::RemoveDirectory(target),
        13 => Operation::RemoveTree(target),
        14 | 15 => Operation::Rename(path(random), target),
        16 => Operation::Exchange(path(random), target),
        17 => Operation::Mode(target, [0o600, 0o755, 0o4755, 0o1777][random.below(4)]),
        18 => Operation::Owner(target, u32::try_from(random.below(3)).unwrap() * 1000),
        _ => match random.below(2) {
            0 => Operation::Attribute(target, 9),
            _ => Operation::Fifo(target),
        },
    }
}

/// What happened: nothing or an errno.
pub fn apply(root: &Path, operation: &Operation) -> Result<(), i32> {
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(-1);
    let at = |path: &PathBuf| root.join(path);
    match operation {
        Operation::Write(path, content) => {
            if at(path).is_symlink() {
                return Ok(()); // links may lead out of the two roots to different places
            }
            if fs::symlink_metadata(at(path)).is_ok_and(|found| !found.is_file() && !found.is_dir())
            {
                return Ok(()); // opening a fifo would wait
            }
            fs::write(at(path), content).map_err(errno)
        }
        Operation::Patch(path, offset, byte) => {
            if !fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_file()) {
                return Ok(());
            }
            let mut file = fs::OpenOptions::new().write(true).open(at(path)).map_err(errno)?;
            file.seek(SeekFrom::Start(*offset)).map_err(errno)?;
            file.write_all(&[*byte]).map_err(errno)
        }
        Operation::Truncate(path, length) => {
            if !fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_file()) {
                return Ok(());
            }
            fs::OpenOptions::new()
                .write(true)
                .open(at(path))
                .and_then(|file| file.set_len(*length))
                .map_err(errno)
        }
        Operation::MakeDirectory(path) => fs::create_dir(at(path)).map_err(errno),
        Operation::Symlink(to, path) => symlink(to, at(path)).map_err(errno),
        Operation::Link(from, path) => {
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::linkat(CWD, at(from), CWD, at(path), flags)
                .map_err(rustix::io::Errno::raw_os_error)
        }
        Operation::Remove(path) => fs::remove_file(at(path)).map_err(errno),
        Operation::RemoveDirectory(path) => fs::remove_dir(at(path)).map_err(errno),
        Operation::RemoveTree(path) => {
            if !fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_dir()) {
                return Ok(());
            }
            fs::remove_dir_all(at(path)).map_err(errno)
        }
        Operation::Rename(from, to) => fs::rename(at(from), at(to)).map_err(errno),
        Operation::Exchange(from, to) => {
            let flags = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags)
                .map_err(rustix::io::Errno::raw_os_error)
        }
        Operation::Mode(path, mode) => {
            if at(path).is_symlink() {
                return Ok(());
            }
            fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)).map_err(errno)
        }
        Operation::Owner(path, id) => {
            std::os::unix::fs::lchown(at(path), Some(*id), Some(*id)).map_err(errno)
        }
        Operation::Attribute(path, byte) => {
            if !fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_file() || found.is_dir())
            {
                return Ok(());
            }
            rustix::fs::lsetxattr(at(path), "user.mark", &[*byte], XattrFlags::empty())
                .map_err(rustix::io::Errno::raw_os_error)
        }
        Operation::Fifo(path) => {
            let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
            rustix::fs::mknodat(CWD, at(path), kind, mode, 0)
                .map_err(rustix::io::Errno::raw_os_error)
        }
    }
}
