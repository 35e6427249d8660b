//! The byte layout of requests and replies: integers in native byte order, structures padded to eight bytes.
//!
//! [`Input`] reads a request field by field; a request that is too short is `EIO`. [`Output`] builds a reply. The order and
//! sizes of the fields are those of `linux/fuse.h`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::io::Errno;

use crate::filesystem::{Attributes, DirectorySink, Entry, OpenReply, Statfs};

/// `struct fuse_in_header`.
pub(crate) const IN_HEADER_BYTES: usize = 40;

/// `struct fuse_out_header`.
pub(crate) const OUT_HEADER_BYTES: usize = 16;

/// `struct fuse_entry_out`.
const ENTRY_BYTES: usize = 128;

/// `struct fuse_dirent` without its name.
const DIRENT_BYTES: usize = 24;

/// The kinds of requests.
pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const SYNCFS: u32 = 50;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
}

/// Reads a request's fields in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(Errno::IO)?;
        self.bytes = rest;
        Ok(taken)
    }

    /// The bytes that have not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn skip(&mut self, count: usize) -> Result<(), Errno> {
        self.take(count).map(|_| ())
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Errno> {
        Ok(u16::from_ne_bytes(self.take(2)?.try_into().map_err(|_| Errno::IO)?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Errno> {
        Ok(u32::from_ne_bytes(self.take(4)?.try_into().map_err(|_| Errno::IO)?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Errno> {
        Ok(u64::from_ne_bytes(self.take(8)?.try_into().map_err(|_| Errno::IO)?))
    }

    /// A name that ends with NUL.
    pub(crate) fn name(&mut self) -> Result<&'a OsStr, Errno> {
        let end = self.bytes.iter().position(|byte| *byte == 0).ok_or(Errno::IO)?;
        let name = self.take(end)?;
        self.skip(1)?;
        Ok(OsStr::from_bytes(name))
    }
}

/// A reply under construction; the first bytes are reserved for its header.
#[derive(Debug, Default)]
pub(crate) struct Output {
    bytes: Vec<u8>,
}

impl Output {
    /// Starts a new reply in the same buffer.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(OUT_HEADER_BYTES, 0);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
    }

    /// Returns a buffer for content that is read directly into the reply.
    pub(crate) fn space(&mut self, count: usize) -> &mut [u8] {
        self.bytes.resize(OUT_HEADER_BYTES + count, 0);
        &mut self.bytes[OUT_HEADER_BYTES..]
    }

    /// Cuts the content to `count` bytes.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.bytes.truncate(OUT_HEADER_BYTES + count);
    }

    pub(crate) fn content_bytes(&self) -> usize {
        self.bytes.len() - OUT_HEADER_BYTES
    }

    /// Returns the finished reply to request `unique`; an error has no content.
    pub(crate) fn finish(&mut self, unique: u64, error: Option<Errno>) -> &[u8] {
        if error.is_some() {
            self.bytes.truncate(OUT_HEADER_BYTES);
        }
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        let code = error.map_or(0, |errno| -errno.raw_os_error());
        self.header(length, code, unique)
    }

    /// Returns the finished notification `code`.
    pub(crate) fn finish_notification(&mut self, code: i32) -> &[u8] {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.header(length, code, 0)
    }

    fn header(&mut self, length: u32, code: i32, unique: u64) -> &[u8] {
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[4..8].copy_from_slice(&code.to_ne_bytes());
        self.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        &self.bytes
    }

    pub(crate) fn attributes(&mut self, attributes: &Attributes) {
        self.u64(attributes.ino);
        self.u64(attributes.size);
        self.u64(attributes.blocks);
        for time in [attributes.atime, attributes.mtime, attributes.ctime] {
            self.bytes(&time.seconds.to_ne_bytes());
        }
        for time in [attributes.atime, attributes.mtime, attributes.ctime] {
            self.u32(time.nanoseconds);
        }
        self.u32(attributes.mode);
        self.u32(attributes.nlink);
        self.u32(attributes.uid);
        self.u32(attributes.gid);
        self.u32(encode_device(attributes.rdev));
        self.u32(attributes.block_size);
        self.u32(0);
    }

    pub(crate) fn attributes_for(&mut self, attributes: &Attributes, ttl: Duration) {
        self.u64(ttl.as_secs());
        self.u32(ttl.subsec_nanos());
        self.u32(0);
        self.attributes(attributes);
    }

    pub(crate) fn entry(&mut self, entry: &Entry) {
        self.u64(entry.node.map_or(0, |node| node.0));
        self.u64(entry.generation);
        self.u64(entry.entry_ttl.as_secs());
        self.u64(entry.attributes_ttl.as_secs());
        self.u32(entry.entry_ttl.subsec_nanos());
        self.u32(entry.attributes_ttl.subsec_nanos());
        match &entry.attributes {
            Some(attributes) => self.attributes(attributes),
            None => self.bytes(&[0; ENTRY_BYTES - 40]),
        }
    }

    pub(crate) fn opened(&mut self, opened: &OpenReply) {
        const DIRECT_IO: u32 = 1 << 0;
        const KEEP_CACHE: u32 = 1 << 1;
        const PASSTHROUGH: u32 = 1 << 7;
        let mut flags = 0;
        for (wanted, flag) in [
            (opened.direct_io, DIRECT_IO),
            (opened.keep_cache, KEEP_CACHE),
            (opened.backing.is_some(), PASSTHROUGH),
        ] {
            if wanted {
                flags |= flag;
            }
        }
        self.u64(opened.handle.map_or(0, |handle| handle.0));
        self.u32(flags);
        self.bytes(&opened.backing.map_or(0, |backing| backing.0).to_ne_bytes());
    }

    pub(crate) fn statfs(&mut self, statfs: &Statfs) {
        for value in [
            statfs.blocks,
            statfs.blocks_free,
            statfs.blocks_available,
            statfs.files,
            statfs.files_free,
        ] {
            self.u64(value);
        }
        for value in [statfs.block_size, statfs.name_max, statfs.fragment_size, 0, 0, 0, 0, 0, 0, 0]
        {
            self.u32(value);
        }
    }

    fn dirent(&mut self, ino: u64, offset: u64, kind: u8, name: &OsStr) {
        self.u64(ino);
        self.u64(offset);
        self.u32(u32::try_from(name.len()).unwrap_or(0));
        self.u32(u32::from(kind));
        self.bytes(name.as_bytes());
        let padding = padded(name.len()) - name.len();
        self.bytes(&[0; 8][..padding]);
    }
}

fn padded(length: usize) -> usize {
    length.next_multiple_of(8)
}

/// Adds directory entries to a reply of at most `limit` bytes.
pub(crate) struct EntryBuffer<'o> {
    pub(crate) output: &'o mut Output,
    pub(crate) limit: usize,
}

impl EntryBuffer<'_> {
    fn fits(&self, bytes: usize) -> bool {
        self.output.content_bytes() + bytes <= self.limit
    }
}

impl DirectorySink for EntryBuffer<'_> {
    fn push(&mut self, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool {
        let fits = self.fits(DIRENT_BYTES + padded(name.len()));
        if fits {
            self.output.dirent(ino, offset, kind, name);
        }
        fits
    }

    fn push_plus(&mut self, entry: &Entry, ino: u64, offset: u64, kind: u8, name: &OsStr) -> bool {
        let fits = self.has_room(name);
        if fits {
            self.output.entry(entry);
            self.output.dirent(ino, offset, kind, name);
        }
        fits
    }

    fn has_room(&self, name: &OsStr) -> bool {
        self.fits(ENTRY_BYTES + DIRENT_BYTES + padded(name.len()))
    }
}

/// The kernel's 32-bit form of a device number (`new_encode_dev`).
pub(crate) fn encode_device((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The reverse of [`encode_device`].
pub(crate) fn decode_device(device: u32) -> (u32, u32) {
    ((device & 0x000f_ff00) >> 8, (device & 0xff) | ((device >> 12) & 0x000f_ff00))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filesystem::{FOREVER, NodeId};

    #[test]
    fn structures_have_the_sizes_of_the_kernel_header() {
        let mut output = Output::default();
        let attributes = Attributes { ino: 7, ..blank() };
        output.clear();
        output.attributes_for(&attributes, FOREVER);
        assert_eq!(output.content_bytes(), 104, "struct fuse_attr_out");
        output.clear();
        let entry = Entry {
            node: Some(NodeId(9)),
            generation: 0,
            entry_ttl: FOREVER,
            attributes_ttl: FOREVER,
            attributes: Some(attributes),
        };
        output.entry(&entry);
        assert_eq!(output.content_bytes(), ENTRY_BYTES, "struct fuse_entry_out");
        output.clear();
        output.entry(&Entry { node: None, attributes: None, ..entry });
        assert_eq!(output.content_bytes(), ENTRY_BYTES, "a negative entry is as long");
        output.clear();
        output.statfs(&Statfs::default());
        assert_eq!(output.content_bytes(), 80, "struct fuse_kstatfs");
        output.clear();
        output.opened(&OpenReply::default());
        assert_eq!(output.content_bytes(), 16, "struct fuse_open_out");
    }

    #[test]
    fn an_error_answer_is_its_header_alone() {
        let mut output = Output::default();
        output.clear();
        output.u64(1);
        let bytes = output.finish(3, Some(Errno::NOENT)).to_vec();
        assert_eq!(bytes.len(), OUT_HEADER_BYTES);
        assert_eq!(bytes[0..4], 16u32.to_ne_bytes());
        assert_eq!(bytes[4..8], (-2i32).to_ne_bytes());
        assert_eq!(bytes[8..16], 3u64.to_ne_bytes());
    }

    #[test]
    fn a_short_request_is_an_error_and_not_a_panic() {
        let mut input = Input::new(&[1, 2, 3]);
        assert_eq!(input.u32(), Err(Errno::IO));
        assert_eq!(Input::new(b"no end").name(), Err(Errno::IO));
    }

    #[test]
    fn device_numbers_survive_the_round_trip() {
        for device in [(0, 0), (8, 1), (259, 65_537), (4095, 1_048_575)] {
            assert_eq!(decode_device(encode_device(device)), device);
        }
    }

    #[test]
    fn an_entry_that_does_not_fit_is_not_written() {
        let mut output = Output::default();
        output.clear();
        let mut sink = EntryBuffer { output: &mut output, limit: 64 };
        assert!(sink.push(1, 1, 4, OsStr::new("name")));
        assert!(sink.push(2, 2, 4, OsStr::new("eightchr")));
        assert!(!sink.push(3, 3, 4, OsStr::new("x")));
        assert_eq!(output.content_bytes(), 64);
    }

    fn blank() -> Attributes {
        Attributes {
            ino: 0,
            size: 0,
            blocks: 0,
            atime: Default::default(),
            mtime: Default::default(),
            ctime: Default::default(),
            mode: 0,
            nlink: 0,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            block_size: 0,
        }
    }
}
