//! POSIX as pjdfstest 0.2.2 has it: every case that passes in an ordinary directory passes in a branch.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::Mount;

const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
[settings]
naptime = 0.01
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// The C library asks a table of file system types for LINK_MAX, and FUSE is not in it; overlayfs needs one link itself.
const LINK_MAX: &str = "link::link_count_max";

/// The kernel's overlayfs keeps the device 0:0, which these cases make, for itself: EPERM.
const WITH_DEVICE_0_0: &str = "::char";

/// Names of the cases that pass in `directory`.
fn passing(directory: &Path, configuration: &Path) -> BTreeSet<String> {
    fs::create_dir(directory).unwrap();
    fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
    let program = std::env::var_os("PJDFSTEST").unwrap_or_else(|| "pjdfstest".into());
    let run = Command::new(&program).arg("-c").arg(configuration).arg("-p").arg(directory).output();
    let output = run.unwrap_or_else(|error| {
        panic!(
            "{}: {error}; install it: cargo install pjdfstest --version 0.2.2 --locked",
            program.to_string_lossy()
        )
    });
    let text = String::from_utf8(output.stdout).unwrap();
    let passed = |line: &str| line.strip_suffix(" ok").map(|name| name.trim().to_owned());
    text.lines().filter_map(passed).collect()
}

#[test]
fn every_case_that_passes_natively_passes_in_a_branch() {
    let mount = Mount::new();
    // The users of the cases must be able to enter.
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let configuration = mount.directory.path().join("pjdfstest.toml");
    fs::write(&configuration, CONFIGURATION).unwrap();
    let branch = mount.create("posix");
    let native = passing(&mount.directory.path().join("native"), &configuration);
    let ours = passing(&branch.join("t"), &configuration);
    assert!(native.len() > 350, "the suite ran: {} cases passed natively", native.len());
    let is_excepted = |case: &&String| match common::driver() {
        "overlay" => case.ends_with(WITH_DEVICE_0_0) || *case == LINK_MAX,
        _ => *case == LINK_MAX,
    };
    let missing = |ours: &BTreeSet<String>| -> BTreeSet<String> {
        native.difference(ours).filter(|case| !is_excepted(case)).cloned().collect()
    };
    // Some cases race with a child that they start themselves, on any file system: on a busy machine one may need another
    // try. What cannot pass fails every time.
    let mut missing = missing(&ours);
    for run in 0..3 {
        if missing.is_empty() {
            break;
        }
        let again = passing(&branch.join(format!("again-{run}")), &configuration);
        missing.retain(|case| !again.contains(case));
    }
    assert!(missing.is_empty(), "pass natively and not in a branch: {missing:#?}");
    println!("native {}, branch {}", native.len(), ours.len());
}
