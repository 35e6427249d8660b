//! What an open branch that nobody uses costs the daemon in memory.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use common::Mount;
use serde_json::json;

/// Bytes of each idle branch, as an average over many: its record, its layer and its view.
const IDLE_BRANCH_BYTES_MAX: u64 = 1024;

/// Anonymous memory of the daemon in bytes. Freed memory that the allocator keeps counts, too.
fn anonymous_bytes(daemon: i32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{daemon}/smaps_rollup")).unwrap();
    let line = rollup.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn create(mount: &Mount, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let name = format!("branch-{number}");
        let reply = mount.request(&json!({"v": 1, "verb": "create", "name": name}));
        assert_eq!(reply["name"], name);
    }
}

#[test]
fn an_idle_branch_takes_at_most_a_kibibyte() {
    // So many that a stack or an arena of another thread, which comes at any time, adds less than 5 % of the limit.
    const BRANCHES: u64 = 10_000;
    let mount = Mount::new();
    create(&mount, 0..1000); // the tables and the allocator have their usual size from here on
    let before = anonymous_bytes(mount.daemon());
    create(&mount, 1000..1000 + BRANCHES);
    let each = (anonymous_bytes(mount.daemon()) - before) / BRANCHES;
    println!("an idle branch takes {each} bytes of memory");
    assert!(each <= IDLE_BRANCH_BYTES_MAX, "{each} bytes");
}
