//! Dispatch: decodes a request, calls the [`Filesystem`](crate::Filesystem) and encodes the reply.

use rustix::io::Errno;

use super::{Header, TRANSFER_BYTES_MAX, Worker};
use crate::abi::{EntryBuffer, Input, Output, decode_device, opcode};
use crate::filesystem::{
    Entry, FsResult, Handle, NodeId, OpenFlags, OpenReply, SetAttr, SetTime, Time,
};

/// The references and handles in a reply, which are released if the kernel does not receive it.
pub(super) enum UnackedReply {
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
            self.filesystem.forget(NodeId(node), lookups);
        }
    }

    pub(super) fn release_reply(&self, given: UnackedReply) {
        let forget = |entry: Entry| {
            if let Some(node) = entry.node {
                self.filesystem.forget(node, 1);
            }
        };
        match given {
            UnackedReply::Nothing => {}
            UnackedReply::Entry(entry) => forget(entry),
            UnackedReply::Open(node, handle) => self.filesystem.release(node, handle),
            UnackedReply::EntryAndOpen(entry, handle) => {
                if let Some(node) = entry.node {
                    self.filesystem.release(node, handle);
                }
                forget(entry);
            }
        }
    }

    /// Decodes one request, calls the filesystem and encodes its result.
    pub(super) fn dispatch(
        &self,
        header: &Header,
        mut input: Input<'_>,
        output: &mut Output,
    ) -> FsResult<UnackedReply> {
        let (filesystem, node, caller) = (&self.filesystem, header.node, &header.caller);
        match header.opcode {
            opcode::LOOKUP => reply_entry(output, filesystem.lookup(caller, node, input.name()?)?),
            opcode::GETATTR => {
                const HAS_HANDLE: u32 = 1;
                let flags = input.u32()?;
                input.skip(4)?;
                let handle = Handle(input.u64()?);
                let (attributes, ttl) =
                    filesystem.getattr(node, (flags & HAS_HANDLE != 0).then_some(handle))?;
                output.attributes_for(&attributes, ttl);
                Ok(UnackedReply::Nothing)
            }
            opcode::SETATTR => {
                let (attributes, ttl) = filesystem.setattr(caller, node, &set_attr(input)?)?;
                output.attributes_for(&attributes, ttl);
                Ok(UnackedReply::Nothing)
            }
            opcode::READLINK => reply_bytes(output, &filesystem.readlink(node)?),
            opcode::SYMLINK => {
                let (name, target) = (input.name()?, input.name()?);
                reply_entry(output, filesystem.symlink(caller, node, name, target)?)
            }
            opcode::MKNOD => {
                let (mode, device, umask) = (input.u32()?, input.u32()?, input.u32()?);
                input.skip(4)?;
                reply_entry(
                    output,
                    filesystem.mknod(
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
                reply_entry(output, filesystem.mkdir(caller, node, input.name()?, mode, umask)?)
            }
            opcode::UNLINK => reply_empty(filesystem.unlink(caller, node, input.name()?)),
            opcode::RMDIR => reply_empty(filesystem.rmdir(caller, node, input.name()?)),
            opcode::RENAME => {
                let new_parent = NodeId(input.u64()?);
                let (name, new_name) = (input.name()?, input.name()?);
                reply_empty(filesystem.rename(caller, node, name, new_parent, new_name, 0))
            }
            opcode::RENAME2 => {
                let (new_parent, flags) = (NodeId(input.u64()?), input.u32()?);
                input.skip(4)?;
                let (name, new_name) = (input.name()?, input.name()?);
                reply_empty(filesystem.rename(caller, node, name, new_parent, new_name, flags))
            }
            opcode::LINK => {
                let linked = NodeId(input.u64()?);
                reply_entry(output, filesystem.link(caller, linked, node, input.name()?)?)
            }
            opcode::OPEN => {
                let flags =
                    OpenFlags { flags: input.u32()?, kill_privileges: input.u32()? & 1 != 0 };
                let opened = filesystem.open(caller, node, flags)?;
                output.opened(&opened);
                Ok(UnackedReply::Open(node, opened.handle.unwrap_or(Handle(0))))
            }
            opcode::CREATE | opcode::TMPFILE => self.create(header, input, output),
            opcode::READ => {
                let (handle, offset, size) = (Handle(input.u64()?), input.u64()?, input.u32()?);
                let read = filesystem.read(
                    node,
                    handle,
                    offset,
                    output.space(size.min(TRANSFER_BYTES_MAX) as usize),
                )?;
                output.truncate(read);
                Ok(UnackedReply::Nothing)
            }
            opcode::WRITE => {
                const KILL_PRIVILEGES: u32 = 1 << 2;
                let (handle, offset, size, flags) =
                    (Handle(input.u64()?), input.u64()?, input.u32()?, input.u32()?);
                input.skip(16)?;
                let data = input.take(size as usize)?;
                let written =
                    filesystem.write(node, handle, offset, data, flags & KILL_PRIVILEGES != 0)?;
                output.u32(u32::try_from(written).unwrap_or(u32::MAX));
                output.u32(0);
                Ok(UnackedReply::Nothing)
            }
            opcode::STATFS => {
                output.statfs(&filesystem.statfs(node)?);
                Ok(UnackedReply::Nothing)
            }
            opcode::RELEASE => {
                filesystem.release(node, Handle(input.u64()?));
                Ok(UnackedReply::Nothing)
            }
            opcode::FLUSH => reply_empty(filesystem.flush(node, Handle(input.u64()?))),
            opcode::FSYNC => {
                reply_empty(filesystem.fsync(node, Handle(input.u64()?), input.u32()? & 1 != 0))
            }
            opcode::FSYNCDIR => {
                input.skip(8)?;
                reply_empty(filesystem.fsyncdir(node, input.u32()? & 1 != 0))
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                input.skip(8)?;
                let (offset, size) = (input.u64()?, input.u32()?);
                let plus = header.opcode == opcode::READDIRPLUS;
                let mut sink = EntryBuffer { output, limit: size as usize };
                filesystem.readdir(caller, node, offset, plus, &mut sink)?;
                Ok(UnackedReply::Nothing)
            }
            opcode::SETXATTR => {
                let (size, flags, own) = (input.u32()?, input.u32()?, input.u32()?);
                input.skip(4)?;
                let name = input.name()?;
                reply_empty(filesystem.setxattr(
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
                reply_sized(output, &filesystem.getxattr(node, input.name()?)?, size)
            }
            opcode::LISTXATTR => {
                let size = input.u32()?;
                reply_sized(output, &filesystem.listxattr(node)?, size)
            }
            opcode::REMOVEXATTR => reply_empty(filesystem.removexattr(caller, node, input.name()?)),
            opcode::FALLOCATE => {
                let (handle, offset, length) = (Handle(input.u64()?), input.u64()?, input.u64()?);
                reply_empty(filesystem.fallocate(
                    caller,
                    node,
                    handle,
                    input.u32()?,
                    offset,
                    length,
                ))
            }
            opcode::LSEEK => {
                let (handle, offset, whence) = (Handle(input.u64()?), input.u64()?, input.u32()?);
                output.u64(filesystem.lseek(node, handle, offset, whence)?);
                Ok(UnackedReply::Nothing)
            }
            opcode::COPY_FILE_RANGE => {
                let (handle, offset) = (Handle(input.u64()?), input.u64()?);
                let to = (NodeId(input.u64()?), Handle(input.u64()?), input.u64()?);
                let copied = filesystem.copy_file_range(
                    caller,
                    (node, handle, offset),
                    to,
                    input.u64()?,
                    input.u64()?,
                )?;
                output.u32(u32::try_from(copied).unwrap_or(u32::MAX));
                output.u32(0);
                Ok(UnackedReply::Nothing)
            }
            opcode::SYNCFS => reply_empty(filesystem.syncfs(node)),
            opcode::IOCTL => {
                let (_handle, _flags, command) = (input.u64()?, input.u32()?, input.u32()?);
                let (_argument, _in_bytes, out_bytes) = (input.u64()?, input.u32()?, input.u32()?);
                let result = filesystem.ioctl(node, command)?;
                output.bytes(&[0; 16]); // struct fuse_ioctl_out: result 0, no retry
                output.bytes(&result[..result.len().min(out_bytes as usize)]);
                Ok(UnackedReply::Nothing)
            }
            opcode::DESTROY => Ok(UnackedReply::Nothing),
            // OPENDIR too, once: the kernel then opens and closes directories itself, and caches listings.
            _ => Err(Errno::NOSYS),
        }
    }

    fn create(
        &self,
        header: &Header,
        mut input: Input<'_>,
        output: &mut Output,
    ) -> FsResult<UnackedReply> {
        let (flags, mode, umask, own) = (input.u32()?, input.u32()?, input.u32()?, input.u32()?);
        let flags = OpenFlags { flags, kill_privileges: own & 1 != 0 };
        let (entry, opened): (Entry, OpenReply) = if header.opcode == opcode::TMPFILE {
            self.filesystem.tmpfile(&header.caller, header.node, mode, umask, flags)?
        } else {
            self.filesystem.create(
                &header.caller,
                header.node,
                input.name()?,
                mode,
                umask,
                flags,
            )?
        };
        output.entry(&entry);
        output.opened(&opened);
        Ok(UnackedReply::EntryAndOpen(entry, opened.handle.unwrap_or(Handle(0))))
    }
}

fn reply_empty(outcome: FsResult<()>) -> FsResult<UnackedReply> {
    outcome.map(|()| UnackedReply::Nothing)
}

fn reply_entry(output: &mut Output, entry: Entry) -> FsResult<UnackedReply> {
    output.entry(&entry);
    Ok(UnackedReply::Entry(entry))
}

fn reply_bytes(output: &mut Output, bytes: &[u8]) -> FsResult<UnackedReply> {
    output.bytes(bytes);
    Ok(UnackedReply::Nothing)
}

/// Encodes an extended attribute's value or the list of names; only its length if `size` is 0.
fn reply_sized(output: &mut Output, value: &[u8], size: u32) -> FsResult<UnackedReply> {
    if size == 0 {
        output.u32(u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?);
        output.u32(0);
        return Ok(UnackedReply::Nothing);
    }
    if value.len() > size as usize {
        return Err(Errno::RANGE);
    }
    reply_bytes(output, value)
}

fn set_attr(mut input: Input<'_>) -> FsResult<SetAttr> {
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
    Ok(SetAttr {
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
