//! fsx, the file system exerciser (the crate of that name), on a file of a branch: random reads, writes, mappings,
//! truncations, holes and copies, each checked against what the file must hold.
//!
//! Every run does some thousand operations; `scripts/test --soak` does a million.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Mount, succeed};

/// What the kernel may do in several ways: mappings beside writes, holes, copies within the file, and syncs between.
const EVERYTHING: &str = "[weights]\nclose_open = 1\ninvalidate = 1\nmapread = 10\nmapwrite = 10\nread = 10\nwrite = 10\ntruncate = 5\nfsync = 0.1\nfdatasync = 0.1\nposix_fallocate = 3\npunch_hole = 5\nsendfile = 3\nposix_fadvise = 1\ncopy_file_range = 5\n";

const CONFIGURATIONS: [(&str, &str); 5] = [
    ("everything", "flen = 262144\n"),
    ("mappings are not synced", "flen = 262144\nnomsyncafterwrite = true\n"),
    ("small operations at any offset", "flen = 20000\n[opsize]\nmin = 1\nmax = 700\n"),
    ("large operations", "flen = 8388608\n[opsize]\nmin = 1\nmax = 1048576\n"),
    (
        "a size that never changes",
        "flen = 262144\nblockmode = true\n[opsize]\nmin = 4096\nmax = 65536\nalign = 4096\n",
    ),
];

/// Runs fsx on `file`.
fn exercise(file: &Path, configuration: &str, seed: u64, operations: usize, scratch: &Path) {
    let path = scratch.join("fsx.toml");
    let block = configuration.contains("blockmode");
    let weights = match block {
        // Nothing that could change the size.
        true => EVERYTHING
            .replace("close_open = 1", "close_open = 0")
            .replace("truncate = 5", "truncate = 0")
            .replace("posix_fallocate = 3", "posix_fallocate = 0"),
        false => EVERYTHING.to_owned(),
    };
    fs::write(&path, format!("{configuration}{weights}")).unwrap();
    let program = std::env::var_os("FSX").unwrap_or_else(|| "fsx".into());
    let mut command = Command::new(&program);
    command.arg("-f").arg(&path).arg("-P").arg(scratch).args(["-q", "-S", &seed.to_string()]);
    let run = command.args(["-N", &operations.to_string()]).arg(file).output();
    let output = run.unwrap_or_else(|error| {
        panic!(
            "{}: {error}; install it: cargo install fsx --version 0.3.2 --locked",
            program.to_string_lossy()
        )
    });
    assert!(
        output.status.success(),
        "seed {seed}, {operations} operations, {configuration:?}\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_read_finds_what_was_written() {
    let operations = common::rounds(1000, 25_000);
    let seeds = common::rounds(1, 8) as u64;
    for seed in 1..=seeds {
        for (number, (name, configuration)) in CONFIGURATIONS.iter().enumerate() {
            // A file of the base, so that the first change copies it up; and in a nested branch, over a layer.
            let fill = |base: &Path| fs::write(base.join("file"), vec![b'b'; 200_000]).unwrap();
            let mount = Mount::unmounted(fill);
            // Every other time the file is a big one, and copied up in part.
            let mount = mount.with_big_files_from(if number % 2 == 0 { 20_000 } else { 1 << 40 });
            mount.mount();
            let outer = mount.create("outer");
            if number % 2 == 1 {
                fs::write(outer.join("file"), vec![b'o'; 100_000]).unwrap();
            }
            let inner = mount.create_below("outer", "inner");
            let scratch = tempfile::tempdir().unwrap();
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // Other branches come and go meanwhile.
                scope.spawn(|| {
                    for _ in 0..20 {
                        if done.load(Ordering::Relaxed) {
                            break;
                        }
                        let sibling = mount.run(&["create", "--parent", "outer", "sibling"], &[]);
                        succeed(&sibling);
                        fs::write(mount.branch("sibling").join("file"), name).unwrap();
                        mount.abort("sibling");
                    }
                });
                let run = || {
                    exercise(
                        &inner.join("file"),
                        configuration,
                        1000 * number as u64 + seed,
                        operations,
                        scratch.path(),
                    )
                };
                let outcome = std::panic::catch_unwind(run);
                done.store(true, Ordering::Relaxed);
                if let Err(panic) = outcome {
                    std::panic::resume_unwind(panic);
                }
            });
            let content = fs::read(inner.join("file")).unwrap();
            mount.commit("inner");
            assert!(fs::read(outer.join("file")).unwrap() == content, "{name}: in the parent");
            mount.commit("outer");
            assert!(fs::read(mount.base().join("file")).unwrap() == content, "{name}: in the base");
        }
    }
    println!("{} operations", operations as u64 * CONFIGURATIONS.len() as u64 * seeds);
}
