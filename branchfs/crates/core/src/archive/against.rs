//! What an archive was made against: a fingerprint of what the parent had at each path that the archive changes.
//!
//! It is in global PAX headers at the beginning, as records `comment`, which other programs pass over: the text
//! `branchfs.against.1` and a line of JSON for each path. A load compares it with what the new branch's parent has, so that
//! changes which others made there since are a conflict and not lost. Inode numbers and ctimes are left out: they differ in
//! a copy of the base. Where only the modification time differs, the content decides.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use tar::{Builder, EntryType, Header};

use super::EXTENSION_BYTES_MAX;
use crate::diff::{Pair, Reader, Side, find_below};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::write_set::{from_hex, to_hex};

/// The beginning of each comment.
const PREFIX: &[u8] = b"branchfs.against.1\n";

/// The object at a path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Fingerprint {
    /// `st_mode`: file type and permission bits.
    mode: u32,
    /// Bytes of a regular file or symbolic link; 0 for other objects.
    size: u64,
    /// Nanoseconds since 1970; of everything but directories, which change with their entries.
    mtime: i64,
    /// SHA-1 of a file's content or a link's target; missing if it could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sha1: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    path: String,
    was: Option<Fingerprint>,
}

/// The state of the archive's paths when it was made.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Against(BTreeMap<PathBuf, Option<Fingerprint>>);

impl Fingerprint {
    fn of(side: &Side) -> Self {
        let has_content = matches!(side.kind(), FileType::RegularFile | FileType::Symlink);
        Self {
            mode: side.stat.mode,
            size: if has_content { side.stat.size } else { 0 },
            mtime: if side.is_directory() { 0 } else { side.stat.mtime.as_nanoseconds() },
            sha1: None,
        }
    }

    fn with_content(self, side: &Side, reader: &mut Reader) -> Self {
        Self { sha1: sha1(side, reader), ..self }
    }

    /// Whether `side` has this fingerprint.
    fn is_of(&self, side: &Side, reader: &mut Reader) -> bool {
        let now = Self::of(side);
        if (self.mode, self.size) != (now.mode, now.size) {
            return false;
        }
        self.mtime == now.mtime || (self.sha1.is_some() && self.sha1 == sha1(side, reader))
    }
}

fn sha1(side: &Side, reader: &mut Reader) -> Option<String> {
    let mut digest = sha1_smol::Sha1::new();
    match side.kind() {
        FileType::RegularFile => reader
            .stream(side, |piece| {
                digest.update(piece);
                Ok(())
            })
            .ok()?,
        FileType::Symlink => digest.update(&reader.link_target(side).ok()?),
        _ => return None,
    }
    Some(digest.digest().to_string())
}

impl Against {
    /// Records the state of `pairs` before the change. Files that the user may not read are recorded by their
    /// attributes only.
    pub(super) fn of(pairs: &[Pair], reader: &mut Reader) -> Self {
        let mut found = BTreeMap::new();
        for after in pairs.iter().filter_map(|pair| pair.after.as_ref()) {
            found.insert(after.path.clone(), None);
        }
        for before in pairs.iter().filter_map(|pair| pair.before.as_ref()) {
            let fingerprint = Fingerprint::of(before).with_content(before, reader);
            found.insert(before.path.clone(), Some(fingerprint));
        }
        found.remove(Path::new(""));
        Self(found)
    }

    /// Writes the headers.
    pub(super) fn write(&self, builder: &mut Builder<&mut dyn Write>) -> Result<(), Error> {
        const TEXT_BYTES_MAX: u64 = EXTENSION_BYTES_MAX / 2;
        let mut text = PREFIX.to_vec();
        for (path, was) in &self.0 {
            let line = Line { path: to_hex(path), was: was.clone() };
            text.extend(serde_json::to_vec(&line).expect("it is plain data"));
            text.push(b'\n');
            if text.len() as u64 > TEXT_BYTES_MAX {
                write_comment(builder, &text)?;
                text = PREFIX.to_vec();
            }
        }
        write_comment(builder, &text) // also without a line: it says that there is a record
    }

    /// Reads a comment; `false` for a comment of another program.
    pub(super) fn read(&mut self, comment: &[u8]) -> Result<bool, Error> {
        let Some(lines) = comment.strip_prefix(PREFIX) else { return Ok(false) };
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let line = serde_json::from_slice::<Line>(line).ok();
            let read = line.and_then(|line| Some((from_hex(&line.path)?, line.was)));
            let (path, was) = read.ok_or_else(|| {
                Error::Usage("the archive is refused: a damaged record of its base".to_owned())
            })?;
            self.0.insert(path, was);
        }
        Ok(true)
    }

    /// Compares the recorded state with `below`, the layers of the new branch's parent.
    ///
    /// # Errors
    /// `Conflict` with the paths that changed.
    pub(super) fn check(&self, below: &[Arc<Layer>]) -> Result<(), Error> {
        let mut reader = Reader::default();
        let mut changed = BTreeSet::new();
        for (path, was) in &self.0 {
            let is_same = match (was, find_below(below, path)?) {
                (Some(was), Some(side)) => was.is_of(&side, &mut reader),
                (was, now) => was.is_none() && now.is_none(),
            };
            if !is_same {
                changed.insert(path.clone());
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        Err(Error::Conflict {
            message: "the archive was made against other content: these paths have changed since"
                .to_owned(),
            paths: changed.into_iter().collect(),
            hint: "no branch was made; --force loads the archive over these changes",
        })
    }
}

fn write_comment(builder: &mut Builder<&mut dyn Write>, text: &[u8]) -> Result<(), Error> {
    const FRAME_BYTES: usize = " comment=\n".len();
    let mut length = text.len() + FRAME_BYTES;
    while length != text.len() + FRAME_BYTES + length.to_string().len() {
        length = text.len() + FRAME_BYTES + length.to_string().len(); // it counts its own digits
    }
    let record = [format!("{length} comment=").as_bytes(), text, b"\n"].concat();
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::XGlobalHeader);
    header.set_path("pax_global_header").at(super::OUTPUT)?;
    header.set_mode(0o644);
    header.set_size(record.len() as u64);
    header.set_cksum();
    builder.append(&header, record.as_slice().take(record.len() as u64)).at(super::OUTPUT)
}
