//! Masked files: which files of the workspace a sandbox hides, and whether they stay hidden.
//!
//! A cover is a mount on top of a name. No process inside can unmount it, but the kernel does when the name below is
//! removed from outside, or when a FUSE daemon invalidates it. So init watches the covers, and the sandbox ends when
//! one is gone.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::failure::{Context, Failure, Result};
use crate::mount_table::{self, MOUNT_TABLE};

const VANISHED: &str = "it disappeared before it could be hidden: another process is changing it";

/// Finds the places below `top` to be covered: the matches of the globs, the targets of matching links, and the other
/// names of the same files. Fails if a directory cannot be listed, or a name is gone again: a place that cannot be
/// examined cannot be hidden either.
pub(crate) fn find(top: &Path, globs: &[Vec<u8>]) -> Result<BTreeSet<PathBuf>> {
    let patterns: Vec<_> = globs.iter().map(|glob| Pattern::new(glob)).collect();
    let mut places = BTreeSet::new();
    walk(top, &mut |path, is_directory| {
        let name = path.strip_prefix(top).unwrap_or(path).as_os_str().as_bytes();
        let is_match = patterns.iter().any(|pattern| pattern.matches(name));
        if is_match {
            places.extend(place_of(path)?);
        }
        Ok(is_directory && !is_match)
    })?;
    let known = identities(top, &places)?;
    if known.is_empty() {
        return Ok(places);
    }
    let mut others = Vec::new();
    walk(top, &mut |path, is_directory| {
        if places.iter().any(|place| path.starts_with(place)) {
            return Ok(false);
        }
        if !is_directory && identity(path)?.is_some_and(|found| known.contains(&found)) {
            others.push(path.to_owned());
        }
        Ok(is_directory)
    })?;
    places.extend(others);
    Ok(places)
}

/// Calls `visit` with each name below a directory, and whether it is a directory; visits that too if it says so.
fn walk(top: &Path, visit: &mut impl FnMut(&Path, bool) -> Result<bool>) -> Result<()> {
    let mut todo = vec![top.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(&directory).at(&directory)? {
            let entry = entry.at(&directory)?;
            let path = entry.path();
            if visit(&path, entry.file_type().at(&path)?.is_dir())? {
                todo.push(path);
            }
        }
    }
    Ok(())
}

/// Device and inode numbers of the files at or below these places that have other names.
fn identities(top: &Path, places: &BTreeSet<PathBuf>) -> Result<HashSet<(u64, u64)>> {
    let mut known = HashSet::new();
    for place in places {
        if !place.is_dir() {
            known.extend(identity(place)?);
        } else if place.starts_with(top) && place != top {
            let mut todo = vec![place.clone()];
            while let Some(directory) = todo.pop() {
                // A directory that init cannot read cannot be read in the sandbox either.
                for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        todo.push(entry.path());
                    } else {
                        known.extend(identity(&entry.path())?);
                    }
                }
            }
        }
    }
    Ok(known)
}

/// Device and inode number of a file that has several names; `None` for other files.
fn identity(path: &Path) -> Result<Option<(u64, u64)>> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.nlink() < 2 || !found.is_file() => Ok(None),
        Ok(found) => Ok(Some((found.dev(), found.ino()))),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Err(vanished(path)),
        Err(error) => Err(error).at(path),
    }
}

/// The place to cover: a link is as readable as its target.
fn place_of(path: &Path) -> Result<Option<PathBuf>> {
    let error = match fs::canonicalize(path) {
        Ok(place) => return Ok(Some(place)),
        Err(error) => error,
    };
    let number = error.raw_os_error();
    let leads_nowhere = matches!(number, Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP));
    if leads_nowhere && path.is_symlink() {
        return Ok(None);
    }
    if number == Some(libc::ENOENT) {
        return Err(vanished(path));
    }
    Err(error).at(path)
}

fn vanished(path: &Path) -> Failure {
    let text = Some(VANISHED.to_owned());
    Failure { text, path: Some(path.to_owned()), ..Errno::STALE.into() }
}

/// Looks after the covers, which are mounts of this process's table.
pub(crate) struct Watch {
    table: File,
    covers: Vec<u64>,
}

impl Watch {
    /// The covers are all that is mounted now and was not `before`.
    pub(crate) fn new(before: &[u64]) -> Result<Self> {
        let mut watch =
            Self { table: File::open(MOUNT_TABLE).at(MOUNT_TABLE)?, covers: Vec::new() };
        watch.covers = watch.ids().at(MOUNT_TABLE)?;
        watch.covers.retain(|id| !before.contains(id));
        Ok(watch)
    }

    /// Whether all covers are there.
    pub(crate) fn is_whole(&self) -> bool {
        self.ids().is_ok_and(|ids| self.covers.iter().all(|id| ids.contains(id)))
    }

    fn ids(&self) -> std::io::Result<Vec<u64>> {
        let (mut table, mut text) = (&self.table, Vec::new());
        table.rewind()?;
        table.read_to_end(&mut text)?;
        Ok(mount_table::ids(&text))
    }
}

impl AsFd for Watch {
    /// It polls `POLLPRI` when the mount table has changed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }
}

/// A glob: `*` stays within a name, `**/` stands for any directories, or none. The Python function `glob_pattern` reads
/// them the same way.
struct Pattern(Vec<Token>);

enum Token {
    /// These bytes.
    Text(u8),
    /// `?`
    One,
    /// `*`
    Name,
    /// `**`
    All,
    /// `**/`
    Directories,
}

impl Pattern {
    fn new(glob: &[u8]) -> Self {
        let mut tokens = Vec::new();
        let mut rest = glob;
        while let [first, after @ ..] = rest {
            let (token, more) = match rest {
                [b'*', b'*', b'/', more @ ..] => (Token::Directories, more),
                [b'*', b'*', more @ ..] => (Token::All, more),
                [b'*', more @ ..] => (Token::Name, more),
                [b'?', more @ ..] => (Token::One, more),
                _ => (Token::Text(*first), after),
            };
            tokens.push(token);
            rest = more;
        }
        Self(tokens)
    }

    /// Whether it matches all of a path. `reached` is which positions in it the tokens so far can end at.
    fn matches(&self, path: &[u8]) -> bool {
        let mut reached = vec![false; path.len() + 1];
        reached[0] = true;
        for token in &self.0 {
            let mut next = vec![false; path.len() + 1];
            for start in (0..=path.len()).filter(|&start| reached[start]) {
                let mut at = start;
                next[start] |= matches!(token, Token::Name | Token::All | Token::Directories);
                while at < path.len() {
                    let byte = path[at];
                    match token {
                        Token::Text(wanted) => next[at + 1] |= byte == *wanted,
                        Token::One if byte != b'/' => {
                            next[at + character_length(&path[at..])] = true
                        }
                        Token::Name if byte != b'/' => {
                            at += character_length(&path[at..]);
                            next[at] = true;
                            continue;
                        }
                        Token::All => next[at + 1] = true,
                        Token::Directories => next[at + 1] |= byte == b'/',
                        Token::One | Token::Name => {}
                    }
                    if !matches!(token, Token::All | Token::Directories) {
                        break;
                    }
                    at += 1;
                }
            }
            reached = next;
        }
        reached[path.len()]
    }
}

/// The length of the character that a text begins with; 1 for a byte that begins none.
fn character_length(text: &[u8]) -> usize {
    let lengths = 1..=text.len().min(4);
    lengths.into_iter().find(|&length| std::str::from_utf8(&text[..length]).is_ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_the_python_function_reads_them() {
        let cases: [(&str, &[&str], &[&str]); 6] = [
            ("**/.env", &[".env", "a/.env", "a/b/.env"], &["a.env", ".env/x", "a/.env2"]),
            ("*.pem", &["key.pem", ".pem"], &["a/key.pem", "key.pem2"]),
            ("a?c", &["abc", "aéc", "a\nc"], &["a/c", "ac", "abbc"]),
            ("a/**", &["a/b", "a/b/c", "a/"], &["a", "b/a"]),
            ("*??", &["éa", "abc"], &["€", "a"]),
            ("[a].{x}", &["[a].{x}"], &["a.x"]),
        ];
        for (glob, matching, others) in cases {
            let pattern = Pattern::new(glob.as_bytes());
            for path in matching {
                assert!(pattern.matches(path.as_bytes()), "{glob} {path}");
            }
            for path in others {
                assert!(!pattern.matches(path.as_bytes()), "{glob} {path}");
            }
        }
    }
}
