//! S13: no symlink, name or mount in a branch lets a commit or a read leave the base. Only root, the daemon's user and the
//! base's owner may control branches.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Mount, assert_same, refusal, shell, snapshot};
use rustix::fs::{CWD, RenameFlags};

/// A directory beside the base with something to lose.
struct Outside {
    directory: tempfile::TempDir,
    before: std::collections::BTreeMap<PathBuf, common::Object>,
}

impl Outside {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        shell(
            directory.path(),
            "mkdir room; echo outside | tee secret room/file room/other > /dev/null; chmod 755 .",
        );
        let before = snapshot(directory.path());
        Self { directory, before }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn assert_untouched(&self, when: &str) {
        assert_same(&snapshot(self.path()), &self.before, when);
    }
}

/// What a shell script says and how it ends, as a user of no importance.
fn as_nobody(directory: &Path, script: &str) -> String {
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", script])
        .current_dir(directory)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Everybody may come as far as the base and the mount.
fn open_to_all(mount: &Mount) {
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn hostile_links_are_links_and_nothing_else() {
    let outside = Outside::new();
    let out = outside.path().display();
    let depth = "../".repeat(40);
    let targets = [
        format!("{out}/secret"),
        format!("{out}/room"),
        format!("{depth}{}", outside.path().strip_prefix("/").unwrap().display()),
        format!("/proc/self/root{out}/room"),
        "/proc/self/fd/0".to_owned(),
        "/proc/self/cwd".to_owned(),
        "/proc/1/root".to_owned(),
        "/dev/fd/3".to_owned(),
        "..".to_owned(),
        "./self".to_owned(),
        "nowhere".to_owned(),
        "x".repeat(4000),
    ];
    let plant = |place: &Path| {
        for (number, target) in targets.iter().enumerate() {
            symlink(target, place.join(format!("link-{number}"))).unwrap();
        }
    };
    let mount = Mount::over(|base| {
        fs::create_dir(base.join("planted")).unwrap();
        plant(&base.join("planted"));
        plant(base);
    });
    let branch = mount.create("branch");
    fs::create_dir(branch.join("new")).unwrap();
    plant(&branch.join("new"));
    // Each is copied up, renamed, linked, and one of each directory gives way to a directory with entries of the room.
    shell(
        &branch,
        "for place in planted new .; do
             (cd $place
              chown -h 1000:1000 link-*; touch -h -d 2001-02-03 link-*
              mv link-2 moved; ln -P link-3 linked; rm link-1; mkdir link-1; echo inside > link-1/file; rm link-0; echo inside > link-0)
         done
         mv planted planted-elsewhere",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    outside.assert_untouched("after the commit");
    assert_same(&snapshot(&mount.base()), &wanted, "the base after the commit");
    let link =
        |name: &str| fs::read_link(mount.base().join("planted-elsewhere").join(name)).unwrap();
    assert_eq!(link("link-4"), Path::new("/proc/self/fd/0"));
    assert_eq!(link("moved"), PathBuf::from(&targets[2]));
}

/// Swaps a directory and a symbolic link that leads out, until told to stop or until it is no longer let.
fn swap(room: &Path, door: &Path, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        if rustix::fs::renameat_with(CWD, room, CWD, door, RenameFlags::EXCHANGE).is_err() {
            std::thread::yield_now();
        }
    }
}

fn race_rounds() -> usize {
    common::rounds(30, 500)
}

#[test]
fn a_directory_of_the_base_that_keeps_turning_into_a_link_leads_no_commit_out() {
    let outside = Outside::new();
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p room/deep; echo base | tee room/file room/other room/deep/file > /dev/null",
        );
        symlink(outside.path().join("room"), base.join("door")).unwrap();
    });
    let (stop, base) = (AtomicBool::new(false), mount.base());
    let mut committed = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| swap(&base.join("room"), &base.join("door"), &stop));
        let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..race_rounds() {
                let branch = mount.create("branch");
                // In the branch too the name may be either at any moment: what fails, fails.
                let work = "echo branch > room/file; echo branch > room/new; rm room/other; rm -rf room/deep; mkdir room/deep; echo > room/deep/new; true";
                let _ = Command::new("bash")
                    .args(["-c", work])
                    .current_dir(&branch)
                    .stderr(Stdio::null())
                    .status()
                    .unwrap();
                // A process that follows the link goes out by itself: that is not the daemon's doing.
                shell(
                    outside.path(),
                    "rm -rf room/new room/deep; echo outside | tee room/file room/other > /dev/null",
                );
                let commit = mount.run(&["commit", "--force", "branch"], &[]);
                let kept = fs::read_dir(outside.path().join("room")).unwrap().count();
                assert_eq!(kept, 2, "round {round}: something was made or removed outside");
                for name in ["file", "other"] {
                    let content =
                        fs::read_to_string(outside.path().join("room").join(name)).unwrap();
                    assert_eq!(content, "outside\n", "round {round}: {name}");
                }
                if commit.status.success() {
                    committed += 1;
                } else {
                    mount.abort("branch");
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = rounds {
            std::panic::resume_unwind(panic);
        }
    });
    println!("{committed} of {} were committed", race_rounds());
    mount.unmount();
    mount.mount();
}

#[test]
fn a_directory_of_the_branch_that_keeps_turning_into_a_link_leads_no_commit_out() {
    let outside = Outside::new();
    let mount = Mount::over(|base| {
        shell(base, "mkdir room; echo base | tee room/file room/other > /dev/null")
    });
    for round in 0..race_rounds() {
        let branch = mount.create("branch");
        let (room, door) = (branch.join("room"), branch.join("door"));
        fs::write(room.join("file"), format!("round {round}")).unwrap();
        fs::write(room.join("new"), "new").unwrap();
        if round == 0 {
            symlink(outside.path().join("room"), &door).unwrap();
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| swap(&room, &door, &stop));
            let commit = mount.run(&["commit", "branch"], &[]);
            stop.store(true, Ordering::Relaxed);
            common::succeed(&commit);
        });
        outside.assert_untouched(&format!("round {round}"));
        // One of the two is the link and the other the whole directory.
        let names = ["room", "door"].map(|name| mount.base().join(name));
        let links = names.iter().filter(|path| path.is_symlink()).count();
        assert_eq!(links, 1, "round {round}");
        let whole = names.iter().find(|path| !path.is_symlink()).unwrap();
        assert_eq!(fs::read_to_string(whole.join("file")).unwrap(), format!("round {round}"));
        assert_eq!(fs::read_dir(whole).unwrap().count(), 3);
        if mount.base().join("room").is_symlink() {
            rustix::fs::renameat_with(CWD, &names[0], CWD, &names[1], RenameFlags::EXCHANGE)
                .unwrap();
        }
    }
}

#[test]
fn hostile_names_are_names_and_nothing_else() {
    let names: [&[u8]; 14] = [
        b"-rf",
        b"new\nline",
        b"\xff\xfe\x80",
        b"\x01\x1b[31m\x7f",
        b" ",
        b"\\",
        b"...",
        b"@",
        b"@main",
        b".wh.file",
        b".wh..wh..opq",
        b".Branching",
        b"$(touch pwned)",
        b"%s%n",
    ];
    let long = vec![b'n'; 255];
    let names: Vec<&OsStr> =
        names.iter().copied().chain([&long[..]]).map(OsStr::from_bytes).collect();
    let mount = Mount::over(|base| {
        fs::write(base.join("file"), "base").unwrap();
        fs::create_dir(base.join("directory")).unwrap();
        for name in &names {
            fs::write(base.join("directory").join(name), "base").unwrap();
        }
    });
    let branch = mount.create("branch");
    for name in &names {
        fs::write(branch.join(name), name.as_bytes()).unwrap();
        fs::create_dir_all(branch.join("nested").join(name)).unwrap();
        fs::write(branch.join("nested").join(name).join(name), "deep").unwrap();
        fs::remove_file(branch.join("directory").join(name)).unwrap();
    }
    // The name of the store is reserved.
    let store = branch.join(".branching");
    let refused = fs::write(&store, "").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    assert_eq!(fs::create_dir(&store).unwrap_err().raw_os_error(), Some(libc::EPERM));
    let renamed = fs::rename(branch.join("file"), &store).unwrap_err();
    assert_eq!(renamed.raw_os_error(), Some(libc::EPERM));
    fs::create_dir(branch.join("nested/.branching")).unwrap();
    let diff = mount.run(&["diff", "branch"], &[]);
    common::succeed(&diff);
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "the base after the commit");
    assert_eq!(fs::read_dir(mount.base().join("directory")).unwrap().count(), 0);
    assert!(!mount.base().join("pwned").exists());
}

#[test]
fn no_hard_link_ties_a_branch_to_anything_else() {
    let outside = Outside::new();
    let mount = Mount::over(|base| {
        fs::write(base.join("file"), "base").unwrap();
        fs::hard_link(outside.path().join("secret"), base.join("shared")).unwrap();
    });
    let before = fs::read_to_string(outside.path().join("secret")).unwrap();
    let (branch, sibling) = (mount.create("branch"), mount.create("sibling"));
    for (from, to) in [
        (branch.join("file"), sibling.join("link")),
        (branch.join("file"), mount.mountpoint().join("link")),
        (mount.mountpoint().join("file"), branch.join("link")),
        (outside.path().join("secret"), branch.join("link")),
        (branch.join("file"), outside.path().join("link")),
        (branch.join("file"), mount.base().join("link")),
    ] {
        let refused = fs::hard_link(&from, &to).unwrap_err().raw_os_error();
        assert_eq!(refused, Some(libc::EXDEV), "{} -> {}", from.display(), to.display());
        let refused = fs::rename(&from, &to).map_err(|error| error.raw_os_error());
        assert_eq!(refused, Err(Some(libc::EXDEV)), "{} -> {}", from.display(), to.display());
    }
    // Nor through an open file's name in /proc.
    shell(
        &branch,
        &format!(
            "exec 3<file; ! ln -L /proc/self/fd/3 {0}/link 2>/dev/null; ! ln -L /proc/self/fd/3 ../@sibling/link 2>/dev/null; ln -L /proc/self/fd/3 inside; test inside -ef file",
            outside.path().display()
        ),
    );
    // A file of the base that has a name outside is the branch's own once changed.
    fs::write(branch.join("shared"), "changed").unwrap();
    assert_eq!(fs::read_to_string(outside.path().join("secret")).unwrap(), before);
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("shared")).unwrap(), "changed");
    assert_eq!(fs::read_to_string(outside.path().join("secret")).unwrap(), before);
}

#[test]
fn an_open_file_is_no_way_into_the_base() {
    let mount = Mount::over(|base| {
        shell(base, "echo base | tee file read truncated mapped > /dev/null; chmod 666 *")
    });
    open_to_all(&mount);
    let before = snapshot(&mount.base());
    let branch = mount.create("branch");
    let script = "import mmap, os, sys
def through(descriptor, flags):
    return os.open(f'/proc/self/fd/{descriptor}', flags)
reader = os.open('file', os.O_RDONLY)
os.write(through(reader, os.O_WRONLY), b'BRANCH')
assert os.pread(reader, 6, 0) == b'BRANCH', 'the reader follows the copy'
handle = os.open('read', os.O_PATH)
os.write(through(handle, os.O_RDWR), b'BRANCH')
os.close(through(os.open('truncated', os.O_RDONLY), os.O_WRONLY | os.O_TRUNC))
assert os.stat('truncated').st_size == 0
mapped = os.open('mapped', os.O_RDONLY)
try:
    mmap.mmap(mapped, 4, mmap.MAP_SHARED, mmap.PROT_WRITE)
    sys.exit('a shared writable mapping of a file opened for reading')
except PermissionError:
    pass
private = mmap.mmap(mapped, 4, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
private[:] = b'MINE'
assert os.pread(mapped, 4, 0) == b'base'
writer = os.open('mapped', os.O_RDWR)
shared = mmap.mmap(writer, 4)
shared[:] = b'DATA'
shared.flush()
assert os.pread(mapped, 4, 0) == b'DATA'
for descriptor in os.listdir('/proc/self/fd'):
    target = os.readlink(f'/proc/self/fd/{descriptor}') if os.path.lexists(f'/proc/self/fd/{descriptor}') else ''
    assert 'upper' not in target, target";
    fs::write(mount.directory.path().join("script.py"), script).unwrap();
    assert_eq!(as_nobody(&branch, "python3 ../../script.py"), "");
    assert_same(&snapshot(&mount.base()), &before, "the base before the commit");
    // Main is frozen while it has a branch: no way round.
    let refused = fs::write(mount.mountpoint().join("file"), "main").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
}

#[test]
fn devices_are_unchanged_and_only_root_makes_any() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mknod null c 1 3; mknod zero c 0 0; mknod block b 7 250; mkfifo fifo; mknod gone c 0 0; chmod 666 *; mkdir -m 777 open",
        );
    });
    open_to_all(&mount);
    let branch = mount.create("branch");
    // Device 0:0 is what a whiteout is made of: a real one that is copied up is none.
    shell(
        &branch,
        "chmod 600 zero null block; touch -d 2001-02-03 fifo; mv zero open/moved; rm gone; mknod made c 0 0; ln made linked
         test -c open/moved; test -c made; test ! -e gone; echo > null; test -c linked",
    );
    // Device 0:0 may be made by everybody since Linux 5.8, others by root alone.
    let native = mount.directory.path().join("native");
    shell(mount.directory.path(), "mkdir -p native/open; chmod 777 native/open");
    for attempt in
        ["mknod open/c c 1 3", "mknod open/b b 8 0", "mknod open/w c 0 0; test -c open/w; echo $?"]
    {
        assert_eq!(as_nobody(&branch, attempt), as_nobody(&native, attempt), "{attempt}");
    }
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "the base after the commit");
    let zero = fs::symlink_metadata(mount.base().join("open/moved")).unwrap();
    assert_eq!((zero.rdev(), zero.mode() & 0o777), (0, 0o600));
}

/// Does the same in an ordinary directory and in a branch; both must say the same, and the base must be the ordinary
/// directory's twin after the commit but for the times.
fn same_as_native(prepare: &str, by_nobody: &str, by_root: &str) {
    let native = tempfile::tempdir().unwrap();
    fs::set_permissions(native.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let plain = native.path().join("base");
    fs::create_dir(&plain).unwrap();
    shell(&plain, prepare);
    let mount = Mount::over(|base| shell(base, prepare));
    open_to_all(&mount);
    let branch = mount.create("branch");
    let mut heard = Vec::new();
    for directory in [&plain, &branch] {
        let said = as_nobody(directory, by_nobody);
        shell(directory, by_root);
        heard.push(said + &as_nobody(directory, by_nobody));
    }
    assert_eq!(heard[0], heard[1], "natively, and in the branch");
    mount.commit("branch");
    let without_times = |tree: std::collections::BTreeMap<PathBuf, common::Object>| {
        let strip = |object: common::Object| common::Object { mtime: (0, 0), ..object };
        tree.into_iter().map(|(path, object)| (path, strip(object))).collect()
    };
    assert_same(
        &without_times(snapshot(&mount.base())),
        &without_times(snapshot(&plain)),
        "the base, and the ordinary directory",
    );
}

#[test]
fn set_id_bits_and_capabilities_come_and_go_as_they_do_natively() {
    // A capability in the kernel's format: version 2, effective, cap_net_bind_service.
    let capable = "python3 -c \"import os, sys; [os.setxattr(f, 'security.capability', bytes.fromhex('0100000200040000000000000000000000000000')) for f in sys.argv[1:]]\"";
    same_as_native(
        &format!(
            "for f in root-setuid theirs-setuid theirs-setgid theirs-noexec root-chmod written; do cp /bin/true $f; done; chown 65534:65534 theirs-*
             chmod 4755 root-setuid theirs-setuid; chmod 2755 theirs-setgid; chmod 2644 theirs-noexec; chmod 4777 written
             cp /bin/true capable; chmod 777 capable; {capable} capable; cp capable capable-kept; {capable} capable-kept
             mkdir -m 2777 setgid; chown :100 setgid; chmod 2777 setgid; mkdir -m 1777 sticky; cp /bin/true sticky/root"
        ),
        "echo x >> written; echo x >> theirs-setuid; echo x >> theirs-setgid; echo x >> theirs-noexec; echo x >> root-setuid
         echo x >> capable; chmod 4755 root-chmod; chmod 6755 theirs-setuid; chgrp 65534 theirs-setgid; chown 0 theirs-setuid
         mkdir setgid/below; echo > setgid/file; rm sticky/root; mv sticky/root sticky/other; echo > sticky/mine; stat -c '%n %a %u %g' * */*",
        "chmod 6755 root-chmod; chown 1000:1000 root-setuid; truncate -s 1 theirs-noexec; echo x >> written; chmod 4711 sticky/mine; touch capable-kept",
    );
}

#[test]
fn other_users_may_what_modes_and_acls_let_them() {
    same_as_native(
        "mkdir -m 700 closed; echo secret > closed/file; mkdir -m 711 passable; echo secret > passable/file; chmod 600 passable/file; echo > passable/open; chmod 666 passable/open
         mkdir -m 777 open; echo > open/roots; chmod 644 open/roots; mkdir -m 555 readonly; echo theirs > mine; chown 65534:65534 mine; chmod 400 mine
         mkdir -m 755 acl; setfacl -m u:65534:rwx,d:u:65534:rw,d:o::- acl; echo > acl/file; setfacl -m u:65534:r acl/file; echo > denied; chmod 666 denied; setfacl -m u:65534:- denied",
        "cat closed/file; ls closed; cat passable/file; ls passable; echo > passable/open; echo > passable/new; cat denied
         echo x > open/roots; rm -f open/roots; echo > open/new; mkdir open/directory; ln -s /etc open/link; echo > readonly/new; echo > mine; chmod 600 mine; echo > mine; chown 0 mine
         echo > acl/file; cat acl/file; echo > acl/made; getfacl acl/made 2>/dev/null | grep -v '^#'; mkdir acl/below; chmod 777 closed; touch -d 2001-01-01 denied; setfacl -m u:65534:rwx denied
         stat -c '%n %a %u %g' * open/* acl/*; test -w denied; echo $?; test -r mine; echo $?",
        "chmod 701 closed; chmod 644 passable/file; setfacl -x u:65534 denied; chown 65534 open; echo root > open/second; chmod 000 mine",
    );
}

#[test]
fn the_store_is_closed_to_everybody_but_the_owner() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    open_to_all(&mount);
    let branch = mount.create("branch");
    fs::write(branch.join("file"), "secret").unwrap();
    let said = as_nobody(
        &mount.base(),
        "ls .branching; cat .branching/layers/*/upper/file; cat .branching/branches/*",
    );
    assert_eq!(said.matches("Permission denied").count(), 3, "{said}");
    assert!(!said.contains("secret"), "{said}");
    // Nor can the branch see or change it by any of its names.
    shell(
        &branch,
        "test ! -e .branching; ! cd .branching 2>/dev/null; ! mkdir .branching 2>/dev/null; ! ls .branching/layers 2>/dev/null; ! rm -r .branching 2>/dev/null",
    );
}

#[test]
fn all_that_the_store_keeps_for_itself_is_the_base_owners() {
    const OWNER: u32 = 12345;
    let mount = Mount::unmounted(|base| {
        shell(
            base,
            &format!("truncate -s 20M big; echo 1 > file; mkdir d; chown -R {OWNER}:{OWNER} ."),
        );
    });
    mount.mount_with(&["--policy", "snapshot"]);
    // A change in part, a nested commit, a snapshot layer, a record that is replaced, an undo and a redo.
    let open = mount.create("open");
    shell(&open, "printf x | dd of=big bs=1 seek=5000 conv=notrunc status=none; echo > d/new");
    shell(&mount.create_below("open", "inner"), "echo inner > inner");
    mount.commit("inner");
    for turn in ["one", "two"] {
        shell(&mount.create(turn), &format!("echo {turn} | tee file new-{turn} > /dev/null"));
        mount.commit(turn);
    }
    for verb in ["undo", "redo", "undo"] {
        common::succeed(&mount.run(&[verb], &[]));
    }
    // What came from branches and the base keeps its owner: content of layers, and what commits moved out.
    let find = format!(
        r"find .branching \( -name upper -o -path '.branching/history/*/[0-9]*' \) -prune -o ! -uid {OWNER} -print"
    );
    let output = std::process::Command::new("bash")
        .args(["-c", &find])
        .current_dir(mount.base())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(mount.base().join(".branching/history").read_dir().unwrap().count() > 1);
}

#[test]
fn a_commit_changes_nothing_in_the_store_of_another_workspace() {
    let outer = Mount::unmounted(|base| fs::create_dir_all(base.join("sub/d")).unwrap());
    let sub = outer.base().join("sub");
    let mountpoint = outer.directory.path().join("inner");
    fs::create_dir(&mountpoint).unwrap();
    let run = |words: &[&str]| {
        let mut command = Command::new(common::PROGRAM);
        common::succeed(&command.args(words).arg(&mountpoint).output().unwrap());
    };
    run(&["mount", "--driver", "fuse", "--base", sub.to_str().unwrap()]);
    run(&["create", "theirs"]);
    fs::write(mountpoint.join("@theirs/file"), "theirs").unwrap();
    run(&["unmount"]);
    let before = snapshot(&sub.join(".branching"));
    outer.mount();
    let branch = outer.create("branch");
    shell(&branch, "rm -r sub/.branching/branches/*; echo ours > sub/d/file");
    for words in [&["commit", "branch"][..], &["commit", "--force", "branch"]] {
        let refused = refusal(&outer.run(words, &[]));
        assert!(refused.contains("sub/.branching is the store of another workspace"), "{refused}");
        assert!(!sub.join("d/file").exists());
    }
    let words = ["commit", "--exclude", ".branching", "branch"];
    common::succeed(&outer.run(&words, &[]));
    assert_eq!(fs::read_to_string(sub.join("d/file")).unwrap(), "ours\n");
    assert_same(&snapshot(&sub.join(".branching")), &before, "their store");
    run(&["mount", "--driver", "fuse", "--base", sub.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(mountpoint.join("@theirs/file")).unwrap(), "theirs");
    run(&["unmount"]);
}

#[test]
fn attributes_of_users_with_similar_names_are_kept() {
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    let names = [
        "user.branchfs.partial",
        "user.branchfs.control",
        "user.branchfs.private",
        "user.branchfs.x",
    ];
    let mount = Mount::over(|base| {
        shell(base, "mkdir room; echo base | tee room/file untouched > /dev/null");
        for (name, path) in
            names.iter().flat_map(|name| ["room", "room/file", ""].map(|path| (name, path)))
        {
            set(&base.join(path), name, b"theirs");
        }
    });
    let before = common::snapshot(&mount.base());
    let branch = mount.create("branch");
    assert_eq!(common::snapshot(&branch), before);
    shell(&branch, "echo more >> room/file; chmod 700 room; mkdir new; echo new > new/file");
    for name in names {
        for path in ["room", "room/file", "new", "new/file", "untouched", ""] {
            set(&branch.join(path), name, b"the branch's");
        }
    }
    let wanted = common::snapshot(&branch);
    assert_eq!(wanted[Path::new("room/file")].xattrs.len(), names.len());
    mount.unmount();
    mount.mount();
    assert_same(&common::snapshot(&branch), &wanted, "after a remount");
    mount.commit("branch");
    assert_same(&common::snapshot(&mount.base()), &wanted, "committed");
    common::succeed(&mount.run(&["undo"], &[]));
    assert_same(&common::snapshot(&mount.base()), &before, "undone");
}

#[test]
fn a_store_is_mounted_with_the_marks_that_it_was_made_with() {
    let mount = Mount::over(|base| shell(base, "mkdir room; echo base > room/file"));
    let marks = mount.base().join(".branching/marks");
    let store = mount.base().join(".branching");
    mount.create("kept");
    mount.unmount();
    assert_eq!(fs::read_link(&marks).unwrap(), Path::new("trusted"));
    shell(&store, "ln -sfn user marks"); // as a mount without the privilege would have
    mount.mount();
    shell(&mount.create("branch"), "rm -r room; mkdir room");
    mount.kill();
    mount.mount();
    shell(&mount.branch("branch"), "test ! -e room/file");
    mount.commit("branch");
    shell(&mount.base(), "test -d room; test ! -e room/file");
    assert_eq!(common::snapshot(&mount.base())[Path::new("room")].xattrs.len(), 0);
    mount.create("later");
    mount.unmount();
    shell(&store, "ln -sfn trusted marks");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_admin", common::PROGRAM, "mount", "--base"]);
    let output = command.arg(mount.base()).arg(mount.mountpoint()).output().unwrap();
    assert!(refusal(&output).contains("CAP_SYS_ADMIN"));
    assert!(store.join("layers").exists());
    mount.mount();
}

#[test]
fn marks_of_the_layer_format_cannot_be_forged() {
    let outside = Outside::new();
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p room/below marked; echo base | tee room/file room/below/file marked/file > /dev/null",
        );
        // In the base such marks mean nothing; they may be what another overlay left.
        let set = |name: &str, value: &[u8]| {
            let marked = base.join("marked");
            rustix::fs::lsetxattr(marked, name, value, rustix::fs::XattrFlags::empty()).unwrap();
        };
        set("trusted.overlay.opaque", b"y");
        set("trusted.overlay.redirect", format!("/../..{}", outside.path().display()).as_bytes());
    });
    let branch = mount.create("branch");
    // Where the marks are `trusted` attributes, these mean nothing.
    for name in ["user.overlay.opaque", "user.overlay.redirect"] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(branch.join("room"), name, b"y", flags).unwrap();
    }
    for name in ["trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.branchfs.device"] {
        for path in ["room", "room/file"] {
            let set = rustix::fs::lsetxattr(
                branch.join(path),
                name,
                b"y",
                rustix::fs::XattrFlags::empty(),
            );
            assert_eq!(set, Err(rustix::io::Errno::PERM), "{name} on {path}");
        }
    }
    let mut value = [0; 64];
    let read =
        rustix::fs::lgetxattr(branch.join("marked"), "trusted.overlay.opaque", &mut value[..]);
    assert_eq!(read, Err(rustix::io::Errno::NODATA));
    shell(
        &branch,
        "cat marked/file; echo branch > marked/new; echo branch > marked/file; mv marked moved; rm -r room/below; mkdir room/below",
    );
    mount.commit("branch");
    outside.assert_untouched("after the commit");
    shell(
        &mount.base(),
        "test \"$(cat moved/file)\" = branch; test -e moved/new; test ! -e room/below/file; test ! -e marked",
    );
}

#[test]
fn a_file_system_mounted_below_the_base_is_not_part_of_it() {
    let mount =
        Mount::unmounted(|base| shell(base, "mkdir room; echo base > room/file; echo base > file"));
    let room = mount.base().join("room");
    rustix::mount::mount("none", &room, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    let outcome = std::panic::catch_unwind(|| {
        fs::write(room.join("mounted"), "other").unwrap();
        mount.mount();
        let branch = mount.create("branch");
        assert!(
            !branch.join("room/mounted").exists(),
            "a branch does not see what is mounted there"
        );
        fs::write(branch.join("room/new"), "branch").unwrap();
        fs::write(branch.join("file"), "branch").unwrap();
        let refused = refusal(&mount.run(&["commit", "branch"], &[]));
        assert!(refused.contains("room"), "{refused}");
        assert_eq!(
            fs::read_to_string(mount.base().join("file")).unwrap(),
            "base\n",
            "nothing half done"
        );
        assert_eq!(
            fs::read_dir(&room).unwrap().count(),
            1,
            "nothing came into what is mounted there"
        );
        fs::remove_file(branch.join("room/new")).unwrap();
        fs::remove_dir_all(branch.join("room")).unwrap();
        let refused = refusal(&mount.run(&["commit", "--force", "branch"], &[]));
        assert!(refused.contains("room"), "{refused}");
        mount.abort("branch");
    });
    rustix::mount::unmount(&room, rustix::mount::UnmountFlags::DETACH).unwrap();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn a_planted_attribute_makes_no_directory_a_mount() {
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    shell(place.path(), "mkdir plain tmpfs bound; mount -t tmpfs branchfs tmpfs");
    let mount = Mount::over(|base| fs::create_dir(base.join("d")).unwrap());
    // The attributes of a directory in a branch are its owner's, also where it is mounted elsewhere.
    let inside = mount.create("branch").join("d");
    for directory in [&place.path().join("plain"), &place.path().join("tmpfs"), &inside] {
        let name = "user.branchfs.control";
        let value = socket.as_os_str().as_bytes();
        let set = rustix::fs::setxattr(directory, name, value, rustix::fs::XattrFlags::empty());
        set.unwrap();
    }
    shell(place.path(), &format!("mount --bind '{}' bound", inside.display()));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for name in ["plain", "tmpfs", "bound"] {
            let directory = place.path().join(name);
            for words in [&["list"][..], &["create", "x"], &["unmount"]] {
                let output =
                    Command::new(common::PROGRAM).args(words).arg(&directory).output().unwrap();
                let said = refusal(&output);
                assert!(said.contains("is not a BranchFS mount"), "{name}, {words:?}: {said}");
            }
        }
        assert!(listener.accept().is_err(), "somebody has connected to the planted socket");
    }));
    shell(place.path(), "umount tmpfs bound");
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// An ordinary user could not keep the group of the directory's files.
#[test]
fn a_directory_of_a_foreign_group_is_refused_to_its_owner_and_nothing_is_left_in_it() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("branchfs");
    fs::copy(common::PROGRAM, &program).unwrap();
    shell(directory.path(), "mkdir base mount; chown 65534:0 base; chown 65534:65534 mount");
    let said = as_nobody(directory.path(), "./branchfs mount --base base mount; echo $?");
    assert!(
        said.contains("the directory belongs to group 0, which you are not a member of"),
        "{said}"
    );
    assert!(said.starts_with("1\n"), "{said}");
    assert_eq!(fs::read_dir(directory.path().join("base")).unwrap().count(), 0);
}

#[test]
fn an_error_says_its_cause_once() {
    let directory = tempfile::tempdir().unwrap();
    shell(directory.path(), "mkdir base mount; echo > file");
    let mut command = Command::new(common::PROGRAM);
    let mount = command.current_dir(directory.path()).args(["mount", "--base", "base"]);
    let said = refusal(&mount.args(["--store", "file/store", "mount"]).output().unwrap());
    assert_eq!(said.matches("Not a directory").count(), 1, "{said}");
}
