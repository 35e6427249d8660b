//! S6 and S7: snapshot isolation and serializability between branches of one parent.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::{Mount, Object, assert_same, fill_for_parts, refusal, shell, snapshot, succeed};

fn fill(base: &Path) {
    shell(
        base,
        "mkdir -p kept moved/inner gone/below replaced apart
         echo old >file; echo old >kept/file; echo old >moved/inner/file; echo old >moved/other
         echo old >gone/below/file; echo old >replaced/old; ln -s file link; ln kept/file kept/twin
         chmod 750 kept; mkfifo gone/pipe; echo old >apart/mine; echo old >apart/theirs
         find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

/// One of everything a commit can do.
const CHANGES: &str = "echo new >file; echo added >kept/added; echo longer than before >kept/file; rm -r gone
    mv moved elsewhere; echo changed >elsewhere/inner/file; mkdir -p new/deep; echo new >new/deep/file; mv elsewhere new/place
    rm -r replaced; mkdir -m 700 replaced; echo new >replaced/new; rm link; mkdir link; echo in >link/in; chmod 700 kept";

fn mounted(policy: &str) -> Mount {
    Mount::with(&["--policy", policy], fill)
}

/// A branch's tree without what a reader changes or cannot know.
fn seen(branch: &Path) -> BTreeMap<PathBuf, Object> {
    snapshot(branch)
}

#[test]
fn siblings_stay_live_and_keep_seeing_their_own_snapshot() {
    let mount = mounted("snapshot");
    let early = mount.create("early");
    let fresh = mount.create("fresh"); // nothing of it is known to the kernel before the commit
    let before = seen(&early);
    let idle = mount.create("idle"); // used before the commits, and not between them
    assert_same(&seen(&idle), &before, "before the commits");
    let numbers = fs::metadata(early.join("moved/inner/file")).unwrap().ino();
    shell(&mount.create("one"), CHANGES);
    mount.commit("one");
    assert_same(&seen(&early), &before, "after the first commit");
    assert_same(&seen(&fresh), &before, "looked at for the first time");
    assert_eq!(fs::metadata(early.join("moved/inner/file")).unwrap().ino(), numbers);
    let middle = mount.create("middle");
    let between = seen(&middle);
    assert_same(&between, &snapshot(&mount.base()), "a new branch sees the commit");
    shell(
        &mount.create("two"),
        "rm -r new; echo again >file; mkdir -p moved gone; echo other >moved/inner; echo x >gone/x",
    );
    mount.commit("two");
    assert_same(&seen(&early), &before, "after the second commit");
    assert_same(&seen(&fresh), &before, "after the second commit");
    assert_same(&seen(&middle), &between, "after the second commit");
    assert_same(&seen(&idle), &before, "after both commits");
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot"]);
    assert_same(&seen(&early), &before, "after a remount");
    assert_same(&seen(&middle), &between, "after a remount");
    mount.kill();
    mount.mount_with(&["--policy", "snapshot"]);
    assert_same(&seen(&early), &before, "after a kill");
}

/// Who has changed nothing yet has no layer: of the topmost directory too it sees what was.
#[test]
fn the_topmost_directory_stays_what_it_was_at_the_fork() {
    let mount = mounted("snapshot");
    shell(&mount.base(), "chmod 751 .");
    let early = mount.create("early");
    let before = seen(&early);
    mount.create("nothing");
    mount.commit("nothing");
    assert_same(&seen(&early), &before, "after a commit of nothing");
    shell(&mount.create("below"), "echo new >apart/mine");
    succeed(&mount.run(&["commit", "--only", "apart/mine", "below"], &[]));
    assert_same(&seen(&early), &before, "after a commit of one file");
    shell(&mount.create("top"), "chmod 700 .");
    mount.commit("top");
    assert_same(&seen(&early), &before, "after a commit of the topmost directory's attributes");
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot"]);
    assert_same(&seen(&early), &before, "after a remount");
    shell(&early, "echo mine >own; rm own");
    assert_eq!(snapshot(&early)[Path::new("")].mode, before[Path::new("")].mode);
}

#[test]
fn a_branch_works_on_in_its_snapshot_after_others_have_committed() {
    let mount = mounted("snapshot");
    let late = mount.create("late");
    shell(&mount.create("one"), CHANGES);
    mount.commit("one");
    // Each of these meets something that the commit changed or took away.
    shell(
        &late,
        "test \"$(cat moved/inner/file)\" = old; echo more >>moved/inner/file; mv moved/inner here; test \"$(cat here/file)\" = $'old\\nmore'
         rm gone/below/file; rmdir gone/below; test -p gone/pipe; echo mine >gone/mine; test ! -e new; mkdir new; echo mine >new/mine
         rm file; test ! -e file; echo mine >replaced/old; test ! -e replaced/new; test \"$(readlink link)\" = file; test ! -e kept/added
         echo twin >>kept/twin; test \"$(cat kept/file)\" = $'old\\ntwin'; test \"$(stat -c %h kept/file)\" = 2; ls new | grep -qx mine",
    );
    let said = refusal(&mount.run(&["commit", "late"], &[]));
    assert!(said.contains("another commit since the fork changed the same paths"), "{said}");
    let is_listed = |path: &str| said.lines().any(|line| line.trim() == path);
    for path in ["file", "gone", "moved", "replaced/old", "kept/file"] {
        assert!(is_listed(path), "{path}: {said}");
    }
    assert!(!is_listed("new"), "both made this directory, with different names in it: {said}");
}

#[test]
fn disjoint_changes_are_all_committed() {
    let mount = mounted("snapshot");
    let (one, two, three) = (mount.create("one"), mount.create("two"), mount.create("three"));
    shell(
        &one,
        "echo one >apart/theirs; echo one >apart/new-one; chmod 711 kept; rm -r gone; touch -d 2021-01-01 apart",
    );
    shell(&two, "echo two >apart/mine; echo two >kept/new-two; mv moved away; ln -s x two");
    shell(&three, "echo three >new-three; rm replaced/old");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(three.join("apart"), "user.three", b"3", flags).unwrap();
    for name in ["one", "two", "three"] {
        mount.commit(name);
    }
    shell(
        &mount.base(),
        "test \"$(cat apart/theirs apart/new-one)\" = $'one\\none'; test \"$(cat apart/mine kept/new-two)\" = $'two\\ntwo'
         test \"$(stat -c %a kept)\" = 711; test ! -e gone; test ! -e moved; test \"$(cat away/inner/file)\" = old; test -L two
         test \"$(cat new-three)\" = three; test ! -e replaced/old
         test -d replaced; test \"$(stat -c %h kept/file)\" = 2",
    );
    let mut value = [0; 8];
    let read = rustix::fs::getxattr(mount.base().join("apart"), "user.three", &mut value).unwrap();
    assert_eq!(&value[..read], b"3");
}

#[test]
fn the_same_path_is_a_conflict_that_names_it_and_forcing_it_wins() {
    // What the first commits, what the second tries, and the paths that stand against it.
    let cases: [(&str, &str, &str, &[&str]); 11] = [
        ("both write", "echo 1 >file", "echo 2 >file", &["file"]),
        ("both add", "echo 1 >new", "echo 2 >new", &["new"]),
        ("both remove", "rm file", "rm file", &["file"]),
        ("removed under it", "rm -r gone", "echo 2 >gone/below/new", &["gone", "gone/below"]),
        ("written below", "echo 1 >gone/below/new", "rm -r gone", &["gone/below/new"]),
        ("moved under it", "mv moved there", "echo 2 >moved/new", &["moved"]),
        ("written in the moved", "echo 1 >moved/other", "mv moved there", &["moved/other"]),
        ("both move", "mv moved one", "mv moved two", &["moved"]),
        ("another type", "rm link; mkdir link", "rm link; echo 2 >link", &["link"]),
        ("attributes", "chmod 700 apart", "chmod 711 apart", &["apart"]),
        ("content and attributes", "echo 1 >file", "chmod 600 file", &["file"]),
    ];
    for (case, first, second, paths) in cases {
        let mount = mounted("snapshot");
        let (one, two) = (mount.create("one"), mount.create("two"));
        shell(&one, first);
        shell(&two, second);
        mount.commit("one");
        let committed = snapshot(&mount.base());
        let said = refusal(&mount.run(&["commit", "two"], &[]));
        for path in paths {
            assert!(said.lines().any(|line| line.trim() == *path), "{case}: {path}: {said}");
        }
        assert_same(&snapshot(&mount.base()), &committed, case);
        if !["both remove", "removed under it", "moved under it", "both move"].contains(&case) {
            let wanted = snapshot(&two);
            succeed(&mount.run(&["commit", "--force", "two"], &[]));
            let found = snapshot(&mount.base());
            for path in paths.iter().map(Path::new).filter(|path| wanted.contains_key(*path)) {
                assert_eq!(found[path].content, wanted[path].content, "{case}: forced");
                assert_eq!(found[path].mode, wanted[path].mode, "{case}: forced");
            }
        }
    }
}

#[test]
fn a_branch_that_writes_only_after_the_others_commit_meets_it_too() {
    for (first, second) in
        [("rm file", "echo 2 >>file"), ("echo 1 >file", "rm file"), ("echo 1 >new", "echo 2 >new")]
    {
        let mount = mounted("snapshot");
        let (one, two) = (mount.create("one"), mount.create("two"));
        shell(&one, first);
        mount.commit("one");
        shell(&two, second);
        let said = refusal(&mount.run(&["commit", "two"], &[]));
        assert!(
            said.contains("another commit since the fork changed the same paths"),
            "{first}: {said}"
        );
    }
}

#[test]
fn a_serializable_commit_needs_the_paths_that_it_read_unchanged() {
    let cases = [
        ("opened", "echo 1 >file", "cat file", Some("file")),
        ("opened, metadata", "chmod 600 file", "cat file", Some("file")),
        ("a link", "ln -sf other link", "readlink link", Some("link")),
        ("listed", "echo 1 >apart/new", "ls apart", Some("apart/new")),
        ("listed, removed", "rm apart/mine", "ls apart", Some("apart/mine")),
        ("looked up in vain", "echo 1 >new", "test ! -e new", Some("new")),
        ("removed above", "rm -r gone", "cat gone/below/file", Some("gone")),
        ("listed, but only content changed", "echo 1 >apart/mine", "ls apart", None),
        ("looked at another", "echo 1 >apart/mine", "cat apart/theirs", None),
    ];
    for (case, first, second, path) in cases {
        for policy in ["serializable", "snapshot"] {
            let mount = mounted(policy);
            let (one, two) = (mount.create("one"), mount.create("two"));
            shell(&one, first);
            shell(&two, &format!("({second}) >/dev/null; echo depends >result"));
            mount.commit("one");
            match path.filter(|_| policy == "serializable") {
                Some(path) => {
                    let said = refusal(&mount.run(&["commit", "two"], &[]));
                    assert!(said.contains("changed files that it read"), "{case}: {said}");
                    assert!(said.lines().any(|line| line.trim() == path), "{case}: {said}");
                    succeed(&mount.run(&["commit", "--force", "two"], &[]));
                }
                None => mount.commit("two"),
            }
            assert!(mount.base().join("result").exists(), "{case}");
        }
    }
}

#[test]
fn reads_are_remembered_by_a_later_mount() {
    let mount = mounted("serializable");
    let (one, two) = (mount.create("one"), mount.create("two"));
    shell(&two, "cat file >copy");
    mount.unmount();
    mount.mount_with(&["--policy", "serializable"]);
    shell(&one, "echo 1 >file");
    mount.commit("one");
    assert!(refusal(&mount.run(&["commit", "two"], &[])).contains("changed files that it read"));
}

#[test]
fn a_commit_may_choose_its_own_policy() {
    let mount = mounted("first-winner");
    let (one, two) = (mount.create("one"), mount.create("two"));
    shell(&one, "echo 1 >file");
    shell(&two, "echo 2 >apart/mine");
    succeed(&mount.run(&["commit", "--policy", "snapshot", "one"], &[]));
    assert_eq!(fs::read_to_string(two.join("file")).unwrap(), "old\n");
    assert!(refusal(&mount.run(&["commit", "two"], &[])).contains("a sibling was committed first"));
    let said = refusal(&mount.run(&["commit", "--policy", "serializable", "two"], &[]));
    assert!(said.contains("what branch two read was not recorded"), "{said}");
    succeed(&mount.run(&["commit", "--policy", "snapshot", "two"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("apart/mine")).unwrap(), "2\n");
}

#[test]
fn branches_below_a_branch_keep_their_snapshot_too() {
    let mount = mounted("snapshot");
    let parent = mount.create("parent");
    shell(&parent, "echo parent >file; mkdir p; echo p >p/p");
    let (one, two) = (mount.create_below("parent", "one"), mount.create_below("parent", "two"));
    let before = seen(&two);
    shell(&mount.create("uncle"), "echo uncle >kept/file; rm -r gone; mv moved elsewhere");
    mount.commit("uncle");
    assert_same(&seen(&two), &before, "an uncle's commit");
    shell(&one, "echo one >file; rm -r p; echo one >one");
    mount.commit("one");
    assert_same(&seen(&two), &before, "a sibling's commit into the parent");
    shell(&two, "echo two >apart/mine");
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot"]);
    assert_eq!(fs::read_to_string(two.join("p/p")).unwrap(), "p\n");
    mount.commit("two");
    assert_eq!(fs::read_to_string(parent.join("one")).unwrap(), "one\n");
    assert_eq!(fs::read_to_string(parent.join("apart/mine")).unwrap(), "two\n");
    assert!(!parent.join("p").exists());
    mount.commit("parent");
    for (path, content) in
        [("file", "one\n"), ("kept/file", "uncle\n"), ("apart/mine", "two\n"), ("one", "one\n")]
    {
        assert_eq!(fs::read_to_string(mount.base().join(path)).unwrap(), content);
    }
    assert!(!mount.base().join("gone").exists() && mount.base().join("elsewhere/other").exists());
}

#[test]
fn siblings_below_a_branch_meet_as_siblings_of_main_do() {
    // What the first commits, what the second tries, and the path that stands against it.
    let cases: [(&str, &str, Option<&str>); 13] = [
        ("echo 1 >file", "echo 2 >file", Some("file")),
        ("echo 1 >new", "echo 2 >new", Some("new")),
        ("rm -r gone", "echo 2 >gone/below/new", Some("gone")),
        ("mv moved there", "echo 2 >moved/new", Some("moved")),
        ("echo 1 >moved/other", "mv moved there", Some("moved/other")),
        ("chmod 700 apart", "chmod 711 apart", Some("apart")),
        ("chmod 700 apart", "echo 2 >apart/mine", None),
        ("echo 1 >apart/theirs", "echo 2 >apart/mine", None),
        ("mv moved there", "echo 2 >apart/mine; rm link", None),
        // A directory made anew hides all that comes to lie in the old one.
        ("echo 1 >apart/new", "rm -r apart; mkdir apart; echo 2 >apart/mine", Some("apart/new")),
        (
            "echo 1 >replaced/new",
            "rm replaced/old; rmdir replaced; mkdir replaced",
            Some("replaced/new"),
        ),
        ("chmod 700 .", "echo 2 >apart/mine", None),
        ("echo 1 >apart/theirs", "chmod 700 .", None),
    ];
    for (first, second, path) in cases {
        let mount = mounted("snapshot");
        let parent = mount.create("parent");
        let (one, two) = (mount.create_below("parent", "one"), mount.create_below("parent", "two"));
        shell(&one, first);
        shell(&two, second);
        mount.commit("one");
        let tried = mount.run(&["commit", "two"], &[]);
        match path {
            Some(path) => {
                let said = refusal(&tried);
                assert!(said.lines().any(|line| line.trim() == path), "{first}; {second}: {said}");
                succeed(&mount.run(&["commit", "--force", "two"], &[]));
            }
            None => {
                succeed(&tried);
                let both = Mount::over(fill);
                shell(&both.base(), &format!("{first}; {second}"));
                let (mut found, mut wanted) = (snapshot(&parent), snapshot(&both.base()));
                for tree in [&mut found, &mut wanted] {
                    tree.values_mut().for_each(|object| object.mtime = (0, 0)); // made at two times
                }
                assert_same(&found, &wanted, &format!("{first}; {second}"));
            }
        }
    }
}

#[test]
fn a_name_made_and_removed_again_below_a_branch_hides_nothing_of_a_sibling() {
    // The work of the branch, and then of a child that is committed into it: nothing of it is left to see.
    let cases = [
        ("echo 2 >new", "rm new", "new"),
        ("mkdir new; echo 2 >new/file", "rm -r new", "new"),
        ("mkdir new; echo 2 >new/file", "mv new elsewhere", "new"),
        ("echo 2 >apart/new", "rm apart/new", "apart/new"),
    ];
    for (work, grandchild, path) in cases {
        let mount = mounted("snapshot");
        let parent = mount.create("parent");
        let (one, two) = (mount.create_below("parent", "one"), mount.create_below("parent", "two"));
        shell(&two, &format!("{work}; echo 2 >apart/mine"));
        shell(&mount.create_below("two", "three"), grandchild);
        mount.commit("three");
        shell(&one, &format!("echo 1 >{path}"));
        mount.commit("one");
        let said = refusal(&mount.run(&["commit", "two"], &[]));
        assert!(said.lines().any(|line| line.trim() == path), "{work}; {grandchild}: {said}");
        assert_eq!(fs::read_to_string(parent.join(path)).unwrap(), "1\n");
    }
}

#[test]
fn a_forced_commit_below_a_branch_keeps_its_own_attributes() {
    let mount = mounted("snapshot");
    let parent = mount.create("parent");
    let (one, two) = (mount.create_below("parent", "one"), mount.create_below("parent", "two"));
    shell(&one, "chmod 700 apart");
    shell(&two, "chmod 711 apart; echo 2 >apart/mine");
    mount.commit("one");
    succeed(&mount.run(&["commit", "--force", "two"], &[]));
    assert_eq!(fs::metadata(parent.join("apart")).unwrap().mode() & 0o777, 0o711);
}

#[test]
fn an_undo_takes_back_the_commit_that_was_last_whoever_was_forked_first() {
    let mount = mounted("snapshot");
    let (first, second) = (mount.create("first"), mount.create("second"));
    shell(&second, "echo second >kept/file");
    mount.commit("second");
    let between = snapshot(&mount.base());
    shell(&first, "echo first >file");
    mount.commit("first");
    succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &between, "undone");
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot"]);
    succeed(&mount.run(&["redo"], &[]));
    succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &between, "undone again");
}

#[test]
fn commits_that_the_history_forgot_are_no_drift_to_those_who_live_on() {
    let mount = Mount::with(&["--policy", "snapshot", "--history", "1"], fill);
    let (undone, pruned) = (mount.create("undone"), mount.create("pruned"));
    shell(&undone, "echo mine >file; rm -r gone; mv moved away");
    shell(&pruned, "echo mine >replaced/old");
    shell(&mount.create("one"), "echo one >file; echo one >gone/below/file; echo one >moved/other");
    mount.commit("one");
    succeed(&mount.run(&["undo"], &[]));
    shell(&mount.create("two"), "echo two >apart/theirs; echo two >replaced/old");
    mount.commit("two"); // what is undone is forgotten now
    mount.unmount();
    mount.mount_with(&["--policy", "snapshot", "--history", "1"]);
    mount.commit("undone");
    let said = refusal(&mount.run(&["commit", "pruned"], &[]));
    assert!(said.contains("another commit since the fork changed the same paths"), "{said}");
    shell(&mount.base(), "echo edited >apart/mine");
    let late = mount.create("late");
    shell(&late, "echo late >apart/mine");
    shell(&mount.base(), "echo edited again >apart/mine");
    let said = refusal(&mount.run(&["commit", "late"], &[]));
    assert!(said.contains("the base was changed directly"), "{said}");
}

#[test]
fn changes_of_a_branch_while_a_commit_is_undone_are_no_drift_at_the_redo() {
    let mount = mounted("snapshot");
    shell(&mount.create("one"), "rm -r gone replaced; echo new >replaced; echo new >new; rm file");
    mount.commit("one");
    let two = mount.create("two");
    succeed(&mount.run(&["undo"], &[]));
    shell(&two, "rm replaced; mv new gone; mkdir replaced; echo mine >file");
    let wanted = snapshot(&two);
    succeed(&mount.run(&["redo"], &[]));
    mount.commit("two");
    assert_same(&snapshot(&mount.base()), &wanted, "committed");
}

#[test]
fn an_undo_and_a_redo_are_commits_to_those_who_live_on() {
    let mount = mounted("snapshot");
    let early = mount.create("early");
    let before = seen(&early);
    let clean = snapshot(&mount.base());
    shell(&mount.create("one"), CHANGES);
    mount.commit("one");
    let after = snapshot(&mount.base());
    let late = mount.create("late");
    for round in 0..2 {
        succeed(&mount.run(&["undo"], &[]));
        assert_same(&seen(&early), &before, &format!("undone, round {round}: forked before"));
        assert_same(&seen(&late), &after, &format!("undone, round {round}: forked after"));
        assert_same(&snapshot(&mount.base()), &clean, &format!("undone, round {round}: main"));
        succeed(&mount.run(&["redo"], &[]));
        assert_same(&seen(&early), &before, &format!("done again, round {round}: forked before"));
        assert_same(&seen(&late), &after, &format!("done again, round {round}: forked after"));
        assert_same(&snapshot(&mount.base()), &after, &format!("done again, round {round}: main"));
    }
    succeed(&mount.run(&["undo"], &[]));
    shell(&early, "echo early >file");
    mount.commit("early");
    shell(&late, "echo late >file");
    let said = refusal(&mount.run(&["commit", "late"], &[]));
    assert!(said.lines().any(|line| line.trim() == "file"), "{said}");
}

/// The undo moves a directory back, and brings back the empty one that it had replaced.
#[test]
fn an_undo_of_a_rename_over_a_directory_conflicts_with_work_in_it_and_is_no_drift() {
    const WORK: [&str; 4] = [
        "echo more >>kept/empty/inner/file",
        "echo new >kept/empty/new",
        "mv kept/empty/other other",
        "mkdir moved; echo new >moved/new",
    ];
    for policy in ["snapshot", "serializable"] {
        let filled = |base: &Path| {
            fill(base);
            shell(base, "mkdir kept/empty");
        };
        for (work, is_before_undo) in
            WORK.iter().flat_map(|work| [true, false].map(|is_before| (work, is_before)))
        {
            let mount = Mount::with(&["--policy", policy], filled);
            shell(&mount.create("one"), "mv -T moved kept/empty");
            mount.commit("one");
            let branch = mount.create("branch");
            if is_before_undo {
                shell(&branch, work);
            }
            succeed(&mount.run(&["undo"], &[]));
            if !is_before_undo {
                shell(&branch, work);
            }
            let when = format!("{policy}, {work}, before the undo: {is_before_undo}");
            let before = snapshot(&mount.base());
            let said = refusal(&mount.run(&["commit", "branch"], &[]));
            assert!(
                said.contains("another commit since the fork changed the same paths"),
                "{when}: {said}"
            );
            let path = if work.contains("mkdir") { "moved" } else { "kept/empty" };
            assert!(said.lines().any(|line| line.trim() == path), "{when}: {said}");
            assert_same(&snapshot(&mount.base()), &before, &when);
        }
        // The redo does the same again, and others' edits of the base still count.
        let mount = Mount::with(&["--policy", policy], filled);
        let late = mount.create("late");
        shell(&late, "echo new >kept/empty/new");
        let edited = mount.create("edited");
        shell(&edited, "echo branch >apart/mine");
        shell(&mount.create("one"), "mv -T moved kept/empty");
        mount.commit("one");
        succeed(&mount.run(&["undo"], &[]));
        succeed(&mount.run(&["redo"], &[]));
        let said = refusal(&mount.run(&["commit", "late"], &[]));
        assert!(
            said.contains("another commit since the fork changed the same paths"),
            "{policy}, redone: {said}"
        );
        shell(&mount.base(), "echo edited >apart/mine");
        let said = refusal(&mount.run(&["commit", "edited"], &[]));
        assert!(said.contains("the base was changed directly"), "{policy}: {said}");
    }
}

#[test]
fn a_snapshot_of_a_removed_directory_has_no_acl_that_the_directory_did_not_have() {
    let mount = Mount::with(&["--policy", "snapshot"], |base| {
        shell(
            base,
            "mkdir -p gone/below/deeper; chmod 750 gone/below gone/below/deeper; setfacl -d -m u:1000:rwx gone",
        );
    });
    let sibling = mount.create("sibling");
    let before = seen(&sibling);
    shell(&mount.create("work"), "rm -r gone");
    mount.commit("work");
    assert_same(&seen(&sibling), &before, "after the commit");
}

#[test]
fn skip_leaves_to_siblings_what_they_committed() {
    let mount = Mount::with(&["--policy", "snapshot"], fill_for_parts);
    let (one, two) = (mount.create("one"), mount.create("two"));
    shell(&one, "echo one >src/a.py; rm -r gone; mv moved away");
    shell(
        &two,
        "echo two >src/a.py; echo two >gone/new; echo two >moved/file; echo two >mine; rm replaced/drop.py",
    );
    mount.commit("one");
    succeed(&mount.run(&["commit", "--skip", "two"], &[]));
    shell(
        &mount.base(),
        "test \"$(cat src/a.py)\" = one; test ! -e gone; test ! -e moved; test \"$(cat away/file)\" = old; test \"$(cat mine)\" = two
         test ! -e replaced/drop.py",
    );
}

#[test]
fn a_snapshot_outlives_the_partial_commits_of_both_sides() {
    let mount = Mount::with(&["--policy", "snapshot"], fill_for_parts);
    let (work, other) = (mount.create("work"), mount.create("other"));
    shell(&work, "echo work >src/a.py; echo work >src/deep/b.py; echo work >mine");
    shell(
        &other,
        "echo other >src/deep/c.txt; echo other >gone/x.py; echo other >gone/below/y.txt",
    );
    succeed(&mount.run(&["commit", "--only", "c.txt", "--only", "x.py", "other"], &[]));
    succeed(&mount.run(&["commit", "--only", "a.py", "work"], &[]));
    shell(
        &work,
        "test \"$(cat src/a.py src/deep/b.py src/deep/c.txt gone/x.py)\" = $'work\\nwork\\nold\\nold'",
    );
    shell(
        &other,
        "test \"$(cat src/a.py src/deep/b.py src/deep/c.txt gone/x.py gone/below/y.txt)\" = $'old\\nold\\nother\\nother\\nother'",
    );
    shell(&work, "echo work >src/deep/c.txt");
    let said = refusal(&mount.run(&["commit", "work"], &[]));
    assert!(said.lines().any(|line| line.trim() == "src/deep/c.txt"), "{said}");
    let forced = ["commit", "--force", "--only", "c.txt", "work"];
    let said = refusal(&mount.run(&forced, &[]));
    assert!(said.contains("rebase the branch first"), "{said}");
    succeed(&mount.run(&["rebase", "--force", "work"], &[]));
    succeed(&mount.run(&forced, &[]));
    mount.commit("work");
    mount.commit("other");
    shell(
        &mount.base(),
        "test \"$(cat src/a.py src/deep/b.py src/deep/c.txt gone/x.py gone/below/y.txt mine)\" = $'work\\nwork\\nwork\\nother\\nother\\nwork'",
    );
}
