//! The file system below the base: supported ones carry branches with all features; the others are refused with the reason;
//! and one that is full, read-only in part or holds immutable files fails a commit without a change.
//! docs/semantics.md, "What the base's file system must have", has the table of them.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::disk::{Disk, lacking};
use common::{Mount, assert_same, refusal, shell, snapshot, succeed};

const BASE: &str = r#"echo one > file; ln file linked; mkdir -p d/e gone/below; echo x > d/e/x; echo y > d/y; echo z > gone/below/z
    ln -s file link; mkfifo fifo; python3 -c 'import os; os.setxattr("d/y", "user.mark", b"base")'; truncate -s 1M sparse
    echo data | dd of=sparse bs=1 seek=500000 conv=notrunc status=none; chmod 750 d; touch -d '2001-02-03 04:05:06.123456789' d/e/x"#;

const WORK: &str = r#"echo two > file; rm d/y; mv d moved; mkdir d; echo new > d/new; rm -r gone; mkdir new; echo > new/file; chmod 2751 new; mv new newer
    ln -sf moved link; python3 -c 'import os; os.setxattr("newer/file", "user.mark", b"branch")'; setfacl -m u:1000:rw newer/file; echo more >> sparse
    mknod c c 1 3; ln newer/file newer/twin; touch -d '2002-03-04 05:06:07.987654321' newer/file"#;

/// The same work on any file system: seen in the branch, committed, and found in the base.
fn carries_branches(disk: &Disk) {
    shell(&disk.base(), BASE);
    disk.mount();
    let before = snapshot(&disk.base());
    let dropped = disk.create("dropped");
    shell(&dropped, WORK);
    disk.abort("dropped");
    assert_same(&snapshot(&disk.base()), &before, "after an abort");
    let branch = disk.create("branch");
    shell(&branch, WORK);
    disk.unmount();
    disk.mount();
    let wanted = snapshot(&branch);
    disk.commit("branch");
    assert_same(&snapshot(&disk.base()), &wanted, "after the commit");
    disk.unmount();
}

#[test]
fn ext4_carries_branches() {
    carries_branches(&Disk::image("24M", "mkfs.ext4 -q -m 0"));
}

#[test]
fn ext4_with_small_blocks_and_inodes_and_without_a_journal_carries_branches() {
    carries_branches(&Disk::image(
        "24M",
        "mkfs.ext4 -q -m 0 -b 1024 -I 128 -O ^has_journal,^metadata_csum",
    ));
}

#[test]
fn xfs_carries_branches() {
    carries_branches(&Disk::image("320M", "mkfs.xfs -q"));
}

#[test]
fn btrfs_carries_branches() {
    carries_branches(&Disk::image("120M", "mkfs.btrfs -q"));
}

#[test]
fn tmpfs_carries_branches() {
    carries_branches(&Disk::mounted("mount -t tmpfs -o size=16m none base"));
}

/// The mount is refused for that reason, and the base is as it was.
fn refuses(disk: &Mount, reason: &str) {
    let before = snapshot(&disk.base());
    let refused = refusal(&disk.run(&["mount", "--base"], &[&disk.base()]));
    assert!(refused.contains(reason), "{refused}");
    assert_same(&snapshot(&disk.base()), &before, "after the refusal");
    assert!(!disk.base().join(".branching").exists(), "no store is left behind");
}

#[test]
fn a_file_system_without_extended_attributes_is_refused() {
    let disk = Disk::mounted("mount -t ramfs none base; echo content > base/file");
    refuses(&disk, "has no extended attributes");
}

#[test]
fn an_overlay_is_refused() {
    let disk = Disk::mounted(
        "mkdir lower upper work; echo content > lower/file; mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work base",
    );
    refuses(&disk, "cannot hold whiteouts (device 0:0), as an overlay");
}

#[test]
fn a_branch_as_a_base_is_refused() {
    let outer = Mount::over(|base| shell(base, "mkdir base; echo content > base/file"));
    let branch = outer.create("outer").join("base");
    let inner = Mount::unmounted(|_| ());
    let refused = refusal(&inner.run(&["mount", "--base"], &[&branch]));
    assert!(refused.contains("has no extended attributes for the marks of layers"), "{refused}");
    assert_eq!(fs::read_dir(&branch).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn a_read_only_file_system_is_refused() {
    let disk = Disk::image("8M", "mkfs.ext4 -q -m 0");
    shell(&disk.base(), "echo content > file; mount -o remount,ro .");
    refuses(&disk, "is on a read-only file system");
}

#[test]
fn a_read_only_view_of_a_directory_is_refused() {
    let disk = Disk::mounted(
        "mkdir original; echo content > original/file; mount --bind original base; mount -o remount,ro,bind base",
    );
    refuses(&disk, "is on a read-only file system");
    // A store beside it could keep branches, but no commit could leave it.
    let store = disk.directory.path().join("store");
    let refused =
        refusal(&disk.run(&["mount", "--store"], &[&store, Path::new("--base"), &disk.base()]));
    assert!(refused.contains("is on a read-only file system"), "{refused}");
    assert!(!store.exists());
}

const EXCHANGE: u32 = 2;
const ANY_RENAME_FLAG: u32 = 0xff;

#[test]
fn missing_features_of_a_file_system_are_found_before_anything_depends_on_them() {
    for (call, argument, flag, errno, reason) in [
        ("renameat2", 4, EXCHANGE, libc::EINVAL, "cannot swap two names at once (RENAME_EXCHANGE)"),
        ("renameat2", 4, ANY_RENAME_FLAG, libc::EINVAL, "cannot swap two names at once"),
        ("renameat2", 4, 1, libc::EINVAL, "cannot rename without replacing (RENAME_NOREPLACE)"),
        ("mknodat", 0, 0, libc::EPERM, "cannot hold whiteouts"),
        ("linkat", 0, 0, libc::EPERM, "has no hard links"),
        ("openat2", 0, 0, libc::ENOSYS, "openat2 is not available"),
    ] {
        let mount = Mount::unmounted(|base| fs::write(base.join("file"), "content").unwrap());
        let before = snapshot(&mount.base());
        let script = mount.directory.path().join("lacking.py");
        let mut command = lacking(&script, call, argument, flag, errno);
        command.args(["mount", "--base"]).arg(mount.base()).arg(mount.mountpoint());
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{call} {flag} was not missed");
        let refused = refusal(&output);
        assert!(refused.contains(reason), "{call} {flag}: {refused}");
        assert_same(&snapshot(&mount.base()), &before, call);
        assert!(!mount.base().join(".branching").exists(), "{call}: no store is left behind");
    }
}

/// A base of 24 MiB on ext4 with a 6 MiB file in it.
fn small_disk() -> Disk {
    let disk = Disk::image("24M", "mkfs.ext4 -q -m 0");
    shell(
        &disk.base(),
        "head -c 6M /dev/urandom > big; echo base > file; mkdir d; echo base > d/file",
    );
    disk
}

fn is_full(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOSPC)
}

#[test]
fn a_full_disk_fails_the_write_and_nothing_else() {
    let disk = small_disk();
    disk.mount();
    let before = snapshot(&disk.base());
    let branch = disk.create("branch");
    let content = vec![b'x'; 40 << 20];
    assert!(is_full(&fs::write(branch.join("new"), &content).unwrap_err()));
    assert!(is_full(&fs::write(branch.join("new"), &content).unwrap_err()));
    assert_same(&snapshot(&disk.base()), &before, "the base");
    fs::remove_file(branch.join("new")).unwrap();
    fs::write(branch.join("new"), &content[..100]).unwrap();
    let wanted = snapshot(&branch);
    disk.commit("branch");
    assert_same(&snapshot(&disk.base()), &wanted, "the base after the commit");
}

#[test]
fn a_full_disk_is_named_as_the_reason_for_fuse_and_the_next_mount_chooses_again() {
    let disk = small_disk();
    disk.mount();
    disk.create("keeps-the-store");
    let filler = disk.fill(0);
    disk.unmount();
    let mount = |driver| disk.run(&["mount", "--driver", driver, "--base"], &[&disk.base()]);
    let reason = "the probe failed: no space left";
    assert!(refusal(&mount("overlay")).contains(reason));
    succeed(&mount("auto"));
    let chosen = disk.ask("info");
    assert_eq!(chosen["driver"], "fuse");
    assert!(chosen["why_not"].as_str().unwrap().contains(reason), "{chosen}");
    disk.unmount();
    fs::remove_file(filler).unwrap();
    succeed(&mount("auto"));
    assert_eq!(disk.ask("info")["driver"], "overlay");
}

#[test]
fn a_full_disk_fails_the_copy_up_and_takes_no_room_with_it() {
    let disk = small_disk();
    disk.mount();
    let branch = disk.create("branch");
    let before = snapshot(&branch);
    disk.fill(2 << 20);
    let free = disk.free();
    for _ in 0..5 {
        let opened = fs::OpenOptions::new().append(true).open(branch.join("big"));
        assert!(is_full(&opened.unwrap_err()));
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        assert!(is_full(&fs::set_permissions(branch.join("big"), mode).unwrap_err()));
    }
    assert_same(&snapshot(&branch), &before, "the branch is as before");
    assert!(disk.free() + (64 << 10) > free, "{} of {free} bytes are left", disk.free());
    fs::remove_file(disk.base().join(".branching/filler")).unwrap();
    shell(&branch, "echo more >> big");
    disk.commit("branch");
    assert_eq!(fs::metadata(disk.base().join("big")).unwrap().len(), (6 << 20) + 5);
}

#[test]
fn a_full_disk_creates_no_branch_and_lets_branches_go() {
    let disk = small_disk();
    disk.mount();
    disk.create("old");
    fs::write(disk.branch("old").join("new"), vec![b'x'; 3 << 20]).unwrap();
    let filler = disk.fill(0);
    // The last blocks that directories and records can be squeezed into.
    let made =
        (0..2000).take_while(|n| disk.run(&["create", &format!("b{n}")], &[]).status.success());
    let made = made.count();
    assert!(made < 2000, "the disk never was full");
    let refused = refusal(&disk.run(&["create", "last"], &[]));
    assert!(refused.contains("No space left on device"), "{refused}");
    let listed = disk.run(&["list"], &[]);
    assert_eq!(String::from_utf8(listed.stdout).unwrap().lines().count(), made + 1);
    // A new mount over it finds them all, and an abort needs no room.
    disk.unmount();
    disk.mount();
    let listed = disk.run(&["list"], &[]);
    assert_eq!(String::from_utf8(listed.stdout).unwrap().lines().count(), made + 1);
    for number in 0..made {
        disk.abort(&format!("b{number}"));
    }
    disk.abort("old");
    fs::remove_file(filler).unwrap();
    let branch = disk.create("new");
    fs::write(branch.join("file"), "branch").unwrap();
    disk.commit("new");
}

/// Fills the disk but for some room, commits, and expects all or nothing; whatever came of it, with room again all.
fn commits_whole_or_not_at_all(disk: &Disk, left: u64) -> bool {
    disk.mount();
    let before = snapshot(&disk.base());
    let branch = disk.create("branch");
    shell(
        &branch,
        "for i in $(seq 40); do echo $i > d/a-name-long-enough-to-fill-the-blocks-of-the-directory-with-few-of-them-$i; done
         echo branch > file; mkdir new; echo > new/file; rm d/file",
    );
    let wanted = snapshot(&branch);
    let filler = disk.fill(left);
    let committed = disk.run(&["commit", "branch"], &[]);
    if committed.status.success() {
        assert_same(&snapshot(&disk.base()), &wanted, &format!("{left} bytes left: committed"));
    } else {
        let refused = refusal(&committed);
        assert!(refused.contains("No space left on device"), "{left} bytes left: {refused}");
        let when = format!("{left} bytes left: {refused}");
        assert!(!refused.contains("taking the commit back"), "{when}");
        assert_same(&snapshot(&disk.base()), &before, &when);
        assert_same(&snapshot(&branch), &wanted, &when);
    }
    if filler.exists() {
        fs::remove_file(filler).unwrap();
    }
    if !committed.status.success() {
        shell(&branch, "echo later > later");
        disk.commit("branch");
        assert!(disk.base().join("later").exists());
    }
    disk.unmount();
    committed.status.success()
}

#[test]
fn a_full_disk_fails_a_commit_whole_at_every_fill() {
    // Blocks of 1 KiB: directories outgrow theirs soon, in the middle of the commit.
    let outcomes: Vec<bool> = (0..common::rounds(10, 24))
        .map(|eighth| {
            let disk = Disk::image("8M", "mkfs.ext4 -q -m 0 -b 1024 -O ^inline_data");
            shell(&disk.base(), "echo base > file; mkdir d; echo base > d/file");
            commits_whole_or_not_at_all(&disk, 8192 * eighth as u64)
        })
        .collect();
    assert!(outcomes.contains(&false) && outcomes.contains(&true), "{outcomes:?}");
}

#[test]
fn a_disk_without_free_inodes_fails_a_commit_whole() {
    let disk = Disk::image("8M", "mkfs.ext4 -q -m 0 -N 128");
    shell(&disk.base(), "echo base > file; mkdir d; echo base > d/file");
    disk.mount();
    let before = snapshot(&disk.base());
    let branch = disk.create("branch");
    fs::write(branch.join("file"), "branch").unwrap();
    fs::remove_file(branch.join("d/file")).unwrap();
    let wanted = snapshot(&branch);
    let filler = disk.base().join(".branching/trash-free");
    fs::create_dir(&filler).unwrap();
    let last = (0..1000).find(|n| fs::write(filler.join(n.to_string()), "").is_err()).unwrap();
    // From none free to more than a commit needs.
    let mut refused = 0;
    for free in 0..last {
        let committed = disk.run(&["commit", "branch"], &[]);
        if committed.status.success() {
            break;
        }
        refused += 1;
        let message = refusal(&committed);
        assert!(message.contains("No space left on device"), "{free} free: {message}");
        assert!(!message.contains("taking the commit back"), "{free} free: {message}");
        assert_same(&snapshot(&disk.base()), &before, &format!("{free} free: {message}"));
        assert_same(&snapshot(&branch), &wanted, &format!("{free} free: {message}"));
        fs::remove_file(filler.join(free.to_string())).unwrap();
    }
    assert!(refused > 0);
    assert_same(&snapshot(&disk.base()), &wanted, "after the commit");
    fs::remove_dir_all(filler).unwrap();
}

/// Sets and clears the immutable flag of a path of the base.
fn immutable(path: &Path, run: impl FnOnce()) {
    struct Flag(PathBuf);
    impl Drop for Flag {
        fn drop(&mut self) {
            let _ =
                std::process::Command::new("chattr").args(["-f", "-i", "-a"]).arg(&self.0).status();
        }
    }
    let flag = Flag(path.to_path_buf());
    shell(Path::new("/"), &format!("chattr +i '{}'", flag.0.display()));
    run();
}

#[test]
fn an_immutable_file_in_the_way_of_a_commit_rolls_it_back_and_is_named() {
    for (fixed, work) in [
        ("m/fixed", "echo branch > m/fixed"),
        ("m/fixed", "rm m/fixed"),
        ("m/fixed", "mv m/fixed m/moved"),
        ("m", "echo branch > m/other"),
        ("m", "rm m/fixed"),
        ("m", "chmod 700 m"),
        ("m", "mv m n"),
        ("m/fixed", "rm -r m"),
    ] {
        let mount = Mount::over(|base| {
            shell(
                base,
                "mkdir a m z; echo base | tee a/file m/fixed m/other z/file file > /dev/null",
            )
        });
        let before = snapshot(&mount.base());
        let branch = mount.create("branch");
        shell(&branch, "echo branch > a/file; rm z/file; mv a b; echo new > new");
        shell(&branch, work);
        let wanted = snapshot(&branch);
        immutable(&mount.base().join(fixed), || {
            let refused = refusal(&mount.run(&["commit", "--force", "branch"], &[]));
            assert!(refused.contains("Operation not permitted"), "{work}: {refused}");
            assert!(refused.contains("cannot access m"), "{work}: it names the path: {refused}");
            assert!(!refused.contains("taking the commit back"), "{work}: {refused}");
            assert_same(&snapshot(&mount.base()), &before, work);
            assert_same(&snapshot(&branch), &wanted, work);
        });
        succeed(&mount.run(&["commit", "--force", "branch"], &[]));
        assert_same(&snapshot(&mount.base()), &wanted, work);
    }
}
