//! Defects that were measured in other file systems for branches: lost files, lost attributes, a changed base. Each test is
//! named after the failure that it would find. (Permissions are in `security.rs`, full disks and immutable files in
//! `filesystems.rs`.)

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;

use common::{Mount, assert_same, refusal, shell, snapshot};

const BASE: &str = r#"echo base > file; mkdir -p d/below; echo 1 > d/one; echo 2 > d/below/two; ln -s d link; ln -s nowhere dangling; mkfifo fifo
    echo linked > hard; ln hard harder; printf x > $'new\nline'; printf x > $'\xff\xfe'; truncate -s 8M sparse; printf end >> sparse
    echo theirs > owned; chown 1000:1001 owned; chmod 640 owned; touch -d '2001-02-03 04:05:06.789' owned; mkdir -m 2750 closed; touch -d 2002-03-04 closed"#;

/// Does `script` in a branch; then the branch, a new mount over it and the base after the commit must pass `check` too.
fn holds(script: &str, check: &str) {
    let mount = Mount::over(|base| shell(base, BASE));
    let before = snapshot(&mount.base());
    let branch = mount.create("branch");
    shell(&branch, script);
    shell(&branch, check);
    assert_same(&snapshot(&mount.base()), &before, "the base before the commit");
    let shown = snapshot(&branch);
    mount.unmount();
    mount.mount();
    shell(&branch, check);
    assert_same(&snapshot(&branch), &shown, "the branch on a new mount");
    mount.commit("branch");
    shell(&mount.base(), check);
    assert_same(&snapshot(&mount.base()), &shown, "the base after the commit");
}

#[test]
fn symlinks_are_followed_by_the_daemon_or_shown_as_their_target() {
    holds(
        "mv link moved; ln -s file new",
        "test -h moved -a \"$(readlink moved)\" = d; test -h dangling; test \"$(readlink dangling)\" = nowhere; test \"$(cat new)\" = base",
    );
}

#[test]
fn a_deleted_name_stays_listed() {
    holds(
        "rm file fifo $'new\\nline' $'\\xff\\xfe'",
        "test \"$(find . -mindepth 1 -maxdepth 1 ! -name .branching -printf x)\" = xxxxxxxx; ! ls | grep -qx file; test ! -e file",
    );
}

#[test]
fn a_file_made_again_under_a_deleted_name_is_invisible() {
    holds(
        "rm file; echo again > file; rm -r d; mkdir d; echo > d/new; rm link; mkdir link",
        "test \"$(cat file)\" = again; test \"$(ls d)\" = new; test -d link",
    );
}

#[test]
fn a_directory_made_again_shows_the_deleted_files_after_a_new_mount() {
    holds("rm -rf d; mkdir d", "test -z \"$(ls -A d)\"; test ! -e d/one");
}

#[test]
fn renaming_a_directory_of_the_base_is_refused_or_copies_it() {
    let mount = Mount::over(|base| shell(base, "mkdir d; head -c 4M /dev/zero > d/large"));
    let branch = mount.create("branch");
    let ino = fs::metadata(branch.join("d/large")).unwrap().ino();
    fs::rename(branch.join("d"), branch.join("e")).unwrap();
    assert_eq!(fs::metadata(branch.join("e/large")).unwrap().ino(), ino);
    let stored = std::process::Command::new("du")
        .args(["-sk"])
        .arg(mount.base().join(".branching"))
        .output()
        .unwrap();
    let kib: u64 = String::from_utf8(stored.stdout)
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(kib < 1024, "{kib} KiB in the store");
    mount.commit("branch");
    assert_eq!(fs::metadata(mount.base().join("e/large")).unwrap().ino(), ino);
}

#[test]
fn rmdir_of_a_new_directory_fails() {
    holds(
        "mkdir n; rmdir n; mkdir -p a/b/c; rm -r a; echo > new; rmdir d 2>/dev/null || true",
        "test ! -e n; test ! -e a; test -e d/one",
    );
}

#[test]
fn a_first_change_loses_owner_times_holes_or_attributes() {
    holds(
        "chmod 600 owned; python3 -c 'import os; os.setxattr(\"owned\", \"user.k\", b\"v\")'; printf X | dd of=sparse bs=1 seek=100 conv=notrunc status=none; chmod 2700 closed",
        "test \"$(stat -c '%u %g %a' owned)\" = '1000 1001 600'; test \"$(stat -c %y owned | cut -c1-23)\" = '2001-02-03 04:05:06.789'
         test $(stat -c %b sparse) -lt 1000; test \"$(stat -c '%a %y' closed | cut -c1-15)\" = '2700 2002-03-04'; test $(stat -c %Z owned) -gt 1000000000",
    );
}

#[test]
fn a_commit_loses_empty_directories_owners_and_attributes() {
    holds(
        "mkdir -p empty/er; chown -R 7:8 empty; chmod 1770 empty/er; python3 -c 'import os; os.setxattr(\"empty\", \"user.k\", b\"v\")'; touch -d 2003-04-05 empty; mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'",
        "test \"$(stat -c '%u %g %a' empty/er)\" = '7 8 1770'; test \"$(stat -c %y empty | cut -c1-10)\" = 2003-04-05; test -p p; test -S s",
    );
}

#[test]
fn hard_links_of_the_base_are_torn_apart_by_a_write() {
    holds(
        "test \"$(stat -c '%h %i' hard)\" = \"$(stat -c '%h %i' harder)\"; echo more >> hard; ln hard hardest",
        "test \"$(cat harder)\" = $'linked\\nmore'; test hard -ef harder; test hard -ef hardest; test $(stat -c %h harder) = 3",
    );
}

#[test]
fn names_of_255_bytes_or_outside_utf8_are_refused() {
    let name = "n".repeat(255);
    holds(
        &format!(
            "echo long > {name}; mkdir $'\\xfe'; mv $'\\xff\\xfe' $'\\xfe/\\x80'; mv $'new\\nline' $'\\n'"
        ),
        &format!("test \"$(cat {name})\" = long; test -e $'\\xfe/\\x80'; test -e $'\\n'"),
    );
}

#[test]
fn entries_are_missed_when_they_are_removed_during_a_scan() {
    let mount = Mount::over(|base| shell(base, "mkdir many; cd many; seq 1500 | xargs touch"));
    let branch = mount.create("branch");
    shell(&branch.join("many"), "seq 1501 3000 | xargs touch");
    let mut removed = 0;
    for entry in fs::read_dir(branch.join("many")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        removed += 1;
    }
    assert_eq!((removed, fs::read_dir(branch.join("many")).unwrap().count()), (3000, 0));
    mount.commit("branch");
    assert_eq!(fs::read_dir(mount.base().join("many")).unwrap().count(), 0);
}

#[test]
fn levels_between_the_base_and_the_nearest_change_are_missing_from_listings() {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo > d/base"));
    let mut parent = "main".to_owned();
    for level in 0..20 {
        let name = format!("level-{level}");
        let branch = mount.create_below(&parent, &name);
        fs::write(branch.join("d").join(level.to_string()), "").unwrap();
        assert_eq!(fs::read_dir(branch.join("d")).unwrap().count(), level + 2, "at level {level}");
        parent = name;
    }
}

#[test]
fn a_child_sees_what_its_parent_writes_after_the_fork() {
    let mount = Mount::over(|base| shell(base, BASE));
    let parent = mount.create("parent");
    let child = mount.create_below("parent", "child");
    let refused = fs::write(parent.join("file"), "late").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS), "a parent with children is frozen");
    assert_eq!(fs::read_to_string(child.join("file")).unwrap(), "base\n");
}

#[test]
fn the_second_branch_to_commit_silently_wins() {
    let mount = Mount::over(|base| shell(base, BASE));
    let (one, other) = (mount.create("one"), mount.create("other"));
    fs::write(one.join("file"), "one").unwrap();
    fs::write(other.join("file"), "other").unwrap();
    mount.commit("one");
    refusal(&mount.run(&["commit", "other"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "one");
}

#[test]
fn edits_of_others_in_the_base_are_overwritten() {
    let mount = Mount::over(|base| shell(base, BASE));
    let branch = mount.create("branch");
    fs::write(branch.join("file"), "branch").unwrap();
    fs::write(mount.base().join("file"), "others").unwrap();
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    assert!(refused.contains("file"), "{refused}");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "others");
    assert_eq!(
        fs::read_to_string(branch.join("file")).unwrap(),
        "branch",
        "the branch is still there"
    );
}

#[test]
fn files_that_others_put_into_the_base_are_not_seen() {
    let mount = Mount::over(|base| shell(base, BASE));
    let branch = mount.create("branch");
    fs::write(mount.base().join("late"), "late").unwrap();
    assert_eq!(fs::read_to_string(branch.join("late")).unwrap(), "late");
}

#[test]
fn an_open_file_that_is_unlinked_can_no_longer_be_read() {
    let mount = Mount::over(|base| shell(base, BASE));
    let branch = mount.create("branch");
    let mut base = fs::File::open(branch.join("file")).unwrap();
    let mut own = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(branch.join("own"))
        .unwrap();
    own.write_all(b"own").unwrap();
    fs::remove_file(branch.join("file")).unwrap();
    fs::remove_file(branch.join("own")).unwrap();
    own.write_all(b" still").unwrap();
    own.seek(SeekFrom::Start(0)).unwrap();
    let read = |file: &mut fs::File| {
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    };
    assert_eq!((read(&mut base), read(&mut own)), ("base\n".to_owned(), "own still".to_owned()));
}

#[test]
fn a_file_that_is_open_across_an_abort_reaches_the_base() {
    let mount = Mount::over(|base| shell(base, BASE));
    let before = snapshot(&mount.base());
    let branch = mount.create("branch");
    let mut file = fs::OpenOptions::new().write(true).open(branch.join("file")).unwrap();
    file.write_all(b"branch").unwrap();
    mount.abort("branch");
    // The write may be refused, or go to what nobody can reach any more.
    let _ = file.write_all(b"late");
    drop(file);
    assert_same(&snapshot(&mount.base()), &before, "the base");
}

#[test]
fn the_root_of_the_mount_is_switched_to_another_branch() {
    let mount = Mount::over(|base| shell(base, BASE));
    let one = mount.create("one");
    mount.create_below("one", "two");
    fs::write(mount.branch("two").join("file"), "two").unwrap();
    mount.commit("two");
    assert_eq!(fs::read_to_string(mount.mountpoint().join("file")).unwrap(), "base\n");
    assert_eq!(fs::read_to_string(one.join("file")).unwrap(), "two");
    mount.abort("one");
    assert_eq!(fs::read_to_string(mount.mountpoint().join("file")).unwrap(), "base\n");
}

#[test]
fn the_control_file_in_a_branch_lets_its_processes_commit_it() {
    let mount = Mount::over(|base| shell(base, BASE));
    let branch = mount.create("branch");
    let before = snapshot(&mount.base());
    fs::write(branch.join(".branchfs_ctl"), "commit").unwrap();
    assert_same(
        &snapshot(&mount.base()),
        &before,
        "a write to a file of that name is a write to a file",
    );
}

#[test]
fn statfs_shows_a_full_disk() {
    let mount = Mount::over(|base| shell(base, BASE));
    let (native, ours) = (
        rustix::fs::statvfs(mount.base()).unwrap(),
        rustix::fs::statvfs(mount.create("branch")).unwrap(),
    );
    assert_eq!(
        (ours.f_blocks, ours.f_files, ours.f_namemax),
        (native.f_blocks, native.f_files, native.f_namemax)
    );
    assert!(ours.f_bavail > 0 && ours.f_ffree > 0);
}

#[test]
fn unnamed_files_holes_and_ranges_are_not_supported() {
    holds(
        r"python3 - <<'END'
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
PUNCH, KEEP = 2, 1
file = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(file, b'x' * 100000)
assert libc.fallocate(file, PUNCH | KEEP, ctypes.c_long(8192), ctypes.c_long(65536)) == 0, os.strerror(ctypes.get_errno())
assert os.lseek(file, 0, os.SEEK_HOLE) == 8192
assert os.lseek(file, 8192, os.SEEK_DATA) == 73728
os.posix_fallocate(file, 0, 200000)
copy = os.open('copied', os.O_RDWR | os.O_CREAT)
assert os.copy_file_range(file, copy, 5000, 0, 0) == 5000
FOLLOW, AT = 0x400, -100
assert libc.linkat(AT, b'/proc/self/fd/%d' % file, AT, b'named', FOLLOW) == 0, os.strerror(ctypes.get_errno())
libc.syncfs(copy); os.fsync(copy); os.fdatasync(file)
NOREPLACE, EXCHANGE = 1, 2
assert libc.renameat2(AT, b'copied', AT, b'copy', NOREPLACE) == 0
assert libc.renameat2(AT, b'd', AT, b'file', EXCHANGE) == 0
END",
        "test $(stat -c %s named) = 200000; test $(stat -c %s copy) = 5000; test ! -e copied; test \"$(cat d)\" = base; test -e file/one",
    );
}
