//! The table of open branches, found by number, by name and by parent: no verb looks through all of them for one.
//!
//! Some of them may be held, by verbs that take their time: nobody forks or ends those meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Deref, DerefMut};

use super::{Branch, BranchId};

/// Open branches by number, oldest first.
#[derive(Debug, Default)]
pub(super) struct Branches {
    by_id: BTreeMap<BranchId, Branch>,
    /// Names and parents never change.
    by_name: HashMap<String, BranchId>,
    children: HashMap<BranchId, BTreeSet<BranchId>>,
    held: BTreeSet<BranchId>,
}

impl Branches {
    pub(super) fn insert(&mut self, id: BranchId, branch: Branch) {
        self.by_name.insert(branch.record.name.clone(), id);
        self.children.entry(branch.record.parent).or_default().insert(id);
        self.by_id.insert(id, branch);
    }

    pub(super) fn remove(&mut self, id: &BranchId) -> Option<Branch> {
        let branch = self.by_id.remove(id)?;
        self.by_name.remove(&branch.record.name);
        if let Some(siblings) = self.children.get_mut(&branch.record.parent) {
            siblings.remove(id);
            if siblings.is_empty() {
                self.children.remove(&branch.record.parent);
            }
        }
        Some(branch)
    }

    pub(super) fn named(&self, name: &str) -> Option<&Branch> {
        self.by_id.get(self.by_name.get(name)?)
    }

    pub(super) fn hold(&mut self, id: BranchId) {
        self.held.insert(id);
    }

    pub(super) fn let_go(&mut self, id: BranchId) {
        self.held.remove(&id);
    }

    /// Whether this branch, or one below it, is held.
    pub(super) fn holds(&self, id: BranchId) -> bool {
        let above = |below: &BranchId| self.by_id.get(below).map(|branch| branch.record.parent);
        let lineage = |held: &BranchId| std::iter::successors(Some(*held), above);
        self.held.iter().flat_map(lineage).any(|found| found == id)
    }

    /// Whether this branch itself is held.
    pub(super) fn is_held(&self, id: BranchId) -> bool {
        self.held.contains(&id)
    }

    /// Those forked from this branch, stale ones too.
    pub(super) fn children(&self, id: BranchId) -> impl Iterator<Item = &Branch> {
        self.children.get(&id).into_iter().flatten().filter_map(|child| self.by_id.get(child))
    }
}

impl Deref for Branches {
    type Target = BTreeMap<BranchId, Branch>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

/// For a branch that changes; branches come and go by the methods above.
impl DerefMut for Branches {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.by_id
    }
}
