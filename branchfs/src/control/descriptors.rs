//! A socket whose reader keeps the descriptors that come with the bytes.
//!
//! A request that hands over content (a patch, an archive) brings the file to write to or read from as a descriptor
//! (`SCM_RIGHTS`), so that no content passes the socket and the client's own rights decide what may be opened.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Read, Result};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// Descriptors that may wait for their request; what comes beyond that is closed.
const DESCRIPTORS_MAX: usize = 4;

/// A stream, and the descriptors that came through it.
#[derive(Debug)]
pub(super) struct Socket<'s> {
    stream: &'s UnixStream,
    descriptors: VecDeque<OwnedFd>,
}

impl<'s> Socket<'s> {
    pub(super) fn new(stream: &'s UnixStream) -> Self {
        Self { stream, descriptors: VecDeque::new() }
    }

    /// The descriptor that came first.
    pub(super) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }
}

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(buffer)];
        let received = rustix::net::recvmsg(self.stream, &mut parts, &mut ancillary, flags)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        self.descriptors.truncate(DESCRIPTORS_MAX);
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::io::IoSlice;
    use std::os::fd::{AsFd, BorrowedFd};

    fn send(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        let line = [IoSlice::new(b"x")];
        rustix::net::sendmsg(stream, &line, &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn descriptors_come_in_order_and_too_many_are_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (alive, witness) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(&ours);
        for _ in 0..8 {
            send(&theirs, &[alive.as_fd()]);
            assert_eq!(socket.read(&mut [0]).unwrap(), 1);
        }
        drop(alive);
        for _ in 0..DESCRIPTORS_MAX {
            drop(socket.descriptor().unwrap());
        }
        assert!(socket.descriptor().is_none());
        // All copies are closed: nobody can write there any more.
        assert_eq!((&witness).read(&mut [0]).unwrap(), 0);
    }
}
