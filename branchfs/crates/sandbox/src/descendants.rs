//! All descendants of this process: the replacement for a process namespace where there is none.
//!
//! Orphans become children of this process (it is their subreaper), so all of them are found. But a process that forks
//! faster than /proc is read may live a little longer, and one that changes its user cannot be ended.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{WaitOptions, getpid, wait};

use crate::sys;

const KILL_MAX: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(1);

/// Signals each of them. A stopped process is woken to receive it.
pub(crate) fn signal_all(number: i32) {
    for pid in descendants() {
        // Each may have ended meanwhile, or be another user's.
        if sys::kill(pid, number).is_ok() && number != libc::SIGSTOP {
            let _ = sys::kill(pid, libc::SIGCONT);
        }
    }
}

/// Kills them until there are none, or for a bounded time.
pub(crate) fn kill_all() {
    let deadline = Instant::now() + KILL_MAX;
    while Instant::now() < deadline {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => return, // without a child there is no descendant: orphans would be children
            }
        }
        signal_all(libc::SIGKILL);
        std::thread::sleep(POLL);
    }
}

fn descendants() -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may have ended meanwhile. The name in parentheses can be any bytes.
        let Ok(stat) = fs::read(entry.path().join("stat")) else { continue };
        let Some(end) = stat.iter().rposition(|&byte| byte == b')') else { continue };
        let facts = String::from_utf8_lossy(&stat[end + 1..]);
        if let Some(parent) = facts.split_whitespace().nth(1).and_then(|text| text.parse().ok()) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut waiting = vec![getpid().as_raw_nonzero().get()];
    while let Some(pid) = waiting.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        waiting.extend(&below);
        found.extend(below);
    }
    found
}
