//! The guard beside the daemon: after the daemon's death it settles an interrupted transaction by itself, and after an
//! unmount nothing of it is left. `strace` kills the daemon at the same rename of a commit each time.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Mount, assert_same, guard_of, kill_guard, shell, snapshot, succeed};
use rustix::process::{Pid, Signal};

fn is_alive(process: i32) -> bool {
    let state = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    const WAIT_MAX: Duration = Duration::from_secs(60);
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WAIT_MAX, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A mount with a branch that changes many files.
fn with_work() -> Mount {
    let mount = Mount::over(|base| shell(base, "for i in $(seq 40); do echo old > $i; done"));
    let branch = mount.create("work");
    shell(&branch, "for i in $(seq 40); do echo new > $i; done; echo > added");
    mount
}

/// Attaches strace, which kills the daemon at a rename in the middle of the next commit.
fn arm(mount: &Mount) -> Child {
    let output = mount.directory.path().join("strace");
    // The daemon answers this query itself: it is made before strace is attached.
    let daemon = mount.daemon();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-p", &daemon.to_string(), "-e", "trace=renameat2"]);
    strace.args(["-e", "inject=renameat2:signal=KILL:when=20", "-o"]).arg(&output);
    let strace = strace.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{daemon}/status");
    wait_until("strace attaches", || {
        !fs::read_to_string(&status).unwrap().contains("TracerPid:\t0")
    });
    // Until all threads are attached.
    wait_until("strace attaches to all threads", || {
        fs::read_dir(format!("/proc/{daemon}/task")).unwrap().all(|task| {
            let status = task.unwrap().path().join("status");
            !fs::read_to_string(status).unwrap_or_default().contains("TracerPid:\t0")
        })
    });
    strace
}

/// Kills the daemon in the middle of the commit of `work`.
fn die_in_commit(mount: &Mount) {
    let mut strace = arm(mount);
    let output = mount.run(&["commit", "work"], &[]);
    assert!(!output.status.success());
    strace.wait().unwrap();
}

fn journal_is_empty(base: &Path) -> bool {
    fs::read_dir(base.join(".branching/journal")).unwrap().next().is_none()
}

fn remount(mount: &Mount) -> String {
    let _ = rustix::mount::unmount(mount.mountpoint(), rustix::mount::UnmountFlags::DETACH);
    let words = ["mount", "--driver", "fuse", "--base"];
    let mounted = mount.run(&words, &[&mount.base()]);
    succeed(&mounted);
    String::from_utf8(mounted.stderr).unwrap()
}

#[test]
fn a_commit_is_finished_without_a_command_when_the_daemon_is_killed() {
    let mount = with_work();
    let wanted = snapshot(&mount.branch("work"));
    let guard = guard_of(&mount);
    die_in_commit(&mount);
    wait_until("the guard ends", || !is_alive(guard));
    assert!(journal_is_empty(&mount.base()));
    assert_same(&snapshot(&mount.base()), &wanted, "after the guard");
    let log = fs::read_to_string(mount.base().join(".branching/branchfs.log")).unwrap();
    let line = "the commit of work, which was interrupted, was finished";
    assert!(log.contains(&format!("WARN recovery without a mount: {line}")), "{log}");
    let checked = Command::new(common::PROGRAM).arg("fsck").arg(mount.base()).output().unwrap();
    succeed(&checked);

    // The next mount reports what was done in between, once.
    let said = remount(&mount);
    assert!(said.contains("the last mount ended without being unmounted"), "{said}");
    assert!(said.contains(line), "{said}");
    mount.unmount();
    assert_eq!(remount(&mount), "");
}

#[test]
fn the_guard_survives_what_kills_the_process_group_of_the_daemon() {
    let mount = with_work();
    let guard = guard_of(&mount);
    let stat = |process: i32| fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let session = |process: i32| stat(process).rsplit(' ').nth(46).unwrap().to_owned();
    wait_until("it has a session of its own", || session(guard) == guard.to_string());
    let open = || fs::read_dir(format!("/proc/{guard}/fd")).unwrap().count();
    wait_until("only the standard descriptors are open", || open() == 3);
    assert_eq!(fs::read_link(format!("/proc/{guard}/cwd")).unwrap(), Path::new("/"));
    let group = rustix::process::getpgid(Pid::from_raw(mount.daemon())).unwrap();
    rustix::process::kill_process_group(group, Signal::KILL).unwrap();
    wait_until("the guard ends after the daemon", || !is_alive(guard));
    let log = fs::read_to_string(mount.base().join(".branching/branchfs.log")).unwrap();
    assert!(!log.contains("recovery"), "the journal was empty: {log}");
}

#[test]
fn the_guard_of_a_daemon_in_the_foreground_keeps_no_directory_busy() {
    let mount = Mount::unmounted(|_| ());
    let mut command = Command::new(common::PROGRAM);
    command.args(["mount", "--foreground", "--driver", "fuse", "--base"]).arg(mount.base());
    command.arg(mount.mountpoint()).current_dir(mount.directory.path());
    let mut daemon = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let mut value = [0; 4096];
    wait_until("the mount answers", || {
        rustix::fs::getxattr(mount.mountpoint(), "user.branchfs.control", &mut value[..]).is_ok()
    });
    let guard = guard_of(&mount);
    let directory_of = |process: i32| fs::read_link(format!("/proc/{process}/cwd")).unwrap();
    assert_eq!(directory_of(mount.daemon()), mount.directory.path());
    wait_until("the guard leaves the directory", || directory_of(guard) == Path::new("/"));
    mount.unmount();
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn without_the_guard_recover_or_the_next_mount_finishes_the_commit() {
    for by_command in [true, false] {
        let mount = with_work();
        let wanted = snapshot(&mount.branch("work"));
        kill_guard(&mount);
        die_in_commit(&mount);
        assert!(!journal_is_empty(&mount.base()), "the kill comes in the middle");
        if by_command {
            let recover = || {
                let done = Command::new(common::PROGRAM)
                    .arg("recover")
                    .arg(mount.base())
                    .output()
                    .unwrap();
                succeed(&done);
                String::from_utf8(done.stdout).unwrap()
            };
            assert_eq!(recover(), "the commit of work, which was interrupted, was finished\n");
            assert_same(&snapshot(&mount.base()), &wanted, "after branchfs recover");
            assert_eq!(recover(), "nothing to recover\n");
        }
        assert!(remount(&mount).contains("the commit of work"));
        assert_same(&snapshot(&mount.base()), &wanted, "after the next mount");
    }
}

#[test]
fn no_guard_is_left_after_an_unmount() {
    let mount = Mount::new();
    let guard = guard_of(&mount);
    mount.unmount();
    assert!(!Path::new(&format!("/proc/{guard}")).exists());
}

#[test]
fn recover_refuses_a_mounted_store_and_makes_none() {
    let mount = Mount::unmounted(|_| ());
    let recover = |mount: &Mount| {
        Command::new(common::PROGRAM).arg("recover").arg(mount.base()).output().unwrap()
    };
    let done = recover(&mount);
    succeed(&done);
    assert_eq!(done.stdout, b"nothing to recover\n");
    assert!(!mount.base().join(".branching").exists());
    mount.mount();
    fs::create_dir(mount.base().join(".branching/journal/1")).unwrap();
    let refused = recover(&mount);
    fs::remove_dir(mount.base().join(".branching/journal/1")).unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("is in use by another mount"), "{said}");
}
