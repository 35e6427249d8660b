//! `branchfs fsck`: every damage is made for real, and found.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Mount, PROGRAM, shell, snapshot};

fn fsck(path: &Path, options: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } =
        Command::new(PROGRAM).arg("fsck").args(options).arg(path).output().unwrap();
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8(text).unwrap())
}

/// A store with a branch, a branch of it, and a commit that can be undone; unmounted.
fn kept() -> Mount {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo x > d/file; echo y > other"));
    shell(&mount.create("committed"), "echo z > other");
    mount.commit("committed");
    let parent = mount.create("parent");
    shell(&parent, "mv d moved; rm other; echo new > new");
    shell(&mount.create_below("parent", "child"), "echo more >> new");
    mount.unmount();
    mount
}

#[test]
fn a_store_as_the_daemon_leaves_it_is_clean() {
    let mount = kept();
    assert_eq!(fsck(&mount.base(), &[]), (Some(0), String::new()));
    assert_eq!(fsck(&mount.base().join(".branching"), &["--repair"]), (Some(0), String::new()));
    mount.mount();
    let (code, told) = fsck(&mount.base(), &[]);
    assert_eq!(code, Some(8), "{told}");
    assert!(told.contains("in use"), "{told}");
    mount.kill();
    assert_eq!(fsck(&mount.base(), &[]).0, Some(0), "after a kill");
    assert_eq!(fsck(mount.directory.path(), &[]).0, Some(8), "no store");
}

/// (what is done to the store, what is told, whether it can be repaired)
const DAMAGES: [(&str, &str, bool); 17] = [
    ("echo '{' > branches/7.new", "a draft", true),
    ("echo x >> layers/$LAYER/writes", "lines of the log are damaged", true),
    ("mkdir -p layers/5/upper", "no branch has this layer", true),
    ("rmdir layers/$LAYER/work", "the directory is missing", true),
    ("rm -r journal", "the directory is missing", true),
    ("mkdir journal/9; echo torn > journal/9/plan.new", "never decided", true),
    ("chown 12345 branches/$LAYER.json", "belongs to user 12345", true),
    ("chown 12345 layers/$LAYER", "belongs to user 12345", true),
    ("echo '{' > branches/$LAYER.json", "no JSON", false),
    ("sed -i 's/\"name\"/\"nom\"/' branches/$LAYER.json", "lacks a name", false),
    ("sed 's/\"id\":[0-9]*/\"id\":8/' branches/$LAYER.json > branches/8.json", "as well", false),
    ("cp branches/$LAYER.json branches/8.json", "another branch's", false),
    ("rm -r layers/$LAYER", "the layer is gone", false),
    ("rm -r layers/$LAYER/upper", "no content directory", false),
    (
        "sed -i 's/\"parent\":[0-9]*/\"parent\":77/' branches/$LAYER.json",
        "its parent 77 is gone",
        false,
    ),
    (
        "sed -i \"s/\\\"parent\\\":[0-9]*/\\\"parent\\\":$LAYER/\" branches/$LAYER.json",
        "its own ancestor",
        false,
    ),
    (
        "mkdir journal/9; echo torn > journal/9/plan; echo base > journal/9/1",
        "holds objects",
        false,
    ),
];

#[test]
fn each_damage_is_found_and_what_is_safe_is_repaired() {
    for (damage, wanted, is_repairable) in DAMAGES {
        let mount = kept();
        let store = mount.base().join(".branching");
        shell(&store, &format!("LAYER=$(ls layers | head -n 1); {damage}"));
        let before = snapshot(&store);
        let (code, told) = fsck(&mount.base(), &[]);
        assert_eq!(code, Some(4), "{damage}: {told}");
        assert!(told.contains(wanted), "{damage}: {told}");
        assert_eq!(before, snapshot(&store), "{damage}: a check changes nothing");
        let (code, told) = fsck(&mount.base(), &["--repair"]);
        assert_eq!(code, Some(if is_repairable { 1 } else { 4 }), "{damage}: {told}");
        if is_repairable {
            assert_eq!(fsck(&mount.base(), &[]), (Some(0), String::new()), "{damage}");
            mount.mount();
            shell(&mount.branch("child"), "grep -q more new; test -e moved/file; test ! -e other");
        }
    }
}

#[test]
fn damaged_marks_and_plans_are_found() {
    let mount = kept();
    let store = mount.base().join(".branching");
    let flags = rustix::fs::XattrFlags::empty();
    let first = std::fs::read_dir(store.join("layers")).unwrap();
    let layer = first
        .map(|entry| entry.unwrap().path())
        .find(|layer| layer.join("upper/moved").exists())
        .unwrap();
    let moved = layer.join("upper/moved");
    rustix::fs::setxattr(&moved, "trusted.overlay.redirect", b"/../../etc", flags).unwrap();
    rustix::fs::setxattr(&moved, "trusted.overlay.opaque", b"?", flags).unwrap();
    shell(&store, "for plan in history/*/plan; do echo torn >> $plan; done");
    let (code, told) = fsck(&mount.base(), &["--repair"]);
    assert_eq!(code, Some(4), "{told}");
    for wanted in ["leads out of the layers", "opaque mark", "its plan is damaged"] {
        assert!(told.contains(wanted), "{wanted}: {told}");
    }
}
