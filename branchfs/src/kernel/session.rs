//! Serving requests: threads that read `/dev/fuse`, ask the [`Handler`] and write the answers.
//!
//! All threads share one descriptor (no clone: a single-threaded caller is fastest where its request wakes one thread),
//! and each has its own buffers for life. A request costs one `read` and one `write`; content that is read goes straight
//! into the answer. INTERRUPT is not acted on: no request waits for anything but the disk.

mod dispatch;
mod initialise;

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::io::Errno;

use super::handler::{Answer, Caller, Handler, Kernel, NodeId};
use super::mount::{self, MountError};
use super::notifier::Notifier;
use super::requests::{Requests, name};
use super::wire::{IN_HEADER_BYTES, Input, Output, opcode};
use crate::injected_panics::panic_if_listed;
use dispatch::Given;

/// Largest write, and largest read, in one request.
const TRANSFER_BYTES_MAX: u32 = TRANSFER_PAGES_MAX as u32 * 4096;

/// The same in pages.
const TRANSFER_PAGES_MAX: u16 = 256;

/// A request's headers beside its data.
const HEADER_ROOM_BYTES: usize = 4096;

/// A mounted filesystem that is not served yet.
pub(crate) struct Session {
    device: Arc<OwnedFd>,
    /// How many file systems may be stacked below ours for its files to have backing files; `None`: never ask for it.
    stacking: Option<u32>,
    requests: Arc<Requests>,
}

impl Session {
    /// Mounts at `mountpoint`. The mount shows as type `fuse.branchfs` with this source: the base, so that the mount of
    /// a directory is found in the mount table, without a question to any daemon. `stacking` is the number of stacked
    /// file systems that backing files may lie on; `None` does without backing files.
    pub(crate) fn mount(
        mountpoint: &Path,
        source: &Path,
        stacking: Option<u32>,
    ) -> Result<Self, MountError> {
        let device = Arc::new(mount::mount(mountpoint, source)?);
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

    fn answer(&self, request: &[u8], output: &mut Output) -> io::Result<()> {
        let mut input = Input::new(request);
        let Ok(header) = header(&mut input) else {
            return Ok(());
        };
        output.clear();
        self.requests.count(header.opcode);
        match header.opcode {
            opcode::FORGET => {
                let count = input.u64().unwrap_or(0);
                self.catch(&header, || self.handler.forget(header.node, count));
                return Ok(());
            }
            opcode::BATCH_FORGET => {
                self.catch(&header, || self.forget_many(input));
                return Ok(());
            }
            opcode::INTERRUPT => return Ok(()),
            opcode::DESTROY => {
                self.catch(&header, || self.handler.destroy());
            }
            opcode::IOCTL | opcode::WRITE if self.handler.waits_for_others(header.node) => {
                return self.answer_apart(header, input.rest().to_vec(), output);
            }
            _ => {}
        }
        let outcome = self.dispatch_or_fail(&header, input, output);
        self.reply(&header, outcome, output)
    }

    /// Runs part of a request; `None` after a panic, which the panic hook has logged.
    fn catch<T>(&self, header: &Header, work: impl FnOnce() -> T) -> Option<T> {
        let work = || {
            panic_if_listed(name(header.opcode));
            work()
        };
        // What a panic may leave half-done in memory is in doubt: the handler stops transactions.
        let outcome = catch_unwind(AssertUnwindSafe(work));
        outcome.inspect_err(|_| self.handler.panicked()).ok()
    }

    /// As [`Self::dispatch`]; a panic is EIO.
    fn dispatch_or_fail(
        &self,
        header: &Header,
        input: Input<'_>,
        output: &mut Output,
    ) -> Answer<Given> {
        self.catch(header, || self.dispatch(header, input, output)).unwrap_or(Err(Errno::IO))
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
            let outcome = apart.dispatch_or_fail(&header, Input::new(&request), &mut output);
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
                self.catch(header, || self.take_back(outcome.unwrap_or(Given::Nothing)));
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
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
