//! A system call of the daemon fails during a commit, on a real mount: the base is old or new, as the answer says, and no
//! later commit is changed. The sweep over every call of every verb is in `src/workspace/fault_tests.rs`; this one also
//! sees what the kernel's overlayfs and the daemon's other threads have part in.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{Mount, Object, assert_same, rounds, shell, snapshot_by_names, succeed};

/// Calls that fail; not `write`, which answers requests too.
const CALLS: &str = "%file,fsync,fdatasync,syncfs,getdents64,fchmod,fchown,ftruncate,fallocate,copy_file_range,fsetxattr,fgetxattr,fremovexattr";

const ERRORS: [&str; 4] = ["EIO", "ENOSPC", "EPERM", "EDQUOT"];

/// A daemon in which the call number `at` of each thread fails, as long as this lives.
struct Fault(Child);

impl Fault {
    fn new(mount: &Mount, at: usize, error: &str) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-p", &mount.daemon().to_string(), "-o", "/dev/null"]);
        strace.arg("-e").arg(format!("trace={CALLS}"));
        strace.arg("-e").arg(format!("inject={CALLS}:error={error}:when={at}"));
        let mut child = strace.stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("attached"), "{line}");
        Self(child)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let _ = self.0.wait();
    }
}

fn fill(base: &Path) {
    shell(
        base,
        "mkdir -p kept moved/inner gone/below; echo old >file; echo old >kept/file; echo old >moved/inner/file
         echo old >gone/below/file; ln kept/file kept/twin; echo old >other",
    );
}

const CHANGES: &str = "echo new >file; echo added >kept/added; echo longer than before >kept/file; rm -r gone
    mv moved elsewhere; echo changed >elsewhere/inner/file; mkdir -p new/deep; echo new >new/deep/file; chmod 700 kept";

fn check_store(mount: &Mount, when: &str) {
    let mut fsck = Command::new(common::PROGRAM);
    let checked = fsck.arg("fsck").arg(mount.base()).output().unwrap();
    assert!(checked.status.success(), "{when}: {}", String::from_utf8_lossy(&checked.stdout));
}

/// Directories get a new time when names come and go.
fn without_times(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = snapshot_by_names(root);
    tree.values_mut().for_each(|object| object.mtime = (0, 0));
    tree
}

#[test]
fn a_commit_is_all_or_nothing_when_a_call_of_the_daemon_fails() {
    const CALLS_MAX: u64 = 180;
    let seed = std::env::var("BRANCHFS_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut random = fastrand::Rng::with_seed(seed.unwrap_or_else(|| fastrand::u64(..)));
    let seed = random.get_seed();
    for round in 0..rounds(4, 300) {
        let at = usize::try_from(random.u64(1..CALLS_MAX)).unwrap();
        let error = ERRORS[random.usize(..ERRORS.len())];
        let mount = Mount::over(fill);
        let branch = mount.create("work");
        shell(&branch, CHANGES);
        let (old, new) = (without_times(&mount.base()), without_times(&branch));
        let fault = Fault::new(&mount, at, error);
        let output = mount.run(&["commit", "work"], &[]);
        drop(fault);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let when =
            format!("BRANCHFS_SEED={seed}, round {round}, call {at} fails with {error}: {said}");
        mount.unmount();
        mount.mount();
        let found = without_times(&mount.base());
        if output.status.success() || said.contains("was applied") {
            assert_same(&found, &new, &when);
        } else if !said.contains("partly old and partly new") || found != new {
            assert_same(&found, &old, &when);
        }
        let branch = mount.create("later");
        shell(&branch, "echo later >other");
        let wanted = without_times(&branch);
        mount.commit("later");
        for _ in 0..2 {
            mount.unmount();
            check_store(&mount, &when);
            mount.mount();
            assert_same(&without_times(&mount.base()), &wanted, &when);
        }
        succeed(&mount.run(&["undo", "--force"], &[]));
    }
}
