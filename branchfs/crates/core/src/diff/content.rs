//! Reading what a walk found, and nothing else.
//!
//! Between the walk and the reading a branch may be committed (its files are exchanged with those of the base), written
//! to, or dropped. So every object that is opened must be the inode that was walked over.
//!
//! A reader works with directory descriptors of its own: those of the layers were opened with the daemon's rights, and
//! a reader may have fewer ([`crate::credentials`]).

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, SeekFrom};
use rustix::io::Errno;

use super::Side;
use crate::error::{Context, Error};
use crate::ids::LayerId;
use crate::lazy_copy_up::PartialCopy;
use crate::overlay::user_xattrs;
use crate::rooted_dir::RootedDir;
use crate::vfs::Attributes;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 128 * 1024;

/// A regular file that is read from its beginning.
pub struct OpenedFile {
    file: File,
    partial: Option<Arc<PartialCopy>>,
    /// The offset up to which it was read.
    offset: u64,
}

impl OpenedFile {
    pub(crate) fn size(&self) -> std::io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// The ranges that hold data, according to the file system; the rest is holes.
    pub(crate) fn data(&self) -> std::io::Result<Vec<Range<u64>>> {
        let size = self.size()?;
        let (mut found, mut at) = (Vec::new(), 0);
        while at < size {
            let start = match &self.partial {
                Some(partial) => partial.seek_data(at),
                None => rustix::fs::seek(&self.file, SeekFrom::Data(at)),
            };
            let start = match start {
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL) => return Ok(std::iter::once(0..size).collect()), // the file system does not support it
                other => other?,
            };
            let end = match &self.partial {
                Some(partial) => partial.seek_hole(start)?,
                None => rustix::fs::seek(&self.file, SeekFrom::Hole(start))?,
            };
            found.push(start..end.min(size));
            at = end;
        }
        Ok(found)
    }

    /// Reads at `offset`; 0 bytes only at the end of the file.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        match &self.partial {
            Some(partial) => Ok(partial.read(buffer, offset)?),
            None => self.file.read_at(buffer, offset),
        }
    }
}

impl Read for OpenedFile {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// Opens and reads objects with the rights of the current thread.
#[derive(Default)]
pub struct Reader {
    trees: HashMap<LayerId, RootedDir>,
}

impl Reader {
    fn tree(&mut self, side: &Side) -> Result<&RootedDir, Error> {
        use std::collections::hash_map::Entry;
        match self.trees.entry(side.layer.id) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(free) => {
                let root = side.layer.tree.root().and_then(rustix::io::dup).at(&side.path)?;
                Ok(free.insert(RootedDir::new(root)))
            }
        }
    }

    /// A regular file, open for reading.
    pub(crate) fn open(&mut self, side: &Side) -> Result<OpenedFile, Error> {
        let side = side.data();
        let tree = self.tree(side)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK; // should a fifo have taken its place
        // Looking at a branch changes no access times, where that is allowed.
        let opened = match tree.open(&side.place, flags | OFlags::NOATIME) {
            Err(Errno::PERM) => tree.open(&side.place, flags),
            other => other,
        };
        let file = File::from(opened.map_err(|error| missing(error, side))?);
        let found = rustix::fs::fstat(&file).at(&side.path)?;
        if found.st_ino == side.stat.ino
            && FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
        {
            Ok(OpenedFile { file, partial: side.partial.clone(), offset: 0 })
        } else {
            Err(changed(side))
        }
    }

    /// Runs `read` on the object's tree, and checks that the object is the one that was walked over.
    fn checked<T>(
        &mut self,
        side: &Side,
        read: impl FnOnce(&RootedDir) -> Result<T, Errno>,
    ) -> Result<T, Error> {
        let tree = self.tree(side)?;
        let value = read(tree).map_err(|error| missing(error, side))?;
        let found =
            Attributes::from(&tree.stat(&side.place).map_err(|error| missing(error, side))?);
        if (found.ino, found.mode & libc::S_IFMT) == (side.stat.ino, side.stat.mode & libc::S_IFMT)
        {
            Ok(value)
        } else {
            Err(changed(side))
        }
    }

    /// Reads the target of a symbolic link. Fails if the link was replaced since the walk found it.
    pub(crate) fn link_target(&mut self, side: &Side) -> Result<Vec<u8>, Error> {
        self.checked(side, |tree| tree.read_link(&side.place))
    }

    /// Extended attributes, without those of the overlay format.
    pub(crate) fn xattrs(&mut self, side: &Side) -> Result<BTreeMap<OsString, Vec<u8>>, Error> {
        self.checked(side, |tree| {
            let mut found = BTreeMap::new();
            for name in user_xattrs(tree, &side.place)? {
                match tree.get_xattr(&side.place, &name) {
                    Ok(value) => {
                        found.insert(name, value);
                    }
                    Err(Errno::NODATA) => {} // removed just now
                    Err(error) => return Err(error),
                }
            }
            Ok(found)
        })
    }

    /// Whether two regular files have the same content.
    pub(crate) fn is_same_content(&mut self, one: &Side, other: &Side) -> Result<bool, Error> {
        let (mut first, mut second) = (self.open(one)?, self.open(other)?);
        let (mut left, mut right) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
        loop {
            let length = read_full(&mut first, &mut left).at(&one.path)?;
            if read_full(&mut second, &mut right).at(&other.path)? != length
                || left[..length] != right[..length]
            {
                return Ok(false);
            }
            if length == 0 {
                return Ok(true);
            }
        }
    }

    /// Passes a regular file's content to `take`, piece by piece.
    pub(crate) fn stream(
        &mut self,
        side: &Side,
        mut take: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut file = self.open(side)?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match read_full(&mut file, &mut buffer).at(&side.path)? {
                0 => return Ok(()),
                length => take(&buffer[..length])?,
            }
        }
    }
}

/// Fills the buffer, except at the end of the file.
fn read_full(file: &mut OpenedFile, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The error for an object that is not the one that was walked over.
pub(crate) fn changed(side: &Side) -> Error {
    Error::Changed(side.path.clone())
}

fn missing(error: Errno, side: &Side) -> Error {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE | Errno::INVAL => changed(side),
        error => Error::Io { path: side.path.clone(), source: error.into() },
    }
}
