//! INIT, the first request: negotiates the protocol version and its optional features.

use std::io;

use super::{TRANSFER_BYTES_MAX, TRANSFER_PAGES_MAX, Worker, header};
use crate::abi::{Input, opcode};
use crate::filesystem::Capabilities;

/// Oldest supported protocol (7.31: Linux 5.4).
const MINOR_MIN: u32 = 31;

/// Newest supported protocol.
const MINOR_MAX: u32 = 45;

/// First protocol with `FUSE_NOTIFY_INC_EPOCH` (Linux 6.16).
const MINOR_EPOCH: u32 = 44;

/// `FUSE_PASSTHROUGH`, one of the high flags of INIT.
const PASSTHROUGH: u64 = 1 << 37;

impl Worker {
    /// Reads INIT, replies to it, and calls [`Filesystem::init`](crate::Filesystem::init).
    pub(super) fn initialise(&mut self, passthrough_depth: Option<u32>) -> io::Result<()> {
        let Some(length) = self.read()? else {
            return Err(io::Error::other("the filesystem was unmounted before INIT"));
        };
        let request = self.request[..length].to_vec();
        let mut input = Input::new(&request);
        let header = header(&mut input)?;
        if header.opcode != opcode::INIT {
            return Err(io::Error::other("the first request of the kernel is not INIT"));
        }
        let (major, minor, readahead) = (input.u32()?, input.u32()?, input.u32()?);
        if major != 7 || minor < MINOR_MIN {
            return Err(io::Error::other(format!(
                "the kernel speaks FUSE {major}.{minor}; 7.{MINOR_MIN} is needed (Linux 5.4)"
            )));
        }
        let offered = u64::from(input.u32()?) | u64::from(input.u32().unwrap_or(0)) << 32;
        let wanted = wanted_flags() | if passthrough_depth.is_some() { PASSTHROUGH } else { 0 };
        let flags = offered & wanted;
        let minor = minor.min(MINOR_MAX);
        let output = &mut self.output;
        output.clear();
        output.u32(7);
        output.u32(minor);
        output.u32(readahead);
        let (low, high) = halves(flags);
        output.u32(low);
        output.u16(64); // max_background: asynchronous requests in flight
        output.u16(48); // congestion_threshold
        output.u32(TRANSFER_BYTES_MAX);
        output.u32(1); // time granularity, ns
        output.u16(TRANSFER_PAGES_MAX);
        output.u16(0);
        output.u32(high);
        output.u32(passthrough_depth.filter(|_| flags & PASSTHROUGH != 0).unwrap_or(0)); // max_stack_depth
        output.bytes(&[0; 24]);
        rustix::io::write(&*self.device, output.finish(header.unique, None))?;
        // After the reply: the kernel accepts backing files from now on, and `init` may try one.
        self.filesystem.init(&Capabilities {
            epoch: minor >= MINOR_EPOCH,
            passthrough: flags & PASSTHROUGH != 0,
        });
        Ok(())
    }
}

/// Low and high 32 bits.
fn halves(flags: u64) -> (u32, u32) {
    let bytes = flags.to_le_bytes();
    let half =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}

/// The features to enable if the kernel offers them. Not among them: WRITEBACK_CACHE (a write reaches the filesystem before
/// it returns), POSIX and FLOCK locks (the locks of the kernel are right on one machine).
fn wanted_flags() -> u64 {
    const ASYNC_READ: u64 = 1 << 0;
    const ATOMIC_O_TRUNC: u64 = 1 << 3;
    const BIG_WRITES: u64 = 1 << 5;
    const DONT_MASK: u64 = 1 << 6;
    const DO_READDIRPLUS: u64 = 1 << 13;
    const READDIRPLUS_AUTO: u64 = 1 << 14;
    const PARALLEL_DIROPS: u64 = 1 << 18;
    const POSIX_ACL: u64 = 1 << 20;
    const MAX_PAGES: u64 = 1 << 22;
    const CACHE_SYMLINKS: u64 = 1 << 23;
    const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    const SETXATTR_EXT: u64 = 1 << 29;
    const INIT_EXT: u64 = 1 << 30;
    ASYNC_READ
        | ATOMIC_O_TRUNC
        | BIG_WRITES
        | DONT_MASK
        | DO_READDIRPLUS
        | READDIRPLUS_AUTO
        | PARALLEL_DIROPS
        | POSIX_ACL
        | MAX_PAGES
        | CACHE_SYMLINKS
        | EXPLICIT_INVAL_DATA
        | HANDLE_KILLPRIV_V2
        | SETXATTR_EXT
        | INIT_EXT
}
