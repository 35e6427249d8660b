//! What a partial copy was copied from: a whole file, or a partial copy of a layer further down.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::record::Seen;
use super::{data_at, hole_at, read_merged, size_of, write_all};
use crate::layer::copy_range;
use crate::tree::Result;

/// A lower file that is read from.
#[derive(Debug)]
pub(crate) struct Original {
    file: OwnedFd,
    /// What it must still be.
    seen: Seen,
    /// Where it is a partial copy itself: its limit, and what it was copied from.
    below: Option<(u64, Box<Original>)>,
}

impl Original {
    /// The file `file`; `None` where it is not what was `seen`.
    pub(crate) fn new(
        file: OwnedFd,
        seen: Seen,
        below: Option<(u64, Self)>,
    ) -> Result<Option<Self>> {
        let below = below.map(|(limit, original)| (limit, Box::new(original)));
        let original = Self { file, seen, below };
        Ok(original.is_unchanged()?.then_some(original))
    }

    fn is_unchanged(&self) -> Result<bool> {
        Ok(Seen::of(self.file.as_fd())? == self.seen)
    }

    /// Fills `buffer` from `offset`; all of it is inside the file.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let (rest, at) = (&mut buffer[done..], offset + done as u64);
            let read = match &self.below {
                None => {
                    rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *rest, at))?
                }
                Some((limit, below)) => read_merged(&self.file, *limit, || Ok(&**below), rest, at)?,
            };
            if read == 0 {
                return Err(Errno::IO); // it is shorter than it was
            }
            done += read;
        }
        // Afterwards: what was changed before or during the read must not be mixed in.
        if self.is_unchanged()? { Ok(()) } else { Err(Errno::IO) }
    }

    pub(super) fn data_at(&self, offset: u64) -> Result<Option<u64>> {
        let own = data_at(&self.file, offset)?;
        let belows = match &self.below {
            Some((limit, below)) if offset < *limit => {
                below.data_at(offset)?.filter(|data| data < limit)
            }
            _ => None,
        };
        Ok(own.into_iter().chain(belows).min())
    }

    /// Where what is data at `offset` may end: all of it up to there is data.
    pub(super) fn hole_at(&self, offset: u64) -> Result<u64> {
        if data_at(&self.file, offset)? == Some(offset) {
            return hole_at(&self.file, offset);
        }
        match &self.below {
            Some((limit, below)) => {
                let end = below.hole_at(offset)?.min(*limit);
                Ok(data_at(&self.file, offset)?.map_or(end, |data| data.min(end)))
            }
            None => hole_at(&self.file, offset),
        }
    }

    /// Copies the data in `start..end` to the same place of `to`; holes stay holes.
    pub(super) fn copy_data(&self, to: &OwnedFd, start: u64, end: u64) -> Result<()> {
        let end = end.min(size_of(&self.file)?);
        let mut at = start;
        while at < end {
            let Some(data) = self.data_at(at)?.filter(|data| *data < end) else {
                break;
            };
            let stop = self.hole_at(data)?.min(end);
            if self.below.is_none() {
                copy_range(self.file.as_fd(), to.as_fd(), data, stop)?;
            } else {
                self.copy_by_hand(to, data, stop)?;
            }
            at = stop;
        }
        if self.is_unchanged()? { Ok(()) } else { Err(Errno::IO) }
    }

    fn copy_by_hand(&self, to: &OwnedFd, start: u64, end: u64) -> Result<()> {
        let mut buffer = vec![0; super::BUFFER_BYTES];
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            self.read(&mut buffer[..length], at)?;
            write_all(to, &buffer[..length], at)?;
            at += length as u64;
        }
        Ok(())
    }
}
