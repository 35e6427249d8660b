//! What our own work did to the ctimes of the base's objects: it is no drift.
//!
//! A transaction moves objects, also one that fails and is taken back: that is known by when it was carried out. An
//! object loses a link when a before-image in the history or in a veil is deleted, which happens at any time later: each
//! is noted with the ctime before and after, so that a change by others in between is told from it.
//!
//! As text, which is appended to: a line `START END` for a transaction, `INODE BEFORE AFTER` for a link; times in
//! nanoseconds since 1970. A line that is damaged is passed over: then something is refused that need not be.

use std::collections::HashMap;

/// First and last moment of a transaction by the clock of the file system, nanoseconds since 1970: an object of the base
/// whose ctime lies between was touched by us.
pub(crate) type Interval = (i64, i64);

/// Such changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traces {
    intervals: Vec<Interval>,
    /// Inode number of an object that lost a link, and its ctime -> its ctime before, which is an earlier one.
    unlinked: HashMap<(u64, i64), i64>,
}

impl Traces {
    pub(crate) fn parse(text: &[u8]) -> Self {
        let mut traces = Self::default();
        for line in String::from_utf8_lossy(text).lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                [start, end] => {
                    if let (Ok(start), Ok(end)) = (start.parse(), end.parse()) {
                        traces.intervals.push((start, end));
                    }
                }
                [ino, before, after] => {
                    if let (Ok(ino), Ok(before), Ok(after)) =
                        (ino.parse(), before.parse::<i64>(), after.parse::<i64>())
                    {
                        if before < after {
                            traces.unlinked.insert((ino, after), before);
                        }
                    }
                }
                _ => {}
            }
        }
        traces
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

    /// Drops what ended before `oldest`. Tells whether there was anything.
    pub(crate) fn drop_before(&mut self, oldest: i64) -> bool {
        let count = |traces: &Self| traces.intervals.len() + traces.unlinked.len();
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

    /// The ctimes that mean the state which an object has with this one: those before it lost links of ours, too.
    pub(crate) fn same(&self, ino: u64, ctime: i64) -> impl Iterator<Item = i64> {
        std::iter::successors(Some(ctime), move |after| self.unlinked.get(&(ino, *after)).copied())
    }

    /// Whether a transaction that began at `since` or later touched what has this ctime.
    pub(crate) fn covers(&self, ctime: i64, since: i64) -> bool {
        let mut later = self.intervals.iter().filter(|(start, _)| *start >= since);
        later.any(|(start, end)| (*start..=*end).contains(&ctime))
    }
}
