//! The steps of a transaction.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags, Statx, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error};
use crate::overlay::{private_xattrs, user_xattrs};
use crate::ownership;
use crate::rooted_dir::RootedDir;
use crate::write_set::{from_hex, to_hex};

/// The two trees a commit works on. Their descriptor caches are the commit's own.
#[derive(Debug)]
pub(crate) struct TransactionRoots {
    pub(crate) base: RootedDir,
    pub(crate) store: RootedDir,
}

/// A path below one of the two roots.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(crate) enum Location {
    /// In the base.
    Base(#[serde(with = "hex")] PathBuf),
    /// In the store.
    Store(#[serde(with = "hex")] PathBuf),
}

impl Location {
    pub(crate) fn join(&self, name: &OsStr) -> Self {
        match self {
            Self::Base(path) => Self::Base(path.join(name)),
            Self::Store(path) => Self::Store(path.join(name)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Base(path) | Self::Store(path) => path,
        }
    }
}

/// Value of an overlay attribute: text of BranchFS, or a file handle of the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct XattrValue(pub(crate) Vec<u8>);

impl Serialize for XattrValue {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex_of(&self.0))
    }
}

impl<'de> Deserialize<'de> for XattrValue {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let damaged = |_| serde::de::Error::custom("not a value in hexadecimal");
        bytes_of(&text).map(Self).map_err(damaged)
    }
}

/// Attributes of an object that is on both sides of a commit.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds and nanoseconds.
    pub(crate) atime: (i64, u32),
    /// Seconds and nanoseconds.
    pub(crate) mtime: (i64, u32),
    /// Name -> value, both in hexadecimal; without the overlay format's own.
    pub(crate) xattrs: BTreeMap<String, String>,
}

impl Metadata {
    /// Whether everything except the access time is equal.
    fn is_but_for_access(&self, other: &Self) -> bool {
        Self { atime: other.atime, ..self.clone() } == *other
    }

    /// Whether everything except the times is equal.
    pub(super) fn is_but_for_times(&self, other: &Self) -> bool {
        Self { atime: other.atime, mtime: other.mtime, ..self.clone() } == *other
    }

    /// These attributes, except for mode, owner and extended attributes of `now` that equal neither these nor `new`:
    /// others have set them meanwhile.
    fn but_for_edits(&self, new: &Self, now: &Self) -> Self {
        let mut wanted = self.clone();
        if now.mode != new.mode {
            wanted.mode = now.mode;
        }
        if (now.uid, now.gid) != (new.uid, new.gid) {
            (wanted.uid, wanted.gid) = (now.uid, now.gid);
        }
        let is_ours = |(name, value): (&String, &String)| {
            [self, new].iter().any(|known| known.xattrs.get(name) == Some(value))
        };
        if !now.xattrs.iter().all(is_ours) {
            wanted.xattrs.clone_from(&now.xattrs);
        }
        wanted
    }

    /// Where these attributes equal those of `then`, uses those of `now`: changes by others are kept.
    pub(super) fn keep_changes(&mut self, then: &Self, now: &Self) {
        if self.mode == then.mode {
            self.mode = now.mode;
        }
        if (self.uid, self.gid) == (then.uid, then.gid) {
            (self.uid, self.gid) = (now.uid, now.gid);
        }
        if self.xattrs == then.xattrs {
            self.xattrs.clone_from(&now.xattrs);
        }
    }
}

/// One atomic change.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Moves `ino` to a free name.
    Rename { from: Location, to: Location, ino: u64, directory: bool },
    /// Swaps two objects.
    Exchange { one: Location, other: Location, ino_one: u64, ino_other: u64, directory: bool },
    /// Removes an overlay attribute from an object that was moved into the base.
    #[serde(rename = "Strip")]
    RemoveXattr { place: Location, name: String, value: XattrValue },
    /// Sets the attributes of the object `ino`, which is at `before` until the preceding steps are done: a directory on
    /// both sides, or a file of the base of which the branch changed only attributes.
    Metadata { path: Location, before: Location, ino: u64, new: Metadata, old: Metadata },
}

/// Whether a step is carried out or rolled back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Forward,
    Back,
}

/// The directory of the journal in the store.
pub(super) const JOURNAL: &str = "journal";

/// The directory in the store to which a transaction moves objects of the base.
pub(super) fn directory_of(transaction: u64) -> PathBuf {
    Path::new(JOURNAL).join(transaction.to_string())
}

impl TransactionRoots {
    pub(super) fn tree(&self, place: &Location) -> &RootedDir {
        match place {
            Location::Base(_) => &self.base,
            Location::Store(_) => &self.store,
        }
    }

    pub(crate) fn stat(&self, place: &Location) -> Result<Option<Statx>, Error> {
        match self.tree(place).stat(place.path()) {
            Ok(stat) => Ok(Some(stat)),
            // Others may have put a symbolic link in place of a parent directory.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error).at(place.path()),
        }
    }

    pub(crate) fn list(
        &self,
        place: &Location,
    ) -> Result<Vec<crate::rooted_dir::DirectoryEntry>, Error> {
        self.tree(place).list(place.path()).at(place.path())
    }

    pub(crate) fn xattr(&self, place: &Location, name: &str) -> Result<Option<Vec<u8>>, Error> {
        self.tree(place).find_xattr(place.path(), OsStr::new(name)).at(place.path())
    }

    /// The overlay attributes of the object at `place`.
    pub(crate) fn private_xattrs(
        &self,
        place: &Location,
    ) -> Result<Vec<(OsString, XattrValue)>, Error> {
        let (tree, path) = (self.tree(place), place.path());
        let with_value = |name: OsString| {
            let value = tree.get_xattr(path, &name).at(path)?;
            Ok((name, XattrValue(value)))
        };
        private_xattrs(tree, path).at(path)?.into_iter().map(with_value).collect()
    }

    pub(super) fn set_store_times(&self, path: &Path, times: &Timestamps) -> Result<(), Error> {
        self.store.set_times(path, times).at(path)
    }

    /// Opens a file for reading; `None` if nothing is there that can be opened.
    pub(crate) fn open(&self, place: &Location) -> Result<Option<OwnedFd>, Error> {
        match self.tree(place).open(place.path(), OFlags::RDONLY | OFlags::NONBLOCK) {
            Ok(file) => Ok(Some(file)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => Ok(None),
            Err(error) => Err(error).at(place.path()),
        }
    }

    pub(crate) fn remove_file(&self, place: &Location) -> Result<(), Error> {
        self.tree(place).remove_file(place.path()).at(place.path())
    }

    fn rename(
        &self,
        from: &Location,
        to: &Location,
        flags: RenameFlags,
        directory: bool,
    ) -> Result<(), Errno> {
        let parent_of = |place: &Location| {
            self.tree(place).directory(place.path().parent().unwrap_or(Path::new("")))
        };
        let (from_parent, to_parent) = (parent_of(from)?, parent_of(to)?);
        let name_of = |place: &Location| {
            place.path().file_name().map(OsStr::to_os_string).ok_or(Errno::INVAL)
        };
        if directory {
            self.tree(from).invalidate(from.path());
            self.tree(to).invalidate(to.path());
        }
        rustix::fs::renameat_with(&*from_parent, name_of(from)?, &*to_parent, name_of(to)?, flags)
    }

    /// Whether the object has both names of a move, which a crash on btrfs can leave: if another program has synced the
    /// directory of the new name alone, and nothing the one of the old name.
    fn has_both_names(&self, from: &Location, to: &Location, ino: u64) -> Result<bool, Error> {
        let is_there = |place| -> Result<bool, Error> {
            Ok(self.stat(place)?.is_some_and(|stat| stat.stx_ino == ino && stat.stx_nlink > 1))
        };
        Ok(is_there(from)? && is_there(to)?)
    }

    /// The attributes of the directory at `place`.
    pub(crate) fn metadata(&self, place: &Location) -> Result<Metadata, Error> {
        let tree = self.tree(place);
        let stat = tree.stat(place.path()).at(place.path())?;
        let mut xattrs = BTreeMap::new();
        for name in user_xattrs(tree, place.path()).at(place.path())? {
            let value = tree.get_xattr(place.path(), &name).at(place.path())?;
            xattrs.insert(hex_of(name.as_bytes()), hex_of(&value));
        }
        let (atime, mtime) = times_of(&stat);
        let mode = u32::from(stat.stx_mode) & 0o7777;
        Ok(Metadata { mode, uid: stat.stx_uid, gid: stat.stx_gid, atime, mtime, xattrs })
    }
}

/// The times of the last access and the last change of content, in seconds and nanoseconds.
pub(crate) fn times_of(stat: &Statx) -> ((i64, u32), (i64, u32)) {
    let (atime, mtime) = (stat.stx_atime, stat.stx_mtime);
    ((atime.tv_sec, atime.tv_nsec), (mtime.tv_sec, mtime.tv_nsec))
}

/// Sets the attributes of an object.
pub(crate) fn set_metadata(tree: &RootedDir, path: &Path, wanted: &Metadata) -> Result<(), Errno> {
    ownership::set_in(tree, path, (wanted.uid, wanted.gid))?;
    for name in user_xattrs(tree, path)? {
        if !wanted.xattrs.contains_key(&hex_of(name.as_bytes())) {
            tree.remove_xattr(path, &name)?;
        }
    }
    for (name, value) in &wanted.xattrs {
        let (name, value) = (bytes_of(name)?, bytes_of(value)?);
        let name = OsString::from_vec(name);
        if tree.get_xattr(path, &name).as_ref() != Ok(&value) {
            tree.set_xattr(path, &name, &value, XattrFlags::empty())?;
        }
    }
    if u32::from(tree.stat(path)?.stx_mode) & 0o7777 != wanted.mode {
        tree.set_mode(path, wanted.mode)?;
    }
    let time = |(seconds, nanoseconds): (i64, u32)| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(nanoseconds),
    };
    tree.set_times(
        path,
        &Timestamps { last_access: time(wanted.atime), last_modification: time(wanted.mtime) },
    )
}

impl Step {
    /// Its word in errors.
    fn label(&self) -> &'static str {
        match self {
            Self::Rename { .. } => "move",
            Self::Exchange { .. } => "exchange",
            Self::RemoveXattr { .. } => "unmark",
            Self::Metadata { .. } => "attributes",
        }
    }

    /// The path in the base whose attributes the step sets, and the earlier attributes.
    pub(crate) fn attributes_before(&self) -> Option<(&Path, &Metadata)> {
        match self {
            Self::Metadata { before: Location::Base(path), old, .. } => Some((path, old)),
            _ => None,
        }
    }

    /// Whether the step only sets the times of a directory, which follow from its entries.
    pub(super) fn sets_times_alone(&self) -> bool {
        matches!(self, Self::Metadata { new, old, .. } if new.is_but_for_times(old))
    }

    /// Adds the step to an error of the operating system.
    pub(super) fn with_step(&self, error: Error) -> Error {
        match error {
            Error::Io { path, source } => Error::Step { step: self.label(), path, source },
            other => other,
        }
    }

    /// Every location that the step names.
    pub(super) fn places_mut(&mut self) -> Vec<&mut Location> {
        match self {
            Self::Rename { from, to, .. } => vec![from, to],
            Self::Exchange { one, other, .. } => vec![one, other],
            Self::RemoveXattr { place, .. } => vec![place],
            Self::Metadata { path, before, .. } => vec![path, before],
        }
    }

    /// Sets the inode of the object that is moved from `place`, which was created only after the plan.
    pub(super) fn set_inode(&mut self, place: &Location, made: u64) {
        match self {
            Self::Rename { from, ino, .. } if from == place => *ino = made,
            Self::Exchange { one, ino_one, .. } if one == place => *ino_one = made,
            Self::Metadata { before, ino, .. } if before == place => *ino = made,
            _ => {}
        }
    }

    /// Executes the step, or rolls it back.
    pub(crate) fn run(&self, disk: &TransactionRoots, direction: Direction) -> Result<(), Error> {
        let forward = direction == Direction::Forward;
        match self {
            Self::Rename { from, to, ino, directory } => {
                let (from, to) = if forward { (from, to) } else { (to, from) };
                let moved = disk.rename(from, to, RenameFlags::NOREPLACE, *directory);
                if moved == Err(Errno::EXIST) && disk.has_both_names(from, to, *ino)? {
                    return disk.remove_file(from);
                }
                moved.at(base_path(from, to))
            }
            Self::Exchange { one, other, directory, .. } => {
                disk.rename(one, other, RenameFlags::EXCHANGE, *directory).at(base_path(one, other))
            }
            Self::RemoveXattr { place, name, value } => {
                let tree = disk.tree(place);
                if forward {
                    match tree.remove_xattr(place.path(), OsStr::new(name)) {
                        Ok(()) | Err(Errno::NODATA) => Ok(()),
                        Err(error) => Err(error).at(place.path()),
                    }
                } else {
                    tree.set_xattr(place.path(), OsStr::new(name), &value.0, XattrFlags::empty())
                        .at(place.path())
                }
            }
            Self::Metadata { path, new, .. } if forward => {
                set_metadata(disk.tree(path), path.path(), new).at(path.path())
            }
            Self::Metadata { path, before, ino, new, old } => {
                // During a rollback the directory may be at either path, or back in a layer.
                for place in [path, before] {
                    if disk.stat(place)?.is_some_and(|stat| stat.stx_ino == *ino) {
                        let now = disk.metadata(place)?;
                        let old = &old.but_for_edits(new, &now);
                        // One that cannot be changed has not been.
                        if now.is_but_for_access(old) {
                            return Ok(());
                        }
                        return set_metadata(disk.tree(place), place.path(), old).at(place.path());
                    }
                }
                Ok(())
            }
        }
    }
}

/// The path for an error message: the one in the base.
fn base_path<'p>(one: &'p Location, other: &'p Location) -> &'p Path {
    match (one, other) {
        (Location::Base(path), _) | (_, Location::Base(path)) => path,
        _ => one.path(),
    }
}

fn hex_of(bytes: &[u8]) -> String {
    to_hex(Path::new(OsStr::from_bytes(bytes)))
}

fn bytes_of(text: &str) -> Result<Vec<u8>, Errno> {
    from_hex(text).map(|path| path.into_os_string().into_vec()).ok_or(Errno::IO)
}

/// Paths in the journal: JSON text cannot hold bytes outside UTF-8.
pub(super) mod hex {
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::write_set::{from_hex, to_hex};

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_hex(path))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<PathBuf, D::Error> {
        let text = String::deserialize(deserializer)?;
        from_hex(&text).ok_or_else(|| serde::de::Error::custom("not a path in hexadecimal"))
    }
}

/// As [`hex`], for a path that may be missing.
pub(super) mod hex_option {
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        super::hex::serialize(path.as_deref().unwrap_or(Path::new("")), serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        let damaged = || serde::de::Error::custom("not a path in hexadecimal");
        text.map(|text| crate::write_set::from_hex(&text).ok_or_else(damaged)).transpose()
    }
}
