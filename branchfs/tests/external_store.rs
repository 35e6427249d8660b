//! A store on another file system than the base: the tests of the other files with such a store, and tests of its own.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(clippy::duplicate_mod, reason = "each module of the suite brings its own `common`")]

// The conformance suite: these modules find out by their path that they are here, see `common::Mount`.
#[path = "fail_stop.rs"]
mod fail_stop;
#[path = "faults.rs"]
mod faults;
#[path = "history.rs"]
mod history;
#[path = "model.rs"]
mod model;
#[path = "nested.rs"]
mod nested;
#[path = "partial_commit.rs"]
mod partial_commit;
#[path = "partial_commit_model.rs"]
mod partial_commit_model;
#[path = "policies.rs"]
mod policies;
#[path = "posix.rs"]
mod posix;
#[path = "rebase.rs"]
mod rebase;

mod common {
    pub(crate) use super::history::common::*;
}

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::{Mount, assert_same, refusal, shell, snapshot, succeed};

const FILLED: &str = "mkdir -p d/e gone moved; echo one > d/file; echo two > d/e/two; echo x > gone/x; echo m > moved/m; ln -s d link";

const CHANGES: &str = "echo more >> d/file; rm -r gone; mv moved there; echo n > there/new; mkdir new; echo 1 > new/one; ln new/one new/two
    mkfifo new/fifo; mknod new/zero c 0 0; truncate -s 3M new/sparse; chmod 4750 d/e/two; touch -d '2001-02-03 04:05:06.123456789' d/e; chown 1000:1000 link -h
    rm -r d/e; mkdir d/e; echo anew > d/e/anew; setfattr -n user.note -v x new 2>/dev/null || true";

fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_commit_carries_everything_and_leaves_nothing_behind() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let before = snapshot(&mount.base());
    let home = mount.base().join(".branching");
    assert_ne!(
        fs::metadata(mount.store()).unwrap().dev(),
        fs::metadata(mount.base()).unwrap().dev()
    );
    let branch = mount.create("work");
    shell(&branch, CHANGES);
    let wanted = snapshot(&branch);
    assert_eq!(names(&home.join("layers")), [""; 0], "the base's file system is not touched");
    succeed(&mount.run(&["commit", "--dry-run", "work"], &[]));
    assert_same(&snapshot(&mount.base()), &before, "a dry run");
    mount.kill();
    mount.mount();
    assert_same(&snapshot(&branch), &wanted, "after a kill");
    mount.commit("work");
    assert_same(&snapshot(&mount.base()), &wanted, "committed");
    for directory in [mount.store().join("layers"), home.join("layers"), home.join("journal")] {
        assert_eq!(names(&directory), [""; 0], "{}", directory.display());
    }
    assert_eq!(fs::metadata(mount.base().join("new/sparse")).unwrap().blocks(), 0, "holes stay");
    mount.unmount();
    assert!(!mount.store().exists(), "it keeps no branch");
    mount.mount();
    succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &before, "undone");
    succeed(&mount.run(&["prune"], &[]));
    mount.unmount();
    assert!(!home.exists(), "it keeps no commit");
}

#[test]
fn the_check_of_a_store_looks_at_both_of_its_parts() {
    let mount = Mount::unmounted(|base| shell(base, FILLED));
    mount.mount_with(&["--policy", "snapshot"]);
    mount.create("early");
    shell(&mount.create("work"), CHANGES);
    mount.commit("work");
    mount.unmount();
    let fsck = |path: &Path| {
        let output = std::process::Command::new(common::PROGRAM).arg("fsck").arg(path).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    for place in [mount.base(), mount.store()] {
        assert_eq!(fsck(&place), (Some(0), String::new()), "{}", place.display());
    }
    shell(&mount.base(), "for plan in .branching/history/*/plan; do echo torn >> $plan; done");
    for place in [mount.base(), mount.store()] {
        let (code, said) = fsck(&place);
        assert_eq!(code, Some(4), "{said}");
        assert!(said.contains("its plan is damaged"), "{said}");
    }
}

#[test]
fn the_overlay_driver_is_not_for_a_store_elsewhere() {
    let mount = Mount::unmounted(|base| shell(base, FILLED));
    let store = mount.store();
    let words = ["mount", "--driver", "overlay", "--store"];
    let said = refusal(&mount.run(&words, &[&store, Path::new("--base"), &mount.base()]));
    assert!(said.contains("the store is not on the base's file system"), "{said}");
    assert!(!store.exists() && !mount.base().join(".branching").exists());
}

#[test]
fn a_refused_commit_leaves_no_copy() {
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("work"), "echo mine > d/file");
    shell(&mount.base(), "echo theirs, longer > d/file");
    assert!(
        refusal(&mount.run(&["commit", "work"], &[])).contains("the base was changed directly")
    );
    assert_eq!(names(&mount.base().join(".branching/layers")), [""; 0]);
    succeed(&mount.run(&["commit", "--force", "work"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("d/file")).unwrap(), "mine\n");
}

#[test]
fn a_store_belongs_to_one_base_and_a_base_finds_its_store() {
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("work"), "echo kept > new");
    mount.unmount();
    // Without --store it is found.
    succeed(&mount.run(&["mount", "--base"], &[&mount.base()]));
    shell(&mount.branch("work"), "grep -qx kept new");
    mount.unmount();
    let other = Mount::unmounted(|base| shell(base, FILLED));
    let store = mount.store();
    let said =
        refusal(&other.run(&["mount", "--store"], &[&store, Path::new("--base"), &other.base()]));
    assert!(said.contains("a store belongs to one base"), "{said}");
    assert!(!other.base().join(".branching").exists());
    let aside = store.with_extension("aside");
    fs::rename(&store, &aside).unwrap();
    let said = refusal(&mount.run(&["mount", "--base"], &[&mount.base()]));
    assert!(said.contains("which is missing"), "{said}");
    fs::rename(&aside, &store).unwrap();
    mount.mount();
    mount.commit("work");
    shell(&mount.base(), "grep -qx kept new");
}

#[test]
fn a_base_that_keeps_branches_itself_takes_no_store_elsewhere() {
    let mount = Mount::unmounted(|base| shell(base, FILLED));
    succeed(&mount.run(&["mount", "--base"], &[&mount.base()]));
    mount.create("work");
    mount.unmount();
    let store = mount.store();
    let said =
        refusal(&mount.run(&["mount", "--store"], &[&store, Path::new("--base"), &mount.base()]));
    assert!(said.contains("mount it without --store"), "{said}");
    assert!(!store.exists());
}

#[test]
fn a_commit_without_room_for_its_copies_names_the_file_and_gives_the_room_back() {
    let disk = common::disk::Disk::image("32M", "mkfs.ext4 -q -m 0");
    disk.mount();
    let branch = disk.create("work");
    shell(&branch, "mkdir d; head -c 40M /dev/zero | tr '\\0' x > d/big; echo small > d/small");
    let free = disk.free();
    let said = refusal(&disk.run(&["commit", "work"], &[]));
    assert!(said.contains("base/d/big: No space left on device"), "{said}");
    const SLACK: u64 = 256 << 10; // directories that stay
    common::wait_until("the room is given back", || disk.free() + SLACK > free);
    shell(&branch, "truncate -s 1M d/big");
    disk.commit("work");
    assert_eq!(fs::metadata(disk.base().join("d/big")).unwrap().len(), 1 << 20);
    disk.unmount();
}
