//! Sparse files in an archive: which parts of a file hold data.
//!
//! Written is version 1.0 of GNU tar's format for PAX archives: the records `GNU.sparse.major`, `minor`, `name` and
//! `realsize`, and before the data a map in decimal lines (the number of parts, then offset and length of each), filled up
//! to a block. Read are also the versions 0.0 and 0.1, with the map in records, and GNU tar's older member type `S`, with
//! the map in the header and in blocks that follow it.

use std::io::Read;

use tar::{GnuExtSparseHeader, GnuSparseHeader, Header};

use super::BLOCK_BYTES;
use crate::error::Error;

/// The ranges of a file that hold data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Sparse {
    /// Size of the unpacked file in bytes, with its holes.
    pub(super) size: u64,
    /// Offset and length of each part, in the order of their data.
    pub(super) parts: Vec<(u64, u64)>,
}

impl Sparse {
    /// The map that version 1.0 has before the data.
    pub(super) fn to_map(&self) -> Vec<u8> {
        let mut map = format!("{}\n", self.parts.len());
        for (offset, length) in &self.parts {
            map += &format!("{offset}\n{length}\n");
        }
        let mut map = map.into_bytes();
        map.resize(map.len().next_multiple_of(BLOCK_BYTES), 0);
        map
    }

    /// Reads the map of version 1.0, and leaves `content` at the start of the data.
    pub(super) fn read_map(size: u64, content: &mut impl Read) -> Result<Self, Error> {
        let mut map = Lines { content, block: [0; BLOCK_BYTES], position: 0 };
        map.position = map.block.len();
        let count = map.number()?;
        let mut parts = Vec::new(); // `count` is not to be trusted
        for _ in 0..count {
            parts.push((map.number()?, map.number()?));
        }
        Ok(Self { size, parts })
    }

    /// Reads the map of a member of type `S`, and leaves `content` at the start of the data.
    pub(super) fn read_old(header: &Header, content: &mut impl Read) -> Result<Self, Error> {
        let header = header.as_gnu().ok_or_else(damaged)?;
        let mut sparse =
            Self { size: header.real_size().map_err(|_| damaged())?, parts: Vec::new() };
        sparse.add(&header.sparse)?;
        let mut is_extended = header.is_extended();
        while is_extended {
            let mut more = GnuExtSparseHeader::new();
            content.read_exact(more.as_mut_bytes()).map_err(|_| damaged())?;
            sparse.add(more.sparse())?;
            is_extended = more.is_extended();
        }
        Ok(sparse)
    }

    fn add(&mut self, descriptors: &[GnuSparseHeader]) -> Result<(), Error> {
        for descriptor in descriptors.iter().filter(|descriptor| !descriptor.is_empty()) {
            let number = |number: std::io::Result<u64>| number.map_err(|_| damaged());
            self.parts.push((number(descriptor.offset())?, number(descriptor.length())?));
        }
        Ok(())
    }

    /// Checks that the ranges are in order, disjoint, inside the file, and `bytes` long in total.
    pub(super) fn check(&self, bytes: u64) -> Result<(), Error> {
        let (mut end, mut total) = (0, 0_u64);
        for (offset, length) in &self.parts {
            if *offset < end {
                return Err(damaged());
            }
            end = offset.checked_add(*length).ok_or_else(damaged)?;
            total = total.checked_add(*length).ok_or_else(damaged)?;
        }
        if end <= self.size && total == bytes { Ok(()) } else { Err(damaged()) }
    }
}

/// Decimal lines in blocks.
struct Lines<'c, R> {
    content: &'c mut R,
    block: [u8; BLOCK_BYTES],
    position: usize,
}

impl<R: Read> Lines<'_, R> {
    fn number(&mut self) -> Result<u64, Error> {
        let mut number = None;
        loop {
            if self.position == self.block.len() {
                self.content.read_exact(&mut self.block).map_err(|_| damaged())?;
                self.position = 0;
            }
            let byte = self.block[self.position];
            self.position += 1;
            number = match byte {
                b'\n' => return number.ok_or_else(damaged),
                b'0'..=b'9' => {
                    let shifted = number.unwrap_or(0_u64).checked_mul(10);
                    Some(
                        shifted
                            .and_then(|n| n.checked_add((byte - b'0').into()))
                            .ok_or_else(damaged)?,
                    )
                }
                _ => return Err(damaged()),
            };
        }
    }
}

pub(super) fn damaged() -> Error {
    Error::Usage("the archive is refused: a damaged map of a sparse file".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_as_it_was_written() {
        for count in [0, 1, 40, 1000] {
            let parts: Vec<_> = (0..count).map(|n| (n << 20, 4096)).collect();
            let sparse = Sparse { size: count << 20, parts };
            let mut map = sparse.to_map();
            assert_eq!(map.len() % 512, 0);
            map.extend_from_slice(b"data");
            let mut rest = map.as_slice();
            assert_eq!(Sparse::read_map(sparse.size, &mut rest).unwrap(), sparse);
            assert_eq!(rest, b"data");
            sparse.check(count * 4096).unwrap();
        }
    }

    #[test]
    fn damaged_maps_are_refused() {
        for text in ["", "x\n", "1\n0\n", "-1\n", "\n", "99999999999999999999\n"] {
            let mut block = text.as_bytes().to_vec();
            block.resize(512, 0);
            assert!(Sparse::read_map(1, &mut block.as_slice()).is_err(), "{text:?}");
        }
        let wrong: [&[(u64, u64)]; 4] =
            [&[(0, 11)], &[(4, 4), (0, 4)], &[(0, 6), (4, 4)], &[(u64::MAX, 10)]];
        for parts in wrong {
            let sparse = Sparse { size: 10, parts: parts.to_vec() };
            let bytes = parts.iter().map(|(_, length)| length).sum();
            assert!(sparse.check(bytes).is_err(), "{parts:?}");
        }
        assert!(Sparse { size: 10, parts: vec![(0, 4)] }.check(5).is_err());
    }
}
