//! Committing a branch: into the base through [`crate::commit`], into a parent branch by stacking its layers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Branch, BranchId, Committed, Selector, Workspace, children_of, siblings_of};
#[cfg(test)]
use crate::commit::Disk;
use crate::commit::{self, Decided, Header, Request};
use crate::error::{Context, Error};
use crate::filesystem::MAIN;
use crate::layer::Layer;
use crate::seen::WriteSet;

/// How long a commit waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

impl Workspace {
    /// Commits a branch into its parent.
    ///
    /// # Errors
    /// `Stale` siblings' commits are `Conflict`; `Frozen`, `Busy`, `Conflict` (drift), `Io`. Parent and branch are as
    /// before then.
    pub(crate) fn commit(
        &self,
        selector: &Selector,
        force: bool,
        dry_run: bool,
    ) -> Result<Committed, Error> {
        let mut branches = self.lock();
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?;
        let (id, name, parent) =
            (branch.record.id, branch.record.name.clone(), branch.record.parent);
        if branch.record.is_stale {
            let message =
                format!("branch {name} cannot be committed: a sibling was committed first");
            return Err(Error::Conflict { message, paths: Vec::new() });
        }
        let children = children_of(&branches, id);
        if !children.is_empty() {
            return Err(Error::Frozen { name, children: children.join(", ") });
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        if dry_run {
            let plan = self.plan(branch)?;
            refuse_drift(&name, &plan.drift, force)?;
            return Ok(Committed { changes: plan.changes, stale: Vec::new() });
        }
        mounted.freeze();
        let closed = self.wait_for_writers(branch);
        let outcome = closed.and_then(|()| match parent {
            0 => self.commit_to_base(&mut branches, id, force),
            parent => self.commit_to_branch(&mut branches, id, parent),
        });
        if outcome.is_err() {
            mounted.thaw();
        }
        outcome
    }

    fn plan(&self, branch: &Branch) -> Result<commit::Plan, Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().join_all_links().at(&self.base_path)?;
        let mut seen = BTreeMap::new();
        for layer in branch.record.layers.iter().rev() {
            let log = self.layer_path(*layer).join("writes");
            for (path, expected) in WriteSet::load(&log).at(&log)?.seen {
                seen.entry(path).or_insert(expected);
            }
        }
        let layers = branch
            .record
            .layers
            .iter()
            .map(|layer| Path::new("layers").join(layer.to_string()).join("upper"));
        let request = Request {
            transaction: branch.record.id,
            layers: layers.collect(),
            namespace: self.namespace,
            seen,
            forked: branch.record.created,
            by_kernel: false,
        };
        commit::plan(&self.disk()?, &request)
    }

    /// The plan of a branch's commit, and the header its commit would have.
    #[cfg(test)]
    pub(crate) fn plan_for_tests(&self, name: &str) -> Result<(Disk, Header, commit::Plan), Error> {
        let branches = self.lock();
        let branch = Selector::Name(name.to_owned())
            .find(&branches)?
            .ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let header = Header {
            version: 1,
            transaction: branch.record.id,
            branch: branch.record.id,
            stale: Vec::new(),
        };
        Ok((self.disk()?, header, self.plan(branch)?))
    }

    /// What a branch would change in the base: its own layers alone.
    ///
    /// # Errors
    /// `NotFound`, `Unsupported` for a nested branch, `Io`.
    pub(crate) fn diff(&self, selector: &Selector) -> Result<Committed, Error> {
        let branches = self.lock();
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main has no parent to compare with".to_owned()))?;
        if branch.record.parent != 0 {
            return Err(Error::Unsupported("the changes of a nested branch cannot be listed yet; commit it into its parent first".to_owned()));
        }
        Ok(Committed { changes: self.plan(branch)?.changes, stale: Vec::new() })
    }

    /// Closing a file is told to us after the caller goes on: give it a moment.
    fn wait_for_writers(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        loop {
            let view = mounted.lock();
            let mut written: Vec<PathBuf> =
                view.handles.written().filter_map(|index| view.nodes.path(index).ok()).collect();
            drop(view);
            if written.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                written.sort();
                written.dedup();
                return Err(Error::Busy { name: branch.record.name.clone(), paths: written });
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn commit_to_base(
        &self,
        branches: &mut BTreeMap<BranchId, Branch>,
        id: BranchId,
        force: bool,
    ) -> Result<Committed, Error> {
        let branch = &branches[&id];
        let plan = self.plan(branch)?;
        refuse_drift(&branch.record.name, &plan.drift, force)?;
        let disk = self.disk()?;
        for litter in &plan.litter {
            disk.remove_file(litter)?;
        }
        let changes = plan.changes.clone();
        let stale: Vec<BranchId> = siblings_of(branches, id);
        let header = Header { version: 1, transaction: id, branch: id, stale: stale.clone() };
        let decided =
            Decided::decide(&disk, header, plan).inspect_err(|_| self.drop_journal(id))?;
        let gate = self.filesystem.close_gate();
        if let Err(error) = decided.apply(&disk) {
            drop(gate);
            if !matches!(error, Error::Corrupt(_)) {
                self.drop_journal(id); // all is taken back: the entry holds nothing of the base
            }
            return Err(error);
        }
        for layer in [&self.base, &self.main_layer()] {
            layer.tree.forget_all();
        }
        self.settle_siblings(branches, &stale);
        drop(gate);
        for layer in &branches[&id].record.layers {
            // What was committed has one link too many as long as the layer keeps its own.
            let links = self.layer_path(*layer).join("links");
            fs::remove_dir_all(&links).at(&links)?;
        }
        Decided::sync(&disk)?;
        for sibling in &stale {
            self.write_record(&branches[sibling].record)?;
        }
        let names = stale.iter().map(|id| branches[id].record.name.clone()).collect();
        let committed = branches.remove(&id);
        if let Some(committed) = committed {
            self.thaw(MAIN, 1 + stale.len());
            self.retire_branch(&committed)?;
        }
        decided.retire(&disk, &self.trash_name("tx", id))?;
        self.tell_stale(branches, &stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        Ok(Committed { changes, stale: names })
    }

    fn main_layer(&self) -> Arc<Layer> {
        let main = self.filesystem.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().top()
    }

    /// A commit into a parent branch: the child's layers become the parent's top.
    fn commit_to_branch(
        &self,
        branches: &mut BTreeMap<BranchId, Branch>,
        id: BranchId,
        parent: BranchId,
    ) -> Result<Committed, Error> {
        let stale = siblings_of(branches, id);
        let child = branches.get(&id).ok_or_else(|| Error::NotFound(id.to_string()))?;
        let (child_layers, child_stack) = (child.record.layers.clone(), child.stack.clone());
        let above = branches.get(&parent).ok_or_else(|| Error::NotFound(parent.to_string()))?;
        let mut record = above.record.clone();
        record.layers = child_layers.into_iter().chain(record.layers).collect();
        // One rename of one record is the commit; what it names must be on disk first.
        let disk = self.disk()?;
        Decided::sync(&disk)?;
        self.write_record(&record)?;
        Decided::sync(&disk)?;
        let slot = above.slot;
        let gate = self.filesystem.close_gate();
        self.settle_siblings(branches, &stale);
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        let outdated = mounted.lock().restack(child_stack.clone());
        drop(gate);
        for sibling in &stale {
            self.write_record(&branches[sibling].record)?;
        }
        if let Some(above) = branches.get_mut(&parent) {
            above.record = record;
            above.stack = child_stack;
        }
        self.thaw(slot, 1 + stale.len());
        if let Some(mut child) = branches.remove(&id) {
            child.record.layers.clear(); // they are the parent's now
            self.retire_branch(&child)?;
        }
        self.filesystem.invalidate_outdated(slot, &outdated);
        self.tell_stale(branches, &stale);
        let names = stale.iter().map(|id| branches[id].record.name.clone()).collect();
        Ok(Committed { changes: Vec::new(), stale: names })
    }

    /// Under the gate: from the next request on the siblings answer ESTALE.
    fn settle_siblings(&self, branches: &mut BTreeMap<BranchId, Branch>, stale: &[BranchId]) {
        for id in stale {
            if let Some(branch) = branches.get_mut(id) {
                branch.record.is_stale = true;
                self.filesystem.set_stale(branch.slot);
            }
        }
    }

    fn tell_stale(&self, branches: &BTreeMap<BranchId, Branch>, stale: &[BranchId]) {
        for id in stale {
            if let Ok(mounted) = self.filesystem.mounted(branches[id].slot) {
                self.filesystem.invalidate(&mounted);
            }
        }
    }
}

fn refuse_drift(
    name: &str,
    drift: &std::collections::BTreeSet<PathBuf>,
    force: bool,
) -> Result<(), Error> {
    if drift.is_empty() || force {
        return Ok(());
    }
    let message =
        format!("branch {name} cannot be committed: the base was changed by others since the fork");
    Err(Error::Conflict { message, paths: drift.iter().cloned().collect() })
}
