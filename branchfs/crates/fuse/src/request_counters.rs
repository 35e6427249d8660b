//! Counts the requests of each kind: a measure of cost that does not depend on the clock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::opcode;

/// The kinds of requests, sorted by opcode.
const NAMES: [(u32, &str); 42] = [
    (opcode::LOOKUP, "lookup"),
    (opcode::FORGET, "forget"),
    (opcode::GETATTR, "getattr"),
    (opcode::SETATTR, "setattr"),
    (opcode::READLINK, "readlink"),
    (opcode::SYMLINK, "symlink"),
    (opcode::MKNOD, "mknod"),
    (opcode::MKDIR, "mkdir"),
    (opcode::UNLINK, "unlink"),
    (opcode::RMDIR, "rmdir"),
    (opcode::RENAME, "rename"),
    (opcode::LINK, "link"),
    (opcode::OPEN, "open"),
    (opcode::READ, "read"),
    (opcode::WRITE, "write"),
    (opcode::STATFS, "statfs"),
    (opcode::RELEASE, "release"),
    (opcode::FSYNC, "fsync"),
    (opcode::SETXATTR, "setxattr"),
    (opcode::GETXATTR, "getxattr"),
    (opcode::LISTXATTR, "listxattr"),
    (opcode::REMOVEXATTR, "removexattr"),
    (opcode::FLUSH, "flush"),
    (opcode::INIT, "init"),
    (opcode::OPENDIR, "opendir"),
    (opcode::READDIR, "readdir"),
    (opcode::RELEASEDIR, "releasedir"),
    (opcode::FSYNCDIR, "fsyncdir"),
    (opcode::CREATE, "create"),
    (opcode::INTERRUPT, "interrupt"),
    (opcode::DESTROY, "destroy"),
    (opcode::IOCTL, "ioctl"),
    (opcode::BATCH_FORGET, "batch_forget"),
    (opcode::FALLOCATE, "fallocate"),
    (opcode::READDIRPLUS, "readdirplus"),
    (opcode::RENAME2, "rename2"),
    (opcode::LSEEK, "lseek"),
    (opcode::COPY_FILE_RANGE, "copy_file_range"),
    (opcode::SYNCFS, "syncfs"),
    (opcode::TMPFILE, "tmpfile"),
    (opcode::STATX, "statx"),
    (OTHER, "other"),
];

/// Counts all opcodes that are not in [`NAMES`]. Greater than every known opcode.
const OTHER: u32 = 63;

/// Returns the name of a kind of request.
pub(super) fn name(opcode: u32) -> &'static str {
    NAMES.iter().find(|(known, _)| *known == opcode).map_or("other", |(_, name)| name)
}

/// The counters of one mount.
#[derive(Debug)]
pub(crate) struct RequestCounters {
    by_opcode: [AtomicU64; OTHER as usize + 1],
}

impl RequestCounters {
    pub(crate) fn new() -> Self {
        Self { by_opcode: [const { AtomicU64::new(0) }; OTHER as usize + 1] }
    }

    pub(crate) fn count(&self, opcode: u32) {
        let is_known = NAMES.binary_search_by_key(&opcode, |(known, _)| *known).is_ok();
        let at = if is_known { opcode } else { OTHER };
        self.by_opcode[at as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the kinds that were counts at least once.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        let count = |number: u32| self.by_opcode[number as usize].load(Ordering::Relaxed);
        NAMES
            .iter()
            .map(|(number, name)| (*name, count(*number)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_counted_by_itself_and_the_unknown_together() {
        let requests = RequestCounters::new();
        for opcode in [opcode::LOOKUP, opcode::LOOKUP, opcode::TMPFILE, 9999, 7] {
            requests.count(opcode);
        }
        assert_eq!(requests.counts(), [("lookup", 2), ("tmpfile", 1), ("other", 2)]);
    }

    #[test]
    fn every_number_has_room() {
        assert!(NAMES.iter().all(|(number, _)| *number <= OTHER));
        assert!(NAMES.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
