//! S12: undo reverts the last commit to main, repeatably, under the same atomicity and drift rules, and can itself be
//! undone.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use common::{Mount, assert_same, refusal, shell, snapshot, succeed, wait_for_the_clock};

fn fill(base: &Path) {
    shell(
        base,
        "mkdir -p kept moved/inner gone/below replaced
         echo old >file; echo old >kept/file; echo old >moved/inner/file; echo old >gone/below/file; echo old >replaced/old
         ln -s file link; ln kept/file kept/twin; chmod 750 kept; mkfifo gone/pipe
         find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

/// One of everything a commit can do.
const CHANGES: &str = "echo new >file; echo added >kept/added; echo longer than before >kept/file; rm -r gone
    mv moved elsewhere; echo changed >elsewhere/inner/file; mkdir -p new/deep; echo new >new/deep/file; mv elsewhere new/place
    rm -r replaced; mkdir -m 700 replaced; echo new >replaced/new; rm link; mkdir link; chmod 700 kept";

fn undo(mount: &Mount) {
    succeed(&mount.run(&["undo"], &[]));
}

fn redo(mount: &Mount) {
    succeed(&mount.run(&["redo"], &[]));
}

/// The numbers of the commits in the history, oldest first.
fn ids_of(mount: &Mount) -> Vec<u64> {
    let history = mount.ask("history");
    let entries = history["entries"].as_array().unwrap().iter();
    entries.map(|entry| entry["id"].as_u64().unwrap()).collect()
}

#[test]
fn an_undo_brings_everything_back_and_a_redo_does_it_again() {
    let mount = Mount::over(fill);
    let before = snapshot(&mount.base());
    shell(&mount.create("work"), CHANGES);
    mount.commit("work");
    let after = snapshot(&mount.base());
    assert_ne!(before, after);
    for round in 0..3 {
        undo(&mount);
        assert_same(&snapshot(&mount.base()), &before, &format!("undone, round {round}"));
        redo(&mount);
        assert_same(&snapshot(&mount.base()), &after, &format!("done again, round {round}"));
    }
    assert!(refusal(&mount.run(&["redo"], &[])).contains("no commit to redo"));
}

/// A directory from which another one was moved before it went has the time it had.
#[test]
fn a_removed_directory_out_of_which_one_was_moved_comes_back_with_its_time() {
    let removals =
        ["rm -r outer", "rm -r outer; echo file >outer", "rm -r outer; mkdir -m 700 outer"];
    for removal in removals {
        let mount = Mount::over(|base| {
            let rest = "find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +";
            shell(
                base,
                &format!("mkdir -p outer/middle/moved outer/other; echo file >outer/file; {rest}"),
            );
        });
        let before = snapshot(&mount.base());
        shell(
            &mount.create("work"),
            &format!("mv outer/middle/moved saved; mv outer/other saved; {removal}"),
        );
        mount.commit("work");
        let after = snapshot(&mount.base());
        for round in 0..2 {
            undo(&mount);
            assert_same(&snapshot(&mount.base()), &before, &format!("{removal}, round {round}"));
            redo(&mount);
            assert_same(&snapshot(&mount.base()), &after, &format!("{removal}, round {round}"));
        }
    }
}

#[test]
fn the_history_is_undone_commit_by_commit_also_by_a_later_mount() {
    let mount = Mount::over(fill);
    let mut states = vec![snapshot(&mount.base())];
    for round in 0..4 {
        let branch = mount.create("work");
        shell(
            &branch,
            &format!(
                "echo {round} >>file; mkdir -p d{round}; echo {round} >d{round}/f; rm -rf d{}",
                round - 1
            ),
        );
        mount.commit("work");
        states.push(snapshot(&mount.base()));
    }
    for state in states.iter().rev().skip(1) {
        mount.unmount();
        mount.mount();
        undo(&mount);
        assert_same(&snapshot(&mount.base()), state, "undone");
    }
    assert!(refusal(&mount.run(&["undo"], &[])).contains("no commit to undo"));
    for state in &states[1..] {
        redo(&mount);
        assert_same(&snapshot(&mount.base()), state, "done again");
    }
}

#[test]
fn a_commit_after_an_undo_drops_what_was_undone() {
    let mount = Mount::new();
    for name in ["one", "two"] {
        fs::write(mount.create(name).join(name), "").unwrap();
        mount.commit(name);
    }
    undo(&mount);
    fs::write(mount.create("three").join("three"), "").unwrap();
    mount.commit("three");
    assert!(refusal(&mount.run(&["redo"], &[])).contains("no commit to redo"));
    let listed = mount.run(&["history", "--json"], &[]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let names: Vec<_> =
        listed["entries"].as_array().unwrap().iter().map(|entry| &entry["branch"]).collect();
    assert_eq!(names, ["one", "three"]);
    undo(&mount);
    undo(&mount);
    assert_eq!(snapshot(&mount.base()).len(), 1, "only the root is left");
}

#[test]
fn an_undo_lists_later_changes_by_others_and_changes_nothing() {
    let cases: [(&str, &str, &str); 6] = [
        ("edited", "echo other >>file", "file"),
        ("replaced", "echo other >x; mv x file", "file"),
        ("removed", "rm new/deep/file", "new/deep"),
        ("added below", "echo other >new/deep/other", "new/deep/other"),
        ("recreated", "mkdir gone", "gone"),
        ("attributes", "chmod 711 kept", "kept"),
    ];
    for (case, change, path) in cases {
        let mount = Mount::over(fill);
        shell(&mount.create("work"), CHANGES);
        mount.commit("work");
        wait_for_the_clock(&mount.base());
        shell(&mount.base(), change);
        let changed = snapshot(&mount.base());
        let said = refusal(&mount.run(&["undo"], &[]));
        assert!(said.contains("its paths were changed since"), "{case}: {said}");
        assert!(said.lines().any(|line| line.trim() == path), "{case}: {said}");
        assert_same(&snapshot(&mount.base()), &changed, case);
    }
}

#[test]
fn an_undo_keeps_changes_by_others_at_other_paths() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), CHANGES);
    mount.commit("work");
    wait_for_the_clock(&mount.base());
    shell(&mount.base(), "echo mine >kept/mine; echo mine >new/place/mine; echo mine >top");
    undo(&mount);
    for path in ["kept/mine", "moved/mine", "top"] {
        assert_eq!(fs::read_to_string(mount.base().join(path)).unwrap(), "mine\n", "{path}");
    }
    assert!(!mount.base().join("new").exists());
}

#[test]
fn a_forced_undo_brings_the_old_state_back_and_a_redo_the_others_work() {
    let mount = Mount::over(fill);
    let before = snapshot(&mount.base());
    shell(&mount.create("work"), CHANGES);
    mount.commit("work");
    wait_for_the_clock(&mount.base());
    shell(
        &mount.base(),
        "echo other >>file; rm replaced/new; mkdir gone; echo other >gone/other; rm kept/file",
    );
    let changed = snapshot(&mount.base());
    succeed(&mount.run(&["undo", "--force"], &[]));
    let mut undone = snapshot(&mount.base());
    // Others removed an entry of it since: that time is theirs.
    undone.get_mut(Path::new("kept")).unwrap().mtime = before[Path::new("kept")].mtime;
    undone.get_mut(Path::new("")).unwrap().mtime = before[Path::new("")].mtime;
    assert_same(&undone, &before, "forced");
    succeed(&mount.run(&["redo"], &[]));
    assert_same(&snapshot(&mount.base()), &changed, "what was forced aside is there again");
}

#[test]
fn an_undo_waits_for_no_branch_unless_forced() {
    let mount = Mount::new();
    fs::write(mount.create("one").join("one"), "").unwrap();
    mount.commit("one");
    let open = mount.create("open");
    mount.create_below("open", "child");
    let said = refusal(&mount.run(&["undo"], &[]));
    assert!(said.contains("branches of the directory are open (open, child)"), "{said}");
    assert!(said.contains("--force makes them stale"), "{said}");
    assert!(mount.base().join("one").exists());
    succeed(&mount.run(&["undo", "--force"], &[]));
    assert!(!mount.base().join("one").exists());
    assert_eq!(fs::read_dir(&open).unwrap_err().raw_os_error(), Some(libc::ESTALE));
}

#[test]
fn an_undo_can_be_looked_at_first() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), "echo new >file; echo added >added; rm -r gone; mv moved there");
    mount.commit("work");
    let after = snapshot(&mount.base());
    let shown = mount.run(&["undo", "--dry-run"], &[]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(
        lines,
        [
            "deleted   added",
            "modified  file",
            "added     gone",
            "added     gone/below",
            "added     gone/below/file",
            "added     gone/pipe",
            "renamed   moved"
        ]
    );
    assert_same(&snapshot(&mount.base()), &after, "only looked at");
}

#[test]
fn an_undo_lists_both_paths_of_a_directory_that_was_renamed_over_another_object() {
    let mount = Mount::over(fill);
    let lines = |said: std::process::Output| String::from_utf8(said.stdout).unwrap();
    for (work, committed, undone) in [
        ("mkdir empty", "added     empty\n", ""),
        ("mv -T moved empty", "modified  empty\n", "added     empty\nrenamed   moved\n"),
        ("rm file; mv empty file", "type      file\n", "renamed   empty\nadded     file\n"),
    ] {
        shell(&mount.create("work"), work);
        assert_eq!(lines(mount.run(&["commit", "work"], &[])), committed, "{work}");
        if !undone.is_empty() {
            for round in 0..2 {
                let said = lines(mount.run(&["undo"], &[]));
                assert_eq!(said, undone, "{work}, round {round}");
                let said = lines(mount.run(&["redo"], &[]));
                assert_eq!(said, committed, "{work}, round {round}");
            }
        }
    }
}

#[test]
fn the_history_keeps_what_it_is_told_to() {
    let mount = Mount::with(&["--history", "2"], |_| ());
    for name in ["one", "two", "three"] {
        fs::write(mount.create(name).join(name), "").unwrap();
        mount.commit(name);
    }
    undo(&mount);
    undo(&mount);
    refusal(&mount.run(&["undo"], &[]));
    assert!(mount.base().join("one").exists());
    redo(&mount);
    let said = mount.run(&["prune"], &[]);
    assert!(String::from_utf8_lossy(&said.stdout).starts_with("2 commits removed"));
    refusal(&mount.run(&["undo"], &[]));
    mount.unmount();
    assert!(!mount.base().join(".branching").exists(), "a store that keeps nothing goes");
}

#[test]
fn a_commit_is_shown_and_undone_by_its_number() {
    let mount = Mount::with(&["--history", "2"], |base| fs::write(base.join("file"), "").unwrap());
    let verb =
        |verb: &str, commit: u64| mount.request(&json!({"v": 1, "verb": verb, "commit": commit}));
    let ids = || (ids_of(&mount), mount.ask("history")["newest_pruned"].as_u64().unwrap());
    for name in ["one", "two"] {
        fs::write(mount.create(name).join(name), "").unwrap();
        mount.commit(name);
    }
    let (first, pruned) = ids();
    assert_eq!(pruned, 0);
    let shown = verb("show", first[0]);
    assert_eq!(shown["entry"]["branch"], "one");
    assert_eq!(shown["changes"][0]["path"], "one");
    assert!(verb("show", 7).is_null());
    assert!(verb("undo", first[0]).is_null(), "it is not the last one");
    assert!(mount.base().join("two").exists());
    assert_eq!(verb("undo", first[1])["entry"]["branch"], "two");
    assert!(verb("redo", first[0]).is_null());
    assert_eq!(verb("redo", first[1])["entry"]["branch"], "two");
    for name in ["three", "four"] {
        fs::write(mount.create(name).join(name), "").unwrap();
        mount.commit(name);
    }
    assert_eq!(ids().1, first[1], "two commits were pushed out");
    let newest = ids().0[1];
    undo(&mount);
    fs::write(mount.create("five").join("five"), "").unwrap();
    mount.commit("five");
    assert!(!ids().0.contains(&newest));
    assert_eq!(ids().1, first[1], "a commit that was undone is not counted");
}

/// A deleted file of more than the history's limit of 1 GiB.
#[test]
fn the_last_commit_can_be_undone_whatever_its_size_and_says_which_commits_it_pushes_out() {
    let mount = Mount::over(|base| {
        fs::write(base.join("file"), "old").unwrap();
        shell(base, "fallocate -l 1100M big");
    });
    fs::write(mount.create("small").join("file"), "new").unwrap();
    mount.commit("small");
    fs::remove_file(mount.create("large").join("big")).unwrap();
    let commit = |dry_run: bool| {
        mount.request(&json!({"v": 1, "verb": "commit", "branch": "large", "dry_run": dry_run}))
    };
    let branches = |reply: &serde_json::Value| {
        let forgotten = reply["forgotten"].as_array().unwrap().iter();
        forgotten.map(|commit| commit["branch"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(branches(&commit(true)), ["small"], "told before the commit");
    assert!(commit(true)["commit"].is_null());
    let reply = commit(false);
    assert_eq!(branches(&reply), ["small"], "told after the commit");
    let number = reply["commit"].as_u64().unwrap();
    assert_eq!(ids_of(&mount)[0], number, "it is in the history");
    undo(&mount);
    assert_eq!(fs::metadata(mount.base().join("big")).unwrap().len(), 1100 << 20);
    assert!(refusal(&mount.run(&["undo"], &[])).contains("no commit to undo"));
}

#[test]
fn nothing_is_kept_where_no_history_is_wanted() {
    let mount = Mount::with(&["--history", "0"], fill);
    shell(&mount.create("work"), CHANGES);
    let reply = mount.request(&json!({"v": 1, "verb": "commit", "branch": "work"}));
    assert!(reply["commit"].is_null(), "it cannot be undone");
    refusal(&mount.run(&["undo"], &[]));
    mount.unmount();
    assert!(!mount.base().join(".branching").exists());
}

#[test]
fn a_branch_open_through_a_commit_and_its_undo_sees_no_drift() {
    let mount = Mount::over(fill);
    shell(&mount.create("first"), "echo first >file");
    mount.commit("first");
    undo(&mount);
    let branch = mount.create("second");
    shell(&branch, "echo second >>file; rm link");
    mount.commit("second");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "old\nsecond\n");
    symlink("x", mount.base().join("link")).unwrap();
    fs::set_permissions(mount.base().join("file"), fs::Permissions::from_mode(0o600)).unwrap();
}

/// What the history has dropped has moved the same objects.
#[test]
fn the_history_is_undone_past_commits_that_were_undone_for_good() {
    let mount = Mount::over(fill);
    let before = snapshot(&mount.base());
    let commit = |name: &str, script: &str| {
        shell(&mount.create(name), script);
        mount.commit(name);
        wait_for_the_clock(&mount.base());
    };
    commit("one", "echo one >file; mkdir d; echo one >d/file");
    commit("two", "echo two >file; rm -r d");
    undo(&mount);
    wait_for_the_clock(&mount.base());
    commit("three", "echo three >other");
    undo(&mount);
    undo(&mount);
    assert_same(&snapshot(&mount.base()), &before, "all is undone");
}

/// S9: an error half-way takes the commit back; what it moved and moved back is no change by others.
#[test]
fn a_commit_that_was_rolled_back_blocks_no_other_commit() {
    let mount = Mount::over(fill);
    let before = snapshot(&mount.base());
    shell(&mount.create("work"), "echo work >file; mkdir new; echo work >new/file");
    mount.commit("work");
    wait_for_the_clock(&mount.base());
    shell(&mount.create("bad"), "echo bad >file; mv new elsewhere; echo bad >kept/bad");
    shell(&mount.base(), "chattr +i kept");
    let said = refusal(&mount.run(&["commit", "bad"], &[]));
    shell(&mount.base(), "chattr -i kept");
    assert!(said.contains("kept/bad"), "{said}");
    wait_for_the_clock(&mount.base());
    mount.commit("bad");
    undo(&mount);
    undo(&mount);
    assert_same(&snapshot(&mount.base()), &before, "both are undone");
}

/// Type, mode and extended attributes, which hold the ACLs, of every object.
fn access(root: &Path) -> BTreeMap<PathBuf, (u32, BTreeMap<OsString, Vec<u8>>)> {
    snapshot(root).into_iter().map(|(path, object)| (path, (object.mode, object.xattrs))).collect()
}

/// A default ACL is for what is made in its directory. The store lies in the base's root, and files are built in the store.
#[test]
fn nothing_inherits_an_acl_that_it_would_not_inherit_natively() {
    const BASE: &str = "mkdir plain given moved; for d in plain given; do for n in 1 2 3 4 5 6; do echo $n >$d/$n; chmod 640 $d/$n; done; mkdir -m 750 $d/sub; done
        echo root >file; chmod 640 file; mkdir -m 770 moved/in; echo in >moved/in/file; chmod 660 moved/in/file
        setfacl -d -m u:1000:rwx .; setfacl -d -m u:1000:rwx,m::r,o::- given";
    const WORK: &str = "for d in plain given; do cd $d; echo more >>1; chmod 664 2; rm 3; echo new >3; mv 4 four; ln 5 five; echo new >new; echo x >sub/x
        rm 6; mkdir 6; echo in >6/in; mkfifo pipe; rm -r sub; mkdir sub; echo y >sub/y; touch -d 2001-01-01 2; echo z >z; setfacl -b z; chmod 660 z; cd ..; done
        echo more >>file; mv moved gone; echo more >>gone/in/file; umask 0; echo open >open; rm plain/1; echo open >plain/1; rm given/1; echo open >given/1";
    const CHILD: &str = "umask 077; echo child >>plain/2; echo child >>given/2; rm gone/in/file; echo child >gone/in/file; echo child >given/child";
    let native = tempfile::tempdir().unwrap();
    let mount = Mount::over(|base| shell(base, BASE));
    shell(native.path(), &format!("chmod {:o} .; {BASE}", 0o755));
    shell(&mount.base(), "chmod 755 .");
    let before = access(&mount.base());
    assert_eq!(before, access(native.path()));
    let branch = mount.create("branch");
    assert_eq!(access(&branch), before);
    shell(&branch, WORK);
    shell(native.path(), WORK);
    let wanted = access(native.path());
    assert_eq!(access(&branch), wanted, "after the first changes");
    shell(&mount.create_below("branch", "child"), CHILD);
    shell(native.path(), CHILD);
    let wanted = access(native.path());
    assert_eq!(access(&mount.branch("child")), wanted, "in the child");
    mount.commit("child");
    assert_eq!(access(&branch), wanted, "after the child's commit");
    let archive = mount.directory.path().join("branch.tar");
    succeed(&mount.run(&["export", "-o", archive.to_str().unwrap(), "branch"], &[]));
    let mut import = Command::new(common::PROGRAM);
    import.args(["import", "imported"]).arg(mount.mountpoint());
    succeed(&import.stdin(fs::File::open(&archive).unwrap()).output().unwrap());
    assert_eq!(access(&mount.branch("imported")), wanted, "imported");
    mount.commit("branch");
    assert_eq!(access(&mount.base()), wanted, "committed");
    succeed(&mount.run(&["undo"], &[]));
    assert_eq!(access(&mount.base()), before, "undone");
    succeed(&mount.run(&["redo"], &[]));
    assert_eq!(access(&mount.base()), wanted, "redone");
}

/// The history keeps a name that a commit deleted by a link: a copy of it would not be the same file after an undo.
#[test]
fn the_links_of_a_file_count_a_deleted_name_until_its_commit_is_forgotten() {
    let links = |path: &Path| std::os::unix::fs::MetadataExt::nlink(&fs::metadata(path).unwrap());
    let ino = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let mount = Mount::over(|base| shell(base, "echo one > a; ln a b; ln a c"));
    let (a, b) = (mount.base().join("a"), mount.base().join("b"));
    shell(&mount.create("removes"), "rm b");
    mount.commit("removes");
    assert_eq!((b.exists(), links(&a)), (false, 3), "one more than there are names");
    assert_eq!(links(&mount.create("reader").join("a")), 3, "a branch shows the same");
    succeed(&mount.run(&["abort", "reader"], &[]));
    undo(&mount);
    assert_eq!((links(&a), links(&b), ino(&a) == ino(&b)), (3, 3, true), "one file again");
    redo(&mount);
    assert_eq!((b.exists(), links(&a)), (false, 3));
    succeed(&mount.run(&["prune"], &[]));
    common::wait_until("the trash is empty", || links(&a) == 2);
}
