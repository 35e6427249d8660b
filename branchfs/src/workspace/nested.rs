//! What branches of a branch did, for their commit into it: one's own changes, and those of siblings that were first.
//!
//! A commit into a branch stacks layers, so that what siblings committed since a fork are the parent's layers that the
//! child's stack does not have. Both sides are found by walking layers; the cost follows the changed names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::Branch;
use super::conflicts::Theirs;
use crate::commit::{Change, ChangeKind};
use crate::difference::{Moves, Pair, Side, Walked, rename_by_inode, walk};
use crate::error::{Context, Error};
use crate::layer::copy_attributes;
use crate::tree::{Tree, xattr_names};

/// What layers changed over those below them.
#[derive(Debug, Default)]
pub(super) struct Work {
    walked: Walked,
    /// Sorted by path.
    pub(super) changes: Vec<Change>,
}

impl Work {
    /// What a branch changed against its parent at the fork.
    pub(super) fn of(branch: &Branch) -> Result<Self, Error> {
        Self::over(branch, branch.record.layers.len())
    }

    /// What was committed into `parent` since `child` was forked from it.
    pub(super) fn since(parent: &Branch, child: &Branch) -> Result<Self, Error> {
        let is_new = |layer: &&u64| !child.record.below.contains(layer);
        Self::over(parent, parent.record.layers.iter().take_while(is_new).count())
    }

    fn over(branch: &Branch, own: usize) -> Result<Self, Error> {
        if own == 0 {
            return Ok(Self::default());
        }
        let (own, below) = branch.stack.split_at(own);
        let mut walked = walk(own, below, Moves::Whole)?;
        walked.pairs = rename_by_inode(walked.pairs);
        let mut changes = Vec::new();
        for pair in &walked.pairs {
            changes.extend(change(pair)?);
        }
        Ok(Self { walked, changes })
    }

    pub(super) fn theirs(&self) -> Theirs {
        let mut theirs = Theirs::default();
        theirs.add(&self.changes);
        theirs
    }

    /// The paths at which `theirs` stand against what these layers wrote. What they hide without a change counts as
    /// written: on top of `theirs` it would hide theirs.
    pub(super) fn against(&self, theirs: &Theirs) -> BTreeSet<PathBuf> {
        theirs.against(&self.changes, &self.walked.masks)
    }

    /// Lets the directories of these layers have the attributes that `theirs` gave them, where only they did: the child's
    /// copy would hide them.
    pub(super) fn take_attributes(&self, theirs: &Self) -> Result<(), Error> {
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

/// The directories, the root among them, that are on both sides with other attributes: as they are after it.
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

/// How a path differs; `None` for a directory that is only on the way to something, and for the root.
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
    Ok((one.stat.mode, one.stat.owner) != (other.stat.mode, other.stat.owner)
        || xattrs(&one.layer.tree, &one.place)? != xattrs(&other.layer.tree, &other.place)?)
}

fn xattrs(tree: &Tree, path: &Path) -> Result<BTreeMap<OsString, Vec<u8>>, Error> {
    let list = match tree.list_xattrs(path) {
        Err(Errno::OPNOTSUPP) => Vec::new(),
        other => other.at(path)?,
    };
    let mut found = BTreeMap::new();
    for name in xattr_names(&list).filter(|name| !crate::overlay::is_private_xattr(name)) {
        found.insert(name.to_os_string(), tree.get_xattr(path, name).at(path)?);
    }
    Ok(found)
}
