//! A daemon with a low limit of open files: branches and commits work, and a program that opens too many files gets an error.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "test code")]

mod common;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use common::{Mount, driver, refusal, shell, succeed};

/// Soft and hard.
const LIMIT: u64 = 1024;

/// Mounts with the limit, and what the daemon is started by has it too.
fn mount_limited(fill: impl FnOnce(&Path), limit: u64) -> Mount {
    let mount = Mount::unmounted(fill);
    let mounted = Command::new("prlimit")
        .arg(format!("--nofile={limit}:{limit}"))
        .args([common::PROGRAM, "mount", "--driver", driver(), "--base"])
        .args([mount.base(), mount.mountpoint()])
        .output()
        .unwrap();
    succeed(&mounted);
    mount
}

fn open_in_daemon(mount: &Mount) -> usize {
    fs::read_dir(format!("/proc/{}/fd", mount.daemon())).unwrap().count()
}

const BRANCHES: usize = 40;
const DIRECTORIES: usize = 50;

#[test]
fn many_branches_of_many_directories_need_no_more_descriptors_than_there_are() {
    let fill = |base: &Path| {
        for number in 0..DIRECTORIES {
            fs::create_dir(base.join(number.to_string())).unwrap();
            fs::write(base.join(format!("{number}/file")), "base").unwrap();
        }
    };
    let mount = mount_limited(fill, LIMIT);
    let names: Vec<String> = (0..BRANCHES).map(|number| format!("b{number}")).collect();
    for name in &names {
        let branch = mount.create(name);
        for number in 0..DIRECTORIES {
            fs::create_dir(branch.join(format!("{number}/{name}"))).unwrap();
            fs::write(branch.join(format!("{number}/{name}/new")), name).unwrap();
        }
    }
    for name in &names {
        for number in 0..DIRECTORIES {
            let file = mount.branch(name).join(format!("{number}/{name}/new"));
            assert_eq!(fs::read_to_string(file).unwrap(), *name);
        }
        succeed(&mount.run(&["diff", name], &[]));
    }
    let open = open_in_daemon(&mount);
    assert!(open < 600, "{open} descriptors");
    for name in &names {
        succeed(&mount.run(&["commit", "--policy", "snapshot", name], &[]));
    }
    for name in &names {
        let file = mount.base().join(format!("{}/{name}/new", DIRECTORIES - 1));
        assert_eq!(fs::read_to_string(file).unwrap(), *name);
    }
}

#[test]
fn a_program_that_opens_too_many_files_is_refused_and_the_branch_can_still_be_committed() {
    if driver() == "overlay" {
        return; // the kernel opens the files
    }
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let maximum = getrlimit(Resource::Nofile).maximum; // this process opens them too
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    }
    let mount = mount_limited(|base| fs::write(base.join("file"), "base").unwrap(), LIMIT);
    let (branch, other) = (mount.create("crowded"), mount.create("other"));
    fs::write(other.join("file"), "other").unwrap();
    let mut open = Vec::new();
    let refused = loop {
        match File::open(branch.join("file")) {
            Ok(file) => open.push(file),
            Err(error) => break error,
        }
        assert!(open.len() < 2000, "there is no limit");
    };
    assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    assert!(open.len() > 700, "{} files were opened", open.len());
    // Nothing is made for an open that is refused, or truncated.
    assert_eq!(File::create(branch.join("new")).unwrap_err().raw_os_error(), Some(libc::EMFILE));
    assert!(!branch.join("new").exists());
    assert_eq!(File::create(other.join("file")).unwrap_err().raw_os_error(), Some(libc::EMFILE));
    assert_eq!(fs::metadata(other.join("file")).unwrap().len(), 5);
    // All that opens no file goes on.
    fs::create_dir(branch.join("directory")).unwrap();
    fs::rename(branch.join("directory"), branch.join("renamed")).unwrap();
    mount.create("third");
    mount.abort("third");
    mount.commit("other");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "other");
    drop(open);
    mount.abort("crowded");
}

#[test]
fn a_commit_that_could_not_open_its_files_is_refused_before_anything_is_changed() {
    let mount = mount_limited(|_| (), 256);
    let branch = mount.create("branch");
    shell(&branch, "echo new > file");
    // From now on the daemon has hardly more than it has open.
    let limit = open_in_daemon(&mount) + 8;
    let (daemon, limit) = (mount.daemon().to_string(), format!("--nofile={limit}:256"));
    let set = |limit: &str| Command::new("prlimit").args(["--pid", &daemon, limit]).output();
    succeed(&set(&limit).unwrap());
    let message = refusal(&mount.run(&["commit", "branch"], &[]));
    assert!(message.contains("so nothing was begun"), "{message}");
    assert_eq!(File::open(mount.base().join("file")).unwrap_err().kind(), ErrorKind::NotFound);
    succeed(&set("--nofile=256:256").unwrap());
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "new\n");
}
