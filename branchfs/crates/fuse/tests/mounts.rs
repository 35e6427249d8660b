//! Real mounts: of the example, and of a filesystem with one file that the test controls. They need `/dev/fuse` and root.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use branchfs_fuse::{
    Attributes, Caller, Entry, FOREVER, Filesystem, FsResult, Handle, KernelNotifier, MountOptions,
    NodeId, OpenFlags, OpenReply, Session, Time, unmount,
};
use rustix::io::Errno;
use tempfile::TempDir;

#[path = "../examples/hello.rs"]
#[expect(dead_code, reason = "the main function of the example")]
mod hello;

/// The mount table's line of a mountpoint: source, mountpoint, type.
fn mount_line(mountpoint: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let mountpoint = format!(" {} ", mountpoint.display());
    table.lines().find(|line| line.contains(&mountpoint)).map(str::to_owned)
}

/// A mount of the example.
struct Hello {
    mountpoint: TempDir,
    serving: Option<JoinHandle<()>>,
}

impl Hello {
    fn new() -> Self {
        let mountpoint = TempDir::new().unwrap();
        let path = mountpoint.path().to_owned();
        let serving = std::thread::spawn(move || hello::mount(&path).unwrap());
        while mount_line(mountpoint.path()).is_none() {
            assert!(!serving.is_finished(), "the mount failed");
            std::thread::yield_now();
        }
        Self { mountpoint, serving: Some(serving) }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.mountpoint.path().join(name)
    }
}

impl Drop for Hello {
    fn drop(&mut self) {
        unmount(self.mountpoint.path(), true).unwrap();
        self.serving.take().unwrap().join().unwrap();
    }
}

#[test]
fn the_mount_table_shows_source_and_subtype() {
    let mount = Hello::new();
    let line = mount_line(mount.mountpoint.path()).unwrap();
    assert!(line.starts_with("hello ") && line.contains(" fuse.hello "), "{line}");
}

#[test]
fn a_file_is_created_written_truncated_listed_and_removed() {
    let mount = Hello::new();
    assert_eq!(fs::read_to_string(mount.path("hello")).unwrap(), "Hello, world!\n");
    let big: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    fs::write(mount.path("big"), &big).unwrap();
    assert_eq!(fs::read(mount.path("big")).unwrap(), big);
    let file = fs::OpenOptions::new().write(true).open(mount.path("big")).unwrap();
    file.set_len(5).unwrap();
    assert_eq!(fs::read(mount.path("big")).unwrap(), [0, 1, 2, 3, 4]);
    fs::set_permissions(mount.path("big"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(mount.path("big")).unwrap().permissions().mode(), 0o100_600);
    let names = || -> Vec<_> {
        let entries = fs::read_dir(mount.mountpoint.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(), ["big", "hello"]);
    fs::remove_file(mount.path("big")).unwrap();
    assert_eq!(names(), ["hello"]);
    let missing = fs::read(mount.path("big")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

#[test]
fn an_inode_number_differs_from_its_node_id() {
    let mount = Hello::new();
    assert_eq!(fs::metadata(mount.path("")).unwrap().ino(), 1001);
    assert_eq!(fs::metadata(mount.path("hello")).unwrap().ino(), 1002);
    let listed = fs::read_dir(mount.path("")).unwrap().next().unwrap().unwrap();
    assert_eq!(std::os::unix::fs::DirEntryExt::ino(&listed), 1002);
}

#[test]
fn an_open_file_survives_its_name() {
    let mount = Hello::new();
    let mut file = fs::OpenOptions::new().read(true).write(true).open(mount.path("hello")).unwrap();
    fs::remove_file(mount.path("hello")).unwrap();
    file.write_all(b"J").unwrap();
    file.rewind().unwrap();
    let mut content = String::new();
    file.read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), file.metadata().unwrap().nlink()), ("Jello, world!\n", 0));
}

#[test]
fn a_method_that_is_not_overridden_replies_enosys() {
    let mount = Hello::new();
    let error = fs::create_dir(mount.path("directory")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::NOSYS.raw_os_error()));
}

/// A filesystem with the file `file`, which the kernel caches until it is notified.
#[derive(Default)]
struct OneFile {
    content: Mutex<String>,
    panics: AtomicBool,
    panicked: AtomicUsize,
    received: Mutex<Vec<&'static str>>,
}

impl OneFile {
    fn attributes(&self, node: NodeId) -> Attributes {
        let (mode, size) = match node {
            NodeId(1) => (0o040_755, 0),
            _ => (0o100_644, self.content.lock().unwrap().len() as u64),
        };
        let zero = Time::default();
        Attributes {
            ino: node.0,
            size,
            blocks: 0,
            atime: zero,
            mtime: zero,
            ctime: zero,
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            block_size: 4096,
        }
    }
}

impl Filesystem for OneFile {
    fn lookup(&self, _caller: &Caller, _parent: NodeId, name: &OsStr) -> FsResult<Entry> {
        let node =
            (name == "file" && !self.content.lock().unwrap().is_empty()).then_some(NodeId(2));
        let attributes = node.map(|node| self.attributes(node));
        Ok(Entry { node, generation: 0, entry_ttl: FOREVER, attributes_ttl: FOREVER, attributes })
    }

    fn getattr(&self, node: NodeId, _: Option<Handle>) -> FsResult<(Attributes, Duration)> {
        Ok((self.attributes(node), FOREVER))
    }

    fn open(&self, _caller: &Caller, _node: NodeId, _flags: OpenFlags) -> FsResult<OpenReply> {
        assert!(!self.panics.load(Ordering::Relaxed), "an injected panic");
        Ok(OpenReply { keep_cache: true, ..OpenReply::default() })
    }

    fn read(&self, _: NodeId, _: Handle, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let content = self.content.lock().unwrap();
        let rest = content.as_bytes().get(usize::try_from(offset).unwrap()..).unwrap_or(&[]);
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn panicked(&self) {
        self.panicked.fetch_add(1, Ordering::Relaxed);
    }

    fn request_received(&self, name: &'static str) {
        self.received.lock().unwrap().push(name);
    }
}

/// Runs `test` with the mountpoint of a [`OneFile`] and its notifier.
fn with_one_file(content: &str, test: impl FnOnce(&OneFile, &Path, &dyn KernelNotifier)) {
    let directory = TempDir::new().unwrap();
    let options =
        MountOptions { source: Path::new("one"), subtype: "one-file", passthrough_depth: None };
    let session = Session::mount(directory.path(), &options).unwrap();
    let notifier = session.notifier();
    let one = Arc::new(OneFile { content: Mutex::new(content.to_owned()), ..OneFile::default() });
    let filesystem: Arc<dyn Filesystem> = one.clone();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| session.serve(&filesystem, 2));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            test(&one, directory.path(), &*notifier);
        }));
        unmount(directory.path(), true).unwrap();
        serving.join().unwrap().unwrap();
        outcome.unwrap();
    });
}

#[test]
fn cached_content_is_read_again_after_an_invalidation() {
    with_one_file("before", |one, mountpoint, notifier| {
        let read = || fs::read_to_string(mountpoint.join("file")).unwrap();
        assert_eq!(read(), "before");
        "behind".clone_into(&mut one.content.lock().unwrap());
        assert_eq!(read(), "before", "the kernel caches the content");
        notifier.invalidate_node(NodeId(2)).unwrap();
        assert_eq!(read(), "behind");
    });
}

#[test]
fn a_negative_entry_is_cached_until_it_is_invalidated() {
    with_one_file("", |one, mountpoint, notifier| {
        let exists = || mountpoint.join("file").exists();
        assert!(!exists());
        "now".clone_into(&mut one.content.lock().unwrap());
        assert!(!exists(), "the kernel caches the negative entry");
        notifier.invalidate_entry(NodeId(1), OsStr::new("file")).unwrap();
        assert!(exists());
        notifier.invalidate_entry(NodeId(1), OsStr::new("unknown")).unwrap();
    });
}

#[test]
fn a_panic_is_eio_and_the_session_continues() {
    with_one_file("content", |one, mountpoint, _notifier| {
        one.panics.store(true, Ordering::Relaxed);
        let error = fs::read(mountpoint.join("file")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
        assert_eq!(one.panicked.load(Ordering::Relaxed), 1);
        one.panics.store(false, Ordering::Relaxed);
        assert_eq!(fs::read_to_string(mountpoint.join("file")).unwrap(), "content");
    });
}

#[test]
fn every_request_is_counted_and_reported_by_its_name() {
    with_one_file("content", |one, mountpoint, notifier| {
        let lookups = || {
            let counts = notifier.request_counts();
            counts.iter().find(|(name, _)| *name == "lookup").map_or(0, |(_, count)| *count)
        };
        assert_eq!(lookups(), 0);
        assert!(!mountpoint.join("other").exists());
        assert_eq!(lookups(), 1);
        assert!(one.received.lock().unwrap().contains(&"lookup"));
    });
}
