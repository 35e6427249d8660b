//! A store from an untrusted source. Every name that a used store holds is replaced by a symbolic link, a FIFO, a device and
//! a hard link, and every command that opens a store runs on it: nothing outside is read or changed, and no command blocks.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Mount, PROGRAM, driver, shell, snapshot};

/// What stands outside, and must not be shown or changed.
const SECRET: &str = "outside-secret";

/// How long a command may take. It waits for nothing; a loaded machine is slow.
const PATIENCE_SECONDS: &str = "60";

/// Makes a plant: the name is `$1`, what is outside is `$2`.
const PLANTS: [(&str, &str); 7] = [
    ("a link to a file", "ln -s \"$2/secret\" \"$1\""),
    ("a link to an empty file", "ln -s \"$2/empty\" \"$1\""),
    ("a link to a directory", "ln -s \"$2/room\" \"$1\""),
    ("a FIFO", "mkfifo \"$1\""),
    ("a device", "mknod \"$1\" c 1 3"),
    ("a hard link to a file", "ln \"$2/secret\" \"$1\""),
    ("a hard link to an empty file", "ln \"$2/empty\" \"$1\""),
];

/// With a log of reads, where the driver can record them.
fn policy() -> &'static str {
    if driver() == "overlay" { "first-winner" } else { "serializable" }
}

fn outside(directory: &Path) -> PathBuf {
    let outside = directory.join("outside");
    fs::create_dir(&outside).unwrap();
    shell(
        &outside,
        &format!(
            "mkdir -p room/deep; echo {SECRET} | tee secret room/log room/plan room/deep/log > /dev/null; touch empty room/empty"
        ),
    );
    outside
}

/// Content, owner, mode and modification time of all that is outside.
fn state(outside: &Path) -> BTreeMap<PathBuf, (Vec<u8>, u32, u32, i64)> {
    let mut found = BTreeMap::new();
    for path in snapshot(outside).into_keys() {
        let full = outside.join(&path);
        let metadata = fs::symlink_metadata(&full).unwrap();
        let content = if metadata.is_file() { fs::read(&full).unwrap() } else { Vec::new() };
        let changed = if metadata.is_file() { metadata.mtime_nsec() } else { 0 };
        found.insert(path, (content, metadata.uid(), metadata.mode(), changed));
    }
    found
}

/// A store with all that a store may hold: records, branches one below the other, logs of what was written and read, a file
/// that was copied up in part, a commit that can be undone and one that is undone, a daemon's log.
fn used() -> Mount {
    let mount = Mount::unmounted(|base| {
        shell(base, "mkdir d; echo x > d/file; echo y > other; head -c 200000 /dev/urandom > big");
    })
    .with_big_files_from(65536);
    mount.mount_with(&["--policy", policy()]);
    for change in ["echo z > other", "rm d/file; echo new > d/new"] {
        shell(&mount.create("committed"), change);
        mount.commit("committed");
    }
    assert!(mount.run(&["undo"], &[]).status.success());
    let parent = mount.create("parent");
    shell(
        &parent,
        "cat d/file; mv d moved; echo new > new; printf x | dd of=big bs=1 conv=notrunc",
    );
    shell(&mount.create_below("parent", "child"), "echo more >> new; ln new linked");
    mount.unmount();
    mount
}

/// What a command says and how it ends, which is not by waiting.
fn said(words: &[&str], paths: &[&Path], when: &str) -> (Option<i32>, String) {
    let output = Command::new("timeout")
        .args(["--signal=KILL", PATIENCE_SECONDS, PROGRAM])
        .args(words)
        .args(paths)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.code().is_some_and(|code| code != 137), "{when}: {words:?} waits");
    assert!(!text.contains(SECRET), "{when}: {words:?} shows what is outside:\n{text}");
    (output.status.code(), text)
}

/// Runs everything that opens a store. Returns whether it could be mounted, and what the mount said.
fn use_store(base: &Path, mountpoint: &Path, when: &str) -> (bool, String) {
    said(&["log"], &[base], when);
    said(&["fsck"], &[base], when);
    said(&["recover"], &[base], when);
    let options = ["mount", "--driver", driver(), "--policy", policy(), "--base"];
    let (code, told) = said(&options, &[base, mountpoint], when);
    if code != Some(0) {
        return (false, told);
    }
    for words in [
        &["list"][..],
        &["history"],
        &["log"],
        &["undo"],
        &["redo"],
        &["create", "another"],
        &["diff", "child"],
        &["commit", "--force", "child"],
        &["commit", "--force", "parent"],
        &["abort", "another"],
        &["prune"],
    ] {
        said(words, &[mountpoint], when);
    }
    said(&["unmount"], &[mountpoint], when);
    said(&["fsck", "--repair"], &[base], when);
    (true, told)
}

/// Every path in a directory, itself not included.
fn names(directory: &Path) -> Vec<PathBuf> {
    snapshot(directory).into_keys().filter(|path| !path.as_os_str().is_empty()).collect()
}

#[test]
fn nothing_planted_in_a_store_leads_out_of_it_or_makes_anyone_wait() {
    let mount = used();
    let place = in_memory();
    let outside = outside(place.path());
    let paths = names(&mount.store());
    for wanted in ["branches/log", "branchfs.log", "lock", "format", ".gitignore", "history"] {
        assert!(paths.iter().any(|path| path == Path::new(wanted)), "{wanted}: {paths:?}");
    }
    let copy = Copy::of(&mount.base());
    let (is_mounted, told) = use_store(&copy.base(), &copy.mountpoint(), "as it is");
    assert!(is_mounted, "{told}");
    let before = state(&outside);
    let (refused, mounted) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for (what, plant) in PLANTS {
            let (mount, paths, outside) = (&mount, &paths, &outside);
            let (refused, mounted) = (&refused, &mounted);
            scope.spawn(move || {
                for path in paths {
                    match plant_at(mount, path, what, plant, outside) {
                        Some(true) => mounted.fetch_add(1, Ordering::Relaxed),
                        Some(false) => refused.fetch_add(1, Ordering::Relaxed),
                        None => 0,
                    };
                }
            });
        }
    });
    assert_eq!(state(&outside), before);
    let (refused, mounted) = (refused.into_inner(), mounted.into_inner());
    println!("{refused} plants were refused, {mounted} did no harm");
    assert!(refused > 50 && mounted > 20, "{refused} refused, {mounted} mounted");
}

/// A directory that no sync has to wait for.
fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A copy of a base and its store, and a mountpoint.
struct Copy(tempfile::TempDir);

impl Copy {
    fn of(base: &Path) -> Self {
        let copy = Self(in_memory());
        fs::create_dir(copy.mountpoint()).unwrap();
        let copied = Command::new("cp").arg("-a").arg(base).arg(copy.base()).status().unwrap();
        assert!(copied.success());
        copy
    }

    fn base(&self) -> PathBuf {
        self.0.path().join("base")
    }

    fn mountpoint(&self) -> PathBuf {
        self.0.path().join("at")
    }
}

/// Puts a plant in the place of an object of the store, and uses the store. Returns whether it could be mounted; `None`
/// where the plant would be one more of its kind.
fn plant_at(mount: &Mount, path: &Path, what: &str, plant: &str, outside: &Path) -> Option<bool> {
    let when = format!("{what} at {}", path.display());
    let copy = Copy::of(&mount.base());
    let name = copy.base().join(".branching").join(path);
    if fs::symlink_metadata(&name).unwrap().is_dir() && what.contains("file") {
        return None;
    }
    shell(&copy.base(), &format!("rm -rf '{}'", name.display()));
    let mut shell = Command::new("sh");
    let planted = shell.args(["-c", plant, "sh"]).arg(&name).arg(outside).status();
    assert!(planted.unwrap().success(), "{when}");
    let before = state(outside);
    let (is_mounted, told) = use_store(&copy.base(), &copy.mountpoint(), &when);
    assert!(state(outside) == before, "{when}: what is outside was changed");
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(is_mounted || told.contains(name), "{when}: {told}");
    Some(is_mounted)
}

#[test]
fn a_refusal_names_the_object_and_the_remedy() {
    let mount = used();
    let log = mount.store().join("branches/log");
    shell(
        &mount.store(),
        "cp branches/log ../kept; rm branches/log; ln -s ../../kept branches/log",
    );
    let (code, told) = use_store_refused(&mount);
    assert!(code != Some(0) && told.contains(log.to_str().unwrap()), "{told}");
    assert!(told.contains("symbolic link") && told.contains("Hint: "), "{told}");
    shell(&mount.store(), "rm branches/log; mv ../kept branches/log");
    mount.mount();
    assert_eq!(fs::read_to_string(mount.branch("parent").join("new")).unwrap(), "new\n");
}

fn use_store_refused(mount: &Mount) -> (Option<i32>, String) {
    let (base, at) = (mount.base(), mount.mountpoint());
    said(&["mount", "--base"], &[&base, &at], "a planted log")
}

#[test]
fn a_store_that_is_not_the_bases_own_is_neither_checked_nor_made() {
    let place = tempfile::tempdir().unwrap();
    let outside = outside(place.path());
    let mountpoint = place.path().join("at");
    shell(place.path(), "mkdir at empty base base/.branching");
    let other = used();
    for target in [outside.as_path(), &place.path().join("empty"), &other.store()] {
        let link = place.path().join("base/.branching/store");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(target, &link).unwrap();
        let before = (snapshot(target), snapshot(&outside));
        let base = place.path().join("base");
        let when = target.display().to_string();
        let (is_mounted, told) = use_store(&base, &mountpoint, &when);
        assert!(!is_mounted && told.contains("store"), "{told}");
        said(&["fsck", "--repair"], &[&base], &when);
        assert_eq!((snapshot(target), snapshot(&outside)), before, "{when}");
    }
}
