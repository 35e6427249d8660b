//! From pairs to differences: what changed in each, and which removed and added objects are one that was renamed.
//!
//! A removed and an added object are one if the branch shows the same inode number for both, or if they are regular files
//! that are not empty and have the same content. The first is certain and free; the second reads only files that have a
//! counterpart of the same size. In both, path order decides between equals, and a pair with the same file name goes
//! first.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::{Pair, Reader, Side};
use crate::error::Error;

/// The kind of a change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// The object is new.
    Added,
    /// The content, the target of a link, or the device number changed.
    Modified,
    /// The object was deleted.
    Deleted,
    /// The object has a new path.
    Renamed,
    /// The object was replaced by one of another type.
    Type,
    /// Only the mode, the owner, extended attributes or times changed.
    Metadata,
}

/// A property in which an object that is on both sides differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangedField {
    /// The content, the target of a link, or the device number.
    Content,
    /// The permission bits.
    Mode,
    /// The owner or the group.
    Owner,
    /// The extended attributes.
    Xattrs,
    /// The modification time, if nothing else differs.
    Times,
}

/// One changed path.
#[derive(Clone, Debug)]
pub struct Difference {
    /// How the path changed.
    pub change: ChangeKind,
    pub(crate) pair: Pair,
    /// Empty if the object is on one side only.
    pub aspects: Vec<ChangedField>,
}

impl Difference {
    /// The present path; for a removed object its path before.
    pub fn path(&self) -> &Path {
        self.pair.path()
    }

    /// The earlier path of a renamed object.
    pub fn from(&self) -> Option<&Path> {
        match (&self.pair.before, self.change) {
            (Some(before), ChangeKind::Renamed) => Some(&before.path),
            _ => None,
        }
    }

    /// The object's type; for a removed object its type before.
    pub fn kind(&self) -> FileType {
        let side = self.pair.after.as_ref().or(self.pair.before.as_ref());
        side.map_or(FileType::Unknown, Side::kind)
    }
}

/// Compares the sides of each pair. Sorted by path.
pub fn compare(pairs: Vec<Pair>, reader: &mut Reader) -> Result<Vec<Difference>, Error> {
    let mut differences = Vec::new();
    for pair in merge_type_changes(rename(pairs, reader)?) {
        let aspects = match (&pair.before, &pair.after) {
            (Some(before), Some(after)) => aspects(before, after, reader)?,
            _ => Vec::new(),
        };
        if let Some(change) = change_of(&pair, &aspects) {
            differences.push(Difference { change, pair, aspects });
        }
    }
    Ok(differences)
}

/// `None` if nothing differs.
fn change_of(pair: &Pair, aspects: &[ChangedField]) -> Option<ChangeKind> {
    match (&pair.before, &pair.after) {
        (None, _) => Some(ChangeKind::Added),
        (_, None) => Some(ChangeKind::Deleted),
        (Some(before), Some(after)) if before.path != after.path && !pair.keeps_name => {
            Some(ChangeKind::Renamed)
        }
        (Some(before), Some(after)) if before.kind() != after.kind() => Some(ChangeKind::Type),
        _ if aspects.contains(&ChangedField::Content) => Some(ChangeKind::Modified),
        _ => (!aspects.is_empty()).then_some(ChangeKind::Metadata),
    }
}

fn aspects(before: &Side, after: &Side, reader: &mut Reader) -> Result<Vec<ChangedField>, Error> {
    let is_same_object = before.layer.id == after.layer.id && before.stat.ino == after.stat.ino;
    if is_same_object || before.kind() != after.kind() {
        return Ok(Vec::new());
    }
    let xattrs = |reader: &mut Reader, side: &Side| readable(reader.xattrs(side));
    let checks = [
        (ChangedField::Content, !has_same_content(before, after, reader)?),
        // A symbolic link has no mode of its own.
        (ChangedField::Mode, before.mode() != after.mode() && before.kind() != FileType::Symlink),
        (ChangedField::Owner, before.stat.owner() != after.stat.owner()),
        (ChangedField::Xattrs, xattrs(reader, before)? != xattrs(reader, after)?),
    ];
    let mut found: Vec<ChangedField> =
        checks.iter().filter(|(_, differs)| *differs).map(|(aspect, _)| *aspect).collect();
    // A directory's times change with its entries.
    if found.is_empty() && !after.is_directory() && before.stat.mtime != after.stat.mtime {
        found.push(ChangedField::Times);
    }
    Ok(found)
}

fn has_same_content(before: &Side, after: &Side, reader: &mut Reader) -> Result<bool, Error> {
    match after.kind() {
        FileType::RegularFile => {
            if before.stat.size != after.stat.size {
                return Ok(false);
            }
            let object = |side: &Side| (side.data().layer.id, side.data().stat.ino);
            if object(before) == object(after) {
                return Ok(true);
            }
            // What may not be read may differ.
            Ok(readable(reader.is_same_content(before, after))?.unwrap_or(false))
        }
        FileType::Symlink => Ok(reader.link_target(before)? == reader.link_target(after)?),
        FileType::CharacterDevice | FileType::BlockDevice => {
            Ok(before.stat.rdev == after.stat.rdev)
        }
        _ => Ok(true),
    }
}

/// `None` if the requesting user may not read it.
fn readable<T>(read: Result<T, Error>) -> Result<Option<T>, Error> {
    match read {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Joins removed and added objects that are one.
fn rename(pairs: Vec<Pair>, reader: &mut Reader) -> Result<Vec<Pair>, Error> {
    let mut candidates = RenameCandidates::of(pairs);
    candidates.match_by(by_inode);
    let digests = digests_of_equal_sizes(&candidates.removed, &candidates.added, reader)?;
    candidates.match_by(|side| digests.get(&(side.layer.id, side.stat.ino)).copied());
    Ok(candidates.into_pairs())
}

/// As [`compare`] finds renames, but only by inode number, without reading content.
pub fn rename_by_inode(pairs: Vec<Pair>) -> Vec<Pair> {
    let mut candidates = RenameCandidates::of(pairs);
    candidates.match_by(by_inode);
    candidates.into_pairs()
}

fn by_inode(side: &Side) -> Option<(u32, u64)> {
    Some((side.stat.mode & libc::S_IFMT, side.st_ino()))
}

/// Pairs, as far as they may be parts of a rename by path.
struct RenameCandidates {
    removed: BTreeMap<PathBuf, Side>,
    added: BTreeMap<PathBuf, Side>,
    rest: Vec<Pair>,
}

impl RenameCandidates {
    fn of(pairs: Vec<Pair>) -> Self {
        let (mut removed, mut added, mut rest) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for pair in pairs {
            match (pair.before, pair.after) {
                (Some(before), None) if !before.is_directory() => {
                    removed.insert(before.path.clone(), before);
                }
                (None, Some(after)) if !after.is_directory() => {
                    added.insert(after.path.clone(), after);
                }
                (before, after) => rest.push(Pair { before, after, keeps_name: pair.keeps_name }),
            }
        }
        Self { removed, added, rest }
    }

    fn match_by<K: Eq + std::hash::Hash>(&mut self, key: impl Fn(&Side) -> Option<K>) {
        let joined = match_pairs(&mut self.removed, &mut self.added, key);
        self.rest.extend(joined.into_iter().map(|(before, after)| Pair {
            before: Some(before),
            after: Some(after),
            keeps_name: false,
        }));
    }

    fn into_pairs(self) -> Vec<Pair> {
        let pair = |before, after| Pair { before, after, keeps_name: false };
        let mut pairs = self.rest;
        pairs.extend(self.removed.into_values().map(|side| pair(Some(side), None)));
        pairs.extend(self.added.into_values().map(|side| pair(None, Some(side))));
        pairs.sort_by(|one, other| one.path().cmp(other.path()));
        pairs
    }
}

/// Removes elements with the same key from `removed` and `added`, and pairs them.
pub fn match_pairs<T, K: Eq + std::hash::Hash>(
    removed: &mut BTreeMap<PathBuf, T>,
    added: &mut BTreeMap<PathBuf, T>,
    key: impl Fn(&T) -> Option<K>,
) -> Vec<(T, T)> {
    let mut pairs = Vec::new();
    // Two rounds: those that kept their file name choose first.
    for must_keep_name in [true, false] {
        let name = |path: &Path| {
            must_keep_name.then(|| path.file_name().map(OsStr::to_os_string)).flatten()
        };
        let mut candidates: HashMap<(K, Option<OsString>), Vec<PathBuf>> = HashMap::new();
        for (path, side) in removed.iter().rev() {
            if let Some(found) = key(side) {
                // The first by path is last.
                candidates.entry((found, name(path))).or_default().push(path.clone());
            }
        }
        let paths: Vec<PathBuf> = added.keys().cloned().collect();
        for path in paths {
            let known = key(&added[&path])
                .and_then(|found| candidates.get_mut(&(found, name(&path))))
                .and_then(Vec::pop);
            if let Some(from) = known {
                pairs.extend(removed.remove(&from).zip(added.remove(&path)));
            }
        }
    }
    pairs
}

type Digest = [u8; 20];
type Object = (crate::ids::LayerId, u64);

/// Digests of regular files that have a counterpart of their size on the other side. Files that the requesting user may
/// not read have none.
fn digests_of_equal_sizes(
    removed: &BTreeMap<PathBuf, Side>,
    added: &BTreeMap<PathBuf, Side>,
    reader: &mut Reader,
) -> Result<HashMap<Object, Digest>, Error> {
    let is_candidate = |side: &&Side| side.kind() == FileType::RegularFile && side.stat.size > 0;
    let sizes = |sides: &BTreeMap<PathBuf, Side>| -> std::collections::HashSet<u64> {
        sides.values().filter(is_candidate).map(|side| side.stat.size).collect()
    };
    let common: std::collections::HashSet<u64> =
        sizes(removed).intersection(&sizes(added)).copied().collect();
    let mut digests = HashMap::new();
    let candidates = removed.values().chain(added.values()).filter(is_candidate);
    for side in candidates.filter(|side| common.contains(&side.stat.size)) {
        let mut digest = sha1_smol::Sha1::new();
        let read = reader.stream(side, |piece| {
            digest.update(piece);
            Ok(())
        });
        if readable(read)?.is_some() {
            digests.insert((side.layer.id, side.stat.ino), digest.digest().bytes());
        }
    }
    Ok(digests)
}

/// Combines a removed and an added object of the same name into one change of type.
fn merge_type_changes(pairs: Vec<Pair>) -> Vec<Pair> {
    let mut folded: Vec<Pair> = Vec::with_capacity(pairs.len());
    for pair in pairs {
        if let Some(last) = folded.last_mut().filter(|last| last.path() == pair.path()) {
            match (&last.before, &last.after, &pair.before, &pair.after) {
                (None, Some(_), Some(_), None) => {
                    last.before = pair.before;
                    continue;
                }
                (Some(_), None, None, Some(_)) => {
                    last.after = pair.after;
                    continue;
                }
                _ => {}
            }
        }
        folded.push(pair);
    }
    folded
}
