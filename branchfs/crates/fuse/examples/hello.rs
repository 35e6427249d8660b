//! An in-memory filesystem: one directory that you can write files into. It starts with the file `hello`.
//!
//! ```sh
//! mkdir /tmp/hello
//! cargo run --example hello /tmp/hello &
//! cat /tmp/hello/hello
//! umount /tmp/hello
//! ```

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use branchfs_fuse::{
    Attributes, Caller, DirectorySink, Entry, FOREVER, Filesystem, FsResult, Handle, MountOptions,
    NodeId, OpenFlags, OpenReply, Session, SetAttr, SetTime, Time,
};
use rustix::io::Errno;

const ROOT: NodeId = NodeId(1);

/// Inode numbers are the node ids plus this: the two are independent.
const INO_OFFSET: u64 = 1000;

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const DT_DIR: u8 = 4;
const DT_REG: u8 = 8;

/// The filesystem. All methods take the one lock.
struct Hello {
    state: Mutex<State>,
}

struct State {
    files: BTreeMap<u64, File>,
    names: BTreeMap<OsString, u64>,
    next: u64,
}

struct File {
    content: Vec<u8>,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: Time,
    /// References of the kernel. A file without a name is freed with the last one.
    lookups: u64,
    nlink: u32,
}

impl Hello {
    fn new() -> Self {
        let mut state = State { files: BTreeMap::new(), names: BTreeMap::new(), next: ROOT.0 + 1 };
        let hello = state.create("hello".into(), 0o644, 0, 0);
        state.files.entry(hello).and_modify(|file| file.content = b"Hello, world!\n".to_vec());
        Self { state: Mutex::new(state) }
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> FsResult<T>) -> FsResult<T> {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl State {
    fn create(&mut self, name: OsString, mode: u32, uid: u32, gid: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let mode = mode & 0o7777;
        let file = File { content: Vec::new(), mode, uid, gid, mtime: now(), lookups: 0, nlink: 1 };
        self.files.insert(id, file);
        self.names.insert(name, id);
        id
    }

    fn file(&mut self, node: NodeId) -> FsResult<&mut File> {
        self.files.get_mut(&node.0).ok_or(if node == ROOT { Errno::ISDIR } else { Errno::STALE })
    }

    fn attributes(&mut self, node: NodeId) -> FsResult<Attributes> {
        let blank = Attributes {
            ino: node.0 + INO_OFFSET,
            size: 0,
            blocks: 0,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time::default(),
            mode: S_IFDIR | 0o777,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            block_size: 4096,
        };
        if node == ROOT {
            return Ok(blank);
        }
        let file = self.file(node)?;
        let size = file.content.len() as u64;
        Ok(Attributes {
            size,
            blocks: size.div_ceil(512),
            atime: file.mtime,
            mtime: file.mtime,
            ctime: file.mtime,
            mode: S_IFREG | file.mode,
            nlink: file.nlink,
            uid: file.uid,
            gid: file.gid,
            ..blank
        })
    }

    /// The reply that gives the kernel a node.
    fn entry(&mut self, id: u64) -> FsResult<Entry> {
        let attributes = Some(self.attributes(NodeId(id))?);
        self.file(NodeId(id))?.lookups += 1;
        let node = Some(NodeId(id));
        Ok(Entry { node, generation: 0, entry_ttl: FOREVER, attributes_ttl: FOREVER, attributes })
    }

    fn free_if_unused(&mut self, id: u64) {
        if self.files.get(&id).is_some_and(|file| file.nlink == 0 && file.lookups == 0) {
            self.files.remove(&id);
        }
    }
}

impl Filesystem for Hello {
    fn lookup(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        self.with(|state| {
            let id = *state.names.get(name).filter(|_| parent == ROOT).ok_or(Errno::NOENT)?;
            state.entry(id)
        })
    }

    fn forget(&self, node: NodeId, count: u64) {
        // The root is no file: it is never freed.
        let _ = self.with(|state| {
            let file = state.file(node)?;
            file.lookups = file.lookups.saturating_sub(count);
            state.free_if_unused(node.0);
            Ok(())
        });
    }

    fn getattr(&self, node: NodeId, _: Option<Handle>) -> FsResult<(Attributes, Duration)> {
        self.with(|state| Ok((state.attributes(node)?, FOREVER)))
    }

    fn setattr(
        &self,
        _caller: &Caller,
        node: NodeId,
        changes: &SetAttr,
    ) -> FsResult<(Attributes, Duration)> {
        self.with(|state| {
            let file = state.file(node)?;
            file.mode = changes.mode.map_or(file.mode, |mode| mode & 0o7777);
            file.uid = changes.uid.unwrap_or(file.uid);
            file.gid = changes.gid.unwrap_or(file.gid);
            if let Some(size) = changes.size {
                file.content.resize(usize::try_from(size).map_err(|_| Errno::FBIG)?, 0);
                file.mtime = now();
            }
            match changes.mtime {
                Some(SetTime::Now) => file.mtime = now(),
                Some(SetTime::At(time)) => file.mtime = time,
                None => {}
            }
            Ok((state.attributes(node)?, FOREVER))
        })
    }

    fn open(&self, _caller: &Caller, node: NodeId, _flags: OpenFlags) -> FsResult<OpenReply> {
        self.with(|state| state.file(node).map(|_| OpenReply::default()))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        self.with(|state| {
            if parent != ROOT {
                return Err(Errno::NOTDIR);
            }
            let id = state.create(name.to_owned(), mode & !umask, caller.uid, caller.gid);
            Ok((state.entry(id)?, OpenReply::default()))
        })
    }

    fn unlink(&self, _caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        self.with(|state| {
            let removed = if parent == ROOT { state.names.remove(name) } else { None };
            let id = removed.ok_or(Errno::NOENT)?;
            state.file(NodeId(id))?.nlink = 0;
            state.free_if_unused(id);
            Ok(())
        })
    }

    fn read(&self, node: NodeId, _: Handle, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        self.with(|state| {
            let content = &state.file(node)?.content;
            let start = usize::try_from(offset).map_or(content.len(), |at| at.min(content.len()));
            let count = buffer.len().min(content.len() - start);
            buffer[..count].copy_from_slice(&content[start..start + count]);
            Ok(count)
        })
    }

    fn write(
        &self,
        node: NodeId,
        _handle: Handle,
        offset: u64,
        data: &[u8],
        _kill_privileges: bool,
    ) -> FsResult<usize> {
        self.with(|state| {
            let file = state.file(node)?;
            let start = usize::try_from(offset).map_err(|_| Errno::FBIG)?;
            let end = start.checked_add(data.len()).ok_or(Errno::FBIG)?;
            if file.content.len() < end {
                file.content.resize(end, 0);
            }
            file.content[start..end].copy_from_slice(data);
            file.mtime = now();
            Ok(data.len())
        })
    }

    fn readdir(
        &self,
        _caller: &Caller,
        node: NodeId,
        offset: u64,
        plus: bool,
        sink: &mut dyn DirectorySink,
    ) -> FsResult<()> {
        self.with(|state| {
            if node != ROOT {
                return Err(Errno::NOTDIR);
            }
            let dots = [".", ".."].map(|name| (OsString::from(name), ROOT.0));
            let files = state.names.iter().map(|(name, id)| (name.clone(), *id));
            let entries: Vec<_> = dots.into_iter().chain(files).collect();
            for (position, (name, id)) in (1_u64..).zip(entries).filter(|(at, _)| *at > offset) {
                let (ino, kind) = (id + INO_OFFSET, if id == ROOT.0 { DT_DIR } else { DT_REG });
                let fits = if !plus {
                    sink.push(ino, position, kind, &name)
                } else if sink.has_room(&name) {
                    let ttl = Duration::ZERO;
                    let (entry_ttl, attributes_ttl) = (ttl, ttl);
                    let dots = Entry {
                        node: None,
                        generation: 0,
                        entry_ttl,
                        attributes_ttl,
                        attributes: None,
                    };
                    let entry = if id == ROOT.0 { dots } else { state.entry(id)? };
                    sink.push_plus(&entry, ino, position, kind, &name)
                } else {
                    false
                };
                if !fits {
                    break;
                }
            }
            Ok(())
        })
    }
}

fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Time { seconds, nanoseconds: since.subsec_nanos() }
}

/// Mounts a new filesystem and serves it until it is unmounted.
pub(crate) fn mount(mountpoint: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let options =
        MountOptions { source: Path::new("hello"), subtype: "hello", passthrough_depth: None };
    let session = Session::mount(mountpoint, &options)?;
    let filesystem: Arc<dyn Filesystem> = Arc::new(Hello::new());
    Ok(session.serve(&filesystem, 2)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mountpoint: PathBuf = std::env::args_os().nth(1).ok_or("usage: hello MOUNTPOINT")?.into();
    mount(&mountpoint)
}
