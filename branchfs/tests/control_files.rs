//! The published protocol on a real mount: control files, ioctls, written commands, and the published program's words.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Mount, refusal, shell, snapshot, succeed};

const CONTROL: &str = ".branchfs_ctl";

/// A mount with control files, over a base with one file.
fn mounted() -> Mount {
    let mount = Mount::unmounted(|base| fs::write(base.join("file"), "base").unwrap());
    succeed(&mount.run(&["mount", "--control-files", "--base"], &[&mount.base()]));
    mount
}

/// Writes a command to the control file of a directory; the errno where it fails.
fn tell(directory: &Path, command: &str) -> Result<(), i32> {
    fs::write(directory.join(CONTROL), command).map_err(|error| error.raw_os_error().unwrap())
}

/// Issues an ioctl as the published package does; what it hands out, or the errno.
fn ioctl(directory: &Path, number: u32) -> Result<String, i32> {
    let program = "import ctypes, fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
number = int(sys.argv[2])
buffer = ctypes.create_string_buffer(128)
try:
    fcntl.ioctl(descriptor, number, buffer if number >> 16 else 0)
except OSError as error:
    sys.exit(error.errno)
print(buffer.value.decode(), end='')";
    let mut python = Command::new("python3");
    let output = python.args(["-c", program]).arg(directory.join(CONTROL)).arg(number.to_string());
    let output = output.output().unwrap();
    match output.status.code().unwrap() {
        0 => Ok(String::from_utf8(output.stdout).unwrap()),
        1 => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        errno => Err(errno),
    }
}

const CREATE: u32 = 0x8080_6200;
const COMMIT: u32 = 0x6201;
const ABORT: u32 = 0x6202;

#[test]
fn without_the_option_the_name_is_like_any_other() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    assert!(!mount.mountpoint().join(CONTROL).exists());
    assert!(!branch.join(CONTROL).exists());
    fs::write(branch.join(CONTROL), "content").unwrap();
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join(CONTROL)).unwrap(), "content");
}

#[test]
fn the_mount_table_shows_the_published_type_and_the_base() {
    let mount = mounted();
    let table = fs::read_to_string("/proc/mounts").unwrap();
    let point = mount.mountpoint();
    let line = table.lines().find(|line| line.split(' ').nth(1) == point.to_str()).unwrap();
    let base = mount.base().canonicalize().unwrap();
    assert!(line.starts_with(&format!("{} ", base.display())), "{line}");
    assert!(line.contains(" fuse.branchfs "), "{line}");
}

#[test]
fn ioctls_fork_commit_and_abort() {
    let mount = mounted();
    let name = ioctl(&mount.mountpoint(), CREATE).unwrap();
    let branch = mount.branch(&name);
    fs::write(branch.join("file"), "changed").unwrap();
    let child = mount.branch(&ioctl(&branch, CREATE).unwrap());
    fs::write(child.join("child"), "").unwrap();
    assert_eq!(ioctl(&branch, COMMIT), Err(libc::EBUSY), "it has a live child");
    ioctl(&child, COMMIT).unwrap();
    assert!(branch.join("child").exists() && !child.exists());
    ioctl(&branch, COMMIT).unwrap();
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "changed");
    assert!(mount.base().join("child").exists());

    let dropped = mount.branch(&ioctl(&mount.mountpoint(), CREATE).unwrap());
    fs::write(dropped.join("file"), "dropped").unwrap();
    ioctl(&dropped, ABORT).unwrap();
    assert!(!dropped.exists());
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "changed");
    assert_eq!(ioctl(&mount.mountpoint(), 0x6203), Err(libc::ENOTTY), "an unknown number");
    assert_eq!(ioctl(&mount.mountpoint(), COMMIT), Err(libc::EINVAL), "main has no parent");
}

#[test]
fn a_lost_race_is_estale_and_the_loser_can_be_aborted_through_its_file() {
    let mount = mounted();
    let (one, two) = (mount.create("one"), mount.create("two"));
    fs::write(one.join("file"), "one").unwrap();
    fs::write(two.join("file"), "two").unwrap();
    ioctl(&one, COMMIT).unwrap();
    assert_eq!(ioctl(&two, COMMIT), Err(libc::ESTALE));
    assert_eq!(tell(&two, "commit"), Err(libc::ESTALE));
    let stale = fs::read(two.join("file")).unwrap_err();
    assert_eq!(stale.raw_os_error(), Some(libc::ESTALE), "the control file alone is reachable");
    let listed = fs::read_dir(&two).unwrap().next().unwrap().unwrap_err();
    assert_eq!(listed.raw_os_error(), Some(libc::ESTALE));
    ioctl(&two, ABORT).unwrap();
    assert!(!two.exists());
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "one");
}

#[test]
fn a_base_changed_by_others_is_estale_too() {
    let mount = mounted();
    let branch = mount.create("branch");
    fs::write(branch.join("file"), "mine").unwrap();
    fs::write(mount.base().join("file"), "theirs").unwrap();
    assert_eq!(ioctl(&branch, COMMIT), Err(libc::ESTALE));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "theirs");
    assert_eq!(fs::read_to_string(branch.join("file")).unwrap(), "mine", "it is still open");
}

#[test]
fn written_commands_act_on_the_current_branch_at_the_root_and_on_their_own_elsewhere() {
    let mount = mounted();
    let root = mount.mountpoint();
    let current = || fs::read_to_string(root.join(CONTROL)).unwrap();
    assert_eq!(current(), "main");
    tell(&root, "create:one\n").unwrap();
    tell(&mount.branch("one"), "CREATE: two ").unwrap();
    assert_eq!(current(), "main", "a fork does not switch");
    tell(&root, "switch:two").unwrap();
    assert_eq!(current(), "two");
    assert_eq!(fs::read_to_string(mount.branch("one").join(CONTROL)).unwrap(), "one");
    fs::write(mount.branch("two").join("new"), "").unwrap();
    tell(&root, "commit").unwrap();
    assert_eq!(current(), "one", "the parent of what was committed");
    assert!(mount.branch("one").join("new").exists());
    tell(&root, "create:three").unwrap();
    assert!(mount.branch("one").join("@three").exists(), "a child of the current branch");
    tell(&mount.branch("three"), "abort").unwrap();
    tell(&root, "abort").unwrap();
    assert_eq!(current(), "main");
    assert!(!mount.branch("one").exists());

    mount.create("gone");
    tell(&root, "switch:gone").unwrap();
    mount.abort("gone");
    assert_eq!(current(), "main", "a current branch that others ended");

    for (directory, command, errno) in [
        (&root, "switch:absent", libc::ENOENT),
        (&root, "commit", libc::EINVAL),
        (&root, "nonsense", libc::EINVAL),
        (&root, "create:a/b", libc::EINVAL),
        (&root, "create:", libc::EINVAL),
    ] {
        assert_eq!(tell(directory, command), Err(errno), "{command}");
    }
    mount.create("taken");
    assert_eq!(tell(&root, "create:taken"), Err(libc::EEXIST));
    assert_eq!(tell(&mount.branch("taken"), "switch:taken"), Err(libc::EINVAL));
}

#[test]
fn a_nested_branch_is_reached_by_both_paths() {
    let mount = mounted();
    mount.create("parent");
    let child = mount.create_below("parent", "child");
    let below = mount.branch("parent").join("@child");
    fs::write(below.join("file"), "changed").unwrap();
    assert_eq!(fs::read_to_string(child.join("file")).unwrap(), "changed");
    assert_eq!(fs::metadata(&below).unwrap().ino(), fs::metadata(&child).unwrap().ino());
    assert!(!child.join("@parent").exists(), "only downwards");
    ioctl(&below, COMMIT).unwrap();
    assert_eq!(fs::read_to_string(mount.branch("parent").join("file")).unwrap(), "changed");
}

#[test]
fn control_files_are_in_no_listing_and_no_commit_and_cannot_be_touched() {
    let mount = mounted();
    let branch = mount.create("branch");
    let control = branch.join(CONTROL);
    fs::create_dir(branch.join("d")).unwrap();
    assert!(!branch.join("d").join(CONTROL).exists(), "only in the root");
    let errno = |outcome: std::io::Result<()>| outcome.unwrap_err().raw_os_error().unwrap();
    assert_eq!(errno(fs::remove_file(&control)), libc::EPERM);
    assert_eq!(errno(fs::rename(&control, branch.join("x"))), libc::EPERM);
    assert_eq!(errno(fs::rename(branch.join("file"), &control)), libc::EPERM);
    assert_eq!(errno(fs::hard_link(branch.join("file"), &control)), libc::EEXIST);
    assert_eq!(errno(fs::create_dir(&control)), libc::EEXIST);
    assert_eq!(errno(fs::set_permissions(&control, PermissionsExt::from_mode(0o666))), libc::EPERM);
    let names = |directory: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&branch), ["d", "file"]);
    assert_eq!(names(&mount.mountpoint()), ["file"]);
    shell(
        &branch,
        "cp -a . ../@branch/d/copy 2>/dev/null || true; ls -la .branchfs_ctl; tar cf /dev/null .",
    );
    let wanted = snapshot(&branch);
    ioctl(&branch, COMMIT).unwrap();
    common::assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
    assert!(!mount.base().join(CONTROL).exists());
}

#[test]
fn only_the_bases_owner_may_open_a_control_file() {
    let mount = mounted();
    fs::set_permissions(mount.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let branch = mount.create("branch");
    for directory in [mount.mountpoint(), branch.clone()] {
        let mut other = Command::new("setpriv");
        other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c"]);
        let output =
            other.arg("echo abort >.branchfs_ctl").current_dir(&directory).output().unwrap();
        assert!(refusal(&output).contains("Permission denied"));
    }
    assert!(branch.exists());
}

#[test]
fn more_concurrent_verbs_than_the_daemon_has_threads_all_end() {
    let mount = mounted();
    let branches: Vec<PathBuf> = (0..24).map(|n| mount.create(&format!("b{n}"))).collect();
    branches.iter().for_each(|branch| fs::write(branch.join("file"), "mine").unwrap());
    let outcomes: Vec<Result<(), i32>> = std::thread::scope(|scope| {
        let race = |branch: &PathBuf| {
            tell(branch, "commit").or_else(|errno| tell(branch, "abort").and(Err(errno)))
        };
        let racers: Vec<_> =
            branches.iter().map(|branch| scope.spawn(move || race(branch))).collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
    assert!(!outcomes.contains(&Err(libc::EBUSY)), "{outcomes:?}");
    assert!(branches.iter().all(|branch| !branch.exists()));
}

#[test]
fn a_commit_that_waits_for_a_writer_is_not_starved_by_verbs_that_wait_for_it() {
    let mount = mounted();
    let branch = mount.create("branch");
    let others: Vec<PathBuf> =
        (0..8).map(|n| mount.create_below("main", &format!("b{n}"))).collect();
    let file = fs::File::create(branch.join("file")).unwrap();
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| tell(&branch, "commit"));
        std::thread::sleep(std::time::Duration::from_millis(50));
        let aborts: Vec<_> =
            others.iter().map(|other| scope.spawn(|| tell(other, "abort"))).collect();
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(file); // the daemon hears of it by one more request
        assert_eq!(commit.join().unwrap(), Ok(()));
        aborts.into_iter().for_each(|abort| assert_eq!(abort.join().unwrap(), Ok(())));
    });
}

#[test]
fn the_published_programs_words_are_understood() {
    let mount = Mount::unmounted(|base| fs::write(base.join("file"), "base").unwrap());
    let storage = mount.directory.path().join("storage");
    let root = mount.mountpoint();
    let say = |words: &[&str]| -> Output {
        let words = words.iter().map(|word| match *word {
            "BASE" => mount.base().into_os_string(),
            "STORAGE" => storage.clone().into_os_string(),
            "MNT" => root.clone().into_os_string(),
            word => word.into(),
        });
        Command::new(common::PROGRAM).args(words).output().unwrap()
    };
    succeed(&say(&["mount", "--base", "BASE", "--storage", "STORAGE", "MNT"]));
    assert!(refusal(&say(&["commit", "MNT"])).contains("no branch is the current one"));
    succeed(&say(&["create", "level1", "MNT", "--storage", "STORAGE"]));
    succeed(&say(&["create", "level2", "MNT", "-p", "level1"]));
    fs::write(mount.branch("level2").join("file"), "deep").unwrap();
    succeed(&say(&["commit", "MNT", "--storage", "STORAGE"]));
    assert_eq!(fs::read_to_string(mount.branch("level1").join("file")).unwrap(), "deep");
    succeed(&say(&["commit", "MNT"]));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "deep");
    succeed(&say(&["create", "dropped", "MNT"]));
    succeed(&say(&["abort", "MNT", "--storage", "STORAGE"]));
    let listed = say(&["list", "MNT"]);
    assert_eq!(String::from_utf8(listed.stdout).unwrap(), "");
    succeed(&say(&["unmount", "MNT", "--storage", "STORAGE"]));
    assert!(storage.join("history").exists(), "the commit can be undone");
    assert!(!mount.base().join(".branching").exists());
}

#[test]
fn a_command_without_a_branch_needs_control_files() {
    let mount = Mount::new();
    mount.create("branch");
    assert!(refusal(&mount.run(&["commit"], &[])).contains("no branch is named"));
    assert!(refusal(&mount.run(&["abort"], &[])).contains("no branch is named"));
}
