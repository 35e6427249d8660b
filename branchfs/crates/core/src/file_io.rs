//! The content of an open file: a file of a layer, or one that was copied up in part.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::lazy_copy_up::PartialCopy;
use crate::rooted_dir::Result;

/// Most that is copied at once between files of which one was copied up in part.
const PIECE_BYTES: u64 = 1 << 20;

/// The content of an open file, for reading and writing.
#[derive(Debug)]
pub struct FileIo {
    /// The file. For a partial copy, the sparse file.
    pub file: Arc<OwnedFd>,
    /// Set if the file was copied up in part.
    pub partial: Option<Arc<PartialCopy>>,
}

impl FileIo {
    /// Reads into `buffer` from `offset`; returns fewer bytes only at the end of the file.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        if let Some(partial) = &self.partial {
            return partial.read(buffer, offset);
        }
        let mut filled = 0;
        while filled < buffer.len() {
            match rustix::io::pread(&*self.file, &mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    /// Writes at `offset`; returns the number of bytes written.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<usize> {
        match &self.partial {
            Some(partial) => partial.write(data, offset),
            None => rustix::io::retry_on_intr(|| rustix::io::pwrite(&*self.file, data, offset)),
        }
    }

    /// As `fsync(2)` or `fdatasync(2)`.
    pub fn sync(&self, data_only: bool) -> Result<()> {
        match &self.partial {
            Some(partial) => partial.sync(data_only),
            None if data_only => rustix::fs::fdatasync(&*self.file),
            None => rustix::fs::fsync(&*self.file),
        }
    }

    /// Copies from another file, or within this one; returns the number of bytes copied.
    pub fn copy_from(&self, source: &Self, from: u64, to: u64, length: u64) -> Result<usize> {
        if self.partial.is_none() && source.partial.is_none() {
            let (mut read, mut write) = (from, to);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (read, write) = (Some(&mut read), Some(&mut write));
            return rustix::fs::copy_file_range(&*source.file, read, &*self.file, write, length);
        }
        let mut piece = vec![0; usize::try_from(length.min(PIECE_BYTES)).unwrap_or(0)];
        let read = source.read(from, &mut piece)?;
        self.write(to, &piece[..read])
    }
}
