//! While a commit plans, copies and syncs, other branches go on: with their files, and with their verbs. Each commit is
//! held at one of its syncs, by whom the kernel asks before a directory is opened (fanotify), as long as the test says.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{Mount, assert_same, refusal, shell, snapshot, succeed};

/// `PID DIRECTORY`: the first time that the process opens the directory it waits until a line is read.
const HOLDING: &str = r#"
import ctypes, os, select, struct, sys
pid, path = int(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
libc.fanotify_mark.argtypes = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p
CLASS_CONTENT, CLOSE_ON_EXEC, ADD, HERE, OPEN_PERMISSION, ON_DIRECTORIES, ALLOW = 4, 1, 1, -100, 0x10000, 0x40000000, 1
events = libc.fanotify_init(CLASS_CONTENT | CLOSE_ON_EXEC, os.O_RDONLY | os.O_CLOEXEC)
assert events >= 0, os.strerror(ctypes.get_errno())
marked = libc.fanotify_mark(events, ADD, OPEN_PERMISSION | ON_DIRECTORIES, HERE, os.fsencode(path))
assert marked == 0, os.strerror(ctypes.get_errno())
print('ready', flush=True)
held, is_over = None, False
allow = lambda fd: (os.write(events, struct.pack('=iI', fd, ALLOW)), os.close(fd))
while True:
    if 0 in select.select([events, 0], [], [])[0]:
        if not os.read(0, 1):
            break
        allow(held)
        is_over = True
        continue
    found = os.read(events, 4096)
    while found:
        length, *_, fd, who = struct.unpack_from('=IBBHQii', found)
        found = found[length:]
        if who == pid and held is None:
            held = fd
            print('held', flush=True)
        else:
            allow(fd)
"#;

/// Holds the daemon at the next time that it opens a directory; lets go of it at the end.
struct Hold {
    holder: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Hold {
    fn new(mount: &Mount, directory: &Path) -> Self {
        let script = mount.directory.path().join("holding.py");
        fs::write(&script, HOLDING).unwrap();
        let mut command = Command::new("python3");
        command.arg(script).arg(mount.daemon().to_string()).arg(directory);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let said = BufReader::new(holder.stdout.take().unwrap());
        let mut hold = Self { holder, said };
        hold.hear("ready");
        hold
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn release(&mut self) {
        self.holder.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A verb that must be answered while something else is held.
fn run(mount: &Mount, words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["60", common::PROGRAM]).args(words).arg(mount.mountpoint());
    command.stdin(Stdio::null()).output().unwrap()
}

fn start(mount: &Mount, words: &[&str]) -> Child {
    let mut command = Command::new(common::PROGRAM);
    command.args(words).arg(mount.mountpoint()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Work in a branch that must go on.
fn work(branch: &Path, script: &str) {
    let mut command = Command::new("timeout");
    command.args(["60", "bash", "-euc", script]).current_dir(branch);
    succeed(&command.stdin(Stdio::null()).output().unwrap());
}

fn listed(mount: &Mount) -> Vec<String> {
    let output = run(mount, &["list"]);
    succeed(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect()
}

fn read(path: PathBuf) -> String {
    fs::read_to_string(path).unwrap()
}

/// A base and branches `one`, `sibling` and `doomed` of it, `one` of which is being committed and is held there.
fn committing(directory: impl Fn(&Mount) -> PathBuf) -> (Mount, Hold, Child) {
    let mount = Mount::with(&["--policy", "snapshot"], |base| {
        shell(base, "echo old | tee file other > /dev/null; mkdir d; echo x > d/x");
    });
    shell(&mount.create("one"), "echo new > file; mkdir made; rm -r d");
    for name in ["sibling", "doomed"] {
        shell(&mount.create(name), "echo mine > mine");
    }
    let mut hold = Hold::new(&mount, &directory(&mount));
    let commit = start(&mount, &["commit", "one"]);
    hold.hear("held");
    (mount, hold, commit)
}

/// What others do meanwhile.
fn others_go_on(mount: &Mount) {
    let sibling = mount.branch("sibling");
    work(
        &sibling,
        "echo more >> other; mkdir new; mv mine new/; ls -lR . > /dev/null; cat file d/x > /dev/null; rm d/x; sync -d other",
    );
    succeed(&run(mount, &["create", "late"]));
    succeed(&run(mount, &["create", "--parent", "doomed", "inner"]));
    work(&mount.branch("inner"), "echo inner > inner");
    succeed(&run(mount, &["diff", "sibling"]));
    succeed(&run(mount, &["abort", "doomed"]));
    assert!(listed(mount).iter().all(|name| name != "doomed" && name != "inner"));
    work(&mount.branch("late"), "cat other > /dev/null; echo late > late");
}

/// All that must be there when the commit of `one` is over.
fn check_committed(mount: &Mount, late: &str, when: &str) {
    assert_eq!(read(mount.base().join("file")), "new\n", "{when}");
    assert!(!mount.base().join("d").exists(), "{when}");
    assert_eq!(read(mount.branch("sibling").join("file")), "old\n", "{when}: its snapshot");
    assert_eq!(read(mount.branch("late").join("file")), late, "{when}");
    assert_eq!(read(mount.branch("late").join("late")), "late\n", "{when}");
    assert_eq!(listed(mount), ["sibling", "late"], "{when}");
}

#[test]
fn other_branches_go_on_while_a_commit_prepares() {
    let (mount, mut hold, mut commit) = committing(Mount::store);
    others_go_on(&mount);
    assert_eq!(read(mount.base().join("file")), "old\n", "it has not happened");
    assert_eq!(read(mount.branch("one").join("file")), "new\n", "its files can be read");
    // Who wants the branch itself waits.
    let forked = start(&mount, &["create", "--parent", "one", "fork"]);
    let aborted = start(&mount, &["abort", "one"]);
    assert!(listed(&mount).contains(&"one".to_owned()));
    assert!(commit.try_wait().unwrap().is_none(), "it is held");
    hold.release();
    succeed(&commit.wait_with_output().unwrap());
    for waited in [forked, aborted] {
        assert!(refusal(&waited.wait_with_output().unwrap()).contains("no branch"));
    }
    check_committed(&mount, "old\n", "committed");
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot"]);
    check_committed(&mount, "old\n", "after a remount");
    succeed(&run(&mount, &["commit", "late"]));
    assert_eq!(read(mount.base().join("late")), "late\n");
}

#[test]
fn other_branches_go_on_while_a_commit_is_made_durable() {
    let (mount, mut hold, mut commit) = committing(Mount::base);
    others_go_on(&mount);
    assert!(commit.try_wait().unwrap().is_none(), "it is held");
    check_committed(&mount, "new\n", "not durable yet");
    hold.release();
    succeed(&commit.wait_with_output().unwrap());
    check_committed(&mount, "new\n", "committed");
    succeed(&run(&mount, &["commit", "late"]));
}

#[test]
fn what_others_did_meanwhile_outlives_a_daemon_that_is_killed_there() {
    for (directory, late) in
        [(Mount::store as fn(&Mount) -> PathBuf, "old\n"), (Mount::base, "new\n")]
    {
        let (mount, hold, commit) = committing(directory);
        others_go_on(&mount);
        let before = snapshot(&mount.branch("sibling"));
        mount.kill();
        drop(hold);
        commit.wait_with_output().unwrap();
        mount.mount_with(&["--policy", "snapshot"]);
        assert_same(&snapshot(&mount.branch("sibling")), &before, "the sibling");
        if late == "old\n" {
            assert_eq!(read(mount.base().join("file")), "old\n", "it had not happened");
            mount.commit("one");
        }
        check_committed(&mount, late, "after a kill");
    }
}

#[test]
fn a_branch_that_is_stale_meanwhile_can_be_aborted_before_the_commit_is_durable() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old\n").unwrap());
    shell(&mount.create("one"), "echo new > file");
    for name in ["kept", "gone"] {
        mount.create(name);
    }
    let mut hold = Hold::new(&mount, &mount.base());
    let commit = start(&mount, &["commit", "one"]);
    hold.hear("held");
    succeed(&run(&mount, &["abort", "gone"]));
    hold.release();
    succeed(&commit.wait_with_output().unwrap());
    mount.kill();
    mount.mount();
    assert_eq!(listed(&mount), ["kept"]);
    assert!(refusal(&run(&mount, &["commit", "kept"])).contains("a sibling was committed first"));
}

#[test]
fn others_go_on_while_a_branch_is_committed_into_its_parent() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old\n").unwrap());
    mount.create("outer");
    shell(&mount.create_below("outer", "one"), "echo new > file");
    let rival = mount.create_below("outer", "rival");
    let apart = mount.create("apart");
    let mut hold = Hold::new(&mount, &mount.store());
    let commit = start(&mount, &["commit", "one"]);
    hold.hear("held");
    work(&apart, "echo mine > mine; cat file > /dev/null");
    work(&rival, "echo mine > mine");
    succeed(&run(&mount, &["create", "late"]));
    succeed(&run(&mount, &["create", "--parent", "outer", "inner"]));
    succeed(&run(&mount, &["abort", "late"]));
    let aborted = start(&mount, &["abort", "outer"]);
    assert_eq!(listed(&mount), ["outer", "one", "rival", "apart", "inner"]);
    hold.release();
    succeed(&commit.wait_with_output().unwrap());
    succeed(&aborted.wait_with_output().unwrap());
    assert_eq!(listed(&mount), ["apart"], "the parent went after the commit, with all below it");
    assert_eq!(read(apart.join("mine")), "mine\n");
}
