//! A network of one's own, with nothing in it but the loopback interface, up.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::failure::{Context, Failure, Result};
use crate::sys;

/// Moves this process into a new network namespace.
///
/// Where its capabilities do not reach into it (a container's root lacks `NET_ADMIN`) a helper makes it inside a user
/// namespace, whose owner has them all, and this process enters it from outside.
pub(crate) fn enter() -> Result<()> {
    sys::unshare(libc::CLONE_NEWNET).calling("unshare")?;
    match sys::raise_loopback() {
        Err(Errno::PERM | Errno::ACCESS) => {}
        raised => return raised.map_err(Failure::from),
    }
    let (own, helpers) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let helper = sys::clone(0).calling("clone")?;
    if helper == 0 {
        if let Err(errno) = make(&helpers) {
            let _ = send(&helpers, &errno.raw_os_error().to_ne_bytes(), SendFlags::NOSIGNAL);
        }
        sys::exit(0);
    }
    drop(helpers);
    let space = received(&own);
    let _ = waitpid(Pid::from_raw(helper), WaitOptions::empty());
    move_into_link_name_space(space?.as_fd(), Some(LinkNameSpaceType::Network)).calling("setns")
}

fn make(answer: &OwnedFd) -> std::result::Result<(), Errno> {
    sys::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET)?;
    sys::raise_loopback()?;
    // An open descriptor keeps the namespace alive when its maker has ended.
    let space = File::open("/proc/self/ns/net")
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let files = [space.as_fd()];
    let mut buffer = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut buffer);
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(answer, &[IoSlice::new(b"up")], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
}

fn received(stream: &OwnedFd) -> Result<OwnedFd> {
    let mut answer = [0; 4];
    let mut buffer = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut buffer);
    let mut slices = [IoSliceMut::new(&mut answer)];
    recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = message {
            if let Some(file) = files.next() {
                return Ok(file);
            }
        }
    }
    match i32::from_ne_bytes(answer) {
        0 => Err(Errno::PERM.into()), // it died
        number => Err(Errno::from_raw_os_error(number).into()),
    }
}
