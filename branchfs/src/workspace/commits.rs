//! Committing a branch: into the base through [`crate::commit`], into a parent branch by stacking its layers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Branch, BranchId, Committed, Selector, Workspace, children_of, now, rivals_of};
use crate::commit::{self, Decided, Disk, Header, Kind, Plan, Request, VERSION};
use crate::driver::{self, Completion};
use crate::error::{Context, Error};
use crate::filesystem::{MAIN, Slot};
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
            let hint = "abort it, and start again from a new branch";
            return Err(Error::Conflict { message, paths: Vec::new(), hint });
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
        let closed = self
            .wait_for_writers(branch)
            .and_then(|()| self.driver().freeze(id, Completion::ForCommit));
        let outcome = closed.and_then(|()| match parent {
            0 => self.commit_to_base(&mut branches, id, force),
            parent => self.commit_to_branch(&mut branches, id, parent),
        });
        if outcome.is_err() {
            mounted.thaw();
        }
        self.thaw_presented(&branches);
        outcome
    }

    fn plan(&self, branch: &Branch) -> Result<Plan, Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        mounted.lock().join_all_links().at(&self.base_path)?;
        let mut seen = BTreeMap::new();
        for layer in branch.record.layers.iter().rev() {
            let log = self.layer_path(*layer).join("writes");
            for (path, expected) in WriteSet::load(&log).at(&log)?.seen {
                seen.entry(path).or_insert(expected);
            }
        }
        self.seen_by_kernel(branch, &mut seen)?;
        let disk = self.disk()?;
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
            by_kernel: self.is_by_kernel(branch),
            own: self.own_intervals(&disk)?,
        };
        commit::plan(&disk, &request)
    }

    /// The plan of a branch's commit, and the header its commit would have.
    #[cfg(test)]
    pub(crate) fn plan_for_tests(&self, name: &str) -> Result<(Disk, Header, Plan), Error> {
        let branches = self.lock();
        let branch = Selector::Name(name.to_owned())
            .find(&branches)?
            .ok_or_else(|| Error::NotFound(name.to_owned()))?;
        let plan = self.plan(branch)?;
        Ok((self.disk()?, commit_header(branch, &plan, Vec::new()), plan))
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
            let written = mounted.lock().written();
            if written.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::Busy { name: branch.record.name.clone(), paths: written });
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Freezes a branch that is about to be forked. What the kernel writes by itself no freezing stops: it must be
    /// closed.
    pub(super) fn freeze_for_fork(&self, slot: Slot) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        mounted.freeze();
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        loop {
            let paths = mounted.lock().written_by_kernel();
            if paths.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                mounted.thaw();
                let name = mounted.name.to_string_lossy().into_owned();
                return Err(Error::Written { name, paths });
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
        let stale: Vec<BranchId> = rivals_of(branches, id);
        let header = commit_header(branch, &plan, stale);
        let decided = self.transact(branches, &disk, header, plan)?;
        if let Some(mut committed) = branches.remove(&id) {
            self.unlink_kept(&committed.record)?;
            self.thaw(MAIN, 1);
            committed.record.layers.clear(); // they go with the commit
            self.retire_branch(&committed)?;
        }
        self.settle(branches, &disk, &decided)?;
        let names = decided.header.stale.iter().map(|id| branches[id].record.name.clone());
        Ok(Committed { stale: names.collect(), changes: decided.changes })
    }

    /// What was committed has one link too many as long as its layer keeps one of its own.
    pub(super) fn unlink_kept(&self, record: &super::Record) -> Result<(), Error> {
        for layer in &record.layers {
            driver::drop_index(&self.layer_path(*layer))?;
            let links = self.layer_path(*layer).join("links");
            match fs::remove_dir_all(&links) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => other.at(&links)?,
            }
        }
        Ok(())
    }

    /// Decides a transaction and carries it out; then it is in the base, durable, and the records of those who are stale
    /// say so. The journal still has it.
    pub(super) fn transact(
        &self,
        branches: &mut BTreeMap<BranchId, Branch>,
        disk: &Disk,
        header: Header,
        plan: Plan,
    ) -> Result<Decided, Error> {
        let number = header.transaction;
        let decided =
            Decided::decide(disk, header, plan).inspect_err(|_| self.drop_journal(number))?;
        let gate = self.filesystem.close_gate();
        if let Err(error) = decided.apply(disk) {
            drop(gate);
            if !matches!(error, Error::Corrupt(_)) {
                self.drop_journal(number); // all is taken back: the entry holds nothing of the base
            }
            return Err(error);
        }
        for layer in [&self.base, &self.main_layer()] {
            layer.tree.forget_all();
        }
        self.settle_stale(branches, &decided.header.stale);
        drop(gate);
        Decided::sync(disk)?;
        for id in &decided.header.stale {
            if let Some(branch) = branches.get(id) {
                self.write_record(&branch.record)?;
            }
        }
        Ok(decided)
    }

    /// Takes a transaction that happened from the journal to the history, and tells the kernel.
    pub(super) fn settle(
        &self,
        branches: &BTreeMap<BranchId, Branch>,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<(), Error> {
        self.keep(disk, decided)?;
        self.tell_stale(branches, &decided.header.stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        Ok(())
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
        let stale = rivals_of(branches, id);
        let child = branches.get(&id).ok_or_else(|| Error::NotFound(id.to_string()))?;
        let (child_layers, child_stack) = (child.record.layers.clone(), child.stack.clone());
        let above = branches.get(&parent).ok_or_else(|| Error::NotFound(parent.to_string()))?;
        self.leave_to_fuse(above)?; // the kernel cannot mount what several layers make up
        let mut record = above.record.clone();
        record.layers = child_layers.into_iter().chain(record.layers).collect();
        // One rename of one record is the commit; what it names must be on disk first.
        let disk = self.disk()?;
        Decided::sync(&disk)?;
        self.write_record(&record)?;
        Decided::sync(&disk)?;
        let slot = above.slot;
        let gate = self.filesystem.close_gate();
        self.settle_stale(branches, &stale);
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
        self.thaw(slot, 1);
        if let Some(mut child) = branches.remove(&id) {
            if let Some(quota) = &child.quota {
                quota.lift();
            }
            child.record.layers.clear(); // they are the parent's now
            self.retire_branch(&child)?;
        }
        self.filesystem.invalidate_outdated(slot, &outdated);
        self.tell_stale(branches, &stale);
        let names = stale.iter().map(|id| branches[id].record.name.clone()).collect();
        Ok(Committed { changes: Vec::new(), stale: names })
    }

    /// Under the gate: from the next request on these branches answer ESTALE, and freeze nobody any more.
    fn settle_stale(&self, branches: &mut BTreeMap<BranchId, Branch>, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get_mut(id) else { continue };
            branch.record.is_stale = true;
            self.filesystem.set_stale(branch.slot);
            let parent = branch.record.parent;
            self.thaw(branches.get(&parent).map_or(MAIN, |parent| parent.slot), 1);
        }
    }

    fn tell_stale(&self, branches: &BTreeMap<BranchId, Branch>, stale: &[BranchId]) {
        for id in stale {
            self.driver().detach(*id);
            if let Ok(mounted) = self.filesystem.mounted(branches[id].slot) {
                self.filesystem.invalidate(&mounted);
            }
        }
    }
}

fn commit_header(branch: &Branch, plan: &Plan, stale: Vec<BranchId>) -> Header {
    Header {
        version: VERSION,
        transaction: branch.record.id,
        kind: Kind::Commit { branch: branch.record.id },
        name: branch.record.name.clone(),
        layers: branch.record.layers.clone(),
        stale,
        decided: now(),
        displaced_bytes: plan.displaced_bytes,
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
    let hint = "the branch is still open: look at these paths, then force the commit or abort it";
    Err(Error::Conflict { message, paths: drift.iter().cloned().collect(), hint })
}
