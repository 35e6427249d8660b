//! The first request (INIT): which protocol kernel and daemon speak, and what of it.

use std::io;

use super::{TRANSFER_BYTES_MAX, TRANSFER_PAGES_MAX, Worker, header};
use crate::kernel::handler::Capabilities;
use crate::kernel::wire::{Input, opcode};

/// Oldest protocol that has all we ask for (7.31: Linux 5.4).
const MINOR_MIN: u32 = 31;

/// Newest protocol we know.
const MINOR_MAX: u32 = 45;

/// First protocol with `FUSE_NOTIFY_INC_EPOCH` (Linux 6.16).
const MINOR_EPOCH: u32 = 44;

/// Set among the high flags of INIT: files may have backing files.
const PASSTHROUGH: u64 = 1 << 37;

impl Worker {
    /// The first request: which protocol, and what of it.
    pub(super) fn initialise(&mut self, stacking: Option<u32>) -> io::Result<()> {
        let Some(length) = self.read()? else {
            return Err(io::Error::other("the mount went away at once"));
        };
        let request = self.request[..length].to_vec();
        let mut input = Input::new(&request);
        let header = header(&mut input)?;
        if header.opcode != opcode::INIT {
            return Err(io::Error::other("the kernel did not begin with INIT"));
        }
        let (major, minor, readahead) = (input.u32()?, input.u32()?, input.u32()?);
        if major != 7 || minor < MINOR_MIN {
            return Err(io::Error::other(format!(
                "the kernel speaks FUSE {major}.{minor}; 7.{MINOR_MIN} is needed (Linux 5.4)"
            )));
        }
        let offered = u64::from(input.u32()?) | u64::from(input.u32().unwrap_or(0)) << 32;
        let wanted = wanted_flags() | if stacking.is_some() { PASSTHROUGH } else { 0 };
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
        output.u32(stacking.filter(|_| flags & PASSTHROUGH != 0).unwrap_or(0)); // max_stack_depth
        output.bytes(&[0; 24]);
        rustix::io::write(&*self.device, output.finish(header.unique, None))?;
        // After the answer: only now the kernel takes backing files, which the handler tries out.
        self.handler.init(&Capabilities {
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

/// What we ask of the kernel where it offers it. Not asked: WRITEBACK_CACHE (a write must have reached the layer when it
/// returns, so that a commit misses nothing), POSIX and FLOCK locks (the kernel's own are right on one machine).
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
