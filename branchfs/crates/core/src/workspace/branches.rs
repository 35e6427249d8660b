//! What a workspace knows of its open branches.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::BranchId;
use super::branch_log::Record;
use crate::error::Error;
use crate::layer::Layer;
use crate::mount::{FreezeGuard, ViewId};
use crate::quota::Quota;

/// An open branch: its record, and its parts in the mount.
#[derive(Clone, Debug)]
pub(super) struct Branch {
    pub(super) record: Record,
    pub(super) slot: ViewId,
    /// Its whole layer stack, top first, ending with the base.
    pub(super) stack: Vec<Arc<Layer>>,
    /// Its disk usage, if it or an ancestor has a limit.
    pub(super) quota: Option<Arc<Quota>>,
}

/// Open branches by number, oldest first.
#[derive(Debug, Default)]
pub(super) struct Branches {
    /// Boxed: the nodes of a map to which ever larger keys are added are half empty.
    by_id: BTreeMap<BranchId, Box<Branch>>,
    /// Names and parents never change.
    by_name: HashMap<Box<str>, BranchId>,
    children: HashMap<BranchId, BTreeSet<BranchId>>,
    held: BTreeSet<BranchId>,
    /// The freeze of the parent, for each branch that is not stale.
    parent_freezes: HashMap<BranchId, FreezeGuard>,
}

impl Branches {
    /// Adds a branch, which freezes its parent unless it is stale.
    pub(super) fn insert(&mut self, branch: Branch, parent_freeze: Option<FreezeGuard>) {
        let id = branch.record.id;
        debug_assert_eq!(parent_freeze.is_none(), branch.record.is_stale, "branch {id}");
        self.parent_freezes.extend(parent_freeze.map(|freeze| (id, freeze)));
        self.by_name.insert(branch.record.name.as_str().into(), id);
        self.children.entry(branch.record.parent).or_default().insert(id);
        self.by_id.insert(id, Box::new(branch));
    }

    pub(super) fn remove(&mut self, id: &BranchId) -> Option<Branch> {
        let branch = self.by_id.remove(id)?;
        self.parent_freezes.remove(id);
        self.by_name.remove(branch.record.name.as_str());
        if let Some(siblings) = self.children.get_mut(&branch.record.parent) {
            siblings.remove(id);
            if siblings.is_empty() {
                self.children.remove(&branch.record.parent);
            }
        }
        Some(*branch)
    }

    /// Marks a branch as stale: it does not freeze its parent any more.
    pub(super) fn set_stale(&mut self, id: BranchId) -> Option<&Branch> {
        self.parent_freezes.remove(&id);
        let branch = self.by_id.get_mut(&id)?;
        branch.record.is_stale = true;
        Some(branch)
    }

    /// Removes the freeze of a branch's parent from the table, for a branch that is inserted again.
    pub(super) fn take_parent_freeze(&mut self, id: BranchId) -> Option<FreezeGuard> {
        self.parent_freezes.remove(&id)
    }

    pub(super) fn by_name(&self, name: &str) -> Option<&Branch> {
        self.by_id.get(self.by_name.get(name)?).map(AsRef::as_ref)
    }

    pub(super) fn hold(&mut self, id: BranchId) {
        self.held.insert(id);
    }

    pub(super) fn release(&mut self, id: BranchId) {
        self.held.remove(&id);
    }

    /// Whether this branch, or a descendant, is guarded.
    pub(super) fn holds(&self, id: BranchId) -> bool {
        let above = |below: &BranchId| self.by_id.get(below).map(|branch| branch.record.parent);
        let lineage = |held: &BranchId| std::iter::successors(Some(*held), above);
        self.held.iter().flat_map(lineage).any(|found| found == id)
    }

    /// Whether this branch itself is guarded, not only a descendant.
    pub(super) fn is_held(&self, id: BranchId) -> bool {
        self.held.contains(&id)
    }

    /// The branches forked from this one, also stale ones.
    pub(super) fn children(&self, id: BranchId) -> impl Iterator<Item = &Branch> {
        let children = self.children.get(&id).into_iter().flatten();
        children.filter_map(|child| Some(&**self.by_id.get(child)?))
    }
}

impl Deref for Branches {
    type Target = BTreeMap<BranchId, Box<Branch>>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

/// Only for changes within a branch; branches are added and removed by the methods above.
impl DerefMut for Branches {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.by_id
    }
}

pub(super) fn children_of(branches: &Branches, id: BranchId) -> Vec<String> {
    let live = branches.children(id).filter(|branch| !branch.record.is_stale);
    live.map(|branch| branch.record.name.clone()).collect()
}

/// Live branches below `top`, children before their own children.
pub(super) fn descendants(branches: &Branches, top: BranchId) -> Vec<BranchId> {
    let mut found = vec![top];
    let mut position = 0;
    while let Some(&parent) = found.get(position) {
        let live = branches.children(parent).filter(|branch| !branch.record.is_stale);
        found.extend(live.map(|branch| branch.record.id));
        position += 1;
    }
    found.split_off(1)
}

pub(super) fn names_of(branches: &Branches, ids: &[BranchId]) -> Vec<String> {
    ids.iter().map(|id| branches[id].record.name.clone()).collect()
}

/// Refuses a branch from which others were forked.
pub(super) fn has_no_live_children(branches: &Branches, branch: &Branch) -> Result<(), Error> {
    let name = &branch.record.name;
    let children = children_of(branches, branch.record.id);
    if children.is_empty() {
        return Ok(());
    }
    Err(Error::Frozen { name: name.clone(), children: children.join(", ") })
}
