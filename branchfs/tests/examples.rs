//! Runs the `console` blocks of README.md and docs/semantics.md with both drivers, and compares the output.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{PROGRAM, succeed, wait_for_the_clock};

/// The directory in which the documents show the examples.
const SHOWN_DIRECTORY: &str = "/tmp/demo";

const DRIVERS: [&str; 2] = ["fuse", "overlay"];

/// The `console` blocks of a document, in order.
fn blocks(document: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(document)).unwrap();
    let parts = text.split("```console\n").skip(1);
    parts.map(|part| part.split_once("```\n").unwrap().0.to_owned()).collect()
}

/// Runs the commands of a block and returns them with their output, as the block shows it.
fn run(block: &str, directory: &Path, driver: &str) -> String {
    let mut shown = String::new();
    for command in block.lines().filter_map(|line| line.strip_prefix("$ ")) {
        wait_for_the_clock(directory); // an edit is told from an earlier one by its time
        let path = Path::new(PROGRAM).parent().unwrap().display();
        let output = Command::new("bash")
            .args(["-c", &format!("exec 2>&1; {command}")])
            .current_dir(directory)
            .env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap()))
            .env("BRANCHFS_DRIVER", driver)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let output = output.replace(directory.to_str().unwrap(), SHOWN_DIRECTORY);
        // An interactive shell, as in the documents, names no line.
        shown.push_str(&format!("$ {command}\n{}", output.replace("bash: line 1: ", "bash: ")));
    }
    shown
}

/// Checks that the blocks, run one after the other in an empty directory, have the output that they show.
fn assert_blocks_hold(blocks: &[&String], driver: &str) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().canonicalize().unwrap();
    let found: Vec<String> = blocks.iter().map(|block| run(block, &directory, driver)).collect();
    let mountpoint = directory.join("mnt");
    if fs::read_to_string("/proc/self/mounts").unwrap().contains(mountpoint.to_str().unwrap()) {
        let mut unmount = Command::new(PROGRAM);
        succeed(&unmount.arg("unmount").arg(&mountpoint).output().unwrap());
    }
    for (shown, found) in blocks.iter().zip(found) {
        assert_eq!(**shown, found, "with the driver {driver}");
    }
}

#[test]
fn the_examples_of_the_semantics_hold() {
    let blocks = blocks("docs/semantics.md");
    let (setup, examples) = blocks.split_first().unwrap();
    assert!(examples.len() >= 11, "the document has an example for most promises");
    for driver in DRIVERS {
        for example in examples {
            assert_blocks_hold(&[setup, example], driver);
        }
    }
}

#[test]
fn the_examples_of_the_readme_hold() {
    let blocks = blocks("README.md");
    assert!(!blocks.is_empty());
    for driver in DRIVERS {
        assert_blocks_hold(&blocks.iter().collect::<Vec<_>>(), driver);
    }
}
