//! S9 and S11 with a real daemon: it is killed (`kill -9`) at a random moment of each verb, again and again over one and
//! the same base. The next mount finds base and branches as before the verb or as after it, never between, and works on.
//!
//! The moments are random; the outcome must be right at each. Some twenty kills in every run, hundreds in
//! `scripts/test --soak`.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Mount, Object, assert_same, shell, succeed};

type Snapshot = BTreeMap<PathBuf, Object>;

/// A tree, over overlayfs without its link counts: a file of the base has one link more as long as the history holds it, and
/// loses it in a parent that shows the child's files after a nested commit.
fn snapshot(directory: &Path) -> Snapshot {
    let mut found = common::snapshot(directory);
    if common::driver() == "overlay" {
        found.values_mut().for_each(|object| object.nlink = 0);
    }
    found
}

/// Starts a verb, kills the daemon some time into it, and mounts again.
fn killed(mount: &Mount, words: &[&str], round: usize) {
    let mut verb = Command::new(common::PROGRAM);
    verb.args(words).arg(mount.mountpoint()).stdin(Stdio::null());
    let mut verb = verb.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Steps that meet every part of a verb of some tens of milliseconds in the course of the rounds.
    std::thread::sleep(Duration::from_micros((round as u64 * 7919) % 40_000));
    mount.kill();
    verb.wait().unwrap();
    mount.mount();
}

fn is_open(mount: &Mount, name: &str) -> bool {
    let listed = mount.run(&["list"], &[]);
    succeed(&listed);
    let text = String::from_utf8(listed.stdout).unwrap();
    text.lines().any(|line| line.split('\t').next() == Some(name))
}

/// One of two states, the first of which is before. Returns whether it is the second.
fn is_after(found: &Snapshot, before: &Snapshot, after: &Snapshot, when: &str) -> bool {
    // What tells them apart beside the times is in every change that is made here.
    let marker = Path::new("marker");
    let changed = found.get(marker).map(|object| &object.content)
        == after.get(marker).map(|object| &object.content);
    assert_same(found, if changed { after } else { before }, when);
    changed
}

/// Changes of every kind, different in each round.
fn work(directory: &Path, round: usize) {
    shell(
        directory,
        &format!(
            "echo {round} > marker; for i in $(seq 1 7 60); do echo {round} > files/$i; done; rm -f gone-*; echo > gone-{round}
             mkdir -p new/{round}; echo {round} > new/{round}/file; ln -f files/2 linked; ln -sfn new/{round} link; chmod $((700 + {round} % 8)) files
             if test -d left; then mv left right; echo {round} > right/moved; else mv right left; echo {round} > left/moved; fi"
        ),
    );
}

#[test]
fn a_daemon_killed_in_any_verb_leaves_all_before_or_all_after_it() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir files left; for i in $(seq 60); do echo base > files/$i; done; seq 9 > left/kept; echo base > marker",
        );
    });
    let mut outcomes = BTreeMap::new();
    for round in 0..common::rounds(20, 300) {
        let (name, when) = (format!("b{round}"), format!("round {round}"));
        let before = snapshot(&mount.base());
        let branch = mount.create(&name);
        work(&branch, round);
        let after = snapshot(&branch);
        let verb = ["commit", "abort", "create", "nested commit", "undo"][round % 5];
        let happened = match verb {
            "commit" => {
                killed(&mount, &["commit", &name], round);
                let happened = is_after(&snapshot(&mount.base()), &before, &after, &when);
                assert_eq!(is_open(&mount, &name), !happened, "{when}");
                if !happened {
                    assert_same(&snapshot(&branch), &after, &when);
                    mount.commit(&name);
                    assert_same(&snapshot(&mount.base()), &after, &when);
                }
                happened
            }
            "abort" => {
                killed(&mount, &["abort", &name], round);
                assert_same(&snapshot(&mount.base()), &before, &when);
                let is_kept = is_open(&mount, &name);
                if is_kept {
                    assert_same(&snapshot(&branch), &after, &when);
                    mount.abort(&name);
                }
                !is_kept
            }
            "create" => {
                killed(&mount, &["create", "extra"], round);
                assert_same(&snapshot(&mount.base()), &before, &when);
                assert_same(&snapshot(&branch), &after, &when);
                let is_made = is_open(&mount, "extra");
                if is_made {
                    assert_same(&snapshot(&mount.branch("extra")), &before, &when);
                    mount.abort("extra");
                }
                mount.commit(&name);
                is_made
            }
            "nested commit" => {
                let child = mount.create_below(&name, "child");
                work(&child, 1000 + round);
                let wanted = snapshot(&child);
                killed(&mount, &["commit", "child"], round);
                assert_same(&snapshot(&mount.base()), &before, &when);
                let happened = is_after(&snapshot(&branch), &after, &wanted, &when);
                assert_eq!(is_open(&mount, "child"), !happened, "{when}");
                if !happened {
                    assert_same(&snapshot(&child), &wanted, &when);
                    mount.commit("child");
                }
                mount.commit(&name);
                assert_same(&snapshot(&mount.base()), &wanted, &when);
                happened
            }
            _ => {
                mount.commit(&name);
                killed(&mount, &["undo"], round);
                let is_kept = is_after(&snapshot(&mount.base()), &before, &after, &when);
                if is_kept {
                    succeed(&mount.run(&["undo"], &[]));
                    assert_same(&snapshot(&mount.base()), &before, &when);
                }
                !is_kept
            }
        };
        outcomes.entry((verb, happened)).and_modify(|count| *count += 1).or_insert(1);
    }
    println!("{outcomes:?}");
}
