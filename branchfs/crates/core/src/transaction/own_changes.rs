//! Changes of ctimes in the base by our own transactions, which are no drift.
//!
//! A transaction moves objects, even if it is rolled back; its time span is recorded. An object loses a link when a
//! before-image in the history or in a snapshot layer is deleted, at any later time. Its ctime before and after is
//! recorded, so that an external change in between is detected.
//!
//! The log is text: a line `START END` for a transaction, `INODE BEFORE AFTER` for a link; times in nanoseconds since 1970.
//! A damaged line is ignored, which can only cause a false conflict.
//!
//! Before links are deleted, a line `unlinking DIRECTORY INODE BEFORE …` is written, with the directory in hexadecimal. If it
//! is the last line, the ctimes after the deletion were not recorded. They are not later than that of the directory, from
//! which the names were removed: `AFTER` may be any time until then.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::write_set::{from_hex, to_hex};

/// Prefix of the line with links that are about to be deleted.
const UNLINKING: &str = "unlinking";

/// First and last moment of a transaction by the clock of the file system, nanoseconds since 1970. An object of the
/// base with a ctime in between was changed by the transaction.
pub(crate) type Interval = (i64, i64);

/// The changes of ctimes in the base that BranchFS caused. A commit does not report them as drift.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnCtimeChanges {
    intervals: Vec<Interval>,
    /// Inode number of an object that lost a link, and the latest ctime it had by that -> its ctime before.
    unlinked: BTreeMap<(u64, i64), i64>,
}

/// Links whose deletion was announced and not recorded yet.
#[derive(Debug)]
pub(crate) struct PendingUnlink {
    /// The directory that contains the links.
    pub(crate) directory: PathBuf,
    /// Inode numbers and ctimes before.
    objects: Vec<(u64, i64)>,
}

impl PendingUnlink {
    /// Parses the last line of a text, if it announces such links.
    pub(crate) fn last(text: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(text);
        let mut words = text.lines().last()?.strip_prefix(UNLINKING)?.split_whitespace();
        let directory = from_hex(words.next()?)?;
        let mut objects = Vec::new();
        while let (Some(ino), Some(before)) = (words.next(), words.next()) {
            objects.push((ino.parse().ok()?, before.parse().ok()?));
        }
        Some(Self { directory, objects })
    }

    pub(crate) fn log_line(directory: &Path, objects: impl Iterator<Item = (u64, i64)>) -> String {
        let mut line = format!("{UNLINKING} {}", to_hex(directory));
        objects.for_each(|(ino, before)| line += &format!(" {ino} {before}"));
        line + "\n"
    }

    /// The log lines for them, if the last was deleted at `latest` or before.
    pub(crate) fn notes(&self, latest: i64) -> String {
        let note =
            |(ino, before): &(u64, i64)| OwnCtimeChanges::unlinked_line(*ino, *before, latest);
        self.objects.iter().map(note).collect()
    }
}

impl OwnCtimeChanges {
    pub(crate) fn parse(text: &[u8]) -> Self {
        let mut own_changes = Self::default();
        for line in String::from_utf8_lossy(text).lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                [start, end] => {
                    if let (Ok(start), Ok(end)) = (start.parse(), end.parse()) {
                        own_changes.intervals.push((start, end));
                    }
                }
                [ino, before, after] => {
                    if let (Ok(ino), Ok(before), Ok(after)) =
                        (ino.parse(), before.parse::<i64>(), after.parse::<i64>())
                    {
                        if before < after {
                            own_changes.unlinked.insert((ino, after), before);
                        }
                    }
                }
                _ => {}
            }
        }
        own_changes
    }

    pub(crate) fn interval_line((start, end): Interval) -> String {
        format!("{start} {end}\n")
    }

    pub(crate) fn unlinked_line(ino: u64, before: i64, after: i64) -> String {
        format!("{ino} {before} {after}\n")
    }

    pub(crate) fn add(&mut self, interval: Interval) {
        self.intervals.push(interval);
    }

    /// Removes all transactions; the entries of deleted links stay.
    pub(crate) fn drop_transactions(&mut self) {
        self.intervals.clear();
    }

    /// Drops what ended before `oldest`. Returns whether there was anything.
    pub(crate) fn drop_before(&mut self, oldest: i64) -> bool {
        let count = |own_changes: &Self| own_changes.intervals.len() + own_changes.unlinked.len();
        let before = count(self);
        self.intervals.retain(|(_, end)| *end >= oldest);
        self.unlinked.retain(|(_, after), _| *after >= oldest);
        count(self) < before
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.intervals.is_empty() && self.unlinked.is_empty()
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for interval in &self.intervals {
            text += &Self::interval_line(*interval);
        }
        for ((ino, after), before) in &self.unlinked {
            text += &Self::unlinked_line(*ino, *before, *after);
        }
        text
    }

    /// Returns the earlier ctimes that are equivalent to this one, because only our links were deleted since.
    pub(crate) fn equivalent_ctimes(&self, ino: u64, ctime: i64) -> impl Iterator<Item = i64> {
        std::iter::successors(Some(ctime), move |after| {
            let mut befores =
                self.unlinked.range((ino, *after)..=(ino, i64::MAX)).map(|one| *one.1);
            befores.find(|before| before < after)
        })
    }

    /// Whether a transaction that began at `since` or later changed an object with this ctime.
    pub(crate) fn contains(&self, ctime: i64, since: i64) -> bool {
        let mut later = self.intervals.iter().filter(|(start, _)| *start >= since);
        later.any(|(start, end)| (*start..=*end).contains(&ctime))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ctime_means_those_before_our_links_went() {
        let same = |text: &str, ctime| {
            let own_changes = OwnCtimeChanges::parse(text.as_bytes());
            own_changes.equivalent_ctimes(7, ctime).collect::<Vec<_>>()
        };
        let noted = "7 10 20\n8 20 21\n7 20 30\n";
        assert_eq!(same(noted, 30), [30, 20, 10]);
        assert_eq!(same(noted, 31), [31], "changed by others afterwards");
        // The deletion was not recorded: at 25 at the latest, and perhaps of two links.
        let cut =
            format!("7 5 10\n{}", PendingUnlink::log_line(Path::new("a b"), [(7, 10)].into_iter()));
        let unlinking = PendingUnlink::last(cut.as_bytes()).unwrap();
        assert_eq!(unlinking.directory, Path::new("a b"));
        let text = cut + &unlinking.notes(25);
        assert_eq!(same(&text, 22), [22, 10, 5]);
        assert_eq!(same(&text, 26), [26]);
        let later = text + "7 22 23\n";
        assert_eq!(same(&later, 23), [23, 22, 10, 5]);
        assert!(PendingUnlink::last(later.as_bytes()).is_none(), "it was noted");
    }
}
