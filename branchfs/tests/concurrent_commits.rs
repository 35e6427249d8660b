//! Other branches continue to work, with files and with verbs, while a commit plans, copies and syncs. Each commit is held
//! at one of its syncs (by fanotify, which asks before a directory is opened) until the test releases it.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::disk::Disk;
use common::hold::Hold;
use common::{Mount, assert_same, refusal, shell, snapshot, snapshot_by_names, succeed};

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

const FILLED: &str = "echo old | tee file other > /dev/null; mkdir d; echo x > d/x";

/// A base, and branches `one`, `sibling` and `doomed` of it.
fn branches() -> Mount {
    let mount = Mount::with(&["--policy", "snapshot"], |base| shell(base, FILLED));
    make_branches(&mount);
    mount
}

fn make_branches(mount: &Mount) {
    shell(&mount.create("one"), "echo new > file; mkdir made; rm -r d");
    for name in ["sibling", "doomed"] {
        shell(&mount.create(name), "echo mine > mine");
    }
}

/// The same, with `one` being committed and held there.
fn committing(directory: impl Fn(&Mount) -> PathBuf) -> (Mount, Hold, Child) {
    let mount = branches();
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
fn other_branches_continue_while_a_commit_prepares() {
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
fn other_branches_continue_while_a_commit_is_made_durable() {
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
fn changes_by_others_outlive_a_daemon_that_is_killed_there() {
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
        shell(&mount.create(name), "echo mine > mine");
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
fn others_continue_while_a_branch_is_committed_into_its_parent() {
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

#[test]
fn other_branches_continue_while_one_is_compared() {
    let mount = branches();
    let id = mount.ask("list")["branches"][0]["id"].to_string();
    let mut hold = Hold::new(&mount, &mount.store().join("layers").join(id).join("upper"));
    let compared = start(&mount, &["diff", "one"]);
    hold.hear("held");
    others_go_on(&mount);
    let aborted = start(&mount, &["abort", "one"]);
    assert!(listed(&mount).contains(&"one".to_owned()), "it waits");
    hold.release();
    let compared = compared.wait_with_output().unwrap();
    succeed(&compared);
    assert!(String::from_utf8_lossy(&compared.stdout).contains("file"));
    succeed(&aborted.wait_with_output().unwrap());
    assert_eq!(listed(&mount), ["sibling", "late"]);
}

/// Branches, and an import of one named `brought` that is held while it unpacks its file of that name.
fn importing(parent: &str, pack: &str) -> (Disk, Hold, Child) {
    let disk = Disk::image("64M", "mkfs.ext4 -q");
    shell(&disk.base(), FILLED);
    disk.mount_with(&["--policy", "snapshot"]);
    make_branches(&disk);
    let outside = disk.directory.path();
    shell(outside, &format!("mkdir tree; cd tree; {pack}"));
    let mut hold = Hold::at_file(&disk, "brought");
    let mut command = Command::new(common::PROGRAM);
    command.args(["import", "--parent", parent, "brought"]).arg(disk.mountpoint());
    command.stdin(fs::File::open(outside.join("archive")).unwrap());
    let imported = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    hold.hear("held");
    (disk, hold, imported)
}

const BROUGHT: &str = "echo brought > brought; touch .wh.file; tar -cf ../archive .";

#[test]
fn other_branches_continue_while_one_is_imported() {
    let (disk, mut hold, imported) = importing("one", BROUGHT);
    others_go_on(&disk);
    succeed(&run(&disk, &["commit", "sibling"]));
    assert_eq!(read(disk.base().join("other")), "old\nmore\n");
    work(&disk.branch("one"), "echo later > later");
    work(&disk.branch("late"), "echo later > later");
    assert_eq!(listed(&disk), ["one", "late"]);
    hold.release();
    succeed(&imported.wait_with_output().unwrap());
    let brought = disk.branch("brought");
    work(&brought, "test ! -e file; test -d made; test ! -e new; test ! -e d; test -e later");
    assert_eq!(read(brought.join("other")), "old\n", "what its parent sees");
    succeed(&run(&disk, &["abort", "one"]));
    assert_eq!(listed(&disk), ["late"], "the parent went with all below it");
}

/// What the archive says of what is below it means the parent at the fork, which comes when all is unpacked.
#[test]
fn an_import_lies_on_what_was_committed_while_it_was_unpacked() {
    let pack = "mkdir d; echo x > d/brought; touch .wh.mine .wh.other; tar -cf ../archive d/brought .wh.mine .wh.other";
    let (disk, mut hold, imported) = importing("main", pack);
    work(
        &disk.branch("doomed"),
        "chmod 750 . d; python3 -c 'import os; os.setxattr(\"d\", \"user.mark\", b\"x\")'; rm other",
    );
    succeed(&run(&disk, &["commit", "doomed"]));
    assert_eq!(read(disk.base().join("mine")), "mine\n");
    hold.release();
    succeed(&imported.wait_with_output().unwrap());
    work(&disk.branch("brought"), "test ! -e mine; test $(cat d/brought) = x; test $(cat d/x) = x");
    succeed(&run(&disk, &["commit", "brought"]));
    let left =
        "test ! -e mine; test ! -e other; test $(stat -c %a.%a . d | tr -d '\n') = 750.750750.750
        python3 -c 'import os; assert os.getxattr(\"d\", \"user.mark\") == b\"x\"'; test -e d/brought";
    shell(&disk.base(), left);
}

#[test]
fn an_import_whose_parent_has_ended_meanwhile_leaves_nothing() {
    let (disk, mut hold, imported) = importing("one", BROUGHT);
    succeed(&run(&disk, &["abort", "one"]));
    hold.release();
    assert!(refusal(&imported.wait_with_output().unwrap()).contains("there is no branch one"));
    assert_eq!(listed(&disk), ["sibling", "doomed"]);
    assert_eq!(fs::read_dir(disk.store().join("layers")).unwrap().count(), 2);
}

/// Deletes what is in the trash as late as it may: after an undo has brought back what it shares with the base.
fn undone_before_a_snapshot_layer_is_deleted() -> (Mount, Hold) {
    let mount = Mount::with(&["--policy", "snapshot"], |base| {
        shell(
            base,
            "mkdir d; echo old | tee file d/file > /dev/null; touch -d 2020-01-01 file d/file",
        );
    });
    let before = snapshot(&mount.base());
    mount.create("observer"); // its snapshot layer links what the commit replaces
    shell(&mount.create("one"), "echo new > file; rm -r d");
    mount.commit("one");
    let mut hold = Hold::new(&mount, &mount.store().join("trash"));
    mount.abort("observer");
    hold.hear("held");
    succeed(&run(&mount, &["undo"]));
    assert_same(&snapshot_by_names(&mount.base()), &before, "undone");
    (mount, hold)
}

fn wait_for_an_empty_trash(mount: &Mount) {
    common::wait_until("the trash is empty", || {
        fs::read_dir(mount.store().join("trash")).unwrap().next().is_none()
    });
}

fn let_go_and_wait_for_an_empty_trash(mount: &Mount, hold: &mut Hold) {
    common::wait_for_the_clock(&mount.base());
    hold.release();
    wait_for_an_empty_trash(mount);
}

/// S12: only what others changed stands in the way of a redo, not a link of ours that goes.
#[test]
fn a_snapshot_layer_that_is_deleted_in_the_background_blocks_no_redo() {
    let (mount, mut hold) = undone_before_a_snapshot_layer_is_deleted();
    let_go_and_wait_for_an_empty_trash(&mount, &mut hold);
    succeed(&run(&mount, &["redo"]));
    assert_eq!(read(mount.base().join("file")), "new\n");
}

/// S8: nor in that of a commit whose branch saw the object before.
#[test]
fn a_snapshot_layer_that_is_deleted_in_the_background_is_no_drift() {
    let (mount, mut hold) = undone_before_a_snapshot_layer_is_deleted();
    let early = mount.create("early");
    work(&early, "echo mine >> file; rm d/file");
    let_go_and_wait_for_an_empty_trash(&mount, &mut hold);
    let late = mount.create("late");
    work(&late, "test $(cat d/file) = old");
    succeed(&run(&mount, &["commit", "early"]));
    assert_eq!(read(mount.base().join("file")), "old\nmine\n");
}

/// What others did before a link of ours went is told from it all the same, though only the ctime tells of it.
#[test]
fn changes_by_others_before_a_snapshot_layer_was_deleted_are_drift() {
    let (mount, mut hold) = undone_before_a_snapshot_layer_is_deleted();
    common::wait_for_the_clock(&mount.base());
    shell(&mount.base(), "chmod 600 file");
    let_go_and_wait_for_an_empty_trash(&mount, &mut hold);
    let said = refusal(&run(&mount, &["redo"]));
    assert!(said.contains("its paths were changed since"), "{said}");
    assert!(said.lines().any(|line| line.trim() == "file"), "{said}");
    assert!(!said.contains("d/file"), "{said}");
}

/// The daemon is killed where it opens its notes, before a link is deleted or after it.
fn killed_while_a_snapshot_layer_is_deleted(is_deleted: bool) -> Mount {
    let (mount, mut trash) = undone_before_a_snapshot_layer_is_deleted();
    common::wait_for_the_clock(&mount.base());
    let links = || {
        fs::metadata(mount.base().join("file")).unwrap().nlink()
            + fs::metadata(mount.base().join("d/file")).unwrap().nlink()
    };
    let before = links();
    let notes = mount.store().join("forgotten");
    fs::OpenOptions::new().append(true).create(true).open(&notes).unwrap();
    let mut hold = Hold::new(&mount, &notes);
    trash.release();
    hold.hear("held");
    if is_deleted {
        hold.release_once();
        hold.hear("held");
    }
    assert_eq!(links(), before - u64::from(is_deleted));
    mount.kill();
    mount
}

/// S12: what the kill kept from being noted is no change by others.
#[test]
fn a_kill_while_a_snapshot_layer_is_deleted_blocks_no_redo() {
    for is_deleted in [false, true] {
        let mount = killed_while_a_snapshot_layer_is_deleted(is_deleted);
        common::wait_for_the_clock(&mount.base());
        mount.mount_with(&["--policy", "snapshot"]);
        wait_for_an_empty_trash(&mount);
        succeed(&run(&mount, &["redo"]));
        assert_eq!(read(mount.base().join("file")), "new\n", "deleted: {is_deleted}");
    }
}

#[test]
fn changes_by_others_after_such_a_kill_are_drift() {
    /// More than the ticks of any file system's clock.
    const LATER: Duration = Duration::from_millis(50);
    let mount = killed_while_a_snapshot_layer_is_deleted(true);
    let killed = Instant::now();
    common::wait_until("the kill is over", || killed.elapsed() > LATER);
    shell(&mount.base(), "chmod 600 file d/file");
    mount.mount_with(&["--policy", "snapshot"]);
    wait_for_an_empty_trash(&mount);
    let said = refusal(&run(&mount, &["redo"]));
    for path in ["file", "d/file"] {
        assert!(said.lines().any(|line| line.trim() == path), "{path}: {said}");
    }
}
