//! Serving requests: threads that read `/dev/fuse`, ask the [`Handler`] and write the answers.
//!
//! All threads share one descriptor (no clone: a single-threaded caller is fastest where its request wakes one thread),
//! and each has its own buffers for life. A request costs one `read` and one `write`; content that is read goes straight
//! into the answer. INTERRUPT is not acted on: no request waits for anything but the disk.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::io::Errno;

use super::handler::{
    Answer, BackingId, Caller, Capabilities, Changes, Entry, Handle, Handler, Kernel, NodeId,
    OpenFlags, Opened, SetTime, Time,
};
use super::mount::{self, MountError};
use super::requests::Requests;
use super::wire::{EntryBuffer, IN_HEADER_BYTES, Input, Output, decode_device, opcode};

/// Largest write, and largest read, in one request.
const TRANSFER_BYTES_MAX: u32 = TRANSFER_PAGES_MAX as u32 * 4096;

/// The same in pages.
const TRANSFER_PAGES_MAX: u16 = 256;

/// A request's headers beside its data.
const HEADER_ROOM_BYTES: usize = 4096;

/// Oldest protocol that has all we ask for (7.31: Linux 5.4).
const MINOR_MIN: u32 = 31;

/// Newest protocol we know.
const MINOR_MAX: u32 = 45;

/// First protocol with `FUSE_NOTIFY_INC_EPOCH` (Linux 6.16).
const MINOR_EPOCH: u32 = 44;

/// Set among the high flags of INIT: files may have backing files.
const PASSTHROUGH: u64 = 1 << 37;

/// A mounted filesystem that is not served yet.
pub(crate) struct Session {
    device: Arc<OwnedFd>,
    /// How many file systems may be stacked below ours for its files to have backing files; `None`: never ask for it.
    stacking: Option<u32>,
    requests: Arc<Requests>,
}

impl Session {
    /// Mounts at `mountpoint`. The mount shows as type `fuse.branchfs`, source `branchfs`. `stacking` is the number of
    /// stacked file systems that backing files may lie on; `None` does without backing files.
    pub(crate) fn mount(mountpoint: &Path, stacking: Option<u32>) -> Result<Self, MountError> {
        let device = Arc::new(mount::mount(mountpoint)?);
        Ok(Self { device, stacking, requests: Arc::new(Requests::new()) })
    }

    /// The way to tell the kernel something unasked.
    pub(crate) fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::new(Notifier {
            device: Arc::clone(&self.device),
            requests: Arc::clone(&self.requests),
        })
    }

    /// Serves until the mount is gone.
    pub(crate) fn serve(self, handler: &Arc<dyn Handler>, threads: usize) -> io::Result<()> {
        let worker = || {
            let (device, requests) = (Arc::clone(&self.device), Arc::clone(&self.requests));
            Worker::new(device, Arc::clone(handler), requests)
        };
        let mut first = worker();
        first.initialise(self.stacking)?;
        let others: Vec<_> = (1..threads)
            .map(|number| {
                let mut worker = worker();
                thread::Builder::new()
                    .name(format!("request-{number}"))
                    .spawn(move || worker.serve())
            })
            .collect::<io::Result<_>>()?;
        let served = first.serve();
        for other in others {
            other.join().map_err(|_| io::Error::other("a request thread panicked"))??;
        }
        served
    }
}

/// One serving thread.
struct Worker {
    device: Arc<OwnedFd>,
    handler: Arc<dyn Handler>,
    requests: Arc<Requests>,
    request: Vec<u8>,
    output: Output,
}

/// A request's header.
struct Header {
    opcode: u32,
    unique: u64,
    node: NodeId,
    caller: Caller,
}

/// What must be given back when an answer does not reach the kernel.
enum Given {
    Nothing,
    Entry(Entry),
    Open(NodeId, Handle),
    Directory(NodeId, Handle),
    EntryAndOpen(Entry, Handle),
}

impl Worker {
    fn new(device: Arc<OwnedFd>, handler: Arc<dyn Handler>, requests: Arc<Requests>) -> Self {
        let request = vec![0; TRANSFER_BYTES_MAX as usize + HEADER_ROOM_BYTES];
        Self { device, handler, requests, request, output: Output::default() }
    }

    /// Reads one request; `None` when the mount is gone.
    fn read(&mut self) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&*self.device, self.request.as_mut_slice()) {
                Ok(count) => return Ok(Some(count)),
                Err(Errno::NODEV) => return Ok(None),
                // ENOENT: the request was taken back before it was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        while let Some(length) = self.read()? {
            // The buffers are lent out so that the request can be read while the answer is written.
            let request = std::mem::take(&mut self.request);
            let mut output = std::mem::take(&mut self.output);
            let answered = self.answer(&request[..length], &mut output);
            self.request = request;
            self.output = output;
            answered?;
        }
        Ok(())
    }

    /// The first request: which protocol, and what of it.
    fn initialise(&mut self, stacking: Option<u32>) -> io::Result<()> {
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

    fn answer(&self, request: &[u8], output: &mut Output) -> io::Result<()> {
        let mut input = Input::new(request);
        let Ok(header) = header(&mut input) else {
            return Ok(());
        };
        output.clear();
        self.requests.count(header.opcode);
        match header.opcode {
            opcode::FORGET => {
                self.handler.forget(header.node, input.u64().unwrap_or(0));
                return Ok(());
            }
            opcode::BATCH_FORGET => {
                self.forget_many(input);
                return Ok(());
            }
            opcode::INTERRUPT => return Ok(()),
            opcode::DESTROY => self.handler.destroy(),
            opcode::IOCTL | opcode::WRITE if self.handler.waits_for_others(header.node) => {
                return self.answer_apart(header, input.rest().to_vec(), output);
            }
            _ => {}
        }
        let outcome = self.dispatch(&header, input, output);
        self.reply(&header, outcome, output)
    }

    /// Answers a request that may wait for others on a thread of its own.
    fn answer_apart(
        &self,
        header: Header,
        request: Vec<u8>,
        output: &mut Output,
    ) -> io::Result<()> {
        let apart = Worker {
            device: Arc::clone(&self.device),
            handler: Arc::clone(&self.handler),
            requests: Arc::clone(&self.requests),
            request: Vec::new(),
            output: Output::default(),
        };
        let unique = header.unique;
        let started = thread::Builder::new().name("waiting".to_owned()).spawn(move || {
            let mut output = Output::default();
            output.clear();
            let outcome = apart.dispatch(&header, Input::new(&request), &mut output);
            // A device that cannot be written to any more ends the session's own threads too.
            let _ = apart.reply(&header, outcome, &mut output);
        });
        if started.is_err() {
            rustix::io::write(&*self.device, output.finish(unique, Some(Errno::AGAIN)))?;
        }
        Ok(())
    }

    fn reply(
        &self,
        header: &Header,
        outcome: Answer<Given>,
        output: &mut Output,
    ) -> io::Result<()> {
        let error = outcome.as_ref().err().copied();
        match rustix::io::write(&*self.device, output.finish(header.unique, error)) {
            Ok(_) => Ok(()),
            // ENOENT: the caller was killed meanwhile. ENODEV: unmounted; the next read says so too.
            Err(Errno::NOENT | Errno::NODEV) => {
                self.take_back(outcome.unwrap_or(Given::Nothing));
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn forget_many(&self, mut input: Input<'_>) {
        let count = input.u32().unwrap_or(0);
        let _ = input.u32();
        for _ in 0..count {
            let (Ok(node), Ok(lookups)) = (input.u64(), input.u64()) else {
                return;
            };
            self.handler.forget(NodeId(node), lookups);
        }
    }

    fn take_back(&self, given: Given) {
        let forget = |entry: Entry| {
            if let Some(node) = entry.node {
                self.handler.forget(node, 1);
            }
        };
        match given {
            Given::Nothing => {}
            Given::Entry(entry) => forget(entry),
            Given::Open(node, handle) => self.handler.release(node, handle),
            Given::Directory(node, handle) => self.handler.releasedir(node, handle),
            Given::EntryAndOpen(entry, handle) => {
                if let Some(node) = entry.node {
                    self.handler.release(node, handle);
                }
                forget(entry);
            }
        }
    }

    /// Decodes one request, asks the handler and encodes what it says.
    fn dispatch(
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
                done(handler.fsyncdir(node, Handle(input.u64()?), input.u32()? & 1 != 0))
            }
            opcode::OPENDIR => {
                let opened = handler.opendir(caller, node, input.u32()?)?;
                output.opened(&opened);
                Ok(Given::Directory(node, opened.handle.unwrap_or(Handle(0))))
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let (handle, offset, size) = (Handle(input.u64()?), input.u64()?, input.u32()?);
                let plus = header.opcode == opcode::READDIRPLUS;
                let mut sink = EntryBuffer { output, limit: size as usize };
                handler.readdir(caller, node, handle, offset, plus, &mut sink)?;
                Ok(Given::Nothing)
            }
            opcode::RELEASEDIR => {
                handler.releasedir(node, Handle(input.u64()?));
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
                done(handler.fallocate(node, handle, input.u32()?, offset, length))
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

/// Low and high 32 bits.
fn halves(flags: u64) -> (u32, u32) {
    let bytes = flags.to_le_bytes();
    let half =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}

fn header(input: &mut Input<'_>) -> Answer<Header> {
    debug_assert_eq!(IN_HEADER_BYTES, 40);
    let _length = input.u32()?;
    let (opcode, unique, node) = (input.u32()?, input.u64()?, NodeId(input.u64()?));
    let caller = Caller { uid: input.u32()?, gid: input.u32()? };
    let _thread = input.u32()?;
    let (_extensions, _padding) = (input.u16()?, input.u16()?);
    Ok(Header { opcode, unique, node, caller })
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

/// Sends notifications.
struct Notifier {
    device: Arc<OwnedFd>,
    requests: Arc<Requests>,
}

impl Notifier {
    fn send(&self, code: i32, fill: impl FnOnce(&mut Output)) -> Answer<()> {
        let mut output = Output::default();
        output.clear();
        fill(&mut output);
        match rustix::io::write(self.device.as_fd(), output.finish_notification(code)) {
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(()),
            Err(Errno::INVAL) => Err(Errno::NOSYS),
            Err(error) => Err(error),
        }
    }
}

impl Notifier {
    fn forget_entry(&self, parent: NodeId, name: &OsStr, flags: u32) -> Answer<()> {
        const INVAL_ENTRY: i32 = 3;
        self.send(INVAL_ENTRY, |output| {
            output.u64(parent.0);
            output.u32(u32::try_from(name.len()).unwrap_or(0));
            output.u32(flags);
            output.bytes(name.as_bytes());
            output.bytes(&[0]);
        })
    }
}

impl Kernel for Notifier {
    fn invalidate_node(&self, node: NodeId) -> Answer<()> {
        const INVAL_INODE: i32 = 2;
        self.send(INVAL_INODE, |output| {
            output.u64(node.0);
            output.u64(0);
            output.u64(0); // length 0: to the end
        })
    }

    fn invalidate_entry(&self, parent: NodeId, name: &OsStr) -> Answer<()> {
        self.forget_entry(parent, name, 0)
    }

    fn expire_entry(&self, parent: NodeId, name: &OsStr) -> Answer<()> {
        const EXPIRE_ONLY: u32 = 1; // where the kernel does not know it, it is not looked at
        self.forget_entry(parent, name, EXPIRE_ONLY)
    }

    fn increment_epoch(&self) -> Answer<()> {
        const INC_EPOCH: i32 = 8;
        self.send(INC_EPOCH, |_| {})
    }

    fn invalidate_attributes(&self, node: NodeId) -> Answer<()> {
        const INVAL_INODE: i32 = 2;
        const NO_PAGES: u64 = u64::MAX; // offset -1
        self.send(INVAL_INODE, |output| {
            output.u64(node.0);
            output.u64(NO_PAGES);
            output.u64(0);
        })
    }

    fn open_backing(&self, file: BorrowedFd<'_>) -> Answer<BackingId> {
        crate::sys::open_backing(self.device.as_fd(), file).map(BackingId)
    }

    fn requests(&self) -> Vec<(&'static str, u64)> {
        self.requests.counted()
    }

    fn close_backing(&self, backing: BackingId) {
        // It fails for a number that is not registered, or a mount that is gone: nothing is left to close either way.
        let _ = crate::sys::close_backing(self.device.as_fd(), backing.0);
    }
}
