//! The control socket: JSON lines, one reply a request (docs/control.md). One thread a connection; some wait for the next
//! ones, so that no client has to wait for the start of a thread.

mod comparison;
mod connection;
mod descriptors;
mod runtime;
mod transfer;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::commit::Change;
use crate::error::{Context, Error};
use crate::injected_panics::panic_if_listed;
use crate::selection::Selection;
use connection::{CONNECTIONS_MAX, Connection, Line, Place, Places, REQUEST_BYTES_MAX, Refused};

use crate::workspace::{
    BranchInfo, CommitOptions, PastInfo, Policy, Resolution, Selector, Towards, Workspace,
    directory_name,
};

/// Version of the protocol.
const VERSION: u64 = 1;

/// What a client cannot tell from the version alone.
const FEATURES: [&str; 3] = ["disk_limit", "rebase", "drop_rest"];

/// What a mount says about itself.
#[derive(Clone, Debug)]
pub(crate) struct MountInfo {
    /// Where it is mounted.
    pub(crate) mountpoint: PathBuf,
    /// What happens to siblings.
    pub(crate) policy: Policy,
    /// Every branch shows a control file.
    pub(crate) control_files: bool,
    /// What presents the branches of main.
    pub(crate) driver: &'static str,
    /// Why it is not another driver.
    pub(crate) why_not: String,
}

/// Threads that wait for a connection while nobody comes.
const WAITING_MAX: usize = 2;

/// The listening socket.
pub(crate) struct Control {
    listener: UnixListener,
    path: PathBuf,
}

/// What the threads of the connections share.
struct Service {
    listener: UnixListener,
    workspace: Arc<Workspace>,
    info: MountInfo,
    places: Places,
    /// Leaf lock.
    refused: Mutex<Refused>,
    /// How many threads wait for a connection.
    waiting: AtomicUsize,
}

#[derive(Deserialize)]
struct Request {
    v: Option<u64>,
    verb: String,
    name: Option<String>,
    parent: Option<Value>,
    disk_limit: Option<u64>,
    branch: Option<Value>,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    skip: bool,
    #[serde(default)]
    drop_rest: bool,
    #[serde(default)]
    rebase: bool,
    #[serde(default)]
    only: Vec<String>,
    #[serde(default)]
    exclude: Vec<String>,
    #[serde(default)]
    dry_run: bool,
    keep: Option<usize>,
    policy: Option<String>,
    #[serde(default)]
    stat: bool,
    #[serde(default)]
    patch: bool,
    #[serde(default)]
    no_same_owner: bool,
}

impl Control {
    /// Listens on a socket of its own in the runtime directory.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn listen() -> Result<Self, Error> {
        let path = runtime::directory()?.join(format!("{}.sock", std::process::id()));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).at(&path);
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).at(&path)?;
        // Who may connect is checked by credentials, not by the file's mode.
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))
            .at(&path)?;
        Ok(Self { listener, path })
    }

    /// The socket's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Serves connections until the process ends.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn serve(self, workspace: Arc<Workspace>, info: MountInfo) -> std::io::Result<()> {
        let service = Arc::new(Service {
            listener: self.listener,
            workspace,
            info,
            places: Places::default(),
            refused: Mutex::default(),
            waiting: AtomicUsize::new(0),
        });
        (0..WAITING_MAX).try_for_each(|_| service.start())
    }
}

impl Service {
    /// Starts a thread that waits for connections, one after the other, for as long as there are not too many such.
    fn start(self: &Arc<Self>) -> std::io::Result<()> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let service = Arc::clone(self);
        let started = thread::Builder::new().name("control".to_owned()).spawn(move || {
            while service.waiting.load(Ordering::Acquire) <= WAITING_MAX {
                // A panic of a request is answered in `answer`; any other one ends its connection alone.
                if catch_unwind(AssertUnwindSafe(|| service.serve_next())).is_err() {
                    service.workspace.fail_stop.trip("a control connection panicked");
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
            return; // without a thread the connection is closed, which the peer sees
        }
        let Ok((stream, _)) = accepted else { return }; // the peer gave up, or descriptors ran out: others may come
        let stream = Arc::new(stream);
        match admit(&stream, &self.workspace, &self.places) {
            Ok(place) => {
                // A connection that breaks concerns its peer alone.
                let _ = serve_connection(&stream, place, &self.workspace, &self.info);
            }
            Err(refusal) => {
                tracing::warn!("a connection was refused: {refusal}");
                // A refusal leaves nothing half-done.
                let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
                refused.tell(stream, &reply(Err(refusal)));
            }
        }
    }
}

/// Lets a peer in: root, the daemon's user or the owner of the base, while there is a place.
fn admit(stream: &Arc<UnixStream>, workspace: &Workspace, places: &Places) -> Result<Place, Error> {
    let peer = rustix::net::sockopt::socket_peercred(stream).at("the control socket")?.uid.as_raw();
    let allowed = [0, rustix::process::geteuid().as_raw(), workspace.owner().0];
    if !allowed.contains(&peer) {
        return Err(Error::Usage(format!("user {peer} may not control this workspace")));
    }
    places.take(peer, stream).ok_or_else(|| {
        Error::Usage(format!(
            "user {peer} has {CONNECTIONS_MAX} connections with a request under way, or as many as the daemon's limit of open files allows; more are not taken"
        ))
    })
}

fn serve_connection(
    stream: &UnixStream,
    place: Place,
    workspace: &Workspace,
    info: &MountInfo,
) -> std::io::Result<()> {
    let mut connection = Connection::new(stream, place)?;
    loop {
        match connection.read()? {
            Line::Whole(line) => {
                let answer = answer(&line, workspace, info, &mut connection);
                connection.write(&reply(answer))?;
            }
            Line::End => return Ok(()),
            Line::Broken => {
                let error = Error::Usage(format!(
                    "a request is one line of at most {REQUEST_BYTES_MAX} bytes, sent in one go"
                ));
                return connection.write(&reply(Err(error)));
            }
        }
    }
}

fn reply(outcome: Result<Value, Error>) -> String {
    let value = match outcome {
        Ok(value) => json!({ "ok": value }),
        Err(error) => json!({ "error": {
            "kind": error.kind(),
            "message": error.to_string(),
            "hint": error.hint(),
            "path": error.path().map(path_text),
            "step": error.step(),
            "paths": error.paths().iter().map(|path| path_text(path)).collect::<Vec<_>>(),
        }}),
    };
    restore_surrogates(&value.to_string()) + "\n"
}

fn answer(
    line: &[u8],
    workspace: &Workspace,
    info: &MountInfo,
    connection: &mut Connection<'_>,
) -> Result<Value, Error> {
    let request: Request = serde_json::from_slice(line)
        .map_err(|error| Error::Usage(format!("the request cannot be read: {error}")))?;
    if request.v != Some(VERSION) {
        return Err(Error::Usage(format!("this daemon speaks version {VERSION} of the protocol")));
    }
    let verb = request.verb.clone();
    let branch = request.branch.clone().map_or(String::new(), |branch| format!(" {branch}"));
    let carry_out = || {
        panic_if_listed(&verb);
        carry_out(request, workspace, info, connection)
    };
    let outcome = catch_unwind(AssertUnwindSafe(carry_out)).unwrap_or_else(|_| {
        workspace.fail_stop.trip(format!("the request {verb}{branch} panicked"));
        Err(Error::Panicked(verb.clone()))
    });
    outcome.inspect_err(|error| match error.kind() {
        "io" | "corrupt" => tracing::error!("{verb}{branch} failed: {error}"),
        _ => tracing::info!("{verb}{branch} was refused: {error}"),
    })
}

fn carry_out(
    request: Request,
    workspace: &Workspace,
    info: &MountInfo,
    connection: &mut Connection<'_>,
) -> Result<Value, Error> {
    match request.verb.as_str() {
        "info" => Ok(describe(workspace, info)),
        "unmount" => workspace.unmount(&info.mountpoint).map(|()| json!({})),
        "create" => {
            let name =
                request.name.ok_or_else(|| Error::Usage("create needs a name".to_owned()))?;
            let parent = request.parent.map_or(Ok(Selector::Id(0)), |parent| selector(&parent))?;
            if request.disk_limit == Some(0) {
                return Err(Error::Usage("a disk limit is more than zero".to_owned()));
            }
            let branch = workspace.create_limited(&name, &parent, request.disk_limit)?;
            Ok(branch_object(&branch, workspace, info))
        }
        "commit" => {
            let branch = branch_of(request.branch.as_ref())?;
            let options = CommitOptions {
                force: request.force,
                dry_run: request.dry_run,
                policy: request.policy.as_deref().map(policy_named).transpose()?,
                skip: request.skip,
                rebase: request.rebase,
                selection: Selection::new(&request.only, &request.exclude)?,
                drop_rest: request.drop_rest,
            };
            let committed = workspace.commit(&branch, &options)?;
            let forgotten = committed.forgotten.iter();
            let forgotten: Vec<Value> = forgotten
                .map(|commit| json!({ "id": commit.id, "branch": commit.branch }))
                .collect();
            Ok(json!({
                "changes": changes(&committed.changes),
                "stale": committed.stale,
                "remaining": committed.remaining,
                "forgotten": forgotten,
            }))
        }
        "rebase" => {
            let branch = branch_of(request.branch.as_ref())?;
            let resolution = if request.force { Resolution::Override } else { Resolution::Refuse };
            let conflicts = workspace.rebase(&branch, resolution, request.dry_run)?;
            let conflicts: Vec<String> = conflicts.iter().map(|path| path_text(path)).collect();
            Ok(json!({ "conflicts": conflicts }))
        }
        "abort" => workspace.abort(&branch_of(request.branch.as_ref())?).map(|()| json!({})),
        "list" => {
            let object = |branch: &BranchInfo| branch_object(branch, workspace, info);
            let branches: Vec<Value> = workspace.list()?.iter().map(object).collect();
            Ok(json!({ "branches": branches }))
        }
        "diff" => comparison::diff(&request, workspace, connection),
        "export" => transfer::export(&request, workspace, connection),
        "import" => {
            let (made, has_record) = transfer::import(&request, workspace, connection)?;
            let mut object = branch_object(&made, workspace, info);
            object["has_base_record"] = json!(has_record);
            Ok(object)
        }
        "undo" | "redo" => {
            let towards = if request.verb == "undo" { Towards::Past } else { Towards::Future };
            let reverted = workspace.revert(towards, request.force, request.dry_run)?;
            Ok(json!({
                "entry": past_object(&reverted.entry),
                "changes": changes(&reverted.committed.changes),
                "stale": reverted.committed.stale,
            }))
        }
        "history" => {
            let entries: Vec<Value> = workspace.history()?.iter().map(past_object).collect();
            Ok(json!({ "entries": entries }))
        }
        "prune" => {
            let (removed, bytes) = workspace.prune(request.keep.unwrap_or(0))?;
            Ok(json!({ "removed": removed, "bytes": bytes }))
        }
        "requests" => {
            let counted = workspace.filesystem.requests().into_iter();
            Ok(counted.map(|(kind, count)| (kind.to_owned(), Value::from(count))).collect())
        }
        verb => Err(Error::Usage(format!("this daemon does not know the verb {verb:?}"))),
    }
}

fn describe(workspace: &Workspace, info: &MountInfo) -> Value {
    let (uid, gid) = workspace.owner();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "mountpoint": path_text(&info.mountpoint),
        "base": path_text(workspace.base()),
        "store": path_text(workspace.store()),
        "driver": info.driver,
        "why_not": info.why_not,
        "policy": info.policy.name(),
        "control_files": info.control_files,
        "features": FEATURES,
        "passthrough": feature(workspace.filesystem.passthrough()),
        "pid": std::process::id(),
        "uid": uid,
        "gid": gid,
    })
}

/// A feature of the mount: whether it is on, and why not.
fn feature(missing: &str) -> Value {
    if missing.is_empty() {
        json!({ "on": true, "reason": null })
    } else {
        json!({ "on": false, "reason": missing })
    }
}

fn branch_of(value: Option<&Value>) -> Result<Selector, Error> {
    selector(value.ok_or_else(|| Error::Usage("the request names no branch".to_owned()))?)
}

fn policy_named(name: &str) -> Result<Policy, Error> {
    <Policy as clap::ValueEnum>::from_str(name, false)
        .map_err(|_| Error::Usage(format!("{name:?} is no policy")))
}

fn selector(value: &Value) -> Result<Selector, Error> {
    match value {
        Value::String(name) => Ok(Selector::Name(name.clone())),
        Value::Number(id) => id
            .as_u64()
            .map(Selector::Id)
            .ok_or_else(|| Error::Usage(format!("{id} is not a branch id"))),
        other => Err(Error::Usage(format!("{other} is neither a branch's name nor its id"))),
    }
}

fn branch_object(branch: &BranchInfo, workspace: &Workspace, info: &MountInfo) -> Value {
    json!({
        "driver": workspace.driver_of(branch.id),
        "id": branch.id,
        "name": branch.name,
        "parent": branch.parent,
        "path": path_text(&info.mountpoint.join(directory_name(&branch.name))),
        "branch_path": branch.branch_path,
        "state": if branch.is_stale { "stale" } else { "live" },
        "frozen": branch.is_frozen,
        "created": branch.created,
        "disk_limit": branch.disk_limit,
        "disk_used": branch.disk_used,
        "disk_refusals": branch.disk_refusals,
    })
}

fn past_object(past: &PastInfo) -> Value {
    json!({
        "id": past.id,
        "branch": past.branch,
        "committed": past.committed,
        "undone": past.undone,
        "changes": past.changes,
        "bytes": past.bytes,
    })
}

fn changes(changes: &[Change]) -> Vec<Value> {
    let object = |change: &Change| {
        let mut value = json!({ "path": path_text(&change.path), "change": change.change, "kind": change.kind });
        if let Some(from) = &change.from {
            value["from"] = path_text(from).into();
        }
        value
    };
    changes.iter().map(object).collect()
}

/// First of the private-use characters that stand for a byte outside UTF-8 until the text is finished: the JSON library
/// cannot write the lone surrogates that the protocol uses.
const ESCAPED_BYTE: u32 = 0x10_FF00;

/// A path as text; bytes outside UTF-8 become marks that [`restore_surrogates`] turns into `\udcXX`.
fn path_text(path: &Path) -> String {
    let mut text = String::new();
    for chunk in OsStr::new(path).as_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(
            chunk
                .invalid()
                .iter()
                .filter_map(|byte| char::from_u32(ESCAPED_BYTE + u32::from(*byte))),
        );
    }
    text
}

fn restore_surrogates(text: &str) -> String {
    if !text.chars().any(|character| u32::from(character) >= ESCAPED_BYTE) {
        return text.to_owned();
    }
    let restore = |character: char| match u32::from(character).checked_sub(ESCAPED_BYTE) {
        Some(byte) if byte <= 0xff => format!("\\udc{byte:02x}"),
        _ => character.to_string(),
    };
    text.chars().map(restore).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_outside_utf8_are_lone_surrogates() {
        let path = Path::new(OsStr::from_bytes(b"a\xff/\xc3\xa9"));
        assert_eq!(restore_surrogates(&json!(path_text(path)).to_string()), "\"a\\udcff/\u{e9}\"");
    }
}
