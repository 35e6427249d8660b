//! The daemon's log in the store, by real daemons: what it holds while they live, and after each kind of death.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Mount, shell, succeed};
use rustix::process::{Pid, Signal};

fn log_of(mount: &Mount) -> String {
    fs::read_to_string(mount.base().join(".branching/branchfs.log")).unwrap_or_default()
}

/// Waits until the log holds a text: another process writes it.
fn wait_for(mount: &Mount, text: &str) -> String {
    const WAIT_MAX: Duration = Duration::from_secs(60);
    let start = Instant::now();
    loop {
        let log = log_of(mount);
        if log.contains(text) {
            return log;
        }
        assert!(start.elapsed() < WAIT_MAX, "{text:?} is not in the log:\n{log}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn assert_lines(log: &str, wanted: &[&str]) {
    let mut rest = log;
    for text in wanted {
        let at = rest.find(text).unwrap_or_else(|| panic!("{text:?} does not follow:\n{log}"));
        rest = &rest[at + text.len()..];
    }
}

#[test]
fn the_log_names_start_driver_commits_and_refusals() {
    let mount = Mount::unmounted(|base| {
        shell(base, "echo base > file; chown 1000:1000 .");
    });
    mount.mount();
    shell(&mount.create("one"), "echo one > file; echo new > new");
    shell(&mount.create("two"), "echo two > file");
    mount.commit("one");
    assert!(!mount.run(&["commit", "two"], &[]).status.success());
    succeed(&mount.run(&["undo"], &[]));
    let log = log_of(&mount);
    let version = concat!("INFO branchfs ", env!("CARGO_PKG_VERSION"), " starts");
    let wanted = [
        version,
        "INFO the driver is fuse: fuse was asked for",
        "INFO mounted at",
        "INFO committed \"one\", 2 paths changed",
        "INFO commit \"two\" was refused: ",
        "INFO undone: the commit of \"one\", 2 paths changed",
    ];
    assert_lines(&log, &wanted);
    assert!(!log.contains("created"), "creates are logged at the level debug:\n{log}");
    assert!(!mount.mountpoint().join(".branching").exists(), "no view shows it");
    let found = fs::metadata(mount.base().join(".branching/branchfs.log")).unwrap();
    assert_eq!((found.uid(), found.mode() & 0o777), (1000, 0o600));

    let printed = mount.run(&["log"], &[]);
    succeed(&printed);
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), log_of(&mount));
    mount.unmount();
    let log = log_of(&mount);
    assert_lines(&log, &["undone", "INFO unmounted"]);
    let printed = Command::new(common::PROGRAM).arg("log").arg(mount.base()).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), log);
}

#[test]
fn the_level_is_set_by_an_option_or_the_environment() {
    for (options, environment, is_logged) in [
        (&["--log-level", "debug"][..], None, true),
        (&[], Some("debug"), true),
        (&["--log-level", "error"], Some("debug"), false),
    ] {
        let mount = Mount::unmounted(|_| ());
        let mut command = Command::new(common::PROGRAM);
        command.args(["mount", "--driver", "fuse"]).args(options);
        command.arg("--base").arg(mount.base()).arg(mount.mountpoint());
        if let Some(level) = environment {
            command.env("BRANCHFS_LOG", level);
        }
        succeed(&command.output().unwrap());
        mount.create("one");
        mount.abort("one");
        let log = log_of(&mount);
        let is_found = log.contains("DEBUG created \"one\"") && log.contains("DEBUG aborted");
        assert_eq!(is_found, is_logged, "{options:?} {environment:?}:\n{log}");
    }
}

#[test]
fn an_unmount_removes_a_store_that_holds_nothing_but_the_log() {
    let mount = Mount::new();
    assert!(log_of(&mount).contains("mounted"));
    mount.unmount();
    assert!(!mount.base().join(".branching").exists());
}

#[test]
fn a_fatal_signal_leaves_a_line_and_the_next_mount_logs_the_recovery() {
    for signal in [Signal::SEGV, Signal::ABORT] {
        let mount = Mount::new();
        let daemon = Pid::from_raw(mount.daemon()).unwrap();
        rustix::process::kill_process(daemon, signal).unwrap();
        let name = if signal == Signal::SEGV { "SIGSEGV" } else { "SIGABRT" };
        wait_for(&mount, &format!("FATAL: {name} ends the daemon"));
        let _ = rustix::mount::unmount(mount.mountpoint(), rustix::mount::UnmountFlags::DETACH);
        mount.mount();
        assert_lines(
            &log_of(&mount),
            &["FATAL", "WARN recovery: the last mount ended without being unmounted"],
        );
    }
}

#[test]
fn a_command_that_finds_the_daemon_dead_names_the_log() {
    let mount = Mount::new();
    mount.kill_alone();
    for command in ["log", "list"] {
        let said = String::from_utf8(mount.run(&[command], &[]).stderr).unwrap();
        assert!(said.contains("is gone") && said.contains("branchfs log BASE"), "{said}");
    }
    let printed = Command::new(common::PROGRAM).arg("log").arg(mount.base()).output().unwrap();
    assert!(String::from_utf8(printed.stdout).unwrap().contains("mounted at"));
}

/// Set for the process that is the daemon: how it dies.
const DEATH: &str = "BRANCHFS_TEST_DEATH";

/// A daemon in this program, which dies once it answers.
fn dying_daemon(mount: &Mount, death: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_daemon_that_dies", "--ignored", "--nocapture"]);
    command.env(DEATH, death).env("BRANCHFS_TEST_PLACE", mount.directory.path());
    command.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap()
}

#[test]
#[ignore = "the daemon of other tests"]
fn a_daemon_that_dies() {
    let Some(death) = std::env::var_os(DEATH) else { return };
    let place = PathBuf::from(std::env::var_os("BRANCHFS_TEST_PLACE").unwrap());
    let options = branchfs::Options {
        base: place.join("base"),
        store: None,
        mountpoint: place.join("mount"),
        policy: branchfs::Policy::FirstWinner,
        history_commits_max: 10,
        control_files: false,
        passthrough: true,
        driver: branchfs::DriverKind::Fuse,
        log_level: branchfs::LogLevel::Info,
    };
    let _ = branchfs::run(&options, || {
        branchfs::detach_and_notify();
        match death.to_str() {
            Some("panic") => panic!("a bug in the daemon"),
            _ => println!("{}", overflow(0)),
        }
    });
}

#[allow(unconditional_recursion, reason = "it overflows the stack")]
fn overflow(depth: u64) -> u64 {
    let frame = std::hint::black_box([depth; 64]);
    overflow(depth + 1) + frame[usize::try_from(depth % 64).unwrap()]
}

#[test]
fn a_panic_leaves_its_message_and_backtrace_in_the_log() {
    let mount = Mount::unmounted(|_| ());
    let mut daemon = dying_daemon(&mount, "panic");
    let log = wait_for(&mount, "log::a_daemon_that_dies");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert_lines(&log, &["ERROR panic in thread", "a bug in the daemon", "a_daemon_that_dies"]);
}

#[test]
fn a_stack_overflow_leaves_the_message_of_the_runtime_in_the_log() {
    let mount = Mount::unmounted(|_| ());
    let mut daemon = dying_daemon(&mount, "overflow");
    let ended = daemon.wait().unwrap();
    assert_eq!(ended.signal(), Some(Signal::ABORT.as_raw()));
    assert_lines(&log_of(&mount), &["FATAL: SIGSEGV", "has overflowed its stack", "SIGABRT"]);
}
