//! Hunks of a unified diff, over lines of bytes.
//!
//! The lines are compared by the library `imara-diff`: its time stays bounded on inputs that make a plain Myers
//! comparison quadratic, and a branch's files are not ours to choose.

use std::io::{Result, Write};
use std::ops::Range;

use imara_diff::sources::byte_lines;
use imara_diff::{Algorithm, Diff, InternedInput};

/// Unchanged lines shown around a change.
const CONTEXT_LINES: u32 = 3;

/// The numbers of added and removed lines.
pub(super) fn count(before: &[u8], after: &[u8]) -> (usize, usize) {
    let input = InternedInput::new(byte_lines(before), byte_lines(after));
    let diff = Diff::compute(Algorithm::Histogram, &input);
    (diff.count_additions() as usize, diff.count_removals() as usize)
}

/// Writes the hunks that turn `before` into `after`.
pub(super) fn write(before: &[u8], after: &[u8], out: &mut dyn Write) -> Result<()> {
    let input = InternedInput::new(byte_lines(before), byte_lines(after));
    let mut diff = Diff::compute(Algorithm::Histogram, &input);
    diff.postprocess_lines(&input);
    let changes: Vec<Change> =
        diff.hunks().map(|hunk| Change { before: hunk.before, after: hunk.after }).collect();
    let lines = Lines {
        before: input.before.iter().map(|token| input.interner[*token]).collect(),
        after: input.after.iter().map(|token| input.interner[*token]).collect(),
    };
    let mut rest = changes.as_slice();
    while !rest.is_empty() {
        // Changes whose contexts touch share a hunk.
        let is_apart =
            |pair: &[Change]| pair[1].before.start - pair[0].before.end > 2 * CONTEXT_LINES;
        let length = rest.windows(2).position(is_apart).map_or(rest.len(), |last| last + 1);
        let (hunk, later) = rest.split_at(length);
        lines.write_hunk(hunk, out)?;
        rest = later;
    }
    Ok(())
}

struct Change {
    before: Range<u32>,
    after: Range<u32>,
}

struct Lines<'t> {
    before: Vec<&'t [u8]>,
    after: Vec<&'t [u8]>,
}

impl Lines<'_> {
    fn write_hunk(&self, changes: &[Change], out: &mut dyn Write) -> Result<()> {
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else { return Ok(()) };
        let lead = first.before.start.min(CONTEXT_LINES);
        let total = u32::try_from(self.before.len()).unwrap_or(u32::MAX);
        let trail = (total - last.before.end).min(CONTEXT_LINES);
        let before = first.before.start - lead..last.before.end + trail;
        let after = first.after.start - lead..last.after.end + trail;
        writeln!(out, "@@ -{} +{} @@", position(&before), position(&after))?;
        let mut next = before.start;
        for change in changes {
            self.write_lines(b' ', &self.before, next..change.before.start, out)?;
            self.write_lines(b'-', &self.before, change.before.clone(), out)?;
            self.write_lines(b'+', &self.after, change.after.clone(), out)?;
            next = change.before.end;
        }
        self.write_lines(b' ', &self.before, next..before.end, out)
    }

    fn write_lines(
        &self,
        mark: u8,
        lines: &[&[u8]],
        range: Range<u32>,
        out: &mut dyn Write,
    ) -> Result<()> {
        for line in &lines[range.start as usize..range.end as usize] {
            out.write_all(&[mark])?;
            out.write_all(line)?;
            if line.last() != Some(&b'\n') {
                out.write_all(b"\n\\ No newline at end of file\n")?;
            }
        }
        Ok(())
    }
}

/// A hunk's lines on one side: counted from one; of none, the line before.
fn position(lines: &Range<u32>) -> String {
    match lines.end - lines.start {
        0 => format!("{},0", lines.start),
        1 => (lines.start + 1).to_string(),
        count => format!("{},{count}", lines.start + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hunks(before: &str, after: &str) -> String {
        let mut out = Vec::new();
        write(before.as_bytes(), after.as_bytes(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn changes_far_apart_are_two_hunks_and_near_ones_one() {
        let text: String = (1..=20).map(|line| format!("{line}\n")).collect();
        let far = text.replace("\n2\n", "\nB\n").replace("\n19\n", "\nS\n");
        assert_eq!(
            hunks(&text, &far),
            "@@ -1,5 +1,5 @@\n 1\n-2\n+B\n 3\n 4\n 5\n@@ -16,5 +16,5 @@\n 16\n 17\n 18\n-19\n+S\n 20\n"
        );
        let near = text.replace("\n2\n", "\nB\n").replace("\n9\n", "\nI\n");
        assert_eq!(hunks(&text, &near).matches("@@ -").count(), 1);
    }

    #[test]
    fn a_missing_newline_at_the_end_is_said() {
        assert_eq!(hunks("a", "a\n"), "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n");
        assert_eq!(hunks("", "a\n"), "@@ -0,0 +1 @@\n+a\n");
        assert_eq!(hunks("a\n", ""), "@@ -1 +0,0 @@\n-a\n");
    }
}
