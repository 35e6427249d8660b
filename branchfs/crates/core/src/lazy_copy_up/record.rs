//! The extended attribute that makes a file a partial copy.
//!
//! Numbers are little-endian: version (1 byte; 2 where the copy has a map), limit, layer of the original, its inode number, size and modification
//! time in nanoseconds (8 bytes each), then its path in that layer. Short, so that ext4 keeps it inside the inode.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::ids::LayerId;
use crate::overlay::Namespace;
use crate::rooted_dir::{Result, read_growing};

/// The copy's extents are its map, as in earlier versions of the program.
const WITHOUT_MAP: u8 = 1;

/// The copy has a map ([`super::blocks`]).
const WITH_MAP: u8 = 2;

/// Everything before the path.
const HEAD_BYTES: usize = 1 + 5 * 8;

/// Identifies one state of a lower file's content. Without the ctime: a rename or a change of mode does not change the
/// content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LowerFingerprint {
    pub(crate) ino: u64,
    pub(crate) size: u64,
    /// Nanoseconds since 1970.
    pub(crate) mtime: i64,
}

impl LowerFingerprint {
    pub(crate) fn of(file: BorrowedFd<'_>) -> Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        let nanoseconds = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
        Ok(Self {
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(nanoseconds),
        })
    }
}

/// The lower file of a partial copy, and the limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) has_map: bool,
    /// Below this offset, blocks that are not the copy's own read from the original.
    pub(crate) limit: u64,
    /// The layer of the original at the time of the copy.
    pub(crate) layer: LayerId,
    pub(crate) path: PathBuf,
    pub(crate) fingerprint: LowerFingerprint,
}

impl Record {
    /// The record of `file`, if it is a partial copy.
    pub(crate) fn read(file: BorrowedFd<'_>, namespace: Namespace) -> Result<Option<Self>> {
        match read_growing(|buffer| rustix::fs::fgetxattr(file, namespace.partial(), buffer)) {
            Ok(value) => Self::parse(&value).map(Some).ok_or(Errno::IO),
            Err(Errno::NODATA) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn write(&self, file: BorrowedFd<'_>, namespace: Namespace) -> Result<()> {
        rustix::fs::fsetxattr(file, namespace.partial(), &self.bytes(), XattrFlags::empty())
    }

    pub(super) fn remove(file: BorrowedFd<'_>, namespace: Namespace) -> Result<()> {
        match rustix::fs::fremovexattr(file, namespace.partial()) {
            Ok(()) | Err(Errno::NODATA) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![if self.has_map { WITH_MAP } else { WITHOUT_MAP }];
        for number in [self.limit, self.layer.0, self.fingerprint.ino, self.fingerprint.size] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&self.fingerprint.mtime.to_le_bytes());
        bytes.extend_from_slice(self.path.as_os_str().as_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, path) = bytes.split_at_checked(HEAD_BYTES)?;
        let (version, numbers) = head.split_first()?;
        let mut numbers = numbers.chunks_exact(8).map(|bytes| bytes.try_into().ok());
        let mut next = || numbers.next().flatten();
        let record = Self {
            has_map: *version == WITH_MAP,
            limit: u64::from_le_bytes(next()?),
            layer: LayerId(u64::from_le_bytes(next()?)),
            fingerprint: LowerFingerprint {
                ino: u64::from_le_bytes(next()?),
                size: u64::from_le_bytes(next()?),
                mtime: i64::from_le_bytes(next()?),
            },
            path: Path::new(OsStr::from_bytes(path)).to_path_buf(),
        };
        [WITHOUT_MAP, WITH_MAP].contains(version).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::sections;

    #[test]
    fn the_document_of_the_format_has_the_fields_of_a_record() {
        let rows = &sections("format.md")["Partial copies"].tables["bytes"];
        let names: Vec<&str> = rows.iter().map(|row| row[1].as_str()).collect();
        assert_eq!(names, ["version", "limit", "layer", "ino", "size", "mtime", "path"]);
        let bytes = rows.iter().filter_map(|row| row[0].parse::<usize>().ok());
        assert_eq!(bytes.sum::<usize>(), HEAD_BYTES);
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_torn_one_is_none() {
        let record = Record {
            has_map: true,
            limit: 5,
            layer: LayerId(7),
            path: PathBuf::from(OsStr::from_bytes(b"a/\xff\nb")),
            fingerprint: LowerFingerprint { ino: 9, size: 11, mtime: -13 },
        };
        let bytes = record.bytes();
        assert_eq!(Record::parse(&bytes), Some(record));
        assert_eq!(Record::parse(&bytes[..HEAD_BYTES - 1]), None);
        assert_eq!(Record::parse(&[&[3], &bytes[1..]].concat()), None, "another version");
        let old = Record::parse(&[&[1], &bytes[1..]].concat()).unwrap();
        assert!(!old.has_map && old.limit == 5, "an earlier version");
    }
}
