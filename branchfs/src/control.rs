//! The server of the control protocol (docs/control.md). One thread serves one connection. A few more threads wait for new
//! connections, so that no client waits for the start of a thread.

mod connection;
mod fd_passing;
mod socket_dir;
mod verbs;

use std::borrow::Cow;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use serde::Deserialize;

use crate::filesystem::BranchFilesystem;
use crate::protocol::{Empty, ErrorReply, Reply, Request, VERSION, WirePath};
use branchfs_core::error::{Context, Error, ErrorKind};
use branchfs_core::injected_panics::panic_if_listed;
use branchfs_core::workspace::{Policy, Workspace};
use connection::{
    CONNECTIONS_MAX, Connection, ConnectionSlot, ConnectionSlots, Line, REQUEST_BYTES_MAX,
    RejectedPeers,
};
use verbs::Handler;

/// The properties of a mount that `info` reports.
#[derive(Clone, Debug)]
pub(crate) struct MountInfo {
    pub(crate) mountpoint: PathBuf,
    /// The policy of commits that do not name one.
    pub(crate) policy: Policy,
    /// Whether branches contain control files.
    pub(crate) control_files: bool,
    /// The driver that presents the branches of main.
    pub(crate) driver: &'static str,
    /// Why the other driver is not used.
    pub(crate) why_not: String,
}

/// How many threads wait for a connection.
const WAITING_MAX: usize = 2;

/// The listening socket.
pub(crate) struct Control {
    listener: UnixListener,
    path: PathBuf,
}

/// The state that the threads share.
struct Service {
    listener: UnixListener,
    workspace: Arc<Workspace>,
    filesystem: Arc<BranchFilesystem>,
    mount: MountInfo,
    slots: ConnectionSlots,
    /// Leaf lock.
    rejected: Mutex<RejectedPeers>,
    /// How many threads are waiting for a connection.
    waiting: AtomicUsize,
}

impl Control {
    /// Creates the socket of this daemon and listens on it.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn listen() -> Result<Self, Error> {
        let path = socket_dir::directory()?.join(format!("{}.sock", std::process::id()));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).at(&path);
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).at(&path)?;
        // `admit` checks the peer's credentials, so the mode of the file does not matter.
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))
            .at(&path)?;
        Ok(Self { listener, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Serves connections until the process ends.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn serve(
        self,
        workspace: Arc<Workspace>,
        filesystem: Arc<BranchFilesystem>,
        mount: MountInfo,
    ) -> std::io::Result<()> {
        let service = Arc::new(Service {
            listener: self.listener,
            workspace,
            filesystem,
            mount,
            slots: ConnectionSlots::default(),
            rejected: Mutex::default(),
            waiting: AtomicUsize::new(0),
        });
        (0..WAITING_MAX).try_for_each(|_| service.start())
    }
}

impl Service {
    /// Starts a thread that serves connections, one after the other. It ends when more than [`WAITING_MAX`] are waiting.
    fn start(self: &Arc<Self>) -> std::io::Result<()> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let service = Arc::clone(self);
        let started = thread::Builder::new().name("control".to_owned()).spawn(move || {
            while service.waiting.load(Ordering::Acquire) <= WAITING_MAX {
                // `answer` handles the panic of a request. Any other panic ends only its connection.
                if catch_unwind(AssertUnwindSafe(|| service.serve_next())).is_err() {
                    service.workspace.mount().fail_stop.trip("a control connection panicked");
                }
                service.waiting.fetch_add(1, Ordering::AcqRel);
            }
            service.waiting.fetch_sub(1, Ordering::AcqRel);
        });
        if started.is_err() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        started.map(drop)
    }

    /// Waits for a connection and serves it to its end.
    fn serve_next(self: &Arc<Self>) {
        let accepted = self.listener.accept();
        if self.waiting.fetch_sub(1, Ordering::AcqRel) == 1 && self.start().is_err() {
            return; // no thread can wait for the next connection; this one is closed
        }
        let Ok((stream, _)) = accepted else { return }; // the peer disconnected, or no descriptor is free
        let stream = Arc::new(stream);
        match admit(&stream, &self.workspace, &self.slots) {
            Ok(slot) => {
                // If the connection breaks, only its peer is affected.
                let _ = serve_connection(&stream, slot, self);
            }
            Err(refusal) => {
                tracing::warn!("a connection was refused: {refusal}");
                // A panic leaves the list consistent.
                let mut rejected = self.rejected.lock().unwrap_or_else(PoisonError::into_inner);
                rejected.reject(stream, &error_line(&refusal));
            }
        }
    }
}

/// Takes a slot for a peer of root, the daemon's user or the owner of the base.
fn admit(
    stream: &Arc<UnixStream>,
    workspace: &Workspace,
    slots: &ConnectionSlots,
) -> Result<ConnectionSlot, Error> {
    let peer = rustix::net::sockopt::socket_peercred(stream).at("the control socket")?.uid.as_raw();
    let allowed = [0, rustix::process::geteuid().as_raw(), workspace.owner().0];
    if !allowed.contains(&peer) {
        return Err(Error::Usage(format!("user {peer} is not allowed to control this workspace")));
    }
    slots.take(peer, stream).ok_or_else(|| {
        Error::Usage(format!(
            "user {peer} has {CONNECTIONS_MAX} connections with a request under way, or as many as the daemon's limit of open files allows; more are not taken"
        ))
    })
}

fn serve_connection(
    stream: &UnixStream,
    slot: ConnectionSlot,
    service: &Service,
) -> std::io::Result<()> {
    let mut connection = Connection::new(stream, slot)?;
    loop {
        match connection.read()? {
            Line::Whole(line) => {
                let reply = answer(&line, service, &mut connection);
                connection.write(&reply.unwrap_or_else(|error| error_line(&error)))?;
            }
            Line::End => return Ok(()),
            Line::Broken => {
                let error = Error::Usage(format!(
                    "a request is one line of at most {REQUEST_BYTES_MAX} bytes, sent in one go"
                ));
                return connection.write(&error_line(&error));
            }
        }
    }
}

/// Writes the error reply.
fn error_line(error: &Error) -> String {
    let reply: Reply<Empty> = Reply::Error(ErrorReply {
        hint: error.hint().map(Cow::into_owned),
        kind: error.kind(),
        message: error.to_string(),
        path: error.path().map(WirePath::from),
        paths: error.paths().iter().map(|path| path.as_path().into()).collect(),
        step: error.step().map(Cow::from),
    });
    reply.to_line()
}

/// Parses a request line.
///
/// # Errors
/// `Usage`: it is not JSON, or has another version, an unknown verb or a wrong field.
fn parse(line: &[u8]) -> Result<Request, Error> {
    #[derive(Deserialize)]
    struct Head {
        v: Option<u64>,
        verb: String,
    }
    let malformed =
        |error: serde_json::Error| Error::Usage(format!("the request cannot be read: {error}"));
    let Head { v, verb } = serde_json::from_slice(line).map_err(malformed)?;
    if v != Some(VERSION) {
        return Err(Error::Usage(format!("this daemon speaks version {VERSION} of the protocol")));
    }
    if !Request::VERBS.contains(&verb.as_str()) {
        return Err(Error::Usage(format!("this daemon does not know the verb {verb:?}")));
    }
    serde_json::from_slice(line)
        .map_err(|error| Error::Usage(format!("the request {verb:?} cannot be read: {error}")))
}

/// Carries out the request in `line` and returns the line of its reply.
fn answer(
    line: &[u8],
    service: &Service,
    connection: &mut Connection<'_>,
) -> Result<String, Error> {
    let Service { workspace, filesystem, mount, .. } = service;
    let request = parse(line)?;
    let verb = request.verb();
    let branch = request.branch().map_or(String::new(), |branch| format!(" {branch}"));
    let carry_out = || {
        panic_if_listed(verb);
        Handler { workspace, filesystem, mount, connection }.carry_out(request)
    };
    let outcome = catch_unwind(AssertUnwindSafe(carry_out)).unwrap_or_else(|_| {
        workspace.mount().fail_stop.trip(format!("the request {verb}{branch} panicked"));
        Err(Error::Panicked(verb.to_owned()))
    });
    outcome.inspect_err(|error| match error.kind() {
        ErrorKind::Io | ErrorKind::Corrupt => tracing::error!("{verb}{branch} failed: {error}"),
        _ => tracing::info!("{verb}{branch} was refused: {error}"),
    })
}
