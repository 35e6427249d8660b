//! What a branch depends on: the objects of the base that it changed or read.

use std::ffi::OsStr;
use std::path::PathBuf;

use rustix::io::Errno;

use super::{MergedTree, NodeIndex, NodeLocation};
use crate::rooted_dir::Result;
use crate::write_set::{Fingerprint, Precondition, Read};

impl MergedTree {
    /// Records a negative lookup under its path in the snapshot.
    pub(super) fn record_missing(&self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        match &self.nodes.get(parent)?.place {
            NodeLocation::Directory { lowers, .. } => match lowers.first() {
                Some(below) => {
                    self.layers.record_read(&below.path.join(name), Read::NegativeLookup)
                }
                None => Ok(()), // new in this branch, with all that is in it
            },
            _ => Ok(()),
        }
    }

    /// The path of a name in the base, where the directory is there too.
    fn base_path(&self, parent: NodeIndex, name: &OsStr) -> Option<PathBuf> {
        match &self.nodes.get(parent).ok()?.place {
            NodeLocation::Directory { lowers, .. } => {
                lowers.last().filter(|at| at.layer.is_base()).map(|at| at.path.join(name))
            }
            _ => None,
        }
    }

    /// Whether a snapshot layer stands between the branch and what the base has under a name.
    fn is_hidden_by_snapshot(&self, parent: NodeIndex, name: &OsStr) -> Result<bool> {
        let NodeLocation::Directory { lowers, .. } = &self.nodes.get(parent)?.place else {
            return Ok(false);
        };
        for at in lowers.iter().filter(|at| at.layer.is_snapshot()) {
            match at.layer.tree.stat(&at.path.join(name)) {
                Ok(_) => return Ok(true),
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// The branch depends on a name of the base being free.
    pub(super) fn record_absent(&self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        self.record_base(parent, name, false, None)
    }

    /// The branch depends on what the base has under a name.
    pub(super) fn record_present(&self, parent: NodeIndex, name: &OsStr) -> Result<()> {
        self.record_base(parent, name, true, None)
    }

    /// As [`Self::record_present`], for the name of a node that was just looked up.
    pub(super) fn record_removed(
        &self,
        parent: NodeIndex,
        name: &OsStr,
        index: NodeIndex,
    ) -> Result<()> {
        let node = self.nodes.get(index)?;
        let known = match (&node.place, self.base_path(parent, name)) {
            (NodeLocation::Lower(at), Some(path)) if at.layer.is_base() && at.path == path => {
                node.identity
            }
            _ => None,
        };
        self.record_base(parent, name, true, known)
    }

    /// `known` is the state of the object of the base, if the caller has it.
    fn record_base(
        &self,
        parent: NodeIndex,
        name: &OsStr,
        present: bool,
        known: Option<Fingerprint>,
    ) -> Result<()> {
        let top = self.top();
        let Some(path) = self.base_path(parent, name).filter(|_| !top.is_base()) else {
            return Ok(());
        };
        let Some(base) = self.layers.last() else {
            return Ok(());
        };
        if self.is_hidden_by_snapshot(parent, name)? {
            return Ok(()); // the base has something else there than the branch sees, until that is undone
        }
        if let Some(known) = known {
            return top.record_precondition(&path, Precondition::Present(known));
        }
        let expected = match base.tree.stat(&path) {
            Ok(stat) if present => Precondition::Present(Fingerprint::of(&stat)),
            // This branch hides it already: the first precondition counts.
            Ok(_) => return Ok(()),
            Err(Errno::NOENT | Errno::NOTDIR) => Precondition::Absent,
            Err(error) => return Err(error),
        };
        top.record_precondition(&path, expected)
    }
}
