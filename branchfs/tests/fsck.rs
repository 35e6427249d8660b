//! `branchfs fsck`: every damage is made for real, and found.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Mount, Object, PROGRAM, assert_same, shell, snapshot, succeed};

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
    ("echo '{' > branches/log.new", "a draft", true),
    ("echo x >> layers/$LAYER/writes", "lines of the log are damaged", true),
    ("mkdir -p layers/5/upper", "no branch has this layer", true),
    ("mkdir -p layers/5/upper/work", "the next mount sets it aside", false),
    ("rm -r journal", "the directory is missing", true),
    ("mkdir journal/9; echo torn > journal/9/plan.new", "an incomplete transaction", true),
    ("chown 12345 branches/log", "belongs to user 12345", true),
    ("chown 12345 layers/$LAYER", "belongs to user 12345", true),
    ("printf '{\"id\":8' >> branches/log", "cut off", true),
    ("echo '{' >> branches/log", "not JSON", false),
    ("sed -i 's/\"name\"/\"nom\"/' branches/log", "lacks an id, a name", false),
    (
        "grep name branches/log | tail -n 1 | sed 's/\"id\":[0-9]*/\"id\":8/' > 8; cat 8 >> branches/log; rm 8",
        "as has",
        false,
    ),
    ("rm -r layers/$LAYER", "the layer is gone", false),
    ("rm -r layers/$LAYER/upper", "no content directory", false),
    (
        "sed -i 's/\"parent\":[0-9]*/\"parent\":77/' branches/log",
        "is below branch 77, which is gone",
        false,
    ),
    (
        "sed -i \"s/\\\"parent\\\":[0-9]*/\\\"parent\\\":$LAYER/\" branches/log",
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

/// A store with all the books there are: branches under a snapshot layer and below one another, commits that can be undone and
/// redone, one that a crash cut off, and one that was forgotten.
fn with_all_books() -> Mount {
    let mount = Mount::unmounted(|base| {
        shell(base, "mkdir d; echo x > d/file; echo y > other; echo z > third")
    });
    mount.mount_with(&["--policy", "serializable", "--history", "2"]);
    let early = mount.create("early");
    shell(&early, "cat third; echo early > mine");
    for (name, work) in [
        ("gone", "echo 1 > other"),
        ("first", "echo 2 > other; rm -r d"),
        ("second", "echo 3 > third"),
        ("third", "echo 4 > new"),
    ] {
        shell(&mount.create(name), work);
        mount.commit(name);
    }
    succeed(&mount.run(&["undo"], &[]));
    let parent = mount.create("parent");
    shell(&parent, "echo parent > mine");
    shell(&mount.create_below("parent", "child"), "echo child > mine");
    mount.unmount();
    let store = mount.base().join(".branching");
    // As a crash leaves it between the last step and the move into the history.
    shell(
        &store,
        "for plan in history/*/plan; do tx=$(dirname $plan); test -e $tx/undone || last=$tx; done
         for layer in $last/layer-*; do mv $layer layers/${layer##*-}; done; rm $last/finished; mv $last journal/",
    );
    mount
}

const BRANCHES: [&str; 3] = ["early", "parent", "child"];

fn trees(mount: &Mount) -> BTreeMap<&'static str, BTreeMap<PathBuf, Object>> {
    let is_there = |name: &&str| fs::symlink_metadata(mount.branch(name)).is_ok();
    let untimed = |object: Object| Object { mtime: (0, 0), ..object }; // another store is of another time
    let tree = |name: &str| -> BTreeMap<PathBuf, Object> {
        let found = snapshot(&mount.branch(name)).into_iter();
        found.map(|(path, object)| (path, untimed(object))).collect()
    };
    BRANCHES.into_iter().filter(is_there).map(|name| (name, tree(name))).collect()
}

fn books(store: &Path, kind: &str) -> Vec<PathBuf> {
    let list = format!("shopt -s nullglob; printf '%s\\n' {kind}");
    let output = Command::new("bash").args(["-c", &list]).current_dir(store).output().unwrap();
    let list = String::from_utf8(output.stdout).unwrap();
    list.lines().filter(|line| !line.is_empty()).map(|line| store.join(line)).collect()
}

#[test]
fn no_damage_of_any_book_is_a_panic_or_a_loss() {
    const ALL: &str = "format branches/log layers/*/writes layers/*/reads layers/*/changes history/*/plan history/*/undone/plan history/*/finished journal/*/plan forgotten lock .gitignore";
    let options = ["--policy", "serializable", "--history", "2"];
    let mut mount = with_all_books();
    let is_unharmed = |mount: &Mount, when: &str| {
        let said = mount.run(
            &["mount", "--driver", "fuse", "--policy", "serializable", "--history", "2", "--base"],
            &[&mount.base()],
        );
        assert!(said.status.success(), "{when}: {}", String::from_utf8_lossy(&said.stderr));
        let found = trees(mount);
        mount.unmount();
        found
    };
    let mut wanted = None;
    const DAMAGES: [&str; 6] = ["empty", "half", "zeros", "garbage", "missing", "version"];
    for (number, kind) in ALL.split(' ').chain([ALL]).enumerate() {
        // In an ordinary run each book meets one, and all books together meet all.
        let turns = common::rounds(if kind == ALL { DAMAGES.len() } else { 1 }, DAMAGES.len());
        for damage in DAMAGES.iter().cycle().skip(number).take(turns) {
            let when = format!("{kind}: {damage}");
            let store = mount.base().join(".branching");
            let files = books(&store, kind);
            assert!(!files.is_empty(), "{when}: there is no such book");
            let saved: Vec<(PathBuf, Vec<u8>)> =
                files.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
            for (path, content) in &saved {
                let damaged = match *damage {
                    "empty" => Vec::new(),
                    "half" => content[..content.len() / 2].to_vec(),
                    "zeros" => vec![0; content.len()],
                    "garbage" => content.iter().map(|byte| byte ^ 0x5a).collect(),
                    _ => String::from_utf8_lossy(content)
                        .replace("branchfs 2", "branchfs 9")
                        .replace("\"version\":", "\"version\":9")
                        .into_bytes(),
                };
                if *damage == "missing" { fs::remove_file(path) } else { fs::write(path, damaged) }
                    .unwrap();
            }
            let base = snapshot(&mount.base());
            let (code, told) = fsck(&mount.base(), &[]);
            assert!(matches!(code, Some(0 | 4 | 8)), "{when}: {code:?} {told}");
            assert!(!told.contains("panicked"), "{when}: {told}");
            let words = [&["mount", "--driver", "fuse"], &options[..], &["--base"]].concat();
            let mounted = mount.run(&words, &[&mount.base()]);
            let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
            assert!(!said.contains("panicked"), "{when}: {said}");
            assert_same(&snapshot(&mount.base()), &base, &when);
            if !mounted.status.success() {
                assert!(said.starts_with("branchfs: ") && said.len() > 20, "{when}: {said:?}");
                // Nothing was lost: with the book as it was, all is there.
                for (path, content) in &saved {
                    fs::write(path, content).unwrap();
                }
                let found = is_unharmed(&mount, &when);
                let wanted = wanted.get_or_insert_with(|| found.clone());
                assert_eq!(&found, wanted, "{when}");
            } else {
                // What can be shown is shown as it was; what cannot is set aside, whole.
                let lost = store.join("lost");
                let found = trees(&mount);
                for name in BRANCHES {
                    let is_kept = found.contains_key(name)
                        || *damage == "missing" && kind.contains("branches/log")
                        || shell_finds(&lost, name);
                    assert!(is_kept, "{when}: {name} is gone\n{said}");
                    if let (Some(found), Some(wanted)) = (found.get(name), &wanted) {
                        let wanted: &BTreeMap<_, _> = &wanted[name];
                        assert_eq!(
                            found.get(Path::new("mine")),
                            wanted.get(Path::new("mine")),
                            "{when}"
                        );
                    }
                }
                for verb in ["undo", "redo", "history"] {
                    let output = mount.run(&[verb], &[]);
                    assert!(
                        !String::from_utf8_lossy(&output.stderr).contains("panicked"),
                        "{when}"
                    );
                }
                mount.ask("info")["pid"].as_u64().expect("the daemon lives");
                mount.unmount();
            }
            mount = with_all_books();
        }
    }
}

/// Whether what the branch wrote is somewhere below a directory.
fn shell_finds(directory: &Path, content: &str) -> bool {
    Command::new("grep").args(["-rqx", content]).arg(directory).status().unwrap().success()
}
