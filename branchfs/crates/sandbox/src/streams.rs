//! The descriptors that init inherits from the caller.

use std::os::fd::{OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::request::Request;
use crate::sys;

/// The descriptors that init inherits from the caller.
pub(crate) struct Streams {
    pub(crate) line: OwnedFd,
    /// `None` once the command has it.
    pub(crate) gate: Option<OwnedFd>,
    /// The descriptors that the command gets, with their numbers there.
    pub(crate) descriptors: Vec<(RawFd, OwnedFd)>,
}

impl Streams {
    pub(crate) fn of(request: &Request) -> std::result::Result<Self, Errno> {
        let mut placed: Vec<(RawFd, RawFd, OwnedFd)> = Vec::new();
        for &(number, here) in &request.descriptors {
            let known = placed.iter().find(|(_, other, _)| *other == here);
            let file = match known {
                Some((_, _, file)) => rustix::io::fcntl_dupfd_cloexec(file, 3)?,
                None => sys::inherited(here)?,
            };
            placed.push((number, here, file));
        }
        Ok(Self {
            line: sys::inherited(request.line)?,
            gate: Some(sys::inherited(request.gate)?),
            descriptors: placed.into_iter().map(|(number, _, file)| (number, file)).collect(),
        })
    }

    /// Says something to the caller. False if it is gone.
    pub(crate) fn say(&self, message: &[u8]) -> bool {
        send(&self.line, message, SendFlags::NOSIGNAL).is_ok()
    }
}
