//! Fail-stop: what happens after an error in the last part of a commit, and how it is recovered.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Mount, assert_same, refusal, shell, snapshot, succeed};

/// A directory whose entries cannot be changed until this is dropped.
struct Immutable(PathBuf);

impl Immutable {
    fn new(path: PathBuf) -> Self {
        shell(Path::new("/"), &format!("chattr +i '{}'", path.display()));
        Self(path)
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        let _ = std::process::Command::new("chattr").arg("-i").arg(&self.0).status();
    }
}

fn fill(base: &Path) {
    shell(base, "echo old >file; mkdir d; echo old >d/gone; echo old >other");
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A mount with a commit of branch `a` whose last step failed, and the state that it should have.
fn incomplete() -> (Mount, Immutable, std::collections::BTreeMap<PathBuf, common::Object>) {
    let mount = Mount::over(fill);
    let branch = mount.create("a");
    shell(&branch, "echo a >file; rm d/gone; mkdir new; echo a >new/file");
    let wanted = snapshot(&branch);
    let history = Immutable::new(mount.base().join(".branching/history"));
    let said = refusal(&mount.run(&["commit", "a"], &[]));
    assert!(said.contains("the commit was applied"), "{said}");
    assert!(said.contains("do not repeat it"), "{said}");
    assert_same(&snapshot(&mount.base()), &wanted, "it was applied");
    (mount, history, wanted)
}

fn check_store(mount: &Mount) {
    let checked = std::process::Command::new(common::PROGRAM)
        .args(["fsck".as_ref(), mount.base().as_os_str()])
        .output()
        .unwrap();
    succeed(&checked);
}

#[test]
fn nothing_is_accepted_until_the_last_commit_is_complete_and_the_next_change_completes_it() {
    let (mount, history, _) = incomplete();
    for words in
        [&["create", "b"][..], &["abort", "a"], &["commit", "a"], &["undo"], &["redo"], &["prune"]]
    {
        let said = refusal(&mount.run(words, &[]));
        let gone = said.contains("there is no branch a");
        assert!(said.contains("nothing was changed") || gone, "{words:?}: {said}");
    }
    drop(history);
    let branch = mount.create("b");
    assert_eq!(names(&mount.base().join(".branching/journal")), [""; 0], "it is complete");
    shell(&branch, "echo b >file; echo b >other");
    let wanted = snapshot(&branch);
    mount.commit("b");
    for _ in 0..2 {
        mount.unmount();
        check_store(&mount);
        mount.mount();
        assert_same(&snapshot(&mount.base()), &wanted, "both commits are there");
    }
    succeed(&mount.run(&["undo"], &[]));
    succeed(&mount.run(&["undo"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "old\n");
    assert!(mount.base().join("d/gone").exists());
}

#[test]
fn the_next_mount_completes_a_commit_and_later_commits_stay() {
    let (mount, history, wanted) = incomplete();
    drop(history);
    mount.kill();
    mount.mount();
    assert_same(&snapshot(&mount.base()), &wanted, "it is complete");
    let branch = mount.create("b");
    shell(&branch, "echo b >file");
    let wanted = snapshot(&branch);
    mount.commit("b");
    for _ in 0..2 {
        mount.unmount();
        check_store(&mount);
        mount.mount();
        assert_same(&snapshot(&mount.base()), &wanted, "both commits are there");
    }
}

#[test]
fn an_ordinary_unmount_keeps_what_recovery_needs() {
    let (mount, history, wanted) = incomplete();
    mount.unmount();
    drop(history);
    mount.mount();
    assert_same(&snapshot(&mount.base()), &wanted, "it is complete");
    succeed(&mount.run(&["undo"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "old\n");
    mount.unmount();
    check_store(&mount);
}

#[test]
fn a_mount_refuses_a_journal_with_several_transactions_and_changes_nothing() {
    let (mount, history, wanted) = incomplete();
    // The guard stays where the daemon does not end in order, and would recover when the directory can be changed again.
    common::kill_guard(&mount);
    mount.unmount();
    drop(history);
    let journal = mount.base().join(".branching/journal");
    let number = names(&journal).remove(0);
    shell(&journal, &format!("cp -a {number} 9{number}"));
    for _ in 0..2 {
        let base = mount.base();
        let said =
            refusal(&mount.run(&["mount", "--driver", common::driver(), "--base"], &[&base]));
        assert!(said.contains("2 unfinished transactions"), "{said}");
        assert!(said.contains(journal.to_str().unwrap()), "{said}");
        assert!(said.contains("back up the base directory"), "{said}");
        assert_same(&snapshot(&mount.base()), &wanted, "it is as it was");
    }
    fs::remove_dir_all(journal.join(format!("9{number}"))).unwrap();
    mount.mount();
    assert_same(&snapshot(&mount.base()), &wanted, "it is complete");
}
