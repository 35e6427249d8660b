//! Where upper and lower case are one: a file system of our own that is so, in all of it or in one directory.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::filesystem::BranchFilesystem;
use branchfs_core::error::Error;
use branchfs_core::layer::Layer;
use branchfs_core::mount::Mount;
use branchfs_core::path_filter::PathFilter;
use branchfs_core::rooted_dir::RootedDir;
use branchfs_core::workspace::{BranchRef, CommitOptions, Settings, Workspace};
use branchfs_fuse::{
    Attributes, Caller, Capabilities, DirectorySink, Entry, Filesystem, FsResult, Handle, NodeId,
    OpenFlags, OpenReply, SetAttr, Statfs,
};
use branchfs_fuse::{MountOptions, Session};

/// A directory as it is, but for case.
struct Folding {
    inner: BranchFilesystem,
    /// Directories of this name say that they do not tell cases apart; without one, nothing does.
    only: Option<&'static str>,
    marked: Mutex<HashSet<NodeId>>,
}

impl Folding {
    /// The name that is meant. That of a store must be another one: main shows none.
    fn name(&self, name: &OsStr) -> OsString {
        match name.to_str() {
            Some(".branching") => OsString::from("store"),
            Some(text) if self.only.is_none() => OsString::from(text.to_lowercase()),
            _ => name.to_os_string(),
        }
    }
}

/// Attributes of layers are others here: a mount of ours shows none.
fn attribute(name: &OsStr) -> OsString {
    let name = name.to_str().unwrap();
    OsString::from(name.replace("trusted.", "trusted.folding-"))
}

/// Requests that name no object by a name.
macro_rules! passed_on {
    ($($request:ident($($given:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(fn $request(&self, $($given: $type),*) -> $answer {
            Filesystem::$request(&self.inner, $($given),*)
        })*
    };
}

impl Filesystem for Folding {
    passed_on! {
        init(capabilities: &Capabilities) -> ();
        forget(node: NodeId, count: u64) -> ();
        getattr(node: NodeId, handle: Option<Handle>) -> FsResult<(Attributes, Duration)>;
        setattr(caller: &Caller, node: NodeId, changes: &SetAttr) -> FsResult<(Attributes, Duration)>;
        readlink(node: NodeId) -> FsResult<Vec<u8>>;
        open(caller: &Caller, node: NodeId, flags: OpenFlags) -> FsResult<OpenReply>;
        read(node: NodeId, handle: Handle, offset: u64, buffer: &mut [u8]) -> FsResult<usize>;
        write(node: NodeId, handle: Handle, offset: u64, data: &[u8], kill: bool) -> FsResult<usize>;
        release(node: NodeId, handle: Handle) -> ();
        fsync(node: NodeId, handle: Handle, data_only: bool) -> FsResult<()>;
        lseek(node: NodeId, handle: Handle, offset: u64, whence: u32) -> FsResult<u64>;
        readdir(
            caller: &Caller, node: NodeId, offset: u64, plus: bool, sink: &mut dyn DirectorySink
        ) -> FsResult<()>;
        fsyncdir(node: NodeId, data_only: bool) -> FsResult<()>;
        statfs(node: NodeId) -> FsResult<Statfs>;
        syncfs(node: NodeId) -> FsResult<()>;
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        let entry = self.inner.lookup(caller, parent, &self.name(name))?;
        if let Some(node) = entry.node.filter(|_| self.only.is_some_and(|only| name == only)) {
            self.marked.lock().unwrap().insert(node);
        }
        Ok(entry)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: (u32, u32),
    ) -> FsResult<Entry> {
        self.inner.mknod(caller, parent, &self.name(name), mode, umask, rdev)
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
    ) -> FsResult<Entry> {
        self.inner.mkdir(caller, parent, &self.name(name), mode, umask)
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> FsResult<Entry> {
        self.inner.symlink(caller, parent, &self.name(name), target)
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        self.inner.unlink(caller, parent, &self.name(name))
    }

    fn rmdir(&self, caller: &Caller, parent: NodeId, name: &OsStr) -> FsResult<()> {
        self.inner.rmdir(caller, parent, &self.name(name))
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        new_parent: NodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> FsResult<()> {
        let (name, new_name) = (self.name(name), self.name(new_name));
        self.inner.rename(caller, parent, &name, new_parent, &new_name, flags)
    }

    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        self.inner.link(caller, node, parent, &self.name(name))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: OpenFlags,
    ) -> FsResult<(Entry, OpenReply)> {
        self.inner.create(caller, parent, &self.name(name), mode, umask, flags)
    }

    fn getxattr(&self, node: NodeId, name: &OsStr) -> FsResult<Vec<u8>> {
        self.inner.getxattr(node, &attribute(name))
    }

    fn setxattr(
        &self,
        caller: &Caller,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> FsResult<()> {
        self.inner.setxattr(caller, node, &attribute(name), value, flags, acl_kill_sgid)
    }

    fn listxattr(&self, node: NodeId) -> FsResult<Vec<u8>> {
        let names = String::from_utf8(self.inner.listxattr(node)?).unwrap();
        Ok(names.replace("trusted.folding-", "trusted.").into_bytes())
    }

    fn removexattr(&self, caller: &Caller, node: NodeId, name: &OsStr) -> FsResult<()> {
        self.inner.removexattr(caller, node, &attribute(name))
    }

    fn ioctl(&self, node: NodeId, command: u32) -> FsResult<Vec<u8>> {
        const GETFLAGS: u32 = 0x8008_6601;
        const CASEFOLD: u32 = 0x4000_0000;
        if command != GETFLAGS {
            return Err(Errno::NOTTY);
        }
        let is_marked = self.marked.lock().unwrap().contains(&node);
        Ok(if is_marked { CASEFOLD } else { 0 }.to_ne_bytes().to_vec())
    }
}

/// Such a file system, mounted over an empty directory.
struct Base {
    _directory: tempfile::TempDir,
    mountpoint: PathBuf,
    serving: Option<JoinHandle<()>>,
}

impl Base {
    fn new(only: Option<&'static str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (inside, mountpoint) = (directory.path().join("inside"), directory.path().join("base"));
        fs::create_dir(&inside).unwrap();
        fs::create_dir(&mountpoint).unwrap();
        let layer = Layer::base(RootedDir::open_root(&inside).unwrap());
        let inner = BranchFilesystem::new(Arc::new(Mount::new(Arc::new(layer))));
        let handler: Arc<dyn Filesystem> =
            Arc::new(Folding { inner, only, marked: Mutex::default() });
        let session = Session::mount(
            &mountpoint,
            &MountOptions { source: &inside, subtype: "branchfs", passthrough_depth: None },
        )
        .unwrap();
        let serving = std::thread::spawn(move || session.serve(&handler, 2).unwrap());
        Self { _directory: directory, mountpoint, serving: Some(serving) }
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        branchfs_fuse::unmount(&self.mountpoint, true).unwrap();
        let _ = self.serving.take().map(JoinHandle::join);
    }
}

#[test]
fn a_base_in_which_upper_and_lower_case_are_one_is_refused_and_left_as_it_was() {
    let base = Base::new(None);
    fs::write(base.mountpoint.join("File"), "").unwrap();
    assert!(base.mountpoint.join("FILE").exists(), "the file system is one to test with");
    let Err(refused) = Workspace::open(&base.mountpoint, None, Settings::default()) else {
        panic!("it was mounted")
    };
    assert!(refused.to_string().contains("does not distinguish upper and lower case"), "{refused}");
    let left: Vec<OsString> =
        fs::read_dir(&base.mountpoint).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["file"]);
}

#[test]
fn changes_in_a_directory_in_which_upper_and_lower_case_are_one_are_refused_at_the_commit() {
    let base = Base::new(Some("folding"));
    fs::create_dir_all(base.mountpoint.join("d/folding")).unwrap();
    fs::write(base.mountpoint.join("d/folding/file"), "old").unwrap();
    fs::write(base.mountpoint.join("other"), "old").unwrap();
    let workspace = Workspace::open(&base.mountpoint, None, Settings::default()).unwrap();
    let flags = rustix::fs::open(
        base.mountpoint.join("d/folding"),
        OFlags::RDONLY | OFlags::DIRECTORY,
        rustix::fs::Mode::empty(),
    );
    let flags = rustix::fs::ioctl_getflags(flags.unwrap()).unwrap();
    assert_eq!(flags.bits(), 0x4000_0000, "the file system is one to test with");
    let branch = workspace.create("one", &BranchRef::Id(0)).unwrap();
    workspace.mount().mounted(1).unwrap().lock().tree.make_layer().unwrap();
    let upper = workspace.store().join("layers").join(branch.id.to_string()).join("upper");
    fs::create_dir_all(upper.join("d/folding")).unwrap();
    fs::write(upper.join("d/folding/FILE"), "new").unwrap();
    fs::write(upper.join("added"), "new").unwrap();
    let one = BranchRef::Name("one".to_owned());
    let refused = workspace.commit(&one, &CommitOptions::default()).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(_)), "{refused:?}");
    assert!(refused.to_string().contains("d/folding"), "{refused}");
    assert!(!base.mountpoint.join("added").exists(), "nothing of it was committed");
    let selection = PathFilter::new(&[], &["d/folding".to_owned()]).unwrap();
    let options = CommitOptions { selection, ..CommitOptions::default() };
    workspace.commit(&one, &options).unwrap();
    assert_eq!(fs::read_to_string(base.mountpoint.join("added")).unwrap(), "new");
    assert!(!base.mountpoint.join("d/folding/FILE").exists());
}
