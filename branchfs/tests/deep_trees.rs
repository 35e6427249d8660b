//! Trees deeper than any path, and directories with very many entries: every verb works, or is refused with the limit of a
//! path, and the daemon continues to work.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "test code")]

mod common;

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Mount, driver, refusal, rounds, shell, succeed, wait_until};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// `PATH_BYTES_MAX` of the program: what a path below the root of a branch may have.
const PATH_BYTES_MAX: usize = 4068;

/// Levels with names of so many bytes that the limit allows.
const fn levels_max(name_bytes: usize) -> usize {
    (PATH_BYTES_MAX + 1) / (name_bytes + 1)
}

fn open(at: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// Makes a chain of directories of one name from the top down, never by a path. Returns how many there are, and what ended
/// it.
fn descend(top: &Path, name: &str, levels: usize) -> (usize, Option<Errno>, OwnedFd) {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut here = rustix::fs::open(top, flags, Mode::empty()).unwrap();
    for level in 0..levels {
        match rustix::fs::mkdirat(&here, name, Mode::RWXU).and_then(|()| open(&here, name)) {
            Ok(below) => here = below,
            Err(error) => return (level, Some(error), here),
        }
    }
    (levels, None, here)
}

fn write_file(directory: &OwnedFd, name: &str) {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::RUSR).unwrap();
    rustix::io::write(file, b"content").unwrap();
}

fn check(mount: &Mount) {
    let check = || Command::new(common::PROGRAM).arg("fsck").arg(mount.base()).output().unwrap();
    // The guard process ends a moment after the daemon.
    let in_use = || String::from_utf8_lossy(&check().stderr).contains("is in use");
    wait_until("the store is free", || !in_use());
    succeed(&check());
}

fn export(mount: &Mount, name: &str) -> std::process::Output {
    let words = ["export", name, "--output", "/dev/null"];
    mount.run(&words, &[])
}

/// `tempfile` could not remove what is so deep.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = Command::new("rm").arg("-rf").arg(&self.0).status();
    }
}

#[test]
fn a_chain_of_directories_up_to_the_limit_passes_every_verb() {
    let mount = Mount::new();
    let _removed = Removed(mount.base());
    // And a file at the bottom. Each change below FUSE costs its whole path, which adds up without optimization.
    let most = levels_max(1) - 1;
    let levels = if driver() == "fuse" { rounds(500, most) } else { most };
    let (made, error, bottom) = descend(&mount.create("deep"), "d", levels);
    assert_eq!((made, error), (levels, None));
    write_file(&bottom, "f");
    drop(bottom);
    let diff = mount.run(&["diff", "deep"], &[]);
    succeed(&diff);
    assert_eq!(diff.stdout.iter().filter(|byte| **byte == b'\n').count(), levels + 1);
    succeed(&export(&mount, "deep"));
    mount.unmount();
    check(&mount);
    mount.mount();
    mount.commit("deep");
    let (file, below) = ("d/".repeat(levels) + "f", mount.base());
    let read = |script: String| shell(&below, &script);
    read(format!("test \"$(cat {file})\" = content"));
    succeed(&mount.run(&["undo"], &[]));
    assert!(!mount.base().join("d").exists());
    succeed(&mount.run(&["redo"], &[]));
    // What is removed is as deep.
    shell(&mount.create("removes"), "rm -r d");
    mount.commit("removes");
    assert!(!mount.base().join("d").exists());
    mount.unmount();
    check(&mount);
}

#[test]
fn a_tree_deeper_than_the_limit_is_refused_by_name_and_can_be_dropped() {
    let mount = Mount::new();
    let _removed = Removed(mount.base());
    let levels = rounds(8_000, 50_000);
    let name = "d".repeat(if driver() == "fuse" { rounds(12, 1) } else { 1 });
    let (made, error, bottom) = descend(&mount.create("deep"), &name, levels);
    drop(bottom);
    if driver() == "fuse" {
        assert_eq!((made, error), (levels_max(name.len()), Some(Errno::NAMETOOLONG)));
    } else {
        assert_eq!((made, error), (levels, None), "the kernel knows no such limit");
        for refused in [
            mount.run(&["diff", "deep"], &[]),
            mount.run(&["commit", "deep"], &[]),
            mount.run(&["commit", "--force", "deep"], &[]),
            mount.run(&["commit", "--only", "nothing", "deep"], &[]),
            mount.run(&["create", "--parent", "deep", "below"], &[]),
            export(&mount, "deep"),
        ] {
            let message = refusal(&refused);
            assert!(message.contains("at most 4068 bytes"), "{message}");
            assert!(message.len() < 1000, "{message}");
        }
    }
    succeed(&mount.run(&["list"], &[]));
    mount.unmount();
    check(&mount);
    mount.mount();
    mount.abort("deep");
    mount.unmount();
    mount.mount(); // and whatever was left in the trash goes on being deleted
    let trash = mount.store().join("trash");
    wait_until("the trash is empty", || fs::read_dir(&trash).unwrap().count() == 0);
    shell(&mount.create("next"), "echo x > file");
    mount.commit("next");
    mount.unmount();
    check(&mount);
}

#[test]
fn renaming_cannot_take_a_name_beyond_the_limit() {
    let mount = Mount::new();
    let branch = mount.create("deep");
    let directory = "d".repeat(12);
    let (_, _, bottom) = descend(&branch, &directory, levels_max(directory.len()) - 16);
    fs::create_dir(branch.join("other")).unwrap();
    let name = "n".repeat(220);
    let from = rustix::fs::open(&branch, OFlags::PATH, Mode::empty()).unwrap();
    let renamed = rustix::fs::renameat(&from, "other", &bottom, name.as_str());
    let linked = {
        write_file(&from, "file");
        rustix::fs::linkat(&from, "file", &bottom, name.as_str(), rustix::fs::AtFlags::empty())
    };
    drop((bottom, from));
    if driver() == "fuse" {
        assert_eq!((renamed, linked), (Err(Errno::NAMETOOLONG), Err(Errno::NAMETOOLONG)));
        mount.commit("deep");
    } else {
        assert!(refusal(&mount.run(&["commit", "deep"], &[])).contains("at most 4068 bytes"));
        mount.abort("deep");
    }
    let _removed = Removed(mount.base());
}

#[test]
fn work_is_possible_beside_a_deep_tree_of_the_base() {
    let mount = Mount::over(|base| drop(descend(base, "d", rounds(3_000, 50_000))));
    let _removed = Removed(mount.base());
    let branch = mount.create("beside");
    shell(
        &branch,
        "echo x > file; mkdir d/new; echo y > d/new/file; mv d moved; find . > /dev/null || true",
    );
    succeed(&mount.run(&["diff", "beside"], &[]));
    mount.commit("beside");
    shell(&mount.base(), "test \"$(cat moved/new/file)\" = y");
    succeed(&mount.run(&["undo"], &[]));
    shell(&mount.base(), "test -d d/d; test ! -e d/new");
}

#[test]
fn a_directory_with_very_many_entries_passes_every_verb() {
    let mount = Mount::new();
    let count = rounds(4_000, 200_000);
    let branch = mount.create("wide");
    let fill = format!("mkdir d; cd d; seq {count} | xargs touch; echo content > 1");
    shell(&branch, &fill);
    let diff = mount.run(&["diff", "wide"], &[]);
    succeed(&diff);
    assert_eq!(diff.stdout.iter().filter(|byte| **byte == b'\n').count(), count + 1);
    succeed(&export(&mount, "wide"));
    mount.unmount();
    check(&mount);
    mount.mount();
    mount.commit("wide");
    let entries = |directory: &Path| fs::read_dir(directory.join("d")).map_or(0, Iterator::count);
    assert_eq!(entries(&mount.base()), count);
    // Each of them has the same content as those that take their place under other names.
    let branch = mount.create("others");
    shell(
        &branch,
        &format!("rm -r d; mkdir d; cd d; seq -f n%.0f {count} | xargs touch; echo content > n1"),
    );
    succeed(&mount.run(&["diff", "others"], &[]));
    mount.commit("others");
    succeed(&mount.run(&["undo"], &[]));
    assert!(mount.base().join("d/1").exists());
    let branch = mount.create("dropped");
    shell(&branch, "rm -r d");
    mount.abort("dropped");
    assert_eq!(entries(&mount.base()), count);
}
