//! Receives the descriptors that clients send with their requests (`SCM_RIGHTS`), and sends one.
//!
//! A client opens the file that receives a patch or an archive, or that contains one, and sends its descriptor. So no
//! content passes through the socket, and the client's own rights decide which files can be opened.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Result};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// How many descriptors are kept until a request takes them. Further ones are closed.
const DESCRIPTORS_MAX: usize = 4;

/// A stream and the descriptors that were received on it.
#[derive(Debug)]
pub(super) struct Socket<'s> {
    stream: &'s UnixStream,
    descriptors: VecDeque<OwnedFd>,
}

impl<'s> Socket<'s> {
    pub(super) fn new(stream: &'s UnixStream) -> Self {
        Self { stream, descriptors: VecDeque::new() }
    }

    /// Closes the descriptors that no request has taken.
    pub(super) fn discard_descriptors(&mut self) {
        self.descriptors.clear();
    }

    /// Takes the descriptor that was received first.
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

/// Sends a descriptor with one byte to a Unix socket. Does not wait for room in it.
pub(super) fn send(stream: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(stream, &[IoSlice::new(b"x")], &mut ancillary, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

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
        // End of file: all copies are closed.
        assert_eq!((&witness).read(&mut [0]).unwrap(), 0);
    }
}
