//! Writes differences as a patch for `git apply`.
//!
//! | module | content |
//! |---|---|
//! | [`quote`] | names as git writes them |
//! | [`hunks`] | hunks of text |
//! | [`binary`] | `GIT binary patch`, in both directions, so that a patch can be reverted |
//!
//! A renamed directory is a rename of each file in it (the walk lists them: [`super::RenamedDirs::Expand`]). Changes that git
//! cannot represent (empty directories, owners, extended attributes, special files, attributes of directories, set-id bits)
//! are written as lines that begin with `#`, which `git apply` ignores. The caller gets their number. Of a mode, git has
//! only the execute bit.
//!
//! A file larger than [`TEXT_BYTES_MAX`] is treated as binary: a comparison by lines holds both sides in memory.

mod binary;
mod hunks;
mod quote;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use rustix::fs::FileType;

use super::compare::ChangeKind;
use super::{ChangedField, Difference, Reader, Side, content};
use crate::error::{Context, Error};
use quote::quoted;

/// Largest file that is compared by lines.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// Git searches this many bytes for a zero byte, the sign of binary content.
const BINARY_PROBE_BYTES: usize = 8000;

/// The name of the object that is not there.
const NO_OBJECT: &str = "0000000000000000000000000000000000000000";

/// How much a file changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Statistics {
    /// Numbers of lines, for text files.
    Lines {
        /// The number of added lines.
        added: usize,
        /// The number of removed lines.
        removed: usize,
    },
    /// Sizes in bytes, for files that are not compared by lines.
    Bytes {
        /// Of the parent's.
        before: u64,
        /// Of the branch's.
        after: u64,
    },
}

/// Counts the changed lines of a file or symbolic link; `None` for other types.
pub fn statistics(
    difference: &Difference,
    reader: &mut Reader,
) -> Result<Option<Statistics>, Error> {
    let (before, after) =
        (file(difference.pair.before.as_ref()), file(difference.pair.after.as_ref()));
    if before.is_none() && after.is_none() {
        return Ok(None);
    }
    let sizes = Statistics::Bytes {
        before: before.map_or(0, |side| side.stat.size),
        after: after.map_or(0, |side| side.stat.size),
    };
    let (before, after) = (load(before, reader)?, load(after, reader)?);
    Ok(Some(match (before.text(), after.text()) {
        (Some(before), Some(after)) => {
            let (added, removed) = hunks::count(before, after);
            Statistics::Lines { added, removed }
        }
        _ => sizes,
    }))
}

/// Writes the patch. Returns the number of differences that it cannot express.
pub fn write_patch(
    differences: &[Difference],
    reader: &mut Reader,
    out: &mut dyn Write,
) -> Result<usize, Error> {
    let mut left_out = 0;
    for (position, difference) in differences.iter().enumerate() {
        for remark in remarks(difference, &differences[position + 1..]) {
            left_out += 1;
            let path = quoted("", difference.path());
            writeln!(out, "# not in this patch: {remark}: {path}").at(OUTPUT)?;
        }
    }
    for (before, after) in by_path(differences) {
        match (before, after) {
            (Some(before), Some(after)) if before.kind() != after.kind() => {
                write_file(Some(before), None, reader, out)?;
                write_file(None, Some(after), reader, out)?;
            }
            (before, after) => write_file(before, after, reader, out)?,
        }
    }
    Ok(left_out)
}

/// The files of a patch, by path. A rename is one only if its old name is free afterwards and its new name was free
/// before: git has no other renames, and treats a chain or a swap of renames as changes of content.
fn by_path(differences: &[Difference]) -> Vec<(Option<&Side>, Option<&Side>)> {
    let mut paths: BTreeMap<&Path, (Option<&Side>, Option<&Side>)> = BTreeMap::new();
    for difference in differences {
        if let Some(before) = file(difference.pair.before.as_ref()) {
            paths.entry(&before.path).or_default().0 = Some(before);
        }
        if let Some(after) = file(difference.pair.after.as_ref()) {
            paths.entry(&after.path).or_default().1 = Some(after);
        }
    }
    for difference in differences {
        let (Some(before), Some(after)) =
            (file(difference.pair.before.as_ref()), file(difference.pair.after.as_ref()))
        else {
            continue;
        };
        let is_left = paths.get(before.path.as_path()).is_some_and(|(_, after)| after.is_none());
        let was_free = paths.get(after.path.as_path()).is_some_and(|(before, _)| before.is_none());
        if is_left && was_free {
            paths.remove(before.path.as_path());
            paths.insert(&after.path, (Some(before), Some(after)));
        }
    }
    paths.into_values().collect()
}

/// Names the output in errors.
const OUTPUT: &str = "the output";

/// The object, if git can hold it: regular files and symbolic links.
fn file(side: Option<&Side>) -> Option<&Side> {
    side.filter(|side| matches!(side.kind(), FileType::RegularFile | FileType::Symlink))
}

/// The part of a difference that a patch cannot express. `later`: the following differences, by path.
fn remarks(difference: &Difference, later: &[Difference]) -> Vec<String> {
    const SPECIAL_BITS: u32 = 0o7000;
    let mut remarks = Vec::new();
    let (before, after) = (&difference.pair.before, &difference.pair.after);
    let below = later.iter().take_while(|other| other.path().starts_with(difference.path()));
    let has_file = |side: fn(&Difference) -> Option<&Side>| {
        below.clone().any(|other| file(side(other)).is_some())
    };
    let is_special = |side: &Side| file(Some(side)).is_none() && !side.is_directory();
    let is_directory = |side: &Option<Side>| side.as_ref().is_some_and(Side::is_directory);
    if is_directory(after) && !is_directory(before) {
        if !has_file(|other| other.pair.after.as_ref()) {
            remarks.push("an empty directory was added".to_owned());
        }
    } else if is_directory(before) && !is_directory(after) {
        if !has_file(|other| other.pair.before.as_ref()) {
            remarks.push("an empty directory was removed".to_owned());
        }
    } else if is_directory(after) && difference.aspects.contains(&ChangedField::Mode) {
        remarks.push("the mode of a directory was changed".to_owned());
    }
    if before.as_ref().is_some_and(is_special) {
        remarks.push("a special file was changed or removed".to_owned());
    } else if after.as_ref().is_some_and(is_special) {
        remarks.push("a special file was added".to_owned());
    }
    for (aspect, what) in [
        (ChangedField::Owner, "the owner was changed"),
        (ChangedField::Xattrs, "extended attributes were changed"),
        (ChangedField::Times, "only the time was changed"),
    ] {
        if difference.aspects.contains(&aspect) {
            remarks.push(what.to_owned());
        }
    }
    let special = |side: &Option<Side>| side.as_ref().map_or(0, |side| side.mode() & SPECIAL_BITS);
    if difference.change != ChangeKind::Deleted
        && !is_directory(after)
        && after.as_ref().is_some_and(|side| side.kind() == FileType::RegularFile)
        && special(before) != special(after)
    {
        remarks.push("set-id or sticky bits were changed".to_owned());
    }
    remarks
}

/// The mode in git's notation.
fn git_mode(side: &Side) -> &'static str {
    match side.kind() {
        FileType::Symlink => "120000",
        _ if side.mode() & 0o100 != 0 => "100755",
        _ => "100644",
    }
}

fn write_file(
    before: Option<&Side>,
    after: Option<&Side>,
    reader: &mut Reader,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let (old, new) = (load(before, reader)?, load(after, reader)?);
    let Some(shown) = before.or(after) else { return Ok(()) };
    let from = before.unwrap_or(shown);
    let to = after.unwrap_or(shown);
    let is_renamed = from.path != to.path;
    let modes = (before.map(git_mode), after.map(git_mode));
    let is_same_mode = modes.0 == modes.1;
    let is_same_content = old.name == new.name;
    if before.is_some() && after.is_some() && is_same_mode && is_same_content && !is_renamed {
        return Ok(()); // only attributes that git does not know
    }
    let mut header =
        format!("diff --git {} {}\n", quoted("a/", &from.path), quoted("b/", &to.path));
    let mut line = |text: String| {
        header.push_str(&text);
        header.push('\n');
    };
    match modes {
        (None, Some(mode)) => line(format!("new file mode {mode}")),
        (Some(mode), None) => line(format!("deleted file mode {mode}")),
        (Some(old), Some(new)) if old != new => {
            line(format!("old mode {old}"));
            line(format!("new mode {new}"));
        }
        _ => {}
    }
    if is_renamed {
        if is_same_content {
            line("similarity index 100%".to_owned());
        }
        line(format!("rename from {}", quoted("", &from.path)));
        line(format!("rename to {}", quoted("", &to.path)));
    }
    if !is_same_content {
        let mode =
            modes.0.filter(|_| is_same_mode).map_or(String::new(), |mode| format!(" {mode}"));
        line(format!("index {}..{}{mode}", old.name, new.name));
    }
    out.write_all(header.as_bytes()).at(OUTPUT)?;
    if is_same_content {
        return Ok(());
    }
    match (old.text(), new.text()) {
        (Some(old), Some(new)) => {
            let side = |prefix, side: Option<&Side>| match side {
                Some(side) => file_name_line(prefix, &side.path),
                None => "/dev/null".to_owned(),
            };
            if !(old.is_empty() && new.is_empty()) {
                writeln!(out, "--- {}\n+++ {}", side("a/", before), side("b/", after))
                    .at(OUTPUT)?;
            }
            hunks::write(old, new, out).at(OUTPUT)
        }
        _ => {
            writeln!(out, "GIT binary patch").at(OUTPUT)?;
            binary::write(after, &new, reader, out)?;
            binary::write(before, &old, reader, out)
        }
    }
}

/// A name with a blank is followed by a tab, so that the rest is not read as a time.
fn file_name_line(prefix: &str, path: &Path) -> String {
    let mut text = quoted(prefix, path);
    if !text.starts_with('"') && text.contains(' ') {
        text.push('\t');
    }
    text
}

/// The content of one side: its object name in git, and the bytes if they are few and text.
struct Blob {
    name: String,
    size: u64,
    /// `None` if it is too large.
    bytes: Option<Vec<u8>>,
    is_binary: bool,
}

impl Blob {
    fn text(&self) -> Option<&[u8]> {
        self.bytes.as_deref().filter(|_| !self.is_binary)
    }
}

fn load(side: Option<&Side>, reader: &mut Reader) -> Result<Blob, Error> {
    let Some(side) = side else {
        let name = NO_OBJECT.to_owned();
        return Ok(Blob { name, size: 0, bytes: Some(Vec::new()), is_binary: false });
    };
    if side.kind() == FileType::Symlink {
        let target = reader.link_target(side)?;
        let size = target.len() as u64;
        let name = object_name(size, |digest| digest.update(&target));
        return Ok(Blob { name, size, bytes: Some(target), is_binary: false });
    }
    // A branch may be written meanwhile: the content that was read counts, if it is consistent.
    let size = reader.open(side)?.size().at(&side.path)?;
    let is_large = size > TEXT_BYTES_MAX;
    let (mut bytes, mut is_binary, mut read) = (Vec::new(), is_large, 0);
    let mut outcome = Ok(());
    let name = object_name(size, |digest| {
        outcome = reader.stream(side, |piece| {
            digest.update(piece);
            read += piece.len() as u64;
            if !is_large {
                bytes.extend_from_slice(piece);
            }
            if read > size { Err(content::changed(side)) } else { Ok(()) }
        });
    });
    outcome?;
    if read != size {
        return Err(content::changed(side));
    }
    is_binary |= bytes[..bytes.len().min(BINARY_PROBE_BYTES)].contains(&0);
    Ok(Blob { name, size, bytes: (!is_large).then_some(bytes), is_binary })
}

/// The object name of content in git.
fn object_name(size: u64, feed: impl FnOnce(&mut sha1_smol::Sha1)) -> String {
    let mut digest = sha1_smol::Sha1::new();
    digest.update(format!("blob {size}\0").as_bytes());
    feed(&mut digest);
    digest.digest().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_name_is_gits() {
        // `printf hello | git hash-object --stdin`
        let name = object_name(5, |digest| digest.update(b"hello"));
        assert_eq!(name, "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
    }
}
