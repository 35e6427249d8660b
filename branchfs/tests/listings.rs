//! Directory listings while the directory changes, and the kernel's cache of listings.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::Path;

use common::{Mount, shell};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

/// More than the kernel asks for at once.
const MANY: usize = 3000;

fn fill(base: &Path) {
    fs::create_dir(base.join("d")).unwrap();
    for number in 0..MANY {
        fs::write(base.join(format!("d/old{number}")), "").unwrap();
    }
}

fn name(entry: std::io::Result<fs::DirEntry>) -> String {
    entry.unwrap().file_name().into_string().unwrap()
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(name).collect()
}

#[test]
fn a_reader_sees_what_stays_once_while_others_read_make_and_remove() {
    let mount = Mount::over(fill);
    let directory = mount.create("branch").join("d");
    let mut reader = fs::read_dir(&directory).unwrap();
    let mut seen: Vec<String> = reader.by_ref().take(10).map(name).collect();
    assert_eq!(names(&directory).len(), MANY);
    shell(&directory, "rm old*7; touch new{0..499}");
    let after = names(&directory);
    seen.extend(reader.map(name));
    let once: BTreeSet<String> = seen.iter().cloned().collect();
    assert_eq!(seen.len(), once.len(), "a name came twice");
    let stayed: BTreeSet<String> =
        after.iter().filter(|name| name.starts_with("old")).cloned().collect();
    assert!(stayed.is_subset(&once), "{:?} did not come", stayed.difference(&once).next());
    assert_eq!(after.len(), MANY - MANY / 10 + 500);
}

#[test]
fn all_is_gone_when_each_name_was_removed_as_it_came() {
    let mount = Mount::over(fill);
    let directory = mount.create("branch").join("d");
    for entry in fs::read_dir(&directory).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    fs::remove_dir(&directory).unwrap();
}

#[test]
fn a_branch_is_listed_again_without_a_request() {
    let mount = Mount::over(fill);
    let directory = mount.create("branch").join("d");
    assert_eq!(names(&directory).len(), MANY);
    let asked = |kinds: &[&str]| kinds.iter().map(|kind| mount.requests(kind)).sum::<u64>();
    let before = asked(&["readdir", "readdirplus"]);
    assert_eq!(names(&directory).len(), MANY);
    assert_eq!(asked(&["readdir", "readdirplus"]), before);
    assert_eq!(asked(&["opendir", "releasedir"]), 1, "the first one was told that none is needed");
    fs::remove_file(directory.join("old7")).unwrap();
    assert_eq!(names(&directory).len(), MANY - 1);
}

#[test]
fn main_shows_at_once_what_others_make_whatever_the_times_say() {
    let mount = Mount::over(|base| shell(base, "mkdir d; touch one d/one"));
    for directory in ["", "d"] {
        let (shown, base) = (mount.mountpoint().join(directory), mount.base().join(directory));
        let others = names(&shown).len();
        assert_eq!(names(&shown).len(), others);
        let status = rustix::fs::stat(&base).unwrap();
        let time = |tv_sec, tv_nsec: u64| Timespec { tv_sec, tv_nsec: tv_nsec.try_into().unwrap() };
        let times = Timestamps {
            last_access: time(status.st_atime, status.st_atime_nsec),
            last_modification: time(status.st_mtime, status.st_mtime_nsec),
        };
        fs::write(base.join("two"), "").unwrap();
        utimensat(CWD, &base, &times, AtFlags::empty()).unwrap();
        assert!(names(&shown).contains("two"), "in {shown:?}");
        assert_eq!(names(&shown).len(), others + 1);
    }
}

#[test]
fn a_listing_shows_the_inode_numbers_that_stat_shows() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p plain/in moved/in anew/in other/in deep/er; echo > deep/er/f; echo > file",
        );
    });
    let change = "mv moved renamed; rm -r anew; mkdir anew; mv other other2; mkdir other; chmod 700 plain; mkdir new; echo >> file
         mv deep/er deep/est; mkdir deep/er; mv file file2";
    let assert_same_numbers = |directory: &Path| {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let stat = fs::symlink_metadata(entry.path()).unwrap();
            assert_eq!(entry.ino(), stat.ino(), "{}", entry.path().display());
        }
    };
    let branch = mount.create("branch");
    shell(&branch, change);
    let child = mount.create_below("branch", "child");
    for directory in [&branch, &branch.join("deep"), &child, &child.join("deep")] {
        assert_same_numbers(directory);
    }
    shell(&child, "mv renamed again; rm -r new; mkdir new; mv other2 other/x");
    for directory in [&child, &child.join("other")] {
        assert_same_numbers(directory);
    }
    mount.unmount();
    mount.mount();
    for directory in [&branch, &child, &child.join("other"), &child.join("deep")] {
        assert_same_numbers(directory);
    }
}

#[test]
fn a_rename_that_asks_for_a_whiteout_is_refused() {
    let mount = Mount::over(|base| shell(base, "echo file > file"));
    let branch = mount.create("branch");
    for root in [&branch, &mount.mountpoint()] {
        let flags = rustix::fs::RenameFlags::WHITEOUT;
        let (from, to) = (root.join("file"), root.join("new"));
        let renamed =
            rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &to, flags);
        assert_eq!(renamed, Err(rustix::io::Errno::INVAL));
        assert_eq!(fs::read_to_string(&from).unwrap(), "file\n");
        assert!(!to.exists());
    }
}
