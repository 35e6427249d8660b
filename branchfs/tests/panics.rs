//! A panic of the daemon fails the request alone and stops transactions; the next mount recovers.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "test code")]

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{Mount, refusal, shell, succeed, wait_until};

const EIO: Option<i32> = Some(5);

/// A mount whose daemon panics on these requests, with a branch `a` that has a change.
fn mount_with_panics(requests: &str) -> (Mount, PathBuf) {
    let mount = Mount::new();
    mount.unmount();
    let mut command = Command::new(common::PROGRAM);
    command.args(["mount", "--control-files", "--driver", "fuse", "--base"]);
    command.arg(mount.base()).arg(mount.mountpoint());
    succeed(&command.env("BRANCHFS_PANIC_ON", requests).output().unwrap());
    let branch = mount.create("a");
    shell(&branch, "echo changed > file");
    (mount, branch)
}

/// Transactions are refused, the log has the panic with its backtrace, and the next mount commits the branch.
fn check_recovery(mount: &Mount, request: &str) {
    let refused = refusal(&mount.run(&["commit", "a"], &[]));
    assert!(refused.contains("no transaction is accepted"), "{refused}");
    assert!(refused.contains("panicked"), "{refused}");
    succeed(&mount.run(&["list"], &[]));
    let log = fs::read_to_string(mount.store().join("branchfs.log")).unwrap();
    assert!(log.contains(&format!("injected panic: {request}")), "{log}");
    assert!(log.contains("panic_if_listed"), "a backtrace: {log}");
    mount.unmount();
    mount.mount();
    mount.commit("a");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "changed\n");
}

#[test]
fn a_panic_of_a_file_system_request_is_an_io_error_and_every_thread_continues() {
    let (mount, branch) = mount_with_panics("mkdir");
    // More often than the daemon has threads.
    for attempt in 0..10 {
        let error = fs::create_dir(branch.join(format!("directory{attempt}"))).unwrap_err();
        assert_eq!(error.raw_os_error(), EIO);
    }
    shell(&branch, "cat file");
    check_recovery(&mount, "mkdir");
}

#[test]
fn a_panic_of_a_request_on_a_thread_of_its_own_is_an_io_error() {
    let (mount, branch) = mount_with_panics("ioctl");
    let control = fs::File::open(branch.join(".branchfs_ctl")).unwrap();
    assert_eq!(rustix::fs::ioctl_getflags(&control).unwrap_err().raw_os_error(), 5);
    drop(control);
    check_recovery(&mount, "ioctl");
}

#[test]
fn a_panic_while_a_node_is_forgotten_ends_no_thread() {
    let (mount, branch) = mount_with_panics("forget,batch_forget");
    let log = || fs::read_to_string(mount.store().join("branchfs.log")).unwrap();
    for attempt in 0..10 {
        shell(&branch, &format!("echo x > gone{attempt}; rm gone{attempt}"));
    }
    wait_until("the panics are logged", || log().contains("injected panic"));
    shell(&branch, "cat file");
    let request = if log().contains("panic: forget") { "forget" } else { "batch_forget" };
    check_recovery(&mount, request);
}

#[test]
fn a_panic_of_a_verb_is_an_error_reply_and_the_connections_continue() {
    let (mount, _) = mount_with_panics("history");
    for _ in 0..5 {
        let refused = refusal(&mount.run(&["history"], &[]));
        assert!(refused.contains("internal error of the daemon"), "{refused}");
    }
    check_recovery(&mount, "history");
}

#[test]
fn a_panic_of_a_background_job_ends_no_thread() {
    let (mount, _) = mount_with_panics("background");
    mount.create("dropped");
    mount.abort("dropped");
    let log = || fs::read_to_string(mount.store().join("branchfs.log")).unwrap();
    wait_until("the panic has stopped transactions", || log().contains("job panicked"));
    check_recovery(&mount, "background");
}
