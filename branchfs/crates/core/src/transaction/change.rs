//! The changes that a transaction makes to paths of the base, as they are reported and stored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use crate::diff::{ChangeKind, match_pairs};

/// The type of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, FIFO or socket.
    Other,
}

impl From<FileType> for ObjectKind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Symlink,
            _ => Self::Other,
        }
    }
}

/// One changed path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Change {
    /// The path, relative to the base.
    #[serde(with = "super::step::hex")]
    pub path: PathBuf,
    /// How the path changed.
    pub change: ChangeKind,
    /// The earlier path, if it was renamed.
    #[serde(with = "super::step::hex_option", default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// The type of the object.
    pub kind: ObjectKind,
}

/// Sorts the changes, and combines a deletion and an addition at one path into one change.
pub(super) fn one_change_a_path(changes: Vec<Change>) -> Vec<Change> {
    let mut by_path: BTreeMap<PathBuf, Change> = BTreeMap::new();
    for change in changes {
        let folded = match by_path.get(&change.path) {
            Some(known)
                if known.change == ChangeKind::Deleted || change.change == ChangeKind::Deleted =>
            {
                let is_same_kind = known.kind == change.kind;
                let new = if change.change == ChangeKind::Deleted { known.clone() } else { change };
                Change {
                    change: if is_same_kind { ChangeKind::Modified } else { ChangeKind::Type },
                    ..new
                }
            }
            _ => change,
        };
        by_path.insert(folded.path.clone(), folded);
    }
    by_path.into_values().collect()
}

/// Objects other than directories that may have been renamed. As in a difference, a removed and an added object are one
/// if they are the same object. Content is not read.
#[derive(Debug, Default)]
pub(super) struct Renames {
    deleted: BTreeMap<PathBuf, Moving>,
    added: BTreeMap<PathBuf, Moving>,
}

#[derive(Clone, Debug)]
struct Moving {
    path: PathBuf,
    kind: FileType,
    /// Inode number in the base.
    ino: u64,
}

impl Renames {
    pub(super) fn deleted(&mut self, path: &Path, kind: FileType, ino: u64) {
        if kind != FileType::Directory {
            self.deleted.insert(path.to_path_buf(), Moving { path: path.to_path_buf(), kind, ino });
        }
    }

    pub(super) fn added(&mut self, path: &Path, kind: FileType, ino: u64) {
        if kind != FileType::Directory {
            self.added.insert(path.to_path_buf(), Moving { path: path.to_path_buf(), kind, ino });
        }
    }

    /// Merges each delete/add pair of one inode into a rename. Sorted by path, one entry per path.
    pub(super) fn joined(mut self, changes: Vec<Change>) -> Vec<Change> {
        // Replaced objects at the same path are reported already.
        let mut by_path: BTreeMap<PathBuf, Change> =
            changes.into_iter().map(|change| (change.path.clone(), change)).collect();
        let is = |path: &PathBuf, kind| by_path.get(path).is_some_and(|known| known.change == kind);
        self.deleted.retain(|path, _| is(path, ChangeKind::Deleted));
        self.added.retain(|path, _| is(path, ChangeKind::Added));
        let key = |moving: &Moving| Some((moving.kind.as_raw_mode(), moving.ino));
        for (before, after) in match_pairs(&mut self.deleted, &mut self.added, key) {
            by_path.remove(&before.path);
            if let Some(change) = by_path.get_mut(&after.path) {
                (change.change, change.from) = (ChangeKind::Renamed, Some(before.path));
            }
        }
        by_path.into_values().collect()
    }
}
