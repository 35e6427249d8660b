//! A real mount over a scratch directory, and whole-tree snapshots to compare.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "test code")]

pub mod disk;
pub mod hold;
pub mod mapping;
pub mod recorder;
pub mod work;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_branchfs");

/// What presents the branches: `tests/overlay.rs` holds the other test files as modules, and runs them over overlayfs.
pub fn driver() -> &'static str {
    if module_path!().starts_with("overlay::") { "overlay" } else { "fuse" }
}

/// A base and its mount; unmounted and removed at the end.
pub struct Mount {
    pub directory: tempfile::TempDir,
    /// On another file system than the base, for `tests/external_store.rs`.
    elsewhere: Option<tempfile::TempDir>,
    /// From this size on a file is big, where it is not 16 MiB.
    big_file_bytes: Option<u64>,
}

impl Mount {
    /// Mounts an empty base.
    pub fn new() -> Self {
        Self::over(|_| ())
    }

    /// Mounts a base that `fill` has filled.
    pub fn over(fill: impl FnOnce(&Path)) -> Self {
        let mount = Self::unmounted(fill);
        mount.mount();
        mount
    }

    /// Mounts a base that `fill` has filled, with options of `mount`.
    pub fn with(options: &[&str], fill: impl FnOnce(&Path)) -> Self {
        let mount = Self::unmounted(fill);
        mount.mount_with(options);
        mount
    }

    /// A base that `fill` has filled, to be mounted in the test's own way.
    pub fn unmounted(fill: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let is_elsewhere = module_path!().starts_with("external_store::");
        let elsewhere = is_elsewhere.then(|| tempfile::tempdir_in("/dev/shm").unwrap());
        let mount = Self { directory, elsewhere, big_file_bytes: None };
        fs::create_dir(mount.base()).unwrap();
        fs::create_dir(mount.mountpoint()).unwrap();
        fill(&mount.base());
        mount
    }

    /// Lets the daemon take files of this size for big ones (semantics.md) at the next mount.
    pub fn with_big_files_from(mut self, bytes: u64) -> Self {
        self.big_file_bytes = Some(bytes);
        self
    }

    pub fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    /// Where records and layers are.
    pub fn store(&self) -> PathBuf {
        let elsewhere = self.elsewhere.as_ref().map(|place| place.path().join("store"));
        elsewhere.unwrap_or_else(|| self.base().join(".branching"))
    }

    pub fn mountpoint(&self) -> PathBuf {
        self.directory.path().join("mount")
    }

    pub fn branch(&self, name: &str) -> PathBuf {
        self.mountpoint().join(format!("@{name}"))
    }

    pub fn mount(&self) {
        self.mount_with(&[]);
    }

    /// Mounts with more options. The daemon of an earlier mount goes on while a program that was started meanwhile has a
    /// copy of that mount in a mount namespace of its own: that is waited for.
    pub fn mount_with(&self, options: &[&str]) {
        let words = self.mount_words(options);
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let start = Instant::now();
        loop {
            let output = self.run(&words, &[]);
            let said = String::from_utf8_lossy(&output.stderr);
            if !said.contains("copies of its mount in other") || start.elapsed() > WAIT_MAX {
                return succeed(&output);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The store is clean. The mount is unmounted, and its daemon ends.
    pub fn assert_clean_store(&self, when: &str) {
        let check = || Command::new(PROGRAM).arg("fsck").arg(self.base()).output().unwrap();
        wait_until("the store is free", || {
            !String::from_utf8_lossy(&check().stderr).contains("is in use")
        });
        let found = check();
        let said = [&found.stdout[..], &found.stderr[..]].concat();
        let status = found.status;
        assert!(status.success(), "{when}: fsck, {status}: {}", String::from_utf8_lossy(&said));
    }

    /// The words with which `branchfs` mounts, but for the mountpoint.
    pub fn mount_words(&self, options: &[&str]) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["mount".into(), "--driver".into(), driver().into()];
        if self.elsewhere.is_some() {
            words.extend(["--store".into(), self.store().into_os_string()]);
        }
        words.extend(options.iter().map(OsString::from));
        words.extend(["--base".into(), self.base().into_os_string()]);
        words
    }

    /// Unmounts. A process that another test of this program is about to start has copies of our open files for a
    /// moment: that is waited for.
    pub fn unmount(&self) {
        let start = Instant::now();
        loop {
            let output = self.run(&["unmount"], &[]);
            let in_use = String::from_utf8_lossy(&output.stderr).contains("is in use");
            if !in_use || start.elapsed() > WAIT_MAX {
                return succeed(&output);
            }
            std::thread::yield_now();
        }
    }

    pub fn control_socket(&self) -> PathBuf {
        let mut value = [0; 4096];
        let read = rustix::fs::getxattr(self.mountpoint(), "user.branchfs.control", &mut value[..])
            .unwrap();
        PathBuf::from(std::ffi::OsStr::from_bytes(&value[..read]))
    }

    /// The mount's daemon, by the name of its control socket.
    pub fn daemon(&self) -> i32 {
        self.control_socket().file_stem().unwrap().to_str().unwrap().parse().unwrap()
    }

    /// What the daemon answers to a verb that takes nothing.
    pub fn ask(&self, verb: &str) -> serde_json::Value {
        self.request(&serde_json::json!({"v": 1, "verb": verb}))
    }

    /// What the daemon answers to a request.
    pub fn request(&self, request: &serde_json::Value) -> serde_json::Value {
        let mut stream = std::os::unix::net::UnixStream::connect(self.control_socket()).unwrap();
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let line = line.replace("\\udc", "\\\\udc"); // bytes outside UTF-8
        serde_json::from_str::<serde_json::Value>(&line).unwrap()["ok"].clone()
    }

    /// How many requests of a kind the kernel has sent.
    pub fn requests(&self, kind: &str) -> u64 {
        self.ask("requests")[kind].as_u64().unwrap_or(0)
    }

    /// `kill -9` of the daemon; the dead mount is taken away.
    pub fn kill(&self) {
        self.kill_alone();
        self.take_away();
    }

    /// Takes a mount away whose daemon is dead.
    pub fn take_away(&self) {
        rustix::mount::unmount(self.mountpoint(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }

    /// `kill -9` of the daemon.
    pub fn kill_alone(&self) {
        kill_daemon(self.daemon());
    }

    /// Runs the program with words, paths, and the mountpoint last.
    pub fn run(&self, words: &[&str], paths: &[&Path]) -> Output {
        let mut command = Command::new(PROGRAM);
        command.args(words).args(paths).arg(self.mountpoint()).stdin(Stdio::null());
        if let Some(bytes) = self.big_file_bytes {
            command.env("BRANCHFS_BIG_FILE_BYTES", bytes.to_string());
        }
        command.output().unwrap()
    }

    pub fn create(&self, name: &str) -> PathBuf {
        succeed(&self.run(&["create", name], &[]));
        self.branch(name)
    }

    pub fn create_below(&self, parent: &str, name: &str) -> PathBuf {
        succeed(&self.run(&["create", "--parent", parent, name], &[]));
        self.branch(name)
    }

    pub fn commit(&self, name: &str) {
        succeed(&self.run(&["commit", name], &[]));
    }

    pub fn abort(&self, name: &str) {
        succeed(&self.run(&["abort", name], &[]));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A test that failed may have left anything: the mount goes whatever it takes.
        let _ = Command::new(PROGRAM).arg("unmount").arg(self.mountpoint()).output();
        let _ = rustix::mount::unmount(self.mountpoint(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// `kill -9` of a daemon, by its number; returns when it is gone.
pub fn kill_daemon(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let waiter = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let mut poll = [rustix::event::PollFd::new(&waiter, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut poll, None).unwrap();
    let _ = fs::remove_file(format!("/run/branchfs/{}.sock", pid.as_raw_nonzero()));
}

/// The processes that a process has started.
fn children(process: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).unwrap() {
        let list = fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
        found.extend(list.split_whitespace().map(|one| one.parse::<i32>().unwrap()));
    }
    found
}

/// The guard of a mount's daemon: its only child, which it starts when the mount answers.
pub fn guard_of(mount: &Mount) -> i32 {
    let mut found = Vec::new();
    wait_until("the guard starts", || {
        found = children(mount.daemon());
        found.len() == 1 && is_guard(found[0])
    });
    found[0]
}

fn is_guard(process: i32) -> bool {
    let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).contains("--guard")
}

/// Kills the guard of a mount's daemon, so that nothing recovers when the daemon dies.
pub fn kill_guard(mount: &Mount) {
    let guard = rustix::process::Pid::from_raw(guard_of(mount)).unwrap();
    let waiter = rustix::process::pidfd_open(guard, rustix::process::PidfdFlags::empty()).unwrap();
    rustix::process::kill_process(guard, rustix::process::Signal::KILL).unwrap();
    let mut poll = [rustix::event::PollFd::new(&waiter, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut poll, None).unwrap();
}

/// A copy of the program in a directory that other users can reach: the source tree may be in a home directory.
///
/// Another process writes the copy. If this one did, a child that another test is about to start could hold the file
/// open for writing, and the copy could not be executed (`ETXTBSY`).
pub fn program_for_others(directory: &Path) -> PathBuf {
    let copy = directory.join("branchfs");
    succeed(&Command::new("cp").arg(PROGRAM).arg(&copy).output().unwrap());
    copy
}

/// How often something random is tried: few times in every run, many times in `scripts/test --soak`.
pub fn rounds(usual: usize, soak: usize) -> usize {
    if std::env::var_os("BRANCHFS_SOAK").is_some() { soak } else { usual }
}

/// When a soak of one test ends early: `BRANCHFS_SOAK_SECONDS` after this call. It is tested between its rounds.
pub fn soak_deadline() -> Option<Instant> {
    let seconds = std::env::var("BRANCHFS_SOAK_SECONDS").ok()?.parse().unwrap();
    Some(Instant::now() + Duration::from_secs(seconds))
}

/// How many rounds of each test a soak leaves out at first (`BRANCHFS_SOAK_SKIP`): those of an earlier soak that ended
/// early.
pub fn soak_skip() -> usize {
    std::env::var("BRANCHFS_SOAK_SKIP").map_or(0, |count| count.parse().unwrap())
}

/// For a condition that never comes true; a loaded machine may need many times as long as an idle one.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// Waits for a condition that must come true.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WAIT_MAX, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// File times move in ticks: what is changed in the tick of the commit's end could not be told from it.
pub fn wait_for_the_clock(directory: &Path) {
    let probe = directory.with_extension("probe");
    let time = || {
        fs::write(&probe, "").unwrap();
        let metadata = fs::metadata(&probe).unwrap();
        (metadata.ctime(), metadata.ctime_nsec())
    };
    let first = time();
    wait_until("the clock goes on", || time() != first);
}

pub fn succeed(output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

/// The error text of a command that must fail.
pub fn refusal(output: &Output) -> String {
    assert!(!output.status.success(), "it succeeded: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What the tests of partial commits begin with.
pub fn fill_for_parts(base: &Path) {
    shell(
        base,
        "mkdir -p src/deep gone/below replaced moved
         echo old >src/a.py; echo old >src/deep/b.py; echo old >src/deep/c.txt; echo old >gone/x.py; echo old >gone/below/y.txt
         echo old >replaced/keep.txt; echo old >replaced/drop.py; echo old >moved/file; echo old >link-to
         find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

/// Runs a shell script in a directory.
pub fn shell(directory: &Path, script: &str) {
    let output = Command::new("bash")
        .args(["-euc", script])
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{script}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Everything that a commit must carry of one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Object {
    pub mode: u32,
    pub owner: (u32, u32),
    pub mtime: (i64, i64),
    pub nlink: u64,
    pub content: Content,
    pub xattrs: BTreeMap<OsString, Vec<u8>>,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    File(Vec<u8>),
    Link(PathBuf),
    Directory,
    Other(u64),
}

/// Long content is named by its length and first bytes.
impl std::fmt::Debug for Content {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(bytes) => write!(
                formatter,
                "File({} bytes, {:02x?}…)",
                bytes.len(),
                &bytes[..bytes.len().min(8)]
            ),
            Self::Link(target) => write!(formatter, "Link({})", target.display()),
            Self::Directory => write!(formatter, "Directory"),
            Self::Other(device) => write!(formatter, "Other({device})"),
        }
    }
}

/// A whole tree, by relative path; without the store.
pub fn snapshot(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = BTreeMap::new();
    visit(root, Path::new(""), &mut tree);
    tree
}

/// What is at a path, if anything.
pub fn object(full: &Path) -> Option<Object> {
    let metadata = match fs::symlink_metadata(full) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
            return None;
        }
        other => other.unwrap_or_else(|error| panic!("{}: {error}", full.display())),
    };
    let kind = metadata.file_type();
    let content = if kind.is_file() {
        Content::File(fs::read(full).unwrap())
    } else if kind.is_symlink() {
        Content::Link(fs::read_link(full).unwrap())
    } else if kind.is_dir() {
        Content::Directory
    } else {
        Content::Other(if kind.is_char_device() || kind.is_block_device() {
            metadata.rdev()
        } else {
            0
        })
    };
    let is_directory = content == Content::Directory;
    Some(Object {
        mode: metadata.mode(),
        owner: (metadata.uid(), metadata.gid()),
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
        nlink: if is_directory { 0 } else { metadata.nlink() },
        content,
        xattrs: xattrs(full),
    })
}

fn visit(root: &Path, path: &Path, tree: &mut BTreeMap<PathBuf, Object>) {
    let full = if path.as_os_str().is_empty() { root.to_path_buf() } else { root.join(path) };
    let object = object(&full).unwrap_or_else(|| panic!("{} is gone", full.display()));
    let is_directory = object.content == Content::Directory;
    tree.insert(path.to_path_buf(), object);
    if is_directory {
        for entry in fs::read_dir(&full).unwrap() {
            let name = entry.unwrap().file_name();
            if path.as_os_str().is_empty() && name == ".branching" {
                continue;
            }
            visit(root, &path.join(name), tree);
        }
    }
}

fn xattrs(path: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let mut list = vec![0; 65536];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap_or(0);
    list[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let name = std::ffi::OsStr::from_bytes(name);
            let mut value = vec![0; 65536];
            let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice()).unwrap();
            (name.to_os_string(), value[..length].to_vec())
        })
        .collect()
}

/// The same with the names that an object has in this tree for its number of links: the history may keep another one.
pub fn snapshot_by_names(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = snapshot(root);
    let inode = |path: &PathBuf| fs::symlink_metadata(root.join(path)).unwrap().ino();
    let mut names: BTreeMap<u64, u64> = BTreeMap::new();
    for path in tree.keys() {
        *names.entry(inode(path)).or_default() += 1;
    }
    for (path, object) in tree.iter_mut().filter(|(_, object)| object.nlink > 0) {
        object.nlink = names[&inode(path)];
    }
    tree
}

/// Compares two trees and names the first differences.
pub fn assert_same(
    found: &BTreeMap<PathBuf, Object>,
    wanted: &BTreeMap<PathBuf, Object>,
    when: &str,
) {
    let mut differences = Vec::new();
    for path in found.keys().chain(wanted.keys().filter(|path| !found.contains_key(*path))) {
        let (is, should) = (found.get(path), wanted.get(path));
        if is != should {
            differences.push(format!("{}:\n  is     {is:?}\n  should {should:?}", path.display()));
        }
    }
    assert!(
        differences.is_empty(),
        "{when}: {} differences\n{}",
        differences.len(),
        differences[..differences.len().min(5)].join("\n")
    );
}
