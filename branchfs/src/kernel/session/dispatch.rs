//! A request decoded, handed to the [`Handler`](crate::kernel::handler::Handler), and its answer encoded.

use rustix::io::Errno;

use super::{Header, TRANSFER_BYTES_MAX, Worker};
use crate::kernel::handler::{
    Answer, Changes, Entry, Handle, NodeId, OpenFlags, Opened, SetTime, Time,
};
use crate::kernel::wire::{EntryBuffer, Input, Output, decode_device, opcode};

/// What must be given back when an answer does not reach the kernel.
pub(super) enum Given {
    Nothing,
    Entry(Entry),
    Open(NodeId, Handle),
    EntryAndOpen(Entry, Handle),
}

impl Worker {
    pub(super) fn forget_many(&self, mut input: Input<'_>) {
        let count = input.u32().unwrap_or(0);
        let _ = input.u32();
        for _ in 0..count {
            let (Ok(node), Ok(lookups)) = (input.u64(), input.u64()) else {
                return;
            };
            self.handler.forget(NodeId(node), lookups);
        }
    }

    pub(super) fn take_back(&self, given: Given) {
        let forget = |entry: Entry| {
            if let Some(node) = entry.node {
                self.handler.forget(node, 1);
            }
        };
        match given {
            Given::Nothing => {}
            Given::Entry(entry) => forget(entry),
            Given::Open(node, handle) => self.handler.release(node, handle),
            Given::EntryAndOpen(entry, handle) => {
                if let Some(node) = entry.node {
                    self.handler.release(node, handle);
                }
                forget(entry);
            }
        }
    }

    /// Decodes one request, asks the handler and encodes what it says.
    pub(super) fn dispatch(
        &self,
        header: &Header,
        mut input: Input<'_>,
        output: &mut Output,
    ) -> Answer<Given> {
        let (handler, node, caller) = (&self.handler, header.node, &header.caller);
        match header.opcode {
            opcode::LOOKUP => give_entry(output, handler.lookup(caller, node, input.name()?)?),
            opcode::GETATTR => {
                const HAS_HANDLE: u32 = 1;
                let flags = input.u32()?;
                input.skip(4)?;
                let handle = Handle(input.u64()?);
                let (attributes, ttl) =
                    handler.getattr(node, (flags & HAS_HANDLE != 0).then_some(handle))?;
                output.attributes_for(&attributes, ttl);
                Ok(Given::Nothing)
            }
            opcode::SETATTR => {
                let (attributes, ttl) = handler.setattr(caller, node, &changes(input)?)?;
                output.attributes_for(&attributes, ttl);
                Ok(Given::Nothing)
            }
            opcode::READLINK => give_bytes(output, &handler.readlink(node)?),
            opcode::SYMLINK => {
                let (name, target) = (input.name()?, input.name()?);
                give_entry(output, handler.symlink(caller, node, name, target)?)
            }
            opcode::MKNOD => {
                let (mode, device, umask) = (input.u32()?, input.u32()?, input.u32()?);
                input.skip(4)?;
                give_entry(
                    output,
                    handler.mknod(
                        caller,
                        node,
                        input.name()?,
                        mode,
                        umask,
                        decode_device(device),
                    )?,
                )
            }
            opcode::MKDIR => {
                let (mode, umask) = (input.u32()?, input.u32()?);
                give_entry(output, handler.mkdir(caller, node, input.name()?, mode, umask)?)
            }
            opcode::UNLINK => done(handler.unlink(caller, node, input.name()?)),
            opcode::RMDIR => done(handler.rmdir(caller, node, input.name()?)),
            opcode::RENAME => {
                let new_parent = NodeId(input.u64()?);
                let (name, new_name) = (input.name()?, input.name()?);
                done(handler.rename(caller, node, name, new_parent, new_name, 0))
            }
            opcode::RENAME2 => {
                let (new_parent, flags) = (NodeId(input.u64()?), input.u32()?);
                input.skip(4)?;
                let (name, new_name) = (input.name()?, input.name()?);
                done(handler.rename(caller, node, name, new_parent, new_name, flags))
            }
            opcode::LINK => {
                let linked = NodeId(input.u64()?);
                give_entry(output, handler.link(caller, linked, node, input.name()?)?)
            }
            opcode::OPEN => {
                let flags =
                    OpenFlags { flags: input.u32()?, kill_privileges: input.u32()? & 1 != 0 };
                let opened = handler.open(caller, node, flags)?;
                output.opened(&opened);
                Ok(Given::Open(node, opened.handle.unwrap_or(Handle(0))))
            }
            opcode::CREATE | opcode::TMPFILE => self.create(header, input, output),
            opcode::READ => {
                let (handle, offset, size) = (Handle(input.u64()?), input.u64()?, input.u32()?);
                let read = handler.read(
                    node,
                    handle,
                    offset,
                    output.space(size.min(TRANSFER_BYTES_MAX) as usize),
                )?;
                output.truncate(read);
                Ok(Given::Nothing)
            }
            opcode::WRITE => {
                const KILL_PRIVILEGES: u32 = 1 << 2;
                let (handle, offset, size, flags) =
                    (Handle(input.u64()?), input.u64()?, input.u32()?, input.u32()?);
                input.skip(16)?;
                let data = input.take(size as usize)?;
                let written =
                    handler.write(node, handle, offset, data, flags & KILL_PRIVILEGES != 0)?;
                output.u32(u32::try_from(written).unwrap_or(u32::MAX));
                output.u32(0);
                Ok(Given::Nothing)
            }
            opcode::STATFS => {
                output.statfs(&handler.statfs(node)?);
                Ok(Given::Nothing)
            }
            opcode::RELEASE => {
                handler.release(node, Handle(input.u64()?));
                Ok(Given::Nothing)
            }
            opcode::FLUSH => done(handler.flush(node, Handle(input.u64()?))),
            opcode::FSYNC => done(handler.fsync(node, Handle(input.u64()?), input.u32()? & 1 != 0)),
            opcode::FSYNCDIR => {
                input.skip(8)?;
                done(handler.fsyncdir(node, input.u32()? & 1 != 0))
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                input.skip(8)?;
                let (offset, size) = (input.u64()?, input.u32()?);
                let plus = header.opcode == opcode::READDIRPLUS;
                let mut sink = EntryBuffer { output, limit: size as usize };
                handler.readdir(caller, node, offset, plus, &mut sink)?;
                Ok(Given::Nothing)
            }
            opcode::SETXATTR => {
                let (size, flags, own) = (input.u32()?, input.u32()?, input.u32()?);
                input.skip(4)?;
                let name = input.name()?;
                done(handler.setxattr(
                    caller,
                    node,
                    name,
                    input.take(size as usize)?,
                    flags,
                    own & 1 != 0,
                ))
            }
            opcode::GETXATTR => {
                let size = input.u32()?;
                input.skip(4)?;
                give_sized(output, &handler.getxattr(node, input.name()?)?, size)
            }
            opcode::LISTXATTR => {
                let size = input.u32()?;
                give_sized(output, &handler.listxattr(node)?, size)
            }
            opcode::REMOVEXATTR => done(handler.removexattr(caller, node, input.name()?)),
            opcode::FALLOCATE => {
                let (handle, offset, length) = (Handle(input.u64()?), input.u64()?, input.u64()?);
                done(handler.fallocate(caller, node, handle, input.u32()?, offset, length))
            }
            opcode::LSEEK => {
                let (handle, offset, whence) = (Handle(input.u64()?), input.u64()?, input.u32()?);
                output.u64(handler.lseek(node, handle, offset, whence)?);
                Ok(Given::Nothing)
            }
            opcode::COPY_FILE_RANGE => {
                let (handle, offset) = (Handle(input.u64()?), input.u64()?);
                let to = (NodeId(input.u64()?), Handle(input.u64()?), input.u64()?);
                let copied = handler.copy_file_range(
                    caller,
                    (node, handle, offset),
                    to,
                    input.u64()?,
                    input.u64()?,
                )?;
                output.u32(u32::try_from(copied).unwrap_or(u32::MAX));
                output.u32(0);
                Ok(Given::Nothing)
            }
            opcode::SYNCFS => done(handler.syncfs(node)),
            opcode::IOCTL => {
                let (_handle, _flags, command) = (input.u64()?, input.u32()?, input.u32()?);
                let (_argument, _in_bytes, out_bytes) = (input.u64()?, input.u32()?, input.u32()?);
                let handed_out = handler.ioctl(node, command)?;
                output.bytes(&[0; 16]); // struct fuse_ioctl_out: result 0, no retry
                output.bytes(&handed_out[..handed_out.len().min(out_bytes as usize)]);
                Ok(Given::Nothing)
            }
            opcode::DESTROY => Ok(Given::Nothing),
            // OPENDIR too, once: the kernel opens and closes directories by itself from then on, and keeps listings.
            _ => Err(Errno::NOSYS),
        }
    }

    fn create(&self, header: &Header, mut input: Input<'_>, output: &mut Output) -> Answer<Given> {
        let (flags, mode, umask, own) = (input.u32()?, input.u32()?, input.u32()?, input.u32()?);
        let flags = OpenFlags { flags, kill_privileges: own & 1 != 0 };
        let (entry, opened): (Entry, Opened) = if header.opcode == opcode::TMPFILE {
            self.handler.tmpfile(&header.caller, header.node, mode, umask, flags)?
        } else {
            self.handler.create(&header.caller, header.node, input.name()?, mode, umask, flags)?
        };
        output.entry(&entry);
        output.opened(&opened);
        Ok(Given::EntryAndOpen(entry, opened.handle.unwrap_or(Handle(0))))
    }
}

fn done(outcome: Answer<()>) -> Answer<Given> {
    outcome.map(|()| Given::Nothing)
}

fn give_entry(output: &mut Output, entry: Entry) -> Answer<Given> {
    output.entry(&entry);
    Ok(Given::Entry(entry))
}

fn give_bytes(output: &mut Output, bytes: &[u8]) -> Answer<Given> {
    output.bytes(bytes);
    Ok(Given::Nothing)
}

/// A value whose size may be asked for first (size 0).
fn give_sized(output: &mut Output, value: &[u8], size: u32) -> Answer<Given> {
    if size == 0 {
        output.u32(u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?);
        output.u32(0);
        return Ok(Given::Nothing);
    }
    if value.len() > size as usize {
        return Err(Errno::RANGE);
    }
    give_bytes(output, value)
}

fn changes(mut input: Input<'_>) -> Answer<Changes> {
    const MODE: u32 = 1 << 0;
    const UID: u32 = 1 << 1;
    const GID: u32 = 1 << 2;
    const SIZE: u32 = 1 << 3;
    const ATIME: u32 = 1 << 4;
    const MTIME: u32 = 1 << 5;
    const HANDLE: u32 = 1 << 6;
    const ATIME_NOW: u32 = 1 << 7;
    const MTIME_NOW: u32 = 1 << 8;
    const KILL_PRIVILEGES: u32 = 1 << 11;
    let valid = input.u32()?;
    input.skip(4)?;
    let (handle, size) = (input.u64()?, input.u64()?);
    input.skip(8)?;
    let (atime, mtime, _ctime) = (input.u64()?, input.u64()?, input.u64()?);
    let (atime_nanoseconds, mtime_nanoseconds, _) = (input.u32()?, input.u32()?, input.u32()?);
    let mode = input.u32()?;
    input.skip(4)?;
    let (uid, gid) = (input.u32()?, input.u32()?);
    let time = |set: u32, now: u32, seconds: u64, nanoseconds: u32| {
        if valid & now != 0 {
            Some(SetTime::Now)
        } else if valid & set != 0 {
            Some(SetTime::At(Time {
                seconds: i64::from_ne_bytes(seconds.to_ne_bytes()),
                nanoseconds,
            }))
        } else {
            None
        }
    };
    Ok(Changes {
        mode: (valid & MODE != 0).then_some(mode),
        uid: (valid & UID != 0).then_some(uid),
        gid: (valid & GID != 0).then_some(gid),
        size: (valid & SIZE != 0).then_some(size),
        atime: time(ATIME, ATIME_NOW, atime, atime_nanoseconds),
        mtime: time(MTIME, MTIME_NOW, mtime, mtime_nanoseconds),
        handle: (valid & HANDLE != 0).then_some(Handle(handle)),
        kill_privileges: valid & KILL_PRIVILEGES != 0,
    })
}
