//! The session: threads that read requests from `/dev/fuse`, call the [`Filesystem`] and write the replies.
//!
//! All threads share one descriptor: a single-threaded caller is fastest if its request wakes one thread. Each thread
//! keeps its buffers. A request costs one `read` and one `write`; READ places the content directly in the reply. INTERRUPT
//! is ignored: a request waits for nothing but the disk.

mod dispatch;
mod init;

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::io::Errno;

use crate::abi::{IN_HEADER_BYTES, Input, Output, opcode};
use crate::filesystem::{Caller, Filesystem, FsResult, KernelNotifier, NodeId};
use crate::mount::{self, MountError, MountOptions};
use crate::notify::Notifier;
use crate::request_counters::{RequestCounters, name};
use dispatch::UnackedReply;

/// Largest READ and WRITE.
const TRANSFER_BYTES_MAX: u32 = TRANSFER_PAGES_MAX as u32 * 4096;

/// Largest READ and WRITE, in pages.
const TRANSFER_PAGES_MAX: u16 = 256;

/// Room for the headers of a request.
const HEADER_ROOM_BYTES: usize = 4096;

/// A mounted filesystem. The kernel queues requests until [`Self::serve`] runs.
#[derive(Debug)]
pub struct Session {
    device: Arc<OwnedFd>,
    passthrough_depth: Option<u32>,
    request_counters: Arc<RequestCounters>,
}

impl Session {
    /// Mounts at `mountpoint`. Without root this runs `fusermount3`.
    ///
    /// # Errors
    /// The device cannot be opened, or the mount is not permitted. The message says how to fix that.
    pub fn mount(mountpoint: &Path, options: &MountOptions<'_>) -> Result<Self, MountError> {
        let device = Arc::new(mount::mount(mountpoint, options)?);
        let request_counters = Arc::new(RequestCounters::new());
        Ok(Self { device, passthrough_depth: options.passthrough_depth, request_counters })
    }

    /// Returns the sender of notifications to the kernel.
    pub fn notifier(&self) -> Arc<dyn KernelNotifier> {
        Arc::new(Notifier {
            device: Arc::clone(&self.device),
            request_counters: Arc::clone(&self.request_counters),
        })
    }

    /// Serves requests on the calling thread and `threads - 1` others, until the filesystem is unmounted.
    ///
    /// # Errors
    /// The kernel's protocol is too old, a thread cannot be started, or reading or writing `/dev/fuse` fails.
    pub fn serve(self, filesystem: &Arc<dyn Filesystem>, threads: usize) -> io::Result<()> {
        let worker = || {
            let (device, counters) = (Arc::clone(&self.device), Arc::clone(&self.request_counters));
            Worker::new(device, Arc::clone(filesystem), counters)
        };
        let mut first = worker();
        first.initialise(self.passthrough_depth)?;
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
    filesystem: Arc<dyn Filesystem>,
    request_counters: Arc<RequestCounters>,
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

impl Worker {
    fn new(
        device: Arc<OwnedFd>,
        filesystem: Arc<dyn Filesystem>,
        request_counters: Arc<RequestCounters>,
    ) -> Self {
        let request = vec![0; TRANSFER_BYTES_MAX as usize + HEADER_ROOM_BYTES];
        Self { device, filesystem, request_counters, request, output: Output::default() }
    }

    /// Reads one request; `None` after the filesystem was unmounted.
    fn read(&mut self) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&*self.device, self.request.as_mut_slice()) {
                Ok(count) => return Ok(Some(count)),
                Err(Errno::NODEV) => return Ok(None),
                // ENOENT: the request was interrupted before it was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        while let Some(length) = self.read()? {
            // Moved out of `self`, so that the request can be borrowed while the reply is written.
            let request = std::mem::take(&mut self.request);
            let mut output = std::mem::take(&mut self.output);
            let answered = self.answer(&request[..length], &mut output);
            self.request = request;
            self.output = output;
            answered?;
        }
        Ok(())
    }

    fn answer(&self, request: &[u8], output: &mut Output) -> io::Result<()> {
        let mut input = Input::new(request);
        let Ok(header) = header(&mut input) else {
            return Ok(());
        };
        output.clear();
        self.request_counters.count(header.opcode);
        match header.opcode {
            opcode::FORGET => {
                let count = input.u64().unwrap_or(0);
                self.catch(&header, || self.filesystem.forget(header.node, count));
                return Ok(());
            }
            opcode::BATCH_FORGET => {
                self.catch(&header, || self.forget_many(input));
                return Ok(());
            }
            opcode::INTERRUPT => return Ok(()),
            opcode::DESTROY => {
                self.catch(&header, || self.filesystem.destroy());
            }
            opcode::IOCTL | opcode::WRITE if self.filesystem.may_block(header.node) => {
                return self.dispatch_on_own_thread(header, input.rest().to_vec(), output);
            }
            _ => {}
        }
        let outcome = self.dispatch_or_fail(&header, input, output);
        self.reply(&header, outcome, output)
    }

    /// Runs a part of a request; `None` if it panics. The panic hook has logged the panic.
    fn catch<T>(&self, header: &Header, work: impl FnOnce() -> T) -> Option<T> {
        let work = || {
            self.filesystem.request_received(name(header.opcode));
            work()
        };
        // A panic may leave the memory of the filesystem inconsistent: `panicked` lets it react.
        let outcome = catch_unwind(AssertUnwindSafe(work));
        outcome.inspect_err(|_| self.filesystem.panicked()).ok()
    }

    /// Dispatches a request; a panic becomes `EIO`.
    fn dispatch_or_fail(
        &self,
        header: &Header,
        input: Input<'_>,
        output: &mut Output,
    ) -> FsResult<UnackedReply> {
        self.catch(header, || self.dispatch(header, input, output)).unwrap_or(Err(Errno::IO))
    }

    /// Dispatches a request that may wait for other requests, on a thread of its own.
    fn dispatch_on_own_thread(
        &self,
        header: Header,
        request: Vec<u8>,
        output: &mut Output,
    ) -> io::Result<()> {
        let apart = Worker {
            device: Arc::clone(&self.device),
            filesystem: Arc::clone(&self.filesystem),
            request_counters: Arc::clone(&self.request_counters),
            request: Vec::new(),
            output: Output::default(),
        };
        let unique = header.unique;
        let started = thread::Builder::new().name("waiting".to_owned()).spawn(move || {
            let mut output = Output::default();
            output.clear();
            let outcome = apart.dispatch_or_fail(&header, Input::new(&request), &mut output);
            // If the device cannot be written to, the threads of the session end too.
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
        outcome: FsResult<UnackedReply>,
        output: &mut Output,
    ) -> io::Result<()> {
        let error = outcome.as_ref().err().copied();
        match rustix::io::write(&*self.device, output.finish(header.unique, error)) {
            Ok(_) => Ok(()),
            // ENOENT: the caller was killed. ENODEV: unmounted; the next read returns that too.
            Err(Errno::NOENT | Errno::NODEV) => {
                self.catch(header, || self.release_reply(outcome.unwrap_or(UnackedReply::Nothing)));
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn header(input: &mut Input<'_>) -> FsResult<Header> {
    debug_assert_eq!(IN_HEADER_BYTES, 40);
    let _length = input.u32()?;
    let (opcode, unique, node) = (input.u32()?, input.u64()?, NodeId(input.u64()?));
    let caller = Caller { uid: input.u32()?, gid: input.u32()? };
    let _thread = input.u32()?;
    let (_extensions, _padding) = (input.u16()?, input.u16()?);
    Ok(Header { opcode, unique, node, caller })
}
