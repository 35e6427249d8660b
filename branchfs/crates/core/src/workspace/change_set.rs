//! The changes that some layers make to those below: what a branch did, or what was committed into its parent.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::Branch;
use super::conflicts::CommittedChanges;
use crate::diff::{Pair, RenamedDirs, Side, Walked, rename_by_inode, walk};
use crate::error::{Context, Error};
use crate::object_copy::copy_attributes;
use crate::overlay::user_xattrs;
use crate::rooted_dir::RootedDir;
use crate::transaction::{Change, ChangeKind};

/// The changes that a group of layers makes to the layers below.
#[derive(Debug, Default)]
pub(super) struct ChangeSet {
    walked: Walked,
    /// Sorted by path.
    pub(super) changes: Vec<Change>,
}

impl ChangeSet {
    /// The changes of a branch since its fork.
    pub(super) fn of(branch: &Branch) -> Result<Self, Error> {
        Self::over(branch, branch.record.layers.len())
    }

    /// The changes that were committed into `parent` since `child` was forked from it.
    pub(super) fn since_fork(parent: &Branch, child: &Branch) -> Result<Self, Error> {
        let is_new = |layer: &&u64| !child.record.lower_layers.contains(layer);
        Self::over(parent, parent.record.layers.iter().take_while(is_new).count())
    }

    fn over(branch: &Branch, own: usize) -> Result<Self, Error> {
        if own == 0 {
            return Ok(Self::default());
        }
        let (own, below) = branch.stack.split_at(own);
        let mut walked = walk(own, below, RenamedDirs::Collapse)?;
        walked.pairs = rename_by_inode(walked.pairs);
        let mut changes = Vec::new();
        for pair in &walked.pairs {
            changes.extend(change(pair)?);
        }
        Ok(Self { walked, changes })
    }

    /// Whether these layers change nothing.
    pub(super) fn is_empty(&self) -> Result<bool, Error> {
        // The root's attributes are no change of a path.
        Ok(self.changes.is_empty() && changed_directories(&self.walked.pairs)?.is_empty())
    }

    /// The changed paths; a path with a change of type counts once.
    pub(super) fn paths(&self) -> BTreeSet<&Path> {
        self.changes.iter().map(|change| change.path.as_path()).collect()
    }

    pub(super) fn committed_changes(&self) -> CommittedChanges {
        let mut theirs = CommittedChanges::default();
        theirs.add(&self.changes);
        theirs
    }

    /// The paths at which `theirs` conflict with the writes of these layers. Paths that the layers hide count as
    /// written: on top of `theirs` they would hide them.
    pub(super) fn conflicts_with(&self, theirs: &CommittedChanges) -> BTreeSet<PathBuf> {
        theirs.conflicts_with(&self.changes, &self.walked.opaque_paths)
    }

    /// Applies the attributes that only `theirs` changed to the directories of these layers: the child's copies would
    /// hide them.
    pub(super) fn merge_attributes(&self, theirs: &Self) -> Result<(), Error> {
        let theirs = changed_directories(&theirs.walked.pairs)?;
        if theirs.is_empty() {
            return Ok(());
        }
        let ours = changed_directories(&self.walked.pairs)?;
        for pair in &self.walked.pairs {
            let Some(after) = pair.after.as_ref().filter(|side| side.is_directory()) else {
                continue;
            };
            let Some(from) = theirs.get(after.path.as_path()) else { continue };
            if !ours.contains_key(after.path.as_path()) {
                let to = (&after.layer.tree, after.place.as_path());
                copy_attributes((&from.layer.tree, &from.place), to).at(&after.path)?;
            }
        }
        Ok(())
    }
}

/// The directories, including the root, that exist on both sides with different attributes, with their attributes after
/// the change.
fn changed_directories(pairs: &[Pair]) -> Result<BTreeMap<&Path, &Side>, Error> {
    let mut found = BTreeMap::new();
    for pair in pairs {
        let (Some(before), Some(after)) = (&pair.before, &pair.after) else { continue };
        let are_directories = before.is_directory() && after.is_directory();
        if are_directories && attributes_differ(before, after)? {
            found.insert(after.path.as_path(), after);
        }
    }
    Ok(found)
}

/// The change at a path; `None` for a directory that is only a parent of changes, and for the root.
fn change(pair: &Pair) -> Result<Option<Change>, Error> {
    let (kind, side, from) = match (&pair.before, &pair.after) {
        (None, Some(after)) => (ChangeKind::Added, after, None),
        (Some(before), None) => (ChangeKind::Deleted, before, None),
        (Some(before), Some(after)) if before.kind() != after.kind() => {
            (ChangeKind::Type, after, None)
        }
        (Some(before), Some(after)) if before.path != after.path && !pair.keeps_name => {
            (ChangeKind::Renamed, after, Some(before.path.clone()))
        }
        (Some(before), Some(after)) if after.is_directory() => {
            if after.path.as_os_str().is_empty() || !attributes_differ(before, after)? {
                return Ok(None);
            }
            (ChangeKind::Metadata, after, None)
        }
        (Some(_), Some(after)) => (ChangeKind::Modified, after, None),
        (None, None) => return Ok(None),
    };
    Ok(Some(Change { path: side.path.clone(), change: kind, from, kind: side.kind().into() }))
}

fn attributes_differ(one: &Side, other: &Side) -> Result<bool, Error> {
    Ok((one.stat.mode, one.stat.owner()) != (other.stat.mode, other.stat.owner())
        || xattrs(&one.layer.tree, &one.place)? != xattrs(&other.layer.tree, &other.place)?)
}

fn xattrs(tree: &RootedDir, path: &Path) -> Result<BTreeMap<OsString, Vec<u8>>, Error> {
    let names = user_xattrs(tree, path).at(path)?;
    let value = |name: OsString| {
        let value = tree.get_xattr(path, &name).at(path)?;
        Ok((name, value))
    };
    names.into_iter().map(value).collect()
}
