//! Committing a branch: into the base through [`crate::commit`], into a parent branch by stacking its layers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::branches::Branches;
use super::history::oldest;
use super::nested::Work;
use super::{
    Absorbed, Branch, BranchId, Committed, MAIN_BRANCH, Policy, Selector, Workspace, below,
    children_of, now,
};
use crate::commit::{self, Decided, Disk, Header, Kind, Plan, Request, VERSION, Woven};
use crate::driver::{self, Completion};
use crate::error::{Context, Error};
use crate::filesystem::{MAIN, Mounted, Slot};
use crate::layer::Layer;
use crate::seen::WriteSet;
use crate::selection::Selection;

/// What a commit is asked to be.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitOptions {
    /// Overwrite what others did.
    pub(crate) force: bool,
    /// Show what would change, and change nothing.
    pub(crate) dry_run: bool,
    /// Instead of the mount's.
    pub(crate) policy: Option<Policy>,
    /// Leave what others changed as it is, and commit the rest.
    pub(crate) skip: bool,
    /// What to commit; the rest goes with the branch.
    pub(crate) selection: Selection,
}

const WRITTEN_BY_OTHERS: &str = "others committed changes of the same paths since the fork";
const CHANGED_AFTER_READ: &str = "others committed changes of what it read since the fork";

/// How long a commit waits for files that are being closed.
const WRITERS_WAIT_MAX: Duration = Duration::from_secs(1);

/// Keeps a branch from being changed as long as it lives.
struct Frozen(Arc<Mounted>);

impl Frozen {
    fn new(mounted: Arc<Mounted>) -> Self {
        mounted.freeze();
        Self(mounted)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

impl Workspace {
    /// Commits a branch into its parent.
    ///
    /// # Errors
    /// `Stale` siblings' commits are `Conflict`; `Frozen`, `Busy`, `Conflict` (drift, or commits of others), `Io`. Parent
    /// and branch are as before then.
    pub(crate) fn commit(
        &self,
        selector: &Selector,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let _frozen = if options.dry_run { None } else { self.await_writers(selector)? };
        let mut branches = self.lock();
        let branch = selector
            .find(&branches)?
            .ok_or_else(|| Error::Usage("main has no parent to commit to".to_owned()))?;
        let (id, name, parent) =
            (branch.record.id, branch.record.name.clone(), branch.record.parent);
        if branch.record.is_stale {
            return Err(too_late(&name));
        }
        let children = children_of(&branches, id);
        if !children.is_empty() {
            return Err(Error::Frozen { name, children: children.join(", ") });
        }
        if parent != MAIN_BRANCH && (options.skip || !options.selection.is_all()) {
            return Err(Error::Unsupported(
                "paths can be chosen in a commit into main alone: commit all of it into its parent"
                    .to_owned(),
            ));
        }
        if self.policy(options) != Policy::FirstWinner && self.driver().name() != "fuse" {
            return Err(Error::Unsupported(
                "the overlay driver serves the policy first-winner alone; mount with --driver fuse"
                    .to_owned(),
            ));
        }
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        if options.dry_run && parent != MAIN_BRANCH {
            let above = branches.get(&parent).ok_or_else(|| Error::NotFound(parent.to_string()))?;
            let (ours, theirs) = (Work::of(branch)?, Work::since(above, branch)?);
            self.refuse_nested(branch, (&ours, &theirs), options)?;
            return Ok(Committed { changes: ours.changes, stale: Vec::new() });
        }
        if options.dry_run {
            let _staged = self.stage(id, &branch.record)?;
            let plan = self.checked_plan(branch, options);
            return Ok(Committed { changes: plan?.changes, stale: Vec::new() });
        }
        mounted.freeze();
        let closed = self
            .refuse_writers(branch)
            .and_then(|()| self.driver().freeze(id, Completion::ForCommit));
        let outcome = closed.and_then(|()| match parent {
            MAIN_BRANCH => self.commit_to_base(&mut branches, id, options),
            parent => self.commit_to_branch(&mut branches, id, parent, options),
        });
        if outcome.is_err() {
            mounted.thaw();
        }
        self.thaw_presented(&branches);
        outcome
    }

    fn policy(&self, options: &CommitOptions) -> Policy {
        options.policy.unwrap_or(self.settings.policy)
    }

    /// The plan of a commit into main that nothing stands against, or that is forced.
    fn checked_plan(&self, branch: &Branch, options: &CommitOptions) -> Result<Plan, Error> {
        let record = &branch.record;
        let theirs = self.theirs(record)?;
        let policy = self.policy(options);
        let reads = match policy {
            Policy::Serializable => self.reads(record)?,
            Policy::FirstWinner | Policy::Snapshot => Vec::new(),
        };
        if policy == Policy::FirstWinner && !theirs.is_empty() && !options.force {
            return Err(too_late(&record.name));
        }
        let mut selection = options.selection.clone();
        loop {
            let plan = self.plan(branch, selection.clone())?;
            if options.force {
                return Ok(plan);
            }
            let written = theirs.against(&plan.changes, &plan.written);
            if options.skip && selection.skip(written.iter().chain(&plan.drift).cloned()) {
                continue; // each turn leaves out more, so there are no more turns than paths
            }
            let name = &record.name;
            refuse(name, WRITTEN_BY_OTHERS, &written)?;
            refuse(name, CHANGED_AFTER_READ, &theirs.against_reads(&reads))?;
            refuse(name, "the base was changed by others since the fork", &plan.drift)?;
            return Ok(plan);
        }
    }

    fn plan(&self, branch: &Branch, selection: Selection) -> Result<Plan, Error> {
        self.driver().settle(branch.record.id)?;
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
            .map(|layer| Path::new("layers").join(layer.to_string()).join("upper"))
            .collect();
        let request = Request {
            transaction: self.next_number(),
            layers,
            namespace: self.namespace,
            seen,
            forked: branch.record.created,
            by_kernel: self.is_by_kernel(branch),
            veils: self.veils_of(&branch.record),
            selection,
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
        self.stage(branch.record.id, &branch.record)?.hand_over();
        let plan = self.plan(branch, Selection::default())?;
        Ok((self.disk()?, commit_header(branch, &plan), plan))
    }

    /// Closing a file is told to us after the caller goes on: gives it a moment, in which other verbs go on. The branch is
    /// frozen from then on until the guard is dropped.
    fn await_writers(&self, selector: &Selector) -> Result<Option<Frozen>, Error> {
        let branches = self.lock();
        let Some(branch) = selector.find(&branches)?.filter(|branch| !branch.record.is_stale)
        else {
            return Ok(None);
        };
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        drop(branches);
        let frozen = Frozen::new(mounted);
        let deadline = Instant::now() + WRITERS_WAIT_MAX;
        while Instant::now() < deadline && !frozen.0.lock().written().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Some(frozen))
    }

    fn refuse_writers(&self, branch: &Branch) -> Result<(), Error> {
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let paths = mounted.lock().written();
        if paths.is_empty() {
            return Ok(());
        }
        Err(Error::Busy { name: branch.record.name.clone(), paths })
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
        branches: &mut Branches,
        id: BranchId,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let branch = &branches[&id];
        // Before the commit is decided: what is renamed into the base must be whole. A commit that is refused copies nothing.
        let mounted = self.filesystem.mounted(branch.slot).at(&self.base_path)?;
        let view = mounted.lock();
        if view.has_partial_copies() {
            drop(view);
            self.checked_plan(branch, options)?;
            mounted.lock().complete_copies()?;
        } else {
            drop(view);
        }
        mounted.lock().join_all_links().at(&self.base_path)?;
        let staged = self.stage(id, &branch.record)?;
        let plan = self.checked_plan(branch, options)?;
        let disk = self.disk()?;
        for litter in &plan.litter {
            disk.remove_file(litter)?;
        }
        let audience = self.audience(branches, self.policy(options), Some(id), None);
        let header = self.address(commit_header(branch, &plan), audience);
        let staged = staged.hand_over();
        let (decided, synced) =
            self.transact(branches, &disk, header, plan).inspect_err(|error| {
                // What could not be taken back has put objects of the base there.
                if !matches!(error, Error::Corrupt(_)) {
                    self.unstage(&staged);
                }
            })?;
        if let Some(mut committed) = branches.remove(&id) {
            self.unlink_kept(&committed.record)?;
            self.thaw(MAIN, 1);
            if !self.is_elsewhere() {
                committed.record.layers.clear(); // they go with the commit
            }
            self.retire_branch(branches, &committed)?;
        }
        self.settle(branches, &disk, &decided)?;
        synced?;
        let names = decided.header.stale.iter().map(|id| branches[id].record.name.clone());
        Ok(Committed { stale: names.collect(), changes: decided.changes })
    }

    /// What was committed has one link too many as long as its layer keeps one of its own.
    pub(super) fn unlink_kept(&self, record: &super::Record) -> Result<(), Error> {
        for layer in &record.layers {
            driver::drop_index(&self.layer_path(*layer))?;
            remove_tree(&self.layer_path(*layer).join("links"))?;
        }
        Ok(())
    }

    /// Decides a transaction and carries it out; then it is in the base, durable, and the records of those who are stale
    /// say so. The journal still has it. Returns with it whether it is durable; the caller settles it in any case.
    pub(super) fn transact(
        &self,
        branches: &mut Branches,
        disk: &Disk,
        header: Header,
        plan: Plan,
    ) -> Result<(Decided, Result<(), Error>), Error> {
        let number = header.transaction;
        let decided =
            Decided::decide(disk, header, plan).inspect_err(|_| self.drop_journal(number))?;
        let gate = self.filesystem.close_gate();
        let veil = match self.carry_out(disk, &decided) {
            Ok(veil) => veil,
            Err(error) => {
                drop(gate);
                if !matches!(error, Error::Corrupt(_)) {
                    self.drop_journal(number); // all is taken back: the entry holds nothing of the base
                }
                return Err(error);
            }
        };
        for layer in [&self.base, &self.main_layer()] {
            layer.tree.forget_all();
        }
        let header = &decided.header;
        self.settle_stale(branches, &header.stale);
        self.veil(branches, header, veil.as_ref())?;
        drop(gate);
        // One sync for all: what the records say is on disk before any of them is there.
        let mut drafts = Vec::new();
        for id in header.stale.iter().chain(&header.observers).chain(&header.unveiled) {
            if let Some(branch) = branches.get(id) {
                drafts.push((self.draft_record(&branch.record)?, self.record_path(*id)));
            }
        }
        let synced = Decided::sync(disk);
        if self.is_elsewhere() && !drafts.is_empty() {
            self.sync_store()?;
        }
        for (draft, path) in drafts {
            fs::rename(draft, &path).at(&path)?;
        }
        self.drop_lifted(branches, header)?;
        Ok((decided, synced.map_err(|error| Error::NotDurable(error.to_string()))))
    }

    /// Under the gate: the steps, and the veil over them. When either fails, all is taken back.
    fn carry_out(
        &self,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<Option<(Arc<Layer>, Woven)>, Error> {
        decided.apply(disk)?;
        let Some(id) = decided.header.veil else { return Ok(None) };
        match self.weave(disk, decided, id) {
            Ok(veil) => Ok(Some(veil)),
            Err(error) => {
                decided.take_back(disk)?;
                self.throw_away(&self.home_layer_path(id), "veil");
                Err(error)
            }
        }
    }

    /// Takes a transaction that happened from the journal to the history, and tells the kernel.
    pub(super) fn settle(
        &self,
        branches: &Branches,
        disk: &Disk,
        decided: &Decided,
    ) -> Result<(), Error> {
        self.sync_records_elsewhere()?;
        self.keep(disk, decided, oldest(branches.values().map(|branch| &branch.record)))?;
        self.tell_stale(branches, &decided.header.stale);
        self.filesystem.invalidate_main();
        self.empty_trash();
        Ok(())
    }

    fn main_layer(&self) -> Arc<Layer> {
        let main = self.filesystem.mounted(MAIN).expect("main is there as long as the mount");
        main.lock().top()
    }

    /// Refuses a commit into a branch against which something stands, unless it is forced.
    fn refuse_nested(
        &self,
        child: &Branch,
        (ours, theirs): (&Work, &Work),
        options: &CommitOptions,
    ) -> Result<(), Error> {
        let record = &child.record;
        let policy = self.policy(options);
        let reads = match policy {
            Policy::Serializable => self.reads(record)?,
            Policy::FirstWinner | Policy::Snapshot => Vec::new(),
        };
        let theirs = theirs.theirs();
        if options.force || theirs.is_empty() {
            return Ok(());
        }
        if policy == Policy::FirstWinner {
            return Err(too_late(&record.name));
        }
        let written = ours.against(&theirs);
        refuse(&record.name, WRITTEN_BY_OTHERS, &written)?;
        refuse(&record.name, CHANGED_AFTER_READ, &theirs.against_reads(&reads))
    }

    /// A commit into a parent branch: the child's layers become the parent's top. Nobody else's stack changes: what was
    /// forked before goes on seeing the parent as it was.
    fn commit_to_branch(
        &self,
        branches: &mut Branches,
        id: BranchId,
        parent: BranchId,
        options: &CommitOptions,
    ) -> Result<Committed, Error> {
        let stale = match self.policy(options) {
            Policy::FirstWinner => {
                let mut rivals = below(branches, parent);
                rivals.retain(|rival| *rival != id); // it has no live children
                rivals
            }
            Policy::Snapshot | Policy::Serializable => Vec::new(),
        };
        let child = branches.get(&id).ok_or_else(|| Error::NotFound(id.to_string()))?;
        let above = branches.get(&parent).ok_or_else(|| Error::NotFound(parent.to_string()))?;
        let (ours, theirs) = (Work::of(child)?, Work::since(above, child)?);
        self.refuse_nested(child, (&ours, &theirs), options)?;
        ours.take_attributes(&theirs)?;
        self.leave_to_fuse(above)?; // the kernel cannot mount what several layers make up
        let own = child.record.layers.len();
        let stack: Vec<Arc<Layer>> =
            child.stack[..own].iter().chain(&above.stack).cloned().collect();
        let mut record = above.record.clone();
        record.layers = child.record.layers.iter().chain(&record.layers).copied().collect();
        record.absorbed = Some(Absorbed { child: id, stale: stale.clone() });
        // One rename of one record is the commit; what it names must be on disk first.
        self.sync_store()?;
        self.write_record(&record)?;
        self.sync_store()?;
        let slot = above.slot;
        let gate = self.filesystem.close_gate();
        self.settle_stale(branches, &stale);
        let mounted = self.filesystem.mounted(slot).at(&self.base_path)?;
        let outdated = mounted.lock().restack(stack.clone(), None);
        drop(gate);
        self.write_records(stale.iter().map(|sibling| &branches[sibling].record))?;
        if let Some(above) = branches.get_mut(&parent) {
            (above.record, above.stack) = (record, stack);
        }
        self.thaw(slot, 1);
        if let Some(mut child) = branches.remove(&id) {
            if let Some(quota) = &child.quota {
                quota.lift();
            }
            child.record.layers.clear(); // they are the parent's now
            self.retire_branch(branches, &child)?;
        }
        if let Some(above) = branches.get_mut(&parent) {
            above.record.absorbed = None;
            self.write_record(&above.record)?;
        }
        self.filesystem.invalidate_outdated(slot, &outdated);
        self.tell_stale(branches, &stale);
        let names = stale.iter().map(|id| branches[id].record.name.clone()).collect();
        Ok(Committed { changes: ours.changes, stale: names })
    }

    /// Under the gate: from the next request on these branches answer ESTALE, and freeze nobody any more.
    fn settle_stale(&self, branches: &mut Branches, stale: &[BranchId]) {
        for id in stale {
            let Some(branch) = branches.get_mut(id) else { continue };
            branch.record.is_stale = true;
            self.filesystem.set_stale(branch.slot);
            let parent = branch.record.parent;
            self.thaw(branches.get(&parent).map_or(MAIN, |parent| parent.slot), 1);
        }
    }

    fn tell_stale(&self, branches: &Branches, stale: &[BranchId]) {
        for id in stale {
            self.driver().detach(*id);
            if let Ok(mounted) = self.filesystem.mounted(branches[id].slot) {
                self.outdate(mounted);
            }
        }
    }
}

fn commit_header(branch: &Branch, plan: &Plan) -> Header {
    Header {
        version: VERSION,
        transaction: plan.transaction,
        kind: Kind::Commit { branch: branch.record.id },
        name: branch.record.name.clone(),
        layers: branch.record.layers.clone(),
        stale: Vec::new(),
        veil: None,
        observers: Vec::new(),
        unveiled: Vec::new(),
        lifted: None,
        decided: now(),
        displaced_bytes: plan.displaced_bytes,
    }
}

/// Removes a directory of the store with all that is in it, if it is there.
pub(super) fn remove_tree(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.at(path),
    }
}

fn too_late(name: &str) -> Error {
    Error::Conflict {
        message: format!("branch {name} cannot be committed: a sibling was committed first"),
        paths: Vec::new(),
        hint: "abort it, and start again from a new branch",
    }
}

fn refuse(name: &str, reason: &str, paths: &BTreeSet<PathBuf>) -> Result<(), Error> {
    if paths.is_empty() {
        return Ok(());
    }
    Err(Error::Conflict {
        message: format!("branch {name} cannot be committed: {reason}"),
        paths: paths.iter().cloned().collect(),
        hint: "the branch is still open: look at these paths, then force the commit or abort it",
    })
}
