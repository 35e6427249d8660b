//! A file mapped into memory, whose descriptor is closed. It is read and written so that a page that cannot be had is an
//! error, not the death of the test.

#![allow(unsafe_code, reason = "a mapping is raw memory")]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;

/// A page: what a mapping is made of.
pub const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Pages of the file itself; not to be written.
    ReadOnly,
    /// Pages of the file itself: what is written is written to the file.
    Writable,
    /// The first page is written, and so is a copy of the file's.
    Private,
}

/// The beginning of a file; it ends with this.
pub struct Mapping {
    start: *mut libc::c_void,
    length: usize,
}

impl Mapping {
    /// Maps the first `length` bytes of a file, which must be open in a mode that allows for it. The file can be closed.
    pub fn new(file: &File, length: usize, sharing: Sharing) -> Self {
        let (protection, flags) = match sharing {
            Sharing::ReadOnly => (libc::PROT_READ, libc::MAP_SHARED),
            Sharing::Writable => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED),
            Sharing::Private => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE),
        };
        // SAFETY: the kernel chooses a place that is free.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { start, length }
    }

    /// Whether the file that was mapped has no name any more.
    pub fn is_deleted(&self) -> bool {
        let start = format!("{:x}-", self.start.addr());
        let maps = fs::read("/proc/self/maps").unwrap();
        let mut lines = maps.split(|byte| *byte == b'\n');
        lines.any(|line| line.starts_with(start.as_bytes()) && line.ends_with(b" (deleted)"))
    }

    /// The pages that can be read, up to the first that cannot.
    pub fn read(&self) -> Vec<u8> {
        let mut found = vec![0; self.length];
        let mut done = 0;
        while done < self.length {
            let count = PAGE_BYTES.min(self.length - done);
            if self.copy(done, &mut found[done..done + count], Direction::Read).is_err() {
                break;
            }
            done += count;
        }
        found.truncate(done);
        found
    }

    /// # Errors
    /// EFAULT where there is no such page.
    pub fn byte(&self, at: usize) -> io::Result<u8> {
        let mut found = [0];
        self.copy(at, &mut found, Direction::Read)?;
        Ok(found[0])
    }

    /// # Errors
    /// EFAULT where there is no such page.
    pub fn write(&self, at: usize, data: &[u8]) -> io::Result<()> {
        self.copy(at, &mut data.to_vec(), Direction::Write)
    }

    /// Lets the kernel copy, which reports a page that cannot be had.
    fn copy(&self, at: usize, buffer: &mut [u8], direction: Direction) -> io::Result<()> {
        assert!(at + buffer.len() <= self.length);
        let (pid, length) = (rustix::process::getpid().as_raw_nonzero().get(), buffer.len());
        let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: length };
        let there = self.start.wrapping_byte_add(at);
        let remote = libc::iovec { iov_base: there, iov_len: length };
        // SAFETY: `buffer` is of this length, and so is what is mapped from there on.
        let done = unsafe {
            match direction {
                Direction::Read => libc::process_vm_readv(pid, &local, 1, &remote, 1, 0),
                Direction::Write => libc::process_vm_writev(pid, &local, 1, &remote, 1, 0),
            }
        };
        match usize::try_from(done) {
            Ok(done) if done == length => Ok(()),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nobody else has the address.
        let done = unsafe { libc::munmap(self.start, self.length) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}
